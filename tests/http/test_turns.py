"""Handlers end where they wait when they are cancelled, and a large answer when its client is gone."""

import asyncio
import contextlib
import socket
import time

import pytest

from service.http.answering import coroutines as turns
from service.http.answering.coroutines import Pause, Run
from service.http.answering.stream import send_json
from service.http.connection.limits import BURST_SECONDS, TURN_SECONDS, Connections, Loop
from service.settings import BUNDLED, Settings

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "wait", [lambda: asyncio.sleep(60), lambda: asyncio.Event().wait(), lambda: asyncio.to_thread(int)]
)
async def test_a_run_is_cancelled_where_it_waits(wait):
    seen = []

    class Recorded(Run):
        def ended(self, error):
            seen.append(type(error))

    async def handler():
        try:
            while True:
                await wait()
        except asyncio.CancelledError:
            seen.append("told")
            await asyncio.sleep(0)  # what must still be done
            raise

    run = Recorded(handler())
    run.go_on()
    run.cancel()
    async with asyncio.timeout(10):
        while len(seen) < 2:
            await asyncio.sleep(0)
    assert seen == ["told", asyncio.CancelledError]


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
    monkeypatch.setattr(turns, "BUSY_SECONDS", 0.0)
    steps = []

    async def work(name):
        pause = Pause()
        for _ in range(3):
            steps.append(name)
            await pause.if_due()

    a, b, c = tasks = [asyncio.create_task(work(name)) for name in "abc"]
    await asyncio.sleep(0)
    assert steps == ["a", "b", "c"]
    b.cancel()
    while not all(task.done() for task in tasks):
        before = len(steps)
        await asyncio.sleep(0)
        assert len(steps) <= before + 1
    assert steps == ["a", "b", "c", "a", "c", "a", "c"]


async def test_requests_of_a_burst_are_begun_in_several_turns_and_in_order():
    connections, loop, begun = Connections(Settings(checkpoint=BUNDLED)), asyncio.get_running_loop(), []

    class Asking:
        transport = None

        def __init__(self, number):
            self.number = number

        def take_turn(self):
            begun.append(self.number)
            time.sleep(0.6 * TURN_SECONDS)

    first, *others = map(Asking, range(7))
    assert not connections.must_wait(first, loop)
    time.sleep(BURST_SECONDS)
    assert all([connections.must_wait(each, loop) for each in others])
    turns_taken = 0
    while len(begun) < len(others):
        await asyncio.sleep(0)
        turns_taken += 1
    assert begun == [1, 2, 3, 4, 5, 6] and turns_taken >= 3
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not connections.must_wait(first, loop)


def test_connections_are_accepted_several_in_a_turn():
    made, turn = [], 0

    class Made(asyncio.Protocol):
        def connection_made(self, transport):
            made.append(turn)
            transport.abort()

    async def main():
        nonlocal turn
        with contextlib.ExitStack() as stack, socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            server = await asyncio.get_running_loop().create_server(Made, sock=listener, ssl=None, backlog=100)
            for _ in range(32):
                stack.enter_context(socket.create_connection(listener.getsockname()))
            while len(made) < 32:
                await asyncio.sleep(0)
                turn += 1
            server.close()
            await server.wait_closed()

    with contextlib.closing(Loop()) as loop:
        loop.run_until_complete(main())
    assert made[-1] - made[0] < 16
