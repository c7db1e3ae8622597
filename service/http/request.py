"""One HTTP request: its fields, the resources that it holds, and its answer.

A request starts when its head is parsed. It has one owner at a time: the connection while its body arrives, then its
handler. It knows nothing about routes or sockets. A Responder carries the answer, and drops it once the client has
left.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qsl

from service.http.api.errors import ApiError

if TYPE_CHECKING:
    from service.http.engine.lease import Lease
    from service.http.engine.model import Model
    from service.http.engine.sequences import Generation

Headers = list[tuple[bytes, bytes]]

# Headers of answers are lines, ready to be sent, with names in lower case.
JSON = b"content-type: application/json\r\n"
CLOSE = b"connection: close\r\n"
NO_STORE = b"cache-control: no-store\r\n"


UNREAD_SECONDS = 6.0  # to write the rest after the deadline; a lost worker may take 5 of them


class Responder(Protocol):
    """Carries an answer to the client: a connection, or the middlewares in front of it."""

    is_secure: bool

    @property
    def is_full(self) -> bool:
        """True while the write buffer is above its high-water mark."""

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """Send a whole answer. `headers` lack the Content-Length."""

    def begin(self, status: int, headers: bytes) -> None:
        """Begin an answer of unknown length."""

    def write(self, data: bytes) -> None:
        """Send a part of the answer."""

    def finish(self) -> None:
        """End the answer."""

    async def drain(self) -> None:
        """Return when the write buffer is below its high-water mark or the client has left."""

    def abort(self) -> None:
        """Close the connection at once."""

    def client_left(self) -> None:
        """The client has left: nobody reads the answer."""


class Owner(Protocol):
    """Begins and ends requests: the application."""

    def add_headers(self, request: Request, headers: bytes) -> bytes:
        """Return the headers of an answer with the headers that every answer has."""

    def end(self, request: Request) -> None:
        """Release everything that the request holds. Called at least once; later calls have no effect."""


class Request:
    """Times are by time.monotonic()."""

    __slots__ = (
        "owner", "responder", "id", "method", "path", "query", "headers", "fields", "peer", "endpoint", "parameter",
        "started_at", "arrived_at", "deadline", "content", "num_body_bytes", "keeps_body", "is_complete", "is_running",
        "is_ended", "lease", "timeout_seconds", "ignored_fields", "num_prompt_tokens", "generations", "num_answering",
        "future", "client_left", "is_gone", "status", "is_old", "closes", "keep_alive", "written_at",
    )  # fmt: skip

    def __init__(self, method: str, path: str, query: bytes, headers: Headers, peer: str, started_at: float):
        self.method, self.path, self.query, self.headers, self.peer = method, path, query, headers, peer
        self.fields = dict(headers)  # names in lower case; the last of several with one name
        self.started_at = self.arrived_at = started_at  # arrived_at: time when the body was complete
        self.is_old = False  # HTTP/1.0
        self.closes = False  # the connection closes after the answer
        self.owner: Owner
        self.responder: Responder | None = None  # None: it was answered, or the client has left
        self.id = ""
        self.endpoint: Any  # an Endpoint of app.py
        self.parameter = ""  # of the path
        self.deadline = math.inf  # the time when it ends, whatever it waits for
        self.content = bytearray()  # the body as far as it has arrived
        self.num_body_bytes = 0
        self.keeps_body = True  # False: the body is discarded as it arrives
        self.is_complete = False  # the body has arrived
        self.is_running = False  # its handler was called
        self.is_ended = False
        self.lease: Lease  # the resources that it holds
        # Set while it runs.
        self.timeout_seconds: float | None = None  # its own time limit
        self.ignored_fields: list[str] = []  # unknown ones
        self.num_prompt_tokens: int | None = None  # None: it does not run the model
        self.generations: list[Generation] = []
        self.num_answering = 1  # the first ones of these, which give the answer or candidates for it
        self.future: asyncio.Future[Any] | None = None  # the result that a thread computes
        self.client_left = False  # before the answer and its sequences were complete
        self.is_gone = False  # True once the client has left
        self.status: int | None = None  # status of the answer; None: the answer has not begun
        self.keep_alive: Callable[[], None] | None = (
            None  # of a stream: writes a comment that keeps the connection open
        )
        self.written_at: float | None = None  # time of the last write to a stream

    # -- what was asked --

    @property
    def body(self) -> bytes:
        return bytes(self.content).removeprefix(b"\xef\xbb\xbf")  # a file from Windows may begin with it

    @property
    def query_fields(self) -> list[tuple[str, str]]:
        """Raises ApiError: a value is not UTF-8."""
        try:
            return parse_qsl(self.query.decode("latin-1"), keep_blank_values=True, errors="strict")
        except UnicodeDecodeError:
            raise ApiError(400, "the query is not UTF-8") from None

    # -- what is known of it --

    @property
    def client(self) -> str:
        """The client: the name of the API key, or the address."""
        return self.lease.client

    @property
    def model(self) -> Model | None:
        """The model that the request has chosen."""
        return self.lease.model

    @property
    def answering(self) -> list[Generation]:
        """The generations that give the answer."""
        return self.generations[: self.num_answering]

    @property
    def num_completion_tokens(self) -> int:
        return sum([it.num_completion_tokens for it in self.answering])

    @property
    def num_run_characters(self) -> int:
        """Characters of the prompts and completions of all sequences, including those that the client did not get."""
        return sum(
            (0 if it.queue_seconds is None else len(it.submit.prompt)) + it.num_completion_tokens + it.num_unseen
            for generation in self.generations
            for it in generation.sequences
        )

    @property
    def endings(self) -> dict[str, int]:
        """Number of sequences of the answer by finish reason."""
        if len(self.answering) == 1:
            return self.answering[0].endings
        return dict(sum((Counter(it.endings) for it in self.answering), Counter()))

    # -- its end --

    def limit_time(self, seconds: float) -> None:
        """Set the deadline. It includes writing, so a client that does not read loses its connection."""
        self.deadline = self.arrived_at + seconds + UNREAD_SECONDS

    def left(self) -> None:
        """End everything that still runs, because the client has left."""
        if self.responder is not None:
            self.responder.client_left()
        self.responder = None
        self.is_gone = True
        is_running = self.status is None or any(not generation.is_finished for generation in self.generations)
        self.client_left = self.client_left or is_running
        self.abort()
        if not self.is_running:  # its body is not complete
            self.client_left = True
            self.owner.end(self)

    def drop(self) -> None:
        """Close the connection, because the client does not read its answer in time."""
        self.client_left = True
        if self.responder is not None:
            self.responder.abort()  # calls `left`

    def abort(self) -> None:
        for generation in self.generations:
            generation.abort()
        if self.future is not None:
            self.future.cancel()

    # -- its answer --

    def respond(self, body: bytes, headers: bytes = JSON, status: int = 200) -> None:
        """Send a whole answer."""
        responder = self.responder
        if responder is not None:
            self.status = status
            responder.respond(status, self.owner.add_headers(self, headers), body)

    def fail(self, error: ApiError) -> None:
        headers = JSON + header_lines(error.headers)
        if error.status == 401:
            headers += b"www-authenticate: Bearer\r\n"
        self.respond(error.body, headers, error.status)

    def begin(self, headers: bytes, status: int = 200) -> None:
        responder = self.responder
        if responder is not None:
            self.status = status
            responder.begin(status, self.owner.add_headers(self, headers))

    def put(self, data: bytes) -> bool:
        """Send a part. Returns True if the caller must await `drained` before the next part."""
        responder = self.responder
        if responder is None:
            return False
        responder.write(data)
        return responder.is_full

    @property
    def is_full(self) -> bool:
        """True while the client's write buffer is above its high-water mark."""
        return self.responder is not None and self.responder.is_full

    async def drained(self) -> None:
        if self.responder is not None:
            await self.responder.drain()

    async def write(self, data: bytes) -> None:
        """Send a part. Returns when the next part may follow."""
        if self.put(data):
            await self.drained()

    def finish(self, data: bytes = b"") -> None:
        """Send the last part and end the answer."""
        responder = self.responder
        if responder is not None:
            if data:
                responder.write(data)
            responder.finish()


def header_lines(headers: Mapping[str, Any]) -> bytes:
    return "".join([f"{name.lower()}: {value}\r\n" for name, value in headers.items()]).encode()
