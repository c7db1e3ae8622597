"""Frames between the HTTP processes and the inference processes, over Unix sockets of a private folder.

Each worker listens on a socket of its own; each HTTP process connects to every worker. A frame is a 4-byte
length and a MessagePack array; nothing is pickled. Either side sees at once when the other one dies. It
stands behind LitServe's abstract transport: `send` in a worker, `areceive` in an HTTP process.

Knows nothing of HTTP, text or the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import selectors
import shutil
import signal
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
from litserve.transport.base import MessageTransport

logger = logging.getLogger(__name__)

IDLE_SECONDS = 1.0  # a blocking receive ends after so long, so that whoever counts idle time can
MAX_UNSENT_BYTES = 64 << 20  # to one HTTP process; past it that process counts as hung


class Hello(msgspec.Struct, gc=False, array_like=True, tag=True):
    """First frame of a connection: which HTTP process this is. The worker sends it back, as a sign that it reads."""

    consumer_id: int


class Sampling(msgspec.Struct, gc=False, array_like=True):
    """The fields of service.model.sampling.SamplingParams, which would load torch."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()


class Submit(msgspec.Struct, gc=False, array_like=True, tag=True):
    """A sequence to run. `id` is unique among all HTTP processes."""

    id: int
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    timeout_seconds: float
    stop: tuple[tuple[int, ...], ...] = ()
    stop_pattern: bytes | None = None  # a packed Automaton
    include_stop: bool = False
    min_tokens: int = 0
    constraint: bytes | None = None  # a packed Automaton
    may_leave: bool = True
    logprobs: int | None = None
    logprob_ids: tuple[int, ...] = ()
    score_from: int | None = None
    priority: int = 0
    request_id: str = ""  # for the log


class Abort(msgspec.Struct, gc=False, array_like=True, tag=True):
    id: int


class Refused(msgspec.Struct, gc=False, array_like=True, tag=True):
    """A submitted sequence that the worker has no room for."""

    id: int
    message: str
    retry_after_seconds: int


class Logprobs(msgspec.Struct, gc=False, array_like=True):
    """The log-probabilities of some ids, in nats: of each, and of `len(top_ids) / len(values)` others of its place."""

    values: list[float]
    top_ids: list[int]
    top_values: list[float]


class Delta(msgspec.Struct, gc=False, array_like=True):
    """New ids of a sequence; the last one has a finish reason, one of them the times before the first character."""

    id: int
    ids: list[int]
    finish_reason: str | None = None
    scheduled_at: float | None = None  # the times by time.monotonic(), which all processes of a machine share
    prefilled_at: float | None = None
    ended_at: float | None = None  # with the finish reason
    logprobs: Logprobs | None = None  # of the ids
    prompt_logprobs: Logprobs | None = None  # of further characters of the prompt


class Step(msgspec.Struct, gc=False, array_like=True, tag=True):
    """All that one engine step has for one HTTP process."""

    deltas: list[Delta]
    load: int  # sequences the worker holds, running and waiting


class WorkerLost(msgspec.Struct, gc=False, array_like=True, tag=True):
    """Made by the HTTP side itself when a connection ends: what ran there is gone."""


class ConsumerLost(msgspec.Struct, gc=False, array_like=True, tag=True):
    """Made by the worker itself when a connection ends: nobody waits for what came from there."""


ToWorker = Hello | Submit | Abort
FromWorker = Step | Refused

_HEADER = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode
_decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
_decode_from_worker = msgspec.msgpack.Decoder(Hello | FromWorker).decode


def _frame(message: ToWorker | FromWorker) -> bytes:
    body = _encode(message)
    return _HEADER.pack(len(body)) + body


class SocketTransport(MessageTransport):
    """One object for both sides; each process uses the half that is its own."""

    def __init__(self, num_workers: int):
        self.num_workers = num_workers
        self.folder = Path(tempfile.mkdtemp(prefix="chargpt-"))  # mode 0700
        self._worker: _WorkerSide | None = None
        self._http: _HttpSide | None = None

    def __reduce__(self) -> Any:  # crosses to a spawned worker as its folder alone
        return _reopen, (self.num_workers, self.folder)

    def close(self, **kwargs: Any) -> None:
        """Called by LitServe when it begins to stop; the sockets are still needed until the workers end."""

    def remove(self) -> None:
        """Delete the folder, after all processes have ended."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- inference process --

    def listen(self, worker_id: int) -> None:
        self._worker = _WorkerSide(self.folder / f"{worker_id}.sock")

    @property
    def is_connected(self) -> bool:
        assert self._worker is not None
        return self._worker.is_connected

    def wake(self) -> None:
        """End a blocking `receive`; safe in a signal handler."""
        if self._worker is not None:
            self._worker.wake()

    def receive(self, block: bool) -> list[tuple[int, ToWorker | ConsumerLost]]:
        """What has arrived, with the HTTP process it came from; waits for something, for IDLE_SECONDS, if `block`."""
        assert self._worker is not None
        return self._worker.receive(block)

    def send(self, item: FromWorker, consumer_id: int) -> None:
        """Send a frame to an HTTP process; dropped where that process has gone."""
        assert self._worker is not None
        self._worker.send(item, consumer_id)

    # -- HTTP process --

    def connect(self, consumer_id: int, received: Callable[[int, FromWorker | WorkerLost], None]) -> None:
        """Keep a connection to every worker, and give each frame with the worker's number to `received`.

        Must be called in the event loop.
        """
        sockets = [self.folder / f"{worker_id}.sock" for worker_id in range(self.num_workers)]
        self._http = _HttpSide(sockets, consumer_id, received)

    @property
    def connected_workers(self) -> list[int]:
        return [] if self._http is None else self._http.connected

    def send_to_worker(self, item: Submit | Abort, worker_id: int) -> None:
        """Send a frame to a worker; lost where that worker is gone, of which `areceive` tells."""
        assert self._http is not None
        self._http.send(item, worker_id)

    async def areceive(self, timeout: float | None = None, consumer_id: int | None = None) -> Any:
        """LitServe's way to receive, one frame at a time; `connect` hands them out with nothing in between."""
        raise NotImplementedError("frames go to what connect() was given")

    async def disconnect(self) -> None:
        if self._http is not None:
            await self._http.close()


def _reopen(num_workers: int, folder: Path) -> SocketTransport:
    transport = SocketTransport.__new__(SocketTransport)
    transport.num_workers, transport.folder = num_workers, folder
    transport._worker = transport._http = None
    return transport


class _Connection:
    """A worker's connection to one HTTP process: never blocks the engine."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.consumer_id: int | None = None  # until its Hello
        self.unparsed = bytearray()
        self.unsent = bytearray()


class _WorkerSide:
    def __init__(self, path: Path):
        path.unlink(missing_ok=True)  # of a worker that died
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
        self._messages: list[tuple[int, ToWorker | ConsumerLost]] = []

    @property
    def is_connected(self) -> bool:
        return bool(self._connections)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_write.send(b"\0")

    def receive(self, block: bool) -> list[tuple[int, ToWorker | ConsumerLost]]:
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

    def send(self, item: Hello | FromWorker, consumer_id: int) -> None:
        connection = self._connections.get(consumer_id)
        if connection is None:
            return
        connection.unsent += _frame(item)
        self._flush(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        unparsed = connection.unparsed
        unparsed += data
        start = 0
        while len(unparsed) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(unparsed, start)
            end = start + _HEADER.size + length
            if len(unparsed) < end:
                break
            message = _decode_to_worker(memoryview(unparsed)[start + _HEADER.size : end])
            start = end
            if isinstance(message, Hello):
                connection.consumer_id = message.consumer_id
                self._connections[message.consumer_id] = connection
                self.send(message, message.consumer_id)
            elif connection.consumer_id is not None:
                self._messages.append((connection.consumer_id, message))
        del unparsed[:start]

    def _flush(self, connection: _Connection) -> None:
        try:
            sent = connection.sock.send(connection.unsent)
            del connection.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        if len(connection.unsent) > MAX_UNSENT_BYTES:
            logger.error("HTTP process %s does not read; its connection is closed", connection.consumer_id)
            self._drop(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.sock, events, connection)

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.sock)
        connection.sock.close()
        if connection.consumer_id is not None:
            del self._connections[connection.consumer_id]
            self._messages.append((connection.consumer_id, ConsumerLost()))


class _HttpSide:
    RETRY_SECONDS = 0.05

    def __init__(self, sockets: list[Path], consumer_id: int, received: Callable[[int, FromWorker | WorkerLost], None]):
        self._consumer_id = consumer_id
        self._received = received
        self._connections: dict[int, _Frames] = {}
        self._tasks = [asyncio.create_task(self._keep(i, path)) for i, path in enumerate(sockets)]

    @property
    def connected(self) -> list[int]:
        return list(self._connections)

    def send(self, item: Submit | Abort, worker_id: int) -> None:
        connection = self._connections.get(worker_id)
        if connection is not None:
            connection.send(_frame(item))

    async def _keep(self, worker_id: int, path: Path) -> None:
        """Connect, wait until the worker goes, and begin again."""
        loop = asyncio.get_running_loop()
        received = functools.partial(self._received, worker_id)
        while True:
            try:
                _, connection = await loop.create_unix_connection(lambda: _Frames(received), str(path))
            except OSError:  # not there yet, or not there now
                await asyncio.sleep(self.RETRY_SECONDS)
                continue
            connection.send(_frame(Hello(self._consumer_id)))
            try:
                # A process that is being killed may still have the socket that takes connections.
                await asyncio.wait([connection.greeted, connection.ended], return_when=asyncio.FIRST_COMPLETED)
                if connection.greeted.done():
                    self._connections[worker_id] = connection
                    await connection.ended
                    logger.warning("the connection to worker %d has ended", worker_id)
            finally:
                connection.transport.close()
                if self._connections.pop(worker_id, None) is not None:
                    received(WorkerLost())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Frames(asyncio.Protocol):
    """Frames from one worker, each handed out as soon as it is whole."""

    def __init__(self, received: Callable[[FromWorker], None]):
        self._received = received
        self._unparsed = b""
        self._unsent: list[bytes] = []
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)  # uvloop's own class

    def send(self, frame: bytes) -> None:
        """Send a frame, with the others of this turn of the event loop: each write wakes the worker."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame)

    def _flush(self) -> None:
        if not self.transport.is_closing():  # else the worker is gone, of which `ended` tells
            self.transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        data = self._unparsed + data if self._unparsed else data
        start, view = 0, memoryview(data)
        while len(data) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(data, start)
            end = start + _HEADER.size + length
            if len(data) < end:
                break
            frame = _decode_from_worker(view[start + _HEADER.size : end])
            start = end
            if isinstance(frame, Hello):
                self.greeted.set_result(None)
            else:
                self._received(frame)
        self._unparsed = data[start:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def rest_garbage_collector() -> None:
    """Leave alone what start-up made, and look for cycles rarely: requests make next to none."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel (Linux) for a signal when the parent dies, so that no process outlives the service."""
    PR_SET_PDEATHSIG = 1
    if os.uname().sysname == "Linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
