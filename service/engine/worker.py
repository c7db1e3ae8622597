"""The inference process: it loads one checkpoint and runs its engine.

Each turn of its synchronous loop takes the messages that arrived, runs one step of the engine, and sends one frame to
each HTTP process that has deltas. The loop blocks while there is nothing to do. The process handles ids and frames
only, no text and no HTTP.
"""

from __future__ import annotations

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
from service.shared import SharedState, worker_name
from service.sockets import ConsumerLost, WorkerSide
from service.wire import Abort, Delta, Refused, Step, Submit, Submits, consumer_of

if TYPE_CHECKING:
    from service.catalog import Version
    from service.engine.admission import Admission
    from service.engine.engine import Engine
    from service.observe.metrics import Metrics, ModelMetrics
    from service.settings import Settings

logger = logging.getLogger(__name__)

NICENESS = 5  # HTTP processes get the CPU first, because refusals and first characters wait for them
MAX_RETRY_SECONDS = 3600  # the largest Retry-After
WARM_UP_CHARACTERS = 8


class EngineAPI(LitAPI):
    """The object that LitServe places on a device; it holds the engine of one version of a checkpoint."""

    # Set by the server:
    settings: Settings  # without the API keys
    folder: Path  # the folder of this run, with the copies of checkpoints
    state: SharedState
    version: Version
    backend: str
    dtype: str
    slots: int  # cache slots
    # Set by `setup`:
    admission: Admission
    metrics: Metrics
    model_metrics: ModelMetrics

    def setup(self, device: str) -> None:
        process = worker_name(int(os.environ["LITSERVE_WORKER_ID"]))
        become(process, self.state.main_pid)
        os.nice(NICENESS)
        configure_logging(self.settings.log_level, self.settings.log_format)

        from prometheus_client import CollectorRegistry

        from service.engine.admission import Admission
        from service.engine.selfcheck import SelfCheckError
        from service.model.checkpoint import CheckpointError
        from service.observe.metrics import Metrics

        self.metrics = Metrics(self.settings.model_name, CollectorRegistry(), process)
        self.model_metrics = self.metrics.of(self.version.name)
        try:
            self.admission = Admission(self.open_engine(device), self.settings.max_queue_seconds)
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
        self.model_metrics.cache_slots.set(self.slots)
        spare_old_objects()

    def open_engine(self, device: str) -> Engine:
        """Load the checkpoint, check that the backend computes it, and return an engine that has run once.

        Raises:
            CheckpointError: the copy of the checkpoint is gone or was altered.
            SelfCheckError: the backend computes something else than the model, or no text.
            RuntimeError, MemoryError: the model does not run here.
        """
        from service.engine.backends import open_runner
        from service.engine.engine import Engine
        from service.engine.selfcheck import SelfCheckError, check
        from service.model.params import SamplingParams

        settings, checkpoint = self.settings, self.version.read(self.folder)
        runner = open_runner(checkpoint, self.backend, self.dtype, self.slots, settings.threads, device)
        check(runner, checkpoint)
        logger.info(
            "serving %s on %s: backend %s, dtype %s, slots %d, threads %d%s",
            self.version.source, device, runner.backend, runner.dtype, runner.slots, settings.threads,
            f" ({description})" if (description := getattr(runner, "description", "")) else "",
        )  # fmt: skip
        if runner.backend == "cuda":
            logger.info("a GPU pays with many sequences at once; a lone text is expected to be faster on a CPU")
        engine = Engine(runner, max_waiting=settings.max_queued_requests)
        (ids,) = engine.generate([Submit(0, [0], WARM_UP_CHARACTERS, SamplingParams())])  # the first request is fast
        if len(ids) < WARM_UP_CHARACTERS:
            raise SelfCheckError("the model does not run: its logits are not finite")
        return engine


class EngineLoop(LitLoop):
    """The loop of the process. LitServe calls `run` again and again; each call is one iteration."""

    def __init__(self) -> None:
        super().__init__()
        self._sockets: WorkerSide | None = None
        self._stopping = False
        self._flush_at = 0.0
        self._is_trimmed = False  # whether memory was trimmed since the last message, or since loading

    def __call__(self, *arguments: Any) -> None:
        try:
            super().__call__(*arguments)
        except Exception:  # log it here, because multiprocessing would print it
            logger.critical("uncaught exception", exc_info=True)
            raise SystemExit(1) from None

    def run(self, lit_api: EngineAPI, device: str, worker_id: int, request_queue: Any, folder: Path, *_: Any) -> None:
        if self._sockets is None:
            self._sockets = WorkerSide(folder, worker_id, lit_api.version.id)
            signal.signal(signal.SIGTERM, self._stop)
        lit_api.state.beat(worker_name(worker_id))
        if self._stopping and not self._sockets.is_connected:
            raise SystemExit(0)
        began = self._receive(lit_api, self._sockets)
        if lit_api.admission.engine.has_work:
            self._step(lit_api, self._sockets, began)

    def _receive(self, lit_api: EngineAPI, sockets: WorkerSide) -> float:
        """Handle the messages that arrived; without work, wait for one. Returns when the turn began."""
        metrics, is_idle, began = lit_api.metrics, not lit_api.admission.engine.has_work, time.monotonic()
        if is_idle or began >= self._flush_at:
            metrics.flush()
            self._flush_at = began + metrics.FLUSH_SECONDS
        messages = sockets.receive(block=is_idle)
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
            self._handle(lit_api.admission, sockets, message, consumer_id)
        return began

    def _step(self, lit_api: EngineAPI, sockets: WorkerSide, began: float) -> None:
        """Run a step of the engine, and send its results."""
        engine, received_at = lit_api.admission.engine, time.monotonic()
        frames: defaultdict[int, list[Delta]] = defaultdict(list)  # one for each HTTP process
        for delta in lit_api.admission.step(began):
            frames[consumer_of(delta.id)].append(delta)
        for consumer_id, its_deltas in frames.items():
            sockets.send(Step.of(its_deltas), consumer_id)
        transport_seconds = received_at - began + time.monotonic() - engine.stats.ended_at
        _observe(lit_api.model_metrics, engine, lit_api.slots, transport_seconds)

    def _handle(
        self, admission: Admission, sockets: WorkerSide, message: Submits | Abort | ConsumerLost, consumer_id: int
    ) -> None:
        engine = admission.engine
        match message:
            case Submits():
                for submit in message.each():
                    self._submit(admission, sockets, submit, consumer_id)
            case Abort(id):
                engine.abort(id)
            case ConsumerLost():
                for id in engine.ids:
                    if consumer_of(id) == consumer_id:
                        engine.abort(id)

    def _submit(self, admission: Admission, sockets: WorkerSide, submit: Submit, consumer_id: int) -> None:
        try:
            admission.submit(submit)
        except BusyError as error:
            seconds = max(1, min(MAX_RETRY_SECONDS, math.ceil(admission.expected_wait(submit))))
            sockets.send(Refused(submit.id, str(error), seconds), consumer_id)
        except Exception:  # only this request fails
            logger.exception("a sequence could not be queued", extra={"request_ids": [submit.request_id]})
            sockets.send(Step.of([Delta(submit.id, [], "error")]), consumer_id)

    def _stop(self, *_: Any) -> None:
        """Handle SIGTERM: exit when no HTTP process is connected any more.

        Each HTTP process ends before, or follows a listing without this process's checkpoint.
        """
        self._stopping = True
        assert self._sockets is not None
        self._sockets.wake()


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of any library means that this machine or a GPU is out of memory."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "status_alloc_failed" in text


def _observe(metrics: ModelMetrics, engine: Engine, slots: int, transport_seconds: float) -> None:
    """Record the metrics of the last step."""
    stats, scheduler = engine.stats, engine.scheduler
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
    if scheduler.num_moved:
        metrics.num_preemptions.inc(scheduler.num_moved)
        scheduler.num_moved = 0
    metrics.num_requests_running.set(scheduler.num_running)
    metrics.num_requests_waiting.set(scheduler.num_waiting)
    metrics.cache_slots_in_use.set(scheduler.num_running)
