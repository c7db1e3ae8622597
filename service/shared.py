"""Memory that all processes of the service share: heartbeats, loads, counts of ended sequences, clients.

The main process allocates it before it starts any other process. Each number of SharedState has one writer, until the
main process settles the numbers of a dead process. Times are by time.monotonic(), which all processes share.
"""

from __future__ import annotations

import fcntl
import mmap
import multiprocessing
import os
import tempfile
import time
import weakref
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, get_args

import numpy as np

from service.wire import FinishReason

REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
_COLUMNS = ("submitted", "refused", "begun", *REASONS)  # counts of sequences by HTTP process and model
_NUMBER = {column: number for number, column in enumerate(_COLUMNS)}
_WIDTH = len(_COLUMNS)
_RELOADS = ("loaded", "refused", "removed")
_STAGES = ("serving", "leaving", "draining", "stopping")
MAX_NAMES = 256  # checkpoint names in the life of a service
_MAX_VERSIONS = 4096  # versions of checkpoints in use at once


class _OfEach:
    """A number for each process, by its name."""

    def __init__(self, kind: str, names: Iterable[str]):
        self._index = {name: i for i, name in enumerate(names)}
        self._numbers: Any = multiprocessing.RawArray(kind, len(self._index))

    def __getitem__(self, name: str) -> Any:
        return self._numbers[self._index[name]]

    def __setitem__(self, name: str, number: Any) -> None:
        self._numbers[self._index[name]] = number


class SharedState:
    """Numbers of the main process, the HTTP processes and the workers, named main, http-0, …, worker-0, …

    It can be pickled only while a process is spawned.
    """

    def __init__(self, http_processes: int = 1, workers: int = 1):
        self.main_pid = os.getpid()
        self.http_names = [f"http-{i}" for i in range(http_processes)]
        self.worker_names = [f"worker-{i}" for i in range(workers)]
        self._names = ["main", *self.http_names, *self.worker_names]
        self._beats = _OfEach("d", self._names)  # 0: the process is starting
        self.pids = _OfEach("q", self._names)  # 0: the process does not run
        self.pids["main"] = self.main_pid
        self.answering = _OfEach("b", self._names)  # HTTP processes that are connected to a worker
        self._has_run = _OfEach("b", self._names)  # workers that were sent a sequence
        self.restarts = _OfEach("q", self._names)
        self._followed = _OfEach("q", self._names)  # 1 + the generation; 0: none yet
        self._failed = _OfEach("b", self._names)
        self._stage = multiprocessing.RawValue("b", 0)
        self._outstanding = multiprocessing.RawArray("q", http_processes * workers)  # sequences, by worker
        self._sequences = multiprocessing.RawArray("q", http_processes * MAX_NAMES * _WIDTH)
        # Generation of the listing that all processes follow (catalog.py). The main process sets it.
        self.generation = multiprocessing.RawValue("q", 0)
        self._reloads = multiprocessing.RawArray("q", MAX_NAMES * len(_RELOADS))
        self._users = multiprocessing.RawArray("q", http_processes * _MAX_VERSIONS)  # requests, by version

    # -- processes --

    def died(self, name: str) -> None:
        for numbers in (self.pids, self._beats, self.answering, self._has_run, self._followed, self._failed):
            numbers[name] = 0

    def running(self) -> dict[str, int]:
        """The process ids of the running processes."""
        return {name: pid for name in self._names if (pid := self.pids[name])}

    def beat(self, name: str) -> None:
        """Record a heartbeat: the process `name` is neither stopped nor stuck in a call."""
        self._beats[name] = time.monotonic()

    def last_beat(self, name: str) -> float | None:
        """The time of a process's last heartbeat; None: the process is starting."""
        return self._beats[name] or None

    def has_served(self, name: str) -> bool:
        """True if a client may have caused its death: the process accepts connections, or was sent a sequence."""
        return bool(self._beats[name] and (name in self.http_names or self._has_run[name]))

    def is_responsive(self, name: str, seconds: float) -> bool:
        """True if the process has started and had a heartbeat within `seconds`."""
        last = self._beats[name]
        return bool(last) and time.monotonic() - last <= seconds

    def enter(self, stage: str) -> None:
        """Enter a stage of the shutdown: leaving (not ready), draining (refuses new requests) or stopping (ends)."""
        self._stage.value = _STAGES.index(stage)

    def is_in(self, stage: str) -> bool:
        """True in this stage and in later ones."""
        return bool(self._stage.value >= _STAGES.index(stage))

    # -- which checkpoints (catalog.py) --

    def follow(self, name: str, generation: int, has_failed: bool = False) -> None:
        """Record that the process `name` follows a listing. has_failed: it could not load a checkpoint."""
        self._failed[name] = has_failed
        self._followed[name] = generation + 1

    def follows(self, name: str, generation: int) -> bool:
        return self._followed[name] > generation

    def has_failed(self, name: str, generation: int) -> bool:
        """True if the process could not follow this listing or a later one."""
        return self.follows(name, generation) and bool(self._failed[name])

    def use(self, http: int, version: int, change: int) -> None:
        """Add to the count of an HTTP process's running requests that use a version."""
        self._users[http * _MAX_VERSIONS + version % _MAX_VERSIONS] += change

    def is_used(self, version: int) -> bool:
        return any(self._users[version % _MAX_VERSIONS :: _MAX_VERSIONS])

    @property
    def num_busy(self) -> int:
        """Running requests. A shutdown waits for them."""
        return sum(self._users)

    def count_reload(self, row: int, result: str) -> None:
        self._reloads[row * len(_RELOADS) + _RELOADS.index(result)] += 1

    def num_reloads(self, row: int) -> dict[str, int]:
        """Return the number of reloads by result: loaded, refused or removed."""
        return dict(zip(_RELOADS, self._reloads[row * len(_RELOADS) :][: len(_RELOADS)], strict=True))

    # -- sequences; `row` is that of the model's name in the listing --

    def assign(self, http: int, worker: int, change: int) -> None:
        """Add to the count of sequences that an HTTP process has in a worker."""
        self._outstanding[http * len(self.worker_names) + worker] += change
        if change > 0:
            self._has_run[self.worker_names[worker]] = True

    def load(self, worker: int) -> int:
        """Return the number of sequences of all HTTP processes in a worker."""
        return sum(self._outstanding[worker :: len(self.worker_names)])

    def count(self, http: int, row: int, column: str, count: int = 1) -> None:
        """Add to a count of an HTTP process's sequences.

        column: submitted (each must be refused or end once), refused (not accepted), begun (a first delta has come, so
        they are accepted; counted before their end at the latest), or the FinishReason of ended ones.
        """
        self._sequences[(http * MAX_NAMES + row) * _WIDTH + _NUMBER[column]] += count

    def num_sequences(self, row: int, column: str) -> int:
        """Return the number of sequences of all HTTP processes so far, by column. It never decreases."""
        return sum(self._sequences[row * _WIDTH + _NUMBER[column] :: MAX_NAMES * _WIDTH])

    def http_process_died(self, http: int) -> None:
        """Settle the counts of a dead process. Its sequences have ended, because nobody waits for them."""
        workers = len(self.worker_names)
        self._outstanding[http * workers : (http + 1) * workers] = [0] * workers
        self._users[http * _MAX_VERSIONS : (http + 1) * _MAX_VERSIONS] = [0] * _MAX_VERSIONS
        for row in range(MAX_NAMES):
            start = (http * MAX_NAMES + row) * _WIDTH
            submitted, refused, begun, *ended = self._sequences[start : start + _WIDTH]
            lost = submitted - refused - sum(ended)
            self.count(http, row, "begun", sum(ended) + lost - begun)
            self.count(http, row, "abort", lost)


class SharedTable:
    """A row of two times and a count per HTTP process for each of many names, in memory shared by forked processes.

    Use it within `with`, which locks out the other processes. The kernel releases the lock of a process that dies. A
    name without a count whose times have passed is forgotten when its place is needed.
    """

    ROWS = 1 << 16
    PROBES = 128  # places that a name may have

    def __init__(self, num_processes: int = 1):
        self.process = 0  # number of this process; an HTTP process sets it
        self._num_processes, self._width = num_processes, 3 + num_processes
        self._secret = os.urandom(16)  # keeps clients from choosing names that share places
        self._memory = mmap.mmap(-1, 8 * self.ROWS * self._width)  # zeros, which take no memory until they change
        self._keys = memoryview(self._memory).cast("Q")
        self.numbers = memoryview(self._memory).cast("d")
        self._lock, path = tempfile.mkstemp()
        os.unlink(path)
        weakref.finalize(self, os.close, self._lock)

    def __enter__(self) -> SharedTable:
        if self._num_processes > 1:
            fcntl.lockf(self._lock, fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        if self._num_processes > 1:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def row(self, name: str, now: float) -> int:
        """Return the index in `numbers` of the two times of a name. They are 0 for a new name.

        Raises LookupError: names with counts take all of its places.
        """
        keys, width, free, forgiven = self._keys, self._width, -1, -1
        key = int.from_bytes(blake2b(name.encode(), digest_size=8, key=self._secret).digest(), "little") or 1
        for probe in range(key, key + self.PROBES):
            at = probe % self.ROWS * width
            found = keys[at]
            if found == key:
                return at + 1
            if free < 0 and (not found or not self.count(at + 1)):
                forgiven = at
                if not found or max(self.numbers[at + 1 : at + 3]) <= now:
                    free = at
            if not found:  # no name was ever placed after this
                break
        at = free if free >= 0 else forgiven
        if at < 0:
            raise LookupError(name)
        self._memory[8 * at : 8 * (at + width)] = bytes(8 * width)
        keys[at] = key
        return at + 1

    def count(self, row: int) -> int:
        """Return the count of all processes."""
        return int(sum(self.numbers[row + 2 : row + 2 + self._num_processes]))

    def change(self, row: int, difference: int) -> None:
        """Change the count of this process."""
        self.numbers[row + 2 + self.process] += difference

    def forget(self, process: int) -> None:
        """Reset the counts of a dead process."""
        np.frombuffer(self._memory).reshape(self.ROWS, self._width)[:, 3 + process] = 0
