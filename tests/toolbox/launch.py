"""Starts programs that serve HTTP, waits until they are ready, reads their logs, measures and stops them."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import build_opener, urlopen

import psutil

ROOT = Path(__file__).parents[2]


class ServerError(RuntimeError):
    """A server did not become ready; the message holds the end of its log."""


def free_port() -> int:
    """One below those that kernels give to outgoing connections, which could take it before the server does."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(16_384, 32_768)))
            return probe.getsockname()[1]


def is_worker(process: psutil.Process) -> bool:
    """Whether it is an inference process: ours by its name, stock LitServe's as it is spawned."""
    return process.name().startswith("worker-") or "spawn_main" in " ".join(process.cmdline())


class Program(contextlib.AbstractContextManager):
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

    def wait_until_ready(self, timeout: float = 240) -> float:
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
            # From Python 3.12 on, urlopen keeps the certificates that it found at its first call.
            ask = build_opener().open if self.url.startswith("https:") else urlopen
            with ask(self.url + self.ready, timeout=5) as answer:
                return answer.status == 200
        except HTTPError as error:
            error.close()
        except (OSError, http.client.HTTPException):
            pass
        return False

    def processes(self) -> list[psutil.Process]:
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def worker(self) -> psutil.Process:
        return next(filter(is_worker, self.processes()))

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

    def __exit__(self, *_: object) -> None:
        self.close()


# Of benchmarks


def module(name: str, **flags: object) -> tuple[str, ...]:
    """The command `python -m NAME --flag=value …`."""
    given = (f"--{flag.replace('_', '-')}" + ("" if value is True else f"={value}") for flag, value in flags.items())
    return (sys.executable, "-m", name, *given)


class Server(Program):
    """A command with `--port PORT`, a free one, in a process group of its own, which can be paused and measured."""

    poll_seconds = 0.01  # the start is measured

    def __init__(self, command: Sequence[str], log: Path, ready: str, environment: dict[str, str] | None = None):
        port = free_port()
        options = {"cwd": ROOT, "env": os.environ | (environment or {}), "start_new_session": True}
        super().__init__([*command, "--port", port], port, ready, log, **options)

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far, of inference processes (`worker`) and all others (`http`)."""
        seconds = {"worker": 0.0, "http": 0.0}
        for process in self.processes():
            times = process.cpu_times()
            seconds["worker" if is_worker(process) else "http"] += times.user + times.system
        return seconds

    def pause(self) -> None:
        """Stop all processes, so that idle loops do not take CPU time from other servers."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Resume for a turn; servers that are compared are paused otherwise."""
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
        # Right after SIGCONT the kernel could deliver SIGTERM to another thread than the main one, which ignores it.
        time.sleep(0.1)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        with contextlib.suppress(ProcessLookupError):  # stock LitServe leaves child processes behind
            os.killpg(self.process.pid, signal.SIGKILL)
        super().close()
