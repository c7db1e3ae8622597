"""A load generator: raw sockets and epoll in one thread, so that what is measured is the server.

    python -m tests.bench.load        its own ceiling, against a server of ready-made bytes

Knows of HTTP/1.1 what the servers of this benchmark speak: kept connections, Content-Length and chunked bodies.
Parses nothing while it measures; what a body means is asked afterwards (`dechunked`).
"""

from __future__ import annotations

import json
import multiprocessing
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.toolbox.http import post as post

EVENT = b'"text":'  # one in each event of a stream of the service, none in what follows the last
END = b"0\r\n\r\n"  # of a chunked body
RECEIVE_BYTES = 1 << 18
PATIENCE_SECONDS = 120.0


class LoadError(RuntimeError):
    """A server did not answer as it should; says how."""


@dataclass
class Reply:
    """One answer. Times are on time.perf_counter; only what came within the measurement is counted."""

    asked: Any  # what `requests` gave beside the bytes
    sent_at: float
    first_at: float | None = None  # when the first event was read, of a body without events its first byte
    ended_at: float | None = None  # None: it was still under way
    num_bytes: int = 0
    num_events: int = 0
    parts: list[tuple[float, bytes]] = field(default_factory=list)  # (time, what was read), if kept
    is_refused: bool = False  # it was answered 429


@dataclass
class Outcome:
    """What a run of the load generator saw."""

    seconds: float
    cpu_seconds: float  # of the load generator itself
    replies: list[Reply]  # in the order in which they were asked
    started_at: float = 0.0  # on time.perf_counter; what `when` of a request counts from

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
    """One connection, one request at a time."""

    def __init__(self, port: int, marker: bytes, keep: bool, refusals: bool):
        self.port, self.marker, self.keep, self.refusals = port, marker, keep, refusals
        self.reply: Reply | None = None  # None: it rests
        self.connect()

    def connect(self) -> None:
        self.sock = socket.create_connection(("127.0.0.1", self.port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)

    def is_closed(self) -> bool:
        """Whether the server has closed the connection while it rested."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    def ask(self, request: bytes, asked: Any) -> None:
        self._head = b""  # until the header is whole
        self._rest = -1  # bytes of the body still to come; -1: chunked
        self._tail = b""
        self._in_body = False
        self.reply = Reply(asked, time.perf_counter())
        sent = self.sock.send(request)
        if sent != len(request):
            raise LoadError(f"a request of {len(request)} bytes did not fit the socket")

    def read(self) -> bool:
        """Take what has come; whether that was the end of the answer."""
        data = self.sock.recv(RECEIVE_BYTES)
        now = time.perf_counter()
        reply = self.reply
        assert reply is not None
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
            at = head.lower().find(b"\r\ncontent-length:")
            if at >= 0:
                self._rest = int(head[at + 17 :].partition(b"\r\n")[0])
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
            # A marker that was cut in two is found with the next part; a whole one is not found again.
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
) -> Outcome:
    """Ask a server on 127.0.0.1, with at most `connections` requests under way.

    requests: (when, bytes, what it is); `when` is the earliest moment in seconds from the beginning, they are asked in
    order. Ends when all are answered, or after `seconds`, which leaves those under way without an end. With `refusals`
    429 is an answer like others.

    Raises:
        LoadError: a connection was closed, an answer is not 200, or nothing came for PATIENCE_SECONDS.
        OSError: the server cannot be reached.
    """
    selector = selectors.DefaultSelector()
    clients = [_Client(port, marker, keep, refusals) for _ in range(connections)]
    for client in clients:
        selector.register(client.sock, selectors.EVENT_READ, client)
    resting, under_way = clients[::-1], 0
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
        while upcoming is not None or under_way:
            now = time.perf_counter() - started
            if seconds is not None and now >= seconds:
                break
            while upcoming is not None and resting and upcoming[0] <= now:
                ask(resting.pop(), upcoming[1], upcoming[2])
                under_way += 1
                upcoming = next(queue, None)
            timeout = PATIENCE_SECONDS if seconds is None else min(PATIENCE_SECONDS, seconds - now)
            if upcoming is not None and resting:
                timeout = min(timeout, upcoming[0] - now)
            ready = selector.select(timeout)
            if not ready and timeout == PATIENCE_SECONDS:
                raise LoadError(f"nothing came for {timeout:g} s, with {under_way} requests under way")
            for key, _ in ready:
                client = key.data
                if client.reply is None:  # the server has closed a connection that rested for too long
                    connect_again(client)
                elif client.read():
                    client.reply = None
                    under_way -= 1
                    if upcoming is not None and upcoming[0] <= time.perf_counter() - started:
                        ask(client, upcoming[1], upcoming[2])
                        under_way += 1
                        upcoming = next(queue, None)
                    else:
                        resting.append(client)
        return Outcome(time.perf_counter() - started, time.process_time() - cpu_started, replies, started)
    finally:
        selector.close()
        for client in clients:
            client.sock.close()


def at_once(request: bytes, count: int, asked: Any = None) -> Iterator[tuple[float, bytes, Any]]:
    """`count` equal requests, each as soon as a connection is free."""
    return ((0.0, request, asked) for _ in range(count))


def dechunked(parts: list[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """The body of a chunked answer without the chunks' lengths: (time at which the chunk was whole, its data)."""
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


# Its own ceiling


def _serve_ready_bytes(listener: socket.socket, answer: bytes) -> None:
    """Answer every read with the same bytes, for ever."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                sock, _ = listener.accept()
                selector.register(sock, selectors.EVENT_READ, sock)
            else:
                try:
                    asked = key.data.recv(1 << 16)
                    key.data.sendall(answer if asked else b"")
                except OSError:  # the client closed it with an answer under way
                    asked = b""
                if not asked:
                    selector.unregister(key.data)
                    key.data.close()


def with_ready_bytes(answer: bytes, use: Callable[[int], Outcome]) -> Outcome:
    """What `use` (of a port) returns beside a server that answers everything with `answer`."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        context = multiprocessing.get_context("fork")
        server = context.Process(target=_serve_ready_bytes, args=(listener, answer), daemon=True)
        server.start()
        try:
            return use(listener.getsockname()[1])
        finally:
            server.kill()
            server.join()


def ceiling(seconds: float = 1.0) -> dict[str, float]:
    """Requests and events a second of this load generator: seen against ready-made bytes, and by its own CPU time.

    The first shares the machine with that server; the second is what a core of its own would give.
    """
    request = post("/generate", {"prompt": "a", "max_tokens": 1})
    body = b'{"id":"0123456789abcdef","choices":[{"index":0,"text":"a","finish_reason":"length"}]}'
    whole = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    outcome = with_ready_bytes(whole, lambda port: run(port, at_once(request, 10**9), connections=32, seconds=seconds))
    figures = {
        "requests_per_second": len(outcome.ended) / outcome.seconds,
        "requests_per_cpu_second": len(outcome.ended) / outcome.cpu_seconds,
    }
    event = b'data: {"index":0,"text":"a","finish_reason":null,"seed":1}\n\n'
    # One event a packet is the dearest: as when a server writes each character by itself.
    stream = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)
    outcome = with_ready_bytes(stream, lambda port: run(port, at_once(request, 10**9), connections=32, seconds=seconds))
    return figures | {
        "events_per_second": outcome.num_events / outcome.seconds,
        "events_per_cpu_second": outcome.num_events / outcome.cpu_seconds,
    }


if __name__ == "__main__":
    print(json.dumps(ceiling(), indent=1))
