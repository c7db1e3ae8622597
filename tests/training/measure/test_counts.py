"""The counts of a training split: baselines, what a network learns from, and the mixture with a network."""

import math
import random
from collections import Counter

import numpy as np
import pytest

from service.model.counts import Counts
from training.measure import counts as module
from training.measure.counts import Predictions, baselines
from training.measure.mixture import fit_mixture, mixed_loss


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


def counts_of(ids, symbols, records):
    return Counts.count(ids, symbols, end=0 if records else None)


def splits(records, symbols):
    if records:
        return [split_of(random_records(seed, 150, symbols)) for seed in (1, 2)]
    return [np.array(random_ids(seed, 1000, symbols), np.uint8) for seed in (1, 2)]


@pytest.mark.parametrize("records", [False, True])
def test_baselines_in_chunks_equal_the_plain_losses(monkeypatch, records):
    """Also of stretches, which see the text before them as the model does."""
    monkeypatch.setattr(module, "SCORED_AT_ONCE", 37)
    symbols = 12
    train, val = splits(records, symbols)
    ones = Counter(train.tolist())
    unigram = np.array([-math.log((ones[b] + 1) / (len(train) + symbols)) for b in val[1:].tolist()])
    counts = counts_of(train, symbols, records)
    kneser_ney = np.array([-math.log(counts.next(val[:i].tolist())[0][val[i]]) for i in range(1, len(val))])
    for places in ([(0, len(val))], [(0, 100)], [(0, 3), (5, 60), (200, 301)]):
        at = np.concatenate([np.arange(start + 1, end) for start, end in places])
        expected = {"uniform": math.log(symbols), "unigram": unigram[at - 1].mean()}
        expected["kneser_ney"] = kneser_ney[at - 1].mean()
        assert baselines(train, val, at, counts) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("table_bytes", [1 << 27, 6_000, 0])
@pytest.mark.parametrize("records", [False, True])
def test_predictions_are_the_distributions_of_the_counts(monkeypatch, records, table_bytes):
    """A smaller table holds shorter contexts."""
    monkeypatch.setattr(module, "TABLE_BYTES", table_bytes)
    symbols = 9
    train, val = splits(records, symbols)
    counts = counts_of(train, symbols, records)
    predictions = Predictions(counts)
    length = predictions.lengths
    assert length == 7 if table_bytes == 1 << 27 else 0 < length < 7 if table_bytes else length == 0
    found = predictions.after(val, np.array([0]))
    expected = [counts.next(val[max(0, i + 1 - length) : i + 1].tolist() if length else [])[0] for i in range(len(val))]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_predictions_see_no_text_before_the_one_that_a_character_is_in():
    train = np.array(random_ids(3, 900, 9), np.uint8)
    predictions, starts = Predictions(counts_of(train, 9, False)), np.array([0, 40, 41, 90])
    alone = [predictions.after(part, np.array([0])) for part in np.split(train[:120], starts[1:])]
    assert np.array_equal(predictions.after(train[:120], starts), np.concatenate(alone))


def test_each_half_is_scored_with_the_weights_of_the_other():
    """The network of the first half is good, that of the second bad: weights of the same half would hide it."""
    train, val = splits(False, 9)
    counts = counts_of(train, 9, False)
    p, classes = counts.probabilities(val)
    each = np.full(len(val), np.nan, np.float32)
    half = (len(val) - 1) // 2
    each[1 : 1 + half], each[1 + half :] = 0.01, 6.0
    found = fit_mixture(counts, val, each)
    network = np.exp(-each[1:].astype(np.float64))
    expected = 0.0
    for own, other in ((slice(None, half), slice(half, None)), (slice(half, None), slice(None, half))):
        w = counts.fitted(network[other], p[other], classes[other]).weights.ravel()[classes[own]]
        expected -= np.log((1 - w) * network[own] + w * p[own]).sum()
    assert found.loss == pytest.approx(expected / len(network))
    assert found.loss > mixed_loss(found.counts, val, each) + 0.5
    w = counts.fitted(network, p, classes).weights
    assert np.array_equal(found.counts.weights, w) and w.any() and not counts.weights.any()


def test_characters_that_were_not_scored_do_not_count():
    train, val = splits(True, 12)
    counts = counts_of(train, 12, True)
    each = np.full(len(val), np.nan, np.float32)
    each[5:90] = 2.0
    found = fit_mixture(counts, val, each)
    assert found.loss == pytest.approx(fit_mixture(counts, val[:90], each[:90]).loss)
    assert mixed_loss(found.counts, val, each) == pytest.approx(mixed_loss(found.counts, val[:90], each[:90]))
