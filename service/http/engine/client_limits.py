"""Who a client is, and its limits.

A client is the name of its API key, or without keys its address. Limits come from a file that can be read again while
the service runs. Knows nothing of routes or of the model; a client that is idle is forgotten.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from service.http.api.errors import ApiError
from service.settings import ClientLimitsFile, Limits, Settings, read_client_limits
from service.shared import SharedTable
from service.words import plural

logger = logging.getLogger(__name__)

MINUTE = 60.0  # seconds; at most a minute's worth is there
ROUNDING = 1e-6  # seconds
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


class Charge(NamedTuple):
    """Characters that count in a client's limit."""

    characters: int
    limit: int  # per minute, at that time
    restored_at: float  # when they have ceased to count, unused or not


class ClientLimits:
    """The limits of all clients, over all HTTP processes.

    Of each rate the table has the moment at which the whole minute's worth is there again: virtual scheduling, as in
    the generic cell rate algorithm (ITU-T I.371). Taking moves it into the future.
    """

    def __init__(
        self, settings: Settings, table: SharedTable | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._path = settings.client_limits
        self._read(settings.limits)
        self._clock, self._table = clock, table or SharedTable()

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
        """Count a request; `end` must follow. Raises ApiError: 429, beyond a limit; it was not counted."""
        limits, now = self.of(client), self._clock()
        most = limits.concurrent_requests
        with self._table:
            row = self._row(client, now)
            if most is not None and self._table.count(row) >= most:
                raise _refusal(client, "concurrent_requests", most, BUSY_RETRY_SECONDS)
            if limits.requests_per_minute is not None:
                seconds = self._take(row, MINUTE / limits.requests_per_minute, now)
                if seconds:
                    raise _refusal(client, "requests_per_minute", limits.requests_per_minute, seconds)
            self._table.change(row, 1)

    def end(self, client: str) -> None:
        """A request that `begin` counted has ended."""
        with self._table:
            self._table.change(self._row(client, self._clock()), -1)

    def charge(self, client: str, characters: int, must_wait: bool = True) -> Charge | None:
        """Count characters that are going to run; with must_wait=False even beyond the limit. None: there is none.

        Raises ApiError: 429, not yet within the limit, or 400, more than a whole minute's; nothing was counted.
        """
        limit = self.of(client).characters_per_minute
        if limit is None:
            return None
        if must_wait and characters > limit:
            message = (
                f"the request may take {plural(characters, 'character')}, prompts and max_tokens of all its sequences; "
                f"characters_per_minute of client {client} is {limit}"
            )
            raise ApiError(400, message)
        now = self._clock()
        with self._table:
            moment = self._row(client, now) + 1
            seconds = self._take(moment, characters * MINUTE / limit, now, must_wait)
            restored_at = self._table.numbers[moment]
        if seconds:
            raise _refusal(client, "characters_per_minute", limit, seconds)
        return Charge(characters, limit, restored_at)

    def give_back(self, client: str, charge: Charge, num_run: int) -> None:
        """Return what did not run of a charge, as far as it still counts."""
        now = self._clock()
        seconds = min((charge.characters - num_run) * MINUTE / charge.limit, max(0.0, charge.restored_at - now))
        with self._table:
            self._take(self._row(client, now) + 1, -seconds, now)

    def _row(self, client: str, now: float) -> int:
        try:
            return self._table.row(f"client {client}", now)
        except LookupError:
            message = "requests of too many clients are in progress"
            raise ApiError(429, message, code="rate_limit", retry_after_seconds=BUSY_RETRY_SECONDS) from None

    def _take(self, moment: int, cost: float, now: float, must_wait: bool = True) -> float:
        """Take `cost` seconds' worth, if it is there or need not be; returns after how long it will be."""
        numbers = self._table.numbers
        full_at = max(numbers[moment], now) + cost
        seconds = full_at - now - MINUTE
        if must_wait and seconds > ROUNDING:
            return seconds
        numbers[moment] = full_at
        return 0.0


def _refusal(client: str, name: str, limit: int, seconds: float) -> ApiError:
    message = f"{name} of client {client} is {limit}"
    return ApiError(429, message, code="rate_limit", retry_after_seconds=max(1, math.ceil(seconds)))
