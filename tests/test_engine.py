import copy
import random

import pytest
import torch
from helpers import random_model

from service.engine import Engine
from service.model.sampling import SamplingParams
from service.scheduler import QueueFullError, Sequence


@pytest.fixture(scope="module")
def model():
    return random_model(block_size=8)


@pytest.fixture(scope="module")
def exact():
    return random_model(torch.float64, block_size=8)


def request(id, seed=None, **options):
    """A sequence that depends on its number alone."""
    r = random.Random(id if seed is None else seed)
    prompt = [r.randrange(60) for _ in range(r.choice([1, 2, 7, 8, 9, 14, 15, 16, 40, 200]))]
    params = SamplingParams(
        r.choice([0.0, 0.3, 1.0, 2.0]), r.choice([0, 0, 5]), r.choice([1.0, 1.0, 0.7]), r.randrange(2**64)
    )
    return Sequence(id, prompt, r.choice([1, 3, 10, 40]), params, **options)


def test_every_text_equals_the_uncached_reference(model, exact):
    """In a full batch, with chunked prompts, arrivals at random times: the fp32 engine gives the fp64 model's text."""
    engine = Engine(model, max_running=5, prefill_budget=13)
    r = random.Random(0)
    todo = [request(i) for i in range(40)]
    texts = {s.id: [] for s in todo}
    while todo or engine.has_work:
        while todo and r.random() < 0.4:
            engine.submit(todo.pop())
        for delta in engine.step():
            texts[delta.sequence.id] += delta.ids
    for i, text in texts.items():
        s = request(i)
        assert text == exact.generate(s.prompt, s.max_tokens, s.params), i


def test_near_ties_are_decided_by_the_exact_model():
    """Characters in pairs whose logits differ by one unit in the last place of one weight: fp32 cannot tell them
    apart, the exact decisions can."""
    small = random_model(block_size=8, vocab_size=60)
    weight = small.head.weight
    weight[1::2] = weight[::2]
    weight[1::2, 3] = torch.nextafter(weight[1::2, 3], torch.tensor(9.0))
    large = copy.deepcopy(small).double()
    engine = Engine(small, max_running=4)
    sequences = [Sequence(i, [i], 12, SamplingParams(temperature=0.0)) for i in range(4)]
    exact_choices = 0
    texts = {s.id: [] for s in sequences}
    for s in sequences:
        engine.submit(s)
    while engine.has_work:
        for delta in engine.step():
            texts[delta.sequence.id] += delta.ids
        exact_choices += engine.stats.num_exact
    assert exact_choices > 0
    for i, text in texts.items():
        assert text == large.generate([i], 12, SamplingParams(temperature=0.0))


def test_the_tolerance_covers_the_rounding_error(model, exact):
    tolerance = Engine(model).tolerance
    idx = torch.randint(61, (4, 60), generator=torch.Generator().manual_seed(5))
    error = model(idx).double() - exact(idx)
    error -= error.mean(-1, keepdim=True)
    assert 0 < error.abs().max() < tolerance < 1e-3


def test_in_fp64_nothing_is_decided_twice(exact):
    engine = Engine(exact)
    assert engine.tolerance == 0
    engine.generate([request(1)])
    assert engine.stats.num_exact == 0


def test_stop_ends_the_text_before_it(model, exact):
    s = request(3)
    text = exact.generate(s.prompt, 40, s.params)
    stop = tuple(text[10:13])
    first = next(i for i in range(len(text)) if tuple(text[i : i + 3]) == stop)
    engine = Engine(model)
    stopped = Sequence(0, s.prompt, 40, s.params, stop=(stop, (99, 99)))
    assert engine.generate([stopped]) == [text[:first]]
    assert stopped.finish_reason == "stop"


def test_abort_frees_the_slot_at_once_and_touches_nobody(model, exact):
    engine = Engine(model, max_running=2)
    leaving = Sequence(1, [1, 2, 3], 10_000, SamplingParams(seed=1))
    staying = Sequence(2, [4, 5], 30, SamplingParams(seed=2))
    waiting = Sequence(3, [6], 5, SamplingParams(seed=3))
    for s in (leaving, staying, waiting):
        engine.submit(s)
    texts = {2: [], 3: []}
    for _ in range(4):
        for delta in engine.step():
            texts.setdefault(delta.sequence.id, []).extend(delta.ids)
    assert engine.scheduler.num_waiting == 1
    engine.abort(1)
    deltas = engine.step()
    assert [d.sequence.id for d in deltas if d.finish_reason == "abort"] == [1]
    assert engine.scheduler.num_waiting == 0
    for delta in deltas:
        texts[delta.sequence.id] += delta.ids
    while engine.has_work:
        for delta in engine.step():
            texts[delta.sequence.id] += delta.ids
    for s in (staying, waiting):
        assert texts[s.id] == exact.generate(s.prompt, s.max_tokens, s.params)
    engine.abort(1)
    engine.abort(77)  # ended or unknown: nothing
    assert not engine.has_work


def test_deadlines_end_the_running_and_the_waiting(model):
    now = 0.0
    engine = Engine(model, max_running=1, clock=lambda: now)
    engine.submit(Sequence(1, [1], 1000, SamplingParams(), deadline=5.0))
    engine.submit(Sequence(2, [1], 1000, SamplingParams(), deadline=5.0))
    engine.submit(Sequence(3, [1], 2, SamplingParams(), deadline=9.0))
    engine.step()
    now = 5.0
    ended = {d.sequence.id: d.finish_reason for d in engine.step() if d.finish_reason}
    assert ended == {1: "timeout", 2: "timeout"}
    while engine.has_work:
        ended |= {d.sequence.id: d.finish_reason for d in engine.step() if d.finish_reason}
    assert ended[3] == "length"


def test_a_full_queue_refuses_and_keeps_the_rest(model):
    engine = Engine(model, max_running=1, max_waiting=1)
    engine.submit(request(0))
    engine.submit(request(1))
    with pytest.raises(QueueFullError):
        engine.submit(request(2))
    done = []
    while engine.has_work:
        done += [d.sequence.id for d in engine.step() if d.finish_reason]
    assert sorted(done) == [0, 1]


def test_a_row_that_is_not_finite_ends_alone(exact):
    """One character's embedding is broken: the sequence that meets it ends with an error, its neighbour goes on."""
    broken = random_model(block_size=8)
    broken.embed.weight[7] = float("nan")
    engine = Engine(random_model(block_size=8), max_running=2)
    engine.model = broken
    bad, fine = Sequence(1, [7], 5, SamplingParams()), Sequence(2, [1], 1, SamplingParams(seed=4))
    texts = engine.generate([bad, fine])
    assert bad.finish_reason == "error"
    assert texts[0] == []
    assert texts[1] == exact.generate([1], 1, SamplingParams(seed=4))


def test_a_failing_forward_ends_its_sequences_and_the_engine_goes_on(model, exact, caplog):
    engine = Engine(model, max_running=2)
    engine.submit(Sequence(1, [10_000], 5, SamplingParams()))  # an id that the embedding does not have
    ended = [d for d in engine.step() if d.finish_reason] + [d for d in engine.step() if d.finish_reason]
    assert [d.finish_reason for d in ended] == ["error"]
    assert "failed" in caplog.text
    s = request(5)
    assert engine.generate([s]) == [exact.generate(s.prompt, s.max_tokens, s.params)]
