"""ASGI around the handlers, for middlewares that a LitServe user passes in. Without them, nothing here runs.

A request reaches them after its head was checked and its body is complete, so key, limits and memory are the same as
for any request. The outermost middleware is called as an ASGI application. The innermost one calls `_application`,
which runs the handler with the request as the middlewares have changed it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from service.http.api.errors import ApiError
from service.http.request import Request

logger = logging.getLogger(__name__)

MAX_UNSENT = 4  # messages of an answer that the middlewares have not passed on yet


class Handlers(Protocol):
    """Runs the handlers of requests: the application."""

    tasks: set[Any]

    def run(self, request: Request) -> None:
        """Call the handler of the request's path and method, which may have changed."""

    def end(self, request: Request) -> None:
        """End the request if its handler has not."""


class Middlewares:
    """A chain of ASGI middlewares: classes, or pairs of a class and its options."""

    def __init__(self, handlers: Handlers, middlewares: Iterable[Any]):
        self._handlers = handlers
        self._asgi: ASGIApp = self._application
        for middleware in middlewares:
            kind, options = middleware if isinstance(middleware, tuple) else (middleware, {})
            self._asgi = kind(self._asgi, **options)

    def run(self, request: Request) -> None:
        """Run the chain for a complete request."""
        task = asyncio.get_running_loop().create_task(self._run(Exchange(request)))
        self._handlers.tasks.add(task)
        task.add_done_callback(self._handlers.tasks.discard)

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._asgi(exchange.scope, exchange.receive, exchange.send)
        except Exception:
            if not exchange.has_left:  # without an answer, some middlewares raise
                logger.exception("a middleware failed")
        finally:  # cancelled when the time to drain is over
            if not exchange.is_finished:
                exchange.fail()
            self._handlers.end(exchange.request)

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["chargpt.exchange"]
        await exchange.pass_on(scope, receive)
        self._handlers.run(exchange.request)
        while (answer := await exchange.next()) is not None:
            await send(answer)


class Exchange:
    """A request for ASGI, and the responder of its handler.

    The handler's answer becomes messages, which pass the middlewares. `send` passes their output to the connection.
    """

    def __init__(self, request: Request):
        assert request.responder is not None
        self.request, self._connection = request, request.responder
        self.is_secure = self._connection.is_secure
        request.responder = self
        self._body: bytes | None = bytes(request.content)
        request.content = bytearray()
        self._left = asyncio.Event()
        self._start: tuple[int, bytes] | None = None  # status and headers, until the answer's first part
        self._has_begun = self.is_finished = self._is_passed_on = (
            False  # the first two concern the answer to the client
        )
        self._messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()  # messages of the handler; None: no more
        self._sent = asyncio.Event()
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.0" if request.is_old else "1.1",
            "method": request.method,
            "scheme": "https" if self.is_secure else "http",
            "path": request.path,
            "raw_path": request.path.encode(),
            "query_string": request.query,
            "root_path": "",
            "headers": request.headers,
            "client": (request.peer, 0),
            "chargpt.exchange": self,
        }

    @property
    def has_left(self) -> bool:
        return self._left.is_set()

    # -- what middlewares see --

    async def receive(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is None:
            await self._left.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            given = [(name.lower(), value) for name, value in message.get("headers", ())]
            own = (b"content-length", b"transfer-encoding")  # set by the connection
            self._start = message["status"], b"".join([b"%b: %b\r\n" % pair for pair in given if pair[0] not in own])
            self.request.status = message["status"]
        elif not (self._left.is_set() or self.is_finished):
            body, is_last, start = message.get("body", b""), not message.get("more_body", False), self._start
            self._start, self.is_finished = None, is_last
            if start is not None and is_last:
                self._connection.respond(*start, body)
                return
            if start is not None:
                self._has_begun = True
                self._connection.begin(*start)
            if body:
                self._connection.write(body)
            if is_last:
                self._connection.finish()
            elif self._connection.is_full:
                await self._connection.drain()

    async def pass_on(self, scope: Scope, receive: Receive) -> None:
        """Take over the request as the middlewares have changed it. Raises RuntimeError: it was passed on already."""
        if self._is_passed_on:
            raise RuntimeError("a middleware has passed the same request on twice")
        self._is_passed_on = True
        request, is_last = self.request, False
        while not is_last:
            message = await receive()
            request.content += message.get("body", b"")
            is_last = not message.get("more_body", False)
        request.method, request.path, request.query = scope["method"], scope["path"], scope["query_string"]
        request.headers = list(scope["headers"])
        request.fields, request.num_body_bytes = dict(request.headers), len(request.content)

    def fail(self) -> None:
        """Answer with an error, or cut off an answer that has begun."""
        if self._has_begun:
            self._connection.abort()
        elif not self._left.is_set():
            self.request.responder = self._connection
            self.request.fail(ApiError(500, "internal error"))

    # -- the responder of the handler --

    async def next(self) -> dict[str, Any] | None:
        message = await self._messages.get()
        self._sent.set()
        return message

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        if status not in (204, 304):
            headers += b"content-length: %d\r\n" % len(body)
        self.begin(status, headers)
        self.write(body)
        self.finish()

    def begin(self, status: int, headers: bytes) -> None:
        pairs = [tuple(line.split(b": ", 1)) for line in headers.split(b"\r\n")[:-1]]
        self._messages.put_nowait({"type": "http.response.start", "status": status, "headers": pairs})

    def write(self, data: bytes) -> None:
        self._messages.put_nowait({"type": "http.response.body", "body": data, "more_body": True})

    def finish(self) -> None:
        self._messages.put_nowait({"type": "http.response.body", "body": b""})
        self._messages.put_nowait(None)

    @property
    def is_full(self) -> bool:
        return self._messages.qsize() > MAX_UNSENT

    async def drain(self) -> None:
        while self.is_full and not self._left.is_set():
            self._sent.clear()
            await self._sent.wait()

    def abort(self) -> None:
        self._connection.abort()

    def client_left(self) -> None:
        self._left.set()
        self._messages.put_nowait(None)
        self._sent.set()
