"""The HTTP process's side of the engine: sends sequences to workers, and passes results to their Generation.

This module knows nothing about routes, and writes nothing to clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from service.catalog import Listing
from service.http.connection.errors import ApiError
from service.http.models.model import Model
from service.http.workers.exact import ExactGeneration
from service.http.workers.sequences import HOMELESS, TICK_SECONDS, Generation, SequenceState
from service.observe.metrics import Metrics
from service.shared import SharedState, worker_name
from service.sockets import HttpSide, WorkerEvent, WorkerFound, WorkerLost
from service.text.exact import Exact
from service.wire import Abort, Delta, FinishReason, Refused, Step, Submit, Submits, sequence_id
from service.words import plural

logger = logging.getLogger(__name__)

LATE_SECONDS = 5.0  # grace period after the deadline of a sequence without news
CONNECT_SECONDS = 5.0  # longest wait for a worker of each checkpoint
MAX_RUNS = 2  # runs of a sequence whose workers are lost: it may be the cause
REFUSING_SECONDS = 0.25  # time after a refusal during which the client's other sequences are refused at once
REPLACING_SECONDS = 2.0  # time after a lost worker during which new requests wait for another one


def _queue_full(refused: Refused) -> ApiError:
    return ApiError(429, refused.message, code="queue_full", retry_after_seconds=refused.retry_after_seconds)


def _not_ready() -> ApiError:
    return ApiError(503, "no inference process is ready", code="not_ready", retry_after_seconds=1)


@dataclass
class Full:
    """A worker has refused a client's sequence. It accepts only as many as have ended since."""

    refused: Refused
    until: float  # time.monotonic()
    num_ended: int = 0


class EngineClient:
    """Connects to the workers, and sends each sequence to that worker of its model with the fewest sequences.

    hang_seconds: a worker without a heartbeat for this long is not ready.
    capacity: sequences of one client that an idle worker accepts.
    patience: the longest wait in a queue that workers accept. A refused sequence with a shorter time limit, or one of
    several sequences, says nothing about its client's other requests.
    """

    def __init__(
        self,
        folder: Path,
        consumer_id: int,
        metrics: Metrics,
        state: SharedState,
        hang_seconds: float = math.inf,
        capacity: int = 2**31,
        patience: float = 0.0,
    ):
        self.metrics = metrics
        self.state, self.consumer_id = state, consumer_id
        self._hang_seconds, self._capacity, self._patience = hang_seconds, capacity, patience
        self._full: dict[str, Full] = {}  # by client
        self.served: set[int] = set()  # ids of the versions that new requests use
        self._lost_at: dict[int, float] = {}  # time of the latest loss of a worker, by version
        self.loop = asyncio.get_running_loop()
        self._sockets = HttpSide(folder, consumer_id, self._received)
        # Differs from the ids of an earlier process, whose deltas may still arrive.
        self._numbers = itertools.count(int(time.time()) << 16)
        self._running: dict[int, tuple[Generation, SequenceState]] = {}  # by sequence id
        self._turns = itertools.count()
        self._open: dict[Generation, float] = {}  # -> when the rest of it is given up
        self._homeless: dict[int, float] = {}  # ids of sequences that wait for a worker -> the end of the wait
        self._sleeping: dict[Generation, None] = {}  # streams with text that is not due yet
        self._clock: asyncio.TimerHandle | None = None  # wakes them, at `_tick_at`
        self._tick_at = math.inf
        self._due: dict[Generation, None] = {}  # may continue when all arrived deltas are taken in
        self._is_receiving = False
        self._hungry: dict[Generation, None] = {}  # may run more sequences then

    def connect(self, listing: Listing) -> None:
        """Stay connected to the workers of the listed versions, and to no others."""
        self._sockets.connect(listing.workers(self.state))

    @property
    def is_ready(self) -> bool:
        """True if each served model has a worker that answers."""
        return bool(self.served) and self._have_workers(self.served)

    def _have_workers(self, versions: Iterable[int]) -> bool:
        return all(any(map(self._is_responsive, self._workers_of(version))) for version in versions)

    async def have_workers(self, versions: Collection[int]) -> bool:
        """Wait until each of these versions has a worker that answers. Returns False after CONNECT_SECONDS."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_SECONDS):
                while not self._have_workers(versions):
                    await asyncio.sleep(0.005)
                return True
        return False

    def _workers_of(self, version: int) -> list[int]:
        """Return the connected workers of a version."""
        return self._sockets.connected.get(version, [])

    def _is_responsive(self, worker: int) -> bool:
        return self.state.is_responsive(worker_name(worker), self._hang_seconds)

    def refuse_if_full(self, client: str) -> None:
        """Refuse requests of a flood early, without asking a worker that would refuse them.

        Raises ApiError: 429, a worker has just refused a sequence of this client, and fewer sequences have ended since
        than requests have arrived.
        """
        full = self._full.get(client)
        if full is None or len(self.served) > 1 or time.monotonic() >= full.until:
            return
        if not full.num_ended:
            self.metrics.request_rejected("queue_full")
            raise _queue_full(full.refused)
        full.num_ended -= 1

    def start(
        self,
        model: Model,
        submits: list[Submit],
        arrived_at: float,
        *,
        echo: list[str] | None = None,
        interval: float | None = None,
        window: int | None = None,
        exact: Exact | None = None,
        is_accepted: bool = False,
    ) -> Generation:
        """Run sequences, at most `window` of them at once. Sets their ids.

        echo: the text of each prompt, if the answer begins with it.
        exact: runs the candidates of these exact answers; `submits` are its templates.
        is_accepted: the request has run other sequences before.

        Raises ApiError: 503, no worker of the model is connected.
        """
        # A worker without a heartbeat gets requests too: it continues after a pause, or is replaced.
        is_connected = bool(self._workers_of(model.id))
        if not is_connected and not is_accepted and not self._is_replacing(model, len(submits)):
            model.metrics.request_rejected("not_ready", len(submits))
            raise _not_ready()
        self.count(model, "submitted", len(submits))
        generation = (
            Generation(self, model, submits, arrived_at, echo, interval, window)
            if exact is None
            else ExactGeneration(self, model, exact, window or self._capacity, arrived_at, interval)
        )
        generation.refill(is_accepted)
        return generation

    def _is_replacing(self, model: Model, count: int) -> bool:
        """True if no worker of the model is left but one was just lost, so a replacement may be ready soon."""
        if time.monotonic() >= self._replaced_by(model):
            return False
        running = sum(generation.model is model for generation, _ in self._running.values())
        return running + count <= self._capacity

    def _replaced_by(self, model: Model) -> float:
        """Return when new sequences have waited long enough for the replacement of a worker that was lost."""
        return self._lost_at.get(model.id, -math.inf) + REPLACING_SECONDS

    def run(self, generation: Generation, sequences: list[SequenceState], must_run: bool) -> None:
        """Run sequences of a generation."""
        self._open[generation] = generation.deadline + LATE_SECONDS
        for sequence in sequences:
            sequence.submit.must_run = must_run
            sequence.submit.id = sequence_id(self.consumer_id, next(self._numbers))
            self._running[sequence.submit.id] = (generation, sequence)
            generation.open.add(sequence.submit.id)
        self._send(generation, sequences)

    def drop(self, sequences: Iterable[SequenceState]) -> None:
        """End sequences that are not needed. Each stays open until its worker reports the characters that ran."""
        for sequence in sequences:
            sequence.is_leaving = True
            if sequence.worker != HOMELESS:
                self._sockets.send(Abort(sequence.submit.id), sequence.worker)

    def refill(self, generation: Generation) -> None:
        """Let it run more sequences when all deltas that arrived are taken in."""
        self._hungry[generation] = None

    def _send(self, generation: Generation, sequences: list[SequenceState]) -> None:
        """Send sequences to workers of their model, or keep them until one is connected."""
        workers = self._workers_of(generation.model.id)
        if not workers:
            for sequence in sequences:
                until = generation.deadline
                if not sequence.submit.must_run:
                    until = min(until, self._replaced_by(generation.model))
                self._homeless[sequence.submit.id] = until
            return
        seconds = max(0.0, generation.deadline - time.monotonic())
        prompts: dict[tuple[int, int, bool], tuple[list[int], tuple[int, ...]]] = {}
        messages: dict[tuple[Any, ...], list[Submit]] = {}  # by worker, and what the sequences of a message share
        for sequence in sequences:
            self._homeless.pop(sequence.submit.id, None)
            if len(workers) > 1:
                first = next(self._turns)  # equal workers take turns
                workers = [workers[(first + i) % len(workers)] for i in range(len(workers))]
                workers.sort(key=lambda w: (not self._is_responsive(w), self.state.load(w)))
            sequence.worker = workers[0]
            self.state.assign(self.consumer_id, sequence.worker, 1)
            sequence.runs += 1
            submit = sequence.submit
            submit.timeout_seconds = seconds
            if len(submit.prompt) > generation.model.receptive_field:
                submit = _shortened(submit, generation.model.receptive_field, prompts)
            if sequence.ids:
                submit = msgspec.structs.replace(submit, written=bytes(sequence.ids))
            messages.setdefault((sequence.worker, *submit.shared), []).append(submit)
        for (worker, *_), submits in messages.items():
            self._sockets.send(Submits.of(submits), worker)

    def sweep(self, now: float) -> None:
        """End sequences that have waited too long. Call this at least ten times a second."""
        for id in [id for id, until in self._homeless.items() if until <= now]:
            self._homeless.pop(id, None)
            if id not in self._running:  # it was refused with an earlier one
                continue
            generation, sequence = self._running[id]
            if now >= generation.deadline:
                self._received_delta(Delta(id, [], "timeout"), now)
            elif not sequence.submit.must_run:
                self._refuse(id, "not_ready", _not_ready())
        for generation in [it for it, until in self._open.items() if until <= now]:
            self.abort(generation, "timeout")
        for client in [it for it, full in self._full.items() if full.until <= now]:
            del self._full[client]
        for version in [it for it, at in self._lost_at.items() if at + REPLACING_SECONDS <= now]:
            del self._lost_at[version]
        self._refill()

    def _refuse(self, id: int, reason: str, error: ApiError) -> None:
        """Refuse a sequence and the others of its request that have not begun. Abort those that have."""
        generation, _ = self._running[id]
        count = len(generation.pending)
        generation.pending.clear()
        for it in list(generation.open):
            sequence = self._running[it][1]
            if it == id or not (sequence.is_begun or sequence.submit.must_run):
                if it != id and sequence.worker != HOMELESS:
                    self._sockets.send(Abort(it), sequence.worker)
                self._end(it)
                count += 1
        count = generation.refused(count)
        self.count(generation.model, "refused", count)
        generation.model.metrics.request_rejected(reason, count)
        generation.fail(error)

    def _leave(self, sequence: SequenceState) -> None:
        """Take a sequence out of its worker's count."""
        if sequence.worker != HOMELESS:
            self.state.assign(self.consumer_id, sequence.worker, -1)
            sequence.worker = HOMELESS

    def _go_on(self, running: Iterable[tuple[Generation, SequenceState]]) -> None:
        """Let other workers go on with sequences that have none, if these have not run MAX_RUNS times."""
        left: dict[Generation, list[SequenceState]] = {}
        for generation, sequence in running:
            id = sequence.submit.id
            if id not in self._running or sequence.worker != HOMELESS:  # it has ended, or has a worker
                continue
            if sequence.is_leaving:
                self._received_delta(Delta(id, [], "abort"), time.monotonic())
            elif sequence.runs == MAX_RUNS:
                message = f"the inference processes that ran this request ended, {MAX_RUNS} in a row"
                sequence.error = ApiError(503, message, code="worker_lost", retry_after_seconds=1)
                self._received_delta(Delta(id, [], "error"), time.monotonic())
            else:
                sequence.go_on()
                left.setdefault(generation, []).append(sequence)
        for generation, sequences in left.items():
            self._send(generation, sequences)

    def abort(self, generation: Generation, reason: FinishReason) -> None:
        """End all sequences of a generation, submitted or not.

        A candidate ends when its worker reports how many characters ran, because these are charged.
        """
        now = time.monotonic()
        if generation.pending:
            generation.drop_pending(reason)
        for id in list(generation.open):
            sequence = self._running[id][1]
            delta = Delta(id, [], reason)
            if sequence.worker != HOMELESS:
                if not sequence.is_leaving:
                    self._sockets.send(Abort(id), sequence.worker)
                if not sequence.is_begun:  # it may have run, and would otherwise not be charged
                    delta.num_unseen = len(sequence.submit.prompt)
                if isinstance(generation, ExactGeneration) and reason == "abort":
                    sequence.is_leaving = True
                    continue
            self._received_delta(delta, now)
        if not generation.open:
            self._open.pop(generation, None)

    @contextlib.asynccontextmanager
    async def connected(self, listing: Listing) -> AsyncIterator[None]:
        """Stay connected to the workers. The block begins when one of each served model answers.

        Workers are loaded before HTTP processes start. If none of a model answers within CONNECT_SECONDS, its requests
        get 503.
        """
        self.connect(listing)
        try:
            await self.have_workers(self.served)
            yield
        finally:
            await self._sockets.close()

    def _received(self, worker: int, message: WorkerEvent) -> None:
        self._is_receiving, now = True, time.monotonic()
        try:
            match message:
                case Step():
                    model = next((self._running[id][0].model for id in message.sequences if id in self._running), None)
                    if model is not None:  # the one of all its sequences
                        self._received_ids(message, model, now)
                    for delta in message.deltas:
                        self._received_delta(delta, now)
                case Refused(id) if id in self._running:
                    generation, sequence = self._running[id]
                    is_single = len(generation.sequences) == len(generation.open) == 1
                    self._refuse(id, "queue_full", _queue_full(message))
                    if is_single and generation.timeout_seconds >= self._patience:
                        self._full[sequence.submit.client] = Full(message, now + REFUSING_SECONDS)
                case WorkerFound(version):
                    self._go_on([entry for entry in self._running.values() if entry[0].model.id == version])
                case WorkerLost(version):
                    lost = [entry for entry in self._running.values() if entry[1].worker == worker]
                    self._lost_at[version] = now
                    for _, sequence in lost:
                        self._leave(sequence)
                    self._go_on(lost)
                    if lost:
                        what = plural(len(lost), "sequence")
                        logger.error("lost worker %d; %s of it will go on in another one", worker, what)
            self._refill()
        finally:
            self._is_receiving = False
            self._resume()

    def _refill(self) -> None:
        hungry, self._hungry = self._hungry, {}
        for generation in hungry:
            generation.refill()

    def _received_ids(self, step: Step, model: Model, now: float) -> None:
        text = model.tokenizer.decode_array(np.frombuffer(step.ids, np.uint32))  # of all sequences
        total, end = 0, 0
        # Most sequences have the same time of their last characters and the same number of new ones.
        gaps: dict[tuple[float, int], int] = {}  # -> characters
        for id, count in zip(step.sequences, step.counts, strict=True):
            start, end = end, end + count
            running = self._running.get(id)
            if running is None:  # aborted here, with frames in flight
                continue
            generation, sequence = running
            sequence.ids += step.ids[4 * start : 4 * end]
            if not generation.streams_text:
                generation.add(sequence, text[start:end], now)
                continue
            total += count
            gap = (now, count - 1) if sequence.last_at is None else (sequence.last_at, count)
            gaps[gap] = gaps.get(gap, 0) + gap[1]
            generation.add(sequence, text[start:end], now)
            if generation.is_stream and generation not in self._sleeping:  # sleeping streams have their time already
                generation.wake_when_due(now)
        if total:
            model.metrics.generation_tokens.inc(total)
        for (last_at, count), characters in gaps.items():
            if count:  # characters that arrive together share the time since the last ones
                model.metrics.inter_token_latency.observe((now - last_at) / count, characters)

    def count(self, model: Model, what: str, number: int = 1) -> None:
        """Count sequences in shared memory."""
        self.state.count(self.consumer_id, model.row, what, number)

    def wake(self, generation: Generation) -> None:
        """Wake a generation soon, not now, because the caller may be in the middle of others."""
        if not (self._due or self._is_receiving):
            self.loop.call_soon(self._resume)
        self._due[generation] = None

    def _resume(self) -> None:
        due, self._due = self._due, {}
        for generation in due:
            try:
                generation.come()
            except Exception:  # concerns only one request
                logger.exception("a request could not continue")

    def wake_later(self, generation: Generation) -> None:
        """Wake a stream when it is due. Streams share a timer, because each timer wakes the process."""
        self._sleeping[generation] = None
        if generation.due_at < self._tick_at:
            self._tick_later(generation.due_at)

    def _tick_later(self, moment: float) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._tick_at = moment
        self._clock = self.loop.call_later(max(0.0, moment - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._clock, self._tick_at, now = None, math.inf, time.monotonic()
        sleeping, self._sleeping, earliest = self._sleeping, {}, math.inf
        for generation in sleeping:
            if generation.due_at > now + TICK_SECONDS:
                self._sleeping[generation] = None
                earliest = min(earliest, generation.due_at)
            elif generation.touched:
                self._due[generation] = None
        if self._sleeping:
            self._tick_later(earliest)
        self._resume()

    def _received_delta(self, delta: Delta, now: float) -> None:
        running = self._running.get(delta.id)
        if running is None:  # aborted here, with frames in flight
            return
        generation, sequence = running
        if delta.finish_reason is not None:
            self._end(delta.id)
            if self._full and (full := self._full.get(sequence.submit.client)) is not None:
                full.num_ended += 1
        generation.receive(sequence, delta, now)

    def _end(self, id: int) -> None:
        """Forget a sequence that has ended, and submit the next one of its generation."""
        generation, sequence = self._running.pop(id)
        if self._homeless:
            self._homeless.pop(id, None)
        generation.open.discard(id)
        self._leave(sequence)
        if generation.pending:
            self._hungry[generation] = None
        elif not generation.open:
            self._open.pop(generation, None)


def _shortened(
    submit: Submit, receptive_field: int, known: dict[tuple[int, int, bool], tuple[list[int], tuple[int, ...]]]
) -> Submit:
    """Cut off the beginning of a prompt that no needed logit depends on. Penalties still need its ids.

    known: what is left of each prompt, and the ids that were cut off, by the prompt, the place of the cut and whether
    the ids are needed.
    """
    first_needed = submit.score_from or len(submit.prompt)  # the first id whose logits are needed
    start = first_needed - receptive_field
    if start <= 0:
        return submit
    key = (id(submit.prompt), start, submit.sampling.needs_history)
    if key not in known:
        seen = tuple(sorted(set(submit.prompt[:start]))) if submit.sampling.needs_history else ()
        known[key] = submit.prompt[start:], seen
    prompt, seen = known[key]
    score_from = None if submit.score_from is None else submit.score_from - start
    return msgspec.structs.replace(submit, prompt=prompt, seen=seen, score_from=score_from)
