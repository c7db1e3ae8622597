"""The load generator of benchmarks, load sweep, chaos and the tests of deploy/: raw sockets and epoll in one thread.

Takes some 10 µs of CPU time per answer. Supports the HTTP/1.1 that the measured servers use: keep-alive, Content-Length
and chunked bodies. Parses nothing while it measures; bodies are decoded afterwards (`dechunked`). Times are those of
time.monotonic, which all processes share.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.toolbox.http import DONE, events, text_of
from tests.toolbox.http import post as post

EVENT = b'"text":'  # occurs once per event of the service's streams, and not after the last
END = b"0\r\n\r\n"  # end of a chunked body
RECEIVE_BYTES = 1 << 18
Due = tuple[float, bytes, Any]  # when, in seconds from the start; the request; its identification
Requests = Callable[[], Iterable[Due]]  # can be pickled


class LoadError(RuntimeError):
    """A server did not answer as expected."""


@dataclass(slots=True)
class Reply:
    """One response. Bytes and events are those within the measurement."""

    asked: Any  # from `requests`, identifies the request
    began_at: float  # before connecting, if the request has a connection of its own
    sent_at: float
    first_at: float | None = None  # time of the first event; in a body without events, of its first byte
    ended_at: float | None = None  # None: unfinished
    num_bytes: int = 0
    num_events: int = 0
    parts: list[tuple[float, bytes]] = field(default_factory=list)  # (time, data) of each read, if kept
    head: bytes = b""
    failure: str = ""  # why there is no whole answer: cut, hang or left
    is_chunked: bool = True

    @property
    def status(self) -> int:
        """0: there was no head."""
        return int(self.head[9:12] or 0)

    @property
    def body(self) -> bytes:
        """What was kept of the body: of a chunked one the whole chunks."""
        return b"".join(data for _, data in (dechunked(self.parts) if self.is_chunked else self.parts))

    @property
    def ending(self) -> str:
        """complete, error (a status or an event says so), cut, hang or left."""
        if self.failure or self.ended_at is None:
            return self.failure or "hang"
        if self.status != 200:
            return "error"
        if not (body := self.body).startswith(b"data:"):
            return "complete"
        if not body.endswith(b"\n\n"):
            return "cut"
        *pieces, last = events(body.decode().split("\n"))
        if any("error" in json.loads(piece) for piece in (*pieces, last) if piece != DONE):
            return "error"
        return "complete" if last == DONE else "cut"

    @property
    def seconds(self) -> float:
        assert self.ended_at is not None
        return self.ended_at - self.began_at

    @property
    def text(self) -> str:
        """Of /generate with one sequence, streamed or not."""
        body = self.body.decode()
        if body.startswith("data:"):
            return text_of(json.loads(data) for data in events(body.split("\n")) if data != DONE)
        return json.loads(body)["choices"][0]["text"]


@dataclass
class Outcome:
    """Result of a run of the load generator."""

    seconds: float
    cpu_seconds: float  # of the load generator itself
    replies: list[Reply]  # in order of sending
    started_at: float = 0.0  # a request's `when` is relative to it

    @property
    def ended(self) -> list[Reply]:
        return [reply for reply in self.replies if reply.ended_at is not None]

    @property
    def num_events(self) -> int:
        return sum(reply.num_events for reply in self.replies)

    @property
    def times_to_first(self) -> list[float]:
        return [reply.first_at - reply.sent_at for reply in self.replies if reply.first_at is not None]


class Reader:
    """Takes in the bytes of one response, as they come, for its `reply`."""

    __slots__ = ("_head", "_rest", "_tail", "accepts", "closes", "keep", "marker", "reply")

    def __init__(self, reply: Reply, marker: bytes = EVENT, keep: bool = False, accepts: Collection[int] | None = None):
        self.reply, self.marker, self.keep, self.accepts = reply, marker, keep, accepts
        self.closes = False  # the server announced that it closes the connection after this response
        self._head = b""  # incomplete
        self._rest = -1  # remaining bytes of the body; -1: chunked
        self._tail = b""

    def feed(self, data: bytes) -> bool:
        """True at the end of the response.

        Raises:
            LoadError: there is no more data, or its status is not accepted.
        """
        now, reply = time.monotonic(), self.reply
        if not data:
            raise LoadError(f"the server closed a connection after {reply.num_bytes} bytes of {reply.asked}")
        reply.num_bytes += len(data)
        if not reply.head:
            if self._head:
                data = self._head + data
            head, separator, body = data.partition(b"\r\n\r\n")
            if not separator:
                self._head = data
                return False
            reply.head = head
            if self.accepts is not None and int(head[9:12]) not in self.accepts:
                raise LoadError(f"{reply.asked} was answered {data[:500]!r}")
            lower = head.lower()
            self.closes = b"\r\nconnection: close" in lower
            at = lower.find(b"\r\ncontent-length:")
            if at >= 0:
                self._rest = int(head[at + 17 :].partition(b"\r\n")[0])
                reply.is_chunked = False
            data = body
        if self.keep:
            reply.parts.append((now, data))
        if self._rest >= 0:
            if reply.first_at is None and data:
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


class _Client:
    """A connection with one request at a time."""

    __slots__ = ("address", "is_stale", "num_asked", "opened_at", "port", "reader", "request", "sock")

    def __init__(self, port: int, address: str):
        self.port, self.address = port, address
        self.reader: Reader | None = None  # None: idle
        self.request = b""

    def connect(self, *, waits: bool) -> None:
        self.sock = socket.socket()
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.bind((self.address, 0))
        self.sock.setblocking(waits)
        (self.sock.connect if waits else self.sock.connect_ex)(("127.0.0.1", self.port))
        self.sock.setblocking(False)
        self.num_asked, self.opened_at = 0, time.monotonic()  # requests on this connection
        self.is_stale = False  # closed before the server read the request: it had been idle, or as cpp-httplib does

    def is_closed(self) -> bool:
        """Whether the server closed the idle connection."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    def send(self) -> None:
        self.num_asked += 1
        try:
            sent = self.sock.send(self.request)
        except OSError as error:
            raise LoadError(f"no connection: {error}") from None
        if sent != len(self.request):
            raise LoadError(f"a request of {len(self.request)} bytes did not fit the socket")

    def read(self, reader: Reader) -> bool:
        """Read available data; True at the end of the response."""
        try:
            data = self.sock.recv(RECEIVE_BYTES)
        except (ConnectionError, TimeoutError):
            data = b""
        is_used = self.num_asked > 1 or time.monotonic() - self.opened_at > 1
        if not data and is_used and not reader.reply.num_bytes and reader.accepts is not None:
            self.is_stale = True
            return False
        return reader.feed(data)


def run(
    port: int, requests: Iterable[Due], *, connections: int, seconds: float | None = None,
    is_over: Callable[[], bool] | None = None, marker: bytes = EVENT, keep: bool = False, fresh: bool = False,
    accepts: Collection[int] | None = (200,), patience: float = 120.0, address: str = "127.0.0.1",
    replies: list[Reply] | None = None,
) -> Outcome:  # fmt: skip
    """Send requests to a server on 127.0.0.1, at most `connections` at a time.

    requests: sent in order, each at its time or later. Ends when all are answered, or after `seconds`, or when
        `is_over()`, which leaves open requests unfinished.
    fresh: each request has a connection of its own, instead of one that is open already.
    accepts: statuses that are valid. None: whatever comes, and requests that fail have their `failure`.
    patience: seconds without any data after which open requests have failed.
    address: the client's, within 127.0.0.0/8.
    replies: where they are put while they come.

    Raises:
        LoadError: a request failed or has another status.
        OSError: the server cannot be reached.
    """
    selector = selectors.DefaultSelector()
    clients = [_Client(port, address) for _ in range(connections)]
    idle, in_flight = clients[::-1], 0
    replies = [] if replies is None else replies

    def connect(client: _Client) -> None:
        client.connect(waits=not fresh)
        selector.register(client.sock, selectors.EVENT_WRITE if fresh else selectors.EVENT_READ, client)

    def disconnect(client: _Client) -> None:
        selector.unregister(client.sock)
        client.sock.close()

    def ask(client: _Client, now: float) -> None:
        """What is due next."""
        nonlocal upcoming, in_flight
        assert upcoming is not None
        _, client.request, asked = upcoming
        reply = Reply(asked, now, now)
        replies.append(reply)
        client.reader = Reader(reply, marker, keep, accepts)
        if fresh:
            connect(client)
        else:
            client.send()
        in_flight += 1
        upcoming = next(queue, None)

    def end(client: _Client, reader: Reader, failure: str = "") -> None:
        """Of a request that has ended."""
        nonlocal in_flight
        client.reader, reply = None, reader.reply
        in_flight -= 1
        if failure:
            reply.failure, reply.ended_at = failure, time.monotonic()
        assert reply.ended_at is not None
        if fresh or failure or reader.closes:  # cpp-httplib does after 100 requests
            disconnect(client)
            if upcoming is None:  # nothing is asked any more
                return
            if not fresh:
                connect(client)
        if upcoming is not None and upcoming[0] <= reply.ended_at - started:
            ask(client, reply.ended_at)
        else:
            idle.append(client)

    try:
        for client in () if fresh else clients:
            connect(client)
        queue = iter(requests)
        upcoming = next(queue, None)
        cpu_started, started = time.process_time(), time.monotonic()
        while upcoming is not None or in_flight:
            now = time.monotonic() - started
            if (seconds is not None and now >= seconds) or (is_over is not None and is_over()):
                break
            while upcoming is not None and idle and upcoming[0] <= now:
                client = idle.pop()
                if not fresh and client.is_closed():
                    disconnect(client)
                    connect(client)
                ask(client, time.monotonic())
            timeout = patience if seconds is None else min(patience, seconds - now)
            if upcoming is not None and idle:
                timeout = min(timeout, upcoming[0] - now)
            ready = selector.select(timeout if is_over is None else min(timeout, 0.05))
            if not ready and timeout == patience and is_over is None:
                if accepts is not None:
                    raise LoadError(f"no data for {timeout:g} s, with {in_flight} requests in flight")
                for client, reader in [(each, each.reader) for each in clients if each.reader is not None]:
                    end(client, reader, "hang")
            for key, _ in ready:
                client, reader = key.data, key.data.reader
                if reader is None:  # the server closed an idle connection
                    disconnect(client)
                    connect(client)
                    continue
                try:
                    if not client.num_asked:  # a new connection
                        reader.reply.sent_at = time.monotonic()
                        client.send()
                        selector.modify(client.sock, selectors.EVENT_READ, client)
                        continue
                    if not client.read(reader):
                        if client.is_stale:  # ask again on a new connection; the time counts from the first attempt
                            disconnect(client)
                            connect(client)
                            client.send()
                        continue
                except LoadError:
                    if accepts is not None:
                        raise
                    end(client, reader, "cut")
                else:
                    end(client, reader)
        return Outcome(time.monotonic() - started, time.process_time() - cpu_started, replies, started)
    finally:
        for key in list(selector.get_map().values()):
            key.data.sock.close()
        selector.close()


class Apart(contextlib.AbstractContextManager):
    """`run` in a process of its own, ready when this returns, to the end of the `with` statement, which sets `outcome`.

    begin: the event that lets it begin; default: at once.
    drains: requests that are open at the end are awaited, instead of cut off.
    least: so many answers are awaited in any case.
    """

    outcome: Outcome

    def __init__(
        self, port: int, requests: Requests, *, begin: Any = None, drains: bool = False, least: int = 0, **options: Any
    ):
        self._over, (self._results, theirs) = SPAWN.Event(), SPAWN.Pipe(duplex=False)
        arguments = (theirs, begin, self._over, drains, least, port, requests, options)
        self._process = SPAWN.Process(target=_run_apart, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._results.recv()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.outcome = self.wait()

    def wait(self) -> Outcome:
        """Until all requests have ended."""
        outcome = self._results.recv()
        self._process.join()
        return outcome


SPAWN = multiprocessing.get_context("spawn")  # a fork would inherit connections


def _run_apart(
    results: Any, begin: Any, over: Any, drains: bool, least: int, port: int, requests: Requests, options: Any
) -> None:
    replies: list[Reply] = []

    def due() -> Iterator[Due]:
        results.send("ready")
        if begin is not None:
            begin.wait()
        for each in requests():
            if drains and over.is_set():
                return
            yield each

    def is_over() -> bool:
        return over.is_set() and sum(reply.ended_at is not None for reply in replies) >= least

    gc.disable()
    results.send(run(port, due(), is_over=None if drains else is_over, replies=replies, **options))


# Requests


def at_once(request: bytes, count: int, asked: Any = None) -> Iterator[Due]:
    """`count` equal requests, each due at once."""
    return ((0.0, request, asked) for _ in range(count))


def every(interval: float, request: bytes) -> Iterator[Due]:
    """The same request again `interval` seconds after it was sent, and answered."""
    started, due = time.monotonic(), 0.0
    while True:
        yield due, request, None
        due = time.monotonic() - started + interval


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
