"""Admission to an engine's queue: a request that would wait too long is refused.

The expected wait follows from the rate at which sequences ended lately. The module handles ids and numbers only.
"""

from __future__ import annotations

from collections import deque

from service.engine.engine import Engine
from service.engine.scheduler import BusyError
from service.wire import Delta, Submit


class Admission:
    """Accepts requests for an engine, runs its steps, and observes how fast its sequences end."""

    def __init__(self, engine: Engine, max_queue_seconds: float):
        self.engine, self._max_queue_seconds = engine, max_queue_seconds
        self._drain = DrainRate()

    def submit(self, request: Submit) -> None:
        """Queue a request.

        Raises:
            BusyError: the expected wait is longer than the request's timeout or `max_queue_seconds`; or as
                Engine.submit.
        """
        wait = self.expected_wait(request)
        limit = min(request.timeout_seconds, self._max_queue_seconds)
        if wait > limit and not request.must_run:
            raise BusyError(f"expected wait for a slot is {wait:.1f} s (limit {limit:g} s)")
        self.engine.submit(request)

    def expected_wait(self, request: Submit) -> float:
        """Return the seconds that a new request is expected to wait for a slot."""
        return self.engine.scheduler.expected_wait(request, self._drain.rate(self.engine.clock()))

    def step(self, began: float) -> list[Delta]:
        """Run a step of the engine. began: when its turn began, with the messages that arrived."""
        engine = self.engine
        is_saturated = engine.scheduler.is_saturated
        deltas = engine.step()
        if is_saturated:
            num_ended = sum(delta.ended_at is not None for delta in deltas)
            self._drain.observe(began, num_ended, engine.clock())
        if not is_saturated or not engine.has_work:
            self._drain.pause()
        return deltas


class DrainRate:
    """How many sequences end per second while new sequences would have to wait.

    At other times sequences end only as fast as they arrive, so these times do not count. The observations are
    forgotten after FORGET_SECONDS without waiting, because later requests may be of another kind.
    """

    FORGET_SECONDS = 60.0

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=256)  # ends of the latest sequences, in seconds of counted time
        self._seconds = 0.0
        self._observed_at = 0.0
        self._is_paused = True

    def observe(self, began: float, num_ended: int, now: float) -> None:
        """Count a step, and the time since the last one."""
        self._seconds += now - (began if self._is_paused else self._observed_at)
        self._observed_at, self._is_paused = now, False
        self._ends.extend([self._seconds] * num_ended)

    def pause(self) -> None:
        """Stop counting time, because new sequences would not wait."""
        self._is_paused = True

    def rate(self, now: float) -> float | None:
        """Return the sequences that end per second, or None if fewer than two were observed."""
        if now - self._observed_at > self.FORGET_SECONDS:
            self._ends.clear()
        if len(self._ends) < 2:
            return None
        return len(self._ends) / max(self._seconds - self._ends[0], 1e-3)
