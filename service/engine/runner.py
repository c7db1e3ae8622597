"""The tensors of the engine: model, cache and sampler, run over the sequences that the scheduler chose.

What a seed means is defined by `GPT.generate` in fp64. The runner computes in faster arithmetic, and decides the rare
choices that its rounding could change (see sampling.py) from an fp64 forward over the text so far. That forward takes
as long as several steps, so it runs in a thread beside them while its sequence waits outside the batch.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from service.engine.scheduler import Prefill
from service.engine.sequence import Sequence
from service.model.gpt import GPT
from service.model.kv_cache import KVCache
from service.model.sampling import Draws, History, SamplingRows, sample
from service.wire import Logprobs

logger = logging.getLogger(__name__)


class StepStats:
    """What one engine step did, and the seconds of its phases: schedule, decide, decode, prefill, sample."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.started_at = self.ended_at = clock()
        self.phases: dict[str, float] = {}
        self.prefilled_at = 0.0  # when the forward over pieces of prompts had run
        self.num_prefill_tokens = 0
        self.num_decode_rows = 0
        self.num_exact = 0  # choices made from fp64 logits

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at

    def lap(self, phase: str) -> None:
        """Count the time since the last lap as part of `phase`; `ended_at` becomes now."""
        now = self._clock()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self.ended_at
        self.ended_at = now


@dataclass(slots=True)
class Result:
    """What a forward gave one sequence."""

    sequence: Sequence
    id: int | None = None  # the next id; None: the prompt is not complete, or is only scored
    logprobs: Logprobs | None = None  # of `id`, if requested
    prompt_logprobs: Logprobs | None = None  # of the piece of the prompt that ran, if requested
    is_undecided: bool = False  # `decide` will give the id
    is_failed: bool = False


@dataclass(slots=True)
class _Sampler:
    """What the choice of a sequence's next character depends on, besides its parameters and the logits."""

    draws: Draws
    history: History | None  # if a penalty needs it


@dataclass(slots=True)
class _Decision:
    """A choice that waits for fp64 logits, and what else it depends on."""

    sequence: Sequence
    logits: Tensor  # (1, V) fp64, by the faster arithmetic: log-probabilities come from these
    u: Tensor  # (1,)
    allowed: Tensor | None  # (1, V)
    exact: Future[Tensor] | None = None  # (1, V); None: not started


class Runner:
    """Eager torch on any device. `slots`: sequences in the cache at once."""

    def __init__(self, model: GPT, slots: int):
        self.model = model
        self.config = model.config
        weight = model.head.weight
        self._device = weight.device
        self.cache = KVCache(model.config, slots, weight.device, weight.dtype)
        self._samplers: dict[int, _Sampler] = {}  # by sequence id
        self._undecided: dict[int, _Decision] = {}  # by sequence id
        self._rows: tuple[list[int], SamplingRows] = ([], SamplingRows([]))
        self._executor = ThreadPoolExecutor(1, "exact", torch.set_num_threads, (1,))
        # MPS has no fp64.
        exact_device = torch.device("cpu") if weight.device.type == "mps" else weight.device
        self.exact_model = copy.deepcopy(model).to(exact_device, torch.float64)
        self.tolerance = 0.0 if weight.dtype == torch.float64 else self._measure_tolerance()

    def add(self, sequence: Sequence) -> None:
        params = sequence.request.sampling
        history = History(self.config.vocab_size, sequence.request.prompt) if params.needs_history else None
        self._samplers[sequence.id] = _Sampler(Draws(params.seed), history)

    def remove(self, sequence: Sequence) -> None:
        del self._samplers[sequence.id]
        decision = self._undecided.pop(sequence.id, None)
        if decision is not None and decision.exact is not None:
            decision.exact.cancel()

    def move(self, moves: list[tuple[int, int]]) -> None:
        """Copy cache slots: (source, target) pairs, in order."""
        for source, target in moves:
            self.cache.move(source, target)

    def decode(self, sequences: list[Sequence], stats: StepStats) -> list[Result]:
        """One character for the sequences in slots 0 … len(sequences)−1."""
        idx = torch.tensor([[sequence.ids[-1]] for sequence in sequences], device=self._device)  # (B, 1)
        logits = self.model(idx, self.cache.decode(len(sequences)))[:, -1].cpu()  # (B, V)
        stats.num_decode_rows = len(sequences)
        stats.lap("decode")
        return self._sample(sequences, logits)

    def prefill(self, pieces: list[Prefill], slots: list[int], stats: StepStats) -> list[Result]:
        """Run pieces of prompts; the last piece of a prompt also gives its sequence's first character."""
        counts = [piece.count for piece in pieces]
        idx = torch.zeros(len(pieces), max(counts), dtype=torch.long)  # (B, T), padded on the right
        for b, piece in enumerate(pieces):
            sequence, start = piece.sequence, piece.sequence.num_prefilled
            if start == sequence.prefill_from:
                self.cache.clear(slots[b])
            idx[b, : piece.count] = torch.tensor(sequence.request.prompt[start : start + piece.count])
        logits = self.model(idx.to(self._device), self.cache.prefill(slots, counts)).cpu()  # (B, T, V)
        stats.num_prefill_tokens = sum(counts)
        stats.lap("prefill")
        stats.prefilled_at = stats.ended_at
        results = [Result(piece.sequence) for piece in pieces]
        for result, piece, row in zip(results, pieces, logits, strict=True):
            if piece.sequence.request.score_from is not None:
                result.prompt_logprobs = _prompt_logprobs(piece, row)
        complete = [b for b, piece in enumerate(pieces) if piece.is_last and piece.sequence.request.max_tokens]
        if complete:
            last = torch.tensor([counts[b] - 1 for b in complete])
            sampled = self._sample([pieces[b].sequence for b in complete], logits[torch.tensor(complete), last])
            for b, result in zip(complete, sampled, strict=True):
                result.prompt_logprobs = results[b].prompt_logprobs
                results[b] = result
        return results

    def decide(self, busy: bool) -> list[Result]:
        """The undecided choices whose fp64 logits are ready; `busy`: there are forwards to run meanwhile.

        The calling thread runs an fp64 forward itself if it has nothing else to do, or if the other thread falls
        behind.
        """
        undecided = list(self._undecided.values())
        for decision in undecided if busy else []:
            if decision.exact is None:
                decision.exact = self._executor.submit(self._exact_logits, decision.sequence)
        if undecided and (not busy or len(undecided) > 2):
            last = undecided[-1]
            if last.exact is None or last.exact.cancel():
                last.exact = _run(self._exact_logits, last.sequence)
            elif not busy:
                wait_for([last.exact])
        return [self._decided(it) for it in undecided if it.exact is not None and it.exact.done()]

    def _decided(self, decision: _Decision) -> Result:
        sequence, exact = decision.sequence, decision.exact
        assert exact is not None
        del self._undecided[sequence.id]
        if error := exact.exception():
            logger.error("an fp64 forward failed", exc_info=error, extra={"request_ids": [sequence.request.request_id]})
            return Result(sequence, is_failed=True)
        rows, history = SamplingRows([sequence.request.sampling]), self._samplers[sequence.id].history
        choice = sample(exact.result(), rows, decision.u, 0.0, [history], decision.allowed)
        return self._chosen(sequence, int(choice.ids), decision.logits)

    def _sample(self, sequences: list[Sequence], logits: Tensor) -> list[Result]:
        """Choose the next id of each sequence; logits (B, V)."""
        logits = logits.double()
        who = [sequence.id for sequence in sequences]
        if self._rows[0] != who:
            self._rows = (who, SamplingRows([sequence.request.sampling for sequence in sequences]))
        samplers = [self._samplers[id] for id in who]
        numbers = [sequence.num_completion_tokens for sequence in sequences]
        u = torch.tensor([it.draws[n] for it, n in zip(samplers, numbers, strict=True)], dtype=torch.float64)
        allowed = self._allowed(sequences)
        finite = logits.isfinite().all(dim=1).tolist()
        histories = [it.history for it in samplers]
        ids, certain = sample(logits, self._rows[1], u, self.tolerance, histories, allowed)
        results = []
        for b, (sequence, id, sure) in enumerate(zip(sequences, ids.tolist(), certain.tolist(), strict=True)):
            row = slice(b, b + 1)
            if not finite[b]:
                about = {"request_ids": [sequence.request.request_id]}
                logger.error("sequence %d: the model gave logits that are not finite", sequence.id, extra=about)
                results.append(Result(sequence, is_failed=True))
            elif sure:
                results.append(self._chosen(sequence, id, logits[row]))
            else:
                mask = None if allowed is None else allowed[row]
                self._undecided[sequence.id] = _Decision(sequence, logits[row], u[row], mask)
                results.append(Result(sequence, is_undecided=True))
        return results

    def _chosen(self, sequence: Sequence, id: int, logits: Tensor) -> Result:
        """logits (1, V)"""
        history = self._samplers[sequence.id].history
        if history is not None:
            history.append(id)
        logprobs = None if sequence.request.logprobs is None else _logprobs(logits, [id], sequence)
        return Result(sequence, id, logprobs)

    def _allowed(self, sequences: list[Sequence]) -> Tensor | None:
        """(B, V) bool: the ids that each sequence's pattern allows next; None: all ids for all sequences."""
        masks = [sequence.allowed() for sequence in sequences]
        if all(mask is None for mask in masks):
            return None
        allowed = np.ones((len(sequences), self.config.vocab_size), dtype=bool)
        for b, mask in enumerate(masks):
            if mask is not None:
                allowed[b] = mask
        return torch.from_numpy(allowed)

    @torch.inference_mode()
    def _exact_logits(self, sequence: Sequence) -> Tensor:
        """(1, V), by the fp64 model, after the text so far."""
        device = self.exact_model.head.weight.device
        idx = torch.tensor([sequence.ids[-self.config.receptive_field :]], device=device)
        return self.exact_model.last_logits(idx).cpu()

    @torch.inference_mode()
    def _measure_tolerance(self) -> float:
        """Four times the largest rounding error seen in this model's cached logits on this device, in nats."""
        config, rows = self.config, min(4, self.cache.slots)
        generator = torch.Generator().manual_seed(0)
        length, steps = config.block_size + config.block_size // 2, 8
        idx = torch.randint(config.vocab_size, (rows, length + steps), generator=generator)
        exact = self.exact_model(idx.to(self.exact_model.head.weight.device)).cpu()
        idx = idx.to(self._device)
        for slot in range(rows):
            self.cache.clear(slot)
        logits = [self.model(idx[:, :length], self.cache.prefill(range(rows), [length] * rows))]
        for t in range(length, length + steps):
            logits.append(self.model(idx[:, t : t + 1], self.cache.decode(rows)))
        error = torch.cat(logits, dim=1).cpu().double() - exact
        # A shift of all logits changes nothing, except where a repetition penalty looks at the logits themselves.
        shifted = error - error.mean(dim=-1, keepdim=True)
        return float(4 * torch.maximum(error.abs(), shifted.abs()).max())


def _run(function: Callable[[Sequence], Tensor], sequence: Sequence) -> Future[Tensor]:
    """Call now, in this thread, and wrap the outcome as an executor does."""
    future: Future[Tensor] = Future()
    try:
        future.set_result(function(sequence))
    except Exception as error:
        future.set_exception(error)
    return future


def _prompt_logprobs(piece: Prefill, logits: Tensor) -> Logprobs | None:
    """Of the prompt's ids that the logits (T, V) of one of its pieces predict."""
    request, start = piece.sequence.request, piece.sequence.num_prefilled
    assert request.score_from is not None
    first = max(start + 1, request.score_from)  # the id at index i is predicted at position i−1
    last = min(start + piece.count + 1, len(request.prompt))
    if first >= last:
        return None
    rows = logits[first - 1 - start : last - 1 - start].double()
    return _logprobs(rows, request.prompt[first:last], piece.sequence)


def _logprobs(logits: Tensor, ids: Seq[int], sequence: Sequence) -> Logprobs:
    """Of `ids` (N,) under logits (N, V), each with the alternatives that the sequence requests."""
    request = sequence.request
    logprobs = logits.log_softmax(dim=1)
    values = logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
    if request.logprob_ids:
        top_ids = torch.tensor(request.logprob_ids).expand(len(ids), -1)
        top_values = logprobs.gather(1, top_ids)
    elif request.logprobs:
        top_values, top_ids = logprobs.topk(min(request.logprobs, logits.size(1)), dim=1)
    else:
        return Logprobs(values)
    return Logprobs(values, top_ids.flatten().tolist(), top_values.flatten().tolist())
