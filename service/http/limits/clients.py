"""The limits of clients.

A client is the name of its API key, or its address if there are no keys. Limits come from a file that can be read again
while the service runs. Each HTTP process counts its own requests, and enforces its part of each limit. Idle clients are
forgotten. This module knows nothing about routes or the model.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from service.http.connection.errors import ApiError
from service.settings import ClientLimitsFile, Limits, Settings, read_client_limits
from service.words import plural

MINUTE = 60.0  # seconds; a client can save up at most a minute's allowance
ROUNDING = 1e-6  # seconds
BUSY_RETRY_SECONDS = 1  # the end of a client's running requests is unknown


class Charge(NamedTuple):
    """Characters charged to a client's limit."""

    characters: int
    limit: int  # per minute in this process, at that time
    restored_at: float  # when the charge has expired, used or not


class _Client:
    """What one client uses.

    For each rate, it has the time at which the whole minute's allowance is available again. Each charge moves it into
    the future. This is virtual scheduling, as in the generic cell rate algorithm (ITU-T I.371).
    """

    __slots__ = ("requests_at", "characters_at", "num_running")

    def __init__(self) -> None:
        self.requests_at = self.characters_at = 0.0
        self.num_running = 0


class ClientLimits:
    """The limits of all clients in one HTTP process: the file's limits divided by --http-processes, rounded up."""

    MAX_CLIENTS = 1 << 16  # beyond which the one that asked longest ago is forgotten, unless a request of it runs

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic):
        self._path, self._num_processes = settings.client_limits, settings.http_processes
        self._read(settings.limits)
        self._clock = clock
        self._clients: OrderedDict[str, _Client] = OrderedDict()  # the one that asked longest ago comes first

    def reload(self) -> None:
        """Read the file again. Raises ValueError: it is invalid, and the old limits stay."""
        if self._path is not None:
            self._read(read_client_limits(self._path))

    def _read(self, file: ClientLimitsFile) -> None:
        self._file = file
        every = [file.default, *file.clients.values()]
        self.has_any = any(limits != Limits(weight=limits.weight) for limits in every)  # False: nothing is counted

    def of(self, client: str) -> Limits:
        """Return the limits that the file states."""
        return self._file.clients.get(client, self._file.default)

    def characters_per_minute(self, client: str) -> int | None:
        """Return this process's part of the limit, which no request may exceed; None: no limit."""
        return self._part(self.of(client).characters_per_minute)

    def begin(self, client: str) -> None:
        """Count a request. `end` must follow. Raises ApiError: 429, beyond a limit; the request is not counted."""
        limits, now, found = self.of(client), self._clock(), self._find(client)
        most, rate = self._part(limits.concurrent_requests), self._part(limits.requests_per_minute)
        if most is not None and found.num_running >= most:
            raise self._refusal(client, "concurrent_requests", BUSY_RETRY_SECONDS)
        if rate is not None:
            full_at = max(found.requests_at, now) + MINUTE / rate
            if seconds := _wait(full_at, now):
                raise self._refusal(client, "requests_per_minute", seconds)
            found.requests_at = full_at
        found.num_running += 1

    def end(self, client: str) -> None:
        """End a request that `begin` counted."""
        self._clients[client].num_running -= 1

    def charge(self, client: str, characters: int, must_wait: bool = True) -> Charge | None:
        """Charge characters before they run, with must_wait=False even beyond the limit. Returns None without a limit.

        Raises ApiError: 429, beyond the limit for now; 400, more than the whole minute's allowance. Nothing is charged.
        """
        limit = self.characters_per_minute(client)
        if limit is None:
            return None
        if must_wait and characters > limit:
            message = (
                f"the request may take {plural(characters, 'character')}, prompts and max_tokens of all its sequences; "
                f"{self._stated(client, 'characters_per_minute')}"
            )
            raise ApiError(400, message)
        now, found = self._clock(), self._find(client)
        full_at = max(found.characters_at, now) + characters * MINUTE / limit
        if must_wait and (seconds := _wait(full_at, now)):
            raise self._refusal(client, "characters_per_minute", seconds)
        found.characters_at = full_at
        return Charge(characters, limit, full_at)

    def give_back(self, client: str, charge: Charge, num_run: int) -> None:
        """Give back the part of a charge that did not run, as far as it has not expired."""
        found, now = self._clients.get(client), self._clock()
        if found is not None:
            unused = (charge.characters - num_run) * MINUTE / charge.limit
            found.characters_at = max(found.characters_at, now) - min(unused, max(0.0, charge.restored_at - now))

    def _find(self, client: str) -> _Client:
        found = self._clients.get(client)
        if found is None:
            self._forget()
            found = self._clients[client] = _Client()
        else:
            self._clients.move_to_end(client)
        return found

    def _forget(self) -> None:
        """Forget up to two clients for each new one, so that idle ones become fewer."""
        now = self._clock()
        for name, client in list(itertools.islice(self._clients.items(), 2)):
            if client.num_running:
                self._clients.move_to_end(name)
            elif max(client.requests_at, client.characters_at) <= now or len(self._clients) >= self.MAX_CLIENTS:
                del self._clients[name]

    def _part(self, limit: int | None) -> int | None:
        """Return what this process may allow of a limit."""
        return None if limit is None else -(-limit // self._num_processes)

    def _stated(self, client: str, name: str) -> str:
        limit = getattr(self.of(client), name)
        divided = f", {self._part(limit)} in each of {self._num_processes} HTTP processes"
        return f"{name} of client {client} is {limit}{divided if self._num_processes > 1 else ''}"

    def _refusal(self, client: str, name: str, seconds: float) -> ApiError:
        retry_after = max(1, math.ceil(seconds))
        return ApiError(429, self._stated(client, name), code="rate_limit", retry_after_seconds=retry_after)


def _wait(full_at: float, now: float) -> float:
    """Return the seconds to wait before a charge that would make the allowance whole again at `full_at`."""
    seconds = full_at - now - MINUTE
    return seconds if seconds > ROUNDING else 0.0
