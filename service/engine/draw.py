"""Exact answers under a condition, by rejection sampling.

A mask excludes characters that can no longer lead to a match, so masked text follows another distribution than the
model's. A draw lets the model choose freely instead. It drops a candidate at the first character after which no match
can follow. An answer is therefore a draw from p(text | the condition), and costs 1 / acceptance candidates on average.

Candidates are numbered, and the seed of each is computed from the draw's seed and its number. The answers are the first
matching candidates in the order of these numbers. The answers therefore depend neither on other requests nor on the
order in which candidates end.
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
SEED_BITS = 52  # bits of a candidate's seed, so that JavaScript reads it exactly


def candidate_seed(seed: int, number: int) -> int:
    """Return the seed of a draw's candidate.

    Candidate 0 has the draw's own seed, so a draw with the seed of an answer finds this answer at once.
    """
    if number == 0:
        return seed
    z = (seed + number * 0x9E3779B97F4A7C15) & _MASK  # splitmix64 (Steele, Lea & Flood 2014)
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
    return (z ^ z >> 31) >> (64 - SEED_BITS)


class Candidate(Sequence):
    """A sequence that follows its pattern without masking, unless the pattern has a single match.

    forced: the number of ids at the end of its prompt that belong to the text, because every match begins with them.
    """

    def __init__(self, request: Submit, draw: Draw, number: int, forced: int, now: float, receptive_field: int):
        super().__init__(request, now, receptive_field)
        self.draw, self.number, self.num_forced = draw, number, forced
        self.notable = None  # `extend` examines each id
        if self.guide is not None:
            self.guide.masks = draw.is_certain
            self.guide.remaining += forced
            for id in request.prompt[len(request.prompt) - forced :]:
                self.guide.push(id)

    @property
    def num_drawn(self) -> int:
        """The number of characters that the model chose, with the one that the pattern refused."""
        return self.num_completion_tokens + (self.refused is not None)

    @property
    def text(self) -> list[int]:
        """The ids of the candidate's text, which is an answer if it matches."""
        start, end = len(self.request.prompt) - self.num_forced, len(self.ids) - self.num_cut
        return self.ids[start:end]

    @property
    def matches(self) -> bool:
        if len(self.text) < self.draw.request.min_tokens:
            return False
        return self.guide is None or self.guide.accepts(self.refused)


class _Result(NamedTuple):
    """The result of a candidate that has ended."""

    characters: int
    distance: int | None  # characters to the nearest match; None: unknown
    length: int  # characters of its text
    answer: tuple[Answer, list[int], Logprobs | None] | None  # None: the candidate did not match


class Draw:
    """One request for exact answers; it decides which candidates run next, and which of them are answers."""

    def __init__(self, request: Submit, arrived_at: float, receptive_field: int):
        assert request.draw is not None
        self.request, self.limits, self.id = request, request.draw, request.id
        self.deadline = arrived_at + request.timeout_seconds
        self.running: dict[int, Candidate] = {}  # by number
        self.drawn = Drawn()
        self.num_run = 0  # prompt and candidate characters that ran, including candidates that were given up
        self.scheduled_at = self.prefilled_at = math.nan  # times of the first candidate whose prompt has run
        self.is_timed = False
        self.is_finished = False
        self._receptive_field = receptive_field
        self._next = 0  # number of the next candidate
        self._results: dict[int, _Result] = {}  # undecided results, by candidate number
        self._num_ended = self._num_matched = 0  # candidates that ended, and those that matched, decided or not
        # Answers that were not emitted yet, with their ids and log-probabilities.
        self._ids: list[int] = []
        self._answers: list[Answer] = []
        self._logprobs: Logprobs | None = None if request.logprobs is None else Logprobs()
        self._num_emitted = 0  # ids emitted
        self.is_certain = False  # whether the pattern has a single match; its mask then changes no distribution
        self._forced: list[int] = []
        self._template = msgspec.structs.replace(request, draw=None, min_tokens=0, timeout_seconds=math.inf)
        guide = Sequence(self._template).guide
        if guide is not None:
            forced = guide.forced()
            self.is_certain = all(map(guide.push, forced)) and guide.must_end
            # Penalties count generated characters, so with penalties the forced ones must be generated too.
            if not self.is_certain and not request.sampling.needs_history:
                self._forced = forced[: request.max_tokens - 1]
        if self._forced:
            self._template.prompt = request.prompt + self._forced
            self._template.max_tokens -= len(self._forced)
            if request.logprobs is not None:
                self._template.score_from = len(request.prompt)

    @property
    def wants_more(self) -> bool:
        """Whether another candidate should start.

        So many run at the same time as are likely to give the missing answers at the present rate of matches.
        """
        missing = self.limits.answers - self._num_matched
        if missing <= 0 or self.is_finished or self._next == self.limits.max_candidates:
            return False
        return len(self.running) < math.ceil(missing * (self._num_ended + 1) / (self._num_matched + 1))

    @property
    def _num_undecided_matches(self) -> int:
        return self._num_matched - self.drawn.matches

    def next(self, id: int, now: float) -> Candidate:
        """Return the next candidate, a sequence with the id `id`."""
        number, template = self._next, self._template
        sampling = msgspec.structs.replace(template.sampling, seed=candidate_seed(template.sampling.seed, number))
        request = msgspec.structs.replace(template, id=id, sampling=sampling, must_run=number > 0 or template.must_run)
        candidate = Candidate(request, self, number, len(self._forced), now, self._receptive_field)
        self.running[number] = candidate
        self._next += 1
        return candidate

    def ended(self, candidate: Candidate) -> list[Candidate]:
        """Record the result of a candidate that has ended. Return the running candidates that are no longer needed."""
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
        """Count the characters that a candidate has run, when it leaves."""
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
        """Return what has changed since the last delta, or None. `reason` says why the draw ends early, if it does."""
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
    """Yield, one after another, the draws that start a candidate in `room` free slots.

    The client that runs the fewest candidates for its weight comes first. A draw without a candidate gets one even if
    there is no room.
    """
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
