"""Continuous batching over cache slots: submit, abort, step.

Ids only: the engine knows nothing of text, HTTP or LitServe. It is synchronous and not thread-safe; whoever
owns it calls `step` for as long as `has_work`.

What a seed means is defined by `GPT.generate` in fp64. The engine computes in faster arithmetic and decides
the rare choices that its rounding could change (see sampling.py) from an fp64 forward over the text so far,
so its text is that one, whatever else is in the batch.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from service.model.gpt import GPT
from service.model.kv_cache import KVCache
from service.model.sampling import Draws, SamplingRows, sample
from service.scheduler import FinishReason, Prefill, Scheduler, Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delta:
    """What a step gives of one sequence: new ids, and the reason if it ended."""

    sequence: Sequence
    ids: list[int]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.sequence.finish_reason


@dataclass
class StepStats:
    """What the last step did."""

    seconds: float = 0.0
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
        self._draws: dict[int, Draws] = {}
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
        self._draws[sequence.id] = Draws(sequence.params.seed)

    def abort(self, id: int, reason: FinishReason = "abort") -> None:
        """End a sequence now; nothing happens where it has ended already."""
        sequence = self.scheduler.finish(id, reason)
        if sequence is not None:
            self._end(sequence)

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """One turn: expire, schedule, decode one character of each running sequence, prefill, sample, update."""
        now = self.clock()
        self.stats = StepStats()
        for sequence in self.scheduler:
            if sequence.deadline is not None and now >= sequence.deadline:
                self.abort(sequence.id, "timeout")
        pieces = self.scheduler.schedule(now)
        touched: list[Sequence] = []
        for run, sequences in (
            (self._decode, list(self.scheduler.decoding)),
            (lambda: self._prefill(pieces), [piece.sequence for piece in pieces]),
        ):
            if not sequences:
                continue
            try:
                touched += run()
            except Exception:  # one failing forward must not end the engine
                logger.exception("a forward over %d sequences failed", len(sequences))
                for sequence in sequences:
                    self.abort(sequence.id, "error")
        deltas, self._ended = self._ended, []
        for sequence in touched:
            if sequence.is_finished:
                self.scheduler.remove(sequence)
                del self._draws[sequence.id]
            ids = sequence.take_new_ids()
            if ids or sequence.is_finished:
                deltas.append(Delta(sequence, ids))
        self.stats.seconds = self.clock() - now
        return deltas

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
        """Where a prompt's prefill begins: older characters cannot reach the last position's logits."""
        return max(0, len(sequence.prompt) - self.config.receptive_field)

    def _end(self, sequence: Sequence) -> None:
        del self._draws[sequence.id]
        self._ended.append(Delta(sequence, sequence.take_new_ids()))

    def _move_slots(self) -> None:
        for source, target in self.scheduler.moves:
            self._cache.move(source, target)
        self.scheduler.moves.clear()

    def _decode(self) -> list[Sequence]:
        self._move_slots()
        sequences = list(self.scheduler.decoding)
        idx = torch.tensor([[sequence.ids[-1]] for sequence in sequences], device=self._device)  # (B, 1)
        logits = self.model(idx, self._cache.decode(len(sequences)))[:, -1]  # (B, V)
        self.stats.num_decode_rows = len(sequences)
        self._append(sequences, logits)
        return sequences

    def _prefill(self, pieces: list[Prefill]) -> list[Sequence]:
        self._move_slots()
        counts = [piece.count for piece in pieces]
        idx = torch.zeros(len(pieces), max(counts), dtype=torch.long)  # (B, T), padded on the right
        for b, piece in enumerate(pieces):
            sequence, start = piece.sequence, piece.sequence.num_prefilled
            if start == self._first_needed(sequence):
                self._cache.clear(piece.slot)
            idx[b, : piece.count] = torch.tensor(sequence.prompt[start : start + piece.count])
        cache = self._cache.prefill([piece.slot for piece in pieces], counts)
        logits = self.model(idx.to(self._device), cache)  # (B, T, V)
        logits = logits[torch.arange(len(pieces)), torch.tensor(counts) - 1]  # (B, V)
        self.stats.num_prefill_tokens = sum(counts)
        done = []
        for b, piece in enumerate(pieces):
            self.scheduler.prefilled(piece)
            if piece.sequence.num_prefilled == len(piece.sequence.prompt):
                done.append(b)
        sequences = [pieces[b].sequence for b in done]
        if sequences:
            self._append(sequences, logits[done])
        return sequences

    def _append(self, sequences: list[Sequence], logits: Tensor) -> None:
        """Choose and append one id for each sequence; logits (B, V)."""
        logits = logits.cpu().double()
        who = [sequence.id for sequence in sequences]
        if self._rows[0] != who:
            self._rows = (who, SamplingRows([sequence.params for sequence in sequences]))
        rows = self._rows[1]
        u = torch.tensor([self._draws[s.id][s.num_completion_tokens] for s in sequences], dtype=torch.float64)
        finite = logits.isfinite().all(dim=1).tolist()
        ids, certain = sample(logits, rows, u, self.tolerance)
        now = self.clock()
        for b, (sequence, id, sure) in enumerate(zip(sequences, ids.tolist(), certain.tolist(), strict=True)):
            if not finite[b]:
                logger.error("sequence %d: the model gave logits that are not finite", sequence.id)
                sequence.finish_reason = "error"
                continue
            if not sure:
                id = self._decide_exactly(sequence, u[b : b + 1])
            if sequence.first_token_at is None:
                sequence.first_token_at = now
            sequence.append(id)

    def _decide_exactly(self, sequence: Sequence, u: Tensor) -> int:
        """The id that the fp64 model chooses."""
        self.stats.num_exact += 1
        idx = torch.tensor([sequence.ids[-self.config.receptive_field :]], device=self._exact.head.weight.device)
        logits = self._exact(idx)[:, -1].cpu()
        return int(sample(logits, SamplingRows([sequence.params]), u).ids)

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
        error -= error.mean(dim=-1, keepdim=True)  # a shift of all logits changes nothing
        return float(4 * error.abs().max())
