"""`python -m service` in a fork of a process that has imported the libraries of others which the service uses.

They take a third of a server's start, and the tests start many. All of the service itself is imported in the fork.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
from typing import IO


class Forked:
    """Has what the tests use of a subprocess.Popen with these options."""

    def __init__(self, args: list[str], *, stdout: IO[bytes], stderr: int, start_new_session: bool):
        self.args, self.returncode = args, None
        self._status, status = os.pipe()
        about = pickle.dumps((args, dict(os.environ), os.getcwd()))
        socket.send_fds(_parent(), [about], [stdout.fileno(), status])
        os.close(status)
        self.pid = int.from_bytes(os.read(self._status, 4), sys.byteorder)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int.from_bytes(os.read(self._status, 4), sys.byteorder, signed=True)
            os.close(self._status)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _parent() -> socket.socket:
    """Of the one for this process."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen([sys.executable, "-m", __name__], stdin=its, stdout=subprocess.DEVNULL)
    atexit.register(process.wait)
    atexit.register(ours.close)  # first
    return ours


def _serve() -> None:
    """Fork for each message at stdin; report its process id, and in the end its status."""
    import litserve  # noqa: F401
    import msgspec  # noqa: F401
    import numpy  # noqa: F401
    import pydantic_settings  # noqa: F401
    import uvloop  # noqa: F401

    requests, children = socket.socket(fileno=0), {}
    while True:
        for ready in select.select([requests, *children], [], [])[0]:
            if ready in children:
                child, report = children.pop(ready)
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                os.write(report, status.to_bytes(4, sys.byteorder, signed=True))
                os.close(report)
                os.close(ready)
                continue
            about, files, _, _ = socket.recv_fds(requests, 1 << 20, 2)
            if not about:
                return
            child = os.fork()
            if not child:
                requests.detach()
                return _become(*pickle.loads(about), files[0])
            os.write(files[1], child.to_bytes(4, sys.byteorder))
            os.close(files[0])
            children[os.pidfd_open(child)] = child, files[1]


def _become(args: list[str], environment: dict[str, str], folder: str, output: int) -> None:
    os.setsid()
    for standard, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(file, standard)
    os.closerange(3, 1 << 10)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = args[2:]
    runpy.run_module(args[2], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve()
