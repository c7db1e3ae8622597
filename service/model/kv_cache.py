"""KV cache: preallocated slots, each a ring buffer of the last W positions of a sequence.

Position p is stored at ring index p mod W. So the memory and the cost of a decode step do not depend on the length of
the text. The cache knows nothing about requests or the assignment of slots.

Letters as in gpt.py; S' is the number of keys that a pass reads for each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from service.model.config import GPTConfig


class KVCache:
    """The keys and values of `slots` sequences, and a spare slot.

    Each slot is a ring of `config.block_size` positions. Padding, and rows that only fill a batch, write to the spare
    slot, which has the number `slots`.

    Bytes: 2 · n_layer · (slots + 1) · n_kv_head · block_size · head_dim · element size.
    """

    def __init__(self, config: GPTConfig, slots: int, device: torch.device | str, dtype: torch.dtype):
        self.window = config.block_size
        self.slots = slots
        shape = (config.n_layer, slots + 1, config.n_kv_head, self.window, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = [0] * (slots + 1)  # number of positions written to each slot, which may exceed W

    def empty(self, slot: int, position: int = 0) -> None:
        """Empty a slot before another sequence uses it. position: of the first character that it will hold.

        The old keys and values become 0. Masking alone does not remove values that are not finite, because 0 times such
        a value is NaN.
        """
        self.lengths[slot] = position
        self.keys[:, slot] = self.values[:, slot] = 0.0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`, which then holds nothing else."""
        assert length <= self.lengths[source] <= max(self.window, length), "its ring must hold the last W of them"
        used = min(length, self.window)
        for ring in (self.keys, self.values):
            ring[:, target, :, :used] = ring[:, source, :, :used]
        self.lengths[target] = length


class CacheRows:
    """The rows of one forward pass, as a view of the cache.

    Row b appends `counts[b]` characters to slot `slots[b]`. Rows are padded on the right to T, the largest count.

    positions: (B, T) int64.
    mask: it is added to the scores (B, nh, T, S'), and broadcasts to their shape. It is 0 if the query sees the key,
        and −∞ otherwise. (A boolean mask would be converted to this form in each layer.)
    """

    def __init__(self, cache: KVCache, slots: Sequence[int], counts: Sequence[int]):
        device, W, T = cache.keys.device, cache.window, max(counts)
        starts = [cache.lengths[slot] for slot in slots]
        slot, start, count = (torch.tensor(it, device=device)[:, None] for it in (slots, starts, counts))  # (B, 1)
        offset = torch.arange(T, device=device)
        self.cache, self.positions = cache, start + offset
        # The last W characters of a row are written to its ring. Earlier ones and padding go to the spare slot.
        self.target = torch.where((offset < count) & (offset >= count - W), slot, cache.slots)  # (B, T)
        self.index = self.positions % W
        self.is_step = T == 1 and list(slots) == list(range(len(slots)))
        # A step reads its keys from the rings after writing to them, without a copy. Other passes concatenate the keys
        # of the rings and the new keys.
        self.rows: slice | Tensor = slice(0, len(slots)) if self.is_step else slot[:, 0]
        self.filled = min(max(starts) + self.is_step, W)
        ring = torch.arange(self.filled, device=device)
        if self.is_step:
            # A full ring holds exactly the positions p − W < j ≤ p. Until it is full, only p + 1 entries are valid.
            seen = (ring <= self.positions)[:, None]  # (B, 1, S')
        else:
            # Ring index i holds the last position before `start` that is congruent to i mod W; negative: it is empty.
            key = torch.cat((start - 1 - (start - 1 - ring) % W, self.positions), dim=1)  # (B, S')
            distance = self.positions[:, :, None] - key[:, None]  # (B, T, S'); no query sees the later padding
            seen = (distance >= 0) & (distance < W) & (key >= 0)[:, None]
        self.mask = additive(seen[:, None], cache.keys.dtype)
        for it, n in zip(slots, counts, strict=True):
            cache.lengths[it] += n

    def update_and_fetch(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (B, nkv, T, hs). Return the keys and values to attend to, (B, nkv, S', hs) each."""
        fetched = []
        for ring, new in ((self.cache.keys[layer], k), (self.cache.values[layer], v)):
            held = ring[self.rows, :, : self.filled]
            fetched.append(held if self.is_step else torch.cat((held, new), dim=2))
            ring[self.target, :, self.index] = new.transpose(1, 2)
        return fetched[0], fetched[1]


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask to add to scores: 0 for a key that the query sees, −∞ for any other."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
