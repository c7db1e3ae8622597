"""The service around a stub engine that has every character ready, to measure the path alone.

    python -m tests.bench.stub --checkpoint DIR --port 8000        flags as of python -m service

    CHARGPT_STUB_CHARACTERS       characters per sequence and step (default 1)
    CHARGPT_STUB_STEP_SECONDS     minimum time between the starts of two steps (default 0)

Everything but the engine is the real service: entry point, processes, worker loop.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from service.engine import worker
from service.engine.scheduler import QueueFullError


class StubEngine:
    """Has the Engine's interface; runs all sequences at once, regardless of max_running."""

    clock = staticmethod(time.monotonic)
    tolerance = 0.0

    def __init__(self, model: Any, *, max_running: int = 32, max_waiting: int = 1024, **_: Any):
        from service.engine.engine import Delta, StepStats

        self._delta = Delta
        self.stats = StepStats()
        self.model, self.config = model, model.config
        self.limit = max_running + max_waiting
        self.scheduler = self  # stands in for len, num_running and num_waiting
        self.num_waiting = 0
        self.characters = int(os.environ.get("CHARGPT_STUB_CHARACTERS", "1"))
        self.step_seconds = float(os.environ.get("CHARGPT_STUB_STEP_SECONDS", "0"))
        self._next_step = 0.0
        # Ids by the number of them that a step emits.
        letters = [1 + i % (self.config.vocab_size - 1) for i in range(self.characters)]
        self._ready = [letters[:n] for n in range(self.characters + 1)]
        self._left: dict[int, tuple[Any, int]] = {}  # sequence id -> (sequence, remaining characters)
        self._ended: list[Any] = []

    def __len__(self) -> int:
        return len(self._left)

    @property
    def num_running(self) -> int:
        return len(self._left)

    @property
    def has_work(self) -> bool:
        return bool(self._left or self._ended)

    def submit(self, sequence: Any) -> None:
        if len(self._left) >= self.limit:
            raise QueueFullError(self.limit)
        sequence.arrived_at = sequence.scheduled_at = sequence.prefilled_at = self.clock()
        self._left[sequence.id] = (sequence, sequence.max_tokens)

    def abort(self, id: int, reason: Any = "abort") -> None:
        sequence, _ = self._left.pop(id, (None, 0))
        if sequence is not None:
            sequence.finish_reason = reason
            self._ended.append(self._delta(sequence, [], [], []))

    def step(self) -> list[Any]:
        now = self.clock()
        if self.step_seconds:
            time.sleep(max(0.0, self._next_step - now))
            now = self.clock()
            self._next_step = now + self.step_seconds
        deltas, self._ended = self._ended, []
        for id, (sequence, left) in list(self._left.items()):
            ids = self._ready[min(left, self.characters)]
            left -= len(ids)
            if left:
                self._left[id] = (sequence, left)
            else:
                del self._left[id]
                sequence.finish_reason = "length"
            deltas.append(self._delta(sequence, ids, [], []))
        self.stats.num_decode_rows = len(deltas)
        self.stats.ended_at = self.clock()
        self.stats.seconds = self.stats.ended_at - now
        return deltas


class StubAPI(worker.EngineAPI):
    """The real API with the stub engine."""

    def setup(self, device: str) -> None:
        import service.engine.engine

        service.engine.engine.Engine = StubEngine
        super().setup(device)


if __name__ == "__main__":
    worker.EngineAPI = StubAPI  # before the server imports it
    from service.__main__ import main

    sys.exit(main())
