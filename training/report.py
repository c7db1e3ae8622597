"""How much of what a model writes is copied from its training text, and how varied it is.

Everything works on arrays of ids in pieces, so the training text may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.model.tokenizer import CharTokenizer

PIECE = 1 << 22  # training characters hashed at a time
# Polynomial hashes modulo 2⁶⁴ with an odd base; whatever they find is compared character by character.
BASE = np.uint64(0x9E3779B97F4A7C15)
INVERSE = np.uint64(pow(int(BASE), -1, 1 << 64))


@dataclass(frozen=True)
class Copy:
    """A passage of a text that stands in the training text too."""

    length: int
    start: int  # in the text
    train_start: int


def describe_copies(text: np.ndarray, train: np.ndarray, tokenizer: CharTokenizer) -> dict[str, Any]:
    """Every figure of one text, by name."""
    copy = longest_copy(text, train)
    return {
        "characters": len(text),
        "longest copied passage": copy.length,
        "the passage": tokenizer.decode(text[copy.start : copy.start + copy.length].tolist()),
        "share of 50-grams copied": copied_share(text, train),
        **{f"distinct-{n}": distinct_n(text, n) for n in (1, 3, 10)},
    }


def longest_copy(text: np.ndarray, train: np.ndarray) -> Copy:
    """The longest passage of `text` (n,) that `train` (N,) holds; length 0 where they share no symbol.

    A binary search over the length: O((n + N) · log n · log N).
    """
    best = Copy(0, 0, 0)
    low, high = 1, min(len(text), len(train))
    while low <= high:
        length = (low + high) // 2
        found = next(_copies(text, train, length), None)
        if found is None:
            high = length - 1
        else:
            start, train_start = found
            while (  # it may go on for longer
                start + length < len(text)
                and train_start + length < len(train)
                and text[start + length] == train[train_start + length]
            ):
                length += 1
            best = Copy(length, start, train_start)
            low = length + 1
    return best


def copied_share(text: np.ndarray, train: np.ndarray, length: int = 50) -> float:
    """The share of all passages of `length` characters of `text` that stand in `train`; 0 for a shorter text."""
    total = len(text) - length + 1
    if total < 1:
        return 0.0
    unique, which = np.unique(_hashes(text, length), return_inverse=True)
    copied = np.zeros(len(unique), dtype=bool)  # of each different passage
    for i, _ in _copies(text, train, length):
        copied[which[i]] = True
    return float(copied[which].mean())


def distinct_n(text: np.ndarray, n: int) -> float:
    """Different n-grams over all n-grams of a text (Li et al. 2016); 1: nothing is repeated."""
    if len(text) < n:
        return 1.0
    windows = np.lib.stride_tricks.sliding_window_view(text, n)
    return len(np.unique(windows, axis=0)) / len(windows)


def _copies(text: np.ndarray, train: np.ndarray, length: int) -> Iterator[tuple[int, int]]:
    """Places (in text, in train) of passages of `length` that are the same, for each piece of `train` one of each."""
    hashes, first = np.unique(_hashes(text, length), return_index=True)
    for start, piece in _pieces(train, length):
        place = np.searchsorted(hashes, piece).clip(max=len(hashes) - 1)
        found = np.flatnonzero(hashes[place] == piece)
        for which, k in zip(*np.unique(place[found], return_index=True), strict=True):
            i, j = int(first[which]), start + int(found[k])
            if np.array_equal(text[i : i + length], train[j : j + length]):
                yield i, j


def _pieces(train: np.ndarray, length: int) -> Iterator[tuple[int, np.ndarray]]:
    """Hashes of all passages of `length` of the training text, piece by piece, with the place of the first."""
    for start in range(0, len(train) - length + 1, PIECE):
        yield start, _hashes(train[start : start + PIECE + length - 1], length)


def _hashes(ids: np.ndarray, length: int) -> np.ndarray:
    """Hash of each window of `length` ids: (len(ids) − length + 1,) uint64."""
    n = len(ids)
    inverse_powers = np.cumprod(np.concatenate(([np.uint64(1)], np.full(n - 1, INVERSE))), dtype=np.uint64)
    powers = np.cumprod(np.concatenate(([np.uint64(1)], np.full(n - 1, BASE))), dtype=np.uint64)
    sums = np.concatenate(([np.uint64(0)], np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * inverse_powers)))
    return (sums[length:] - sums[:-length]) * powers[: n - length + 1]
