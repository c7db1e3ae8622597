"""Requests at the limits of memory, altered checkpoints, prompts that must not leak, and a clock that jumps."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import http.server
import os
import random
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from service.model.checkpoint import Checkpoint, CheckpointError
from service.settings import BUNDLED
from tests.chaos import case
from tests.chaos.case import DEFAULTS, MB, Memory, Outcome, Plan, asking, bodies_of, compared, ours, tell
from tests.chaos.client import OTHER, Probe, ask
from tests.helpers import RunningServer, web

CGROUPS = Path("/sys/fs/cgroup")
LIMIT_BYTES = 700_000_000


# Memory


@contextlib.contextmanager
def cgroup(limit_bytes: int, server: RunningServer) -> Iterator[dict[str, int] | None]:
    """Move a program that has just been started, before it allocates, into a cgroup of either version; None where this
    machine does not let us make one. At the end the dict holds `most_bytes` and `num_killed`."""
    is_v2 = (CGROUPS / "cgroup.controllers").exists()
    folder = (CGROUPS if is_v2 else CGROUPS / "memory") / f"chargpt-chaos-{os.getpid()}"
    limit, most, events = V2 if is_v2 else V1
    try:
        folder.mkdir()
        try:
            (folder / limit).write_text(str(limit_bytes))
        except OSError:
            folder.rmdir()
            raise
    except OSError:
        yield None
        return
    if is_v2:
        with contextlib.suppress(OSError):  # without swap
            (folder / "memory.swap.max").write_text("0")
    (folder / "cgroup.procs").write_text(str(server.process.pid))  # and each process that it starts from now on
    found: dict[str, int] = {}
    try:
        yield found
        lines = (folder / events).read_text().splitlines()
        found["num_killed"] = next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        found["most_bytes"] = int((folder / most).read_text())
    finally:
        server.close()
        for _ in range(100):  # the last processes may just be ending
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


V1 = ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control")
V2 = ("memory.max", "memory.peak", "memory.events")


async def memory(plan: Plan, outcome: Outcome) -> None:
    outcome.did = (
        'the request {"prompt": "A", "max_tokens": 4000, "n": 64, "logprobs": 65}, the largest that is allowed, 64 '
        "streams with 65 log-probabilities, and echo of 20,000 characters with as many"
    )
    bomb = {"prompt": "A", "max_tokens": 4000, "n": 64, "logprobs": 65}
    allowed = {"prompt": "A", "max_tokens": 1200, "n": plan.count(64, 16), "logprobs": 65}  # 63 MB
    stream = {"prompt": "A", "max_tokens": plan.count(1000, 300), "logprobs": 65, "stream": True}
    echo = {"prompt": "To be, or " * 2000, "echo": True, "logprobs": 65, "max_tokens": 1}
    with RunningServer(BUNDLED, **DEFAULTS) as server, cgroup(LIMIT_BYTES, server) as group:
        await asyncio.to_thread(server.wait_until_ready)
        pids = {process.pid for process in server.processes()}
        with Memory(server) as watched, Probe(server.port) as probe:
            for _ in range(3):
                reply = await ask(server.port, bomb)
                outcome.check(reply.status == 400, f"the bomb: status {reply.status}, {reply.ending}")
            outcome.figures["the bomb: status"] = reply.status or reply.ending
            for name, body, count, sources, path in (
                ("largest", allowed, 2, 2, "/generate"),
                ("streams", stream, 64, 4, "/generate"),
                ("echo", echo, 4, 4, "/v1/completions"),
            ):
                replies = await asyncio.gather(*asking(server, [body] * count, sources, path=path, patience=120))
                statuses = Counter(f"{reply.status} {reply.ending}" for reply in replies)
                outcome.figures[f"{name}: statuses"] = tell(statuses)
                for reply in replies:
                    fine = reply.ending == "complete" or reply.status == 429
                    outcome.check(fine, f"{name}: status {reply.status}, {reply.ending}")
        outcome.figures["echo: answer, MB"] = max(len(reply.data) for reply in replies) / MB
        outcome.check({process.pid for process in server.processes()} == pids, "processes were replaced")
        await case.check_end(server, outcome)
    outcome.figures |= watched.figures | case.others("/livez of others", probe)
    outcome.check(max(probe.seconds) < 1, f"/livez took {max(probe.seconds):.2f} s")
    outcome.check(watched.most < LIMIT_BYTES, f"{watched.most / MB:.0f} MB at most")
    if group is None:
        outcome.figures["cgroup of 700 MB"] = "not allowed on this machine: by resident memory"
        return
    outcome.figures["cgroup of 700 MB: at most, MB"] = round(group["most_bytes"] / MB)
    outcome.figures["cgroup of 700 MB: processes killed"] = group["num_killed"]
    outcome.check(group["num_killed"] == 0, "processes were killed for memory")


# Checkpoints


async def checkpoints(plan: Plan, outcome: Outcome) -> None:
    count, chance, took = plan.count(1000, 200), random.Random(0), []
    outcome.did = f"{count:,} times one bit of the bundled checkpoint flipped, and as often a file cut short"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoint"
        shutil.copytree(BUNDLED, folder)
        digest = Checkpoint.read(folder).digest
        originals = {file: file.read_bytes() for file in folder.iterdir()}
        sizes = [len(data) for data in originals.values()]
        for i in range(count):
            # Half of the places in the large file of weights, half anywhere else.
            weights = [1.0 / len(sizes) if i % 2 else float(size) for size in sizes]
            (file,) = chance.choices(list(originals), weights)
            data, place = originals[file], chance.randrange(len(originals[file]))
            for altered in (bytes([data[place] ^ 1 << chance.randrange(8)]), b""):
                with open(file, "r+b", buffering=0) as stream:
                    stream.seek(place)
                    stream.write(altered)
                    stream.truncate(len(data) if altered else place)
                began = time.perf_counter()
                try:
                    Checkpoint.read(folder, digest)
                    refused = False
                except CheckpointError:
                    refused = True
                took.append(time.perf_counter() - began)
                outcome.check(refused, f"{file.name}, byte {place}: {'flipped' if altered else 'cut'}, and not refused")
            file.write_bytes(data)
            await asyncio.sleep(0)
        outcome.check(bool(Checkpoint.read(folder, digest).load_weights()), "the original is refused")
    outcome.figures |= {"refused": 2 * count - len(outcome.failures)} | case.spread("refused after", took, "ms")


# Logs, metrics and traces


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps what OpenTelemetry sends."""

    received: list[bytes]

    def do_POST(self) -> None:
        self.received.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


async def marker(plan: Plan, outcome: Outcome) -> None:
    word = "XyzzyPlughMarker"
    outcome.did = (
        f"requests with the word {word} in every text, which are answered, refused, time out, leave, or lose their "
        "process, at --log-level debug with traces"
    )
    received: list[bytes] = []
    handler = type("Kept", (Collector,), {"received": received})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            endpoint = f"http://127.0.0.1:{collector.server_address[1]}/v1/traces"
            await mark(outcome, word, endpoint, received)
        finally:
            collector.shutdown()
            thread.join()


async def mark(outcome: Outcome, word: str, endpoint: str, received: list[bytes]) -> None:
    settings = {"log_level": "debug", "otlp_traces_endpoint": endpoint, "max_queued_requests": 8}
    async with contextlib.AsyncExitStack() as stack:
        with patch.dict(os.environ, {"OTEL_BSP_SCHEDULE_DELAY": "100"}):  # ms
            server = await stack.enter_async_context(ours(outcome, **settings))
        endings = Counter[str]()

        async def send(path: str, body: dict[str, Any] | bytes, **options: Any) -> None:
            reply = await ask(server.port, body, path=path, **options)
            endings[reply.failure or f"status {reply.status}"] += 1
            outcome.cases += 1

        every = {"prompt": word, "texts": [word, word], "max_tokens": 3}
        for extra in ({}, {"stop": [word]}, {"suffix": word}, {"choice": [word]}, {"stream": True, "echo": True}):
            for path in ("/generate", "/v1/completions"):
                await send(path, every | extra)
        for path in ("/v1/score", "/v1/next", "/tokenize"):
            await send(path, every)
        for wrong in (
            {"prompt": word + "\u6f22"},
            {"prompt": word, "max_tokens": word},
            {"prompt": word, word: 1, "n": -1},
            {"prompt": word, "regex": word + "("},
            {"prompt": word, "model": word},
            {"prompt": word, "logit_bias": {word: 1}},
            b'{"prompt": "' + word.encode() + b'", ',
            b"\xff" + word.encode(),
        ):
            await send("/v1/completions", wrong)
            await send("/generate", wrong)
        await send(f"/{word}", every)
        long = {"prompt": word, "max_tokens": 16_000}
        await send("/generate", long | {"timeout_seconds": 0.1})
        await send("/generate", long | {"stream": True}, leave_after=400)
        await asyncio.gather(*(send("/generate", long | {"timeout_seconds": 1}) for _ in range(90)))  # refused
        killed = asyncio.create_task(send("/generate", long | {"timeout_seconds": 5}))
        await asyncio.sleep(0.3)
        server.worker().kill()
        await killed
        killed = asyncio.create_task(send("/generate", long | {"timeout_seconds": 5}))
        await asyncio.sleep(1)  # the spans of all others are sent
        case.listeners(server)[0].kill()
        await killed
        await asyncio.to_thread(server.wait_until_ready)
        metrics = web.get(f"{server.url}/metrics", headers={"Accept": "application/openmetrics-text"}).text
        await case.check_end(server, outcome)
        log, spans = server.output(), b"".join(received)
    found = {"log": log.count(word), "metrics": metrics.count(word), "traces": spans.count(word.encode())}
    for place, count in found.items():
        outcome.check(count == 0, f"{count} hits in {place}")
    outcome.check(len(spans) > 0 and len(log) > 10_000, "there are no traces, or no log")
    outcome.figures |= {f"hits in {place}": count for place, count in found.items()}
    outcome.figures |= {"log, kB": round(len(log) / 1e3), "traces, kB": round(len(spans) / 1e3)}
    outcome.figures["endings"] = tell(endings)


# The clock


def hours_off(url: str) -> float:
    """The server's wall clock against ours, by its header Date."""
    date = email.utils.parsedate_to_datetime(web.get(f"{url}/livez").headers["date"])
    return round((date.timestamp() - time.time()) / 3600, 1)


async def clock(plan: Plan, outcome: Outcome) -> None:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or os.uname().sysname != "Linux":
        outcome.skipped = "moving the clock of one program needs Linux and a C compiler"
        return
    outcome.did = "the wall clock of all processes moved by +1 h, −1 h and back while requests run and wait"
    with tempfile.TemporaryDirectory() as name:
        library, offset = Path(name) / "clock.so", Path(name) / "offset"
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", library, Path(__file__).with_name("clock.c"), "-ldl"]
        subprocess.run(command, check=True)

        def move(hours: float) -> None:
            with open(offset, "r+b" if offset.exists() else "wb") as file:
                file.write(struct.pack("d", hours * 3600))

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
                    await case.until(lambda hours=hours: hours_off(server.url) == hours)
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
