"""Whose sequence runs next: start-time fair queueing between clients (Goyal, Vin & Cheng 1996).

Each client that waits has a tag, the virtual time at which its next sequence starts. The lowest tag goes first, and
then grows by the cost of its sequence divided by the client's weight. Counts and costs only: no slots, no clock.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from typing import Any

from service.engine.sequence import Sequence
from service.wire import Submit


class Client:
    """A client that has sequences, waiting or running."""

    def __init__(self, name: str, weight: float):
        self.name, self.weight = name, weight
        self.tag = 0.0
        self.order = 0  # among equal tags
        self.waiting: list[tuple[int, int, Sequence]] = []  # heap of (priority, order of arrival, sequence)
        self.num_waiting = 0
        self.num_running = 0
        self.prompt_tags = [0.0, 0.0]  # of prompts that run: of those that generate, of those that are only scored
        self.version = 0  # of its entry in each of the queue's heaps; earlier ones are void


class FairQueue:
    """The waiting sequences of all clients, each client's own in order of priority, then arrival.

    Operations take O(log n), amortized. A client without sequences is forgotten, and returns at the current virtual
    time. A client's share is its part, by weight, of max_running; is_fair=False takes all sequences for one client's.
    """

    def __init__(self, max_running: int, is_fair: bool = True):
        self.max_running, self.is_fair = max_running, is_fair
        self.num_waiting = 0
        self._clients: dict[str, Client] = {}
        self._weights = 0.0  # of all of them
        self._virtual_time = 0.0
        self._by_tag: list[tuple[Any, ...]] = []  # heap of (tag, order, version, client)
        self._by_running: list[tuple[Any, ...]] = []  # heap of (running / weight, tag, order, version, client)
        self._numbers = itertools.count(1)
        self._lengths: Counter[tuple[int, float]] = Counter()  # clients by (waiting sequences, weight)

    def add(self, sequence: Sequence) -> None:
        name, weight = self.identity(sequence.request)
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = Client(name, weight)
            self._weights += weight
        is_changed = client.weight != weight  # the latest request's counts
        if is_changed:
            self._weights += weight - client.weight
            num_waiting = client.num_waiting
            self._count_waiting(client, -num_waiting)
            client.weight = weight
            self._count_waiting(client, num_waiting)
        heapq.heappush(client.waiting, (sequence.request.priority, next(self._numbers), sequence))
        self._count_waiting(client, 1)
        if client.num_waiting == 1:
            self._place(client, max(client.tag, self._virtual_time))
        elif is_changed:
            self._place(client, client.tag)

    def pop(self, below_share: bool = False) -> Sequence | None:
        """Take the next sequence, which runs from now on; `charge` must follow. None: nobody may start.

        below_share: only of a client that runs fewer than its share; the one that runs fewest by weight goes first.
        """
        for heap in (self._by_tag, self._by_running):
            while heap and not _is_valid(heap[0]):
                heapq.heappop(heap)
        if not self._by_tag:
            return None
        client: Client = self._by_running[0][-1] if below_share else self._by_tag[0][-1]
        if below_share and not self._is_below_share(client.num_running, client.weight, self._weights):
            return None
        # Not that of the client's own tag: `below_share` may take one far ahead, behind whom no newcomer should start.
        self._virtual_time = max(self._virtual_time, self._by_tag[0][0])
        while (sequence := heapq.heappop(client.waiting)[2]).is_finished:
            pass
        self._count_waiting(client, -1)
        client.num_running += 1
        return sequence

    def charge(self, sequence: Sequence, cost: int) -> None:
        """Count `cost` characters that a sequence just taken is going to run."""
        client = self.client_of(sequence)
        sequence.charged = cost
        self._place(client, client.tag + cost / client.weight)

    def remove(self, sequence: Sequence) -> None:
        """A finished sequence leaves; if it ran, its client gets back what was charged and not run, or pays what its
        stop pattern took beyond that.

        But no client goes back behind the current virtual time, so that no newcomer waits for a refund to be used up.
        """
        client = self.client_of(sequence)
        if sequence.charged is None:
            self._count_waiting(client, -1)
            if len(client.waiting) > 2 * client.num_waiting + 64:
                client.waiting = [item for item in client.waiting if not item[2].is_finished]
                heapq.heapify(client.waiting)
            if not client.num_waiting:
                client.waiting.clear()
                client.version += 1
        else:
            client.num_running -= 1
            unused = sequence.charged - sequence.num_run - sequence.num_completion_tokens - sequence.num_followed
            self._place(client, max(client.tag - unused / client.weight, self._virtual_time))
        if not client.num_waiting and not client.num_running:
            del self._clients[client.name]
            self._weights = self._weights - client.weight if self._clients else 0.0

    def is_below_share(self, request: Submit) -> bool:
        """Whether the client of a new request, with all that it waits for, would run fewer than its share."""
        name, weight = self.identity(request)
        client = self._clients.get(name)
        if client is None:
            return self._is_below_share(0, weight, self._weights + weight)
        return self._is_below_share(client.num_running + client.num_waiting, client.weight, self._weights)

    def is_below_part(self, request: Submit, max_waiting: int) -> bool:
        """Whether the client of a new request has fewer waiting sequences than its part of `max_waiting`, by weight."""
        num_waiting, weight = self.num_waiting_of(request), self.identity(request)[1]
        weights = sum(weight * count for (_, weight), count in self._lengths.items())
        return num_waiting < max_waiting * weight / (weights + (0.0 if num_waiting else weight)) - 1e-9

    def num_waiting_of(self, request: Submit) -> int:
        client = self._clients.get(self.identity(request)[0])
        return client.num_waiting if client else 0

    def num_before(self, request: Submit) -> int:
        """Waiting sequences likely to start before a new request: of other clients as many as of its own, by weight.

        Takes O(√n) for n sequences: so many different numbers of waiting sequences can clients have.
        """
        rounds = (self.num_waiting_of(request) + 1) / self.identity(request)[1]
        return int(sum(count * min(length, rounds * weight) for (length, weight), count in self._lengths.items()))

    def client_of(self, sequence: Sequence) -> Client:
        """Of a sequence that has not left."""
        return self._clients[self.identity(sequence.request)[0]]

    def identity(self, request: Submit) -> tuple[str, float]:
        """Name and weight of the client."""
        return (request.client, request.weight) if self.is_fair else ("", 1.0)

    def _is_below_share(self, count: int, weight: float, weights: float) -> bool:
        return count < self.max_running * (weight / weights) - 1e-9  # sums of weights are rounded

    def _count_waiting(self, client: Client, change: int) -> None:
        before, client.num_waiting = client.num_waiting, client.num_waiting + change
        self.num_waiting += change
        for length, one in ((before, -1), (client.num_waiting, 1)):
            if length:
                self._lengths[length, client.weight] += one
                if not self._lengths[length, client.weight]:
                    del self._lengths[length, client.weight]

    def _place(self, client: Client, tag: float) -> None:
        """Put a client, if it waits, where its tag and its running sequences belong."""
        if tag != client.tag or not client.order:
            client.tag, client.order = tag, next(self._numbers)
        client.version += 1
        if not client.num_waiting:
            return
        entry = (client.tag, client.order, client.version, client)
        heapq.heappush(self._by_tag, entry)
        heapq.heappush(self._by_running, (client.num_running / client.weight, *entry))
        for heap in (self._by_tag, self._by_running):
            if len(heap) > 2 * len(self._clients) + 64:
                heap[:] = filter(_is_valid, heap)
                heapq.heapify(heap)


def _is_valid(entry: tuple[Any, ...]) -> bool:
    return bool(entry[-1].version == entry[-2])
