"""Exact answers under a condition: free candidates, and the first ones that match.

A mask excludes at each step what can no longer match, and so draws from another distribution than the model's. Here the
model chooses freely. A candidate is dropped at the first character after which no match can follow, so an answer is a
draw from p(text | the condition) (rejection sampling). It costs 1 / acceptance candidates.

Candidates are numbered, and each has a seed that follows from the draw's seed and its number. The answers are the first
ones that match in the order of these numbers. So they are the same whatever else runs, and whichever candidate ends
first.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from service.engine.sequence import Sequence
from service.wire import Answer, Delta, Drawn, FinishReason, Logprobs, Submit

_MASK = 2**64 - 1
SEED_BITS = 52  # of a candidate's seed, so that JavaScript reads it as it is


def candidate_seed(seed: int, number: int) -> int:
    """Of a draw's candidate. Candidate 0 has the draw's own: with its seed, an answer is drawn again at once."""
    if number == 0:
        return seed
    z = (seed + number * 0x9E3779B97F4A7C15) & _MASK  # splitmix64 (Steele, Lea & Flood 2014)
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
    return (z ^ z >> 31) >> (64 - SEED_BITS)


class Candidate(Sequence):
    """A sequence whose pattern is followed, and masks nothing unless it has a single match.

    forced: ids at the end of its prompt that belong to the text, as every match begins with them.
    """

    def __init__(self, request: Submit, draw: Draw, number: int, forced: int, now: float, receptive_field: int):
        super().__init__(request, now, receptive_field)
        self.draw, self.number, self.num_forced = draw, number, forced
        self.notable = None  # each id needs a look
        if self.guide is not None:
            self.guide.masks = draw.is_certain
            self.guide.remaining += forced
            for id in request.prompt[len(request.prompt) - forced :]:
                self.guide.push(id)

    @property
    def num_drawn(self) -> int:
        """Characters that were chosen until it was decided."""
        return self.num_completion_tokens + (self.refused is not None)

    @property
    def text(self) -> list[int]:
        """The ids of the answer that it gives if it matches."""
        start, end = len(self.request.prompt) - self.num_forced, len(self.ids) - self.num_cut
        return self.ids[start:end]

    @property
    def matches(self) -> bool:
        if len(self.text) < self.draw.request.min_tokens:
            return False
        return self.guide is None or self.guide.accepts(self.refused)


class _Result(NamedTuple):
    """Of a candidate that has ended."""

    characters: int
    distance: int | None  # to a match; None: unknown
    length: int  # in the pattern
    answer: tuple[Answer, list[int], Logprobs | None] | None  # None: dropped


class Draw:
    """One request for exact answers: which candidates run next, and which of them are answers."""

    def __init__(self, request: Submit, arrived_at: float, receptive_field: int):
        assert request.draw is not None
        self.request, self.limits, self.id = request, request.draw, request.id
        self.deadline = arrived_at + request.timeout_seconds
        self.running: dict[int, Candidate] = {}  # by number
        self.drawn = Drawn()
        self.num_run = 0  # characters of prompts and candidates, with those that decided nothing
        self.scheduled_at = self.prefilled_at = math.nan  # of the first candidate whose prompt has run
        self.is_timed = False
        self.is_finished = False
        self._receptive_field = receptive_field
        self._next = 0  # number of the next candidate
        self._results: dict[int, _Result] = {}  # that are not decided, by number
        self._num_ended = self._num_matched = 0  # of all that ended, decided or not
        self._ids: list[int] = []  # of answers that were not emitted, with …
        self._answers: list[Answer] = []
        self._logprobs: Logprobs | None = None if request.logprobs is None else Logprobs()
        self._num_emitted = 0  # ids
        self.is_certain = False  # the pattern has a single match, so its mask changes no distribution
        self._forced: list[int] = []
        self._template = msgspec.structs.replace(request, draw=None, min_tokens=0, timeout_seconds=math.inf)
        guide = Sequence(self._template).guide
        if guide is not None:
            forced = guide.forced()
            self.is_certain = all(map(guide.push, forced)) and guide.must_end
            # Penalties count what was generated, so what is forced must be.
            if not self.is_certain and not request.sampling.needs_history:
                self._forced = forced[: request.max_tokens - 1]
        if self._forced:
            self._template.prompt = request.prompt + self._forced
            self._template.max_tokens -= len(self._forced)
            if request.logprobs is not None:
                self._template.score_from = len(request.prompt)

    @property
    def wants_more(self) -> bool:
        """Whether another candidate should run: as many as are likely to give what is missing, at the same time."""
        missing = self.limits.answers - self._num_matched
        if missing <= 0 or self.is_finished or self._next == self.limits.max_candidates:
            return False
        return len(self.running) < math.ceil(missing * (self._num_ended + 1) / (self._num_matched + 1))

    @property
    def _num_undecided_matches(self) -> int:
        return self._num_matched - self.drawn.matches

    def next(self, id: int, now: float) -> Candidate:
        """The next candidate, as the sequence `id`."""
        number, template = self._next, self._template
        sampling = msgspec.structs.replace(template.sampling, seed=candidate_seed(template.sampling.seed, number))
        request = msgspec.structs.replace(template, id=id, sampling=sampling, must_run=number > 0 or template.must_run)
        candidate = Candidate(request, self, number, len(self._forced), now, self._receptive_field)
        self.running[number] = candidate
        self._next += 1
        return candidate

    def ended(self, candidate: Candidate) -> list[Candidate]:
        """Take in a candidate that has ended; returns those that still run in vain."""
        self.running.pop(candidate.number, None)
        self.count(candidate)
        if self.is_finished:
            return []
        answer, guide = None, candidate.guide
        if candidate.matches:
            text, reason = candidate.text, candidate.finish_reason
            assert reason is not None
            answer = Answer(len(text), candidate.request.sampling.seed, reason), text, self._logprobs_of(candidate)
            self._num_matched += 1
        self._num_ended += 1
        distance = None if guide is None else guide.distance
        self._results[candidate.number] = _Result(candidate.num_drawn, distance, len(candidate.text), answer)
        self._decide()
        if self.is_finished:
            return list(self.running.values())
        missing = self.limits.answers - self.drawn.matches
        if self._num_undecided_matches < missing:
            return []
        last = sorted(number for number, result in self._results.items() if result.answer)[missing - 1]
        return [it for number, it in self.running.items() if number > last]

    def _logprobs_of(self, candidate: Candidate) -> Logprobs | None:
        if self._logprobs is None:
            return None
        logprobs = candidate.unemitted_prompt_logprobs
        logprobs.extend(candidate.unemitted_logprobs)
        return logprobs.take(len(candidate.text))

    def count(self, candidate: Candidate) -> None:
        """Count what a candidate that leaves has run."""
        self.num_run += candidate.num_run + candidate.num_drawn

    def _decide(self) -> None:
        drawn, limits = self.drawn, self.limits
        while not self.is_finished and (result := self._results.pop(drawn.candidates, None)) is not None:
            drawn.candidates += 1
            drawn.characters += result.characters
            if result.answer is not None:
                answer, ids, logprobs = result.answer
                drawn.matches += 1
                self._answers.append(answer)
                self._ids += ids
                if self._logprobs is not None and logprobs is not None:
                    self._logprobs.extend(logprobs)
            else:
                drawn.longest = max(drawn.longest, result.length)
                if result.distance is not None:
                    drawn.nearest = result.distance if drawn.nearest is None else min(drawn.nearest, result.distance)
            self.is_finished = (
                drawn.matches == limits.answers
                or drawn.candidates == limits.max_candidates
                or drawn.characters >= limits.max_characters
            )

    def delta(self, now: float, reason: FinishReason | None = None) -> Delta | None:
        """What is new; None: nothing. reason: why it ends early."""
        if self.is_finished and reason is None:
            reason = "stop"
        is_prefilled = not math.isnan(self.prefilled_at)
        if not self._answers and reason is None and (self.is_timed or not is_prefilled):
            return None
        ids, answers, logprobs = self._ids, self._answers, self._logprobs
        self._ids, self._answers = [], []
        if logprobs is not None:
            self._logprobs = Logprobs()
        self._num_emitted += len(ids)
        delta = Delta(
            self.id, ids, reason, logprobs=logprobs, answers=answers, drawn=msgspec.structs.replace(self.drawn)
        )
        if is_prefilled and not self.is_timed:
            self.is_timed = True
            delta.scheduled_at, delta.prefilled_at = self.scheduled_at, self.prefilled_at
        if reason is not None:
            self.is_finished = True
            delta.ended_at = now if is_prefilled else None
            delta.num_unseen = max(
                0, self.num_run - self._num_emitted - (len(self.request.prompt) if is_prefilled else 0)
            )
        return delta


def shared_out(draws: Iterable[Draw], room: int) -> Iterator[Draw]:
    """Whose candidate starts next, `room` of them: of the client that runs the fewest, by weight. Each draw has one."""
    numbers: Counter[str] = Counter()
    for draw in draws:
        numbers[draw.request.client] += len(draw.running)

    def place(draw: Draw) -> tuple[bool, float, int]:
        return bool(draw.running), numbers[draw.request.client] / draw.request.weight, len(draw.running)

    heap = [(place(draw), i, draw) for i, draw in enumerate(draws) if draw.wants_more]
    heapq.heapify(heap)
    while heap:
        before, i, draw = heapq.heappop(heap)
        if (now := place(draw)) != before:
            heapq.heappush(heap, (now, i, draw))
            continue
        if room <= 0 and draw.running:
            return
        room -= 1
        yield draw
        numbers[draw.request.client] += 1
        if draw.wants_more:
            heapq.heappush(heap, (place(draw), i, draw))
