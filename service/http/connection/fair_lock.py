"""A lock that clients take in turn, so many requests of one client delay others no longer than one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class FairLock:
    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by client, for waiting clients

    @asynccontextmanager
    async def held(self, client: str) -> AsyncIterator[None]:
        """One request of each client waits for the lock at a time. The others of that client wait for this one."""
        own = self._locks.get(client) or self._locks.setdefault(client, asyncio.Lock())
        async with own, self._lock:
            yield
