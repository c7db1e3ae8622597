"""What answers look like on the wire: JSON and server-sent events, built by hand, as they are many and small.

Knows nothing of models or processes; the schemas that /docs shows of them are in openapi.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from service.http.run import CharacterLogprob, Piece, Timing

_json = msgspec.json.encode


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int

    def json(self) -> bytes:
        return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (*self, sum(self))


@dataclass(frozen=True)
class Receipt:
    """What it takes to get the same answer again, and what it took: the same body with these seeds, on this checkpoint.

    It goes into the answer as `chargpt`, and into headers.
    """

    checkpoint_sha256: str
    seeds: list[int]  # one for each prompt
    replaced_characters: int = 0
    dropped_characters: int = 0

    def json(self, timing: Timing) -> bytes:
        return _json(
            {
                "checkpoint_sha256": self.checkpoint_sha256,
                "seeds": self.seeds,
                "timing": {
                    "queue_seconds": round(timing.queue, 6),
                    "prefill_seconds": round(timing.prefill, 6),
                    "decode_seconds": round(timing.decode, 6),
                    "seconds_per_character": None if timing.per_character is None else round(timing.per_character, 9),
                },
                "replaced_characters": self.replaced_characters,
                "dropped_characters": self.dropped_characters,
            }
        )

    def headers(self, timing: Timing, total_seconds: float | None) -> list[tuple[bytes, bytes]]:
        """Times in milliseconds, by the names that text-generation-inference gave them.

        Those of the end only with `total_seconds`: a stream's headers go out before it.
        """
        headers = [(b"x-checkpoint", self.checkpoint_sha256.encode())]
        if self.seeds:
            headers.append((b"x-seed", b",".join(b"%d" % seed for seed in self.seeds)))
        times = {b"x-queue-time": timing.queue, b"x-prefill-time": timing.prefill}
        if total_seconds is not None:
            times[b"x-inference-time"] = timing.prefill + timing.decode
            times[b"x-total-time"] = total_seconds
            if timing.per_character is not None:
                times[b"x-time-per-token"] = timing.per_character
        return headers + [(name, b"%.3f" % (1000 * seconds)) for name, seconds in times.items()]


class Answer:
    """One request's answer, whole or as server-sent events, in the native form.

    An event: `{"index", "text", "finish_reason", "seed"}`; the last one: `{"id", "model", "usage", "chargpt"}`.
    """

    DONE = b"data: [DONE]\n\n"
    KEEP_ALIVE = b": keep-alive\n\n"

    def __init__(
        self,
        request_id: str,
        model: str,
        receipt: Receipt,
        decode_id: Callable[[int], str],
        *,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ):
        self.identity = b'"id":%b,"model":%b' % (_json(request_id), _json(model))
        self.receipt = receipt
        self.include_usage = include_usage
        self.continuous_usage = continuous_usage
        self._decode_id = decode_id
        self._offsets: dict[int, int] = {}  # characters given of each choice, where log-probabilities are

    def choice(self, piece: Piece) -> bytes:
        """The JSON of a part of a choice, or of all of it."""
        return b'{"index":%d,"text":%b,"finish_reason":%b,"seed":%d%b}' % (
            piece.number,
            _json(piece.text),
            _json(piece.finish_reason),
            piece.seed,
            b"" if piece.logprobs is None else b',"logprobs":%b' % self.logprobs(piece.number, piece.logprobs),
        )

    def logprobs(self, number: int, rows: list[CharacterLogprob]) -> bytes:
        """OpenAI's object of a completion's log-probabilities; offsets are those of the choice's text."""
        start = self._offsets.get(number, 0)
        self._offsets[number] = start + len(rows)
        return _json(
            {
                "tokens": [row.character for row in rows],
                "token_logprobs": [None if row.logprob is None else round(row.logprob, 7) for row in rows],
                "top_logprobs": [self._top(row) for row in rows],
                "text_offset": list(range(start, start + len(rows))),
            }
        )

    def _top(self, row: CharacterLogprob) -> dict[str, float] | None:
        """The likeliest characters and the given one, with their log-probabilities."""
        if row.logprob is None:
            return None
        return {self._decode_id(id): round(value, 7) for id, value in row.top} | {row.character: round(row.logprob, 7)}

    def event(self, piece: Piece, usage: Usage, timing: Timing | None) -> bytes:
        """The event of a piece; `timing`: it is the last one."""
        after = b',"usage":%b}' % usage.json() if self.continuous_usage else b"}"
        return b"data: %b%b\n\n" % (self.choice(piece)[:-1], after)

    def last_event(self, usage: Usage, timing: Timing) -> bytes:
        return b'data: {%b,"usage":%b,"chargpt":%b}\n\n' % (self.identity, usage.json(), self.receipt.json(timing))

    def whole(self, pieces: list[Piece], usage: Usage, timing: Timing) -> bytes:
        return b'{%b,"choices":[%b],"usage":%b,"chargpt":%b}' % (
            self.identity,
            b",".join(map(self.choice, pieces)),
            usage.json(),
            self.receipt.json(timing),
        )


class CompletionAnswer(Answer):
    """The form of OpenAI's completions; each choice also carries its seed, the last chunk of a stream the receipt."""

    def __init__(self, request_id: str, model: str, *arguments: Any, **options: Any):
        super().__init__(request_id, model, *arguments, **options)
        self.identity = b'"id":%b,"object":"text_completion","created":%d,"model":%b' % (
            _json(f"cmpl-{request_id}"),
            int(time.time()),
            _json(model),
        )

    def choice(self, piece: Piece) -> bytes:
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"seed":%d}' % (
            piece.number,
            _json(piece.text),
            b"null" if piece.logprobs is None else self.logprobs(piece.number, piece.logprobs),
            _json(piece.finish_reason),
            piece.seed,
        )

    def event(self, piece: Piece, usage: Usage, timing: Timing | None) -> bytes:
        after = (
            b'],"usage":%b' % usage.json()
            if self.continuous_usage
            else b'],"usage":null'
            if self.include_usage
            else b"]"
        )
        if timing is not None:
            after += b',"chargpt":%b' % self.receipt.json(timing)
        return b'data: {%b,"choices":[%b%b}\n\n' % (self.identity, self.choice(piece), after)

    def last_event(self, usage: Usage, timing: Timing) -> bytes:
        if not self.include_usage:
            return b""
        return b'data: {%b,"choices":[],"usage":%b}\n\n' % (self.identity, usage.json())
