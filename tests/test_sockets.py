"""The connection between HTTP processes and workers, over real sockets."""

import asyncio
import contextlib
import fcntl
import multiprocessing
import shutil
import socket
import struct
import tempfile
import termios
import threading
from pathlib import Path

import pytest

from service.sockets import (
    BACKLOG_BYTES,
    MAX_UNSENT_BYTES,
    ConsumerLost,
    SocketTransport,
    WorkerFound,
    WorkerLost,
    _frame,
)
from service.wire import Abort, Delta, Hello, Step
from tests.helpers import logprobs_of, run_with_sockets

HTTP = 7  # the number of the HTTP process


def new_transport():
    return SocketTransport(1, Path(tempfile.mkdtemp(prefix="chargpt-test-")))


def work(transport):
    worker = transport.listen(0)
    while True:
        worker.receive(block=True)


async def wait_for(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def unread(writer):
    """Bytes written to a socket and not yet read by its peer."""
    if writer.is_closing():
        return 0
    return struct.unpack("i", fcntl.ioctl(writer.get_extra_info("socket"), termios.TIOCOUTQ, b"\0" * 4))[0]


class Relay:
    """Forwards bytes between a worker and an HTTP process, in pieces of a chosen size."""

    def __init__(self, worker_path, path):
        self.worker_path, self.path = worker_path, path
        self.piece_bytes = None  # maximum size of a forwarded piece; None: no limit
        self.flows = asyncio.Event()  # cleared: reading stops
        self.flows.set()
        self.to_worker = self.to_http = 0  # bytes forwarded
        self.connections = set()

    async def __aenter__(self):
        self.server = await asyncio.start_unix_server(self._connected, self.path)
        return self

    async def __aexit__(self, *_):
        self.flows.set()
        self.cut()
        self.server.close()
        await wait_for(lambda: not self.connections)

    def cut(self):
        for writer in list(self.connections):
            writer.transport.abort()

    async def _connected(self, http_reader, http_writer):
        worker_reader, worker_writer = await asyncio.open_unix_connection(self.worker_path)
        self.connections |= {http_writer, worker_writer}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(http_reader, worker_writer, "to_worker"))
                group.create_task(self._forward(worker_reader, http_writer, "to_http"))
        except* ConnectionError:
            pass
        finally:
            for writer in (http_writer, worker_writer):
                writer.transport.abort()
                self.connections.remove(writer)

    async def _forward(self, reader, writer, direction):
        while True:
            await self.flows.wait()
            data = await reader.read(self.piece_bytes or 1 << 20)
            await self.flows.wait()
            if not data:
                raise ConnectionError
            writer.write(data)
            await writer.drain()
            setattr(self, direction, getattr(self, direction) + len(data))
            while self.piece_bytes and unread(writer):
                await asyncio.sleep(0)


class Pair:
    """A worker, an HTTP process and the relay between them."""

    def __init__(self, worker, relay, folder):
        self.worker, self.relay, self.folder = worker, relay, folder
        self.at_worker, self.at_http = [], []

    def receive(self):
        self.at_worker += self.worker.receive(block=False)

    async def until(self, condition):
        """Receives at the worker until `condition` holds."""
        async with asyncio.timeout(60):
            while not condition():
                self.receive()
                await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def connected(piece_bytes=None):
    worker, http = new_transport(), new_transport()
    try:
        async with Relay(str(worker.folder / "0.sock"), str(http.folder / "0.sock")) as relay:
            relay.piece_bytes = piece_bytes
            pair = Pair(worker.listen(0), relay, worker.folder)
            pair.http = http.connect(HTTP, lambda *event: event[1] == WorkerFound() or pair.at_http.append(event))
            await pair.until(lambda: pair.http.connected_workers == [0] and pair.worker.is_connected)
            yield pair
            await pair.http.close()
    finally:
        shutil.rmtree(worker.folder)
        shutil.rmtree(http.folder)


def step(number, length=3):
    return Step.of([Delta(number, list(range(length)))])


def test_worker_counts_as_connected_from_its_hello_until_its_connection_ends():
    """A dying worker accepts connections until its socket closes; nothing may be sent to it."""
    transport, received = new_transport(), []
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(transport,))

    async def connect():
        with socket.socket(socket.AF_UNIX) as dying:
            dying.bind(str(transport.folder / "0.sock"))
            dying.listen()
            http = transport.connect(7, lambda number, frame: received.append((number, frame)))
            accepted, _ = await asyncio.to_thread(dying.accept)
            assert await asyncio.to_thread(accepted.recv, 1)  # the HTTP process has connected and identified itself
            assert http.connected_workers == []
        accepted.close()
        worker.start()
        await wait_for(lambda: http.connected_workers == [0])
        assert received == [(0, WorkerFound())]
        worker.kill()
        await wait_for(lambda: http.connected_workers == [])
        assert received == [(0, WorkerFound()), (0, WorkerLost())]
        await http.close()

    asyncio.run(connect())
    worker.join()
    shutil.rmtree(transport.folder)


@pytest.mark.parametrize("piece_bytes", [1, 3, None])
def test_frames_arrive_whole_and_in_order_for_any_fragmentation(piece_bytes):
    async def main():
        async with connected(piece_bytes) as pair:
            for number in range(20):
                pair.http.send(Abort(number), 0)  # all in one write
                pair.worker.send(step(number), HTTP)
            await pair.until(lambda: len(pair.at_worker) == len(pair.at_http) == 20)
            assert pair.at_worker == [(HTTP, Abort(number)) for number in range(20)]
            assert pair.at_http == [(0, step(number)) for number in range(20)]

    run_with_sockets(main)


def test_only_the_hung_reader_is_disconnected_at_the_buffer_limit():
    async def main():
        async with connected() as pair:
            others = []
            # The same worker, without the relay.
            other = SocketTransport(1, pair.folder).connect(8, lambda _, event: others.append(event))
            await pair.until(lambda: other.connected_workers == [0])

            pair.worker.send(step(0, 1_000_000), HTTP)
            await pair.until(lambda: pair.at_http)
            frame_bytes = pair.relay.to_http
            pair.relay.flows.clear()
            frames = 0
            while not pair.at_worker:
                pair.worker.send(step(1, 1_000_000), HTTP)
                pair.worker.send(step(frames), 8)
                pair.receive()
                frames += 1
                assert frames * frame_bytes < 2 * MAX_UNSENT_BYTES, "unsent data is unbounded"
            assert frames * frame_bytes > MAX_UNSENT_BYTES
            assert (frames - 3) * frame_bytes < MAX_UNSENT_BYTES  # socket buffers hold little
            assert pair.at_worker == [(HTTP, ConsumerLost())]
            pair.worker.send(step(2), HTTP)  # dropped
            await pair.until(lambda: len(others) == 1 + frames)
            assert others == [WorkerFound(), *(step(number) for number in range(frames))]

            # The reader resumes, finds the connection closed and reconnects.
            pair.relay.flows.set()
            await pair.until(lambda: (0, WorkerLost()) in pair.at_http)
            await pair.until(lambda: pair.http.connected_workers == [0])
            pair.at_http.clear()
            pair.worker.send(step(3), HTTP)
            await pair.until(lambda: pair.at_http)
            assert pair.at_http == [(0, step(3))]
            await other.close()

    run_with_sockets(main)


def test_frames_larger_than_a_socket_takes_do_not_pile_up_for_a_process_that_reads():
    """A worker sends once per step, and a socket takes 0.2 MB: frames of log-probabilities are larger."""
    transport = new_transport()
    logprobs, received = logprobs_of(range(100_000)), []

    def send(worker):
        while not worker.is_connected:
            worker.receive(block=True)
        (connection,) = worker._connections.values()
        for number in range(150):  # 120 MB
            worker.send(Step.of([Delta(number, [], logprobs=logprobs)]), HTTP)
            assert len(connection.unsent) < 16 * BACKLOG_BYTES  # more than one only if the reader pauses
        while connection.unsent:
            worker.receive(block=True)

    async def main():
        http = transport.connect(HTTP, lambda _, event: received.append(type(event)))
        await asyncio.to_thread(send, transport.listen(0))
        await wait_for(lambda: received == [WorkerFound] + [Step] * 150)
        await http.close()

    try:
        run_with_sockets(main)
    finally:
        shutil.rmtree(transport.folder)


def test_partial_frame_is_discarded_when_its_connection_ends():
    async def main():
        async with connected(1) as pair:
            passed = pair.relay.to_http
            pair.worker.send(step(1, 100_000), HTTP)
            await pair.until(lambda: pair.relay.to_http > passed + 10)
            passed = pair.relay.to_worker
            pair.http.send(Abort(1), 0)
            await pair.until(lambda: pair.relay.to_worker > passed)
            assert pair.at_http == pair.at_worker == []
            pair.relay.cut()
            await pair.until(lambda: pair.at_http and pair.at_worker)
            assert pair.at_http == [(0, WorkerLost())]
            assert pair.at_worker == [(HTTP, ConsumerLost())]
            pair.relay.piece_bytes = None
            await pair.until(lambda: pair.http.connected_workers == [0])
            pair.at_http.clear()
            pair.at_worker.clear()
            pair.worker.send(step(2), HTTP)
            pair.http.send(Abort(2), 0)
            await pair.until(lambda: pair.at_http and pair.at_worker)
            assert (pair.at_http, pair.at_worker) == ([(0, step(2))], [(HTTP, Abort(2))])

    run_with_sockets(main)


def test_wake_interrupts_a_blocking_receive(monkeypatch):
    monkeypatch.setattr("service.sockets.IDLE_SECONDS", None)  # no timeout

    async def main():
        transport = new_transport()
        worker = transport.listen(0)
        for is_early in (True, False):
            thread = threading.Thread(target=worker.receive, args=(True,))
            if is_early:
                worker.wake()
            thread.start()
            if not is_early:
                worker.wake()
            thread.join()
        shutil.rmtree(transport.folder)

    run_with_sockets(main)


def test_a_connection_that_was_replaced_takes_nothing_with_it():
    """An HTTP process that died is replaced by one of the same number; the end of the old connection comes later."""

    async def main():
        transport = new_transport()
        worker = transport.listen(0)
        path = str(transport.folder / "0.sock")
        hello = _frame(Hello(HTTP))
        (_, old), (reader, new) = [await asyncio.open_unix_connection(path) for _ in range(2)]
        for writer in (old, new):
            writer.write(hello)
            for _ in range(10):
                await asyncio.sleep(0.01)
                worker.receive(block=False)
        old.close()
        for _ in range(10):
            await asyncio.sleep(0.01)
            assert worker.receive(block=False) == []
        worker.send(Step.of([Delta(1, [2])]), HTTP)
        async with asyncio.timeout(10):
            assert await reader.read(1000)
        new.close()
        shutil.rmtree(transport.folder)

    run_with_sockets(main)
