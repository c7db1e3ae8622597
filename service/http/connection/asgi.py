"""ASGI around the application, for the middlewares that a LitServe user passes in; without any, nothing here runs.

A connection hands its requests to `Wrapped` in place of App. Once a body is complete, the outermost middleware is
called as an ASGI application; the innermost one calls `_application`, which hands a request of its own on to App. An
Exchange stands at both ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from service.http.api.errors import ApiError
from service.http.app import App
from service.http.request import Request

logger = logging.getLogger(__name__)

MAX_UNSENT = 4  # messages of an answer that middlewares have not passed on


class Wrapped:
    """Has what a connection and a Request use of App."""

    cors, is_leaving = None, False
    tasks: set[Any]  # uvicorn's, as a connection sets it

    def __init__(self, app: App, middlewares: Iterable[Any]):
        self.app = app
        self._asgi: ASGIApp = self._application
        for middleware in middlewares:
            kind, options = middleware if isinstance(middleware, tuple) else (middleware, {})
            self._asgi = kind(self._asgi, **options)

    def begin(self, request: Request) -> None:
        request.app, request.id = self, os.urandom(16).hex()  # type: ignore[assignment]
        self.app.tasks = self.tasks

    def receive(self, request: Request) -> None:
        if request.is_complete or request.num_body_bytes > self.app.settings.max_body_bytes:  # App refuses it then
            request.is_running = True
            exchange = Exchange(request)  # has the body
            request.content, request.is_ended = bytearray(), not request.is_complete  # what still comes is not kept
            request.generations = [exchange]  # type: ignore[list-item]  # aborted when the client leaves
            task = asyncio.get_running_loop().create_task(self._run(exchange))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def expire(self, request: Request) -> None:
        if request.is_running:
            request.drop()
        else:
            request.fail(self.app.too_slow())

    def end(self, request: Request) -> None:
        """The client has left before its body was complete."""

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._asgi(exchange.scope, exchange.receive, exchange.send)
        except Exception:
            logger.exception("a middleware failed")
            if exchange.request.status is None:
                exchange.request.fail(ApiError(500, "internal error"))
        exchange.request.drop()  # if the answer is not complete
        exchange.request.generations.clear()

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["chargpt.exchange"]
        head = scope["method"], scope["path"], scope["query_string"], list(scope["headers"])
        request = Request(*head, (scope.get("client") or ("", 0))[0], time.monotonic())
        request.responder = exchange
        try:
            self.app.begin(request)
            while not (request.is_complete or request.is_ended):
                if (message := await receive())["type"] != "http.request":
                    return
                request.content += message.get("body", b"")
                request.num_body_bytes = len(request.content)
                request.is_complete = not message.get("more_body", False)
                self.app.receive(request)
            while (answer := await exchange.next()) is not None:
                await send(answer)
        finally:
            if not request.is_ended:
                request.left()


class Exchange:
    """A connection's request as ASGI shows it; and the responder of the one that comes out of the middlewares."""

    is_finished = False

    def __init__(self, request: Request):
        self.request = request
        self._body: bytes | None = request.body
        self._left = asyncio.Event()
        self._start: tuple[int, bytes] | None = None  # status and headers, until the answer's first part
        self._messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()  # of the answer; None: it has ended
        self._sent = asyncio.Event()
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.0" if request.is_old else "1.1",
            "method": request.method,
            "scheme": "https" if getattr(request.responder, "is_secure", False) else "http",
            "path": request.path,
            "raw_path": request.path.encode(),
            "query_string": request.query,
            "root_path": "",
            "headers": request.headers,
            "client": (request.peer, 0),
            "chargpt.exchange": self,
        }

    # -- what middlewares see --

    async def receive(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is None:
            await self._left.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Any) -> None:
        responder = self.request.responder
        if message["type"] == "http.response.start":
            given = [(name.lower(), value) for name, value in message.get("headers", ())]
            own = (b"content-length", b"transfer-encoding")  # the connection's
            self._start = message["status"], b"".join([b"%b: %b\r\n" % pair for pair in given if pair[0] not in own])
        elif responder is not None:
            body, is_last, start = message.get("body", b""), not message.get("more_body", False), self._start
            self._start = None
            if start is not None:
                self.request.status = start[0]
            if start is not None and is_last:
                responder.respond(*start, body)
                return
            if start is not None:
                responder.begin(*start)
            if body:
                await self.request.write(body)
            if is_last:
                self.request.finish()

    # -- the responder --

    @property
    def deadline(self) -> float:
        return self.request.deadline

    @deadline.setter
    def deadline(self, at: float) -> None:
        self.request.deadline = at
        if self.request.responder is not None:
            self.request.responder.deadline = at

    async def next(self) -> dict[str, Any] | None:
        message = await self._messages.get()
        self._sent.set()
        return message

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        if status not in (204, 304):
            headers += b"content-length: %d\r\n" % len(body)
        self.begin(status, headers)
        self.finish(body)

    def begin(self, status: int, headers: bytes) -> None:
        pairs = [tuple(line.split(b": ", 1)) for line in headers.split(b"\r\n")[:-1]]
        self._messages.put_nowait({"type": "http.response.start", "status": status, "headers": pairs})

    def write(self, data: bytes) -> None:
        self._messages.put_nowait({"type": "http.response.body", "body": data, "more_body": True})

    def finish(self, data: bytes = b"") -> None:
        self._messages.put_nowait({"type": "http.response.body", "body": data})
        self._messages.put_nowait(None)

    @property
    def is_full(self) -> bool:
        return self._messages.qsize() > MAX_UNSENT

    async def drain(self) -> None:
        while self.is_full:
            self._sent.clear()
            await self._sent.wait()

    def abort(self) -> None:
        """The client has left, or is to be left."""
        self._left.set()
        self._messages.put_nowait(None)
        self._sent.set()
