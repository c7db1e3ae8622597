"""Latency and throughput against offered load, in an open loop, compared with llama.cpp's server and stock LitServe.

    make load-sweep                     about 20 minutes on a quiet machine
    make load-sweep ARGS=--quick        under 3 minutes: fewer and shorter rungs
    make load-sweep ARGS=--publish      also write the tables of tests/README.md, and the picture
    make load-sweep ARGS=--tables       publish OUT/sweep.json without measuring

First measures the saturation of each system, its throughput with CROWD clients in a closed loop. Then offers a ladder
of rates, as shares of the saturation, with Poisson arrivals: all systems get the same requests, with gaps scaled to
the rate, and alternate at each rung. A rung is a warm-up, a window and a cool-down under constant load. Its figures
cover all requests due in the window, each counted as ended, refused (429) or unfinished. Latencies count from the time
at which a request was due, not from sending; an unfinished request counts with its time so far, a lower bound.

Goodput is the highest rate up to which every rung meets the goal.

Writes OUT/sweep.json, OUT/sweep.md, OUT/sweep.png and the servers' logs in OUT/logs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from service.model.config import GPTConfig
from service.settings import available_cpus
from tests.bench import llama, load, peers, report
from tests.bench.command import (
    BenchError,
    Progress,
    add_threads,
    build_parser,
    busy_warning,
    context,
    device,
    prepare_process,
)
from tests.bench.serve import about, percentiles, running
from tests.bench.servers import ROOT, Server, ServerError, module
from tests.bench.shapes import SHAPES, Work, checkpoint_of, mixed_work
from tests.toolbox.figures import write_figures
from tests.toolbox.http import event_data

SYSTEMS = ("ours", "llama", "stock")
NAMES = {"ours": "this service", "llama": "llama.cpp", "stock": "stock LitServe"}
FIELDS = {"ours": "text", "llama": "content"}  # of an event
LLAMA_DTYPE = "BF16"  # with its fp16 cache the fastest at most row counts of `make bench`
SLOTS = 64  # equals the stock service's batch size
WAITING = 64  # queue limit of this service; the stock service's queue is unbounded
CROWD = 96  # clients at saturation: more than slots, so that every batch is full
CONNECTIONS = 1000  # maximum
BUSY_CORES = 0.8  # of the load generator; above, it may be the bottleneck
LATE_SECONDS = 0.01  # tolerated delay of sending, at the 99th percentile
FAILURES = (BenchError, ServerError, load.LoadError, llama.LlamaError, OSError)
PICTURE = "load-sweep.png"  # in deploy


@dataclass(frozen=True)
class Goal:
    """`quantile` of the requests get their first character, and further ones on average, within these; no refusal."""

    first_seconds: float = 0.2
    character_seconds: float = 0.05
    quantile: float = 0.95


@dataclass(frozen=True)
class Plan:
    """Amount of measurement."""

    shares: tuple[float, ...]  # rates, as shares of the saturation
    bisections: int  # between the highest rate that meets the goal and the next
    longest: int  # completion, in characters
    saturation_seconds: float
    warm_seconds: float
    window_seconds: float
    cool_seconds: float
    least_requests: int  # due in a window; at low rates it grows, at most threefold


FULL = Plan(
    shares=(0.05, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0),
    bisections=2,
    longest=160,
    saturation_seconds=16.0,
    warm_seconds=4.0,
    window_seconds=13.0,
    cool_seconds=6.0,
    least_requests=30,
)
QUICK = Plan(
    shares=(0.05, 0.5, 0.9, 2.0),
    bisections=0,
    longest=80,
    saturation_seconds=6.0,
    warm_seconds=1.5,
    window_seconds=4.0,
    cool_seconds=2.5,
    least_requests=10,
)


# The work


def poisson_work(longest: int, seed: int = 0) -> Iterator[Work]:
    """An endless, fixed sequence of requests of mixed lengths, arriving at 1 per second on average."""
    chance, at = random.Random(seed), 0.0
    for number in itertools.count():
        at += chance.expovariate(1.0)
        [item] = mixed_work(1, longest=longest, arriving=0.0, seed=number)
        yield Work(item.prompt, item.max_tokens, at)


def at_rate(longest: int, rate: float, seconds: float) -> list[Work]:
    """The requests of poisson_work due within `seconds` at `rate` per second."""
    due = (Work(item.prompt, item.max_tokens, item.at / rate) for item in poisson_work(longest))
    return list(itertools.takewhile(lambda item: item.at < seconds, due))


def asked(system: str, number: int, item: Work) -> bytes:
    return peers.System(system, "", (), "").request(item.prompt, item.max_tokens, True, number)


def moments(system: str, reply: load.Reply) -> list[tuple[float, int]]:
    """(time, number of characters) of each read with characters."""
    separator, field = (b"\n", "text") if system == "stock" else (b"\n\n", FIELDS[system])
    got, unparsed = [], b""
    for at, data in load.dechunked(reply.parts):
        *events, unparsed = (unparsed + data).split(separator)
        count = 0
        for event in events:
            data = event if system == "stock" else event_data(event)
            if data is not None and data.startswith(b"{"):
                count += len(json.loads(data).get(field, ""))
        if count:
            got.append((at, count))
    return got


# A rung


def summary(system: str, due: list[Work], outcome: load.Outcome, begin: float, end: float) -> dict[str, Any]:
    """Figures of the requests due between `begin` and `end`, in seconds from the start.

    outcome: of sending all of `due` in order; requests not sent count as unfinished.

    Raises:
        LoadError: a finished completion has the wrong length.
    """
    closed = outcome.started_at + outcome.seconds
    counts = {"due": 0, "ended": 0, "refused": 0, "unfinished": 0}
    first, whole, per_character, between, late = [], [], [], [], []
    open_first = characters = ended_within = 0
    for item, reply in itertools.zip_longest(due, outcome.replies):
        got = [] if reply is None or reply.is_refused else moments(system, reply)
        if reply is not None and reply.ended_at is not None and not reply.is_refused:
            given = sum(count for _, count in got)
            if given != item.max_tokens:
                raise load.LoadError(f"{NAMES[system]}: expected {item.max_tokens} characters, got {given}")
            ended_within += begin <= reply.ended_at - outcome.started_at < end
        characters += sum(count for at, count in got if begin <= at - outcome.started_at < end)
        if not begin <= item.at < end:
            continue
        counts["due"] += 1
        due_at = outcome.started_at + item.at
        if reply is not None:
            late.append(reply.sent_at - due_at)
            if reply.is_refused:
                counts["refused"] += 1
                continue
        is_ended = reply is not None and reply.ended_at is not None
        counts["ended" if is_ended else "unfinished"] += 1
        # What is missing has taken at least until now.
        first.append((got[0][0] if got else closed) - due_at)
        open_first += not got
        whole.append((reply.ended_at if reply is not None and reply.ended_at is not None else closed) - due_at)
        if got and item.max_tokens > 1:
            last = got[-1][0] if is_ended else closed
            per_character.append((last - got[0][0]) / max(1, sum(count for _, count in got) - 1))
        if got:  # characters of one event share the time since the previous one, as in the service's histogram
            between += [0.0] * (got[0][1] - 1)
            for (before, _), (at, count) in zip(got, got[1:], strict=False):
                between += [(at - before) / count] * count
    return {
        "window_seconds": end - begin,
        **counts,
        "without_first": open_first,
        "characters_per_second": characters / (end - begin),
        "requests_per_second": ended_within / (end - begin),
        **{
            name: percentiles(values) if values else None
            for name, values in (
                ("first", first), ("between", between), ("per_character", per_character), ("whole", whole)
            )
        },
        "late_p99": percentiles(late)["p99"] if late else None,
        "load_cores": outcome.cpu_seconds / outcome.seconds,
    }  # fmt: skip


def holds(rung: dict[str, Any], goal: Goal) -> bool:
    """Whether a rung met the goal. Unfinished requests count with their time so far."""
    p = f"p{round(100 * goal.quantile)}"
    return (
        not rung["refused"]
        and rung["first"] is not None
        and rung["first"][p] <= goal.first_seconds
        and (rung["per_character"] is None or rung["per_character"][p] <= goal.character_seconds)
    )


def goodput(rungs: list[dict[str, Any]], goal: Goal) -> tuple[float, float | None]:
    """(highest rate up to which all rungs meet the goal, rate of the next rung); (0, …) if the first does not."""
    best = 0.0
    for rung in sorted(rungs, key=lambda rung: rung["rate"]):
        if not holds(rung, goal):
            return best, rung["rate"]
        best = rung["rate"]
    return best, None


def warnings(rung: dict[str, Any]) -> list[str]:
    """Reasons to doubt the figures of a rung."""
    found = []
    if rung["load_cores"] > BUSY_CORES:
        found.append(f"the load generator was busy on {rung['load_cores']:.2f} cores")
    if rung["late_p99"] is not None and rung["late_p99"] > LATE_SECONDS:
        found.append(f"requests were sent up to {1e3 * rung['late_p99']:.0f} ms late (p99)")
    return found


# The sweep


class Sweep:
    """One sweep and its results so far."""

    def __init__(
        self,
        plan: Plan,
        shape: Path | GPTConfig,
        threads: int,
        goal: Goal,
        out: Path,
        llama_folder: Path | None = None,
        systems: tuple[str, ...] = SYSTEMS,
    ):
        self.plan, self.shape, self.threads, self.goal, self.out = plan, shape, threads, goal, out
        self.llama_folder, self.systems = llama_folder or llama.default_folder(), systems
        self.cores = available_cpus()  # threads of the peers
        self.device = device()
        self.say = Progress()
        self.servers: dict[str, Server] = {}
        self.results: dict[str, Any] = {
            **context("tests.load.sweep", "torch", "transformers", "litserve"),
            "settings": {
                "plan": asdict(plan),
                "quick": plan is not FULL,
                "threads": threads,
                "device": self.device,
                "slots": SLOTS,
                "waiting": WAITING,
                "cores": self.cores,
                "shape": about(shape),
            },
            "goal": asdict(goal),
            "warnings": [],
        }

    def run(self) -> None:
        """
        Raises:
            BenchError, ServerError, LoadError, OSError: a server or measurement failed.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="chargpt-sweep-") as folder:
            self.folder = checkpoint_of(self.shape, Path(folder) / "S")
            if "llama" in self.systems:
                self.programs = llama.build(self.llama_folder)
                files = llama.convert(self.programs, self.folder, Path(folder))
                self.variant = llama.Variant(LLAMA_DTYPE, llama.CACHES[0], files[LLAMA_DTYPE])
            self.results["load_generator"] = load.ceiling(0.5)
            with contextlib.ExitStack() as stack:
                stack.callback(self.close)
                for system in self.systems:
                    self.servers[system] = self.start(system)
                    self.servers[system].pause()
                self.measure()
        self.results["seconds"] = self.say.seconds
        self.write()
        draw(self.results, self.out / "sweep.png")

    def measure(self) -> None:
        systems: dict[str, dict[str, Any]] = {}
        for system in self.systems:
            systems[system] = {"saturation": self.saturation(system), "rungs": []}
            self.say(
                f"{NAMES[system]}: saturation {systems[system]['saturation']['requests_per_second']:.2f} requests/s"
            )
        self.results["systems"] = systems
        for share in self.plan.shares:
            for system in self.systems:
                self.rung(system, share * systems[system]["saturation"]["requests_per_second"])
        for _ in range(self.plan.bisections):
            for system in self.systems:
                below, above = goodput(systems[system]["rungs"], self.goal)
                if above is not None and below:
                    self.rung(system, (below + above) / 2)

    def saturation(self, system: str) -> dict[str, float]:
        """Throughput with CROWD clients in a closed loop."""
        plan = self.plan
        work = poisson_work(plan.longest)
        requests = ((0.0, asked(system, i, item), item) for i, item in enumerate(work))
        with running(self.servers[system]), self.servers[system].busy() as cores:
            outcome = load.run(
                self.servers[system].port, requests, connections=CROWD, seconds=plan.saturation_seconds, keep=True
            )
        begin = outcome.started_at + plan.saturation_seconds / 3
        closed = outcome.started_at + outcome.seconds
        given = sum(count for reply in outcome.replies for at, count in moments(system, reply) if begin <= at < closed)
        lengths = [item.max_tokens for item in itertools.islice(poisson_work(plan.longest), 5000)]
        length = sum(lengths) / len(lengths)
        self.restart(system)
        rate = given / (closed - begin)
        return {
            "characters_per_second": rate,
            "requests_per_second": rate / length,
            "mean_characters": length,
            "load_cores": outcome.cpu_seconds / outcome.seconds,
            **{f"{role}_cores": cores[role] for role in ("worker", "http")},
        }

    def rung(self, system: str, rate: float) -> None:
        plan = self.plan
        window = min(max(plan.window_seconds, plan.least_requests / rate), 3 * plan.window_seconds)
        end = plan.warm_seconds + window
        seconds = end + plan.cool_seconds
        due = at_rate(plan.longest, rate, seconds)
        requests = [(item.at, asked(system, i, item), item) for i, item in enumerate(due)]
        server = self.servers[system]
        with running(server), server.busy() as cores:
            outcome = load.run(
                server.port,
                requests,
                connections=min(len(requests), CONNECTIONS) or 1,
                seconds=seconds,
                keep=True,
                refusals=True,
            )
        saturation = self.results["systems"][system]["saturation"]["requests_per_second"]
        rung = {
            "rate": rate,
            "share": rate / saturation,
            **summary(system, due, outcome, plan.warm_seconds, end),
            "cores": cores,
        }
        self.results["systems"][system]["rungs"].append(rung)
        first = rung["first"]
        self.say(
            f"{NAMES[system]}, {rate:.2f} requests/s: {rung['characters_per_second']:,.0f} characters/s, "
            f"first p95 {'–' if first is None else format(1e3 * first['p95'], ',.0f')} ms, "
            f"{rung['refused']} refused, {rung['unfinished']} unfinished of {rung['due']}"
        )
        for reason in warnings(rung):
            self.results["warnings"].append(f"{NAMES[system]} at {rate:.2f} requests/s: {reason}")
            self.say(f"  doubtful: {reason}")
        self.write()
        if len(outcome.ended) < len(due):
            self.restart(system)

    # -- servers --

    def start(self, system: str) -> Server:
        log = self.out / "logs" / f"{system}.log"
        if system == "ours":
            flags = {"threads": self.threads, "max_running_requests": SLOTS, "max_queued_requests": WAITING}
            [found] = peers.ours(self.folder, flags)
            server = found.start(log)
        elif system == "llama":
            [found] = peers.llama_cpp(self.programs, [self.variant], self.cores, SLOTS)
            server = found.start(log)
        else:
            server = Server(
                module("tests.bench.stock", checkpoint=self.folder, threads=self.cores, loop="stream"), log, "/health"
            )
        try:
            server.wait_until_ready()
            # Warm-up.
            requests = [
                (0.0, asked(system, i, item), item) for i, item in enumerate(itertools.islice(poisson_work(32), 16))
            ]
            load.run(server.port, requests, connections=16)
        except BaseException:
            server.close()
            raise
        return server

    def restart(self, system: str) -> None:
        """Replace a server whose clients disconnected: stock LitServe continues with their requests."""
        with contextlib.suppress(ProcessLookupError):
            if system == "stock":  # its shutdown would wait for them
                os.killpg(self.servers[system].process.pid, signal.SIGKILL)
        self.servers[system].close()
        self.servers[system] = self.start(system)
        self.servers[system].pause()

    def close(self) -> None:
        for server in self.servers.values():
            server.close()

    def write(self) -> None:
        write_figures(self.out / "sweep.json", self.results)
        (self.out / "sweep.md").write_text(markdown(self.results), encoding="utf-8")


# Output

README_SHARES = (1.0,)


def rows(results: dict[str, Any], shares: tuple[float, ...] | None = None) -> list[list[str]]:
    """A row for each rung by system and rate, or of the ladder at `shares` alone."""
    found = [["offered, requests/s", "of its saturation", "characters/s", "requests/s"]]
    found[0] += ["first character, ms", "between characters, ms", "mean per character, ms", "whole answer, ms"]
    found[0] += ["due", "refused", "unfinished", "goal"]
    goal = Goal(**results["goal"])
    for system, figures in results["systems"].items():
        for rung in sorted(figures["rungs"], key=lambda rung: rung["rate"]):
            if shares is not None and not any(math.isclose(rung["share"], share) for share in shares):
                continue
            latencies = [three(rung[name]) for name in ("first", "between", "per_character", "whole")]
            found.append(
                [f"{NAMES[system]}, {rung['rate']:.3g}", f"{100 * rung['share']:.0f} %"]
                + [f"{rung['characters_per_second']:,.0f}", f"{rung['requests_per_second']:.3g}", *latencies]
                + [str(rung[name]) for name in ("due", "refused", "unfinished")]
                + ["met" if holds(rung, goal) else "missed"]
            )
    return found


def three(seconds: dict[str, float] | None) -> str:
    """The percentiles in ms."""
    if seconds is None:
        return report.NONE
    return " / ".join(f"{1e3 * value:,.{0 if value > 0.02 else 1}f}" for value in seconds.values())


def verdict(results: dict[str, Any]) -> list[list[str]]:
    """Rows of saturation and goodput."""
    goal = Goal(**results["goal"])
    systems = [system for system in SYSTEMS if system in results["systems"]]
    found = [["", *(NAMES[system] for system in systems), *(f"÷ {NAMES[system]}" for system in systems[1:])]]
    saturations = [results["systems"][system]["saturation"] for system in systems]
    best = [goodput(results["systems"][system]["rungs"], goal)[0] for system in systems]
    for label, values in (
        ("saturation, requests/s", [s["requests_per_second"] for s in saturations]),
        ("saturation, characters/s", [s["characters_per_second"] for s in saturations]),
        ("goodput, requests/s", best),
    ):
        ratios = [f"{values[0] / value:.1f} ×" if value else report.NONE for value in values[1:]]
        found.append([label, *(f"{v:,.1f}" if v else "none" for v in values), *ratios])
    return found


def markdown(results: dict[str, Any], shares: tuple[float, ...] | None = None) -> str:
    """The tables of a run with footnotes; only rungs at `shares` if given."""
    return (
        "\n".join(
            [
                *report.table(verdict(results)),
                *report.table(rows(results, shares)),
                *("- " + line for line in footnotes(results)),
            ]
        )
        + "\n"
    )


def footnotes(results: dict[str, Any]) -> list[str]:
    about, settings, goal = results["machine"], results["settings"], results["goal"]
    plan, versions, length = settings["plan"], results["versions"], results["systems"]["ours"]["saturation"]
    cores = max(rung["load_cores"] for figures in results["systems"].values() for rung in figures["rungs"])
    lines = [
        f"The goal: {100 * goal['quantile']:.0f} % of the requests have their first character within "
        f"{1e3 * goal['first_seconds']:.0f} ms and each further one within {1e3 * goal['character_seconds']:.0f} ms on "
        "average, and none is refused. Latencies are the 50th / 95th / 99th percentile, from the moment a request was "
        "due; unfinished requests count with the time elapsed.",
        f"Prompts of 4 to 64 characters, answers of {plan['longest'] // 16} to {plan['longest']}, "
        f"{length['mean_characters']:.0f} on average; windows of at least {plan['window_seconds']:g} s after "
        f"{plan['warm_seconds']:g} s of warm-up. This service has {settings['slots']} slots and a queue of "
        f"{settings['waiting']} (`--max-queued-requests`), llama.cpp 64 slots "
        f"({LLAMA_DTYPE}, {settings['cores']} threads), stock LitServe batches of 64; both have unbounded queues.",
        f"{about['cpu']}, {about['cores']} cores; {settings['threads']} "
        f"{'thread' if settings['threads'] == 1 else 'threads'} per engine; load "
        f"{results['load_average']:.2f} at the start; {results['date'][:10]}; torch {versions['torch']}, transformers "
        f"{versions['transformers']}, LitServe {versions['litserve']}; revision {results['revision']}"
        f"{'; the quick form' if settings['quick'] else ''}.",
        f"The load generator shares the cores with the server and took up to {100 * cores:.0f} % of one.",
    ]
    return lines + [f"doubtful: {reason}" for reason in results["warnings"]]


COLORS = {"ours": "tab:blue", "llama": "tab:green", "stock": "tab:orange"}
STYLES = {"p50": "-", "p95": "--", "p99": ":"}


def draw(results: dict[str, Any], png: Path) -> None:
    """Plot throughput and latencies by offered rate, with goal and goodput."""
    from matplotlib.figure import Figure
    from PIL import Image

    goal = Goal(**results["goal"])
    picture = Figure(figsize=(12, 8), layout="constrained")
    (given, first), (between, mean) = picture.subplots(2, 2)
    for system, figures in results["systems"].items():
        color, rungs = COLORS[system], sorted(figures["rungs"], key=lambda rung: rung["rate"])
        if not rungs:
            continue
        rates = [rung["rate"] for rung in rungs]
        given.plot(rates, [r["characters_per_second"] for r in rungs], "o-", color=color, ms=4, label=NAMES[system])
        for axes, key in ((first, "first"), (between, "between"), (mean, "per_character")):
            for p, dashes in STYLES.items():
                values = [math.nan if rung[key] is None else 1e3 * rung[key][p] for rung in rungs]
                axes.plot(rates, values, dashes, marker=".", color=color, label=f"{NAMES[system]}, {p}")
        saturation = figures["saturation"]["requests_per_second"]
        best = goodput(rungs, goal)[0]
        for axes in (given, first, between, mean):
            axes.axvline(saturation, color=color, lw=1, alpha=0.4)
            if best:
                axes.axvspan(best * 0.985, best * 1.015, color=color, alpha=0.5, lw=0)
    for axes, limit in ((first, goal.first_seconds), (mean, goal.character_seconds)):
        axes.axhline(1e3 * limit, color="tab:red", ls="--", lw=1.2, label=f"goal for {100 * goal.quantile:.0f} %")
    for axes, title, y in (
        (given, "Throughput", "characters/s"),
        (first, "Time to first character", "ms"),
        (between, "Time between characters", "ms"),
        (mean, "Mean time per character of a request", "ms"),
    ):
        axes.set(title=title, xlabel="offered, requests/s", ylabel=y, xscale="log", yscale="log")
        axes.grid(alpha=0.3)
    about = results["machine"]
    picture.suptitle(
        f"{about['cpu']}, {about['cores']} cores, {results['date'][:10]}; thin line: saturation, bar: goodput",
        fontsize=9,
    )
    handles = {
        label: line for axes in (given, mean) for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    picture.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize=8)
    with tempfile.TemporaryFile() as drawn:
        picture.savefig(drawn, dpi=90)
        Image.open(drawn).quantize(64).save(png, optimize=True)  # a third of the bytes


def publish(results: dict[str, Any], out: Path, root: Path) -> None:
    """Put the tables into tests/README.md below `root`, and the picture into deploy/.

    Raises:
        ValueError: the file lacks its markers.
        OSError: a file cannot be read or written.
    """
    shares = None if results["settings"]["quick"] else README_SHARES
    report.put(markdown(results, shares), root / "tests" / "README.md", "load-sweep")
    shutil.copy(out / "sweep.png", root / "deploy" / PICTURE)


# Command line


def parse_args() -> argparse.Namespace:
    parser = build_parser("tests.load.sweep", __doc__, "out/load-sweep")
    add_threads(parser)
    llama.add_folder(parser)
    parser.add_argument("--quick", action="store_true", help="under three minutes")
    for name, default, what in (("--first", 0.2, "the first character"), ("--character", 0.05, "a further one")):
        parser.add_argument(
            name, type=float, default=default, metavar="SECONDS",
            help=f"goal: {what} of 95 %% of the requests within (default: %(default)s)",
        )  # fmt: skip
    parser.add_argument("--publish", action="store_true", help="write tests/README.md's tables and deploy's picture")
    parser.add_argument("--tables", action="store_true", help="publish OUT/sweep.json without measuring")
    args = parser.parse_args()
    if not (0 < args.first < math.inf and 0 < args.character < math.inf):
        parser.error(f"--first and --character must be positive, got {args.first:g} and {args.character:g}")
    return args


def main() -> int:
    args = parse_args()
    try:
        if not args.tables:
            measure(args)
        results = json.loads((args.out / "sweep.json").read_text(encoding="utf-8"))
        if args.tables:
            draw(results, args.out / "sweep.png")
        else:
            print(markdown(results))
        if args.tables or args.publish:
            publish(results, args.out, ROOT)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (*FAILURES, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def measure(args: argparse.Namespace) -> None:
    prepare_process()
    goal = Goal(args.first, args.character)
    sweep = Sweep(QUICK if args.quick else FULL, SHAPES["S"], args.threads, goal, args.out, args.llama_cpp)
    if warning := busy_warning(sweep.results):
        sweep.say(warning)
    sweep.run()
    sweep.say(f"figures: {args.out / 'sweep.json'}, .md, .png")


if __name__ == "__main__":
    sys.exit(main())
