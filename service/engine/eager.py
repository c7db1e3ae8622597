"""The backend "torch": GPT, KVCache and the reference sampler, run eagerly on any device.

A decode step covers the cache slots 0 … the highest one asked for, as one slice; rows in between compute what nobody
reads. Kernels round differently at different batch sizes: in float64, the default, a choice that this could change
occurs about once in 10¹²; in float32 and bfloat16 a text may depend on what runs beside it.

Letters: B rows, K steps, T characters, V vocab_size.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from service.constrain.automaton import Guide
from service.engine.runner import FAILED, NONE, Outcome, Piece, Runner, check_ids, masks_of
from service.model.gpt import GPT
from service.model.kv_cache import KVCache
from service.model.params import SamplingParams
from service.model.sampling import Draws, History, SamplingRows, sample

DRAWS = 256  # of each slot, computed at once


class TorchRunner(Runner):
    """`model` is copied in `dtype` to `device`; `threads`: of torch, in this process."""

    backend = "torch"

    def __init__(self, model: GPT, slots: int, dtype: str, device: torch.device | str = "cpu", threads: int = 1):
        torch.set_num_threads(threads)
        self.dtype, self.slots, self.config = dtype, slots, model.config
        self.model = copy.deepcopy(model).to(device, getattr(torch, dtype)).eval().requires_grad_(False)
        weight = self.model.head.weight
        self._device = weight.device
        self.cache = KVCache(model.config, slots, weight.device, weight.dtype)
        self._last = np.zeros(slots, dtype=np.int64)  # the id that the next decode step feeds
        self._draws = Draws(slots, DRAWS)
        self._params = [SamplingParams()] * slots
        self._histories: list[History | None] = [None] * slots  # where a penalty needs it
        self._rows: tuple[bytes, SamplingRows] = (b"", SamplingRows([]))  # of the last call, by its slots

    def start(self, slot: int, params: SamplingParams, prompt: Sequence[int]) -> None:
        V = self.config.vocab_size
        check_ids(params, prompt, V)
        self.cache.clear(slot)
        self._draws.start(slot, params.seed)
        self._params[slot] = params
        self._histories[slot] = History(V, prompt) if params.needs_history else None
        self._rows = (b"", self._rows[1])

    def copy(self, source: int, target: int, length: int) -> None:
        self.cache.copy(source, target, length)

    def prefill(self, pieces: list[Piece]) -> Outcome:
        """Pieces are padded to the longest of a forward, at most to twice their length."""
        order = sorted(range(len(pieces)), key=lambda b: len(pieces[b].ids))
        groups: list[list[int]] = []
        for b in order:
            if not groups or len(pieces[b].ids) > 2 * len(pieces[groups[-1][0]].ids):
                groups.append([])
            groups[-1].append(b)
        ids = np.full((len(pieces), 1), NONE, dtype=np.int32)
        logits: dict[int, np.ndarray] = {}
        for group in groups:
            outcome = self._prefill([pieces[b] for b in group])
            ids[group] = outcome.ids
            logits |= {group[i]: rows for i, rows in outcome.logits.items()}
        return Outcome(ids, logits)

    @torch.inference_mode()
    def _prefill(self, pieces: list[Piece]) -> Outcome:
        slots, counts = [piece.slot for piece in pieces], [len(piece.ids) for piece in pieces]
        idx = np.zeros((len(pieces), max(counts)), dtype=np.int64)  # (B, T), padded on the right
        for b, piece in enumerate(pieces):
            idx[b, : counts[b]] = piece.ids
        cache = self.cache.prefill(slots, counts)
        logits = self.model(torch.from_numpy(idx).to(self._device), cache).cpu()  # (B, T, V)
        ids = np.full((len(pieces), 1), NONE, dtype=np.int32)
        complete = [b for b, piece in enumerate(pieces) if piece.choose]
        if complete:
            last = torch.tensor([counts[b] - 1 for b in complete])
            masks = masks_of({i: guide for i, b in enumerate(complete) if (guide := pieces[b].guide)})
            who = np.array(slots)[complete]
            u = self._draws.take(who, np.ones(len(who), dtype=np.int64))[:, 0]
            ids[complete, 0] = self._choose(logits[torch.tensor(complete), last].double(), who, u, masks)
            self._take(who, ids[complete, 0])
        wanted = {b: logits[b, : counts[b]].double().numpy() for b, piece in enumerate(pieces) if piece.wants_logits}
        return Outcome(ids, wanted)

    @torch.inference_mode()
    def decode(
        self, slots: np.ndarray, steps: np.ndarray, guides: dict[int, Guide], wants_logits: Collection[int]
    ) -> Outcome:
        B, K, width = len(slots), int(steps.max()), int(slots.max()) + 1
        ids = np.full((B, K), NONE, dtype=np.int32)
        u = self._draws.take(slots, steps)
        logits_of: dict[int, list[np.ndarray]] = {b: [] for b in wants_logits}
        alive = np.ones(B, dtype=bool)
        idx = torch.from_numpy(self._last[:width, None])  # shares memory: what `_take` writes is fed next
        for k in range(K):
            rows = np.flatnonzero(alive & (steps > k))
            active = np.zeros(width, dtype=bool)
            active[slots[rows]] = True
            logits = self.model(idx.to(self._device), self.cache.decode(active.tolist()))[:, -1].cpu()
            logits = logits[torch.from_numpy(slots[rows])].double()  # (rows, V)
            masks = masks_of({i: guides[b] for i, b in enumerate(rows.tolist()) if b in guides})
            ids[rows, k] = self._choose(logits, slots[rows], u[rows, k], masks)
            self._take(slots[rows], ids[rows, k])
            alive = ids[:, k] != FAILED
            for i, b in enumerate(rows.tolist()) if logits_of else ():
                if b in logits_of:
                    logits_of[b].append(logits[i].numpy())
        return Outcome(ids, {b: np.stack(rows) for b, rows in logits_of.items()})

    def _choose(self, logits: Tensor, slots: np.ndarray, u: np.ndarray, masks: dict[int, np.ndarray]) -> np.ndarray:
        """An id or FAILED for each row, (B,), from logits (B, V) fp64, draws u (B,) and allowed ids by row."""
        who = slots.tobytes()
        if self._rows[0] != who:
            self._rows = (who, SamplingRows([self._params[slot] for slot in slots.tolist()]))
        rows = self._rows[1]
        allowed = None
        if masks:
            allowed = torch.ones(logits.shape, dtype=torch.bool)
            for b, mask in masks.items():
                allowed[b] = torch.from_numpy(mask.copy())  # a mask is read-only, which torch would warn about
        histories = [self._histories[slot] for slot in slots.tolist()] if rows.penalised else None
        chosen = sample(logits, rows, torch.from_numpy(u), histories, allowed).numpy()
        return np.where(logits.isfinite().all(dim=1).numpy(), chosen, FAILED)

    def _take(self, slots: np.ndarray, ids: np.ndarray) -> None:
        """Feed each slot's chosen id to its next step, and count it."""
        self._last[slots] = np.maximum(ids, 0)
        for b in self._rows[1].penalised:
            history = self._histories[slots[b]]
            if history is not None and ids[b] != FAILED:
                history.append(ids[b])
