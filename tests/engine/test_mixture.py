"""Engines that mix the network with counts, against an independent mixture and against themselves."""

import dataclasses
import functools
import itertools
import random

import numpy as np
import pytest
import torch

from service.constrain.regex import compile_regex
from service.engine import native
from service.engine.backends import open_runner
from service.engine.engine import Engine
from service.engine.selfcheck import SelfCheckError
from service.engine.selfcheck import check as self_check
from service.local import load
from service.model.checkpoint import Checkpoint
from service.model.counts import COUNTS, Counts
from service.model.params import SamplingParams
from service.model.tokenizer import CharTokenizer
from service.wire import Submit, floats
from tests import reference
from tests.engine.test_engine import (
    SEVERAL,
    Ran,
    check,
    clock,  # noqa: F401
    continued,
    moves,  # noqa: F401
    of_many_clients,
    request_with_options,
    submit_and_run,
    uncached,
)
from tests.helpers import VOCABULARY, random_model
from tests.toolbox.needs import missing
from training.run.saving import save_checkpoint

ON_CPU = ["torch"] if native.why_not() else ["native", "torch"]
KINDS = ["text", "records"]
UNKNOWN = 60


def repetitive(seed, length):
    """Ids with frequent n-grams of all lengths, as the random prompts of requests hardly have."""
    r = random.Random(seed)
    words = [[r.randrange(61) for _ in range(r.randint(1, 9))] for _ in range(40)]
    return list(itertools.chain(*(r.choice(words) for _ in range(length))))[:length]


def counts_of(kind, weights=None):
    """Counts of a text in which the prompts of requests occur, as those of a file."""
    prompts = [id for i in range(SEVERAL) for id in request_with_options(i).prompt]
    ids = np.array([*prompts, *repetitive(1, 4000)] * 2, np.uint8)
    options = {"text": {}, "records": {"end": 0}}[kind]
    counts = Counts.count(ids, len(VOCABULARY), **options)
    if weights is None:
        weights = np.random.default_rng(2).uniform(0.05, 0.95, counts.weights.shape)
    return Counts.load(dataclasses.replace(counts, weights=weights).dump(), len(VOCABULARY))


def save(folder, counts, **options):
    save_checkpoint(folder, random_model(**options), CharTokenizer(VOCABULARY), {"losses": {}}, {COUNTS: counts.dump()})
    return Checkpoint.read(folder)


def contexts_in(counts, ids):
    """The longest known context after each id."""
    walks = counts.walk(counts.histories(np.array(ids)))
    return [ids[i + 1 - n : i + 1] for i, n in enumerate((walks >= 0).sum(axis=0).tolist())]


class Mixed:
    """A model in float64, whose logits are mixed by tests/reference.py."""

    def __init__(self, checkpoint):
        self.config = checkpoint.config
        self.network = checkpoint.load_model(dtype=torch.float64)
        self.after = functools.cache(reference.counts(checkpoint.path))

    @torch.no_grad()
    def __call__(self, idx):
        ids, rows = tuple(idx[0].tolist()), self.network(idx).softmax(2)
        for i in range(len(ids)):
            p, weight = self.after(ids[max(0, i - 6) : i + 1])
            rows[0, i] = (1 - weight) * rows[0, i] + weight * torch.tensor(p, dtype=torch.float64)
        return rows.log()


@pytest.fixture(scope="module", params=KINDS)
def mixed(request, tmp_path_factory):
    return save(tmp_path_factory.mktemp("mixed") / "ck", counts_of(request.param), block_size=16)


@pytest.fixture(scope="module")
def references(mixed):
    """What the requests give alone; none of the cache, the pieces and the backends has a part in it."""
    model = Mixed(mixed)
    return [uncached(model, wanted(i)) for i in range(SEVERAL + 8)]


def wanted(id):
    """A request with any options; the last ones share a beginning of 40 ids, and end in different ones."""
    if id < SEVERAL:
        return request_with_options(id)
    options = {"logprobs": 3, "score_from": 41} if id % 2 else {"logprobs": 0}
    return Submit(id, [*repetitive(7, 40), id % 61, id % 3], 30, SamplingParams(0.8, seed=id), **options)


@pytest.fixture(params=ON_CPU)
def backend(request):
    return request.param


@pytest.fixture
def make(backend, mixed):
    return lambda slots, **options: Engine(open_runner(mixed, backend, "float64", slots), **options)


def test_the_mixture_of_a_file_is_that_of_explicit_loops(tmp_path):
    for kind in KINDS:
        checkpoint = save(tmp_path / kind, counts_of(kind), block_size=4)
        counts, ids = checkpoint.load_counts(), [UNKNOWN, *repetitive(3, 30), 0, 5, UNKNOWN, 7, 0, *repetitive(1, 20)]
        expected = reference.mixture(checkpoint.path, ids)
        found = Mixed(checkpoint)(torch.tensor([ids]))[0].numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
        lengths = {len(context) for context in contexts_in(counts, ids)}
        assert lengths >= set(range(1, 8))


@pytest.mark.parametrize("length", [1, 2, 5, 7, 8, 20])
def test_generate_defines_the_text_of_a_mixture(mixed, length):
    model, params = Mixed(mixed), SamplingParams(0.9, seed=length)
    prompt = [UNKNOWN, *repetitive(3, length)][:length]
    expected = uncached(model, Submit(0, prompt, 40, params))[0]
    network = mixed.load_model(dtype=torch.float64)
    assert network.generate(prompt, 40, params, mixed.load_counts()) == expected != network.generate(prompt, 40, params)


def test_every_option_equals_the_mixture_of_the_definition(make, references, clock):  # noqa: F811
    """Prompts in pieces, of one id and past the window; copied beginnings; log-probabilities of prompts too."""
    engine, requests = make(5, clock=clock), [wanted(i) for i in range(SEVERAL + 8)]
    ran = Ran(engine)
    submit_and_run(engine, ran, requests)
    check(ran, requests, references)
    assert ran.counts["copied"] >= 40


@pytest.mark.parametrize("clock", ["jumping"], indirect=True)
def test_a_moved_sequence_keeps_the_text_of_its_mixture(make, references, clock, moves):  # noqa: F811
    engine, requests = make(5, clock=clock), of_many_clients([wanted(i) for i in range(SEVERAL + 8)])
    ran = Ran(engine)
    submit_and_run(engine, ran, requests)
    check(ran, requests, references)
    assert moves.total() > 30


@pytest.mark.parametrize("clock", ["jumping"], indirect=True)
def test_a_sequence_of_another_engine_goes_on_with_its_mixture(make, references, clock):  # noqa: F811
    requests = [wanted(i) for i in range(SEVERAL)]
    left, ran = requests, None
    for steps in (3, 5, 8, 13, 21, 34, 5000):
        engine = make(5, clock=clock)
        ran = Ran(engine) if ran is None else ran
        ran.engine = engine
        for each in left:
            engine.submit(each)
        ran.run(steps)
        left = [continued(request, ran) for request in left if request.id not in ran.reasons]
    check(ran, requests, references)


def test_a_text_whose_prompt_was_cut_has_the_same_mixture(tmp_path, backend):
    """The network of one layer sees fewer characters than the counts."""
    checkpoint = save(tmp_path / "ck", counts_of("text"), n_layer=1, block_size=2)
    assert checkpoint.config.receptive_field == 7
    prompt, params = repetitive(3, 50), SamplingParams(seed=4)
    expected = checkpoint.load_model(dtype=torch.float64).generate(prompt, 30, params, checkpoint.load_counts())
    for start in (0, 50 - 7):
        engine = Engine(open_runner(checkpoint, backend, "float64", 2))
        assert engine.generate([Submit(0, prompt[start:], 30, params)]) == [expected]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_counts_without_weight_change_no_bit(backend, dtype):
    """They serve for guesses."""
    model, counts = random_model(), counts_of("text", np.zeros((8, 3)))
    found = []
    for given in (None, counts):
        engine = Engine(open_runner(model, backend, dtype, 60, counts=given), clock=itertools.count().__next__)
        ran = Ran(engine)
        submit_and_run(engine, ran, [wanted(i) for i in range(SEVERAL + 8)])
        found.append((ran.texts, ran.logprobs, ran.scores, ran.reasons))
    assert found[0] == found[1]


@pytest.fixture
def library():
    """Where a compiler is required, a library that cannot be loaded is a failure, not a skip."""
    if reason := native.why_not():
        missing("compiler", f"native engine: {reason}")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bits_of_a_mixture_depend_on_no_batch_thread_or_guess(dtype):
    model, counts = random_model(block_size=13), counts_of("text")
    requests = [Submit(i, repetitive(3 + i, 1 + i), 60, SamplingParams(0.7, seed=i), logprobs=2) for i in range(32)]
    found = []
    for slots, threads, step_seconds in (
        (32, 1, 0.02),
        (1, 1, 0.02),
        (1, 1, 1e-9),
        (1, 2, 0.02),
        (32, 2, 0.02),
        (5, 3, 0.02),
    ):
        runner = open_runner(model, "native", dtype, slots, threads, counts=counts)
        ran = Ran(Engine(runner, max_waiting=100, clock=lambda: 0.0, step_seconds=step_seconds))
        for each in requests:
            ran.engine.submit(each)
        ran.run()
        found.append((ran.texts, ran.logprobs))
        guessed, right = runner.guesses
        assert guessed >= right and bool(right) == (slots == 1 and step_seconds > 1e-9 or slots == 5)
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("vocab_size", [2, 300, 70_000])
def test_ids_of_all_sizes_mix(backend, vocab_size):
    model = random_model(vocab_size=vocab_size)
    ids = np.array(repetitive(3, 3000)) * max(1, vocab_size // 61) % vocab_size
    counts = Counts.count(ids, vocab_size, order=5)
    counts = dataclasses.replace(counts, weights=np.full(counts.weights.shape, 0.6))
    counts = Counts.load(counts.dump(), vocab_size)
    engine = Engine(open_runner(model, backend, "float64", 2, counts=counts))
    requests = [Submit(i, ids[:20].tolist(), 30, SamplingParams(seed=i)) for i in range(2)]
    expected = [model.double().generate(it.prompt, 30, it.sampling, counts) for it in requests]
    assert engine.generate(requests) == expected
    assert vocab_size == 2 or {*expected[0]} & {*ids.tolist()}


def test_logits_that_are_not_finite_fail_in_a_mixture_too(backend):
    model, counts = random_model(), counts_of("text")
    model.embed.weight[7, 0] = float("nan")
    engine = Engine(open_runner(model, backend, "float64", 3, counts=counts))
    ran = Ran(engine)
    for each in (Submit(0, [7], 5, SamplingParams()), Submit(1, [3], 5, SamplingParams(logit_bias=((7, -100.0),)))):
        engine.submit(each)
    ran.run()
    assert ran.reasons == {0: "error", 1: "length"}


def test_the_self_check_compares_the_mixture(mixed, backend):
    self_check(open_runner(mixed, backend, "float64", 1), mixed)
    model, counts = mixed.load_model(), mixed.load_counts()
    longest = counts.weights.copy()
    longest[7] = 1 - longest[7]  # a difference after the longest contexts only
    for other in (None, dataclasses.replace(counts, weights=counts.weights * 0.9),
                  dataclasses.replace(counts, weights=longest)):  # fmt: skip
        with pytest.raises(SelfCheckError, match=f"backend {backend} does not compute the model"):
            self_check(open_runner(model, backend, "float64", 1, counts=other), mixed)


def test_python_generates_and_scores_the_mixture(mixed, backend):
    """Several candidates, a score, the next character, and the log-probabilities of an answer."""
    model, encode = Mixed(mixed), mixed.tokenizer.encode
    prompt = mixed.tokenizer.decode([id for id in repetitive(3, 30) if id])  # id 0 is the line break
    with load(mixed.path, backend=backend, dtype="float64", threads=2) as served:
        answers = served.generate(prompt, n=3, seed=5, max_tokens=20, logprobs=2)
        score, following = served.score(prompt), served.next(prompt)
    exact, counts = mixed.load_model(dtype=torch.float64), mixed.load_counts()
    texts = [exact.generate(encode(prompt), 20, SamplingParams(seed=5 + i), counts) for i in range(3)]
    assert answers.texts == list(map(mixed.tokenizer.decode, texts))
    ids = [*encode(prompt), *texts[0]]
    rows, length = model(torch.tensor([ids]))[0].numpy(), len(prompt)
    values = rows[np.arange(len(ids) - 1), ids[1:]]
    assert score.nats == pytest.approx(-values[: length - 1].sum(), abs=1e-7)
    assert answers[0].logprobs == pytest.approx(values[length - 1 :].tolist(), abs=1e-7)
    assert following[0][VOCABULARY[7]] == pytest.approx(np.exp(rows[length - 1, 7]), abs=1e-9)


def test_backend_cuda_names_the_remedy(mixed, monkeypatch):
    monkeypatch.setattr("service.engine.backends.resolve", lambda *_: ("cuda", "float32"))
    with pytest.raises(SelfCheckError, match="cuda does not mix .* counts.bin: use --backend torch"):
        open_runner(mixed, "cuda")


def test_a_pattern_restricts_the_mixture(make, mixed):
    """With a bias and a report of chosen alternatives, which are those of the mixture before both."""
    automaton, ids = compile_regex("[a-c]{12}", VOCABULARY), tuple(range(20, 30))
    params = SamplingParams(0.5, seed=3, logit_bias=((VOCABULARY.index("b"), 2.0),))
    request = Submit(0, repetitive(1, 12), 12, params, logprobs=0, logprob_ids=ids, constraint=automaton.pack())
    engine, found = make(2), []
    engine.submit(request)
    text = []
    while engine.has_work:
        for delta in engine.step():
            text += delta.ids
            if delta.logprobs is not None:
                found += list(floats(delta.logprobs.top_values))
    rows = Mixed(mixed)(torch.tensor([[*request.prompt, *text]]))[0, len(request.prompt) - 1 : -1]
    assert {VOCABULARY[id] for id in text} <= set("abc") and len(text) == 12
    assert found == pytest.approx(rows[:, list(ids)].ravel().tolist(), abs=1e-9)
