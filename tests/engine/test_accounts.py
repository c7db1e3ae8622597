"""Each client keeps its part of the speed that it has alone, whatever the other one sends.

Deterministic: the calls of the engine take a time by a formula, and characters are random.
"""

import functools
import statistics

import pytest

from service.engine.accounts import Account, behind, settle
from tests.engine.accounts import Candidates, Streams, Texts, speeds

# Texts of that many characters, or candidates for exact answers to that pattern.
KINDS = [1, 2, 4, 16, 100, "(aa|bb){15}", "[ab]*bbbbbb[ab]*\n"]
NUMBERS = [1, 16, 60, 100]  # of streams; 100 take all slots
WEIGHTS = [(1, 1), (1, 10), (10, 1)]


def short(kind, weight=1):
    return (Texts if isinstance(kind, int) else Candidates)("short", kind, weight)


@functools.cache
def alone(kind, number):
    return speeds(short(kind) if number is None else Streams("streams", number))[0]


@functools.cache
def pair(number, kind, weights):
    """The parts of their speeds alone that streams and short texts keep, by their shares; the longest gap of a stream
    in seconds."""
    streams, texts = Streams("streams", number, weights[0]), short(kind, weights[1])
    found = speeds(streams, texts)
    single = alone("", number), alone(kind, None)
    shares = [weight / sum(weights) for weight in weights]
    kept = [speed / most / share for speed, most, share in zip(found, single, shares, strict=True)]
    return min(kept), streams.longest


@pytest.mark.parametrize("number", NUMBERS)
def test_each_of_two_clients_keeps_its_part_of_its_speed(number):
    kept = {(kind, weights): pair(number, kind, weights) for kind in KINDS for weights in WEIGHTS}
    least = min(kept, key=lambda key: kept[key][0])
    assert kept[least][0] >= 0.8, (least, kept[least])
    assert max(gap for (_, weights), (_, gap) in kept.items() if weights == (1, 1)) <= 0.04


def test_most_pairs_of_clients_keep_all_of_their_parts():
    kept = [pair(number, kind, weights)[0] for number in NUMBERS for kind in KINDS for weights in WEIGHTS]
    assert statistics.median(kept) >= 0.95


@pytest.mark.parametrize("weight", [3, 10])
def test_streams_of_two_clients_run_by_weight(weight):
    heavy, light = speeds(Streams("heavy", 32, weight), Streams("light", 32))
    assert 0.8 * weight <= heavy / light <= 1.1 * weight


def test_three_clients_keep_their_parts():
    """Of which one sends prompts of 60 characters."""
    clients = [Streams("streams", 16), Texts("short", 1), Texts("prompts", 4, prompt=60)]
    single = [alone("", 16), alone(1, None), speeds(Texts("prompts", 4, prompt=60))[0]]
    assert all(3 * speed / most >= 0.85 for speed, most in zip(speeds(*clients), single, strict=True))


def test_clients_that_come_and_go_take_no_more_than_their_part():
    """A new client each time, with as much work at once."""

    class Guests(Texts):
        def submit(self, engine, ids):
            if not self.open:
                self.name = f"guest {next(ids)}"
                super().submit(engine, ids)

    streams = Streams("streams", 16)
    kept = speeds(streams, Guests("", 4, number=20))[0]
    assert kept / alone("", 16) >= 0.45


# -- the accounts alone --


def test_a_client_is_behind_by_what_it_did_not_get():
    one, other = Account("one", 1.0), Account("other", 3.0)
    other.used = 0.008
    settle([one, other], 0.008, 0.004)
    assert (one.lag, other.lag, other.used) == (0.002, -0.002, 0.0) and not behind([one, other], 0.004)
    other.used = 0.02
    settle([one, other], 0.02, 0.004)
    assert behind([one, other], 0.004) == {one}


def test_a_lag_is_bounded_and_who_is_behind_is_so_beside_another():
    one, other = Account("one", 1.0), Account("other", 1.0)
    for _ in range(100):
        settle([one, other], 0.01, 0.004)  # nobody gets anything
    assert (one.lag, other.lag) == (0.0, 0.0)
    for _ in range(100):
        other.used = 0.01
        settle([one, other], 0.01, 0.004)
    assert one.lag == pytest.approx(0.02) and other.lag == pytest.approx(-0.02)
