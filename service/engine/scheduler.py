"""Who runs when: a fair queue, a fixed number of cache slots, and the prompts that share a beginning.

Bookkeeping only: no torch, no text, no HTTP, no clock of its own (the engine passes the time in).
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

MIN_PREFILL = 16  # prompt characters per step, whatever else it does
MIN_SHARED = 16  # characters; copying fewer costs as much as running them
# In the time in which one character of a prompt runs, so many positions are copied, or ids compared.
COPIED_PER_CHARACTER = 128
COMPARED_PER_CHARACTER = 16384
STARTED_PER_CHARACTER = 256  # or so many ids of a prompt handed to the runner
SCORING_TURN = 4  # every so many steps, prompts that are only scored come first


def reserved_slots(max_running: int) -> int:
    """Slots beyond `max_running`, the number that one client can use, for clients that run less than their share."""
    return max(1, max_running // 8)


class BusyError(Exception):
    """Not accepted: the queue is full, or the expected wait too long; the message says which."""


class Found(NamedTuple):
    """A slot that has the first `length` ids of a sequence, or will have once it has run them."""

    source: int
    length: int
    is_ready: bool


class Plan(NamedTuple):
    """What a step does besides decoding, to be carried out in this order."""

    starts: list[tuple[Sequence, Found | None]]  # sequences that got a slot, and what each copies; then `copied`
    pieces: list[Piece]  # then `prefilled`


class Scheduler:
    """A sequence keeps its slot from start to end. The free slot that was unused for longest goes first, as its text is
    the least likely to be copied.

    max_running: sequences that one client can run; reserve: further slots. The last `reserve` free ones go only to
    clients that run fewer than their share, max_running divided among all clients with sequences, by weight.
    max_waiting: sequences in the queue; a quarter as many again only from clients that have fewer there than
    max_waiting divided by the number of clients that wait.
    piece: prompts run in pieces that begin at multiples of it; what is shared ends at one.
    Arrays are by slot, so that a decode step costs the same few array operations at any number of rows.
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
        self.prefilling: list[Sequence] = []  # in order of arrival in a slot
        # Taken from the queue, each for a free slot; they look again for what to copy once a slot has run so many ids.
        self.copying: list[tuple[Sequence, int, int]] = []
        self.num_guided = 0  # decoding sequences whose next choice depends on their last character
        self.contents = Contents(self.slots, config, piece)
        self.queue = FairQueue(max_running, is_fair)
        self._free = dict.fromkeys(range(self.slots))  # the one that was unused for longest first
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, id)
        self._turn = 0  # steps with pieces of prompts
        # Of prompts that generate and of those that are only scored: virtual time, and the weights of their clients.
        self._prompt_times = [0.0, 0.0]
        self._prompt_weights: list[dict[Client, float]] = [{}, {}]
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
        """Free slots for any client."""
        return max(0, self.max_running - self.num_running)

    @property
    def is_saturated(self) -> bool:
        """Some sequence waits, or would if it came now."""
        return self.num_waiting >= self.num_open

    def limit(self, max_running: int) -> None:
        """Run fewer than there are slots for, or as many again; what runs goes on. At most slots − reserve."""
        assert 1 <= max_running <= self.slots - self.reserve
        self.max_running = self.queue.max_running = max_running

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            BusyError: its client has no free slot and no place in the queue; nothing was queued.
        """
        if not sequence.request.must_run and not self._has_place(sequence.request):
            raise BusyError(f"queue full (limit {self.max_waiting})")
        self.queue.add(sequence)
        self._by_id[sequence.id] = sequence
        if sequence.deadline < math.inf:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.id))

    def _has_place(self, request: Submit) -> bool:
        limit = self.max_waiting + self.num_open
        if self.num_waiting < limit:
            return True
        if self.queue.is_below_part(request, self.max_waiting):
            limit += self.max_waiting // 4
        return self.num_waiting < limit + self._num_reserved(request)

    def _num_reserved(self, request: Submit) -> int:
        """Free slots that the client of a new request may take although others may not."""
        return self.num_free - self.num_open if self.queue.is_below_share(request) else 0

    def expected_wait(self, request: Submit, rate: float | None) -> float:
        """Seconds until a new request gets a slot if `rate` sequences end per second; 0 if that is unknown."""
        if rate is None or self._num_reserved(request) > self.queue.num_waiting_of(request):
            return 0.0
        return max(0, self.queue.num_before(request) + 1 - self.num_open) / rate

    def expired(self, now: float) -> list[int]:
        """Ids of sequences whose deadline has come."""
        ids = []
        while self._deadlines and self._deadlines[0][0] <= now:
            ids.append(heapq.heappop(self._deadlines)[1])
        return ids

    def finish(self, id: int, reason: FinishReason) -> Sequence | None:
        """End a sequence early, wherever it is; None if it has ended already."""
        sequence = self._by_id.get(id)
        if sequence is not None:
            sequence.finish_reason = sequence.finish_reason or reason
            self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Free what a finished sequence holds."""
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
        # Ended sequences stay in the heap until popped, or until they outnumber the others.
        if len(self._deadlines) > 2 * len(self._by_id) + 64:
            self._deadlines = [item for item in self._deadlines if item[1] in self._by_id]
            heapq.heapify(self._deadlines)

    def schedule(self, now: float, budget: int) -> Plan:
        """Give free slots to waiting sequences, and share out `budget` prompt characters (see `_in_order`).

        A prompt that shares its beginning with one in prefill starts once that has run, with a copy. Starts and copies
        count as characters: they take about half of the budget at most, and the others come in the next steps.
        """
        starts: list[tuple[Sequence, Found | None]] = []
        spent, held = 0, self.contents.num_held
        copying, self.copying = self.copying, []
        for sequence, source, length in copying:
            if 2 * spent < budget and (held[source] >= length or not self.contents.in_prefill[source]):
                spent += self._start(sequence, starts)
            else:
                self.copying.append((sequence, source, length))
        while self.num_free and 2 * spent < budget:
            first = self.queue.pop(below_share=not self.num_open)
            if first is None:
                break
            first.scheduled_at = now
            spent += self._start(first, starts)
        return Plan(starts, self._pieces(max(budget - spent, min(budget, MIN_PREFILL))) if self.prefilling else [])

    def copied(self, slot: int, length: int) -> None:
        """Record that a slot was given the first `length` positions of another."""
        self.contents.num_held[slot] = length

    def prefilled(self, piece: Piece) -> None:
        """Record that a piece was launched; after the last one its sequence decodes, if it is not only scored."""
        sequence, slot, length = piece.sequence, piece.slot, len(piece.ids)
        sequence.num_prefilled += length
        sequence.num_run += length
        self.contents.num_held[slot] += length
        self.contents.in_prefill[slot] &= not piece.is_last
        client, kind = self.queue.client_of(sequence), sequence.is_only_scored
        client.prompt_tags[kind] += length / client.weight
        self._prompt_times[kind] += length / sum(self._prompt_weights[kind].values())
        if piece.choose:
            self.prefilling.remove(sequence)
            self.is_decoding[slot] = True
            if sequence.request.constrains_first:
                sequence.guide = None  # the piece has it
            self.num_guided += sequence.guide is not None
            self.num_left[slot] = sequence.request.max_tokens - 1  # the first one is chosen with the piece

    def decoded(self, slots: np.ndarray, steps: np.ndarray) -> None:
        """Record that `steps` (B,) characters of the sequences in `slots` (B,) were launched."""
        self.contents.num_held[slots] += steps
        self.num_left[slots] -= steps

    def not_run(self, sequence: Sequence, count: int) -> None:
        """Record that a running sequence's row ended `count` steps earlier than it was launched for."""
        self.contents.num_held[sequence.slot] -= count
        self.num_left[sequence.slot] += count

    def _start(self, sequence: Sequence, starts: list[tuple[Sequence, Found | None]]) -> int:
        """Give a slot to a sequence, or have it wait for what is to be copied; returns the cost in characters."""
        found = self.contents.find(sequence)
        cost, length = 1 + self.contents.num_compared // COMPARED_PER_CHARACTER, found.length if found else 0
        if sequence.charged is None:
            self.queue.charge(sequence, sequence.num_prompt_left - length + sequence.request.max_tokens)
        if found is not None and not found.is_ready:
            self.copying.append((sequence, found.source, length))
            return cost
        if found is not None and found.source in self._free:  # it is used now
            del self._free[found.source]
            self._free[found.source] = None
        slot = next(iter(self._free))
        del self._free[slot]
        if found is not None and found.source == slot:  # no other is free, and it cannot be emptied and copied
            found = None
        sequence.slot = slot
        self.by_slot[slot] = sequence
        self.prefilling.append(sequence)
        self.contents.start(slot, sequence)
        if found is not None:
            sequence.num_prefilled = length
            cost += min(length, self.contents.window) // COPIED_PER_CHARACTER  # it moves at most W positions
        starts.append((sequence, found))
        return cost + len(sequence.request.prompt) // STARTED_PER_CHARACTER

    def _pieces(self, budget: int) -> list[Piece]:
        stop_at: dict[int, int] = {}  # slot -> where it must stop, so that those that wait for it can copy
        for _, source, length in self.copying:
            limit = self.contents.last_chance(length)
            stop_at[source] = min(limit, stop_at.get(source, limit))
        pieces: list[Piece] = []
        for sequence in self._in_order():
            if budget <= 0:
                break
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

    def _in_order(self) -> list[Sequence]:
        """The prompts that can run: those of the client whose prompts have run the fewest characters, by weight, first;
        of equals the shortest. A client's further prompts follow as if those before them had run.

        A client that had none begins at the virtual time, where each would be that had its part. Sequences that are
        only scored come last, as streams are sensitive to latency and scoring is not. Every fourth time they come
        first, so that they end. A prompt takes the place of one that waits for it.
        """
        self._turn += 1
        left = [(sequence, sequence.slot, sequence.num_prompt_left) for sequence in self.prefilling]
        lent = [(sequence, slot, length - int(self.contents.num_held[slot])) for sequence, slot, length in self.copying]
        before, self._prompt_weights = self._prompt_weights, [{}, {}]
        are_scores_first = self._turn % SCORING_TURN == 0
        starts: dict[tuple[bool, Client], float] = {}  # virtual, of each client's next prompt
        places: dict[int | None, tuple[bool, float, int]] = {}  # by slot
        for sequence, slot, num_left in [*left, *lent]:
            client, kind = self.queue.client_of(sequence), sequence.is_only_scored
            if client not in self._prompt_weights[kind]:
                self._prompt_weights[kind][client] = client.weight
                if client not in before[kind]:
                    client.prompt_tags[kind] = max(client.prompt_tags[kind], self._prompt_times[kind])
            start = starts.get((kind, client), client.prompt_tags[kind])
            starts[kind, client] = start + num_left / client.weight
            place = (kind != are_scores_first, start, num_left)
            places[slot] = min(place, places.get(slot, place))
        return sorted(self.prefilling, key=lambda sequence: places[sequence.slot])


class Contents:
    """What the cache slots hold: the ids from position 0 on, of running sequences and of ended ones.

    Each slot is a ring of W: a text that has outgrown it can only be copied whole.
    """

    def __init__(self, slots: int, config: GPTConfig, piece: int = 1):
        self.window, self.piece = config.block_size, piece
        self.num_held = np.zeros(slots, dtype=np.int64)  # positions processed, generated ones included
        self.in_prefill = np.zeros(slots, dtype=bool)  # others may wait for it
        self.num_compared = 0  # ids, by the last `find`
        self._ids = np.full((slots, config.receptive_field), -1, dtype=np.int32)  # −1: past what is known
        self._beginnings = np.zeros(slots, dtype=np.int64)  # by hash; 0: too short to be shared
        self._groups = np.full(slots, "", dtype=object)

    def start(self, slot: int, sequence: Sequence) -> None:
        """A slot is empty, and is about to run the sequence's prompt."""
        self.num_held[slot] = 0
        # Nobody waits for who is only scored, and so runs last.
        self.in_prefill[slot] = sequence.request.max_tokens > 0
        self._groups[slot] = sequence.request.reuse_group
        self._record(slot, sequence.cut_prompt)

    def ended(self, slot: int, sequence: Sequence) -> None:
        """A sequence leaves its text in a slot; after an error nothing, as keys and values may not be finite."""
        self.in_prefill[slot] = False
        # With pieces, what was generated has other bits than as part of a prompt.
        ids = sequence.ids if self.piece == 1 else sequence.request.prompt
        end = 0 if sequence.finish_reason == "error" else sequence.prefill_from + self._ids.shape[1]
        self._record(slot, np.array(ids[sequence.prefill_from : end], dtype=np.int32))

    def last_chance(self, length: int) -> int:
        """The most positions that a slot may have processed when its first `length` are copied."""
        return max(self.window, length)

    def find(self, sequence: Sequence) -> Found | None:
        """The slot of its group that shares most of the sequence's beginning: of equals one to be copied now, then the
        lowest. Slots of other groups take no time, which would tell what they hold."""
        self.num_compared = 0
        ids = sequence.cut_prompt[: sequence.max_shared][: self._ids.shape[1]]
        group = sequence.request.reuse_group
        beginning = _hash_of_beginning(ids, group)
        slots = np.flatnonzero(self._beginnings == beginning)
        if not beginning or not len(slots):
            return None
        slots = slots[self._groups[slots] == group]  # whatever the hash
        slots = slots[self.num_held[slots] <= self.last_chance(len(ids))]
        slots = slots[np.argsort(self.in_prefill[slots], kind="stable")]
        best: Found | None = None
        for some in (slots[:1], slots[1:]):  # often the first shares all that may be copied
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
