"""Exact answers under a condition, by rejection sampling.

A mask excludes characters that can no longer lead to a match, so masked text follows another distribution than the
model's. Exact answers let the model choose freely instead: a candidate that no match can follow any more is dropped.
An answer is therefore a draw from p(text | the condition), and costs 1 / acceptance candidates on average.

Candidates are numbered, and the seed of each is computed from the prompt's seed and its number. The answers are the
first matching candidates in the order of these numbers. The answers therefore depend neither on other requests nor on
the order in which candidates end.
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Any, NamedTuple

import msgspec
import numpy as np

from service.constrain.automaton import Automaton, Guide, MinimumLength
from service.text.errors import InvalidRequestError
from service.text.model import TextModel
from service.text.pieces import Piece
from service.wire import FinishReason, Logprobs, Submit, Tried
from service.words import plural

_MASK = 2**64 - 1
SEED_BITS = 52  # bits of a candidate's seed, so that JavaScript reads it exactly


class Bounds(NamedTuple):
    """The exact answers of each prompt, and the limits of their candidates."""

    answers: int
    max_candidates: int
    max_characters: int  # of all candidates


class Cost(NamedTuple):
    """The candidates up to the last answer. They do not depend on the load."""

    candidates: int
    matches: int
    characters: int

    def __str__(self) -> str:
        return f"{self.matches} of {plural(self.candidates, 'candidate')} matched"


def candidate_seed(seed: int, number: int) -> int:
    """Return the seed of a candidate.

    Candidate 0 has the prompt's own seed, so a request with the seed of an answer finds this answer at once.
    """
    if number == 0:
        return seed
    z = (seed + number * 0x9E3779B97F4A7C15) & _MASK  # splitmix64 (Steele, Lea & Flood 2014)
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
    return (z ^ z >> 31) >> (64 - SEED_BITS)


class Ending(NamedTuple):
    """How a candidate has ended."""

    text: str
    finish_reason: FinishReason | None
    num_unseen: int
    tried: Tried | None
    logprobs: Logprobs | None  # those of the prompt that were asked for, and then those of the text


class Exact:
    """The exact answers of a request: it says which sequences run, takes their results, and gives the answers.

    submits: the sequence of each prompt under its condition, the template of its candidates.
    """

    def __init__(self, model: TextModel, submits: list[Submit], bounds: Bounds):
        self.templates, self.bounds = submits, bounds
        self._draws = [_Draw(model, submit, bounds, i * bounds.answers) for i, submit in enumerate(submits)]
        self._numbers = itertools.count()
        self._running: dict[int, tuple[int, int]] = {}  # prompt and candidate of each sequence that is needed
        self._needless: list[int] = []
        self._num_done = 0  # prompts that have all their answers, with all prompts before them
        self.num_matched = 0  # candidates that matched, needed or not

    @property
    def cost(self) -> Cost:
        every = [draw.cost for draw in self._draws]
        return Cost(*(sum(column) for column in zip(*every, strict=True)))

    @property
    def failure(self) -> InvalidRequestError | None:
        """The error of the first prompt whose limits were reached, if all prompts before it have their answers."""
        if self._num_done == len(self._draws) or not (draw := self._draws[self._num_done]).is_finished:
            return None
        message = draw.too_few()
        if len(self._draws) > 1:
            message = f"prompt {self._num_done}: {message}"
        return InvalidRequestError(message, "exact", "too_few_matches")

    def is_finished(self, prompt: int) -> bool:
        return self._draws[prompt].is_finished

    def is_needed(self, number: int) -> bool:
        """True if the result of a sequence still matters."""
        return number in self._running

    def more(self, room: int) -> list[tuple[int, int, Submit]]:
        """Return sequences to run too, each with its number and that of its prompt.

        There are at most `room`, but at least one of each prompt that still needs answers.
        """
        heap = [(draw.num_running, i) for i, draw in enumerate(self._draws) if draw.wants_more]
        heapq.heapify(heap)
        started = []
        while heap and (room > 0 or not heap[0][0]):
            running, i = heap[0]
            candidate, submit = self._draws[i].next()
            number = next(self._numbers)
            self._running[number] = i, candidate
            started.append((number, i, submit))
            room -= 1
            if self._draws[i].wants_more:
                heapq.heapreplace(heap, (running + 1, i))
            else:
                heapq.heappop(heap)
        return started

    def ended(self, number: int, result: Ending) -> list[Piece]:
        """Take the result of a sequence that is needed. Return the answers that are known by it, in order."""
        prompt, candidate = self._running.pop(number)
        draw = self._draws[prompt]
        before = draw.num_matched
        last = draw.ended(candidate, result)
        self.num_matched += draw.num_matched - before
        if last is not None:
            self._drop(prompt, last)
        while self._num_done < len(self._draws) and self._draws[self._num_done].has_all:
            self._num_done += 1
        if draw.is_finished and not draw.has_all:  # the request fails, so later prompts are needless
            for later in range(prompt + 1, len(self._draws)):
                self._draws[later].is_finished = True
                self._drop(later, -1)
        answers, draw.answers = draw.answers, []
        return answers

    def _drop(self, prompt: int, last: int) -> None:
        """Candidates of a prompt after the candidate `last` are needless."""
        needless = [number for number, (its, which) in self._running.items() if its == prompt and which > last]
        for number in needless:
            del self._running[number]
        self._draws[prompt].num_running -= len(needless)
        self._needless += needless

    def close(self) -> None:
        """Nothing more is needed."""
        for draw in self._draws:
            draw.is_finished = True
        self._running.clear()

    def take_needless(self) -> list[int]:
        """Return the sequences that have become needless."""
        needless, self._needless = self._needless, []
        return needless


class _Undecided(NamedTuple):
    """A candidate that has ended before an earlier one."""

    characters: int
    distance: int | None  # characters to the nearest match; None: unknown
    length: int  # characters of its text
    answer: tuple[str, FinishReason | None, Logprobs | None] | None  # None: it does not match


class _Draw:
    """The exact answers of one prompt. first: the number of the first one."""

    def __init__(self, model: TextModel, template: Submit, bounds: Bounds, first: int):
        self.template, self._bounds, self._first = template, bounds, first
        self.answers: list[Piece] = []  # not returned yet
        self.num_running = 0
        self.is_finished = False
        self.cost = Cost(0, 0, 0)
        self._nearest: int | None = None  # fewest characters that a dropped candidate lacked for a match
        self._longest = 0  # most characters that a dropped candidate had in the pattern
        self._next = 0  # number of the next candidate
        self._results: dict[int, _Undecided] = {}  # not decided yet: an earlier candidate still runs
        self._num_ended = self.num_matched = 0  # candidates that ended, and those that matched, decided or not
        # What a candidate has in place of the template's. One shorter than min_tokens ends, and is dropped.
        self._own: dict[str, Any] = {"min_tokens": 0, "masks": False}
        self._end = model.record_end_character or ""
        self._forced = ""  # what all matches begin with
        self._only: str | None = None  # the only match
        if template.constraint is not None:
            self._force(model, template.constraint)

    def _force(self, model: TextModel, constraint: bytes) -> None:
        """Begin all candidates with what all matches begin with."""
        template = self.template
        automaton = Automaton.unpack(constraint)
        guide = Guide(automaton, template.max_tokens)
        forced = guide.forced()
        if all(map(guide.push, forced)) and (guide.must_end or not guide.remaining):
            self._only = model.tokenizer.decode(forced)
            self._own["masks"] = True  # the mask changes no distribution
            return
        forced = forced[: template.max_tokens - 1]
        # Penalties count generated characters, so with penalties the forced ones must be generated too.
        if not forced or template.sampling.needs_history:
            return
        self._forced = model.tokenizer.decode(forced)
        minimum = None if template.minimum is None else MinimumLength.unpack(template.minimum)
        rest, minimum = _after(automaton, minimum, forced)
        self._own |= {
            "constraint": rest.pack(),
            "minimum": None if minimum is None else minimum.pack(),
            "prompt": template.prompt + forced,
            "max_tokens": template.max_tokens - len(forced),
            "score_from": None if template.logprobs is None else len(template.prompt),
        }

    @property
    def has_all(self) -> bool:
        return self.cost.matches == self._bounds.answers

    @property
    def wants_more(self) -> bool:
        """True if another candidate should start.

        So many run at the same time as are likely to give the missing answers at the present rate of matches.
        """
        missing = self._bounds.answers - self.num_matched
        if missing <= 0 or self.is_finished or self._next == self._bounds.max_candidates:
            return False
        return self.num_running < math.ceil(missing * (self._num_ended + 1) / (self.num_matched + 1))

    def next(self) -> tuple[int, Submit]:
        """Return the next candidate's number and sequence."""
        number, template = self._next, self.template
        sampling = msgspec.structs.replace(template.sampling, seed=candidate_seed(template.sampling.seed, number))
        self._next += 1
        self.num_running += 1
        return number, msgspec.structs.replace(template, sampling=sampling, **self._own)

    def ended(self, number: int, result: Ending) -> int | None:
        """Take a result. Return the last candidate that is still needed if there are matches enough, else None."""
        self.num_running -= 1
        self._num_ended += 1
        text, reason, num_unseen, tried, logprobs = result
        if tried is None:  # it was masked
            matches = self._only in (text, text + self._end)
            tried = Tried(matches, len(text) + num_unseen, len(text), 0)
        length = len(self._forced) + tried.length
        answer = None
        if tried.matches and length >= self.template.min_tokens:
            answer = self._forced + text, reason, None if logprobs is None else logprobs.take(length)
            self.num_matched += 1
        self._results[number] = _Undecided(tried.characters, tried.distance, length, answer)
        self._decide()
        missing = self._bounds.answers - self.cost.matches
        if self.is_finished:
            return -1
        if self.num_matched - self.cost.matches < missing:
            return None
        return sorted(which for which, its in self._results.items() if its.answer)[missing - 1]

    def _decide(self) -> None:
        """Decide the results of all candidates before the first one that still runs."""
        bounds = self._bounds
        while not self.is_finished and (its := self._results.pop(self.cost.candidates, None)) is not None:
            number, matches, characters = self.cost
            if its.answer is not None:
                text, reason, logprobs = its.answer
                seed = candidate_seed(self.template.sampling.seed, number)
                self.answers.append(Piece(self._first + matches, seed, text, reason, logprobs, is_exact=True))
                matches += 1
            else:
                self._longest = max(self._longest, its.length)
                if its.distance is not None and (self._nearest is None or its.distance < self._nearest):
                    self._nearest = its.distance
            self.cost = Cost(number + 1, matches, characters + its.characters)
            self.is_finished = (
                self.has_all
                or self.cost.candidates == bounds.max_candidates
                or self.cost.characters >= bounds.max_characters
            )

    def too_few(self) -> str:
        """Describe that a limit was reached before there were all answers."""
        rest = "the others" if self.cost.matches else "them"
        near = f"the longest of {rest} kept to the condition for {plural(self._longest, 'character')}"
        if self._nearest:
            near = f"the nearest of {rest} lacked {plural(self._nearest, 'character')} of a match, {near}"
        return (
            f"{self.cost} ({plural(self.cost.characters, 'character')}), {self._bounds.answers} must: {near}; loosen "
            "the condition or raise max_candidates or max_candidate_characters"
        )


def _after(
    automaton: Automaton, minimum: MinimumLength | None, ids: list[int]
) -> tuple[Automaton, MinimumLength | None]:
    """Return the automaton of what may follow `ids`, and its minimum length: the state after them becomes state 0."""
    state = 0
    for id in ids:
        state = int(automaton.table[state, automaton.classes[id]])
    order = np.arange(len(automaton.table))
    order[[0, state]] = order[[state, 0]]  # its own inverse
    table = np.append(order, -1).astype(automaton.table.dtype)[automaton.table[order]]
    rest = Automaton(automaton.classes, table, automaton.accepting[order], automaton.distance[order])
    if minimum is None or minimum.length <= len(ids):
        return rest, None
    layers = np.unpackbits(minimum.layers, axis=1, count=len(order))[:, order]
    return rest, MinimumLength(minimum.length - len(ids), np.packbits(layers, axis=1), minimum.repeat)
