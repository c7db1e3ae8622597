"""Pauses in long work on the event loop. It knows nothing about requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from weakref import WeakKeyDictionary

BUSY_SECONDS = 0.004  # work before a pause; another request may need several turns of the loop


class Pause:
    """Lets the event loop run other tasks during long work, such as encoding a large answer.

    One piece of long work continues in each turn of the loop. Otherwise a hundred would take a hundred times
    BUSY_SECONDS in each turn.
    """

    __slots__ = ("_since",)
    _lines: WeakKeyDictionary[asyncio.AbstractEventLoop, deque[asyncio.Future[None]]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def if_due(self) -> None:
        """Pause if the last pause was BUSY_SECONDS ago."""
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
        if not turn.done():  # it was cancelled
            turn.set_result(None)
        if line:
            loop.call_soon(cls._next, loop)
