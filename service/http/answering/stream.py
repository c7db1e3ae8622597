"""The writing of an answer while its sequences run: whole, or as server-sent events.

This module knows nothing about sockets or the meaning of a request.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from service.http.answering.forms import Form, pieces_of
from service.http.answering.json_parts import escape_breaks
from service.http.answering.pause import Pause
from service.http.api.answers import Receipt
from service.http.api.errors import ApiError
from service.http.engine.sequences import Generation, Piece
from service.http.request import JSON, NO_STORE, Request, header_lines

DONE = b"data: [DONE]\n\n"
# A comment without the blank line of an event, because openai-go before 3.43 ends a stream at an empty event.
KEEP_ALIVE = b": keep-alive\n"
EVENT_STREAM = (
    b"content-type: text/event-stream; charset=utf-8\r\n%b"
    b"x-accel-buffering: no\r\n" % NO_STORE  # otherwise nginx collects events
)

CHUNK_BYTES = 1 << 16  # written at a time
MAX_HEADER_SEEDS = 128  # more may exceed the header size of proxies and clients
MAX_WHOLE_BYTES = 1 << 18  # an answer of at most this size has a Content-Length, a larger one is sent in chunks

Pieces = Generation | Coroutine[Any, Any, list[Piece]]  # a coroutine: nothing can be written before its end


async def write_whole(request: Request, pieces: Pieces, form: Form) -> None:
    complete = await (pieces.whole() if isinstance(pieces, Generation) else pieces)
    receipt = form.receipt
    headers = receipt_headers(receipt, time.monotonic() - request.arrived_at)
    parts = form.whole(complete, receipt)
    if isinstance(parts, bytes):
        request.respond(parts, JSON + headers)
    else:
        await send_json(request, parts, headers)


def event(json: bytes) -> bytes:
    """Return a server-sent event as one line for every client."""
    return b"data: %b\n\n" % (json if json.isascii() else escape_breaks(json))


async def write_stream(request: Request, pieces: Pieces, form: Form, done: bytes = DONE) -> None:
    """Write server-sent events, closed by `done`. The first piece, or its failure, decides the status."""

    def begin() -> None:
        if request.written_at is None:
            request.begin(EVENT_STREAM + receipt_headers(form.receipt, None))
        request.written_at = time.monotonic()

    def keep_alive() -> None:
        begin()
        request.put(KEEP_ALIVE)

    def write(some: list[Piece]) -> Coroutine[Any, Any, None] | None:
        if form.is_large or (some and some[0].logprobs is not None):  # either all pieces of a request have them or none
            return write_slowly(some)
        data = b""
        for piece in some:
            if piece.text or piece.finish_reason:
                data += event(form.event(piece, piece is some[-1]))
        if data:
            if request.written_at is None:
                begin()
            request.written_at = time.monotonic()
            if request.put(data):
                return request.drained()
        return None

    async def write_slowly(some: list[Piece]) -> None:
        data, pause = b"", Pause()
        for piece in some:
            for part in pieces_of(piece):
                if part.text or part.finish_reason:
                    data += event(form.event(part, piece is some[-1]))
                if len(data) >= CHUNK_BYTES:
                    begin()
                    await request.write(data)
                    data = b""
                await pause.if_due()
        if data:
            begin()
            await request.write(data)

    request.keep_alive = keep_alive
    try:
        if isinstance(pieces, Generation):
            await pieces.stream(write)
        elif (unwritten := write(await pieces)) is not None:
            await unwritten
        end = form.end()
    except ApiError as error:
        if request.written_at is None:
            raise
        end = error.body
    finally:
        request.keep_alive = None
    begin()
    request.finish((event(end) if end else b"") + done)


async def send_json(request: Request, parts: Iterable[bytes], headers: bytes = b"") -> None:
    """Write a whole answer with status 200, until the client leaves.

    A small answer has a Content-Length. A large one is encoded while it is written, in chunks.
    """
    headers = JSON + headers
    has_begun, body, pause = False, bytearray(), Pause()
    for part in parts:
        body += part
        if len(body) > (CHUNK_BYTES if has_begun else MAX_WHOLE_BYTES):
            if not has_begun:
                request.begin(headers)
                has_begun = True
            await request.write(bytes(body))
            body.clear()
        await pause.if_due()
        if request.is_gone:
            return
    if has_begun:
        request.finish(bytes(body))
    else:
        request.respond(bytes(body), headers)


def receipt_headers(receipt: Receipt, total_seconds: float | None) -> bytes:
    """Return times in milliseconds under the names of text-generation-inference.

    The times of the end need `total_seconds`, because the headers of a stream go out before.
    """
    timing = receipt.timing
    headers = _model_headers(receipt.checkpoint_sha256, receipt.backend, receipt.dtype)
    if 0 < len(receipt.seeds) <= MAX_HEADER_SEEDS:
        headers += b"x-seed: %b\r\n" % b",".join([b"%d" % seed for seed in receipt.seeds])
    times = (1000 * timing.queue_seconds, 1000 * timing.prefill_seconds)
    headers += b"x-queue-time: %.3f\r\nx-prefill-time: %.3f\r\n" % times
    if total_seconds is not None:
        times = (1000 * (timing.prefill_seconds + timing.decode_seconds), 1000 * total_seconds)
        headers += b"x-inference-time: %.3f\r\nx-total-time: %.3f\r\n" % times
        if timing.seconds_per_character is not None:
            headers += b"x-time-per-token: %.3f\r\n" % (1000 * timing.seconds_per_character)
    return headers


@functools.lru_cache(maxsize=256)
def _model_headers(checkpoint: str, backend: str, dtype: str) -> bytes:
    return header_lines({"X-Checkpoint": checkpoint, "X-Backend": backend, "X-Dtype": dtype})
