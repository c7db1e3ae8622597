"""Every metric, label and bucket.

Names are vLLM's stems under `chargpt_`, in base units. The values of all processes live in files of one folder
(prometheus-client's multiprocess mode), so that any HTTP process answers for all of them. The folder is
named by PROMETHEUS_MULTIPROC_DIR, which must be set before this module is imported.
"""

from __future__ import annotations

from bisect import bisect_left

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

# 0.1 ms to 87 s, a factor of about 1.5 to 2 a bucket: fit for a small model.
SECONDS = (
    0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02,
    0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 30, 60, 120, 300,
)  # fmt: skip
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

LABELS = ["model_name"]


class Histogram(prometheus_client.Histogram):
    """Takes equal values together: at some 2 µs a value, one for each character would be dear."""

    def observe_many(self, amount: float, count: int) -> None:
        """As `count` times observe(amount)."""
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)


class Metrics:
    """All series of one served model; `registry` is where they are declared, not where they are read."""

    def __init__(self, model_name: str, registry: CollectorRegistry):
        def histogram(name: str, help: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(name, help, LABELS, buckets=buckets, registry=registry).labels(model_name)

        def counter(name: str, help: str) -> Counter:
            return Counter(name, help, LABELS, registry=registry).labels(model_name)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(name, help, LABELS, registry=registry, multiprocess_mode="livesum").labels(model_name)

        # Observed by the HTTP processes, one sequence (a prompt and its completion) at a time.
        self.time_to_first_token = histogram(
            "chargpt_time_to_first_token_seconds", "From a request's arrival until its first character is written"
        )
        self.inter_token_latency = histogram(
            "chargpt_inter_token_latency_seconds", "Between two characters of a sequence; one value per character"
        )
        self.e2e_request_latency = histogram(
            "chargpt_e2e_request_latency_seconds", "From a request's arrival until its last character is written"
        )
        self.request_queue_time = histogram("chargpt_request_queue_time_seconds", "Until the sequence got a cache slot")
        self.request_prefill_time = histogram(
            "chargpt_request_prefill_time_seconds", "From the cache slot to the first character chosen"
        )
        self.prompt_tokens = counter("chargpt_prompt_tokens", "Characters of prompts")
        self.generation_tokens = counter("chargpt_generation_tokens", "Characters generated and given away")
        self.request_prompt_tokens = histogram("chargpt_request_prompt_tokens", "Characters of a prompt", LENGTHS)
        self.request_generation_tokens = histogram(
            "chargpt_request_generation_tokens", "Characters of a completion", LENGTHS
        )
        self._request_success = Counter(
            "chargpt_request_success", "Sequences that ended, by reason", [*LABELS, "finished_reason"],
            registry=registry,
        )  # fmt: skip
        self._admission_rejections = Counter(
            "chargpt_admission_rejections", "Sequences that were not accepted, by reason", [*LABELS, "reason"],
            registry=registry,
        )  # fmt: skip
        self._http_requests = Counter(
            "chargpt_http_requests", "HTTP requests answered", [*LABELS, "handler", "method", "status"],
            registry=registry,
        )  # fmt: skip

        # Observed by the inference processes.
        self.num_requests_running = gauge("chargpt_num_requests_running", "Sequences that hold a cache slot")
        self.num_requests_waiting = gauge("chargpt_num_requests_waiting", "Sequences in the queue")
        self.iteration_batch_size = histogram("chargpt_iteration_batch_size", "Sequences in a decode step", COUNTS)
        self.iteration_tokens = histogram(
            "chargpt_iteration_tokens", "Characters run in an engine step, prompts included", COUNTS
        )
        self.iteration_seconds = histogram("chargpt_iteration_seconds", "Duration of an engine step")
        self.exact_choices = counter(
            "chargpt_exact_choices", "Characters chosen from fp64 logits because rounding could have mattered"
        )
        self._model_name = model_name

    def request_ended(self, finished_reason: str) -> None:
        self._request_success.labels(self._model_name, finished_reason).inc()

    def request_rejected(self, reason: str) -> None:
        self._admission_rejections.labels(self._model_name, reason).inc()

    def http_request(self, handler: str, method: str, status: int) -> None:
        self._http_requests.labels(self._model_name, handler, method, str(status)).inc()


def exposition() -> bytes:
    """The sum over all processes in Prometheus' text format 0.0.4."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return generate_latest(registry)


def forget_process(pid: int) -> None:
    """Take a dead process out of the gauges; what it counted stays."""
    mark_process_dead(pid)
