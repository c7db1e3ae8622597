"""What the cases share: their outcome, this service's and stock LitServe's servers, memory, and quantiles."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from service.settings import BUNDLED, Settings, available_cpus
from service.supervisor import SETTLED_SECONDS
from tests.bench.servers import Server, module
from tests.chaos.client import Probe
from tests.helpers import RunningServer, is_worker, wait_until
from tests.load.record import quantile
from tests.toolbox.launch import Program

Figure = float | int | str
MB = 1e6
# What RunningServer changes for tests.
DEFAULTS = {name: Settings.model_fields[name].default for name in ("max_tokens", "max_request_bytes", "max_held_bytes")}


@dataclass
class Outcome:
    """Of one case. Labels of figures name their unit; the same label under `stock` is the same figure of LitServe."""

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
    figures = spread(label, probe.seconds, "ms")
    return figures | {f"{label}, not answered": probe.unanswered}


# Servers


@contextlib.contextmanager
def ours(checkpoint: Path = BUNDLED, **settings: object) -> Iterator[RunningServer]:
    """This service with its defaults, ready."""
    with RunningServer(checkpoint, **DEFAULTS | settings) as server:
        server.wait_until_ready()
        yield server


@contextlib.contextmanager
def stock(plan: Plan) -> Iterator[Server]:
    """Stock LitServe with batched streaming, ready, after a first answer."""
    command = module("tests.bench.stock", checkpoint=BUNDLED, threads=available_cpus(), loop="stream")
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


def worker(server: Program) -> psutil.Process:
    """The inference process."""
    return next(each for each in psutil.Process(server.process.pid).children(recursive=True) if is_worker(each))


def left_of(session: int) -> list[psutil.Process]:
    """Running processes of a server's session, orphans included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


async def settled(process: psutil.Process) -> None:
    """Wait until the process is replaced at once if it dies: one that has just started is replaced after a pause."""
    await asyncio.sleep(max(0.0, process.create_time() + SETTLED_SECONDS + 0.3 - time.time()))


async def until(condition: Callable[[], Any], seconds: float = 30, otherwise: object = "timed out") -> Any:
    return await asyncio.to_thread(wait_until, condition, seconds, otherwise)


def endings(server: RunningServer) -> tuple[int, int]:
    """(accepted, ended) sequences."""
    metrics = server.metrics()
    ended = sum(value for (name, _), value in metrics.items() if name == "chargpt_request_success_total")
    return int(metrics["chargpt_requests_accepted_total", frozenset()]), int(ended)


async def check_balance(server: RunningServer, outcome: Outcome) -> None:
    """Every accepted sequence has ended, once."""
    with contextlib.suppress(AssertionError):
        await until(lambda: len(set(endings(server))) == 1)
    accepted, ended = endings(server)
    outcome.check(accepted == ended, f"{accepted} sequences accepted, {ended} endings")
    outcome.figures["sequences accepted"] = outcome.figures.get("sequences accepted", 0) + accepted
    outcome.figures["endings"] = outcome.figures.get("endings", 0) + ended


def check_quiet(server: Program, outcome: Outcome) -> None:
    outcome.check("Traceback" not in server.output(), "a traceback in the log")


class Memory:
    """Resident memory of all processes of a server, in bytes: at the beginning, and the most until the end."""

    def __init__(self, server: Program, interval: float = 0.05):
        self._server, self._interval = server, interval
        self._is_done = threading.Event()
        self.before = self.most = self._now()

    def _now(self) -> int:
        main, total = psutil.Process(self._server.process.pid), 0
        for process in (main, *main.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def _watch(self) -> None:
        while not self._is_done.wait(self._interval):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.most = max(self.most, self._now())

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()

    @property
    def figures(self) -> dict[str, Figure]:
        return {"memory before, MB": round(self.before / MB), "memory at most, MB": round(self.most / MB)}
