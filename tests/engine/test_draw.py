"""Exact answers against enumeration: p(text | condition) of a tiny model, from its definition alone."""

import functools
import itertools
import re
from collections import Counter

import pytest
import torch

from service.constrain.automaton import MinimumLength
from service.constrain.regex import compile_choice, compile_regex, compile_without
from service.engine.backends import open_runner
from service.engine.draw import Draw as Running
from service.engine.draw import candidate_seed, shared_out
from service.engine.engine import Engine
from service.engine.scheduler import BusyError
from service.model.params import SamplingParams
from service.wire import Draw, Submit, floats
from tests.engine.test_cuda import runner_of
from tests.engine.test_engine import CLOCKS, ON_CPU, jumping
from tests.helpers import random_model

CHARACTERS = "ab\n"
DRAWS = 300
END = CHARACTERS.index("\n")


@pytest.fixture(scope="module")
def exact():
    """Over three characters, of which the last one ends a record."""
    return random_model(torch.float64, seed=5, vocab_size=len(CHARACTERS), block_size=8)


@pytest.fixture(params=[*ON_CPU, "cuda"])
def backend(request):
    return request.param


at_once = pytest.mark.parametrize("backend", ON_CPU, indirect=True)
on_any = pytest.mark.parametrize("backend", ON_CPU[:1], indirect=True)


@pytest.fixture
def make(backend, exact):
    """Makes an engine over `exact`, in float64."""

    def make(slots=8, **options):
        runner = runner_of(exact, slots) if backend == "cuda" else open_runner(exact, backend, "float64", slots)
        return Engine(runner, **options)

    return make


@pytest.fixture
def clock():
    return CLOCKS["fast"]()


def ids_of(text):
    return [CHARACTERS.index(c) for c in text]


def text_of(ids):
    return "".join(CHARACTERS[id] for id in ids)


def draw(id, pattern, answers=1, seed=0, length=6, prompt="\n", limits=(10**6, 10**9), **options):
    automaton = pattern if not isinstance(pattern, str) else compile_regex(pattern, CHARACTERS)
    constraint = None if automaton is None else automaton.pack()
    if minimum := options.get("min_tokens", 0):
        options["minimum"] = MinimumLength.of(automaton, minimum, length).pack()
    return Submit(
        id, ids_of(prompt), length, SamplingParams(seed=seed), constraint=constraint,
        draw=Draw(answers, *limits), **options,
    )  # fmt: skip


def run(engine, requests, meanwhile=()):
    """The answers of each draw, (text, seed, reason), and how each ended: (reason, Drawn)."""
    found, endings, answers = {it.id: [] for it in requests}, {}, {it.id: [] for it in requests}
    for request in (*meanwhile, *requests):
        engine.submit(request)
    for _ in range(100_000):
        if not engine.has_work:
            break
        for delta in engine.step():
            if delta.id in found:
                found[delta.id] += delta.ids
                answers[delta.id] += delta.answers
                if delta.finish_reason:
                    assert delta.id not in endings
                    endings[delta.id] = delta.finish_reason, delta.drawn
    texts = {}
    for id, its in answers.items():
        ids = iter(found[id])
        texts[id] = [(text_of(itertools.islice(ids, it.length)), it.seed, it.finish_reason) for it in its]
        assert next(ids, None) is None
    assert not engine.has_work and not engine.draws and not len(engine.scheduler)
    return texts, endings


def chances(model, prompt, length, outcome):
    """p(text | it matches) of all answers, by enumeration of what the model generates freely.

    outcome(text, next): the answer if the text ends with this character, or with "" at `length`; False: it is dropped;
    None: it goes on.
    """
    found = {}

    def extend(text, chance):
        logits = model(torch.tensor([ids_of(prompt + text)]))
        for c, p in zip(CHARACTERS, logits[0, -1].softmax(-1).tolist(), strict=True):
            answer = outcome(text, c)
            if answer is None and len(text) + 1 < length:
                extend(text + c, chance * p)
            elif answer is None:
                answer = outcome(text + c, "")
            if isinstance(answer, str):
                found[answer] = found.get(answer, 0.0) + chance * p

    extend("", 1.0)
    total = sum(found.values())
    return {text: chance / total for text, chance in found.items()}


def p_value(counts, expected):
    """Of Pearson's chi-square, texts with fewer than five expected together."""
    assert set(counts) <= set(expected), set(counts) - set(expected)
    total = sum(counts.values())
    cells, rest = [], [0.0, 0.0]
    for text, chance in expected.items():
        if total * chance >= 5:
            cells.append((counts[text], total * chance))
        else:
            rest = [rest[0] + counts[text], rest[1] + total * chance]
    cells += [rest] * (rest[1] > 0)
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2.0), torch.tensor(statistic / 2.0)))


def regex(pattern):
    """Of a text model: a match ends where the next character does not fit, or nothing can."""
    automaton = compile_regex(pattern, CHARACTERS)

    def live(text):
        state = 0
        for id in ids_of(text):
            state = automaton.table[state, automaton.classes[id]] if state >= 0 else -1
        return state >= 0

    def outcome(text, following):
        if following and live(text + following):
            return None
        return text if re.fullmatch(pattern, text) else False

    return outcome


def record(condition):
    """Of a record: it ends at the line break, and matches as a whole; at the length it matches as it is."""

    def outcome(text, following):
        if following not in ("", "\n"):
            return None
        return text if condition(text, following) else False

    return outcome


def stopped(stop, condition):
    """Of a text model with a stop, which is cut off; the condition holds for it too."""

    def outcome(text, following):
        if not condition(text + following):
            return False
        if not following:
            return text
        return text.removesuffix(stop[:-1]) if (text + following).endswith(stop) else None

    return outcome


CASES = {
    "regex": ({"pattern": "(a|bb)*a?"}, regex("(a|bb)*a?")),
    "forced beginning": ({"pattern": "ab(a|b\n)*"}, regex("ab(a|b\n)*")),
    "choice": ({"pattern": compile_choice(["ab", "aba", "b", "bbb"], CHARACTERS)}, regex("ab|aba|b|bbb")),
    "records": (
        {"pattern": "[ab]*bb[ab]*\n", "stop": ((END,),), "may_leave": False},
        record(lambda text, following: bool(re.fullmatch("[ab]*bb[ab]*", text)) and following == "\n"),
    ),
    "bad words": (
        {"pattern": compile_without(["aa", "bbb"], CHARACTERS, end="\n"), "stop": ((END,),), "may_leave": False},
        record(lambda text, _: "aa" not in text and "bbb" not in text),
    ),
    "at least": (
        {"pattern": "[ab]*\n", "stop": ((END,),), "may_leave": False, "min_tokens": 4},
        record(lambda text, following: len(text) >= 4 and following == "\n"),
    ),
    "stop": (
        {"pattern": compile_without(["bb"], CHARACTERS), "stop": (tuple(ids_of("\nb")),), "may_leave": False},
        stopped("\nb", lambda text: "bb" not in text),
    ),
}


@on_any
@pytest.mark.parametrize("case", CASES)
def test_answers_are_drawn_from_the_conditional_distribution(make, exact, case, clock):
    options, matches = CASES[case]
    texts, endings = run(make(16, clock=clock), [draw(1, answers=DRAWS, seed=1, **options)])
    assert endings[1][0] == "stop" and len(texts[1]) == DRAWS
    assert p_value(Counter(text for text, *_ in texts[1]), chances(exact, "\n", 6, matches)) > 0.01


def load(count):
    """Sequences and draws of others, which are in the way."""
    for i in range(count):
        yield Submit(1000 + i, ids_of("ab" * (i % 9 + 1)), 5 + i % 40, SamplingParams(seed=i), client=f"other {i % 3}")
        if i % 4 == 0:
            yield draw(2000 + i, "[ab]*a\n", answers=5, seed=i, stop=((END,),), may_leave=False, client="other")


@on_any
def test_answers_under_load_are_drawn_from_the_conditional_distribution(make, exact):
    options, outcome = CASES["records"]
    requests = [draw(i, answers=DRAWS // 5, seed=i, **options) for i in range(5)]
    texts, _ = run(make(24, clock=jumping(1), max_waiting=4096), requests, load(40))
    counts = Counter(text for its in texts.values() for text, *_ in its)
    assert p_value(counts, chances(exact, "\n", 6, outcome)) > 0.01


@pytest.mark.parametrize(
    ("backend", "case"), [*((it, "at least") for it in (*ON_CPU, "cuda")), (ON_CPU[0], "forced beginning")],
    indirect=["backend"],
)  # fmt: skip
def test_answers_are_the_same_whatever_runs_beside_them(make, case, backend):
    options = CASES[case][0]
    requests = [draw(i, answers=3, seed=i, **options) for i in range(2)]
    expected = run(make(3, clock=jumping(2)), requests)
    alone = [run(make(9), [it]) for it in requests]
    assert expected == ({**alone[0][0], **alone[1][0]}, {**alone[0][1], **alone[1][1]})
    if backend != "cuda":
        assert run(make(5, clock=jumping(3)), requests, load(8)) == expected


@on_any
@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_a_free_text_of_its_seed(make, case):
    """With its seed a draw gives it at once, and so does a sequence without a condition, but for its end."""
    options = CASES[case][0]
    ((_, answers),) = run(make(), [draw(1, answers=4, seed=7, **options)])[0].items()
    for text, seed, reason in answers:
        texts, endings = run(make(), [draw(1, seed=seed, **options)])
        assert texts[1] == [(text, seed, reason)] and endings[1][1].candidates == 1
        if case not in ("forced beginning",):
            (free,) = make().generate([Submit(1, ids_of("\n"), 6, SamplingParams(seed=seed))])
            assert text_of(free).startswith(text)


@on_any
def test_a_draw_gives_up_at_its_limits_whatever_runs_beside_it(make):
    options = CASES["records"][0]
    ((_, whole),) = run(make(), [draw(1, answers=50, seed=3, **options)])[1].values()
    for limits in ((100, 10**9), (10**6, 500)):
        found = [
            run(make(slots, clock=jumping(slots)), [draw(1, answers=50, seed=3, limits=limits, **options)], load(n))
            for slots, n in ((3, 0), (8, 10))
        ]
        assert found[0] == found[1]
        texts, (reason, drawn) = found[0][0][1], found[0][1][1]
        assert reason == "stop" and len(texts) == drawn.matches < 50
        assert drawn.candidates == 100 or 500 <= drawn.characters < 510
        assert drawn.nearest >= 1 and 1 <= drawn.longest <= 6
        assert drawn.candidates < whole.candidates


CANDIDATE_SEEDS = [candidate_seed(seed, number) for seed in (0, 1, 2, 2**64 - 1) for number in range(1, 1000)]


def test_seeds_of_candidates_are_different_and_small():
    assert (
        len(set(CANDIDATE_SEEDS)) == len(CANDIDATE_SEEDS) and 0 <= min(CANDIDATE_SEEDS) <= max(CANDIDATE_SEEDS) < 2**52
    )
    assert max(CANDIDATE_SEEDS) > 2**51 and candidate_seed(5, 0) == 5


@at_once
def test_the_only_match_needs_one_candidate(make):
    only = compile_choice(["abbab"], CHARACTERS)
    texts, endings = run(make(), [draw(1, only, answers=3)])
    assert [text for text, *_ in texts[1]] == ["abbab"] * 3 and endings[1][1].candidates == 3


@at_once
def test_log_probabilities_are_those_of_the_text(make, exact):
    pattern = "ab[ab]*\n"
    engine = make()
    engine.submit(draw(1, pattern, answers=3, seed=2, logprobs=1))
    answers, ids, values = [], [], []
    while engine.has_work:
        for delta in engine.step():
            answers += delta.answers
            ids += delta.ids
            values += floats(delta.logprobs.values) if delta.logprobs else []
    assert len(answers) == 3 and len(ids) == len(values) == sum(it.length for it in answers)
    for it in answers:
        text, ids = ids[: it.length], ids[it.length :]
        logprobs = exact(torch.tensor([[END, *text]]))[0].log_softmax(-1)
        expected = [float(logprobs[k, id]) for k, id in enumerate(text)]
        assert values[: it.length] == pytest.approx(expected)
        values = values[it.length :]


@at_once
def test_a_draw_is_aborted_timed_out_and_refused_as_a_sequence_is(make):
    never = compile_without(["a", "b", "\n"], CHARACTERS)  # what no candidate gives: six characters of none
    clock = itertools.count()
    engine = make(4, clock=lambda: next(clock) / 1000, max_waiting=1)
    hopeless = dict(answers=1, length=6, may_leave=False)
    engine.submit(draw(1, never, **hopeless))
    for _ in range(20):
        assert not [delta for delta in engine.step() if delta.finish_reason]
    engine.abort(1)
    (delta,) = [delta for delta in engine.step() if delta.finish_reason]
    assert (delta.id, delta.finish_reason) == (1, "abort") and delta.drawn.candidates > 5 and delta.num_unseen > 5
    assert not engine.has_work and not engine.draws
    engine.submit(draw(2, never, timeout_seconds=0.5, **hopeless))
    assert engine.ids == [2]
    endings = {}
    for _ in range(500):  # each moves the clock by a millisecond or more
        endings |= {delta.id: (delta.finish_reason, delta.drawn.candidates) for delta in engine.step()}
    assert endings[2][0] == "timeout" and endings[2][1] > 5 and not engine.has_work
    for id in range(10):
        engine.submit(Submit(100 + id, ids_of("a"), 5, SamplingParams(), must_run=True))
    with pytest.raises(BusyError):
        engine.submit(draw(3, never, **hopeless))
    assert not engine.draws


@at_once
@pytest.mark.parametrize("where", ["prefill", "decode", "start"])
def test_a_failing_forward_ends_a_draw_as_an_error(make, monkeypatch, where):
    engine = make()
    engine.submit(draw(1, "[ab]*bbb\n", answers=10))
    run_well = getattr(engine.runner, where)
    calls = itertools.count()

    def fail(*arguments):
        if next(calls) == 3:
            raise RuntimeError("out of luck")
        return run_well(*arguments)

    monkeypatch.setattr(engine.runner, where, fail)
    reasons = [delta.finish_reason for _ in range(2000) if engine.has_work for delta in engine.step()]
    assert [reason for reason in reasons if reason] == ["error"] and not engine.has_work
    assert engine.generate([Submit(2, ids_of("a"), 5, SamplingParams())])[0]


class Spent:
    """A clock that each call of a runner moves, by what such calls take of a small model on a CPU."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def watch(self, runner, monkeypatch):
        for name, cost in {
            "start": lambda *_: 60e-6,
            "prefill": lambda pieces: 50e-6 + 80e-6 * len(pieces),
            "decode": lambda slots, steps, *_: steps.max() * (60e-6 + 25e-6 * len(slots)),
        }.items():
            monkeypatch.setattr(runner, name, functools.partial(self.spend, getattr(runner, name), cost))

    def spend(self, call, cost, *arguments):
        self.now += cost(*arguments)
        return call(*arguments)


@on_any
@pytest.mark.parametrize("pattern", ["(aa|bb){15}", "[ab]*bbbbbb[ab]*\n", "[ab]{2}\n\n[ab]*"])
def test_beside_a_draw_of_thousands_a_stream_keeps_half_its_speed(make, monkeypatch, pattern):
    """Whether its candidates end after one character or after many."""
    speeds = []
    for count in (0, 2):
        clock = Spent()
        engine = make(64, clock=clock)
        clock.watch(engine.runner, monkeypatch)
        for id in range(count):
            engine.submit(draw(10 + id, pattern, answers=10**4, length=40, seed=id, client="draws"))
        for _ in range(30 * count):
            engine.step()
        engine.submit(Submit(2, ids_of("ab"), 10**6, SamplingParams(seed=1), client="streams"))
        characters, candidates, began = 0, 0, None
        while characters < 1500:
            characters += sum(len(delta.ids) for delta in engine.step() if delta.id == 2)
            began = clock.now if began is None and characters else began
            candidates += engine.stats.num_candidates
        speeds.append(characters / (clock.now - began))
        assert bool(count) == (candidates > 30)
        for id in engine.ids:
            engine.abort(id)
        engine.step()
        assert not engine._debts
    assert speeds[1] >= 0.48 * speeds[0]


@on_any
def test_draws_of_several_clients_share_the_slots(make, monkeypatch):
    """None waits for what others owe."""
    clock = Spent()
    engine = make(16, clock=clock)
    clock.watch(engine.runner, monkeypatch)
    for id in range(4):
        pattern = ["(aa|bb){15}", "[ab]*bbbbbb[ab]*\n"][id % 2]
        engine.submit(draw(id, pattern, answers=10**4, length=40, seed=id, client=f"client {id}"))
    rows, steps = 0, 300
    for _ in range(steps):
        engine.step()
        rows += engine.stats.num_decode_rows
    spent = [it.num_run for it in engine.draws.values()]
    assert min(spent) > 50 and rows > 2 * steps, (spent, rows)


def test_slots_go_to_draws_by_their_clients_weights():
    options = dict(pattern="[ab]*", answers=99)
    draws = [Running(draw(id, client="ab"[id], weight=[3.0, 1.0][id], **options), 0.0, 99) for id in range(2)]
    for number, it in enumerate(shared_out(draws, 8)):
        it.next(number, 0.0)
    assert [len(it.running) for it in draws] == [6, 2]


@on_any
def test_characters_of_dropped_candidates_ran_unseen(make):
    engine = make(1)
    engine.submit(draw(1, "[ab]*bb\n", answers=3))
    num_run, deltas = 0, []
    for _ in range(1000):
        deltas += engine.step()
        num_run += engine.stats.num_prefill_tokens + engine.stats.num_candidate_tokens
    assert deltas[-1].finish_reason == "stop" and deltas[-1].drawn.candidates > 3
    assert num_run == 1 + sum(len(delta.ids) for delta in deltas) + deltas[-1].num_unseen  # 1: the prompt


@on_any
def test_clients_that_all_owe_go_on(make):
    """A client whose candidates end at their first character never decodes, and so owes nothing."""
    engine = make(16)
    for id, client in enumerate(["one", "other"]):
        engine.submit(draw(id, "(aa|bb){15}", answers=10**4, length=40, seed=id, client=client))
    for _ in range(3):
        engine.step()
    engine.submit(draw(2, "\n", answers=10**4, length=40, client="third"))
    engine._debts |= {"one": 10.0, "other": 10.0}
    rows = 0
    for _ in range(5):
        engine.step()
        rows += engine.stats.num_decode_rows
    assert rows
