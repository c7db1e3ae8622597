"""One prompt and its completion: the request, its progress and its end.

The module handles ids only, without torch. A sequence ends once, with exactly one finish reason.
"""

from __future__ import annotations

import functools
import math
from array import array

import numpy as np

from service.constrain.automaton import Automaton, Guide, MinimumLength, StopPattern
from service.engine.runner import HISTORY, NONE, Piece, Report
from service.wire import FinishReason, Logprobs, Submit, Tried


class StopMatcher:
    """Finds stop sequences in a stream of ids, one id at a time (Knuth, Morris & Pratt 1977).

    The last `held` ids may be the beginning of a stop sequence, so they must not be emitted yet.
    """

    def __init__(self, stops: tuple[tuple[int, ...], ...]):
        self._stops = [(stop, _failure_links(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # length of the prefix of each stop that the stream ends with

    @property
    def held(self) -> int:
        return max(self._matched, default=0)

    def push(self, id: int) -> int | None:
        """Take one id. Return the length of the longest stop sequence that it completes, or None."""
        found = None
        for i, (stop, links) in enumerate(self._stops):
            k = self._matched[i]
            while k and (k == len(stop) or stop[k] != id):
                k = links[k - 1]
            self._matched[i] = k = k + (stop[k] == id)
            if k == len(stop):
                found = max(found or 0, k)
        return found


@functools.lru_cache(256)
def _failure_links(stop: tuple[int, ...]) -> array[int]:
    """Return `links`: links[i] is the length of the longest proper prefix of `stop` that ends at i."""
    links, k = array("I", [0]), 0
    for id in stop[1:]:
        while k and stop[k] != id:
            k = links[k - 1]
        k += stop[k] == id
        links.append(k)
    return links


# All sequences with the same pattern share an automaton and its masks.
_automaton = functools.lru_cache(64)(Automaton.unpack)


@functools.lru_cache(64)
def _minimum(packed: bytes, constraint: bytes) -> MinimumLength:
    """Return the minimum length of one pattern.

    It caches the masks of that pattern, so two patterns with equal layers do not share it.
    """
    return MinimumLength.unpack(packed)


def _guide_of(request: Submit) -> Guide | None:
    if request.constraint is None or (request.constrains_first and request.written):
        return None
    minimum = None if request.minimum is None else _minimum(request.minimum, request.constraint)
    return Guide(_automaton(request.constraint), request.max_tokens, minimum, request.may_leave, request.masks)


def _stops_of(request: Submit) -> list[StopMatcher | StopPattern]:
    stops: list[StopMatcher | StopPattern] = [StopMatcher(request.stop)] if request.stop else []
    if request.stop_pattern is not None:
        stops.append(StopPattern(_automaton(request.stop_pattern)))
    return stops


class Sequence:
    """The state of one submitted sequence. Times are on the engine's clock.

    A sequence may lose its slot and go on in another one, as another worker's sequence goes on here. It then runs the
    end of its text, as if it were a prompt.

    receptive_field: the model's. Ids before it cannot influence a needed logit, and are skipped.
    """

    def __init__(self, request: Submit, arrived_at: float = 0.0, receptive_field: int = 2**31):
        assert request.prompt and request.max_tokens >= 0, "validated before it gets here"
        assert request.score_from is None or (request.score_from >= 1 and request.logprobs is not None)
        self.request = request
        self.id = request.id
        self.deadline = arrived_at + request.timeout_seconds
        self.receptive_field = receptive_field
        self.ids = [*request.prompt, *array("i", request.written)]  # prompt, then completion
        self._is_followed = not request.written  # whether the guide and the stops are where `ids` end
        self.report = None if request.logprobs is None else Report(request.logprobs, request.logprob_ids)
        self.num_run = 0  # ids of the prompt that ran, and were not copied; not those that ran again
        self.order_of_arrival = 0  # set by the queue
        self.has_left_queue = False
        self.goes_on = bool(request.written)  # has run in another slot, or in another worker
        self.is_parked = False  # has lost its slot, and does not wait for another one yet
        self.num_emitted = self.num_completion_tokens  # completion ids emitted
        self.num_cut = 0  # ids at the end that belong to a stop and are not emitted
        self.refused: int | None = None  # the id that ended its pattern; it is not part of the completion
        self.finish_reason: FinishReason | None = None
        self.scheduled_at = math.nan
        self.prefilled_at: float | None = None
        self.is_timed = False  # whether a delta has reported scheduled_at and prefilled_at
        self.unemitted_logprobs = Logprobs()
        self.unemitted_prompt_logprobs = Logprobs()
        self.guide = _guide_of(request)
        self._stops = _stops_of(request)
        self.num_held = 0  # ids at the end that may begin a stop
        # Ids that may begin a stop. While none of them is held or arrives, `extend_simply` suffices. None: it never
        # does.
        is_simple = (request.constraint is None or request.constrains_first) and request.stop_pattern is None
        self.notable = frozenset(stop[0] for stop in request.stop) if is_simple and request.masks else None
        self.slot: int | None = None
        self.rewind()

    def rewind(self) -> None:
        """Prepare to run in an empty slot what the next choice depends on.

        Each id keeps its position, because the bits of its keys depend on it.
        """
        self.slot = None
        scores_from = None if self.num_completion_tokens else self.request.score_from
        origin = max(0, (self.request.score_from or len(self.request.prompt)) - self.receptive_field)
        first_needed = scores_from or len(self.ids)  # the first id whose logits are needed
        self.prefill_from = max(origin, first_needed - self.receptive_field)
        self.position = self.prefill_from - origin  # of the first id that runs
        self.to_run = np.array(self.ids[self.prefill_from :], dtype=np.int32)  # before the next choice
        # For each of them, the id after it if its log-probability is to be reported, else NONE.
        self.targets: np.ndarray | None = None
        if scores_from is not None:
            self.targets = np.append(self.to_run[1:], np.int32(NONE))
            self.targets[: scores_from - 1 - self.prefill_from] = NONE
        # At most so many of them may be copied from another slot, because the logits of the others are needed.
        self.max_shared = 0 if self.position else first_needed - 1 - self.prefill_from
        self.num_prefilled = 0  # of them, how many are in the cache

    @property
    def num_completion_tokens(self) -> int:
        return len(self.ids) - len(self.request.prompt)

    @property
    def is_candidate(self) -> bool:
        """True for a candidate of an exact answer, unless its pattern has a single match."""
        return not self.request.masks

    @property
    def is_extra(self) -> bool:
        """True if it was accepted before: a later candidate of a request, or a text of which a part is written."""
        return self.goes_on or (self.is_candidate and self.request.must_run)

    @property
    def tried(self) -> Tried:
        """How a candidate has ended."""
        guide, chosen = self.guide, self.num_completion_tokens
        matches = guide is None or guide.accepts(self.refused)
        distance = None if guide is None else guide.distance
        return Tried(matches, chosen + (self.refused is not None), chosen - self.num_cut, distance)

    @property
    def is_only_scored(self) -> bool:
        return self.request.max_tokens == 0

    @property
    def may_stop(self) -> bool:
        return bool(self._stops)

    @property
    def ends(self) -> list[int]:
        """The stop sequences of one character, as ids."""
        return [stop[0] for stop in self.request.stop if len(stop) == 1]

    @property
    def num_written(self) -> int:
        """The number of ids that it has chosen in its slot."""
        return len(self.ids) - self.prefill_from - len(self.to_run)

    @property
    def num_again(self) -> int:
        """The number of ids that run again if it goes on in another slot."""
        return min(len(self.ids), self.receptive_field) if self.num_prefilled or self.num_completion_tokens else 0

    @property
    def written(self) -> list[int]:
        """The completion so far, with what is held back."""
        return self.ids[len(self.request.prompt) :]

    @property
    def num_left_to_run(self) -> int:
        """The number of ids that are not in the cache yet, and run before the next choice."""
        return len(self.to_run) - self.num_prefilled

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def piece(self, length: int) -> Piece:
        """Return the piece that runs the next `length` ids of `to_run`."""
        assert self.slot is not None
        start, is_last = self.num_prefilled, length == self.num_left_to_run
        end = self.prefill_from + start
        chooses = is_last and self.request.max_tokens > 0
        return Piece(
            self.slot,
            self.to_run[start : start + length],
            chooses,
            self.guide if chooses else None,
            self.report if chooses or self.targets is not None else None,
            None if self.targets is None else self.targets[start : start + length],
            self,
            is_last,
            np.array(self.ids[max(0, end - HISTORY) : end], dtype=np.int32),
        )

    def extend_simply(self, ids: list[int]) -> bool:
        """Append ids that contain no beginning of a stop, and count them as emitted. The caller watches max_tokens.

        Return False, and append nothing, if the ids need `extend`.
        """
        if self.notable is None or self.num_held or (self.notable and not self.notable.isdisjoint(ids)):
            return False
        self.ids += ids
        self.num_emitted += len(ids)
        return True

    def extend(self, ids: list[int]) -> int:
        """Append the next ids of the completion until one ends it. Return how many became part of it."""
        before = len(self.ids)
        for id in ids:
            self.append(id)
            if self.is_finished:
                break
        return len(self.ids) - before

    def append(self, id: int) -> None:
        """Append the next id of the completion. End the sequence at a stop, at max_tokens or at its pattern's end."""
        if self.guide is not None and not self.guide.push(id):
            self.finish_reason, self.refused = "stop", id
            return
        self.ids.append(id)
        self._follow(id, self.num_completion_tokens)

    def follow(self) -> int:
        """Let the guide and the stops follow what another worker has written. Return how many ids they followed."""
        if self._is_followed:
            return 0
        self._is_followed = True
        if self.guide is None and not self._stops:
            return 0
        for count, id in enumerate(self.written, start=1):
            if self.guide is not None:
                self.guide.push(id)
            self._follow(id, count)
        assert not self.is_finished, "what was written before did not end it"
        return len(self.written)

    def _follow(self, id: int, count: int) -> None:
        """End the sequence if it ends after `id`, with which it has `count` ids."""
        # A stop that is cut off may begin only after min_tokens characters.
        first = 0 if self.request.include_stop else self.request.min_tokens
        if self._stops and count > first:
            matched = max(stop.push(id) or 0 for stop in self._stops)
            if matched and count >= self.request.min_tokens:
                self.num_cut = 0 if self.request.include_stop else matched
                self.finish_reason = "stop"
                return
            self.num_held = max(stop.held for stop in self._stops)
        if self.guide is not None and self.guide.must_end:
            self.finish_reason = "stop"
        elif count == self.request.max_tokens:
            self.finish_reason = "length"

    def emit(self) -> tuple[list[int], Logprobs | None, Logprobs | None]:
        """Return new completion ids, their log-probabilities if requested, and new log-probabilities of the prompt.

        Ids that may begin a stop are held back until a stop is ruled out.
        """
        of_prompt, self.unemitted_prompt_logprobs = self.unemitted_prompt_logprobs, Logprobs()
        end = len(self.ids)
        if self.finish_reason == "stop":
            end -= self.num_cut
        elif not self.is_finished:
            end -= self.num_held
        start = len(self.request.prompt) + self.num_emitted
        end = max(start, end)
        self.num_emitted += end - start
        has_logprobs = self.request.logprobs is not None and end > start
        logprobs = self.unemitted_logprobs.take(end - start) if has_logprobs else None
        return self.ids[start:end], logprobs, of_prompt if len(of_prompt) else None
