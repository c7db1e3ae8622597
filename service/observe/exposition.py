"""The page of /metrics: the sums of all processes' values, and metrics that are computed when scraped.

Those are each process's memory and CPU time, the checkpoint and versions, and ratios of sums. An option repeats series
under vLLM's names. Records no observations.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import msgspec
import psutil
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as SampleExemplar
from prometheus_client.samples import Sample

from service.model.checkpoint import Checkpoint
from service.observe import metrics
from service.shared import REASONS, SharedState

# Names in vLLM 0.33, the last two from prometheus-fastapi-instrumentator, which vLLM uses.
VLLM_NAMES = {
    f"chargpt_{stem}": f"vllm:{stem}"
    for stem in (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens",
        "generation_tokens",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_success",
        "iteration_tokens_total",
        "num_preemptions",
        "admission_rejections",
    )
} | {
    "chargpt_http_requests": "http_requests",
    "chargpt_http_request_duration_seconds": "http_request_duration_seconds",
}


class Exposition(Collector):
    """All metrics of the service and of the checkpoints it serves.

    served: those, by name; rows: in shared memory, of every name that was ever listed; engine: labels of its info.
    """

    def __init__(
        self,
        service_name: str,
        served: Callable[[], Mapping[str, Checkpoint]],
        rows: Callable[[], Mapping[str, int]],
        *,
        engine: dict[str, str],
        vllm_names: bool,
        state: SharedState,
        hang_seconds: float,
    ):
        self.service_name, self.engine = service_name, engine
        self._served, self._rows = served, rows
        self.vllm_names = vllm_names
        self.state, self.hang_seconds = state, hang_seconds
        self.certificate_expires_at: float | None = None  # Unix time, of the one in use; None: no TLS
        self._lock = threading.Lock()

    def page(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type: OpenMetrics 1.0 with exemplars if `accept` names it, else text 0.0.4.

        Scrapes are serialized: of two that overlap, the later answer could hold the lower counters.
        """
        registry = CollectorRegistry()
        registry.register(self)
        with self._lock:
            if "application/openmetrics-text" in accept:
                # prometheus-client 0.26 escapes the colon in sample names by default.
                return openmetrics.generate_latest(registry, openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
            return exposition.generate_latest(registry), exposition.CONTENT_TYPE_PLAIN_0_0_4

    def describe(self) -> Iterable[Metric]:
        return []  # otherwise registering calls collect()

    def collect(self) -> Iterator[Metric]:
        registry = CollectorRegistry()
        families = {family.name: family for family in MultiProcessCollector(registry).collect()}
        started = families["chargpt_process_start_time_seconds"]
        started.samples = [
            sample._replace(labels={name: value for name, value in sample.labels.items() if name != "pid"})
            for sample in started.samples
        ]
        for family in (*self._ratios(families), *self._processes(), *self._sequences(), *self._identity()):
            families[family.name] = family
        _add_exemplars(families, _read_exemplars(Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])))
        yield from families.values()
        if self.vllm_names:
            for ours, theirs in VLLM_NAMES.items():
                if ours in families:
                    yield _renamed(families[ours], theirs)

    def _gauge(self, name: str, help: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, help, labels=[*metrics.LABELS, *labels])

    def _ratios(self, families: dict[str, Metric]) -> Iterator[Metric]:
        usage = self._gauge("chargpt_kv_cache_usage_perc", "Share of cache slots in use, 0 to 1")
        slots = sum(sample.value for sample in families["chargpt_cache_slots"].samples)
        if slots:  # 0 without a worker
            for sample in families["chargpt_cache_slots_in_use"].samples:
                usage.add_metric([sample.labels["model_name"]], min(1.0, sample.value / slots))
        yield usage

    def _processes(self) -> Iterator[Metric]:
        memory = self._gauge(
            "chargpt_process_resident_memory_bytes", "Resident memory of a process, in bytes", "process"
        )
        files = self._gauge("chargpt_process_open_fds", "Open file descriptors of a process", "process")
        threads = self._gauge("chargpt_process_threads", "Threads of a process", "process")
        cpu = CounterMetricFamily(
            "chargpt_process_cpu_seconds", "CPU time of a process, user and system, in seconds",
            labels=[*metrics.LABELS, "process"],
        )  # fmt: skip
        for name, pid in sorted((self.state.pids | {"main": os.getppid()}).items()):
            labels = [self.service_name, name]
            with contextlib.suppress(psutil.Error):  # ended since, or a zombie
                process = psutil.Process(pid)
                with process.oneshot():
                    times = process.cpu_times()
                    memory.add_metric(labels, process.memory_info().rss)
                    files.add_metric(labels, process.num_fds())
                    threads.add_metric(labels, process.num_threads())
                    cpu.add_metric(labels, times.user + times.system)
        yield from (memory, files, threads, cpu)
        for name, text, names in (
            ("chargpt_http_processes", "HTTP processes", self.state.http_names),
            ("chargpt_workers", "Inference workers", self.state.worker_names),
        ):
            ready = sum(self.state.is_responsive(process, self.hang_seconds) for process in names)
            for suffix, help, value in (
                ("", f"{text} that should run", len(names)),
                ("_ready", f"{text} that have started and do not hang", ready),
            ):
                count = self._gauge(name + suffix, help)
                count.add_metric([self.service_name], value)
                yield count
        expiry = self._gauge(
            "chargpt_tls_certificate_expiry_timestamp_seconds",
            "When the certificate in use expires, in seconds since the Unix epoch; only with TLS",
        )
        if self.certificate_expires_at is not None:
            expiry.add_metric([self.service_name], self.certificate_expires_at)
        yield expiry

    def _identity(self) -> Iterator[Metric]:
        yield self._info(
            "chargpt_build_info", "Always 1; software versions as labels",
            {"version": version("chargpt"), "python": platform.python_version()}
            | {name: version(name) for name in ("torch", "litserve")},
        )  # fmt: skip
        yield self._info("chargpt_engine_info", "Always 1; backend and dtype of the engine as labels", self.engine)
        sizes = ("block_size", "n_layer", "n_embd", "vocab_size")
        info = self._gauge(
            "chargpt_checkpoint_info", "Always 1; hash and sizes of the served checkpoint as labels",
            "checkpoint_sha256", *sizes,
        )  # fmt: skip
        loss = self._gauge(
            "chargpt_checkpoint_validation_loss", "Validation loss recorded in training, in nats per character"
        )
        for name, checkpoint in self._served().items():
            shape = checkpoint.hyperparameters
            info.add_metric([name, checkpoint.digest, *(str(shape[size]) for size in sizes)], 1)
            recorded = checkpoint.training.get("losses", {}).get("whole")
            if recorded is not None:
                loss.add_metric([name], recorded)
        yield from (info, loss)

    def _sequences(self) -> Iterator[Metric]:
        accepted = CounterMetricFamily(
            "chargpt_requests_accepted", "Sequences accepted that have begun or ended; each ends once",
            labels=metrics.LABELS,
        )  # fmt: skip
        ended = CounterMetricFamily(
            "chargpt_request_success", "Accepted sequences that ended, by finish reason",
            labels=[*metrics.LABELS, "finished_reason"],
        )  # fmt: skip
        reloads = CounterMetricFamily(
            "chargpt_checkpoint_reloads", "Checkpoints loaded, refused or removed at SIGHUP, or refused at start",
            labels=[*metrics.LABELS, "result"],
        )  # fmt: skip
        for name, row in self._rows().items():
            accepted.add_metric([name], self.state.num_sequences(row, "begun"))
            for reason in REASONS:
                ended.add_metric([name, reason], self.state.num_sequences(row, reason))
            for result, count in self.state.num_reloads(row).items():
                reloads.add_metric([name, result], count)
        yield from (accepted, ended, reloads)
        for kind, text, names in (
            ("worker", "inference workers", self.state.worker_names),
            ("http_process", "HTTP processes", self.state.http_names),
        ):
            help = f"Restarts of {text} after a crash"
            restarts = CounterMetricFamily(f"chargpt_{kind}_restarts", help, labels=metrics.LABELS)
            restarts.add_metric([self.service_name], self.state.num_restarts(names))
            yield restarts

    def _info(self, name: str, help: str, labels: dict[str, str]) -> Metric:
        family = self._gauge(name, help, *labels)
        family.add_metric([self.service_name, *labels.values()], 1)
        return family


Bucket = tuple[str, float]  # model_name, upper bound


def _read_exemplars(folder: Path) -> dict[str, dict[Bucket, metrics.Exemplar]]:
    """The latest exemplar of all processes, by histogram name and bucket."""
    latest: dict[str, dict[Bucket, metrics.Exemplar]] = {}
    for path in folder.glob(metrics.EXEMPLARS.format("*")):
        for name, model_name, bound, *values in msgspec.json.decode(path.read_bytes()):
            known, exemplar = latest.setdefault(name, {}), metrics.Exemplar(*values)
            bucket = (model_name, math.inf if bound is None else bound)  # JSON has no infinity
            if bucket not in known or exemplar.timestamp > known[bucket].timestamp:
                known[bucket] = exemplar
    return latest


def _add_exemplars(families: dict[str, Metric], exemplars: dict[str, dict[Bucket, metrics.Exemplar]]) -> None:
    for name, buckets in exemplars.items():
        samples = families[name].samples
        for i, sample in enumerate(samples):
            labels = sample.labels
            exemplar = buckets.get((labels["model_name"], float(labels.get("le", "nan"))))
            if sample.name.endswith("_bucket") and exemplar is not None:
                exemplar_labels = {"request_id": exemplar.request_id}
                value = SampleExemplar(exemplar_labels, exemplar.value, exemplar.timestamp)
                samples[i] = sample._replace(exemplar=value)


def _renamed(family: Metric, name: str) -> Metric:
    """A copy under vLLM's name, labelled engine 0: the values here are sums over all engines."""
    renamed = Metric(name, family.documentation, family.type)
    extra = {"engine": "0"} if name.startswith("vllm:") else {}
    for sample in family.samples:
        labels = sample.labels | extra
        if name.startswith("http_"):
            del labels["model_name"]
            if "status" in labels:
                labels["status"] = labels["status"][0] + "xx"
        renamed.samples.append(Sample(name + sample.name.removeprefix(family.name), labels, *sample[2:]))
    if name == "http_requests":
        renamed.samples = _summed(renamed.samples)
    return renamed


def _summed(samples: list[Sample]) -> list[Sample]:
    """One sample per set of labels, the sum of all with the same set."""
    totals: dict[tuple[str, frozenset[tuple[str, str]]], Sample] = {}
    for sample in samples:
        key = (sample.name, frozenset(sample.labels.items()))
        total = totals[key].value if key in totals else 0.0
        totals[key] = sample._replace(value=total + sample.value)
    return list(totals.values())
