"""Runs the slow jobs of requests, the compilation of patterns, in a thread, and keeps the latest results."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from service.http.connection.turns import FairLock
from service.text.patterns import Compiled
from service.text.work import Job

CACHE_BYTES = 64 << 20  # limit of a model's cache
ENTRY_BYTES = 500  # of an entry, besides its key and its result


class PatternThread:
    """Compiles one pattern at a time, with the clients in turn.

    Each additional thread would take the GIL from the event loop for another switch interval.
    """

    def __init__(self) -> None:
        self.lock = FairLock()
        self._pool = ThreadPoolExecutor(1, "patterns")  # starts its thread with the first pattern

    async def run(self, job: Job) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, job.call)


class PatternCache:
    """The results that were used last, at most CACHE_BYTES together. An error is kept as its message.

    An exception would keep its traceback, and with it everything in its frames.
    """

    def __init__(self, thread: PatternThread) -> None:
        self._thread = thread
        self._found: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0

    async def find(self, client: str, job: Job) -> Any:
        """Return the result of a job. If it is not cached, run it in the thread at the client's turn."""
        key = job.key
        if key not in self._found:
            async with self._thread.lock.held(client):
                if key not in self._found:  # another request may have compiled it meanwhile
                    found = await self._thread.run(job)
                    size = ENTRY_BYTES + job.key_bytes + _size(found)
                    if size > CACHE_BYTES:
                        return found
                    self._found[key] = found, size
                    self._bytes += size
                    while self._bytes > CACHE_BYTES:
                        self._bytes -= self._found.popitem(last=False)[1][1]
        self._found.move_to_end(key)
        return self._found[key][0]


def _size(found: Any) -> int:
    return len(found.packed) if isinstance(found, Compiled) else 0 if found is None else len(found)
