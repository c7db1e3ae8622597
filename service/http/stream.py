"""How an answer is written while its sequences run: whole or as server-sent events, natively or as OpenAI does.

Knows ASGI and the two forms of answers; nothing of what a request means.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.http.client import LogprobRow, Piece, gathered
from service.http.context import RequestContext
from service.http.schemas import (
    ApiError,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionChunk,
    GenerateAnswer,
    GenerateChoice,
    GenerateEnd,
    GenerateEvent,
    Receipt,
    Timing,
    TokenLogprobs,
    Usage,
)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

UNREAD_SECONDS = 6.0  # for what is left to write at the deadline; 5 of them may pass until a worker is given up

logger = logging.getLogger(__name__)

_encode = msgspec.json.encode

AnyChoice = TypeVar("AnyChoice", bound=ChunkChoice)


class RunningAnswer(Response):
    """Writes an answer while its sequences run; a client that leaves aborts them.

    The requests' time limit covers writing too: the connection of a client that does not read is dropped.
    """

    WATCH_AFTER_SECONDS = 0.02  # most answers are out by then and need no task that watches the client

    def __init__(
        self, context: RequestContext, busy: AbstractContextManager[None], write: Callable[[Send], Awaitable[None]]
    ):
        self.context, self.busy, self.write = context, busy, write
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watchers: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        timer = loop.call_later(
            self.WATCH_AFTER_SECONDS, lambda: watchers.append(loop.create_task(self._watch(receive)))
        )
        try:
            with self.busy:
                async with asyncio.timeout(self._seconds_left()):
                    await self.write(send)
                if self.background is not None:
                    await self.background()
        except TimeoutError:
            logger.info("the client did not read its answer in time: dropping its connection")
            self.context.client_left = True
            scope["extensions"]["chargpt.abort"]()
        finally:
            timer.cancel()
            for watcher in watchers:
                watcher.cancel()
            self.context.abort()

    def _seconds_left(self) -> float | None:
        deadlines = [generation.deadline for generation in self.context.generations]
        return max(deadlines) - time.monotonic() + UNREAD_SECONDS if deadlines else None

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.context.client_has_left()


# -- the two forms of a generation's answer --


class Form(ABC):
    """Encodes one request's answer."""

    def __init__(
        self,
        context: RequestContext,
        model: str,
        characters: list[str],
        receipt: Callable[[Timing], Receipt],
        *,
        include_usage: bool,
        continuous_usage: bool,
    ):
        self.context, self.model = context, model
        self.receipt = receipt
        self.include_usage = include_usage
        self.continuous_usage = continuous_usage
        self._characters = characters
        self._offsets: dict[int, int] = {}  # characters of each choice written so far, if log-probabilities are

    @property
    def timing(self) -> Timing:
        return self.context.generations[0].timing

    @property
    def usage(self) -> Usage:
        return Usage.of(self.context.num_prompt_tokens or 0, self.context.num_completion_tokens)

    def logprobs(self, piece: Piece) -> TokenLogprobs | None:
        if piece.logprobs is None:
            return None
        start = self._offsets.get(piece.number, 0)
        self._offsets[piece.number] = start + len(piece.text)
        values = [None if value is None else round(value, 7) for value, _ in piece.logprobs]
        tops = [self._top(c, row) for c, row in zip(piece.text, piece.logprobs, strict=True)]
        return TokenLogprobs(list(piece.text), values, tops, list(range(start, start + len(piece.text))))

    def _top(self, character: str, row: LogprobRow) -> dict[str, float] | None:
        """The likeliest characters, and the one in the text."""
        value, top = row
        if value is None:
            return None
        return {self._characters[id]: round(other, 7) for id, other in top} | {character: round(value, 7)}

    @abstractmethod
    def whole(self, pieces: list[Piece]) -> bytes:
        """The answer of complete choices."""

    @abstractmethod
    def event(self, piece: Piece, is_last: bool) -> bytes:
        """The JSON of a piece; `is_last`: no other follows."""

    @abstractmethod
    def end(self) -> bytes:
        """The JSON of the event after the last piece; empty: none."""


class NativeForm(Form):
    """/generate"""

    def whole(self, pieces: list[Piece]) -> bytes:
        choices = [GenerateChoice(*_fields(piece), self.logprobs(piece) or UNSET) for piece in pieces]
        receipt = self.receipt(self.timing)
        return _encode(GenerateAnswer(self.context.request_id, self.model, choices, self.usage, receipt))

    def event(self, piece: Piece, is_last: bool) -> bytes:
        usage = self.usage if self.continuous_usage else UNSET
        return _encode(GenerateEvent(*_fields(piece), self.logprobs(piece) or UNSET, usage))

    def end(self) -> bytes:
        receipt = self.receipt(self.timing)
        return _encode(GenerateEnd(self.context.request_id, self.model, self.usage, receipt))


class CompletionForm(Form):
    """/v1/completions, as in OpenAI's API"""

    def __init__(self, context: RequestContext, *arguments: Any, **options: Any):
        super().__init__(context, *arguments, **options)
        self.id, self.created = f"cmpl-{context.request_id}", int(time.time())

    def whole(self, pieces: list[Piece]) -> bytes:
        choices = [self._choice(CompletionChoice, piece) for piece in pieces]
        receipt = self.receipt(self.timing)
        return _encode(Completion(self.id, "text_completion", self.created, self.model, choices, self.usage, receipt))

    def event(self, piece: Piece, is_last: bool) -> bytes:
        usage: Usage | None | UnsetType = None if self.include_usage else UNSET
        if self.continuous_usage:
            usage = self.usage
        return self._chunk([self._choice(ChunkChoice, piece)], usage, self.receipt(self.timing) if is_last else UNSET)

    def end(self) -> bytes:
        return self._chunk([], self.usage) if self.include_usage else b""

    def _choice(self, kind: type[AnyChoice], piece: Piece) -> AnyChoice:
        number, text, finish_reason, seed = _fields(piece)
        return kind(number, text, self.logprobs(piece), finish_reason, seed)

    def _chunk(
        self, choices: list[ChunkChoice], usage: Usage | None | UnsetType, receipt: Receipt | UnsetType = UNSET
    ) -> bytes:
        chunk = CompletionChunk(self.id, "text_completion", self.created, self.model, choices, usage, receipt)
        return _encode(chunk)


def _fields(piece: Piece) -> tuple[int, str, Any, int]:
    return piece.number, piece.text, piece.finish_reason, piece.seed


# -- writing it --


async def write_whole(send: Send, context: RequestContext, pieces: AsyncIterable[list[Piece]], form: Form) -> None:
    body = form.whole(await gathered(pieces))
    await send_json(send, body, receipt_headers(form.receipt(form.timing), time.monotonic() - context.arrived_at))


async def write_stream(
    send: Send,
    context: RequestContext,
    pieces: AsyncIterable[list[Piece]],
    form: Form,
    *,
    done: bytes = DONE,
    keep_alive_seconds: float,
) -> None:
    """Server-sent events, closed by `done`; the first piece, or its failure, decides the status."""
    loop = asyncio.get_running_loop()
    last_write: float | None = None  # None: the headers are not out

    async def write(data: bytes, more_body: bool = True) -> None:
        nonlocal last_write
        if last_write is None:
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-store"),
                *receipt_headers(form.receipt(form.timing), None),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        last_write = loop.time()
        await send({"type": "http.response.body", "body": data, "more_body": more_body})

    async def keep_alive() -> None:
        while True:
            since = 0.0 if last_write is None else loop.time() - last_write
            if since >= keep_alive_seconds:
                await write(KEEP_ALIVE)
                since = 0.0
            await asyncio.sleep(keep_alive_seconds - since)

    keeper = asyncio.create_task(keep_alive())
    try:
        async for some in pieces:
            is_end = all(generation.is_finished for generation in context.generations)
            new = [piece for piece in some if piece.text or piece.finish_reason]
            if new:
                last = new[-1] if is_end else None
                await write(b"".join([b"data: %b\n\n" % form.event(piece, piece is last) for piece in new]))
        end = form.end()
    except ApiError as error:
        if last_write is None:
            raise
        end = error.body
    finally:
        keeper.cancel()
    await write((b"data: %b\n\n" % end if end else b"") + done, more_body=False)


async def send_json(send: Send, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """A whole answer with status 200, in half the time of starlette's Response."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def receipt_headers(receipt: Receipt, total_seconds: float | None) -> list[tuple[bytes, bytes]]:
    """Times in milliseconds, under text-generation-inference's names.

    Times of the end only with `total_seconds`: the headers of a stream go out before it.
    """
    headers = [
        (b"x-checkpoint", receipt.checkpoint_sha256.encode()),
        (b"x-backend", receipt.backend.encode()),
        (b"x-dtype", receipt.dtype.encode()),
    ]
    if receipt.seeds:
        headers.append((b"x-seed", b",".join(b"%d" % seed for seed in receipt.seeds)))
    timing = receipt.timing
    times = {b"x-queue-time": timing.queue_seconds, b"x-prefill-time": timing.prefill_seconds}
    if total_seconds is not None:
        times[b"x-inference-time"] = timing.prefill_seconds + timing.decode_seconds
        times[b"x-total-time"] = total_seconds
        if timing.seconds_per_character is not None:
            times[b"x-time-per-token"] = timing.seconds_per_character
    return headers + [(name, b"%.3f" % (1000 * seconds)) for name, seconds in times.items()]
