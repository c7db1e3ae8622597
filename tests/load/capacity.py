"""Capacity model: the load that a replica carries, from measured step times, and the replicas that a load needs.

    python -m tests.load.capacity --rate 500                          replicas for 500 requests/s
    python -m tests.load.capacity --rate 500 --first 0.5 --character 0.02
    python -m tests.load.capacity --write deploy/CAPACITY.md          the tables of that file

Engine figures come from OUT/sweep.json (`make load-sweep`). The model is a birth-death chain over the number of
sequences in a replica: Poisson arrivals, completions at a rate that depends on the number running. Of HTTP it includes
a constant path time, of the engine the step times only.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from service.engine.cuda import STEPS
from service.model.config import GPTConfig
from service.model.gpt import GPT
from tests.bench import report
from tests.bench.shapes import SHAPES, config_of

Floats = NDArray[np.float64]

LEAST_RATE = 1e-6  # requests/s; a goal not met at this rate is met at none


# The queue


class Chain:
    """A birth-death chain: Poisson arrivals at `arrivals` per second, rates[n − 1] completions per second while n run.

    At most len(rates) sequences run; further ones wait in order, at most `waiting` (None: unbounded), the rest are
    refused. M/M/1, M/M/c and M/M/c/K are special cases. Lengths are exponential; while none wait, only their mean
    matters, as running sequences share the processor.

    Raises:
        ValueError: a rate is not positive, or the queue is unbounded and arrivals reach the last rate.
    """

    def __init__(self, arrivals: float, rates: Sequence[float] | Floats, waiting: int | None = None):
        self.arrivals, self.rates, self.waiting = arrivals, np.asarray(rates, dtype=np.float64), waiting
        if arrivals <= 0 or not len(self.rates) or self.rates.min() <= 0:
            raise ValueError(f"rates must be positive, got {arrivals} and {self.rates}")
        self.load = arrivals / self.rates[-1]
        if waiting is None and self.load >= 1:
            raise ValueError(f"{arrivals:g} requests/s exceed the capacity of {self.rates[-1]:g} requests/s")
        running = np.concatenate([[0.0], np.cumsum(np.log(arrivals / self.rates))])  # log weights
        if waiting is None:
            running -= running.max()
            weights = np.exp(running)
            tail = weights[-1] * self.load / (1 - self.load)  # of all states with waiting sequences
        else:
            queued = running[-1] + math.log(self.load) * np.arange(1, waiting + 1)
            highest = max(running.max(), queued.max(initial=-np.inf))
            weights, behind = np.exp(running - highest), np.exp(queued - highest)
            tail = behind.sum()
            self._queued: Floats = behind / (weights.sum() + tail)  # [k]: probability of k + 1 waiting
        total = weights.sum() + tail
        self.running: Floats = weights / total  # [n]: probability of n in the system, n ≤ slots
        self.waits = float(tail / total)  # probability that any wait

    @property
    def slots(self) -> int:
        return len(self.rates)

    @property
    def refused(self) -> float:
        """Share of arrivals that find the queue full."""
        if self.waiting is None:
            return 0.0
        return float(self._queued[-1] if self.waiting else self.running[-1])

    @property
    def throughput(self) -> float:
        """Completed requests per second."""
        return self.arrivals * (1 - self.refused)

    @property
    def mean_running(self) -> float:
        return float(self.running @ np.arange(self.slots + 1) + self.waits * self.slots)

    @property
    def mean_waiting(self) -> float:
        if self.waiting is None:
            return self.waits / (1 - self.load)
        return float(self._queued @ np.arange(1, self.waiting + 1))

    @property
    def at_arrival(self) -> Floats:
        """[n]: probability that an accepted arrival finds n < slots in the system; otherwise it waits."""
        return self.running[:-1] / (1 - self.refused)

    def wait_exceeds(self, seconds: float) -> float:
        """Probability that an accepted arrival waits longer than `seconds` ≥ 0 for a slot."""
        rate = float(self.rates[-1])
        if self.waiting is None:
            waits = float(self.running[-1]) + self.waits
            return waits * math.exp(-(rate - self.arrivals) * seconds)
        # An arrival with k ahead in the queue waits for k + 1 completions: longer than t if t sees at most k.
        found = np.concatenate([self.running[-1:], self._queued])[:-1] / (1 - self.refused)
        if seconds == 0:
            return float(found.sum())
        k = np.arange(len(found))
        factorials = np.concatenate([[0.0], np.cumsum(np.log(k[1:]))])  # logarithms
        log_poisson = -rate * seconds + k * math.log(rate * seconds) - factorials
        return float(found @ np.minimum(np.cumsum(np.exp(log_poisson)), 1.0))


# A replica


@dataclass(frozen=True)
class Replica:
    """A service with one engine, and its workload."""

    step_seconds: tuple[tuple[int, float], ...]  # (rows, time of a decode step), sorted by rows
    prefill_seconds: float  # added to a turn of a full batch by the first prompt
    prefill_more_seconds: float  # added by each further prompt in the same turn
    idle_prefill_seconds: float  # of a prompt on an idle engine, with cold caches
    characters: float  # mean length of a completion
    slots: int = 64
    waiting: int | None = 1024
    path_seconds: float = 0.0015  # of the first character outside the engine: HTTP, validation, frames

    def __post_init__(self) -> None:
        rows = [rows for rows, _ in self.step_seconds]
        if not rows or rows != sorted(set(rows)) or rows[0] < 1:
            raise ValueError(f"step_seconds must be sorted by rows ≥ 1, got {self.step_seconds}")
        if self.characters < 1:
            raise ValueError(f"characters must be at least 1, got {self.characters}")

    def step(self, rows: float | Floats) -> Floats:
        """Time of a decode step: linear between measurements, and extrapolated beyond."""
        points = np.array([(0, 0.0), *self.step_seconds])
        (below, low), (above, high) = points[-2:]
        beyond = np.maximum(np.asarray(rows) - above, 0) * (high - low) / (above - below)
        return np.interp(rows, points[:, 0], points[:, 1]) + beyond

    def turn(self, running: float | Floats) -> Floats:
        """Time between two characters while `running` sequences run, prompts of their successors included.

        A sequence takes as many turns as it has characters; the first runs its prompt and emits the first character,
        while the others decode.
        """
        prompts = running / self.characters  # per turn
        return self.step(running - prompts) + self.prefill(prompts)

    def prefill(self, prompts: float | Floats) -> Floats:
        """Mean time that prompts add to a turn; their number per turn is Poisson-distributed with mean `prompts`."""
        return (self.prefill_seconds - self.prefill_more_seconds) * -np.expm1(-prompts) + (
            self.prefill_more_seconds * np.asarray(prompts)
        )

    def rate(self, running: float | Floats) -> Floats:
        """Completed requests per second while `running` sequences run."""
        return running / (self.characters * self.turn(running))

    @property
    def saturation(self) -> float:
        """Maximum requests per second."""
        return float(self.rate(self.slots))

    def chain(self, arrivals: float, replicas: int = 1) -> Chain:
        """The queue at `arrivals` requests per second.

        Several replicas share one queue and are equally busy, the optimum of any load balancing. That queue is
        unbounded, as no goal permits queues near the limit.
        """
        rates = replicas * self.rate(np.arange(1, replicas * self.slots + 1) / replicas)
        return Chain(arrivals, rates, self.waiting if replicas == 1 else None)

    def forecast(self, arrivals: float, replicas: int = 1) -> Forecast:
        return Forecast(self, self.chain(arrivals, replicas), replicas)


@dataclass(frozen=True)
class Forecast:
    """Client-side latencies of a replica, or of several with one queue, at a given rate."""

    replica: Replica
    chain: Chain
    replicas: int = 1

    @property
    def characters_per_second(self) -> float:
        return self.chain.throughput * self.replica.characters

    def first_exceeds(self, seconds: float) -> float:
        """Probability that an accepted request's first character takes longer.

        A request that finds a free slot waits for the rest of the current turn, uniformly distributed, and for its own
        turn; a queued one enters between two turns.
        """
        replica, chain = self.replica, self.chain
        found = np.arange(chain.slots) / self.replicas  # per replica
        prefill = np.where(found == 0, replica.idle_prefill_seconds, replica.prefill_seconds)
        left = seconds - replica.path_seconds - prefill
        rest = np.maximum(replica.turn(found), 1e-12)  # 0 on an idle replica
        late = float(chain.at_arrival @ np.clip(1 - (left - replica.step(found)) / rest, 0.0, 1.0))
        left_of_waiting = seconds - replica.path_seconds - replica.prefill_seconds - float(replica.step(replica.slots))
        return late + chain.wait_exceeds(max(0.0, left_of_waiting))

    def first(self, quantile: float) -> float:
        """Quantile of the time to first character."""
        high = 1e-3
        while self.first_exceeds(high) > 1 - quantile:
            high *= 2
        return bisect(lambda seconds: self.first_exceeds(seconds) > 1 - quantile, 0.0, high)

    def character(self, quantile: float) -> float:
        """Quantile of the time per further character: a turn with the sequences that an arrival finds, and itself.

        A request's own mean averages over its whole run, so its high quantiles are somewhat lower.
        """
        found = int(np.searchsorted(np.cumsum(self.chain.at_arrival), quantile))
        rows = self.replica.slots if found == self.chain.slots else max(1.0, (found + 1) / self.replicas)
        return float(self.replica.turn(rows))


def bisect(is_below: Callable[[float], bool], low: float, high: float, rounds: int = 40) -> float:
    """The point where `is_below` turns false, approached from below."""
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low


# Goals and fleets


@dataclass(frozen=True)
class Goal:
    """A latency goal: `quantile` of requests get the first character, and further ones on average, within these."""

    first_seconds: float = 0.2
    character_seconds: float = 0.05
    quantile: float = 0.95
    refused: float = 0.001  # tolerated share; a bounded queue can always be full

    def __post_init__(self) -> None:
        if min(self.first_seconds, self.character_seconds) <= 0 or not 0 < self.quantile < 1:
            raise ValueError(f"a goal must have positive seconds and a quantile between 0 and 1, got {self}")

    def holds(self, forecast: Forecast) -> bool:
        return (
            forecast.chain.refused <= self.refused
            and forecast.character(self.quantile) <= self.character_seconds
            and forecast.first_exceeds(self.first_seconds) <= 1 - self.quantile
        )


def goodput(replica: Replica, goal: Goal, replicas: int = 1) -> float:
    """The highest rate in requests per second that meets the goal; 0 if none does."""
    limit = replicas * replica.saturation * (1 - 1e-9)
    if not goal.holds(replica.forecast(LEAST_RATE, replicas)):
        return 0.0
    return bisect(lambda rate: goal.holds(replica.forecast(rate, replicas)), LEAST_RATE, limit)


@dataclass(frozen=True)
class Fleet:
    """Number of replicas for a load."""

    at_random: int  # random balancing: each replica has a queue of its own
    at_best: int  # one shared queue; least-loaded balancing comes close
    with_headroom: int  # recommended: random balancing, replicas at HEADROOM of their goodput, plus one


HEADROOM = 0.8  # planned share of a replica's goodput; the rest absorbs peaks and restarts


def fleet(replica: Replica, goal: Goal, rate: float) -> Fleet:
    """
    Raises:
        ValueError: no rate meets the goal.
    """
    each = goodput(replica, goal)
    if not each:
        raise ValueError(f"no rate meets {goal}")
    at_random = math.ceil(rate / each)
    too_few, at_best = math.ceil(rate / replica.saturation) - 1, at_random
    while at_best - too_few > 1:
        middle = (too_few + at_best) // 2
        if _carries(replica, goal, rate, middle):
            at_best = middle
        else:
            too_few = middle
    return Fleet(at_random, at_best, math.ceil(rate / (HEADROOM * each)) + 1)


def _carries(replica: Replica, goal: Goal, rate: float, replicas: int) -> bool:
    return rate < replicas * replica.saturation and goal.holds(replica.forecast(rate, replicas))


# GPUs


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet."""

    name: str
    bytes_per_second: float
    operations_per_second: dict[str, float]  # by dtype: fp32 without tensor cores; bf16 dense, summed in fp32


CARDS = (
    Card("H200", 4.8e12, {"float32": 67e12, "bfloat16": 989e12}),
    Card("L4", 300e9, {"float32": 30.3e12, "bfloat16": 121e12}),
    Card("RTX 4090", 1.008e12, {"float32": 82.6e12, "bfloat16": 165e12}),
)
# An assumption: the shortest time of a kernel in a graph, from the end of the one before.
KERNEL_SECONDS = 2.5e-6


@dataclass(frozen=True)
class StepOnCard:
    """Calculated minimum times of a decode step on a GPU, by bottleneck."""

    rows: int
    read_seconds: float  # of the weights once, and of keys and values of each row
    product_seconds: float
    kernel_seconds: float  # of as many kernels as a step has, were each as short as possible
    host_seconds: float  # the engine's part, which runs beside

    @property
    def card_seconds(self) -> float:
        return max(self.read_seconds, self.product_seconds, self.kernel_seconds)

    @property
    def seconds(self) -> float:
        return max(self.card_seconds, self.host_seconds)

    @property
    def bound(self) -> str:
        """What takes longest."""
        parts = {
            "reads": self.read_seconds,
            "products": self.product_seconds,
            "kernels": self.kernel_seconds,
            "host": self.host_seconds,
        }
        return max(parts, key=lambda name: parts[name])


def step_on_card(
    config: GPTConfig, parameters: int, rows: int, card: Card, dtype: str, *, operations: float, host_seconds: float
) -> StepOnCard:
    """A step over `rows` full windows. operations: kernels per step; host_seconds: per step."""
    products = 2 * parameters + 4 * config.n_layer * config.n_embd * config.block_size  # per row
    size = 4 if dtype == "float32" else 2
    return StepOnCard(
        rows,
        (size * parameters + rows * slot_bytes(config, size)) / card.bytes_per_second,
        rows * products / card.operations_per_second[dtype],
        operations * KERNEL_SECONDS,
        host_seconds,
    )


def slot_bytes(config: GPTConfig, element_size: int = 4) -> int:
    """Keys and values of one cache slot (service/model/kv_cache.py)."""
    return 2 * config.n_layer * config.n_kv_head * config.block_size * config.head_dim * element_size


# Measured figures and tables


def replica_of(results: dict[str, Any], waiting: int | None = None) -> Replica:
    """The replica that a sweep measured; `waiting` overrides its queue limit."""
    measured, settings = results["engine"], results["settings"]
    return Replica(
        tuple((int(rows), float(seconds)) for rows, seconds in measured["step_seconds"]),
        measured["prefill_seconds"],
        measured["prefill_more_seconds"],
        measured["idle_prefill_seconds"],
        results["systems"]["ours"]["saturation"]["mean_characters"],
        settings["slots"],
        settings["waiting"] if waiting is None else waiting,
    )


# Measured by `make bench` on 2 cores (table "over HTTP").
HTTP_CHARACTERS = 880_000  # characters/s per HTTP process, 64 streams around a stub engine
EVENT_SECONDS = 36e-6  # CPU time of an HTTP process per event
INTERVAL_SECONDS = 0.02  # --stream-interval-seconds: at most one event per stream in each

GOALS = (Goal(0.1, 0.015), Goal(), Goal(1.0, 0.1))
RATES = (10, 100, 1_000, 10_000)  # requests/s
CARD_ROWS = (1, 64, 512, 2048)
CHARACTER_RATES = (10_000, 100_000, 1_000_000, 10_000_000)  # characters/s


def write_tables(results: dict[str, Any], path: Path) -> None:
    """Write all tables of a sweep's results to a file, each between its markers.

    Raises:
        ValueError: the file lacks the markers of a table.
        OSError: it cannot be read or written.
    """
    for name, content in tables(results).items():
        report.put(content, path, name)


def tables(results: dict[str, Any]) -> dict[str, str]:
    replica = replica_of(results)
    return {
        name: "\n".join(report.table(rows))
        for name, rows in (
            ("capacity-replica", replica_rows(results, replica)),
            ("capacity-check", check_rows(results, replica)),
            ("capacity-replicas", fleet_rows(replace(replica, waiting=1024))),
            ("capacity-host", host_rows(results["engine"])),
            ("capacity-card", card_rows(results["engine"])),
            ("capacity-characters", character_rows(results["engine"], replica)),
        )
    }


def replica_rows(results: dict[str, Any], replica: Replica) -> list[list[str]]:
    """Measured step times, and figures of a full batch."""
    cores = results["machine"]["cores"]
    found = [["rows", "ms per step", "characters/s of the engine", f"one replica on {cores} cores"]]
    for rows, seconds in replica.step_seconds:
        found.append([str(rows), f"{1e3 * seconds:.2f}", f"{rows / seconds:,.0f}", ""])
    measured = results["systems"]["ours"]["saturation"]
    facts = (
        f"prefill adds {1e3 * replica.prefill_seconds:.1f} ms to a full batch's turn, "
        f"{1e3 * replica.prefill_more_seconds:.1f} ms per further prompt; on an idle engine it takes "
        f"{1e3 * replica.idle_prefill_seconds:.1f} ms",
        f"mean completion: {replica.characters:.0f} characters",
        f"saturation, model: {replica.saturation:.1f} requests/s, "
        f"{replica.saturation * replica.characters:,.0f} characters/s",
        f"saturation, measured over HTTP: {measured['requests_per_second']:.1f} requests/s, "
        f"{measured['characters_per_second']:,.0f} characters/s",
        f"goodput, model: {goodput(replica, Goal(**results['goal'])):.1f} requests/s",
    )
    for row, fact in zip(found[1:], facts, strict=False):
        row[3] = fact
    return found + [["", "", "", fact] for fact in facts[len(found) - 1 :]]


def check_rows(results: dict[str, Any], replica: Replica) -> list[list[str]]:
    """The model against the sweep at each offered rate, measured → model."""
    found = [["offered, requests/s", "characters/s", "first character, ms, p50", "p95"]]
    found[0] += ["mean per character, ms, p50", "p95", "refused"]
    errors: list[list[float]] = [[] for _ in range(5)]
    for rung in sorted(results["systems"]["ours"]["rungs"], key=lambda rung: rung["rate"]):
        if rung["first"] is None or rung["per_character"] is None:
            continue
        forecast = replica.forecast(rung["rate"])
        pairs = [(rung["characters_per_second"], forecast.characters_per_second)]
        for name, predict in (("first", forecast.first), ("per_character", forecast.character)):
            pairs += [(1e3 * rung[name][f"p{p}"], 1e3 * predict(p / 100)) for p in (50, 95)]
        for column, (measured, predicted) in zip(errors, pairs, strict=True):
            column.append(predicted / measured - 1 if measured else math.inf)
        shown = [f"{a:,.{0 if a > 20 else 1}f} → {b:,.{0 if b > 20 else 1}f}" for a, b in pairs]
        refused = f"{100 * rung['refused'] / max(1, rung['due']):.0f} % → {100 * forecast.chain.refused:.0f} %"
        found.append([f"{rung['rate']:.3g}", *shown, refused])
    for label, choose in (("median error of the model", np.median), ("worst error of the model", np.max)):
        cells = [f"{100 * float(choose(np.abs(column))):.0f} %" if column else report.NONE for column in errors]
        found.append([label, *cells, ""])
    return found


def fleet_rows(replica: Replica) -> list[list[str]]:
    """Replicas by goal and rate."""
    found = [["goal: first character, mean of further ones", "goodput of one, requests/s"]]
    found[0] += [f"{rate:,} requests/s" for rate in RATES]
    for goal in GOALS:
        each = goodput(replica, goal)
        first, character = 1e3 * goal.first_seconds, 1e3 * goal.character_seconds
        row = [f"{100 * goal.quantile:.0f} % within {first:.0f} ms, {character:.0f} ms"]
        row.append(f"{each:.1f}" if each else "none")
        for rate in RATES:
            if each:
                needed = fleet(replica, goal, rate)
                row.append(f"{needed.with_headroom:,} ({needed.at_best:,}–{needed.at_random:,})")
            else:
                row.append(report.NONE)
        found.append(row)
    return found


def shape_on_card(name: str, rows: int, measured: dict[str, Any], card: Card, dtype: str) -> StepOnCard:
    """A step of a benchmarked shape; measured: the counts and the host's time, as `measure_host` gives them."""
    config = config_of(SHAPES[name])
    with torch.device("meta"):
        parameters = GPT(config).num_parameters
    operations = measured["operations"][name]
    return step_on_card(
        config, parameters, rows, card, dtype,
        operations=operations["step"] + operations["fixed"] / max(STEPS),
        host_seconds=float(np.interp(rows, *zip(*measured["host_seconds"], strict=True))) / max(STEPS),
    )  # fmt: skip


def card_rows(measured: dict[str, Any]) -> list[list[str]]:
    """Characters per second calculated for each card, and what bounds them."""
    found = [["card, shape, dtype", *(report.plural(rows, "row") for rows in CARD_ROWS)]]
    for card in CARDS:
        for name in SHAPES:
            for dtype in card.operations_per_second:
                steps = [shape_on_card(name, rows, measured, card, dtype) for rows in CARD_ROWS]
                cells = [f"{step.rows / step.seconds:,.0f} ({step.bound})" for step in steps]
                found.append([f"{card.name}, {name}, {dtype}", *cells])
    return found


def host_rows(measured: dict[str, Any]) -> list[list[str]]:
    """What was measured and counted without a card."""
    found = [["", *(report.plural(rows, "row") for rows, _ in measured["host_seconds"])]]
    found.append(
        [f"host, ms per launch of {max(STEPS)} steps", *(f"{1e3 * s:.2f}" for _, s in measured["host_seconds"])]
    )
    for name, counts in measured["operations"].items():
        text = f"{counts['step']} per step and {counts['fixed']} per replay"
        found.append([f"kernels of {name}", text, *[report.NONE] * (len(found[0]) - 2)])
    return found


def character_rows(measured: dict[str, Any], replica: Replica) -> list[list[str]]:
    """Resources per throughput: CPU replicas, engines on GPUs, HTTP processes."""
    rows = 1024
    step = shape_on_card("S", rows, measured, CARDS[0], "float32")
    each = rows / step.seconds
    found = [["characters/s", "CPU replicas", f"{CARDS[0].name}s with {rows:,} rows each"]]
    found[0] += ["concurrent streams", "HTTP processes", "events/s", "cache"]
    for rate in CHARACTER_RATES:
        streams = rate * step.seconds
        events = streams / max(INTERVAL_SECONDS, step.seconds)
        processes = max(events * EVENT_SECONDS, rate / HTTP_CHARACTERS)
        found.append(
            [f"{rate:,}", f"{math.ceil(rate / (replica.saturation * replica.characters)):,}"]
            + [f"{math.ceil(rate / each):,}", f"{streams:,.0f}"]
            + [
                f"{math.ceil(processes):,}",
                f"{events:,.0f}",
                f"{streams * slot_bytes(config_of(SHAPES['S'])) / 1e9:.2g} GB",
            ]
        )
    return found


# Command line


def add_goal(parser: argparse.ArgumentParser) -> None:
    goal = Goal()
    parser.add_argument(
        "--first", type=float, default=goal.first_seconds, metavar="SECONDS",
        help="goal: time to first character (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--character", type=float, default=goal.character_seconds, metavar="SECONDS",
        help="goal: mean time per further character (default: %(default)s)",
    )  # fmt: skip


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.load.capacity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    file = Path("out/load-sweep/sweep.json")
    parser.add_argument("--sweep", type=Path, default=file, metavar="FILE", help="(default: %(default)s)")
    parser.add_argument("--rate", type=float, metavar="R", help="offered load, in requests per second")
    parser.add_argument("--characters", type=float, metavar="N", help="mean answer length (default: the sweep's)")
    add_goal(parser)
    parser.add_argument(
        "--quantile", type=float, default=Goal.quantile, metavar="Q",
        help="goal: share of requests that must meet it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--write", type=Path, metavar="FILE", help="write all tables to FILE")
    args = parser.parse_args()
    if args.rate is None and args.write is None:
        parser.error("pass --rate or --write")
    if args.rate is not None and not 0 < args.rate < math.inf:
        parser.error(f"--rate must be positive, got {args.rate:g}")
    return args


def main() -> int:
    args = parse_args()
    try:
        results = json.loads(args.sweep.read_text(encoding="utf-8"))
        if args.write is not None:
            write_tables(results, args.write)
        if args.rate is not None:
            replica = replica_of(results, waiting=1024)
            if args.characters is not None:
                replica = replace(replica, characters=args.characters)
            print(answer(replica, Goal(args.first, args.character, args.quantile), args.rate))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyError as error:
        print(f"error: {args.sweep} lacks {error}, as an earlier revision's: run make load-sweep", file=sys.stderr)
        return 1
    return 0


def answer(replica: Replica, goal: Goal, rate: float) -> str:
    """
    Raises:
        ValueError: no rate meets the goal.
    """
    needed, each = fleet(replica, goal, rate), goodput(replica, goal)
    return "\n".join(
        (
            f"one replica: saturation {replica.saturation:.1f} requests/s, goodput {each:.1f} requests/s",
            f"{rate:g} requests/s: {needed.with_headroom} replicas, {100 * HEADROOM:.0f} % loaded, one of them spare",
            f"without headroom: {needed.at_random} with random balancing, at least {needed.at_best} with any",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
