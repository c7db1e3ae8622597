"""Keeps processes running: replaces dead and hung ones, with back-off, and gives up where that does not help.

The main process's main thread calls `check` ten times a second. Knows nothing of what the processes do.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

from service.shared import SharedState
from service.words import plural

logger = logging.getLogger(__name__)

START_SECONDS = 600.0  # to load and be ready; GPUs capture graphs meanwhile
SETTLED_SECONDS = 5.0  # a process that ran this long is replaced at once, one that died sooner after a pause
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds; the pause doubles with each early death in a row


class TooManyDeathsError(Exception):
    """Processes keep dying; restarting them does not help."""


@dataclass
class Watched:
    """A process that must run. `start` starts it; `died` is called once for each death, before the next start."""

    name: str
    start: Callable[[], BaseProcess]
    died: Callable[[], None]
    start_seconds: float  # until its first heartbeat
    process: BaseProcess
    started_at: float
    restart_at: float | None = None  # None: it runs
    early_deaths: int = 0  # in a row
    is_killed: bool = False  # as it hung, and has not ended yet


class Supervisor:
    """
    hang_seconds: a process without a heartbeat for so long is killed and replaced.
    max_deaths: more deaths than this are too many: of all processes within `window_seconds`, or of one in a row, each
    before it had run for SETTLED_SECONDS.
    """

    def __init__(
        self,
        state: SharedState,
        *,
        hang_seconds: float,
        max_deaths: int,
        window_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._state = state
        self._hang_seconds = hang_seconds
        self._max_deaths, self._window_seconds = max_deaths, window_seconds
        self._clock = clock
        self._watched: dict[str, Watched] = {}
        self._deaths: deque[float] = deque()
        self._checked_at = self._patient_from = clock()

    def watch(
        self, name: str, start: Callable[[], BaseProcess], died: Callable[[], None], start_seconds: float
    ) -> None:
        """Start a process, and look after it from now on."""
        self._state.beat("main")
        process = start()
        self._state.pids[name] = process.pid
        self._watched[name] = Watched(name, start, died, start_seconds, process, self._clock())

    def processes(self, names: Iterable[str]) -> list[BaseProcess]:
        """Of those that are watched: they run, or died last."""
        return [self._watched[name].process for name in names if name in self._watched]

    def check(self) -> None:
        """Look after every process; never waits for one. Raises TooManyDeathsError: more deaths than allowed."""
        now = self._clock()
        self._state.beat("main")
        if now - self._checked_at > self._hang_seconds / 2:
            self._patient_from = now  # this process was stopped, and maybe the others with it
        self._checked_at = now
        for watched in self._watched.values():
            if watched.restart_at is not None:
                if watched.restart_at <= now:
                    self._restart(watched)
            elif not watched.process.is_alive():
                self._bury(watched, now)
            elif not watched.is_killed and self._is_hung(watched, now):
                logger.error("%s (process %d) hangs: killing it", watched.name, watched.process.pid)
                watched.process.kill()
                watched.is_killed = True
                self._patient_from = now  # the others may have waited for what it held

    def _is_hung(self, watched: Watched, now: float) -> bool:
        last = self._state.last_beat(watched.name)
        if last is None:
            return now - watched.started_at > watched.start_seconds
        return now - max(last, self._patient_from) > self._hang_seconds

    def _bury(self, watched: Watched, now: float) -> None:
        is_early = self._state.last_beat(watched.name) is None or now - watched.started_at < SETTLED_SECONDS
        self._state.died(watched.name)
        try:
            watched.died()
        except OSError as error:  # its files are gone
            logger.error("%s: %s", watched.name, error)
        self._count(watched, now, is_early, f"(process {watched.process.pid}) died ({_cause(watched.process)})")
        if watched.restart_at == now:
            self._restart(watched)

    def _restart(self, watched: Watched) -> None:
        watched.started_at = self._clock()
        try:
            watched.process = watched.start()
        except OSError as error:  # no memory, or too many processes
            self._count(watched, watched.started_at, True, f"cannot be started ({error.strerror})")
            return
        watched.restart_at, watched.is_killed = None, False
        self._state.pids[watched.name] = watched.process.pid
        self._state.restarts[watched.name] += 1

    def _count(self, watched: Watched, now: float, is_early: bool, what: str) -> None:
        """Count a death, and set when to start the process again."""
        watched.early_deaths = watched.early_deaths + 1 if is_early else 0
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(watched.early_deaths - 1, 10)) if is_early else 0.0
        watched.restart_at = now + pause
        self._deaths.append(now)
        while self._deaths[0] < now - self._window_seconds:
            self._deaths.popleft()
        if len(self._deaths) > self._max_deaths:
            count = len(self._deaths)
            many = f"{plural(count, 'death')} of processes within {self._window_seconds:g} s"
        elif watched.early_deaths > self._max_deaths:
            count = watched.early_deaths
            many = f"{plural(count, 'early death')} of it in a row"
        else:
            logger.error("%s %s: restarting%s", watched.name, what, f" in {pause:g} s" if pause else "")
            return
        raise TooManyDeathsError(
            f"{watched.name} {what}: {many} {'is' if count == 1 else 'are'} more than --max-restarts "
            f"{self._max_deaths} allows"
        )


def _cause(process: BaseProcess) -> str:
    status = process.exitcode or 0
    return f"signal {-status}: {signal.strsignal(-status)}" if status < 0 else f"exit status {status}"
