"""The HTTP process's side of the engine: submit sequences, gather their deltas, abort them.

Knows ids and frames; no text, no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from service.sockets import SocketTransport, WorkerLost
from service.wire import Abort, Delta, FinishReason, Refused, Step, Submit, sequence_id

logger = logging.getLogger(__name__)

LATE_SECONDS = 5.0  # after its deadline a sequence of which the worker says nothing is given up here
CONNECT_SECONDS = 5.0  # that a starting HTTP process waits for a first worker
FAILURES = frozenset({"abort", "timeout", "error"})


class Arrival(msgspec.Struct, gc=False):
    """What came of one sequence, and when, by time.monotonic()."""

    number: int
    delta: Delta | Refused
    at: float


@dataclass(eq=False)
class Generation:
    """The sequences of one request, numbered from 0; deltas gather here until they are taken.

    They are given at once where a sequence begins or fails, and at the very end; in between so that `interval`
    seconds lie between two takes, or not at all where it is None.
    """

    interval: float | None = None
    _arrived: list[Arrival] = field(default_factory=list)
    _open: dict[int, int] = field(default_factory=dict)  # sequence id -> number, of those that run
    _later: deque[tuple[int, Submit]] = field(default_factory=deque)  # (number, request) of those that wait here
    _deadline: float = 0.0  # by time.monotonic()
    _is_urgent: bool = False
    _taken_at: float = 0.0
    _waiter: asyncio.Future[None] | None = None
    _timer: asyncio.TimerHandle | None = None

    @property
    def is_finished(self) -> bool:
        """Every sequence has ended and everything was taken."""
        return not self._open and not self._later and not self._arrived

    async def take(self) -> list[Arrival]:
        """All that has arrived since the last call, once it is time."""
        if not self._is_urgent:
            self._waiter = asyncio.get_running_loop().create_future()
            if self._arrived:
                self._set_timer()
            try:
                await self._waiter
            finally:
                self._waiter = None
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
        self._is_urgent = False
        self._taken_at = time.monotonic()
        arrived, self._arrived = self._arrived, []
        return arrived

    def put(self, number: int, delta: Delta | Refused, at: float) -> None:
        self._arrived.append(Arrival(number, delta, at))
        if self._is_due(delta):
            self._is_urgent = True
            self._wake()
        elif self._waiter is not None and self._timer is None:
            self._set_timer()

    def _is_due(self, delta: Delta | Refused) -> bool:
        if not self._open and not self._later:
            return True
        if isinstance(delta, Refused) or delta.finish_reason in FAILURES:
            return True
        return delta.prefilled_at is not None and self.interval is not None

    def _set_timer(self) -> None:
        if self.interval is not None:
            rest = self._taken_at + self.interval - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, rest), self._wake)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Talks to every worker; a sequence goes to the one that holds the fewest."""

    def __init__(self, transport: SocketTransport, consumer_id: int):
        self._transport = transport
        self._consumer_id = consumer_id
        self._numbers = itertools.count()
        self._running: dict[int, tuple[Generation, int]] = {}  # sequence id -> its generation and worker
        self._load: Counter[int] = Counter()  # sequences sent to each worker from here, not ended yet
        self._load_elsewhere: Counter[int] = Counter()  # what the worker holds for other HTTP processes
        self._late: dict[Generation, asyncio.TimerHandle] = {}

    @property
    def is_ready(self) -> bool:
        return bool(self._transport.connected_workers)

    def submit(
        self, requests: list[Submit], *, interval: float | None = None, window: int | None = None
    ) -> Generation | None:
        """Run sequences, at most `window` of them at once; their ids are set here.

        None where no worker is there to take them.
        """
        if not self.is_ready:
            return None
        timeout = max(request.timeout_seconds for request in requests)
        generation = Generation(interval, _later=deque(enumerate(requests)), _deadline=time.monotonic() + timeout)
        self._late[generation] = asyncio.get_running_loop().call_later(
            timeout + LATE_SECONDS, self.abort, generation, "timeout"
        )
        for _ in requests[:window]:
            self._start_next(generation)
        return generation

    def _start_next(self, generation: Generation) -> None:
        number, request = generation._later.popleft()
        now = time.monotonic()
        workers = self._transport.connected_workers
        if not workers:
            generation.put(number, Delta(request.id, [], "error"), now)
            return
        worker = min(workers, key=lambda w: self._load[w] + self._load_elsewhere[w])
        request.id = sequence_id(self._consumer_id, next(self._numbers))
        request.timeout_seconds = max(0.0, generation._deadline - now)
        self._running[request.id] = (generation, worker)
        self._load[worker] += 1
        generation._open[request.id] = number
        self._transport.send_to_worker(request, worker)

    def abort(self, generation: Generation, reason: FinishReason = "abort") -> None:
        """End what still runs of a generation, and what has not begun."""
        now = time.monotonic()
        while generation._later:
            number, request = generation._later.pop()
            generation.put(number, Delta(request.id, [], reason), now)
        for id in list(generation._open):
            worker = self._running[id][1]
            self._transport.send_to_worker(Abort(id), worker)
            self._put(Delta(id, [], reason), now)

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Talk to the workers, for as long as the HTTP process lives; entered once one of them answers.

        Workers are loaded before HTTP processes start. Without one after CONNECT_SECONDS, requests are answered 503.
        """
        self._transport.connect(self._consumer_id, self._received)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_SECONDS):
                    while not self.is_ready:
                        await asyncio.sleep(0.005)
            yield
        finally:
            await self._transport.disconnect()

    def _received(self, worker: int, frame: Step | Refused | WorkerLost) -> None:
        now = time.monotonic()
        match frame:
            case Step(deltas, load):
                for delta in deltas:
                    self._put(delta, now)
                self._load_elsewhere[worker] = max(0, load - self._load[worker])
            case Refused():
                self._put(frame, now)
            case WorkerLost():
                lost = [id for id, (_, where) in self._running.items() if where == worker]
                for id in lost:
                    self._put(Delta(id, [], "error"), now)
                if lost:
                    logger.error("worker %d was lost with %d sequences", worker, len(lost))

    def _put(self, delta: Delta | Refused, now: float) -> None:
        running = self._running.get(delta.id)
        if running is None:  # aborted here; its last frames were under way
            return
        generation, worker = running
        if isinstance(delta, Delta) and delta.finish_reason is None:
            generation.put(generation._open[delta.id], delta, now)
            return
        number = generation._open.pop(delta.id)
        del self._running[delta.id]
        self._load[worker] -= 1
        if generation._later:
            self._start_next(generation)
        elif not generation._open:
            self._late.pop(generation).cancel()
        generation.put(number, delta, now)
