"""HTTP connections: their number, their headers, pipelining, and how long they may wait.

uvicorn's protocol on httptools bounds none of these. What is refused here never reaches a route, and is answered with
the body of every other error.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable
from typing import Any

import uvloop
from httptools import HttpParserError, HttpParserUpgrade
from starlette.types import Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from service.http.clients import network_of
from service.http.schemas import ApiError
from service.observe.metrics import Metrics
from service.settings import Settings
from service.words import plural

logger = logging.getLogger(__name__)

MAX_HEADERS = 100
MAX_PIPELINED = 16
PIECE_BYTES = 4096  # fed to the parser at once, so that the limits are checked before much is parsed
LINGER_SECONDS = 1.0
LINGER_BYTES = 4 << 20


class OpenFilesError(ValueError):
    """The process may not open enough files to serve."""


class RefusedRequest(Exception):
    """A request that is not passed on: the answer, and the reason as metrics name it."""

    def __init__(self, error: ApiError, reason: str):
        self.error, self.reason = error, reason


class Connections:
    """The open connections of one HTTP process and their limits, in all and per address.

    The limits leave room for probes: an address without an open connection gets one of RESERVED connections beyond
    the limit, and loopback, from which a container's health check comes, one of RESERVED_FOR_LOOPBACK more.

    metrics: returns None until the HTTP process has started.

    Raises:
        OpenFilesError: the limit of open files (RLIMIT_NOFILE, hard) is less than MIN_FILES.
    """

    RESERVED = 16
    RESERVED_FOR_LOOPBACK = 4
    LINGERING = 64  # refused connections that are kept until the client has read why
    MIN_FILES = 256
    SPARE_FILES = 2300  # own files, the connections above, and as many as are accepted at once (uvicorn's backlog)

    def __init__(self, settings: Settings, metrics: Callable[[], Metrics | None] = lambda: None):
        self.settings, self._metrics = settings, metrics
        asked = settings.max_connections // settings.http_processes or 1
        files = raise_files_limit()
        if files < self.MIN_FILES:
            raise OpenFilesError(f"the limit of open files (ulimit -n) must be at least {self.MIN_FILES}, got {files}")
        self.limit = min(asked, files - min(self.SPARE_FILES, files // 2))
        if self.limit < asked:
            logger.warning(
                "--max-connections: at most %d per HTTP process instead of %d, as the limit of open files is %d",
                self.limit, asked, files,
            )  # fmt: skip
        share = settings.max_connections_per_address * self.limit // settings.max_connections
        self.limit_per_address = max(1, share) if settings.max_connections_per_address else self.limit + self.RESERVED
        self.num_open = self.num_lingering = 0
        self._open_by_network: dict[str, int] = {}

    def admit(self, network: str) -> None:
        """Count a connection as open.

        Raises:
            RefusedRequest: there are too many.
        """
        already = self._open_by_network.get(network, 0)
        options: dict[str, Any] = {"code": "too_many_connections", "retry_after_seconds": 1}
        if already >= self.limit_per_address:
            message = f"your address has {plural(already, 'connection')} open, which is the maximum"
            raise RefusedRequest(ApiError(429, message, **options), "address_limit")
        room = self.limit
        if not already:
            room += self.RESERVED + (self.RESERVED_FOR_LOOPBACK if network in LOOPBACK else 0)
        if self.num_open >= room:
            raise RefusedRequest(ApiError(503, "the server has no connection left", **options), "limit")
        self.num_open += 1
        self._open_by_network[network] = already + 1

    def leave(self, network: str) -> None:
        self.num_open -= 1
        self._open_by_network[network] -= 1
        if not self._open_by_network[network]:
            del self._open_by_network[network]

    def count_rejection(self, reason: str) -> None:
        if (metrics := self._metrics()) is not None:
            metrics.http_connection_rejected(reason)


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


class Flow(FlowControl):
    """Flow control of a connection that can stop reading whatever uvicorn does."""

    is_held = False

    def hold(self) -> None:
        self.is_held = True
        self.pause_reading()

    def release(self) -> None:
        self.is_held = False
        self.resume_reading()

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class Protocol(HttpToolsProtocol):
    """One connection.

    Requests get `abort` in their scope's extensions, as `chargpt.abort`.
    """

    flow: Flow

    def __init__(
        self,
        limits: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        super().__init__(config, server_state, app_state, _loop)
        self.limits = limits
        self._accepted_at = self.loop.time()
        self._network: str | None = None  # None: not admitted
        self._running: RequestResponseCycle | None = None  # the request being answered; self.cycle is the last one read
        self._refusal: ApiError | None = None
        self._timer: asyncio.TimerHandle | None = None  # for headers that do not come, or a close that does not end
        self._is_lingering = False
        self._discarded_bytes = 0
        # Where the parser is. Trailers of a chunked body, and line breaks between requests, count as a head too.
        self._in_head = True
        self._is_begun = False  # a request whose headers are not complete
        self._began_in_piece = False
        self._head_bytes = 0
        self._unparsed = b""  # read, but to be parsed when pipelined requests have been answered

    # -- the connection --

    def admit(self, address: str) -> None:
        """
        Raises:
            RefusedRequest: there are too many connections.
        """
        network = network_of(address) or "unknown"
        self.limits.admit(network)
        self._network = network

    def leave(self) -> None:
        if self._network is not None:
            self.limits.leave(self._network)
            self._network = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport)
        self._extensions = {"chargpt.abort": self.abort}
        if self._network is None:  # otherwise TlsServer has admitted it
            if self.client is None:  # gone already
                transport.abort()
                return
            try:
                self.admit(self.client[0])
            except RefusedRequest as refused:
                self._refuse(refused.error, refused.reason)
                return
        seconds = self.limits.settings.header_timeout_seconds - (self.loop.time() - self._accepted_at)
        self._timer = self.loop.call_later(max(0.0, seconds), self._time_out_headers)

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave()
        self._set_timer(None)
        self._unset_keepalive_if_required()
        if self._is_lingering:
            self.limits.num_lingering -= 1
        self._disconnect()  # uvicorn tells only the last request read
        super().connection_lost(exc)
        self.pipeline.clear()
        self._unparsed = b""

    def abort(self) -> None:
        """Close the connection at once, whatever the client has still to read."""
        self._disconnect()
        self.transport.abort()

    def _disconnect(self) -> None:
        if self._is_answering:
            self._running.disconnected = True  # type: ignore[union-attr]
            self._running.message_event.set()  # type: ignore[union-attr]

    def shutdown(self) -> None:
        super().shutdown()
        # Before uvicorn cancels what still runs.
        self.loop.call_later(0.5 * (self.config.timeout_graceful_shutdown or 1), self._abort_if_stuck)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # close() would wait for the client to read
            self.transport.abort()
        else:
            self.transport.close()

    def _abort_if_stuck(self) -> None:
        """Abort if the client reads nothing of what it was sent."""
        if self.flow.write_paused or (self.transport.is_closing() and self.transport.get_write_buffer_size()):
            self.abort()

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    # -- reading --

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self._is_lingering:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > LINGER_BYTES:
                self.transport.abort()
        elif self.flow.is_held:
            self._unparsed += data
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        position, size = 0, len(data)
        while position < size:
            length = min(size - position, PIECE_BYTES)
            if self._in_head:
                length = min(length, self.limits.settings.max_header_bytes - self._head_bytes)
            self._began_in_piece = False
            try:
                self.parser.feed_data(data if length == size else data[position : position + length])
            except HttpParserUpgrade as upgrade:  # not supported, so ignored, as RFC 9110 has it
                length = upgrade.args[0]
            except HttpParserError as error:
                self._refuse_malformed(error)
                return
            position += length
            if self._in_head:
                if not self._began_in_piece:
                    self._head_bytes += length
                    if self._head_bytes >= self.limits.settings.max_header_bytes:
                        self._refuse_too_large()
                        return
                if self._is_begun and self._timer is None:
                    seconds = self.limits.settings.header_timeout_seconds
                    self._timer = self.loop.call_later(seconds, self._time_out_headers)
            if len(self.pipeline) >= MAX_PIPELINED:
                self._unparsed = data[position:]
                self.flow.hold()
                return

    def on_message_begin(self) -> None:
        self._is_begun = True
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        super().on_message_begin()
        self.scope["extensions"] = self._extensions  # type: ignore[typeddict-item]

    def on_headers_complete(self) -> None:
        names = [name for name, _ in self.headers]
        if len(names) > MAX_HEADERS:
            message = f"a request must have at most {MAX_HEADERS} headers, got {len(names)}"
            raise RefusedRequest(ApiError(431, message, code="headers_too_large"), "headers_too_large")
        version, hosts = self.parser.get_http_version(), names.count(b"host")
        if version not in ("1.1", "1.0"):
            raise RefusedRequest(ApiError(505, f"HTTP/{version} is not served, only 1.1 and 1.0"), "malformed")
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            raise RefusedRequest(ApiError(400, f"a request must have one Host header, got {hosts}"), "malformed")
        self._in_head = self._is_begun = False
        self._set_timer(None)
        self._unset_keepalive_if_required()  # a response ended after the head began
        super().on_headers_complete()
        self.headers = []  # takes the trailers, which would otherwise join the headers

    def on_body(self, body: bytes) -> None:
        self._in_head = False
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._expect_head()  # the trailers, if this is the last chunk

    def on_message_complete(self) -> None:
        self._expect_head()
        super().on_message_complete()

    def _expect_head(self) -> None:
        self._in_head = self._began_in_piece = True
        self._head_bytes = 0

    # -- answering --

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(app, cycle)
        cycle.transport = AnswerTransport(self, cycle)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self._is_lingering:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self.transport.is_closing():  # when the client has read the answer
            self._set_timer(self.loop.call_later(self.timeout_keep_alive, self.transport.abort))
        elif self._refusal is not None:
            if not self._is_answering:
                self._write_refusal(self._refusal)
        elif self.flow.is_held and not self.pipeline:
            data, self._unparsed = self._unparsed, b""
            self.flow.release()
            self._parse(data)

    @property
    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    # -- refusing --

    def _time_out_headers(self) -> None:
        self._timer = None
        if self.flow.read_paused:  # until earlier requests are answered: no fault of the client
            self._timer = self.loop.call_later(self.limits.settings.header_timeout_seconds, self._time_out_headers)
            return
        if not self._head_bytes and not self._is_begun:  # nothing has come
            self.limits.count_rejection("header_timeout")
            self.transport.close()
            return
        message = f"headers not received within {self.limits.settings.header_timeout_seconds:g} s"
        self._refuse(ApiError(408, message, code="header_timeout"), "header_timeout")

    def _refuse_too_large(self) -> None:
        limit = self.limits.settings.max_header_bytes
        is_url = self._is_begun and len(self.url) > limit // 2
        message = f"request line and headers must have at most {limit} bytes"
        self._refuse(ApiError(414 if is_url else 431, message, code="headers_too_large"), "headers_too_large")

    def _refuse_malformed(self, error: HttpParserError) -> None:
        cause = error.__context__
        if isinstance(cause, RefusedRequest):
            self._refuse(cause.error, cause.reason)
            return
        reason = "invalid request target" if cause is not None else error
        self._refuse(ApiError(400, f"the request is not valid HTTP: {reason}", code="invalid_http"), "malformed")

    def _refuse(self, error: ApiError, reason: str) -> None:
        """Answer with an error and close, once the requests before are answered."""
        if self.transport.is_closing():
            return
        self.limits.count_rejection(reason)
        logger.debug("refused: %s", error.message)
        self._set_timer(None)
        self._unparsed, self._refusal = b"", error
        if self.pipeline and self.cycle.more_body:  # the request that is at fault
            self.pipeline.popleft()
        if not self._is_answering:
            self._write_refusal(error)
        elif self._running is self.cycle and self.cycle.more_body:
            self._disconnect()
            if self.cycle.response_started:
                self.transport.abort()
            else:
                self._write_refusal(error)
        else:
            self.flow.hold()

    def _write_refusal(self, error: ApiError) -> None:
        body = error.body
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "x-request-id": os.urandom(16).hex(),
        } | error.headers
        lines = [f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}"]
        lines += [f"{name.lower()}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "\r\n"]).encode() + body)
        self.linger()

    def linger(self) -> None:
        """Close after LINGER_SECONDS: closing while data arrives would send a reset, and the client lose the answer."""
        self._unset_keepalive_if_required()
        self._set_timer(self.loop.call_later(LINGER_SECONDS, self.transport.abort))
        if self.scheme == "https" or self.limits.num_lingering >= self.limits.LINGERING:
            self.transport.close()
            return
        self.limits.num_lingering += 1
        self._is_lingering = True
        self.transport.write_eof()
        self.flow.release()


def _without_chunks(app: Any, cycle: RequestResponseCycle) -> Any:
    """For HTTP/1.0, which has no chunked encoding: a body of unknown length ends with the connection."""

    async def ask(scope: Scope, receive: Receive, send: Send) -> None:
        is_measured = True

        async def write(message: Message) -> None:
            nonlocal is_measured
            if message["type"] == "http.response.start":
                is_measured = any(name.lower() == b"content-length" for name, _ in message["headers"])
                if not is_measured:
                    cycle.chunked_encoding = False
            elif not is_measured:
                cycle.expected_content_length = len(message.get("body", b""))  # of this part: more may follow
            await send(message)

        await app(scope, receive, write)

    return ask


class AnswerTransport:
    """What uvicorn writes an answer to: lingers where the client may still be sending its body."""

    def __init__(self, protocol: Protocol, cycle: RequestResponseCycle):
        self._protocol, self._cycle = protocol, cycle
        self.write, self.is_closing = protocol.transport.write, protocol.transport.is_closing

    def close(self) -> None:
        if self._cycle.more_body and not self._protocol.transport.is_closing():
            self._protocol.linger()
        else:
            self._protocol.transport.close()


class TlsServer:
    """Listens for TLS connections and admits each before its handshake, which must end within the time for headers.

    Has what uvicorn uses of an asyncio.Server.
    """

    ACCEPTED_AT_ONCE = 100
    PAUSE_SECONDS = 0.5  # when the process can open no more files

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        factory: Callable[[], Protocol],
        listener: socket.socket,
        context: ssl.SSLContext,
    ):
        self._loop, self._factory, self._context = loop, factory, context
        self._handshakes: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.sockets = (listener,)
        self._listen()

    def close(self) -> None:
        self._is_closed = True
        self._loop.remove_reader(self.sockets[0])
        for handshake in self._handshakes:
            handshake.cancel()

    async def wait_closed(self) -> None:
        """uvicorn waits for connections itself."""

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self.sockets[0], self._accept)

    def _accept(self) -> None:
        for _ in range(self.ACCEPTED_AT_ONCE):
            try:
                connection, address = self.sockets[0].accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.warning("no connection accepted for %g s: %s", self.PAUSE_SECONDS, error.strerror)
                self._loop.remove_reader(self.sockets[0])
                self._loop.call_later(self.PAUSE_SECONDS, self._listen)
                return
            protocol = self._factory()
            try:
                protocol.admit(address[0])
            except RefusedRequest as refused:  # an answer is not worth a handshake
                protocol.limits.count_rejection(refused.reason)
                connection.close()
                continue
            task = self._loop.create_task(self._connect(connection, protocol))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _connect(self, connection: socket.socket, protocol: Protocol) -> None:
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context,
                ssl_handshake_timeout=protocol.limits.settings.header_timeout_seconds,
                ssl_shutdown_timeout=LINGER_SECONDS,
            )  # fmt: skip
        except OSError:  # ssl.SSLError and TimeoutError included
            protocol.leave()
            connection.close()


class Loop(uvloop.Loop):
    """uvloop with TlsServer in place of its own TLS servers, which count a connection after its handshake."""

    async def create_server(  # type: ignore[override]
        self, factory: Callable[[], Any], *arguments: Any, sock: socket.socket, ssl: ssl.SSLContext | None, backlog: int
    ) -> Any:
        if ssl is None:
            return await super().create_server(factory, *arguments, sock=sock, backlog=backlog)
        sock.setblocking(False)
        sock.listen(backlog)
        return TlsServer(self, factory, sock, ssl)
