"""The metrics that a process records, with their labels and buckets.

Names are vLLM's stems under `chargpt_`, in base units. prometheus-client's multiprocess mode keeps the values of all
processes in files of one folder, so that any HTTP process can expose all of them (exposition.py). The folder is
PROMETHEUS_MULTIPROC_DIR, which must be set before this module is imported.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter as Occurrences
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
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

# Bytes of prometheus-client's files of one process, by kind; more than all series take if names are short: those of the
# service, and those of each model.
FILES = {"counter": 1 << 19, "histogram": 1 << 21, "gauge_livesum": 1 << 14, "gauge_liveall": 1 << 14}
MODEL_FILES = {"counter": 1 << 13, "histogram": 3 << 16, "gauge_livesum": 1 << 12}
SPARE_MODELS = 8  # that may come while the service runs
MAX_EXEMPLAR_CHARACTERS = 128 - len("request_id")  # OpenMetrics 1.0: of all label names and values together
EXEMPLARS = "exemplars_{}.json"  # file of a process, beside those

logger = logging.getLogger(__name__)

LABELS = ["model_name"]
METHODS = frozenset(("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"))

BufferedKind = TypeVar("BufferedKind", bound="_Buffered")
FamilyKind = TypeVar("FamilyKind", bound=prometheus_client.metrics.MetricWrapperBase)


class _Buffered(ABC):
    """Buffers observations: a write to the shared file costs ten times as much as an addition."""

    def __init__(self, owner: Metrics):
        self._owner = owner

    @abstractmethod
    def flush(self) -> None: ...


class Exemplar(NamedTuple):
    """The latest observation in a histogram's bucket."""

    request_id: str
    value: float
    timestamp: float  # Unix time


class Histogram(_Buffered):
    def __init__(self, child: prometheus_client.Histogram, owner: Metrics):
        super().__init__(owner)
        self.name: str = child._name
        self.model_name: str = child._labelvalues[0]
        self._child = child
        self._bounds: list[float] = child._upper_bounds
        self._observed: list[tuple[float, int, str | None]] = []
        self.exemplars: dict[float, Exemplar] = {}  # by upper bound of the bucket

    def observe(self, amount: float, count: int = 1, request_id: str | None = None) -> None:
        """Record `count` observations of the same amount; `request_id`, if short, becomes the bucket's exemplar."""
        if not self._owner.is_flush_due:
            self._owner.request_flush()
        self._observed.append((amount, count, request_id))

    def flush(self) -> None:
        if not self._observed:
            return
        total, counts, latest = 0.0, Occurrences[int](), {}
        for amount, count, request_id in self._observed:
            bucket = bisect_left(self._bounds, amount)
            counts[bucket] += count
            total += amount * count
            if request_id is not None:
                latest[bucket] = (request_id, amount)
        self._observed.clear()
        self._write(total, counts, latest)

    def observe_all(self, amounts: Collection[float], request_ids: Iterable[str | None]) -> None:
        """Record them at once; each belongs to a request, or None."""
        bounds = self._bounds
        buckets = [bisect_left(bounds, amount) for amount in amounts]
        latest = dict(zip(buckets, zip(request_ids, amounts, strict=True), strict=True))
        self._write(sum(amounts), Occurrences(buckets), latest)

    def _write(self, total: float, counts: dict[int, int], latest: Mapping[int, tuple[str | None, float]]) -> None:
        self._child._sum.inc(total)
        for bucket, count in counts.items():
            self._child._buckets[bucket].inc(count)
        now = time.time()
        for bucket, (request_id, amount) in latest.items():
            if request_id is not None and len(request_id) <= MAX_EXEMPLAR_CHARACTERS:
                self.exemplars[self._bounds[bucket]] = Exemplar(request_id, amount, now)


class Records(_Buffered):
    """Observations that come together, one of each histogram: (request id, amount, …)."""

    def __init__(self, histograms: list[Histogram], owner: Metrics):
        super().__init__(owner)
        self._histograms = histograms
        self._records: list[tuple[Any, ...]] = []

    def add(self, record: tuple[Any, ...]) -> None:
        if not self._owner.is_flush_due:
            self._owner.request_flush()
        self._records.append(record)

    def flush(self) -> None:
        if self._records:
            ids, *columns = zip(*self._records, strict=True)
            self._records.clear()
            for histogram, amounts in zip(self._histograms, columns, strict=True):
                histogram.observe_all(amounts, ids)


class Counter(_Buffered):
    def __init__(self, child: prometheus_client.Counter, owner: Metrics):
        super().__init__(owner)
        self._child = child
        self._count = 0.0

    def inc(self, count: float = 1) -> None:
        if not self._owner.is_flush_due:
            self._owner.request_flush()
        self._count += count

    def flush(self) -> None:
        if self._count:
            self._child.inc(self._count)
            self._count = 0.0


class Gauge(_Buffered):
    def __init__(self, child: prometheus_client.Gauge, owner: Metrics):
        super().__init__(owner)
        self._child = child
        self._value = 0.0
        self._written = -1.0

    def set(self, value: float) -> None:
        self._value = value
        if not self._owner.is_flush_due:
            self._owner.request_flush()

    def change(self, difference: float) -> None:
        self._value += difference
        if not self._owner.is_flush_due:
            self._owner.request_flush()

    def flush(self) -> None:
        if self._value != self._written:
            self._child.set(self._value)
            self._written = self._value


class _Labelled:
    """The series of one `model_name`: of a served model, or of the service as a whole."""

    def __init__(self, owner: Metrics, model_name: str):
        self._owner, self._model_name = owner, model_name

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return self._labeled_histogram(name, help, buckets=buckets)()

    def _labeled_histogram(
        self, name: str, help: str, *labels: str, buckets: tuple[float, ...] = SECONDS
    ) -> Callable[..., Histogram]:
        owner = self._owner
        family = owner.family(prometheus_client.Histogram, name, help, labels, buckets=buckets)
        return functools.cache(
            lambda *values: owner.buffered(Histogram(family.labels(self._model_name, *values), owner))
        )

    def _counter(self, name: str, help: str) -> Counter:
        return self._labeled_counter(name, help)()

    def _labeled_counter(self, name: str, help: str, *labels: str) -> Callable[..., Counter]:
        owner = self._owner
        family = owner.family(prometheus_client.Counter, name, help, labels)
        return functools.cache(lambda *values: owner.buffered(Counter(family.labels(self._model_name, *values), owner)))

    def _gauge(self, name: str, help: str) -> Gauge:
        owner = self._owner
        family = owner.family(prometheus_client.Gauge, name, help, (), multiprocess_mode="livesum")
        return owner.buffered(Gauge(family.labels(self._model_name), owner))

    def _rejections(self) -> Callable[..., Counter]:
        return self._labeled_counter(
            "chargpt_admission_rejections",
            "Sequences rejected at admission, by reason",
            "reason",
        )


class ModelMetrics(_Labelled):
    """Of one served model."""

    def __init__(self, owner: Metrics, model_name: str):
        super().__init__(owner, model_name)
        histogram, counter, gauge = self._histogram, self._counter, self._gauge
        labeled_counter, labeled_histogram = self._labeled_counter, self._labeled_histogram

        # Recorded by HTTP processes. A sequence is one prompt with its completion; a request may have several.
        self.time_to_first_token = histogram(
            "chargpt_time_to_first_token_seconds",
            "Time from request arrival to the first character written, in seconds",
        )
        self.request_queue_time = histogram(
            "chargpt_request_queue_time_seconds", "Time from request arrival to cache slot assignment, in seconds"
        )
        self.request_prefill_time = histogram(
            "chargpt_request_prefill_time_seconds", "Time from cache slot assignment to the end of prefill, in seconds"
        )
        self.request_first_decode_time = histogram(
            "chargpt_request_first_decode_time_seconds",
            "Time from the end of prefill to the first character written, in seconds",
        )
        self.inter_token_latency = histogram(
            "chargpt_inter_token_latency_seconds",
            "Time between consecutive characters of a sequence, in seconds; one observation per character",
        )
        self.request_time_per_output_token = histogram(
            "chargpt_request_time_per_output_token_seconds",
            "Mean time per character after the first of a sequence, in seconds",
        )
        self.e2e_request_latency = histogram(
            "chargpt_e2e_request_latency_seconds",
            "Time from request arrival to the last character written, in seconds; sequences ended by stop or length",
        )
        self.request_decode_time = histogram(
            "chargpt_request_decode_time_seconds",
            "Time from the end of prefill to the last character generated, in seconds",
        )
        self.request_inference_time = histogram(
            "chargpt_request_inference_time_seconds",
            "Time from cache slot assignment to the last character generated, in seconds",
        )
        self.prompt_tokens = counter("chargpt_prompt_tokens", "Prompt characters processed")
        self.generation_tokens = counter("chargpt_generation_tokens", "Characters generated and emitted")
        self.request_prompt_tokens = histogram(
            "chargpt_request_prompt_tokens", "Prompt length of a sequence, in characters", LENGTHS
        )
        self.request_generation_tokens = histogram(
            "chargpt_request_generation_tokens", "Completion length of a sequence, in characters", LENGTHS
        )

        def records(*histograms: Histogram) -> Records:
            return owner.buffered(Records([*histograms], owner))

        # Of each sequence: once a first character was written or it has ended; of one with characters; at its end;
        # at the end of one with several characters.
        self.scheduled = records(self.request_queue_time, self.request_prefill_time)
        self.begun = records(self.time_to_first_token, self.request_first_decode_time)
        self.ended = records(self.e2e_request_latency, self.request_decode_time, self.request_inference_time)
        self.paced = records(self.request_time_per_output_token)
        self._prompts, self._completions = records(self.request_prompt_tokens), records(self.request_generation_tokens)

        self._admission_rejections = self._rejections()
        self._unknown_characters = labeled_counter(
            "chargpt_unknown_characters",
            "Characters absent from the vocabulary, replaced or dropped by policy",
            "policy",
        )
        # Created at 0: the rate of a series that appears at 1 misses its first event.
        for reason in ("queue_full", "rate_limit", "overloaded", "shutting_down", "not_ready"):
            self._admission_rejections(reason)

        # Recorded by inference processes.
        self.num_requests_running = gauge("chargpt_num_requests_running", "Sequences running in a cache slot")
        self.num_requests_waiting = gauge("chargpt_num_requests_waiting", "Sequences waiting in the queue")
        self.cache_slots_in_use = gauge("chargpt_cache_slots_in_use", "Cache slots in use")
        self.num_preemptions = counter(
            "chargpt_num_preemptions", "Sequences preempted; always 0, as the engine never preempts"
        )
        self.iteration_batch_size = histogram(
            "chargpt_iteration_batch_size", "Sequences decoded per engine step", COUNTS
        )
        self.iteration_batch_utilization = histogram(
            "chargpt_iteration_batch_utilization_ratio",
            "Sequences decoded per engine step divided by cache slots",
            RATIOS,
        )
        self.iteration_tokens = histogram(
            "chargpt_iteration_tokens_total", "Characters processed per engine step, prompts included", COUNTS
        )
        self.iteration_seconds = histogram("chargpt_iteration_seconds", "Duration of an engine step, in seconds")
        self.iteration_phase = labeled_histogram(
            "chargpt_iteration_phase_seconds",
            "Duration of a phase of an engine step, in seconds; transport: exchange of frames between steps",
            "phase",
        )
        self.prefix_cache_hit_tokens = counter(
            "chargpt_prefix_cache_hit_tokens", "Prompt characters copied from another sequence's cache instead of run"
        )
        self.dropped_tokens = counter(
            "chargpt_dropped_tokens", "Characters generated beyond a stop, or after an abort, and dropped"
        )

    def prompt_ran(self, length: int) -> None:
        self.prompt_tokens.inc(length)
        self._prompts.add((None, length))

    def sequence_ended(self, length: int) -> None:
        self._completions.add((None, length))

    def request_rejected(self, reason: str, count: int = 1) -> None:
        self._admission_rejections(reason).inc(count)

    def unknown_characters(self, policy: str, count: int) -> None:
        if count:
            self._unknown_characters(policy).inc(count)


class Metrics(_Labelled):
    """All metrics of one process: those of the service as a whole, and with `of` those of each model.

    service_name: their model_name.
    registry: holds the declarations; exposition.py reads the values of all processes from the shared files.
    process: the value of the `process` label: main, http-0, worker-0.
    later: loop.call_later or the like, called once after a change to schedule `flush`. Without it the owner calls
    `flush`.
    """

    FLUSH_SECONDS = 0.05
    EXEMPLAR_SECONDS = 1.0  # between two writes of the exemplars' file

    def __init__(
        self,
        service_name: str,
        registry: CollectorRegistry,
        process: str,
        later: Callable[[float, Callable[[], None]], Any] = lambda seconds, flush: None,
    ):
        super().__init__(self, service_name)
        self._registry, self._process = registry, process
        # Files are named after the process, so that one that replaces a dead one goes on where that ended.
        if values.ValueClass is not values.MutexValue:  # which keeps values in this process, in tests
            values.ValueClass = values.MultiProcessValue(lambda: process)
        self._families: dict[str, Any] = {}
        self._buffered: list[_Buffered] = []
        self._later = later
        self.is_flush_due = False
        self._exemplars_at = 0.0
        self._can_write_exemplars = True
        self._models: dict[str, ModelMetrics] = {}
        counter, gauge = self._counter, self._gauge
        labeled_counter, labeled_histogram = self._labeled_counter, self._labeled_histogram

        self._http_requests = self.family(
            prometheus_client.Counter,
            "chargpt_http_requests",
            "HTTP requests completed, by route, method and status; 499 if the client disconnected",
            ("handler", "method", "status"),
        )  # fmt: skip
        duration = labeled_histogram(
            "chargpt_http_request_duration_seconds",
            "Time from HTTP request headers to the end of the response, in seconds",
            "handler", "method",
        )  # fmt: skip
        self._durations_of = functools.cache(lambda *labels: self.buffered(Records([duration(*labels)], self)))
        self._series_of = functools.cache(self._series_of_route)
        self.http_requests_in_progress = gauge("chargpt_http_requests_in_progress", "HTTP requests in progress")
        self._http_connections_rejected = labeled_counter(
            "chargpt_http_connections_rejected",
            "Connections closed by a limit or for a malformed request, by reason",
            "reason",
        )

        self.held_bytes = gauge(
            "chargpt_held_bytes", "Memory that requests in progress may need, by estimate, in bytes"
        )

        self.cache_slots = gauge(
            "chargpt_cache_slots", "Cache slots that one client can use; the reserve for other clients comes on top"
        )
        self.engine_idle = counter("chargpt_engine_idle_seconds", "Time without work in the engine, in seconds")
        self._admission_rejections = self._rejections()

        # Created at 0: the rate of a series that appears at 1 misses its first event.
        for reason in ("queue_full", "rate_limit", "overloaded", "shutting_down", "not_ready"):
            self._admission_rejections(reason)
        for reason in ("limit", "address_limit", "header_timeout", "headers_too_large", "malformed"):
            self._http_connections_rejected(reason)

        started = prometheus_client.Gauge(
            "chargpt_process_start_time_seconds", "Start time of a process, in seconds since the Unix epoch",
            [*LABELS, "process"], registry=registry, multiprocess_mode="liveall",
        )  # fmt: skip
        started.labels(service_name, process).set(time.time())

    def of(self, model_name: str) -> ModelMetrics:
        if model_name not in self._models:
            self._models[model_name] = ModelMetrics(self, model_name)
        return self._models[model_name]

    def family(self, kind: type[FamilyKind], name: str, help: str, labels: Iterable[str], **options: Any) -> FamilyKind:
        """Declared at its first use."""
        if name not in self._families:
            self._families[name] = kind(name, help, [*LABELS, *labels], registry=self._registry, **options)
        found: FamilyKind = self._families[name]
        return found

    def buffered(self, metric: BufferedKind) -> BufferedKind:
        self._buffered.append(metric)
        return metric

    def request_rejected(self, reason: str, count: int = 1) -> None:
        """Before it was known which model it is for."""
        self._admission_rejections(reason).inc(count)

    def http_request(self, handler: str, method: str, status: int, seconds: float) -> None:
        count, durations = self._series_of(handler, method if method in METHODS else "other", status)
        count(1)  # at once: not lost if this process is killed
        durations.add((None, seconds))

    def _series_of_route(self, handler: str, method: str, status: int) -> tuple[Callable[[float], None], Records]:
        requests = self._http_requests.labels(self._model_name, handler, method, str(status))
        return requests._value.inc, self._durations_of(handler, method)

    def http_connection_rejected(self, reason: str) -> None:
        self._http_connections_rejected(reason).inc()

    def request_flush(self) -> None:
        """Once, until it comes."""
        self.is_flush_due = True
        self._later(self.FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        """Write buffered observations to the shared files."""
        self.is_flush_due = False
        for metric in self._buffered:
            metric.flush()
        if time.monotonic() >= self._exemplars_at:
            self._exemplars_at = time.monotonic() + self.EXEMPLAR_SECONDS
            self._write_exemplars()

    def _write_exemplars(self) -> None:
        """Write them to a file of their own, as prometheus-client's multiprocess files hold values only."""
        exemplars = [
            (metric.name, metric.model_name, bound, *exemplar)
            for metric in self._buffered
            if isinstance(metric, Histogram)
            for bound, exemplar in metric.exemplars.items()
        ]
        if exemplars:
            path = _folder() / EXEMPLARS.format(self._process)
            temporary = path.with_suffix(".new")
            try:
                temporary.write_bytes(msgspec.json.encode(exemplars))
                temporary.replace(path)
            except OSError as error:  # a full disk; values have their space already
                if self._can_write_exemplars:
                    logger.error("%s: exemplars cannot be written: %s", temporary, error.strerror)
                self._can_write_exemplars = False
            else:
                self._can_write_exemplars = True


def _folder() -> Path:
    return Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])


def allocate_files(processes: Iterable[str], model_names: Collection[str]) -> None:
    """Take the disk space of all processes' files. They are mapped: on a full disk, the first write would be SIGBUS.

    model_names: of the service and the models. There is room for SPARE_MODELS more; beyond them, files grow.

    Raises:
        OSError: the disk is full.
    """
    names = [len(json.dumps(name)) for name in model_names]  # as each key has it
    for process in processes:
        for kind, size in FILES.items():
            model = MODEL_FILES.get(kind, 0)
            total = size + SPARE_MODELS * model + sum(model + (size + model) * name // 128 for name in names)
            with open(_folder() / f"{kind}_{process}.db", "wb") as file:
                file.write(bytes(total))


def forget_process(process: str) -> None:
    """Empty a dead process's files of gauges, which keep their disk space; its counters and histograms stay."""
    for kind in FILES:
        if kind.startswith("gauge"):
            with open(_folder() / f"{kind}_{process}.db", "r+b") as file:
                file.write(bytes(4))  # the length in use
