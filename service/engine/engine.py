"""Continuous batching over cache slots: submit, abort, step.

Ids only: the engine knows nothing of text, HTTP, LitServe or tensors. It is synchronous and not thread-safe; its owner
calls `step` while `has_work`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from service.engine.runner import FAILED, Outcome, Piece, Runner
from service.engine.scheduler import MIN_PREFILL, Copy, Prefill, Scheduler
from service.engine.sequence import Sequence
from service.wire import Delta, FinishReason, Logprobs, Submit
from service.words import plural

logger = logging.getLogger(__name__)

MIN_STEPS = 8  # of a call over more than CACHED_ROWS rows, where nobody waits for its end
CACHED_ROWS = 16
MAX_FAILURES = 16  # calls of the runner in a row that gave nothing of use, after which it counts as broken

# Takes in what a launch gave: waits for it, updates its sequences and adds their deltas.
Collect = Callable[[list[Delta]], None]


class BrokenRunnerError(Exception):
    """Every recent call of the runner failed, whatever it ran: only a new process may help."""


class StepStats:
    """What one engine step did, and the seconds of its phases: schedule, decode, prefill, update."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.started_at = self.ended_at = clock()
        self.phases: dict[str, float] = {}
        self.prefilled_at = 0.0  # when the forward over pieces of prompts had run
        self.num_prefill_tokens = 0
        self.num_copied_tokens = 0  # of prompts: keys and values came from another slot
        self.num_decode_rows = 0
        self.num_decode_steps = 0  # of the longest row
        self.num_decode_tokens = 0
        self.num_dropped_tokens = 0  # chosen beyond a stop

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at

    def lap(self, phase: str) -> float:
        """Count the time since the last lap as part of `phase`, and return it; `ended_at` becomes now."""
        now = self._clock()
        seconds = now - self.ended_at
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        self.ended_at = now
        return seconds


class Cost:
    """Seconds of a call as a function of its size: fixed + each · size, fitted to recent calls.

    Weighted least squares; a call weighs half as much 16 calls later. One call that takes far longer than expected
    counts as twice the expectation: the machine did something else.
    """

    DECAY = 2 ** (-1 / 16)

    def __init__(self, each: float):
        self.fixed, self.each = 0.0, each  # a first guess
        self._sums = [0.0] * 5  # of weights w, and of w·n, w·n², w·t, w·n·t over sizes n and seconds t
        self._last_ratio = 1.0

    def seconds(self, size: int) -> float:
        return self.fixed + self.each * size

    def size_for(self, seconds: float) -> int:
        """The size that takes `seconds`, or the one at which half of the time is not fixed, if that is larger."""
        return int(max(seconds - self.fixed, self.fixed) / self.each)

    def observe(self, size: int, seconds: float) -> None:
        ratio = seconds / self.seconds(size)
        if self._sums[0]:  # else there is nothing to expect yet
            seconds *= min(1.0, max(2.0, self._last_ratio) / ratio) if ratio > 2.0 else 1.0
        self._last_ratio = ratio
        new = (1.0, size, size * size, seconds, size * seconds)
        w, n, nn, t, nt = self._sums = [self.DECAY * a + b for a, b in zip(self._sums, new, strict=True)]
        n, nn, t, nt = n / w, nn / w, t / w, nt / w
        variance = nn - n * n
        each = (nt - n * t) / variance if variance > 1e-3 * n * n else t / n
        self.each = max(1e-9, 0.1 * t / n, min(each, t / n))  # a slope from noise would be far off elsewhere
        self.fixed = max(0.0, t - self.each * n)


class Engine:
    """Runs a model over many sequences at once, as many as the runner has slots.

    max_running: sequences that one client can run, as many as the runner has slots by default; the other slots are for
    clients that run less than their share (scheduler.py). is_fair=False takes all sequences for one client's.
    max_waiting: further sequences in the queue; step_seconds: how long a step should take, which bounds how long a
    prompt holds up the streams beside it and how long an arrival waits.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_running: int | None = None,
        max_waiting: int = 1024,
        is_fair: bool = True,
        step_seconds: float = 0.004,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config = runner.config
        self.clock = clock
        self.step_seconds = step_seconds
        max_running = runner.slots if max_running is None else max_running
        self.scheduler = Scheduler(
            max_running, max_waiting, runner.config, runner.piece, reserve=runner.slots - max_running, is_fair=is_fair
        )
        self.runner = runner
        self.stats = StepStats(clock)  # of the last step
        self._decode_cost = Cost(each=step_seconds)  # of one step, by rows; the first call has one step
        self._prefill_cost = Cost(each=step_seconds / MIN_PREFILL)  # by characters
        self._ended: list[Delta] = []  # ended early; returned by the current step, or the next
        self._turn, self._decoded_at = 0, np.zeros(runner.slots, np.int64)  # calls of clients that share; by slot
        self._in_flight: list[Collect] = []  # launched by the last step, if the runner is asynchronous
        self._num_failures = 0  # calls in a row

    @property
    def has_work(self) -> bool:
        return bool(self._ended) or len(self.scheduler) > 0 or bool(self._in_flight)

    def submit(self, request: Submit) -> Sequence:
        """Queue a sequence.

        Raises:
            QueueFullError: its client has no free slot and no place in the queue; nothing was queued.
        """
        sequence = Sequence(request, self.clock(), self.config.receptive_field)
        self.scheduler.add(sequence)
        return sequence

    def abort(self, id: int, reason: FinishReason = "abort") -> None:
        """End a sequence now; does nothing if it has ended already."""
        sequence = self.scheduler.finish(id, reason)
        if sequence is not None:
            self._ended.append(self._delta(sequence))

    def step(self) -> list[Delta]:
        """One turn: schedule, launch (some decode steps in one call, then pieces of prompts), collect.

        An asynchronous runner is given this turn's launches before the last turn's outcomes are read, so that the
        device need not wait for the host. What a sequence ran beyond a stop is dropped.

        Raises:
            BrokenRunnerError: MAX_FAILURES calls in a row failed, or gave no finite logits.
        """
        stats = self.stats = StepStats(self.clock)
        scheduler = self.scheduler
        for id in scheduler.expired(stats.started_at):
            self.abort(id, "timeout")
        deltas, self._ended = self._ended, []
        if self._in_flight and scheduler.num_guided:  # whose masks follow from their last characters
            self._collect(self._in_flight, deltas)
            self._in_flight = []
        slots = self._share(np.flatnonzero(scheduler.is_decoding & (scheduler.num_left > 0)))  # (B,)
        plan = scheduler.schedule(stats.started_at, self._prefill_budget(len(slots)))
        for sequence, copy in plan.copies:
            with self._isolated([sequence]):
                self._copy(copy)
        for sequence, shared in plan.starts:
            self._start(sequence, shared)
        stats.lap("schedule")
        launched: list[Collect] = []
        if len(slots):
            self._decode(slots, sum(piece.length for piece in plan.pieces), launched)
        # A start or a copy that failed has ended its sequence.
        pieces = [piece for piece in plan.pieces if not piece.sequence.is_finished]
        if pieces:
            self._prefill(pieces, launched)
        if self.runner.is_async and launched:
            launched, self._in_flight = self._in_flight, launched
        else:
            launched, self._in_flight = self._in_flight + launched, []
        self._collect(launched, deltas)
        deltas += self._ended
        self._ended = []
        stats.lap("update")
        return deltas

    def generate(self, requests: Iterable[Submit]) -> list[list[int]]:
        """Run sequences to their ends and return their completions, in order (offline use).

        All of them must fit the queue.
        """
        completions: dict[int, list[int]] = {}
        for request in requests:
            self.submit(request)
            completions[request.id] = []
        while self.has_work:
            for delta in self.step():
                completions[delta.id] += delta.ids
        return list(completions.values())

    def _share(self, slots: np.ndarray) -> np.ndarray:
        """Of the slots that decode (B,), those whose turn it is, so that clients share the time and not the sequences.

        With k clients, a call takes as many rows as take k times as long as those of the client with the fewest: that
        client has its share of the time then, and the sequences of clients with many take turns.
        """
        if len(slots) < 2 or not self.scheduler.is_fair:
            return slots
        by_client: dict[str, list[int]] = {}
        for slot in slots.tolist():
            sequence = self.scheduler.by_slot[slot]
            assert sequence is not None
            by_client.setdefault(sequence.request.client, []).append(slot)
        if len(by_client) == 1:
            return slots
        fewest, k = min(map(len, by_client.values())), len(by_client)
        limit = max(
            k * fewest, int((k * self._decode_cost.seconds(fewest) - self._decode_cost.fixed) / self._decode_cost.each)
        )
        if limit >= len(slots):
            return slots
        chosen: list[int] = []
        for its_slots in sorted(by_client.values(), key=len):
            room = max(1, (limit - len(chosen)) // k)
            k -= 1
            if len(its_slots) > room:  # those that have waited longest
                its_slots = sorted(its_slots, key=self._decoded_at.__getitem__)[:room]
            chosen += its_slots
        self._turn += 1
        self._decoded_at[chosen] = self._turn
        return np.array(sorted(chosen))

    def _prefill_budget(self, rows: int) -> int:
        """Prompt characters of a step that decodes `rows`: half of its time, or what one decode step leaves of it."""
        decoding = self._decode_cost.seconds(rows) if rows else 0.0
        seconds = self.step_seconds if not rows else max(0.5 * self.step_seconds, decoding)
        return max(MIN_PREFILL, self._prefill_cost.size_for(seconds))

    def _num_steps(self, rows: int, num_prompt: int) -> int:
        """Decode steps of a call over `rows`, beside `num_prompt` characters of prompts.

        Alone, as many as fit `step_seconds`; of many rows MIN_STEPS, in which each stays in the cache, even if they
        take up to three times as long. Beside prompts, as many as fit the time that these take, so that neither stalls
        the other.
        """
        seconds, limit = self._decode_cost.seconds(rows), self.step_seconds
        free = MIN_STEPS if rows > CACHED_ROWS else 1
        if num_prompt:
            limit, free = min(0.5 * limit, self._prefill_cost.seconds(num_prompt)), 1
        elif self.scheduler.prefilling:  # which wait for others
            limit, free = 0.5 * limit, 1
        return max(
            n
            for n in self.runner.step_counts
            if n == 1 or n * seconds <= limit or (n <= free and n * seconds <= 3 * limit)
        )

    def _collect(self, launched: list[Collect], deltas: list[Delta]) -> None:
        for collect in launched:
            collect(deltas)

    def _copy(self, copy: Copy) -> None:
        self.runner.copy(*copy)
        self.stats.num_copied_tokens += copy.length

    def _start(self, sequence: Sequence, shared: Copy | None) -> None:
        assert sequence.slot is not None
        with self._isolated([sequence]):
            request = sequence.request
            self.runner.start(sequence.slot, request.sampling, request.seen + request.prompt)
            if shared is not None:
                self._copy(shared)

    def _decode(self, slots: np.ndarray, num_prompt: int, launched: list[Collect]) -> None:
        """Launch the sequences in `slots` (B,), beside `num_prompt` characters of prompts."""
        scheduler, stats = self.scheduler, self.stats
        by_slot = scheduler.by_slot
        sequences = [sequence for slot in slots.tolist() if (sequence := by_slot[slot]) is not None]
        with self._isolated(sequences):
            special = [b for b, sequence in enumerate(sequences) if sequence.notable is None]
            guides = {b: guide for b in special if (guide := sequences[b].guide) is not None}
            wants_logits = [b for b in special if sequences[b].request.logprobs is not None]
            # Where a guided row takes one step per call, all do: beside rows of K steps it would wait for all K after
            # each character, so that its own text would be up to K times slower.
            is_slow = scheduler.num_guided and not self.runner.follows_guides
            most = 1 if is_slow else self._num_steps(len(slots), num_prompt)
            steps = np.minimum(most, scheduler.num_left[slots])
            pending = self.runner.decode(slots, steps, guides, wants_logits)
            scheduler.decoded(slots, steps)
            is_end = (scheduler.num_left[slots] == 0).tolist()
            stats.num_decode_rows, stats.num_decode_steps = len(slots), int(steps.max())
            stats.num_decode_tokens = int(steps.sum())
            seconds = stats.lap("decode")

            def collect(deltas: list[Delta]) -> None:
                with self._isolated(sequences):
                    outcome = pending.collect()
                    self._decode_cost.observe(len(slots), (outcome.seconds or seconds) / outcome.ids.shape[1])
                    self.stats.lap("decode")
                    self._update(sequences, steps, is_end, outcome, deltas)
                    self.stats.lap("update")

            launched.append(collect)

    def _update(
        self, sequences: list[Sequence], steps: np.ndarray, is_end: list[bool], outcome: Outcome, deltas: list[Delta]
    ) -> None:
        """Take what a decode call chose, of each row the first `steps`; is_end: with which it has all it may have."""
        ids: list[list[int]] = outcome.ids.tolist()
        for b in np.flatnonzero(steps < outcome.ids.shape[1]).tolist():
            del ids[b][steps[b] :]
        failed = set(np.flatnonzero((outcome.ids == FAILED).any(axis=1)).tolist())
        self._ran(well=len(failed) < len(sequences))
        for b in failed:
            del ids[b][ids[b].index(FAILED) :]
        for b, (sequence, chosen) in enumerate(zip(sequences, ids, strict=True)):
            if sequence.finish_reason is not None:  # since this was launched
                self.stats.num_dropped_tokens += len(chosen)
            elif b in failed or not sequence.extend_simply(chosen):
                self._take(sequence, chosen, outcome.logits.get(b))
                if b in failed and not sequence.is_finished:
                    self._fail(sequence)
                self._send(sequence, deltas)
            else:
                delta = Delta(sequence.id, chosen)
                if is_end[b]:
                    sequence.finish_reason = delta.finish_reason = "length"
                    delta.ended_at = self.clock()
                    self.scheduler.remove(sequence)
                deltas.append(delta)

    def _prefill(self, pieces: list[Prefill], launched: list[Collect]) -> None:
        stats = self.stats
        sequences = [piece.sequence for piece in pieces]
        with self._isolated(sequences):
            pending = self.runner.prefill([_piece(piece) for piece in pieces])
            num_tokens = stats.num_prefill_tokens = sum(piece.length for piece in pieces)
            seconds = stats.lap("prefill")
            parts = [(*piece, piece.is_last, piece.sequence.num_prefilled) for piece in pieces]
            for piece in pieces:
                self.scheduler.prefilled(piece)

            def collect(deltas: list[Delta]) -> None:
                with self._isolated(sequences):
                    outcome = pending.collect()
                    self._ran(well=bool((outcome.ids != FAILED).any()))
                    self._prefill_cost.observe(num_tokens, outcome.seconds or seconds)
                    self.stats.lap("prefill")
                    self.stats.prefilled_at = self.stats.ended_at
                    for b, (sequence, length, is_last, start) in enumerate(parts):
                        if not sequence.is_finished:
                            logits = outcome.logits.get(b)
                            self._update_prefill(sequence, length, is_last, start, int(outcome.ids[b, 0]), logits)
                            self._send(sequence, deltas)
                    self.stats.lap("update")

            launched.append(collect)

    def _update_prefill(
        self, sequence: Sequence, length: int, is_last: bool, start: int, id: int, logits: np.ndarray | None
    ) -> None:
        """Take what `length` prompt ids from index `start` on gave: logits (length, V), and the first choice."""
        request, is_failed = sequence.request, id == FAILED
        if request.score_from is not None and logits is not None:
            is_failed = is_failed or not np.isfinite(logits).all()
            if not is_failed:
                _score(sequence, start, logits)
        if is_failed:
            self._fail(sequence)
        if not is_last:
            return
        sequence.prefilled_at = self.stats.prefilled_at
        if is_failed:
            return
        if request.max_tokens == 0:
            sequence.finish_reason = "length"
        else:
            self._take(sequence, [id], None if logits is None else logits[length - 1 : length])

    def _take(self, sequence: Sequence, ids: list[int], logits: np.ndarray | None) -> None:
        """Extend a sequence by chosen ids, which are from logits (len(ids) or more, V) if it reports them."""
        taken = sequence.extend(ids)
        if logits is not None and sequence.request.logprobs is not None:
            sequence.unemitted_logprobs.extend(_logprobs(logits[:taken], ids[:taken], sequence.request))
        if sequence.guide is None:  # a guide refuses the id that ends its text
            self.stats.num_dropped_tokens += len(ids) - taken

    def _fail(self, sequence: Sequence) -> None:
        sequence.finish_reason = "error"
        about = {"request_ids": [sequence.request.request_id]}
        logger.error("sequence %d: the model gave logits that are not finite", sequence.id, extra=about)

    def _send(self, sequence: Sequence, deltas: list[Delta]) -> None:
        """Add what there is to send of a sequence; remove it if it has finished."""
        if sequence.is_finished:
            self.scheduler.remove(sequence)
        delta = self._delta(sequence)
        if delta.ids or delta.prompt_logprobs is not None or sequence.is_finished:
            deltas.append(delta)

    @contextlib.contextmanager
    def _isolated(self, sequences: list[Sequence]) -> Iterator[None]:
        """A failing forward ends its own sequences; the engine continues, unless its device is lost."""
        try:
            yield
        except Exception as error:
            if isinstance(error, BrokenRunnerError) or self.runner.is_lost(error):
                raise
            self._ran(well=False)
            about = {"request_ids": [sequence.request.request_id for sequence in sequences]}
            logger.exception("a forward over %s failed", plural(len(sequences), "sequence"), extra=about)
            for sequence in sequences:
                self.abort(sequence.id, "error")

    def _ran(self, well: bool) -> None:
        self._num_failures = 0 if well else self._num_failures + 1
        if self._num_failures == MAX_FAILURES:
            raise BrokenRunnerError(f"the last {MAX_FAILURES} calls of the model failed")

    def _delta(self, sequence: Sequence) -> Delta:
        ids, logprobs = sequence.emit()
        delta = Delta(sequence.id, ids, sequence.finish_reason)
        delta.logprobs, delta.prompt_logprobs = logprobs, sequence.emit_prompt_logprobs()
        if sequence.prefilled_at is not None:
            if not sequence.is_timed:
                sequence.is_timed = True
                delta.scheduled_at, delta.prefilled_at = sequence.scheduled_at, sequence.prefilled_at
            if sequence.is_finished:
                delta.ended_at = self.clock()
        return delta


def _piece(piece: Prefill) -> Piece:
    sequence, length = piece
    assert sequence.slot is not None
    start = sequence.num_prefilled - sequence.prefill_from
    chooses = piece.is_last and sequence.request.max_tokens > 0
    return Piece(
        sequence.slot,
        sequence.cut_prompt[start : start + length],
        chooses,
        sequence.guide if chooses else None,
        sequence.request.score_from is not None or (chooses and sequence.request.logprobs is not None),
    )


def _score(sequence: Sequence, start: int, logits: np.ndarray) -> None:
    """Take the log-probabilities of the prompt's ids that the logits (T, V) of ids from index `start` on predict."""
    request = sequence.request
    assert request.score_from is not None
    first = max(start + 1, request.score_from)  # the id at index i is predicted at position i−1
    last = min(start + len(logits) + 1, len(request.prompt))
    if first < last:
        ids = request.prompt[first:last]
        sequence.unemitted_prompt_logprobs.extend(_logprobs(logits[first - 1 - start : last - 1 - start], ids, request))


def _logprobs(logits: np.ndarray, ids: list[int], request: Submit) -> Logprobs:
    """Of `ids` (N,) under logits (N, V), each with the alternatives that the request asks for."""
    z = logits - logits.max(axis=1, keepdims=True)
    logprobs = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    row = np.arange(len(ids))[:, None]
    values = _column(logprobs[row[:, 0], ids], np.float64)
    if request.logprob_ids:
        top_ids = np.tile(request.logprob_ids, (len(ids), 1))
    elif request.logprobs:
        k = min(request.logprobs, logits.shape[1])
        top_ids = np.argpartition(-logprobs, k - 1, axis=1)[:, :k]
        top_ids = top_ids[row, np.lexsort((top_ids, -logprobs[row, top_ids]))]  # of equals the lower id first
    else:
        return Logprobs(values)
    return Logprobs(values, _column(top_ids, np.uint32), _column(logprobs[row, top_ids], np.float64))


def _column(numbers: np.ndarray, dtype: type[np.generic]) -> bytearray:
    return bytearray(numbers.astype(dtype).tobytes())
