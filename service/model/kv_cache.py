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

    def empty(self, slot: int) -> None:
        """Before another sequence. A masked key or value counts 0 times, which one that is not finite would survive."""
        self.lengths[slot] = 0
        self.keys[:, slot] = self.values[:, slot] = 0.0

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of a slot become another slot's whole content."""
        assert length <= self.lengths[source] <= max(self.window, length), "its ring must hold the last W of them"
        used = min(length, self.window)
        for ring in (self.keys, self.values):
            ring[:, target, :, :used] = ring[:, source, :, :used]
        self.lengths[target] = length


class CacheRows:
    """The rows of one forward, which appends `counts[b]` characters to slot `slots[b]`, padded to T on the right.

    positions (B, T) int64; mask broadcasts to scores (B, nh, T, S') and is added to them: 0 where a query sees a key,
    −∞ elsewhere. (Each layer would have to convert a boolean mask to this form.)
    """

    def __init__(self, cache: KVCache, slots: Sequence[int], counts: Sequence[int]):
        device, W, T = cache.keys.device, cache.window, max(counts)
        starts = [cache.lengths[slot] for slot in slots]
        slot, start, count = (torch.tensor(it, device=device)[:, None] for it in (slots, starts, counts))  # (B, 1)
        offset = torch.arange(T, device=device)
        self.cache, self.positions = cache, start + offset
        # Only the last W characters of a row are kept in its ring; others and padding go to the spare slot.
        self.target = torch.where((offset < count) & (offset >= count - W), slot, cache.slots)  # (B, T)
        self.index = self.positions % W
        self.is_step = T == 1 and list(slots) == list(range(len(slots)))
        # Keys: after the write, in rings that are read where they are; else those of the rings, then the new ones.
        self.rows: slice | Tensor = slice(0, len(slots)) if self.is_step else slot[:, 0]
        self.filled = min(max(starts) + self.is_step, W)
        ring = torch.arange(self.filled, device=device)
        if self.is_step:
            # A full ring holds exactly the band p − W < j ≤ p; before that, only its first p + 1 entries are valid.
            seen = (ring <= self.positions)[:, None]  # (B, 1, S')
        else:
            # Ring index i holds the latest position before `start` that is congruent to i mod W; negative: empty.
            key = torch.cat((start - 1 - (start - 1 - ring) % W, self.positions), dim=1)  # (B, S')
            distance = self.positions[:, :, None] - key[:, None]  # (B, T, S'); padding is after all that is seen
            seen = (distance >= 0) & (distance < W) & (key >= 0)[:, None]
        self.mask = additive(seen[:, None], cache.keys.dtype)
        for it, n in zip(slots, counts, strict=True):
            cache.lengths[it] += n

    def update_and_fetch(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (B, nkv, T, hs); returns the keys and values to attend to, (B, nkv, S', hs) each."""
        fetched = []
        for ring, new in ((self.cache.keys[layer], k), (self.cache.values[layer], v)):
            held = ring[self.rows, :, : self.filled]
            fetched.append(held if self.is_step else torch.cat((held, new), dim=2))
            ring[self.target, :, self.index] = new.transpose(1, 2)
        return fetched[0], fetched[1]


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query sees a key, −∞ elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
