"""Pauses in long work of the event loop. Knows nothing of requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from weakref import WeakKeyDictionary

BUSY_SECONDS = 0.004  # before a pause; another request may need several turns of the loop


class Pause:
    """Lets the event loop run what waits, in long work such as encoding a large answer.

    Of all such work in progress one goes on in a turn of the loop: a hundred would otherwise take a hundred times
    BUSY_SECONDS in each.
    """

    __slots__ = ("_since",)
    _lines: WeakKeyDictionary[asyncio.AbstractEventLoop, deque[asyncio.Future[None]]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def if_due(self) -> None:
        """If the last pause was BUSY_SECONDS ago."""
        if time.monotonic() - self._since >= BUSY_SECONDS:
            loop = asyncio.get_running_loop()
            line, turn = self._lines.setdefault(loop, deque()), loop.create_future()
            line.append(turn)
            if len(line) == 1:
                loop.call_soon(self._next, loop)
            await turn
            self._since = time.monotonic()

    @classmethod
    def _next(cls, loop: asyncio.AbstractEventLoop) -> None:
        line = cls._lines[loop]
        turn = line.popleft()
        if not turn.done():  # cancelled
            turn.set_result(None)
        if line:
            loop.call_soon(cls._next, loop)
