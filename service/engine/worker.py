"""The inference process: loads the checkpoint and turns the engine.

One synchronous loop: take what arrived, one engine step, one frame to each HTTP process that has something
to get. It blocks while there is nothing to do. Knows ids and frames; no text, no HTTP.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
from collections import deque
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from litserve import LitAPI
from litserve.loops.base import LitLoop

from service import sockets as frames
from service.observe.logs import LogFormat, configure_logging
from service.sockets import SocketTransport, die_with_parent, rest_garbage_collector

logger = logging.getLogger(__name__)


class EngineAPI(LitAPI):
    """What LitServe places on a device: an engine over the checkpoint's model."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        model_name: str,
        threads: int,
        max_running: int,
        max_waiting: int,
        prefill_budget: int,
        log_level: str,
        log_format: LogFormat,
        **lit_options: Any,
    ):
        super().__init__(**lit_options)
        self.checkpoint = checkpoint
        self.model_name = model_name
        self.threads = threads
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.prefill_budget = prefill_budget
        self.log_level, self.log_format = log_level, log_format

    def setup(self, device: str) -> None:
        die_with_parent()
        configure_logging(self.log_level, self.log_format, self.loop.request_ids)
        # A terminal's Ctrl-C reaches this process too, but running sequences are to finish.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

        import torch
        from prometheus_client import CollectorRegistry

        from service.engine.engine import Engine
        from service.model.checkpoint import Checkpoint
        from service.observe.metrics import Metrics

        torch.set_num_threads(self.threads)
        model = Checkpoint.read(self.checkpoint).load_model(device)
        self.engine = Engine(
            model,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            prefill_budget=self.prefill_budget,
        )
        self.metrics = Metrics(self.model_name, CollectorRegistry(), f"worker-{os.environ['LITSERVE_WORKER_ID']}")
        self.metrics.num_requests_running.set(0)
        self.metrics.num_requests_waiting.set(0)
        self.metrics.cache_slots.set(self.max_running)
        self.metrics.cache_slots_in_use.set(0)
        rest_garbage_collector()
        logger.info(
            "serving %s on %s: %d parameters, %d slots, %d threads, rounding tolerance %.1e",
            self.checkpoint, device, model.num_parameters, self.max_running, self.threads, self.engine.tolerance,
        )  # fmt: skip


class EngineLoop(LitLoop):
    """LitServe calls `run` for ever; one call is one turn."""

    def __init__(self) -> None:
        super().__init__()
        self._transport: SocketTransport | None = None
        self._stopping = False
        self._consumer: dict[int, int] = {}  # sequence id -> HTTP process
        self.request_ids: dict[int, str] = {}  # by sequence id, for the log
        self._timed: set[int] = set()  # sequences whose times until the first character were told
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
        if self._transport is None:
            self._transport = transport
            transport.listen(worker_id)
            signal.signal(signal.SIGTERM, self._stop)
        if self._stopping and not transport.is_connected:
            raise SystemExit(0)
        began = engine.clock()
        is_idle = not engine.has_work
        if is_idle or began >= self._flush_at:
            metrics.flush()
            self._flush_at = began + metrics.FLUSH_SECONDS
        messages = transport.receive(block=is_idle)
        if is_idle:
            waited_until = engine.clock()
            metrics.engine_idle.inc(waited_until - began)
            began = waited_until
        for consumer_id, message in messages:
            self._take(engine, transport, message, consumer_id)
        if not engine.has_work:
            return
        receiving = engine.clock() - began

        outgoing: dict[int, list[frames.Delta]] = {}
        for delta in engine.step():
            sequence = delta.sequence
            frame = frames.Delta(sequence.id, delta.ids, delta.finish_reason)
            frame.logprobs, frame.prompt_logprobs = _logprobs(delta.logprobs), _logprobs(delta.prompt_logprobs)
            if sequence.prefilled_at is not None:
                if sequence.id not in self._timed:
                    self._timed.add(sequence.id)
                    frame.scheduled_at, frame.prefilled_at = sequence.scheduled_at, sequence.prefilled_at
                if delta.finish_reason is not None:
                    frame.ended_at = engine.clock()
            consumer_id = self._consumer[sequence.id]
            outgoing.setdefault(consumer_id, []).append(frame)
            if delta.finish_reason is not None:
                del self._consumer[sequence.id], self.request_ids[sequence.id]
                self._timed.discard(sequence.id)
                self._drain.ended(engine.clock())
        for consumer_id, deltas in outgoing.items():
            transport.send(frames.Step(deltas, len(engine.scheduler)), consumer_id)

        stats = engine.stats
        metrics.iteration_seconds.observe(stats.seconds)
        for phase, seconds in stats.phases.items():
            metrics.iteration_phase(phase).observe(seconds)
        metrics.iteration_phase("transport").observe(receiving + engine.clock() - stats.ended_at)
        if stats.num_decode_rows:
            metrics.iteration_batch_size.observe(stats.num_decode_rows)
            metrics.iteration_batch_utilization.observe(stats.num_decode_rows / lit_api.max_running)
        metrics.iteration_tokens.observe(stats.num_decode_rows + stats.num_prefill_tokens)
        if stats.num_exact:
            metrics.exact_choices.inc(stats.num_exact)
        self._set_gauges(lit_api)

    def _take(self, engine: Any, transport: SocketTransport, message: Any, consumer_id: int) -> None:
        from service.constrain.automaton import Guide, StopPattern
        from service.engine.scheduler import QueueFullError, Sequence
        from service.model.sampling import SamplingParams

        match message:
            case frames.Submit():
                stop_pattern, constraint = message.stop_pattern, message.constraint
                sequence = Sequence(
                    message.id,
                    message.prompt,
                    message.max_tokens,
                    SamplingParams(**msgspec.structs.asdict(message.sampling)),
                    stop=message.stop,
                    deadline=engine.clock() + message.timeout_seconds,
                    priority=message.priority,
                    stop_pattern=None if stop_pattern is None else StopPattern(_automaton(stop_pattern)),
                    include_stop=message.include_stop,
                    min_tokens=message.min_tokens,
                    guide=None if constraint is None else Guide(_automaton(constraint)),
                    may_leave=message.may_leave,
                    logprobs=message.logprobs,
                    logprob_ids=message.logprob_ids,
                    score_from=message.score_from,
                )
                try:
                    engine.submit(sequence)
                except QueueFullError as error:
                    seconds = self._drain.seconds_for(engine.scheduler.num_waiting, engine.clock())
                    transport.send(frames.Refused(message.id, str(error), seconds), consumer_id)
                else:
                    self._consumer[message.id] = consumer_id
                    self.request_ids[message.id] = message.request_id
            case frames.Abort():
                engine.abort(message.id)
            case frames.ConsumerLost():
                for id in [id for id, consumer in self._consumer.items() if consumer == consumer_id]:
                    engine.abort(id)

    def _set_gauges(self, lit_api: EngineAPI) -> None:
        scheduler = lit_api.engine.scheduler
        lit_api.metrics.num_requests_running.set(scheduler.num_running)
        lit_api.metrics.num_requests_waiting.set(scheduler.num_waiting)
        lit_api.metrics.cache_slots_in_use.set(scheduler.num_running)

    def _stop(self, *_: Any) -> None:
        """SIGTERM: end when no HTTP process is connected any more; they end first."""
        self._stopping = True
        assert self._transport is not None
        self._transport.wake()


@functools.lru_cache(maxsize=64)
def _automaton(packed: bytes) -> Any:
    """One for all sequences with the same pattern, which share its masks."""
    from service.constrain.automaton import Automaton

    return Automaton.unpack(packed)


def _logprobs(rows: list[Any]) -> frames.Logprobs | None:
    if not rows:
        return None
    values, top_ids, top_values = zip(*rows, strict=True)
    return frames.Logprobs(list(values), list(chain(*top_ids)), list(chain(*top_values)))


class DrainRate:
    """How fast sequences have been ending, to tell a refused client when to come back."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=256)

    def ended(self, now: float) -> None:
        self._ends.append(now)

    def seconds_for(self, count: int, now: float) -> int:
        """Whole seconds, from 1 to 60, in which `count` sequences are likely to end."""
        if len(self._ends) < 2:
            return 1
        rate = len(self._ends) / max(now - self._ends[0], 1e-3)
        return max(1, min(60, round(count / rate)))
