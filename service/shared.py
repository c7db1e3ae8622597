"""Memory that all processes of the service share: heartbeats, loads, counts of sequences, checkpoints in use.

The main process allocates it before it starts any other process. Each number of SharedState has one writer, until the
main process settles the numbers of a dead process. Times are by time.monotonic(), which all processes share.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable
from typing import Any, get_args

from service.wire import FinishReason

REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
_COLUMNS = ("submitted", "refused", "begun", *REASONS)  # counts of sequences by HTTP process and model
_NUMBER = {column: number for number, column in enumerate(_COLUMNS)}
_WIDTH = len(_COLUMNS)
_RELOADS = ("loaded", "refused", "removed")
_STAGES = ("serving", "leaving", "draining", "stopping")
READ_AGAIN = ("api_keys", "client_limits", "certificate", "checkpoints")  # at SIGHUP
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
        self._read_at = {what: _OfEach("d", self._names) for what in READ_AGAIN}  # Unix time; 0: not configured
        self._is_refused = {what: _OfEach("b", self._names) for what in READ_AGAIN}

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

    # -- what is read again at SIGHUP --

    def has_read(self, name: str, what: str, is_valid: bool = True) -> None:
        """Record that a process has read a file of READ_AGAIN. is_valid=False: it uses what it has read before."""
        self._is_refused[what][name] = not is_valid
        if is_valid:
            self._read_at[what][name] = time.time()

    def inherit_reads(self, name: str) -> None:
        """An HTTP process is forked, with what the main process has read. Only that one reads checkpoints."""
        for what in READ_AGAIN[:-1]:
            for numbers in (self._read_at[what], self._is_refused[what]):
                numbers[name] = numbers["main"]

    def last_reads(self) -> dict[str, tuple[bool, float]]:
        """Return two facts for each configured file: whether every process took it at its last reading, and a time.

        The time, in Unix time, is that of the process whose last success is the oldest.
        """
        read: dict[str, tuple[bool, float]] = {}
        for what in READ_AGAIN:
            names = [name for name in ("main", *self.http_names) if self._read_at[what][name]]
            if names:
                is_valid = not any(self._is_refused[what][name] for name in names)
                read[what] = is_valid, min(self._read_at[what][name] for name in names)
        return read

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
