"""Limits on the open connections of all HTTP processes together, in total and per address.

This module knows nothing about the data of a connection.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import time
from collections.abc import Callable
from typing import Any

from uvicorn.server import ServerState

from service.http.api.errors import ApiError, RefusedRequest
from service.http.connection.turns import Timed, Turns
from service.observe.metrics import Metrics
from service.settings import Settings
from service.shared import SharedTable
from service.words import plural

logger = logging.getLogger(__name__)

LINGER_SECONDS = 1.0


class OpenFilesError(ValueError):
    """The process may not open enough files to serve."""


class ConnectionLimits:
    """The open connections of one HTTP process, and the limits of all HTTP processes together and per address.

    The limits leave room for probes. An address without an open connection may get one of RESERVED connections beyond
    the limit. Loopback, the source of a container's health check, may get one of RESERVED_FOR_LOOPBACK more.

    table: counts the connections; metrics: returns None until the HTTP process has started.

    Raises OpenFilesError: the limit of open files (RLIMIT_NOFILE, hard) is less than MIN_FILES.
    """

    RESERVED = 16
    RESERVED_FOR_LOOPBACK = 4
    LINGERING = 64  # refused connections that stay open until the client has read the error
    MIN_FILES = 256
    SPARE_FILES = 2300  # own files, the connections above, and the backlog of connections accepted at once

    def __init__(
        self, settings: Settings, table: SharedTable | None = None, metrics: Callable[[], Metrics | None] = lambda: None
    ):
        self.settings, self._metrics, self._table = settings, metrics, table or SharedTable()
        asked = settings.max_connections
        files = raise_files_limit()
        if files < self.MIN_FILES:
            raise OpenFilesError(f"the limit of open files (ulimit -n) must be at least {self.MIN_FILES}, got {files}")
        self._own_limit = files - min(self.SPARE_FILES, files // 2)
        self.limit = min(asked, settings.http_processes * self._own_limit)
        if self.limit < asked:
            logger.warning(
                "--max-connections: at most %d per HTTP process instead of %d, because the limit of open files is %d",
                self._own_limit, asked, files,
            )  # fmt: skip
        share = settings.max_connections_per_address * self.limit // asked
        self.limit_per_address = max(1, share) if settings.max_connections_per_address else self.limit + self.RESERVED
        self.num_open = self.num_lingering = 0
        self.every: set[Timed] = set()
        self.turns = Turns()
        self._defaults: tuple[object, bytes] = (None, b"")

    def admit(self, network: str) -> tuple[int, int]:
        """Count an open connection. Returns the argument of `leave`. Raises RefusedRequest: too many are open."""
        options: dict[str, Any] = {"code": "too_many_connections", "retry_after_seconds": 1}
        with self._table as table:
            now = time.monotonic()
            try:
                rows = table.row(f"connections {network}", now), table.row("connections", now)
            except LookupError:  # the table is full
                raise RefusedRequest(ApiError(503, "the server has no connection left", **options), "limit") from None
            already, total = map(table.count, rows)
            if already >= self.limit_per_address:
                message = f"your address has {plural(already, 'connection')} open, which is the maximum"
                raise RefusedRequest(ApiError(429, message, **options), "address_limit")
            reserved = 0
            if not already:
                reserved = self.RESERVED + (self.RESERVED_FOR_LOOPBACK if network in LOOPBACK else 0)
            if total >= self.limit + reserved or self.num_open >= self._own_limit + reserved:
                raise RefusedRequest(ApiError(503, "the server has no connection left", **options), "limit")
            self.num_open += 1
            for row in rows:
                table.change(row, 1)
        return rows

    def leave(self, rows: tuple[int, int]) -> None:
        """Count a closed connection. rows: those of its address and of the total, which stay while counted."""
        self.num_open -= 1
        with self._table as table:
            for row in rows:
                table.change(row, -1)

    def default_headers(self, server: ServerState) -> bytes:
        """Return the header lines that uvicorn adds to each answer: the date, which changes each second."""
        given = server.default_headers
        if given is not self._defaults[0]:
            self._defaults = given, b"".join([b"%b: %b\r\n" % pair for pair in given])
        return self._defaults[1]

    def count_rejection(self, reason: str) -> None:
        if (metrics := self._metrics()) is not None:
            metrics.http_connections_rejected(reason).inc()


def raise_files_limit() -> int:
    """Raise the limit of open files as far as this process may, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS has its own, lower limit OPEN_MAX
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (10240, hard))
            return 10240
        return soft
    return hard if hard != resource.RLIM_INFINITY else 1 << 30


LOOPBACK = frozenset(("127.0.0.1", "::1"))
