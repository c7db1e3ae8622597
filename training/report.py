"""Memorization and diversity: how much of a text is copied from the training text, and how often it repeats itself.

Of records: how many are unique, novel and valid.

The training text is processed in chunks and may be larger than memory; not so one of records.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.model.tokenizer import CharTokenizer

CHUNK = 1 << 22  # training characters hashed at a time
# Polynomial hashes modulo 2⁶⁴ with an odd base; matches are verified character by character.
BASE = np.uint64(0x9E3779B97F4A7C15)
INVERSE = np.uint64(pow(int(BASE), -1, 1 << 64))


class CheckError(ValueError):
    """The command that checks records cannot be used."""


@dataclass(frozen=True)
class Copy:
    """A passage of a text that also occurs in the training text."""

    length: int
    start: int  # in the text
    train_start: int


def describe_copies(text: np.ndarray, train: np.ndarray, tokenizer: CharTokenizer) -> dict[str, Any]:
    """The row labels and values of the command's table."""
    copy = longest_copy(text, train)
    return {
        "characters": len(text),
        "longest copied passage": copy.length,
        "copied text": tokenizer.decode(text[copy.start : copy.start + copy.length].tolist()),
        "share of 50-grams copied": copied_share(text, train),
        **{f"distinct-{n}": distinct_n(text, n) for n in (1, 3, 10)},
    }


def describe_records(records: Sequence[str], known: Set[str], check: str | None = None) -> dict[str, Any]:
    """The same for records: the shares that are different from each other, not among the `known`, and valid."""
    different = set(records)
    figures = {
        "records": len(records),
        "characters per record": sum(map(len, records)) / len(records),
        "share that is unique": len(different) / len(records),
        "share that is novel": sum(record not in known for record in records) / len(records),
    }
    if check is not None:
        valid = valid_records(different, check)
        figures["share that is valid"] = sum(record in valid for record in records) / len(records)
    return figures


def valid_records(records: Set[str], check: str) -> Set[str]:
    """Those that the shell command `check` prints when it is given all of them, a line each, as grep does.

    Raises:
        CheckError: the command failed, with a status above 1, or printed another line.
    """
    given = "".join(f"{record}\n" for record in sorted(records))
    done = subprocess.run(check, shell=True, input=given.encode(), stdout=subprocess.PIPE)
    if not 0 <= done.returncode <= 1:  # 1: grep has found none
        raise CheckError(f"--check {check!r} ended with status {done.returncode}")
    printed = set(done.stdout.decode(errors="replace").removesuffix("\n").split("\n")) if done.stdout else set()
    if other := printed - records:
        raise CheckError(f"--check {check!r} printed {min(other)!r}, which is not a record that it was given")
    return printed


def longest_copy(text: np.ndarray, train: np.ndarray) -> Copy:
    """The longest passage of `text` (n,) that occurs in `train` (N,); length 0 if they share no character.

    Binary search over the length, in O((n + N) · log n · log N).
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
            while (  # extend the match to the right
                start + length < len(text)
                and train_start + length < len(train)
                and text[start + length] == train[train_start + length]
            ):
                length += 1
            best = Copy(length, start, train_start)
            low = length + 1
    return best


def copied_share(text: np.ndarray, train: np.ndarray, length: int = 50) -> float:
    """The share of the `length`-grams of `text` that occur in `train`; 0 for a shorter text."""
    total = len(text) - length + 1
    if total < 1:
        return 0.0
    unique, which = np.unique(_hashes(text, length), return_inverse=True)
    copied = np.zeros(len(unique), dtype=bool)  # per distinct n-gram
    for i, _ in _copies(text, train, length):
        copied[which[i]] = True
    return float(copied[which].mean())


def distinct_n(text: np.ndarray, n: int) -> float:
    """Distinct n-grams over all n-grams of a text (Li et al. 2016); 1: no n-gram repeats."""
    if len(text) < n:
        return 1.0
    windows = np.lib.stride_tricks.sliding_window_view(text, n)
    return len(np.unique(windows, axis=0)) / len(windows)


def _copies(text: np.ndarray, train: np.ndarray, length: int) -> Iterator[tuple[int, int]]:
    """Offsets (in text, in train) of common passages of `length`, each distinct one once per chunk of `train`."""
    hashes, first = np.unique(_hashes(text, length), return_index=True)
    for start in range(0, len(train) - length + 1, CHUNK):
        chunk = _hashes(train[start : start + CHUNK + length - 1], length)
        place = np.searchsorted(hashes, chunk).clip(max=len(hashes) - 1)
        found = np.flatnonzero(hashes[place] == chunk)
        for which, k in zip(*np.unique(place[found], return_index=True), strict=True):
            i, j = int(first[which]), start + int(found[k])
            if np.array_equal(text[i : i + length], train[j : j + length]):
                yield i, j


def _hashes(ids: np.ndarray, length: int) -> np.ndarray:
    """Rolling hash of each window of `length` ids: (len(ids) − length + 1,) uint64."""
    n = len(ids)
    inverse_powers = np.cumprod(np.concatenate(([np.uint64(1)], np.full(n - 1, INVERSE))), dtype=np.uint64)
    powers = np.cumprod(np.concatenate(([np.uint64(1)], np.full(n - 1, BASE))), dtype=np.uint64)
    sums = np.concatenate(([np.uint64(0)], np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * inverse_powers)))
    return (sums[length:] - sums[:-length]) * powers[: n - length + 1]
