"""One HTTP request: its fields, the resources that it holds, and its answer.

A request starts when its head has arrived, and app.py takes it through its steps. It knows nothing about routes. Its
answer goes out through ASGI's `send`, which waits while the client does not read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from service.http.connection.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from service.http.limits.memory import Lease
    from service.http.models.model import Model
    from service.http.workers.sequences import Generation

Headers = dict[str, str]

JSON = {"content-type": "application/json"}
NO_STORE = {"cache-control": "no-store"}
PART_BYTES = 1 << 16  # of an answer, sent at a time
UNREAD_SECONDS = 6.0  # to write the rest after the deadline; a lost worker may take 5 of them


class ClientLeftError(Exception):
    """The client has left: nobody reads the answer."""


class Request:
    """Times are by time.monotonic()."""

    __slots__ = (
        "id", "method", "path", "query", "fields", "route", "is_quiet", "parameter", "started_at", "arrived_at",
        "content", "num_body_bytes", "lease", "timeout_seconds", "priority", "ignored_fields", "num_prompt_tokens",
        "generations", "future", "client_left", "is_gone", "status", "limit", "_receive", "_send",
        "_watch", "__weakref__",
    )  # fmt: skip

    _receive: Receive
    _send: Send

    def __init__(self, id: str, scope: Scope, fields: dict[bytes, bytes]):
        self.id, self.fields = id, fields
        self.method, self.path, self.query = scope["method"], scope["path"], scope["query_string"]
        self._watch: asyncio.Task[None] | None = None
        self.started_at = self.arrived_at = time.monotonic()  # arrived_at: time when the body was complete
        self.route, self.is_quiet = "other", False  # for metrics and the log
        self.parameter = ""  # of the path
        self.content = bytearray()  # the body as far as it has arrived
        self.num_body_bytes = 0
        self.lease: Lease  # the resources that it holds
        self.limit: asyncio.Timeout  # while its handler runs
        # Set while it runs.
        self.timeout_seconds: float | None = None  # its own time limit
        self.priority = 0
        self.ignored_fields: list[str] = []  # unknown ones
        self.num_prompt_tokens: int | None = None  # None: it does not run the model
        self.generations: list[Generation] = []  # the first gives the answer, or candidates for it
        self.future: asyncio.Future[Any] | None = None  # the result that a thread computes
        self.client_left = False  # before the answer and its sequences were complete
        self.is_gone = False  # True once the client has left
        self.status: int | None = None  # status of the answer; None: the answer has not begun

    def use(self, receive: Receive, send: Send) -> None:
        """Receive and answer through these from now on."""
        self._receive, self._send = receive, send

    # -- what was asked --

    @property
    def body(self) -> bytes:
        return bytes(self.content).removeprefix(b"\xef\xbb\xbf")  # a file from Windows may begin with it

    @property
    def query_model(self) -> str | None:
        """The model that the query names. Raises ApiError: 400, the query is not UTF-8."""
        try:
            fields = parse_qsl(self.query.decode("latin-1"), keep_blank_values=True, errors="strict")
        except UnicodeDecodeError:
            raise ApiError(400, "the query is not UTF-8") from None
        return dict(fields).get("model")

    async def receive(self) -> tuple[bytes, bool]:
        """Return the next part of the body, and whether more follows. Raises ClientLeftError."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.left()
            raise ClientLeftError
        return message.get("body", b""), message.get("more_body", False)

    def watch(self) -> None:
        """Notice from now on if the client leaves. The body has arrived."""
        self._watch = asyncio.create_task(self._wait_for_disconnect())

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left()

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
    def num_completion_tokens(self) -> int:
        return self.generations[0].num_completion_tokens if self.generations else 0

    @property
    def num_run_characters(self) -> int:
        """Characters of the prompts and completions of all sequences, including those that the client did not get."""
        return sum(generation.num_run_characters for generation in self.generations)

    @property
    def endings(self) -> dict[str, int]:
        """Number of sequences of the answer by finish reason."""
        return self.generations[0].endings if self.generations else {}

    # -- its end --

    def limit_time(self, seconds: float) -> None:
        """Set the time limit, from the arrival. It includes writing to a client that does not read."""
        passed = time.monotonic() - self.arrived_at
        self.limit.reschedule(asyncio.get_running_loop().time() + seconds + UNREAD_SECONDS - passed)

    def left(self) -> None:
        """End everything that still runs, because the client has left."""
        self.is_gone = True
        is_running = self.status is None or any(not generation.is_finished for generation in self.generations)
        self.client_left = self.client_left or is_running
        self.abort()

    def abort(self) -> None:
        for generation in self.generations:
            generation.abort()
        if self.future is not None:
            self.future.cancel()

    def end(self) -> None:
        """Abort what still runs."""
        if self._watch is not None:
            self._watch.cancel()
        del self._watch, self._receive, self._send  # reference cycles
        self.abort()
        self.content = bytearray()

    # -- its answer --

    async def respond(self, body: bytes, headers: Mapping[str, str] = JSON, status: int = 200) -> None:
        """Send a whole answer."""
        if status not in (204, 304):
            headers = {**headers, "content-length": str(len(body))}
        await self.begin(headers, status)
        for start in range(0, len(body) - PART_BYTES, PART_BYTES):  # what nobody reads is not kept
            await self.write(body[start : start + PART_BYTES])
        await self.write(body[max(0, len(body) - 1) // PART_BYTES * PART_BYTES :], is_last=True)

    async def begin(self, headers: Mapping[str, str], status: int = 200) -> None:
        """Begin an answer. Without a content-length it is sent in chunks."""
        lines = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": lines})
        self.status = status

    async def write(self, data: bytes, is_last: bool = False) -> None:
        """Send a part. Returns when the next part may follow."""
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def fail(self, error: ApiError) -> None:
        headers = {**JSON, **error.headers}
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        await self.respond(error.body, headers, error.status)
