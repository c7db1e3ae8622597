"""Processes that die, hang, are told to end, or whose clock jumps."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import psutil

from tests.chaos import case
from tests.chaos.case import SHORT, STOCK_HEALTH, Outcome, Plan, asking, bodies_of, compared, ours, tally, tell, until
from tests.chaos.client import OTHER, Probe, ask
from tests.helpers import web
from tests.toolbox.http import post, sent
from tests.toolbox.launch import Program
from tests.toolbox.load import Reply

STOCK_HANG_SECONDS = 10.0


async def asking_stock(server: Program, count: int, length: int) -> list[asyncio.Task[Reply]]:
    """Requests that run."""
    tasks = asking(server, [{"prompt": "ROMEO:\n", "max_tokens": length}] * count, patience=STOCK_HANG_SECONDS)
    await asyncio.sleep(1)
    return tasks


async def stock_kill(plan: Plan, outcome: Outcome, find: Callable[[Program], psutil.Process], prefix: str = "") -> None:
    """Kill one process of stock LitServe under load."""
    with case.stock(plan) as server:
        running = await asking_stock(server, 16, 150)
        with Probe(server.port, STOCK_HEALTH) as probe:
            find(server).kill()
            after = await ask(server.port, SHORT, source=OTHER, patience=STOCK_HANG_SECONDS)
            replies = await asyncio.gather(*running)
        never = f"never ({after.ending} after {after.seconds:.1f} s)"
        outcome.stock_did = "once"
        outcome.stock |= {
            f"{prefix}requests in flight": tell(tally(replies)),
            f"{prefix}next request answered after, p50, s": after.seconds if after.ending == "complete" else never,
            **(case.others("/livez of others", probe) if not prefix else {}),
            "server afterwards": "runs" if server.process.poll() is None else "has ended",
        }


async def keep_asking(server: Program) -> list[Reply]:
    """Ten requests over a second, whether or not they are answered."""
    asked = []
    for _ in range(10):
        await asyncio.sleep(0.1)
        asked += asking(server, [SHORT], source=OTHER)
    return await asyncio.gather(*asked)


async def kill_worker(plan: Plan, outcome: Outcome) -> None:
    kills, bodies = plan.count(20, 4), bodies_of(16, 1000)
    outcome.did = f"the inference process is killed {kills} times, each time during 12 streams and 4 whole answers"
    recovery, counted, meanwhile = [], Counter[str](), Counter[str]()
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(ours(outcome)) for _ in range(3)]
        expected = await case.texts(servers[0], bodies)
        with contextlib.ExitStack() as probing:
            probes = [probing.enter_context(Probe(server.port)) for server in servers]
            for i in range(kills):
                server = servers[i % 3]  # the others settle meanwhile
                process = server.worker()
                await case.settled(process)
                running = asking(server, bodies)
                await asyncio.sleep(0.05 + 0.4 * i / kills)
                killed_at = time.monotonic()
                process.kill()
                later = asyncio.create_task(keep_asking(server))
                after = await ask(server.port, SHORT, source=OTHER)
                outcome.check(after.ending == "complete", f"kill {i}: the next request ended as {after.ending}")
                recovery.append(after.ended_at - killed_at)
                for reply in await later:
                    meanwhile[f"status {reply.status}"] += 1
                    refused = reply.status == 503 and b"\r\nretry-after: " in reply.head.lower()
                    outcome.check(reply.status == 200 or refused, f"kill {i}: a later request got {reply.status}")
                for reply, text in zip(await asyncio.gather(*running), expected, strict=True):
                    ending = compared(reply, text)
                    counted[ending] += 1
                    outcome.check(ending in ("the same text", "error"), f"kill {i}: a request ended as {ending}")
        probes[0].outcome.replies += probes[1].outcome.replies + probes[2].outcome.replies
    outcome.raw |= {"recovery_seconds": recovery}
    outcome.figures |= {"requests in flight": tell(counted), "requests of the next second": tell(meanwhile)}
    outcome.figures |= case.spread("next request answered after", recovery)
    outcome.figures |= case.others("/livez of others", probes[0])
    if not plan.quick:
        await stock_kill(plan, outcome, Program.worker)


async def kill_http(plan: Plan, outcome: Outcome) -> None:
    kills, bodies = plan.count(20, 4), bodies_of(8, 2500)
    outcome.did = (
        f"an HTTP process is killed during 8 requests, {kills} times as the only one and {kills} times as one of two"
    )
    recovery: dict[int, list[float]] = {1: [], 2: []}
    counted: dict[int, Counter[str]] = {1: Counter(), 2: Counter()}
    async with (
        ours(outcome) as one,
        ours(outcome) as again,
        ours(outcome, http_processes=2) as two,
    ):
        expected = await case.texts(one, bodies)
        for i in range(2 * kills):
            server, processes = ((one, 1), (two, 2), (again, 1), (two, 2))[i % 4]
            # The oldest: the one that was not killed last time.
            process = min(case.listeners(server), key=psutil.Process.create_time)
            await case.settled(process)
            running = asking(server, bodies)
            await asyncio.sleep(0.05 + 0.2 * i / kills)
            killed_at = time.monotonic()
            process.kill()
            after = await ask(server.port, SHORT, source=OTHER)
            outcome.check(after.ending == "complete", f"kill {i}: the next request ended as {after.ending}")
            recovery[processes].append(after.ended_at - killed_at)
            for reply, text in zip(await asyncio.gather(*running), expected, strict=True):
                ending = compared(reply, text)
                counted[processes][ending] += 1
                outcome.check(ending in ("the same text", "error", "cut"), f"kill {i}: a request ended as {ending}")
        await asyncio.sleep(0.5)  # the other process writes the end of the last scrape within 50 ms
        for server in (one, again, two):
            in_progress = server.metric("chargpt_http_requests_in_progress")
            outcome.check(in_progress == 1, f"http_requests_in_progress is {in_progress:.0f} during its own scrape")
    outcome.raw |= {"recovery_seconds": recovery}
    for processes, name in ((1, "one process"), (2, "two processes")):
        outcome.figures |= {f"{name}: requests in flight": tell(counted[processes])}
        outcome.figures |= case.spread(f"{name}: next request answered after", recovery[processes])
    if not plan.quick:
        await stock_kill(plan, outcome, lambda server: case.listeners(server)[0], "one process: ")


async def kill_main(plan: Plan, outcome: Outcome) -> None:
    kills = plan.count(5, 2)
    outcome.did = f"the main process is killed during 16 requests, {kills} times"
    gone, counted, orphans = [], Counter[str](), 0
    for i in range(kills):
        async with ours(outcome) as server:
            running = asking(server, bodies_of(16, 8000))
            await asyncio.sleep(0.3)
            killed_at = time.monotonic()
            server.process.kill()
            server.process.wait()
            with contextlib.suppress(AssertionError):
                await until(lambda server=server: not server._left(), 10)
            gone.append(time.monotonic() - killed_at)
            orphans += len(server._left())
            endings = tally(await asyncio.gather(*running))
            counted += endings
            outcome.check("hang" not in endings, f"kill {i}: requests hang")
    outcome.check(not orphans, f"{orphans} orphans")
    outcome.figures |= {"orphans after 10 s": orphans, "requests in flight": tell(counted)}
    outcome.figures |= case.spread("time until all processes have ended", gone)
    if plan.quick:
        return
    with case.stock(plan) as theirs:
        started = psutil.Process(theirs.process.pid).children(recursive=True)
        running = await asking_stock(theirs, 16, 150)
        theirs.process.kill()
        theirs.process.wait()
        outcome.stock_did = "once"
        outcome.stock["requests in flight"] = tell(tally(await asyncio.gather(*running)))
        outcome.stock["orphans after 10 s"] = len(psutil.wait_procs(started, 0)[1])  # asking took 10 s


async def hang(plan: Plan, outcome: Outcome) -> None:
    outcome.did = (
        "SIGSTOP stops the inference process or the HTTP process, with the default of 10 for --hang-seconds. In "
        "another run, it stops the whole process group for 20 s"
    )

    async def of_one(kind: str) -> None:
        async with ours(outcome) as server:
            [expected] = await case.texts(server, [SHORT])
            hung = server.worker() if kind == "inference process" else case.listeners(server)[0]
            stopped_at = time.monotonic()
            hung.suspend()
            after = await ask(server.port, SHORT, source=OTHER)
            outcome.check(compared(after, expected) == "the same text", f"{kind}: next is {after.ending}")
            outcome.figures[f"{kind}: next request answered after, s"] = after.ended_at - stopped_at
            await until(lambda: not hung.is_running() or hung.status() == psutil.STATUS_ZOMBIE)  # killed

    async def of_group(seconds: float) -> None:
        async with ours(outcome) as server:
            bodies = bodies_of(8, 2000)
            undisturbed = await case.texts(server, bodies)
            pids = {process.pid for process in server.processes()}
            running = asking(server, bodies)
            await asyncio.sleep(0.1)
            os.killpg(server.process.pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.killpg(server.process.pid, signal.SIGCONT)
            for reply, text in zip(await asyncio.gather(*running), undisturbed, strict=True):
                ending = compared(reply, text)
                outcome.check(ending == "the same text", f"after SIGCONT of all processes a stream ended as {ending}")
            await asyncio.sleep(2)
            replaced = len(pids - {process.pid for process in server.processes()})
            outcome.check(replaced == 0, "processes were replaced after SIGCONT of all of them")
            outcome.figures["processes killed wrongly after SIGCONT of all"] = replaced

    await asyncio.gather(of_one("inference process"), of_one("HTTP process"), of_group(20))
    if plan.quick:
        return
    with case.stock(plan) as server:  # whose start would hold up the others' requests beyond the time limit of headers
        server.worker().suspend()
        with Probe(server.port, STOCK_HEALTH, interval=1) as probe:
            after = await ask(server.port, SHORT, patience=20)
        never = f"never ({after.ending} after {after.seconds:.0f} s)"
        value = after.seconds if after.ending == "complete" else never
        outcome.stock_did = "only the inference process"
        outcome.stock["inference process: next request answered after, s"] = value
        outcome.stock["/health meanwhile"] = tell(Counter(str(reply.status) for reply in probe.outcome.replies))


async def sigterm(plan: Plan, outcome: Outcome) -> None:
    outcome.did = (
        "SIGTERM arrives during 100 streams. In another run, it arrives during 10 streams and a stopped reader, with "
        "--drain-seconds 5"
    )
    async with ours(outcome, max_running_requests=100) as server:
        running = asking(server, [body | {"stream": True} for body in bodies_of(100, 1000)], sources=4)
        await until(lambda: server.metric("chargpt_num_requests_running") == 100)
        began = time.monotonic()
        server.process.terminate()
        await asyncio.sleep(0.2)
        new = await asyncio.gather(*asking(server, [SHORT] * 20, source=OTHER))
        refused = sum(reply.status == 503 for reply in new)
        outcome.check(refused == 20, f"of 20 new requests {refused} got 503: {tell(tally(new))}")
        replies = await asyncio.gather(*running)
        for reply in replies:
            outcome.check(reply.ending == "complete" and len(reply.text) == 1000, f"a stream ended as {reply.ending}")
        status = await asyncio.to_thread(server.process.wait, 30)
        outcome.check(status == 0, f"exit status {status}")
    outcome.figures |= {
        "streams that completed": tally(replies)["complete"], "new requests that got 503": refused,
        "exit status": status, "ended after, s": time.monotonic() - began,
    }  # fmt: skip
    async with ours(outcome, drain_seconds=5) as server:
        body = {"prompt": "A", "max_tokens": 16_000, "stream": True, "logprobs": 65}
        with sent(server.port, post("/generate", body), receive_bytes=4096):
            running = asking(server, bodies_of(10, 1000), source=OTHER)
            await until(lambda: server.metric("chargpt_num_requests_running") > 5)
            await asyncio.sleep(1)
            began = time.monotonic()
            server.process.terminate()
            endings = tally(await asyncio.gather(*running))
            status = await asyncio.to_thread(server.process.wait, 60)
        seconds = time.monotonic() - began
        outcome.figures |= {
            "with a stopped reader: ended after, s": seconds, "with a stopped reader: exit status": status,
        }  # fmt: skip
        outcome.check(endings == {"complete": 10}, f"beside a stopped reader: {tell(endings)}")
        outcome.check(status == 0 and seconds < 5 + 6, f"with a stopped reader: status {status} after {seconds:.1f} s")
    if plan.quick:
        return
    with case.stock(plan) as theirs:
        running = await asking_stock(theirs, 100, 100)
        began = time.monotonic()
        theirs.process.terminate()
        await asyncio.sleep(0.2)
        new = await asyncio.gather(*asking(theirs, [SHORT] * 20, patience=STOCK_HANG_SECONDS))
        replies = await asyncio.gather(*running)
        with contextlib.suppress(Exception):
            await asyncio.to_thread(theirs.process.wait, 15)
        status = theirs.process.poll()
        full = sum(reply.ending == "complete" and reply.body.count(b'"text"') >= 100 for reply in replies)
        outcome.stock_did = "100 streams of 100 characters"
        outcome.stock |= {
            "streams that completed": full,
            "new requests that got 503": sum(reply.status == 503 for reply in new),
            "exit status": "none, still running" if status is None else status,
            "ended after, s": time.monotonic() - began,
        }


async def clock(plan: Plan, outcome: Outcome) -> None:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or os.uname().sysname != "Linux":
        outcome.skipped = "moving the clock of one program needs Linux and a C compiler"
        return
    outcome.did = "the wall clock of all processes moves by +1 h, by −1 h and back while requests run and wait"
    with tempfile.TemporaryDirectory() as name:
        library, offset = Path(name) / "clock.so", Path(name) / "offset"
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", library, Path(__file__).with_name("clock.c"), "-ldl"]
        subprocess.run(command, check=True)

        def move(hours: float) -> None:
            with open(offset, "r+b" if offset.exists() else "wb") as file:
                file.write(struct.pack("d", hours * 3600))

        def hours_off(url: str) -> float:
            """The server's wall clock against ours, by its header Date."""
            date = email.utils.parsedate_to_datetime(web.get(f"{url}/livez").headers["date"])
            return round((date.timestamp() - time.time()) / 3600, 1)

        move(0)
        changed = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(offset)}
        async with contextlib.AsyncExitStack() as stack:
            with patch.dict(os.environ, changed):
                server = await stack.enter_async_context(ours(outcome))
            pids = {process.pid for process in server.processes()}
            bodies = bodies_of(6, plan.count(3000, 2000))
            expected = await case.texts(server, bodies)
            late, took = [], []
            with Probe(server.port, interval=0.05) as probe:
                for hours in (1.0, -1.0, 0.0):
                    long = {"prompt": "A", "max_tokens": 16_000, "n": 4, "timeout_seconds": 2}
                    running, timing = asking(server, bodies), asking(server, [long] * 4, source=OTHER)
                    await asyncio.sleep(0.3)
                    move(hours)
                    # uvicorn renews the date once a second.
                    await until(lambda hours=hours: hours_off(server.url) == hours)
                    outcome.cases += 1
                    for reply, text in zip(await asyncio.gather(*running), expected, strict=True):
                        same = compared(reply, text) == "the same text"
                        outcome.check(same, f"{hours:+g} h: a request ended as {reply.ending}, status {reply.status}")
                        took.append(reply.seconds)
                    for reply in await asyncio.gather(*timing):
                        right = reply.status == 504 and 1.9 < reply.seconds < 6
                        outcome.check(
                            right, f"{hours:+g} h: timeout_seconds 2: {reply.status} in {reply.seconds:.1f} s"
                        )
                        late.append(reply.seconds)
                    ready = web.get(f"{server.url}/readyz").status_code
                    outcome.check(ready == 200, f"{hours:+g} h: /readyz {ready}")
            await asyncio.sleep(1)
            outcome.check({process.pid for process in server.processes()} == pids, "processes were replaced")
        outcome.figures |= case.spread("requests with timeout_seconds 2 ended after", late)
        outcome.figures |= case.spread("others", took) | case.others("/livez of others", probe)
