"""An engine in this process: one thread runs it, and any thread may run sequences on it.

It handles ids and numbers only, no text. Callers send messages through queues that are safe in any thread, in signal
handlers and in finalizers, so this module has no locks. Only the engine's thread touches what the calls have in common.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from queue import Empty, SimpleQueue

from service.engine.engine import Engine
from service.wire import Delta, FinishReason, Logprobs, Submit, Tried

logger = logging.getLogger(__name__)


class ModelClosedError(RuntimeError):
    """The model was closed, its engine failed, or this process is a fork."""


class Running:
    """A sequence of a call, and its results so far. Whoever waits for it reads them when it has ended."""

    def __init__(self, number: int, submit: Submit):
        self.number, self.submit = number, submit
        self.ids: list[int] = []
        self.logprobs, self.prompt_logprobs = Logprobs(), Logprobs()
        self.num_unseen = 0
        self.tried: Tried | None = None
        self.finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        self.ids += delta.ids
        if delta.logprobs is not None:
            self.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs.extend(delta.prompt_logprobs)
        self.num_unseen, self.tried, self.finish_reason = delta.num_unseen, delta.tried, delta.finish_reason


class Call:
    """The sequences of one caller, which are numbered from 0. End it with `close`, which frees their slots.

    streams: `parts` gives what each sequence has got since its last part. Otherwise it gives whole sequences.
    """

    def __init__(self, thread: EngineThread, streams: bool = False):
        self._thread, self.streams = thread, streams
        self._numbers = itertools.count()
        self._num_left = 0  # sequences that have not ended
        self.results: SimpleQueue[Running | None] = SimpleQueue()  # None: the engine has ended
        # Only the engine's thread uses these.
        self.pending: deque[Running] = deque()  # not in the engine yet
        self.open: dict[int, Running] = {}  # in the engine, by id

    def add(self, submits: Iterable[Submit]) -> None:
        """Run sequences too. Raises ModelClosedError."""
        sequences = [Running(number, submit) for submit, number in zip(submits, self._numbers, strict=False)]
        self._num_left += len(sequences)
        self._thread.send(self, sequences)

    def parts(self) -> Iterator[Running]:
        """Yield sequences that have ended, or the next parts of them, in order of arrival, until all have ended.

        Raises ModelClosedError.
        """
        while self._num_left:
            sequence = self.results.get()
            if sequence is None:
                raise self._thread.closed()
            self._num_left -= sequence.finish_reason is not None
            yield sequence

    def drop(self, numbers: Iterable[int]) -> None:
        """End sequences with the finish reason abort. Raises ModelClosedError."""
        self._thread.send(self, frozenset(numbers))

    def close(self) -> None:
        """End the sequences that still run. It may be called anywhere, also by a finalizer."""
        self._thread.leave(self)


class EngineThread:
    """Runs an engine until `close`. Each call has at most as many sequences in it as it has slots.

    So a call of many sequences delays the first character of another by little.
    """

    def __init__(self, engine: Engine):
        self._engine, self._window = engine, engine.scheduler.slots
        self._process = os.getpid()
        self._ids = itertools.count()
        self._calls: dict[int, Call] = {}  # of each sequence in the engine
        # Sequences to run, numbers of sequences to end, or None to end all of the call; None: the end of the thread.
        self._inbox: SimpleQueue[tuple[Call, list[Running] | frozenset[int] | None] | None] = SimpleQueue()
        self._has_ended = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="chargpt-engine", daemon=True)
        self._thread.start()

    def send(self, call: Call, sequences: list[Running] | frozenset[int]) -> None:
        """Run sequences, or end those with these numbers. Raises ModelClosedError."""
        if os.getpid() != self._process:
            raise ModelClosedError(
                f"the model was loaded in process {self._process}, and its engine does not run in this fork of it: "
                'load the model in each process, or start processes by multiprocessing\'s method "spawn"'
            )
        self._inbox.put((call, sequences))
        if self._has_ended:  # otherwise its end will find the message
            raise self.closed()

    def leave(self, call: Call) -> None:
        self._inbox.put((call, None))

    def closed(self) -> ModelClosedError:
        """Return the error of a call after the end."""
        error = ModelClosedError(
            "the model is closed" if self._failure is None else "the model's engine has failed: load it again"
        )
        error.__cause__ = self._failure
        return error

    def close(self) -> None:
        """End all sequences, and free the engine. A finalizer may call it."""
        if os.getpid() == self._process:
            self._inbox.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _run(self) -> None:
        try:
            while self._receive():
                for delta in self._engine.step():
                    self._deliver(delta)
        except Exception as error:  # of any type: the device or the library may fail
            logger.exception("the engine has failed")
            self._failure = error
        finally:
            self._end()

    def _receive(self) -> bool:
        """Take in all messages; wait for one if there is nothing to do. Return False at the end."""
        while True:
            try:
                message = self._inbox.get(block=not self._engine.has_work)
            except Empty:
                return True
            if message is None:
                return False
            call, sequences = message
            if sequences is None:
                self._abort(call)
            elif isinstance(sequences, frozenset):
                self._drop(call, sequences)
            else:
                call.pending.extend(sequences)
                self._fill(call)

    def _fill(self, call: Call) -> None:
        while call.pending and len(call.open) < self._window:
            sequence = call.pending.popleft()
            id = sequence.submit.id = next(self._ids)
            try:
                self._engine.submit(sequence.submit)
            except Exception:  # only this call fails
                logger.exception("a sequence could not be queued")
                sequence.finish_reason = "error"
                call.results.put(sequence)
                continue
            call.open[id], self._calls[id] = sequence, call

    def _abort(self, call: Call) -> None:
        call.pending.clear()
        for id in call.open:
            del self._calls[id]
            self._engine.abort(id)
        call.open.clear()

    def _drop(self, call: Call, numbers: frozenset[int]) -> None:
        dropped = [sequence for sequence in call.pending if sequence.number in numbers]
        call.pending = deque(sequence for sequence in call.pending if sequence.number not in numbers)
        for id in [id for id, sequence in call.open.items() if sequence.number in numbers]:
            dropped.append(call.open.pop(id))
            del self._calls[id]
            self._engine.abort(id)
        for sequence in dropped:
            sequence.finish_reason = "abort"
            call.results.put(sequence)
        self._fill(call)

    def _deliver(self, delta: Delta) -> None:
        call = self._calls.get(delta.id)
        if call is None:  # it was aborted
            return
        sequence = call.open[delta.id]
        if call.streams:  # a part of its own, as the caller reads it while the engine runs
            part = Running(sequence.number, sequence.submit)
            part.add(delta)
            call.results.put(part)
        else:
            sequence.add(delta)
            if delta.finish_reason is not None:
                call.results.put(sequence)
        if delta.finish_reason is not None:
            del call.open[delta.id], self._calls[delta.id]
            self._fill(call)

    def _end(self) -> None:
        """Wake every caller, and free the engine."""
        self._has_ended = True
        waiting = set(self._calls.values())
        while True:
            try:
                message = self._inbox.get(block=False)
            except Empty:
                break
            if message is not None:
                waiting.add(message[0])
        for call in waiting:
            call.results.put(None)
        self._engine.runner.close()
