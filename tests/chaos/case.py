"""What the cases share: their outcome, this service's and stock LitServe's servers, memory, and quantiles."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from service.settings import BUNDLED, Settings, available_cpus
from service.supervisor import SETTLED_SECONDS
from tests.chaos.client import Probe, ask
from tests.helpers import UNBOUNDED, RunningServer, wait_until
from tests.toolbox.figures import quantile
from tests.toolbox.launch import Program, Server, is_worker, module
from tests.toolbox.load import Reply

Figure = float | int | str
Sample = tuple[float, dict[tuple[str, int], tuple[int, int, int]]]  # time; bytes, files, threads by role and process
MB = 1e6
# What RunningServer changes for tests.
DEFAULTS = {name: Settings.model_fields[name].default for name in ("max_tokens", *UNBOUNDED)}
SHORT = {"prompt": "ROMEO:", "max_tokens": 5, "seed": 1}
STOCK_HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


@dataclass
class Outcome:
    """The results of one case. A label names the unit; the same label under `stock` is LitServe's figure."""

    did: str = ""
    stock_did: str = ""  # "": stock LitServe cannot run it, or as above
    cases: int = 0
    failures: list[str] = field(default_factory=list)
    goals: dict[str, bool] = field(default_factory=dict)  # figures that depend on the machine -> whether met
    figures: dict[str, Figure] = field(default_factory=dict)
    stock: dict[str, Figure] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    skipped: str = ""  # why nothing was done
    seconds: float = 0.0

    def check(self, holds: bool, failure: str) -> None:
        """Count a case; `failure` describes it if it does not hold."""
        self.cases += 1
        if not holds:
            self.failures.append(failure)


@dataclass(frozen=True)
class Plan:
    """How much to do, and where files go."""

    quick: bool
    out: Path

    def count(self, full: int, quick: int) -> int:
        return quick if self.quick else full


Case = Callable[[Plan, Outcome], Awaitable[None]]


# Figures


def spread(label: str, seconds: Iterable[float | None], scale: str = "s") -> dict[str, Figure]:
    """Median, 99th percentile and maximum in one figure each; without values, a dash."""
    values = [value for value in seconds if value is not None]
    factor = 1e3 if scale == "ms" else 1.0
    names = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {f"{label}, {name}, {scale}": quantile(values, q) * factor if values else "–" for name, q in names.items()}


def others(label: str, probe: Probe) -> dict[str, Figure]:
    """What another client saw meanwhile."""
    return spread(label, probe.seconds, "ms") | {f"{label}, not answered": probe.unanswered}


def tell(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counted.items()))


def tally(replies: Iterable[Reply]) -> Counter[str]:
    return Counter(reply.ending for reply in replies)


def compared(reply: Reply, text: str) -> str:
    """How a request ended whose text is known."""
    return "the same text" if reply.ending == "complete" and reply.text == text else reply.ending


# Servers


@contextlib.asynccontextmanager
async def ours(outcome: Outcome, checkpoint: Path = BUNDLED, **settings: object) -> AsyncIterator[RunningServer]:
    """This service with its defaults, ready. At the end every accepted sequence must have ended once; SIGTERM ends it
    with status 0, unless it has ended before, and no traceback is in its log."""
    with RunningServer(checkpoint, **DEFAULTS | settings) as server:
        await asyncio.to_thread(server.wait_until_ready)
        yield server
        if server.process.poll() is None:
            with contextlib.suppress(AssertionError):
                await asyncio.to_thread(server.wait_until_all_ended)
            accepted, reasons = server.endings()
            ended = sum(reasons.values())
            outcome.check(accepted == ended, f"{accepted:.0f} sequences accepted, {ended:.0f} endings")
            for label, count in (("sequences accepted", accepted), ("endings", ended)):
                outcome.figures[label] = int(outcome.figures.get(label, 0)) + int(count)
            outcome.check(await asyncio.to_thread(server.stop) == 0, "exit status after SIGTERM")
        log = server.output()
        outcome.check("Traceback" not in log and "ROMEO" not in log, "a traceback or a prompt in the log")


@contextlib.contextmanager
def stock(plan: Plan) -> Iterator[Server]:
    """Stock LitServe with batched streaming, ready."""
    command = module("tests.bench.servers", "stock", checkpoint=BUNDLED, threads=available_cpus(), loop="stream")
    with Server(command, plan.out / "stock.log", "/health") as server:
        server.wait_until_ready()
        yield server


def listeners(server: Program) -> list[psutil.Process]:
    """Processes other than the main one that accept connections."""
    found = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            connections = process.net_connections("tcp")
            if any(each.status == psutil.CONN_LISTEN and each.laddr.port == server.port for each in connections):
                found.append(process)
    return found


async def settled(process: psutil.Process) -> None:
    """Wait until the process is replaced at once if it dies: one that has just started is replaced after a pause."""
    await asyncio.sleep(max(0.0, process.create_time() + SETTLED_SECONDS + 0.3 - time.time()))


async def until(condition: Callable[[], Any], seconds: float = 30) -> Any:
    return await asyncio.to_thread(wait_until, condition, seconds)


# Requests


def bodies_of(count: int, length: int) -> list[dict[str, Any]]:
    """Bodies of `count` requests, of which three in four are streamed."""
    return [
        {"prompt": "ROMEO:\n", "max_tokens": length, "seed": i, "stream": i % 4 != 0, "temperature": 1.0}
        for i in range(count)
    ]


def asking(
    server: Program, bodies: Iterable[dict[str, Any] | bytes], sources: int = 0, **options: Any
) -> list[asyncio.Task[Reply]]:
    """All at once, running; sources: from so many addresses."""
    tasks = []
    for i, body in enumerate(bodies):
        its = options | {"source": f"127.0.0.{10 + i % sources}"} if sources else options
        tasks.append(asyncio.create_task(ask(server.port, body, **its)))
    return tasks


async def texts(server: Program, bodies: list[dict[str, Any]]) -> list[str]:
    """One after the other."""
    return [(await ask(server.port, body)).text for body in bodies]


# Processes


def sample(server: Program) -> Sample:
    main, found = psutil.Process(server.process.pid), {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (main, *main.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess), process.oneshot():
                is_tracker = "resource_tracker" in " ".join(process.cmdline())
                role = "inference" if is_worker(process) else "resource tracker" if is_tracker else "HTTP"
                values = (process.memory_info().rss, process.num_fds(), process.num_threads())
                found["main" if process == main else role, process.pid] = values
    return time.monotonic(), found


@contextlib.asynccontextmanager
async def sampled(server: Program, seconds: float) -> AsyncIterator[list[Sample]]:
    """Samples of all processes of a server, one at once and one each `seconds`."""
    samples = [sample(server)]

    async def go_on() -> None:
        while True:
            await asyncio.sleep(seconds)
            samples.append(sample(server))

    task = asyncio.create_task(go_on())
    try:
        yield samples
    finally:
        task.cancel()


def memory(samples: list[Sample]) -> dict[str, Figure]:
    totals = [sum(rss for rss, _, _ in found.values()) / MB for _, found in samples]
    return {"memory before, MB": round(totals[0]), "peak memory, MB": round(max(totals))}
