"""How an answer goes out while its sequences run: whole, or as a stream; and what ends it when the client leaves.

Knows ASGI and the forms of answers; not what a request means.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.http.answers import Answer, Receipt, Usage
from service.http.run import Piece, Ranked, Run
from service.http.schemas import ApiError


async def send_json(send: Send, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """A whole answer, without the half of its time that starlette's Response would take."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _Watched(Response, ABC):
    """Answers while a job runs; a client that leaves ends the job."""

    WATCH_AFTER_SECONDS = 0.02  # most answers are out by then, and need no task that watches

    def __init__(self, job: Run | Ranked | None, busy: AbstractContextManager[None]):
        self.job, self.busy = job, busy
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watchers: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        timer = loop.call_later(
            self.WATCH_AFTER_SECONDS, lambda: watchers.append(loop.create_task(self._watch(scope, receive)))
        )
        try:
            with self.busy:
                await self.answer(send)
        finally:
            timer.cancel()
            for watcher in watchers:
                watcher.cancel()
            self._abort()

    async def _watch(self, scope: Scope, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope["chargpt.client_left"] = self.job is not None and not self.job.is_finished
        self._abort()

    def _abort(self) -> None:
        if self.job is not None:
            self.job.abort()

    @abstractmethod
    async def answer(self, send: Send) -> None:
        """Send all of the answer."""


class JobResponse(_Watched):
    """One JSON object that takes a run, or none where there is nothing to run; with its receipt."""

    def __init__(
        self,
        run: Run | None,
        busy: AbstractContextManager[None],
        content: Callable[[], Awaitable[dict[str, Any]]],
        receipt: Receipt,
        arrived_at: float,
    ):
        super().__init__(run, busy)
        self.run, self.content, self.receipt, self.arrived_at = run, content, receipt, arrived_at

    async def answer(self, send: Send) -> None:
        content = await self.content()
        headers: list[tuple[bytes, bytes]] = []
        if self.run is not None:
            content["chargpt"] = msgspec.Raw(self.receipt.json(self.run.timing))
            headers = self.receipt.headers(self.run.timing, time.monotonic() - self.arrived_at)
        await send_json(send, msgspec.json.encode(content), headers)


class GenerationResponse(_Watched):
    """A generation's answer, whole or streamed."""

    def __init__(
        self,
        job: Run | Ranked,
        busy: AbstractContextManager[None],
        form: Answer,
        arrived_at: float,
        *,
        num_prompt_tokens: int,
        stream: bool,
        end: bytes,
        keep_alive_seconds: float,
    ):
        super().__init__(job, busy)
        self.generation, self.form = job, form
        self.arrived_at = arrived_at
        self.num_prompt_tokens = num_prompt_tokens
        self.stream = stream
        self.end = end  # what closes a stream
        self.keep_alive_seconds = keep_alive_seconds

    @property
    def usage(self) -> Usage:
        return Usage(self.num_prompt_tokens, self.generation.num_completion_tokens)

    async def answer(self, send: Send) -> None:
        await (self._stream(send) if self.stream else self._whole(send))

    async def _whole(self, send: Send) -> None:
        parts: dict[int, list[Piece]] = {}
        async for pieces in self.generation:
            for piece in pieces:
                parts.setdefault(piece.number, []).append(piece)
        timing = self.generation.timing
        body = self.form.whole([_joined(parts[number]) for number in sorted(parts)], self.usage, timing)
        await send_json(send, body, self.form.receipt.headers(timing, time.monotonic() - self.arrived_at))

    async def _stream(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        last_write: float | None = None  # None: the headers are not out

        async def write(data: bytes, more_body: bool = True) -> None:
            nonlocal last_write
            if last_write is None:  # the first delta decides the status
                headers = [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-store"),
                    *self.form.receipt.headers(self.generation.timing, None),
                ]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            last_write = loop.time()
            await send({"type": "http.response.body", "body": data, "more_body": more_body})

        async def keep_alive() -> None:
            while True:
                since = 0.0 if last_write is None else loop.time() - last_write
                if since >= self.keep_alive_seconds:
                    await write(Answer.KEEP_ALIVE)
                    since = 0.0
                await asyncio.sleep(self.keep_alive_seconds - since)

        keeper = asyncio.create_task(keep_alive())
        try:
            async for pieces in self.generation:
                timing = self.generation.timing if self.generation.is_finished else None
                given = [piece for piece in pieces if piece.text or piece.finish_reason]
                data = b"".join(
                    [self.form.event(piece, self.usage, timing if piece is given[-1] else None) for piece in given]
                )
                if data:
                    await write(data)
            end = self.form.last_event(self.usage, self.generation.timing)
        except ApiError as error:
            if last_write is None:
                raise
            end = b"data: %b\n\n" % error.body
        finally:
            keeper.cancel()
        await write(end + self.end, more_body=False)


def _joined(pieces: list[Piece]) -> Piece:
    """The whole of a choice."""
    last = pieces[-1]
    logprobs = None if last.logprobs is None else [row for piece in pieces for row in piece.logprobs or ()]
    return last._replace(text="".join([piece.text for piece in pieces]), logprobs=logprobs)
