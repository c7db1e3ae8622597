"""How much of its speed alone each of two clients of one engine keeps, on the real clock:

    python -m tests.bench.shares

An engine of the bundled checkpoint in this process, without HTTP, with the slots of a service. Per pair of clients: the
characters per second of each alone and beside the other, at equal weights, one right after the other. A client whose
share by weight is 1/2 should keep at least 1/2 of its speed alone, which the table shows as 1.00. The longest gap is
between two deltas of a stream. Then the speeds of two clients with 32 streams each, at weights 3:1 and 10:1.

The loads are those of tests/engine/accounts.py, where a cost model takes the place of the clock.

Rewrites OUT/shares.json and OUT/shares.md after each round.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from service.constrain.regex import compile_regex
from service.engine.backends import open_runner
from service.engine.engine import Engine
from service.model.checkpoint import Checkpoint
from service.model.params import SamplingParams
from service.process import spare_old_objects
from service.settings import BUNDLED
from service.wire import Submit
from tests.engine.accounts import SLOTS, Candidates, Streams, Texts, speeds
from tests.toolbox.figures import conditions, figure, plural, table

from .command import Run, add_threads, build_parser

WEIGHTS = (3, 10)
RARE = r"[^\n]*qqqq[^\n]*\n"  # no candidate matches: each ends at a line break or after 40 characters
STOP = r"(.|\n){%d}Q{9}"  # almost all of its states are active at each character; so many more are held back


class Scores(Texts):
    """A client that keeps texts waiting to be scored. length: of each; total: of all together."""

    def __init__(self, name: str, length: int, total: int, vocab_size: int):
        super().__init__(name, 0, prompt=length, number=total // length)
        ids = np.random.default_rng(0).integers(0, vocab_size, (self.number, length))
        self.texts = itertools.cycle(ids.tolist())

    def submit(self, engine: Engine, ids: Any) -> None:
        while len(self.open) < self.number:
            id = next(ids)
            self.open.add(id)
            scored = {"logprobs": 0, "score_from": 1, "must_run": True}
            engine.submit(Submit(id, next(self.texts), 0, SamplingParams(seed=id), client=self.name, **scored))

    def took(self, delta: Any, now: float) -> None:
        if delta.finish_reason:
            self.characters += self.prompt
            self.open.remove(delta.id)


def loads(characters: str, scored: int, states: int) -> dict[str, Callable[[str], Any]]:
    """By what a client does; each is called with the client's name. scored: characters of texts to score; states: of
    the stop pattern."""
    stop = compile_regex(STOP % (states - 10), characters).pack()
    return {
        "1 stream": lambda name: Streams(name, 1),
        "60 streams": lambda name: Streams(name, 60),
        "one-character requests": lambda name: Texts(name, 1),
        "draws of exact answers": lambda name: Candidates(name, RARE, characters=characters),
        f"{scored / 1e6:g} MB of scoring": lambda name: Scores(name, 400, scored, len(characters)),
        f"8 streams with a stop pattern of {states} states": lambda name: Streams(name, 8, stop_pattern=stop),
    }


def markdown(results: dict[str, Any]) -> str:
    """The part of its share that each client keeps, and the speeds by weight."""
    rows = [["a client, and another beside it", "keeps of its share", "the other", "longest gap of a stream, ms"]]
    for name, runs in results["pairs"].items():
        kept = (
            figure((2 * run[f"{who}beside"] / run[f"{who}alone"] for run in runs), "{:.2f}") for who in ("", "other_")
        )
        rows.append([name, *kept, figure((run["gap_seconds"] for run in runs), "{:.0f}", 1e3)])
    parts = [table(rows)]
    rows = [["32 and 32 streams, weights", "ratio of the speeds"]]
    rows += [[f"{weight}:1", figure(runs, "{:.2f}")] for weight, runs in results["weights"].items()]
    parts.append(table(rows))
    about = [f"{conditions(results)}; {plural(results['threads'], 'thread')}", "medians (lowest–highest) of runs"]
    about += [f"failed: {what}, {reason}" for what, reason in results["errors"].items()]
    parts.append([f"- {line}" for line in about])
    return "\n".join("\n".join(part) for part in parts) + "\n"


class Bench(Run):
    def __init__(self, args: argparse.Namespace):
        found: dict[str, Any] = {"threads": args.threads, "seconds": args.seconds, "pairs": {}, "weights": {}}
        super().__init__("tests.bench.shares", args.out, "shares", markdown, ("numpy",), **found)
        self.seconds, self.runs, self.ids = args.seconds, args.runs, itertools.count()
        checkpoint = Checkpoint.read(BUNDLED)
        runner = open_runner(checkpoint, "native", "float32", SLOTS, args.threads)
        self.engine = Engine(runner, max_waiting=10**6)
        self.loads = loads("".join(checkpoint.tokenizer.characters), args.scored, args.states)

    def run(self) -> None:
        spare_old_objects()  # as a worker does
        first, second, *others = self.loads
        pairs = [(first, second), *itertools.product((first, second), others)]
        for number in range(1, self.runs + 1):
            with self.noted(f"run {number} of {self.runs}"):
                for pair in pairs:
                    self.results["pairs"].setdefault(" beside ".join(pair), []).append(self.pair(*pair))
                for weight in WEIGHTS:
                    self.results["weights"].setdefault(str(weight), []).append(self.ratio(weight))

    def speeds(self, *clients: Any) -> list[float]:
        return speeds(*clients, seconds=self.seconds, warm_up=self.seconds / 3, engine=self.engine, ids=self.ids)

    def pair(self, one: str, other: str) -> dict[str, float]:
        clients = [self.loads[one]("one"), self.loads[other]("other")]
        alone, other_alone = (self.speeds(self.loads[name](name))[0] for name in (one, other))
        beside, other_beside = self.speeds(*clients)
        return {
            "alone": alone, "beside": beside, "other_alone": other_alone, "other_beside": other_beside,
            "gap_seconds": max(client.longest for client in clients),
        }  # fmt: skip

    def ratio(self, weight: int) -> float:
        heavy, light = self.speeds(Streams("heavy", 32, weight), Streams("light", 32))
        return heavy / light


def main() -> int:
    parser = build_parser("tests.bench.shares", __doc__, "out/bench-shares")
    add_threads(parser)
    add = parser.add_argument
    add("--runs", type=int, default=5, metavar="N", help="(default: %(default)s)")
    add("--seconds", type=float, default=1.2, metavar="S", help="of a measurement (default: %(default)s)")
    add("--scored", type=int, default=4_000_000, metavar="N", help="characters to score (default: %(default)s)")
    add("--states", type=int, default=256, metavar="N", help="of the stop pattern (default: %(default)s)")
    bench = Bench(parser.parse_args())
    return bench.main(bench.run)


if __name__ == "__main__":
    sys.exit(main())
