"""Processes that die, hang, cannot start, or run out of disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from service.settings import BUNDLED
from tests.chaos.case import (
    Outcome,
    Plan,
    check_balance,
    check_quiet,
    left_of,
    listeners,
    others,
    ours,
    settled,
    spread,
    stock,
    until,
    worker,
)
from tests.chaos.client import Probe, Reply, ask
from tests.toolbox.disk import SmallDisk
from tests.toolbox.http import post, sent
from tests.toolbox.launch import Program

OTHER = "127.0.0.2"  # another client than the one whose requests run
STOCK_HANG_SECONDS = 10.0
SHORT = {"prompt": "ROMEO:", "max_tokens": 5, "seed": 1}
STOCK_HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


def load(count: int, length: int) -> list[dict[str, Any]]:
    """Bodies of `count` requests, of which three in four are streamed."""
    return [
        {"prompt": "ROMEO:\n", "max_tokens": length, "seed": i, "stream": i % 4 != 0, "temperature": 1.0}
        for i in range(count)
    ]


async def texts(server: Program, bodies: list[dict[str, Any]]) -> list[str]:
    return [reply.text for reply in [await ask(server.port, body) for body in bodies]]


def tally(replies: list[Reply]) -> dict[str, int]:
    return dict(Counter(reply.ending for reply in replies))


def tell(counted: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counted.items()))


async def stock_load(server: Program, count: int = 16, length: int = 150) -> list[asyncio.Task[Reply]]:
    """Requests that run."""
    body = {"prompt": "ROMEO:\n", "max_tokens": length}
    tasks = [asyncio.create_task(ask(server.port, body, patience=STOCK_HANG_SECONDS)) for _ in range(count)]
    await asyncio.sleep(1)
    return tasks


async def stock_kill(plan: Plan, outcome: Outcome, find: Any) -> None:
    """Kill one process of stock LitServe under load."""
    if plan.quick:
        return
    with stock(plan) as server:
        running = await stock_load(server)
        with Probe(server.port, STOCK_HEALTH) as probe:
            find(server).kill()
            after = await ask(server.port, SHORT, source=OTHER, patience=STOCK_HANG_SECONDS)
            replies = await asyncio.gather(*running)
        outcome.stock_did = "once"
        outcome.stock |= {"requests in flight": tell(tally(list(replies)))}
        answered = after.ended_at - after.began_at
        value = answered if after.ending == "complete" else f"never ({after.ending} after {answered:.1f} s)"
        outcome.stock |= {"next request answered after, p50, s": value} | others("/livez of others", probe)
        outcome.stock["server afterwards"] = "runs" if server.process.poll() is None else "has ended"


async def keep_asking(server: Program) -> list[Reply]:
    """Ten requests over a second, whether or not they are answered."""
    asked = []
    for _ in range(10):
        await asyncio.sleep(0.1)
        asked.append(asyncio.create_task(ask(server.port, SHORT, source=OTHER)))
    return await asyncio.gather(*asked)


async def kill_worker(plan: Plan, outcome: Outcome) -> None:
    kills, bodies = plan.count(20, 4), load(16, 1000)
    outcome.did = f"kill -9 of the inference process, {kills} times, each under 12 streams and 4 whole answers"
    recovery, counted, meanwhile = [], Counter[str](), Counter[str]()
    settings = {"max_restarts": 10_000}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ours(**settings)) for _ in range(3)]
        expected = await texts(servers[0], bodies)
        with contextlib.ExitStack() as probing:
            probes = [probing.enter_context(Probe(server.port)) for server in servers]
            for i in range(kills):
                server = servers[i % 3]  # the others settle meanwhile
                process = server.worker()
                await settled(process)
                running = [asyncio.create_task(ask(server.port, body)) for body in bodies]
                await asyncio.sleep(0.05 + 0.4 * i / kills)
                killed_at = time.monotonic()
                process.kill()
                later = asyncio.create_task(keep_asking(server))
                after = await ask(server.port, SHORT, source=OTHER)
                outcome.check(after.ending == "complete", f"kill {i}: the next request ended as {after.ending}")
                recovery.append(after.ended_at - killed_at)
                for reply in await later:
                    meanwhile[f"status {reply.status}"] += 1
                    refused = reply.status == 503 and b"\r\nretry-after: " in reply.data.lower()
                    outcome.check(reply.status == 200 or refused, f"kill {i}: a later request got {reply.status}")
                for reply, text in zip(await asyncio.gather(*running), expected, strict=True):
                    ending = "the same text" if reply.ending == "complete" and reply.text == text else reply.ending
                    counted[ending] += 1
                    outcome.check(ending in ("the same text", "error"), f"kill {i}: a request ended as {ending}")
        probe = probes[0]
        probe.waits += probes[1].waits + probes[2].waits
        for server in servers:
            await check_balance(server, outcome)
            check_quiet(server, outcome)
            outcome.check(await asyncio.to_thread(server.stop) == 0, "exit status after SIGTERM")
    outcome.raw |= {"recovery_seconds": recovery}
    outcome.figures |= {"requests in flight": tell(counted), "requests of the next second": tell(meanwhile)}
    outcome.figures |= spread("next request answered after", recovery)
    outcome.figures |= others("/livez of others", probe)
    await stock_kill(plan, outcome, worker)


async def kill_http(plan: Plan, outcome: Outcome) -> None:
    kills, bodies = plan.count(20, 4), load(8, 2500)
    outcome.did = f"kill -9 of an HTTP process, {kills} times each with one and with two of them, under 8 requests"
    recovery: dict[int, list[float]] = {1: [], 2: []}
    counted: dict[int, Counter[str]] = {1: Counter(), 2: Counter()}
    settings = {"max_restarts": 10_000}
    with ours(**settings) as one, ours(**settings) as again, ours(http_processes=2, **settings) as two:
        expected = await texts(one, bodies)
        turns = [(one, 1, 0), (two, 2, 0), (again, 1, 0), (two, 2, 1)]
        for i in range(2 * kills):
            server, processes, number = turns[i % 4]
            # The oldest: the one that was not killed last time.
            process = sorted(listeners(server), key=psutil.Process.create_time)[0]
            await settled(process)
            running = [asyncio.create_task(ask(server.port, body)) for body in bodies]
            await asyncio.sleep(0.05 + 0.2 * i / kills)
            killed_at = time.monotonic()
            process.kill()
            after = await ask(server.port, SHORT, source=OTHER)
            outcome.check(after.ending == "complete", f"kill {i}: the next request ended as {after.ending}")
            recovery[processes].append(after.ended_at - killed_at)
            for reply, text in zip(await asyncio.gather(*running), expected, strict=True):
                ending = "the same text" if reply.ending == "complete" and reply.text == text else reply.ending
                counted[processes][ending] += 1
                outcome.check(ending in ("the same text", "error", "cut"), f"kill {i}: a request ended as {ending}")
        for server in (one, again, two):
            await check_balance(server, outcome)
            await asyncio.sleep(0.5)  # the other process writes the end of the last scrape within 50 ms
            in_progress = server.metric("chargpt_http_requests_in_progress")
            outcome.check(in_progress == 1, f"http_requests_in_progress is {in_progress:.0f} during its own scrape")
            check_quiet(server, outcome)
            outcome.check(await asyncio.to_thread(server.stop) == 0, "exit status after SIGTERM")
    outcome.raw |= {"recovery_seconds": recovery}
    for processes, name in ((1, "one process"), (2, "two processes")):
        outcome.figures |= {f"{name}: requests in flight": tell(counted[processes])}
        outcome.figures |= spread(f"{name}: next request answered after", recovery[processes])
    await stock_kill(plan, outcome, lambda server: listeners(server)[0])
    prefix = "one process: "
    outcome.stock = {
        label if label.startswith("server") else prefix + label: value
        for label, value in outcome.stock.items()
        if "/livez" not in label
    }


async def kill_main(plan: Plan, outcome: Outcome) -> None:
    kills = plan.count(5, 2)
    outcome.did = f"kill -9 of the main process under 16 requests, {kills} times"
    gone, counted = [], Counter[str]()
    for i in range(kills):
        with ours() as server:
            running = [asyncio.create_task(ask(server.port, body)) for body in load(16, 8000)]
            await asyncio.sleep(0.3)
            killed_at = time.monotonic()
            server.process.kill()
            server.process.wait()
            with contextlib.suppress(AssertionError):
                await until(lambda: not left_of(server.process.pid), 10)
            gone.append(time.monotonic() - killed_at)
            orphans = left_of(server.process.pid)
            outcome.check(not orphans, f"kill {i}: {len(orphans)} orphans")
            replies = await asyncio.gather(*running)
            counted.update(tally(list(replies)))
            outcome.check(all(reply.ending != "hang" for reply in replies), f"kill {i}: requests hang")
    outcome.figures |= {"orphans after 10 s": 0 if not outcome.failures else "see failures"}
    outcome.figures |= spread("all processes have ended after", gone) | {"requests in flight": tell(counted)}
    if plan.quick:
        return
    with stock(plan) as theirs:
        running = await stock_load(theirs)
        theirs.process.kill()
        theirs.process.wait()
        replies = await asyncio.gather(*running)
        with contextlib.suppress(AssertionError):
            await until(lambda: not left_of(theirs.process.pid), max(0.0, 10 - STOCK_HANG_SECONDS))
        outcome.stock_did = "once"
        outcome.stock |= {"orphans after 10 s": len(left_of(theirs.process.pid))}
        outcome.stock["requests in flight"] = tell(tally(list(replies)))


async def hang(plan: Plan, outcome: Outcome) -> None:
    outcome.did = (
        "SIGSTOP of the inference process, and of the HTTP process, with --hang-seconds at its default, 10; SIGSTOP of "
        "the whole process group for 20 s"
    )
    expected: list[str] = []

    async def of_one(kind: str) -> None:
        with ours() as server:
            expected[:] = await texts(server, [SHORT])
            hung = server.worker() if kind == "inference process" else listeners(server)[0]
            stopped_at = time.monotonic()
            hung.suspend()
            after = await ask(server.port, SHORT, source=OTHER)
            outcome.check(after.ending == "complete" and after.text == expected[0], f"{kind}: next is {after.ending}")
            outcome.figures[f"{kind}: next request answered after, s"] = after.ended_at - stopped_at
            with contextlib.suppress(AssertionError):
                await until(lambda: not hung.is_running() or hung.status() == psutil.STATUS_ZOMBIE, 30)
            is_gone = not hung.is_running() or hung.status() == psutil.STATUS_ZOMBIE
            outcome.check(is_gone, f"{kind}: it was not killed")
            outcome.check(await asyncio.to_thread(server.stop) == 0, f"{kind}: exit status after SIGTERM")
            check_quiet(server, outcome)

    async def of_group(seconds: float) -> None:
        with ours() as server:
            bodies = load(8, 2000)
            undisturbed = await texts(server, bodies)
            pids = {process.pid for process in server.processes()}
            running = [asyncio.create_task(ask(server.port, body)) for body in bodies]
            await asyncio.sleep(0.1)
            os.killpg(server.process.pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.killpg(server.process.pid, signal.SIGCONT)
            for reply, text in zip(await asyncio.gather(*running), undisturbed, strict=True):
                same = reply.ending == "complete" and reply.text == text
                outcome.check(same, f"after SIGCONT of all processes a stream ended as {reply.ending}")
            await asyncio.sleep(2)
            now = {process.pid for process in server.processes()}
            outcome.check(now == pids, "processes were replaced after SIGCONT of all of them")
            outcome.figures["processes killed wrongly after SIGCONT of all"] = len(pids - now)
            outcome.check(await asyncio.to_thread(server.stop) == 0, "exit status after SIGTERM")

    async def of_stock() -> None:
        if plan.quick:
            return
        with stock(plan) as server:
            worker(server).suspend()
            with Probe(server.port, STOCK_HEALTH, interval=1) as probe:
                after = await ask(server.port, SHORT, patience=20)
            value = (
                after.seconds if after.ending == "complete" else f"never ({after.ending} after {after.seconds:.0f} s)"
            )
            outcome.stock_did = "its inference process alone"
            outcome.stock["inference process: next request answered after, s"] = value
            outcome.stock["/health meanwhile"] = tell(dict(Counter(str(wait.status) for wait in probe.waits)))

    await asyncio.gather(of_one("inference process"), of_one("HTTP process"), of_group(20))
    await of_stock()  # whose start would hold up the others' requests beyond the time limit of headers


async def sigterm(plan: Plan, outcome: Outcome) -> None:
    outcome.did = "SIGTERM during 100 streams; during 10 streams and one reader that has stopped, --drain-seconds 5"
    with ours(max_running_requests=100) as server:
        bodies = [body | {"stream": True} for body in load(100, 1000)]
        running = [
            asyncio.create_task(ask(server.port, body, source=f"127.0.0.{10 + i % 4}")) for i, body in enumerate(bodies)
        ]
        await until(lambda: server.metric("chargpt_num_requests_running") == 100)
        began = time.monotonic()
        server.process.terminate()
        await asyncio.sleep(0.2)
        new = await asyncio.gather(*(ask(server.port, SHORT, source=OTHER) for _ in range(20)))
        refused = sum(reply.status == 503 for reply in new)
        outcome.check(refused == 20, f"of 20 new requests {refused} got 503: {tell(tally(list(new)))}")
        replies = await asyncio.gather(*running)
        for reply in replies:
            outcome.check(reply.ending == "complete" and len(reply.text) == 1000, f"a stream ended as {reply.ending}")
        status = await asyncio.to_thread(server.process.wait, 30)
        outcome.figures |= {
            "streams that completed": tally(list(replies)).get("complete", 0),
            "new requests that got 503": refused,
            "exit status": status,
            "ended after, s": time.monotonic() - began,
        }
        outcome.check(status == 0, f"exit status {status}")
        check_quiet(server, outcome)
    with ours(drain_seconds=5) as server:
        body = {"prompt": "A", "max_tokens": 16_000, "stream": True, "logprobs": 65}
        with sent(server.port, post("/generate", body), receive_bytes=4096):
            running = [asyncio.create_task(ask(server.port, body, source=OTHER)) for body in load(10, 1000)]
            await until(lambda: server.metric("chargpt_num_requests_running") > 5)
            await asyncio.sleep(1)
            began = time.monotonic()
            server.process.terminate()
            replies = await asyncio.gather(*running)
            status = await asyncio.to_thread(server.process.wait, 60)
        seconds = time.monotonic() - began
        outcome.figures |= {"with a stopped reader: ended after, s": seconds, "its exit status": status}
        outcome.check(
            all(reply.ending == "complete" for reply in replies), f"beside a stopped reader: {tally(replies)}"
        )
        outcome.check(status == 0 and seconds < 5 + 6, f"with a stopped reader: status {status} after {seconds:.1f} s")
        check_quiet(server, outcome)
    if plan.quick:
        return
    with stock(plan) as theirs:
        running = await stock_load(theirs, 100, 100)
        began = time.monotonic()
        theirs.process.terminate()
        await asyncio.sleep(0.2)
        new = await asyncio.gather(*(ask(theirs.port, SHORT, patience=STOCK_HANG_SECONDS) for _ in range(20)))
        replies = await asyncio.gather(*running)
        with contextlib.suppress(Exception):
            await asyncio.to_thread(theirs.process.wait, 15)
        status = theirs.process.poll()
        full = sum(reply.ending == "complete" and reply.data.count(b'"text"') >= 100 for reply in replies)
        outcome.stock_did = "100 streams of 100 characters"
        outcome.stock |= {
            "streams that completed": full,
            "new requests that got 503": sum(reply.status == 503 for reply in new),
            "exit status": "none, still running" if status is None else status,
            "ended after, s": time.monotonic() - began,
        }


async def crash_loop(plan: Plan, outcome: Outcome) -> None:
    restarts = plan.count(5, 3)
    outcome.did = f"weights truncated on disk, then kill -9 of the inference process; --max-restarts {restarts}"
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        shutil.copytree(BUNDLED, checkpoint)
        with ours(checkpoint, max_restarts=restarts) as server:
            process = server.worker()
            await settled(process)
            os.truncate(checkpoint / "model.safetensors", 1000)
            began = time.monotonic()
            process.kill()
            with Probe(server.port, interval=0.1) as probe:
                waiting = asyncio.create_task(ask(server.port, SHORT))
                status = await asyncio.to_thread(server.process.wait, 120)
                seconds = time.monotonic() - began
                reply = await waiting
            await until(lambda: not left_of(server.process.pid), 10)
            lines = server.output().splitlines()
    made = sum("restarting" in line for line in lines)
    outcome.check(status == 1, f"exit status {status}")
    outcome.check(made == restarts, f"{made} restarts")
    outcome.check(bool(re.match(r"python -m service: worker-0 .* died", lines[-1])), f"last line: {lines[-1]}")
    outcome.check(not any("Traceback" in line for line in lines), "a traceback in the log")
    outcome.check(reply.ending != "hang", "a request that came meanwhile hangs")
    outcome.figures |= {
        "exit status": status,
        "ended after, s": seconds,
        "restarts": made,
        "last line": re.sub(r"\(process \d+\)", "(process …)", lines[-1]),
        "a request that came meanwhile": f"{reply.ending}, status {reply.status}",
    } | others("/livez of others", probe)


async def full_disk(plan: Plan, outcome: Outcome) -> None:
    kills = plan.count(3, 1)
    outcome.did = (
        f"the temporary folder on a full disk: requests to every route, {kills} kills of the inference process and as "
        "many of the HTTP process"
    )
    point = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    try:
        with SmallDisk(point, "16m") as disk, contextlib.ExitStack() as stack:
            with patch.dict(os.environ, {"TMPDIR": str(disk.path)}):
                server = stack.enter_context(ours(max_restarts=100))
            disk.fill()
            free = os.statvfs(disk.path).f_bavail
            outcome.check(free == 0, f"{free} blocks are free")
            for path in ("/tokenize", "/detokenize", "/v1/score", "/v1/next", "/nothing", "/v1/completions"):
                reply = await ask(server.port, {"prompt": "a", "texts": "ab", "tokens": [1]}, path=path)
                fine = reply.status is not None and reply.status < 500
                outcome.check(fine, f"{path}: status {reply.status}, {reply.ending}")
            for i in range(2 * kills):
                process = server.worker() if i % 2 == 0 else listeners(server)[0]
                process.kill()
                reply = await ask(server.port, SHORT)
                outcome.check(reply.ending == "complete", f"kill {i}: the next request ended as {reply.ending}")
            await check_balance(server, outcome)
            check_quiet(server, outcome)
            outcome.check(await asyncio.to_thread(server.stop) == 0, "exit status after SIGTERM")
    finally:
        point.rmdir()
