"""Bulk sampling against one text at a time."""

import pytest
import torch

from service.model.params import SamplingParams
from tests.helpers import random_model
from training import sample
from training.sample import ExhaustedError, sample_texts


@pytest.fixture(scope="module")
def model():
    return random_model()


def test_a_text_depends_on_its_seed_alone(model):
    exact = random_model(torch.float64)
    params = SamplingParams(temperature=0.9, top_k=20, seed=2**64 - 3)
    texts = list(sample_texts(model, [1, 2], 7, 12, params))
    seeds = [(2**64 - 3 + i) % 2**64 for i in range(7)]
    assert [seed for seed, _ in texts] == seeds
    for seed, ids in texts:
        assert ids == exact.generate([1, 2], 12, SamplingParams(temperature=0.9, top_k=20, seed=seed))


def test_more_texts_than_slots_end_at_a_stop(model, monkeypatch):
    whole = [ids for _, ids in sample_texts(model, [0], 50, 30, SamplingParams())]
    monkeypatch.setattr(sample, "MAX_RUNNING", 3)
    stopped = [ids for _, ids in sample_texts(model, [0], 50, 30, SamplingParams(), stop=((5,), (9,)))]
    for a, b in zip(whole, stopped, strict=True):
        ends = [i for i, id in enumerate(a) if id in (5, 9)]
        assert b == a[: ends[0] if ends else None]


def test_unique_skips_repeats(model):
    params = SamplingParams(top_k=6)
    plain = [tuple(ids) for _, ids in sample_texts(model, [0], 300, 2, params)]
    different = list(dict.fromkeys(plain))
    assert len(different) < 60
    found = list(sample_texts(model, [0], 10, 2, params, unique=True))
    assert [tuple(ids) for _, ids in found] == different[:10]
    assert [plain[seed] for seed, _ in found] == different[:10]


def test_unique_gives_up_after_many_repeats(model):
    with pytest.raises(ExhaustedError, match=r"found only 2 distinct texts of 100 requested"):
        list(sample_texts(model, [0], 100, 1, SamplingParams(top_k=2), unique=True))
