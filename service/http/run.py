"""The sequences of one request, from the first frame to the last: Run; and what samples more than it gives: Ranked.

Turns deltas of ids into pieces of text, observes the metrics, and knows what went wrong. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from service.http.client import FAILURES, EngineClient
from service.http.schemas import ApiError
from service.model.tokenizer import CharTokenizer
from service.observe.metrics import Metrics
from service.wire import Delta, Logprobs, Refused, Submit


class CharacterLogprob(NamedTuple):
    """What the model thought of one character; None of a text's first one, which nothing precedes."""

    character: str
    logprob: float | None  # nats
    top: list[tuple[int, float]]  # (id, log-probability) of others that were asked for, likeliest first


class Piece(NamedTuple):
    """What has newly come of one sequence."""

    number: int
    seed: int
    text: str
    finish_reason: str | None = None
    logprobs: list[CharacterLogprob] | None = None  # of the text's characters, if asked for


class Timing(NamedTuple):
    """Seconds; of several sequences the longest."""

    queue: float  # from the request's arrival until a cache slot was free
    prefill: float  # from there until the prompt had run
    decode: float  # from there to the last character
    per_character: float | None  # decode over the characters after the first


@dataclass
class Work:
    """What a request asked of the model and the runs that it took, for its log line and its span."""

    num_prompt_tokens: int
    runs: list[Run] = field(default_factory=list)  # the first one gives the answer, or what is chosen from

    @property
    def num_completion_tokens(self) -> int:
        return self.runs[0].num_completion_tokens if self.runs else 0

    @property
    def endings(self) -> dict[str, int]:
        """How many of its sequences ended for each reason."""
        return self.runs[0].endings if self.runs else {}


@dataclass
class SequenceRecord:
    """What the HTTP process knows of one sequence."""

    num_prompt_tokens: int
    num_completion_tokens: int = 0
    last_at: float | None = None  # when the latest character came
    is_begun: bool = False  # its first character was written
    queue_seconds: float | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefilled_at: float = 0.0
    ended_at: float | None = None
    finish_reason: str | None = None
    first_token_seconds: float | None = None
    echo: str = ""  # still to be given before the first character
    prompt_logprobs: list[CharacterLogprob] = field(default_factory=list)  # likewise


class Run:
    """Sequences that run now. Iterating gives what has gathered, a list of pieces at a time.

    `echo`: the prompts' texts, where the answer is to begin with them; `interval`: for how many seconds characters
    gather, None: to the end; `window`: how many sequences run at once.

    Raises:
        ApiError: no inference process is ready; or while iterating: a sequence was refused, timed out or failed;
            the others are aborted.
    """

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        tokenizer: CharTokenizer,
        submits: list[Submit],
        arrived_at: float,
        *,
        request_id: str,
        echo: list[str] | None = None,
        interval: float | None = None,
        window: int | None = None,
    ):
        self._client, self._metrics, self._tokenizer = client, metrics, tokenizer
        self._arrived_at, self._request_id = arrived_at, request_id
        self._submits = submits
        self._submitted_at = time.monotonic()
        self._records = [SequenceRecord(len(submit.prompt)) for submit in submits]
        for record, text in zip(self._records, echo or (), strict=False):
            record.echo = text
        generation = client.submit(submits, interval=interval, window=window)
        if generation is None:
            metrics.request_rejected("not_ready", len(submits))
            raise ApiError(503, "no inference process is ready", code="not_ready", retry_after_seconds=1)
        self._generation = generation

    def abort(self) -> None:
        """End whatever still runs; the client has left."""
        self._client.abort(self._generation)

    @property
    def is_finished(self) -> bool:
        return self._generation.is_finished

    @property
    def num_completion_tokens(self) -> int:
        return sum(record.num_completion_tokens for record in self._records)

    @property
    def endings(self) -> dict[str, int]:
        return dict(Counter(record.finish_reason for record in self._records if record.finish_reason is not None))

    @property
    def submits(self) -> list[Submit]:
        return self._submits

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the request's arrival until a first character was written."""
        return min((r.first_token_seconds for r in self._records if r.first_token_seconds is not None), default=None)

    @property
    def phases(self) -> list[tuple[str, float, float]]:
        """Each phase with the times, by time.monotonic(), at which a first sequence began it and a last one ended it.

        Only of sequences whose prompts have run, as of others no more is known.
        """
        begun = [record for record in self._records if record.queue_seconds is not None]
        if not begun:
            return []
        scheduled = [record.prefilled_at - record.prefill_seconds for record in begun]
        prefilled = [record.prefilled_at for record in begun]
        phases = [
            ("queue", self._submitted_at, max(scheduled)),
            ("prefill", min(scheduled), max(prefilled)),
        ]
        if self.num_completion_tokens:
            ended = [record.ended_at or record.last_at or record.prefilled_at for record in begun]
            phases.append(("decode", min(prefilled), max(ended)))
        return phases

    @property
    def timing(self) -> Timing:
        decode = sum(record.decode_seconds for record in self._records)
        later = sum(max(0, record.num_completion_tokens - 1) for record in self._records)
        return Timing(
            max(record.queue_seconds or 0.0 for record in self._records),
            max(record.prefill_seconds for record in self._records),
            max(record.decode_seconds for record in self._records),
            decode / later if later else None,
        )

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        failure: ApiError | None = None
        while not self._generation.is_finished:
            try:
                arrived = await self._generation.take()
            except asyncio.CancelledError:  # uvicorn's, when the time to drain is over
                failure = ApiError(503, "the server has shut down", code="shutting_down")
                break
            ids: dict[int, list[int]] = {}
            ends: dict[int, str] = {}
            logprobs: dict[int, list[CharacterLogprob]] = {}
            for arrival in arrived:
                number, delta = arrival.number, arrival.delta
                if isinstance(delta, Refused):
                    failure = failure or ApiError(
                        429, delta.message, code="queue_full", retry_after_seconds=delta.retry_after_seconds
                    )
                    self._metrics.request_rejected("queue_full")
                    continue
                self._note(self._records[number], delta, arrival.at)
                if delta.prompt_logprobs is not None:
                    self._note_prompt(number, delta.prompt_logprobs)
                if delta.ids or delta.finish_reason is not None:
                    ids.setdefault(number, []).extend(delta.ids)
                if delta.logprobs is not None:
                    logprobs.setdefault(number, []).extend(self._characters(delta.ids, delta.logprobs))
                if delta.finish_reason is not None:
                    ends[number] = delta.finish_reason
                    failure = failure or _failure(delta.finish_reason)
            pieces = [self._piece(number, new, ends.get(number), logprobs.get(number)) for number, new in ids.items()]
            if failure is None:
                yield pieces
            else:
                self._client.abort(self._generation)
            for number in ids:
                self._written(self._records[number], ends.get(number))
        if failure is not None:
            raise failure

    def _note(self, record: SequenceRecord, delta: Delta, at: float) -> None:
        count = len(delta.ids)
        if count:
            record.num_completion_tokens += count
            self._metrics.generation_tokens.inc(count)
            if record.last_at is None:
                record.last_at = at
                count -= 1
            # Characters that came together share the time since the ones before.
            if count:
                self._metrics.inter_token_latency.observe((at - record.last_at) / count, count, self._request_id)
            record.last_at = at
        if delta.scheduled_at is not None and delta.prefilled_at is not None:
            record.queue_seconds = delta.scheduled_at - self._arrived_at
            record.prefill_seconds = delta.prefilled_at - delta.scheduled_at
            record.prefilled_at = delta.prefilled_at
            self._metrics.prompt_tokens.inc(record.num_prompt_tokens)
            self._metrics.request_prompt_tokens.observe(record.num_prompt_tokens)
        if delta.finish_reason is not None:
            record.finish_reason, record.ended_at = delta.finish_reason, delta.ended_at or at
        if delta.ended_at is not None and record.queue_seconds is not None:
            record.decode_seconds = delta.ended_at - record.prefilled_at

    def _note_prompt(self, number: int, logprobs: Logprobs) -> None:
        submit, known = self._submits[number], self._records[number].prompt_logprobs
        assert submit.score_from is not None
        start = submit.score_from + len(known)
        known += self._characters(submit.prompt[start : start + len(logprobs.values)], logprobs)

    def _characters(self, ids: list[int], logprobs: Logprobs) -> list[CharacterLogprob]:
        text, tops = self._tokenizer.decode(ids), list(zip(logprobs.top_ids, logprobs.top_values, strict=True))
        k = len(tops) // len(ids)
        return [CharacterLogprob(text[i], value, tops[i * k : (i + 1) * k]) for i, value in enumerate(logprobs.values)]

    def _piece(
        self, number: int, ids: list[int], finish_reason: str | None, logprobs: list[CharacterLogprob] | None
    ) -> Piece:
        record, text = self._records[number], self._tokenizer.decode(ids)
        if self._submits[number].logprobs is None:
            logprobs = None
        else:
            logprobs = logprobs or []
            if record.echo:
                logprobs = [CharacterLogprob(record.echo[0], None, []), *record.prompt_logprobs, *logprobs]
        text, record.echo = record.echo + text, ""
        return Piece(number, self._submits[number].sampling.seed, text, finish_reason, logprobs)

    def prompt_logprobs(self, number: int) -> list[CharacterLogprob]:
        """Those of a sequence's prompt from `score_from` on, once it has ended."""
        return self._records[number].prompt_logprobs

    def _written(self, record: SequenceRecord, finish_reason: str | None) -> None:
        """Note that what there was of a sequence has been written."""
        metrics, id = self._metrics, self._request_id
        now = time.monotonic()
        is_first = record.last_at is not None and not record.is_begun
        if record.queue_seconds is not None and (is_first or (finish_reason is not None and not record.is_begun)):
            metrics.request_queue_time.observe(record.queue_seconds, request_id=id)
            metrics.request_prefill_time.observe(record.prefill_seconds, request_id=id)
        if is_first:
            record.is_begun = True
            record.first_token_seconds = now - self._arrived_at
            metrics.time_to_first_token.observe(record.first_token_seconds, request_id=id)
            metrics.request_first_decode_time.observe(now - record.prefilled_at, request_id=id)
        if finish_reason is None:
            return
        metrics.request_ended(finish_reason)
        metrics.request_generation_tokens.observe(record.num_completion_tokens)
        if finish_reason in FAILURES:
            return
        metrics.e2e_request_latency.observe(now - self._arrived_at, request_id=id)
        metrics.request_decode_time.observe(record.decode_seconds, request_id=id)
        metrics.request_inference_time.observe(record.prefill_seconds + record.decode_seconds, request_id=id)
        if record.num_completion_tokens > 1:
            per_character = record.decode_seconds / (record.num_completion_tokens - 1)
            metrics.request_time_per_output_token.observe(per_character, request_id=id)


def _failure(finish_reason: str) -> ApiError | None:
    match finish_reason:
        case "timeout":
            return ApiError(504, "the request took longer than it may", code="timeout")
        case "error":
            return ApiError(500, "the inference process failed on this request", code="engine_error")
    return None


@dataclass
class Candidate:
    """One of the texts sampled for a prompt."""

    number: int  # of its sequence
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[CharacterLogprob] = field(default_factory=list)
    score: float = 0.0


class Ranked:
    """Samples `num_candidates` texts a prompt and gives the best `n`, all at once; otherwise as Run.

    Without a suffix the best are those with the highest mean log-probability. With one, each text is also cut
    where the suffix's first character is likeliest to come next, and the best are those after which the suffix is
    likeliest: sampled middles, ranked by log p(suffix | prompt, middle).
    """

    CUTS = 3  # places at which a sampled middle may end, besides its own end

    def __init__(
        self,
        start: Callable[[list[Submit], list[str] | None], Run],
        submits: list[Submit],
        *,
        n: int,
        num_candidates: int,
        suffix: list[int],
        echo: list[str] | None,
        give_logprobs: bool,
        receptive_field: int,
    ):
        self._start = start
        self._submits = submits
        self._n, self._num_candidates = n, num_candidates
        self._suffix = suffix[:receptive_field]
        self._echo = echo or [""] * len(submits)  # by sequence
        self._give_logprobs = give_logprobs
        self._sampling = start(submits, None if suffix else echo)
        self._running = self._sampling  # the stage that runs now
        self._is_aborted = False
        self.is_finished = False

    def abort(self) -> None:
        self._is_aborted = True
        self._running.abort()

    @property
    def num_completion_tokens(self) -> int:
        return self._sampling.num_completion_tokens

    @property
    def timing(self) -> Timing:
        return self._sampling.timing

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        candidates = [Candidate(number) for number in range(len(self._submits))]
        async for pieces in self._sampling:
            for piece in pieces:
                candidate = candidates[piece.number]
                candidate.text += piece.text
                candidate.finish_reason = piece.finish_reason
                candidate.logprobs += piece.logprobs or []
        if self._is_aborted:
            return
        if self._suffix:
            candidates = [middle for candidate in candidates for middle in self._middles(candidate)]
            await self._score(candidates)
        else:
            for candidate in candidates:
                values = [c.logprob or 0.0 for c in candidate.logprobs[len(self._echo[candidate.number]) :]]
                candidate.score = sum(values) / len(values) if values else 0.0
        by_prompt: dict[int, list[Candidate]] = {}
        for candidate in candidates:
            by_prompt.setdefault(candidate.number // self._num_candidates, []).append(candidate)
        self.is_finished = True
        yield [self._piece(p, i, c) for p in sorted(by_prompt) for i, c in enumerate(self._best(by_prompt[p]))]

    def _middles(self, candidate: Candidate) -> list[Candidate]:
        """A sampled text as it is, and cut where the suffix is likely to begin."""
        chances = [top[0][1] for _, _, top in candidate.logprobs]  # of the suffix's first character, at each place
        first = self._submits[candidate.number].min_tokens
        places = sorted(range(first, len(chances)), key=lambda i: -chances[i])[: self.CUTS]
        return [candidate, *(Candidate(candidate.number, candidate.text[:i], "stop") for i in sorted(places))]

    async def _score(self, middles: list[Candidate]) -> None:
        """Set the middles' scores: log p(suffix | prompt, middle)."""
        submits: dict[tuple[int, str], Submit] = {}  # each text once, so that equal ones score alike
        encode = self._sampling._tokenizer.encode
        for middle in middles:
            submit = self._submits[middle.number]
            before = submit.prompt + encode(middle.text)
            submits[middle.number // self._num_candidates, middle.text] = Submit(
                0, before + self._suffix, 0, submit.sampling, submit.timeout_seconds,
                logprobs=0, score_from=len(before), priority=submit.priority,
            )  # fmt: skip
        scoring = self._running = self._start(list(submits.values()), None)
        if self._is_aborted:
            scoring.abort()
        async for _ in scoring:
            pass
        scores = {key: sum(c.logprob or 0.0 for c in scoring.prompt_logprobs(i)) for i, key in enumerate(submits)}
        for middle in middles:
            middle.score = scores[middle.number // self._num_candidates, middle.text]

    def _best(self, candidates: list[Candidate]) -> list[Candidate]:
        """The n with the highest score; of equal texts the first counts, and the others come last."""
        seen: set[str] = set()
        repeated = []
        for candidate in candidates:
            repeated.append(candidate.text in seen)
            seen.add(candidate.text)
        order = sorted(range(len(candidates)), key=lambda i: (repeated[i], -round(candidates[i].score, 4), i))
        return [candidates[i] for i in order[: self._n]]

    def _piece(self, prompt: int, index: int, candidate: Candidate) -> Piece:
        return Piece(
            prompt * self._n + index,
            self._submits[candidate.number].sampling.seed,
            (self._echo[candidate.number] if self._suffix else "") + candidate.text,
            candidate.finish_reason,
            candidate.logprobs if self._give_logprobs else None,
        )
