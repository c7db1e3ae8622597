"""Pauses of long work, and a large answer whose client is gone."""

import asyncio

import pytest

from service.http.connection import pause
from service.http.connection.pause import Pause
from service.http.routes.stream import send_json

pytestmark = pytest.mark.anyio


async def test_a_large_answer_ends_when_its_client_is_gone():
    encoded, written = [], []

    class Leaving:
        """What of a Request writes an answer."""

        @property
        def is_gone(self):
            return len(encoded) > 50

        async def begin(self, headers):
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
