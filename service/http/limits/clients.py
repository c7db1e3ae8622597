"""The limits of clients.

A client is the name of its API key, or its address if there are no keys. Limits come from a file that can be read again
while the service runs. An idle client is forgotten. This module knows nothing about routes or the model.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import NamedTuple

from service.http.connection.errors import ApiError
from service.settings import ClientLimitsFile, Limits, Settings, read_client_limits
from service.shared import SharedTable
from service.words import plural

logger = logging.getLogger(__name__)

MINUTE = 60.0  # seconds; a client can save up at most a minute's allowance
ROUNDING = 1e-6  # seconds
BUSY_RETRY_SECONDS = 1  # the end of a client's running requests is unknown


class Charge(NamedTuple):
    """Characters charged to a client's limit."""

    characters: int
    limit: int  # per minute, at that time
    restored_at: float  # when the charge has expired, used or not


class ClientLimits:
    """The limits of all clients, over all HTTP processes.

    For each rate, the table has the time at which the whole minute's allowance is available again. Each charge moves it
    into the future. This is virtual scheduling, as in the generic cell rate algorithm (ITU-T I.371).
    """

    def __init__(
        self, settings: Settings, table: SharedTable | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._path = settings.client_limits
        self._read(settings.limits)
        self._clock, self._table = clock, table or SharedTable()

    def reload(self) -> None:
        """Read the file again. If it is invalid, the old limits stay and the log gives the reason."""
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
        self.has_any = any(limits != Limits(weight=limits.weight) for limits in every)  # False: nothing is counted

    def of(self, client: str) -> Limits:
        return self._file.clients.get(client, self._file.default)

    def begin(self, client: str) -> None:
        """Count a request. `end` must follow. Raises ApiError: 429, beyond a limit; the request is not counted."""
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
        """End a request that `begin` counted."""
        with self._table:
            self._table.change(self._row(client, self._clock()), -1)

    def charge(self, client: str, characters: int, must_wait: bool = True) -> Charge | None:
        """Charge characters before they run, with must_wait=False even beyond the limit. Returns None without a limit.

        Raises ApiError: 429, beyond the limit for now; 400, more than the whole minute's allowance. Nothing is charged.
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
        """Give back the part of a charge that did not run, as far as it has not expired."""
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
        """Take an allowance of `cost` seconds if it is available or must_wait is False. Returns the seconds to wait."""
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
