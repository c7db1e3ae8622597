"""The HTTP process's side of the engine: submit sequences, gather their deltas, abort them.

Knows ids and frames; no text, no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from dataclasses import dataclass, field

from service.transport import Abort, Delta, Refused, SocketTransport, Step, Submit, WorkerLost

logger = logging.getLogger(__name__)

LATE_SECONDS = 5.0  # after its deadline a sequence of which the worker says nothing is given up here


@dataclass(eq=False)
class Generation:
    """The sequences of one request, numbered from 0; deltas gather here until they are taken."""

    _arrived: list[tuple[int, Delta | Refused]] = field(default_factory=list)
    _event: asyncio.Event = field(default_factory=asyncio.Event)
    _open: dict[int, int] = field(default_factory=dict)  # sequence id -> number, of those that run
    _later: deque[tuple[int, Submit]] = field(default_factory=deque)  # (number, request) of those that wait here
    _deadline: float = 0.0  # on the event loop's clock

    @property
    def is_finished(self) -> bool:
        """Every sequence has ended and everything was taken."""
        return not self._open and not self._later and not self._arrived

    async def take(self) -> list[tuple[int, Delta | Refused]]:
        """All (sequence number, delta) that have arrived since the last call; waits for the first."""
        await self._event.wait()
        self._event.clear()
        arrived, self._arrived = self._arrived, []
        return arrived

    def put(self, number: int, delta: Delta | Refused) -> None:
        self._arrived.append((number, delta))
        self._event.set()


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

    def submit(self, requests: list[Submit], window: int | None = None) -> Generation | None:
        """Run sequences, at most `window` of them at once; their ids are set here.

        None where no worker is there to take them.
        """
        if not self.is_ready:
            return None
        loop = asyncio.get_running_loop()
        timeout = max(request.timeout_seconds for request in requests)
        generation = Generation(_later=deque(enumerate(requests)), _deadline=loop.time() + timeout)
        self._late[generation] = loop.call_later(timeout + LATE_SECONDS, self.abort, generation, "timeout")
        for _ in requests[:window]:
            self._start_next(generation)
        return generation

    def _start_next(self, generation: Generation) -> None:
        number, request = generation._later.popleft()
        workers = self._transport.connected_workers
        if not workers:
            generation.put(number, Delta(request.id, [], "error"))
            return
        worker = min(workers, key=lambda w: self._load[w] + self._load_elsewhere[w])
        request.id = self._consumer_id << 48 | next(self._numbers)
        request.timeout_seconds = max(0.0, generation._deadline - asyncio.get_running_loop().time())
        self._running[request.id] = (generation, worker)
        self._load[worker] += 1
        generation._open[request.id] = number
        self._transport.send_to_worker(request, worker)

    def abort(self, generation: Generation, reason: str = "abort") -> None:
        """End what still runs of a generation, and what has not begun."""
        while generation._later:
            number, request = generation._later.pop()
            generation.put(number, Delta(request.id, [], reason))
        for id in list(generation._open):
            worker = self._running[id][1]
            self._transport.send_to_worker(Abort(id), worker)
            self._put(id, Delta(id, [], reason))

    async def run(self) -> None:
        """Hand out what the workers send, for ever."""
        self._transport.connect(self._consumer_id)
        try:
            while True:
                worker, frame = await self._transport.areceive(consumer_id=self._consumer_id)
                match frame:
                    case Step(deltas, load):
                        for delta in deltas:
                            self._put(delta.id, delta)
                        self._load_elsewhere[worker] = max(0, load - self._load[worker])
                    case Refused(id):
                        self._put(id, frame)
                    case WorkerLost():
                        lost = [id for id, (_, where) in self._running.items() if where == worker]
                        for id in lost:
                            self._put(id, Delta(id, [], "error"))
                        if lost:
                            logger.error("worker %d was lost with %d sequences", worker, len(lost))
        finally:
            await self._transport.disconnect()

    def _put(self, id: int, delta: Delta | Refused) -> None:
        if id not in self._running:  # aborted here; its last frames were under way
            return
        generation, worker = self._running[id]
        generation.put(generation._open[id], delta)
        if not isinstance(delta, Refused) and delta.finish_reason is None:
            return
        del self._running[id], generation._open[id]
        self._load[worker] -= 1
        if generation._later:
            self._start_next(generation)
        elif not generation._open:
            self._late.pop(generation).cancel()
