"""The copy detector against brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.model.tokenizer import CharTokenizer
from training.measure import copies

ids = st.lists(st.integers(0, 2), max_size=60).map(lambda x: np.array(x, dtype=np.uint8))


@given(ids, ids, st.integers(1, 6), st.integers(4, 100))
@settings(max_examples=200)
def test_longest_copy_and_copied_share_at_any_chunk_size(text, train, length, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "HASHED_AT_ONCE", chunk)
        start, longest = copies.longest_copy(text, train)
        share = copies.copied_share(text, train, length)
    places = ((i, j) for i in range(len(text) + 1) for j in range(i, len(text) + 1))
    assert longest == max(j - i for i, j in places if bytes(text[i:j]) in bytes(train))
    assert bytes(text[start : start + longest]) in bytes(train)
    windows = [bytes(text[i : i + length]) for i in range(len(text) - length + 1)]
    assert share == pytest.approx(sum(w in bytes(train) for w in windows) / len(windows) if windows else 0.0)


def test_distinct_n():
    text = np.array([1, 2, 1, 2, 1])
    assert copies.distinct_n(text, 1) == 2 / 5
    assert copies.distinct_n(text, 2) == 2 / 4
    assert copies.distinct_n(text, 9) == 1.0


@given(ids, ids, st.integers(1, 6))
@settings(max_examples=200)
def test_copied_passages_are_what_copied_ngrams_cover(text, train, length):
    covered = set()
    for i in range(len(text) - length + 1):
        if bytes(text[i : i + length]) in bytes(train):
            covered.update(range(i, i + length))
    passages = copies.copied_passages(text, train, length)
    assert {i for start, end in passages for i in range(start, end)} == covered
    assert all(end - start >= length for start, end in passages)


def test_records_are_counted():
    figures = copies.describe_records(["ann", "bo", "bo", "cleo", ""], {"bo", "dan"}, {"ann", "bo"}, {"bo", "ann"})
    assert figures == {
        "records": 5, "share that is unique": 4 / 5, "share that is novel": 3 / 5,
        "exact copies of training records": 2,
        "in the validation split alone": 1, "shortest, characters": 0, "median": 2, "longest": 4,
        "share that is valid": 3 / 5,
    }  # fmt: skip


def test_a_long_copied_passage_is_shown_by_its_beginning():
    """A text that was memorized once filled 160 lines."""
    tokenizer = CharTokenizer("abc")
    text = np.random.default_rng(0).integers(0, 3, 900).astype(np.uint8)
    figures = copies.describe_copies(text[100:800], text, tokenizer)
    assert figures["longest copied passage"] == 700
    assert figures["copied text"] == tokenizer.decode(text[100:300].tolist()) + "…"
