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
from service.engine.scheduler import BusyError, Scheduler
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
        if not piece.sequence.num_left_to_run and not piece.sequence.is_finished:
            if piece.sequence.request.max_tokens:
                piece.sequence.append(0)
            else:
                piece.sequence.finish_reason = "length"


@given(st.integers(0, 10_000))
@settings(max_examples=80)
def test_sequences_keep_their_slots_under_random_events(seed):
    """Arrivals, prompts in pieces, copies, completions, moves and aborts in any order.

    Prompts are of two characters, so many share a beginning; some clients weigh more, and copies stay in a group.
    `cache` has the ids that a runner would hold.
    """
    r = random.Random(seed)
    length = r.choice([1, 1, 3])  # of pieces, but for a prompt's last
    scheduler = Scheduler(r.randint(1, 8), 20, CONFIG, length)
    cache = [[] for _ in range(scheduler.slots)]  # the ids whose keys each slot has seen
    groups = [""] * scheduler.slots
    ended, added, copied, moved = [], 0, 0, 0

    def copy(target, found):
        nonlocal copied
        assert found.length <= len(cache[found.source]) <= max(CONFIG.block_size, found.length)
        assert found.length % length == 0 and found.is_ready
        assert groups[found.source] == groups[target]
        cache[target] = cache[found.source][: found.length]
        copied += 1

    def append(piece):
        text, done = piece.sequence.to_run.tolist(), len(cache[piece.sequence.slot])
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
        for s in filter(None, list(scheduler.by_slot)):
            if r.random() < 0.05 and (scheduler.is_decoding[s.slot] or not s.num_prefilled):
                scheduler._move(s)
                moved += 1
        budget = r.randint(1, 30)
        decoding = scheduler.is_decoding.copy()
        plan = scheduler.schedule(float(step), budget)
        decoding = np.flatnonzero(decoding & scheduler.is_decoding)
        assert sum(len(piece.ids) for piece in plan.pieces) <= max(budget, length)
        for s, it in plan.starts:
            cache[s.slot], groups[s.slot] = [], s.request.reuse_group
            if it:
                copy(s.slot, it)
        assert [s.slot for s in scheduler.by_slot if s] == [i for i, s in enumerate(scheduler.by_slot) if s]
        held_up = scheduler.prefilling + scheduler.copying
        assert held_up == [] or plan.starts or plan.pieces, "nobody waits for a sequence that does not run"
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
    event(f"copies: {copied > 0}, moves: {moved > 0}")
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


def fair(slots=8, max_waiting=1000, **options):
    return Scheduler(slots, max_waiting, CONFIG, **options)


def fill(scheduler, count, client="flood", first=0, **options):
    """Adds sequences of a client that run until they are ended."""
    for id in range(first, first + count):
        scheduler.add(sequence(id, max_tokens=1000, client=client, **options))


def started(scheduler, budget=10_000):
    plan = scheduler.schedule(0.0, budget)
    run(scheduler, plan)
    return [s.id for s, _ in plan.starts]


def write(scheduler, count=100):
    """Each decoding sequence writes so many characters."""
    slots = np.flatnonzero(scheduler.is_decoding)
    scheduler.decoded(slots, np.full(len(slots), count))
    for slot in slots:
        scheduler.by_slot[slot].extend([0] * count)


def running(scheduler):
    """The number of running sequences of each client."""
    return Counter(s.request.client for s in scheduler.by_slot if s)


def behind_are(scheduler, *names):
    """The clients, to be passed as those that are behind."""
    return {client for client in scheduler.queue.clients if client.name in names}


def refuses(scheduler, client):
    with pytest.raises(BusyError, match=f"queue full .limit {scheduler.max_waiting}"):
        scheduler.add(sequence(10_000, client=client))
    return True


@given(st.integers(0, 10_000), st.integers(2, 5))
@settings(max_examples=50)
def test_a_place_goes_to_the_client_that_runs_the_fewest(seed, clients):
    """Whatever ends when, and whatever it weighs."""
    r = random.Random(seed)
    queue, ids, running = FairQueue(60), itertools.count(), []
    for client in range(clients):
        for _ in range(400):
            options = {"weight": 1.0 + client, "priority": r.randint(-1000, 1000)}
            queue.add(sequence(next(ids), client=str(client), **options))
    for step in range(300):
        if step > 60:
            ended = running.pop(r.randrange(len(running)))
            ended.finish_reason = "stop"
            queue.remove(ended)
        counts = Counter(int(s.request.client) for s in running)
        queue.begin({client for client in queue.clients if client.name != "0"} if step % 2 else None)
        running.append(queue.pop())
        started = int(running[-1].request.client)
        assert counts[started] == min(counts[client] for client in range(step % 2, clients))


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


def test_a_newcomer_takes_a_slot_of_a_flood():
    """Of its newest sequence, whatever the priority of the newcomer's; it goes on before those that came later."""
    scheduler = fair(64)
    fill(scheduler, 900, priority=-1000)
    assert started(scheduler) == [*range(64)]
    write(scheduler)
    fill(scheduler, 1, client="new", first=1000, priority=1000)
    assert started(scheduler) == [1000] and started(scheduler) == []
    assert running(scheduler) == {"flood": 63, "new": 1} and scheduler.num_waiting == 837
    scheduler.finish(1000, "abort")
    assert started(scheduler) == [63]


def test_a_sequence_keeps_its_slot_until_it_has_written_enough():
    config = GPTConfig(vocab_size=300, block_size=128, n_layer=4)
    scheduler = Scheduler(8, 100, config)
    for id in range(8):
        scheduler.add(Sequence(Submit(id, [id] * 600, 1000, SamplingParams(), client="a"), 0.0, config.receptive_field))
    assert started(scheduler) == [*range(8)]
    fill(scheduler, 1, client="b", first=10)
    for _ in range(6):  # of 509 characters that run again, an eighth
        assert started(scheduler) == []
        write(scheduler, 12)
    assert started(scheduler) == [10]
    fill(scheduler, 1, client="c", first=11)
    scheduler.finish(6, "abort")
    assert started(scheduler) == [11]
    write(scheduler)
    scheduler.finish(5, "abort")
    assert started(scheduler) == [7]
    fill(scheduler, 1, client="d", first=12)
    scheduler.finish(7, "abort")
    assert running(scheduler) == {"a": 5, "b": 1, "c": 1}


def test_what_has_not_run_yet_gives_its_slot_at_once():
    scheduler = fair(8)
    fill(scheduler, 8, prompt=100, score_from=1, logprobs=0)
    assert started(scheduler, 64) == [*range(8)]
    assert [s.id for s in scheduler.by_slot if s.num_prefilled] == [0]
    fill(scheduler, 3, client="new", first=10)
    assert started(scheduler, 64) == [10]  # an eighth of the slots
    assert [s.id for s in scheduler.by_slot] == [*range(7), 10]


def test_what_waits_for_a_prefix_gives_its_place_at_once():
    """It keeps a free slot until another sequence has run the prefix."""
    scheduler = Scheduler(8, 100, GPTConfig(vocab_size=300, block_size=128, n_layer=20))
    fill(scheduler, 8, prompt=250)
    assert started(scheduler, 16) == [0] and len(scheduler.copying) == 7
    fill(scheduler, 1, client="new", first=10)
    assert started(scheduler, 16) == [10]
    assert [s.id for s, _, _ in scheduler.copying] == [1, 2, 3, 4, 5, 6] and scheduler.num_running == 8
    scheduler.finish(3, "abort")
    assert (scheduler.num_running, scheduler.num_free) == (7, 1)
    scheduler.finish(7, "abort")
    assert len(scheduler) == 7 and scheduler.num_waiting == 0


def test_a_client_takes_few_slots_for_short_texts_and_its_part_for_long_ones():
    scheduler = fair(64)
    fill(scheduler, 200)
    started(scheduler)
    write(scheduler)
    fill(scheduler, 200, client="second", first=1000)
    for _ in range(20):
        started(scheduler)
    assert running(scheduler) == {"flood": 56, "second": 8}
    for _ in range(25):
        write(scheduler, 32)
        run(scheduler, scheduler.schedule(0.0, 10_000, behind_are(scheduler, "second")))
    assert running(scheduler) == {"flood": 32, "second": 32}


def test_a_client_that_is_behind_loses_nothing():
    scheduler = fair(8)
    fill(scheduler, 20)
    started(scheduler)
    write(scheduler)
    fill(scheduler, 1, client="new", first=100)
    plan = scheduler.schedule(0.0, 10_000, behind_are(scheduler, "flood", "new"))
    assert not plan.starts
    plan = scheduler.schedule(0.0, 10_000, behind_are(scheduler, "new"))
    assert [s.id for s, _ in plan.starts] == [100]


def test_more_clients_than_slots_take_turns():
    """Each runs one long text, and one that is behind takes a slot of the one that is furthest ahead.

    What runs again is at most a fifth of what is decoded, and eight receptive fields.
    """
    scheduler, turns, num_again, num_decoded = fair(4), Counter(), 0, 0
    for id in range(7):
        submit = Submit(id, [id], 10_000, SamplingParams(), client=str(id))
        scheduler.add(Sequence(submit, 0.0, CONFIG.receptive_field))
    for _ in range(300):
        plan = scheduler.schedule(0.0, 10_000, behind(scheduler.queue.clients, 0.1) or None)
        num_again += sum(len(piece.ids) for piece in plan.pieces if piece.sequence.goes_on)
        run(scheduler, plan)
        write(scheduler, 12)
        num_decoded += 12 * int(scheduler.is_decoding.sum())
        turns += running(scheduler)
        for client in running(scheduler):
            scheduler.queue._clients[client].used = 0.25
        settle(scheduler.queue.clients, 1.0, 0.1)
    assert len(turns) == 7 and max(turns.values()) < 2 * min(turns.values())
    assert num_decoded / 10 < num_again <= num_decoded / 5 + 9 * CONFIG.receptive_field


def test_sequences_that_have_not_begun_do_not_change_places():
    """Of more clients than slots with one sequence each; they would never begin."""
    scheduler = fair(4)
    for id in range(5):
        scheduler.add(Sequence(Submit(id, [id] * 100, 5, SamplingParams(), client=str(id))))
    plan = scheduler.schedule(0.0, 16)
    assert [s.id for s, _ in plan.starts] == [0, 1, 2, 3]
    run(scheduler, plan)
    for _ in range(5):
        assert not scheduler.schedule(0.0, 16, behind_are(scheduler, "4")).starts


def test_a_second_client_grows_to_its_part():
    scheduler = fair(16)
    fill(scheduler, 200, client="first")
    fill(scheduler, 200, client="second", first=1000)
    fill(scheduler, 200, client="heavy", first=2000, weight=2.0)
    ids = started(scheduler)
    r = random.Random(0)
    for _ in range(100):
        scheduler.finish(ids.pop(r.randrange(len(ids))), "abort")
        ids += started(scheduler)
    assert sorted(running(scheduler).values()) == [5, 5, 6]


def test_newcomers_start_before_what_waits_of_a_flood():
    scheduler = fair(4)
    fill(scheduler, 100)
    assert started(scheduler) == [0, 1, 2, 3]
    fill(scheduler, 3, client="new", first=1000)
    order = []
    for id in range(4):
        scheduler.finish(id, "abort")
        order += started(scheduler)
    assert order == [1000, 1001, 4, 5]


def test_the_queue_keeps_places_for_clients_that_use_few():
    scheduler = fair(2, max_waiting=10)
    fill(scheduler, 12)
    assert refuses(scheduler, "flood")
    started(scheduler)
    fill(scheduler, 2, client="new", first=20)
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
    queue = FairQueue(8)
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


def test_without_a_queue_a_newcomer_takes_a_slot():
    scheduler = fair(2, max_waiting=0)
    fill(scheduler, 2)
    assert refuses(scheduler, "flood") and started(scheduler) == [0, 1]
    write(scheduler)
    fill(scheduler, 1, client="new", first=10)
    assert refuses(scheduler, "other") and refuses(scheduler, "new")
    assert started(scheduler) == [10]
    assert refuses(scheduler, "flood")  # what was moved takes no place of others, and gives none


def test_the_expected_wait_counts_who_comes_before():
    scheduler = fair(4)
    request = sequence(0, client="new").request
    assert scheduler.expected_wait(request, None) == scheduler.expected_wait(request, 2.0) == 0.0
    fill(scheduler, 24, first=1)
    started(scheduler)
    flood = sequence(0, client="flood").request
    assert scheduler.expected_wait(flood, None) == 0.0
    assert scheduler.expected_wait(flood, 2.0) == 10.5  # 20 wait
    assert scheduler.expected_wait(request, 2.0) == 0.0  # it takes a slot
    fill(scheduler, 3, client="new", first=100)
    assert scheduler.expected_wait(request, 2.0) == 4.0  # 3 of its own, and 4 of the flood
    assert scheduler.expected_wait(sequence(0, client="third").request, 2.0) == 0.0
    for client in range(3):
        fill(scheduler, 1, client=str(client), first=200 + client)
    assert scheduler.expected_wait(sequence(0, client="last").request, 2.0) == 3.0  # one of each of five, and itself


def num_calls(number):
    """Calls of functions in which `number` sequences of half as many clients come and end."""
    scheduler, calls, r = Scheduler(72, 20_000, CONFIG), 0, random.Random(0)

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


def test_clients_take_turns_and_the_shortest_prompt_is_first():
    scheduler = fair(8)
    for id, (client, prompt) in enumerate([("a", 9), ("a", 8), ("b", 6), ("c", 5), ("c", 2)]):
        scheduler.add(sequence(id, prompt=prompt, client=client))
    scheduler.schedule(0.0, 12)  # all start, none runs
    assert [s.id for s in scheduler._in_order(1.0)] == [3, 2, 0, 4, 1]


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
            if s is not long and s.num_left_to_run == 0:
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
