import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.model.config import GPTConfig
from service.model.gpt import GPT
from service.model.params import SamplingParams
from service.model.sampling import Draws, Sampler, uniforms
from tests.sampler import History, distribution, draw, sample


def test_samplers_are_given_every_parameter():
    """A field that is not in `factors` would be accepted, and read by nothing."""

    def given_to_samplers(params):
        return params.factors, params.seed, params.top_k, params.logit_bias

    for name in SamplingParams.__struct_fields__:
        other = ((3, 1.5),) if name == "logit_bias" else 7 if name in ("seed", "top_k") else 0.25
        assert given_to_samplers(SamplingParams(**{name: other})) != given_to_samplers(SamplingParams()), name


def history_of(V, prompt, completion):
    history = History(V, [i % V for i in prompt])
    for i in completion:
        history.append(i % V)
    return history


def random_params(rng, V):
    """Each parameter has its default value half of the time, otherwise a typical or an arbitrary valid one."""

    def maybe(default, *others):
        return others[rng.integers(len(others))] if rng.random() < 0.5 else default

    biased = rng.choice(V, size=rng.integers(0, min(V, 5) + 1), replace=False)
    return SamplingParams(
        seed=int(rng.integers(2**63)),
        temperature=maybe(1.0, 0.0, rng.uniform(0.1, 2), rng.uniform(0, 100)),
        top_k=maybe(0, int(rng.integers(1, V + 2))),
        top_p=maybe(1.0, rng.uniform(1e-9, 1), rng.uniform(0.8, 1)),
        min_p=maybe(0.0, rng.uniform(0, 0.2), rng.uniform(0, 1), 1.0),
        typical_p=maybe(1.0, rng.uniform(1e-9, 1), rng.uniform(0.8, 1)),
        repetition_penalty=maybe(1.0, rng.uniform(0.7, 1.5), rng.uniform(0.01, 100)),
        presence_penalty=maybe(0.0, rng.uniform(-2, 2)),
        frequency_penalty=maybe(0.0, rng.uniform(-2, 2)),
        logit_bias=maybe((), tuple((int(i), rng.choice([100.0, -100.0, rng.normal()])) for i in biased)),
    )


@pytest.mark.parametrize("seed", range(4))
def test_draws_equal_those_of_an_independent_sampler(seed):
    """Batches of random parameters, texts, masks and vocabularies: the same u gives the same id."""
    rng = np.random.default_rng(seed)
    for V in (1, 2, 3, 80, *rng.integers(1, 81, size=8)):
        B = 32
        params = [random_params(rng, V) for _ in range(B)]
        logits = rng.normal(size=(B, V)) * rng.choice([0.3, 2.0, 8.0], size=(B, 1))
        logits = np.where(rng.random((B, 1)) < 0.25, logits.round(), logits)  # with ties
        texts = [[rng.integers(V, size=rng.integers(0, 9)).tolist() for _ in range(2)] for _ in range(B)]
        allowed = rng.random((B, V)) < rng.choice([0.1, 0.9, 1.0], size=(B, 1))
        allowed[range(B), rng.integers(V, size=B)] = True
        if rng.random() < 0.3:
            allowed = None
        else:  # the logits of excluded ids do not matter
            logits[~allowed] *= rng.choice([1.0, 1e9])
        expected = [
            distribution(logits[b], params[b], *texts[b], None if allowed is None else allowed[b]) for b in range(B)
        ]
        histories = [history_of(V, *texts[b]) if params[b].needs_history else None for b in range(B)]
        mask = None if allowed is None else torch.from_numpy(allowed)
        for u in (np.zeros(B), *rng.random((4, B))):
            ids = sample(torch.from_numpy(logits), params, torch.from_numpy(u), histories, mask)
            assert ids.tolist() == [draw(p, x) for p, x in zip(expected, u, strict=True)]
        last = torch.full((B,), 1 - 2**-53, dtype=torch.float64)  # here the order of summation matters
        ids = sample(torch.from_numpy(logits), params, last, histories, mask).tolist()
        assert all(p[id] > 0 for p, id in zip(expected, ids, strict=True))


def test_a_slot_keeps_nothing_of_its_last_sequence():
    rng, V = np.random.default_rng(0), 6
    sampler, logits = Sampler(1, V), rng.normal(size=V)
    for params in (SamplingParams(), *(random_params(rng, V) for _ in range(100))):
        prompt, u = rng.integers(V, size=2).tolist(), rng.random()
        sampler.start(0, params, prompt)
        sampler.send()
        rows = torch.from_numpy(logits)[None], slice(0, 1), torch.tensor([u], dtype=torch.float64)
        ids, _ = sampler.choose(*rows, needs_all=bool(sampler.needs_all[0]))
        assert ids.item() == draw(distribution(logits, params, prompt), u)
        sampler.counts += 1.0


@pytest.mark.parametrize("seed", range(30))
def test_probabilities_equal_those_of_transformers(seed):
    """Our id changes where the CDF of its chained processors does, within 1e-12."""
    from transformers.generation import logits_process

    rng = np.random.default_rng(seed)
    V = int(rng.integers(2, 81))
    params = SamplingParams(
        rng.uniform(0.3, 2), int(rng.integers(2, V + 1)) if seed % 2 else 0, rng.uniform(0.5, 1) if seed % 3 else 1.0,
        min_p=rng.uniform(0, 0.2) if seed % 5 < 3 else 0.0, typical_p=rng.uniform(0.2, 1) if seed % 7 < 5 else 1.0,
        repetition_penalty=rng.uniform(0.5, 2) if seed % 4 else 1.0,
    )  # fmt: skip
    text = rng.integers(V, size=(1, 20))
    logits = torch.from_numpy(rng.normal(size=(1, V)) * 3)
    scores = logits.clone()
    for processor in (
        logits_process.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        logits_process.TemperatureLogitsWarper(params.temperature),
        logits_process.TopKLogitsWarper(params.top_k or V),
        logits_process.TopPLogitsWarper(params.top_p),
        logits_process.MinPLogitsWarper(params.min_p),
        *([logits_process.TypicalLogitsWarper(params.typical_p)] if params.typical_p < 1 else []),
    ):
        scores = processor(torch.from_numpy(text), scores)
    p = scores.softmax(dim=1)[0]
    end = p.cumsum(dim=0)
    ids = (p > 4e-12).nonzero()[:, 0]
    assert (scores > -torch.inf).sum() == len(ids)
    u = torch.cat((end[ids] - p[ids] + 1e-12, end[ids] - 1e-12))
    histories = [history_of(V, text[0, :12], text[0, 12:])] * len(u)
    chosen = sample(logits.expand(len(u), V), [params] * len(u), u, histories)
    assert torch.equal(chosen, torch.cat((ids, ids)))


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-300, 1e-9, 1e-6, 1e-5])
def test_near_temperature_zero_a_clear_leader_is_chosen(temperature):
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 3.0 - 1e-5], [1.0, 3.0, 2.9]], dtype=torch.float64)
    params = SamplingParams(temperature, top_p=0.9, min_p=0.1, typical_p=0.9, repetition_penalty=1.0 + 1e-9)
    histories = [history_of(3, [], [])] * 3
    ids = sample(logits, [params] * 3, torch.full((3,), 0.3).double(), histories)
    assert ids[0] == ids[2] == 1


@pytest.mark.parametrize("repetition_penalty", [0.01, 100.0])
def test_extreme_repetition_penalties_leave_a_choice(repetition_penalty):
    """At both bounds."""
    logits = torch.tensor([[3.0, 2.0, -1.0, 1.0]])
    allowed = torch.tensor([[False, True, True, True]])
    params = SamplingParams(repetition_penalty=repetition_penalty, min_p=0.5, typical_p=0.5)
    ids = sample(logits, [params], torch.tensor([0.1]), [history_of(4, [0, 1, 2], [])], allowed)
    assert ids.tolist() == [1 if repetition_penalty < 1 else 3]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_rows_do_not_affect_others(value):
    """The engine samples all rows at once, and fails those with non-finite logits afterwards."""
    V = 6
    rng = np.random.default_rng(0)
    params = [SamplingParams(0.0), SamplingParams(top_k=1000), *(random_params(rng, V) for _ in range(40))]
    B = 2 * len(params)
    logits, u = torch.randn(B, V, generator=torch.Generator().manual_seed(0)), torch.full((B,), 0.4)
    rows, histories = params * 2, [history_of(V, [1, 2], [3])] * B
    fine = sample(logits, rows, u, histories)
    logits[: B // 2] = value
    ids = sample(logits, rows, u, histories)
    assert ((ids >= 0) & (ids < V)).all()
    assert torch.equal(ids[B // 2 :], fine[B // 2 :])


@given(st.integers(0, 2**64 - 1), st.integers(0, 2000), st.integers(0, 50))
@settings(max_examples=50)
def test_a_draw_depends_on_seed_and_index_alone(seed, start, count):
    assert np.array_equal(uniforms(seed, start, count), uniforms(seed, 0, start + count)[start:])


@given(st.integers(0, 10_000))
@settings(max_examples=10)
def test_draws_that_are_taken_are_those_of_each_sequences_seed(seed):
    r = random.Random(seed)
    draws, seeds, taken = Draws(3), [0, 0, 0], [0, 0, 0]
    for _ in range(30):
        if r.random() < 0.3:
            b = r.randrange(3)
            seeds[b], taken[b] = r.getrandbits(64), 0
            draws.start(b, seeds[b])
        which = r.sample(range(3), r.randint(1, 3))
        counts = [r.choice([1, 7, 600]) for _ in which]
        found = draws.take(np.array(which), np.array(counts))
        for b, count, row in zip(which, counts, found, strict=True):
            assert np.array_equal(row[:count], uniforms(seeds[b], taken[b], count))
            taken[b] += count


def test_draws_are_uniform():
    counts, _ = np.histogram(uniforms(123, 0, 100_000), bins=100, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 5 * np.sqrt(2 * 99)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_penalises_its_own_output(temperature):
    """Each id equals the draw of the independent sampler."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(9, block_size=8, n_layer=1, n_embd=16, n_head=2)).double()
    torch.nn.init.normal_(model.head.weight)
    params = SamplingParams(
        temperature, seed=3, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.4, logit_bias=((1, -1),)
    )  # fmt: skip
    prompt, completion = [1, 2, 3], []
    for u in uniforms(3, 0, 30):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion]))[0, -1].numpy()
        completion.append(draw(distribution(logits, params, prompt, completion), u))
    assert model.generate(prompt, 30, params) == completion
    assert model.generate(prompt, 30, SamplingParams(temperature, seed=3)) != completion


NAN = float("nan")


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("temperature", NAN), ("top_k", -2), ("top_p", 0.0), ("seed", 2**64), ("min_p", 1.1),
     ("typical_p", 0.0), ("repetition_penalty", 100.5), ("presence_penalty", NAN), ("frequency_penalty", float("inf")),
     *(("logit_bias", bias) for bias in (((-1, 0.0),), ((3, 1.0), (3, 2.0)), ((3, 100.5),), ((3, NAN),)))],
)  # fmt: skip
def test_invalid_parameters_are_named(field, value):
    with pytest.raises(ValueError, match=rf"{field} must be .*, got"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("prompt", [[0, 5], [-1, 0]])
def test_a_prompt_outside_the_vocabulary_is_refused(prompt):
    with pytest.raises(ValueError, match=rf"prompt ids must be in \[0, 4\], got {prompt[0]} to {prompt[1]}"):
        Sampler(1, 5).start(0, SamplingParams(), prompt)


def test_a_bias_outside_the_vocabulary_is_refused():
    rows = [SamplingParams(), SamplingParams(logit_bias=((4, 1.0), (5, 1.0)))]
    with pytest.raises(ValueError, match="logit_bias ids must be below 5, got 5"):
        sample(torch.zeros(2, 5), rows, torch.zeros(2))
