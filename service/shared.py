"""Memory that all processes of the service share: heartbeats, loads, counts of sequences, checkpoints in use.

The main process allocates it before it starts any other process. Each number of SharedState has one writer, until the
main process settles the numbers of a dead process. Times are by time.monotonic(), which all processes share.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
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
MAX_VERSIONS = 2 * MAX_NAMES  # that have workers at once: requests may use the old version of each checkpoint too


def worker_name(id: int) -> str:
    return f"worker-{id}"


class _OfEach:
    """A number for each process, by its name."""

    def __init__(self, kind: str, http_processes: int, workers: int):
        self._http_processes = http_processes
        self._numbers: Any = multiprocessing.RawArray(kind, 1 + http_processes + workers)

    def _index(self, name: str) -> int:
        kind, _, number = name.partition("-")
        return 0 if kind == "main" else 1 + int(number) + (self._http_processes if kind == "worker" else 0)

    def __getitem__(self, name: str) -> Any:
        return self._numbers[self._index(name)]

    def __setitem__(self, name: str, number: Any) -> None:
        self._numbers[self._index(name)] = number


class SharedState:
    """Numbers of the main process, the HTTP processes and the workers, named main, http-0, …, worker-0, …

    Each version of a checkpoint has one of MAX_VERSIONS places, and `workers` workers, whose numbers follow from it.
    It can be pickled only while a process is spawned.
    """

    def __init__(self, http_processes: int = 1, workers: int = 1):
        self.main_pid = os.getpid()
        self.http_names = [f"http-{i}" for i in range(http_processes)]
        self._workers, self._all_workers = workers, MAX_VERSIONS * workers
        of_each = functools.partial(_OfEach, http_processes=http_processes, workers=self._all_workers)
        self._beats = of_each("d")  # 0: the process is starting
        self.pids = of_each("q")  # 0: the process does not run
        self.pids["main"] = self.main_pid
        self.answering = of_each("b")  # HTTP processes that are connected to a worker of each served checkpoint
        self._has_run = of_each("b")  # workers that were sent a sequence
        self.restarts = of_each("q")
        self._followed = of_each("q")  # 1 + the generation; 0: none yet
        self._stage = multiprocessing.RawValue("b", 0)
        self._outstanding = multiprocessing.RawArray("q", http_processes * self._all_workers)  # sequences, by worker
        self._sequences = multiprocessing.RawArray("q", http_processes * MAX_NAMES * _WIDTH)
        # Generation of the listing that HTTP processes follow (catalog.py). The main process sets it.
        self.generation = multiprocessing.RawValue("q", 0)
        self._reloads = multiprocessing.RawArray("q", MAX_NAMES * len(_RELOADS))
        self._users = multiprocessing.RawArray("q", http_processes * MAX_VERSIONS)  # requests, by place of a version
        self._read_at = {what: of_each("d") for what in READ_AGAIN}  # Unix time; 0: not configured
        self._is_refused = {what: of_each("b") for what in READ_AGAIN}

    # -- processes --

    @property
    def worker_names(self) -> list[str]:
        """The names of the workers of all versions that there may be."""
        return [worker_name(id) for id in range(self._all_workers)]

    def workers_of(self, place: int) -> range:
        """Return the numbers of the workers of the version that has a place."""
        return range(place * self._workers, (place + 1) * self._workers)

    def died(self, name: str) -> None:
        for numbers in (self.pids, self._beats, self.answering, self._has_run, self._followed):
            numbers[name] = 0

    def running(self) -> dict[str, int]:
        """The process ids of the running processes."""
        names = ("main", *self.http_names, *self.worker_names)
        return {name: pid for name in names if (pid := self.pids[name])}

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

    def follow(self, name: str, generation: int) -> None:
        """Record that the HTTP process `name` follows a listing."""
        self._followed[name] = generation + 1

    @property
    def is_followed(self) -> bool:
        """True if every running HTTP process follows the newest listing."""
        running = [name for name in self.http_names if self._beats[name]]
        return all(self._followed[name] > self.generation.value for name in running)

    def use(self, http: int, place: int, change: int) -> None:
        """Add to the count of an HTTP process's running requests that use the version that has a place."""
        self._users[http * MAX_VERSIONS + place] += change

    def is_used(self, place: int) -> bool:
        return any(self._users[place::MAX_VERSIONS])

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
        self._outstanding[http * self._all_workers + worker] += change
        if change > 0:
            self._has_run[worker_name(worker)] = True

    def load(self, worker: int) -> int:
        """Return the number of sequences of all HTTP processes in a worker."""
        return sum(self._outstanding[worker :: self._all_workers])

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
        for numbers, width in ((self._outstanding, self._all_workers), (self._users, MAX_VERSIONS)):
            numbers[http * width : (http + 1) * width] = [0] * width
        for row in range(MAX_NAMES):
            start = (http * MAX_NAMES + row) * _WIDTH
            submitted, refused, begun, *ended = self._sequences[start : start + _WIDTH]
            lost = submitted - refused - sum(ended)
            self.count(http, row, "begun", sum(ended) + lost - begun)
            self.count(http, row, "abort", lost)
