"""A small file system, to be filled."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.toolbox.needs import missing


class SmallDisk(contextlib.AbstractContextManager):
    """A file system in memory of `size` ("2m"), in a mount namespace that exists as long as its holder process."""

    def __init__(self, point: Path, size: str):
        if shutil.which("unshare") is None:
            missing("mount", "cannot mount a file system: unshare is not installed")
        # cat ends with this process
        script = f'mount -t tmpfs -o size={size} chargpt "$0" && echo mounted && exec cat'
        for rights in ([], ["--map-root-user"]):
            command = ["unshare", "--mount", *rights, "sh", "-c", script, str(point)]
            self.holder = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            assert self.holder.stdout is not None
            if self.holder.stdout.readline() == "mounted\n":
                break
            reason = self.close().strip()
        else:
            missing("mount", f"cannot mount a file system: {reason}")
        self.path = Path(f"/proc/{self.holder.pid}/root{point}")
        self.ballast = self.path / "ballast"

    def fill(self, room: int = 0) -> None:
        """Leave at most `room` bytes free."""
        free = os.statvfs(self.path).f_bavail * os.statvfs(self.path).f_bsize
        with open(self.ballast, "ab") as file:
            file.write(bytes(max(0, free - room)))

    def close(self) -> str:
        return self.holder.communicate()[1]

    def __exit__(self, *_: object) -> None:
        self.close()
