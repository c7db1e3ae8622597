"""Clients that come all at once, leave, send nonsense, or flood."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import resource
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.chaos import case
from tests.chaos.case import SHORT, STOCK_HEALTH, Figure, Outcome, Plan, asking, compared, ours, tell
from tests.chaos.client import CROWDS, LIVEZ, OTHER, Probe, ask, crowd
from tests.helpers import RunningServer
from tests.http.programs import changed
from tests.toolbox.figures import quantile
from tests.toolbox.http import post
from tests.toolbox.load import Apart, Due, Reply


async def burst(plan: Plan, outcome: Outcome) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    count = min(10_000, (limit - 1000) // CROWDS * CROWDS) if limit > 0 else 10_000
    outcome.did = f"{CROWDS} addresses send {count:,} requests of 50 characters at once, on open and on new connections"
    request = post("/generate", {"prompt": "ROMEO:", "max_tokens": 50, "seed": 1}, Connection="close")

    async def come(port: int, probed: bytes, fresh: bool, patience: float) -> tuple[list[Reply], dict[str, Figure]]:
        """The crowd's replies, and figures of both servers."""
        with Probe(port, probed) as probe:
            replies = await asyncio.to_thread(crowd, port, request, count, fresh=fresh, patience=patience)
        statuses = tell(Counter(f"{reply.status or None} {reply.ending}" for reply in replies))
        return replies, {"statuses": statuses} | case.others("/livez of others", probe)

    for fresh, name in ((False, "open connections"), (True, "new connections")):
        # Room for the probe; and time, as connections that are silent for 8 s are closed.
        patient = changed({"service.http.connection.guard.HEADER_TIMEOUT_SECONDS": 60.0})
        async with ours(outcome, program=patient, max_connections=20_000, max_connections_per_address=0) as server:
            async with case.sampled(server, 0.05) as samples:
                replies, figures = await come(server.port, LIVEZ, fresh, 60.0)
            for each in replies:
                fine = each.ending == "complete" or each.status in (429, 503)
                outcome.check(fine, f"{name}: a request ended as {each.status}, {each.ending}")
            await asyncio.to_thread(server.wait_until_ready)
            reply = await ask(server.port, SHORT)
            outcome.check(reply.ending == "complete", f"{name}: a request afterwards ended as {reply.ending}")
        waits = [each.first_at - each.sent_at for each in replies if each.status in (429, 503) and each.first_at]
        accepted = [each.ended_at - each.sent_at for each in replies if each.status == 200 and each.ended_at]
        used = case.memory(samples)
        figures |= {"accepted": len(accepted), **used}
        figures |= case.spread("refused after sending", waits)
        figures |= case.spread("accepted ones ended after sending", accepted)
        outcome.figures |= {f"{name}: {label}": value for label, value in figures.items()}
        before, most = used.values()
        outcome.check(most - before < 400, f"{name}: memory grew from {before} to {most} MB")
    if plan.quick:
        return
    with case.stock(plan) as theirs:
        async with case.sampled(theirs, 0.05) as samples:
            replies, figures = await come(theirs.port, STOCK_HEALTH, True, 10.0)
    outcome.stock_did = "only new connections, for 10 s"
    figures |= {"accepted": sum(reply.ending == "complete" for reply in replies), **case.memory(samples)}
    outcome.stock |= {f"new connections: {label}": value for label, value in figures.items()}


async def all_leave(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def leave(plan: Plan, outcome: Outcome) -> None:
    count = 500
    outcome.did = f"{count} clients with a running stream each leave at the same moment"
    body = {"prompt": "ROMEO:", "max_tokens": 4000, "stream": True}
    async with ours(outcome, max_running_requests=512, max_connections_per_address=0) as server:
        tasks = asking(server, [body] * count, sources=8, patience=120)
        await case.until(lambda: server.metric("chargpt_num_requests_running") == count)
        left_at = time.monotonic()
        await all_leave(tasks)
        await asyncio.sleep(max(0.0, left_at + 1 - time.monotonic()))
        busy = server.metric("chargpt_num_requests_running") + server.metric("chargpt_num_requests_waiting")
        slots = server.metric("chargpt_cache_slots_in_use")
        reply = await ask(server.port, SHORT, source=OTHER)
        outcome.check(busy == 0 and slots == 0, f"1 s later {busy:.0f} sequences and {slots:.0f} slots are busy")
        outcome.cases += count - 1
        outcome.figures |= {"busy slots 1 s later": int(slots), "the next request is answered after, s": reply.seconds}
    if plan.quick:
        return
    with case.stock(plan) as theirs:
        tasks = asking(theirs, [{"prompt": "ROMEO:", "max_tokens": 200}] * count)
        await asyncio.sleep(3)
        await all_leave(tasks)
        reply = await ask(theirs.port, SHORT, patience=10)
        outcome.stock_did = "streams of 200 characters"
        value = reply.seconds if reply.ending == "complete" else "not within 10 s"
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


def bad_options(body: dict[str, Any] | bytes) -> dict[str, int]:
    return {"leave_after": 500} if isinstance(body, dict) and body.get("stream") else {}


async def bad(plan: Plan, outcome: Outcome) -> None:
    rounds = plan.count(100, 16)
    outcome.did = f"31 good requests and 1 bad one (of 16 kinds) run at the same time, {rounds} times"
    good = [{"prompt": "ROMEO:\n", "max_tokens": 40, "seed": i, "stream": i % 2 == 0} for i in range(31)]
    endings, equal = Counter[str](), 0
    async with ours(outcome) as server:
        alone = await case.texts(server, good)
        for i in range(rounds):
            wrong, at = BAD[i % len(BAD)], i % 32
            tasks = asking(server, good)
            tasks[at:at] = asking(server, [wrong], **bad_options(wrong))
            replies = await asyncio.gather(*tasks)
            its = replies.pop(at)
            endings[its.failure or f"status {its.status}"] += 1
            fine = its.ending == "left" or (its.status is not None and its.status < 500) or its.status == 504
            outcome.check(fine, f"round {i}: the bad request got status {its.status}, {its.ending}")
            for reply, text in zip(replies, alone, strict=True):
                same = compared(reply, text) == "the same text"
                equal += same
                outcome.check(same, f"round {i}: a good request beside {str(wrong)[:40]}: {reply.ending}")
    outcome.figures |= {"good requests": 31 * rounds, "good texts equal to running alone": equal}
    outcome.figures["endings of the bad ones"] = tell(endings)
    if plan.quick:
        return
    rounds, given = 5, 0
    with case.stock(plan) as theirs:
        for _ in range(rounds):
            tasks = asking(theirs, [{"prompt": "ROMEO:\n", "max_tokens": 40}] * 31, patience=15)
            tasks[5:5] = asking(theirs, [{"prompt": "\u6f22", "max_tokens": 40}], patience=15)
            replies = await asyncio.gather(*tasks)
            given += sum(reply.body.count(b'"text"') >= 40 for reply in (*replies[:5], *replies[6:]))
    outcome.stock_did = f"the bad request has an unknown character, {rounds} times"
    outcome.stock |= {"good requests": 31 * rounds, "good ones that got their text": given}


# Fairness


def numbered(body: dict[str, Any], rate: float = 0.0, chance_seed: int = 0) -> Iterator[Due]:
    """Requests with seeds of their own, at once or as Poisson arrivals."""
    chance, at = random.Random(chance_seed), 0.0
    for number in itertools.count():
        at += chance.expovariate(rate) if rate else 0.0
        yield at, post("/generate", body | {"seed": number}, Connection="close"), number


def flood(port: int, body: dict[str, Any], count: int) -> Apart:
    """Another client keeps `count` requests going: the next is sent when one ends."""
    return Apart(port, partial(numbered, body), connections=count, address="127.0.0.50", fresh=True, accepts=None)


def arrivals(port: int, body: dict[str, Any], rate: float) -> list[Apart]:
    """Poisson arrivals of requests from four addresses, whether or not earlier ones were answered."""
    options: dict[str, Any] = {"connections": 1000, "fresh": True, "accepts": None}
    works = [partial(numbered, body, rate / 4, number) for number in range(4)]
    return [Apart(port, work, address=f"127.0.0.{60 + number}", **options) for number, work in enumerate(works)]


def statuses(*clients: Apart) -> str:
    return tell(Counter(str(reply.status) for each in clients for reply in each.outcome.ended))


STOCK_EVENT = b'{"text"'
ASKED = post("/generate", {"prompt": "ROMEO:", "max_tokens": 10, "stream": True}, Connection="close")
ASKED_OF_STOCK = post("/generate", {"prompt": "ROMEO:", "max_tokens": 10}, Connection="close")
INTERVAL = 0.25


async def first_characters(port: int, request: bytes, seconds: float, **options: Any) -> Probe:
    with Probe(port, request, OTHER, INTERVAL, **options) as probe:
        await asyncio.sleep(seconds)
    return probe


async def saturation(port: int, body: dict[str, Any], seconds: float) -> float:
    """Requests per second that end with 96 of them going, in a closed loop, after its first second."""
    with flood(port, body, 96) as crowd:
        await asyncio.sleep(1 + seconds)
    since = crowd.outcome.started_at + 1
    return sum(reply.ending == "complete" and reply.ended_at > since for reply in crowd.outcome.ended) / seconds


async def fairness(plan: Plan, outcome: Outcome) -> None:
    seconds = plan.count(7, 3)
    outcome.did = (
        f"a client asks for 10 characters every {INTERVAL:g} s for {seconds} s, alone and during each flood by another "
        "client"
    )
    median: dict[str, float] = {}

    async def measure(server: RunningServer, name: str) -> None:
        probe = await first_characters(server.port, ASKED, seconds)
        outcome.raw[name] = probe.seconds
        for reply in probe.outcome.replies:
            outcome.check(reply.status == 200, f"{name}: an answer with status {reply.status}")
        median[name] = quantile(probe.seconds, 0.5)
        outcome.figures |= case.spread(f"{name}: first character", probe.seconds, "ms")

    async def judge(server: RunningServer, name: str) -> None:
        await case.until(lambda: server.metric("chargpt_num_requests_running") == 0)
        outcome.figures[f"{name}: p50 ÷ alone"] = median[name] / median["alone"]
        met = median[name] <= 3 * median["alone"] + 0.004
        outcome.goals[f"{name}: p50 at most 3 × alone and a step of 4 ms"] = met

    long = {"prompt": "ROMEO:", "max_tokens": 2000}
    # A queue as long as the flood: with the default of 10 s much of it would be refused.
    async with ours(outcome, max_queue_seconds=600, max_connections_per_address=0) as server:
        await measure(server, "alone")
        for name, body, count, pause in (
            ("flood of 1,000", long, 1000, 3),
            ("flood with priority −1000", long | {"priority": -1000}, 1000, 3),
            ("99,000 characters, n 128", {"prompt": "A" * 99_000, "n": 128, "max_tokens": 100}, 1, 1),
        ):
            with flood(server.port, body, count) as client:
                await asyncio.sleep(pause)
                gauges = (server.metric(f"chargpt_num_requests_{each}") for each in ("running", "waiting"))
                outcome.figures[f"{name}: running and waiting"] = "{:.0f} and {:.0f}".format(*gauges)
                await measure(server, name)
            outcome.figures[f"{name}: statuses of the flood"] = statuses(client) or "–"
            await judge(server, name)
    async with ours(outcome, max_connections_per_address=0) as server:
        name, body = "twice saturation", {"prompt": "ROMEO:", "max_tokens": 300}
        rate = 2 * await saturation(server.port, body, plan.count(4, 2))
        await case.until(lambda: server.metric("chargpt_num_requests_running") == 0)
        with contextlib.ExitStack() as stack:
            others = [stack.enter_context(each) for each in arrivals(server.port, body, rate)]
            await asyncio.sleep(plan.count(4, 2))
            await measure(server, name)
        outcome.figures |= {f"{name}: requests/s of others": rate, f"{name}: statuses of others": statuses(*others)}
        await judge(server, name)
    if plan.quick:
        return
    with case.stock(plan) as theirs:
        outcome.stock_did = "alone, and during a flood of 200 requests of 200 characters"
        alone = (await first_characters(theirs.port, ASKED_OF_STOCK, 4, marker=STOCK_EVENT)).seconds
        outcome.stock |= case.spread("alone: first character", alone, "ms")
        with flood(theirs.port, {"prompt": "ROMEO:", "max_tokens": 200}, 200):
            await asyncio.sleep(1)
            beside = (await first_characters(theirs.port, ASKED_OF_STOCK, 6, marker=STOCK_EVENT)).seconds
        outcome.stock |= case.spread("flood of 1,000: first character", beside, "ms")
        if beside:
            outcome.stock["flood of 1,000: p50 ÷ alone"] = quantile(beside, 0.5) / quantile(alone, 0.5)
