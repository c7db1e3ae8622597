"""Turns of connections, pauses of long work, and a large answer whose client is gone."""

import asyncio
import time

import pytest

from service.http.answering import pause
from service.http.answering.pause import Pause
from service.http.answering.stream import send_json
from service.http.connection.turns import TURNS_SECONDS, Turns

pytestmark = pytest.mark.anyio


async def test_a_large_answer_ends_when_its_client_is_gone():
    encoded, written = [], []

    class Leaving:
        """What of a Request writes an answer."""

        is_whole = is_finished = False

        @property
        def is_gone(self):
            return len(encoded) > 50

        def begin(self, headers):
            assert not written

        async def write(self, data):
            written.append(data)

    def parts():
        for i in range(1000):
            encoded.append(i)
            yield b"x" * 10_000

    await send_json(Leaving(), parts())
    assert written and len(encoded) < 70


async def test_of_long_works_one_goes_on_in_a_turn_and_each_in_its_own(monkeypatch):
    monkeypatch.setattr(pause, "BUSY_SECONDS", 0.0)
    steps = []

    async def work(name):
        own = Pause()
        for _ in range(3):
            steps.append(name)
            await own.if_due()

    a, b, c = tasks = [asyncio.create_task(work(name)) for name in "abc"]
    await asyncio.sleep(0)
    assert steps == ["a", "b", "c"]
    b.cancel()
    while not all(task.done() for task in tasks):
        before = len(steps)
        await asyncio.sleep(0)
        assert len(steps) <= before + 1
    assert steps == ["a", "b", "c", "a", "c", "a", "c"]


async def test_connections_take_turns_in_order_and_one_that_asks_again_goes_behind_the_others():
    turns_of_the_loop, taken, line = 0, [], Turns()

    class Asking:
        def __init__(self, number):
            self.number, self.left = number, 3

        def take_turn(self):
            taken.append((turns_of_the_loop, self.number))
            time.sleep(0.6 * TURNS_SECONDS)
            self.left -= 1
            if self.left:
                line.add(self)

    for number in range(4):
        line.add(Asking(number))
    while len(taken) < 12:
        await asyncio.sleep(0)
        turns_of_the_loop += 1
    assert [number for _, number in taken] == [0, 1, 2, 3] * 3
    assert len({turn for turn, _ in taken}) >= 6, "others are let in after TURNS_SECONDS"
    last = Asking(4)
    line.add(last)  # the line was empty
    while last.left:
        await asyncio.sleep(0)
