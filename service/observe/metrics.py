"""The metrics that a process records, with their labels and buckets.

Names are vLLM's stems with the prefix `chargpt_`, in base units. prometheus-client's multiprocess mode keeps the values
of all processes in files of one folder, so any HTTP process can expose all of them (exposition.py). The folder is
PROMETHEUS_MULTIPROC_DIR, which must be set before this module is imported.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

import numpy as np
import prometheus_client
from prometheus_client import CollectorRegistry, values

# 0.1 ms to 300 s, each bound at most 2.5 times the previous: fine enough for a small model.
SECONDS = (
    0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02,
    0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 30, 60, 120, 300,
)  # fmt: skip
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
RATIOS = tuple(i / 10 for i in range(1, 11))

# Bytes of prometheus-client's files of an HTTP process by kind, for the series of the service and of each model. All
# series fit if names are short. Those of a worker take less than twice MODEL_FILES.
FILES = {"counter": 1 << 19, "histogram": 1 << 21, "gauge_livesum": 1 << 14}
MODEL_FILES = {"counter": 1 << 13, "histogram": 3 << 16, "gauge_livesum": 1 << 12}
SPARE_MODELS = 8  # models that may be added while the service runs

LABELS = ["model_name"]
METHODS = frozenset(("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"))
REJECTIONS = ("queue_full", "rate_limit", "overloaded", "shutting_down", "not_ready")
REJECTED_CONNECTIONS = ("limit", "address_limit", "silent", "header_timeout", "headers_too_large", "malformed")


# Each class buffers observations until its flush, because a write to the shared file costs ten times as much.


class Histogram:
    FAMILY: ClassVar[Any] = prometheus_client.Histogram
    OPTIONS: ClassVar[dict[str, Any]] = {"buckets": SECONDS}

    def __init__(self, child: prometheus_client.Histogram):
        self._child = child
        self._bounds: list[float] = child._upper_bounds
        self._observed: list[tuple[float, int]] = []

    def observe(self, amount: float, count: int = 1) -> None:
        """Record `count` observations of the same amount."""
        self._observed.append((amount, count))

    def flush(self) -> None:
        if self._observed:
            amounts, counts = zip(*self._observed, strict=True)
            self._observed.clear()
            self.observe_all(amounts, counts)

    def observe_all(self, amounts: Sequence[float], counts: Sequence[int] | None = None) -> None:
        """Record many observations, each `counts` times or once."""
        weights = np.ones(len(amounts)) if counts is None else np.array(counts, float)
        self._child._sum.inc(float(weights @ np.array(amounts, float)))
        increases = np.bincount(np.searchsorted(self._bounds, amounts), weights)
        for bucket in increases.nonzero()[0]:
            self._child._buckets[bucket].inc(float(increases[bucket]))


class Records:
    """Groups of observations with one for each histogram. `add` takes a tuple of amounts."""

    def __init__(self, *histograms: Histogram):
        self._histograms = histograms
        self._records: list[tuple[float, ...]] = []
        self.add = self._records.append

    def flush(self) -> None:
        if self._records:
            columns = list(zip(*self._records, strict=True))
            self._records.clear()
            for histogram, amounts in zip(self._histograms, columns, strict=True):
                histogram.observe_all(amounts)


class Counter:
    FAMILY: ClassVar[Any] = prometheus_client.Counter
    OPTIONS: ClassVar[dict[str, Any]] = {}

    def __init__(self, child: Any):
        self._child = child
        self._value = self._written = 0.0

    def inc(self, count: float = 1) -> None:
        self._value += count

    def flush(self) -> None:
        if self._value != self._written:
            self._child.inc(self._value - self._written)
            self._written = self._value


class Gauge(Counter):
    FAMILY = prometheus_client.Gauge
    OPTIONS: ClassVar[dict[str, Any]] = {"multiprocess_mode": "livesum"}

    source: Callable[[], float] | None = None  # gives the value at each flush

    def set(self, value: float) -> None:
        self._value = value

    def flush(self) -> None:
        if self.source is not None:
            self._value = self.source()
        super().flush()


Kind = TypeVar("Kind", Histogram, Counter, Gauge)


class _Series:
    """The series of one `model_name`: a served model, or the whole service.

    Annotations of a class declare the series without further labels: kind, help, and the buckets of a histogram. A
    histogram without buckets has seconds.
    """

    def __init__(self, owner: Metrics, model_name: str):
        self._owner, self._model_name = owner, model_name
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            kind, (help, *buckets) = hint.__origin__, hint.__metadata__
            if kind is Histogram and not buckets:
                series = self._labelled(kind, f"{name}_seconds", f"{help}, in seconds")
            else:
                series = self._labelled(kind, name, help, **({"buckets": buckets[0]} if buckets else {}))
            setattr(self, name, series())
        reason = "Sequences rejected at admission, by reason"
        self._admission_rejections = self._labelled(Counter, "admission_rejections", reason, "reason", known=REJECTIONS)

    def _labelled(
        self, kind: type[Kind], name: str, help: str, *labels: str, known: Iterable[str] = (), **options: Any
    ) -> Callable[..., Kind]:
        """Return the series by label values. `known` ones start at 0: a rate misses the first event of others."""
        owner, family = self._owner, self._owner.family(kind, name, help, labels, options)

        @functools.cache
        def series(*values: str) -> Kind:
            return owner.buffered(kind(family.labels(self._model_name, *values)))

        for value in known:
            series(value)
        return series

    def request_rejected(self, reason: str, count: int = 1) -> None:
        """Count rejected sequences, or a request that was rejected before its model was known."""
        self._admission_rejections(reason).inc(count)


class ModelMetrics(_Series):
    """The metrics of one served model."""

    # Recorded by HTTP processes. A sequence is one prompt with its completion; a request may have several.
    time_to_first_token: Annotated[Histogram, "Time from request arrival to the first character written"]
    request_queue_time: Annotated[Histogram, "Time from request arrival to cache slot assignment"]
    request_prefill_time: Annotated[Histogram, "Time from cache slot assignment to the end of prefill"]
    request_first_decode_time: Annotated[Histogram, "Time from the end of prefill to the first character written"]
    inter_token_latency: Annotated[
        Histogram, "Time between consecutive characters of a sequence, one observation per character"
    ]
    request_time_per_output_token: Annotated[Histogram, "Mean time per character after the first of a sequence"]
    e2e_request_latency: Annotated[
        Histogram, "Time from request arrival to the last character written, of sequences ended by stop or length"
    ]
    request_decode_time: Annotated[Histogram, "Time from the end of prefill to the last character generated"]
    request_inference_time: Annotated[Histogram, "Time from cache slot assignment to the last character generated"]
    prompt_tokens: Annotated[Counter, "Prompt characters processed"]
    generation_tokens: Annotated[Counter, "Characters generated and emitted"]
    request_prompt_tokens: Annotated[Histogram, "Prompt length of a sequence, in characters", LENGTHS]
    request_generation_tokens: Annotated[Histogram, "Completion length of a sequence, in characters", LENGTHS]

    # Recorded by inference processes.
    num_requests_running: Annotated[Gauge, "Sequences running in a cache slot"]
    num_requests_waiting: Annotated[Gauge, "Sequences waiting in the queue"]
    cache_slots: Annotated[Gauge, "Cache slots"]
    cache_slots_in_use: Annotated[Gauge, "Cache slots in use"]
    num_preemptions: Annotated[Counter, "Sequences that lost their slot to another client and go on later"]
    iteration_batch_size: Annotated[Histogram, "Sequences decoded per engine step", COUNTS]
    iteration_batch_utilization_ratio: Annotated[
        Histogram, "Sequences decoded per engine step divided by cache slots", RATIOS
    ]
    iteration_tokens_total: Annotated[Histogram, "Characters processed per engine step, prompts included", COUNTS]
    iteration: Annotated[Histogram, "Duration of an engine step"]
    prefix_cache_hit_tokens: Annotated[Counter, "Prompt characters copied from another sequence's cache instead of run"]
    exact_candidates: Annotated[Counter, "Candidates for exact answers that ended"]
    exact_matches: Annotated[Counter, "Candidates for exact answers that matched"]
    exact_candidate_tokens: Annotated[Counter, "Characters of candidates for exact answers"]
    dropped_tokens: Annotated[Counter, "Characters generated beyond a stop, or after an abort, and dropped"]

    def __init__(self, owner: Metrics, model_name: str):
        super().__init__(owner, model_name)
        self.iteration_phase = self._labelled(
            Histogram,
            "iteration_phase_seconds",
            "Duration of a phase of an engine step, in seconds; transport: exchange of frames between steps",
            "phase",
        )
        unknown = "Characters absent from the vocabulary, replaced or dropped by policy"
        policies = ("replace", "drop")
        self.unknown_characters = self._labelled(Counter, "unknown_characters", unknown, "policy", known=policies)

        def records(*histograms: Histogram) -> Records:
            return owner.buffered(Records(*histograms))

        # Recorded for each sequence: `scheduled` when the first character was written or it has ended, `begun` if it
        # has characters, `ended` at its end, `paced` at its end if it has several characters.
        self.scheduled = records(self.request_queue_time, self.request_prefill_time)
        self.begun = records(self.time_to_first_token, self.request_first_decode_time)
        self.ended = records(self.e2e_request_latency, self.request_decode_time, self.request_inference_time)
        self.paced = records(self.request_time_per_output_token)
        self._prompts = records(self.request_prompt_tokens)

    def prompt_ran(self, length: int) -> None:
        self.prompt_tokens.inc(length)
        self._prompts.add((length,))

    def sequence_ended(self, length: int, count: int = 1) -> None:
        self.request_generation_tokens.observe(length, count)


Buffered = TypeVar("Buffered", Histogram, Counter, Gauge, Records)


class Metrics(_Series):
    """All metrics of one process: the metrics of the whole service and, through `of`, the metrics of each model.

    service_name: model_name of the service's metrics.
    registry: holds the declarations. exposition.py reads the values of all processes from the shared files.
    process: name as in SharedState.

    The owner calls `flush` every FLUSH_SECONDS.
    """

    FLUSH_SECONDS = 0.05

    http_requests_in_progress: Annotated[Gauge, "HTTP requests in progress"]
    http_connections: Annotated[Gauge, "Open HTTP connections"]
    http_max_connections: Annotated[Gauge, "Open HTTP connections allowed, without the reserve for probes"]
    held_bytes: Annotated[Gauge, "Memory that requests in progress may need, by estimate, in bytes"]
    max_held_bytes: Annotated[Gauge, "Memory that requests in progress may need at most, by estimate, in bytes"]
    engine_idle_seconds: Annotated[Counter, "Time without work in the engine, in seconds"]

    def __init__(self, service_name: str, registry: CollectorRegistry, process: str):
        self._registry = registry
        # Files are named after the process, so a replacement continues the counts of a dead process.
        if values.ValueClass is not values.MutexValue:  # MutexValue keeps values in this process, for tests
            values.ValueClass = values.MultiProcessValue(lambda: process)
        self._families: dict[str, Any] = {}
        self._buffered: list[Histogram | Counter | Gauge | Records] = []
        self._models: dict[str, ModelMetrics] = {}
        super().__init__(self, service_name)
        requests = "HTTP requests completed, by route, method and status; 499 if the client disconnected"
        self._http_requests = self.family(Counter, "http_requests", requests, ("handler", "method", "status"))
        duration = "Time from HTTP request headers to the end of the response, in seconds"
        of_route = self._labelled(Histogram, "http_request_duration_seconds", duration, "handler", "method")
        self._durations_of = functools.cache(lambda *labels: self.buffered(Records(of_route(*labels))))
        self._series_of = functools.cache(self._series_of_route)
        rejected = "Connections closed by a limit or for a malformed request, by reason; silent: nothing arrived"
        self.http_connections_rejected = self._labelled(
            Counter, "http_connections_rejected", rejected, "reason", known=REJECTED_CONNECTIONS
        )

    def of(self, model_name: str) -> ModelMetrics:
        if model_name not in self._models:
            self._models[model_name] = ModelMetrics(self, model_name)
        return self._models[model_name]

    def family(
        self, kind: type[Kind], stem: str, help: str, labels: Iterable[str], options: dict[str, Any] | None = None
    ) -> Any:
        """Return prometheus-client's family, declared at its first use."""
        name = f"chargpt_{stem}"
        if name not in self._families:
            options = kind.OPTIONS | (options or {})
            self._families[name] = kind.FAMILY(name, help, [*LABELS, *labels], registry=self._registry, **options)
        return self._families[name]

    def buffered(self, metric: Buffered) -> Buffered:
        self._buffered.append(metric)
        return metric

    def http_request(self, handler: str, method: str, status: int, seconds: float) -> None:
        count, durations = self._series_of(handler, method if method in METHODS else "other", status)
        count(1)  # at once, so that it is not lost if this process is killed
        durations.add((seconds,))

    def _series_of_route(self, handler: str, method: str, status: int) -> tuple[Callable[[float], None], Records]:
        requests = self._http_requests.labels(self._model_name, handler, method, str(status))
        return requests._value.inc, self._durations_of(handler, method)

    def flush(self) -> None:
        """Write buffered observations to the shared files."""
        for metric in self._buffered:
            metric.flush()


def current_folder() -> Path:
    """Return the run's own folder, from the variable that prometheus-client reads."""
    return Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])


def allocate_files(processes: Iterable[str], model_names: Collection[str]) -> None:
    """Reserve the disk space of HTTP processes' files. They are mapped, so a write to a full disk would be SIGBUS.

    model_names: names of the service and of the models. SPARE_MODELS more fit; beyond them, files grow.

    Raises OSError: the disk is full.
    """
    names = [len(json.dumps(name)) for name in model_names]  # as each key has it
    for process in processes:
        for kind, size in FILES.items():
            model = MODEL_FILES.get(kind, 0)
            total = size + SPARE_MODELS * model + sum(model + (size + model) * name // 128 for name in names)
            with open(current_folder() / f"{kind}_{process}.db", "wb") as file:
                file.write(bytes(total))


def allocate_worker_files(process: str, model_name: str) -> None:
    """Reserve the disk space of a worker's files before it starts. They keep the series of earlier models.

    Raises OSError: the disk is full.
    """
    for kind, size in MODEL_FILES.items():
        path = current_folder() / f"{kind}_{process}.db"
        used, allocated = 0, path.stat().st_size if path.exists() else 0
        if allocated:
            with open(path, "rb") as file:
                used = int.from_bytes(file.read(4), sys.byteorder)
        with open(path, "ab") as file:
            file.write(bytes(max(0, used + 2 * size * (1 + len(json.dumps(model_name)) // 64) - allocated)))


def forget_process(process: str) -> None:
    """Empty a dead process's files of gauges. They keep their disk space. Counters and histograms stay."""
    for kind in FILES:
        if kind.startswith("gauge"):
            with open(current_folder() / f"{kind}_{process}.db", "r+b") as file:
                file.write(bytes(4))  # the length in use
