"""One HTTP/1.1 connection: its requests one after the other, their answers, and all time limits.

parser.py parses. uvicorn owns the listening sockets and the event loop, and this class is its protocol. A request that
is refused here never reaches a route. Its error has the same body as every other error. Section numbers are those of
RFC 9112.

One rule bounds the memory and the time that a client can take. A connection begins at most one request in a turn of the
event loop, and parses for at most PARSE_SECONDS in it. It begins no request until the last answer is written and the
write buffer is below its high-water mark. Later bytes stay in the socket.
"""

from __future__ import annotations

import asyncio
import http
import logging
import math
import os
import time
from typing import TYPE_CHECKING, Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from service.http.api.errors import ApiError, RefusedRequest
from service.http.connection.limits import LINGER_SECONDS, ConnectionLimits
from service.http.connection.parser import RequestParser
from service.http.engine.client_limits import network_of
from service.http.request import CLOSE, JSON, Request, header_lines

if TYPE_CHECKING:
    from service.http.app import App

logger = logging.getLogger(__name__)

PARSE_SECONDS = 0.0005
MAX_UNPARSED_BYTES = 1 << 16  # unparsed bytes beyond which reading stops
LINGER_BYTES = 4 << 20
TLS_KEPT_BYTES = 1 << 16  # a TLS connection ends after a larger body or answer, as its buffers would stay that large


class Connection(asyncio.Protocol):
    """One connection, and the responder of its current request. Times are by time.monotonic()."""

    def __init__(
        self,
        limits: ConnectionLimits,
        app: App,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any] | None = None,
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        self.limits, self.app, self.settings = limits, app, limits.settings
        app.tasks = server_state.tasks  # uvicorn cancels the rest when the time to drain is over
        self._server, self._idle_seconds = server_state, config.timeout_keep_alive
        self._grace_seconds = config.timeout_graceful_shutdown or 1
        self._admission: tuple[int, int] | None = None  # None: not admitted
        self.peer = ""
        self.is_secure = False
        self.transport: asyncio.Transport
        self._own_deadline = time.monotonic() + self.settings.header_timeout_seconds  # while there is no request
        self._is_first = True  # True until the first answer
        # Reading.
        self._parser: RequestParser
        self._unparsed, self._position = b"", 0  # read bytes, parsed up to the position
        self._in_line = False  # True: waits for its turn
        self._is_paused = False  # True: reading is paused
        # Answering.
        self.current: Request | None = None
        self._keeps_alive = True  # False: closes after the current request
        self._has_begun = self._is_chunked = False  # state of the current answer
        self._has_body = True
        self._begun_head = b""  # head of an answer that waits for its first part
        self._drained: asyncio.Future[None] | None = None
        self.is_full = False
        # Ending.
        self._is_ending = False  # True: uvicorn shuts down
        self._is_lingering = False
        self._discarded_bytes = 0

    # -- the connection --

    def admit(self, address: str) -> None:
        """Count the connection. Raises RefusedRequest: there are too many."""
        self._admission = self.limits.admit(network_of(address) or "unknown")

    def leave(self) -> None:
        if self._admission is not None:
            self.limits.leave(self._admission)
            self._admission = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._server.connections.add(self)  # type: ignore[arg-type]  # uvicorn calls `shutdown`
        self.limits.every.add(self)
        self.is_secure = transport.get_extra_info("sslcontext") is not None
        peer = transport.get_extra_info("peername")
        if isinstance(peer, (tuple, list)) and len(peer) >= 2:
            self.peer = str(peer[0])
        self._parser = RequestParser(self.settings.max_header_bytes, self.peer)
        if self._admission is None:  # TlsServer has admitted the others
            if not self.peer:  # the client has left already
                transport.abort()
                return
            try:
                self.admit(self.peer)
            except RefusedRequest as refused:
                self._refuse(refused)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self.limits.every.discard(self)
        self.leave()
        if self._is_lingering:
            self.limits.num_lingering -= 1
            self._is_lingering = False
        self._parser.close()
        self._unparsed = b""
        self._lose_current()
        self.resume_writing()

    def _lose_current(self) -> None:
        """End the current request, because nobody can receive its answer."""
        request, self.current = self.current, None
        if request is not None and not request.is_gone:
            request.left()

    def abort(self) -> None:
        """Close at once, without sending the rest of the write buffer."""
        self.transport.abort()
        self._lose_current()
        self.resume_writing()

    def shutdown(self) -> None:
        """End the connection soon, because uvicorn shuts down."""
        self._is_ending = True
        request, soon = self.current, time.monotonic() + 0.25 * self._grace_seconds
        if request is None:
            self.transport.close()
            self._own_deadline = soon  # limit for the client to read its answer
        elif not request.is_running:  # its body is incomplete
            request.fail(ApiError(503, "server has shut down", code="shutting_down"))
            self.app.end(request)
        else:  # well before uvicorn cancels the request, even on a busy machine
            request.deadline = min(request.deadline, soon)

    # -- time --

    @property
    def deadline(self) -> float:
        """When the connection ends, whatever it waits for: bytes, the end of a request, or a client that reads."""
        if self.current is not None:
            return self.current.deadline
        return math.inf if self._in_line else self._own_deadline

    def expire(self, now: float) -> None:
        """End whatever has passed `deadline`."""
        request, self._own_deadline = self.current, math.inf
        if request is not None:
            request.deadline = math.inf
        if self.transport.is_closing() or self._is_lingering:  # the client has not read its answer
            self.transport.abort()
        elif self._is_ending:  # uvicorn cancels the request
            if self.is_full:  # the client does not read
                self.abort()
        elif request is not None:
            self.app.expire(request)
        elif self._parser.is_begun or (self._is_first and self._parser.has_bytes):
            message = f"headers not received within {self.settings.header_timeout_seconds:g} s"
            self._refuse(RefusedRequest(ApiError(408, message, code="header_timeout"), "header_timeout"))
        elif self._is_first:  # nothing has arrived
            self.limits.count_rejection("header_timeout")
            self.transport.close()
        elif self.transport.get_write_buffer_size():  # close() would wait for the client to read
            self.transport.abort()
        else:
            self.transport.close()

    # -- reading --

    def data_received(self, data: bytes) -> None:
        if self._is_lingering or self.transport.is_closing():
            self._discarded_bytes += len(data)
            if self._discarded_bytes > LINGER_BYTES:
                self.transport.abort()
            return
        if self._position < len(self._unparsed):
            data = self._unparsed[self._position :] + data
        self._unparsed, self._position = data, 0
        self._go_on()

    @property
    def _may_parse(self) -> bool:
        """True while the current request's body is incomplete, or the next request may begin."""
        if self._is_lingering or self.transport.is_closing():
            return False
        request = self.current
        return not self.is_full if request is None else not request.is_complete

    def _go_on(self) -> None:
        """Ask for a turn if there are unparsed bytes. Pause reading while there are too many."""
        num_unparsed = len(self._unparsed) - self._position
        if num_unparsed and not self._in_line and self._may_parse:
            self._in_line = True
            self.limits.turns.add(self)
        pauses = num_unparsed > MAX_UNPARSED_BYTES
        if pauses != self._is_paused and not self.transport.is_closing():
            self._is_paused = pauses
            if pauses:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def take_turn(self) -> None:
        """Parse until a request is complete or PARSE_SECONDS have passed, and pass the request on."""
        self._in_line = False
        if not self._may_parse:
            return
        data, parser = self._unparsed, self._parser
        until, was_begun = time.monotonic() + PARSE_SECONDS, parser.is_begun
        while self._position < len(data) and self._may_parse:
            try:
                self._position = parser.feed(data, self._position)
            except RefusedRequest as refused:
                self._refuse(refused)
                return
            request = parser.request
            if (request is not None and request.is_complete) or time.monotonic() >= until:
                break
        if self._position == len(data):
            self._unparsed, self._position = b"", 0
        if parser.request is not None:
            self._receive(parser.request)
        elif parser.is_begun and not was_begun:
            self._own_deadline = time.monotonic() + self.settings.header_timeout_seconds
        self._go_on()

    def _receive(self, request: Request) -> None:
        """Pass a request, or more of its body, to the application."""
        if request is not self.current:
            self.current, request.responder = request, self
            self._keeps_alive, self._has_begun = not request.closes, False
            request.deadline = time.monotonic() + self.settings.body_timeout_seconds
            self.app.begin(request)
            is_asked = request.fields.get(b"expect", b"").lower() == b"100-continue" and not request.is_old
            if is_asked and request is self.current and not request.is_complete:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if request.is_complete:
            self._parser.request = None
        if request is self.current:
            self.app.receive(request)

    def _answered(self) -> None:
        """Go on after a complete answer."""
        request, self.current = self.current, None
        assert request is not None
        request.responder = None
        self._server.total_requests += 1
        self._is_first = False
        # Limit for the next request to begin or, if the connection closes, for the client to read the answer.
        self._own_deadline = time.monotonic() + self._idle_seconds
        if not request.is_complete:
            self._linger()
        elif self._is_ending or not self._keeps_alive:
            self.transport.close()
        else:
            self._go_on()

    # -- answering --

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """Send a whole answer. `headers` lack the Content-Length."""
        request = self.current
        assert request is not None
        data = self._head(status, headers, len(body))
        if status < 200 or status in (204, 304):
            data += b"\r\n"
        else:
            shown = b"" if request.method == "HEAD" else body
            data = b"%bcontent-length: %d\r\n\r\n%b" % (data, len(body), shown)
        if not self.transport.is_closing():
            self.transport.write(data)
        self._answered()

    def begin(self, status: int, headers: bytes) -> None:
        """Begin an answer of unknown length."""
        request = self.current
        assert request is not None
        self._has_body = request.method != "HEAD" and status not in (204, 304)
        self._is_chunked = self._has_body and not request.is_old
        if request.is_old:  # section 6.1: a body of unknown length ends with the connection
            self._keeps_alive = False
        # It goes out with the first part. A stream of events counts as small, because its parts are.
        head = self._head(status, headers, 0 if b"text/event-stream" in headers else math.inf)
        self._begun_head = head + (b"transfer-encoding: chunked\r\n\r\n" if self._is_chunked else b"\r\n")

    def write(self, data: bytes) -> None:
        if self.transport.is_closing() or not self._has_body:
            return
        head, self._begun_head = self._begun_head, b""
        if self._is_chunked:
            data = b"%b%x\r\n%b\r\n" % (head, len(data), data)
        elif head:
            data = head + data
        self.transport.write(data)

    def finish(self) -> None:
        if not self.transport.is_closing():
            head, self._begun_head = self._begun_head, b""
            if self._is_chunked or head:
                self.transport.write(head + (b"0\r\n\r\n" if self._is_chunked else b""))
        self._answered()

    def _head(self, status: int, headers: bytes, size: float) -> bytes:
        request = self.current
        assert request is not None
        self._has_begun = True
        if self.is_secure and max(size, request.num_body_bytes) > TLS_KEPT_BYTES:
            self._keeps_alive = False
        if self._is_ending or not request.is_complete or CLOSE in headers:
            self._keeps_alive = False
        if not self._keeps_alive and CLOSE not in headers:
            headers += CLOSE
        return _status_line(status) + self.limits.default_headers(self._server) + headers

    async def drain(self) -> None:
        """Return when the write buffer is below its high-water mark or the client has left."""
        if self.is_full and not self.transport.is_closing():
            self._drained = asyncio.get_running_loop().create_future()
            try:
                await self._drained
            finally:
                self._drained = None

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._go_on()

    def client_left(self) -> None:
        """Do nothing, because the connection itself has told the request."""

    # -- refusing --

    def _refuse(self, refused: RefusedRequest) -> None:
        """Answer with an error and close, because the beginning of the next request is unknown."""
        error, has_begun = refused.error, self.current is not None and self._has_begun
        self.limits.count_rejection(refused.reason)
        logger.debug("refused: %s", error.message)
        self._lose_current()  # its body is malformed
        if has_begun:
            self.transport.abort()
            return
        own = {"Content-Length": len(error.body), "X-Request-Id": os.urandom(16).hex()} | error.headers
        head = _status_line(error.status) + self.limits.default_headers(self._server) + JSON + CLOSE + header_lines(own)
        self.transport.write(head + b"\r\n" + error.body)
        self._linger()

    def _linger(self) -> None:
        """Close after LINGER_SECONDS. Closing while data arrives would send a reset and lose the answer."""
        self._own_deadline = time.monotonic() + LINGER_SECONDS
        self._unparsed, self._position = b"", 0
        if self.is_secure or self.limits.num_lingering >= self.limits.LINGERING:
            self.transport.close()
            return
        self.limits.num_lingering += 1
        self._is_lingering = True
        self.transport.write_eof()
        self._go_on()  # resumes reading


def _status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


_STATUS_LINES = {it.value: f"HTTP/1.1 {it.value} {it.phrase}\r\n".encode() for it in http.HTTPStatus}
