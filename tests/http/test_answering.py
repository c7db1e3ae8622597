"""Turns of long work, and large answers: their JSON in parts, and a client that is gone."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.http.connection import turns
from service.http.routes.json_parts import json_parts, list_parts, sliced, text_parts
from service.http.routes.stream import send_json

pytestmark = pytest.mark.anyio


async def test_a_large_answer_ends_when_its_client_is_gone():
    encoded, written = [], []

    class Leaving:
        """What of a Request writes an answer."""

        client = "client"

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


async def until(condition):
    """Returns the number of iterations of the loop until the condition holds."""
    for count in range(1000):
        if condition():
            return count
        await asyncio.sleep(0)
    raise AssertionError("it never holds")


async def test_of_long_work_one_slice_runs_and_then_short_work_alone(monkeypatch):
    monkeypatch.setattr(turns, "SLICE_SECONDS", 0.0)  # each part is a slice
    steps, iterations = [], 0

    async def work(name, client):
        for _ in range(2):
            await turns.wait_for_turn(client)
            steps.append((name, iterations))

    tasks = [asyncio.create_task(work(name, name[0])) for name in ("a1", "a2", "a3", "b1", "c1")]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        iterations += 1
    names, places = zip(*steps, strict=True)
    assert names == ("a1", "a1", "b1", "c1", "a2", "b1", "c1", "a3", "a2", "a3")  # clients in turn
    gaps = [later - earlier for earlier, later in zip(places, places[1:], strict=False)]
    assert min(gaps) > turns.REST_TURNS


async def test_work_that_is_cancelled_leaves_its_turn_to_others(monkeypatch):
    monkeypatch.setattr(turns, "SLICE_SECONDS", 0.0)
    done = []

    async def work(name):
        await turns.wait_for_turn("client")
        done.append(name)

    tasks = {name: asyncio.create_task(work(name)) for name in "abcd"}
    await asyncio.sleep(0)
    assert done == ["a"]
    tasks["b"].cancel()  # while it waits
    await until(lambda: turns._lines[asyncio.get_running_loop()]._waiting == {})
    tasks["c" if "c" not in done else "d"].cancel()  # perhaps when its turn has just come
    await until(lambda: all(task.done() for task in tasks.values()))
    assert done in (["a", "c"], ["a", "d"], ["a", "c", "d"])
    await turns.wait_for_turn("another")


async def test_short_work_needs_no_turn(monkeypatch):
    monkeypatch.setattr(turns, "FREE_SECONDS", 1e9)
    pause = turns.Pause("client")
    for _ in range(100):
        await pause.if_due()
    assert asyncio.get_running_loop() not in turns._lines


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
        lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    ),
    st.integers(1, 3),
)
def test_json_in_parts_is_that_of_the_whole(content, size):
    def in_parts(value):
        """The same with an iterator in place of each text and list."""
        if isinstance(value, dict):
            return {name: in_parts(part) for name, part in value.items()}
        if isinstance(value, list):
            return list_parts(sliced([in_parts(part) for part in value], size))
        return text_parts(sliced(value, size)) if isinstance(value, str) else value

    assert json.loads(b"".join(json_parts(in_parts(content)))) == content
