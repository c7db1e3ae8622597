"""The queue of waiting sequences: start-time fair queueing between clients (Goyal, Vin & Cheng 1996).

Each waiting client has a tag, the virtual time at which its next sequence starts. The client with the lowest tag goes
first, and its tag then grows by the cost of its sequence divided by its weight. The queue handles counts and costs
only, no slots and no clock.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from typing import Any

from service.engine.sequence import Sequence
from service.wire import Submit


class Client:
    """A client that has waiting or running sequences."""

    def __init__(self, name: str, weight: float):
        self.name, self.weight = name, weight
        self.tag = 0.0
        self.order = 0  # breaks ties between equal tags
        self.waiting: list[tuple[int, int, Sequence]] = []  # heap of (priority, order of arrival, sequence)
        self.num_waiting = 0
        self.num_running = 0
        self.prompt_tags = [0.0, 0.0]  # tags of prompts in slots: of prompts that generate, of prompts only scored
        self.version = 0  # version of its entry in each of the queue's heaps; entries of earlier versions are void


class FairQueue:
    """The waiting sequences of all clients; those of one client are in order of priority, then arrival.

    Operations take O(log n), amortized. The queue forgets a client without sequences; a client that returns starts at
    the current virtual time. A client's share is its part of max_running by weight. If is_fair is False, all sequences
    count as one client's.
    """

    def __init__(self, max_running: int, is_fair: bool = True):
        self.max_running, self.is_fair = max_running, is_fair
        self.num_waiting = 0
        self._clients: dict[str, Client] = {}
        self._weights = 0.0  # sum of the clients' weights
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
        is_changed = client.weight != weight  # the weight of the latest request applies
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
        """Take the next sequence, which counts as running from now on. Return None if no sequence may start.

        The caller must `charge` the sequence.

        below_share: take a sequence only from the client that runs the fewest for its weight, and only if it runs fewer
            than its share.
        """
        for heap in (self._by_tag, self._by_running):
            while heap and not _is_valid(heap[0]):
                heapq.heappop(heap)
        if not self._by_tag:
            return None
        client: Client = self._by_running[0][-1] if below_share else self._by_tag[0][-1]
        if below_share and not self._is_below_share(client.num_running, client.weight, self._weights):
            return None
        # Not the tag of this client: with `below_share` it may be far ahead, and no newcomer should start behind it.
        self._virtual_time = max(self._virtual_time, self._by_tag[0][0])
        while (sequence := heapq.heappop(client.waiting)[2]).is_finished:
            pass
        self._count_waiting(client, -1)
        client.num_running += 1
        return sequence

    def charge(self, sequence: Sequence, cost: int) -> None:
        """Charge the client of a sequence that was just taken for the `cost` characters that it is going to run."""
        client = self.client_of(sequence)
        sequence.charged = cost
        self._place(client, client.tag + cost / client.weight)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished sequence.

        If it ran, its client is refunded the charged characters that did not run, or pays what the stop pattern took
        in addition. A refund never sets a tag below the current virtual time, so no newcomer waits for a refund to be
        used up.
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
        """Whether the client of a new request has fewer running and waiting sequences than its share."""
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
        """Return the number of waiting sequences that are likely to start before a new request.

        Of each other client, it counts as many as of the request's own client, by weight. It takes O(√n) for n
        sequences, because at most so many different queue lengths can occur.
        """
        rounds = (self.num_waiting_of(request) + 1) / self.identity(request)[1]
        return int(sum(count * min(length, rounds * weight) for (length, weight), count in self._lengths.items()))

    def client_of(self, sequence: Sequence) -> Client:
        """Return the client of a sequence that was not removed."""
        return self._clients[self.identity(sequence.request)[0]]

    def identity(self, request: Submit) -> tuple[str, float]:
        """Return the name and weight of the client of a request."""
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
        """Set a client's tag and, if it waits, enter it in the heaps by tag and by running sequences."""
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
