"""Every metric that a process observes, with its labels and buckets.

Names are vLLM's stems under `chargpt_`, in base units. The values of all processes live in files of one folder
(prometheus-client's multiprocess mode), so that any HTTP process answers for all of them (exposition.py). The folder
is named by PROMETHEUS_MULTIPROC_DIR, which must be set before this module is imported.
"""

from __future__ import annotations

import functools
import os
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import mark_process_dead

# 0.1 ms to 300 s, a factor of about 1.5 to 2 a bucket: fit for a small model.
SECONDS = (
    0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02,
    0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 30, 60, 120, 300,
)  # fmt: skip
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
RATIOS = tuple(i / 10 for i in range(1, 11))

EXEMPLARS = "exemplars_{}.json"  # of a process, by its number, in the folder of the values

LABELS = ["model_name"]

PendingKind = TypeVar("PendingKind", bound="_Pending")


class _Pending(ABC):
    """What was observed and not yet written: a write to a shared file costs ten times as much as an addition."""

    def __init__(self, changed: Callable[[], None]):
        self._changed = changed  # to be called when there is something to write

    @abstractmethod
    def flush(self) -> None:
        """Write it."""


class Exemplar(NamedTuple):
    """An observation to look at: the latest of a histogram's bucket."""

    request_id: str
    value: float
    timestamp: float  # Unix time


class Histogram(_Pending):
    def __init__(self, shared: prometheus_client.Histogram, changed: Callable[[], None]):
        super().__init__(changed)
        self.name: str = shared._name
        self._shared = shared
        self._bounds: list[float] = shared._upper_bounds
        self._observed: list[tuple[float, int, str | None]] = []
        self.exemplars: dict[float, Exemplar] = {}  # by the bucket's upper bound

    def observe(self, amount: float, count: int = 1, request_id: str | None = None) -> None:
        """`count` observations of the same amount, of the request that is named."""
        if not self._observed:
            self._changed()
        self._observed.append((amount, count, request_id))

    def flush(self) -> None:
        if not self._observed:
            return
        total, counts, latest = 0.0, [0] * len(self._bounds), {}
        for amount, count, request_id in self._observed:
            bucket = bisect_left(self._bounds, amount)
            counts[bucket] += count
            total += amount * count
            if request_id is not None:
                latest[bucket] = (request_id, amount)
        self._observed.clear()
        self._shared._sum.inc(total)
        for bucket, count in enumerate(counts):
            if count:
                self._shared._buckets[bucket].inc(count)
        now = time.time()
        for bucket, (request_id, amount) in latest.items():
            self.exemplars[self._bounds[bucket]] = Exemplar(request_id, amount, now)


class Counter(_Pending):
    def __init__(self, shared: prometheus_client.Counter, changed: Callable[[], None]):
        super().__init__(changed)
        self._shared = shared
        self._count = 0.0

    def inc(self, count: float = 1) -> None:
        if not self._count:
            self._changed()
        self._count += count

    def flush(self) -> None:
        if self._count:
            self._shared.inc(self._count)
            self._count = 0.0


class Gauge(_Pending):
    def __init__(self, shared: prometheus_client.Gauge, changed: Callable[[], None]):
        super().__init__(changed)
        self._shared = shared
        self._value = 0.0
        self._written = -1.0

    def set(self, value: float) -> None:
        self._value = value
        self._changed()

    def inc(self) -> None:
        self.set(self._value + 1)

    def dec(self) -> None:
        self.set(self._value - 1)

    def flush(self) -> None:
        if self._value != self._written:
            self._shared.set(self._value)
            self._written = self._value


class Metrics:
    """All series of one process of a served model; `registry` is where they are declared, not where they are read.

    `process`: what this one is called in the series about processes. Values are gathered here and written for the
    others to see by `flush`. `later` is asked to call it soon, once after the last; without it the owner calls it.
    """

    FLUSH_SECONDS = 0.05
    EXEMPLAR_SECONDS = 1.0  # between two writes of them

    def __init__(
        self,
        model_name: str,
        registry: CollectorRegistry,
        process: str,
        later: Callable[[float, Callable[[], None]], Any] = lambda seconds, flush: None,
    ):
        self._pending: list[_Pending] = []
        self._later = later
        self._is_changed = False
        self._exemplars_at = 0.0

        def kept(pending: PendingKind) -> PendingKind:
            self._pending.append(pending)
            return pending

        def histogram(name: str, help: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            shared = prometheus_client.Histogram(name, help, LABELS, buckets=buckets, registry=registry)
            return kept(Histogram(shared.labels(model_name), self._changed))

        def histograms(name: str, help: str, *labels: str) -> Callable[..., Histogram]:
            """A histogram of seconds with further labels, whose values come with use."""
            shared = prometheus_client.Histogram(name, help, [*LABELS, *labels], buckets=SECONDS, registry=registry)
            return functools.cache(lambda *values: kept(Histogram(shared.labels(model_name, *values), self._changed)))

        def counter(name: str, help: str) -> Counter:
            return counters(name, help)()

        def counters(name: str, help: str, *labels: str) -> Callable[..., Counter]:
            shared = prometheus_client.Counter(name, help, [*LABELS, *labels], registry=registry)
            return functools.cache(lambda *values: kept(Counter(shared.labels(model_name, *values), self._changed)))

        def gauge(name: str, help: str) -> Gauge:
            shared = prometheus_client.Gauge(name, help, LABELS, registry=registry, multiprocess_mode="livesum")
            return kept(Gauge(shared.labels(model_name), self._changed))

        # Observed by the HTTP processes, one sequence (a prompt and its completion) at a time.
        self.time_to_first_token = histogram(
            "chargpt_time_to_first_token_seconds", "From a request's arrival until its first character is written"
        )
        self.request_queue_time = histogram(
            "chargpt_request_queue_time_seconds", "From a request's arrival until the sequence got a cache slot"
        )
        self.request_prefill_time = histogram(
            "chargpt_request_prefill_time_seconds", "From the cache slot until the prompt had run"
        )
        self.request_first_decode_time = histogram(
            "chargpt_request_first_decode_time_seconds", "From the prompt's end until the first character is written"
        )
        self.inter_token_latency = histogram(
            "chargpt_inter_token_latency_seconds", "Between two characters of a sequence; one value per character"
        )
        self.request_time_per_output_token = histogram(
            "chargpt_request_time_per_output_token_seconds",
            "Mean time of a sequence's characters after the first; none where there is only one",
        )
        self.e2e_request_latency = histogram(
            "chargpt_e2e_request_latency_seconds",
            "From a request's arrival until its last character is written, where it ends by stop or length",
        )
        self.request_decode_time = histogram(
            "chargpt_request_decode_time_seconds", "From the prompt's end until the last character is there"
        )
        self.request_inference_time = histogram(
            "chargpt_request_inference_time_seconds", "From the cache slot until the last character is there"
        )
        self.prompt_tokens = counter("chargpt_prompt_tokens", "Characters of prompts")
        self.generation_tokens = counter("chargpt_generation_tokens", "Characters generated and given away")
        self.request_prompt_tokens = histogram("chargpt_request_prompt_tokens", "Characters of a prompt", LENGTHS)
        self.request_generation_tokens = histogram(
            "chargpt_request_generation_tokens", "Characters of a completion", LENGTHS
        )
        self._request_success = counters(
            "chargpt_request_success", "Accepted sequences that ended, by reason", "finished_reason"
        )
        self._admission_rejections = counters(
            "chargpt_admission_rejections", "Sequences that were not accepted, by reason", "reason"
        )
        self._unknown_characters = counters(
            "chargpt_unknown_characters", "Characters replaced or dropped as the model does not know them", "policy"
        )
        self._http_requests = counters(
            "chargpt_http_requests", "HTTP requests answered; 499: the client left", "handler", "method", "status"
        )
        self._http_request_duration = histograms(
            "chargpt_http_request_duration_seconds", "From an HTTP request's headers to its answer's end",
            "handler", "method",
        )  # fmt: skip
        self.http_requests_in_progress = gauge("chargpt_http_requests_in_progress", "HTTP requests being answered")

        # From 0 on: the rate of a series that begins at 1 misses its first event.
        for reason in ("stop", "length", "abort", "timeout", "error"):
            self._request_success(reason)
        for reason in ("queue_full", "shutting_down", "not_ready"):
            self._admission_rejections(reason)

        # Observed by the inference processes.
        self.num_requests_running = gauge("chargpt_num_requests_running", "Sequences that hold a cache slot")
        self.num_requests_waiting = gauge("chargpt_num_requests_waiting", "Sequences in the queue")
        self.cache_slots = gauge("chargpt_cache_slots", "Cache slots there are")
        self.cache_slots_in_use = gauge("chargpt_cache_slots_in_use", "Cache slots that sequences hold")
        self.num_preemptions = counter("chargpt_num_preemptions", "Sequences that lost their slot: there are none")
        self.iteration_batch_size = histogram("chargpt_iteration_batch_size", "Sequences in a decode step", COUNTS)
        self.iteration_batch_utilization = histogram(
            "chargpt_iteration_batch_utilization_ratio", "Sequences in a decode step, over the slots there are", RATIOS
        )
        self.iteration_tokens = histogram(
            "chargpt_iteration_tokens_total", "Characters run in an engine step, prompts included", COUNTS
        )
        self.iteration_seconds = histogram("chargpt_iteration_seconds", "Duration of an engine step")
        self.iteration_phase = histograms(
            "chargpt_iteration_phase_seconds",
            "Duration of a phase of an engine step; transport: of the frames between two",
            "phase",
        )
        self.engine_idle = counter("chargpt_engine_idle_seconds", "Time in which an engine had nothing to do")
        self.exact_choices = counter(
            "chargpt_exact_choices", "Characters chosen from fp64 logits because rounding could have mattered"
        )

        started = prometheus_client.Gauge(
            "chargpt_process_start_time_seconds", "When a process began to serve, as Unix time", [*LABELS, "process"],
            registry=registry, multiprocess_mode="liveall",
        )  # fmt: skip
        started.labels(model_name, process).set(time.time())

    def request_ended(self, finished_reason: str) -> None:
        self._request_success(finished_reason).inc()

    def request_rejected(self, reason: str, count: int = 1) -> None:
        self._admission_rejections(reason).inc(count)

    def unknown_characters(self, policy: str, count: int) -> None:
        if count:
            self._unknown_characters(policy).inc(count)

    def http_request(self, handler: str, method: str, status: int, seconds: float) -> None:
        self._http_requests(handler, method, str(status)).inc()
        self._http_request_duration(handler, method).observe(seconds)

    def _changed(self) -> None:
        if not self._is_changed:
            self._is_changed = True
            self._later(self.FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        """Write what was observed since the last time, for all processes to read."""
        self._is_changed = False
        for pending in self._pending:
            pending.flush()
        if time.monotonic() >= self._exemplars_at:
            self._exemplars_at = time.monotonic() + self.EXEMPLAR_SECONDS
            self._write_exemplars()

    def _write_exemplars(self) -> None:
        """Put them beside the values, which prometheus-client's files have no place for."""
        found = {
            pending.name: {str(bound): exemplar for bound, exemplar in pending.exemplars.items()}
            for pending in self._pending
            if isinstance(pending, Histogram) and pending.exemplars
        }
        if found:
            path = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"], EXEMPLARS.format(os.getpid()))
            temporary = path.with_suffix(".new")
            temporary.write_bytes(msgspec.json.encode(found))
            temporary.replace(path)


def forget_process(pid: int) -> None:
    """Take a dead process out of the gauges; what it counted stays."""
    mark_process_dead(pid)
