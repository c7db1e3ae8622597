"""Who a client is, and its limits in this HTTP process.

A client is the name of its API key, or without keys its address. Limits come from a file that can be read again while
the service runs. Knows nothing of routes or of the model; a client that is idle is forgotten.
"""

from __future__ import annotations

import functools
import ipaddress
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from service.http.schemas import ApiError
from service.settings import ClientLimitsFile, Limits, Settings, read_client_limits
from service.words import plural

logger = logging.getLogger(__name__)

MINUTE = 60.0  # seconds; what a bucket holds at most is a minute's worth
BUSY_RETRY_SECONDS = 1  # when one of a client's running requests will have ended is not known


def address_of(peer: str, headers: Mapping[bytes, bytes], header: str | None) -> str:
    """The address that a request comes from, as `network_of`; `peer` is the connection's.

    header: that which a trusted proxy sets. Its last address counts, the one that the nearest proxy added: those before
    it are the client's own words. Without a valid one it is the peer's address.
    """
    if header is not None:
        name = header.lower().encode()
        address = network_of(headers.get(name, b"").decode("latin-1").rpartition(",")[2].strip())
        if address is not None:
            return address
    return network_of(peer) or "unknown"


@functools.lru_cache(maxsize=1024)
def network_of(text: str) -> str | None:
    """What counts as one address: of IPv6 a /64, all of which one customer gets; None: not an address.

    A port may follow, as some proxies have it: 192.0.2.7:5678, [2001:db8::1]:443.
    """
    try:
        if text.startswith("["):
            text = text[1:].partition("]")[0]
        elif text.count(":") == 1:
            text = text.partition(":")[0]
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        if address.is_loopback:
            return str(address)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


@dataclass(slots=True)
class Bucket:
    """Tokens that return at `limit` a minute, up to `limit` and at least one; None: not used yet, full."""

    tokens: float | None = None
    updated_at: float = 0.0

    def level(self, limit: float, now: float) -> float:
        size = max(1.0, limit)
        if self.tokens is None:
            self.tokens = size
        self.tokens = min(size, self.tokens + (now - self.updated_at) * limit / MINUTE)
        self.updated_at = now
        return self.tokens

    def seconds_until(self, amount: float, limit: float, now: float) -> float:
        """Until `amount`, or all that it can hold, is there."""
        missing = min(amount, max(1.0, limit)) - self.level(limit, now)
        return max(0.0, missing) * MINUTE / limit

    def take(self, amount: float, limit: float, now: float) -> None:
        """May leave less than nothing."""
        self.tokens = self.level(limit, now) - amount


@dataclass(slots=True, eq=False)
class _State:
    requests: Bucket = field(default_factory=Bucket)
    characters: Bucket = field(default_factory=Bucket)
    num_running: int = 0


class ClientLimits:
    """The limits of all clients. Each HTTP process enforces its part: a limit divided by the number of processes."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic):
        self._path, self._num_processes = settings.client_limits, settings.http_processes
        self._read(settings.limits)
        self._clock = clock
        self._states: dict[str, _State] = {}  # the one that was looked at longest ago first

    def reload(self) -> None:
        """Read the file again; if it is not valid, the old limits stay and the log says why."""
        if self._path is None:
            return
        try:
            self._read(read_client_limits(self._path))
        except ValueError as error:
            logger.error("client limits not changed: %s", error)
        else:
            logger.info("client limits read again from %s", self._path)

    def _read(self, file: ClientLimitsFile) -> None:
        self._file = file
        every = [file.default, *file.clients.values()]
        self.has_any = any(limits != Limits(weight=limits.weight) for limits in every)  # otherwise nothing is counted

    def of(self, client: str) -> Limits:
        return self._file.clients.get(client, self._file.default)

    def begin(self, client: str) -> None:
        """Count a request; `end` must follow.

        Raises:
            ApiError: 429, beyond a limit; it was not counted.
        """
        limits, state = self.of(client), self._states.get(client)
        if state is None:
            self._forget_idle()
            state = self._states[client] = _State()
        most = limits.concurrent_requests
        if most is not None and state.num_running >= max(1, most // self._num_processes):
            raise _refusal(client, "concurrent_requests", most, BUSY_RETRY_SECONDS)
        if limits.requests_per_minute is not None:
            limit, now = limits.requests_per_minute / self._num_processes, self._clock()
            if seconds := state.requests.seconds_until(1, limit, now):
                raise _refusal(client, "requests_per_minute", limits.requests_per_minute, seconds)
            state.requests.take(1, limit, now)
        state.num_running += 1

    def end(self, client: str) -> None:
        """A request that `begin` counted has ended."""
        self._states[client].num_running -= 1

    def charge(self, client: str, characters: int, must_wait: bool = True) -> int:
        """Count characters that are going to run; with must_wait=False even beyond the limit. Returns how many count.

        Raises:
            ApiError: 429, not yet within the limit, or 400, more than a whole minute's; nothing was counted.
        """
        limit = self.of(client).characters_per_minute
        if limit is None:
            return 0
        if must_wait and characters > limit:
            message = (
                f"the request may take {plural(characters, 'character')}, prompts and max_tokens of all its sequences; "
                f"characters_per_minute of client {client} is {limit}"
            )
            raise ApiError(400, message)
        now, share = self._clock(), limit / self._num_processes
        bucket = self._states.setdefault(client, _State()).characters
        if must_wait and (seconds := bucket.seconds_until(characters, share, now)):
            raise _refusal(client, "characters_per_minute", limit, seconds)
        bucket.take(characters, share, now)
        return characters

    def give_back(self, client: str, characters: int) -> None:
        """Return characters that were charged and not used."""
        limit, state = self.of(client).characters_per_minute, self._states.get(client)
        if limit is not None and state is not None:
            state.characters.take(-characters, limit / self._num_processes, self._clock())

    def _forget_idle(self) -> None:
        """Look at two clients, and forget those without running requests whose buckets are full again."""
        for client in list(itertools.islice(self._states, 2)):
            state, limits, now = self._states.pop(client), self.of(client), self._clock()
            if state.num_running or any(
                limit is not None and bucket.seconds_until(limit, limit / self._num_processes, now)
                for bucket, limit in (
                    (state.requests, limits.requests_per_minute),
                    (state.characters, limits.characters_per_minute),
                )
            ):
                self._states[client] = state


def _refusal(client: str, name: str, limit: int, seconds: float) -> ApiError:
    message = f"{name} of client {client} is {limit}"
    return ApiError(429, message, code="rate_limit", retry_after_seconds=max(1, math.ceil(seconds)))
