"""The backend "torch": it runs GPT, KVCache and the reference sampler eagerly on any device.

If a call decodes at least half of the cache slots up to the highest one, each step runs slots 0 to that one as one
slice, and discards the results of the other rows. Otherwise it gathers the slots.

Kernels round differently at different batch sizes. In float64, the default, this could change about one choice in
10¹². In float32 and bfloat16, a text may depend on the other sequences in its batch.

Letters: B rows, K steps, T characters, V vocab_size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from service.constrain.automaton import Guide
from service.engine.runner import FAILED, HISTORY, NONE, Outcome, Piece, Report, Runner, allowed_by, report_of
from service.model.counts import Counts, mixed_logits
from service.model.gpt import GPT
from service.model.kv_cache import CacheRows, KVCache
from service.model.params import SamplingParams
from service.model.sampling import Draws, Sampler
from service.wire import Logprobs


class TorchRunner(Runner):
    """Runs a copy of `model` in `dtype` on `device`, mixed with `counts` if these have weights above 0."""

    backend = "torch"

    def __init__(
        self,
        model: GPT,
        slots: int,
        dtype: str,
        device: torch.device | str = "cpu",
        counts: Counts | None = None,
    ):
        self.dtype, self.slots, self.config = dtype, slots, model.config
        self.model = copy.deepcopy(model).to(device, getattr(torch, dtype)).eval().requires_grad_(False)
        weight = self.model.head.weight
        self._device = weight.device
        self.cache = KVCache(model.config, slots, weight.device, weight.dtype)
        self._last = np.zeros(slots, dtype=np.int64)  # the id that the next decode step feeds
        self._counts = counts if counts is not None and counts.is_mixed else None
        self._recent = np.full((HISTORY, slots), NONE, dtype=np.int64)  # the last ids of each slot, the newest first
        self._draws = Draws(slots)
        self._sampler = Sampler(slots, model.config.vocab_size)

    def start(
        self,
        slot: int,
        params: SamplingParams,
        prompt: Sequence[int],
        ends: Sequence[int] = (),
        written: Sequence[int] = (),
        position: int = 0,
    ) -> None:
        self._sampler.start(slot, params, prompt, written)
        self.cache.empty(slot, position)
        self._draws.start(slot, params.seed, len(written))

    def copy(self, source: int, target: int, length: int) -> None:
        self.cache.copy(source, target, length)

    @torch.inference_mode()
    def prefill(self, pieces: list[Piece]) -> Outcome:
        """Run pieces in forwards of similar lengths, padding each to at most twice its length."""
        ids = np.full((len(pieces), 1), NONE, dtype=np.int32)
        reports: dict[int, Logprobs] = {}
        left = sorted(range(len(pieces)), key=lambda b: len(pieces[b].ids))
        while left:
            group = [b for b in left if len(pieces[b].ids) <= 2 * len(pieces[left[0]].ids)]
            del left[: len(group)]
            slots = np.array([pieces[b].slot for b in group])
            counts = [len(pieces[b].ids) for b in group]
            idx = np.zeros((len(group), max(counts)), dtype=np.int64)  # (B, T), padded on the right
            for i, b in enumerate(group):
                idx[i, : counts[i]] = pieces[b].ids
            cache = CacheRows(self.cache, slots.tolist(), counts)
            logits = self.model(torch.from_numpy(idx).to(self._device), cache).cpu()  # (B, T, V)
            if self._counts is not None:
                logits = logits.double()
                for i, b in enumerate(group):
                    self._mix_piece(logits[i, : counts[i]].numpy(), pieces[b])
            complete = [i for i, b in enumerate(group) if pieces[b].choose]
            if complete:
                rows, who = [group[i] for i in complete], slots[complete]
                last = logits[complete, [counts[i] - 1 for i in complete]].double()
                u = self._draws.take(who, np.ones(len(who), dtype=np.int64))[:, 0]
                guides = {i: guide for i, b in enumerate(rows) if (guide := pieces[b].guide)}
                ids[rows, 0] = self._choose(last, who, u, guides)
            for i, b in enumerate(group):
                if pieces[b].report is not None:
                    reports[b] = pieces[b].report_of(logits[i].double().numpy(), int(ids[b, 0]))
        return Outcome(ids, reports)

    @torch.inference_mode()
    def decode(
        self, slots: np.ndarray, steps: np.ndarray, guides: Mapping[int, Guide] = {}, reports: Mapping[int, Report] = {}
    ) -> Outcome:
        B, K, width = len(slots), int(steps.max()), int(slots.max()) + 1
        # The slots that the forward runs, and the row of each requested slot in the forward.
        which, places = (np.arange(width), slots) if width <= 2 * B else (slots, np.arange(B))
        ids = np.full((B, K), NONE, dtype=np.int32)
        u = self._draws.take(slots, steps)
        found = {b: Logprobs() for b in reports}
        for k in range(K):
            rows = np.flatnonzero(steps > k)
            counts = np.zeros(len(which), dtype=np.int64)
            counts[places[rows]] = 1
            cache = CacheRows(self.cache, which.tolist(), counts.tolist())
            idx = torch.from_numpy(self._last[which, None])
            logits = self.model(idx.to(self._device), cache).cpu()[places[rows], -1].double()  # (rows, V)
            if self._counts is not None:
                histories = self._recent[: self._counts.order - 1, slots[rows]]
                logits = torch.from_numpy(mixed_logits(logits.numpy(), *self._counts.after(histories)))
            row_guides = {i: guides[b] for i, b in enumerate(rows.tolist()) if b in guides}
            ids[rows, k] = self._choose(logits, slots[rows], u[rows, k], row_guides)
            for i, b in enumerate(rows.tolist()) if reports else ():
                if b in reports:
                    found[b].extend(report_of(logits[i : i + 1].numpy(), ids[b, k : k + 1], reports[b]))
        return Outcome(ids, found)

    def _mix_piece(self, logits: np.ndarray, piece: Piece) -> None:
        """Mix the needed rows of logits (T, V) in place, and record the ids before the next choice."""
        assert self._counts is not None
        text = np.append(piece.before, piece.ids)
        last = text[: -HISTORY - 1 : -1]
        self._recent[:, piece.slot] = NONE
        self._recent[: len(last), piece.slot] = last
        is_needed = np.zeros(len(piece.ids), bool) if piece.targets is None else piece.targets != NONE
        is_needed[-1] |= piece.choose
        histories = self._counts.histories(text)[:, len(piece.before) :][:, is_needed]
        logits[is_needed] = mixed_logits(logits[is_needed], *self._counts.after(histories))

    def _choose(self, logits: Tensor, slots: np.ndarray, u: np.ndarray, guides: Mapping[int, Guide]) -> np.ndarray:
        """Choose an id for each row from logits (B, V) fp64, draws u (B,) and guides by row. Return (B,) ids or FAILED.

        Count the id for the penalties, and record it as the last of its slot.
        """
        allowed = torch.from_numpy(allowed_by(guides, tuple(logits.shape))) if guides else None
        self._sampler.send()
        which, needs_all = torch.from_numpy(slots), bool(self._sampler.needs_all[slots].any())
        ids, is_finite = self._sampler.choose(logits, which, torch.from_numpy(u), allowed, needs_all)
        self._sampler.counts[which, ids] += is_finite.double()
        self._last[slots] = ids.numpy()
        self._recent[1:, slots] = self._recent[:-1, slots]
        self._recent[0, slots] = self._last[slots]
        return np.where(is_finite.numpy(), ids.numpy(), FAILED)
