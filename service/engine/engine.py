"""Continuous batching over cache slots: submit, abort, step.

The engine handles ids only; it knows nothing about text, HTTP, LitServe or tensors. It is synchronous and not
thread-safe. Its owner calls `step` while `has_work` is true.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from service.engine.accounts import Account, behind, settle
from service.engine.cost import Cost
from service.engine.fair_queue import Client
from service.engine.runner import FAILED, Outcome, Piece, Runner
from service.engine.scheduler import MIN_PREFILL, Plan, Scheduler
from service.engine.sequence import Sequence
from service.wire import Delta, FinishReason, Logprobs, Submit, floats
from service.words import plural

logger = logging.getLogger(__name__)

MIN_STEPS = 8  # steps that a call over more than CACHED_ROWS rows aims at if no prompt waits for its end
CACHED_ROWS = 16
MAX_AHEAD = 32  # the most steps of a call in which a stop may end a text; characters after the stop are lost
MAX_FAILURES = 16  # the runner counts as broken after so many failed calls in a row


class BrokenRunnerError(Exception):
    """Every recent call of the runner failed; only a new process may help."""


class StepStats:
    """Counts of one engine step, and the seconds of its phases: schedule, decode, prefill, update."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.started_at = self.ended_at = clock()
        self.phases: dict[str, float] = {}
        self.num_prefill_tokens = 0
        self.num_copied_tokens = 0  # prompt characters whose keys and values were copied from another slot
        self.num_decode_rows = 0
        self.num_decode_steps = 0  # steps of the row with the most steps
        self.num_decode_tokens = 0
        self.num_dropped_tokens = 0  # characters chosen after a stop or after the sequence had ended

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at

    def lap(self, phase: str) -> float:
        """Add the seconds since the last lap to `phase`, set `ended_at` to now, and return these seconds."""
        now = self._clock()
        seconds = now - self.ended_at
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        self.ended_at = now
        return seconds


class Batch(NamedTuple):
    """One call of the runner, which may still run: decode steps of B sequences, or the next pieces of B prompts."""

    sequences: list[Sequence]
    wait: Callable[[], Outcome]
    seconds: float  # the time of the call; an outcome with its own time overrides it
    steps: list[int] = []  # the steps of each row, if the call decodes
    is_end: list[bool] = []  # whether each row then has max_tokens characters, if the call decodes
    pieces: list[Piece] = []


class Engine:
    """Runs a model over as many sequences at once as the runner has slots.

    max_waiting: the limit of the queue.
    step_seconds: the target time of a step. It bounds how long a prompt delays running streams, and how long a new
        request waits for the next step.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_waiting: int = 1024,
        step_seconds: float = 0.004,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config = runner.config
        self.clock = clock
        self.step_seconds = step_seconds
        self.scheduler = Scheduler(runner.slots, max_waiting, runner.config, runner.piece)
        self.runner = runner
        self.stats = StepStats(clock)  # statistics of the last step
        self._decode_cost = Cost(each=step_seconds)  # cost of one step, by rows; the first call has one step
        self._prefill_cost = Cost(each=step_seconds / MIN_PREFILL)  # by characters
        self._deltas: list[Delta] = []  # that the current step returns, or the next one
        self._submit_seconds = 0.0  # since the last step
        self._in_flight: list[Batch] = []  # calls that the last step launched, if the runner is asynchronous
        self._num_failures = 0  # failed calls in a row

    @property
    def has_work(self) -> bool:
        return bool(self._deltas) or len(self.scheduler) > 0 or bool(self._in_flight)

    @property
    def ids(self) -> list[int]:
        """The ids of submitted sequences that have not ended."""
        return [sequence.id for sequence in self.scheduler]

    def submit(self, request: Submit) -> Sequence:
        """Queue a sequence.

        Raises:
            BusyError: no slot is free, and the queue is full for the client. Nothing was queued.
        """
        began = self.clock()
        sequence = Sequence(request, began, self.config.receptive_field)
        self.scheduler.add(sequence)
        seconds = self.clock() - began
        self._charge([sequence], seconds)
        self._submit_seconds += seconds
        return sequence

    def abort(self, id: int, reason: FinishReason = "abort") -> None:
        """End a sequence now. Do nothing if it has ended already."""
        sequence = self.scheduler.finish(id, reason)
        if sequence is not None:
            self._deltas.append(self._delta(sequence))

    def step(self) -> list[Delta]:
        """Expire, take, launch, finish: run some decode steps in one call, and pieces of prompts in another one.

        With an asynchronous runner, the engine launches this step's calls before it reads the outcomes of the last
        step's calls, so that the device need not wait for the host. Characters chosen after a stop are dropped.

        Raises:
            BrokenRunnerError: MAX_FAILURES calls in a row failed, or gave no finite logits.
        """
        stats = self.stats = StepStats(self.clock)
        self._expire()
        slots, pieces = self._take()
        launched = self._launch(slots, pieces)
        due, self._in_flight = (self._in_flight, launched) if self.runner.is_async else (launched, [])
        self._finish(due)
        deltas, self._deltas = self._deltas, []
        stats.lap("update")
        settle(self.scheduler.queue.clients, self._submit_seconds + stats.seconds, self.step_seconds)
        self._submit_seconds = 0.0
        return deltas

    def generate(self, requests: Iterable[Submit]) -> list[list[int]]:
        """Run requests to their ends and return their completions in order, for offline use.

        The queue must have room for all of them.
        """
        completions: dict[int, list[int]] = {}
        for request in requests:
            self.submit(request)
            completions[request.id] = []
        while self.has_work:
            for delta in self.step():
                completions[delta.id] += delta.ids
        return list(completions.values())

    def _expire(self) -> None:
        """End the sequences whose deadlines have passed."""
        for id in self.scheduler.expired(self.stats.started_at):
            self.abort(id, "timeout")

    def _take(self) -> tuple[np.ndarray, list[Piece]]:
        """Choose what runs in this step, and start sequences. Return the slots that decode (B,), and the pieces."""
        # The masks of guided rows depend on their last characters.
        if self.scheduler.num_guided and not self.runner.follows_guides:
            self._finish(self._in_flight)
            self._in_flight = []
        only = behind(self.scheduler.queue.clients, self.step_seconds) or None
        slots, plan = self._schedule(only)
        if only and not (len(slots) or plan.starts or plan.pieces):  # who can do nothing holds nobody up
            slots, plan = self._schedule(None)
        self._start(plan)
        self._charge([sequence for sequence, _ in plan.starts], self.stats.lap("schedule"))
        return slots, [piece for piece in plan.pieces if not piece.sequence.is_finished]  # as after a failed start

    def _schedule(self, only: set[Client] | None) -> tuple[np.ndarray, Plan]:
        """Plan the work of some clients. None: of all."""
        scheduler = self.scheduler
        slots = np.flatnonzero(scheduler.is_decoding & (scheduler.num_left > 0))  # (B,)
        if only is not None:
            slots = np.array([slot for slot in slots.tolist() if self._client(scheduler.by_slot[slot]) in only], int)
        budget = self._prefill_budget(len(slots))
        plan = scheduler.schedule(self.stats.started_at, budget, only, self._prefill_cost.each)
        return slots[scheduler.is_decoding[slots]], plan  # without those that another client took

    def _launch(self, slots: np.ndarray, pieces: list[Piece]) -> list[Batch]:
        """Launch decode steps in `slots` (B,), and pieces of prompts."""
        launched: list[Batch] = []
        if len(slots):
            self._decode(slots, sum(len(piece.ids) for piece in pieces), launched)
        if pieces:
            self._prefill(pieces, launched)
        return launched

    def _client(self, sequence: Sequence | None) -> Client:
        assert sequence is not None
        return self.scheduler.queue.client_of(sequence)

    def _charge_call(self, batch: Batch, sizes: list[int], cost: Cost, seconds: float) -> None:
        """Charge each client what a call of `seconds` would have taken with its rows alone. sizes: of each row."""
        if len(self.scheduler.queue.clients) < 2:
            return
        alone: dict[Account, tuple[int, int]] = {}  # sum and maximum of the sizes
        for sequence, size in zip(batch.sequences, sizes, strict=True):
            if (account := self.scheduler.queue.account(sequence)) is not None:
                total, longest = alone.get(account, (0, 0))
                alone[account] = total + size, max(longest, size)

        def expected(total: int, longest: int) -> float:
            return cost.fixed * (1 if batch.pieces else longest) + cost.each * total

        scale = seconds / expected(max(1, sum(sizes)), max(1, *sizes))
        for account, (total, longest) in alone.items():
            account.used += scale * expected(total, longest)

    def _charge(self, sequences: list[Sequence], seconds: float) -> None:
        """Charge the clients of sequences for a time that these took in equal parts."""
        if len(self.scheduler.queue.clients) < 2:
            return
        for sequence in sequences:
            if (account := self.scheduler.queue.account(sequence)) is not None:
                account.used += seconds / len(sequences)

    def _prefill_budget(self, rows: int) -> int:
        """Return the budget of prompt characters for a step that decodes `rows`.

        If nothing decodes, prompts get `step_seconds`; otherwise half of it, or the time of one decode step if longer.
        """
        decoding = self._decode_cost.seconds(rows) if rows else 0.0
        seconds = self.step_seconds if not rows else max(0.5 * self.step_seconds, decoding)
        return max(MIN_PREFILL, self._prefill_cost.size_for(seconds))

    def _num_steps(self, rows: int, num_prompt: int) -> int:
        """Return the number of decode steps of a call over `rows` in a step that runs `num_prompt` prompt characters.

        Without prompts, return as many as fit `step_seconds`. More than CACHED_ROWS rows get up to MIN_STEPS steps,
        in which each row stays in the cache, if these take at most three times `step_seconds`. With prompts, return as
        many as fit the time of the prompts, or half of `step_seconds` if that is shorter, so that neither stalls the
        other.
        """
        seconds, limit = self._decode_cost.seconds(rows), self.step_seconds
        if num_prompt:
            limit = min(0.5 * limit, self._prefill_cost.seconds(num_prompt))
        fit = max(1, int(limit / seconds))
        if rows > CACHED_ROWS and not num_prompt:
            fit = max(fit, min(MIN_STEPS, int(3 * limit / seconds)))
        counts = self.runner.step_counts
        return counts[bisect.bisect(counts, fit) - 1]

    def _start(self, plan: Plan) -> None:
        for sequence, found in plan.starts:
            request, slot = sequence.request, sequence.slot
            assert slot is not None
            prompt = [*request.seen, *request.prompt]
            with self._isolated([sequence]):
                self.runner.start(slot, request.sampling, prompt, sequence.ends, sequence.written, sequence.position)
                if found is not None:
                    self.runner.copy(found.source, slot, found.length)
                    self.scheduler.copied(slot, found.length)
                    self.stats.num_copied_tokens += found.length

    def _decode(self, slots: np.ndarray, num_prompt: int, launched: list[Batch]) -> None:
        """Launch decode steps of the sequences in `slots` (B,) in a step that runs `num_prompt` prompt characters."""
        scheduler, stats = self.scheduler, self.stats
        sequences = [sequence for slot in slots.tolist() if (sequence := scheduler.by_slot[slot]) is not None]
        with self._isolated(sequences):
            guides = {b: guide for b, sequence in enumerate(sequences) if (guide := sequence.guide) is not None}
            reports = {b: report for b, sequence in enumerate(sequences) if (report := sequence.report) is not None}
            # If a guided row can take only one step per call, all rows take one step. In a call of K steps it would
            # wait for all K after each character, and its text would be up to K times slower.
            is_slow = scheduler.num_guided and not self.runner.follows_guides
            steps = np.minimum(1 if is_slow else self._num_steps(len(slots), num_prompt), scheduler.num_left[slots])
            if steps.max() > MAX_AHEAD and any(sequence.may_stop for sequence in sequences):
                steps = np.minimum(steps, MAX_AHEAD)  # for all rows, for the same reason
            wait = self.runner.decode(slots, steps, guides, reports)
            scheduler.decoded(slots, steps)
            stats.num_decode_rows, stats.num_decode_steps = len(slots), int(steps.max())
            stats.num_decode_tokens = int(steps.sum())
            is_end = (scheduler.num_left[slots] == 0).tolist()
            launched.append(Batch(sequences, wait, stats.lap("decode"), steps.tolist(), is_end))

    def _prefill(self, pieces: list[Piece], launched: list[Batch]) -> None:
        """Launch pieces of prompts."""
        sequences = [piece.sequence for piece in pieces]
        with self._isolated(sequences):
            wait = self.runner.prefill(pieces)
            for piece in pieces:
                self.scheduler.prefilled(piece)
            self.stats.num_prefill_tokens = sum(len(piece.ids) for piece in pieces)
            launched.append(Batch(sequences, wait, self.stats.lap("prefill"), pieces=pieces))

    def _finish(self, batches: list[Batch]) -> None:
        """Wait for calls, and update their sequences."""
        for batch in batches:
            with self._isolated(batch.sequences):
                outcome = batch.wait()
                seconds, is_chosen = outcome.seconds or batch.seconds, outcome.ids >= 0  # (B, K)
                if batch.pieces:
                    sizes, cost = [len(piece.ids) for piece in batch.pieces], self._prefill_cost
                    cost.observe(sum(sizes), seconds)
                else:
                    sizes, cost = is_chosen.sum(axis=1).tolist(), self._decode_cost  # steps that each row ran
                    longest = max(1, *sizes)
                    cost.observe(max(1, sum(sizes) / longest), seconds / longest)
                self._charge_call(batch, sizes, cost, seconds)
                self.stats.lap("prefill" if batch.pieces else "decode")
                charged = self._update(batch, outcome, self._chosen(batch, outcome, is_chosen))
                self._charge(batch.sequences, self.stats.lap("update") - charged)

    def _chosen(self, batch: Batch, outcome: Outcome, is_chosen: np.ndarray) -> list[list[int]]:
        """Return the chosen ids of each row, which may have run fewer steps than were launched."""
        rows: list[list[int]] = outcome.ids.tolist()
        for b in np.flatnonzero(~is_chosen.all(axis=1)).tolist():
            del rows[b][is_chosen[b].argmin() :]
            if batch.steps and not batch.sequences[b].is_finished:
                unused = batch.steps[b] - len(rows[b])
                self.scheduler.not_run(batch.sequences[b], unused)
                self.stats.num_decode_tokens -= unused
        return rows

    def _update(self, batch: Batch, outcome: Outcome, rows: list[list[int]]) -> float:
        """Add the chosen ids of each row to its sequence.

        Return the seconds that were charged to single clients, such as those of a stop pattern.
        """
        charged = 0.0
        failed = set(np.flatnonzero((outcome.ids == FAILED).any(axis=1)).tolist())
        self._ran(well=len(failed) < len(rows))
        for b, (sequence, ids) in enumerate(zip(batch.sequences, rows, strict=True)):
            report = outcome.reports.get(b)
            if sequence.finish_reason is not None:  # the sequence ended after this call was launched
                self.stats.num_dropped_tokens += len(ids)
            elif batch.pieces or b in failed or not sequence.extend_simply(ids):
                began = self.clock()
                self._extend(sequence, ids, report, batch.pieces[b] if batch.pieces else None, b in failed)
                seconds = self.clock() - began
                self._charge([sequence], seconds)
                charged += seconds
                self._report(sequence)
            else:
                delta = Delta(sequence.id, ids)
                delta.logprobs = report
                if batch.is_end[b]:
                    sequence.finish_reason = delta.finish_reason = "length"
                    delta.ended_at = self.clock()
                    self.scheduler.remove(sequence)
                self._deltas.append(delta)
        return charged

    def _report(self, sequence: Sequence) -> None:
        """Add a delta with the news of a sequence, if there are any, and remove the sequence if it has ended."""
        if sequence.is_finished:
            self.scheduler.remove(sequence)
        elif sequence.is_candidate:
            return
        delta = self._delta(sequence)
        is_timed = delta.prefilled_at is not None  # the first character may be held back as part of a stop
        if delta.ids or delta.prompt_logprobs is not None or is_timed or sequence.is_finished:
            self._deltas.append(delta)

    def _extend(
        self, sequence: Sequence, ids: list[int], report: Logprobs | None, piece: Piece | None, has_failed: bool
    ) -> None:
        """Extend a sequence by chosen ids and log-probabilities, after decode steps or after a piece of its prompt."""
        if piece is not None:
            if piece.is_last and sequence.prefilled_at is None:
                sequence.prefilled_at = self.stats.ended_at
            if piece.targets is not None and report is not None:
                scores = report.take(len(report) - piece.choose)
                if np.isfinite(floats(scores.values)).all():
                    sequence.unemitted_prompt_logprobs.extend(scores)
                else:
                    ids, has_failed = [], True
        num_taken = sequence.extend(ids)
        if report is not None:
            sequence.unemitted_logprobs.extend(report.part(0, num_taken))
        if sequence.guide is None:  # with a guide, the difference is the id that ends the text, which it refuses
            self.stats.num_dropped_tokens += len(ids) - num_taken
        if has_failed and not sequence.is_finished:
            sequence.finish_reason = "error"
            about = {"request_ids": [sequence.request.request_id]}
            logger.error("sequence %d: the model gave logits that are not finite", sequence.id, extra=about)
        elif piece is not None and piece.is_last and not piece.choose:
            sequence.finish_reason = "length"

    @contextlib.contextmanager
    def _isolated(self, sequences: list[Sequence]) -> Iterator[None]:
        """End the given sequences if the forward in the block fails. Re-raise only if the device or runner is lost."""
        try:
            yield
        except Exception as error:
            if isinstance(error, BrokenRunnerError) or self.runner.is_lost(error):
                raise
            self._ran(well=False)
            about = {"request_ids": [sequence.request.request_id for sequence in sequences]}
            logger.exception("a forward over %s failed", plural(len(sequences), "sequence"), extra=about)
            for sequence in sequences:
                self.abort(sequence.id, "error")

    def _ran(self, well: bool) -> None:
        self._num_failures = 0 if well else self._num_failures + 1
        if self._num_failures == MAX_FAILURES:
            raise BrokenRunnerError(f"the last {MAX_FAILURES} calls of the model failed")

    def _delta(self, sequence: Sequence) -> Delta:
        ids, logprobs, of_prompt = sequence.emit()
        tried = None
        if sequence.is_candidate:
            tried = sequence.tried if sequence.finish_reason in ("stop", "length") else None
            if tried is None or not tried.matches:
                ids, logprobs, of_prompt, sequence.num_emitted = [], None, None, 0
        delta = Delta(
            sequence.id, ids, sequence.finish_reason, logprobs=logprobs, prompt_logprobs=of_prompt, tried=tried
        )
        if sequence.prefilled_at is not None:
            if not sequence.is_timed:
                sequence.is_timed = True
                delta.scheduled_at, delta.prefilled_at = sequence.scheduled_at, sequence.prefilled_at
            if sequence.is_finished:
                delta.ended_at = self.clock()
        if sequence.is_finished:
            num_prompt = sequence.num_run if sequence.prefilled_at is None or sequence.is_candidate else 0
            num_chosen = sequence.num_completion_tokens + (sequence.is_candidate and sequence.refused is not None)
            delta.num_unseen = num_prompt + num_chosen - sequence.num_emitted
        return delta
