"""The page of /metrics: sums over all processes, and metrics that are computed when scraped.

The computed metrics are the memory and CPU time of each process, the checkpoint and versions, and ratios of sums. This
module records no observations.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import platform
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psutil
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from service import release
from service.model.checkpoint import Checkpoint
from service.observe import metrics
from service.shared import REASONS, SharedState, worker_name

Kind = TypeVar("Kind", GaugeMetricFamily, CounterMetricFamily)


@dataclass(eq=False)
class Exposition(Collector):
    """All metrics of the service and of the checkpoints it serves."""

    service_name: str
    served: Callable[[], Mapping[str, Checkpoint]]  # by name
    rows: Callable[[], Mapping[str, int]]  # row in shared memory of every name that was ever listed
    workers: Callable[[], Iterable[int]]  # numbers of the workers that should run
    engine: dict[str, str]  # labels of its info
    state: SharedState
    hang_seconds: float
    certificate_expires_at: float | None = None  # Unix time, for the certificate in use; None: no TLS
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "metrics"))
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _next: dict[bool, asyncio.Task[bytes]] = field(default_factory=dict)  # pages that have not begun
    _rests_until: float = 0.0

    async def page(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type: OpenMetrics 1.0 if `accept` names it, else text 0.0.4.

        All scrapers that ask before a page begins share it. Pages are rendered one after the other. If two overlapped,
        the later answer could have the lower counters.
        """
        is_open = "application/openmetrics-text" in accept
        if is_open not in self._next:
            self._next[is_open] = asyncio.create_task(self._render(is_open))
        text = await asyncio.shield(self._next[is_open])
        return text, openmetrics.CONTENT_TYPE_LATEST if is_open else exposition.CONTENT_TYPE_PLAIN_0_0_4

    async def _render(self, is_open: bool) -> bytes:
        """Render in a thread, then rest for as long as that took, so scrapers get at most half of a CPU."""
        generate = (openmetrics if is_open else exposition).generate_latest
        async with self._turn:
            await asyncio.sleep(max(0.0, self._rests_until - time.monotonic()))
            del self._next[is_open]
            began = time.monotonic()
            text = await asyncio.get_running_loop().run_in_executor(self._pool, generate, self)
            ended = time.monotonic()
            self._rests_until = ended + (ended - began)
            return text

    def collect(self) -> Iterator[Metric]:
        families = {family.name: family for family in MultiProcessCollector(CollectorRegistry()).collect()}
        slots, in_use = (
            {sample.labels["model_name"]: sample.value for sample in families[f"chargpt_{stem}"].samples}
            for stem in ("cache_slots", "cache_slots_in_use")
        )  # 0 without a worker
        shares = [(name, min(1.0, in_use.get(name, 0.0) / total)) for name, total in slots.items() if total]
        usage = _gauge("kv_cache_usage_perc", "Share of cache slots in use, 0 to 1", shares)
        for family in (usage, *self._processes(), *self._identity(), *self._sequences()):
            families[family.name] = family
        yield from families.values()

    def _processes(self) -> Iterator[Metric]:
        service, state, seen = self.service_name, self.state, []
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # all processes have that of the main process
        max_files = math.inf if limit == resource.RLIM_INFINITY else limit
        for name, pid in sorted(state.running().items()):
            with contextlib.suppress(psutil.Error):  # it has ended, or is a zombie
                process = psutil.Process(pid)
                with process.oneshot():
                    times, started, resident = process.cpu_times(), process.create_time(), process.memory_info().rss
                    files, threads = process.num_fds(), process.num_threads()
                seen.append((name, resident, files, max_files, threads, started, times.user + times.system))
        for kind, stem, help, column in (
            (_gauge, "resident_memory_bytes", "Resident memory of a process, in bytes", 1),
            (_gauge, "open_fds", "Open file descriptors of a process", 2),
            (_gauge, "max_fds", "Open file descriptors that a process may have", 3),
            (_gauge, "threads", "Threads of a process", 4),
            (_gauge, "start_time_seconds", "Start time of a process, in seconds since the Unix epoch", 5),
            (_counter, "cpu_seconds", "CPU time of a process, user and system, in seconds", 6),
        ):
            yield kind(f"process_{stem}", help, [(service, row[0], row[column]) for row in seen], "process")
        workers = [worker_name(id) for id in self.workers()]
        for stem, restarts, text, names, all_names in (
            ("http_processes", "http_process_restarts", "HTTP processes", state.http_names, state.http_names),
            ("workers", "worker_restarts", "inference workers", workers, state.worker_names),
        ):
            ready = sum(state.is_responsive(name, self.hang_seconds) for name in names)
            yield _gauge(stem, f"Number of {text} that should run", [(service, len(names))])
            yield _gauge(f"{stem}_ready", f"Number of {text} that have started and do not hang", [(service, ready)])
            num_restarts = sum(state.restarts[name] for name in all_names)
            yield _counter(restarts, f"Restarts of {text} after a crash", [(service, num_restarts)])
        expiry = "When the certificate in use expires, in seconds since the Unix epoch; only with TLS"
        at = [] if self.certificate_expires_at is None else [(service, self.certificate_expires_at)]
        yield _gauge("tls_certificate_expiry_timestamp_seconds", expiry, at)
        reads = state.last_reads().items()
        help = "1 if all processes took what they read at the last SIGHUP, or else at the start; 0 if one refused it"
        yield _gauge("last_reload_successful", help, [(service, what, it) for what, (it, _) in reads], "what")
        help = "When what is in use was read, in seconds since the Unix epoch"
        times = [(service, what, at) for what, (_, at) in reads]
        yield _gauge("last_reload_success_timestamp_seconds", help, times, "what")

    def _identity(self) -> Iterator[Metric]:
        versions = {"version": release(), "python": platform.python_version()}
        versions |= {name: release(name) for name in ("torch", "litserve")}
        for name, help, labels in (
            ("build_info", "Always 1; software versions as labels", versions),
            ("engine_info", "Always 1; backend and dtype of the engine as labels", self.engine),
        ):
            yield _gauge(name, help, [(self.service_name, *labels.values(), 1)], *labels)
        sizes, served = ("block_size", "n_layer", "n_embd", "vocab_size"), self.served().items()
        shapes = [
            (name, checkpoint.digest, *(str(getattr(checkpoint.config, size)) for size in sizes), 1)
            for name, checkpoint in served
        ]
        losses = [(name, checkpoint.validation_loss) for name, checkpoint in served]
        help = "Always 1; hash and sizes of the served checkpoint as labels"
        yield _gauge("checkpoint_info", help, shapes, "checkpoint_sha256", *sizes)
        help = "Validation loss recorded in training, in nats per character"
        yield _gauge("checkpoint_validation_loss", help, [(name, loss) for name, loss in losses if loss is not None])

    def _sequences(self) -> Iterator[Metric]:
        state, rows = self.state, self.rows().items()
        yield _counter(
            "requests_accepted", "Sequences accepted that have begun or ended; each ends once",
            [(name, state.num_sequences(row, "begun")) for name, row in rows],
        )  # fmt: skip
        yield _counter(
            "request_success", "Accepted sequences that ended, by finish reason",
            [(name, reason, state.num_sequences(row, reason)) for name, row in rows for reason in REASONS],
            "finished_reason",
        )  # fmt: skip
        yield _counter(
            "checkpoint_reloads", "Checkpoints loaded, refused or removed at SIGHUP, or refused at start",
            [(name, *result) for name, row in rows for result in state.num_reloads(row).items()],
            "result",
        )  # fmt: skip


def _family(kind: type[Kind], stem: str, help: str, rows: Iterable[tuple[Any, ...]], *labels: str) -> Kind:
    """Build a family. Each row has a model_name, values of the other labels, and the value of the series."""
    family = kind(f"chargpt_{stem}", help, labels=[*metrics.LABELS, *labels])
    for *values, value in rows:
        family.add_metric(values, value)
    return family


_gauge = functools.partial(_family, GaugeMetricFamily)
_counter = functools.partial(_family, CounterMetricFamily)
