"""The n-grams of a text against explicit counting; what is no such file is refused."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from safetensors.numpy import save

from service.model import ngrams
from service.model.ngrams import DISCOUNT, MAX_BYTES, MAX_NGRAMS, ORDER, REST, NGrams


def text_of(seed: int, length: int = 5000, V: int = 7) -> list[int]:
    """Ids that follow each other unevenly."""
    chance, ids = random.Random(seed), [0]
    while len(ids) < length:
        ids.append((ids[-1] * 3 + min(chance.randrange(V), chance.randrange(V))) % V)
    return ids


def expected(text: list[int], context: list[int], V: int) -> list[float]:
    """Probabilities by explicit counts, the longest context first."""
    counts = Counter(tuple(text[i : i + n]) for n in range(1, ORDER + 2) for i in range(len(text) - n + 1))
    p, rest = [0.0] * V, 1.0
    for length in range(min(ORDER, len(context)), -1, -1):
        beginning = tuple(context[len(context) - length :])
        whole = counts[beginning] if length else len(text)
        if whole < ngrams.MIN_COUNT:
            continue
        given = {id: count for id in range(V) if (count := counts[(*beginning, id)]) >= ngrams.MIN_COUNT}
        for id, count in given.items():
            p[id] += rest * (count - DISCOUNT) / whole
        rest *= 1 - sum(count - DISCOUNT for count in given.values()) / whole
    return [each + (rest + REST) / V for each in p]


@pytest.mark.parametrize("seed", range(3))
def test_probabilities_follow_from_the_counts(seed):
    text = text_of(seed)
    tree = NGrams.load(NGrams.count(np.array(text, np.uint8)).dump(), 7)
    for context in ([], [3], text[100:103], text[200:205], text[300:310], [6, 6, 6, 6, 6, 0], [0, 6, 0, 6, 0]):
        found = tree.probabilities(context, 7)
        assert found.sum() == pytest.approx(1, abs=0.03)  # shares are stored in steps of 4 %
        np.testing.assert_allclose(found, expected(text, context, 7), rtol=0.1, atol=0.01)


def test_only_the_most_frequent_are_kept(monkeypatch):
    text = np.array(text_of(1, 20_000), np.uint16)
    whole = NGrams.count(text)
    monkeypatch.setattr(ngrams, "MAX_NGRAMS", 500)
    part = NGrams.load(NGrams.count(text).dump(), 7)
    assert 300 < len(part.ids) <= 500 < len(whole.ids)
    for context in ([], [1]):
        np.testing.assert_allclose(part.probabilities(context, 7), whole.probabilities(context, 7), atol=0.02)


def test_of_a_long_text_even_parts_are_counted(monkeypatch):
    monkeypatch.setattr(ngrams, "MAX_CHARACTERS", 6400)
    text = np.repeat(np.arange(10, dtype=np.uint32), 10_000)
    assert NGrams.count(text).probabilities([], 10) == pytest.approx([0.1] * 10, abs=0.02)


@pytest.mark.parametrize(
    "text", [[], [0], [0, 0], [65_535, 65_535, 65_534, 65_534], [0] * 100, [70_000, 5, 66_000, 9] * 3]
)
def test_any_text_gives_a_file(text):
    tree = NGrams.load(NGrams.count(np.array(text, np.uint32)).dump(), 1 << 16)
    assert tree.probabilities(text, 1 << 16).sum() == pytest.approx(1, abs=0.1)


def test_the_largest_file_is_allowed():
    N = MAX_NGRAMS
    largest = NGrams(np.zeros(N, np.uint16), np.zeros(N, np.uint8), np.ones(N, np.uint16))
    assert len(largest.dump()) < MAX_BYTES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.zeros(2, np.uint16)}, "do not belong together"),
        ({"ids": np.array([0, 0, 7], np.uint16)}, "ids must be below 7, got 7"),
        ({"ids": np.array([0, 2, 2], np.uint16)}, "in the order of their ids"),
        ({"ids": np.array([0, 0, 1], np.int16)}, "ids must be one row of U16"),
        ({"ids": np.array([[0, 0, 1]], np.uint16)}, "ids must be one row of U16"),
        ({"shares": np.zeros(2, np.uint8)}, "do not belong together"),
        ({"children": np.array([1], np.uint16)}, "do not belong together"),
        ({"children": np.array([0, 2], np.uint16)}, "children must follow their parents"),
        ({"children": np.array([1, 0, 1], np.uint16)}, "children must follow their parents"),
        ({"children": np.zeros(0, np.uint16)}, "do not belong together"),
        ({"more": np.zeros(0, np.uint16)}, "must hold ids, shares and children"),
    ],
)
def test_another_content_is_refused(change, message):
    good = {"ids": np.array([0, 0, 1], np.uint16), "shares": np.array([0, 1, 20], np.uint8)}
    good["children"] = np.array([2], np.uint16)
    assert NGrams.load(save(good), 7).probabilities([], 7).argmax() == 0
    with pytest.raises(ValueError, match=message):
        NGrams.load(save(good | change), 7)


@pytest.mark.parametrize("data", [b"", b"abc", bytes(100), b"\xff" * 100])
def test_what_is_not_safetensors_is_refused(data):
    with pytest.raises(ValueError, match="not in the format of safetensors"):
        NGrams.load(data, 7)
