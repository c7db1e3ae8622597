"""How handlers share the event loop: a Run drives one, a Turn is what it waits for, a Pause lets others in.

A task would start, and go on after each wait, in a later turn of the loop; its bookkeeping costs as much as a small
answer. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any
from weakref import WeakKeyDictionary

BUSY_SECONDS = 0.004  # before a pause; another request may need several turns of the loop


class Run:
    """Runs a coroutine to its end: now, until it waits, and on when that has come.

    As an asyncio.Task, but for what asks for the current one, such as asyncio.timeout.
    """

    __slots__ = ("_coroutine", "_waits_for", "_is_cancelled")

    def __init__(self, coroutine: Coroutine[Any, Any, None]):
        self._coroutine = coroutine
        self._waits_for: Any = None  # a Turn or a future
        self._is_cancelled = False

    def go_on(self, _: object = None) -> None:
        self._waits_for = None
        self.entered()
        try:
            if self._is_cancelled:
                self._is_cancelled = False
                waits_for = self._coroutine.throw(asyncio.CancelledError())
            else:
                waits_for = self._coroutine.send(None)
        except StopIteration:
            self.ended(None)
            return
        except (Exception, asyncio.CancelledError) as error:
            self.ended(error)
            return
        if waits_for is None:  # asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(self.go_on)
        else:
            waits_for._asyncio_future_blocking = False
            self._waits_for = waits_for
            waits_for.add_done_callback(self.go_on)

    def entered(self) -> None:
        """Before each step."""

    def ended(self, error: BaseException | None) -> None:
        """After the last one; `error`: that the coroutine raised."""

    def cancel(self, msg: object = None) -> None:
        """Raise asyncio.CancelledError where it waits."""
        if self._waits_for is None or not self._waits_for.cancel():
            self._is_cancelled = True


class Turn:
    """What one coroutine waits for, again and again: as an asyncio.Future, but it goes on in the call of `come`."""

    __slots__ = ("_asyncio_future_blocking", "_go_on", "_is_cancelled")

    def __init__(self) -> None:
        self._go_on: Callable[[Turn], object] | None = None
        self._asyncio_future_blocking = self._is_cancelled = False

    @property
    def is_awaited(self) -> bool:
        return self._go_on is not None

    def come(self) -> None:
        """Let the coroutine go on, if it waits."""
        go_on, self._go_on = self._go_on, None
        if go_on is not None:
            go_on(self)

    def __await__(self) -> Generator[Turn, None, None]:
        self._is_cancelled = False
        self._asyncio_future_blocking = True
        yield self
        self.result()

    # As a task uses a future.

    def add_done_callback(self, callback: Callable[[Turn], object], *, context: object = None) -> None:
        self._go_on = callback

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def result(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError

    def cancel(self, msg: object = None) -> bool:
        self._is_cancelled = self.is_awaited
        if self._is_cancelled:
            asyncio.get_running_loop().call_soon(self.come)
        return self._is_cancelled


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
