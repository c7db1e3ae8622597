"""Turns of the event loop, which connections share, and the sweep that ends what takes too long.

Knows nothing of what a connection reads or writes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

logger = logging.getLogger(__name__)

TURNS_SECONDS = 0.002  # for which connections take their turns before the event loop looks at sockets again


class Waiting(Protocol):
    """What takes turns: a connection."""

    transport: asyncio.Transport

    def take_turn(self) -> None:
        """Begin at most one request, and return within about 1 ms."""


class Timed(Protocol):
    """What the sweep looks at: a connection."""

    transport: asyncio.Transport

    @property
    def deadline(self) -> float:
        """When `expire` is due, by time.monotonic()."""

    def expire(self, now: float) -> None:
        """End what has taken too long, or set a later deadline."""


class Turns:
    """Lets connections parse in the order in which they asked to, each one request at a time.

    Whoever has sent 100,000 requests at once goes on behind everybody else after each of them.
    """

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()

    def add(self, connection: Waiting) -> None:
        """Let it take a turn soon."""
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        until = time.monotonic() + TURNS_SECONDS
        while True:
            connection = self._waiting[0]
            try:
                connection.take_turn()
            except Exception:  # of this connection alone
                logger.exception("a request could not be begun")
                connection.transport.abort()
            self._waiting.popleft()  # now, so that `add` in between schedules no second call
            if not self._waiting:
                return
            if time.monotonic() >= until:
                break
        asyncio.get_running_loop().call_soon(self._take)


def sweep(connections: Iterable[Timed], now: float) -> None:
    """End what has taken too long; to be called ten times a second or more."""
    for connection in [it for it in connections if it.deadline < now]:
        try:
            connection.expire(now)
        except Exception:  # of this connection alone: all others depend on this sweep too
            logger.exception("a time limit could not be applied")
            connection.transport.abort()
