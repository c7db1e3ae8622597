"""How much of a text is copied from the training text, and how often it repeats itself.

Of records: how many are unique, novel, copies and valid, and how long they are.

The training text is processed in chunks and may be larger than memory; not so one of records.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.model.gpt import GPT
from service.model.params import SamplingParams
from service.model.tokenizer import CharTokenizer
from service.wire import Drawn
from training.config import MAX_CANDIDATES, ConfigError
from training.data import Corpus
from training.records import LINES, separator_between, split_printed
from training.sample import Condition, beginning_of_record, sample_texts

CHUNK = 1 << 22  # training characters hashed at a time
MAX_SHOWN = 200  # characters of a copied passage
NGRAM = 50  # characters of a passage that is called copied
# Polynomial hashes modulo 2⁶⁴ with an odd base; matches are verified character by character.
BASE = np.uint64(0x9E3779B97F4A7C15)
INVERSE = np.uint64(pow(int(BASE), -1, 1 << 64))


@dataclass(frozen=True)
class Examination:
    """What `examine` found, and the texts it looked at."""

    columns: dict[str, dict[str, Any]]  # figures by row, of what was generated and of the validation split
    texts: list[tuple[int, str]]  # generated: (seed, text)
    passages: list[list[tuple[int, int]]]  # of each text: starts and ends of what is copied; of records none
    copies: Set[str] = frozenset()  # of records: the generated ones that are in the training split
    valid: Set[str] | None = None  # of records: the valid ones, if it was asked


def examine(
    model: GPT,
    corpus: Corpus,
    count: int,
    max_tokens: int,
    seed: int,
    regex: str | None,
    check: str | None,
    drawn: Drawn | None = None,
    max_candidates: int = MAX_CANDIDATES,
) -> Examination:
    """Generate texts, or records, and compare them with the text that the model was trained on.

    regex, check: what decides whether a record is valid: a regular expression of Python's that matches the whole, and
    a command.
    drawn: the records are exact answers to regex, and this counts what they cost, as in `sample_texts`.

    Raises:
        ConfigError: the pattern is invalid, or as `valid_records`.
        ExhaustedError: as `sample_texts`.
    """
    tokenizer, device = corpus.tokenizer, str(model.head.weight.device)
    params = SamplingParams(seed=seed, logit_bias=tokenizer.sampling_bias)
    if (end_character := corpus.record_end) is None:
        prompt = tokenizer.encode(corpus.example_prompt)
        generated = list(sample_texts(model, prompt, count, max_tokens, params, device=device))
        arrays = [np.array(ids, corpus.ids.dtype) for _, ids in generated]
        whole = np.concatenate(arrays)
        columns = {
            "generated": describe_copies(whole, corpus.train, tokenizer),
            "validation split": describe_copies(corpus.val[: len(whole)], corpus.train, tokenizer),
        }
        texts = [(its_seed, tokenizer.decode(ids)) for its_seed, ids in generated]
        return Examination(columns, texts, [copied_passages(array, corpus.train) for array in arrays])
    end = int(corpus.train[0])
    condition = None
    if drawn is not None and regex is not None:
        condition = Condition.of(regex, tokenizer, max_tokens, end, is_empty=True)
    found = sample_texts(
        model, [end], count, max_tokens, params, stop=((end,),), begins=beginning_of_record(end_character, tokenizer),
        device=device, condition=condition, drawn=drawn, max_candidates=max_candidates,
    )  # fmt: skip
    texts = [(its_seed, tokenizer.decode(ids)) for its_seed, ids in found]
    records = [record for _, record in texts]
    known, unseen = map(corpus.texts_of, (corpus.train, corpus.val))
    valid = {*records, *unseen}
    if regex is not None:
        try:
            valid = set(filter(re.compile(regex).fullmatch, valid))
        except re.error as error:
            raise ConfigError(f"--regex {regex!r}: {error}") from None
    if check is not None:
        valid = valid_records(valid, check, corpus.separator, end_character)
    asked = None if regex is check is None else valid
    columns = {
        name: describe_records(some, set(known), set(unseen), asked)
        for name, some in (("generated", records), ("validation split", unseen))
    }
    return Examination(columns, texts, [[] for _ in records], copies=set(records) & set(known), valid=asked)


def describe_copies(text: np.ndarray, train: np.ndarray, tokenizer: CharTokenizer) -> dict[str, Any]:
    """The row labels and values of the command's table."""
    start, length = longest_copy(text, train)
    copied = tokenizer.decode(text[start : start + min(length, MAX_SHOWN)].tolist())
    return {
        "characters": len(text),
        "longest copied passage": length,
        "copied text": copied + "…" * (length > MAX_SHOWN),
        f"share of {NGRAM}-grams copied": copied_share(text, train),
        **{f"distinct-{n}": distinct_n(text, n) for n in (1, 3, 10)},
    }


def describe_records(
    records: Sequence[str], known: Set[str], unseen: Set[str], valid: Set[str] | None = None
) -> dict[str, Any]:
    """The same for records.

    known, unseen: those of the training split, and of the validation split; valid: of `records`, if it was asked.
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
    """Those that the shell command `check` prints when it is given all of them, as grep does: a line each, or separated
    as `sample` prints them.

    Raises:
        ConfigError: the command failed, with a status above 1, or printed another record.
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
    """Start and length of the longest passage of `text` (n,) that occurs in `train` (N,); length 0: no character does.

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
    """The share of the `length`-grams of `text` that occur in `train`; 0 for a shorter text."""
    grams = copied_grams(text, train, length)
    return float(grams.mean()) if len(grams) else 0.0


def copied_grams(text: np.ndarray, train: np.ndarray, length: int = NGRAM) -> np.ndarray:
    """Whether each `length`-gram of `text` occurs in `train`: (len(text) − length + 1,) bool, or empty."""
    if len(text) < length:
        return np.zeros(0, dtype=bool)
    unique, which = np.unique(_hashes(text, length), return_inverse=True)
    copied = np.zeros(len(unique), dtype=bool)  # per distinct n-gram
    for i in _copies(text, train, length):
        copied[which[i]] = True
    return copied[which]


def copied_passages(text: np.ndarray, train: np.ndarray, length: int = NGRAM) -> list[tuple[int, int]]:
    """Starts and ends in `text` of what copied `length`-grams cover, in order.

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
    """Distinct n-grams over all n-grams of a text (Li et al. 2016); 1: no n-gram repeats."""
    if len(text) < n:
        return 1.0
    windows = np.lib.stride_tricks.sliding_window_view(text, n)
    return len(np.unique(windows, axis=0)) / len(windows)


def _copies(text: np.ndarray, train: np.ndarray, length: int) -> Iterator[int]:
    """Offsets in `text` of its passages of `length` that `train` has, each distinct one once per chunk of `train`."""
    hashes, first = np.unique(_hashes(text, length), return_index=True)
    for start in range(0, len(train) - length + 1, CHUNK):
        chunk = _hashes(train[start : start + CHUNK + length - 1], length)
        place = np.searchsorted(hashes, chunk).clip(max=len(hashes) - 1)
        found = np.flatnonzero(hashes[place] == chunk)
        for which, k in zip(*np.unique(place[found], return_index=True), strict=True):
            i, j = int(first[which]), start + int(found[k])
            if np.array_equal(text[i : i + length], train[j : j + length]):
                yield i


def _hashes(ids: np.ndarray, length: int) -> np.ndarray:
    """Rolling hash of each window of `length` ids: (len(ids) − length + 1,) uint64."""
    n = len(ids)
    inverse_powers = np.cumprod(np.concatenate(([np.uint64(1)], np.full(n - 1, INVERSE))), dtype=np.uint64)
    powers = np.cumprod(np.concatenate(([np.uint64(1)], np.full(n - 1, BASE))), dtype=np.uint64)
    sums = np.concatenate(([np.uint64(0)], np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * inverse_powers)))
    return (sums[length:] - sums[:-length]) * powers[: n - length + 1]
