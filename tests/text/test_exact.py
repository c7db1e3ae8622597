"""Exact answers against enumeration: p(text | condition) of a tiny model, from its definition alone."""

import itertools
import random
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from service.constrain.automaton import MinimumLength
from service.constrain.regex import compile_choice, compile_regex, compile_without
from service.engine.backends import open_runner
from service.engine.engine import Engine
from service.model.params import SamplingParams
from service.model.tokenizer import CharTokenizer
from service.text.exact import Bounds, Ending, Exact, candidate_seed
from service.wire import Submit, Tried, floats
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
    """Exact answers, with the number of the request."""
    automaton = pattern if not isinstance(pattern, str) else compile_regex(pattern, CHARACTERS)
    constraint = None if automaton is None else automaton.pack()
    if minimum := options.get("min_tokens", 0):
        options["minimum"] = MinimumLength.of(automaton, minimum, length).pack()
    submit = Submit(id, ids_of(prompt), length, SamplingParams(seed=seed), constraint=constraint, **options)
    model = SimpleNamespace(
        tokenizer=CharTokenizer(CHARACTERS), record_end_character="\n" if "stop" in options else None
    )
    return id, Exact(model, [submit], Bounds(answers, *limits))


class Running:
    """Requests for exact answers, driven over one engine."""

    def __init__(self, engine, requests, window=8):
        self.engine, self.exacts, self.window = engine, dict(requests), window
        self.answers = {id: [] for id in self.exacts}
        self.errors, self.num_run = {}, Counter()  # by request
        self._ids, self._candidates, self._results = itertools.count(10**6), {}, {}
        for id in self.exacts:
            self.refill(id)

    def refill(self, id):
        exact = self.exacts[id]
        for needless in exact.take_needless():
            for its, (request, number) in list(self._candidates.items()):
                if (request, number) == (id, needless):
                    self.engine.abort(its)
        num_open = sum(request == id for request, _ in self._candidates.values())
        for number, _, submit in exact.more(self.window - num_open):
            submit.id, submit.must_run = next(self._ids), True
            self._candidates[submit.id], self._results[submit.id] = (id, number), ([], [])
            self.engine.submit(submit)

    def step(self):
        for delta in self.engine.step():
            if delta.id not in self._candidates:
                continue
            ids, logprobs = self._results[delta.id]
            ids += delta.ids
            logprobs += [it for it in (delta.prompt_logprobs, delta.logprobs) if it is not None]
            if delta.finish_reason is None:
                continue
            id, number = self._candidates.pop(delta.id)
            self.num_run[id] += len(ids) + delta.num_unseen
            exact = self.exacts[id]
            if exact.is_needed(number):
                assert delta.finish_reason in ("stop", "length", "error"), delta
                if delta.finish_reason == "error":
                    self.errors[id] = "error"
                    exact.close()
                    continue
                first, *others = logprobs or [None]
                for more in others:
                    first.extend(more)
                ending = Ending(text_of(ids), delta.finish_reason, delta.num_unseen, delta.tried, first)
                self.answers[id] += exact.ended(number, ending)
                if exact.failure is not None:
                    self.errors[id] = exact.failure.message
            self.refill(id)


def run(engine, requests, meanwhile=()):
    """The answers of each request, (text, seed, reason), and what each cost."""
    for request in meanwhile:
        engine.submit(request)
    running = Running(engine, requests)
    for _ in range(100_000):
        if not engine.has_work:
            break
        running.step()
    assert not engine.has_work and not running._candidates
    texts = {id: [(it.text, it.seed, it.finish_reason) for it in its] for id, its in running.answers.items()}
    assert all([it.number for it in its] == [*range(len(its))] for its in running.answers.values())
    costs = {id: (running.errors.get(id), exact.cost) for id, exact in running.exacts.items()}
    return texts, costs


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
    assert endings[1][0] is None and len(texts[1]) == DRAWS
    assert p_value(Counter(text for text, *_ in texts[1]), chances(exact, "\n", 6, matches)) > 0.01


def load(count):
    """Sequences of others, which are in the way."""
    for i in range(count):
        yield Submit(1000 + i, ids_of("ab" * (i % 9 + 1)), 5 + i % 40, SamplingParams(seed=i), client=f"other {i % 3}")


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

    def requests():
        return [draw(i, answers=3, seed=i, **options) for i in range(2)]

    expected = run(make(3, clock=jumping(2)), requests())
    alone = [run(make(9), [it]) for it in requests()]
    assert expected == ({**alone[0][0], **alone[1][0]}, {**alone[0][1], **alone[1][1]})
    if backend != "cuda":
        assert run(make(5, clock=jumping(3)), requests(), load(8)) == expected


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
def test_a_request_gives_up_at_its_limits_whatever_runs_beside_it(make):
    options = CASES["records"][0]
    ((_, whole),) = run(make(), [draw(1, answers=50, seed=3, **options)])[1].values()
    for limits in ((100, 10**9), (10**6, 500)):
        found = [
            run(make(slots, clock=jumping(slots)), [draw(1, answers=50, seed=3, limits=limits, **options)], load(n))
            for slots, n in ((3, 0), (8, 10))
        ]
        assert found[0] == found[1]
        texts, (error, cost) = found[0][0][1], found[0][1][1]
        assert len(texts) == cost.matches < 50
        assert cost.candidates == 100 or 500 <= cost.characters < 510
        lacked, kept = re.search(r"nearest of the others lacked (\d) .* kept to the condition for (\d)", error).groups()
        assert int(lacked) >= 1 and 1 <= int(kept) <= 6
        assert cost.candidates < whole.candidates


CANDIDATE_SEEDS = [candidate_seed(seed, number) for seed in (0, 1, 2, 2**64 - 1) for number in range(1, 1000)]


def test_seeds_of_candidates_are_different_and_small():
    assert (
        len(set(CANDIDATE_SEEDS)) == len(CANDIDATE_SEEDS) and 0 <= min(CANDIDATE_SEEDS) <= max(CANDIDATE_SEEDS) < 2**52
    )
    assert max(CANDIDATE_SEEDS) > 2**51 and candidate_seed(5, 0) == 5


@at_once
@pytest.mark.parametrize(("pattern", "length"), [(["abbab"], 6), (["ab", "abb"], 2)])
def test_the_only_match_needs_one_candidate(make, pattern, length):
    """Another may be too long for the answer."""
    texts, costs = run(make(), [draw(1, compile_choice(pattern, CHARACTERS), answers=3, length=length)])
    assert [text for text, *_ in texts[1]] == pattern[:1] * 3 and costs[1][1].candidates == 3


@at_once
@pytest.mark.parametrize("pattern", ["ab[ab]*\n", "[ab]*\n", "abab"])
def test_log_probabilities_are_those_of_the_text(make, exact, pattern):
    running = Running(make(), [draw(1, pattern, answers=3, seed=2, logprobs=1)])
    while running.engine.has_work:
        running.step()
    assert len(running.answers[1]) == 3
    for it in running.answers[1]:
        text = ids_of(it.text)
        logprobs = exact(torch.tensor([[END, *text]]))[0].log_softmax(-1)
        expected = [float(logprobs[k, id]) for k, id in enumerate(text)]
        assert floats(it.logprobs.values) == pytest.approx(expected)


@at_once
@pytest.mark.parametrize("where", ["prefill", "decode", "start"])
def test_a_failing_forward_ends_a_candidate_as_an_error(make, monkeypatch, where):
    engine = make()
    running = Running(engine, [draw(1, "[ab]*bbb\n", answers=10)])
    run_well = getattr(engine.runner, where)
    calls = itertools.count()

    def fail(*arguments):
        if next(calls) == 3:
            raise RuntimeError("out of luck")
        return run_well(*arguments)

    monkeypatch.setattr(engine.runner, where, fail)
    for _ in range(2000):
        if engine.has_work:
            running.step()
    assert running.errors == {1: "error"} and not engine.has_work
    assert engine.generate([Submit(2, ids_of("a"), 5, SamplingParams())])[0]


@on_any
def test_all_characters_that_ran_are_reported(make):
    engine = make(1)
    running = Running(engine, [draw(1, "[ab]*bb\n", answers=3)])
    num_run = 0
    while engine.has_work:
        running.step()
        stats = engine.stats
        num_run += 2 * stats.num_prefill_tokens + stats.num_decode_tokens  # a prompt of one character chooses one too
    assert running.exacts[1].cost.candidates > 3 and running.num_run[1] == num_run


# -- without an engine: results from a table --


def table_of(seed):
    """How each candidate would end, whatever runs beside it."""
    chance = random.Random(seed)

    def end(number):
        matches, characters = chance.random() < 0.2, chance.randrange(1, 9)
        return Ending("a" * characters if matches else "", "stop", 0, Tried(matches, characters, characters, 1), None)

    return [end(number) for number in range(400)]


def two_prompts(limits):
    model = SimpleNamespace(tokenizer=CharTokenizer(CHARACTERS), record_end_character=None)
    constraint = compile_regex("[ab]*", CHARACTERS).pack()
    submits = [Submit(0, [2], 9, SamplingParams(seed=i), constraint=constraint) for i in range(3)]
    return Exact(model, submits, Bounds(4, *limits))


@pytest.mark.parametrize("limits", [(300, 10**9), (12, 10**9), (300, 60)])
def test_answers_and_errors_do_not_depend_on_the_order_in_which_candidates_end(limits):
    tables = [table_of(i) for i in range(3)]
    outcomes = set()
    for seed in range(30):
        order, exact = random.Random(seed), two_prompts(limits)
        seeds = [{candidate_seed(i, number): number for number in range(400)} for i in range(3)]
        open, answers = {}, []
        while exact.failure is None:
            for number in exact.take_needless():
                del open[number]
            open |= {number: (prompt, submit) for number, prompt, submit in exact.more(order.randrange(1, 9))}
            if not open:
                break
            number = order.choice([*open])
            prompt, submit = open.pop(number)
            answers += exact.ended(number, tables[prompt][seeds[prompt][submit.sampling.seed]])
        if exact.failure is None:
            outcomes.add((exact.cost, *sorted((it.number, it.seed, it.text) for it in answers)))
        else:
            outcomes.add(exact.failure.message)
    assert len(outcomes) == 1, outcomes
