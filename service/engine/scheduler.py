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
from service.engine.runner import Piece
from service.engine.sequence import Sequence
from service.model.config import GPTConfig
from service.wire import FinishReason, Submit

MIN_PREFILL = 16  # the least budget of a step, in prompt characters
MIN_SHARED = 16  # characters; copying fewer costs as much as running them
# Running one prompt character takes as long as copying, comparing or starting this many.
COPIED_PER_CHARACTER = 128  # positions copied
COMPARED_PER_CHARACTER = 16384  # ids compared
STARTED_PER_CHARACTER = 256  # prompt ids passed to the runner's `start`
SCORING_TURN = 4  # prompts that are only scored come first in every step whose number is a multiple of this


def reserved_slots(max_running: int) -> int:
    """Return how many slots to add to `max_running` for clients that run fewer sequences than their share."""
    return max(1, max_running // 8)


class BusyError(Exception):
    """The request is refused: the queue is full, or the expected wait is too long. The message gives the cause."""


class Found(NamedTuple):
    """A slot that holds the first `length` ids of a sequence, or is about to run them."""

    source: int
    length: int
    is_ready: bool


class Plan(NamedTuple):
    """The work of a step besides decoding; the engine carries it out in the order of the fields."""

    starts: list[tuple[Sequence, Found | None]]  # new in a slot, each with its copy; the engine then calls `copied`
    pieces: list[Piece]  # after launching these, the engine calls `prefilled`


class Scheduler:
    """Assigns sequences to slots; a sequence keeps its slot from start to end.

    A new sequence gets the free slot that was unused for longest, because its text is the least likely to be copied.

    max_running: the number of sequences that one client can run.
    reserve: the number of further slots. The last `reserve` free slots go only to clients that run fewer sequences
        than their share. A share is max_running divided by weight among all clients that have sequences.
    max_waiting: the limit of the queue. A client may exceed it by a quarter if it has fewer waiting sequences than
        its part of max_waiting, which is divided among the clients that wait.
    piece: prompts run in pieces that begin at multiples of this; a copied prefix ends at a multiple.

    Arrays are indexed by slot, so a decode step costs the same few array operations at any number of rows.
    """

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        config: GPTConfig,
        piece: int = 1,
        *,
        reserve: int = 0,
        is_fair: bool = True,
    ):
        self.max_running, self.reserve, self.slots = max_running, reserve, max_running + reserve
        self.piece, self.is_fair = piece, is_fair
        self.max_waiting = max_waiting
        self.by_slot: list[Sequence | None] = [None] * self.slots
        self.is_decoding = np.zeros(self.slots, dtype=bool)
        self.num_left = np.zeros(self.slots, dtype=np.int64)  # characters that a decoding sequence may still choose
        self.prefilling: list[Sequence] = []  # in the order in which they got their slots
        # (sequence, source, length): the sequence left the queue, and a free slot is kept for it. It looks for a prefix
        # to copy again when slot `source` has run `length` ids.
        self.copying: list[tuple[Sequence, int, int]] = []
        self.num_guided = 0  # decoding sequences whose next choice depends on their last character
        self.contents = Contents(self.slots, config, piece)
        self.queue = FairQueue(max_running, is_fair)
        self._free = dict.fromkeys(range(self.slots))  # free slots; the slot that was unused for longest is first
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, id)
        self._turn = 1  # number of the next step that runs prompts
        self._by_id: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._by_id.values()))

    @property
    def num_waiting(self) -> int:
        return self.queue.num_waiting

    @property
    def num_running(self) -> int:
        return self.slots - self.num_free

    @property
    def num_free(self) -> int:
        return len(self._free) - len(self.copying)

    @property
    def num_open(self) -> int:
        """The number of free slots that any client can take."""
        return max(0, self.max_running - self.num_running)

    @property
    def is_saturated(self) -> bool:
        """Whether a new sequence of some client would have to wait."""
        return self.num_waiting >= self.num_open

    def limit(self, max_running: int) -> None:
        """Set `max_running`, at most slots − reserve. Running sequences continue."""
        assert 1 <= max_running <= self.slots - self.reserve
        self.max_running = self.queue.max_running = max_running

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            BusyError: the client can use no free slot, and the queue is full for it. Nothing was queued.
        """
        if not sequence.request.must_run and not self._has_place(sequence.request):
            raise BusyError(f"queue full (limit {self.max_waiting})")
        self.queue.add(sequence)
        self._by_id[sequence.id] = sequence
        if sequence.deadline < math.inf:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.id))

    def _has_place(self, request: Submit) -> bool:
        limit = self.max_waiting + self.num_open + self.queue.num_extra
        if self.num_waiting < limit:
            return True
        if self.queue.is_below_part(request, self.max_waiting):
            limit += self.max_waiting // 4
        return self.num_waiting < limit + self._num_reserved(request)

    def _num_reserved(self, request: Submit) -> int:
        """Return the number of free slots that are reserved and that the client of a new request may take."""
        return self.num_free - self.num_open if self.queue.is_below_share(request) else 0

    def expected_wait(self, request: Submit, rate: float | None) -> float:
        """Return the seconds until a new request gets a slot if `rate` sequences end per second.

        Return 0 if the rate is None or a reserved slot is free for the request.
        """
        if rate is None or self._num_reserved(request) > self.queue.num_waiting_of(request):
            return 0.0
        return max(0, self.queue.num_before(request) + 1 - self.num_open) / rate

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
        self.queue.remove(sequence)
        slot = sequence.slot
        if slot is not None:
            if self.is_decoding[slot]:
                self.is_decoding[slot] = False
                self.num_guided -= sequence.guide is not None
            else:
                self.prefilling.remove(sequence)
            self.contents.ended(slot, sequence)
            self.by_slot[slot] = None
            self._free[slot] = None
        else:
            self.copying = [it for it in self.copying if it[0] is not sequence]
        # Deadlines of ended sequences stay in the heap until they pass or outnumber the others.
        if len(self._deadlines) > 2 * len(self._by_id) + 64:
            self._deadlines = [item for item in self._deadlines if item[1] in self._by_id]
            heapq.heapify(self._deadlines)

    def schedule(self, now: float, budget: int, only: set[Client] | None = None, each: float = 1.0) -> Plan:
        """Give free slots to waiting sequences, and share out `budget` prompt characters (see `_in_order`).

        only: the clients that may start and run prompts; None: all. each: seconds per prompt character.

        If a prompt shares its beginning with a prompt in prefill, it waits until that beginning has run, and copies it.
        Starts and copies count as characters and take at most about half of the budget; the rest of them follow in the
        next steps.
        """
        starts: list[tuple[Sequence, Found | None]] = []
        spent, held = 0, self.contents.num_held
        self.queue.begin(only)
        copying, self.copying = self.copying, []
        for sequence, source, length in copying:
            may_run = only is None or self.queue.client_of(sequence) in only
            if may_run and 2 * spent < budget and (held[source] >= length or not self.contents.in_prefill[source]):
                spent += self._start(sequence, starts)
            else:
                self.copying.append((sequence, source, length))
        while self.num_free and 2 * spent < budget:
            first = self.queue.pop(not self.num_open)
            if first is None:
                break
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
        sequence.num_run += length
        self.contents.num_held[slot] += length
        self.contents.in_prefill[slot] &= not piece.is_last
        if piece.choose:
            self.prefilling.remove(sequence)
            self.is_decoding[slot] = True
            if sequence.request.constrains_first:
                sequence.guide = None  # the piece has it
            self.num_guided += sequence.guide is not None
            self.num_left[slot] = sequence.request.max_tokens - 1  # the piece chooses the first character

    def decoded(self, slots: np.ndarray, steps: np.ndarray) -> None:
        """Record that `steps` (B,) characters of the sequences in `slots` (B,) were launched."""
        self.contents.num_held[slots] += steps
        self.num_left[slots] -= steps

    def not_run(self, sequence: Sequence, count: int) -> None:
        """Record that a running sequence ran `count` fewer decode steps than were launched for it."""
        self.contents.num_held[sequence.slot] -= count
        self.num_left[sequence.slot] += count

    def _start(self, sequence: Sequence, starts: list[tuple[Sequence, Found | None]]) -> int:
        """Give a slot to a sequence, or let it wait for the prefix that it will copy. Return the cost in characters."""
        found = self.contents.find(sequence)
        cost, length = 1 + self.contents.num_compared // COMPARED_PER_CHARACTER, found.length if found else 0
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
        return cost + len(sequence.request.prompt) // STARTED_PER_CHARACTER

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
            length = min(sequence.num_prompt_left, budget if pieces else max(budget, self.piece))
            if slot in stop_at:
                length = min(length, stop_at[slot] - sequence.num_prefilled)
            if length < sequence.num_prompt_left:
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
        left = [(sequence, sequence.slot, sequence.num_prompt_left) for sequence in self.prefilling]
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


class Contents:
    """The ids in each cache slot from position 0 on, of running and of ended sequences.

    Each slot is a ring of W positions. After a text has outgrown the ring, only the whole text can be copied.
    """

    def __init__(self, slots: int, config: GPTConfig, piece: int = 1):
        self.window, self.piece = config.block_size, piece
        self.num_held = np.zeros(slots, dtype=np.int64)  # positions processed, generated ones included
        self.in_prefill = np.zeros(slots, dtype=bool)  # whether other sequences may wait for the slot's prompt
        self.num_compared = 0  # ids that the last `find` compared
        self._ids = np.full((slots, config.receptive_field), -1, dtype=np.int32)  # −1: after the last recorded id
        self._beginnings = np.zeros(slots, dtype=np.int64)  # hash of the first ids; 0: too short to be shared
        self._groups = np.full(slots, "", dtype=object)

    def start(self, slot: int, sequence: Sequence) -> None:
        """Record that a slot is empty and is about to run the sequence's prompt."""
        self.num_held[slot] = 0
        # A sequence that is only scored runs last, so no other sequence waits for it.
        self.in_prefill[slot] = sequence.request.max_tokens > 0
        self._groups[slot] = sequence.request.reuse_group
        self._record(slot, sequence.cut_prompt)

    def ended(self, slot: int, sequence: Sequence) -> None:
        """Record the text that an ended sequence leaves in its slot.

        After an error, record no text, because keys and values may not be finite.
        """
        self.in_prefill[slot] = False
        # With pieces, keys and values of generated characters differ in bits from those of the same prompt.
        ids = sequence.ids if self.piece == 1 else sequence.request.prompt
        end = 0 if sequence.finish_reason == "error" else sequence.prefill_from + self._ids.shape[1]
        self._record(slot, np.array(ids[sequence.prefill_from : end], dtype=np.int32))

    def last_chance(self, length: int) -> int:
        """Return how many positions a slot may have processed at most if its first `length` are to be copied."""
        return max(self.window, length)

    def find(self, sequence: Sequence) -> Found | None:
        """Find the slot of the sequence's group that shares the longest beginning with it.

        Among slots that share the same length, prefer a slot that can be copied now, then the lowest. Slots of other
        groups are not compared, because the time of a comparison would reveal their contents.
        """
        self.num_compared = 0
        ids = sequence.cut_prompt[: sequence.max_shared][: self._ids.shape[1]]
        group = sequence.request.reuse_group
        beginning = _hash_of_beginning(ids, group)
        slots = np.flatnonzero(self._beginnings == beginning)
        if not beginning or not len(slots):
            return None
        slots = slots[self._groups[slots] == group]  # hashes of different groups may be equal
        slots = slots[self.num_held[slots] <= self.last_chance(len(ids))]
        slots = slots[np.argsort(self.in_prefill[slots], kind="stable")]
        best: Found | None = None
        for some in (slots[:1], slots[1:]):  # the first slot often shares everything that may be copied
            if best is not None and best.length == len(ids):
                break
            differs = self._ids[some, : len(ids)] != ids  # (B, T)
            self.num_compared += differs.size
            shared = np.where(differs.any(axis=1), differs.argmax(axis=1), len(ids))
            for slot, length, held in zip(some.tolist(), shared.tolist(), self.num_held[some].tolist(), strict=True):
                length = length if self.in_prefill[slot] else min(length, held)
                length -= length % self.piece
                is_ready = length <= held
                is_possible = length >= MIN_SHARED and held <= self.last_chance(length)
                if is_possible and (best is None or (length, is_ready) > (best.length, best.is_ready)):
                    best = Found(slot, length, is_ready)
        return best

    def _record(self, slot: int, ids: np.ndarray) -> None:
        ids = ids[: self._ids.shape[1]]
        self._ids[slot, : len(ids)] = ids
        self._ids[slot, len(ids) :] = -1
        self._beginnings[slot] = _hash_of_beginning(ids, self._groups[slot])


def _hash_of_beginning(ids: np.ndarray, group: str) -> int:
    return hash((group, ids[:MIN_SHARED].tobytes())) if len(ids) >= MIN_SHARED else 0
