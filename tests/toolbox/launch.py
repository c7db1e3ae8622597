"""Starts programs that serve HTTP, waits until they are ready, reads their logs and stops them."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError
from urllib.request import urlopen


class ServerError(RuntimeError):
    """A server did not become ready; the message holds the end of its log."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Program:
    """A server process, ready once GET `ready` returns 200. stdout and stderr go to `log` or a temporary file.

    options: passed to subprocess.Popen.
    """

    poll_seconds = 0.05

    def __init__(self, command: Sequence[object], port: int, ready: str, log: Path | None = None, **options: Any):
        self.port, self.url, self.ready = port, f"http://127.0.0.1:{port}", ready
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        self.log = tempfile.TemporaryFile() if log is None else log.open("w+b")
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [str(word) for word in command], stdout=self.log, stderr=subprocess.STDOUT, **options
        )

    def wait_until_ready(self, timeout: float = 60) -> float:
        """Returns the seconds since the start.

        Raises:
            ServerError: it exited or timed out.
        """
        deadline = time.perf_counter() + timeout
        while time.perf_counter() < deadline and self.process.poll() is None:
            if self._is_ready():
                return time.perf_counter() - self.started
            time.sleep(self.poll_seconds)
        raise ServerError(f"{self.process.args} is not ready; its log ends with:\n{self.output()[-5000:]}")

    def _is_ready(self) -> bool:
        try:
            with urlopen(self.url + self.ready, timeout=5) as answer:
                return answer.status == 200
        except HTTPError as error:
            error.close()
        except (OSError, http.client.HTTPException):
            pass
        return False

    def output(self) -> str:
        log = self.log.fileno()  # pread: the program writes at the shared file position
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            self.process.kill()
        self.process.wait()
        self.log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
