"""Limits on the open connections of an HTTP process, in total and per address.

This module knows nothing about the data of a connection.
"""

from __future__ import annotations

import contextlib
import logging
import resource
from collections import Counter
from collections.abc import Callable

from service.http.connection.addresses import network_of
from service.http.connection.errors import ApiError, RefusedRequest
from service.observe.metrics import Metrics
from service.settings import Settings
from service.words import plural

logger = logging.getLogger(__name__)

LOOPBACK = frozenset(("127.0.0.1", "::1"))


class OpenFilesError(ValueError):
    """The process may not open enough files to serve."""


class ConnectionLimits:
    """The open connections of an HTTP process. Each process has its part of the settings' limits.

    Loopback has no limit per address, and no address has one behind a trusted proxy, which limits its clients itself.
    The total leaves room for probes: loopback, and an address without an open connection, may get one of RESERVED
    connections beyond it.

    metrics: returns None until the HTTP process has started.

    Raises OpenFilesError: the limit of open files (RLIMIT_NOFILE, hard) is less than MIN_FILES.
    """

    RESERVED = 16
    LINGERING = 64  # refused connections that stay open until the client has read the error
    MIN_FILES = 256
    FEWEST_SPARE_FILES = 192  # own files, refused connections, and those that one turn accepts
    SPARE_FILES = 2300  # of a limit that is high enough: a backlog's connections too

    def __init__(self, settings: Settings, metrics: Callable[[], Metrics | None] = lambda: None):
        self.settings, self._metrics = settings, metrics
        files = raise_files_limit()
        if files < self.MIN_FILES:
            raise OpenFilesError(f"the limit of open files (ulimit -n) must be at least {self.MIN_FILES}, got {files}")
        asked = -(-settings.max_connections // settings.http_processes)
        self.limit = min(asked, files - min(self.SPARE_FILES, max(self.FEWEST_SPARE_FILES, files // 2)))
        if self.limit < asked:
            logger.warning(
                "--max-connections: at most %d per HTTP process instead of %d, because the limit of open files is %d",
                self.limit, asked, files,
            )  # fmt: skip
        of_address = 0 if settings.client_header else settings.max_connections_per_address  # 0: no limit
        self.limit_per_address = -(-of_address // settings.http_processes)
        self.num_open = self.num_lingering = 0
        self._by_network: Counter[str] = Counter()

    def admit(self, address: str) -> str:
        """Count an open connection. Returns the argument of `leave`. Raises RefusedRequest: too many are open."""
        network = network_of(address) or "unknown"
        already, limit, is_local = self._by_network[network], self.limit_per_address, network in LOOPBACK
        if limit and already >= limit and not is_local:
            message = f"your address has {plural(already, 'connection')} open, which is the maximum"
            raise RefusedRequest(_too_many(429, message), "address_limit")
        if self.num_open >= self.limit + (self.RESERVED if is_local or not already else 0):
            raise RefusedRequest(_too_many(503, "the server has no connection left"), "limit")
        self.num_open += 1
        self._by_network[network] += 1
        return network

    def leave(self, network: str) -> None:
        """Count a closed connection."""
        self.num_open -= 1
        self._by_network[network] -= 1
        if not self._by_network[network]:
            del self._by_network[network]

    def count_rejection(self, reason: str) -> None:
        if (metrics := self._metrics()) is not None:
            metrics.http_connections_rejected(reason).inc()


def _too_many(status: int, message: str) -> ApiError:
    return ApiError(status, message, code="too_many_connections", retry_after_seconds=1)


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
