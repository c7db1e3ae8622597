import functools
import itertools
import random
import re
import sys
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from service.constrain.automaton import MinimumLength, StopPattern
from service.constrain.regex import compile_choice, compile_regex, compile_without
from service.engine import native
from service.engine.backends import open_runner, resolve
from service.engine.engine import BrokenRunnerError, Cost, Engine
from service.engine.runner import FAILED, Outcome
from service.engine.scheduler import Scheduler
from service.engine.sequence import Sequence
from service.model.params import SamplingParams
from service.model.sampling import uniforms
from service.wire import Submit, floats
from tests.engine.test_cuda import runner_of
from tests.helpers import VOCABULARY, random_model
from tests.model.test_sampling import random_params
from tests.sampler import History, sample
from training.measure.losses import streamed_loss

ON_CPU = ["torch"] if native.why_not() else ["native", "torch"]


@pytest.fixture(scope="module")
def exact():
    """In fp64 the model defines the text of a seed, on every backend."""
    return random_model(torch.float64, block_size=8)


@pytest.fixture(params=[*ON_CPU, "cuda"])
def backend(request):
    return request.param


# What a step does is known after it; backend cuda is one step late, and its prompts run in pieces of 64.
at_once = pytest.mark.parametrize("backend", ON_CPU, indirect=True)
on_any = pytest.mark.parametrize("backend", ON_CPU[:1], indirect=True)  # what is the same on each


@pytest.fixture
def make(backend, exact):
    """Makes an engine over `exact` or another model, in float64."""

    def make(slots=8, model=exact, **options):
        runner = runner_of(model, slots) if backend == "cuda" else open_runner(model, backend, "float64", slots)
        return Engine(runner, **options)

    return make


def jumping(seed):
    """A clock that advances by microseconds to seconds: pieces of prompts and steps per call vary at random."""
    r = random.Random(seed)
    ticks = itertools.accumulate(10 ** r.uniform(-6, 0) for _ in itertools.count())
    return lambda: next(ticks)


CLOCKS = {
    "slow": lambda: itertools.count().__next__,  # one step per call, small pieces
    "fast": lambda: lambda: 0.0,  # as many steps per call as there are, whole prompts
    "jumping": lambda: jumping(0),
}


@pytest.fixture(params=CLOCKS)
def clock(request):
    return CLOCKS[request.param]()


def request(id):
    """One that any option may follow."""
    return Submit(id, list(range(20)), 10, SamplingParams(0.9, seed=id))


class Ran:
    """What an engine has given, by id, and what its steps have counted."""

    def __init__(self, engine):
        self.engine, self.counts, self.reasons = engine, Counter(), {}
        self.texts, self.logprobs, self.scores = defaultdict(list), defaultdict(list), defaultdict(list)

    def run(self, steps=5000):
        """Up to so many steps; returns the finish reasons that came in them."""
        before = set(self.reasons)
        while steps and self.engine.has_work:
            steps -= 1
            for delta in self.engine.step():
                self.texts[delta.id] += delta.ids
                self.logprobs[delta.id] += delta.logprobs.rows() if delta.logprobs else []
                self.scores[delta.id] += floats(delta.prompt_logprobs.values) if delta.prompt_logprobs else []
                if delta.finish_reason:
                    assert delta.id not in self.reasons, "two endings"
                    self.reasons[delta.id] = delta.finish_reason
            stats = self.engine.stats
            self.counts.update(
                run=stats.num_prefill_tokens, copied=stats.num_copied_tokens, dropped=stats.num_dropped_tokens
            )
        return {id: reason for id, reason in self.reasons.items() if id not in before}


def run_all(engine, requests):
    for each in requests:
        engine.submit(each)
    ran = Ran(engine)
    ran.run()
    return ran


model_of = functools.cache(random_model)  # one for all backends, and so one text of each request


def text_of(model, request):
    """The text of a request, by definition."""
    return generated(model, tuple(request.prompt), request.max_tokens, request.sampling)


@functools.cache
def generated(model, prompt, count, params):
    return model.generate(list(prompt), count, params)


# -- how much a step does --


@at_once
def test_steps_per_call_follow_the_work(make):
    """Many while nobody waits, half as many where a stop may come; one beside a prompt, or a pattern that the runner
    cannot follow by itself, and as few as the longest row needs."""
    engine = make(3, clock=lambda: 0.0)

    def steps():
        engine.step()
        return engine.stats.num_decode_steps, engine.stats.num_decode_tokens

    engine.submit(Submit(0, [1], 204, SamplingParams()))
    assert [steps() for _ in range(3)] == [(0, 0), (1, 1), (64, 64)]  # the first call shows what a step costs
    engine.submit(Submit(1, [1], 33, SamplingParams(), stop=((1,) * 9,)))
    assert steps() == (1, 1)
    assert steps() == (32, 32 + 32)
    engine.submit(Submit(2, [1], 4, SamplingParams(), constraint=compile_regex("(.|\n)*", VOCABULARY).pack()))
    if engine.runner.follows_guides:
        assert [steps() for _ in range(3)] == [(1, 1), (64, 64 + 3), (40, 40)]
    else:
        assert [steps() for _ in range(6)] == [(1, 1), (1, 2), (1, 2), (1, 2), (64, 64), (37, 37)]
    assert not engine.has_work


@pytest.fixture
def timed(make, monkeypatch):
    """Makes an engine whose decoding takes time by rows and steps, and prompts by characters; it and the times."""

    def timed(slots, step_seconds, decode, prefill=0.0, **options):
        spent = {"decode": 0.0, "prefill": 0.0}
        engine = make(slots, clock=lambda: sum(spent.values()), step_seconds=step_seconds, **options)

        def takes(name, seconds):
            forward = getattr(engine.runner, name)

            def slow(*arguments):
                spent[name] += seconds(*arguments)
                return forward(*arguments)

            monkeypatch.setattr(engine.runner, name, slow)

        takes("decode", lambda slots, steps, *_: decode(len(slots), steps.max()))
        takes("prefill", lambda pieces: prefill * sum(len(piece.ids) for piece in pieces))
        return engine, spent

    return timed


@at_once
def test_a_step_takes_as_long_as_it_should(timed):
    """0.9 ms per row and decode step, 0.1 ms per character of a prompt: 4 ms are 4 steps, or 2 and 20 characters, so
    that a stream keeps half of the time beside a backlog of prompts."""
    engine, _ = timed(4, 0.004, lambda rows, steps: 0.0009 * rows * steps, prefill=0.0001)
    engine.submit(Submit(0, [1, 2, 3], 1000, SamplingParams()))
    Ran(engine).run(5)
    assert (engine.stats.num_decode_steps, engine.stats.seconds) == (4, pytest.approx(0.0036))
    engine.submit(Submit(1, [1] * 700, 0, SamplingParams(), logprobs=0, score_from=1))
    Ran(engine).run(3)
    assert engine.stats.num_decode_steps == 2
    assert engine.stats.num_prefill_tokens in (19, 20)
    assert engine.stats.seconds == pytest.approx(0.0038, rel=0.05)


@on_any
def test_clients_share_the_time_whatever_number_of_sequences_each_has(timed, make):
    """A call takes 1 ms for each row beside a fixed 4 ms; the texts stay what they are alone."""
    engine, _ = timed(40, 0.02, lambda rows, steps: (0.004 + 0.001 * rows) * steps)
    requests = [Submit(0, [1], 60, SamplingParams(seed=0), client="one")]
    requests += [Submit(i, [2], 400, SamplingParams(seed=i), client="many") for i in range(1, 31)]
    for each in requests:
        engine.submit(each)
    ran = Ran(engine)
    while 0 not in ran.reasons:
        ran.run(1)
        rows = engine.stats.num_decode_rows
    assert rows <= 10  # 2 · (4 + 1) = 4 + 6 ms
    counts = sorted(len(ran.texts[i]) for i in range(1, 31))
    assert 0 < counts[0] and counts[-1] - counts[0] <= 40  # they take turns
    ran.run()
    alone = make(40)
    for i in (0, 1, 17, 30):
        assert ran.texts[i] == alone.generate([requests[i]])[0]


def characters_by_client(engine, request, weights, numbers, until):
    """Characters that clients a and b get while they always have `numbers` sequences, from a fourth of `until` on.

    request: makes one from an id and a client; until: characters of both, prompts included where they are scored.
    """
    ids, running, counts, total = itertools.count(), {"a": {}, "b": {}}, {"a": 0, "b": 0}, 0
    while total < until:
        for (client, weight), number in zip(weights.items(), numbers, strict=True):
            while len(running[client]) < number:
                s = request(next(ids), client)
                s.client, s.weight = client, weight
                running[client][s.id] = s
                engine.submit(s)
        for delta in engine.step():
            client = next(client for client, its in running.items() if delta.id in its)
            count = len(delta.ids)
            if delta.finish_reason:
                ended = running[client].pop(delta.id)
                count += 0 if ended.max_tokens else len(ended.prompt)
            total += count
            counts[client] += count if total > until / 4 else 0
    return counts


@on_any
@pytest.mark.parametrize(("weight", "least", "most"), [(1.0, 0.9, 1.1), (10.0, 9.0, 11.0)])
@pytest.mark.parametrize("number", [12, 40])
def test_clients_get_characters_by_weight(timed, weight, least, most, number):
    """Both with fewer sequences than there are slots, and with more. A call takes 1 ms a row beside a fixed 0.5 ms."""
    engine, _ = timed(27, 0.02, lambda rows, steps: (0.0005 + 0.001 * rows) * steps, 0.0002)
    chance = random.Random(0)

    def request(id, client):
        return Submit(id, [id % 50], chance.randint(20, 60), SamplingParams(seed=id))

    counts = characters_by_client(engine, request, {"a": weight, "b": 1.0}, [number] * 2, until=16_000)
    assert least < counts["a"] / counts["b"] < most, counts


@on_any
def test_the_time_of_a_stop_pattern_counts_in_its_clients_part(timed, monkeypatch):
    """The host follows 250 partial matches in the time of two rows. Charged to nobody, they would take a third of
    another client's characters."""
    engine, spent = timed(4, 0.02, lambda rows, steps: 0.001 * rows * steps)
    push = StopPattern.push

    def slow(self, id):
        spent["update"] = spent.get("update", 0.0) + 8e-6 * len(self._starts)
        return push(self, id)

    monkeypatch.setattr(StopPattern, "push", slow)
    pattern = compile_regex(r"(.|\n){250}Q{9}", VOCABULARY).pack()
    engine.submit(Submit(0, [1], 4000, SamplingParams(), client="a"))
    engine.submit(Submit(1, [1], 4000, SamplingParams(), client="b", stop_pattern=pattern))
    ran = Ran(engine)
    while len(ran.texts[1]) < 300:
        ran.run(1)
    before = {id: len(text) for id, text in ran.texts.items()}
    while len(ran.texts[0]) < 3900:
        ran.run(1)
    plain, followed = (len(ran.texts[id]) - before[id] for id in (0, 1))
    assert 2.8 < plain / followed < 3.1


@on_any
@pytest.mark.parametrize(("weight", "least", "most"), [(1.0, 0.9, 1.1), (10.0, 9.0, 11.0)])
@pytest.mark.parametrize(("lengths", "numbers"), [((20, 100), (40, 40)), ((100, 20), (40, 40)), ((50, 100), (2, 40))])
def test_prompts_run_by_weight(timed, weight, least, most, lengths, numbers):
    """Whatever their lengths; of texts that are only scored, as nothing else runs then. With 2 at a time, client a is
    often gone and comes back: it gets its part at most."""
    engine, _ = timed(27, 0.004, lambda rows, steps: 1.0, 0.0001)
    chance, length_of = random.Random(0), dict(zip("ab", lengths, strict=True))

    def request(id, client):
        prompt = [chance.randrange(50) for _ in range(chance.randint(1, 2 * length_of[client]) + 1)]
        return Submit(id, prompt, 0, SamplingParams(), logprobs=0, score_from=1)

    counts = characters_by_client(engine, request, {"a": weight, "b": 1.0}, numbers, until=40_000)
    assert (least if numbers[0] == 40 else 0) < counts["a"] / counts["b"] < most, counts


def test_cost_is_a_line_through_recent_calls():
    cost = Cost(each=1.0)
    for size in (1, 64, 3, 20, 64, 1):
        cost.observe(size, 0.002 + 0.0001 * size)
    assert cost.seconds(40) == pytest.approx(0.006)
    assert cost.size_for(0.006) in (39, 40)
    assert cost.size_for(0.0) in (19, 20)  # as long as the fixed part
    cost.observe(20, 60.0)  # a hiccup
    assert cost.seconds(20) < 0.008
    for _ in range(60):
        cost.observe(20, 0.04)  # the machine has become ten times slower
    assert cost.seconds(20) == pytest.approx(0.04, rel=0.1)


def test_noise_is_not_taken_for_a_fixed_cost():
    """Sizes hardly vary where clients share the time, and a slope from noise would give the wrong one more rows."""
    cost, r = Cost(each=1.0), random.Random(0)
    for _ in range(500):
        size = r.choice([36, 43, 50])
        cost.observe(size, 0.001 * size * r.uniform(0.8, 1.2))
        assert cost.fixed < 1e-9
    for _ in range(200):
        size = r.choice([1, 43])
        cost.observe(size, (0.01 + 0.001 * size) * r.uniform(0.98, 1.02))
    assert cost.fixed == pytest.approx(0.01, rel=0.2)


@at_once
def test_a_long_prompt_beside_short_ones_makes_no_long_step(make, backend, monkeypatch):
    """449 characters beside 63 prompts of one: nothing is padded to 449, and no step runs more than its budget."""
    engine = make(64, random_model(torch.float64, block_size=512), clock=lambda: 0.0)
    engine._prefill_budget = lambda rows: 256  # prompt characters of a step
    computed = 0
    if backend == "torch":

        def forward(idx, cache):
            nonlocal computed
            computed += idx.numel()
            return model(idx, cache)

        model = engine.runner.model
        monkeypatch.setattr(engine.runner, "model", forward)
    engine.submit(Submit(0, [1] * 449, 5, SamplingParams(), client="long"))
    for i in range(1, 64):
        engine.submit(Submit(i, [i % 50], 5, SamplingParams(), client=f"short {i % 3}"))
    first = {}
    for step in itertools.count():
        computed = 0
        for delta in engine.step():
            first.setdefault(delta.id, step)
        assert engine.stats.num_prefill_tokens <= 256
        assert computed <= 2 * engine.stats.num_prefill_tokens + 64 * engine.stats.num_decode_steps
        if not engine.has_work:
            break
    assert max(first.values()) <= 3  # 512 characters in steps of 256, and a slot for each


def test_the_prompt_of_a_sequence_that_has_ended_is_not_kept(make):
    engine, submitted = make(), request(0)
    prompt = submitted.prompt
    expected = sys.getrefcount(prompt) - 1
    engine.generate([submitted])
    del submitted
    assert sys.getrefcount(prompt) == expected


# -- prompts that share a beginning --


@at_once
@pytest.mark.parametrize(("block_size", "held"), [(256, 200), (64, 200), (16, 61)])
def test_a_prompt_of_many_sequences_runs_once(make, block_size, held):
    """16 answers to one prompt, shorter and longer than W; `held`: of 200 characters, as many as can matter."""
    model = model_of(torch.float64, block_size=block_size, n_layer=4)
    engine = make(16, model, clock=lambda: 0.0)
    prompt = np.random.default_rng(0).integers(50, size=200).tolist()
    todo = [Submit(i, prompt, 8, SamplingParams(seed=i)) for i in range(16)]
    ran = run_all(engine, todo)
    assert (ran.counts["run"], ran.counts["copied"]) == (held + 15, 15 * (held - 1))
    assert ran.texts == {s.id: text_of(model, s) for s in todo}


def test_templates_that_alternate_are_copied(make):
    """One request after the other, two templates of 200 characters, and few slots."""
    model, r = model_of(torch.float64, block_size=256), random.Random(0)
    engine, copied = make(6, model, clock=lambda: 0.0), 0
    templates = [[r.randrange(50) for _ in range(200)] for _ in range(2)]
    for i in range(20):
        s = Submit(i, templates[i % 2] + [r.randrange(50) for _ in range(10)], 8, SamplingParams(seed=i))
        ran = run_all(engine, [s])
        copied += min(200, ran.counts["copied"])
        assert ran.texts[i] == text_of(model, s)
    assert copied >= 0.85 * 20 * 200


@at_once
def test_other_groups_copy_nothing(make):
    """Neither what runs nor what has ended; the text is the same."""
    model = model_of(torch.float64, block_size=64, n_layer=4)
    engine, prompt = make(9, model, clock=lambda: 0.0), list(range(40))
    todo = [Submit(i, prompt, 20, SamplingParams(seed=i), reuse_group=f"group {i % 3}") for i in range(9)]
    ran = run_all(engine, todo)
    assert (ran.counts["run"], ran.counts["copied"]) == (3 * (40 + 2), 3 * 2 * 39)
    assert ran.texts == {s.id: text_of(model, s) for s in todo}
    ran = run_all(engine, [Submit(10, prompt, 1, SamplingParams(), reuse_group="group 3")])
    assert (ran.counts["run"], ran.counts["copied"]) == (40, 0)


@pytest.mark.parametrize("seed", range(4))
def test_shared_beginnings_change_no_text(make, seed):
    """Prompts that branch anywhere, continue earlier answers, arrive and leave at any time, some scored, some long."""
    model = model_of(torch.float64, block_size=[24, 40, 60, 150][seed], n_layer=3)
    r = random.Random(seed)
    engine = make(5, model, clock=jumping(seed))
    known, requests, ran = [[r.randrange(50) for _ in range(90)]], [], Ran(engine)
    for _ in range(3000):
        while len(requests) < 24 and r.random() < 0.7:
            prompt = r.choice(known)
            prompt = prompt[: r.randint(10, len(prompt))]
            prompt = prompt + [r.randrange(50) for _ in range(r.choice([0, 0, 1, 10, 60]))]
            known.append(prompt)
            params = SamplingParams(seed=len(requests), repetition_penalty=r.choice([1.0, 1.2]))
            s = Submit(len(requests), prompt, r.choice([1, 5, 30]), params)
            if r.random() < 0.2 and len(prompt) > 30:
                s.logprobs, s.score_from = 0, r.randint(1, len(prompt) - 1)
            requests.append(s)
            engine.submit(s)
        if r.random() < 0.1 and requests:
            engine.abort(r.choice(requests).id)
        for id, reason in ran.run(1).items():
            if reason == "length" and r.random() < 0.2:
                known.append(requests[id].prompt + ran.texts[id])
    assert len(requests) == 24 and not engine.has_work
    assert ran.counts["copied"] or engine.runner.piece > model.config.block_size / 2  # longer than what is shared
    for s in requests:
        assert ran.texts[s.id] == text_of(model, s)[: len(ran.texts[s.id])], s.id
        if values := ran.scores[s.id]:
            row = model(torch.tensor([s.prompt])).log_softmax(2)[0]
            places = range(s.score_from, s.score_from + len(values))
            assert values == pytest.approx([float(row[i - 1, s.prompt[i]]) for i in places], abs=1e-9)


# -- endings and failures --


@at_once
@pytest.mark.parametrize("kind", ["stop", "constraint"])
def test_a_prompt_continues_an_answer_that_ended_within_a_call(make, backend, kind):
    """Of which its last character is in no cache."""
    model = random_model(torch.float64, block_size=64)
    first = Submit(1, list(range(20)), 30, SamplingParams(seed=1), include_stop=True)
    options = {"stop": (tuple(text_of(model, first)[4:5]),), "constraint": compile_regex("abcde", VOCABULARY).pack()}
    setattr(first, kind, options[kind])
    engine = make(model=model, clock=lambda: 0.0)
    ran = run_all(engine, [first])
    assert 0 < len(ran.texts[1]) <= 5 and ran.reasons == {1: "stop"}
    assert ran.counts["dropped"] == 0 or backend == "torch"
    again = Submit(2, first.prompt + ran.texts[1] + [5, 6], 5, SamplingParams(seed=2))
    ran = run_all(engine, [again])
    assert ran.texts[2] == text_of(model, again) and ran.counts["copied"] >= len(again.prompt) - 3


@at_once
def test_a_text_that_ends_where_the_window_is_full_leaves_its_beginning(make):
    model, params, again = model_of(torch.float64, block_size=32), SamplingParams(1.0), []
    for seed in range(16):
        engine, r = make(4, model, clock=lambda: 0.0), random.Random(seed)
        prompt, likely = [r.randrange(50) for _ in range(24)], SamplingParams(0.3, seed=seed)
        last = text_of(model, Submit(0, prompt, 9, likely))[8]  # after 32 characters
        for s in (Submit(4, prompt, 30, likely, stop=((last,),)), Submit(5, [*prompt[:20], 7], 20, params)):
            ran = run_all(engine, [s])
        again.append(ran.texts[5] == text_of(model, s))
    assert all(again)


@at_once
def test_text_ends_before_the_stop_sequence(make, exact):
    params = SamplingParams(seed=3)
    text = exact.generate([1], 40, params)
    stop = tuple(text[10:13])
    first = next(i for i in range(len(text)) if tuple(text[i : i + 3]) == stop)
    ran = run_all(make(clock=lambda: 0.0), [Submit(0, [1], 40, params, stop=(stop, (99, 99)))])
    assert (ran.texts, ran.reasons) == ({0: text[:first]}, {0: "stop"})
    assert ran.counts["dropped"] == -(first + 3 - 2) % 32  # calls end at 1, 2, 34, … characters


def test_times_come_once_where_the_first_character_may_begin_a_stop(make, exact):
    first, second = text_of(exact, request(0))[:2]
    engine, deltas = make(), []
    engine.submit(Submit(0, request(0).prompt, 10, request(0).sampling, stop=((first, (second + 1) % 50),)))
    while engine.has_work:
        deltas += engine.step()
    assert [delta.prefilled_at is not None for delta in deltas].count(True) == 1


def test_abort_frees_the_slot_at_once_without_affecting_others(make, exact):
    engine = make(2)
    leaving = Submit(1, [1, 2, 3], 10_000, SamplingParams(seed=1))
    staying = Submit(2, [4, 5], 200, SamplingParams(seed=2))
    waiting = Submit(3, [6], 5, SamplingParams(seed=3))
    for s in (leaving, staying, waiting):
        engine.submit(s)
    ran = Ran(engine)
    ran.run(4)
    assert engine.scheduler.num_waiting == 1
    engine.abort(1)
    assert ran.run(1) == {1: "abort"}
    assert engine.scheduler.num_waiting == 0
    ran.run()
    for s in (staying, waiting):
        assert ran.texts[s.id] == text_of(exact, s)
    engine.abort(1)
    engine.abort(77)  # finished or unknown: no effect
    assert not engine.has_work


@on_any
def test_the_last_delta_counts_what_ran_and_was_not_emitted(make, exact):
    engine, stopping = make(1, clock=CLOCKS["slow"]()), Submit(3, [1], 10, SamplingParams(seed=3))
    stopping.stop = (tuple(text_of(exact, stopping)[5:7]),)
    for id in (1, 2):
        engine.submit(Submit(id, [0] * 100, 5, SamplingParams(), logprobs=0, score_from=1))
    engine.step()
    num_run = engine.stats.num_prefill_tokens  # of the first prompt; the second one waits
    engine.abort(1)
    engine.abort(2)
    assert {delta.id: delta.num_unseen for delta in engine.step()} == {1: num_run, 2: 0} and 0 < num_run < 100
    engine.submit(stopping)
    deltas = [delta for _ in range(20) for delta in engine.step()]
    assert (deltas[-1].finish_reason, deltas[-1].num_unseen) == ("stop", 2)


def test_timeouts_end_running_and_waiting_sequences(make):
    now = 0.0
    engine = make(1, clock=lambda: now)
    engine.submit(Submit(1, [1], 1000, SamplingParams(), timeout_seconds=5.0))
    engine.submit(Submit(2, [1], 1000, SamplingParams(), timeout_seconds=5.0))
    engine.submit(Submit(3, [1], 2, SamplingParams(), timeout_seconds=9.0))
    engine.step()
    now = 5.0
    assert Ran(engine).run(1) == {1: "timeout", 2: "timeout"}
    assert Ran(engine).run() == {3: "length"}


def test_non_finite_logits_end_only_their_sequence(make, exact):
    """The embedding of one character is NaN: neither the others are harmed, nor whoever gets the slot next, although
    its ring still has a key that is not finite where a longer text beside it has one."""
    fine = [Submit(number, [1, 2, 3], 30, SamplingParams(seed=5)) for number in (1, 2, 3)]
    expected = exact.generate([1, 2, 3], 30, fine[0].sampling)
    broken = random_model(torch.float64, block_size=8)
    bad = next(id for id in range(4, 61) if id not in expected)
    broken.embed.weight[bad] = float("nan")
    ran = run_all(make(2, broken), [Submit(0, [1] * 6 + [bad], 30, SamplingParams()), *fine])
    assert ran.reasons == {0: "error", 1: "length", 2: "length", 3: "length"}
    assert ran.texts == {0: [], 1: expected, 2: expected, 3: expected}


def test_non_finite_logits_end_a_text_within_a_call(make, exact, caplog):
    """What was chosen before the character whose embedding is NaN is emitted, also where no row of a call has one."""
    params = SamplingParams(seed=1)
    text = exact.generate([1], 40, params)
    broken = random_model(torch.float64, block_size=8)
    at = next(i for i in range(3, 40) if text[i] not in [1, *text[:i]])
    broken.embed.weight[text[at]] = float("nan")
    ran = run_all(make(2, broken, clock=lambda: 0.0), [Submit(id, [1], 40, params, client=f"{id}") for id in (1, 2)])
    assert (ran.reasons, ran.texts) == ({1: "error", 2: "error"}, {1: text[: at + 1], 2: text[: at + 1]})
    assert "a forward over" not in caplog.text


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(repetition_penalty=2.0)])
def test_an_id_outside_the_vocabulary_ends_only_its_sequence(make, exact, caplog, params):
    ran = run_all(make(2), [Submit(1, [10_000], 5, params), request(5)])
    assert ran.reasons == {1: "error", 5: "length"}
    assert ran.texts[5] == text_of(exact, request(5))
    assert "failed" in caplog.text


@pytest.fixture
def fail_once(monkeypatch):
    """Makes the next call of a method fail."""

    def fail_once(owner, name):
        def fail(*_):
            monkeypatch.undo()
            raise RuntimeError("no memory")

        monkeypatch.setattr(owner, name, fail)

    return fail_once


@on_any
@pytest.mark.parametrize("raises", [True, False])
def test_a_runner_of_which_16_calls_in_a_row_fail_is_broken(make, monkeypatch, raises):
    """Then only a new process may help. One call that succeeds begins the count again."""
    engine = make(2)
    forward, numbers = engine.runner.prefill, itertools.count(1)

    def prefill(pieces):
        if next(numbers) == 16:
            return forward(pieces)
        if raises:
            raise RuntimeError("it fails")
        return Outcome(np.full((len(pieces), 1), FAILED), {})

    monkeypatch.setattr(engine.runner, "prefill", prefill)
    endings = []
    with pytest.raises(BrokenRunnerError, match="the last 16 calls of the model failed"):
        for id in range(100):
            engine.submit(Submit(id, [1], 1, SamplingParams()))
            endings += [delta.finish_reason for delta in engine.step()]
    assert endings == ["error"] * 15 + ["length"] + ["error"] * 15


@pytest.mark.parametrize("name", ["start", "prefill"])
def test_failing_forward_ends_its_sequences_and_the_engine_continues(make, exact, fail_once, caplog, name):
    engine = make(2)
    fail_once(engine.runner, name)
    engine.submit(Submit(1, [1], 5, SamplingParams()))
    assert [d.finish_reason for d in engine.step()] == ["error"]
    assert not engine.has_work
    assert "no memory" in caplog.text
    assert engine.generate([request(5)]) == [text_of(exact, request(5))]


def test_failing_decode_step_does_not_affect_a_prompt_in_prefill(make, exact, fail_once):
    engine = make(3, clock=itertools.count().__next__)
    for i in range(2):
        engine.submit(Submit(i, [i], 50, SamplingParams(seed=i)))
    engine.step()
    long = Submit(2, list(range(50)), 20, SamplingParams(seed=2), logprobs=0, score_from=1)  # in several pieces
    engine.submit(long)
    engine.step()
    fail_once(engine.runner, "decode")
    ran = Ran(engine)
    assert ran.run() == {0: "error", 1: "error", 2: "length"}
    assert ran.texts[2] == text_of(exact, long)


def test_nobody_copies_from_a_start_that_failed(make):
    """Two prompts that continue an earlier text arrive together; the first has a bias outside the vocabulary."""
    model = random_model(torch.float64, block_size=64)
    engine = make(4, model)
    head = list(range(40))
    # In the last slot; the others hold other texts, which a failed start leaves there.
    others = [Submit(i, [50 - i] * 60, 30, SamplingParams(seed=i)) for i in range(3)]
    engine.generate([*others, Submit(3, head, 10, SamplingParams())])
    fails = Submit(10, [*head, 1, 2], 5, SamplingParams(logit_bias=((9999, 1.0),)))
    runs = Submit(11, [*head, 3, 4], 20, SamplingParams(seed=1))
    ran = run_all(engine, [fails, runs])
    assert ran.reasons == {10: "error", 11: "length"}
    assert ran.texts[11] == text_of(model, runs)


@at_once
def test_a_failing_copy_ends_only_the_sequence_that_waited_for_it(make, fail_once):
    model = random_model(torch.float64, block_size=64)
    engine = make(4, model)
    fail_once(engine.runner, "copy")
    todo = [Submit(i, list(range(40)), 8, SamplingParams(seed=i)) for i in range(3)]
    ran = run_all(engine, todo)
    assert ran.reasons == {0: "length", 1: "error", 2: "length"}
    for i in (0, 2):
        assert ran.texts[i] == text_of(model, todo[i])


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_scores_that_are_not_finite_end_with_an_error(make, max_tokens):
    broken = random_model(torch.float64, block_size=8)
    broken.embed.weight[7] = float("nan")
    ran = run_all(make(2, broken), [Submit(1, [1, 7, 2], max_tokens, SamplingParams(), logprobs=0, score_from=1)])
    assert (ran.texts, ran.scores, ran.reasons) == ({1: []}, {1: []}, {1: "error"})


# -- constraints, stops, log-probabilities --

PATTERNS = ["[A-Z][a-z]+( [a-z]+){0,3}", "a+b+", "(ab|cd)*", "[^a-m]{3,7}", "x{40}", "(.|\n)*"]
STOP_PATTERNS = ["[A-Z][a-z]", "e.?e", "[.!?]+", "a(bc)*d"]


def request_with_options(id):
    """A request with any combination of options, determined by `id` alone."""
    r = random.Random(1000 + id)
    prompt = [r.randrange(len(VOCABULARY)) for _ in range(r.choice([1, 2, 7, 8, 9, 14, 15, 16, 30, 200]))]
    params = random_params(np.random.default_rng(id), len(VOCABULARY))
    options = {"logprobs": r.choice([None, 0, 5]), "min_tokens": r.choice([0, 0, 5])}
    match r.randrange(6):
        case 0:
            options |= constrained(compile_regex(r.choice(PATTERNS), VOCABULARY), options["min_tokens"])
        case 1:
            options |= constrained(compile_choice(["yes", "no", "yesterday"], VOCABULARY), options["min_tokens"])
        case 2:
            allowed = compile_without((), VOCABULARY, allowed=frozenset("aeiou x"))
            options |= {"constraint": allowed.pack(), "may_leave": False}
        case 3:
            options["stop_pattern"] = compile_regex(r.choice(STOP_PATTERNS), VOCABULARY).pack()
            options["include_stop"] = r.random() < 0.5
        case 4:
            options |= {"constraint": compile_regex("[^a-z ]", VOCABULARY).pack(), "constrains_first": True}
        case 5:
            options["stop"] = tuple(tuple(r.choices(range(len(VOCABULARY)), k=k)) for k in (1, 1, 1, 1, 2, 2))
            options["include_stop"] = r.random() < 0.5
    if options["logprobs"] is not None and r.random() < 0.5 and len(prompt) > 1:
        options["score_from"] = r.randrange(1, len(prompt))
    return Submit(id, prompt, r.choice([1, 3, 40, 45]) if "constraint" not in options else 40, params, **options)


def constrained(automaton, min_tokens):
    minimum = MinimumLength.of(automaton, min_tokens, 40)
    return {"constraint": automaton.pack(), "minimum": minimum.pack()}


@pytest.mark.parametrize("letters", ["a-z", "A-Z"])
def test_a_pattern_has_masks_of_its_own(letters):
    """Though the minimum lengths of others are the same."""
    s = Sequence(Submit(1, [0], 40, SamplingParams(), **constrained(compile_regex(f"[{letters}]+", VOCABULARY), 5)))
    assert all(re.match(f"[{letters}]", VOCABULARY[id]) for id in np.flatnonzero(s.guide.allowed()))


@torch.no_grad()
def uncached(exact, request):
    """Generates alone and without a cache; returns ids, log-probabilities (completion, prompt) and finish reason."""
    sequence = Sequence(request)
    history = History(exact.config.vocab_size, request.prompt)
    rows, logprobs = [request.sampling], []
    while not sequence.is_finished:
        row = exact(torch.tensor([sequence.ids]))[:, -1]
        mask = sequence.guide and sequence.guide.allowed()
        allowed = None if mask is None else torch.from_numpy(mask.copy())[None]
        u = torch.from_numpy(uniforms(request.sampling.seed, sequence.num_completion_tokens, 1))
        id = int(sample(row, rows, u, [history], allowed))
        history.append(id)
        if request.constrains_first:
            sequence.guide = None
        logprobs.append(row.log_softmax(1)[0])
        sequence.append(id)
    ids = sequence.emit()[0]
    of_prompt = exact(torch.tensor([request.prompt])).log_softmax(2)[0]
    return ids, logprobs[: len(ids)], of_prompt, sequence.finish_reason


SEVERAL = 48  # requests with all kinds of options


@pytest.fixture(scope="module")
def references(exact):
    return [uncached(exact, request_with_options(i)) for i in range(SEVERAL)]


def submit_and_run(engine, ran, requests):
    """With random arrivals."""
    r, todo = random.Random(0), requests[:]
    while todo or engine.has_work:
        while todo and (len(todo) > len(requests) - 20 or r.random() < 0.4):
            engine.submit(todo.pop())
        ran.run(1)


def check(ran, requests, references):
    for s in requests:
        ids, expected, of_prompt, reason = references[s.id]
        assert (ran.texts[s.id], ran.reasons[s.id]) == (ids, reason), s.id
        if s.logprobs is None:
            assert not ran.logprobs[s.id] and not ran.scores[s.id]
            continue
        for id, (value, top), row in zip(ids, ran.logprobs[s.id], expected, strict=True):
            assert value == pytest.approx(float(row[id]), abs=1e-9)
            top_ids, top_values = [id for id, _ in top], [value for _, value in top]
            assert top_values == pytest.approx(row.topk(s.logprobs).values.tolist(), abs=1e-9)
            assert row[top_ids].tolist() == pytest.approx(top_values, abs=1e-9)
        if s.score_from is not None:
            places = range(s.score_from, len(s.prompt))
            assert ran.scores[s.id] == pytest.approx([float(of_prompt[i - 1, s.prompt[i]]) for i in places], abs=1e-9)
    assert set(ran.reasons.values()) == {"stop", "length"}


def test_every_option_equals_the_uncached_reference(make, references, clock):
    """With a full batch, prompts in pieces, several steps per call and random arrivals."""
    engine, requests = make(5, clock=clock), [request_with_options(i) for i in range(SEVERAL)]
    ran = Ran(engine)
    submit_and_run(engine, ran, requests)
    check(ran, requests, references)


# -- sequences that go on in another slot, or in another engine --


@pytest.fixture
def moves(monkeypatch):
    """Sequences lose their slots after few characters; counts how often each does."""
    counts, move = Counter(), Scheduler._move

    def counted(self, sequence):
        counts[sequence.id] += 1
        move(self, sequence)

    monkeypatch.setattr(Scheduler, "_move", counted)
    monkeypatch.setattr("service.engine.scheduler.MIN_WRITTEN", 1)
    monkeypatch.setattr(Sequence, "num_again", 0)
    monkeypatch.setattr(
        Scheduler,
        "_may_move",
        lambda self, it, _: it.slot is not None and self.is_decoding[it.slot] and self.num_left[it.slot],
    )
    return counts


def of_many_clients(requests):
    for each in requests:
        each.client = str(each.id % 11)
    return requests


@pytest.mark.parametrize("clock", ["slow", "jumping"], indirect=True)  # while no time passes, nobody is behind
def test_a_sequence_that_is_moved_gives_the_text_of_an_undisturbed_one(make, references, clock, moves):
    engine, requests = make(5, clock=clock), of_many_clients([request_with_options(i) for i in range(SEVERAL)])
    ran = Ran(engine)
    submit_and_run(engine, ran, requests)
    check(ran, requests, references)
    assert len(engine.scheduler) == 0 and engine.scheduler.num_running == 0 == engine.scheduler.queue.num_extra
    assert moves.total() > 30


def continued(request, ran):
    """What another worker is asked for when the one that ran a request is lost."""
    rest = request_with_options(request.id)
    rest.written, rest.must_run = np.array(ran.texts[request.id], np.int32).tobytes(), True
    if not rest.written:
        ran.scores.pop(request.id, None)
    return rest


def test_a_sequence_goes_on_in_another_engine_from_what_has_arrived(make, references, clock):
    requests = [request_with_options(i) for i in range(SEVERAL)]
    left, ran = requests, None
    for steps in (3, 5, 8, 13, 21, 34, 5000):
        engine = make(5, clock=clock)
        if ran is None:
            ran = Ran(engine)
        ran.engine = engine
        for each in left:
            engine.submit(each)
        ran.run(steps)
        left = [continued(request, ran) for request in left if request.id not in ran.reasons]
    check(ran, requests, references)


@pytest.mark.skipif(ON_CPU[0] != "native", reason="the native engine is not built")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_text_that_was_moved_ten_times_is_the_same_to_the_bit(dtype, moves):
    """Far beyond the window, with log-probabilities of its own and of its prompt."""
    model = random_model(torch.float32, block_size=16, n_layer=3)
    requests = [request_with_options(i) for i in range(SEVERAL)]
    for id in range(SEVERAL, SEVERAL + 8):
        params = SamplingParams(seed=id, repetition_penalty=1.1, frequency_penalty=0.1)
        requests.append(Submit(id, [id % 60] * 70, 400, params, logprobs=2, score_from=3))
    found = []
    for slots in (len(requests), 4):
        engine = Engine(open_runner(model, "native", dtype, slots), clock=itertools.count().__next__)
        ran = Ran(engine)
        submit_and_run(engine, ran, of_many_clients(requests))
        found.append((ran.texts, ran.logprobs, ran.scores, ran.reasons))
    assert found[0] == found[1]
    assert sum(count >= 10 for count in moves.values()) >= 3
    assert len(ran.reasons) == len(requests)


@on_any
def test_a_third_client_starts_at_once_beside_two_that_take_all_slots(make):
    """Their texts are of 16,000 characters, and each of them is one request."""
    engine, ran = make(12, clock=itertools.count().__next__), None
    for id in range(24):
        client = "large" if id < 20 else "small"
        engine.submit(Submit(id, [id], 16_000, SamplingParams(seed=id), client=client))
    ran = Ran(engine)
    ran.run(400)
    engine.submit(Submit(100, [1], 3, SamplingParams(seed=100), client="third"))
    ran.run(40)
    assert ran.reasons == {100: "length"}
    for id in range(200, 210):
        engine.submit(Submit(id, [1], 30, SamplingParams(seed=id), client=str(id)))
    ran.run(2000)
    assert len(ran.reasons) == 11
    assert all(ran.texts[id] for id in range(24) if id < 8 or id >= 20)


def test_scores_of_long_texts_equal_streamed_loss(make, exact):
    """Chunked prefill far beyond the receptive field, beside a running sequence."""
    ids = np.random.default_rng(0).integers(len(VOCABULARY), size=700)
    engine = make(3, clock=itertools.count().__next__)
    whole, late = (Submit(start, ids.tolist(), 0, SamplingParams(), logprobs=0, score_from=start) for start in (1, 600))
    ran = run_all(engine, [Submit(0, [5], 10, SamplingParams()), whole])
    values = ran.scores[1]
    assert ran.reasons == {0: "length", 1: "length"} and len(values) == 699
    assert -np.mean(values) == pytest.approx(streamed_loss(exact, ids), abs=1e-5)
    ran = run_all(engine, [late])
    assert ran.counts["run"] == 100 + exact.config.receptive_field  # older characters are skipped
    assert ran.scores[600] == pytest.approx(values[599:], abs=1e-9)


def test_auto_is_the_best_backend_and_a_dtype_that_keeps_a_text():
    assert resolve("torch", "auto", "cpu") == resolve("torch", "auto", "cuda:0") == ("torch", "float64")
    assert resolve("auto", "auto", "cpu") == (ON_CPU[0], "float32" if ON_CPU[0] == "native" else "float64")
    assert resolve("auto", "auto", "cuda:1") == ("cuda", "float32")
    assert resolve("auto", "float64", "cuda:0") == ("cuda", "float64")
