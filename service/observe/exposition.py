"""The page of /metrics: sums over all processes, and metrics that are computed when scraped.

The computed metrics are the memory and CPU time of each process, the checkpoint and versions, and ratios of sums. An
option repeats series under vLLM's names. This module records no observations.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as SampleExemplar
from prometheus_client.samples import Sample

from service import release
from service.model.checkpoint import Checkpoint
from service.observe import metrics
from service.shared import REASONS, SharedState

# Names of vLLM 0.33. The last two are from prometheus-fastapi-instrumentator, which vLLM uses.
VLLM_NAMES = {f"chargpt_{stem}": f"vllm:{stem}" for stem in (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_inference_time_seconds", "num_requests_running", "num_requests_waiting",
    "kv_cache_usage_perc", "prompt_tokens", "generation_tokens", "request_prompt_tokens", "request_generation_tokens",
    "request_success", "iteration_tokens_total", "num_preemptions", "admission_rejections",
)} | {f"chargpt_{name}": name for name in ("http_requests", "http_request_duration_seconds")}  # fmt: skip

Kind = TypeVar("Kind", GaugeMetricFamily, CounterMetricFamily)


@dataclass(eq=False)
class Exposition(Collector):
    """All metrics of the service and of the checkpoints it serves."""

    service_name: str
    served: Callable[[], Mapping[str, Checkpoint]]  # by name
    rows: Callable[[], Mapping[str, int]]  # row in shared memory of every name that was ever listed
    engine: dict[str, str]  # labels of its info
    vllm_names: bool
    state: SharedState
    hang_seconds: float
    certificate_expires_at: float | None = None  # Unix time, for the certificate in use; None: no TLS
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "metrics"))
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _next: dict[bool, asyncio.Task[bytes]] = field(default_factory=dict)  # pages that have not begun
    _rests_until: float = 0.0

    async def page(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type: OpenMetrics 1.0 with exemplars if `accept` names it, else text 0.0.4.

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
        generate = _open_metrics if is_open else exposition.generate_latest
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
        total = sum(sample.value for sample in families["chargpt_cache_slots"].samples)  # 0 without a worker
        in_use = families["chargpt_cache_slots_in_use"].samples
        shares = [(sample.labels["model_name"], min(1.0, sample.value / total)) for sample in in_use if total]
        usage = _gauge("kv_cache_usage_perc", "Share of cache slots in use, 0 to 1", shares)
        for family in (usage, *self._processes(), *self._identity(), *self._sequences()):
            families[family.name] = family
        _add_exemplars(families, metrics.current_folder())
        yield from families.values()
        if self.vllm_names:
            yield from (_renamed(families[ours], theirs) for ours, theirs in VLLM_NAMES.items() if ours in families)

    def _processes(self) -> Iterator[Metric]:
        service, state, seen = self.service_name, self.state, []
        for name, pid in sorted(state.running().items()):
            with contextlib.suppress(psutil.Error):  # it has ended, or is a zombie
                process = psutil.Process(pid)
                with process.oneshot():
                    times, started, resident = process.cpu_times(), process.create_time(), process.memory_info().rss
                    files, threads = process.num_fds(), process.num_threads()
                seen.append((name, resident, files, threads, started, times.user + times.system))
        for kind, stem, help, column in (
            (_gauge, "resident_memory_bytes", "Resident memory of a process, in bytes", 1),
            (_gauge, "open_fds", "Open file descriptors of a process", 2),
            (_gauge, "threads", "Threads of a process", 3),
            (_gauge, "start_time_seconds", "Start time of a process, in seconds since the Unix epoch", 4),
            (_counter, "cpu_seconds", "CPU time of a process, user and system, in seconds", 5),
        ):
            yield kind(f"process_{stem}", help, [(service, row[0], row[column]) for row in seen], "process")
        for stem, restarts, text, names in (
            ("http_processes", "http_process_restarts", "HTTP processes", state.http_names),
            ("workers", "worker_restarts", "inference workers", state.worker_names),
        ):
            ready = sum(state.is_responsive(name, self.hang_seconds) for name in names)
            yield _gauge(stem, f"Number of {text} that should run", [(service, len(names))])
            yield _gauge(f"{stem}_ready", f"Number of {text} that have started and do not hang", [(service, ready)])
            num_restarts = sum(state.restarts[name] for name in names)
            yield _counter(restarts, f"Restarts of {text} after a crash", [(service, num_restarts)])
        expiry = "When the certificate in use expires, in seconds since the Unix epoch; only with TLS"
        at = [] if self.certificate_expires_at is None else [(service, self.certificate_expires_at)]
        yield _gauge("tls_certificate_expiry_timestamp_seconds", expiry, at)

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
        losses = [(name, checkpoint.training.get("losses", {}).get("whole")) for name, checkpoint in served]
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


def _open_metrics(collector: Collector) -> bytes:
    # prometheus-client 0.26 escapes the colon in sample names by default.
    return openmetrics.generate_latest(collector, openmetrics.ALLOWUTF8)


def _family(kind: type[Kind], stem: str, help: str, rows: Iterable[tuple[Any, ...]], *labels: str) -> Kind:
    """Build a family. Each row has a model_name, values of the other labels, and the value of the series."""
    family = kind(f"chargpt_{stem}", help, labels=[*metrics.LABELS, *labels])
    for *values, value in rows:
        family.add_metric(values, value)
    return family


_gauge = functools.partial(_family, GaugeMetricFamily)
_counter = functools.partial(_family, CounterMetricFamily)

Bucket = tuple[str, float]  # model_name, upper bound


def _add_exemplars(families: dict[str, Metric], folder: Path) -> None:
    """Add the latest exemplar of all processes to each bucket."""
    latest: dict[str, dict[Bucket, metrics.Exemplar]] = {}
    for path in folder.glob(metrics.EXEMPLARS.format("*")):
        for name, model_name, bound, *values in msgspec.json.decode(path.read_bytes()):
            known, exemplar = latest.setdefault(name, {}), metrics.Exemplar(*values)
            bucket = (model_name, math.inf if bound is None else bound)  # JSON has no infinity
            if bucket not in known or exemplar.timestamp > known[bucket].timestamp:
                known[bucket] = exemplar
    for name, buckets in latest.items():
        samples = families[name].samples
        for i, sample in enumerate(samples):
            found = buckets.get((sample.labels["model_name"], float(sample.labels.get("le", "nan"))))
            if sample.name.endswith("_bucket") and found is not None:
                value = SampleExemplar({"request_id": found.request_id}, found.value, found.timestamp)
                samples[i] = sample._replace(exemplar=value)


def _renamed(family: Metric, name: str) -> Metric:
    """Return a copy under vLLM's name, labelled engine 0, because its values are sums over all engines."""
    renamed = Metric(name, family.documentation, family.type)
    totals: dict[tuple[str, frozenset[tuple[str, str]]], Sample] = {}
    for sample in family.samples:
        labels = dict(sample.labels)
        if name.startswith("vllm:"):
            labels["engine"] = "0"
        else:
            del labels["model_name"]
            if "status" in labels:
                labels["status"] = labels["status"][0] + "xx"
        sample = Sample(name + sample.name.removeprefix(family.name), labels, *sample[2:])
        key = (sample.name, frozenset(labels.items()))  # several statuses have the same key
        totals[key] = sample._replace(value=sample.value + (totals[key].value if key in totals else 0.0))
    renamed.samples = list(totals.values())
    return renamed
