"""Compute losses of pieces of texts with the service's native engine, which scores several texts at a time.

Each thread of the engine takes texts of its own, so no thread waits for another within a text. The engine computes in
float32 throughout, as GPT.forward does. `evaluate.piece_sums` is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from service.engine import native
from service.engine.runner import NONE, Piece, Report, Runner
from service.engine.selfcheck import SelfCheckError
from service.model.gpt import GPT
from service.model.params import SamplingParams
from training.selfcheck import computes

SLOTS = 32  # texts scored at a time, if their keys and values fit in CACHE_BYTES
CACHE_BYTES = 1 << 28
CHUNK = 1024  # characters of a text in one call
WARM_UP_SHARE = 1 / 8  # largest share of warm-up, compared with the targets of a part of a long text


@dataclass
class _Part:
    """Targets of one piece: the characters that follow ids[start : start + length], without the first `skip`."""

    piece: int
    start: int
    length: int
    skip: int
    done: int = 0


class NativeScorer:
    def __init__(self, runner: Runner, threads: int):
        self.runner, self.threads = runner, threads

    @classmethod
    def of(cls, model: GPT) -> NativeScorer | None:
        """Return a scorer for the model, or None if the engine cannot run here or gpt.py computes another model."""
        weight, config = model.head.weight, model.config
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or native.why_not() is not None:
            return None
        threads = torch.get_num_threads()
        slot_bytes = 2 * 4 * config.n_layer * config.n_kv_head * config.block_size * config.head_dim
        slots = max(threads, min(SLOTS, CACHE_BYTES // slot_bytes))
        weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
        try:
            runner = native.NativeRunner(config, weights, slots, threads, half_cache=False)
        except SelfCheckError:
            return None
        return cls(runner, threads) if computes(runner, model) else None

    def piece_sums(
        self,
        ids: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        advance: Callable[[int], object] = int,
        skips: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return what `evaluate.piece_sums` returns: the summed loss of each piece's targets, (pieces,) float64."""
        if not all(((starts + lengths) < len(ids)) | (lengths == 0)):  # the engine is given pointers
            raise ValueError("a piece ends beyond the text")
        sums = np.zeros(len(lengths))
        skips = np.zeros(len(lengths), np.int64) if skips is None else skips
        order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]  # the longest first
        waiting = [
            part for i in order.tolist() for part in self._parts(i, int(starts[i]), int(lengths[i]), int(skips[i]))
        ][::-1]
        running: dict[int, _Part] = {}  # by slot
        while waiting or running:
            for slot in range(self.runner.slots):
                if slot not in running and waiting:
                    running[slot] = waiting.pop()
                    self.runner.start(slot, SamplingParams(seed=0), [])
            pieces = [_next_piece(ids, slot, part) for slot, part in running.items()]
            outcome = self.runner.prefill(pieces)()
            num_scored = 0
            for b, (piece, (slot, part)) in enumerate(zip(pieces, [*running.items()], strict=True)):
                if b in outcome.reports:
                    logprobs = np.frombuffer(outcome.reports[b].values, np.float64)
                    sums[part.piece] -= logprobs.sum()
                    num_scored += len(logprobs)
                part.done += len(piece.ids)
                if part.done == part.length:
                    del running[slot]
            advance(num_scored)
        return sums

    def _parts(self, piece: int, start: int, length: int, skip: int) -> list[_Part]:
        """Divide a long piece into at most one part for each thread.

        A part begins with the characters on which its first target depends.
        """
        warm_up = self.runner.config.receptive_field - 1
        most = int((length - skip) * WARM_UP_SHARE / max(1, warm_up))
        bounds = np.linspace(skip, length, max(1, min(self.threads, most)) + 1).astype(int).tolist()
        parts = []
        for first, end in zip(bounds, bounds[1:], strict=False):
            before = first if first == skip else warm_up
            parts.append(_Part(piece, start + first - before, end - first + before, before))
        return parts


def _next_piece(ids: np.ndarray, slot: int, part: _Part) -> Piece:
    first = part.start + part.done
    count = min(CHUNK, part.length - part.done)
    skip = part.skip - part.done  # number of these targets that serve only as context
    inputs, targets = (ids[first + ahead : first + ahead + count].astype(np.int32) for ahead in (0, 1))
    if skip >= count:
        return Piece(slot, inputs)
    targets[: max(0, skip)] = NONE
    return Piece(slot, inputs, report=Report(), targets=targets)
