import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.model.sampling import Draws, SamplingParams, SamplingRows, sample, uniforms


def probabilities(logits, params):
    """An independent sampler's distribution, in NumPy, one row: (V,)."""
    z = logits / params.temperature
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    if params.top_k:
        order = order[: params.top_k]
    p = np.exp([z[i] - z[order[0]] for i in order])
    p /= p.sum()
    kept, mass = [], 0.0
    for i, weight in zip(order, p, strict=True):
        kept.append((i, weight))
        mass += weight
        if params.top_p < 1 and mass >= params.top_p:
            break
    out = np.zeros(len(z))
    for i, weight in kept:
        out[i] = weight
    return out / out.sum()


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=1.7, top_k=5),
    SamplingParams(top_p=0.6),
    SamplingParams(temperature=0.8, top_k=9, top_p=0.7),
    SamplingParams(top_k=1),
    SamplingParams(top_k=1000),
    SamplingParams(top_p=1e-9),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_draws_follow_the_distribution(params):
    """Chi-square over 100 000 draws against an independent sampler."""
    V, n = 12, 100_000
    logits = np.random.default_rng(0).normal(size=V) * 2
    expected = probabilities(logits, params) * n
    u = torch.from_numpy(uniforms(7, 0, n))
    rows = SamplingRows([params] * n)
    ids = sample(torch.from_numpy(logits).expand(n, V), rows, u).ids
    seen = np.bincount(ids, minlength=V)
    assert seen[expected == 0].sum() == 0
    likely = expected > 0
    chi2 = ((seen - expected)[likely] ** 2 / expected[likely]).sum()
    freedom = likely.sum() - 1
    assert chi2 <= freedom + 5 * np.sqrt(2 * freedom)


def test_temperature_zero_is_greedy_and_ignores_the_seed():
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    for seed in (1, 2):
        rows = SamplingRows([SamplingParams(temperature=0, seed=seed, top_k=3)] * 50)
        ids = sample(logits, rows, torch.from_numpy(uniforms(seed, 0, 50))).ids
        assert torch.equal(ids, logits.argmax(1))


def test_rows_do_not_touch_each_other():
    logits = torch.randn(len(PARAMS), 30, generator=torch.Generator().manual_seed(0))
    u = torch.from_numpy(uniforms(3, 0, len(PARAMS)))
    together = sample(logits, SamplingRows(PARAMS), u).ids
    alone = [sample(logits[i : i + 1], SamplingRows([p]), u[i : i + 1]).ids for i, p in enumerate(PARAMS)]
    assert torch.equal(together, torch.cat(alone))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2000), st.integers(0, 50))
@settings(max_examples=50, deadline=None)
def test_a_draw_depends_on_seed_and_number_alone(seed, start, count):
    piece = uniforms(seed, start, count)
    assert np.array_equal(piece, uniforms(seed, 0, start + count)[start:])
    draws = Draws(seed)
    assert [draws[start + i] for i in range(count)] == piece.tolist()


def test_draws_are_uniform():
    counts, _ = np.histogram(uniforms(123, 0, 100_000), bins=100, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 5 * np.sqrt(2 * 99)


@pytest.mark.parametrize("seed", range(20))
def test_a_choice_called_certain_survives_the_tolerance(seed):
    """Move every logit by as much as the tolerance allows, at random: a certain id must stay."""
    generator = torch.Generator().manual_seed(seed)
    tolerance = 0.05
    B, V = 512, 8
    logits = torch.randn(B, V, generator=generator, dtype=torch.float64) * 2
    params = [PARAMS[i % len(PARAMS)] for i in range(B - 8)] + [SamplingParams(temperature=0)] * 8
    rows, u = SamplingRows(params), torch.rand(B, generator=generator, dtype=torch.float64)
    ids, certain = sample(logits, rows, u, tolerance)
    assert B // 2 < certain.sum() < B
    for _ in range(20):
        noise = (torch.rand(B, V, generator=generator, dtype=torch.float64) - 0.5) * 0.99 * tolerance
        moved = sample(logits + noise, rows, u).ids
        assert torch.equal(moved[certain], ids[certain])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", 101),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_bad_parameters_name_themselves(field, value):
    with pytest.raises(ValueError, match=rf"{field} must be .*, got"):
        SamplingParams(**{field: value})
