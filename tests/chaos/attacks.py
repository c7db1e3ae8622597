"""What one client once could send to stop the others: each attack's memory, and how long another client waits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable

import httpx

from tests.chaos import case
from tests.chaos.case import MB, Outcome, Plan, ours
from tests.chaos.client import Probe
from tests.helpers import http_processes
from tests.toolbox.http import post

ONE_CONNECTION_MB = 16  # that any connection may make the HTTP process hold over idle
LONGEST_MS = 100  # that another client's /livez may take
LIMIT_MB = 352  # documented in service/OPERATIONS.md for all legal requests
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
SECONDS = 4.0


def unread(port: int, data: bytes, count: int) -> None:
    """Connections that send as much as is taken, and read nothing."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(count)]

        def push(connection: socket.socket) -> None:
            connection.settimeout(SECONDS)
            with contextlib.suppress(OSError):
                connection.sendall(data)

        threads = [threading.Thread(target=push, args=(connection,)) for connection in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def asked(port: int, content: bytes, path: str, count: int, times: int = 1) -> None:
    """Requests at once, each client's one after the other; what they are answered does not matter."""

    def ask() -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            for _ in range(times):
                client.post(path, content=content, headers={"Content-Type": "application/json"})

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def uploads(port: int) -> None:
    """Bodies where none is expected."""
    chunk = b"100000\r\n%b\r\n" % bytes(1 << 20)
    unread(port, b"GET /metrics HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + 40 * chunk, 30)


def refused_patterns(port: int) -> None:
    """Patterns of the largest size, none of which compiles, and each another one."""

    def ask(number: int) -> None:
        pattern = b"(a|b|c){%d}(a|bc|cab){400}[a-z]{300,400}" % (300 + number)
        asked(port, b'{"prompt": "a", "regex": "%b"}' % pattern, "/generate", 1, 10)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


TEXT = b'{"prompt": "%b\xf0\x9f\x98\x80", "unknown_characters": "drop"}' % (b"a" * 4_100_000)
ATTACKS: dict[str, tuple[Callable[[int], None], float]] = {  # and the MB over idle that it may cost
    "1,000 pipelined GET /openapi.json, unread": (
        lambda port: unread(port, b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n" * 1000, 1), ONE_CONNECTION_MB,
    ),
    "4 × 100,000 pipelined GET /livez, unread": (lambda port: unread(port, LIVEZ * 100_000, 4), 4 * ONE_CONNECTION_MB),
    "100 pipelined streams, unread": (
        lambda port: unread(port, 100 * post("/generate", {"prompt": "R", "max_tokens": 16_000, "stream": True}), 1),
        ONE_CONNECTION_MB,
    ),
    "40 MB for GET /metrics, 30 times": (uploads, 30),
    "16 × /tokenize of 4.1 MB and an emoji": (lambda port: asked(port, TEXT, "/tokenize", 16, 2), LIMIT_MB),
    "16 clients with patterns that do not compile": (refused_patterns, LIMIT_MB),
}  # fmt: skip


async def attacks(plan: Plan, outcome: Outcome) -> None:
    times = plan.count(3, 1)
    outcome.did = f"one client attacks in {len(ATTACKS)} ways, {times} times each, while another client asks /livez"
    async with ours(outcome) as server:
        [http] = await asyncio.to_thread(http_processes, server)
        for name, (attack, limit) in ATTACKS.items():
            peak, waits, unanswered = 0.0, [0.0], 0
            for _ in range(times):
                before = http.memory_info().rss
                with open(f"/proc/{http.pid}/clear_refs", "w") as file:
                    file.write("5")  # VmHWM begins anew
                with Probe(server.port) as probe:
                    await asyncio.sleep(1)
                    await asyncio.to_thread(attack, server.port)
                    await asyncio.sleep(0.5)
                with open(f"/proc/{http.pid}/status") as file:
                    [highest] = [int(line.split()[1]) for line in file if line.startswith("VmHWM")]
                peak = max(peak, (1024 * highest - before) / MB)
                waits += [1e3 * seconds for seconds in probe.seconds]
                unanswered += probe.unanswered
                await asyncio.sleep(1)
            outcome.check(http.is_running(), f"{name}: the HTTP process has ended")
            outcome.check(peak < limit, f"{name}: {peak:.0f} MB over idle, {limit:.0f} are allowed")
            outcome.check(not unanswered, f"{name}: {unanswered} requests of another client were not answered")
            outcome.figures |= {f"{name}: memory above idle, max, MB": peak, f"{name}: /livez, max, ms": max(waits)}
            outcome.goals[f"{name}: another's /livez within {LONGEST_MS} ms"] = max(waits) < LONGEST_MS
        began = time.monotonic()
        idle = await case.until(lambda: http.memory_info().rss < 130 * MB, 60)
        outcome.check(bool(idle), "the HTTP process keeps 130 MB or more")
        outcome.figures["HTTP process below 130 MB after, s"] = time.monotonic() - began
