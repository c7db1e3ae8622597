"""The queue of waiting sequences, and the clients that have sequences.

In each step, the clients that wait take turns, and the one that runs the fewest sequences for its weight comes first.
Who may run at all in a step follows from the accounts (accounts.py). The queue handles counts only, no slots and no
clock.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Collection

from service.engine.accounts import Account
from service.engine.sequence import Sequence
from service.wire import Submit


class Client(Account):
    """A client that has waiting or running sequences."""

    def __init__(self, name: str, weight: float, order: int):
        super().__init__(name, weight)
        self.waiting: list[tuple[int, int, Sequence]] = []  # heap of (priority, order of arrival, sequence)
        self.num_waiting = 0
        self.num_running = 0
        self.order = order  # of its last start, or its arrival; breaks ties
        self.is_served = False  # has had its turn in this round
        self.version = 0  # of its entry in the queue's heap; entries of earlier versions are void

    @property
    def place(self) -> tuple[float, int]:
        return self.num_running / self.weight, self.order


class FairQueue:
    """The waiting sequences of all clients; those of one client are in order of priority, then arrival.

    Operations take O(log n), amortized, except `begin` with `only`. The queue forgets a client without sequences. A
    client's share is its part of max_running by weight. If is_fair is False, all sequences count as one client's.
    """

    def __init__(self, max_running: int, is_fair: bool = True):
        self.max_running, self.is_fair = max_running, is_fair
        self.num_waiting = 0
        self.num_extra = 0  # of these, candidates of requests that were accepted before: they take nobody's place
        self._clients: dict[str, Client] = {}
        self._weights = 0.0  # sum of the clients' weights
        self._places: list[tuple[tuple[float, int], int, Client]] = []  # heap of (place, version, client)
        self._served: list[Client] = []
        self._only: set[Client] | None = None
        self._few: list[Client] = []  # with `only`: those that wait and have not had their turn, the next one last
        self._numbers = itertools.count(1)
        self._lengths: Counter[tuple[int, float]] = Counter()  # clients by (waiting sequences, weight)

    @property
    def clients(self) -> Collection[Client]:
        """All clients with sequences."""
        return self._clients.values()

    def add(self, sequence: Sequence) -> None:
        name, weight = self.identity(sequence.request)
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = Client(name, weight, next(self._numbers))
            self._weights += weight
        if client.weight != weight:  # the weight of the latest request applies
            self._weights += weight - client.weight
            num_waiting = client.num_waiting
            self._count_waiting(client, -num_waiting)
            client.weight = weight
            self._count_waiting(client, num_waiting)
        heapq.heappush(client.waiting, (sequence.request.priority, next(self._numbers), sequence))
        self._count_waiting(client, 1)
        self.num_extra += sequence.is_extra
        self._enter(client)

    def begin(self, only: set[Client] | None = None) -> None:
        """Begin a round, in which every client has a turn, or each of `only`."""
        served, self._served, self._only = self._served, [], only
        for client in served:
            client.is_served = False
            self._enter(client)
        if only is not None:
            waiting = [client for client in only if client.num_waiting]
            self._few = sorted(waiting, key=lambda client: client.place, reverse=True)

    def pop(self, below_share: bool = False) -> Sequence | None:
        """Take the next sequence, which counts as running from now on. Return None if no sequence may start.

        below_share: take it only from the client whose turn is next, and only if that runs fewer than its share.
        """
        client = self._next()
        if client is None and self._served:
            self.begin(self._only)
            client = self._next()
        if client is None or (below_share and not self._is_below_share(client.num_running, client.weight)):
            return None
        while (sequence := heapq.heappop(client.waiting)[2]).is_finished:
            pass
        sequence.has_left_queue = True
        self._count_waiting(client, -1)
        self.num_extra -= sequence.is_extra
        client.num_running += 1
        client.order = next(self._numbers)
        client.version += 1
        client.is_served = True
        self._served.append(client)
        return sequence

    def _next(self) -> Client | None:
        """Return the client whose turn is next."""
        if self._only is not None:
            while self._few and (self._few[-1].is_served or not self._few[-1].num_waiting):
                self._few.pop()
            return self._few[-1] if self._few else None
        while self._places and not _is_valid(self._places[0]):
            heapq.heappop(self._places)
        return self._places[0][-1] if self._places else None

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished sequence."""
        client = self.client_of(sequence)
        if sequence.has_left_queue:
            client.num_running -= 1
            self._enter(client)
        else:
            self._count_waiting(client, -1)
            self.num_extra -= sequence.is_extra
            if len(client.waiting) > 2 * client.num_waiting + 64:
                client.waiting = [item for item in client.waiting if not item[2].is_finished]
                heapq.heapify(client.waiting)
            if not client.num_waiting:
                client.waiting.clear()
                client.version += 1
        if not client.num_waiting and not client.num_running:
            client.version += 1
            del self._clients[client.name]
            self._weights = self._weights - client.weight if self._clients else 0.0

    def is_below_share(self, request: Submit) -> bool:
        """Whether the client of a new request has fewer running and waiting sequences than its share."""
        name, weight = self.identity(request)
        client = self._clients.get(name)
        if client is None:
            return self._is_below_share(0, weight, weight)
        return self._is_below_share(client.num_running + client.num_waiting, client.weight)

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

    def account(self, sequence: Sequence) -> Account | None:
        """Return the account of a sequence's client. None: it has no sequences any more."""
        return self._clients.get(self.identity(sequence.request)[0])

    def identity(self, request: Submit) -> tuple[str, float]:
        """Return the name and weight of the client of a request."""
        return (request.client, request.weight) if self.is_fair else ("", 1.0)

    def _is_below_share(self, count: int, weight: float, new_weight: float = 0.0) -> bool:
        """new_weight: of a client that is not known yet."""
        return count < self.max_running * (weight / (self._weights + new_weight)) - 1e-9  # sums are rounded

    def _count_waiting(self, client: Client, change: int) -> None:
        before, client.num_waiting = client.num_waiting, client.num_waiting + change
        self.num_waiting += change
        for length, one in ((before, -1), (client.num_waiting, 1)):
            if length:
                self._lengths[length, client.weight] += one
                if not self._lengths[length, client.weight]:
                    del self._lengths[length, client.weight]

    def _enter(self, client: Client) -> None:
        """Enter a client that waits and has not had its turn in the heap."""
        client.version += 1
        if not client.num_waiting or client.is_served:
            return
        heapq.heappush(self._places, (client.place, client.version, client))
        if len(self._places) > 2 * len(self._clients) + 64:
            self._places = list(filter(_is_valid, self._places))
            heapq.heapify(self._places)


def _is_valid(entry: tuple[tuple[float, int], int, Client]) -> bool:
    return entry[-1].version == entry[-2]
