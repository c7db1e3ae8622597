"""Raw HTTP over a socket, for requests that client libraries do not send, and server-sent events."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

DONE = "[DONE]"
PATIENCE = 240.0  # seconds for what happens at once on an idle machine: a little below the suite's timeout of a test


def post(path: str, body: Mapping[str, Any] | bytes, **headers: object) -> bytes:
    """The bytes of a POST request. In header names _ stands for -; Content_Length overrides the true length."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": len(content)}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


@contextlib.contextmanager
def sent(port: int, data: bytes, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    """A connection to 127.0.0.1 after sending `data`; `receive_bytes` sets the size of its receive buffer."""
    with socket.socket() as connection:
        connection.settimeout(PATIENCE)
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.connect(("127.0.0.1", port))
        connection.sendall(data)
        yield connection


def received(connection: socket.socket) -> bytes:
    """Reads until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@contextlib.contextmanager
def answer(connection: socket.socket) -> Iterator[http.client.HTTPResponse]:
    """The response on a connection, with status line and headers already read."""
    response = http.client.HTTPResponse(connection)
    try:
        response.begin()
        yield response
    finally:
        response.close()


def event_data(event: bytes) -> bytes | None:
    """The data of one server-sent event; None if it has none, such as a comment.

    Raises:
        ValueError: unexpected field.
    """
    data = None
    for line in event.strip(b"\n").split(b"\n"):
        field, _, value = line.partition(b":")
        if field == b"data":
            data = value.removeprefix(b" ")
        elif field not in (b"", b"id"):
            raise ValueError(f"unexpected field: {line!r}")
    return data


def events(source: httpx.Response | Iterable[str]) -> Iterator[str]:
    """Yields the data of each server-sent event as soon as it is complete."""
    event: list[str] = []
    for line in source.iter_lines() if hasattr(source, "iter_lines") else source:
        if line := line.rstrip("\n"):
            event.append(line)
        elif event:
            data = event_data("\n".join(event).encode())
            event.clear()
            if data is not None:
                yield data.decode()
    assert not event, f"the stream ends within an event: {event}"


def pieces(source: httpx.Response | Iterable[str]) -> list[dict[str, Any]]:
    """The objects of a whole stream; asserts that it ends with [DONE]."""
    *objects, done = events(source)
    assert done == DONE, done
    return [json.loads(data) for data in objects]


def text_of(pieces: Iterable[dict[str, Any]]) -> str:
    """The text of a /generate stream with one sequence."""
    return "".join(piece.get("text", "") for piece in pieces)
