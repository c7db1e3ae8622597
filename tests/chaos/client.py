"""An HTTP client on raw sockets: many at once, each from an address of its own, that wait, leave or stop reading.

The service takes each 127.0.0.x for another client. Times are by time.monotonic(), which all processes share.
"""

from __future__ import annotations

import asyncio
import gc
import http.client
import io
import itertools
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

from tests.toolbox.http import DONE, events, post, text_of
from tests.toolbox.launch import ROOT

HANG_SECONDS = 60.0  # without an end: the request hangs
PROBE_SECONDS = 15.0  # the same of a probe
CROWDS = 4  # processes, each with an address of its own
OWN, OTHER = "127.0.0.1", "127.0.0.2"  # the client whose requests run, and another one
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


@dataclass
class Reply:
    """What came back on one connection."""

    began_at: float  # before connecting
    sent_at: float | None = None  # None: no connection
    first_at: float | None = None  # the first byte after the headers
    ended_at: float = 0.0
    data: bytes = b""
    failure: str = ""  # "hang" or "cut" (connection refused, reset, or closed too soon), or the client "left"

    @cached_property
    def _parsed(self) -> tuple[int | None, bytes, bool]:
        """Status, body, and whether that is whole."""
        received: Any = SimpleNamespace(makefile=lambda mode: io.BytesIO(self.data))  # enough of a socket
        response = http.client.HTTPResponse(received)
        try:
            response.begin()
        except (http.client.HTTPException, OSError):
            return None, b"", False
        try:
            return response.status, response.read(), True
        except http.client.IncompleteRead as error:
            return response.status, error.partial, False

    @property
    def status(self) -> int | None:
        return self._parsed[0]

    @property
    def body(self) -> bytes:
        return self._parsed[1]

    @property
    def is_whole(self) -> bool:
        return self._parsed[2]

    @property
    def pieces(self) -> list[dict[str, Any]]:
        """The objects of a stream that is whole."""
        return [json.loads(data) for data in events(self.body.decode().split("\n")) if data != DONE]

    @cached_property
    def ending(self) -> str:
        """complete, error (a status or an event says so), cut, hang or left."""
        status, body, is_whole = self._parsed
        if self.failure or status is None or not is_whole:
            return self.failure or "cut"
        if status != 200:
            return "error"
        if not body.startswith(b"data:"):
            return "complete"
        if not body.endswith(b"\n\n"):
            return "cut"
        if any("error" in piece for piece in self.pieces):
            return "error"
        return "complete" if body.endswith(b"data: [DONE]\n\n") else "cut"

    @property
    def text(self) -> str:
        """Of /generate with one sequence, streamed or not."""
        if self.body.startswith(b"data:"):
            return text_of(self.pieces)
        return json.loads(self.body)["choices"][0]["text"]

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at


def has_body(data: bytes) -> bool:
    """Whether more than the headers has arrived."""
    return bool(data.partition(b"\r\n\r\n")[2])


async def ask(
    port: int,
    body: Mapping[str, Any] | bytes,
    *,
    path: str = "/generate",
    source: str = OWN,
    patience: float = HANG_SECONDS,
    leave_after: int | None = None,
) -> Reply:
    """One request on a connection of its own.

    leave_after: bytes of the answer after which the client leaves.
    """
    request = post(path, body, Connection="close")
    reply, parts = Reply(time.monotonic()), []
    try:
        async with asyncio.timeout(patience):
            reader, writer = await asyncio.open_connection(OWN, port, local_addr=(source, 0))
            try:
                reply.sent_at = time.monotonic()
                writer.write(request)
                size = 0
                while chunk := await reader.read(1 << 18):
                    parts.append(chunk)
                    size += len(chunk)
                    if reply.first_at is None and has_body(chunk if len(parts) == 1 else b"".join(parts)):
                        reply.first_at = time.monotonic()
                    if leave_after is not None and size >= leave_after:
                        reply.failure = "left"
                        break
            finally:
                writer.transport.abort()
    except TimeoutError:
        reply.failure = "hang"
    except OSError:
        reply.failure = "cut"
    reply.ended_at = time.monotonic()
    reply.data = b"".join(parts)
    return reply


# Clients in processes of their own


class Member:
    """A process with the client `role` of MEMBERS, which says when it is ready and gives its results at the end."""

    def __init__(self, role: str, **plan: object):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.client", role, json.dumps(plan)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def tell(self) -> None:
        """To a crowd: begin. To a probe: end."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def results(self) -> list[Any]:
        return json.loads(self._process.communicate()[0])

    def kill(self) -> None:
        self._process.kill()


class Wait(NamedTuple):
    """One request of a probe."""

    sent_at: float
    seconds: float | None  # from connecting to the first byte after the headers; None: there was none
    status: int


class Probe:
    """A small client in a process of its own, which sends the same request again and again.

    interval: seconds between two, unless an answer takes longer. `waits` are known at the end of the `with` statement.
    """

    def __init__(self, port: int, request: bytes = LIVEZ, source: str = "127.0.0.99", interval: float = 0.02):
        self.plan = {"port": port, "source": source, "interval": interval, "request": request.decode("latin-1")}
        self.waits: list[Wait] = []

    def __enter__(self) -> Self:
        self._member = Member("probe", **self.plan)
        self._member.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self._member.tell()
        self.waits = [Wait(*wait) for wait in self._member.results()]

    @property
    def seconds(self) -> list[float]:
        """Of answered requests."""
        return [wait.seconds for wait in self.waits if wait.seconds is not None]

    @property
    def unanswered(self) -> int:
        return sum(wait.seconds is None for wait in self.waits)


def wait(port: int, source: str, request: bytes) -> Wait:
    sent_at, data, first_at = time.monotonic(), b"", None
    with socket.socket() as connection:
        connection.settimeout(PROBE_SECONDS)
        connection.bind((source, 0))
        try:
            connection.connect((OWN, port))
            connection.sendall(request)
            while chunk := connection.recv(1 << 16):
                data += chunk
                if first_at is None and has_body(data):
                    first_at = time.monotonic()
        except OSError:
            pass
    status = int(data[9:12]) if data.startswith(b"HTTP/1.1 ") else 0
    return Wait(sent_at, None if first_at is None else first_at - sent_at, status)


def probe(port: int, source: str, interval: float, request: str) -> list[Wait]:
    print("ready", flush=True)
    waits, due = [], time.monotonic()
    while not select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
        waits.append(wait(port, source, request.encode("latin-1")))
        due = max(due + interval, time.monotonic())
    return waits


def crowd(port: int, body: dict[str, Any], count: int, connects_first: bool, patience: float) -> list[list[Any]]:
    """`count` requests at once from CROWDS processes: [began, sent, first, ended, status, ending] of each."""
    plan = {"port": port, "body": body, "count": count // CROWDS, "connects_first": connects_first}
    members = [Member("crowd", **plan, patience=patience, source=f"127.0.1.{i + 1}") for i in range(CROWDS)]
    try:
        for member in members:
            member.wait_until_ready()
        for member in members:
            member.tell()
        with ThreadPoolExecutor(CROWDS) as pool:
            return list(itertools.chain(*pool.map(Member.results, members)))
    finally:
        for member in members:
            member.kill()


def ask_all(
    port: int, body: dict[str, Any], count: int, source: str, patience: float, connects_first: bool
) -> list[tuple[Any, ...]]:
    """The part of a crowd that is one process. Without asyncio, which takes longer for a request than the service."""
    request, poller = post("/generate", body, Connection="close"), select.epoll()
    waiting: dict[int, tuple[socket.socket, Reply]] = {}
    replies: list[Reply] = []

    def connect() -> None:
        connection = socket.socket()
        connection.setblocking(False)
        connection.bind((source, 0))
        replies.append(Reply(time.monotonic()))
        connection.connect_ex((OWN, port))
        waiting[connection.fileno()] = connection, replies[-1]
        poller.register(connection, select.EPOLLOUT)

    def end(file: int, failure: str = "") -> None:
        connection, reply = waiting.pop(file)
        reply.ended_at, reply.failure = time.monotonic(), failure
        connection.close()

    def go_on(file: int) -> None:
        connection, reply = waiting[file]
        try:
            if reply.sent_at is None:
                connection.send(request)
                reply.sent_at = time.monotonic()
                poller.modify(connection, select.EPOLLIN)
                return
            data = connection.recv(1 << 18)
        except OSError:
            end(file, "cut")
            return
        reply.data += data
        if reply.first_at is None and has_body(reply.data):
            reply.first_at = time.monotonic()
        if not data:
            end(file)

    gc.disable()
    if connects_first:
        for _ in range(count):
            connect()
    print("ready", flush=True)
    sys.stdin.readline()
    until = time.monotonic() + patience
    for _ in range(0 if connects_first else count):
        connect()
    while waiting and time.monotonic() < until:
        for file, _ in poller.poll(1.0):
            go_on(file)
    for file in list(waiting):
        end(file, "hang")
    return [(r.began_at, r.sent_at, r.first_at, r.ended_at, r.status, r.ending) for r in replies]


MEMBERS = {"probe": probe, "crowd": ask_all}

if __name__ == "__main__":
    print(json.dumps(MEMBERS[sys.argv[1]](**json.loads(sys.argv[2]))))
