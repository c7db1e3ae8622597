"""Frames between HTTP processes and inference processes, over Unix sockets in a private folder.

Each worker listens on a socket. Each HTTP process connects to the workers of all listed checkpoints. A frame is a
4-byte length and a MessagePack array. Nothing is pickled. Each side notices the death of the other at once. This module
knows the messages of wire.py, but not their meaning.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import select
import selectors
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import msgspec

from service.wire import Abort, FromWorker, Hello, Refused, Step, Submits, ToWorker

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.25  # longest blocking receive, so that the caller can send a heartbeat
MAX_UNSENT_BYTES = 64 << 20  # per HTTP process; beyond it, the process counts as hung
BACKLOG_BYTES = 1 << 20  # unsent; beyond it, the worker waits for an HTTP process that reads
BACKLOG_SECONDS = 0.05  # without progress; then the process does not count as reading until it reads


class WorkerFound(msgspec.Struct):
    """For an HTTP process, instead of a frame: a worker that runs this version of a checkpoint answers."""

    version: int


class WorkerLost(msgspec.Struct):
    """For an HTTP process, instead of a frame: the connection ended, and the worker's sequences are lost."""

    version: int


class ConsumerLost(msgspec.Struct):
    """For a worker, instead of a frame: the connection ended, and nobody waits for the process's sequences."""


WorkerEvent = Step | Refused | WorkerFound | WorkerLost

_HEADER = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode

Message = TypeVar("Message")


def _frame(message: ToWorker | FromWorker) -> bytes:
    body = _encode(message)
    return _HEADER.pack(len(body)) + body


class _Reader(Generic[Message]):
    """Reassembles messages from a byte stream."""

    def __init__(self, messages: Any):
        self._decode = msgspec.msgpack.Decoder(messages).decode
        self._unparsed = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that `data` completes."""
        unparsed = self._unparsed
        unparsed += data
        messages: list[Message] = []
        start = 0
        with memoryview(unparsed) as view:
            while len(unparsed) - start >= _HEADER.size:
                (length,) = _HEADER.unpack_from(unparsed, start)
                end = start + _HEADER.size + length
                if len(unparsed) < end:
                    break
                messages.append(self._decode(view[start + _HEADER.size : end]))
                start = end
        del unparsed[:start]
        return messages


class _Connection:
    """A worker's connection to one HTTP process. A process that does not read does not block the engine."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.consumer_id: int | None = None  # until its Hello
        self.reader: _Reader[ToWorker] = _Reader(ToWorker)
        self.unsent = bytearray()
        self.is_reading = True


class WorkerSide:
    """A worker's connections to all HTTP processes."""

    def __init__(self, folder: Path, worker_id: int, version: int = 0):
        self._version = version
        path = folder / f"{worker_id}.sock"
        path.unlink(missing_ok=True)  # left by a dead worker
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._connections: dict[int, _Connection] = {}
        self._messages: list[tuple[int, Submits | Abort | ConsumerLost]] = []

    @property
    def is_connected(self) -> bool:
        return bool(self._connections)

    def wake(self) -> None:
        """End a blocking `receive`; safe in a signal handler."""
        with contextlib.suppress(BlockingIOError):
            self._wake_write.send(b"\0")

    def receive(self, block: bool) -> list[tuple[int, Submits | Abort | ConsumerLost]]:
        """Return messages with the HTTP process of each. With `block`, wait up to IDLE_SECONDS for one."""
        for key, events in self._selector.select(IDLE_SECONDS if block else 0):
            if key.fileobj is self._listener:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ, _Connection(sock))
            elif key.fileobj is self._wake_read:
                self._wake_read.recv(4096)
            else:
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    self._read(key.data)
        messages, self._messages = self._messages, []
        return messages

    def send(self, item: FromWorker, consumer_id: int) -> None:
        """Send to an HTTP process. The frame is dropped if that process is gone.

        A socket takes little at a time, so frames of log-probabilities would pile up. This waits while they are read.
        """
        connection = self._connections.get(consumer_id)
        if connection is None:
            return
        connection.unsent += _frame(item)
        self._flush(connection)
        while len(connection.unsent) > BACKLOG_BYTES and connection.is_reading:
            writable = select.poll()
            writable.register(connection.sock, select.POLLOUT)
            if writable.poll(1000 * BACKLOG_SECONDS):
                self._flush(connection)
            else:
                connection.is_reading = False
        if len(connection.unsent) > MAX_UNSENT_BYTES:
            logger.error("HTTP process %s does not read: closing its connection", connection.consumer_id)
            self._drop(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._drop(connection)
        for message in connection.reader.feed(data):
            if isinstance(message, Hello):
                connection.consumer_id = message.consumer_id
                self._connections[message.consumer_id] = connection
                self.send(Hello(message.consumer_id, self._version), message.consumer_id)
            elif connection.consumer_id is not None:
                self._messages.append((connection.consumer_id, message))

    def _flush(self, connection: _Connection) -> None:
        try:
            sent = connection.sock.send(connection.unsent)
            del connection.unsent[:sent]
            connection.is_reading = True
        except BlockingIOError:
            pass
        except OSError:
            return self._drop(connection)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.sock, events, connection)

    def _drop(self, connection: _Connection) -> None:
        if connection.sock.fileno() < 0:  # a write failed before this read
            return
        self._selector.unregister(connection.sock)
        connection.sock.close()
        connection.unsent.clear()
        if connection.consumer_id is not None and self._connections.get(connection.consumer_id) is connection:
            del self._connections[connection.consumer_id]
            self._messages.append((connection.consumer_id, ConsumerLost()))


class HttpSide:
    """An HTTP process's connections to workers, renewed after a loss. Needs the event loop.

    It calls `received(worker_id, message)` for each message.
    """

    RETRY_SECONDS = 0.05

    def __init__(self, folder: Path, consumer_id: int, received: Callable[[int, WorkerEvent], None]):
        self._folder, self._consumer_id = folder, consumer_id
        self._received = received
        self._connections: dict[int, _WorkerConnection] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by worker
        self.connected: dict[int, list[int]] = {}  # the connected workers of each version, by its id

    def connect(self, workers: set[int]) -> None:
        """Stay connected to these workers, and to no others."""
        for worker in self._tasks.keys() - workers:
            self._tasks.pop(worker).cancel()
        for worker in workers - self._tasks.keys():
            self._tasks[worker] = asyncio.create_task(self._keep_connected(worker))

    def send(self, item: Submits | Abort, worker_id: int) -> None:
        """Send to a worker. The frame is dropped if that worker is gone, which WorkerLost reports."""
        connection = self._connections.get(worker_id)
        if connection is not None:
            connection.send(_frame(item))

    async def _keep_connected(self, worker_id: int) -> None:
        loop, path = asyncio.get_running_loop(), str(self._folder / f"{worker_id}.sock")
        received = functools.partial(self._received, worker_id)
        while True:
            try:
                _, connection = await loop.create_unix_connection(lambda: _WorkerConnection(received), path)
            except OSError:  # the worker does not listen
                await asyncio.sleep(self.RETRY_SECONDS)
                continue
            connection.send(_frame(Hello(self._consumer_id)))
            try:
                # A worker that is being killed may still accept connections, so it counts only when it answers.
                waiting: list[asyncio.Future[Any]] = [connection.greeted, connection.ended]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if connection.greeted.done():
                    self._connections[worker_id] = connection
                    self.connected.setdefault(connection.greeted.result(), []).append(worker_id)
                    received(WorkerFound(connection.greeted.result()))
                    await connection.ended
                    logger.warning("lost the connection to worker %d", worker_id)
            finally:
                connection.transport.close()
                if self._connections.get(worker_id) is connection:
                    del self._connections[worker_id]
                    version = connection.greeted.result()
                    self.connected[version].remove(worker_id)
                    if not self.connected[version]:
                        del self.connected[version]
                    received(WorkerLost(version))

    async def close(self) -> None:
        tasks = [*self._tasks.values()]
        self.connect(set())
        await asyncio.gather(*tasks, return_exceptions=True)


class _WorkerConnection(asyncio.Protocol):
    """An HTTP process's connection to one worker. It hands out each message when it is whole."""

    def __init__(self, received: Callable[[Any], None]):
        self._received = received
        self._reader: _Reader[FromWorker] = _Reader(FromWorker)
        self._unsent: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self.greeted: asyncio.Future[int] = self._loop.create_future()  # the version that the worker runs
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)  # uvloop has a class of its own

    def send(self, frame: bytes) -> None:
        """Send a frame with the others of this turn of the event loop, because each write wakes the worker."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(frame)

    def _flush(self) -> None:
        if not self.transport.is_closing():  # `ended` reports that the worker is gone
            self.transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            if isinstance(message, Hello):
                self.greeted.set_result(message.version)
            else:
                self._received(message)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
