"""Keeps processes running: replaces dead and hung ones with back-off, and gives up after too many failed starts.

The main thread of the main process calls `check` ten times a second. This module knows nothing about the work of the
processes.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Literal

from service.shared import SharedState
from service.words import plural

logger = logging.getLogger(__name__)

START_SECONDS = 600.0  # limit to become ready, including the capture of graphs on GPUs
SETTLED_SECONDS = 5.0  # a process that ran this long is replaced at once, others after a pause
MAX_FAILED_STARTS, WINDOW_SECONDS = 10, 300.0  # more failed starts within this time end the service
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 4.0  # seconds; the pause doubles with each failed start in a row
RELEASE_SECONDS = 60.0  # limit to end after `release`


class TooManyDeathsError(Exception):
    """Too many starts failed, so restarting does not help."""


@dataclass
class Watched:
    """A supervised process. `start` starts it. `died` is called once for each death, before the next start.

    Only a kept process is replaced when it dies. One on trial has not become ready yet, and a released one is to end.
    """

    name: str
    start: Callable[[], BaseProcess]
    died: Callable[[], None]
    start_seconds: float  # limit for its first heartbeat
    process: BaseProcess
    started_at: float
    role: Literal["kept", "on trial", "released"]
    released_at: float = 0.0
    ending: str | None = None  # how a process on trial has ended
    restart_at: float | None = None  # None: the process runs
    failed_starts: int = 0  # in a row
    is_killed: bool = False  # True: killed because it hung, and not ended yet


class Supervisor:
    """
    hang_seconds: a process without a heartbeat for this long is killed and replaced.

    More than MAX_FAILED_STARTS of all processes within WINDOW_SECONDS, or of one process in a row, end the service. A
    start fails if the process dies before its first heartbeat, or within SETTLED_SECONDS without having served a
    client. Other deaths do not count: one client may cause them repeatedly, and the service would end for all clients.
    """

    def __init__(self, state: SharedState, *, hang_seconds: float, clock: Callable[[], float] = time.monotonic):
        self._state, self._hang_seconds, self._clock = state, hang_seconds, clock
        self._watched: dict[str, Watched] = {}
        self._failed_starts: deque[float] = deque()  # when
        self._checked_at = self._patient_from = clock()

    def watch(
        self,
        name: str,
        start: Callable[[], BaseProcess],
        died: Callable[[], None],
        start_seconds: float,
        is_on_trial: bool = False,
    ) -> None:
        """Start a process and supervise it from now on. is_on_trial: if it dies before `keep`, it is not replaced."""
        self._state.beat("main")
        process = start()
        self._state.pids[name] = process.pid
        role: Literal["kept", "on trial"] = "on trial" if is_on_trial else "kept"
        self._watched[name] = Watched(name, start, died, start_seconds, process, self._clock(), role)

    def ending(self, name: str) -> str | None:
        """Return how a process on trial has ended; None: it runs."""
        return self._watched[name].ending

    def keep(self, name: str) -> None:
        """End the trial of a process: it is replaced when it dies."""
        self._watched[name].role = "kept"

    def release(self, name: str) -> None:
        """Send SIGTERM to a process, do not replace it, and forget it once it has ended."""
        watched = self._watched[name]
        if watched.ending is not None or watched.restart_at is not None:  # it does not run
            del self._watched[name]
            return
        watched.role, watched.released_at = "released", self._clock()
        watched.process.terminate()

    def is_watched(self, name: str) -> bool:
        return name in self._watched

    def processes(self, names: Iterable[str]) -> list[BaseProcess]:
        """Return the watched processes with these names, running or dead."""
        return [self._watched[name].process for name in names if name in self._watched]

    def check(self) -> None:
        """Replace dead and hung processes without waiting. Raises TooManyDeathsError: too many starts failed."""
        now = self._clock()
        self._state.beat("main")
        if now - self._checked_at > self._hang_seconds / 2:
            self._patient_from = now  # this process was stopped, and perhaps the others with it
        self._checked_at = now
        for watched in list(self._watched.values()):
            if watched.restart_at is not None:
                if watched.restart_at <= now:
                    self._restart(watched)
            elif watched.ending is not None:
                pass  # until its release
            elif not watched.process.is_alive():
                self._bury(watched, now)
            elif not watched.is_killed and self._is_hung(watched, now):
                logger.error("%s (process %d) hangs: killing it", watched.name, watched.process.pid)
                watched.process.kill()
                watched.is_killed = True
                self._patient_from = now  # the others may have waited for a lock that it held

    def _is_hung(self, watched: Watched, now: float) -> bool:
        if watched.role == "released" and now - watched.released_at > RELEASE_SECONDS:
            return True
        last = self._state.last_beat(watched.name)
        if last is None:
            return now - watched.started_at > watched.start_seconds
        return now - max(last, self._patient_from) > self._hang_seconds

    def _bury(self, watched: Watched, now: float) -> None:
        is_settled = now - watched.started_at >= SETTLED_SECONDS
        has_started = self._state.last_beat(watched.name) is not None
        has_started = has_started and (is_settled or self._state.has_served(watched.name))
        self._state.died(watched.name)
        try:
            watched.died()
        except OSError as error:  # its files are gone
            logger.error("%s: %s", watched.name, error)
        if watched.role == "released":
            del self._watched[watched.name]
            return
        what = f"(process {watched.process.pid}) died ({_cause(watched.process)})"
        if watched.role == "on trial":
            watched.ending = f"{watched.name} {what} before it was ready"
            return
        if not has_started:
            self._count_failed_start(watched, now, what)
            return
        watched.failed_starts = 0
        _schedule(watched, now, 0.0 if is_settled else FIRST_PAUSE, what)
        if watched.restart_at == now:
            self._restart(watched)

    def _restart(self, watched: Watched) -> None:
        watched.started_at = self._clock()
        try:
            watched.process = watched.start()
        except OSError as error:  # no memory, or too many processes
            self._count_failed_start(watched, watched.started_at, f"cannot be started ({error.strerror})")
            return
        watched.restart_at, watched.is_killed = None, False
        self._state.pids[watched.name] = watched.process.pid
        self._state.restarts[watched.name] += 1

    def _count_failed_start(self, watched: Watched, now: float, what: str) -> None:
        """Raises TooManyDeathsError: too many starts failed."""
        watched.failed_starts += 1
        self._failed_starts.append(now)
        while self._failed_starts[0] < now - WINDOW_SECONDS:
            self._failed_starts.popleft()
        if len(self._failed_starts) > MAX_FAILED_STARTS:
            count, where = len(self._failed_starts), f"of processes within {WINDOW_SECONDS:g} s"
        elif watched.failed_starts > MAX_FAILED_STARTS:
            count, where = watched.failed_starts, "of it in a row"
        else:
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(watched.failed_starts - 1, 10))
            _schedule(watched, now, pause, what)
            return
        many = f"{plural(count, 'failed start')} {where} {'is' if count == 1 else 'are'}"
        raise TooManyDeathsError(f"{watched.name} {what}: {many} more than the {MAX_FAILED_STARTS} allowed")


def _schedule(watched: Watched, now: float, pause: float, what: str) -> None:
    watched.restart_at = now + pause
    logger.error("%s %s: restarting%s", watched.name, what, f" in {pause:g} s" if pause else "")


def _cause(process: BaseProcess) -> str:
    status = process.exitcode or 0
    return f"signal {-status}: {signal.strsignal(-status)}" if status < 0 else f"exit status {status}"
