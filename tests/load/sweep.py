"""Latency and throughput against offered load, in an open loop, compared with llama.cpp's server and stock LitServe.

    make load-sweep                     about 20 minutes on a quiet machine
    make load-sweep ARGS=--quick        about four minutes: fewer and shorter rungs
    make load-sweep ARGS=--publish      also write the tables of tests/README.md, and the picture

First measures the saturation of each system, its throughput with CROWD clients in a closed loop. Then offers a ladder
of rates, as shares of the saturation, with Poisson arrivals: all systems get the same requests, with gaps scaled to
the rate, and alternate at each rung. A rung is a warm-up, a window and a cool-down under constant load. Its figures
cover all requests due in the window, each counted as ended, refused (429) or unfinished. Latencies count from the time
at which a request was due, not from sending; an unfinished request counts with its time so far, a lower bound.

Goodput is the highest rate of the ladder up to which every rung meets the goal.

Writes OUT/sweep.json, OUT/sweep.md, OUT/sweep.png and the servers' logs in OUT/logs.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from service.model.config import GPTConfig
from service.settings import available_cpus
from tests.bench import llama, peers
from tests.bench.command import Run, add_threads, build_parser
from tests.bench.shapes import SHAPES, VOCABULARY, checkpoint_of
from tests.toolbox import load
from tests.toolbox.figures import NONE, conditions, percentiles, put, table
from tests.toolbox.launch import ROOT, Server

SYSTEMS = ("ours", "llama", "stock")
NAMES = peers.FAMILIES
LLAMA_DTYPE = "BF16"  # with its fp16 cache the fastest at most row counts of `make bench`
SLOTS = 64  # equals the stock service's batch size
WAITING = 64  # queue limit of this service; the stock service's queue is unbounded
CROWD = 96  # clients at saturation: more than slots, so that every batch is full
CONNECTIONS = 1000  # maximum
BUSY_CORES = 0.8  # of the load generator; above, it may be the bottleneck
LATE_SECONDS = 0.01  # tolerated delay of sending, at the 99th percentile
PUBLISHED_SHARES = (1.0,)


Goal = dict[str, float]  # 95 % get their first character, and further ones on average, within these; no refusal


def is_met(goal: Goal, rung: dict[str, Any]) -> bool:
    """Unfinished requests count with their time so far."""
    first, each = rung["first"], rung["per_character"] or {"p95": 0.0}
    if rung["refused"] or first is None:
        return False
    return first["p95"] <= goal["first_seconds"] and each["p95"] <= goal["character_seconds"]


def goodput(goal: Goal, rungs: list[dict[str, Any]]) -> float:
    """The highest rate up to which all rungs meet the goal; 0 if the first does not."""
    met = itertools.takewhile(lambda rung: is_met(goal, rung), by_rate(rungs))
    return max((rung["rate"] for rung in met), default=0.0)


def by_rate(rungs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rungs, key=lambda rung: float(rung["rate"]))


@dataclass(frozen=True)
class Plan:
    """Amount of measurement."""

    # Rates, as shares of the saturation.
    shares: tuple[float, ...] = (0.05, 0.15, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)
    longest: int = 160  # completion, in characters
    saturation_seconds: float = 16.0
    warm_seconds: float = 4.0
    window_seconds: float = 13.0
    cool_seconds: float = 6.0
    least_requests: int = 30  # due in a window; at low rates it grows, at most threefold


FULL = Plan()
QUICK = Plan((0.05, 0.5, 0.9, 2.0), 80, 6.0, 1.5, 4.0, 2.5, 10)


# The work


@dataclass(frozen=True)
class Work:
    prompt: str
    max_tokens: int
    at: float  # time of arrival, in seconds from the start


def poisson_work(longest: int, rate: float = math.inf) -> Iterator[Work]:
    """An endless, fixed sequence of requests, arriving at `rate` per second on average, by default all at once.

    Prompts have 4 to 64 characters, completions are log-uniform in longest/16 to `longest`.
    """
    chance, at = random.Random(0), 0.0
    letters = VOCABULARY[13:]
    while True:
        at += chance.expovariate(1.0) / rate
        prompt = "".join(chance.choices(letters, k=chance.randint(4, 64)))
        yield Work(prompt, round(longest * 16 ** -chance.random()), at)


def moments(system: peers.System, reply: load.Reply) -> list[tuple[float, int]]:
    """(time, number of characters) of each read with characters."""
    got, rest = [], b""
    for at, data in load.dechunked(reply.parts):
        *events, rest = (rest + data).split(system.separator)
        if count := sum(len(system.text_of_event(event)) for event in events):
            got.append((at, count))
    return got


def summary(system: peers.System, due: list[Work], outcome: load.Outcome, begin: float, end: float) -> dict[str, Any]:
    """Figures of the requests due between `begin` and `end`, in seconds from the start.

    outcome: of sending all of `due` in order; requests not sent count as unfinished.

    Raises:
        LoadError: a finished completion has the wrong length.
    """
    closed = outcome.started_at + outcome.seconds
    counts = {"due": 0, "ended": 0, "refused": 0, "unfinished": 0}
    times: dict[str, list[float]] = {"first": [], "per_character": [], "whole": [], "late": []}
    characters = ended_within = 0
    for item, reply in itertools.zip_longest(due, outcome.replies):
        is_refused, ended_at = (False, None) if reply is None else (reply.status == 429, reply.ended_at)
        got = [] if reply is None or is_refused else moments(system, reply)
        given = sum(count for _, count in got)
        if ended_at is not None and not is_refused:
            if given != item.max_tokens:
                raise load.LoadError(f"{NAMES[system.family]}: expected {item.max_tokens} characters, got {given}")
            ended_within += begin <= ended_at - outcome.started_at < end
        characters += sum(count for at, count in got if begin <= at - outcome.started_at < end)
        if not begin <= item.at < end:
            continue
        counts["due"] += 1
        counts["refused" if is_refused else "unfinished" if ended_at is None else "ended"] += 1
        due_at = outcome.started_at + item.at
        if reply is not None:
            times["late"].append(reply.sent_at - due_at)
        if is_refused:
            continue
        until = closed if ended_at is None else ended_at  # what is missing has taken at least until now
        times["first"].append((got[0][0] if got else closed) - due_at)
        times["whole"].append(until - due_at)
        if got and item.max_tokens > 1:
            last = closed if ended_at is None else got[-1][0]
            times["per_character"].append((last - got[0][0]) / max(1, given - 1))
    return {
        "window_seconds": end - begin, **counts, "characters_per_second": characters / (end - begin),
        "requests_per_second": ended_within / (end - begin),
        **{name: percentiles(values) if values else None for name, values in times.items()},
        "load_cores": outcome.cpu_seconds / outcome.seconds,
    }  # fmt: skip


class Sweep(Run):
    def __init__(
        self, plan: Plan, shape: Path | GPTConfig, threads: int, goal: Goal, out: Path, llama_folder: Path,
        systems: tuple[str, ...] = SYSTEMS,
    ):  # fmt: skip
        self.plan, self.shape, self.threads = plan, shape, threads
        self.llama_folder, self.families = llama_folder, systems
        self.cores = available_cpus()  # threads of the peers
        self.systems: dict[str, peers.System] = {}
        self.servers: dict[str, Server] = {}
        settings = {"plan": asdict(plan), "quick": plan is not FULL, "threads": threads, "slots": SLOTS}
        settings |= {"waiting": WAITING, "cores": self.cores}
        packages, found = ("torch", "transformers", "litserve"), {"warnings": [], "systems": {}, "goal": goal}
        super().__init__("tests.load.sweep", out, "sweep", markdown, packages, settings=settings, **found)

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="chargpt-sweep-") as name, contextlib.ExitStack() as stack:
            folder = checkpoint_of(self.shape, Path(name) / "S")
            flags = {"threads": self.threads, "max_running_requests": SLOTS, "max_queued_requests": WAITING}
            self.systems["ours"] = peers.ours(folder, flags)
            if "llama" in self.families:
                programs = llama.build(self.llama_folder)
                file = llama.convert(programs, folder, Path(name))[LLAMA_DTYPE]
                variant = llama.Variant(LLAMA_DTYPE, llama.CACHES[0], file)
                [self.systems["llama"]] = peers.llama_cpp(programs, [variant], self.cores, SLOTS)
            stock = peers.stock_litserve(folder, self.cores)
            self.systems["stock"] = next(system for system in stock if system.streams == (True,))
            stack.callback(lambda: [server.close() for server in self.servers.values()])
            found = self.results["systems"]
            for system in self.families:
                self.start(system)
            for system in self.families:
                found[system] = {"saturation": self.saturation(system), "rungs": []}
            for share in self.plan.shares:
                for system in self.families:
                    self.rung(system, share)
        self.results["seconds"] = self.say.seconds
        self.write()
        draw(self.results, self.out / "sweep.png")

    def send(self, system: str, work: Iterable[Work], seconds: float | None, connections: int) -> load.Outcome:
        its = self.systems[system]
        requests = (
            (item.at, its.request(item.prompt, item.max_tokens, True, number), item) for number, item in enumerate(work)
        )
        options = {"connections": connections, "seconds": seconds, "keep": True, "accepts": (200, 429)}
        with self.servers[system].running():
            return load.run(self.servers[system].port, requests, **options)

    def saturation(self, system: str) -> dict[str, float]:
        """Throughput with CROWD clients in a closed loop."""
        seconds, longest = self.plan.saturation_seconds, self.plan.longest
        outcome = self.send(system, poisson_work(longest), seconds, CROWD)
        begin, closed = outcome.started_at + seconds / 3, outcome.started_at + outcome.seconds
        got = (moment for reply in outcome.replies for moment in moments(self.systems[system], reply))
        rate = sum(count for at, count in got if begin <= at < closed) / (closed - begin)
        if not rate:
            raise load.LoadError(f"{NAMES[system]}: no character within {seconds:g} s")
        lengths = [item.max_tokens for item in itertools.islice(poisson_work(longest), 5000)]
        length = sum(lengths) / len(lengths)
        self.restart(system)
        self.say(f"{NAMES[system]}: saturation {rate / length:.2f} requests/s")
        return {"characters_per_second": rate, "requests_per_second": rate / length, "mean_characters": length}

    def rung(self, system: str, share: float) -> None:
        plan, mine = self.plan, self.results["systems"][system]
        rate = share * mine["saturation"]["requests_per_second"]
        window = min(max(plan.window_seconds, plan.least_requests / rate), 3 * plan.window_seconds)
        end = plan.warm_seconds + window
        seconds = end + plan.cool_seconds
        due = list(itertools.takewhile(lambda item: item.at < seconds, poisson_work(plan.longest, rate)))
        outcome = self.send(system, due, seconds, min(len(due), CONNECTIONS) or 1)
        rung = {"rate": rate, "share": share}
        rung |= summary(self.systems[system], due, outcome, plan.warm_seconds, end)
        mine["rungs"].append(rung)
        name = f"{NAMES[system]} at {rate:.2f} requests/s"
        self.say(f"{name}: first {three(rung['first'])} ms, {rung['refused']} refused of {rung['due']}")
        if rung["load_cores"] > BUSY_CORES:
            self.results["warnings"].append(f"{name}: the load generator was busy on {rung['load_cores']:.2f} cores")
        if rung["late"] and rung["late"]["p99"] > LATE_SECONDS:
            late = f"{1e3 * rung['late']['p99']:.0f} ms late (p99)"
            self.results["warnings"].append(f"{name}: requests were sent up to {late}")
        self.write()
        if len(outcome.ended) < len(due):
            self.restart(system)

    def start(self, system: str) -> None:
        server = self.servers[system] = self.systems[system].start(self.out / "logs" / f"{system}.log")
        server.wait_until_ready()
        self.send(system, itertools.islice(poisson_work(32), 16), None, 16)  # warm-up; pauses it

    def restart(self, system: str) -> None:
        """Replace a server whose clients disconnected: stock LitServe continues with their requests."""
        if system == "stock":  # its shutdown would wait for them
            os.killpg(self.servers[system].process.pid, signal.SIGKILL)
        self.servers[system].close()
        self.start(system)


# Output


def three(seconds: dict[str, float] | None) -> str:
    """The percentiles in ms."""
    if seconds is None:
        return NONE
    return " / ".join(f"{1e3 * value:,.{0 if value > 0.02 else 1}f}" for value in seconds.values())


def markdown(results: dict[str, Any], shares: tuple[float, ...] | None = None) -> str:
    """Saturation and goodput, then the rungs by system and rate (only those at `shares`, if given), with footnotes."""
    systems, goal = results["systems"], results["goal"]
    best = [["", *(NAMES[system] for system in systems), *(f"÷ {NAMES[system]}" for system in list(systems)[1:])]]
    for label, values in (
        ("saturation, requests/s", [each["saturation"]["requests_per_second"] for each in systems.values()]),
        ("goodput, requests/s", [goodput(goal, each["rungs"]) for each in systems.values()]),
    ):
        ratios = [f"{values[0] / value:.1f} ×" if value else NONE for value in values[1:]]
        best.append([label, *(f"{value:,.1f}" if value else "none" for value in values), *ratios])
    rungs = [["offered, requests/s", "of its saturation", "characters/s", "requests/s", "first character, ms"]]
    rungs[0] += ["mean per character, ms", "whole answer, ms", "due", "refused", "unfinished", "goal"]
    for system, each in systems.items():
        for rung in by_rate(each["rungs"]):
            if shares is None or any(math.isclose(rung["share"], share) for share in shares):
                rungs.append(
                    [f"{NAMES[system]}, {rung['rate']:.3g}", f"{100 * rung['share']:.0f} %"]
                    + [f"{rung['characters_per_second']:,.0f}", f"{rung['requests_per_second']:.3g}"]
                    + [three(rung[name]) for name in ("first", "per_character", "whole")]
                    + [str(rung[name]) for name in ("due", "refused", "unfinished")]
                    + ["met" if is_met(goal, rung) else "missed"]
                )
    return "\n".join([*table(best), *table(rungs), *(f"- {line}" for line in footnotes(results))]) + "\n"


def footnotes(results: dict[str, Any]) -> list[str]:
    settings, goal = results["settings"], results["goal"]
    plan, length = settings["plan"], next(iter(results["systems"].values()))["saturation"]["mean_characters"]
    cores = max((r["load_cores"] for each in results["systems"].values() for r in each["rungs"]), default=0.0)
    return [
        f"The goal: 95 % of the requests have their first character within {1e3 * goal['first_seconds']:.0f} ms and "
        f"each further one within {1e3 * goal['character_seconds']:.0f} ms on average, and none is refused. Latencies "
        "are the 50th / 95th / 99th percentile, from the moment a request was due; unfinished requests count with the "
        "time elapsed.",
        f"Prompts of 4 to 64 characters, answers of {plan['longest'] // 16} to {plan['longest']}, {length:.0f} on "
        f"average; windows of at least {plan['window_seconds']:g} s after {plan['warm_seconds']:g} s of warm-up. This "
        f"service has {settings['threads']} threads, {settings['slots']} slots and a queue of {settings['waiting']} "
        f"(`--max-queued-requests`), llama.cpp 64 slots ({LLAMA_DTYPE}, {settings['cores']} threads), stock LitServe "
        "batches of 64; both have unbounded queues.",
        f"{conditions(results)}{'; the quick form' if settings['quick'] else ''}.",
        f"The load generator shares the cores with the server and took up to {100 * cores:.0f} % of one.",
        *(f"doubtful: {reason}" for reason in results["warnings"]),
    ]


def draw(results: dict[str, Any], png: Path) -> None:
    """Plot throughput, and the 95th percentiles of latencies with their goals, by offered rate."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(12, 5), layout="constrained")
    goal, machine = results["goal"], results["machine"]
    for axes, (title, key, limit) in zip(
        picture.subplots(1, 3),
        (
            ("throughput, characters/s", "", None),
            ("time to first character, p95, ms", "first", goal["first_seconds"]),
            ("mean time per character, p95, ms", "per_character", goal["character_seconds"]),
        ),
        strict=True,
    ):
        axes.set(title=title, xlabel="offered, requests/s", xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        for system, figures in results["systems"].items():
            rungs = [rung for rung in by_rate(figures["rungs"]) if not key or rung[key] is not None]
            values = [1e3 * rung[key]["p95"] if key else rung["characters_per_second"] for rung in rungs]
            axes.plot([rung["rate"] for rung in rungs], values, "o-", ms=4, label=NAMES[system])
        if limit is not None:
            axes.axhline(1e3 * limit, color="tab:red", ls="--", lw=1.2, label="goal")
        axes.legend()
    picture.suptitle(f"{machine['cpu']}, {machine['cores']} cores, {results['date'][:10]}", fontsize=9)
    picture.savefig(png, dpi=90)


def main() -> int:
    parser = build_parser("tests.load.sweep", __doc__, "out/load-sweep")
    add_threads(parser)
    llama.add_folder(parser)
    parser.add_argument("--quick", action="store_true", help="about four minutes")
    goal = {"type": float, "metavar": "SECONDS"}
    parser.add_argument("--first", default=0.2, help="goal: 95 %% of first characters within (default: 0.2)", **goal)
    parser.add_argument("--character", default=0.05, help="goal: and further ones within (default: 0.05)", **goal)
    parser.add_argument("--publish", action="store_true", help="write tests/README.md's tables and deploy's picture")
    args = parser.parse_args()
    goals = {"first_seconds": args.first, "character_seconds": args.character}
    sweep = Sweep(QUICK if args.quick else FULL, SHAPES["S"], args.threads, goals, args.out, args.llama_cpp)
    status = sweep.main(sweep.run)
    if args.publish and status == 0:
        shares = None if args.quick else PUBLISHED_SHARES
        put(markdown(sweep.results, shares), ROOT / "tests" / "README.md", "load-sweep")
        shutil.copy(args.out / "sweep.png", ROOT / "deploy" / "load-sweep.png")
    return status


if __name__ == "__main__":
    sys.exit(main())
