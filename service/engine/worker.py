"""The inference process: loads the checkpoint and runs the engine.

One synchronous loop: take what arrived, one engine step, one frame to each HTTP process with deltas. It blocks while
there is nothing to do. Ids and frames only: no text, no HTTP.
"""

from __future__ import annotations

import logging
import math
import os
import signal
from collections import defaultdict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from litserve import LitAPI
from litserve.loops.base import LitLoop

from service.engine.scheduler import LongWaitError, QueueFullError, reserved_slots
from service.model.params import SamplingParams
from service.observe.logs import LogFormat, configure_logging
from service.process import die_with_parent, relax_garbage_collector
from service.shared import SharedState
from service.sockets import ConsumerLost, SocketTransport, WorkerSide
from service.wire import Abort, Delta, Refused, Step, Submit, consumer_of

if TYPE_CHECKING:
    from service.engine.engine import Engine
    from service.observe.metrics import Metrics

logger = logging.getLogger(__name__)

WARM_UP_CHARACTERS = 8
MAX_RETRY_SECONDS = 3600  # of a Retry-After


class EngineOptions(NamedTuple):
    """What a worker needs of the settings; not all of them, as it has no use for the digests of API keys."""

    checkpoint: Path
    digest: str  # of the checkpoint's manifest; a folder that was replaced meanwhile is refused
    model_name: str
    backend: str
    dtype: str
    threads: int
    max_running: int
    max_waiting: int
    max_queue_seconds: float
    is_fair: bool
    step_seconds: float
    log_level: str
    log_format: LogFormat


class EngineAPI(LitAPI):
    """What LitServe places on a device: an engine over the checkpoint's model."""

    options: EngineOptions  # these two from the server
    state: SharedState
    engine: Engine  # these two from `setup`
    metrics: Metrics

    def setup(self, device: str) -> None:
        options = self.options
        slots = options.max_running + (reserved_slots(options.max_running) if options.is_fair else 0)
        die_with_parent(self.state.main_pid)
        configure_logging(options.log_level, options.log_format)

        from prometheus_client import CollectorRegistry

        from service.engine.engine import Engine
        from service.engine.runner import open_runner
        from service.model.checkpoint import Checkpoint, CheckpointError
        from service.observe.metrics import Metrics

        try:
            runner = open_runner(
                Checkpoint.read(options.checkpoint, options.digest), options.backend, options.dtype,
                slots, options.threads, device,
            )  # fmt: skip
        except CheckpointError as error:
            logger.critical("%s", error)
            raise SystemExit(1) from None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.critical(
                "out of memory on %s with %d slots (%s): choose a smaller number with --max-running-requests",
                device, slots, (str(error).splitlines() or [type(error).__name__])[0],
            )  # fmt: skip
            raise SystemExit(1) from None
        self.engine = Engine(
            runner, max_running=options.max_running, max_waiting=options.max_waiting,
            is_fair=options.is_fair, step_seconds=options.step_seconds,
        )  # fmt: skip
        warm_up(self.engine)
        self.metrics = Metrics(options.model_name, CollectorRegistry(), f"worker-{os.environ['LITSERVE_WORKER_ID']}")
        self.metrics.num_requests_running.set(0)
        self.metrics.num_requests_waiting.set(0)
        self.metrics.cache_slots.set(options.max_running)
        self.metrics.cache_slots_in_use.set(0)
        relax_garbage_collector()
        logger.info(
            "serving %s on %s: backend %s, dtype %s, slots %d, threads %d%s",
            options.checkpoint, device, runner.backend, runner.dtype, runner.slots, options.threads,
            f" ({description})" if (description := getattr(runner, "description", "")) else "",
        )  # fmt: skip


class EngineLoop(LitLoop):
    """LitServe calls `run` for ever; each call is one iteration."""

    def __init__(self) -> None:
        super().__init__()
        self._sockets: WorkerSide | None = None
        self._stopping = False
        self._drain = DrainRate()
        self._flush_at = 0.0

    def __call__(self, *arguments: Any) -> None:
        try:
            super().__call__(*arguments)
        except Exception:  # multiprocessing would print it
            logger.critical("uncaught exception", exc_info=True)
            raise SystemExit(1) from None

    def run(
        self, lit_api: EngineAPI, device: str, worker_id: int, request_queue: Any, transport: SocketTransport, *_: Any
    ) -> None:
        engine, metrics = lit_api.engine, lit_api.metrics
        lit_api.state.beat(lit_api.state.worker_names[worker_id])
        if self._sockets is None:
            self._sockets = transport.listen(worker_id)
            signal.signal(signal.SIGTERM, self._stop)
        sockets = self._sockets
        if self._stopping and not sockets.is_connected:
            raise SystemExit(0)
        began = engine.clock()
        is_idle = not engine.has_work
        if is_idle or began >= self._flush_at:
            metrics.flush()
            self._flush_at = began + metrics.FLUSH_SECONDS
        messages = sockets.receive(block=is_idle)
        if is_idle:
            waited_until = engine.clock()
            metrics.engine_idle.inc(waited_until - began)
            began = waited_until
        for consumer_id, message in messages:
            self._handle(lit_api, sockets, message, consumer_id)
        if not engine.has_work:
            return
        receiving = engine.clock() - began
        is_saturated = engine.scheduler.is_saturated
        deltas = engine.step()
        if is_saturated:
            num_ended = sum(delta.ended_at is not None for delta in deltas)
            self._drain.observe(engine.clock() - began, num_ended, engine.clock())
        self._send(engine, sockets, deltas)
        _observe(engine, metrics, transport_seconds=receiving + engine.clock() - engine.stats.ended_at)

    def _handle(
        self, lit_api: EngineAPI, sockets: WorkerSide, message: Submit | Abort | ConsumerLost, consumer_id: int
    ) -> None:
        engine = lit_api.engine
        match message:
            case Submit():
                wait = engine.scheduler.expected_wait(message, self._drain.rate(engine.clock()))
                limit = min(message.timeout_seconds, lit_api.options.max_queue_seconds)
                try:
                    if wait > limit and not message.must_run:
                        raise LongWaitError(wait, limit)
                    engine.submit(message)
                except (LongWaitError, QueueFullError) as error:
                    seconds = max(1, min(MAX_RETRY_SECONDS, math.ceil(wait)))
                    sockets.send(Refused(message.id, str(error), seconds), consumer_id)
            case Abort(id):
                engine.abort(id)
            case ConsumerLost():
                for sequence in engine.scheduler:
                    if consumer_of(sequence.id) == consumer_id:
                        engine.abort(sequence.id)

    def _send(self, engine: Engine, sockets: WorkerSide, deltas: list[Delta]) -> None:
        """One frame per HTTP process."""
        outgoing: defaultdict[int, list[Delta]] = defaultdict(list)
        for delta in deltas:
            outgoing[consumer_of(delta.id)].append(delta)
        for consumer_id, its_deltas in outgoing.items():
            sockets.send(Step.of(its_deltas), consumer_id)

    def _stop(self, *_: Any) -> None:
        """SIGTERM: exit once no HTTP process is connected; they end first."""
        self._stopping = True
        assert self._sockets is not None
        self._sockets.wake()


def warm_up(engine: Engine) -> None:
    """Generate a few characters: what cannot run is known before the worker is ready, and the first request is fast.

    Raises:
        RuntimeError: the model gives nothing.
    """
    (ids,) = engine.generate([Submit(0, [0], WARM_UP_CHARACTERS, SamplingParams())])
    if len(ids) < WARM_UP_CHARACTERS:
        raise RuntimeError("the model does not run: its logits are not finite")


def is_out_of_memory(error: Exception) -> bool:
    """Of this machine or of a GPU, whichever library noticed."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "status_alloc_failed" in text


def _observe(engine: Engine, metrics: Metrics, transport_seconds: float) -> None:
    """Metrics of the last step."""
    stats, scheduler = engine.stats, engine.scheduler
    metrics.iteration_seconds.observe(stats.seconds)
    for phase, seconds in stats.phases.items():
        metrics.iteration_phase(phase).observe(seconds)
    metrics.iteration_phase("transport").observe(transport_seconds)
    if stats.num_decode_rows:
        metrics.iteration_batch_size.observe(stats.num_decode_rows)
        metrics.iteration_batch_utilization.observe(min(1.0, stats.num_decode_rows / scheduler.max_running))
    metrics.iteration_tokens.observe(stats.num_decode_tokens + stats.num_prefill_tokens)
    if stats.num_copied_tokens:
        metrics.prefix_cache_hit_tokens.inc(stats.num_copied_tokens)
    if stats.num_dropped_tokens:
        metrics.dropped_tokens.inc(stats.num_dropped_tokens)
    metrics.num_requests_running.set(scheduler.num_running)
    metrics.num_requests_waiting.set(scheduler.num_waiting)
    metrics.cache_slots_in_use.set(scheduler.num_running)


class DrainRate:
    """How fast sequences end while further ones would wait: at other times it is only as fast as they come.

    What was seen is forgotten after FORGET_SECONDS without such a time: what comes next may be of another kind.
    """

    FORGET_SECONDS = 60.0

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=256)  # when the latest ended, in seconds of such time
        self._seconds = 0.0
        self._observed_at = 0.0

    def observe(self, seconds: float, num_ended: int, now: float) -> None:
        """Add a step."""
        self._seconds += seconds
        self._observed_at = now
        self._ends.extend([self._seconds] * num_ended)

    def rate(self, now: float) -> float | None:
        """Sequences per second; None before two have ended."""
        if now - self._observed_at > self.FORGET_SECONDS:
            self._ends.clear()
        if len(self._ends) < 2:
            return None
        return len(self._ends) / max(self._seconds - self._ends[0], 1e-3)
