"""One HTTP/1.1 connection: heads and bodies as they arrive, pipelining, answers, and all time limits.

httptools parses; uvicorn owns the listening sockets and the loop, and this class is its protocol. What is refused here
never reaches a route, and is answered with the body of every other error. RFC 9112 is what the section numbers mean.
"""

from __future__ import annotations

import asyncio
import functools
import http
import logging
import math
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url
from uvicorn.config import Config
from uvicorn.server import ServerState

from service.http.api.errors import ApiError
from service.http.connection.limits import LINGER_SECONDS, Connections, RefusedRequest
from service.http.engine.client_limits import network_of
from service.http.request import CLOSE, JSON, Headers, Request, header_lines

if TYPE_CHECKING:
    from service.http.app import App
    from service.http.connection.asgi import Wrapped

logger = logging.getLogger(__name__)

MAX_HEADERS = 100
MAX_PIPELINED = 16
PIECE_BYTES = 4096  # fed to the parser at once, so that the limits are checked before much is parsed
MAX_QUEUED_BYTES = 1 << 16  # of bodies behind the current request
LINGER_BYTES = 4 << 20


class Connection(asyncio.Protocol):
    """One connection, and the responder of the request that it answers.

    One `deadline` at a time ends it, whatever it waits for; Connections.sweep looks at it. Times are by
    time.monotonic().
    """

    def __init__(
        self,
        limits: Connections,
        app: App | Wrapped,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any] | None = None,
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        self.limits, self.app, self.settings = limits, app, limits.settings
        app.tasks = server_state.tasks  # uvicorn cancels what still runs when the time to drain is over
        self._server, self._idle_seconds = server_state, config.timeout_keep_alive
        self._grace_seconds = config.timeout_graceful_shutdown or 1
        self._loop = _loop or asyncio.get_running_loop()
        self._admission: tuple[int, int] | None = None  # None: not admitted
        self.peer = ""
        self.is_secure = False
        self.transport: asyncio.Transport
        self.deadline = time.monotonic() + self.settings.header_timeout_seconds
        # Reading. Trailers of a chunked body, and line breaks between requests, count as a head too.
        self._parser: HttpRequestParser | None = None
        self._in_head = True
        self._is_begun = False  # a request whose headers are not complete
        self._began_in_piece = False
        self._head_bytes = 0
        self._url = b""
        self._headers: Headers = []
        self._reading: Request | None = None  # whose body arrives
        self._parsed: deque[Request] = deque()  # behind the current one
        self._unparsed = b""  # read, but to be parsed when pipelined requests have been answered, or in a later turn
        self._is_held = False  # reading stops until then
        self._is_waiting = False  # for its turn
        # Answering.
        self.current: Request | None = None
        self._is_advancing = False
        self._keeps_alive = True  # after the current request
        self._is_chunked = self._has_begun = False  # the current answer
        self._drained: asyncio.Future[None] | None = None
        self.is_full = False  # the client does not read what was written
        # Ending.
        self._has_closed = False  # after the last answer
        self._is_ending = False  # uvicorn shuts down
        self._refusal: ApiError | None = None
        self._is_lingering = False
        self._discarded_bytes = 0

    # -- the connection --

    def admit(self, address: str) -> None:
        """Raises RefusedRequest: there are too many connections."""
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
        self._parser = HttpRequestParser(self)
        # A request may follow one that asks to close, in a pipeline: it is read, and not answered.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        peer = transport.get_extra_info("peername")
        if isinstance(peer, (tuple, list)) and len(peer) >= 2:
            self.peer = str(peer[0])
        if self._admission is None:  # otherwise TlsServer has admitted it
            if not self.peer:  # gone already
                transport.abort()
                return
            try:
                self.admit(self.peer)
            except RefusedRequest as refused:
                self._refuse(refused.error, refused.reason)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self.limits.every.discard(self)
        self.leave()
        if self._is_lingering:
            self.limits.num_lingering -= 1
            self._is_lingering = False
        self._parser = self._reading = None
        self._parsed.clear()
        self._unparsed, self._headers = b"", []
        self._end_current()
        self.resume_writing()

    def _end_current(self) -> None:
        """The current request's answer reaches nobody any more."""
        request, self.current = self.current, None
        if request is not None and not request.is_gone:
            request.left()

    def abort(self) -> None:
        """Close at once, whatever the client has still to read."""
        self.transport.abort()
        self._end_current()
        self.resume_writing()

    def shutdown(self) -> None:
        """uvicorn shuts down."""
        self._is_ending = True
        request = self.current
        if request is None:
            self.transport.close()
            self.deadline = time.monotonic() + 0.25 * self._grace_seconds  # until the client has read its answer
        elif not request.is_running:  # its body is awaited
            request.fail(ApiError(503, "server has shut down", code="shutting_down"))
            self.app.end(request)
        else:
            # Well before uvicorn cancels what still runs, on a busy machine too.
            self.deadline = min(self.deadline, time.monotonic() + 0.25 * self._grace_seconds)

    # -- time --

    def expire(self, now: float) -> None:
        """`deadline` has passed."""
        request = self.current
        if self.transport.is_closing():  # the client has not read its answer
            self.deadline = math.inf
            self.transport.abort()
        elif self._is_lingering:
            self.transport.abort()
        elif self._is_ending:
            if self.is_full:  # the client reads nothing of what it was sent
                self.deadline = math.inf
                self.abort()
        elif request is not None:
            self.deadline = math.inf
            self.app.expire(request)
        elif self._reading is not None or not (self._is_begun or self._awaits_first):  # idle
            self._close()
        elif not self._head_bytes and not self._is_begun:  # nothing has come
            self.limits.count_rejection("header_timeout")
            self.transport.close()
        else:
            message = f"headers not received within {self.settings.header_timeout_seconds:g} s"
            self._refuse(ApiError(408, message, code="header_timeout"), "header_timeout")

    _awaits_first = True  # nothing was answered yet

    def _close(self) -> None:
        if self.transport.get_write_buffer_size():  # close() would wait for the client to read
            self.transport.abort()
        else:
            self.transport.close()

    # -- reading --

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self._is_lingering:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > LINGER_BYTES:
                self.transport.abort()
        elif self._is_held or self._is_waiting:
            self._unparsed += data
            if len(self._unparsed) > MAX_QUEUED_BYTES:
                self._hold()
        elif data.startswith(b"POST ") and self.limits.must_wait(self, self._loop):
            self._unparsed, self._is_waiting = data, True
            if self.current is None:
                self.deadline = math.inf
        else:
            self._parse(data)

    @property
    def _is_closing(self) -> bool:
        """Nothing more is answered."""
        return self._has_closed or self._is_lingering or self.transport.is_closing()

    def take_turn(self) -> None:
        """Parse what had to wait."""
        self._is_waiting = False
        data, self._unparsed = self._unparsed, b""
        self._release()
        if not self._is_closing:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        position, size, parser = 0, len(data), self._parser
        limit = self.settings.max_header_bytes
        while position < size and parser is not None:
            length = size - position
            if length > PIECE_BYTES:
                length = PIECE_BYTES
            if self._in_head and length > limit - self._head_bytes:
                length = limit - self._head_bytes
            self._began_in_piece = False
            try:
                parser.feed_data(data if length == size else data[position : position + length])
            except HttpParserUpgrade as upgrade:  # not supported, so ignored, as RFC 9110 has it
                length = upgrade.args[0]
            except HttpParserError as error:
                self._refuse_malformed(error)
                return
            position += length
            if self._in_head and not self._began_in_piece:
                self._head_bytes += length
                if self._head_bytes >= limit:
                    self._refuse_too_large()
                    return
            if self._parsed or (self.current is not None and not self.current.is_running):
                self._advance()
                if self._refusal is not None or self._is_closing:
                    return
            if self._parsed and (
                len(self._parsed) >= MAX_PIPELINED or sum(it.num_body_bytes for it in self._parsed) > MAX_QUEUED_BYTES
            ):
                self._unparsed = data[position:]
                self._hold()
                return

    def _hold(self) -> None:
        if not self._is_held:
            self._is_held = True
            self.transport.pause_reading()

    def _release(self) -> None:
        if self._is_held:
            self._is_held = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._is_begun = True
        self._url, self._headers = b"", []
        if self.current is None:
            self.deadline = time.monotonic() + self.settings.header_timeout_seconds

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        headers, parser = self._headers, self._parser
        assert parser is not None
        if len(headers) > MAX_HEADERS:
            message = f"a request must have at most {MAX_HEADERS} headers, got {len(headers)}"
            raise RefusedRequest(ApiError(431, message, code="headers_too_large"), "headers_too_large")
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise RefusedRequest(ApiError(505, f"HTTP/{version} is not served, only 1.1 and 1.0"), "malformed")
        path, query = _split(self._url) if len(self._url) > MAX_KNOWN_TARGET or b"?" in self._url else _known(self._url)
        now = time.monotonic()
        request = Request(parser.get_method().decode("ascii"), path, query, headers, self.peer, now)
        fields = request.fields
        has_host = b"host" in fields
        if (not has_host and version == "1.1") or len(fields) < len(headers):
            hosts = sum([name == b"host" for name, _ in headers])
            if hosts > 1 or (not has_host and version == "1.1"):
                raise RefusedRequest(ApiError(400, f"a request must have one Host header, got {hosts}"), "malformed")
        request.is_old = version == "1.0"
        request.closes = request.is_old or not parser.should_keep_alive()
        self._headers = []  # takes the trailers, which would otherwise join the headers
        self._in_head = self._is_begun = False
        if b"transfer-encoding" in fields:
            self._expect_head()  # a chunk's line, with its extensions
        self._reading = request
        self._parsed.append(request)

    def on_body(self, body: bytes) -> None:
        self._in_head = False
        request = self._reading
        if request is not None and not request.is_ended:
            request.num_body_bytes += len(body)
            request.content += body  # not kept piece by piece: a small one takes ten times its size

    def on_message_complete(self) -> None:
        self._expect_head()
        if self._reading is not None:
            self._reading.is_complete = True
            self._reading = None

    def _expect_head(self) -> None:
        self._in_head = self._began_in_piece = True
        self._head_bytes = 0

    on_chunk_header = on_chunk_complete = _expect_head  # the trailers, or the next chunk's line

    # -- from one request to the next --

    def _advance(self) -> None:
        """Hand what has arrived to the application."""
        if self._is_advancing:  # an answer at once ends in here
            return
        self._is_advancing = True
        try:
            while True:
                request = self.current
                if request is None:
                    if not self._parsed or self._is_closing:
                        break
                    request = self.current = self._parsed.popleft()
                    request.responder = self
                    self._keeps_alive, self._has_begun = not request.closes, False
                    self.deadline = time.monotonic() + self.settings.body_timeout_seconds
                    self.app.begin(request)
                    expects_more = self.current is request and not (request.is_running or request.is_complete)
                    is_asked = request.fields.get(b"expect", b"").lower() == b"100-continue" and not request.is_old
                    if expects_more and is_asked:
                        self.limits.write(self.transport, b"HTTP/1.1 100 Continue\r\n\r\n")
                if request is self.current and not request.is_running:
                    self.app.receive(request)
                if request is self.current:
                    break
        finally:
            self._is_advancing = False
        if self.current is not None and self.current.is_running:
            self.deadline = self.current.deadline
        elif self.current is None and self._refusal is not None and not self._is_closing:
            self._write_refusal(self._refusal)

    def _answered(self) -> None:
        """The current answer is complete."""
        request, self.current = self.current, None
        assert request is not None
        request.responder = None
        self._server.total_requests += 1
        self._awaits_first = False
        if not self._keeps_alive or self._is_ending:
            if not request.is_complete and not self.transport.is_closing():
                self.linger()
            else:
                self._has_closed = True
                self.limits.close(self.transport)
                self.deadline = time.monotonic() + self._idle_seconds  # until the client has read the answer
            return
        self.deadline = time.monotonic() + (
            self.settings.header_timeout_seconds if self._is_begun else self._idle_seconds
        )
        if self._parsed or self._refusal is not None:
            self._advance()
        has_room = not self._parsed and self.current is None and self._refusal is None
        if self._is_held and has_room and not self._is_waiting:
            self.take_turn()

    # -- answering --

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """A whole answer; `headers` lack its length."""
        request = self.current
        assert request is not None
        data = self._head(status, headers)
        if status < 200 or status in (204, 304):
            data += b"\r\n"
        else:
            shown = b"" if request.method == "HEAD" else body
            data = b"%bcontent-length: %d\r\n\r\n%b" % (data, len(body), shown)
        if not self.transport.is_closing():
            self.limits.write(self.transport, data)
        self._answered()

    def begin(self, status: int, headers: bytes) -> None:
        """An answer of unknown length; parts follow."""
        request = self.current
        assert request is not None
        self._is_chunked = not request.is_old
        if not self._is_chunked:  # section 6.1: a body of unknown length ends with the connection
            self._keeps_alive = False
        head = self._head(status, headers)  # goes out with the first part
        self._begun_head = head + (b"transfer-encoding: chunked\r\n\r\n" if self._is_chunked else b"\r\n")

    _begun_head = b""

    def write(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        head, self._begun_head = self._begun_head, b""
        if self._is_chunked:
            data = b"%b%x\r\n%b\r\n" % (head, len(data), data)
        elif head:
            data = head + data
        self.limits.write(self.transport, data)

    def finish(self) -> None:
        if not self.transport.is_closing():
            head, self._begun_head = self._begun_head, b""
            if self._is_chunked or head:
                self.limits.write(self.transport, head + (b"0\r\n\r\n" if self._is_chunked else b""))
        self._answered()

    def _head(self, status: int, headers: bytes) -> bytes:
        request = self.current
        assert request is not None
        self._has_begun = True
        if CLOSE in headers:
            self._keeps_alive = False
        elif not self._keeps_alive or self._is_ending or request.is_old:
            headers += CLOSE
        return _STATUS_LINES[status] + self.limits.default_headers(self._server) + headers

    async def drain(self) -> None:
        """Return once the client has read most of what was written, or has left."""
        if self.is_full and not self.transport.is_closing():
            self._drained = self._loop.create_future()
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

    # -- refusing --

    def _refuse_too_large(self) -> None:
        limit = self.settings.max_header_bytes
        is_url = self._is_begun and len(self._url) > limit // 2
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
        if self._is_closing:
            return
        self.limits.count_rejection(reason)
        logger.debug("refused: %s", error.message)
        self._unparsed, self._refusal = b"", error
        if self._parsed and not self._parsed[-1].is_complete:  # the request that is at fault
            self._parsed.pop()
        self._advance()  # what came before
        request = self.current
        if request is None:
            if not self._is_closing:
                self._write_refusal(error)
        elif request is self._reading:  # the current one is at fault
            has_begun = self._has_begun
            self._end_current()
            if has_begun:
                self.transport.abort()
            else:
                self._write_refusal(error)
        else:
            self._hold()

    def _write_refusal(self, error: ApiError) -> None:
        own = {"Content-Length": len(error.body), "X-Request-Id": os.urandom(16).hex()} | error.headers
        self.limits.write(
            self.transport, _STATUS_LINES[error.status] + JSON + CLOSE + header_lines(own) + b"\r\n" + error.body
        )
        self.linger()

    def linger(self) -> None:
        """Close after LINGER_SECONDS: closing while data arrives would send a reset, and the client lose the answer."""
        self.deadline = time.monotonic() + LINGER_SECONDS
        self.limits.flush(self.transport)
        if self.is_secure or self.limits.num_lingering >= self.limits.LINGERING:
            self.transport.close()
            return
        self.limits.num_lingering += 1
        self._is_lingering = True
        self.transport.write_eof()
        self._release()


_STATUS_LINES = {it.value: f"HTTP/1.1 {it.value} {it.phrase}\r\n".encode() for it in http.HTTPStatus}


def _split(target: bytes) -> tuple[str, bytes]:
    """The path and the query."""
    url = parse_url(target)
    path = (url.path or b"/").decode("ascii")
    return unquote(path) if "%" in path else path, url.query or b""


_known = functools.lru_cache(maxsize=64)(_split)  # not with a query, which may contain a prompt
MAX_KNOWN_TARGET = 100
