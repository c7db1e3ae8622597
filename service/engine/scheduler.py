"""Who runs: a queue, a fixed number of cache slots, and a budget of prompt characters per step.

Bookkeeping only: no torch, no text, no HTTP, no clock of its own (the engine passes the time in).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from service.engine.sequence import Sequence
from service.wire import FinishReason


class QueueFullError(Exception):
    """Not accepted: the queue holds its maximum."""

    def __init__(self, limit: int):
        super().__init__(f"queue full (limit {limit})")


@dataclass
class Prefill:
    """A piece of a prompt to run in this step."""

    sequence: Sequence
    count: int  # ids

    @property
    def is_last(self) -> bool:
        return self.count == self.sequence.num_prompt_left


class Scheduler:
    """Slots 0 … len(decoding)−1 hold the decoding sequences; the next ones those in prefill or set aside.

    So a decode step always covers one slice of the cache. `moves` are the slot copies that keep it so; the engine
    carries them out before its next forward.
    """

    def __init__(self, max_running: int, max_waiting: int, prefill_budget: int):
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.prefill_budget = prefill_budget  # prompt ids per step
        self.decoding: list[Sequence] = []  # by slot
        self.aside: list[Sequence] = []  # by slot, after the decoding ones: in prefill, or `set_aside`
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
            QueueFullError: no slot is free and the queue is full; nothing was queued.
        """
        if self.num_running + self.num_waiting >= self.max_running + self.max_waiting:
            raise QueueFullError(self.max_waiting)
        heapq.heappush(self._waiting, (sequence.request.priority, self._arrivals, sequence))
        self._arrivals += 1
        self._by_id[sequence.id] = sequence

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
            # Finished sequences stay in the heap until popped, or until they outnumber the waiting ones.
            self._waiting = [item for item in self._waiting if not item[2].is_finished]
            heapq.heapify(self._waiting)

    def schedule(self, now: float) -> list[Prefill]:
        """Give free slots to waiting sequences and share out this step's prefill budget, first come first served.

        Sequences that are only scored come last: streams are sensitive to latency, scoring is not.
        """
        while self._waiting and self.num_running < self.max_running:
            _, _, sequence = heapq.heappop(self._waiting)
            if not sequence.is_finished:
                sequence.scheduled_at = now
                self.aside.append(sequence)
        budget = self.prefill_budget
        pieces = []
        prefilling = [sequence for sequence in self.aside if sequence.num_prompt_left]
        for sequence in sorted(prefilling, key=lambda it: (it.request.max_tokens == 0, it.scheduled_at)):
            count = min(sequence.num_prompt_left, budget)
            if count == 0:
                break
            pieces.append(Prefill(sequence, count))
            budget -= count
        return pieces

    def slot(self, sequence: Sequence) -> int:
        """The cache slot of a running sequence once the moves are carried out."""
        if sequence in self.decoding:
            return self.decoding.index(sequence)
        return len(self.decoding) + self.aside.index(sequence)

    def prefilled(self, piece: Prefill) -> None:
        """Record that a piece has run; after the last one its sequence decodes, or ends if it is only scored."""
        sequence = piece.sequence
        sequence.num_prefilled += piece.count
        if sequence.num_prompt_left:
            return
        if sequence.request.max_tokens == 0:
            sequence.finish_reason = "length"
        else:
            self.take_back(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Exclude a decoding sequence from decode steps until `take_back`; it keeps its slot."""
        last = len(self.decoding) - 1
        i = self.decoding.index(sequence)
        self._swap(i, last)
        self.decoding[i] = self.decoding[last]
        self.decoding.pop()
        self.aside.insert(0, sequence)

    def take_back(self, sequence: Sequence) -> None:
        """Include a sequence in decode steps again."""
        first = len(self.decoding)
        i = self.aside.index(sequence)
        self._swap(first, first + i)
        self.aside[i] = self.aside[0]
        self.aside.pop(0)
        self.decoding.append(sequence)

    def _swap(self, a: int, b: int) -> None:
        """Swap the contents of two slots through the spare one."""
        if a != b:
            self.moves += [(a, self.max_running), (b, a), (self.max_running, b)]
