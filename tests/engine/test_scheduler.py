import math
import random

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from service.engine.scheduler import QueueFullError, Scheduler
from service.engine.sequence import Sequence, StopMatcher
from service.model.config import GPTConfig
from service.model.params import SamplingParams
from service.wire import Submit


def sequence(id, prompt=3, max_tokens=5, **options):
    return Sequence(Submit(id, list(range(prompt)), max_tokens, SamplingParams(), **options))


# -- stop sequences --


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.text("abc", max_size=30))
@settings(deadline=None)
def test_matcher_finds_the_first_stop_and_holds_the_longest_prefix(stops, text):
    matcher = StopMatcher(tuple(tuple(map(ord, s)) for s in stops))
    for end in range(1, len(text) + 1):
        matched = matcher.push(ord(text[end - 1]))
        complete = [len(s) for s in stops if text[:end].endswith(s)]
        assert matched == (max(complete) if complete else None)
        if complete:
            return
        prefixes = [k for s in stops for k in range(len(s)) if text[:end].endswith(s[:k])]
        assert matcher.held == max(prefixes)


def test_possible_stop_prefixes_are_held_until_ruled_out():
    s = sequence(0, max_tokens=20, stop=((7, 8, 9),))
    emitted = []
    for id, expected in [(1, [1]), (7, []), (8, []), (7, [7, 8]), (8, []), (5, [7, 8, 5]), (7, []), (8, []), (9, [])]:
        s.append(id)
        new = s.emit()[0]
        assert new == expected
        emitted += new
    assert s.finish_reason == "stop"
    assert emitted == [1, 7, 8, 7, 8, 5]


def test_held_ids_are_emitted_when_the_sequence_ends_by_length():
    s = sequence(0, max_tokens=2, stop=((7, 8, 9),))
    s.append(7)
    assert s.emit()[0] == []
    s.append(8)
    assert s.finish_reason == "length"
    assert s.emit()[0] == [7, 8]


# -- slots --

CONFIG = GPTConfig(vocab_size=9, block_size=8, n_layer=4)


def run(scheduler, plan, apply=lambda piece: None):
    """Carries out the pieces of a plan; the first character after a prompt is 0."""
    for piece in plan.pieces:
        apply(piece)
        scheduler.prefilled(piece)
        if not piece.sequence.num_prompt_left and not piece.sequence.is_finished:
            if piece.sequence.request.max_tokens:
                piece.sequence.append(0)
            else:
                piece.sequence.finish_reason = "length"


@given(st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_sequences_keep_their_slots_under_random_events(seed):
    """Arrivals, prompts in pieces, copies, completions and aborts in any order; `cache` is what a runner's would be.

    Prompts are of two characters, so many share a beginning.
    """
    r = random.Random(seed)
    length = r.choice([1, 1, 3])  # of pieces, but for a prompt's last
    scheduler = Scheduler(max_running=r.randint(1, 6), max_waiting=20, config=CONFIG, piece=length)
    cache = [[] for _ in range(scheduler.max_running)]  # the ids whose keys each slot has seen
    ended, added, copied = [], 0, 0

    def copy(it):
        nonlocal copied
        assert it.length <= len(cache[it.source]) <= max(CONFIG.block_size, it.length)
        assert it.length % length == 0
        cache[it.target] = cache[it.source][: it.length]
        copied += 1

    def append(piece):
        text, done = piece.sequence.cut_prompt.tolist(), len(cache[piece.sequence.slot])
        assert cache[piece.sequence.slot] == text[:done], "keys of another text"
        assert done % length == 0 and (piece.is_last or piece.length % length == 0)
        cache[piece.sequence.slot] += text[done : done + piece.length]

    for step in range(80):
        while r.random() < 0.5 and scheduler.num_waiting < 10:
            prompt = [int(r.random() < 0.1) for _ in range(r.choice([1, 5, 20, 25, 60]))]
            submit = Submit(added, prompt, r.randint(0, 6), SamplingParams(), priority=r.randint(0, 1))
            if not submit.max_tokens:
                submit.logprobs = submit.score_from = 1
            scheduler.add(Sequence(submit, 0.0, CONFIG.receptive_field))
            added += 1
        for s in list(scheduler):
            if r.random() < 0.05:
                assert scheduler.finish(s.id, r.choice(["abort", "error"])) is s
                ended.append(s.id)
        decoding = np.flatnonzero(scheduler.is_decoding)
        budget = r.randint(1, 30)
        plan = scheduler.schedule(float(step), budget)
        assert sum(piece.length for piece in plan.pieces) <= max(budget, length)
        for _, it in plan.copies:
            copy(it)
        for s, it in plan.starts:
            cache[s.slot] = []
            if it:
                copy(it)
        assert [s.slot for s in scheduler.by_slot if s] == [i for i, s in enumerate(scheduler.by_slot) if s]
        assert scheduler.prefilling == [] or any(plan), "nobody waits for a sequence that does not run"
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


def make(max_running=1, max_waiting=2):
    return Scheduler(max_running, max_waiting, CONFIG)


def test_queue_is_bounded_and_ordered_by_priority():
    scheduler = make()
    for id in range(3):
        scheduler.add(sequence(id))
    with pytest.raises(QueueFullError, match="queue full .limit 2"):
        scheduler.add(sequence(3))
    scheduler.schedule(0.0, 100)
    assert [s.id for s in scheduler.by_slot] == [0]
    scheduler.finish(0, "abort")
    scheduler.add(sequence(4, priority=-1))
    scheduler.schedule(1.0, 100)
    assert [s.id for s in scheduler.by_slot] == [4]


def test_long_prompt_is_split_across_steps():
    scheduler = make(4)
    scheduler.add(sequence(0, prompt=25))
    scheduler.add(sequence(1, prompt=3))
    seen = []
    for step in range(3):
        plan = scheduler.schedule(float(step), 10)
        seen.append([(piece.sequence.id, piece.length) for piece in plan.pieces])
        run(scheduler, plan)
    assert seen == [[(0, 10)], [(0, 10)], [(0, 5), (1, 3)]]
    assert np.flatnonzero(scheduler.is_decoding).tolist() == [0, 1]


def test_the_lowest_free_slot_goes_first():
    scheduler = make(4, 4)
    for id in range(4):
        scheduler.add(sequence(id))
    scheduler.schedule(0.0, 100)
    for id in (3, 1, 2):
        scheduler.finish(id, "abort")
    scheduler.add(sequence(5))
    (started, _), *_ = scheduler.schedule(0.0, 100).starts
    assert started.slot == 1


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
        copied.append(len(plan.copies) + sum(copy is not None for _, copy in plan.starts))
        assert len(plan.starts) + len(plan.copies) <= 20
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


def test_finished_sequence_cannot_finish_again():
    scheduler = make(2)
    scheduler.add(sequence(0))
    assert scheduler.finish(0, "abort").finish_reason == "abort"
    assert scheduler.finish(0, "timeout") is None


def test_ended_sequences_are_removed_from_the_queue_and_from_the_deadlines():
    scheduler = make(1, 10)
    scheduler.add(sequence(0))
    scheduler.schedule(0.0, 100)
    for id in range(1, 5000):
        scheduler.add(sequence(id, timeout_seconds=1000.0))
        scheduler.finish(id, "abort")
    assert len(scheduler._waiting) < 200
    assert len(scheduler._deadlines) < 200
    assert scheduler.num_waiting == 0


def test_deadlines_come_in_order_of_time():
    scheduler = make(1, 10)
    for id, seconds in enumerate([5.0, 3.0, math.inf, 9.0]):
        scheduler.add(sequence(id, timeout_seconds=seconds))
    assert scheduler.expired(2.9) == []
    assert scheduler.expired(5.0) == [1, 0]
    assert scheduler.expired(100.0) == [3]
