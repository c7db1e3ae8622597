"""The counts against a plain Kneser-Ney of dictionaries, written from the paper; other files are refused."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
from safetensors.numpy import load, save

from service.model import counts as module
from service.model.counts import PRIOR, SIZES, Counts, mixed, mixed_logits, sample


class Reference:
    """p(w | context) after Chen & Goodman (1999), interpolated, with nothing pruned.

    Each piece is counted alone: a text or a record with its end symbols.
    """

    def __init__(self, pieces, vocab_size, order):
        self.vocab_size, self.order = vocab_size, order
        counts, before = [Counter() for _ in range(order + 1)], defaultdict(set)
        for piece in pieces:
            for end in range(1, len(piece)):  # the first character is context only
                for length in range(1, min(order, end + 1) + 1):
                    first = end + 1 - length
                    gram = tuple(piece[first : end + 1])
                    if length == order or first == 0:
                        counts[length][gram] += 1
                    else:
                        before[gram].add(piece[first - 1])
        for gram, characters in before.items():
            counts[len(gram)][gram] += len(characters)
        self.counts, self.following = counts, defaultdict(list)
        for gram in set(itertools.chain(*counts)):
            self.following[gram[:-1]].append(gram[-1])
        self.discounts = [self._discounts(Counter(of.values())) for of in counts]

    @staticmethod
    def _discounts(n):
        if not n[1] or not n[2]:
            return [0, 0.5, 0.5, 0.5]
        y = n[1] / (n[1] + 2 * n[2])
        if n[3] and n[4]:
            three = [c - (c + 1) * y * n[c + 1] / n[c] for c in (1, 2, 3)]
            if min(three) >= 1e-3:
                return [0, *three]
        return [0, y, y, y]

    def next(self, context):
        """The distribution, and the length of the longest known context."""
        p, length = [1 / self.vocab_size] * self.vocab_size, 0
        for n in range(min(self.order - 1, len(context)) + 1):
            ending = tuple(context[len(context) - n :])
            following = self.following[ending]
            if not following:
                continue
            length, total = n, sum(self.counts[n + 1][*ending, v] for v in following)
            taken = {v: self.discounts[n + 1][min(3, self.counts[n + 1][*ending, v])] for v in following}
            p = [sum(taken.values()) / total * each for each in p]
            for v in following:
                p[v] += (self.counts[n + 1][*ending, v] - taken[v]) / total
        return p, length


def random_ids(seed, length, symbols, first=1):
    """Ids in which some n-grams are frequent and others are rare."""
    rng = random.Random(seed)
    words = [[rng.randrange(first, symbols) for _ in range(rng.randrange(1, 6))] for _ in range(6)]
    ids = []
    while len(ids) < length:
        ids += rng.choice(words) if rng.random() < 0.8 else [rng.randrange(first, symbols)]
    return ids[:length]


def random_records(seed, number, symbols):
    rng = random.Random(seed)
    return [random_ids(rng.random(), rng.choice((1, 1, 2, 3, 5, 9, 14)), symbols) for _ in range(number)]


def split_of(records):
    return np.array([0] + [id for record in records for id in (*record, 0)], np.uint8)


def histories(seed, symbols, number=60):
    rng = random.Random(seed)
    return [random_ids(seed, 90, symbols)[i : i + rng.randrange(10)] for i in range(number)]


def compare(found, reference, histories):
    for history in histories:
        expected, length = reference.next(history)
        p, _ = found.next(history)
        assert p == pytest.approx(expected, abs=1e-12)
        padded = np.full((found.order - 1, 1), -1)
        recent = history[::-1][: found.order - 1]
        padded[: len(recent), 0] = recent
        known = np.flatnonzero(found.walk(padded)[:, 0] >= 0)
        assert (known[-1] + 1 if len(known) else 0) == length


@pytest.mark.parametrize("order", [2, 3, 6, 8])
@pytest.mark.parametrize("seed", range(6))
def test_a_text_is_predicted_as_the_formula_predicts_it(seed, order):
    symbols = (2, 3, 5, 9, 20, 300)[seed]
    ids = random_ids(seed, (1, 30, 300, 900, 900, 900)[seed], symbols)
    found = Counts.count(np.array(ids, np.uint16), symbols, order=order, max_bytes=None)
    compare(found, Reference([ids], symbols, order), histories(seed, symbols))


@pytest.mark.parametrize("order", [2, 5, 8])
@pytest.mark.parametrize("seed", range(4))
def test_a_context_begins_at_the_end_symbol_of_records(seed, order):
    symbols = (2, 3, 9, 30)[seed]
    records = random_records(seed, 5 + 40 * seed, symbols)
    found = Counts.count(split_of(records), symbols, end=0, order=order, max_bytes=None)
    reference = Reference([[0, *record, 0] for record in records], symbols, order)
    compare(found, reference, [[0, *history] for history in histories(seed, symbols)] + [[]])
    for record in random_records(seed + 99, 10, symbols):  # what stands before the symbol changes nothing
        assert found.next([1, 1, 0, *record])[0] == pytest.approx(found.next([0, *record])[0], abs=0)


@pytest.mark.parametrize("max_bytes", [None, 3_000])
@pytest.mark.parametrize("records", [False, True])
def test_all_forms_equal_the_definition(max_bytes, records):
    symbols, order = 12, 6
    ids = split_of(random_records(1, 300, symbols)) if records else np.array(random_ids(1, 2000, symbols), np.uint8)
    found = Counts.count(ids, symbols, end=0 if records else None, order=order, max_bytes=max_bytes)
    counted, classes = found.probabilities(ids)
    found = found.fitted(np.full(len(ids) - 1, 0.2), counted, classes)
    text = np.array(random_ids(1, 500, symbols, first=0), np.uint8)
    expected = [found.next(text[: i + 1].tolist()) for i in range(len(text))]
    p, weights = found.after(found.histories(text))
    np.testing.assert_array_equal(p, [p for p, _ in expected])  # the same operations in the same order
    np.testing.assert_array_equal(weights, [w for _, w in expected])
    np.testing.assert_allclose(p.sum(axis=1), 1, rtol=1e-12)
    targets, classes = found.probabilities(text)
    np.testing.assert_allclose(targets, p[np.arange(len(text) - 1), text[1:]], rtol=1e-12)
    np.testing.assert_array_equal(found.weights.ravel()[classes], weights[:-1])


@pytest.mark.parametrize("vocab_size", [20, 255, 256, 70_000])
def test_a_file_fits_its_bound_and_gives_back_what_was_written(vocab_size):
    ids = np.array(random_ids(5, 20_000, 20)) * (vocab_size // 20)
    fixed = 768 + 8 * 8 * SIZES + 4 * vocab_size
    losses = []
    for more in (0, 300, 3_000, 30_000, 3_000_000):
        found = Counts.count(ids, vocab_size, max_bytes=fixed + more)
        data = found.dump()
        assert len(data) <= fixed + more
        assert more > 30_000 or len(data) > fixed + 0.8 * more - 200
        again = Counts.load(data, vocab_size)
        assert again.dump() == data
        for history in histories(5, 20, 9):
            p, exact = again.next(history)[0], found.next(history)[0]
            assert p.sum() == pytest.approx(1, abs=1e-12) and p.min() > 0
            np.testing.assert_allclose(p, exact, rtol=0.2)
            assert exact.sum() == pytest.approx(1, abs=1e-12)
            assert (exact * np.log(exact / p)).sum() < 1e-3
        losses.append(-np.log(again.probabilities(ids)[0]).mean())
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1] + 0.5


@pytest.mark.parametrize("ids", [[], [0], [0, 0], [3, 3, 2, 2], [0] * 100, [0, 1, 2, 3]])
@pytest.mark.parametrize("end", [None, 0])
def test_any_text_gives_a_file(ids, end):
    found = Counts.load(Counts.count(np.array(ids, np.uint8), 4, end=end).dump(), 4)
    p, _ = found.next(ids)
    assert p.sum() == pytest.approx(1, abs=1e-12) and p.min() > 0


def test_a_bound_or_an_order_that_is_impossible_is_refused():
    ids = np.zeros(10, np.uint8)
    with pytest.raises(ValueError, match=r"max_bytes must be at least 1,220 for 65 ids, got 1,219"):
        Counts.count(ids, 65, max_bytes=1219)
    with pytest.raises(ValueError, match="order must be 2 to 8, got 9"):
        Counts.count(ids, 65, order=9)


def test_a_long_text_is_counted_in_a_sample(monkeypatch):
    ids = np.arange(1000)
    assert sample(ids, None) is ids
    monkeypatch.setattr(module, "MAX_COUNTED", 100)
    monkeypatch.setattr(module, "PARTS", 4)
    assert sample(ids, None).tolist() == [*range(25), *range(325, 350), *range(650, 675), *range(975, 1000)]
    assert sample(ids, 0).tolist() == list(range(100))
    assert Counts.count(ids, 1000).next([10])[0].argmax() == 11


def test_weights_maximise_the_likelihood():
    """Each against a search, and a class that never occurs has the weight of all."""
    symbols, rng = 20, np.random.default_rng(0)
    found = Counts.count(np.array(random_ids(1, 3000, symbols), np.uint8), symbols, order=4)
    text = np.array(random_ids(1, 6000, symbols), np.uint8)[3000:]
    log_network = np.log(rng.uniform(0.02, 0.6, len(text) - 1))
    network, (counts, classes) = np.exp(log_network), found.probabilities(text)
    grid = np.linspace(0, 1, 10_001)[1:-1, None]

    def best(chosen, prior):
        gain = np.log((1 - grid) * network[chosen] + grid * counts[chosen]).sum(axis=1)
        return grid[np.argmax(gain + PRIOR * (prior * np.log(grid) + (1 - prior) * np.log(1 - grid))[:, 0]), 0]

    prior = best(np.ones(len(classes), bool), 0.5)
    weights = found.fitted(np.exp(log_network), *found.probabilities(text)).weights
    assert weights.ravel() == pytest.approx([best(classes == c, prior) for c in range(4 * SIZES)], abs=2e-4)
    assert weights[0] == pytest.approx(prior, abs=2e-4) and np.ptp(weights) > 0.05


def test_weights_follow_the_better_expert():
    ids = np.array(random_ids(1, 3000, 9), np.uint8)
    found = Counts.count(ids, 9)
    targets = found.probabilities(ids)[0]
    for network, expected in ((targets**0.2, 0.0), (targets**5, 1.0)):
        weights = found.fitted(network, *found.probabilities(ids)).weights.ravel()
        assert weights[found.probabilities(ids)[1]].mean() == pytest.approx(expected, abs=0.05)


def test_a_mixture_is_the_weighted_mean():
    log_network = np.log([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    counts, weights = np.array([[0, 0.5, 0.5], [0.2, 0.4, 0.4]]), np.array([0.5, 0.25])
    expected = [[0.25, 0.375, 0.375], [0.125, 0.175, 0.7]]
    assert mixed(log_network, counts, weights) == pytest.approx(np.array(expected))
    logits = log_network + np.array([[3.0], [-700.0]])
    assert mixed_logits(logits, counts, weights) == pytest.approx(np.log(expected))


def test_logits_of_a_mixture_are_finite_where_those_of_the_network_are():
    tiny = np.finfo(np.float64).tiny
    logits = np.array([[0, -1e4, 1], [1e308, -1e308, 0], [0, np.nan, 1], [0, -np.inf, 1], [np.inf, 0, 1]])
    found = mixed_logits(logits, np.full((5, 3), 1 / 3), np.zeros(5))
    assert np.exp(found[0]) == pytest.approx([1 / (1 + np.e), tiny, np.e / (1 + np.e)])
    assert np.exp(found[1]) == pytest.approx([1, tiny, tiny])
    assert np.isnan(found[2:]).all()


GOOD = {  # of 3 ids: contexts "", "0", "2" and "20", the newest character last
    "version": np.array([1], np.uint8),
    "weights": np.full((3, SIZES), 0.5),
    "base": np.array([1 << 31, 1 << 30, 1 << 30], np.uint32),
    "older": np.array([0, 0, 2, 2], np.uint8),
    "children": np.array([2, 1], np.uint8),
    "followers": np.array([0, 2, 0, 1], np.uint8),
    "rests": np.array([0, 64, 0, 64], np.uint8),
    "ids": np.array([0, 2, 1], np.uint8),
    "shares": np.array([16, 0, 0], np.uint8),
}


def test_a_file_written_by_hand():
    found = Counts.load(save(GOOD), 3)
    assert found.next([])[0].tolist() == [0.5, 0.25, 0.25]
    assert found.next([1, 2])[0].tolist() == [0.5, 0.25, 0.25]  # context "2" has no followers
    zero = np.array([0.25 + 0.5 / 3, 0.125, 0.125 + 1 / 3])
    assert found.next([1, 0])[0] == pytest.approx(zero, abs=1e-15)
    assert found.next([0, 2, 0])[0] == pytest.approx(zero / 2 + [0, 0.5, 0], abs=1e-15)
    assert found.next([])[1] == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": np.zeros(0, np.uint8)}, "must hold version, weights"),
        ({"version": np.array([2], np.uint8)}, r"version must be 1, got \[2\]"),
        ({"version": np.zeros(0, np.uint8)}, r"version must be 1, got \[\]"),
        ({"weights": np.full((3, 2), 0.5)}, r"weights must have 2 to 8 rows of 3, got \(3, 2\)"),
        ({"weights": np.full((9, SIZES), 0.5)}, "weights must have 2 to 8 rows"),
        ({"weights": np.full((0, SIZES), 0.5)}, "weights must have 2 to 8 rows"),
        ({"weights": np.full((3, SIZES), np.nan)}, "weights must be from 0 to 1"),
        ({"weights": np.full((3, SIZES), -0.1)}, "weights must be from 0 to 1"),
        ({"weights": np.full((3, SIZES), 0.5, np.float32)}, "weights must be a table of F64"),
        ({"weights": np.full(9, 0.5)}, "weights must be a table of F64"),
        ({"base": np.array([1 << 31, 1 << 31, 0], np.uint32)}, "base must have 3 numbers ≥ 1"),
        ({"base": np.array([1 << 31, 1 << 30, 7], np.uint32)}, "whose sum is 2\\^32"),
        ({"base": np.array([1 << 31, 1 << 31], np.uint32)}, "base must have 3 numbers"),
        ({"older": np.array([0, 2, 0, 2], np.uint8)}, "the children of a context must be in the order"),
        ({"older": np.array([0, 2, 2, 2], np.uint8)}, "the children of a context must be in the order"),
        ({"older": np.array([0, 0, 3, 2], np.uint8)}, "children must have ids below 3, got 3"),
        ({"older": np.array([1, 0, 2, 2], np.uint8)}, "the first context must be the root"),
        ({"older": np.array([0, 0, 2], np.uint8)}, "do not belong together"),
        ({"older": np.array([0, 0, 2, 2], np.int8)}, "older must be one row of U8"),
        ({"older": np.array([[0, 0, 2, 2]], np.uint8)}, "older must be one row of U8"),
        ({"older": np.zeros(0, np.uint8)}, "do not belong together"),
        ({"children": np.array([3, 1], np.uint8)}, "do not belong together"),
        ({"children": np.array([0, 3], np.uint8)}, "children must follow their parents"),
        ({"children": np.array([1, 0, 2], np.uint8)}, "children must follow their parents"),
        ({"children": np.array([1, 1, 1], np.uint8)}, "a context must have at most 2 characters"),
        ({"children": np.array([2, 1, 0, 0, 0], np.uint8)}, "do not belong together"),
        ({"children": np.zeros(0, np.uint8)}, "do not belong together"),
        ({"followers": np.array([0, 2, 0, 2], np.uint8)}, "do not belong together"),
        ({"followers": np.array([1, 1, 0, 1], np.uint8)}, "the first context must be the root"),
        ({"ids": np.array([2, 0, 1], np.uint8)}, "the followers of a context must be in the order"),
        ({"ids": np.array([1, 1, 1], np.uint8)}, "the followers of a context must be in the order"),
        ({"ids": np.array([0, 1, 3], np.uint8)}, "followers must have ids below 3, got 3"),
        ({"shares": np.array([16, 1, 0], np.uint8)}, "must be code 0"),
        ({"shares": np.array([16, 0], np.uint8)}, "do not belong together"),
        ({"rests": np.array([0, 64, 1, 64], np.uint8)}, "must be code 0"),
        ({"rests": np.array([0, 64, 64], np.uint8)}, "do not belong together"),
    ],
)
def test_another_content_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Counts.load(save(GOOD | change), 3)


@pytest.mark.parametrize("data", [b"", b"abc", bytes(100), b"\xff" * 100])
def test_what_is_not_safetensors_is_refused(data):
    with pytest.raises(ValueError, match="not in the format of safetensors"):
        Counts.load(data, 3)


def test_a_corrupted_file_is_refused_or_gives_distributions():
    rng = random.Random(0)
    good = Counts.count(np.array(random_ids(1, 400, 7), np.uint8), 7, order=4).dump()
    assert load(good).keys() == GOOD.keys()
    refused = 0
    for _ in range(500):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 5))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            found = Counts.load(bytes(data), 7)
        except ValueError:
            refused += 1
            continue
        for history in histories(1, 7, 5):
            p, weight = found.next(history)
            assert p.sum() == pytest.approx(1, abs=1e-12) and p.min() > 0 and 0 <= weight <= 1
    assert 100 < refused < 500
