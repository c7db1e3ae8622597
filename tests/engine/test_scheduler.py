import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.scheduler import QueueFullError, Scheduler
from service.engine.sequence import Sequence, StopMatcher
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


class Slots:
    """A model of the cache: slot -> id of the sequence whose keys and values it holds."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.content = {}

    def apply_moves(self):
        for source, target in self.scheduler.moves:
            self.content[target] = self.content.get(source)
        self.scheduler.moves.clear()

    def check(self):
        s = self.scheduler
        for slot, sequence in enumerate(s.decoding):
            assert self.content[slot] == sequence.id
        for slot, sequence in enumerate(s.aside, len(s.decoding)):
            assert sequence.num_prefilled == 0 or self.content[slot] == sequence.id
        assert s.num_running <= s.max_running


@given(st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_sequences_keep_their_slots_under_random_events(seed):
    """Arrivals, chunked prefill, pauses, completions and aborts in any order."""
    r = random.Random(seed)
    scheduler = Scheduler(max_running=r.randint(1, 6), max_waiting=20, prefill_budget=r.randint(1, 12))
    slots = Slots(scheduler)
    ended, added = [], 0
    for step in range(80):
        while r.random() < 0.5 and scheduler.num_waiting < 10:
            scheduler.add(sequence(added, prompt=r.randint(1, 10), max_tokens=r.randint(1, 6)))
            added += 1
        for s in list(scheduler):
            if r.random() < 0.05:
                assert scheduler.finish(s.id, "abort") is s
                ended.append(s.id)
        for s in list(scheduler.decoding):
            if r.random() < 0.1:
                scheduler.set_aside(s)
        for s in list(scheduler.aside):
            if not s.num_prompt_left and r.random() < 0.3:
                scheduler.take_back(s)
        pieces = scheduler.schedule(float(step))
        assert sum(p.count for p in pieces) <= scheduler.prefill_budget
        slots.apply_moves()
        slots.check()
        for p in pieces:
            slots.content[scheduler.slot(p.sequence)] = p.sequence.id
        decoded = list(scheduler.decoding)
        for p in pieces:
            scheduler.prefilled(p)
            if p.sequence.num_prefilled == len(p.sequence.request.prompt):
                decoded.append(p.sequence)
        for s in decoded:
            s.append(0)
            if s.is_finished:
                scheduler.remove(s)
                ended.append(s.id)
        slots.apply_moves()
        slots.check()
    assert len(ended) == len(set(ended))
    assert set(ended) | {s.id for s in scheduler} == set(range(added))


def test_queue_is_bounded_and_ordered_by_priority():
    scheduler = Scheduler(max_running=1, max_waiting=2, prefill_budget=100)
    for id in range(3):
        scheduler.add(sequence(id))
    with pytest.raises(QueueFullError, match="queue full .limit 2"):
        scheduler.add(sequence(3))
    scheduler.schedule(0.0)
    assert [s.id for s in scheduler.aside] == [0]
    scheduler.finish(0, "abort")
    scheduler.add(sequence(4, priority=-1))
    scheduler.schedule(1.0)
    assert [s.id for s in scheduler.aside] == [4]


def test_long_prompt_is_split_across_steps():
    scheduler = Scheduler(max_running=4, max_waiting=9, prefill_budget=10)
    scheduler.add(sequence(0, prompt=25))
    scheduler.add(sequence(1, prompt=3))
    seen = []
    for step in range(3):
        pieces = scheduler.schedule(float(step))
        seen.append([(p.sequence.id, p.count) for p in pieces])
        for p in pieces:
            scheduler.prefilled(p)
    assert seen == [[(0, 10)], [(0, 10)], [(0, 5), (1, 3)]]
    assert [s.id for s in scheduler.decoding] == [0, 1]


def test_finished_sequence_cannot_finish_again():
    scheduler = Scheduler(2, 2, 10)
    scheduler.add(sequence(0))
    assert scheduler.finish(0, "abort").finish_reason == "abort"
    assert scheduler.finish(0, "timeout") is None


def test_sequences_aborted_while_waiting_are_removed_from_the_queue():
    scheduler = Scheduler(max_running=1, max_waiting=10, prefill_budget=10)
    scheduler.add(sequence(0))
    scheduler.schedule(0.0)
    for id in range(1, 5000):
        scheduler.add(sequence(id))
        scheduler.finish(id, "abort")
    assert len(scheduler._waiting) < 200
    assert scheduler.num_waiting == 0
