"""The counting baselines against a plain Kneser-Ney of dictionaries and loops, written from the formula."""

import itertools
import math
import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from training.measure.counts import KneserNey, baselines, discounts, sample, sort_keys


class Reference:
    """p(w | context) after Chen & Goodman (1999), interpolated, from n-grams in dictionaries."""

    def __init__(self, sequences, vocab_size, order):
        self.vocab_size = vocab_size
        self.counts = [Counter() for _ in range(order + 1)]
        before = defaultdict(set)
        for sequence in sequences:
            for end in range(1, len(sequence)):  # the first character is context only
                for length in range(1, min(order, end + 1) + 1):
                    first = end + 1 - length
                    gram = tuple(sequence[first : end + 1])
                    if length == order or first == 0:
                        self.counts[length][gram] += 1
                    else:
                        before[gram].add(sequence[first - 1])
        for gram, characters in before.items():
            self.counts[len(gram)][gram] += len(characters)
        self.following = defaultdict(set)
        for gram in itertools.chain(*self.counts):
            self.following[gram[:-1]].add(gram[-1])
        self.discounts = [self.estimate(counted.values()) for counted in self.counts]

    @staticmethod
    def estimate(values):
        n = Counter(values)
        if n[1] == 0 or n[2] == 0:
            return {1: 0.5, 2: 0.5, 3: 0.5}
        y = n[1] / (n[1] + 2 * n[2])
        if n[3] and n[4]:
            three = {c: c - (c + 1) * y * n[c + 1] / n[c] for c in (1, 2, 3)}
            if all(d >= 0 for d in three.values()):
                return three
        return {1: y, 2: y, 3: y}

    def p(self, w, context):
        lower = self.p(w, context[1:]) if context else 1 / self.vocab_size
        counted, discount = self.counts[len(context) + 1], self.discounts[len(context) + 1]
        following = [counted[*context, v] for v in self.following[context]]
        if not following:
            return lower
        rest = sum(discount[min(c, 3)] for c in following) / sum(following)
        own = counted[*context, w]
        return (own - discount[min(own, 3)] if own else 0) / sum(following) + rest * lower


def random_ids(seed, length, symbols):
    """Ids in which some n-grams are frequent and others are rare."""
    rng = random.Random(seed)
    words = [[rng.randrange(1, symbols) for _ in range(rng.randrange(1, 6))] for _ in range(6)]
    ids = []
    while len(ids) < length:
        ids += rng.choice(words) if rng.random() < 0.8 else [rng.randrange(1, symbols)]
    return ids[:length]


def random_records(seed, count, symbols):
    rng = random.Random(seed)
    return [random_ids(rng.random(), rng.choice((1, 1, 2, 3, 5, 9, 14)), symbols) for _ in range(count)]


def split_of(records):
    return np.array([0] + [id for record in records for id in (*record, 0)], np.uint8)


@pytest.mark.parametrize("order", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("seed", range(6))
def test_a_text_is_scored_as_the_formula_scores_it(seed, order):
    symbols = (2, 3, 5, 9, 20, 40)[seed]
    train = random_ids(seed, (7, 30, 300, 900, 900, 40)[seed], symbols)
    val = random_ids(seed, 200, symbols)[50:] + random_ids(seed + 99, 50, symbols)
    reference = Reference([train], symbols, order)
    expected = [-math.log(reference.p(w, tuple(val[max(0, i + 1 - order) : i]))) for i, w in enumerate(val) if i]
    model = KneserNey(np.array(train, np.uint16), symbols, records=False, order=order)
    assert model.losses(np.array(val, np.uint8)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("order", [1, 2, 3, 6])
@pytest.mark.parametrize("seed", range(5))
def test_records_are_scored_as_the_formula_scores_each_alone(seed, order):
    symbols = (2, 3, 5, 9, 30)[seed]
    train, val = random_records(seed, 10 + 40 * seed, symbols), random_records(seed + 99, 20, symbols)
    reference = Reference([[0, *record, 0] for record in train], symbols, order)
    expected = []
    for record in val:
        text = [0, *record, 0]
        expected += [-math.log(reference.p(w, tuple(text[max(0, i + 1 - order) : i]))) for i, w in enumerate(text) if i]
    model = KneserNey(split_of(train), symbols, records=True, order=order)
    assert model.losses(split_of(val)) == pytest.approx(expected, abs=1e-9)


def test_records_of_one_character_have_no_longer_ngrams():
    train, val = split_of([[1], [2], [1], [1]]), split_of([[1], [2, 1, 1, 2, 1, 1, 1]])
    reference = Reference([[0, 1, 0], [0, 2, 0], [0, 1, 0], [0, 1, 0]], 3, 6)
    expected = [-math.log(reference.p(w, c)) for w, c in ((1, (0,)), (0, (0, 1)), (2, (0,)), (1, (0, 2)))]
    assert KneserNey(train, 3, records=True).losses(val)[:4] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("length", [2, 20, 200])
def test_probabilities_sum_to_1_after_every_context(records, length):
    symbols = 3
    ids = split_of(random_records(1, length // 2, symbols)) if records else np.array(random_ids(1, length, symbols))
    model = KneserNey(ids, symbols, records)
    for size in (1, 2, 3, 5):
        for context in itertools.product(range(symbols), repeat=size):
            p = [math.exp(-model.losses(np.array([*context, w]))[-1]) for w in range(symbols)]
            assert sum(p) == pytest.approx(1, abs=1e-12) and min(p) > 0


@pytest.mark.parametrize("records", [False, True])
def test_baselines_in_chunks_equal_the_plain_losses(monkeypatch, records):
    """Also of stretches, which see the text before them as the model does."""
    monkeypatch.setattr("training.measure.counts.SCORED_AT_ONCE", 37)
    symbols = 12
    if records:
        train, val = (split_of(random_records(seed, 150, symbols)) for seed in (1, 2))
    else:
        train, val = (np.array(random_ids(seed, 1000, symbols), np.uint8) for seed in (1, 2))
    ones = Counter(train.tolist())
    unigram = np.array([-math.log((ones[b] + 1) / (len(train) + symbols)) for b in val[1:].tolist()])
    kneser_ney = KneserNey(train, symbols, records).losses(val)
    for places in ([(0, len(val))], [(0, 100)], [(0, 3), (5, 60), (200, 301)]):
        scored = np.concatenate([np.arange(start, end - 1) for start, end in places])
        expected = {"uniform": math.log(symbols), "unigram": unigram[scored].mean()}
        expected["kneser_ney"] = kneser_ney[scored].mean()
        assert baselines(train, val, symbols, records, places) == pytest.approx(expected, abs=1e-9)


def test_a_long_split_is_counted_in_a_sample(monkeypatch):
    train = np.arange(1000)
    assert sample(train, records=False) is train
    monkeypatch.setattr("training.measure.counts.MAX_COUNTED", 100)
    monkeypatch.setattr("training.measure.counts.PARTS", 4)
    parts = sample(train, records=False)
    assert parts.tolist() == [*range(25), *range(325, 350), *range(650, 675), *range(975, 1000)]
    assert sample(train, records=True).tolist() == list(range(100))


@pytest.mark.parametrize("most", [1, 5, 1 << 20, 1 << 62])
def test_keys_of_any_size_are_sorted(most):
    keys = np.random.default_rng(0).integers(0, most, 1000)
    found, places = sort_keys(keys.copy(), np.arange(1000))
    assert found.tolist() == sorted(keys.tolist()) and keys[places].tolist() == found.tolist()


def test_the_largest_vocabulary():
    ids = [65_500 + id for id in random_ids(3, 400, 36)]
    train, val, reference = ids[:300], ids[300:], Reference([ids[:300]], 1 << 16, 6)
    expected = [-math.log(reference.p(w, tuple(val[max(0, i - 5) : i]))) for i, w in enumerate(val) if i]
    model = KneserNey(np.array(train, np.uint16), 1 << 16, records=False)
    assert model.losses(np.array(val, np.uint16)) == pytest.approx(expected, abs=1e-9)


def test_discounts_follow_the_counts_of_counts():
    assert discounts(np.array([1] * 8 + [2] * 4 + [3] * 2 + [4])).tolist() == [0, 0.5, 1.25, 2.0]
    assert discounts(np.array([1] * 8 + [2] * 4 + [5] * 9)).tolist() == [0, 0.5, 0.5, 0.5]
    assert discounts(np.array([1] * 6 + [2] + [3] * 9 + [4])).tolist() == [0, 0.75, 0.75, 0.75]  # 2 would give −18
    assert discounts(np.array([7, 9])).tolist() == [0, 0.5, 0.5, 0.5]
