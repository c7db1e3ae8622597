"""uvicorn's HTTP/1.1 connection with a guard, which bounds what one connection may send, hold and begin.

uvicorn parses with httptools, answers, keeps connections open and applies back-pressure. The guard adds:

- Bytes go to the parser in pieces of PIECE_BYTES, and none while a request that has arrived whole is unanswered.
- Heads, trailers and chunk extensions are counted as they arrive. A head has a deadline.
- A client that does not read its answer loses its connection.
- The body behind an offered upgrade is read, because the upgrade is ignored (RFC 9110, 7.8).
- HTTP/1.0 gets no chunks.
- Refusals have the service's error body.

This module knows nothing about routes. What floods of connections take is limited by the proxy in front.
"""

from __future__ import annotations

import asyncio
import http
import logging
import os
from collections.abc import Callable
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from service.http.connection.errors import ApiError, RefusedRequest
from service.http.connection.limits import ConnectionLimits
from service.words import shortened

logger = logging.getLogger(__name__)
_unheard = logging.getLogger(f"{__name__}.uvicorn")  # of uvicorn's requests: the application logs what failed
_unheard.disabled = True

PIECE_BYTES = 1024
MAX_UNREAD_BYTES = 1 << 16  # beyond which the socket is not read
MAX_HEADER_BYTES = 1 << 15  # of a request line and its headers
HEADER_TIMEOUT_SECONDS = 8.0  # for these
MAX_HEADERS = 100  # of a request, and as many trailers
TURN_BYTES = 1 << 15  # parsed in a turn of the loop
MAX_CHUNKS = 64  # of a body, likewise
MAX_BODY_CHUNKS = 1 << 16  # 4 MB in chunks of one byte would take 7 s
MAX_DISCARDED_BYTES = 4 << 20  # of a body that is no longer wanted
LINGER_SECONDS = 1.0
FRAMING = (b"content-length", b"transfer-encoding")


class Flow(FlowControl):
    """uvicorn's flow control of what is written. The connection itself bounds what is read.

    When the application wants more of a body, waiting bytes go to the parser.
    """

    def __init__(self, connection: Connection):
        super().__init__(connection.transport)
        self.connection: Connection | None = connection

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        if self.connection is not None:
            self.connection.go_on()


class Connection(HttpToolsProtocol):
    def __init__(
        self,
        limits: ConnectionLimits,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        super().__init__(config, server_state, app_state, _loop)
        self.logger = _unheard
        self._limits, self._settings = limits, limits.settings
        self._network: str | None = None  # counted in the limits
        self._unread = b""  # arrived, and not given to the parser
        self._is_scheduled = False  # they will be in a later turn of the loop
        self._is_paused = False  # the socket is not read
        self._timer: asyncio.TimerHandle | None = None  # for the head, or for the end of the connection
        self._unread_timer: asyncio.TimerHandle | None = None  # while the client does not read its answer
        self._is_in_head, self._is_in_body = True, False
        self._num_bytes = 0  # of a head, trailers or a chunk's line so far
        self._num_headers = self._num_chunks = self._num_body_chunks = 0
        self._has_progressed = False  # such a part has ended in this piece
        self._discarded_bytes = 0
        self._is_ending = self._is_lingering = False  # refused: what still arrives is discarded
        self._running: RequestResponseCycle | None = None  # the latest cycle that was started
        self._refused: RefusedRequest | None = None  # follows the answers to earlier requests
        # After a request that offers an upgrade, another parser reads its body.
        self._skips_end = self._is_resuming = False

    # -- the connection --

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: Flow = Flow(self)
        try:
            self._network = self._limits.admit(self.client[0] if self.client else "")
        except RefusedRequest as refused:
            self._discarded_bytes = MAX_DISCARDED_BYTES - MAX_UNREAD_BYTES  # there may be many of these
            self._refuse(refused)
            return
        self._set_timer(HEADER_TIMEOUT_SECONDS, self._head_timed_out)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._running is not None:  # uvicorn tells the last request that has arrived
            _disconnect(self._running)
        if self._network is not None:
            self._limits.leave(self._network)
            self._network = None
        if self._is_lingering:
            self._limits.num_lingering -= 1
        self._set_timer()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        self._unread = b""
        self.pipeline.clear()
        self.flow.connection = self.cycle = self._running = None  # type: ignore[assignment]  # reference cycles

    def _set_timer(self, seconds: float = 0.0, callback: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if callback is None else self.loop.call_later(seconds, callback)

    def _head_timed_out(self) -> None:
        if self._num_bytes or self.cycle is not None:
            message = f"headers not received within {HEADER_TIMEOUT_SECONDS:g} s"
            self._refuse(RefusedRequest(ApiError(408, message, code="header_timeout"), "header_timeout"))
        else:  # nothing has arrived
            self._limits.count_rejection("silent")
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """End an idle connection. close() would wait for a client that does not read."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """End the connection after its answer, or now if the client does not read that."""
        if self.flow.write_paused:
            self.transport.abort()
        else:
            super().shutdown()

    # -- reading --

    @property
    def _may_read(self) -> bool:
        """True if the parser may get more: no request that has arrived whole waits for its answer."""
        cycle = self.cycle
        if self.parser is None or self.transport.is_closing() or self.pipeline or self._refused is not None:
            return False
        if cycle is None or cycle.response_complete:
            return not self.flow.write_paused
        return cycle.more_body and len(cycle.body) <= HIGH_WATER_LIMIT

    def data_received(self, data: bytes) -> None:
        if self._is_ending:
            self._discard(len(data))
        else:
            self._unread += data
            self._read()

    def _discard(self, size: int) -> None:
        self._discarded_bytes += size
        if self._discarded_bytes > MAX_DISCARDED_BYTES:
            self.transport.abort()

    def go_on(self) -> None:
        """Read on soon, in a turn of its own."""
        if (self._unread or self._is_paused or self._is_in_head) and not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._read)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(self._settings.idle_connection_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        self.go_on()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():  # after what the client has still to read
            self._set_timer(self._settings.idle_connection_seconds, self.transport.abort)
        elif self._refused is not None:
            self._refuse(self._refused)
        else:
            if self._is_in_head:  # of the next request: it has the deadline of a head instead
                self._unset_keepalive_if_required()
            self.go_on()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _read(self) -> None:
        self._is_scheduled = False
        data, start = self._unread, 0
        try:
            self._num_chunks = 0
            while start < min(len(data), TURN_BYTES) and self._may_read and self._num_chunks < MAX_CHUNKS:
                end = start + min(PIECE_BYTES, MAX_HEADER_BYTES - self._num_bytes)
                start += self._feed(data[start:end])
        except RefusedRequest as refused:
            self._refuse(refused)
            return
        self._unread = data[start:]
        if start >= TURN_BYTES or self._num_chunks >= MAX_CHUNKS:
            self.go_on()
        if self._is_in_head and self._timer is None and self._may_read:
            self._set_timer(HEADER_TIMEOUT_SECONDS, self._head_timed_out)
        self._pause_if_full()

    def _pause_if_full(self) -> None:
        pauses = len(self._unread) > MAX_UNREAD_BYTES
        if pauses != self._is_paused and not self.transport.is_closing():
            self._is_paused = pauses
            if pauses:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _feed(self, piece: bytes) -> int:
        """Parse a piece, and return how much of it was taken. Raises RefusedRequest: the connection cannot go on."""
        self._has_progressed, size = False, len(piece)
        try:
            self.parser.feed_data(piece)
        except HttpParserUpgrade as upgrade:
            size = upgrade.args[0]
            self._ignore_upgrade()
        except HttpParserError as error:
            raise _refusal(error) from None
        self._num_bytes = 0 if self._has_progressed else self._num_bytes + size
        if self._num_bytes >= MAX_HEADER_BYTES:
            status = 414 if self._is_in_head and len(self.url or b"") > self._num_bytes // 2 else 431
            message = f"request line and headers must have at most {MAX_HEADER_BYTES} bytes"
            raise RefusedRequest(ApiError(status, message, code="headers_too_large"), "headers_too_large")
        return size

    def _ignore_upgrade(self) -> None:
        """Read the body with another parser, because httptools takes what follows for another protocol."""
        framing = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] in FRAMING)
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._is_resuming = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
        self._is_resuming = False

    # -- called by httptools --

    def on_message_begin(self) -> None:
        if self._is_resuming:
            return
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._is_in_head = True
        self._num_headers = self._num_body_chunks = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_resuming:
            return
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            message = f"a request must have at most {MAX_HEADERS} headers, got {self._num_headers}"
            raise RefusedRequest(ApiError(431, message, code="headers_too_large"), "headers_too_large")
        if self._is_in_head:
            super().on_header(name, value.strip(b" \t"))
        elif name.lower() in (b"connection", b"proxy-connection"):  # httptools would end the connection at these
            raise _malformed(400, f"{name.decode('latin-1')} is not allowed as a trailer")

    def on_headers_complete(self) -> None:
        if self._is_resuming:
            return
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise RefusedRequest(ApiError(505, f"HTTP/{version} is not served, only 1.1 and 1.0"), "malformed")
        _check_head(self.headers, version)
        if version == "1.0":  # it has no status 100
            self.expect_100_continue = False
        self._progressed()
        self._is_in_head, self._num_headers = False, 0
        self._discarded_bytes = 0
        self._set_timer()
        self._skips_end = self.parser.should_upgrade()
        if (target := parse_url(self.url)).path is None:  # http://host?query
            self.url = b"/?" + (target.query or b"")
        super().on_headers_complete()
        self._is_in_body = True
        if version == "1.0":
            _send_without_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._progressed()
        super().on_body(body)
        if self.cycle.response_complete:
            self._discard(len(body))

    def on_message_complete(self) -> None:
        if self._skips_end:
            self._skips_end = False
            return
        self._progressed()
        self._is_in_body = False
        super().on_message_complete()

    def _progressed(self) -> None:
        self._has_progressed = True

    on_chunk_header = _progressed

    def on_chunk_complete(self) -> None:
        self._progressed()
        self._num_chunks += 1
        self._num_body_chunks += 1
        if self._num_body_chunks > MAX_BODY_CHUNKS:
            message = f"a body must have at most {MAX_BODY_CHUNKS} chunks, got more"
            raise RefusedRequest(ApiError(413, message, code="body_too_large"), "malformed")

    # -- refusing --

    def _refuse(self, refused: RefusedRequest) -> None:
        """Answer with an error and close, because the beginning of the next request is unknown.

        The connection closes LINGER_SECONDS later, unless many others do. A close while data arrives would send a
        reset, and lose the answer.
        """
        self._unread, error, running = b"", refused.error, self._running
        self._pause_if_full()
        if running is not None and not running.response_complete:
            if running is not self.cycle or not self._is_in_body:  # it has arrived whole
                self._refused = refused
                return
            _disconnect(running)
        self._limits.count_rejection(refused.reason)
        logger.debug("refused: %s", error.message)
        self._is_ending = True
        if running is not None and running.response_started and self._is_in_body:  # it has its answer, or part of one
            self.transport.abort()
            return
        phrase = http.HTTPStatus(error.status).phrase
        headers = {
            "Content-Type": "application/json",
            "Content-Length": len(error.body),
            "X-Request-Id": os.urandom(16).hex(),
            "Connection": "close",
            **error.headers,
        }
        lines = [f"HTTP/1.1 {error.status} {phrase}", *(f"{name.lower()}: {value}" for name, value in headers.items())]
        default = b"".join(b"%b: %b\r\n" % header for header in self.server_state.default_headers)
        self.transport.write("\r\n".join(lines).encode() + b"\r\n" + default + b"\r\n" + error.body)
        if self.transport.can_write_eof() and self._limits.num_lingering < self._limits.LINGERING:
            self._is_lingering = True
            self._limits.num_lingering += 1
            self.transport.write_eof()
            self._set_timer(LINGER_SECONDS, self.transport.abort)
        else:
            self.transport.close()
            self._set_timer(self._settings.idle_connection_seconds, self.transport.abort)


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """End an answer of unknown length with the connection, as HTTP/1.0 has no chunks (RFC 9112, 6.1)."""
    send, is_sized = cycle.send, True

    async def send_old(message: Any) -> None:
        nonlocal is_sized
        if message["type"] == "http.response.start":
            is_sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not is_sized:
                cycle.chunked_encoding = False
        elif not is_sized:  # uvicorn counts what is still to come
            cycle.expected_content_length = len(message.get("body", b"")) + message.get("more_body", False)
        await send(message)

    cycle.send = send_old  # type: ignore[method-assign]


def _disconnect(cycle: RequestResponseCycle) -> None:
    cycle.disconnected = True
    cycle.waiting_for_100_continue = False  # nothing more may be written
    cycle.message_event.set()


def _check_head(headers: list[tuple[bytes, bytes]], version: str) -> None:
    """Raises RefusedRequest: not one Host (RFC 9112, 3.2), or a Transfer-Encoding but `chunked` alone (6.1, 6.3)."""
    num_hosts = sum([name == b"host" for name, _ in headers])
    if num_hosts != 1 and (num_hosts or version != "1.0"):
        raise _malformed(400, f"a request must have one Host header, got {num_hosts}")
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and version == "1.0":
        raise _malformed(400, "HTTP/1.0 has no Transfer-Encoding")
    if codings and codings != [b"chunked"]:
        given = shortened(b", ".join(codings).decode("latin-1"))
        raise _malformed(501, f"Transfer-Encoding must be chunked, got {given}")


def _malformed(status: int, message: str) -> RefusedRequest:
    return RefusedRequest(ApiError(status, message, code="invalid_http"), "malformed")


def _refusal(error: HttpParserError) -> RefusedRequest:
    """Return the refusal for an error of httptools, or the one that httptools passes on."""
    cause = error.__context__
    if isinstance(cause, RefusedRequest):
        return RefusedRequest(cause.error, cause.reason)  # a new one: a frame with its own error is a cycle
    status = 505 if "version" in str(error) else 400
    reason = "invalid request target" if cause is not None else error
    return _malformed(status, f"the request is not valid HTTP: {reason}")
