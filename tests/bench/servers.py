"""Starts, measures and stops the benchmarked servers, each in a process group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from tests.toolbox.launch import Program, free_port
from tests.toolbox.launch import ServerError as ServerError

ROOT = Path(__file__).parents[2]


def module(name: str, **flags: object) -> tuple[str, ...]:
    """The command `python -m NAME --flag=value …`."""
    given = (f"--{flag.replace('_', '-')}" + ("" if value is True else f"={value}") for flag, value in flags.items())
    return (sys.executable, "-m", name, *given)


class Server(Program):
    """A command with `--port PORT`, a free one of 127.0.0.1."""

    poll_seconds = 0.01  # the start is measured

    def __init__(self, command: Sequence[str], log: Path, ready: str, environment: dict[str, str] | None = None):
        port = free_port()
        super().__init__(
            [*command, "--port", port],
            port,
            ready,
            log,
            cwd=ROOT,
            env=os.environ | (environment or {}),
            start_new_session=True,
        )
        self._processes: list[psutil.Process] = []

    def wait_until_ready(self, timeout: float = 120) -> float:
        seconds = super().wait_until_ready(timeout)
        main = psutil.Process(self.process.pid)
        self._processes = [main, *main.children(recursive=True)]
        return seconds

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far, of inference processes (`worker`) and all others (`http`)."""
        seconds = {"worker": 0.0, "http": 0.0}
        for process in self._processes:
            times = process.cpu_times()
            is_worker = "spawn_main" in " ".join(process.cmdline())
            seconds["worker" if is_worker else "http"] += times.user + times.system
        return seconds

    @contextlib.contextmanager
    def busy(self) -> Iterator[dict[str, float]]:
        """Yields a dict that on exit holds the cores in use and the duration: {"worker", "http", "seconds"}."""
        figures: dict[str, float] = {}
        before, started = self.cpu_seconds(), time.perf_counter()
        yield figures
        seconds = time.perf_counter() - started
        figures |= {role: (after - before[role]) / seconds for role, after in self.cpu_seconds().items()}
        figures["seconds"] = seconds

    def pss_bytes(self) -> int:
        """Proportional set size of all processes: counts shared memory once."""
        return sum(process.memory_full_info().pss for process in self._processes)

    def pause(self) -> None:
        """Stop all processes, so that idle loops do not take CPU time from other servers."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.resume()
        # Right after SIGCONT the kernel could deliver SIGTERM to another thread than the main one, which ignores it.
        time.sleep(0.1)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        with contextlib.suppress(ProcessLookupError):  # stock LitServe leaves child processes behind
            os.killpg(self.process.pid, signal.SIGKILL)
        super().close()
