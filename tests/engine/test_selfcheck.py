"""A backend that computes something else than the model ends the start."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from service.engine import native
from service.engine.backends import open_runner
from service.engine.selfcheck import TOLERANCES, SelfCheckError, check
from service.model.attention import logits_of
from service.model.checkpoint import Checkpoint
from service.settings import BUNDLED
from tests.helpers import overflow, random_model, save_random

BACKENDS = [("native", dtype) for dtype in (native.DTYPES if native.why_not() is None else ())]
BACKENDS += [("torch", dtype) for dtype in ("float64", "float32", "bfloat16")]


def test_the_reference_is_the_model():
    model = random_model(torch.float64)
    ids = list(range(0, 60, 3))
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    expected = model(torch.tensor([ids]))[0].numpy()
    np.testing.assert_allclose(logits_of(weights, model.config, ids), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_sound_backends_pass(tmp_path, backend, dtype):
    """Of the bundled model, past its window; of random weights; of a window so long that the text stays in it."""
    short, long = save_random(tmp_path / "a"), save_random(tmp_path / "b", block_size=4096, n_embd=64, n_head=4)
    for checkpoint in (Checkpoint.read(BUNDLED), short, long):
        check(open_runner(checkpoint, backend, dtype, 2, 1), checkpoint)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("name", ["blocks.0.attn.qkv.weight", "blocks.1.mlp_norm.weight", "head.weight"])
def test_other_arithmetic_is_refused_by_name(checkpoint, backend, dtype, name):
    other = checkpoint.load_model()
    other.state_dict()[name].mul_(1.5)
    remedy = "use --backend torch" if backend == "native" else "torch itself is wrong here"
    message = f"backend {backend} does not compute the model: .* positions.*; {remedy}"
    with pytest.raises(SelfCheckError, match=message):
        check(open_runner(other, backend, dtype, 2, 1), checkpoint)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_errors_of_ten_tolerances_are_refused(checkpoint, backend, dtype):
    other = checkpoint.load_model()
    other.head.weight.mul_(1 + 10 * TOLERANCES[dtype])  # all logits are as much too large
    with pytest.raises(SelfCheckError):
        check(open_runner(other, backend, dtype, 2, 1), checkpoint)


def test_not_a_number_is_an_error_where_the_model_gives_numbers(checkpoint):
    other = checkpoint.load_model()
    other.head.weight[0, 0] = math.nan
    with pytest.raises(SelfCheckError, match=r"at \d+ positions, first at 0,"):
        check(open_runner(other, "torch", "float64", 1, 1), checkpoint)


def test_weights_whose_logits_overflow_are_not_judged(checkpoint, monkeypatch):
    checkpoint, other = dataclasses.replace(checkpoint, probe=None), checkpoint.load_model()
    overflow(other, 20)
    weights = {name: value.numpy() for name, value in other.state_dict().items()}
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "load_weights", lambda _: weights)
        for backend, dtype in BACKENDS:
            check(open_runner(other, backend, dtype, 1, 1), checkpoint)
    weights = checkpoint.load_weights()
    weights["head.weight"] = weights["head.weight"].astype(np.float64) * 1e308
    monkeypatch.setattr(Checkpoint, "load_weights", lambda _: weights)
    check(open_runner(checkpoint.load_model(), "torch", "float64", 1, 1), checkpoint)
