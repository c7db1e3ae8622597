"""The service around a stub engine that has every character ready, to measure the path alone.

    python -m tests.bench.stub --checkpoint DIR --port 8000        flags as of python -m service

    CHARGPT_STUB_STEP_SECONDS     minimum time between the starts of two steps (default 0)

Everything but the engine is the real service: entry point, processes, worker loop.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from service.engine import worker
from service.engine.scheduler import BusyError
from service.wire import Delta, Submit

if TYPE_CHECKING:
    from service.engine.runner import Runner


class StubEngine:
    """Has the Engine's interface; runs all sequences at once, regardless of max_running."""

    clock = staticmethod(time.monotonic)

    def __init__(self, runner: Runner, *, max_running: int | None = None, max_waiting: int = 1024, **_: Any):
        from service.engine.engine import StepStats

        self._new_stats = StepStats
        self.stats = StepStats()
        self.runner, self.config = runner, runner.config
        self.max_running = runner.slots if max_running is None else max_running
        self.limit = self.max_running + max_waiting
        self.scheduler = self  # stands in for len, iteration, max_running, num_running and num_waiting
        self.num_waiting = 0
        self.is_saturated = False
        self.step_seconds = float(os.environ.get("CHARGPT_STUB_STEP_SECONDS", "0"))
        self._next_step = 0.0
        self._left: dict[int, tuple[Submit, int]] = {}  # sequence id -> (request, remaining characters)
        self._new: set[int] = set()  # ids of sequences that have emitted nothing yet
        self._ended: list[Delta] = []

    def generate(self, submits: list[Submit]) -> list[list[int]]:
        return [[1] * submit.max_tokens for submit in submits]

    def __len__(self) -> int:
        return len(self._left)

    @property
    def num_running(self) -> int:
        return len(self._left)

    @property
    def has_work(self) -> bool:
        return bool(self._left or self._ended)

    def __iter__(self) -> Iterator[Submit]:
        return iter([request for request, _ in self._left.values()])

    def expected_wait(self, request: Submit, rate: float | None) -> float:
        return 0.0

    def submit(self, request: Submit) -> None:
        if len(self._left) >= self.limit:
            raise BusyError(f"queue full (limit {self.limit})")
        self._left[request.id] = (request, request.max_tokens)
        self._new.add(request.id)

    def abort(self, id: int, reason: Any = "abort") -> None:
        if self._left.pop(id, None) is not None:
            self._ended.append(Delta(id, [], reason))

    def step(self) -> list[Delta]:
        now = self.clock()
        if self.step_seconds:
            time.sleep(max(0.0, self._next_step - now))
            now = self.clock()
            self._next_step = now + self.step_seconds
        self.stats = self._new_stats(self.clock)
        deltas, self._ended = self._ended, []
        for id, (request, left) in list(self._left.items()):
            left -= 1
            delta = Delta(id, [1])
            if id in self._new:
                self._new.remove(id)
                delta.scheduled_at = delta.prefilled_at = now
            if left:
                self._left[id] = (request, left)
            else:
                del self._left[id]
                delta.finish_reason, delta.ended_at = "length", now
            deltas.append(delta)
        self.stats.num_decode_rows = len(deltas)
        self.stats.num_decode_tokens = sum(len(delta.ids) for delta in deltas)
        self.stats.lap("decode")
        return deltas


class StubAPI(worker.EngineAPI):
    def setup(self, device: str) -> None:
        import service.engine.engine

        service.engine.engine.Engine = StubEngine
        super().setup(device)


if __name__ == "__main__":
    worker.EngineAPI = StubAPI  # before the server imports it
    from service.__main__ import main

    sys.exit(main())
