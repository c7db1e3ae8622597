"""Turns of the event loop, which connections share, and the sweep that applies time limits.

This module knows nothing about the data of a connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

logger = logging.getLogger(__name__)

TURNS_SECONDS = 0.002  # time for turns of connections before the event loop checks sockets again


class Waiting(Protocol):
    """A connection that takes turns."""

    transport: asyncio.Transport

    def take_turn(self) -> None:
        """Begin at most one request, and return within about 1 ms."""


class Timed(Protocol):
    """A connection that the sweep checks."""

    transport: asyncio.Transport

    @property
    def deadline(self) -> float:
        """The time at which `expire` is due, by time.monotonic()."""

    def expire(self, now: float) -> None:
        """End the connection or its request, or set a later deadline."""


class Turns:
    """Lets connections parse in the order of their calls of `add`, one request each.

    A connection with 100,000 requests goes to the end of the line after each of them.
    """

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()

    def add(self, connection: Waiting) -> None:
        """Give a connection a turn soon."""
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        until = time.monotonic() + TURNS_SECONDS
        while True:
            connection = self._waiting[0]
            try:
                connection.take_turn()
            except Exception:  # concerns only this connection
                logger.exception("a request could not be begun")
                connection.transport.abort()
            self._waiting.popleft()  # here, so that `add` does not schedule a second call meanwhile
            if not self._waiting:
                return
            if time.monotonic() >= until:
                break
        asyncio.get_running_loop().call_soon(self._take)


def sweep(connections: Iterable[Timed], now: float) -> None:
    """Expire connections past their deadlines. Call this at least ten times a second."""
    for connection in [it for it in connections if it.deadline < now]:
        try:
            connection.expire(now)
        except Exception:  # concerns only this connection: all others depend on this sweep
            logger.exception("a time limit could not be applied")
            connection.transport.abort()
