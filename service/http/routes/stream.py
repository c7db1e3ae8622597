"""The writing of an answer while its sequences run: whole, or as server-sent events.

This module knows nothing about sockets or the meaning of a request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from service.http.connection.errors import ApiError
from service.http.connection.turns import Pause
from service.http.routes.forms import Form, pieces_of
from service.http.routes.json_parts import escape_breaks
from service.http.routes.request import JSON, NO_STORE, PART_BYTES, Headers, Request
from service.http.schema.answers import Receipt
from service.http.workers.sequences import Generation
from service.text.pieces import Piece

DONE = b"data: [DONE]\n\n"
# A comment without the blank line of an event, because openai-go before 3.43 ends a stream at an empty event.
KEEP_ALIVE = b": keep-alive\n"
KEEP_ALIVE_SECONDS = 15.0  # without an event, until a comment; proxies close a silent connection after 30 s or more
EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "x-accel-buffering": "no",  # otherwise nginx collects events
    **NO_STORE,
}

MAX_HEADER_SEEDS = 128  # more may exceed the header size of proxies and clients
MAX_WHOLE_BYTES = 1 << 18  # an answer of at most this size has a Content-Length, a larger one is sent in chunks

Pieces = Generation | Coroutine[Any, Any, list[Piece]]  # a coroutine: nothing can be written before its end


async def write_whole(request: Request, pieces: Pieces, form: Form) -> None:
    complete = await (pieces.whole() if isinstance(pieces, Generation) else pieces)
    receipt = form.receipt
    headers = receipt_headers(receipt)
    parts = form.whole(complete, receipt)
    if isinstance(parts, bytes):
        await request.respond(parts, JSON | headers)
    else:
        await send_json(request, parts, headers)


def event(json: bytes) -> bytes:
    """Return a server-sent event as one line for every client."""
    return b"data: %b\n\n" % (json if json.isascii() else escape_breaks(json))


class EventStream:
    """A stream of server-sent events, with a comment after each KEEP_ALIVE_SECONDS without one.

    headers: called when the first event or comment is written.
    """

    def __init__(self, request: Request, headers: Callable[[], Headers]):
        self._request, self._headers = request, headers
        self._lock = asyncio.Lock()  # of the answer: an event and a comment may be due together
        self._written_at = time.monotonic()
        self.has_begun = False
        self._comments = asyncio.create_task(self._keep_alive())

    async def write(self, data: bytes, is_last: bool = False) -> None:
        """Write events. Returns when the client has read enough of them."""
        async with self._lock:
            if not self.has_begun:
                await self._request.begin(EVENT_STREAM | self._headers())
                self.has_begun = True  # not before: a comment that waits is cancelled at the end
            await self._request.write(data, is_last)
            self._written_at = time.monotonic()

    async def _keep_alive(self) -> None:
        while True:
            silent = time.monotonic() - self._written_at
            if silent >= KEEP_ALIVE_SECONDS:
                await self.write(KEEP_ALIVE)
            else:
                await asyncio.sleep(KEEP_ALIVE_SECONDS - silent)

    def close(self) -> None:
        self._comments.cancel()
        del self._comments  # a reference cycle


async def write_stream(request: Request, pieces: Pieces, form: Form) -> None:
    """Write server-sent events, closed by DONE. The first piece, or its failure, decides the status."""
    stream = EventStream(request, lambda: receipt_headers(form.receipt))
    try:
        if isinstance(pieces, Generation):
            async for some in pieces.stream():
                await _write_pieces(request, stream, form, some)
        else:
            await _write_pieces(request, stream, form, await pieces)
        end = form.end()
    except ApiError as error:
        if not stream.has_begun:
            raise
        end = error.body
    finally:
        stream.close()
    await stream.write((event(end) if end else b"") + DONE, is_last=True)


async def _write_pieces(request: Request, stream: EventStream, form: Form, pieces: list[Piece]) -> None:
    data, pause = b"", Pause(request.client)
    for piece in pieces:
        for part in pieces_of(piece):
            if part.text or part.finish_reason:
                data += event(form.event(part, piece is pieces[-1]))
            if len(data) >= PART_BYTES:
                await stream.write(data)
                data = b""
            await pause.if_due()
    if data:
        await stream.write(data)


async def send_json(request: Request, parts: Iterable[bytes], headers: Headers | None = None) -> None:
    """Write a whole answer with status 200, until the client leaves.

    A small answer has a Content-Length. A large one is encoded while it is written, in chunks.
    """
    headers = JSON | (headers or {})
    has_begun, body, pause = False, bytearray(), Pause(request.client)
    for part in parts:
        body += part
        if len(body) > (PART_BYTES if has_begun else MAX_WHOLE_BYTES):
            if not has_begun:
                await request.begin(headers)
                has_begun = True
            await request.write(bytes(body))
            body.clear()
        await pause.if_due()
        if request.is_gone:
            return
    if has_begun:
        await request.write(bytes(body), is_last=True)
    else:
        await request.respond(bytes(body), headers)


def receipt_headers(receipt: Receipt) -> Headers:
    digest, backend, dtype, seeds = receipt["checkpoint_sha256"], receipt["backend"], receipt["dtype"], receipt["seeds"]
    headers = {"x-checkpoint": digest, "x-backend": backend, "x-dtype": dtype}
    if 0 < len(seeds) <= MAX_HEADER_SEEDS:
        headers["x-seed"] = ",".join(map(str, seeds))
    return headers
