"""Measure how much of a text is copied from the training text and how often the text repeats itself.

For records, count the unique, novel, copied and valid ones, and measure their lengths.

The training text is processed in chunks and may be larger than memory. A training text of records must fit in memory.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.local import Answer
from service.model.tokenizer import CharTokenizer
from training.config import ConfigError
from training.text.corpus import Corpus
from training.text.encoding import encode_array
from training.text.records import LINES, separator_between, split_printed

HASHED_AT_ONCE = 1 << 22  # training characters hashed at a time
SHOWN_CHARACTERS = 200  # characters shown of a copied passage
NGRAM = 50  # least number of characters of a copied passage
# Polynomial hashes modulo 2⁶⁴ with an odd base; matches are verified character by character.
BASE = np.uint64(0x9E3779B97F4A7C15)
INVERSE = np.uint64(pow(int(BASE), -1, 1 << 64))


@dataclass(frozen=True)
class Examination:
    """The findings of `examine`, and the texts that it examined."""

    columns: dict[str, dict[str, Any]]  # figures by row, for the generated texts and for the validation split
    texts: list[tuple[int, str]]  # (seed, text) of each generated text
    passages: list[list[tuple[int, int]]]  # starts and ends of each text's copied passages; empty for records
    copies: Set[str] = frozenset()  # generated records that are in the training split
    valid: Set[str] | None = None  # valid records; None: the command was not to check them


def examine(answers: Iterable[Answer], corpus: Corpus, regex: str | None, check: str | None) -> Examination:
    """Compare texts or records of a model with the text that it was trained on.

    regex: a record is valid only if this regular expression of Python matches all of it. check: a command that selects
    the valid records, as in `valid_records`.

    Raises:
        ConfigError: the pattern is invalid, or `valid_records` raises it.
    """
    tokenizer, end = corpus.tokenizer, corpus.record_end
    texts = [(answer.seed, answer.text) for answer in answers]
    if end is None:
        arrays = [encode_array(tokenizer, text).astype(corpus.ids.dtype) for _, text in texts]
        whole = np.concatenate(arrays)
        columns = {
            "generated": describe_copies(whole, corpus.train, tokenizer),
            "validation split": describe_copies(corpus.val[: len(whole)], corpus.train, tokenizer),
        }
        return Examination(columns, texts, [copied_passages(array, corpus.train) for array in arrays])
    records = [record for _, record in texts]
    known, unseen = map(corpus.texts_of, (corpus.train, corpus.val))
    valid = {*records, *unseen}
    if regex is not None:
        try:
            valid = set(filter(re.compile(regex).fullmatch, valid))
        except re.error as error:
            raise ConfigError(f"--regex {regex!r}: {error}") from None
    if check is not None:
        valid = valid_records(valid, check, corpus.source.separator, end)
    asked = None if regex is check is None else valid
    columns = {
        name: describe_records(some, set(known), set(unseen), asked)
        for name, some in (("generated", records), ("validation split", unseen))
    }
    return Examination(columns, texts, [[] for _ in records], copies=set(records) & set(known), valid=asked)


def describe_copies(text: np.ndarray, train: np.ndarray, tokenizer: CharTokenizer) -> dict[str, Any]:
    """Return the row labels and values of the table for a text."""
    start, length = longest_copy(text, train)
    copied = tokenizer.decode(text[start : start + min(length, SHOWN_CHARACTERS)].tolist())
    return {
        "characters": len(text),
        "longest copied passage": length,
        "copied text": copied + "…" * (length > SHOWN_CHARACTERS),
        f"share of {NGRAM}-grams copied": copied_share(text, train),
        **{f"distinct-{n}": distinct_n(text, n) for n in (1, 3, 10)},
    }


def describe_records(
    records: Sequence[str], known: Set[str], unseen: Set[str], valid: Set[str] | None = None
) -> dict[str, Any]:
    """Return the row labels and values of the table for records.

    known, unseen: the records of the training split and of the validation split. valid: the valid records; None: they
    were not checked.
    """
    lengths = sorted(map(len, records))
    figures = {
        "records": len(records),
        "share that is unique": len(set(records)) / len(records),
        "share that is novel": sum(record not in known for record in records) / len(records),
        "exact copies of training records": sum(record in known for record in records),
        "in the validation split alone": sum(record in unseen - known for record in records),
        "shortest, characters": lengths[0],
        "median": lengths[len(lengths) // 2],
        "longest": lengths[-1],
    }
    if valid is not None:
        figures["share that is valid"] = sum(record in valid for record in records) / len(records)
    return figures


def valid_records(records: Set[str], check: str, separator: str = LINES, end: str = "\n") -> set[str]:
    """Return the records that the shell command `check` prints when it reads all of them, as grep does.

    The command reads and prints a record on each line, or records separated as `sample` prints them.

    Raises:
        ConfigError: the command printed another record, ended with a status above 1 or was killed by a signal.
    """
    given = separator_between(separator, end).join(sorted(records)) + "\n"
    done = subprocess.run(check, shell=True, input=given.encode(), stdout=subprocess.PIPE)
    if not 0 <= done.returncode <= 1:  # 1: grep has found none
        raise ConfigError(f"--command {check!r} ended with status {done.returncode}")
    printed = set(split_printed(done.stdout.decode(errors="replace"), separator, end))
    if other := printed - records:
        raise ConfigError(f"--command {check!r} printed {min(other)!r}, which is not a record that it was given")
    return printed


def longest_copy(text: np.ndarray, train: np.ndarray) -> tuple[int, int]:
    """Return the start and length of the longest passage of `text` (n,) that occurs in `train` (N,).

    The length is 0 if no character of `text` occurs in `train`.

    Binary search over the length, in O((n + N) · log n · log N).
    """
    best, low, high = (0, 0), 1, min(len(text), len(train))
    while low <= high:
        length = (low + high) // 2
        start = next(_copies(text, train, length), None)
        if start is None:
            high = length - 1
        else:
            best, low = (start, length), length + 1
    return best


def copied_share(text: np.ndarray, train: np.ndarray, length: int = NGRAM) -> float:
    """Return the share of the `length`-grams of `text` that occur in `train`, or 0 for a shorter text."""
    grams = copied_grams(text, train, length)
    return float(grams.mean()) if len(grams) else 0.0


def copied_grams(text: np.ndarray, train: np.ndarray, length: int = NGRAM) -> np.ndarray:
    """Return for each `length`-gram of `text` whether `train` has it: (len(text) − length + 1,) bool, or empty."""
    if len(text) < length:
        return np.zeros(0, dtype=bool)
    unique, which = np.unique(_hashes(text, length), return_inverse=True)
    copied = np.zeros(len(unique), dtype=bool)  # per distinct n-gram
    for i in _copies(text, train, length):
        copied[which[i]] = True
    return copied[which]


def copied_passages(text: np.ndarray, train: np.ndarray, length: int = NGRAM) -> list[tuple[int, int]]:
    """Return in order the starts and ends of the passages of `text` that copied `length`-grams cover.

    A passage may join pieces that come from different places of `train` and overlap.
    """
    passages: list[tuple[int, int]] = []
    for start in np.flatnonzero(copied_grams(text, train, length)).tolist():
        if passages and start <= passages[-1][1]:
            passages[-1] = passages[-1][0], start + length
        else:
            passages.append((start, start + length))
    return passages


def distinct_n(text: np.ndarray, n: int) -> float:
    """Return the number of distinct n-grams divided by that of all n-grams (Li et al. 2016); 1: no n-gram repeats."""
    if len(text) < n:
        return 1.0
    windows = np.lib.stride_tricks.sliding_window_view(text, n)
    return len(np.unique(windows, axis=0)) / len(windows)


def _copies(text: np.ndarray, train: np.ndarray, length: int) -> Iterator[int]:
    """Yield the offsets in `text` of its passages of `length` that occur in `train`.

    Each distinct passage has one offset, which is yielded once for each chunk of `train` that has the passage.
    """
    hashes, first = np.unique(_hashes(text, length), return_index=True)
    for start in range(0, len(train) - length + 1, HASHED_AT_ONCE):
        chunk = _hashes(train[start : start + HASHED_AT_ONCE + length - 1], length)
        place = np.searchsorted(hashes, chunk).clip(max=len(hashes) - 1)
        found = np.flatnonzero(hashes[place] == chunk)
        for which, k in zip(*np.unique(place[found], return_index=True), strict=True):
            i, j = int(first[which]), start + int(found[k])
            if np.array_equal(text[i : i + length], train[j : j + length]):
                yield i


def _hashes(ids: np.ndarray, length: int) -> np.ndarray:
    """Return the rolling hash of each window of `length` ids: (len(ids) − length + 1,) uint64."""
    n = len(ids)
    inverse_powers = np.cumprod(np.concatenate(([np.uint64(1)], np.full(n - 1, INVERSE))), dtype=np.uint64)
    powers = np.cumprod(np.concatenate(([np.uint64(1)], np.full(n - 1, BASE))), dtype=np.uint64)
    sums = np.concatenate(([np.uint64(0)], np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * inverse_powers)))
    return (sums[length:] - sums[:-length]) * powers[: n - length + 1]
