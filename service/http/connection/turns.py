"""Turns of the event loop for long work, with the clients in turn. It knows nothing about requests.

Long work asks for its turn between its parts. In each iteration of the loop, it runs for about one slice, whoever does
it. After a slice for which others wait, or that took too long, short requests have REST_TURNS iterations for
themselves: a request that has just come is then read, run and answered.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary, WeakValueDictionary

FREE_SECONDS = 0.000_25  # shorter work needs no turn
SLICE_SECONDS = 0.002
REST_TURNS = 5


class _Line:
    """The long work of an event loop."""

    def __init__(self) -> None:
        self._slice_since: float | None = None  # None: no long work has run in this iteration
        self._is_resting = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by client, the next one first

    async def wait(self, client: str) -> None:
        since = self._slice_since
        if since is None and not self._is_resting:
            self._begin_slice()
        elif since is None or time.monotonic() - since >= SLICE_SECONDS:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(client, deque()).append(turn)
            try:
                await turn
            finally:
                if not turn.cancelled():  # or else its turn never came
                    self._begin_slice()

    def _begin_slice(self) -> None:
        self._is_resting, self._slice_since = False, time.monotonic()
        asyncio.get_running_loop().call_soon(self._end_slice)  # in the next iteration

    def _end_slice(self) -> None:
        assert self._slice_since is not None
        was_long = time.monotonic() - self._slice_since > 2 * SLICE_SECONDS
        self._slice_since = None
        if self._waiting or was_long:
            self._is_resting = True
            asyncio.get_running_loop().call_soon(self._rest, REST_TURNS)

    def _rest(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._rest, turns - 1)
        else:
            self._is_resting = self._give_turn()

    def _give_turn(self) -> bool:
        """Give the next client the next slice. Returns False if none waits."""
        while self._waiting:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # behind the others
            if not turn.done():  # it was cancelled
                turn.set_result(None)
                return True
        return False


_lines: WeakKeyDictionary[asyncio.AbstractEventLoop, _Line] = WeakKeyDictionary()


async def wait_for_turn(client: str) -> None:
    """Wait until the client may do long work."""
    await _lines.setdefault(asyncio.get_running_loop(), _Line()).wait(client)


class Pause:
    """Lets the event loop run other tasks during the long work of a client, such as encoding a large answer."""

    __slots__ = ("_client", "_since")

    def __init__(self, client: str) -> None:
        self._client, self._since = client, time.monotonic()

    async def if_due(self) -> None:
        """Wait for a turn, unless this iteration of the loop has time for more long work."""
        if time.monotonic() - self._since >= FREE_SECONDS:
            await wait_for_turn(self._client)
            self._since = time.monotonic()


class FairLock:
    """A lock that clients take in turn, so many requests of one client delay others no longer than one request."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by client, for waiting clients

    @asynccontextmanager
    async def held(self, client: str) -> AsyncIterator[None]:
        """One request of each client waits for the lock at a time. The others of that client wait for this one."""
        own = self._locks.get(client) or self._locks.setdefault(client, asyncio.Lock())
        async with own, self._lock:
            yield
