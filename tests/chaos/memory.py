"""The peak memory of the largest requests of each route, and how long another client waits meanwhile."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import socket
import time
from pathlib import Path

from service.settings import Settings
from tests.chaos import case
from tests.chaos.case import MB, Outcome, Plan, ours
from tests.chaos.client import Probe
from tests.helpers import RunningServer, http_processes, save_random
from tests.toolbox.http import PATIENCE, post
from tests.toolbox.largest import largest

CLIENTS = [f"127.0.2.{number}" for number in range(1, 5)]
LONGEST_MS = 60  # that another client's /livez may take
LIMIT_MB = 352  # documented in service/OPERATIONS.md for all legal requests
BODY_BYTES, REQUEST_BYTES = Settings().max_body_bytes, Settings().max_request_bytes
ONE_MB = (REQUEST_BYTES + 20 * BODY_BYTES) / MB
OTHER_MB = 16  # of connections, what allocators keep, buffers of the worker's first long prompt
KEPT_MB = 130  # by Python, for small objects to come


def memory(server: RunningServer, field: str) -> float:
    """Of the HTTP process and the worker: VmRSS, now; VmHWM, the most since `begin`."""
    found = 0
    for process in (*http_processes(server), server.worker()):
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        found += int(lines[field].split()[0]) * 1024
    return found / MB


def begin(server: RunningServer) -> None:
    for process in (*http_processes(server), server.worker()):
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def asked(server: RunningServer, request: bytes, count: int) -> set[str]:
    """The statuses of as many requests at once, of four clients in turn."""

    def ask(number: int) -> str:
        source = (CLIENTS[number % len(CLIENTS)], 0)
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE, source) as connection:
            try:
                connection.sendall(request)
                beginning = connection.recv(1 << 16)
                while connection.recv(1 << 16):
                    pass
            except ConnectionError:  # refused before all of the body was read
                return "429"
        return beginning[9:12].decode()

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return {*pool.map(ask, range(count))}


async def peaks(plan: Plan, outcome: Outcome) -> None:
    count = plan.count(16, 8)
    cases = largest(BODY_BYTES)
    outcome.did = f"{len(cases)} kinds of the largest requests of all routes, one and then {count} at once"
    checkpoint = save_random(plan.out / "memory")  # a tiny one, so that most of the time is HTTP's
    async with ours(outcome, checkpoint.path) as server:
        for path, body in largest(1 << 17).values():  # each route's first request loads what stays
            await asyncio.to_thread(asked, server, post(path, body, Connection="close"), 1)
        await asyncio.sleep(2)
        idle, highest, windows = memory(server, "VmRSS"), {1: 0.0, count: 0.0}, {}
        with Probe(server.port) as probe:
            await asyncio.sleep(1)
            for (name, (path, body)), number in itertools.product(cases.items(), highest):
                row, began = f"{name}, {number} at once", time.monotonic()
                before = max(0.0, memory(server, "VmRSS") - idle)  # kept for the next request
                begin(server)
                statuses = await asyncio.to_thread(asked, server, post(path, body, Connection="close"), number)
                grown, limit = memory(server, "VmHWM") - idle, ONE_MB if number == 1 else LIMIT_MB
                peak = f"{row}: {grown:.0f} MB over idle, {before:.0f} of them before"
                outcome.check(grown - before < limit + OTHER_MB and grown < LIMIT_MB + KEPT_MB, peak)
                outcome.check(statuses <= {"200", "400", "429"} and statuses != {"429"}, f"{row}: {statuses}")
                outcome.raw[row] = {"MB": grown, "MB before": before}
                highest[number], windows[row] = max(highest[number], grown), (began, time.monotonic())
        outcome.check(not probe.unanswered, f"{probe.unanswered} requests of another client were not answered")
        replies = [(it.began_at, 1e3 * (it.first_at - it.began_at)) for it in probe.outcome.replies if it.first_at]
        for row, (began, ended) in windows.items():
            waits = [wait for at, wait in replies if at <= ended and at + wait / 1e3 >= began]
            outcome.raw[row]["/livez, max, ms"] = max(waits, default=0.0)
        for number, most in highest.items():
            wait = max(outcome.raw[f"{name}, {number} at once"]["/livez, max, ms"] for name in cases)
            outcome.figures[f"{number} at once: memory above idle, max, MB"] = most
            outcome.figures[f"{number} at once: /livez of another client, max, ms"] = wait
            outcome.goals[f"{number} at once: another's /livez within {LONGEST_MS} ms"] = wait < LONGEST_MS
        began = time.monotonic()
        back = await case.until(lambda: memory(server, "VmRSS") - idle < KEPT_MB, 60)
        outcome.check(bool(back), f"{KEPT_MB} MB or more are kept")
        outcome.figures[f"memory above idle below {KEPT_MB} MB after, s"] = time.monotonic() - began
        outcome.figures["memory above idle at the end, MB"] = memory(server, "VmRSS") - idle
