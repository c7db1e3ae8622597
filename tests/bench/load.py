"""The load generator of the benchmarks and the load sweep: raw sockets and epoll in one thread.

Takes some 13 µs of CPU time per answer. Supports the HTTP/1.1 that the benchmarked servers use: keep-alive,
Content-Length and chunked bodies. Parses nothing while it measures; bodies are decoded afterwards (`dechunked`).
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.toolbox.http import post as post

EVENT = b'"text":'  # occurs once per event of the service's streams, and not after the last
END = b"0\r\n\r\n"  # end of a chunked body
RECEIVE_BYTES = 1 << 18
PATIENCE_SECONDS = 120.0


class LoadError(RuntimeError):
    """A server did not answer as expected."""


@dataclass
class Reply:
    """One response. Times are from time.perf_counter; bytes and events are those within the measurement."""

    asked: Any  # from `requests`, identifies the request
    sent_at: float
    first_at: float | None = None  # time of the first event; in a body without events, of its first byte
    ended_at: float | None = None  # None: unfinished
    num_bytes: int = 0
    num_events: int = 0
    parts: list[tuple[float, bytes]] = field(default_factory=list)  # (time, data) of each read, if kept
    is_refused: bool = False  # status 429
    is_chunked: bool = True

    @property
    def body(self) -> bytes:
        """What was kept of the body: of a chunked one the whole chunks."""
        return b"".join(data for _, data in (dechunked(self.parts) if self.is_chunked else self.parts))


@dataclass
class Outcome:
    """Result of a run of the load generator."""

    seconds: float
    cpu_seconds: float  # of the load generator itself
    replies: list[Reply]  # in order of sending
    started_at: float = 0.0  # from time.perf_counter; a request's `when` is relative to it

    @property
    def ended(self) -> list[Reply]:
        return [reply for reply in self.replies if reply.ended_at is not None]

    @property
    def num_events(self) -> int:
        return sum(reply.num_events for reply in self.replies)

    @property
    def times_to_first(self) -> list[float]:
        return [reply.first_at - reply.sent_at for reply in self.replies if reply.first_at is not None]


class _Client:
    """A connection with one request at a time."""

    def __init__(self, port: int, marker: bytes, keep: bool, refusals: bool, address: str):
        self.port, self.marker, self.keep, self.refusals, self.address = port, marker, keep, refusals, address
        self.reply: Reply | None = None  # None: idle
        self.connect()

    def connect(self) -> None:
        self.sock = socket.create_connection(("127.0.0.1", self.port), source_address=(self.address, 0))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self.is_stale = False  # closed before the server read the request, as cpp-httplib does without notice
        self.num_asked = 0  # requests on this connection
        self.closes = False  # the server announced that it closes the connection after this response

    def is_closed(self) -> bool:
        """Whether the server closed the idle connection."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    def ask(self, request: bytes, asked: Any) -> None:
        self._head = b""  # incomplete header
        self._rest = -1  # remaining bytes of the body; -1: chunked
        self._tail = b""
        self._in_body = False
        self.reply = Reply(asked, time.perf_counter())
        self.request, self.num_asked = request, self.num_asked + 1
        sent = self.sock.send(request)
        if sent != len(request):
            raise LoadError(f"a request of {len(request)} bytes did not fit the socket")

    def read(self) -> bool:
        """Read available data; True at the end of the response."""
        try:
            data = self.sock.recv(RECEIVE_BYTES)
        except ConnectionResetError:
            data = b""
        now = time.perf_counter()
        reply = self.reply
        assert reply is not None
        if not data and not reply.num_bytes and self.num_asked > 1:
            self.is_stale = True
            return False
        if not data:
            raise LoadError(f"the server closed a connection after {reply.num_bytes} bytes of {reply.asked}")
        reply.num_bytes += len(data)
        if not self._in_body:
            data = self._head + data
            head, separator, body = data.partition(b"\r\n\r\n")
            if not separator:
                self._head = data
                return False
            reply.is_refused = self.refusals and head.startswith(b"HTTP/1.1 429")
            if not head.startswith(b"HTTP/1.1 200") and not reply.is_refused:
                raise LoadError(f"{reply.asked} was answered {data[:500]!r}")
            self._in_body = True
            self.closes = b"\r\nconnection: close" in head.lower()
            at = head.lower().find(b"\r\ncontent-length:")
            if at >= 0:
                self._rest = int(head[at + 17 :].partition(b"\r\n")[0])
                reply.is_chunked = False
            data = body
        if self.keep:
            reply.parts.append((now, data))
        if self._rest >= 0:
            if reply.first_at is None and data and not reply.is_refused:
                reply.first_at = now
            self._rest -= len(data)
            done = self._rest == 0
        else:
            seam = self._tail + data
            reply.num_events += seam.count(self.marker)
            if reply.first_at is None and reply.num_events:
                reply.first_at = now
            done = seam.endswith(END)
            # Finds a marker split between two reads, and counts none twice.
            self._tail = seam[-max(len(self.marker) - 1, len(END) - 1) :] if not done else b""
            if self.marker in self._tail:
                self._tail = self._tail[self._tail.rindex(self.marker) + 1 :]
        if done:
            reply.ended_at = now
        return done


def run(
    port: int,
    requests: Iterable[tuple[float, bytes, Any]],
    *,
    connections: int,
    seconds: float | None = None,
    marker: bytes = EVENT,
    keep: bool = False,
    refusals: bool = False,
    address: str = "127.0.0.1",
) -> Outcome:
    """Send requests to a server on 127.0.0.1, at most `connections` at a time.

    requests: (when, bytes, identification), sent in order, each `when` seconds from the start or later. Ends when all
    are answered, or after `seconds`, which leaves open requests unfinished. With `refusals`, status 429 is valid.
    address: the client's, within 127.0.0.0/8.

    Raises:
        LoadError: a connection was closed, a status is not 200, or no data came for PATIENCE_SECONDS.
        OSError: the server cannot be reached.
    """
    selector = selectors.DefaultSelector()
    clients = [_Client(port, marker, keep, refusals, address) for _ in range(connections)]
    for client in clients:
        selector.register(client.sock, selectors.EVENT_READ, client)
    idle, in_flight = clients[::-1], 0
    queue = iter(requests)
    upcoming = next(queue, None)
    replies: list[Reply] = []

    def connect_again(client: _Client) -> None:
        selector.unregister(client.sock)
        client.sock.close()
        client.connect()
        selector.register(client.sock, selectors.EVENT_READ, client)

    def ask(client: _Client, request: bytes, asked: Any) -> None:
        if client.is_closed():
            connect_again(client)
        client.ask(request, asked)
        assert client.reply is not None
        replies.append(client.reply)

    cpu_started, started = time.process_time(), time.perf_counter()
    try:
        while upcoming is not None or in_flight:
            now = time.perf_counter() - started
            if seconds is not None and now >= seconds:
                break
            while upcoming is not None and idle and upcoming[0] <= now:
                ask(idle.pop(), upcoming[1], upcoming[2])
                in_flight += 1
                upcoming = next(queue, None)
            timeout = PATIENCE_SECONDS if seconds is None else min(PATIENCE_SECONDS, seconds - now)
            if upcoming is not None and idle:
                timeout = min(timeout, upcoming[0] - now)
            ready = selector.select(timeout)
            if not ready and timeout == PATIENCE_SECONDS:
                raise LoadError(f"no data for {timeout:g} s, with {in_flight} requests in flight")
            for key, _ in ready:
                client = key.data
                if client.reply is None:  # the server closed an idle connection
                    connect_again(client)
                elif client.read():
                    client.reply = None
                    in_flight -= 1
                    if client.closes:  # cpp-httplib does after 100 requests
                        connect_again(client)
                    if upcoming is not None and upcoming[0] <= time.perf_counter() - started:
                        ask(client, upcoming[1], upcoming[2])
                        in_flight += 1
                        upcoming = next(queue, None)
                    else:
                        idle.append(client)
                elif client.is_stale:  # ask again on a new connection; the time counts from the first attempt
                    reply = client.reply
                    connect_again(client)
                    client.ask(client.request, reply.asked)
                    client.reply = reply
        return Outcome(time.perf_counter() - started, time.process_time() - cpu_started, replies, started)
    finally:
        selector.close()
        for client in clients:
            client.sock.close()


def at_once(request: bytes, count: int, asked: Any = None) -> Iterator[tuple[float, bytes, Any]]:
    """`count` equal requests, each due at once."""
    return ((0.0, request, asked) for _ in range(count))


def dechunked(parts: list[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """The chunks of a chunked body: (time of completion, data)."""
    chunks, unparsed = [], b""
    for at, data in parts:
        unparsed += data
        while True:
            size, newline, rest = unparsed.partition(b"\r\n")
            length = int(size, 16) if newline else 0
            if not newline or len(rest) < length + 2:
                break
            if length:
                chunks.append((at, rest[:length]))
            unparsed = rest[length + 2 :]
    return chunks
