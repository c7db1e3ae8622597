"""The queue of waiting sequences, and the clients that have sequences.

The next sequence to start is one of the client that runs the fewest sequences. Weights divide time, not slots: who may
run at all in a step follows from the accounts (accounts.py). The queue handles counts only, no slots and no clock.
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
        self.num_parked = 0  # that have lost their slots and do not wait for others yet
        self.order = order  # of its last start, or its arrival; breaks ties
        self.version = 0  # of its entry in the queue's heap; entries of earlier versions are void

    @property
    def place(self) -> tuple[int, int]:
        return self.num_running, self.order


class FairQueue:
    """The waiting sequences of all clients; those of one client are in order of priority, then arrival.

    Operations take O(log n), amortized, except `begin` with `only`. The queue forgets a client without sequences.
    """

    def __init__(self, slots: int):
        self.slots = slots
        self.num_waiting = 0
        self.num_extra = 0  # of these, candidates of requests that were accepted before: they take nobody's place
        self._clients: dict[str, Client] = {}
        self._places: list[tuple[tuple[int, int], int, Client]] = []  # heap of (place, version, client)
        self._only: set[Client] | None = None
        self._few: list[tuple[tuple[int, int], int, Client]] = []  # the same for those of `only`
        self._numbers = itertools.count(1)
        self._lengths: Counter[tuple[int, float]] = Counter()  # clients by (waiting sequences, weight)

    @property
    def clients(self) -> Collection[Client]:
        """All clients with sequences."""
        return self._clients.values()

    def add(self, sequence: Sequence) -> None:
        name, weight = sequence.request.client, sequence.request.weight
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = Client(name, weight, next(self._numbers))
        if client.weight != weight:  # the weight of the latest request applies
            num_waiting = client.num_waiting
            self._count_waiting(client, -num_waiting)
            client.weight = weight
            self._count_waiting(client, num_waiting)
        sequence.order_of_arrival = next(self._numbers)
        self._wait(client, sequence)

    def park(self, sequence: Sequence) -> None:
        """Record that a running sequence has lost its slot. It does not wait until `put_back`."""
        client = self.client_of(sequence)
        client.num_running -= 1
        client.num_parked += 1
        sequence.has_left_queue, sequence.is_parked = False, True
        self._enter(client)

    def put_back(self, sequence: Sequence) -> None:
        """Let a parked sequence wait again, in its order of arrival."""
        client = self.client_of(sequence)
        client.num_parked -= 1
        sequence.is_parked = False
        self._wait(client, sequence)

    def _wait(self, client: Client, sequence: Sequence) -> None:
        heapq.heappush(client.waiting, (sequence.request.priority, sequence.order_of_arrival, sequence))
        self._count_waiting(client, 1)
        self.num_extra += sequence.is_extra
        self._enter(client)

    def begin(self, only: set[Client] | None = None) -> None:
        """Let only some clients start sequences from now on. None: all."""
        self._only = only
        self._few = [(client.place, client.version, client) for client in only or () if client.num_waiting]
        heapq.heapify(self._few)

    def pop(self) -> Sequence | None:
        """Take the next sequence, which counts as running from now on. Return None if no sequence may start."""
        client = self.next_client()
        if client is None:
            return None
        while (sequence := heapq.heappop(client.waiting)[2]).is_finished:
            pass
        sequence.has_left_queue = True
        self._count_waiting(client, -1)
        self.num_extra -= sequence.is_extra
        client.num_running += 1
        client.order = next(self._numbers)
        self._enter(client)
        return sequence

    def next_client(self) -> Client | None:
        """Return the client whose sequence is next; None: no sequence may start."""
        places = self._places if self._only is None else self._few
        while places and not _is_valid(places[0]):
            heapq.heappop(places)
        return places[0][-1] if places else None

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished sequence."""
        client = self.client_of(sequence)
        if sequence.is_parked:
            client.num_parked -= 1
        elif sequence.has_left_queue:
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
        if not (client.num_waiting or client.num_running or client.num_parked):
            client.version += 1
            del self._clients[client.name]

    def is_below_share(self, request: Submit) -> bool:
        """Whether a new request's client then runs and waits with at most an equal part of the slots."""
        client = self._clients.get(request.client)
        count = 1 if client is None else client.num_running + client.num_waiting + 1
        return count * (len(self._clients) + (client is None)) <= self.slots

    def is_below_part(self, request: Submit, max_waiting: int) -> bool:
        """Whether the client of a new request has fewer waiting sequences than its part of `max_waiting`, by weight."""
        num_waiting, weight = self.num_waiting_of(request), request.weight
        weights = sum(weight * count for (_, weight), count in self._lengths.items())
        return num_waiting < max_waiting * weight / (weights + (0.0 if num_waiting else weight)) - 1e-9

    def num_waiting_of(self, request: Submit) -> int:
        client = self._clients.get(request.client)
        return client.num_waiting if client else 0

    def num_before(self, request: Submit) -> int:
        """Return the number of waiting sequences that are likely to start before a new request.

        Of each other client, it counts as many as of the request's own client. It takes O(√n) for n sequences and one
        weight, because at most so many different queue lengths can occur.
        """
        rounds = self.num_waiting_of(request) + 1
        return sum(count * min(length, rounds) for (length, _), count in self._lengths.items())

    def client_of(self, sequence: Sequence) -> Client:
        """Return the client of a sequence that was not removed."""
        return self._clients[sequence.request.client]

    def account(self, sequence: Sequence) -> Account | None:
        """Return the account of a sequence's client. None: it has no sequences any more."""
        return self._clients.get(sequence.request.client)

    def _count_waiting(self, client: Client, change: int) -> None:
        before, client.num_waiting = client.num_waiting, client.num_waiting + change
        self.num_waiting += change
        for length, one in ((before, -1), (client.num_waiting, 1)):
            if length:
                self._lengths[length, client.weight] += one
                if not self._lengths[length, client.weight]:
                    del self._lengths[length, client.weight]

    def _enter(self, client: Client) -> None:
        """Enter a client that waits in the heaps, with its new place."""
        client.version += 1
        if not client.num_waiting:
            return
        entry = client.place, client.version, client
        heapq.heappush(self._places, entry)
        if self._only is not None and client in self._only:
            heapq.heappush(self._few, entry)
        if len(self._places) > 2 * len(self._clients) + 64:
            self._places = list(filter(_is_valid, self._places))
            heapq.heapify(self._places)


def _is_valid(entry: tuple[tuple[int, int], int, Client]) -> bool:
    return entry[-1].version == entry[-2]
