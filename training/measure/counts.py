"""Models of a training split that only count. They are baselines, and a network can learn from the counts.

This module works on ids and needs no torch.
"""

from __future__ import annotations

import math

import numpy as np

from service.model.counts import Counts

SCORED_AT_ONCE = 1 << 20  # characters scored at a time
TABLE_BYTES = 1 << 27  # of the table that a network learns from


def baselines(train: np.ndarray, val: np.ndarray, at: np.ndarray, counts: Counts) -> dict[str, float]:
    """Return the mean loss of each baseline, in nats per character, on the characters of `val` at the places `at`.

    As for the model, the characters before them are context. The unigram model has add-one smoothing.
    """
    vocab_size = counts.vocab_size
    occurrences = np.zeros(vocab_size, np.int64)
    for start in range(0, len(train), SCORED_AT_ONCE):
        occurrences += np.bincount(train[start : start + SCORED_AT_ONCE], minlength=vocab_size)
    unigram = -np.log((occurrences + 1) / (len(train) + vocab_size))
    p, _ = counted(counts, val, at)
    return {
        "uniform": math.log(vocab_size),
        "unigram": float(unigram[val[at]].mean()),
        "kneser_ney": float(-np.log(p).mean()),
    }


def counted(counts: Counts, ids: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the probability of the characters of a text at some places, and the class of the history of each.

    at: (n,) places ≥ 1, in order. Returns (n,) float64 and (n,) int64.
    """
    p, classes = np.empty(len(at)), np.empty(len(at), np.int64)
    for start in range(1, len(ids), SCORED_AT_ONCE):
        own = slice(*np.searchsorted(at, (start, start + SCORED_AT_ONCE)).tolist())
        if own.start < own.stop:
            first = max(0, start - (counts.order - 1))
            found = counts.probabilities(ids[first : start + SCORED_AT_ONCE])
            p[own], classes[own] = (values[at[own] - first - 1] for values in found)
    return p, classes


class Predictions:
    """The distributions of counts after their contexts, in one table, to learn from.

    The table has the contexts of as many lengths as fit in TABLE_BYTES, at least the empty one.
    """

    def __init__(self, counts: Counts):
        self.counts, first_child, first_follower = counts, counts.first_child, counts.first_follower
        ends, row_bytes = [1], 4 * counts.vocab_size  # of the contexts of each length
        while len(ends) < counts.order and int(first_child[ends[-1]]) * row_bytes <= TABLE_BYTES:
            ends.append(int(first_child[ends[-1]]))
        self.table = np.empty((ends[-1], counts.vocab_size), np.float32)
        self.table[0] = counts.base
        parents = np.repeat(np.arange(len(counts.children)), counts.children)  # of all contexts but the first
        for start, end in zip(ends, ends[1:], strict=False):
            rows = self.table[start:end]
            np.take(self.table, parents[start - 1 : end - 1], axis=0, out=rows)
            rows *= counts.rests[start:end, None].astype(np.float32)
            own = slice(first_follower[start], first_follower[end])
            at = np.repeat(np.arange(end - start), counts.followers[start:end])
            rows[at, counts.ids[own]] += counts.shares[own].astype(np.float32)
        self.lengths = len(ends) - 1

    def after(self, ids: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return the distribution of the character after each of `ids`: (T,) -> (T, V) float32.

        starts: places in `ids` where a text starts, in order; no context reaches beyond them.
        """
        place = np.arange(len(ids))
        place -= np.repeat(starts, np.diff(starts, append=len(ids)))
        histories = np.full((self.lengths, len(ids)), -1, np.int64)
        for age, history in enumerate(histories):
            has_it = np.flatnonzero(place >= age)
            history[has_it] = ids[has_it - age]
        rows = np.zeros(len(ids), np.int64)
        for context in self.counts.walk(histories):
            np.copyto(rows, context, where=context >= 0)
        return self.table[rows]
