"""The two forms of a generation's answer: that of /generate, and that of OpenAI's completions.

Both have whole answers and events of streams. This module knows nothing about how they are written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from service.http.models.model import Model
from service.http.routes.json_parts import (
    MAX_CHARACTERS,
    MAX_NUMBERS,
    json_parts,
    list_parts,
    sliced,
    text_parts,
)
from service.http.routes.request import Request
from service.http.routes.service import Service
from service.http.schema.answers import (
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionChunk,
    GenerateAnswer,
    GenerateChoice,
    GenerateEnd,
    GenerateEvent,
    Receipt,
    TokenLogprobs,
    Usage,
    usage,
)
from service.http.schema.requests import StreamOptions
from service.text.encoding import Encoder
from service.text.exact import Exact
from service.text.pieces import Piece
from service.wire import floats

PIECE_CHARACTERS = 512  # limit of an event or of a part of a whole answer, if it has log-probabilities

_encode = msgspec.json.encode


def pieces_of(piece: Piece) -> Iterator[Piece]:
    """Split a piece with log-probabilities at PIECE_CHARACTERS, or earlier if there are many alternatives."""
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


class Form:
    """Encodes one request's answer in the form of /generate."""

    def __init__(
        self,
        service: Service,
        request: Request,
        model: Model,
        encoder: Encoder,
        seeds: list[int],
        stream_options: StreamOptions,
        exact: Exact | None,
    ):
        self._service, self.request, self._model, self.model = service, request, model, model.name
        self.include_usage = stream_options.include_usage
        self.continuous_usage = stream_options.continuous_usage_stats
        self._characters = encoder.tokenizer.characters
        self._encoder, self._seeds, self._exact = encoder, seeds, exact
        self._offsets: dict[int, int] = {}  # characters written of each choice, if log-probabilities are reported

    @property
    def receipt(self) -> Receipt:
        receipt = self._service.receipt(self._model, self._encoder, self.request.generations[0].timing, self._seeds)
        if self._exact is not None:
            candidates, matches, characters = self._exact.cost
            receipt["exact"] = {
                "candidates": candidates,
                "matches": matches,
                "acceptance": round(matches / max(1, candidates), 7),
                "characters": characters,
            }
        return receipt

    @property
    def usage(self) -> Usage:
        return usage(self.request.num_prompt_tokens or 0, self.request.num_completion_tokens)

    def logprobs(self, piece: Piece) -> TokenLogprobs:
        start = self._offsets.get(piece.number, 0)
        end = self._offsets[piece.number] = start + len(piece.text)
        return {
            "tokens": list(piece.text),
            "token_logprobs": _values(piece),
            "top_logprobs": self._tops(piece),
            "text_offset": list(range(start, end)),
        }

    def _tops(self, piece: Piece) -> list[dict[str, float] | None]:
        """Return the likeliest alternatives and the character itself, for each character."""
        assert piece.logprobs is not None
        names, scored = self._characters, piece.text[piece.num_unscored :]
        unscored: list[dict[str, float] | None] = [None] * piece.num_unscored
        return unscored + [
            {names[id]: round(other, 7) for id, other in top} | {own: round(value, 7)}
            for own, (value, top) in zip(scored, piece.logprobs.rows(), strict=True)
        ]

    def _logprob_parts(self, piece: Piece) -> Any:
        """Return `logprobs` with iterators of JSON."""

        def parts() -> Iterator[Piece]:
            return (part for part in pieces_of(piece) if part.text)

        return {
            "tokens": list_parts(list(part.text) for part in parts()),
            "token_logprobs": list_parts(map(_values, parts())),
            "top_logprobs": list_parts(map(self._tops, parts())),
            "text_offset": list_parts(map(list, sliced(range(len(piece.text))))),
        }

    def whole(self, pieces: list[Piece], receipt: Receipt) -> bytes | Iterator[bytes]:
        """Return the whole answer, in parts if it is large."""
        if (_size(pieces[0]) if len(pieces) == 1 else sum(map(_size, pieces))) > 1:
            choices: Any = list_parts([self._choice_in_parts(piece)] for piece in pieces)
            return json_parts(self.answer(choices, receipt))
        choices = [
            self.choice(piece, piece.text, None if piece.logprobs is None else self.logprobs(piece)) for piece in pieces
        ]
        return _encode(self.answer(choices, receipt))

    def _choice_in_parts(self, piece: Piece) -> Any:
        text: Any = text_parts(sliced(piece.text, MAX_CHARACTERS))
        return self.choice(piece, text, None if piece.logprobs is None else self._logprob_parts(piece))

    def answer(self, choices: Any, receipt: Receipt) -> GenerateAnswer | Completion:
        """Return the whole answer."""
        return {
            "id": self.request.id,
            "model": self.model,
            "choices": choices,
            "usage": self.usage,
            "chargpt": receipt,
        }

    def choice(self, piece: Piece, text: str, logprobs: TokenLogprobs | None) -> GenerateChoice | CompletionChoice:
        """Return a complete choice."""
        choice: GenerateChoice = {
            "index": piece.number,
            "text": text,
            "finish_reason": piece.finish_reason,
            "seed": piece.seed,
        }
        if logprobs is not None:
            choice["logprobs"] = logprobs
        if piece.is_exact:
            choice["exact"] = True
        return choice

    def event(self, piece: Piece, is_last: bool) -> bytes:
        """Return the JSON of a piece. is_last: it is the last piece of those written together."""
        event: GenerateEvent = {
            "index": piece.number,
            "text": piece.text,
            "finish_reason": piece.finish_reason,
            "seed": piece.seed,
        }
        if piece.logprobs is not None:
            event["logprobs"] = self.logprobs(piece)
        if piece.is_exact:
            event["exact"] = True
        if self.continuous_usage:
            event["usage"] = self.usage
        return _encode(event)

    def end(self) -> bytes:
        """Return the JSON of the event after the last piece; empty: there is none."""
        end: GenerateEnd = {
            "id": self.request.id,
            "model": self.model,
            "usage": self.usage,
            "chargpt": self.receipt,
        }
        return _encode(end)


class CompletionForm(Form):
    """Encodes one request's answer in the form of /v1/completions and OpenAI's API."""

    def __init__(self, service: Service, request: Request, *arguments: Any):
        super().__init__(service, request, *arguments)
        self.id, self.created = f"cmpl-{request.id}", int(time.time())
        self.continuous_usage = self.continuous_usage and self.include_usage

    def answer(self, choices: Any, receipt: Receipt) -> Completion:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": self.usage,
            "chargpt": receipt,
        }

    def choice(self, piece: Piece, text: str, logprobs: TokenLogprobs | None) -> CompletionChoice:
        choice: CompletionChoice = {
            "index": piece.number,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "seed": piece.seed,
        }
        if piece.is_exact:
            choice["exact"] = True
        return choice

    def _chunk(self, choices: list[ChunkChoice]) -> CompletionChunk:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def event(self, piece: Piece, is_last: bool) -> bytes:
        logprobs = None if piece.logprobs is None else self.logprobs(piece)
        choice: Any = self.choice(piece, piece.text, logprobs)  # whose finish_reason may be null here
        chunk = self._chunk([choice])
        if self.include_usage:
            chunk["usage"] = self.usage if self.continuous_usage else None
        if is_last and piece.finish_reason is not None and all([it.is_finished for it in self.request.generations]):
            chunk["chargpt"] = self.receipt
        return _encode(chunk)

    def end(self) -> bytes:
        if not self.include_usage:
            return b""
        chunk = self._chunk([])
        chunk["usage"] = self.usage
        return _encode(chunk)


def _values(piece: Piece) -> list[float | None]:
    """Return the log-probability of each character."""
    assert piece.logprobs is not None
    unscored: list[float | None] = [None] * piece.num_unscored
    return unscored + [round(value, 7) for value in floats(piece.logprobs.values)]


def _size(piece: Piece) -> float:
    """Return the size of a choice's JSON relative to the part that is encoded at a time."""
    if piece.logprobs is None:
        return len(piece.text) / MAX_CHARACTERS
    return len(piece.text) * (1 + piece.logprobs.num_alternatives) / MAX_NUMBERS
