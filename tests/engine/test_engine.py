import copy
import random
import re
import threading

import numpy as np
import pytest
import torch
from helpers import VOCABULARY, random_model

from service.constrain.regex import any_of, compile_choice, compile_regex
from service.engine.engine import Engine
from service.engine.scheduler import QueueFullError
from service.engine.sequence import Sequence
from service.model.params import SamplingParams
from service.model.sampling import History, SamplingRows, sample, uniforms
from service.wire import Submit
from training.evaluate import streamed_loss


@pytest.fixture(scope="module")
def model():
    return random_model(block_size=8)


@pytest.fixture(scope="module")
def exact():
    return random_model(torch.float64, block_size=8)


def request(id, seed=None, **options):
    """A request determined by `id` (or `seed`) alone."""
    r = random.Random(id if seed is None else seed)
    prompt = [r.randrange(60) for _ in range(r.choice([1, 2, 7, 8, 9, 14, 15, 16, 40, 200]))]
    params = SamplingParams(
        r.choice([0.0, 0.3, 1.0, 2.0]), r.choice([0, 0, 5]), r.choice([1.0, 1.0, 0.7]), r.randrange(2**64)
    )
    return Submit(id, prompt, r.choice([1, 3, 10, 40]), params, **options)


@pytest.mark.parametrize("tolerance", [None, 0.1])
def test_texts_equal_the_uncached_reference(model, exact, tolerance):
    """With a full batch, chunked prefill and random arrivals, the fp32 engine yields the fp64 model's text.

    With a tolerance of 0.1 many choices wait for fp64 logits, several at once.
    """
    engine = Engine(model, max_running=5, prefill_budget=13)
    engine.runner.tolerance = tolerance or engine.runner.tolerance
    r = random.Random(0)
    exact_choices = 0
    todo = [request(i) for i in range(40)]
    texts = {s.id: [] for s in todo}
    while todo or engine.has_work:
        while todo and r.random() < 0.4:
            engine.submit(todo.pop())
        for delta in engine.step():
            texts[delta.id] += delta.ids
        exact_choices += engine.stats.num_exact
    for i, text in texts.items():
        s = request(i)
        assert text == exact.generate(s.prompt, s.max_tokens, s.sampling), i
    assert tolerance is None or exact_choices > 50


def test_near_ties_are_resolved_in_fp64():
    """The weights of paired characters differ by one ulp in one element: only fp64 separates their logits."""
    small = random_model(block_size=8, vocab_size=60)
    weight = small.head.weight
    weight[1::2] = weight[::2]
    weight[1::2, 3] = torch.nextafter(weight[1::2, 3], torch.tensor(9.0))
    large = copy.deepcopy(small).double()
    engine = Engine(small, max_running=4)
    sequences = [Submit(i, [i], 12, SamplingParams(temperature=0.0)) for i in range(4)]
    exact_choices = 0
    texts = {s.id: [] for s in sequences}
    for s in sequences:
        engine.submit(s)
    while engine.has_work:
        for delta in engine.step():
            texts[delta.id] += delta.ids
        exact_choices += engine.stats.num_exact
    assert exact_choices > 0
    for i, text in texts.items():
        assert text == large.generate([i], 12, SamplingParams(temperature=0.0))


@pytest.fixture
def blocked(model, monkeypatch):
    """An engine whose sequence 1 waits for fp64 logits of its first character until `blocked.go` is set."""
    engine = Engine(model, max_running=2)
    engine.go = threading.Event()
    last_logits = engine.runner.exact_model.last_logits

    def slow(idx):
        assert engine.go.wait(30)
        return last_logits(idx)

    monkeypatch.setattr(engine.runner.exact_model, "last_logits", slow)
    usual, engine.runner.tolerance = engine.runner.tolerance, 100.0
    engine.submit(Submit(1, [1, 2, 3], 6, SamplingParams(seed=1), timeout_seconds=1000))
    engine.step()
    engine.runner.tolerance = usual
    engine.submit(Submit(2, [4, 5], 30, SamplingParams(seed=2)))
    yield engine
    engine.go.set()


def collect(engine, texts, steps=1000):
    """Runs up to `steps` steps, extends `texts`; returns the finish reasons."""
    finish_reasons = {}
    for _ in range(steps):
        for delta in engine.step() if engine.has_work else []:
            texts.setdefault(delta.id, []).extend(delta.ids)
            if delta.finish_reason:
                finish_reasons[delta.id] = delta.finish_reason
    return finish_reasons


def test_other_sequences_continue_while_one_waits_for_fp64_logits(blocked, exact):
    texts = {}
    assert collect(blocked, texts, 20) == {}
    assert 1 not in texts
    assert len(texts[2]) == 20
    blocked.go.set()
    assert collect(blocked, texts) == {1: "length", 2: "length"}
    assert texts[1] == exact.generate([1, 2, 3], 6, SamplingParams(seed=1))
    assert texts[2] == exact.generate([4, 5], 30, SamplingParams(seed=2))


def test_sequence_waiting_for_fp64_logits_can_be_aborted(blocked, exact):
    texts = {}
    collect(blocked, texts, 3)
    blocked.abort(1)
    s = Submit(3, [6], 4, SamplingParams(seed=3))
    blocked.submit(s)  # takes the freed slot
    assert collect(blocked, texts) == {1: "abort", 2: "length", 3: "length"}
    assert texts[2] == exact.generate([4, 5], 30, SamplingParams(seed=2))
    assert texts[3] == exact.generate([6], 4, SamplingParams(seed=3))


def test_failure_of_the_fp64_forward_ends_only_its_sequence(blocked, exact, monkeypatch, caplog):
    def fail(idx):
        raise RuntimeError("no memory")

    monkeypatch.setattr(blocked.runner.exact_model, "last_logits", fail)
    texts = {}
    assert collect(blocked, texts) == {1: "error", 2: "length"}
    assert texts[2] == exact.generate([4, 5], 30, SamplingParams(seed=2))
    assert "no memory" in caplog.text


def test_decode_failing_in_the_step_of_a_decision_ends_each_sequence_once(blocked, exact, monkeypatch):
    collect(blocked, {}, 3)  # sequence 2 decodes, and the fp64 forward of sequence 1 has been started
    decode = blocked.runner.decode

    def fail(sequences, stats):
        if len(sequences) == 1:  # sequence 1 still waits
            return decode(sequences, stats)
        monkeypatch.setattr(blocked.runner, "decode", decode)
        raise RuntimeError("no memory")

    monkeypatch.setattr(blocked.runner, "decode", fail)
    blocked.go.set()
    assert collect(blocked, {}) == {1: "error", 2: "error"}
    (ids,) = blocked.generate([Submit(3, [6], 4, SamplingParams(seed=3))])
    assert ids == exact.generate([6], 4, SamplingParams(seed=3))


def test_tolerance_exceeds_the_rounding_error(model, exact):
    tolerance = Engine(model).runner.tolerance
    idx = torch.randint(61, (4, 60), generator=torch.Generator().manual_seed(5))
    error = model(idx).double() - exact(idx)
    error -= error.mean(-1, keepdim=True)
    assert 0 < error.abs().max() < tolerance < 1e-3


def test_fp64_engine_needs_no_second_forward(exact):
    engine = Engine(exact)
    assert engine.runner.tolerance == 0
    engine.generate([request(1)])
    assert engine.stats.num_exact == 0


def test_text_ends_before_the_stop_sequence(model, exact):
    s = request(3)
    text = exact.generate(s.prompt, 40, s.sampling)
    stop = tuple(text[10:13])
    first = next(i for i in range(len(text)) if tuple(text[i : i + 3]) == stop)
    engine = Engine(model)
    stopped = engine.submit(Submit(0, s.prompt, 40, s.sampling, stop=(stop, (99, 99))))
    texts = {}
    collect(engine, texts)
    assert texts == {0: text[:first]}
    assert stopped.finish_reason == "stop"


def test_abort_frees_the_slot_at_once_without_affecting_others(model, exact):
    engine = Engine(model, max_running=2)
    leaving = Submit(1, [1, 2, 3], 10_000, SamplingParams(seed=1))
    staying = Submit(2, [4, 5], 30, SamplingParams(seed=2))
    waiting = Submit(3, [6], 5, SamplingParams(seed=3))
    for s in (leaving, staying, waiting):
        engine.submit(s)
    texts = {2: [], 3: []}
    for _ in range(4):
        for delta in engine.step():
            texts.setdefault(delta.id, []).extend(delta.ids)
    assert engine.scheduler.num_waiting == 1
    engine.abort(1)
    deltas = engine.step()
    assert [d.id for d in deltas if d.finish_reason == "abort"] == [1]
    assert engine.scheduler.num_waiting == 0
    for delta in deltas:
        texts[delta.id] += delta.ids
    while engine.has_work:
        for delta in engine.step():
            texts[delta.id] += delta.ids
    for s in (staying, waiting):
        assert texts[s.id] == exact.generate(s.prompt, s.max_tokens, s.sampling)
    engine.abort(1)
    engine.abort(77)  # finished or unknown: no effect
    assert not engine.has_work


def test_timeouts_end_running_and_waiting_sequences(model):
    now = 0.0
    engine = Engine(model, max_running=1, clock=lambda: now)
    engine.submit(Submit(1, [1], 1000, SamplingParams(), timeout_seconds=5.0))
    engine.submit(Submit(2, [1], 1000, SamplingParams(), timeout_seconds=5.0))
    engine.submit(Submit(3, [1], 2, SamplingParams(), timeout_seconds=9.0))
    engine.step()
    now = 5.0
    ended = {d.id: d.finish_reason for d in engine.step() if d.finish_reason}
    assert ended == {1: "timeout", 2: "timeout"}
    while engine.has_work:
        ended |= {d.id: d.finish_reason for d in engine.step() if d.finish_reason}
    assert ended[3] == "length"


def test_full_queue_rejects_and_keeps_admitted_sequences(model):
    engine = Engine(model, max_running=1, max_waiting=1)
    engine.submit(request(0))
    engine.submit(request(1))
    with pytest.raises(QueueFullError):
        engine.submit(request(2))
    done = []
    while engine.has_work:
        done += [d.id for d in engine.step() if d.finish_reason]
    assert sorted(done) == [0, 1]


def test_non_finite_logits_end_only_their_sequence(exact):
    """One character's embedding is NaN: the sequence that contains it ends with an error, the other continues."""
    broken = random_model(block_size=8)
    broken.embed.weight[7] = float("nan")
    engine = Engine(random_model(block_size=8), max_running=2)
    engine.runner.model = broken
    engine.submit(Submit(1, [7], 5, SamplingParams()))
    engine.submit(Submit(2, [1], 1, SamplingParams(seed=4)))
    texts = {}
    assert collect(engine, texts) == {1: "error", 2: "length"}
    assert texts == {1: [], 2: exact.generate([1], 1, SamplingParams(seed=4))}


def test_failing_forward_ends_its_sequences_and_the_engine_continues(model, exact, caplog):
    engine = Engine(model, max_running=2)
    engine.submit(Submit(1, [10_000], 5, SamplingParams()))  # an id outside the embedding
    ended = [d for d in engine.step() if d.finish_reason] + [d for d in engine.step() if d.finish_reason]
    assert [d.finish_reason for d in ended] == ["error"]
    assert "failed" in caplog.text
    s = request(5)
    assert engine.generate([s]) == [exact.generate(s.prompt, s.max_tokens, s.sampling)]


def test_failing_decode_step_does_not_affect_a_prompt_in_prefill(model, exact, monkeypatch):
    engine = Engine(model, max_running=3, prefill_budget=10)
    lost = [Submit(i, [i], 50, SamplingParams(seed=i)) for i in range(2)]
    for s in lost:
        engine.submit(s)
    engine.step()
    engine.submit(Submit(2, list(range(30)), 20, SamplingParams(seed=2)))  # in several chunks
    engine.step()
    decode = engine.runner.cache.decode

    def fail(rows):
        monkeypatch.setattr(engine.runner.cache, "decode", decode)
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine.runner.cache, "decode", fail)
    texts = {}
    assert collect(engine, texts) == {0: "error", 1: "error", 2: "length"}
    assert texts[2] == exact.generate(list(range(30)), 20, SamplingParams(seed=2))


# -- constraints, stops, log-probabilities --

PATTERNS = ["[A-Z][a-z]+( [a-z]+){0,3}", "a+b+", "(ab|cd)*", "[^a-m]{3,7}", "x{40}", "(.|\n)*"]
STOP_PATTERNS = ["[A-Z][a-z]", "e.?e", "[.!?]+", "a(bc)*d"]


def request_with_options(id):
    """A request with any combination of options, determined by `id` alone."""
    r = random.Random(1000 + id)
    prompt = [r.randrange(len(VOCABULARY)) for _ in range(r.choice([1, 2, 7, 8, 9, 30]))]
    params = SamplingParams(
        r.choice([0.0, 0.5, 1.0, 1.5]),
        seed=r.randrange(2**64),
        min_p=r.choice([0.0, 0.0, 0.1]),
        typical_p=r.choice([1.0, 1.0, 0.8]),
        repetition_penalty=r.choice([1.0, 1.0, 1.3]),
        presence_penalty=r.choice([0.0, 0.0, 1.0]),
        frequency_penalty=r.choice([0.0, 0.0, -0.5]),
        logit_bias=r.choice([(), ((3, 2.0), (40, -100.0))]),
    )
    options = {"logprobs": r.choice([None, 0, 5]), "min_tokens": r.choice([0, 0, 5])}
    match r.randrange(5):
        case 0:
            options["constraint"] = compile_regex(r.choice(PATTERNS), VOCABULARY).pack()
        case 1:
            options["constraint"] = compile_choice(["yes", "no", "yesterday"], VOCABULARY).pack()
        case 2:
            options |= {"constraint": any_of(frozenset("aeiou x"), VOCABULARY).pack(), "may_leave": False}
        case 3:
            options["stop_pattern"] = compile_regex(r.choice(STOP_PATTERNS), VOCABULARY).pack()
            options["include_stop"] = r.random() < 0.5
    if options["logprobs"] is not None and r.random() < 0.5 and len(prompt) > 1:
        options["score_from"] = r.randrange(1, len(prompt))
    return Submit(id, prompt, r.choice([1, 40, 45]) if "constraint" not in options else 40, params, **options)


@torch.no_grad()
def uncached(exact, request):
    """Generates alone and without a cache; returns ids, log-probabilities (completion, prompt) and finish reason."""
    sequence = Sequence(request)
    history = History(exact.config.vocab_size, request.prompt)
    rows, logprobs = SamplingRows([request.sampling]), []
    while not sequence.is_finished:
        row = exact(torch.tensor([sequence.ids]))[:, -1]
        mask = sequence.allowed()
        allowed = None if mask is None else torch.from_numpy(mask.copy())[None]
        u = torch.from_numpy(uniforms(request.sampling.seed, sequence.num_completion_tokens, 1))
        id = int(sample(row, rows, u, 0.0, [history], allowed).ids)
        history.append(id)
        logprobs.append(row.log_softmax(1)[0])
        sequence.append(id)
    ids = sequence.emit()[0]
    of_prompt = exact(torch.tensor([request.prompt])).log_softmax(2)[0]
    return ids, logprobs[: len(ids)], of_prompt, sequence.finish_reason


@pytest.mark.parametrize("tolerance", [None, 0.1])
def test_every_option_equals_the_uncached_reference(model, exact, tolerance):
    engine = Engine(model, max_running=7, prefill_budget=13)
    engine.runner.tolerance = tolerance or engine.runner.tolerance
    sequences = [request_with_options(i) for i in range(80)]
    texts, logprobs, prompts, finish_reasons = ({s.id: [] for s in sequences} for _ in range(4))
    for s in sequences:
        engine.submit(s)
    while engine.has_work:
        for delta in engine.step():
            texts[delta.id] += delta.ids
            logprobs[delta.id] += delta.logprobs.rows() if delta.logprobs else []
            prompts[delta.id] += delta.prompt_logprobs.values if delta.prompt_logprobs else []
            finish_reasons[delta.id] += [delta.finish_reason] if delta.finish_reason else []
    reasons = set()
    for s in sequences:
        ids, expected, of_prompt, reason = uncached(exact, request_with_options(s.id))
        assert (texts[s.id], finish_reasons[s.id]) == (ids, [reason]), s.id
        reasons.add(reason)
        if s.logprobs is None:
            assert not logprobs[s.id] and not prompts[s.id]
            continue
        assert len(logprobs[s.id]) == len(ids)
        for id, (value, top), row in zip(ids, logprobs[s.id], expected, strict=True):
            assert value == pytest.approx(float(row[id]), abs=1e-4)
            top_ids, top_values = [id for id, _ in top], [value for _, value in top]
            assert top_values == pytest.approx(row.topk(s.logprobs).values.tolist(), abs=1e-4)
            assert row[top_ids].tolist() == pytest.approx(top_values, abs=1e-4)
        if s.score_from is not None:
            places = range(s.score_from, len(s.prompt))
            assert prompts[s.id] == pytest.approx([float(of_prompt[i - 1, s.prompt[i]]) for i in places], abs=1e-4)
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_constrained_text_always_matches(model, pattern, seed):
    """At any max_tokens and temperature: there are no dead ends."""
    automaton = compile_regex(pattern, VOCABULARY)
    r = random.Random(seed)
    sequences = [
        Submit(i, [i], budget, SamplingParams(r.choice([0.0, 1.0, 100.0]), seed=seed), constraint=automaton.pack())
        for i, budget in enumerate([max(1, automaton.min_length) + n for n in (0, 1, 2, 5, 30)])
    ]
    for s, ids in zip(sequences, Engine(model).generate(sequences), strict=True):
        text = "".join(VOCABULARY[id] for id in ids)
        assert re.fullmatch(pattern, text), text
        assert len(ids) <= s.max_tokens


def test_stop_sequences_are_ignored_before_min_tokens(model, exact):
    s = request(3)
    text = exact.generate(s.prompt, 40, s.sampling)
    first = text.index(text[4])
    (stopped,) = Engine(model).generate([Submit(0, s.prompt, 40, s.sampling, stop=((text[4],),))])
    assert stopped == text[:first]
    (later,) = Engine(model).generate([Submit(0, s.prompt, 40, s.sampling, stop=((text[4],),), min_tokens=first + 1)])
    again = [i for i in range(first + 1, 40) if text[i] == text[4]]
    assert later == text[: again[0] if again else 40]


def test_scores_of_long_texts_equal_streamed_loss(model):
    """Chunked prefill far beyond the receptive field, beside a running sequence."""
    ids = np.random.default_rng(0).integers(len(VOCABULARY), size=700)
    engine = Engine(model, max_running=3, prefill_budget=37)
    scored = Submit(0, ids.tolist(), 0, SamplingParams(), logprobs=0, score_from=1)
    engine.submit(Submit(1, [5], 10, SamplingParams()))
    sequence = engine.submit(scored)
    values, steps = [], 0
    while engine.has_work:
        for delta in engine.step():
            values += delta.prompt_logprobs.values if delta.prompt_logprobs else []
        steps += 1
    assert sequence.finish_reason == "length"
    assert steps >= 700 // 37
    assert len(values) == 699
    assert -np.mean(values) == pytest.approx(streamed_loss(model, ids), abs=1e-5)
    late = Submit(2, ids.tolist(), 0, SamplingParams(), logprobs=0, score_from=600)
    first_needed = engine.submit(late).num_prefilled
    assert first_needed == 600 - model.config.receptive_field  # older characters are skipped
    tail = []
    while engine.has_work:
        for delta in engine.step():
            tail += delta.prompt_logprobs.values if delta.prompt_logprobs else []
    assert tail == pytest.approx(values[599:], abs=1e-4)


def test_scoring_does_not_delay_generation(model):
    engine = Engine(model, max_running=4, prefill_budget=10)
    engine.submit(Submit(0, [1] * 500, 0, SamplingParams(), logprobs=0, score_from=1))
    engine.step()
    engine.submit(Submit(1, [1] * 10, 1, SamplingParams()))
    assert [delta.id for delta in engine.step() if delta.finish_reason] == [1]
