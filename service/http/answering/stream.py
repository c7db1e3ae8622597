"""How an answer is written while its sequences run: whole or as server-sent events, natively or as OpenAI does.

Knows the two forms of answers; nothing of sockets, or of what a request means.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from service.http.answering.coroutines import Pause
from service.http.api.answers import (
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionChunk,
    GenerateAnswer,
    GenerateChoice,
    GenerateEnd,
    GenerateEvent,
    PromptLogprob,
    Receipt,
    TokenLogprobs,
    Usage,
)
from service.http.api.bodies import GenerationRequest
from service.http.api.errors import ApiError
from service.http.engine.encoding import Encoder
from service.http.engine.sequences import Generation, Piece
from service.http.request import JSON, Request, header_lines
from service.wire import Logprobs, floats

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

# No answer is encoded at once if it is large: other requests wait for the event loop meanwhile.
PIECE_CHARACTERS = 512  # with log-probabilities, of an event of a stream or of a part of a whole answer
MAX_NUMBERS = 1024  # encoded at a time: about 1 ms
MAX_CHARACTERS = 1 << 16  # of a text encoded at a time
CHUNK_BYTES = 1 << 16  # written at a time
MAX_HEADER_SEEDS = 128  # more might be a longer header than proxies and clients take
MAX_WHOLE_BYTES = 1 << 18  # an answer of at most this size has a Content-Length, a larger one is sent in chunks

HOLE: Any = msgspec.Raw(b"\0")  # stands for a part of an answer; JSON never contains this byte

_encode = msgspec.json.encode


# -- parts of an answer --


def filled(content: msgspec.Struct, *parts: Iterable[bytes]) -> Iterator[bytes]:
    """The JSON of `content` with parts in place of its holes."""
    first, *rest = _encode(content).split(b"\0")
    yield first
    for part, after in zip(parts, rest, strict=True):
        yield from part
        yield after


def text_parts(text: str) -> Iterator[bytes]:
    """The JSON of a text."""
    yield b'"'
    for i in range(0, len(text), MAX_CHARACTERS):
        yield _encode(text[i : i + MAX_CHARACTERS])[1:-1]
    yield b'"'


def list_parts(slices: Iterable[list[Any]]) -> Iterator[bytes]:
    """The JSON of a list, given as slices that are not empty."""
    return joined([_encode(some)[1:-1]] for some in slices)


def joined(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """The JSON of a list, given as the parts of its items."""
    before = b"["
    for item in items:
        yield before
        yield from item
        before = b","
    yield b"]" if before == b"," else b"[]"


def sliced(items: Sequence[Any]) -> Iterator[list[Any]]:
    return (list(items[i : i + MAX_NUMBERS]) for i in range(0, len(items), MAX_NUMBERS))


def pieces_of(piece: Piece) -> Iterator[Piece]:
    """A piece with log-probabilities in pieces of at most PIECE_CHARACTERS, fewer if each has many alternatives."""
    if piece.logprobs is None:
        yield piece
        return
    first = piece.num_unscored
    length = max(1, min(PIECE_CHARACTERS, MAX_NUMBERS // (1 + piece.logprobs.num_alternatives)))
    for start in range(0, len(piece.text) or 1, length):
        end = start + length
        is_last = end >= len(piece.text)
        yield msgspec.structs.replace(
            piece,
            text=piece.text[start:end],
            finish_reason=piece.finish_reason if is_last else None,
            logprobs=piece.logprobs.part(max(0, start - first), end - first),
            num_unscored=0 if start else first,
        )


# -- the two forms of a generation's answer --


class Form:
    """Encodes one request's answer, as /generate has it."""

    def __init__(
        self,
        request: Request,
        encoder: Encoder,
        seeds: list[int],
        body: GenerationRequest,
        prompts: list[list[int]],
    ):
        self.request, self.model = request, encoder.model.name
        options = body.stream_options
        self.include_usage, self.continuous_usage = options.include_usage, options.continuous_usage_stats
        self._characters = encoder.tokenizer.characters
        self._encoder, self._seeds, self._body = encoder, seeds, body
        self.is_large = body.return_token_ids  # events with a whole prompt's ids are written one after the other
        self._prompts = prompts
        # If asked for: of each prompt but a first character, over the whole vocabulary.
        self.prompt_logprobs: list[Logprobs] | None = None
        self._echoed: dict[int, int] = {}  # prompt's characters that each choice lacks, if ids are reported
        self._offsets: dict[int, int] = {}  # characters of each choice written so far, if log-probabilities are

    @property
    def receipt(self) -> Receipt:
        return self._encoder.receipt(self.request.generations[0].timing, self._seeds)

    @property
    def usage(self) -> Usage:
        prompt, completion = self.request.num_prompt_tokens or 0, self.request.num_completion_tokens
        return Usage(prompt, completion, prompt + completion)

    def logprobs(self, piece: Piece) -> TokenLogprobs:
        start = self._offsets.get(piece.number, 0)
        end = self._offsets[piece.number] = start + len(piece.text)
        return TokenLogprobs(list(piece.text), _values(piece), self._tops(piece), list(range(start, end)))

    def _tops(self, piece: Piece) -> list[dict[str, float] | None]:
        """Of each character, the likeliest and itself."""
        assert piece.logprobs is not None
        characters = self._characters
        unscored: list[dict[str, float] | None] = [None] * piece.num_unscored
        return unscored + [
            {characters[id]: round(other, 7) for id, other in top} | {character: round(value, 7)}
            for character, (value, top) in zip(piece.text[piece.num_unscored :], piece.logprobs.rows(), strict=True)
        ]

    def whole(self, pieces: list[Piece], receipt: Receipt) -> bytes | Iterator[bytes]:
        """The answer of complete choices, in parts if it is large."""
        has_more = self._body.return_token_ids or self.prompt_logprobs is not None
        if has_more or (_size(pieces[0]) if len(pieces) == 1 else sum(map(_size, pieces))) > 1:
            return filled(self.answer(HOLE, receipt), joined(map(self._parts, pieces)))
        choices = [
            self.choice(piece, piece.text, None if piece.logprobs is None else self.logprobs(piece)) for piece in pieces
        ]
        return _encode(self.answer(choices, receipt))

    def _parts(self, piece: Piece) -> Iterator[bytes]:
        """A choice."""
        choice: Any = self.choice(piece, HOLE, None if piece.logprobs is None else HOLE)
        parts: list[Iterable[bytes]] = [text_parts(piece.text)]
        if piece.logprobs is not None:
            logprobs = filled(
                TokenLogprobs(HOLE, HOLE, HOLE, HOLE),
                list_parts(list(part.text) for part in pieces_of(piece) if part.text),
                list_parts(_values(part) for part in pieces_of(piece) if part.text),
                list_parts(self._tops(part) for part in pieces_of(piece) if part.text),
                list_parts(sliced(range(len(piece.text)))),
            )
            parts.append(logprobs)
        prompt = self._prompt_of(piece)
        if self._body.return_token_ids:
            choice.token_ids = choice.prompt_token_ids = HOLE
            encode, text = self._encoder.tokenizer.encode, piece.text[len(prompt) if self._body.echo else 0 :]
            slices = (encode(text[i : i + MAX_NUMBERS]) for i in range(0, len(text), MAX_NUMBERS))
            parts += [list_parts(slices), list_parts(sliced(prompt))]
        if self.prompt_logprobs is not None:
            choice.prompt_logprobs = HOLE
            rows = self._prompt_rows(prompt, self.prompt_logprobs[piece.number // self._body.n])
            parts.append(list_parts([row] for row in rows))
        return filled(choice, *parts)

    def _prompt_of(self, piece: Piece) -> list[int]:
        return self._prompts[piece.number // self._body.n]

    def _prompt_rows(self, prompt: list[int], logprobs: Logprobs) -> Iterator[dict[str, PromptLogprob] | None]:
        """As vLLM's `prompt_logprobs`: of each character, itself and the likeliest."""
        unscored, count = len(prompt) - len(logprobs), self._body.prompt_logprobs or 0
        yield from [None] * unscored
        for i, own in enumerate(prompt[unscored:]):
            ((_, top),) = logprobs.part(i, i + 1).rows()
            places = [[id for id, _ in top].index(own), *range(len(top) if count < 0 else count)]
            yield {
                str(id): PromptLogprob(round(value, 7), place + 1, self._characters[id])
                for place in places
                for id, value in [top[place]]
            }

    def _add_ids(self, choice: Any, piece: Piece) -> None:
        """To an event: the ids of its text, and in a choice's first one those of the prompt."""
        prompt = self._prompt_of(piece)
        if piece.number not in self._echoed:
            choice.prompt_token_ids = prompt
        echoed = self._echoed.get(piece.number, len(prompt) if self._body.echo else 0)
        choice.token_ids = self._encoder.tokenizer.encode(piece.text[echoed:])
        self._echoed[piece.number] = max(0, echoed - len(piece.text))

    def answer(self, choices: list[Any], receipt: Receipt) -> msgspec.Struct:
        """The whole answer."""
        return GenerateAnswer(self.request.id, self.model, choices, self.usage, receipt)

    def choice(self, piece: Piece, text: str, logprobs: TokenLogprobs | None) -> msgspec.Struct:
        """A complete choice."""
        reason = piece.finish_reason
        return GenerateChoice(piece.number, text, reason, piece.seed, UNSET if logprobs is None else logprobs)

    def event(self, piece: Piece, is_last: bool) -> bytes:
        """The JSON of a piece; `is_last`: of the pieces that are written together."""
        usage = self.usage if self.continuous_usage else UNSET
        logprobs = UNSET if piece.logprobs is None else self.logprobs(piece)
        event = GenerateEvent(piece.number, piece.text, piece.finish_reason, piece.seed, logprobs, usage=usage)
        if self._body.return_token_ids:
            self._add_ids(event, piece)
        return _encode(event)

    def end(self) -> bytes:
        """The JSON of the event after the last piece; empty: none."""
        return _encode(GenerateEnd(self.request.id, self.model, self.usage, self.receipt))


class CompletionForm(Form):
    """As /v1/completions and OpenAI's API have it."""

    def __init__(self, request: Request, *arguments: Any):
        super().__init__(request, *arguments)
        self.id, self.created = f"cmpl-{request.id}", int(time.time())

    def answer(self, choices: list[Any], receipt: Receipt) -> msgspec.Struct:
        return Completion(self.id, "text_completion", self.created, self.model, choices, self.usage, receipt)

    def choice(self, piece: Piece, text: str, logprobs: TokenLogprobs | None) -> msgspec.Struct:
        return CompletionChoice(piece.number, text, logprobs, piece.finish_reason, piece.seed)

    def event(self, piece: Piece, is_last: bool) -> bytes:
        usage: Usage | None | UnsetType = None if self.include_usage else UNSET
        if self.continuous_usage:
            usage = self.usage
        logprobs = None if piece.logprobs is None else self.logprobs(piece)
        choice = ChunkChoice(piece.number, piece.text, logprobs, piece.finish_reason, piece.seed)
        if self._body.return_token_ids:
            self._add_ids(choice, piece)
        chunk = CompletionChunk(self.id, "text_completion", self.created, self.model, [choice], usage)
        if is_last and piece.finish_reason is not None and all([it.is_finished for it in self.request.generations]):
            chunk.chargpt = self.receipt
        return _encode(chunk)

    def end(self) -> bytes:
        if not self.include_usage:
            return b""
        return _encode(CompletionChunk(self.id, "text_completion", self.created, self.model, [], self.usage))


def _values(piece: Piece) -> list[float | None]:
    """The log-probability of each character."""
    assert piece.logprobs is not None
    unscored: list[float | None] = [None] * piece.num_unscored
    return unscored + [round(value, 7) for value in floats(piece.logprobs.values)]


def _size(piece: Piece) -> float:
    """Of a choice's JSON, as a share of what is encoded at a time."""
    if piece.logprobs is None:
        return len(piece.text) / MAX_CHARACTERS
    return len(piece.text) * (1 + piece.logprobs.num_alternatives) / MAX_NUMBERS


# -- writing it --


Pieces = Generation | Coroutine[Any, Any, list[Piece]]  # a coroutine: of which nothing can be written before the end


async def write_whole(request: Request, pieces: Pieces, form: Form) -> None:
    complete = await (pieces.whole() if isinstance(pieces, Generation) else pieces)
    receipt = form.receipt
    headers = receipt_headers(receipt, time.monotonic() - request.arrived_at)
    parts = form.whole(complete, receipt)
    if isinstance(parts, bytes):
        request.respond(parts, JSON + headers)
    else:
        await send_json(request, parts, headers)


async def write_stream(request: Request, pieces: Pieces, form: Form, done: bytes = DONE) -> None:
    """Server-sent events, closed by `done`; the first piece, or its failure, decides the status."""

    def begin() -> None:
        if request.written_at is None:
            request.begin(EVENT_STREAM + receipt_headers(form.receipt, None))
        request.written_at = time.monotonic()

    def keep_alive() -> None:
        begin()
        request.put(KEEP_ALIVE)

    def write(some: list[Piece]) -> Coroutine[Any, Any, None] | None:
        if form.is_large or (some and some[0].logprobs is not None):  # as all of a request have, or none
            return write_slowly(some)
        data = b""
        for piece in some:
            if piece.text or piece.finish_reason:
                data += b"data: %b\n\n" % form.event(piece, piece is some[-1])
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
                    data += b"data: %b\n\n" % form.event(part, piece is some[-1])
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
    request.finish((b"data: %b\n\n" % end if end else b"") + done)


EVENT_STREAM = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-store\r\n"


async def send_json(request: Request, parts: Iterable[bytes], headers: bytes = b"") -> None:
    """A whole answer with status 200, until the client is gone.

    A small one has its length; a large one is encoded while it is written, a chunk at a time.
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
    """Times in milliseconds, under text-generation-inference's names.

    Times of the end only with `total_seconds`: the headers of a stream go out before it.
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
