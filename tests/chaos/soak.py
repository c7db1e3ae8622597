"""Mixed traffic for a long time, with faults: nothing may grow, and every accepted sequence ends once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from statistics import linear_regression
from typing import Any

from tests.chaos.case import MB, Outcome, Plan, ours, sampled, spread, tell
from tests.chaos.client import ask
from tests.chaos.clients import BAD, bad_options
from tests.load.mix import mixed, problem
from tests.toolbox.figures import quantile
from tests.toolbox.http import post
from tests.toolbox.load import Reply

USERS, PAUSE_SECONDS = 12, 0.2  # each waits twice as long at most before it asks again
BAD_SHARE, SLOW_SHARE = 0.05, 0.02
SAMPLE_SECONDS = 2.0
DOCUMENTED = frozenset((503, 504))  # of 5xx
RESTART_SECONDS = 5.0  # after a kill, in which new requests may get 503
MAX_GROWTH_MB = 30.0  # of one process over the second half


def seconds(plan: Plan) -> float:
    return plan.count(1200, 60)


async def read_slowly(port: int, body: dict[str, Any], chance: random.Random) -> None:
    """Read a long stream a few bytes at a time, or not at all, until its deadline."""
    body = body | {"max_tokens": 4000, "stream": True, "timeout_seconds": 5, "logprobs": 5}
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(8):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024, local_addr=("127.0.0.77", 0))
            try:
                writer.write(post("/generate", body, Connection="close"))
                reads = chance.random() < 0.5
                while not reads or await reader.read(512):
                    await asyncio.sleep(0.2)
            finally:
                writer.transport.abort()


async def soak(plan: Plan, outcome: Outcome) -> None:
    duration = seconds(plan)
    every = plan.count(120, 15)
    outcome.did = (
        f"{USERS} clients send mixed traffic for {duration / 60:g} minutes. Some leave, read slowly or send nonsense. "
        f"In the first half, the inference process is killed every {every} s. "
        "The memory figures are from the second half"
    )
    kinds, wrong, statuses = Counter[str](), Counter[str](), Counter[str]()
    first: list[float] = []
    killed_at: list[float] = []
    chance = random.Random(0)
    async with ours(outcome) as server:
        vocabulary = server.client.get(f"{server.url}/info").json()["model"]["vocabulary"]
        numbers = itertools.count()
        began = time.monotonic()
        ends_at, middle = began + duration, began + duration / 2

        async def user(number: int) -> None:
            source = f"127.0.0.{10 + number}"
            while time.monotonic() < ends_at:
                kind = chance.random()
                if kind < SLOW_SHARE:
                    kinds["slow reader"] += 1
                    await read_slowly(server.port, {"prompt": "A"}, chance)
                elif kind < SLOW_SHARE + BAD_SHARE:
                    kinds["nonsense"] += 1
                    body = chance.choice(BAD)
                    note(await ask(server.port, body, source=source, **bad_options(body)), "nonsense")
                else:
                    asked = mixed(next(numbers), vocabulary)
                    leave_after = None if asked.leave_after is None else 300 + asked.leave_after * 20
                    reply = await ask(server.port, asked.body, path=asked.path, source=source, leave_after=leave_after)
                    has_left, name = reply.failure == "left", f"{asked.path} {asked.kind}"
                    kinds["left" if has_left else asked.kind] += 1
                    note(reply, name)
                    wrong_with = "" if has_left else problem(asked, reply.status or 0, reply.body, vocabulary)
                    fine = not wrong_with and (not reply.failure or has_left) or reply.status == 503
                    outcome.check(fine, f"{name}: {wrong_with}, {reply.ending}")
                    if asked.kind == "stream" and reply.first_at is not None:
                        first.append(reply.first_at - reply.began_at)
                await asyncio.sleep(chance.random() * 2 * PAUSE_SECONDS)

        def note(reply: Reply, name: str) -> None:
            statuses[reply.failure or str(reply.status)] += 1
            if reply.status == 503 and all(abs(reply.began_at - at) > RESTART_SECONDS for at in killed_at):
                wrong[f"{name}: status 503 long after a kill"] += 1
            if reply.failure in ("hang", "cut"):
                wrong[f"{name}: {reply.failure}"] += 1
            elif reply.status is not None and reply.status >= 500 and reply.status not in DOCUMENTED:
                wrong[f"{name}: status {reply.status}"] += 1

        async def kill() -> None:
            while time.monotonic() + every < middle:
                await asyncio.sleep(every)
                server.worker().kill()
                killed_at.append(time.monotonic())

        async with sampled(server, SAMPLE_SECONDS) as samples:
            killing = asyncio.create_task(kill())
            await asyncio.gather(*(user(number) for number in range(USERS)))
            killing.cancel()
        restarts = int(server.metric("chargpt_worker_restarts_total"))
    for what, count in wrong.items():
        outcome.check(False, f"{count} × {what}")
    outcome.figures |= {
        "requests": sum(kinds.values()), "kinds": tell(kinds), "statuses": tell(statuses),
        "kills of the inference process": restarts,
        "5xx other than 503 and 504": sum(count for name, count in wrong.items() if "status 5" in name),
    }  # fmt: skip
    outcome.figures |= spread("first character of streams", first, "ms")
    for role, pid in dict.fromkeys(each for _, found in samples for each in found):
        rows = [(at, *found[role, pid]) for at, found in samples if (role, pid) in found]
        later = [row for row in rows if row[0] > middle + 5]
        if len(later) < 5:
            continue
        mb = [(at, rss / MB) for at, rss, _, _ in later]
        slope, hours = 3600 * linear_regression(*zip(*mb, strict=True)).slope, (later[-1][0] - later[0][0]) / 3600
        outcome.figures[f"{role}: memory, MB"] = round(mb[-1][1], 1)
        outcome.figures[f"{role}: slope of memory, MB per hour"] = round(slope, 2)
        fifth = len(later) // 5
        for name, place in (("open files", 2), ("threads", 3)):
            early, late = (quantile((row[place] for row in part), 0.5) for part in (later[:fifth], later[-fifth:]))
            outcome.figures[f"{role}: {name}"] = f"{early} → {late}"
            outcome.check(late <= early + 8, f"{role}: {name} grew from {early} to {late}")
        growth = slope * hours
        outcome.check(growth < MAX_GROWTH_MB, f"{role}: memory grew by {growth:.0f} MB over the second half")
        outcome.raw[f"{role} {len(outcome.raw)}"] = [[round(at - began, 1), rss, fds, n] for at, rss, fds, n in rows]
