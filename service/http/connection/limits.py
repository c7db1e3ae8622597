"""The connections of an HTTP process: how many there may be, and the sweep that ends what takes too long.

Knows nothing of what a connection says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import uvloop
from uvicorn.server import ServerState

from service.http.api.errors import ApiError
from service.observe.metrics import Metrics
from service.settings import Settings
from service.shared import SharedTable
from service.words import plural

if TYPE_CHECKING:
    from service.http.connection.protocol import Connection

logger = logging.getLogger(__name__)

LINGER_SECONDS = 1.0
BURST_SECONDS = 0.008  # for which requests are begun in one turn of the event loop, before the others have to wait
TURN_SECONDS = 0.002  # for which those that wait are begun in each later turn
ACCEPTED_AT_ONCE = 16  # connections in a turn of the event loop; fewer where few files may be open


class OpenFilesError(ValueError):
    """The process may not open enough files to serve."""


class RefusedRequest(Exception):
    """A request that is not passed on: the answer, and the reason as metrics name it."""

    def __init__(self, error: ApiError, reason: str):
        self.error, self.reason = error, reason


class Connections:
    """The open connections of one HTTP process, and the limits of all HTTP processes together and per address.

    The limits leave room for probes: an address without an open connection gets one of RESERVED connections beyond
    the limit, and loopback, from which a container's health check comes, one of RESERVED_FOR_LOOPBACK more.

    table: counts the connections; metrics: returns None until the HTTP process has started.

    Raises OpenFilesError: the limit of open files (RLIMIT_NOFILE, hard) is less than MIN_FILES.
    """

    RESERVED = 16
    RESERVED_FOR_LOOPBACK = 4
    LINGERING = 64  # refused connections that are kept until the client has read why
    MIN_FILES = 256
    SPARE_FILES = 2300  # own files, the connections above, and as many as are accepted at once (uvicorn's backlog)

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
                "--max-connections: at most %d per HTTP process instead of %d, as the limit of open files is %d",
                self._own_limit, asked, files,
            )  # fmt: skip
        share = settings.max_connections_per_address * self.limit // asked
        self.limit_per_address = max(1, share) if settings.max_connections_per_address else self.limit + self.RESERVED
        self.num_open = self.num_lingering = 0
        self.every: set[Connection] = set()
        self._waiting: deque[Connection] = deque()  # with a request to be begun in a later turn of the event loop
        self._turn_began_at: float | None = None  # None: no request has come in this turn
        self._held: dict[asyncio.Transport, bytes] | None = None  # None: writes are not held
        self._closing: list[asyncio.Transport] = []  # once that is written
        self._defaults: tuple[object, bytes] = (None, b"")

    def admit(self, network: str) -> tuple[int, int]:
        """Count a connection as open, until `leave` with what this returns. Raises RefusedRequest: too many are."""
        options: dict[str, Any] = {"code": "too_many_connections", "retry_after_seconds": 1}
        with self._table as table:
            now = time.monotonic()
            try:
                rows = table.row(f"connections {network}", now), table.row("connections", now)
            except LookupError:  # it is full
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
        """rows: of its address, and of all, in the table: names that count keep theirs."""
        self.num_open -= 1
        with self._table as table:
            for row in rows:
                table.change(row, -1)

    def sweep(self, now: float) -> None:
        """End what has taken too long, by time.monotonic(); to be called ten times a second or more."""
        for connection in [it for it in self.every if it.deadline < now]:
            try:
                connection.expire(now)
            except Exception:  # of this connection alone: all others depend on this sweep too
                logger.exception("a time limit could not be applied")
                connection.deadline = math.inf
                connection.transport.abort()

    def must_wait(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether a connection's request is to be begun in a later turn of the event loop, by `take_turn`.

        All that can be read is read in one turn. If 10,000 requests were begun in it too, not even the workers' frames
        would be read before the last one.
        """
        if self._turn_began_at is None:
            self._turn_began_at = time.monotonic()
            loop.call_soon(self._next_turn, loop)
            return False
        if not self._waiting and time.monotonic() - self._turn_began_at < BURST_SECONDS:
            return False
        self._waiting.append(connection)
        return True

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin requests that wait."""
        if not self._waiting:
            self._turn_began_at = None
            return
        loop.call_soon(self._next_turn, loop)
        until = time.monotonic() + TURN_SECONDS
        self.hold_writes()
        while self._waiting and time.monotonic() < until:
            connection = self._waiting.popleft()
            try:
                connection.take_turn()
            except Exception:  # of this connection alone
                logger.exception("a request could not be begun")
                connection.transport.abort()
        self.write_held()

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        if self._held is None:
            transport.write(data)
        else:
            before = self._held.get(transport)
            self._held[transport] = data if before is None else before + data

    def hold_writes(self) -> None:
        """Until write_held: answers that are due at once go out one after the other, not each after its making.

        So whoever reads them is woken once.
        """
        self._held = {}

    def write_held(self) -> None:
        held, self._held = self._held, None
        closing, self._closing = self._closing, []
        for transport, data in held.items() if held else ():
            if not transport.is_closing():
                try:
                    transport.write(data)
                except Exception:  # of this connection alone
                    logger.exception("an answer could not be written")
                    transport.abort()
        for transport in closing:
            transport.close()

    def flush(self, transport: asyncio.Transport) -> None:
        """Write what is held of a connection."""
        if self._held and (data := self._held.pop(transport, b"")):
            transport.write(data)

    def close(self, transport: asyncio.Transport) -> None:
        """Once everything is written."""
        if self._held is None:
            transport.close()
        else:
            self._closing.append(transport)

    def default_headers(self, server: ServerState) -> bytes:
        """Those that uvicorn adds to each answer: the date, in another list each second."""
        given = server.default_headers
        if given is not self._defaults[0]:
            self._defaults = given, b"".join([b"%b: %b\r\n" % pair for pair in given])
        return self._defaults[1]

    def count_rejection(self, reason: str) -> None:
        if (metrics := self._metrics()) is not None:
            metrics.http_connections_rejected(reason).inc()


def raise_files_limit() -> int:
    """Raise the limit of open files as far as this process may; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS has a lower limit of its own: OPEN_MAX
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (10240, hard))
            return 10240
        return soft
    return hard if hard != resource.RLIM_INFINITY else 1 << 30


LOOPBACK = frozenset(("127.0.0.1", "::1"))


class TlsServer:
    """Listens for TLS connections and admits each before its handshake, which must end within the time for headers.

    Has what uvicorn uses of an asyncio.Server.
    """

    PAUSE_SECONDS = 0.5  # when the process can open no more files

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        factory: Callable[[], Connection],
        listener: socket.socket,
        context: ssl.SSLContext,
    ):
        self._loop, self._factory, self._context = loop, factory, context
        self._tasks = {loop.create_task(self._accept(listener))}  # and the handshakes

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """uvicorn waits for connections itself."""

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = await self._loop.sock_accept(listener)
            except OSError as error:
                logger.warning("no connection accepted for %g s: %s", self.PAUSE_SECONDS, error.strerror)
                await asyncio.sleep(self.PAUSE_SECONDS)
                continue
            protocol = self._factory()
            try:
                protocol.admit(address[0])
            except RefusedRequest as refused:  # an answer is not worth a handshake
                protocol.limits.count_rejection(refused.reason)
                connection.close()
                continue
            task = self._loop.create_task(self._connect(connection, protocol))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: socket.socket, protocol: Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context,
                ssl_handshake_timeout=protocol.limits.settings.header_timeout_seconds,
                ssl_shutdown_timeout=LINGER_SECONDS,
            )  # fmt: skip
        except OSError:  # ssl.SSLError and TimeoutError included
            protocol.leave()
            connection.close()


class Servers:
    """Several that listen for the same connections. Has what uvicorn uses of an asyncio.Server."""

    def __init__(self, servers: list[asyncio.AbstractServer]):
        self._servers = servers

    def close(self) -> None:
        for server in self._servers:
            server.close()

    async def wait_closed(self) -> None:
        for server in self._servers:
            await server.wait_closed()


class Loop(uvloop.Loop):
    """uvloop with TlsServer in place of its own TLS servers, which count a connection after its handshake.

    Its other servers accept one connection in a turn of the loop: while requests wait for their turns, that is too few.
    """

    async def create_server(  # type: ignore[override]
        self, factory: Callable[[], Any], *arguments: Any, sock: socket.socket, ssl: ssl.SSLContext | None, backlog: int
    ) -> Any:
        if ssl is None:
            listen, files = super().create_server, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            count = min(ACCEPTED_AT_ONCE, files // Connections.MIN_FILES)  # each takes a file
            socks = [sock, *[sock.dup() for _ in range(count - 1)]]
            return Servers([await listen(factory, *arguments, sock=each, backlog=backlog) for each in socks])
        sock.setblocking(False)
        sock.listen(backlog)
        return TlsServer(self, factory, sock, ssl)
