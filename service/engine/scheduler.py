"""The scheduler: it assigns queued sequences to cache slots, and shares out prompt characters between steps.

It does bookkeeping only, without torch, text or HTTP. It has no clock; the engine passes the time in.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from service.engine.fair_queue import Client, FairQueue
from service.engine.prefixes import Contents, Found
from service.engine.runner import Piece
from service.engine.sequence import Sequence
from service.model.config import GPTConfig
from service.wire import FinishReason, Submit

MIN_PREFILL = 16  # the least budget of a step, in prompt characters
# Running one prompt character takes as long as copying, comparing or starting this many.
COPIED_PER_CHARACTER = 128  # positions copied
COMPARED_PER_CHARACTER = 16384  # ids compared
STARTED_PER_CHARACTER = 256  # prompt ids passed to the runner's `start`
SCORING_TURN = 4  # prompts that are only scored come first in every step whose number is a multiple of this
FOLLOWED_PER_CHARACTER = 16  # ids that another worker has written, and that a guide or stops follow
# A sequence keeps its slot until it has written so many characters in it, and an eighth of those that run again when it
# goes on in another slot.
MIN_WRITTEN = 32
RUN_AGAIN_PER_WRITTEN = 8
# So many characters may run again per decoded one, because both take about as long; at once, so many receptive fields.
RUN_AGAIN_SHARE = 1 / 5
MAX_CREDIT = 8
TAKEN_FREELY = 8  # a client takes up to an eighth of the slots from others, and more if its sequences are long


class BusyError(Exception):
    """The request is refused: the queue is full, or the expected wait is too long. The message gives the cause."""


class Plan(NamedTuple):
    """The work of a step besides decoding; the engine carries it out in the order of the fields."""

    starts: list[tuple[Sequence, Found | None]]  # new in a slot, each with its copy; the engine then calls `copied`
    pieces: list[Piece]  # after launching these, the engine calls `prefilled`


class Scheduler:
    """Assigns sequences to slots.

    A new sequence gets the free slot that was unused for longest, because its text is the least likely to be copied. If
    no slot is free, a client that runs fewer sequences than another one takes a slot from it. The newest sequence of
    the other one then waits, and goes on later from what it has written.

    slots: of the runner.
    max_waiting: the limit of the queue. A client may exceed it by a quarter if it has fewer waiting sequences than
        its part of max_waiting, which is divided among the clients that wait.
    piece: prompts run in pieces that begin at multiples of this; a copied prefix ends at a multiple.

    Arrays are indexed by slot, so a decode step costs the same few array operations at any number of rows.
    """

    def __init__(self, slots: int, max_waiting: int, config: GPTConfig, piece: int = 1):
        self.slots = slots
        self.piece, self.max_waiting = piece, max_waiting
        self.by_slot: list[Sequence | None] = [None] * self.slots
        self.is_decoding = np.zeros(self.slots, dtype=bool)
        self.num_left = np.zeros(self.slots, dtype=np.int64)  # characters that a decoding sequence may still choose
        self.prefilling: list[Sequence] = []  # in the order in which they got their slots
        # (sequence, source, length): the sequence left the queue, and a free slot is kept for it. It looks for a prefix
        # to copy again when slot `source` has run `length` ids.
        self.copying: list[tuple[Sequence, int, int]] = []
        self.num_moved = 0  # sequences that have lost their slots; the owner counts them and sets it to 0
        self.num_guided = 0  # decoding sequences whose next choice depends on their last character
        self.contents = Contents(self.slots, config, piece)
        self.queue = FairQueue(slots)
        self._free = dict.fromkeys(range(self.slots))  # free slots; the slot that was unused for longest is first
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, id)
        self._turn = 1  # number of the next step that runs prompts
        self._parked: dict[int, Sequence] = {}  # that have lost their slots and do not wait for others yet, by id
        self._max_credit = float(MAX_CREDIT * config.receptive_field)
        self._credit = self._max_credit  # characters that may run again; below 0: none may
        self._by_id: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._by_id.values()))

    @property
    def num_waiting(self) -> int:
        return self.queue.num_waiting + len(self._parked)

    @property
    def num_running(self) -> int:
        return self.slots - self.num_free

    @property
    def num_free(self) -> int:
        return len(self._free) - len(self.copying)

    @property
    def is_saturated(self) -> bool:
        """Whether a new sequence of some client would have to wait."""
        return self.num_waiting >= self.num_free

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            BusyError: no slot is free, and the queue is full for the client. Nothing was queued.
        """
        if not sequence.request.must_run and not self._has_place(sequence.request):
            raise BusyError(f"queue full (limit {self.max_waiting})")
        self.queue.add(sequence)
        self._by_id[sequence.id] = sequence
        if sequence.deadline < math.inf:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.id))

    def _has_place(self, request: Submit) -> bool:
        num_waiting = self.queue.num_waiting - self.queue.num_extra
        limit = self.max_waiting + self.num_free
        if num_waiting < limit or self.queue.is_below_share(request):
            return True
        return self.queue.is_below_part(request, self.max_waiting) and num_waiting < limit + self.max_waiting // 4

    def expected_wait(self, request: Submit, rate: float | None) -> float:
        """Return the seconds until a new request gets a slot if `rate` sequences end per second.

        Return 0 if the rate is None or the client runs less than its share, because it then takes a slot.
        """
        if rate is None or self.queue.is_below_share(request):
            return 0.0
        return max(0, self.queue.num_before(request) + 1 - self.num_free) / rate

    def expired(self, now: float) -> list[int]:
        """Remove past deadlines, and return the ids of their sequences, some of which may have ended already."""
        ids = []
        while self._deadlines and self._deadlines[0][0] <= now:
            ids.append(heapq.heappop(self._deadlines)[1])
        return ids

    def finish(self, id: int, reason: FinishReason) -> Sequence | None:
        """End a waiting or running sequence early and return it; return None if it has ended already."""
        sequence = self._by_id.get(id)
        if sequence is not None:
            sequence.finish_reason = sequence.finish_reason or reason
            self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished sequence, and free its slot."""
        assert sequence.is_finished
        del self._by_id[sequence.id]
        self._parked.pop(sequence.id, None)
        self.queue.remove(sequence)
        self._leave(sequence)
        # Deadlines of ended sequences stay in the heap until they pass or outnumber the others.
        if len(self._deadlines) > 2 * len(self._by_id) + 64:
            self._deadlines = [item for item in self._deadlines if item[1] in self._by_id]
            heapq.heapify(self._deadlines)

    def _leave(self, sequence: Sequence) -> None:
        """Free the slot of a sequence, or the one that is kept for it."""
        slot = sequence.slot
        if slot is None:
            self.copying = [it for it in self.copying if it[0] is not sequence]
            return
        if self.is_decoding[slot]:
            self.is_decoding[slot] = False
            self.num_guided -= sequence.guide is not None
        else:
            self.prefilling.remove(sequence)
        self.contents.ended(slot, sequence)
        self.by_slot[slot] = None
        self._free[slot] = None

    def schedule(self, now: float, budget: int, only: set[Client] | None = None, each: float = 1.0) -> Plan:
        """Give free slots to waiting sequences, and share out `budget` prompt characters (see `_in_order`).

        only: the clients that may start and run prompts; None: all. each: seconds per prompt character.

        If a prompt shares its beginning with a prompt in prefill, it waits until that beginning has run, and copies it.
        Starts and copies count as characters and take at most about half of the budget; the rest of them follow in the
        next steps.
        """
        starts: list[tuple[Sequence, Found | None]] = []
        spent, held = 0, self.contents.num_held
        self._put_back()
        self.queue.begin(only)
        copying, self.copying = self.copying, []
        for sequence, source, length in copying:
            may_run = only is None or self.queue.client_of(sequence) in only
            if may_run and 2 * spent < budget and (held[source] >= length or not self.contents.in_prefill[source]):
                spent += self._start(sequence, starts)
            else:
                self.copying.append((sequence, source, length))
        while 2 * spent < budget and (self.num_free or self._make_room(only, {it.id for it, _ in starts})):
            first = self.queue.pop()
            if first is None:
                break
            if first.prefilled_at is None:
                first.scheduled_at = now
            spent += self._start(first, starts)
        budget = max(budget - spent, min(budget, MIN_PREFILL))
        pieces = self._pieces(budget, only, each) if self.prefilling else []
        self._turn += bool(pieces)
        return Plan(starts, pieces)

    def copied(self, slot: int, length: int) -> None:
        """Record that the first `length` positions of another slot were copied into `slot`."""
        self.contents.num_held[slot] = length

    def prefilled(self, piece: Piece) -> None:
        """Record that a piece was launched. After its last piece, a sequence decodes unless it is only scored."""
        sequence, slot, length = piece.sequence, piece.slot, len(piece.ids)
        sequence.num_prefilled += length
        sequence.num_run += 0 if sequence.num_completion_tokens else length
        self.contents.num_held[slot] += length
        self.contents.in_prefill[slot] &= not piece.is_last
        if piece.choose:
            self.prefilling.remove(sequence)
            self.is_decoding[slot] = True
            if sequence.request.constrains_first:
                sequence.guide = None  # the piece has it
            self.num_guided += sequence.guide is not None
            # The piece chooses the next character.
            self.num_left[slot] = sequence.request.max_tokens - sequence.num_completion_tokens - 1

    def decoded(self, slots: np.ndarray, steps: np.ndarray) -> None:
        """Record that `steps` (B,) characters of the sequences in `slots` (B,) were launched."""
        self.contents.num_held[slots] += steps
        self.num_left[slots] -= steps
        self._credit = min(self._max_credit, self._credit + RUN_AGAIN_SHARE * int(steps.sum()))

    def not_run(self, sequence: Sequence, count: int) -> None:
        """Record that a sequence ran `count` fewer decode steps than were launched for it."""
        if sequence.slot is not None:
            self.contents.num_held[sequence.slot] -= count
            self.num_left[sequence.slot] += count

    def _make_room(self, only: set[Client] | None, started: set[int]) -> bool:
        """Take a slot for the client whose sequence is next. Return whether there was one to take.

        The client runs at least two sequences fewer than the one that loses the slot. Or it runs none and is behind
        (`only`), and the sequence that loses the slot has written half a receptive field there. A client takes more
        than a few slots only if it is behind and its own sequences are long. A client that is behind loses nothing.

        started: ids of sequences that start in this step.
        """
        taker = self.queue.next_client()
        if taker is None:
            return False
        running: dict[Client, list[Sequence]] = {}
        for sequence in (*filter(None, self.by_slot), *(sequence for sequence, _, _ in self.copying)):
            running.setdefault(self.queue.client_of(sequence), []).append(sequence)
        own = running.pop(taker, [])
        if len(own) >= max(1, self.slots // TAKEN_FREELY) and not (only and all(map(_has_written, own))):
            return False
        for giver in sorted(running, key=lambda client: (-client.num_running, client.lag)):
            has_more = giver.num_running >= taker.num_running + 2
            if (only and giver in only) or not (has_more or (only and not taker.num_running)):
                continue
            may_move = [it for it in running[giver] if it.id not in started and self._may_move(it, has_more)]
            if may_move:
                self._move(max(may_move, key=lambda it: (it.request.priority, it.order_of_arrival)))
                return True
        return False

    def _may_move(self, sequence: Sequence, has_more: bool) -> bool:
        """Whether a sequence may lose its slot. It must not end in the calls in flight.

        has_more: its client has more sequences than the one that takes the slot.
        """
        if sequence.slot is None or not self.is_decoding[sequence.slot]:
            return has_more and not sequence.num_prefilled
        enough = sequence.receptive_field / 2
        is_long = _has_written(sequence) if has_more else sequence.num_written >= max(MIN_WRITTEN, enough)
        return is_long and bool(self.num_left[sequence.slot])

    def _move(self, sequence: Sequence) -> None:
        """Take the slot of a sequence, which waits again from the next step on at the earliest (`_put_back`)."""
        self._leave(sequence)
        sequence.slot, sequence.goes_on = None, True
        self.queue.park(sequence)
        self._parked[sequence.id] = sequence
        self.num_moved += 1

    def _put_back(self) -> None:
        """Let sequences that have lost their slots wait again, as far as so much may run again."""
        while self._parked and (self._credit >= 0.0 or self.num_running == self.queue.num_waiting == 0):
            sequence = self._parked.pop(next(iter(self._parked)))
            self._credit -= sequence.num_again
            self.queue.put_back(sequence)

    def _start(self, sequence: Sequence, starts: list[tuple[Sequence, Found | None]]) -> int:
        """Give a slot to a sequence, or let it wait for the prefix that it will copy. Return the cost in characters."""
        cost = 1
        if sequence.goes_on:
            cost += sequence.follow() // FOLLOWED_PER_CHARACTER
            sequence.rewind()
        found = self.contents.find(sequence)
        cost, length = cost + self.contents.num_compared // COMPARED_PER_CHARACTER, found.length if found else 0
        if found is not None and not found.is_ready:
            self.copying.append((sequence, found.source, length))
            return cost
        if found is not None and found.source in self._free:  # it was just used, so it moves to the end
            del self._free[found.source]
            self._free[found.source] = None
        slot = next(iter(self._free))
        del self._free[slot]
        if found is not None and found.source == slot:  # no other slot is free, and a slot cannot be its own source
            found = None
        sequence.slot = slot
        self.by_slot[slot] = sequence
        self.prefilling.append(sequence)
        self.contents.start(slot, sequence)
        if found is not None:
            sequence.num_prefilled = length
            cost += min(length, self.contents.window) // COPIED_PER_CHARACTER  # a copy moves at most W positions
        starts.append((sequence, found))
        return cost + len(sequence.ids) // STARTED_PER_CHARACTER

    def _pieces(self, budget: int, only: set[Client] | None, each: float) -> list[Piece]:
        stop_at: dict[int, int] = {}  # slot -> the position at which it must stop so that waiting sequences can copy
        for _, source, length in self.copying:
            limit = self.contents.last_chance(length)
            stop_at[source] = min(limit, stop_at.get(source, limit))
        pieces: list[Piece] = []
        for sequence in self._in_order(each):
            if budget <= 0:
                break
            if only is not None and self.queue.client_of(sequence) not in only:
                continue
            slot = sequence.slot
            assert slot is not None
            length = min(sequence.num_left_to_run, budget if pieces else max(budget, self.piece))
            if slot in stop_at:
                length = min(length, stop_at[slot] - sequence.num_prefilled)
            if length < sequence.num_left_to_run:
                length -= length % self.piece
            if length > 0:
                pieces.append(sequence.piece(length))
                budget -= length
        return pieces

    def _in_order(self, each: float) -> list[Sequence]:
        """Return the prompts in slots in the order in which they run. each: seconds per prompt character.

        The client that is furthest behind comes first. A client's second prompt is placed as if its first one had run,
        and so on. Shorter prompts break ties. Sequences that are only scored come last, because latency matters less
        to them than to streams. In every fourth step they come first, so that they make progress. A prompt moves up to
        the place of a sequence that waits to copy from it.
        """
        left = [(sequence, sequence.slot, sequence.num_left_to_run) for sequence in self.prefilling]
        lent = [(sequence, slot, length - int(self.contents.num_held[slot])) for sequence, slot, length in self.copying]
        are_scores_first = self._turn % SCORING_TURN == 0
        starts: dict[tuple[bool, Client], float] = {}  # of each client's next prompt
        places: dict[int | None, tuple[bool, float, int]] = {}  # by slot
        for sequence, slot, num_left in [*left, *lent]:
            client, kind = self.queue.client_of(sequence), sequence.is_only_scored
            start = starts.get((kind, client), -client.lag)
            starts[kind, client] = start + num_left * each / client.weight
            place = (kind != are_scores_first, start, num_left)
            places[slot] = min(place, places.get(slot, place))
        return sorted(self.prefilling, key=lambda sequence: places[sequence.slot])


def _has_written(sequence: Sequence) -> bool:
    """Whether a sequence has written enough in its slot for the time that it takes to go on in another one."""
    return sequence.num_written >= max(MIN_WRITTEN, sequence.num_again / RUN_AGAIN_PER_WRITTEN)
