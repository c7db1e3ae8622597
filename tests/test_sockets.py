"""The connection between HTTP processes and workers, over real sockets."""

import asyncio
import contextlib
import itertools
import socket
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.sockets import (
    BACKLOG_BYTES,
    MAX_UNSENT_BYTES,
    ConsumerLost,
    HttpSide,
    WorkerFound,
    WorkerLost,
    WorkerSide,
    _frame,
    _Reader,
)
from service.wire import Abort, Delta, FromWorker, Hello, Step
from tests.helpers import PATIENCE, logprobs_of

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore::ResourceWarning")]
HTTP = 7  # the number of the HTTP process


WORK = """
import pathlib, sys
from service.sockets import WorkerSide
worker = WorkerSide(pathlib.Path(sys.argv[1]), 0, 5)
while True:
    worker.receive(block=True)
"""


def connected(http):
    """The side of an HTTP process, which connects to worker 0."""
    http.connect({0})
    return http


async def wait_for(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


def step(number, length=3):
    return Step.of([Delta(number, list(range(length)))])


async def test_worker_counts_as_connected_from_its_hello_until_its_connection_ends(sockets):
    """A dying worker accepts connections until its socket closes; nothing may be sent to it."""
    received = []
    with socket.socket(socket.AF_UNIX) as dying:
        dying.bind(str(sockets / "0.sock"))
        dying.listen()
        http = connected(HttpSide(sockets, 7, lambda number, frame: received.append((number, frame))))
        accepted, _ = await asyncio.to_thread(dying.accept)
        assert await asyncio.to_thread(accepted.recv, 1)  # the HTTP process has connected and identified itself
        assert http.connected == {}
    accepted.close()
    with subprocess.Popen([sys.executable, "-c", WORK, sockets]) as worker, contextlib.ExitStack() as stack:
        stack.callback(worker.kill)
        await wait_for(lambda: http.connected == {5: [0]})
        assert received == [(0, WorkerFound(5))]
    await wait_for(lambda: http.connected == {})
    assert received == [(0, WorkerFound(5)), (0, WorkerLost(5))]
    await http.close()


@given(st.lists(st.integers(0, 60), max_size=8), st.lists(st.integers(1, 100), min_size=1))
def test_frames_are_put_together_from_any_pieces(lengths, pieces):
    steps = [step(number, length) for number, length in enumerate(lengths)]
    stream, reader, found = b"".join(map(_frame, steps)), _Reader(FromWorker), []
    sizes = itertools.cycle(pieces)
    while stream:
        size = next(sizes)
        found += reader.feed(stream[:size])
        stream = stream[size:]
    assert found == steps


@contextlib.asynccontextmanager
async def hello(path):
    """(reader, writer) of an HTTP process that the test plays, to which the worker answers."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(_frame(Hello(HTTP)))
    yield reader, writer
    writer.close()


async def received_by(worker, condition):
    """What a worker receives until a condition holds."""
    found = []
    async with asyncio.timeout(PATIENCE):
        while not condition(found):
            found += worker.receive(block=False)
            await asyncio.sleep(0)
    return found


async def test_only_the_hung_reader_is_disconnected_at_the_buffer_limit_and_frames_arrive_in_order(sockets):
    others, worker = [], WorkerSide(sockets, 0)
    other = connected(HttpSide(sockets, 8, lambda _, event: others.append(event)))
    await received_by(worker, lambda _: other.connected == {0: [0]})
    for number in range(20):
        other.send(Abort(number), 0)  # all in one write
    assert await received_by(worker, lambda found: len(found) == 20) == [(8, Abort(number)) for number in range(20)]
    async with hello(worker._listener.getsockname()) as (hung, _):  # which reads no more than its buffer takes
        await received_by(worker, lambda _: HTTP in worker._connections)
        frame_bytes, frames, lost = len(_frame(step(1, 1_000_000))), 0, []
        while not lost:
            worker.send(step(1, 1_000_000), HTTP)
            worker.send(step(frames), 8)
            lost = worker.receive(block=False)
            frames += 1
            assert frames * frame_bytes < 2 * MAX_UNSENT_BYTES, "unsent data is unbounded"
        assert frames * frame_bytes > MAX_UNSENT_BYTES
        assert (frames - 3) * frame_bytes < MAX_UNSENT_BYTES  # socket buffers hold little
        assert lost == [(HTTP, ConsumerLost())]
        worker.send(step(2), HTTP)  # dropped
        await received_by(worker, lambda _: len(others) == 1 + frames)
        assert others == [WorkerFound(0), *(step(number) for number in range(frames))]
        assert len(await hung.read()) < 3 * frame_bytes  # the reader resumes, and finds the connection closed
    await other.close()


async def test_frames_larger_than_a_socket_takes_do_not_pile_up_for_a_process_that_reads(sockets, monkeypatch):
    """A worker sends once per step, and a socket takes 0.2 MB: frames of log-probabilities are larger."""
    monkeypatch.setattr("service.sockets.BACKLOG_SECONDS", PATIENCE)
    logprobs, received = logprobs_of(range(100_000)), []

    def send(worker):
        while not worker.is_connected:
            worker.receive(block=True)
        (connection,) = worker._connections.values()
        for number in range(50):  # 40 MB
            worker.send(Step.of([Delta(number, [], logprobs=logprobs)]), HTTP)
            assert len(connection.unsent) <= BACKLOG_BYTES
        while connection.unsent:
            worker.receive(block=True)

    http = connected(HttpSide(sockets, HTTP, lambda _, event: received.append(type(event))))
    await asyncio.to_thread(send, WorkerSide(sockets, 0))
    await wait_for(lambda: received == [WorkerFound] + [Step] * 50)
    await http.close()


async def test_a_partial_frame_is_discarded_when_its_connection_ends(sockets):
    """On both sides, and the HTTP process connects again."""
    accepted, found, worker = [], [], WorkerSide(sockets, 0)
    async with hello(worker._listener.getsockname()) as (_, writer):
        writer.write(_frame(Abort(1))[:-1])
        await writer.drain()
        await received_by(worker, lambda _: HTTP in worker._connections)
    assert await received_by(worker, bool) == [(HTTP, ConsumerLost())]

    async def answer(reader, writer):  # a worker that dies within its first frame
        with contextlib.suppress(asyncio.IncompleteReadError):  # the other side has closed, as it does in the end
            accepted.append(await reader.readexactly(len(_frame(Hello(HTTP)))))
            frame = _frame(step(2, 100_000))
            writer.write(_frame(Hello(HTTP)) + (frame if len(accepted) > 1 else frame[:-1]))
        writer.close()  # once that is written

    (sockets / "0.sock").unlink()
    server = await asyncio.start_unix_server(answer, sockets / "0.sock")
    http = connected(HttpSide(sockets, HTTP, lambda _, event: found.append(event)))
    await wait_for(lambda: len(found) >= 5)
    assert found[:5] == [WorkerFound(0), WorkerLost(0), WorkerFound(0), step(2, 100_000), WorkerLost(0)]
    await http.close()
    server.close()


async def test_wake_interrupts_a_blocking_receive(sockets, monkeypatch):
    monkeypatch.setattr("service.sockets.IDLE_SECONDS", None)  # no timeout
    worker = WorkerSide(sockets, 0)
    for is_early in (True, False):
        thread = threading.Thread(target=worker.receive, args=(True,))
        if is_early:
            worker.wake()
        thread.start()
        if not is_early:
            worker.wake()
        thread.join()


async def test_a_connection_that_was_replaced_takes_nothing_with_it(sockets):
    """An HTTP process that died is replaced by one of the same number; the end of the old connection comes later."""
    worker = WorkerSide(sockets, 0)
    path = str(sockets / "0.sock")
    (_, old), (reader, new) = [await asyncio.open_unix_connection(path) for _ in range(2)]
    known = []
    for writer in (old, new):
        writer.write(_frame(Hello(HTTP)))
        await received_by(worker, lambda _: worker._connections.get(HTTP) not in [None, *known])
        known.append(worker._connections[HTTP])
    old.close()
    await old.wait_closed()
    assert await received_by(worker, lambda _: known[0].sock.fileno() < 0) == []
    worker.send(Step.of([Delta(1, [2])]), HTTP)
    async with asyncio.timeout(PATIENCE):
        assert await reader.read(1000)
    new.close()


async def test_an_http_process_leaves_the_workers_that_are_no_longer_listed(sockets):
    """And connects to the next one at the same place, which may run another version."""
    found = []
    http = HttpSide(sockets, HTTP, lambda worker, event: found.append((worker, event)))
    workers = [WorkerSide(sockets, number, version) for number, version in enumerate((5, 5, 6))]

    async def until(condition):
        async with asyncio.timeout(PATIENCE):
            while not condition():
                for worker in workers:
                    worker.receive(block=False)
                await asyncio.sleep(0)

    http.connect({0, 1})
    await until(lambda: http.connected == {5: [0, 1]})
    http.connect({1, 2})
    await until(lambda: http.connected == {5: [1], 6: [2]})
    await until(lambda: not workers[0].is_connected)
    assert found[2:] == [(0, WorkerLost(5)), (2, WorkerFound(6))]
    workers[0] = WorkerSide(sockets, 0, 7)
    http.connect({0, 1, 2})
    await until(lambda: http.connected == {5: [1], 6: [2], 7: [0]})
    await http.close()
    assert http.connected == {}
