"""Clients that come all at once, leave, send nonsense, flood, or never finish a request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

from tests.bench.servers import ROOT
from tests.chaos.case import (
    Figure,
    Memory,
    Outcome,
    Plan,
    check_balance,
    check_quiet,
    others,
    ours,
    spread,
    stock,
    until,
)
from tests.chaos.client import LIVEZ, Probe, Reply, ask
from tests.chaos.processes import OTHER, SHORT, STOCK_HEALTH, tell
from tests.helpers import RunningServer
from tests.load.record import quantile
from tests.toolbox.http import post
from tests.toolbox.launch import Program

CROWDS = 4  # processes, each with an address of its own


def crowd(port: int, body: dict[str, Any], count: int, connects_first: bool, patience: float) -> list[list[Any]]:
    """`count` requests at once from CROWDS processes: [began, sent, first, ended, status, ending] of each."""
    members = []
    for number in range(CROWDS):
        plan = {
            "port": port,
            "body": body,
            "count": count // CROWDS,
            "source": f"127.0.1.{number + 1}",
            "connects_first": connects_first,
            "patience": patience,
        }
        command = [sys.executable, "-m", "tests.chaos.crowd", json.dumps(plan)]
        members.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        for member in members:
            assert member.stdout is not None and member.stdout.readline() == "ready\n"
        for member in members:
            assert member.stdin is not None
            member.stdin.write("go\n")
            member.stdin.flush()
        outputs: list[str] = [""] * len(members)

        def read(number: int) -> None:
            outputs[number] = members[number].communicate()[0]

        readers = [threading.Thread(target=read, args=(number,)) for number in range(len(members))]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return list(itertools.chain(*map(json.loads, outputs)))
    finally:
        for member in members:
            member.kill()


async def burst(plan: Plan, outcome: Outcome) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    count = min(10_000, (limit - 1000) // CROWDS * CROWDS) if limit > 0 else 10_000
    outcome.did = f"{count:,} requests of 50 characters at once from {CROWDS} addresses, on open and on new connections"
    body = {"prompt": "ROMEO:", "max_tokens": 50, "seed": 1}
    for connects_first, name in ((True, "open connections"), (False, "new connections")):
        # Room for the probe; and time, as connections that are silent for 8 s are closed.
        with ours(max_connections=20_000, header_timeout_seconds=60) as server, Memory(server) as memory:
            with Probe(server.port) as probe:
                rows = await asyncio.to_thread(crowd, server.port, body, count, connects_first, 60.0)
            refused = [row for row in rows if row[4] in (429, 503)]
            accepted = [row for row in rows if row[4] == 200]
            statuses = Counter(f"{row[4]} {row[5]}" for row in rows)
            for row in rows:
                fine = row[4] in (429, 503) or (row[4] == 200 and row[5] == "complete")
                outcome.check(fine, f"{name}: a request ended as {row[4]}, {row[5]}")
            await asyncio.to_thread(server.wait_until_ready)
            reply = await ask(server.port, SHORT)
            outcome.check(reply.ending == "complete", f"{name}: a request afterwards ended as {reply.ending}")
            await check_balance(server, outcome)
            check_quiet(server, outcome)
        figures: dict[str, Figure] = {"statuses": tell(dict(statuses)), "accepted": len(accepted), **memory.figures}
        figures |= spread("refused after sending", (row[2] - row[1] for row in refused if row[2]))
        figures |= spread("accepted ones ended after sending", (row[3] - row[1] for row in accepted))
        figures |= others("/livez of others", probe)
        outcome.figures |= {f"{name}: {label}": value for label, value in figures.items()}
        grown = (memory.most - memory.before) / 1e6
        outcome.check(grown < 400, f"{name}: memory grew by {grown:.0f} MB")
        p99 = quantile((row[2] - row[1] for row in refused if row[2]), 0.99)
        outcome.goals[f"{name}: refusals within 100 ms at the 99th percentile"] = p99 <= 0.1
    if plan.quick:
        return
    patience = 10
    with stock(plan) as theirs, Memory(theirs) as memory:
        with Probe(theirs.port, STOCK_HEALTH) as probe:
            rows = await asyncio.to_thread(crowd, theirs.port, body, count, False, float(patience))
        outcome.stock_did = f"on new connections, for {patience} s"
        statuses = Counter(f"{row[4]} {row[5]}" for row in rows)
        figures = {"statuses": tell(dict(statuses)), **memory.figures} | others("/livez of others", probe)
        figures["accepted"] = sum(row[5] == "complete" for row in rows)
        outcome.stock |= {f"new connections: {label}": value for label, value in figures.items()}


async def leave(plan: Plan, outcome: Outcome) -> None:
    count = 500
    outcome.did = f"{count} clients, all with a running stream, leave at the same moment"
    body = {"prompt": "ROMEO:", "max_tokens": 4000, "stream": True}
    with ours(max_running_requests=512) as server:
        tasks = [
            asyncio.create_task(ask(server.port, body, source=f"127.0.0.{10 + i % 8}", patience=120))
            for i in range(count)
        ]
        await until(lambda: server.metric("chargpt_num_requests_running") == count)
        left_at = time.monotonic()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(max(0.0, left_at + 1 - time.monotonic()))
        busy = server.metric("chargpt_num_requests_running") + server.metric("chargpt_num_requests_waiting")
        slots = server.metric("chargpt_cache_slots_in_use")
        reply = await ask(server.port, SHORT, source=OTHER)
        outcome.check(busy == 0 and slots == 0, f"1 s later {busy:.0f} sequences and {slots:.0f} slots are busy")
        outcome.cases += count - 1
        outcome.figures |= {"busy slots 1 s later": int(slots), "the next request is answered after, s": reply.seconds}
        await check_balance(server, outcome)
        check_quiet(server, outcome)
    if plan.quick:
        return
    with stock(plan) as theirs:
        tasks = [asyncio.create_task(ask(theirs.port, {"prompt": "ROMEO:", "max_tokens": 200})) for i in range(count)]
        await asyncio.sleep(3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        patience = 10
        reply = await ask(theirs.port, SHORT, patience=patience)
        value = reply.seconds if reply.ending == "complete" else f"not within {patience} s"
        outcome.stock_did = "streams of 200 characters"
        outcome.stock["the next request is answered after, s"] = value


BAD: list[dict[str, Any] | bytes] = [
    {"prompt": "\u6f22", "max_tokens": 30},
    {"prompt": [10**6], "max_tokens": 30},
    {"prompt": "A", "max_tokens": 10**9},
    {"prompt": "A", "n": 10**9},
    b'{"prompt": "A", "temperature": NaN}',
    b'{"prompt": "A", ',
    b"[" * 50_000,
    b'{"prompt": "\xff"}',
    {"prompt": "A", "regex": "(" * 400},
    {"prompt": "A", "stop_regex": "(a*)*" * 60},
    {"prompt": "A", "max_tokens": 16_000, "timeout_seconds": 0.02},
    {"prompt": "A", "logit_bias": {"A": 1e308}},
    {"prompt": "A", "logit_bias": {"A": -100}, "allowed_characters": "A", "temperature": 0},
    {"prompt": "A", "repetition_penalty": 1e-300},
    {"prompt": "A" * 200_000},
    {"prompt": "A", "max_tokens": 16_000, "stream": True},  # leaves
]


async def bad(plan: Plan, outcome: Outcome) -> None:
    rounds = plan.count(100, 16)
    outcome.did = f"31 good requests and a bad one (16 kinds) at the same time, {rounds} times"
    good = [{"prompt": "ROMEO:\n", "max_tokens": 40, "seed": i, "stream": i % 2 == 0} for i in range(31)]
    endings = Counter[str]()
    with ours() as server:
        alone = [(await ask(server.port, body)).text for body in good]
        for i in range(rounds):
            wrong = BAD[i % len(BAD)]
            leaves = isinstance(wrong, dict) and wrong.get("stream") is True
            tasks = [asyncio.create_task(ask(server.port, body)) for body in good]
            tasks.insert(i % 32, asyncio.create_task(ask(server.port, wrong, leave_after=500 if leaves else None)))
            replies = await asyncio.gather(*tasks)
            its = replies.pop(i % 32)
            endings[its.failure or f"status {its.status}"] += 1
            fine = its.ending == "left" or (its.status is not None and its.status < 500) or its.status == 504
            outcome.check(fine, f"round {i}: the bad request got status {its.status}, {its.ending}")
            for reply, text in zip(replies, alone, strict=True):
                same = reply.ending == "complete" and reply.text == text
                outcome.check(same, f"round {i}: a good request beside {str(wrong)[:40]}: {reply.ending}")
        await check_balance(server, outcome)
        check_quiet(server, outcome)
    outcome.figures |= {
        "good requests": 31 * rounds,
        "good texts equal to running alone": 31 * rounds - sum("a good request" in it for it in outcome.failures),
        "endings of the bad ones": tell(dict(endings)),
    }
    if plan.quick:
        return
    rounds, failed = 5, 0
    with stock(plan) as theirs:
        for _ in range(rounds):
            body = {"prompt": "ROMEO:\n", "max_tokens": 40}
            tasks = [asyncio.create_task(ask(theirs.port, body, patience=15)) for _ in range(31)]
            tasks.insert(5, asyncio.create_task(ask(theirs.port, {"prompt": "\u6f22", "max_tokens": 40}, patience=15)))
            replies = await asyncio.gather(*tasks)
            replies.pop(5)
            failed += sum(reply.data.count(b'"text"') < 40 for reply in replies)
    outcome.stock_did = f"a character that the model does not know, {rounds} times"
    outcome.stock |= {"good requests": 31 * rounds, "good ones that got their text": 31 * rounds - failed}


# Fairness


@contextlib.asynccontextmanager
async def flood(
    port: int, bodies: Iterator[dict[str, Any]], count: int, counted: Counter[str], sources: list[str] | None = None
) -> AsyncIterator[None]:
    """Other clients keep `count` requests going: when one ends, the next is sent; when one is refused, 0.5 s later."""

    async def one(number: int) -> None:
        source = (sources or ["127.0.0.50"])[number % len(sources or [1])]
        while True:
            reply = await ask(port, next(bodies), source=source, patience=600)
            counted[reply.failure or str(reply.status)] += 1
            if reply.status != 200:
                await asyncio.sleep(0.5)

    tasks = [asyncio.create_task(one(i)) for i in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def arrivals(port: int, rate: float, length: int, counted: Counter[str]) -> AsyncIterator[None]:
    """Poisson arrivals of requests from four addresses, whether or not earlier ones were answered."""
    tasks: set[asyncio.Task[None]] = set()
    chance = random.Random(0)

    async def one(number: int) -> None:
        body = {"prompt": "ROMEO:", "max_tokens": length, "seed": number}
        reply = await ask(port, body, source=f"127.0.0.{60 + number % 4}", patience=600)
        counted[reply.failure or str(reply.status)] += 1

    async def arrive() -> None:
        due = time.monotonic()
        for number in itertools.count():
            due += chance.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            task = asyncio.create_task(one(number))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    arriving = asyncio.create_task(arrive())
    try:
        yield
    finally:
        for task in (arriving, *list(tasks)):
            task.cancel()
        await asyncio.gather(arriving, *tasks, return_exceptions=True)


ASKED = post("/generate", {"prompt": "ROMEO:", "max_tokens": 10, "stream": True}, Connection="close")
ASKED_OF_STOCK = post("/generate", {"prompt": "ROMEO:", "max_tokens": 10}, Connection="close")
INTERVAL = 0.25


def numbered(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (body | {"seed": number} for number in itertools.count())


async def idle(server: RunningServer) -> None:
    await until(lambda: server.metric("chargpt_num_requests_running") == 0)


async def saturation(port: int, length: int, seconds: float) -> float:
    """Requests per second that end with 96 of them going, in a closed loop."""
    counted: Counter[str] = Counter()
    async with flood(port, numbered({"prompt": "ROMEO:", "max_tokens": length}), 96, counted):
        await asyncio.sleep(1)
        counted.clear()
        await asyncio.sleep(seconds)
        return counted["200"] / seconds


async def fairness(plan: Plan, outcome: Outcome) -> None:
    seconds = plan.count(7, 3)
    outcome.did = (
        f"a client asks for 10 characters every {INTERVAL:g} s, for {seconds} s each: alone, and beside another's flood"
    )
    median: dict[str, float] = {}

    async def measure(port: int, name: str, *, source: str = OTHER) -> None:
        with Probe(port, ASKED, source, INTERVAL) as probe:
            await asyncio.sleep(seconds)
        outcome.raw[name] = probe.seconds
        for wait in probe.waits:
            outcome.check(wait.status == 200, f"{name}: an answer with status {wait.status}")
        median[name] = quantile(probe.seconds, 0.5)
        outcome.figures |= spread(f"{name}: first character", probe.seconds, "ms")

    def judge(name: str) -> None:
        ratio, bound = median[name] / median["alone"], 3 * median["alone"] + 0.004
        outcome.figures[f"{name}: p50 ÷ alone"] = ratio
        outcome.goals[f"{name}: p50 at most 3 × alone and a step of 4 ms"] = median[name] <= bound

    async def beside(server: RunningServer, name: str, body: dict[str, Any], count: int, pause: float) -> None:
        counted: Counter[str] = Counter()
        async with flood(server.port, numbered(body), count, counted):
            await asyncio.sleep(pause)
            outcome.figures[f"{name}: running and waiting"] = "{:.0f} and {:.0f}".format(
                server.metric("chargpt_num_requests_running"), server.metric("chargpt_num_requests_waiting")
            )
            await measure(server.port, name)
        if counted:
            outcome.figures[f"{name}: statuses of the flood"] = tell(dict(counted))
        await idle(server)
        judge(name)

    # A queue as long as the flood: with the default of 10 s much of it would be refused.
    with ours(max_queue_seconds=600) as server:
        await measure(server.port, "alone")
        long = {"prompt": "ROMEO:", "max_tokens": 2000}
        await beside(server, "flood of 1,000", long, 1000, 3)
        await beside(server, "flood with priority −1000", long | {"priority": -1000}, 1000, 3)
        giant = {"prompt": "A" * 99_000, "n": 128, "max_tokens": 100}
        await beside(server, "99,000 characters, n 128", giant, 1, 1)
        await check_balance(server, outcome)
        check_quiet(server, outcome)
    with ours() as server:
        counted: Counter[str] = Counter()
        rate = 2 * await saturation(server.port, 300, plan.count(4, 2))
        await idle(server)
        name = "twice saturation"
        async with arrivals(server.port, rate, 300, counted):
            await asyncio.sleep(plan.count(4, 2))
            await measure(server.port, name)
        outcome.figures[f"{name}: requests/s of others"] = rate
        outcome.figures[f"{name}: statuses of others"] = tell(dict(counted))
        await idle(server)
        judge(name)
        await check_balance(server, outcome)
        check_quiet(server, outcome)
    if plan.quick:
        return
    with stock(plan) as theirs:
        outcome.stock_did = "alone, and beside 200 requests of 200 characters"
        with Probe(theirs.port, ASKED_OF_STOCK, OTHER, INTERVAL) as probe:
            await asyncio.sleep(min(seconds, 4))
        outcome.stock |= spread("alone: first character", probe.seconds, "ms")
        alone = quantile(probe.seconds, 0.5)
        async with flood(theirs.port, numbered({"prompt": "ROMEO:", "max_tokens": 200}), 200, counted):
            await asyncio.sleep(1)
            with Probe(theirs.port, ASKED_OF_STOCK, OTHER, INTERVAL) as probe:
                await asyncio.sleep(min(seconds, 6))
        outcome.stock |= spread("flood of 1,000: first character", probe.seconds, "ms")
        if probe.seconds:
            outcome.stock["flood of 1,000: p50 ÷ alone"] = quantile(probe.seconds, 0.5) / alone


# Headers and bodies


def dribble(port: int, count: int, begin: bytes, more: bytes, every: float, seconds: float) -> list[float | None]:
    """`count` connections that send `begin`, then `more` each `every` seconds: when the server closed each."""
    connections = []
    for i in range(count):
        connection = socket.create_connection(("127.0.0.1", port), source_address=(f"127.0.0.{30 + i % 8}", 0))
        connection.sendall(begin)
        connection.setblocking(False)
        connections.append(connection)
    began, due = time.monotonic(), time.monotonic() + every
    closed: list[float | None] = [None] * count
    try:
        while None in closed and time.monotonic() - began < seconds:
            time.sleep(0.05)
            sends = time.monotonic() >= due
            due += every if sends else 0
            for i, connection in enumerate(connections):
                if closed[i] is not None:
                    continue
                try:
                    if sends and more:
                        connection.send(more)
                    while data := connection.recv(1 << 16):  # an answer comes before the end
                        del data
                    closed[i] = time.monotonic() - began
                except BlockingIOError:
                    pass
                except OSError:
                    closed[i] = time.monotonic() - began
    finally:
        for connection in connections:
            connection.close()
    return closed


def send_header(port: int, path: str, size: int, lines: int) -> tuple[int, float]:
    """One request with `size` bytes of headers: (status, 0 if the connection was reset; seconds until its end)."""
    began, data = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.40", 0)) as connection:
        connection.settimeout(60)
        line = b"X-Pad: " + b"x" * (size // lines - 9) + b"\r\n"
        with contextlib.suppress(OSError):
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n".encode())
            for _ in range(lines):
                connection.sendall(line)
            connection.sendall(b"\r\n")
        with contextlib.suppress(OSError):
            while chunk := connection.recv(1 << 16):
                data += chunk
    return int(data[9:12]) if data.startswith(b"HTTP/1.1 ") else 0, time.monotonic() - began


async def hostile_headers(server: Program, health: bytes, count: int, seconds: float) -> dict[str, Figure]:
    """The same for both servers: figures by label."""
    figures: dict[str, Figure] = {}
    for label, size, lines in (("a header of 60 MB", 60_000_000, 1), ("100,000 headers", 2_000_000, 100_000)):
        with Probe(server.port, health) as probe:
            status, took = await asyncio.to_thread(send_header, server.port, health.split()[1].decode(), size, lines)
        figures |= {f"{label}: status": status or "connection reset", f"{label}: ended after, s": took}
        figures[f"{label}: longest /livez of others, ms"] = max(probe.seconds, default=float("nan")) * 1e3
    with Probe(server.port, health) as probe:
        slow = b"GET /livez HTTP/1.1\r\nHost: a\r\nX-Slow: "
        closed = await asyncio.gather(
            asyncio.to_thread(dribble, server.port, count, slow, b"x", 1.0, seconds),
            asyncio.to_thread(dribble, server.port, count, b"", b"", 1.0, seconds),
        )
    for label, moments in zip((f"{count} slow headers", f"{count} silent connections"), closed, strict=True):
        figures[f"{label}: closed within 10 s"] = sum(at is not None and at <= 10 for at in moments)
        figures |= {f"{label}: last closed after, s": max((at for at in moments if at is not None), default="never")}
    figures["slow and silent: longest /livez of others, ms"] = max(probe.seconds, default=float("nan")) * 1e3
    return figures


async def headers(plan: Plan, outcome: Outcome) -> None:
    count = 200
    outcome.did = "a header of 60 MB, 100,000 headers, 200 headers at a byte per second, 200 silent connections"
    with ours() as server:
        outcome.figures = await hostile_headers(server, LIVEZ, count, 14)
        for label in ("a header of 60 MB", "100,000 headers"):
            status = outcome.figures[f"{label}: status"]
            outcome.check(status in (431, "connection reset"), f"{label}: status {status}")
        for label in (f"{count} slow headers", f"{count} silent connections"):
            closed = outcome.figures[f"{label}: closed within 10 s"]
            outcome.cases += count
            outcome.check(closed == count, f"{label}: {closed} closed within 10 s")
        for label, value in outcome.figures.items():
            if label.endswith("longest /livez of others, ms"):
                outcome.check(float(value) < 1000, f"{label} {float(value):.0f}")
        check_quiet(server, outcome)
    if plan.quick:
        return
    with stock(plan) as theirs:
        outcome.stock = await hostile_headers(theirs, STOCK_HEALTH, count, 10.5)


async def bodies(plan: Plan, outcome: Outcome) -> None:
    outcome.did = (
        "a body of 20 prompts of 1,000,000 invalid ids each, three times (--max-body-bytes 67108864); 100 bodies at a "
        "byte per second (--body-timeout-seconds 5)"
    )
    ids = b"[" + b"-1," * 999_999 + b"-1]"
    content = b'{"max_tokens": 1, "prompt": [' + b",".join([ids] * 20) + b"]}"
    slow = post("/generate", b"", Content_Length=1000)

    async def send(server: Program, health: bytes, patience: float) -> tuple[list[Reply], Probe]:
        with Probe(server.port, health) as probe:
            replies = [await ask(server.port, content, source="127.0.0.40", patience=patience) for _ in range(3)]
        return replies, probe

    with ours(max_body_bytes=64 << 20, body_timeout_seconds=5) as server:
        with Memory(server) as memory:
            replies, probe = await send(server, LIVEZ, 60)
        for reply in replies:
            outcome.check(reply.status == 400, f"invalid ids: status {reply.status}, {reply.ending}")
        outcome.figures |= {"invalid ids: statuses": tell(dict(Counter(str(reply.status) for reply in replies)))}
        outcome.figures |= {"invalid ids: refused after, p50, s": quantile([reply.seconds for reply in replies], 0.5)}
        outcome.figures |= others("invalid ids: /livez of others", probe) | memory.figures
        outcome.check(max(probe.seconds) < 1, f"invalid ids: /livez took {max(probe.seconds):.2f} s")
        with Probe(server.port) as probe:
            closed = await asyncio.to_thread(dribble, server.port, 100, slow, b" ", 1.0, 12)
        for at in closed:
            outcome.check(at is not None and at < 10, f"a slow body was closed after {at} s")
        outcome.figures["slow bodies: closed within 10 s"] = sum(at is not None for at in closed)
        outcome.figures |= others("slow bodies: /livez of others", probe)
        await check_balance(server, outcome)
        check_quiet(server, outcome)
    if plan.quick:
        return
    with stock(plan) as theirs:
        with Memory(theirs) as memory:
            replies, probe = await send(theirs, STOCK_HEALTH, 20)
        statuses = Counter(reply.failure or str(reply.status) for reply in replies)
        outcome.stock |= {"invalid ids: statuses": tell(dict(statuses))}
        outcome.stock |= {"invalid ids: refused after, p50, s": quantile([reply.seconds for reply in replies], 0.5)}
        outcome.stock |= others("invalid ids: /livez of others", probe) | memory.figures
