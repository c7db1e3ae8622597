"""Continuous batching over cache slots: submit, abort, step.

Ids only: the engine knows nothing of text, HTTP or LitServe. It is synchronous and not thread-safe; whoever
owns it calls `step` for as long as `has_work`.

What a seed means is defined by `GPT.generate` in fp64. The engine computes in faster arithmetic and decides
the rare choices that its rounding could change (see sampling.py) from an fp64 forward over the text so far,
so its text is that one, whatever else is in the batch. That forward takes as long as several steps, so it goes on in a
thread beside them, and the sequence waits for it outside of the batch.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from service.engine.scheduler import FinishReason, Logprob, Prefill, Scheduler, Sequence
from service.model.gpt import GPT
from service.model.kv_cache import KVCache
from service.model.sampling import Draws, History, SamplingRows, sample

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Delta:
    """What a step gives of one sequence: new ids, and the reason if it ended."""

    sequence: Sequence
    ids: list[int]
    logprobs: list[Logprob]  # of the ids, if asked for
    prompt_logprobs: list[Logprob]  # of further characters of the prompt, if asked for

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.sequence.finish_reason


@dataclass
class _Choosing:
    """What the choice of a sequence's next character depends on, besides its parameters and the logits."""

    draws: Draws
    history: History | None  # where a penalty needs it


@dataclass
class _Decision:
    """A choice that waits for logits (1, V) from the fp64 model, and what else it depends on."""

    sequence: Sequence
    logits: Tensor  # (1, V) fp64, of the faster arithmetic: what log-probabilities are taken from
    u: Tensor  # (1,)
    allowed: Tensor | None  # (1, V)
    exact: Future[Tensor] | None = None  # (1, V); None: not begun


@dataclass
class StepStats:
    """What the last step did."""

    seconds: float = 0.0
    ended_at: float = 0.0  # by the engine's clock
    phases: dict[str, float] = field(default_factory=dict)  # seconds; schedule, decide, decode, prefill, sample
    num_prefill_tokens: int = 0
    num_decode_rows: int = 0
    num_exact: int = 0  # choices made from fp64 logits


class Engine:
    """Runs a model over many sequences at once.

    max_running: cache slots; max_waiting: further sequences in the queue; prefill_budget: prompt characters
    per step, which bounds how long a long prompt can hold up the streams beside it.
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
        self.model = model
        self.config = model.config
        self.clock = clock
        self.scheduler = Scheduler(max_running, max_waiting, prefill_budget)
        self.stats = StepStats()
        weight = model.head.weight
        self._device = weight.device
        self._cache = KVCache(model.config, max_running, weight.device, weight.dtype)
        self._choosing: dict[int, _Choosing] = {}  # by sequence id
        self._undecided: dict[int, _Decision] = {}  # by sequence id
        self._lap_at = 0.0
        self._beside = ThreadPoolExecutor(1, "exact", torch.set_num_threads, (1,))
        self._ended: list[Delta] = []  # outside of a step; given with the next one
        self._rows: tuple[list[int], SamplingRows] = ([], SamplingRows([]))
        # MPS has no fp64.
        exact_device = torch.device("cpu") if weight.device.type == "mps" else weight.device
        self._exact = copy.deepcopy(model).to(exact_device, torch.float64)
        self.tolerance = 0.0 if weight.dtype == torch.float64 else self._measure_tolerance()

    @property
    def has_work(self) -> bool:
        return bool(self._ended) or len(self.scheduler) > 0

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            QueueFullError: as many are waiting as may; nothing was queued.
        """
        sequence.arrived_at = self.clock()
        sequence.num_prefilled = self._first_needed(sequence)
        self.scheduler.add(sequence)
        params = sequence.params
        history = History(self.config.vocab_size, sequence.prompt) if params.needs_history else None
        self._choosing[sequence.id] = _Choosing(Draws(params.seed), history)

    def abort(self, id: int, reason: FinishReason = "abort") -> None:
        """End a sequence now; nothing happens where it has ended already."""
        sequence = self.scheduler.finish(id, reason)
        if sequence is not None:
            self._end(sequence)

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """One turn: expire, schedule, decide, decode one character of each running sequence, prefill, update."""
        started = now = self._lap_at = self.clock()
        self.stats = StepStats()
        for sequence in self.scheduler:
            if sequence.deadline is not None and now >= sequence.deadline:
                self.abort(sequence.id, "timeout")
        pieces = self.scheduler.schedule(now)
        self._lap("schedule")
        touched = dict.fromkeys(self._decide(busy=bool(self.scheduler.decoding or pieces)))
        self._lap("decide")
        for run, sequences in (
            (self._decode, list(self.scheduler.decoding)),
            (lambda: self._prefill(pieces), [piece.sequence for piece in pieces]),
        ):
            if not sequences:
                continue
            try:
                touched |= dict.fromkeys(run())
            except Exception:  # one failing forward must not end the engine
                ids = [sequence.id for sequence in sequences]
                logger.exception("a forward over %d sequences failed", len(ids), extra={"sequences": ids})
                for sequence in sequences:
                    self.abort(sequence.id, "error")
        deltas, self._ended = self._ended, []
        for sequence in touched:
            if sequence.is_finished:
                self.scheduler.remove(sequence)
                del self._choosing[sequence.id]
            delta = self._delta(sequence)
            if delta.ids or delta.prompt_logprobs or sequence.is_finished:
                deltas.append(delta)
        self._lap("schedule")
        self.stats.seconds, self.stats.ended_at = self._lap_at - started, self._lap_at
        return deltas

    def _lap(self, phase: str) -> None:
        """Note the time since the last lap as one of `phase`."""
        now = self.clock()
        self.stats.phases[phase] = self.stats.phases.get(phase, 0.0) + now - self._lap_at
        self._lap_at = now

    def generate(self, sequences: Iterable[Sequence]) -> list[list[int]]:
        """Run sequences to their ends and return their completions, in order (offline use).

        All of them must fit the queue.
        """
        sequences = list(sequences)
        completions: dict[int, list[int]] = {sequence.id: [] for sequence in sequences}
        for sequence in sequences:
            self.submit(sequence)
        while self.has_work:
            for delta in self.step():
                completions[delta.sequence.id] += delta.ids
        return list(completions.values())

    def _first_needed(self, sequence: Sequence) -> int:
        """Where a prompt's prefill begins: older characters cannot reach the logits that matter."""
        first = sequence.score_from or len(sequence.prompt)  # the first id whose logits are needed
        return max(0, first - self.config.receptive_field)

    def _end(self, sequence: Sequence) -> None:
        del self._choosing[sequence.id]
        decision = self._undecided.pop(sequence.id, None)
        if decision is not None and decision.exact is not None:
            decision.exact.cancel()
        self._ended.append(self._delta(sequence))

    @staticmethod
    def _delta(sequence: Sequence) -> Delta:
        return Delta(sequence, *sequence.take_new(), sequence.take_prompt_logprobs())

    def _move_slots(self) -> None:
        for source, target in self.scheduler.moves:
            self._cache.move(source, target)
        self.scheduler.moves.clear()

    def _decode(self) -> list[Sequence]:
        self._move_slots()
        sequences = list(self.scheduler.decoding)
        idx = torch.tensor([[sequence.ids[-1]] for sequence in sequences], device=self._device)  # (B, 1)
        logits = self.model(idx, self._cache.decode(len(sequences)))[:, -1].cpu()  # (B, V)
        self.stats.num_decode_rows = len(sequences)
        self._lap("decode")
        self._append(sequences, logits)
        self._lap("sample")
        return sequences

    def _prefill(self, pieces: list[Prefill]) -> list[Sequence]:
        self._move_slots()
        counts = [piece.count for piece in pieces]
        slots = [self.scheduler.slot(piece.sequence) for piece in pieces]
        idx = torch.zeros(len(pieces), max(counts), dtype=torch.long)  # (B, T), padded on the right
        for b, piece in enumerate(pieces):
            sequence, start = piece.sequence, piece.sequence.num_prefilled
            if start == self._first_needed(sequence):
                self._cache.clear(slots[b])
            idx[b, : piece.count] = torch.tensor(sequence.prompt[start : start + piece.count])
        cache = self._cache.prefill(slots, counts)
        logits = self.model(idx.to(self._device), cache).cpu()  # (B, T, V)
        self.stats.num_prefill_tokens = sum(counts)
        self._lap("prefill")
        touched, done = [], []
        for b, piece in enumerate(pieces):
            sequence = piece.sequence
            if sequence.score_from is not None:
                self._score(piece, logits[b])
            self.scheduler.prefilled(piece)
            if not sequence.num_prompt_left:
                sequence.prefilled_at = self._lap_at
                if not sequence.is_finished:
                    done.append(b)
            touched.append(sequence)
        if done:
            last = torch.tensor([counts[b] - 1 for b in done])
            self._append([pieces[b].sequence for b in done], logits[torch.tensor(done), last])  # (B', V)
        self._lap("sample")
        return touched

    def _score(self, piece: Prefill, logits: Tensor) -> None:
        """Take the log-probabilities of a prompt's ids from the logits (T, V) of one of its pieces."""
        sequence, start = piece.sequence, piece.sequence.num_prefilled
        assert sequence.score_from is not None
        first = max(start + 1, sequence.score_from)  # id number i is predicted at place i−1
        last = min(start + piece.count + 1, len(sequence.prompt))
        if first < last:
            rows = logits[first - 1 - start : last - 1 - start].double()
            sequence.prompt_logprobs += _logprobs(rows, sequence.prompt[first:last], sequence)

    def _append(self, sequences: list[Sequence], logits: Tensor) -> None:
        """Choose and append one id for each sequence; logits (B, V)."""
        logits = logits.double()
        who = [sequence.id for sequence in sequences]
        if self._rows[0] != who:
            self._rows = (who, SamplingRows([sequence.params for sequence in sequences]))
        rows = self._rows[1]
        choosing = [self._choosing[id] for id in who]
        histories = [state.history for state in choosing]
        numbers = [sequence.num_completion_tokens for sequence in sequences]
        u = torch.tensor([state.draws[n] for state, n in zip(choosing, numbers, strict=True)], dtype=torch.float64)
        allowed = self._allowed(sequences)
        finite = logits.isfinite().all(dim=1).tolist()
        ids, certain = sample(logits, rows, u, self.tolerance, histories, allowed)
        for b, (sequence, id, sure) in enumerate(zip(sequences, ids.tolist(), certain.tolist(), strict=True)):
            row = slice(b, b + 1)
            if not finite[b]:
                about = {"sequences": [sequence.id]}
                logger.error("sequence %d: the model gave logits that are not finite", sequence.id, extra=about)
                sequence.finish_reason = "error"
            elif sure:
                self._take(sequence, id, logits[row])
            else:
                self.scheduler.set_aside(sequence)
                mask = None if allowed is None else allowed[row]
                self._undecided[sequence.id] = _Decision(sequence, logits[row], u[row], mask)

    def _take(self, sequence: Sequence, id: int, logits: Tensor) -> None:
        """Append the id that was chosen; logits (1, V)."""
        history = self._choosing[sequence.id].history
        if history is not None:
            history.append(id)
        logprob = None
        if sequence.logprobs is not None:
            (logprob,) = _logprobs(logits, [id], sequence)
        sequence.append(id, logprob)

    def _allowed(self, sequences: list[Sequence]) -> Tensor | None:
        """(B, V) bool: the ids that each sequence's pattern lets come next; None: all of all."""
        masks = [sequence.allowed() for sequence in sequences]
        if all(mask is None for mask in masks):
            return None
        allowed = np.ones((len(sequences), self.config.vocab_size), dtype=bool)
        for b, mask in enumerate(masks):
            if mask is not None:
                allowed[b] = mask
        return torch.from_numpy(allowed)

    def _decide(self, busy: bool) -> list[Sequence]:
        """Make the choices whose fp64 logits are there; those sequences decode again.

        The engine's own thread runs a forward where nothing else is to be done, or the other falls behind.
        """
        undecided = list(self._undecided.values())
        for decision in undecided if busy else []:
            if decision.exact is None:
                decision.exact = self._beside.submit(self._exact_logits, decision.sequence)
        if undecided and (not busy or len(undecided) > 2):
            last = undecided[-1]
            if last.exact is None or last.exact.cancel():
                last.exact = _run(self._exact_logits, last.sequence)
            elif not busy:
                wait_for([last.exact])
        decided = []
        for decision in undecided:
            if decision.exact is None or not decision.exact.done():
                continue
            sequence = decision.sequence
            if error := decision.exact.exception():
                logger.error("an fp64 forward failed", exc_info=error, extra={"sequences": [sequence.id]})
                self.abort(sequence.id, "error")
                continue
            del self._undecided[sequence.id]
            rows, histories = SamplingRows([sequence.params]), [self._choosing[sequence.id].history]
            exact = sample(decision.exact.result(), rows, decision.u, 0.0, histories, decision.allowed)
            self._take(sequence, int(exact.ids), decision.logits)
            if not sequence.is_finished:
                self.scheduler.take_back(sequence)
            decided.append(sequence)
        self.stats.num_exact = len(decided)
        return decided

    @torch.inference_mode()
    def _exact_logits(self, sequence: Sequence) -> Tensor:
        """(1, V): what the fp64 model says comes next."""
        idx = torch.tensor([sequence.ids[-self.config.receptive_field :]], device=self._exact.head.weight.device)
        return self._exact.last_logits(idx).cpu()

    @torch.inference_mode()
    def _measure_tolerance(self) -> float:
        """Four times the largest rounding error seen in this model's cached logits, on this device, in nats."""
        config, rows = self.config, min(4, self._cache.slots)
        generator = torch.Generator().manual_seed(0)
        length, steps = config.block_size + config.block_size // 2, 8
        idx = torch.randint(config.vocab_size, (rows, length + steps), generator=generator)
        exact = self._exact(idx.to(self._exact.head.weight.device)).cpu()
        idx = idx.to(self._device)
        for slot in range(rows):
            self._cache.clear(slot)
        logits = [self.model(idx[:, :length], self._cache.prefill(range(rows), [length] * rows))]
        for t in range(length, length + steps):
            logits.append(self.model(idx[:, t : t + 1], self._cache.decode(rows)))
        error = torch.cat(logits, dim=1).cpu().double() - exact
        # A shift of all logits changes nothing, save where a repetition penalty looks at the logits themselves.
        shifted = error - error.mean(dim=-1, keepdim=True)
        return float(4 * torch.maximum(error.abs(), shifted.abs()).max())


def _run(function: Callable[[Sequence], Tensor], sequence: Sequence) -> Future[Tensor]:
    """A call made here and now, as an executor gives it."""
    future: Future[Tensor] = Future()
    try:
        future.set_result(function(sequence))
    except Exception as error:
        future.set_exception(error)
    return future


def _logprobs(logits: Tensor, ids: list[int], sequence: Sequence) -> list[Logprob]:
    """The log-probabilities (nats) of `ids` (N,) under logits (N, V), each with those that the sequence asks for."""
    logprobs = logits.log_softmax(dim=1)
    values = logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
    if not sequence.logprobs and not sequence.logprob_ids:
        return [Logprob(value, [], []) for value in values]
    if sequence.logprob_ids:
        top_ids = torch.tensor(sequence.logprob_ids).expand(len(ids), -1)
        top_values = logprobs.gather(1, top_ids)
    else:
        assert sequence.logprobs is not None
        top_values, top_ids = logprobs.topk(min(sequence.logprobs, logits.size(1)), dim=1)
    return [Logprob(*row) for row in zip(values, top_ids.tolist(), top_values.tolist(), strict=True)]
