"""Clients: many at once, each from an address of its own, that wait or leave.

The service takes each 127.0.0.x for another client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from tests.toolbox import load
from tests.toolbox.http import post
from tests.toolbox.load import Apart, Reply, at_once, every

HANG_SECONDS = 60.0  # without an end: the request hangs
PROBE_SECONDS = 15.0  # the same of a probe
CROWDS = 4  # processes, each with an address of its own
OWN, OTHER = "127.0.0.1", "127.0.0.2"  # the client whose requests run, and another one
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


async def ask(
    port: int, body: Mapping[str, Any] | bytes, *, path: str = "/generate", source: str = OWN,
    patience: float = HANG_SECONDS, leave_after: int | None = None,
) -> Reply:  # fmt: skip
    """One request on a connection of its own.

    leave_after: bytes of the answer after which the client leaves.
    """
    reply = Reply(None, time.monotonic(), time.monotonic())
    answer = load.Reader(reply, keep=True)
    try:
        async with asyncio.timeout(patience):
            reader, writer = await asyncio.open_connection(OWN, port, local_addr=(source, 0))
            try:
                reply.sent_at = time.monotonic()
                writer.write(post(path, body, Connection="close"))
                while not answer.feed(await reader.read(1 << 18)):
                    if leave_after is not None and reply.num_bytes >= leave_after:
                        reply.failure = "left"
                        break
            finally:
                writer.transport.abort()
    except TimeoutError:
        reply.failure = "hang"
    except (OSError, load.LoadError):
        reply.failure = "cut"
    reply.ended_at = time.monotonic()
    return reply


# Clients in processes of their own


class Probe(Apart):
    """A small client that sends the same request again and again, each on a connection of its own.

    interval: seconds between two, unless an answer takes longer. What came of them is known at the end of the `with`
    statement.
    """

    def __init__(
        self, port: int, request: bytes = LIVEZ, source: str = "127.0.0.99", interval: float = 0.02, **its: Any
    ):
        options = {"connections": 1, "fresh": True, "accepts": None, "patience": PROBE_SECONDS, "address": source}
        super().__init__(port, partial(every, interval, request), drains=True, **options, **its)

    @property
    def seconds(self) -> list[float]:
        """From connecting to the first event, or byte of the body."""
        return [each.first_at - each.began_at for each in self.outcome.replies if each.first_at is not None]

    @property
    def unanswered(self) -> int:
        return sum(each.first_at is None for each in self.outcome.replies)


def crowd(port: int, request: bytes, count: int, *, fresh: bool, patience: float) -> list[load.Reply]:
    """`count` requests at once from CROWDS processes."""
    begin, requests = load.SPAWN.Event(), partial(at_once, request, count // CROWDS)
    options = {"connections": count // CROWDS, "fresh": fresh, "accepts": None, "seconds": patience, "begin": begin}
    members = [Apart(port, requests, address=f"127.0.1.{i + 1}", **options) for i in range(CROWDS)]
    begin.set()
    return [reply for member in members for reply in member.wait().replies]
