"""Parses the requests of a connection, one at a time, with httptools and within the limits of a head.

This module knows nothing about sockets, routes or time. Section numbers without a name are those of RFC 9112.
"""

from __future__ import annotations

import re
import time
from typing import Any
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url

from service.http.api.errors import ApiError, RefusedRequest, shortened
from service.http.request import Headers, Request

MAX_HEADERS = 100
PIECE_BYTES = 4096  # parsed at a time outside a body of known length, so that limits are checked early
BLANK_LINE = b"\r\n\r\n"  # ends each head and each chunked body; httptools accepts no other line ends
# Section 3. httptools also accepts several spaces, bare CRs before the line, and RTSP and ICE.
LINE_BREAKS = re.compile(rb"(?:\r\n)*")  # may stand before a request line (section 2.2)
REQUEST_LINE = re.compile(rb"[!-~]+ [^ \r\n]+ HTTP/[0-9]\.[0-9]\r\n")
HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?")  # RFC 3986, 3.2.2


def _malformed(status: int, message: str) -> RefusedRequest:
    return RefusedRequest(ApiError(status, message, code="invalid_http"), "malformed")


class RequestParser:
    """Parses one request at a time.

    `request` is the request whose head has arrived. Its owner sets it to None when it is complete, before more is fed.
    """

    def __init__(self, max_header_bytes: int, peer: str):
        self._max_header_bytes, self._peer = max_header_bytes, peer
        self.request: Request | None = None
        self.is_begun = False  # True from the first byte of a head to its end
        # The limited part: a head with line breaks before it, a chunk's line, or the trailers.
        self._head_bytes = 0
        self._in_head = True
        self._progressed = False  # True: such a part ended in the current piece
        self._unread_bytes = 0  # left of a body of known length
        self._tail = b""  # the end of the last piece, in which a blank line may have begun
        self._line = b""  # the beginning of a head, until its request line is complete
        self._has_line = False
        self._url = b""
        self._headers: Headers = []
        # After a request with Upgrade, httptools treats the connection as another protocol and skips the body. The
        # upgrade is ignored (RFC 9110, 7.8), so another parser continues, which gets only the body.
        self._skips_end = self._is_resuming = False
        self._parser: Any = HttpRequestParser(self)

    def close(self) -> None:
        """Break reference cycles. Nothing may be fed afterwards."""
        self._parser = self.request = None

    @property
    def has_bytes(self) -> bool:
        """True if part of the next head has arrived, or line breaks before it."""
        return self._head_bytes > 0

    def feed(self, data: bytes, start: int) -> int:
        """Parse a piece in which at most one request ends, and return the position of its end.

        Raises RefusedRequest: the request is malformed or too large, and the connection cannot continue.
        """
        end = self._piece(data, start)
        self._progressed, piece = False, data[start:end]
        if not self._has_line:
            self._line += piece
            self._line = self._line[LINE_BREAKS.match(self._line).end() :]  # type: ignore[union-attr]  # matches ""
            if b"\n" in piece and REQUEST_LINE.match(self._line):
                self._line, self._has_line = b"", True
        try:
            self._parser.feed_data(piece)
        except HttpParserUpgrade as upgrade:
            end = start + upgrade.args[0]
            self._ignore_upgrade()
        except HttpParserError as error:
            raise _refusal(error) from None
        if self._in_head:
            self._head_bytes = 0 if self._progressed else self._head_bytes + end - start
            if self._head_bytes >= self._max_header_bytes:
                raise self._too_large()
        return end

    def _piece(self, data: bytes, start: int) -> int:
        """Return the end of the next piece of `data`: the end of the body, or the first blank line."""
        size = len(data)
        if self._unread_bytes:
            end = min(size, start + self._unread_bytes)
            self._unread_bytes -= end - start
            self._tail = b""
            return end
        end = min(size, start + PIECE_BYTES)
        if self._in_head:
            end = min(end, start + self._max_header_bytes - self._head_bytes)
        tail = self._tail
        straddling = (tail + data[start : start + 3]).find(BLANK_LINE) if tail else -1
        if straddling >= 0:
            end = start + straddling + len(BLANK_LINE) - len(tail)
        else:
            begin = start if self._has_line else LINE_BREAKS.match(data, start, end).end()  # type: ignore[union-attr]
            blank = data.find(BLANK_LINE, begin, end)
            if blank >= 0:
                end = blank + len(BLANK_LINE)
        self._tail = b"" if straddling >= 0 or data[end - 4 : end] == BLANK_LINE else (tail + data[start:end])[-3:]
        return end

    def _ignore_upgrade(self) -> None:
        assert self.request is not None
        framing = [it for it in self.request.headers if it[0] in (b"content-length", b"transfer-encoding")]
        self._parser = HttpRequestParser(self)
        self._is_resuming = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join([b"%b: %b\r\n" % it for it in framing]))
        self._is_resuming = False
        self._headers = []

    # -- called by httptools --

    def on_message_begin(self) -> None:
        if self._is_resuming:
            return
        if self.request is not None:
            raise _malformed(400, "the request is not valid HTTP: a line must end with CR LF")
        self.is_begun = True
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        if self._is_resuming:
            return
        parser, headers = self._parser, self._headers
        if len(headers) > MAX_HEADERS:
            message = f"a request must have at most {MAX_HEADERS} headers, got {len(headers)}"
            raise RefusedRequest(ApiError(431, message, code="headers_too_large"), "headers_too_large")
        version, method = parser.get_http_version(), parser.get_method().decode("ascii")
        if version not in ("1.1", "1.0"):
            raise RefusedRequest(ApiError(505, f"HTTP/{version} is not served, only 1.1 and 1.0"), "malformed")
        if not self._has_line:
            raise _malformed(400, "a request line must be METHOD TARGET HTTP/1.1, with single spaces")
        if method == "CONNECT":
            raise _malformed(501, "CONNECT is not served: this is not a proxy")
        path, query = _split(self._url, method)
        request = Request(method, path, query, headers, self._peer, time.monotonic())
        request.is_old = version == "1.0"
        request.closes = request.is_old or not parser.should_keep_alive()
        _check_host(request)
        self._in_head = self.is_begun = False
        if b"transfer-encoding" in request.fields:
            _check_coding(request)
            self._end_part()  # the next part is a chunk's line with its extensions
        else:
            self._unread_bytes = int(request.fields.get(b"content-length", b"0"))
        self._headers = []  # collects the trailers, which are dropped
        self._skips_end = parser.should_upgrade()
        self.request = request

    def on_body(self, body: bytes) -> None:
        self._in_head = False
        request = self.request
        assert request is not None
        request.num_body_bytes += len(body)
        if request.keeps_body:
            request.content += body  # one buffer, because small pieces take ten times their size

    def on_message_complete(self) -> None:
        if self._skips_end:
            self._skips_end = False
            return
        self._end_part()
        self._has_line = False
        assert self.request is not None
        self.request.is_complete = True

    def _end_part(self) -> None:
        """Begin the next part of limited length."""
        self._in_head = self._progressed = True
        self._head_bytes = 0

    on_chunk_header = on_chunk_complete = _end_part

    # -- refusing --

    def _too_large(self) -> RefusedRequest:
        limit = self._max_header_bytes
        is_url = self.is_begun and len(self._url) > limit // 2
        message = f"request line and headers must have at most {limit} bytes"
        return RefusedRequest(ApiError(414 if is_url else 431, message, code="headers_too_large"), "headers_too_large")


def _refusal(error: HttpParserError) -> RefusedRequest:
    """Return the refusal for an error of httptools, or for one that httptools passes on."""
    cause = error.__context__
    if isinstance(cause, RefusedRequest):
        return RefusedRequest(cause.error, cause.reason)  # a new one: a frame with its own error is a cycle
    reason = "invalid request target" if cause is not None else error
    return _malformed(400, f"the request is not valid HTTP: {reason}")


def _split(target: bytes, method: str) -> tuple[str, bytes]:
    """Return the path and the query."""
    if target == b"*" and method == "OPTIONS":  # asks about the whole server (section 3.2.4)
        return "*", b""
    url = parse_url(target)
    path = (url.path or b"/").decode("ascii")
    if not path.startswith("/"):  # such as * with another method
        raise _malformed(400, "the request is not valid HTTP: invalid request target")
    return unquote(path) if "%" in path else path, url.query or b""


def _check_host(request: Request) -> None:
    """Raises RefusedRequest: not exactly one valid Host (section 3.2)."""
    host, fields = request.fields.get(b"host"), request.fields
    count = 1 if len(fields) == len(request.headers) else sum([name == b"host" for name, _ in request.headers])
    if host is None and request.is_old:
        return
    if host is None or count > 1:
        raise _malformed(400, f"a request must have one Host header, got {0 if host is None else count}")
    if HOST.fullmatch(host) is None:
        raise _malformed(400, f"Host must be a name or an address, and may have a port, got {shortened(host)}")


def _check_coding(request: Request) -> None:
    """Raises RefusedRequest: Transfer-Encoding is not `chunked` alone (sections 6.1 and 6.3)."""
    given = b",".join([value for name, value in request.headers if name == b"transfer-encoding"])
    codings = [coding.strip(b" \t").lower() for coding in given.split(b",")]
    if request.is_old:
        raise _malformed(400, "HTTP/1.0 has no Transfer-Encoding")
    if codings != [b"chunked"]:  # 501: the end of the body is known, but its coding is not
        status = 501 if codings[-1] == b"chunked" else 400
        raise _malformed(status, f"Transfer-Encoding must be chunked, got {shortened(given.decode('latin-1'))}")
