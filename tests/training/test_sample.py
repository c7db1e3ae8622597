import pytest
import torch
from helpers import random_model

from service.model.params import SamplingParams
from training import sample
from training.sample import ExhaustedError, sample_texts


@pytest.fixture(scope="module")
def model():
    return random_model()


def test_each_text_is_the_one_of_its_seed(model):
    exact = random_model(torch.float64)
    params = SamplingParams(temperature=0.9, top_k=20, seed=2**64 - 3)
    texts = list(sample_texts(model, [1, 2], 7, 12, params))
    seeds = [(2**64 - 3 + i) % 2**64 for i in range(7)]
    assert [seed for seed, _ in texts] == seeds
    for seed, ids in texts:
        assert ids == exact.generate([1, 2], 12, SamplingParams(temperature=0.9, top_k=20, seed=seed))


def test_more_texts_than_rows_end_at_a_stop(model, monkeypatch):
    whole = [ids for _, ids in sample_texts(model, [0], 50, 30, SamplingParams())]
    monkeypatch.setattr(sample, "MAX_RUNNING", 3)
    stopped = [ids for _, ids in sample_texts(model, [0], 50, 30, SamplingParams(), stop=((5,), (9,)))]
    for a, b in zip(whole, stopped, strict=True):
        ends = [i for i, id in enumerate(a) if id in (5, 9)]
        assert b == a[: ends[0] if ends else None]


def test_unique_texts_are_the_first_of_each(model):
    params = SamplingParams(top_k=6)
    plain = [tuple(ids) for _, ids in sample_texts(model, [0], 300, 2, params)]
    different = list(dict.fromkeys(plain))
    assert len(different) < 60
    found = list(sample_texts(model, [0], 10, 2, params, unique=True))
    assert [tuple(ids) for _, ids in found] == different[:10]
    assert [plain[seed] for seed, _ in found] == different[:10]


def test_too_few_different_texts_are_an_answer(model):
    with pytest.raises(ExhaustedError, match=r"\d+ different texts were found, 100 were asked for"):
        list(sample_texts(model, [0], 100, 1, SamplingParams(top_k=2), unique=True))
