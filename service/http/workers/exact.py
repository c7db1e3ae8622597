"""The candidates of one request for exact answers: a window of sequences that moves on as they end."""

from __future__ import annotations

import time

from service.http.connection.errors import ApiError
from service.http.models.model import Model
from service.http.workers.sequences import FAILURES, Client, Generation, SequenceState
from service.text.exact import Ending, Exact
from service.text.pieces import Piece
from service.wire import Delta, FinishReason, Logprobs


class ExactGeneration(Generation):
    """The answers of a prompt count as one sequence, which has the times of the first candidate that ran.

    window: the most candidates that workers have at once, beside one of each prompt.
    """

    streams_text = False

    def __init__(
        self, client: Client, model: Model, exact: Exact, window: int, arrived_at: float, interval: float | None
    ):
        super().__init__(client, model, exact.templates, arrived_at, None, interval, window)
        self.pending.clear()
        self.exact = exact
        self._running: dict[int, tuple[int, SequenceState]] = {}  # each candidate with its prompt, by number
        self._refused: set[SequenceState] = set()
        self._answers: list[list[Piece]] = [[] for _ in self.sequences]  # of each prompt, not taken yet
        self._num_run = [0] * len(self.sequences)  # characters that ran for each prompt, with its own

    @property
    def num_run_characters(self) -> int:
        """At least the prompts and answers, and at most the limits of the request."""
        total = 0
        for num_run, it in zip(self._num_run, self.sequences, strict=True):
            length = len(it.submit.prompt)
            least = (0 if it.queue_seconds is None else length) + it.num_completion_tokens
            total += max(least, min(num_run, length + self.exact.bounds.max_characters))
        return total

    @property
    def is_finished(self) -> bool:
        """True when all answers were taken. Candidates that are not needed may still be open."""
        return not self.touched and all([its.finish_reason is not None for its in self.sequences])

    def refill(self, must_run: bool = True) -> None:
        """Run the next candidates, and drop those that have become needless."""
        needless = self.exact.take_needless()
        self._client.drop([self._running[number][1] for number in needless if number in self._running])
        started = []
        for number, prompt, submit in self.exact.more(self._window - len(self.open)):
            started.append(SequenceState(number, submit, ""))
            self._running[number] = prompt, started[-1]
        if started:
            self._client.run(self, started, must_run)

    def abort(self) -> None:
        self._close(time.monotonic())
        super().abort()

    def refused(self, count: int) -> int:
        self.exact.close()
        self._refused = {its for its in self.sequences if not its.is_begun}
        return len(self._refused)

    def add(self, sequence: SequenceState, text: str, now: float) -> None:
        """Take in the text of a candidate."""
        sequence.num_completion_tokens += len(text)
        sequence.new_texts.append(text)

    def receive(self, sequence: SequenceState, delta: Delta, now: float) -> None:
        """Take in a delta of a candidate."""
        sequence.is_begun = True
        sequence.add_logprobs(delta)
        prompt, reason = self._running[sequence.number][0], delta.finish_reason
        its = self.sequences[prompt]
        change = Delta(0, [])
        if its.queue_seconds is None:
            change.scheduled_at, change.prefilled_at = delta.scheduled_at, delta.prefilled_at
        if reason is not None:
            del self._running[sequence.number]
            text = "".join(sequence.new_texts)
            own = len(its.submit.prompt) if sequence.submit.masks and delta.ended_at is not None else 0
            self._num_run[prompt] += own + len(text) + delta.num_unseen
            if self.exact.is_needed(sequence.number):
                if reason in FAILURES:
                    its.error = sequence.error
                    change.finish_reason = reason
                else:
                    self._take_result(prompt, sequence, text, delta, reason, now)
                    change.finish_reason = "stop" if self.exact.is_finished(prompt) else None
                change.ended_at = delta.ended_at
        super().receive(its, change, now)
        if change.finish_reason in FAILURES:
            self._close(now)
        elif reason is not None:
            self._client.refill(self)

    def _take_result(
        self, prompt: int, candidate: SequenceState, text: str, delta: Delta, reason: FinishReason, now: float
    ) -> None:
        logprobs = None
        if candidate.submit.logprobs is not None:
            logprobs = candidate.prompt_logprobs or Logprobs()
            logprobs.extend(candidate.new_logprobs or Logprobs())
        metrics, num_matched = self._metrics, self.exact.num_matched
        result = Ending(text, reason, delta.num_unseen, delta.tried, logprobs)
        answers = self.exact.ended(candidate.number, result)
        metrics.exact_candidates.inc()
        metrics.exact_candidate_tokens.inc(delta.tried.characters if delta.tried else len(text) + delta.num_unseen)
        metrics.exact_matches.inc(self.exact.num_matched - num_matched)
        if answers:
            self._answers[prompt] += answers
            its, new = self.sequences[prompt], "".join([piece.text for piece in answers])
            metrics.generation_tokens.inc(len(new))
            if its.last_at is not None and new:
                metrics.inter_token_latency.observe((now - its.last_at) / len(new), len(new))
            super().add(its, new, now)
            if self.is_stream:
                self.wake_when_due(now)
        if (failure := self.exact.failure) is not None:
            self._failure = self._failure or ApiError.of(failure)

    def _close(self, now: float) -> None:
        """No answer is needed any more."""
        self.exact.close()
        for its in self.sequences:
            if its.finish_reason is None and its not in self._refused:
                super().receive(its, Delta(0, [], "abort"), now)

    def _failed(self, sequence: SequenceState, reason: FinishReason) -> ApiError | None:
        error = super()._failed(sequence, reason)
        if error is not None and reason == "timeout":
            return ApiError(504, f"{error.message}: {self.exact.cost}", code="timeout")
        return error

    def _take(self, sequence: SequenceState) -> list[Piece]:
        pieces, self._answers[sequence.number] = self._answers[sequence.number], []
        sequence.num_taken += sum([len(piece.text) for piece in pieces])
        sequence.new_texts = []
        return pieces
