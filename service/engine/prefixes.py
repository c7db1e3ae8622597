"""What each cache slot holds, so that a sequence can copy the beginning that it shares with another one.

It does bookkeeping only; the runner copies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from service.engine.sequence import Sequence
from service.model.config import GPTConfig

MIN_SHARED = 16  # characters; copying fewer costs as much as running them


class Found(NamedTuple):
    """A slot that holds the first `length` ids of a sequence, or is about to run them."""

    source: int
    length: int
    is_ready: bool


class Contents:
    """The ids in each cache slot from position 0 on, of running and of ended sequences.

    Each slot is a ring of W positions. After a text has outgrown the ring, only the whole text can be copied.
    """

    def __init__(self, slots: int, config: GPTConfig, piece: int = 1):
        self.window, self.piece = config.block_size, piece
        self.num_held = np.zeros(slots, dtype=np.int64)  # positions processed, generated ones included
        self.in_prefill = np.zeros(slots, dtype=bool)  # whether other sequences may wait for the slot's prompt
        self.num_compared = 0  # ids that the last `find` compared
        self._ids = np.full((slots, config.receptive_field), -1, dtype=np.int32)  # −1: after the last recorded id
        self._beginnings = np.zeros(slots, dtype=np.int64)  # hash of the first ids; 0: too short to be shared
        self._groups = np.full(slots, "", dtype=object)

    def start(self, slot: int, sequence: Sequence) -> None:
        """Record that a slot is empty and is about to run the sequence's prompt.

        A text that goes on in the middle is not recorded, because its first id is not at position 0.
        """
        self.num_held[slot] = 0
        # A sequence that is only scored runs last, so no other sequence waits for it.
        self.in_prefill[slot] = sequence.request.max_tokens > 0
        self._groups[slot] = sequence.request.reuse_group
        self._record(slot, sequence.to_run[: 0 if sequence.position else None])

    def ended(self, slot: int, sequence: Sequence) -> None:
        """Record the text that a sequence leaves in its slot.

        After an error, record no text, because keys and values may not be finite.
        """
        self.in_prefill[slot] = False
        if sequence.finish_reason == "error" or sequence.position:
            self._record(slot, sequence.to_run[:0])
        elif self.piece == 1:
            first = sequence.prefill_from
            self._record(slot, np.array(sequence.ids[first : first + self._ids.shape[1]], dtype=np.int32))
        # With pieces, keys and values of generated characters differ in bits from those of the same prompt, which
        # stays recorded.

    def last_chance(self, length: int) -> int:
        """Return how many positions a slot may have processed at most if its first `length` are to be copied."""
        return max(self.window, length)

    def find(self, sequence: Sequence) -> Found | None:
        """Find the slot of the sequence's group that shares the longest beginning with it.

        Among slots that share the same length, prefer a slot that can be copied now, then the lowest. Slots of other
        groups are not compared, because the time of a comparison would reveal their contents.
        """
        self.num_compared = 0
        ids = sequence.to_run[: sequence.max_shared][: self._ids.shape[1]]
        group = sequence.request.reuse_group
        beginning = _hash_of_beginning(ids, group)
        slots = np.flatnonzero(self._beginnings == beginning)
        if not beginning or not len(slots):
            return None
        slots = slots[self._groups[slots] == group]  # hashes of different groups may be equal
        slots = slots[self.num_held[slots] <= self.last_chance(len(ids))]
        slots = slots[np.argsort(self.in_prefill[slots], kind="stable")]
        best: Found | None = None
        for some in (slots[:1], slots[1:]):  # the first slot often shares everything that may be copied
            if best is not None and best.length == len(ids):
                break
            differs = self._ids[some, : len(ids)] != ids  # (B, T)
            self.num_compared += differs.size
            shared = np.where(differs.any(axis=1), differs.argmax(axis=1), len(ids))
            for slot, length, held in zip(some.tolist(), shared.tolist(), self.num_held[some].tolist(), strict=True):
                length = length if self.in_prefill[slot] else min(length, held)
                length -= length % self.piece
                is_ready = length <= held
                is_possible = length >= MIN_SHARED and held <= self.last_chance(length)
                if is_possible and (best is None or (length, is_ready) > (best.length, best.is_ready)):
                    best = Found(slot, length, is_ready)
        return best

    def _record(self, slot: int, ids: np.ndarray) -> None:
        ids = ids[: self._ids.shape[1]]
        self._ids[slot, : len(ids)] = ids
        self._ids[slot, len(ids) :] = -1
        self._beginnings[slot] = _hash_of_beginning(ids, self._groups[slot])


def _hash_of_beginning(ids: np.ndarray, group: str) -> int:
    return hash((group, ids[:MIN_SHARED].tobytes())) if len(ids) >= MIN_SHARED else 0
