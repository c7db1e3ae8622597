"""Continuous batching over cache slots: submit, abort, step.

Ids only: the engine knows nothing of text, HTTP or LitServe. It is synchronous and not thread-safe; its owner calls
`step` while `has_work`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from service.engine.runner import Result, Runner, StepStats
from service.engine.scheduler import Prefill, Scheduler
from service.engine.sequence import Sequence
from service.model.gpt import GPT
from service.wire import Delta, FinishReason, Submit

logger = logging.getLogger(__name__)


class Engine:
    """Runs a model over many sequences at once.

    max_running: cache slots; max_waiting: further sequences in the queue; prefill_budget: prompt characters
    per step, which bounds how long a long prompt can delay the streams beside it.
    """

    def __init__(
        self,
        model: GPT,
        *,
        max_running: int = 32,
        max_waiting: int = 1024,
        prefill_budget: int = 512,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config = model.config
        self.clock = clock
        self.scheduler = Scheduler(max_running, max_waiting, prefill_budget)
        self.runner = Runner(model, max_running)
        self.stats = StepStats(clock)  # of the last step
        self._ended: list[Delta] = []  # outside a step; returned by the next one

    @property
    def has_work(self) -> bool:
        return bool(self._ended) or len(self.scheduler) > 0

    def submit(self, request: Submit) -> Sequence:
        """Queue a sequence.

        Raises:
            QueueFullError: no slot is free and the queue is full; nothing was queued.
        """
        sequence = Sequence(request, self.clock())
        first_needed = request.score_from or len(request.prompt)  # the first id whose logits are needed
        sequence.prefill_from = sequence.num_prefilled = max(0, first_needed - self.config.receptive_field)
        self.scheduler.add(sequence)
        self.runner.add(sequence)
        return sequence

    def abort(self, id: int, reason: FinishReason = "abort") -> None:
        """End a sequence now; does nothing if it has ended already."""
        sequence = self.scheduler.finish(id, reason)
        if sequence is not None:
            self.runner.remove(sequence)
            self._ended.append(self._delta(sequence))

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """One turn: schedule, run (fp64 decisions, one decode step, pieces of prompts), update."""
        self.stats = StepStats(self.clock)
        self._expire(self.stats.started_at)
        pieces = self.scheduler.schedule(self.stats.started_at)
        self.stats.lap("schedule")
        touched = self._decide(busy=bool(self.scheduler.decoding or pieces))
        self.stats.lap("decide")
        touched += self._decode()
        touched += self._prefill(pieces)
        deltas = self._deltas(touched)
        self.stats.lap("schedule")
        return deltas

    def generate(self, requests: Iterable[Submit]) -> list[list[int]]:
        """Run sequences to their ends and return their completions, in order (offline use).

        All of them must fit the queue.
        """
        completions: dict[int, list[int]] = {}
        for request in requests:
            self.submit(request)
            completions[request.id] = []
        while self.has_work:
            for delta in self.step():
                completions[delta.id] += delta.ids
        return list(completions.values())

    def _expire(self, now: float) -> None:
        for sequence in self.scheduler:
            if now >= sequence.deadline:
                self.abort(sequence.id, "timeout")

    def _decide(self, busy: bool) -> list[Sequence]:
        """Make the choices whose fp64 logits are ready; their sequences decode again."""
        results = self.runner.decide(busy)
        self._update(results)
        for result in results:
            if not result.sequence.is_finished:
                self.scheduler.take_back(result.sequence)
        self.stats.num_exact = sum(not result.is_failed for result in results)
        return [result.sequence for result in results]

    def _decode(self) -> list[Sequence]:
        sequences = list(self.scheduler.decoding)
        if sequences:
            with self._isolated(sequences):
                self._move_slots()
                self._update(self.runner.decode(sequences, self.stats))
                self.stats.lap("sample")
        return sequences

    def _prefill(self, pieces: list[Prefill]) -> list[Sequence]:
        sequences = [piece.sequence for piece in pieces]
        if sequences:
            with self._isolated(sequences):
                self._move_slots()
                slots = [self.scheduler.slot(sequence) for sequence in sequences]
                results = self.runner.prefill(pieces, slots, self.stats)
                for piece in pieces:
                    self.scheduler.prefilled(piece)
                    if not piece.sequence.num_prompt_left:
                        piece.sequence.prefilled_at = self.stats.prefilled_at
                self._update(results)
                self.stats.lap("sample")
        return sequences

    @contextlib.contextmanager
    def _isolated(self, sequences: list[Sequence]) -> Iterator[None]:
        """A failing forward ends its own sequences; the engine continues."""
        try:
            yield
        except Exception:
            about = {"request_ids": [sequence.request.request_id for sequence in sequences]}
            logger.exception("a forward over %d sequences failed", len(sequences), extra=about)
            for sequence in sequences:
                self.abort(sequence.id, "error")

    def _move_slots(self) -> None:
        self.runner.move(self.scheduler.moves)
        self.scheduler.moves.clear()

    def _update(self, results: list[Result]) -> None:
        for result in results:
            sequence = result.sequence
            if result.prompt_logprobs is not None:
                sequence.unemitted_prompt_logprobs.extend(result.prompt_logprobs)
            if result.is_failed:
                sequence.finish_reason = "error"
            elif result.is_undecided:
                self.scheduler.set_aside(sequence)
            elif result.id is not None:
                sequence.append(result.id, result.logprobs)

    def _deltas(self, touched: list[Sequence]) -> list[Delta]:
        """What this step has to send, after what ended outside of one; removes finished sequences."""
        deltas, self._ended = self._ended, []
        ended = {delta.id for delta in deltas}
        for sequence in dict.fromkeys(touched):
            if sequence.id in ended:
                continue
            if sequence.is_finished:
                self.scheduler.remove(sequence)
                self.runner.remove(sequence)
            delta = self._delta(sequence)
            if delta.ids or delta.prompt_logprobs is not None or sequence.is_finished:
                deltas.append(delta)
        return deltas

    def _delta(self, sequence: Sequence) -> Delta:
        ids, logprobs = sequence.emit()
        delta = Delta(sequence.id, ids, sequence.finish_reason)
        delta.logprobs, delta.prompt_logprobs = logprobs, sequence.emit_prompt_logprobs()
        if sequence.prefilled_at is not None:
            if not sequence.is_timed:
                sequence.is_timed = True
                delta.scheduled_at, delta.prefilled_at = sequence.scheduled_at, sequence.prefilled_at
            if sequence.is_finished:
                delta.ended_at = self.clock()
        return delta
