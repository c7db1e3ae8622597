"""The inference process: it loads the checkpoints and runs their engines.

Each turn of its synchronous loop takes the messages that arrived, runs one step of one engine, and sends one frame to
each HTTP process that has deltas. The loop blocks while there is nothing to do. The process handles ids and frames
only, no text and no HTTP.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from litserve import LitAPI
from litserve.loops.base import LitLoop

from service.engine.scheduler import BusyError
from service.observe.logs import configure_logging
from service.process import become, spare_old_objects, trim_memory
from service.shared import SharedState
from service.sockets import IDLE_SECONDS, ConsumerLost, WorkerSide
from service.wire import Abort, Delta, Refused, Step, Submit, Submits, consumer_of

if TYPE_CHECKING:
    from service.catalog import Version
    from service.engine.engine import Engine
    from service.engine.host import Host, Hosted
    from service.observe.metrics import Metrics
    from service.settings import Settings

logger = logging.getLogger(__name__)

NICENESS = 5  # HTTP processes get the CPU first, because refusals and first characters wait for them
MAX_RETRY_SECONDS = 3600  # the largest Retry-After


class EngineAPI(LitAPI):
    """The object that LitServe places on a device; it holds the engines of all checkpoints in the listing."""

    # Set by the server:
    settings: Settings  # without the API keys
    folder: Path  # the folder of this run, with the listing of checkpoints
    state: SharedState
    backend: str
    dtype: str
    slots: int  # cache slots
    # Set by `setup`:
    host: Host
    metrics: Metrics

    def setup(self, device: str) -> None:
        process = self.state.worker_names[int(os.environ["LITSERVE_WORKER_ID"])]
        become(process, self.state.main_pid)
        os.nice(NICENESS)
        configure_logging(self.settings.log_level, self.settings.log_format)

        from prometheus_client import CollectorRegistry

        from service.engine.host import Host
        from service.engine.selfcheck import SelfCheckError
        from service.model.checkpoint import CheckpointError
        from service.observe.metrics import Metrics

        self.metrics = Metrics(self.settings.model_name, CollectorRegistry(), process)
        try:
            self.host = Host(
                self.folder, self.state, process, self.metrics, functools.partial(self.open_engine, device),
                max_running=self.slots, loads_alone=self.backend == "cuda",
            )  # fmt: skip
        except Exception as error:
            if isinstance(error, CheckpointError | SelfCheckError):
                logger.critical("%s", error)
            elif is_out_of_memory(error):
                logger.critical(
                    "out of memory on %s with %d slots (%s): choose a smaller number with --max-running-requests",
                    device, self.slots, (str(error).splitlines() or [type(error).__name__])[0],
                )  # fmt: skip
            else:
                raise
            raise SystemExit(1) from None
        self.metrics.cache_slots.set(self.slots)
        spare_old_objects()

    def open_engine(self, device: str, version: Version) -> Engine:
        """Load a version, check that its backend computes the model, and return an engine for it.

        Raises:
            CheckpointError: the copy of the checkpoint is gone or was altered.
            SelfCheckError: the backend computes something else than the model.
            RuntimeError, MemoryError: the model does not run here.
        """
        from service.engine.backends import open_runner
        from service.engine.engine import Engine
        from service.engine.selfcheck import check

        settings, checkpoint = self.settings, version.read(self.folder)
        runner = open_runner(checkpoint, self.backend, self.dtype, self.slots, settings.threads, device)
        check(runner, checkpoint)
        logger.info(
            "serving %s on %s: backend %s, dtype %s, slots %d, threads %d%s",
            version.source, device, runner.backend, runner.dtype, runner.slots, settings.threads,
            f" ({description})" if (description := getattr(runner, "description", "")) else "",
        )  # fmt: skip
        if runner.backend == "cuda":
            logger.info("a GPU pays with many sequences at once; a lone text is expected to be faster on a CPU")
        return Engine(runner, max_waiting=settings.max_queued_requests)


class EngineLoop(LitLoop):
    """The loop of the process. LitServe calls `run` again and again; each call is one iteration."""

    def __init__(self) -> None:
        super().__init__()
        self._sockets: WorkerSide | None = None
        self._stopping = False
        self._flush_at = 0.0
        self._is_trimmed = True  # whether no message has arrived since memory was trimmed
        self._early: list[tuple[int, Submits]] = []  # requests for models that this process may be about to load

    def __call__(self, *arguments: Any) -> None:
        try:
            super().__call__(*arguments)
        except Exception:  # log it here, because multiprocessing would print it
            logger.critical("uncaught exception", exc_info=True)
            raise SystemExit(1) from None

    def run(self, lit_api: EngineAPI, device: str, worker_id: int, request_queue: Any, folder: Path, *_: Any) -> None:
        host, metrics = lit_api.host, lit_api.metrics
        lit_api.state.beat(lit_api.state.worker_names[worker_id])
        if self._sockets is None:
            host.show()
            self._sockets = WorkerSide(folder, worker_id)
            signal.signal(signal.SIGTERM, self._stop)
        sockets = self._sockets
        if self._stopping and not sockets.is_connected:
            raise SystemExit(0)
        if host.follow(IDLE_SECONDS):
            return
        began = time.monotonic()
        is_idle = not host.has_work
        if is_idle or began >= self._flush_at:
            metrics.flush()
            self._flush_at = began + metrics.FLUSH_SECONDS
        early, self._early = self._early, []
        messages = [*early, *sockets.receive(block=is_idle and (not early or host.is_behind))]
        if is_idle:
            waited_until = time.monotonic()
            metrics.engine_idle_seconds.inc(waited_until - began)
            began = waited_until
        if messages:
            self._is_trimmed = False
        elif is_idle and not self._is_trimmed:
            self._is_trimmed = True
            trim_memory()
        for consumer_id, message in messages:
            self._handle(lit_api, sockets, message, consumer_id)
        hosted = host.next()
        if hosted is None:
            return
        engine, receiving_until = hosted.engine, time.monotonic()
        is_saturated = engine.scheduler.is_saturated
        deltas = engine.step()
        seconds = time.monotonic() - receiving_until
        if is_saturated:
            num_ended = sum(delta.ended_at is not None for delta in deltas)
            hosted.drain.observe(began, num_ended, time.monotonic())
        if not is_saturated or not engine.has_work:
            hosted.drain.pause()
        frames: defaultdict[int, list[Delta]] = defaultdict(list)  # one for each HTTP process
        for delta in deltas:
            frames[consumer_of(delta.id)].append(delta)
        for consumer_id, its_deltas in frames.items():
            sockets.send(Step.of(its_deltas), consumer_id)
        transport_seconds = receiving_until - began + time.monotonic() - engine.stats.ended_at
        _observe(host, hosted, lit_api.slots, transport_seconds)
        host.ran(hosted, seconds)

    def _handle(
        self, lit_api: EngineAPI, sockets: WorkerSide, message: Submits | Abort | ConsumerLost, consumer_id: int
    ) -> None:
        host = lit_api.host
        match message:
            case Submits():
                for submit in message.each():
                    self._submit(lit_api, sockets, submit, consumer_id)
            case Abort(id):
                self._early = [it for it in self._early if it[1].first.id != id]
                for hosted in host.models.values():
                    hosted.engine.abort(id)
            case ConsumerLost():
                self._early = [it for it in self._early if it[0] != consumer_id]
                for hosted in host.models.values():
                    for id in hosted.engine.ids:
                        if consumer_of(id) == consumer_id:
                            hosted.engine.abort(id)

    def _submit(self, lit_api: EngineAPI, sockets: WorkerSide, submit: Submit, consumer_id: int) -> None:
        host = lit_api.host
        if submit.model not in host.models and host.is_behind:
            self._early.append((consumer_id, Submits(submit, [])))
            return
        try:
            hosted = host.models[submit.model]  # KeyError: replaced before this process started
            hosted.submit(submit, lit_api.settings.max_queue_seconds)
        except BusyError as error:
            seconds = max(1, min(MAX_RETRY_SECONDS, math.ceil(hosted.expected_wait(submit))))
            sockets.send(Refused(submit.id, str(error), seconds), consumer_id)
        except Exception:  # only this request fails
            logger.exception("a sequence could not be queued", extra={"request_ids": [submit.request_id]})
            sockets.send(Step.of([Delta(submit.id, [], "error")]), consumer_id)

    def _stop(self, *_: Any) -> None:
        """Handle SIGTERM: exit when no HTTP process is connected any more. The HTTP processes end first."""
        self._stopping = True
        assert self._sockets is not None
        self._sockets.wake()


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of any library means that this machine or a GPU is out of memory."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "status_alloc_failed" in text


def _observe(host: Host, hosted: Hosted, slots: int, transport_seconds: float) -> None:
    """Record the metrics of a model's last step."""
    metrics, stats = hosted.metrics, hosted.engine.stats
    metrics.iteration.observe(stats.seconds)
    for phase, seconds in stats.phases.items():
        metrics.iteration_phase(phase).observe(seconds)
    metrics.iteration_phase("transport").observe(transport_seconds)
    if stats.num_decode_rows:
        metrics.iteration_batch_size.observe(stats.num_decode_rows)
        metrics.iteration_batch_utilization_ratio.observe(min(1.0, stats.num_decode_rows / slots))
    metrics.iteration_tokens_total.observe(stats.num_decode_tokens + stats.num_prefill_tokens)
    if stats.num_copied_tokens:
        metrics.prefix_cache_hit_tokens.inc(stats.num_copied_tokens)
    if stats.num_dropped_tokens:
        metrics.dropped_tokens.inc(stats.num_dropped_tokens)
    if stats.num_moved:
        metrics.num_preemptions.inc(stats.num_moved)
    # An earlier or later version of the same model has the same series.
    schedulers = [other.engine.scheduler for other in host.models.values() if other.metrics is metrics]
    running = sum(scheduler.num_running for scheduler in schedulers)
    metrics.num_requests_running.set(running)
    metrics.num_requests_waiting.set(sum(scheduler.num_waiting for scheduler in schedulers))
    metrics.cache_slots_in_use.set(running)
