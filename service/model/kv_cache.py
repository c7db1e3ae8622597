"""KV cache: preallocated slots, each a ring buffer of the last W positions of a sequence.

Position p is stored at ring index p mod W, so that memory and the cost of a decode step do not depend on text length.
The cache knows nothing about requests or the assignment of slots.

Letters as in gpt.py; S slots, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from service.model.config import GPTConfig


class CacheRows:
    """The rows of one forward: their positions, their mask, and access to their slots.

    positions (B, T) int64; mask broadcasts to scores (B, nh, T, S') and is added to them: 0 where a query sees a key,
    −∞ elsewhere. (Each layer would have to convert a boolean mask to this form.)
    """

    positions: Tensor
    mask: Tensor

    def update_and_fetch(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (B, nkv, T, hs); returns the keys and values to attend to, (B, nkv, S', hs) each."""
        raise NotImplementedError


class KVCache:
    """`slots` rings of `config.block_size` keys and values each.

    Bytes: 2 · n_layer · (slots + 1) · n_kv_head · block_size · head_dim · element size. The spare slot, number `slots`,
    takes the writes of padding and of rows that only fill a batch.
    """

    def __init__(self, config: GPTConfig, slots: int, device: torch.device | str, dtype: torch.dtype):
        self.window = config.block_size
        self.slots = slots
        shape = (config.n_layer, slots + 1, config.n_kv_head, self.window, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = [0] * (slots + 1)  # characters seen by each slot; may exceed W

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self.lengths[slot] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of a slot become another slot's whole content.

        Raises:
            ValueError: the source has seen fewer characters, or so many that its ring has lost one of the last W of
                them.
        """
        seen = self.lengths[source]
        if not length <= seen <= max(self.window, length):
            allowed = f"{length} to {max(self.window, length)}"
            raise ValueError(f"to copy {length} positions the source must have seen {allowed}, got {seen}")
        used = min(length, self.window)
        self.keys[:, target, :, :used] = self.keys[:, source, :, :used]
        self.values[:, target, :, :used] = self.values[:, source, :, :used]
        self.lengths[target] = length

    def decode(self, active: Sequence[bool]) -> CacheRows:
        """Append one character to each active slot among 0 … len(active) − 1; the others keep their content."""
        return _DecodeRows(self, active)

    def prefill(self, slots: Sequence[int], counts: Sequence[int]) -> CacheRows:
        """Append `counts[b]` characters to slot `slots[b]`; rows are right-padded to the longest."""
        return _PrefillRows(self, slots, counts)


class _DecodeRows(CacheRows):
    def __init__(self, cache: KVCache, active: Sequence[bool]):
        device, self.rows = cache.keys.device, len(active)
        position = torch.tensor(cache.lengths[: self.rows], device=device)
        self.positions = position[:, None]  # (B, 1)
        self.cache = cache
        self.target = torch.tensor([slot if it else cache.slots for slot, it in enumerate(active)], device=device)
        self.index = position % cache.window
        # A full ring holds exactly the band p − W < j ≤ p; before that, only its first p + 1 entries are valid.
        self.filled = min(max(cache.lengths[: self.rows]) + 1, cache.window)
        seen = torch.arange(self.filled, device=device) <= position[:, None]
        self.mask = additive(seen[:, None, None], cache.keys.dtype)
        for slot, it in enumerate(active):
            cache.lengths[slot] += it

    def update_and_fetch(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.target, :, self.index] = k[:, :, 0]
        values[self.target, :, self.index] = v[:, :, 0]
        return keys[: self.rows, :, : self.filled], values[: self.rows, :, : self.filled]


class _PrefillRows(CacheRows):
    def __init__(self, cache: KVCache, slots: Sequence[int], counts: Sequence[int]):
        device, W = cache.keys.device, cache.window
        T = max(counts)
        start = torch.tensor([cache.lengths[slot] for slot in slots], device=device)[:, None]  # (B, 1)
        count = torch.tensor(counts, device=device)[:, None]
        offset = torch.arange(T, device=device)
        self.positions = start + offset  # (B, T)
        self.cache = cache
        self.slots = torch.tensor(slots, device=device)
        # Only the last W characters of a row are kept in its ring; others and padding go to the spare slot.
        stays = (offset < count) & (offset >= count - W)
        self.target = torch.where(stays, self.slots[:, None], cache.slots)  # (B, T)
        self.index = self.positions % W

        key_position = self.positions
        key_exists = offset < count
        self.has_past = bool((start > 0).any())
        if self.has_past:
            # Ring index i holds the latest position before `start` that is congruent to i mod W.
            ring = torch.arange(W, device=device)
            past = start - 1 - (start - 1 - ring) % W  # (B, W); negative: empty
            key_position = torch.cat((past, key_position), dim=1)
            key_exists = torch.cat((past >= 0, key_exists), dim=1)
        distance = self.positions[:, :, None] - key_position[:, None]  # (B, T, S')
        seen = (distance >= 0) & (distance < W) & key_exists[:, None]
        # A padding query sees itself, so that its softmax is defined.
        seen |= (distance == 0) & ~key_exists[:, None]
        self.mask = additive(seen[:, None], cache.keys.dtype)
        for slot, n in zip(slots, counts, strict=True):
            cache.lengths[slot] += n

    def update_and_fetch(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        fetched_k, fetched_v = k, v
        if self.has_past:
            fetched_k = torch.cat((keys[self.slots], k), dim=2)
            fetched_v = torch.cat((values[self.slots], v), dim=2)
        keys[self.target, :, self.index] = k.transpose(1, 2)
        values[self.target, :, self.index] = v.transpose(1, 2)
        return fetched_k, fetched_v


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query sees a key, −∞ elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
