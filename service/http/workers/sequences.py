"""The sequences of one request, with their ids as text, either whole or as it arrives.

This module observes metrics and turns failures into ApiErrors. It knows nothing about routes or workers, and writes
nothing to clients.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from service.http.connection.errors import ApiError
from service.http.connection.turns import Pause
from service.http.models.model import Model
from service.http.schema.answers import Timing
from service.text.pieces import Piece, piece_of
from service.wire import Delta, FinishReason, Logprobs, Submit

TICK_SECONDS = 0.001  # resolution of the event loop's timers
HOMELESS = -1  # no worker: the sequence waits until one is connected
FAILURES = frozenset({"abort", "timeout", "error"})


class SequenceState:
    """One sequence of a request. Times are by time.monotonic(), durations in seconds.

    If its worker is lost, another one goes on from what has arrived, because a draw depends on seed and position alone.
    """

    def __init__(self, number: int, submit: Submit, echo: str):
        self.number, self.submit = number, submit
        self.echo = echo  # emitted before the first character
        self.ids = bytearray()  # that have arrived, 32 bits each
        self.new_texts: list[str] = []  # arrived and not taken yet

    # Class attributes until they change, because most never do.
    worker: int = HOMELESS
    runs: int = 0
    is_begun: bool = False  # a first delta, or the ending, has come
    is_leaving: bool = False  # a candidate: True after an abort, until its worker reports the characters that ran
    num_unseen: int = 0  # characters that ran for it, without a complete prompt and emitted ones
    error: ApiError | None = None  # its failure, if known here
    prompt_logprobs: Logprobs | None = None
    new_logprobs: Logprobs | None = None
    num_completion_tokens: int = 0
    num_taken: int = 0
    last_at: float | None = None  # arrival of the latest character
    queue_seconds: float | None = None  # None: the prompt has not run
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefilled_at: float = 0.0
    ended_at: float | None = None
    finish_reason: FinishReason | None = None
    first_token_seconds: float | None = None  # None: no character was written

    def add_logprobs(self, delta: Delta) -> None:
        if delta.logprobs is not None:
            if self.new_logprobs is None:
                self.new_logprobs = Logprobs()
            self.new_logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            if self.prompt_logprobs is None:
                self.prompt_logprobs = Logprobs()
            self.prompt_logprobs.extend(delta.prompt_logprobs)

    def go_on(self) -> None:
        """Prepare to run what has not arrived in another worker. Before the first character, that is all of it."""
        if self.runs:  # otherwise no worker has accepted it
            self.submit.must_run = True
        if not self.ids:
            self.prompt_logprobs = None


class Client(Protocol):
    """Runs sequences, and wakes a generation when more of their text has arrived."""

    def count(self, model: Model, what: str, number: int = 1) -> None:
        """Count sequences that have begun or ended."""

    def abort(self, generation: Generation, reason: FinishReason) -> None:
        """End all of its sequences."""

    def run(self, generation: Generation, sequences: list[SequenceState], must_run: bool) -> None:
        """Run sequences of a generation."""

    def drop(self, sequences: Iterable[SequenceState]) -> None:
        """End sequences that are not needed. Each stays open until its worker reports the characters that ran."""

    def refill(self, generation: Generation) -> None:
        """Call its method `refill` when all deltas that arrived are taken in."""

    def wake(self, generation: Generation) -> None:
        """Call its method `come` soon."""

    def wake_later(self, generation: Generation) -> None:
        """Call its method `come` at `due_at`."""


class Generation:
    """The sequences of one request. `whole` or `stream` gives their text.

    A stream gets a piece at once when a sequence begins and at its end. Other pieces are at least `interval` seconds
    apart.

    window: the number of sequences that run at once; None: all.

    Raises ApiError: from both: a sequence was refused, timed out or failed; the others are aborted.
    """

    timeout_name = "its time limit"  # its name in errors
    streams_text = True  # characters are the client's as they arrive

    def __init__(
        self,
        client: Client,
        model: Model,
        submits: list[Submit],
        arrived_at: float,
        echo: list[str] | None = None,
        interval: float | None = None,
        window: int | None = None,
    ):
        self._client, self.model, self._metrics = client, model, model.metrics
        self._client_name = submits[0].client
        self._arrived_at = arrived_at
        self.is_stream, self._interval = interval is not None, interval or 0.0
        self._submitted_at = time.monotonic()
        self.timeout_seconds = submits[0].timeout_seconds  # of each
        self.deadline = arrived_at + self.timeout_seconds
        self.sequences = [SequenceState(i, submit, echo[i] if echo else "") for i, submit in enumerate(submits)]
        self.num_completion_tokens = 0
        self.pending = deque(self.sequences)  # not submitted yet
        self._window = len(submits) if window is None else window
        self._dropped: dict[str, int] = {}  # number of sequences that ended before they were submitted, by reason
        self.open: set[int] = set()  # ids of the sequences that run
        self.touched: dict[SequenceState, None] = {}  # sequences with undelivered deltas, in order of arrival
        self._failure: Exception | None = None  # raised by `_fail`
        self.due_at = 0.0  # time of the next pieces of a stream, if nothing wakes it before
        self._is_due = False  # a stream may take pieces now
        self._waiter: asyncio.Future[None] | None = None  # awaited by `whole` or `stream`

    def abort(self) -> None:
        """End all sequences."""
        if self.open or self.pending:
            self._client.abort(self, "abort")

    @property
    def is_finished(self) -> bool:
        """True when every sequence has ended and all of their text was taken."""
        return not self.open and not self.pending and not self.touched

    @property
    def num_run_characters(self) -> int:
        """Characters of the prompts and completions of all sequences, including those that the client did not get."""
        return sum(
            (0 if it.queue_seconds is None else len(it.submit.prompt)) + it.num_completion_tokens + it.num_unseen
            for it in self.sequences
        )

    @property
    def endings(self) -> dict[str, int]:
        if len(self.sequences) == 1:
            reason = self.sequences[0].finish_reason
            return dict(self._dropped) if reason is None else {reason: 1}
        ended = Counter(it.finish_reason for it in self.sequences if it.finish_reason is not None)
        return dict(ended + Counter(self._dropped))

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the request's arrival to its first written character."""
        known = (it.first_token_seconds for it in self.sequences if it.first_token_seconds is not None)
        return min(known, default=None)

    @property
    def phases(self) -> list[tuple[str, float, float]]:
        """The phases, each with the times at which the first sequence began it and the last one ended it.

        They cover only sequences whose prompts have run.
        """
        begun = [it for it in self.sequences if it.queue_seconds is not None]
        if not begun:
            return []
        scheduled = [it.prefilled_at - it.prefill_seconds for it in begun]
        prefilled = [it.prefilled_at for it in begun]
        phases = [("queue", self._submitted_at, max(scheduled)), ("prefill", min(scheduled), max(prefilled))]
        if self.num_completion_tokens:
            ended = [it.ended_at or it.last_at or it.prefilled_at for it in begun]
            phases.append(("decode", min(prefilled), max(ended)))
        return phases

    @property
    def timing(self) -> Timing:
        """The longest times of a sequence, and the mean time per character."""
        every = self.sequences
        later = sum([max(0, it.num_completion_tokens - 1) for it in every])  # all characters except each first one
        return {
            "queue_seconds": round(max([it.queue_seconds or 0.0 for it in every]), 6),
            "prefill_seconds": round(max([it.prefill_seconds for it in every]), 6),
            "decode_seconds": round(max([it.decode_seconds for it in every]), 6),
            "seconds_per_character": round(sum([it.decode_seconds for it in every]) / later, 9) if later else None,
        }

    async def whole(self) -> list[Piece]:
        """Return each sequence's text in one piece, ordered by number. Requires `interval` to be None."""
        while (self.open or self.pending) and self._failure is None:
            await self._wait()
        if self._failure is not None:
            await self._fail()
        pieces = await self._take_slowly()
        pieces.sort(key=lambda piece: piece.number)
        return pieces

    async def stream(self) -> AsyncIterator[list[Piece]]:
        """Yield new text, until every sequence has ended. Requires an `interval`."""
        while self._failure is None and not self.is_finished:
            if not self._is_due:
                await self._wait()
            self._is_due = False
            if self._failure is None and self.touched:
                self.due_at = time.monotonic() + self._interval
                yield self._take_all()
                if not self._is_due:  # text may have come while this was written
                    self.wake_when_due(time.monotonic())
        while self.open and self._failure is None:  # until their workers report the characters that ran
            await self._wait()
        if self._failure is not None:
            await self._fail()

    def come(self) -> None:
        """Continue after the client has taken in all deltas that arrived."""
        self._is_due = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take_all(self) -> list[Piece]:
        """Take all text that has arrived."""
        touched, self.touched = self.touched, {}
        pieces = []
        for sequence in touched:
            pieces += self._take_observed(sequence)
        return pieces

    def _take_observed(self, sequence: SequenceState) -> list[Piece]:
        pieces = self._take(sequence)
        if sequence.first_token_seconds is None or sequence.finish_reason is not None:
            self._observe(sequence, sequence.finish_reason)
        return pieces

    async def _take_slowly(self) -> list[Piece]:
        """Take all text. Thousands of sequences take some 2 µs each."""
        pause, touched, self.touched = Pause(self._client_name), self.touched, {}
        pieces = []
        for sequence in touched:
            pieces += self._take_observed(sequence)
            await pause.if_due()
        return pieces

    async def _fail(self) -> None:
        """Raise the failure without keeping it, because its traceback would form a reference cycle."""
        self.abort()
        try:
            while self.open:  # until their workers report the characters that ran
                await self._wait()
            self._take_all()
            assert self._failure is not None
            raise self._failure
        finally:
            self._failure = None

    async def _wait(self) -> None:
        try:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        except asyncio.CancelledError:  # when the time to drain is over
            raise ApiError(503, "server has shut down", code="shutting_down") from None

    def wake_when_due(self, now: float) -> None:
        """Wake a stream now, or at the tick of the client's clock after `due_at`."""
        if not self.touched:
            return
        if self.due_at <= now + TICK_SECONDS:
            self._client.wake(self)
        else:
            self._client.wake_later(self)

    def refill(self, must_run: bool = True) -> None:
        """Run sequences in the place of those that have ended."""
        count = min(len(self.pending), self._window - len(self.open))
        if count > 0:
            self._client.run(self, [self.pending.popleft() for _ in range(count)], must_run)

    def refused(self, count: int) -> int:
        """A worker has refused `count` sequences. Return how many of the request's sequences that makes."""
        return count

    def add(self, sequence: SequenceState, text: str, now: float) -> None:
        """Take in new characters."""
        self.num_completion_tokens += len(text)
        sequence.num_completion_tokens += len(text)
        sequence.new_texts.append(text)
        sequence.last_at = now
        self.touched[sequence] = None

    def receive(self, sequence: SequenceState, delta: Delta, now: float) -> None:
        """Take in a delta without ids. The client calls this after it has updated `open` and `pending`."""
        sequence.add_logprobs(delta)
        prefilled_at = delta.prefilled_at
        if prefilled_at is not None and delta.scheduled_at is not None and sequence.queue_seconds is None:
            sequence.queue_seconds = delta.scheduled_at - self._arrived_at
            sequence.prefill_seconds = prefilled_at - delta.scheduled_at
            sequence.prefilled_at = prefilled_at
            self._metrics.prompt_ran(len(sequence.submit.prompt))
        if not sequence.is_begun:
            sequence.is_begun = True
            self._client.count(self.model, "begun")
        if delta.finish_reason is not None:
            self._end(sequence, delta, delta.finish_reason, now)
        is_first = prefilled_at is not None and sequence in self.touched  # not held back
        if (is_first and self.is_stream) or self._failure is not None or (not self.open and not self.pending):
            self._client.wake(self)
        elif delta.finish_reason is not None and self.is_stream:
            self.wake_when_due(now)

    def _end(self, sequence: SequenceState, delta: Delta, reason: FinishReason, now: float) -> None:
        """Record the end of a sequence, and its failure if it is the first of the request."""
        sequence.finish_reason, sequence.ended_at, sequence.ids = reason, delta.ended_at or now, bytearray()
        sequence.num_unseen = delta.num_unseen
        if delta.ended_at is not None and sequence.queue_seconds is not None:
            sequence.decode_seconds = delta.ended_at - sequence.prefilled_at
        if self._failure is None and reason in FAILURES:
            self._failure = self._failed(sequence, reason)
        self._metrics.sequence_ended(sequence.num_completion_tokens)
        self._client.count(self.model, reason)
        self.touched[sequence] = None

    def drop_pending(self, reason: FinishReason) -> None:
        """End the sequences that are not submitted yet, all at once, because there may be thousands."""
        count, first = len(self.pending), self.pending[0]
        self.pending.clear()
        self._dropped[reason] = self._dropped.get(reason, 0) + count
        self._failure = self._failure or self._failed(first, reason)
        self._metrics.sequence_ended(0, count)
        self._client.count(self.model, "begun", count)
        self._client.count(self.model, reason, count)
        self._client.wake(self)

    def fail(self, error: ApiError) -> None:
        """Raise this error from `whole` or `stream`, which abort the other sequences."""
        self._failure = self._failure or error
        self._client.wake(self)

    def _failed(self, sequence: SequenceState, reason: FinishReason) -> ApiError | None:
        if reason == "timeout":
            message = f"the request took longer than {self.timeout_seconds:g} s, {self.timeout_name}"
            return ApiError(504, message, code="timeout")
        if reason == "error":
            return sequence.error or ApiError(500, "inference failed on this request", code="engine_error")
        return None

    def _take(self, sequence: SequenceState) -> list[Piece]:
        texts, sequence.new_texts = sequence.new_texts, []
        text = texts[0] if len(texts) == 1 else "".join(texts)
        sequence.num_taken += len(text)
        logprobs, sequence.new_logprobs, echo = sequence.new_logprobs, None, sequence.echo
        of_prompt = None
        if echo:
            of_prompt, sequence.echo, sequence.prompt_logprobs = sequence.prompt_logprobs, "", None
        return [piece_of(sequence.number, sequence.submit, text, sequence.finish_reason, logprobs, echo, of_prompt)]

    def prompt_logprobs(self, number: int) -> Logprobs:
        """Return the log-probabilities of a sequence's prompt from `score_from` on, after its end."""
        return self.sequences[number].prompt_logprobs or Logprobs()

    def _observe(self, sequence: SequenceState, finish_reason: str | None) -> None:
        """Observe the first or the last piece of a sequence, which is about to be written."""
        metrics, now = self._metrics, time.monotonic()
        queue, prefill, decode = sequence.queue_seconds, sequence.prefill_seconds, sequence.decode_seconds
        if sequence.first_token_seconds is None:
            is_first = sequence.num_taken > 0
            if queue is not None and (is_first or finish_reason is not None):
                metrics.scheduled.add((queue, prefill))
            if is_first:
                sequence.first_token_seconds = now - self._arrived_at
                metrics.begun.add((sequence.first_token_seconds, now - sequence.prefilled_at))
        if finish_reason is not None and finish_reason not in FAILURES:
            metrics.ended.add((now - self._arrived_at, decode, prefill + decode))
            if sequence.num_completion_tokens > 1:
                metrics.paced.add((decode / (sequence.num_completion_tokens - 1),))
