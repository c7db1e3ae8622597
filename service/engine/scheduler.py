"""Who runs: a queue, a fixed number of cache slots, and a budget of prompt characters per step.

Bookkeeping over ids: no torch, no text, no HTTP, no clock of its own (the engine passes the time in). A sequence
is added once and ends once, with exactly one finish reason.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from service.constrain.automaton import Guide, StopPattern
    from service.model.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


class QueueFullError(Exception):
    """The queue holds as many sequences as it may."""

    def __init__(self, limit: int):
        super().__init__(f"{limit} sequences are waiting already, the most that may")
        self.limit = limit


class StopMatcher:
    """Looks for stop sequences in a stream of ids, one id at a time (Knuth, Morris & Pratt 1977).

    `held` ids at the end of the stream could be the beginning of a stop sequence, so they may not be
    given away yet.
    """

    def __init__(self, stops: tuple[tuple[int, ...], ...]):
        self._stops = [(stop, _failure_links(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # how much of each stop the stream ends with

    @property
    def held(self) -> int:
        return max(self._matched, default=0)

    def push(self, id: int) -> int | None:
        """Take one id; the length of the stop sequence that it completes (the longest of several), or None."""
        found = None
        for i, (stop, links) in enumerate(self._stops):
            k = self._matched[i]
            while k and (k == len(stop) or stop[k] != id):
                k = links[k - 1]
            self._matched[i] = k = k + (stop[k] == id)
            if k == len(stop):
                found = max(found or 0, k)
        return found


def _failure_links(stop: tuple[int, ...]) -> list[int]:
    """links[i]: the length of the longest proper prefix of `stop` that ends at i."""
    links, k = [0], 0
    for id in stop[1:]:
        while k and stop[k] != id:
            k = links[k - 1]
        k += stop[k] == id
        links.append(k)
    return links


class Logprob(NamedTuple):
    """What the model thought of one character: nats, by its own logits."""

    value: float  # log-probability of the character
    top_ids: list[int]  # others that were asked for, likeliest first
    top_values: list[float]


@dataclass(eq=False)
class Sequence:
    """One prompt and what follows it."""

    id: int
    prompt: list[int]  # at least one id
    max_tokens: int  # 0: the prompt is run, for its log-probabilities
    params: SamplingParams
    stop: tuple[tuple[int, ...], ...] = ()  # the text ends before the first of these
    deadline: float | None = None  # on the engine's clock; None: never
    priority: int = 0  # lower goes first
    arrived_at: float = 0.0

    stop_pattern: StopPattern | None = None  # or before the first match of this
    include_stop: bool = False  # after the stop, that is, instead of before it
    min_tokens: int = 0  # no stop leaves less than this
    guide: Guide | None = None  # the text must match
    may_leave: bool = True  # an id that leaves the pattern where it may end ends the text; False: it is not allowed
    logprobs: int | None = None  # give each character's log-probability and so many of the likeliest; None: do not
    logprob_ids: tuple[int, ...] = ()  # give those of these ids instead of the likeliest
    score_from: int | None = None  # give the log-probabilities of the prompt too, from this place on (at least 1)

    ids: list[int] = field(default_factory=list, init=False)  # prompt, then completion
    num_prefilled: int = field(default=0, init=False)  # prompt ids in the cache
    num_emitted: int = field(default=0, init=False)  # completion ids given away
    num_cut: int = field(default=0, init=False)  # ids at the end that belong to a stop sequence
    finish_reason: FinishReason | None = field(default=None, init=False)
    scheduled_at: float | None = field(default=None, init=False)
    prefilled_at: float | None = field(default=None, init=False)
    completion_logprobs: list[Logprob] = field(default_factory=list, init=False)
    prompt_logprobs: list[Logprob] = field(default_factory=list, init=False)  # not given away yet

    def __post_init__(self) -> None:
        assert self.prompt and self.max_tokens >= 0, "validated before it gets here"
        assert self.score_from is None or (self.score_from >= 1 and self.logprobs is not None)
        self.ids = list(self.prompt)
        self._stops: list[StopMatcher | StopPattern] = [StopMatcher(self.stop)] if self.stop else []
        if self.stop_pattern is not None:
            self._stops.append(self.stop_pattern)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.ids) - len(self.prompt)

    @property
    def num_prompt_left(self) -> int:
        """Ids of the prompt that are not in the cache yet."""
        return len(self.prompt) - self.num_prefilled

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def allowed(self) -> np.ndarray | None:
        """(V,) bool: the ids that may come next, of which there is at least one; None: all."""
        if self.guide is None:
            return None
        must_go_on = not self.may_leave or self.num_completion_tokens < self.min_tokens
        return self.guide.allowed(self.max_tokens - self.num_completion_tokens, must_go_on)

    def append(self, id: int, logprob: Logprob | None = None) -> None:
        """Take the next id of the completion; ends the sequence at a stop, at its length or where its pattern ends."""
        if self.guide is not None and not self.guide.push(id):
            self.finish_reason = "stop"
            return
        self.ids.append(id)
        if logprob is not None:
            self.completion_logprobs.append(logprob)
        if self._stops:
            matched = max(stop.push(id) or 0 for stop in self._stops)
            num_cut = 0 if self.include_stop else matched
            if matched and self.num_completion_tokens - num_cut >= self.min_tokens:
                self.num_cut = num_cut
                self.finish_reason = "stop"
                return
        if self.guide is not None and self.guide.must_end:
            self.finish_reason = "stop"
        elif self.num_completion_tokens == self.max_tokens:
            self.finish_reason = "length"

    def take_new(self) -> tuple[list[int], list[Logprob]]:
        """Completion ids not given away before, and their log-probabilities if asked for.

        Those that may begin a stop sequence stay until that is ruled out.
        """
        end = len(self.ids)
        if self.finish_reason == "stop":
            end -= self.num_cut
        elif self._stops and not self.is_finished:
            end -= max(stop.held for stop in self._stops)
        start = len(self.prompt) + self.num_emitted
        end = max(start, end)
        logprobs = self.completion_logprobs[self.num_emitted : self.num_emitted + end - start]
        self.num_emitted += end - start
        return self.ids[start:end], logprobs

    def take_prompt_logprobs(self) -> list[Logprob]:
        taken, self.prompt_logprobs = self.prompt_logprobs, []
        return taken


@dataclass
class Prefill:
    """A piece of a prompt to run in this step."""

    sequence: Sequence
    count: int  # ids


class Scheduler:
    """Slots 0 … len(decoding)−1 hold the sequences that decode, the next ones those that do not yet or not now.

    So a decode step is one slice of the cache, whoever came and went. `moves` are the slot copies that keep it
    so; the engine carries them out before its next forward.
    """

    def __init__(self, max_running: int, max_waiting: int, prefill_budget: int):
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.prefill_budget = prefill_budget  # prompt ids per step
        self.decoding: list[Sequence] = []  # by slot
        self.aside: list[Sequence] = []  # by slot, after the decoding ones: the prompt still runs, or `set_aside`
        self.moves: list[tuple[int, int]] = []  # (source slot, target slot), in order
        self._waiting: list[tuple[int, int, Sequence]] = []  # heap of (priority, order of arrival, sequence)
        self._arrivals = 0
        self._by_id: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._by_id.values()))

    @property
    def num_waiting(self) -> int:
        return len(self._by_id) - self.num_running

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.aside)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            QueueFullError: it would have to wait, and as many wait already as may.
        """
        if self.num_running + self.num_waiting >= self.max_running + self.max_waiting:
            raise QueueFullError(self.max_waiting)
        heapq.heappush(self._waiting, (sequence.priority, self._arrivals, sequence))
        self._arrivals += 1
        self._by_id[sequence.id] = sequence

    def finish(self, id: int, reason: FinishReason) -> Sequence | None:
        """End a sequence before its time, wherever it is; None where it has ended already."""
        sequence = self._by_id.get(id)
        if sequence is not None:
            sequence.finish_reason = sequence.finish_reason or reason
            self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Free what a finished sequence holds."""
        assert sequence.is_finished
        del self._by_id[sequence.id]
        if sequence in self.decoding:
            hole = self.decoding.index(sequence)
            last = self.decoding.pop()
            if last is not sequence:
                self.decoding[hole] = last
                self.moves.append((len(self.decoding), hole))
            # Those aside start one slot earlier now: the last of them goes into the hole.
            if self.aside:
                self.moves.append((self.num_running, len(self.decoding)))
                self.aside.insert(0, self.aside.pop())
        elif sequence in self.aside:
            hole = self.aside.index(sequence)
            last = self.aside.pop()
            if last is not sequence:
                self.aside[hole] = last
                self.moves.append((self.num_running, len(self.decoding) + hole))
        elif len(self._waiting) > 2 * self.num_waiting + 64:
            # A waiting one stays in the heap until it comes up; many that left are swept out together.
            self._waiting = [item for item in self._waiting if not item[2].is_finished]
            heapq.heapify(self._waiting)

    def schedule(self, now: float) -> list[Prefill]:
        """Admit the waiting into free slots, and share out this step's prefill budget, first come first served.

        What is only scored comes after what is to be continued: a stream's first character is waited for.
        """
        while self._waiting and self.num_running < self.max_running:
            _, _, sequence = heapq.heappop(self._waiting)
            if not sequence.is_finished:
                sequence.scheduled_at = now
                self.aside.append(sequence)
        budget = self.prefill_budget
        pieces = []
        prefilling = [sequence for sequence in self.aside if sequence.num_prompt_left]
        for sequence in sorted(prefilling, key=lambda it: (it.max_tokens == 0, it.scheduled_at or 0.0)):
            count = min(sequence.num_prompt_left, budget)
            if count == 0:
                break
            pieces.append(Prefill(sequence, count))
            budget -= count
        return pieces

    def slot(self, sequence: Sequence) -> int:
        """Where a running sequence's keys and values lie once the moves are made."""
        if sequence in self.decoding:
            return self.decoding.index(sequence)
        return len(self.decoding) + self.aside.index(sequence)

    def prefilled(self, piece: Prefill) -> None:
        """Note that a piece has run; after the last of its prompt a sequence decodes, or ends if it is only scored."""
        sequence = piece.sequence
        sequence.num_prefilled += piece.count
        if sequence.num_prompt_left:
            return
        if sequence.max_tokens == 0:
            sequence.finish_reason = "length"
        else:
            self.take_back(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Keep a decoding sequence out of the decode steps until `take_back`; its slot stays its own."""
        last = len(self.decoding) - 1
        i = self.decoding.index(sequence)
        self._swap(i, last)
        self.decoding[i] = self.decoding[last]
        self.decoding.pop()
        self.aside.insert(0, sequence)

    def take_back(self, sequence: Sequence) -> None:
        """Let a sequence decode from the next step on."""
        first = len(self.decoding)
        i = self.aside.index(sequence)
        self._swap(first, first + i)
        self.aside[i] = self.aside[0]
        self.aside.pop(0)
        self.decoding.append(sequence)

    def _swap(self, a: int, b: int) -> None:
        """Exchange what two slots hold, through the spare slot."""
        if a != b:
            self.moves += [(a, self.max_running), (b, a), (self.max_running, b)]
