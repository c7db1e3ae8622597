import itertools
import math
import random
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from service.constrain.regex import compile_regex
from service.engine.accounts import behind, settle
from service.engine.fair_queue import FairQueue
from service.engine.scheduler import BusyError, Scheduler, reserved_slots
from service.engine.sequence import Sequence, StopMatcher
from service.model.config import GPTConfig
from service.model.params import SamplingParams
from service.wire import Submit, sequence_id


def sequence(id, prompt=3, max_tokens=5, **options):
    return Sequence(Submit(id, list(range(prompt)), max_tokens, SamplingParams(), **options))


# -- stop sequences --


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.text("abc", max_size=30))
@example(["b", "ab"], "ab")  # the longest of those that end together, wherever it stands
@example(["ab", "b"], "ab")
@example(["aab"], "aaab")  # it begins again within itself
def test_matcher_finds_the_first_stop_and_holds_the_longest_prefix(stops, text):
    matcher = StopMatcher(tuple(tuple(map(ord, s)) for s in stops))
    for end in range(1, len(text) + 1):
        matched = matcher.push(ord(text[end - 1]))
        complete = [len(s) for s in stops if text[:end].endswith(s)]
        assert matched == (max(complete) if complete else None)
        if complete:
            return
        assert matcher.held == max([k for s in stops for k in range(len(s)) if text[:end].endswith(s[:k])])


def test_a_stop_that_is_cut_off_begins_after_min_tokens():
    s = sequence(0, max_tokens=9, min_tokens=1, stop=((7, 8), (8,)))
    s.extend([7, 8])
    assert s.finish_reason == "stop" and s.emit()[0] == [7]


def test_a_stop_that_is_kept_may_end_at_min_tokens():
    s = sequence(0, max_tokens=9, min_tokens=2, stop=((7, 8),), include_stop=True)
    assert s.extend([7, 8, 1]) == 2
    assert s.finish_reason == "stop" and s.emit()[0] == [7, 8]


def test_held_ids_are_emitted_when_the_sequence_ends_by_length():
    s = sequence(0, max_tokens=2, stop=((7, 8, 9),))
    s.append(7)
    assert s.emit()[0] == []
    s.append(8)
    assert s.finish_reason == "length" and s.emit()[0] == [7, 8]


# -- slots --

CONFIG = GPTConfig(vocab_size=9, block_size=8, n_layer=4)


def run(scheduler, plan, apply=lambda piece: None):
    """Carries out a plan; the first character after a prompt is 0."""
    for s, found in plan.starts:
        if found:
            scheduler.copied(s.slot, found.length)
    for piece in plan.pieces:
        apply(piece)
        scheduler.prefilled(piece)
        if not piece.sequence.num_prompt_left and not piece.sequence.is_finished:
            if piece.sequence.request.max_tokens:
                piece.sequence.append(0)
            else:
                piece.sequence.finish_reason = "length"


@given(st.integers(0, 10_000))
@settings(max_examples=80)
def test_sequences_keep_their_slots_under_random_events(seed):
    """Arrivals, prompts in pieces, copies, completions and aborts in any order; `cache` is what a runner's would be.

    Prompts are of two characters, so many share a beginning; some clients weigh more, and copies stay in a group.
    """
    r = random.Random(seed)
    length = r.choice([1, 1, 3])  # of pieces, but for a prompt's last
    max_running, reserve = r.randint(1, 6), r.randint(0, 2)
    scheduler = Scheduler(max_running, 20, CONFIG, length, reserve=reserve, is_fair=r.random() < 0.8)
    cache = [[] for _ in range(scheduler.slots)]  # the ids whose keys each slot has seen
    groups = [""] * scheduler.slots
    ended, added, copied = [], 0, 0

    def copy(target, found):
        nonlocal copied
        assert found.length <= len(cache[found.source]) <= max(CONFIG.block_size, found.length)
        assert found.length % length == 0 and found.is_ready
        assert groups[found.source] == groups[target]
        cache[target] = cache[found.source][: found.length]
        copied += 1

    def append(piece):
        text, done = piece.sequence.cut_prompt.tolist(), len(cache[piece.sequence.slot])
        assert cache[piece.sequence.slot] == text[:done], "keys of another text"
        assert done % length == 0 and (piece.is_last or len(piece.ids) % length == 0)
        cache[piece.sequence.slot] += text[done : done + len(piece.ids)]

    for step in range(80):
        while r.random() < 0.5 and scheduler.num_waiting < 10:
            prompt = [int(r.random() < 0.1) for _ in range(r.choice([1, 5, 20, 25, 60]))]
            submit = Submit(added, prompt, r.randint(0, 6), SamplingParams(), priority=r.randint(0, 1))
            submit.client, submit.reuse_group = r.choice("aab"), r.choice("xxy")
            submit.weight = r.choice([0.1, 0.7]) if submit.client == "a" else 3.0
            if not submit.max_tokens:
                submit.logprobs = submit.score_from = 1
            scheduler.add(Sequence(submit, 0.0, CONFIG.receptive_field))
            added += 1
        for s in list(scheduler):
            if r.random() < 0.05:
                assert scheduler.finish(s.id, r.choice(["abort", "error"])) is s
                assert scheduler.finish(s.id, "timeout") is None  # it has ended
                ended.append(s.id)
        decoding = np.flatnonzero(scheduler.is_decoding)
        budget = r.randint(1, 30)
        plan = scheduler.schedule(float(step), budget)
        assert sum(len(piece.ids) for piece in plan.pieces) <= max(budget, length)
        for s, it in plan.starts:
            cache[s.slot], groups[s.slot] = [], s.request.reuse_group
            if it:
                copy(s.slot, it)
        assert [s.slot for s in scheduler.by_slot if s] == [i for i, s in enumerate(scheduler.by_slot) if s]
        held_up = scheduler.prefilling + scheduler.copying
        assert held_up == [] or any(plan), "nobody waits for a sequence that does not run"
        steps = np.minimum(r.randint(1, 3), scheduler.num_left[decoding])
        scheduler.decoded(decoding, steps)
        touched = [scheduler.by_slot[slot] for slot in decoding]
        for s, n in zip(touched, steps.tolist(), strict=True):
            for _ in range(n):
                cache[s.slot].append(s.ids[-1])
                s.append(0)
        run(scheduler, plan, append)
        for s in [*touched, *(piece.sequence for piece in plan.pieces)]:
            if s.is_finished:
                scheduler.remove(s)
                ended.append(s.id)
        for slot, s in enumerate(scheduler.by_slot):
            assert len(cache[slot]) == scheduler.contents.num_held[slot] or s is None
    assert len(ended) == len(set(ended))
    assert set(ended) | {s.id for s in scheduler} == set(range(added))
    event(f"copies: {copied > 0}")
    for s in list(scheduler):
        scheduler.finish(s.id, "abort")
    assert (scheduler.num_waiting, scheduler.num_running, len(scheduler.queue._clients)) == (0, 0, 0)


def test_sequences_with_a_guide_are_counted_while_they_decode():
    scheduler, pattern = Scheduler(5, 9, CONFIG), compile_regex("a*", "abcdefghi").pack()
    guided = {"constraint": pattern}
    for id, options in enumerate(({}, guided, guided, guided, guided | {"constrains_first": True})):
        scheduler.add(sequence(id, **options))
    assert scheduler.num_guided == 0
    run(scheduler, scheduler.schedule(0.0, 99))
    counts = [scheduler.num_guided]
    for id in range(5):
        scheduler.finish(id, "abort")
        counts.append(scheduler.num_guided)
    assert counts == [3, 3, 2, 1, 0, 0]


def test_the_slot_that_was_unused_for_longest_goes_first():
    config = GPTConfig(vocab_size=300, block_size=128, n_layer=4)
    scheduler = Scheduler(4, 4, config)

    def start(id, prompt):
        scheduler.add(Sequence(Submit(id, prompt, 5, SamplingParams())))
        plan = scheduler.schedule(0.0, 1000)
        run(scheduler, plan)
        ((it, found),) = plan.starts
        return it.slot, found and (found.source, found.length)

    texts = [[id] * 40 for id in range(4)]
    assert [start(id, texts[id]) for id in range(4)] == [(0, None), (1, None), (2, None), (3, None)]
    for id in (2, 3, 1):
        scheduler.finish(id, "abort")
    assert start(4, texts[3]) == (2, (3, 39))  # what is copied is used again
    assert start(5, texts[0]) == (1, (0, 39))
    assert start(6, texts[3]) == (3, (2, 39))
    scheduler.finish(5, "abort")
    assert start(7, texts[0]) == (1, (0, 39))  # though the free slot has it too
    scheduler.finish(0, "abort")
    scheduler.finish(7, "abort")
    assert start(8, texts[0]) == (1, (0, 39))  # 0 ended first, and was used again


def test_starts_and_copies_count_in_the_budget_of_a_step():
    """64 equal prompts arrive at once: a few start or copy per step."""
    config = GPTConfig(vocab_size=300, block_size=128, n_layer=20)
    scheduler = Scheduler(64, 64, config)
    for id in range(64):
        scheduler.add(sequence(id, prompt=250))
    started, copied = [], []
    for step in range(200):
        plan = scheduler.schedule(float(step), 40)
        started.append(len(plan.starts))
        copied.append(sum(copy is not None for _, copy in plan.starts))
        assert len(plan.starts) <= 20
        assert copied[-1] <= 10  # a copy of 128 positions counts as a character more
        run(scheduler, plan)
    assert (sum(started), sum(copied), scheduler.is_decoding.sum()) == (64, 63, 64)


def test_the_search_for_a_shared_beginning_ends_at_the_first_slot_that_shares_all():
    scheduler = Scheduler(64, 64, GPTConfig(vocab_size=300, block_size=128, n_layer=20))
    for id in range(64):
        scheduler.add(sequence(id, prompt=100))
    while scheduler.is_decoding.sum() < 64:
        run(scheduler, scheduler.schedule(0.0, 40))
    scheduler.contents.num_compared = 0
    assert scheduler.contents.find(sequence(64, prompt=100)) == (0, 99, True)
    assert scheduler.contents.num_compared == 99


def test_sequences_expire_at_their_deadlines():
    scheduler, large = Scheduler(1, 10, CONFIG), sequence_id(1, 0)
    for id, seconds in {0: 30.0, large: 10.0, large + 1: 20.0, 1: 1000.0, 2: math.inf}.items():
        added = sequence(id, timeout_seconds=seconds)
        added.deadline = seconds  # as if it had come at 0
        scheduler.add(added)
    assert [scheduler.expired(now) for now in (9.0, 10.0, 11.0, 30.0)] == [[], [large], [], [large + 1, 0]]


def test_ended_sequences_are_removed_from_the_queue_and_from_the_deadlines():
    scheduler = Scheduler(1, 10, CONFIG)
    scheduler.add(sequence(0))
    scheduler.schedule(0.0, 100)
    for id in range(1, 5000):
        scheduler.add(sequence(id, timeout_seconds=1000.0))
        scheduler.finish(id, "abort")
        if id == 1000:
            scheduler.add(sequence(5000))  # its client waits from now on
    assert len(scheduler.queue._clients[""].waiting) < 200
    assert len(scheduler._deadlines) < 200
    assert scheduler.num_waiting == 1


# -- fairness between clients --


def fair(max_running=8, max_waiting=1000, **options):
    return Scheduler(max_running, max_waiting, CONFIG, reserve=reserved_slots(max_running), **options)


def fill(scheduler, count, client="flood", first=0, **options):
    """Adds sequences of a client that run until they are ended."""
    for id in range(first, first + count):
        scheduler.add(sequence(id, max_tokens=1000, client=client, **options))


def started(scheduler, budget=10_000):
    plan = scheduler.schedule(0.0, budget)
    run(scheduler, plan)
    return [s.id for s, _ in plan.starts]


def refuses(scheduler, client):
    with pytest.raises(BusyError, match=f"queue full .limit {scheduler.max_waiting}"):
        scheduler.add(sequence(10_000, client=client))
    return True


@given(st.integers(0, 10_000), st.lists(st.sampled_from([0.1, 0.5, 1.0, 2.0, 7.0]), min_size=2, max_size=5))
@settings(max_examples=50)
def test_a_place_goes_to_the_client_that_runs_the_fewest_for_its_weight(seed, weights):
    """Whatever ends when."""
    r = random.Random(seed)
    queue, ids, running = FairQueue(max_running=60), itertools.count(), []
    for i, weight in enumerate(weights):
        for _ in range(400):
            priority = r.randint(-1000, 1000)
            queue.add(sequence(next(ids), client=str(i), weight=weight, priority=priority))
    for step in range(300):
        if step > 60:
            ended = running.pop(r.randrange(len(running)))
            ended.finish_reason = "stop"
            queue.remove(ended)
        counts = Counter(int(s.request.client) for s in running)
        queue.begin()
        running.append(queue.pop())
        started = int(running[-1].request.client)
        by_weight = [counts[i] / weight for i, weight in enumerate(weights)]
        assert by_weight[started] == min(by_weight)


def test_in_a_step_the_clients_that_wait_take_turns():
    """Also one that runs many: it pays for their time, and not with places."""
    queue, ids = FairQueue(max_running=100), itertools.count()
    for client, count in ("many", 20), ("few", 20):
        for _ in range(count):
            queue.add(sequence(next(ids), client=client))
    queue.begin({client for client in queue.clients if client.name == "many"})
    for _ in range(10):
        assert queue.pop().request.client == "many"
    queue.begin()
    assert [queue.pop().request.client for _ in range(6)] == ["few", "many"] * 3


@given(st.integers(0, 10_000))
@settings(max_examples=30)
def test_no_client_waits_for_ever(seed):
    """Beside clients that return with the best priority, and ever new ones, a sequence starts within few others."""
    r = random.Random(seed)
    scheduler, ids, running, since = fair(4), itertools.count(1), [], 0
    fill(scheduler, 1, client="patient", priority=1000)
    scheduler.schedule(0.0, 100)
    scheduler.finish(0, "abort")
    fill(scheduler, 40, first=next(ids) + 10_000)
    running += started(scheduler)
    fill(scheduler, 1, client="patient", first=0, priority=1000, weight=0.5)
    while 0 not in running:
        for _ in range(r.randint(0, 3)):
            fill(scheduler, 1, client=f"new {next(ids)}", first=next(ids), priority=-1000)
        if running and r.random() < 0.7:
            scheduler.finish(running.pop(r.randrange(len(running))), "abort")
        running += started(scheduler, r.choice([4, 100]))
        since += 1
        assert since < 100


def test_a_newcomer_starts_at_once_beside_a_flood():
    scheduler = fair(64)
    fill(scheduler, 900, priority=-1000)
    assert started(scheduler) == [*range(64)] and started(scheduler) == []  # all but the reserve
    for id in range(1000, 1010):  # more newcomers than the reserve has slots
        scheduler.add(sequence(id, client=f"new {id}", priority=1000))
    assert started(scheduler) == [*range(1000, 1008)]
    scheduler.finish(0, "abort")
    assert started(scheduler) == [1008]  # whatever the priority of the flood's next
    scheduler.finish(1, "abort")
    scheduler.finish(1008, "abort")
    assert started(scheduler) == [1009]
    assert scheduler.num_running == 71  # the reserve has a slot left for the next newcomer


def test_a_second_client_grows_to_its_share():
    scheduler = fair(16)
    fill(scheduler, 200, client="first")
    fill(scheduler, 200, client="second", first=1000)
    fill(scheduler, 200, client="heavy", first=2000, weight=2.0)
    running = started(scheduler)
    r = random.Random(0)
    for _ in range(100):
        scheduler.finish(running.pop(r.randrange(len(running))), "abort")
        running += started(scheduler)
    first, second, heavy = (sum(id // 1000 == k for id in running) for k in range(3))
    assert abs(first - second) <= 2 and abs(heavy - first - second) <= 2
    assert first + second + heavy >= 16


def test_clients_that_run_their_share_leave_the_reserve_to_others():
    scheduler = fair(16)
    fill(scheduler, 200, client="first")
    fill(scheduler, 200, client="second", first=1000)
    assert len(started(scheduler)) == 16 and started(scheduler) == []
    fill(scheduler, 1, client="third", first=2000)
    assert started(scheduler) == [2000]


def test_without_fair_queueing_all_clients_share_one_queue():
    scheduler = Scheduler(1, 10, CONFIG, is_fair=False)
    for id, (client, priority) in enumerate([("a", 0), ("a", 5), ("b", 7), ("a", 6), ("b", -1)]):
        scheduler.add(sequence(id, client=client, priority=priority))
    order = []
    for _ in range(5):
        order += started(scheduler)
        scheduler.finish(order[-1], "abort")
    assert order == [4, 0, 1, 3, 2]


def test_newcomers_start_before_what_waits_of_a_flood():
    scheduler = fair(4)
    fill(scheduler, 100)
    for id in started(scheduler):
        scheduler.finish(id, "abort")
    started(scheduler)
    fill(scheduler, 3, client="new", first=1000)
    assert started(scheduler) == [1000]  # the reserve
    running, order = [4, 5, 6, 7], []
    while len(order) < 2:
        scheduler.finish(running.pop(), "abort")
        order += started(scheduler)
    assert 1001 in order


def test_the_queue_keeps_places_for_clients_that_use_few():
    scheduler = fair(2, max_waiting=10)
    fill(scheduler, 12)
    assert refuses(scheduler, "flood")
    started(scheduler)
    fill(scheduler, 1, client="new", first=20)
    assert started(scheduler) == [20]  # the reserved slot
    fill(scheduler, 2, client="new", first=21)
    assert refuses(scheduler, "new") and refuses(scheduler, "other")
    assert scheduler.num_waiting == 10 + 10 // 4


def test_candidates_of_accepted_requests_take_nobodys_place():
    """Some hundred of them wait for one client, which has a single request."""
    scheduler = fair(2, max_waiting=10)
    fill(scheduler, 8)
    for id in range(100, 400):
        scheduler.add(sequence(id, client="draws", masks=False, must_run=True))
    for client in ("flood", "new"):
        scheduler.add(sequence(1000 + ord(client[0]), client=client))
    started(scheduler)
    for id in range(100, 400):
        scheduler.finish(id, "abort")
    assert scheduler.queue.num_extra == 0


def test_places_in_the_queue_are_shared_by_weight():
    queue = FairQueue(max_running=8)
    counts, weights = {"light": 3, "heavy": 5}, {"light": 1.0, "heavy": 3.0, "new": 4.0}

    def of(client):
        return sequence(0, client=client, weight=weights[client])

    for client, count in counts.items():
        for _ in range(count):
            queue.add(of(client))
    # Parts of 8 places: 2 and 6; with the new client 1, 3 and 4.
    assert [queue.is_below_part(of(client).request, 8) for client in weights] == [False, True, True]
    queue.add(of("heavy"))
    assert not queue.is_below_part(of("heavy").request, 8)


def test_without_a_queue_a_newcomer_takes_a_reserved_slot():
    scheduler = fair(2, max_waiting=0)
    fill(scheduler, 2)
    assert refuses(scheduler, "flood") and started(scheduler) == [0, 1]
    fill(scheduler, 1, client="new", first=10)
    assert refuses(scheduler, "other")
    assert started(scheduler) == [10]


def test_the_expected_wait_counts_who_comes_before():
    scheduler = fair(4)
    request = sequence(0, client="new").request
    assert scheduler.expected_wait(request, None) == scheduler.expected_wait(request, 2.0) == 0.0
    assert Scheduler(1, 10, CONFIG).expected_wait(request, 2.0) == 0.0  # a free slot, none reserved
    fill(scheduler, 24, first=1)
    started(scheduler)
    flood = sequence(0, client="flood").request
    assert scheduler.expected_wait(flood, None) == 0.0
    assert scheduler.expected_wait(flood, 2.0) == 10.5  # 20 wait
    assert scheduler.expected_wait(request, 2.0) == 0.0  # a reserved slot
    fill(scheduler, 3, client="new", first=100)
    started(scheduler)
    assert scheduler.expected_wait(request, 2.0) == 3.0  # 2 of its own and 3 of the flood
    assert scheduler.expected_wait(sequence(0, client="third").request, 2.0) == 1.5
    heavy = sequence(0, client="heavy", weight=4.0).request
    assert scheduler.expected_wait(heavy, 2.0) == 0.5


def num_calls(number):
    """Calls of functions in which `number` sequences of half as many clients come and end."""
    scheduler, calls, r = Scheduler(64, 20_000, CONFIG, reserve=8), 0, random.Random(0)

    def count(*_):
        nonlocal calls
        calls += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for id in range(number):
            s = sequence(id, client=str(r.randrange(number // 2)), priority=r.randint(-1, 1))
            scheduler.expected_wait(s.request, 1.0)
            scheduler.add(s)
        while len(scheduler):
            for s, _ in scheduler.schedule(0.0, 10_000).starts:
                scheduler.finish(s.id, "abort")
            if len(scheduler) > number // 20:
                for id in r.sample(range(number), 10):
                    scheduler.finish(id, "timeout")
    finally:
        sys.setprofile(before)
    queue = scheduler.queue
    assert not queue._clients and not queue._lengths and not queue.num_waiting
    assert len(queue._places) < 100
    return calls


def test_many_sequences_of_many_clients_take_few_calls_each_and_leave_nothing_behind():
    """Eight times as many take hardly more than eight times as long, and 64 times with an operation of O(n)."""
    assert num_calls(2400) < 14 * num_calls(300)


# -- which prompts run --


@pytest.mark.parametrize(("is_fair", "order"), [(True, [3, 2, 0, 4, 1]), (False, [0, 1, 2, 3, 4])])
def test_clients_take_turns_and_the_shortest_prompt_is_first(is_fair, order):
    scheduler = fair(8)
    scheduler.queue.is_fair = is_fair
    for id, (client, prompt) in enumerate([("a", 9), ("a", 8), ("b", 6), ("c", 5), ("c", 2)]):
        scheduler.add(sequence(id, prompt=prompt, client=client))
    scheduler.schedule(0.0, 12)  # all start, none runs
    assert [s.id for s in scheduler._in_order(1.0)] == order


def test_who_waits_for_anothers_prompt_lends_it_its_place():
    config = GPTConfig(vocab_size=300, block_size=128, n_layer=20)
    scheduler = Scheduler(8, 8, config)
    header = list(range(100, 140))
    for id in range(4):
        scheduler.add(Sequence(Submit(id, [id] * 200, 1, SamplingParams(), client="a")))
    scheduler.add(Sequence(Submit(4, header + [1] * 100, 1, SamplingParams(), client="a")))
    scheduler.schedule(0.0, 10)
    scheduler.add(Sequence(Submit(5, [*header, 2], 1, SamplingParams(), client="b")))
    scheduler.schedule(0.0, 2)
    assert [s.id for s in scheduler.prefilling] == [0, 1, 2, 3, 4]
    assert scheduler._in_order(1.0)[0].id == 4  # as b's only prompt needs its first 40 characters


@pytest.mark.parametrize("max_tokens", [5, 0])
def test_a_long_prompt_runs_beside_ever_new_short_ones(max_tokens):
    """Which alone would take the whole of each step. A ninth of the characters is its client's part."""
    scheduler, ids = fair(16), itertools.count(1)
    options = {} if max_tokens else {"logprobs": 0, "score_from": 1}
    long = sequence(0, prompt=600, max_tokens=max_tokens, client="long", **options)
    scheduler.add(long)
    steps = 0
    while not (long.is_finished or scheduler.is_decoding[long.slot or 0]):
        for s in list(scheduler):
            if s is not long and s.num_prompt_left == 0:
                scheduler.finish(s.id, "abort")
        for _ in range(8 - len(scheduler)):
            scheduler.add(sequence(next(ids), prompt=9, client=f"short {next(ids)}"))
        plan = scheduler.schedule(0.0, 32, behind(scheduler.queue.clients, 32.0) or None)
        for piece in plan.pieces:  # a character takes a second
            scheduler.queue.client_of(piece.sequence).used += len(piece.ids)
        settle(scheduler.queue.clients, sum(len(piece.ids) for piece in plan.pieces), 32.0)
        run(scheduler, plan)
        steps += 1
        assert steps < 9 * 600 / 20
