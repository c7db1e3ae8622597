"""Answers under a condition, by mask and exactly: how far each is from the model's own answers that match.

    python -m tests.bench.exact --lists names.txt smiles.txt

Each list, a record in each line, is trained on as installed (`train --records`), served as installed (`python -m
service`), and asked over HTTP under conditions of its kind. Per condition:

    free      free answers of the model that match, found by sampling --pool records: what answers should be like
    mask      answers by the mask, the default
    exact     answers with "exact": true

All are scored by `/v1/score`: nats per character, and of the end of a record. With RDKit installed, the share of valid
SMILES too. `exact` has its acceptance and its time. Then, for each list, the speed of another client's stream alone and
beside requests for exact answers that draw all the time (they match nothing and end at their limits).

Rewrites OUT/exact.json and OUT/exact.md after each part.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from service.settings import cpus_per_worker
from tests.helpers import serving
from tests.toolbox import load
from tests.toolbox.figures import figure, table
from training.text.records import LINES

from . import peers
from .command import BenchError, Run, build_parser, in_child
from .serve import OTHER_CLIENT
from .train import trained

CONDITIONS = {
    "smiles": {
        "contains S(=O)(=O)N": {"regex": r"[^\n]*S\(=O\)\(=O\)N[^\n]*"},
        "[^Ss]{20,30}": {"regex": r"[^Ss\n]{20,30}"},
        "min_tokens 40": {"min_tokens": 40},
    },
    "names": {"[a-z]*ella": {"regex": "[a-z]*ella"}, "[a-z]{6}": {"regex": "[a-z]{6}"}},
}
MAX_TOKENS = 200
NO_RECORD = r"[^\n]*(CCCCCCCCCC|aaaaaaaaaa){4}[^\n]*"  # none repeats a character so often
DRAWING = load.post("/generate", {"prompt": "", "max_tokens": MAX_TOKENS, "regex": NO_RECORD, "exact": True, "n": 64})
COLUMNS = {  # name in the JSON: label, format
    "count": ("answers", "{:.0f}"),
    "nats": ("nats a character", "{:.3f}"),
    "end_nats": ("nats of the end", "{:.3f}"),
    "valid": ("valid", "{:.1%}"),
    "unique": ("unique", "{:.1%}"),
    "acceptance": ("acceptance", "{:.2%}"),
    "seconds": ("seconds", "{:.2f}"),
}


def train(data: Path, out: Path, threads: int) -> None:
    trained({"data": (str(data),), "records": LINES, "threads": threads, "sample_chars": 0, "device": "cpu"}, out)


def conditions_of(data: Path) -> dict[str, dict[str, Any]]:
    """Those of molecules, if most lines have a character that no name has."""
    lines = data.read_text(encoding="utf-8").splitlines()[:1000]
    is_smiles = sum(bool(re.search(r"[()=\[\]0-9]", line)) for line in lines) > len(lines) / 2
    return CONDITIONS["smiles" if is_smiles else "names"]


def valid_share(texts: list[str]) -> float | None:
    """Of molecules; None: RDKit is not installed."""
    try:
        from rdkit import Chem, RDLogger  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    RDLogger.DisableLog("rdApp.*")
    return sum(Chem.MolFromSmiles(text) is not None for text in texts) / len(texts)


class Asking:
    """Requests to a server, each of a client of its own name."""

    def __init__(self, url: str):
        self.url = url
        self.http = httpx.Client(timeout=600)

    def ask(self, path: str, **body: Any) -> Any:
        response = self.http.post(f"{self.url}{path}", json=body)
        if response.status_code != 200:
            raise BenchError(f"{path} answered {response.status_code}: {response.text[:300]}")
        return response.json()

    def sample(self, count: int, **body: Any) -> tuple[list[str], float, dict[str, Any]]:
        """Texts, seconds, and what exact ones cost together."""
        texts: list[str] = []
        cost: Counter[str] = Counter()
        started = time.perf_counter()
        while len(texts) < count:
            n = min(100, count - len(texts))
            answer = self.ask("/generate", prompt="", max_tokens=MAX_TOKENS, seed=len(texts) + 1, n=n, **body)
            texts += [it["text"] for it in answer["choices"]]
            cost.update({name: answer["chargpt"].get("exact", {}).get(name, 0) for name in ("candidates", "matches")})
        return texts, time.perf_counter() - started, dict(cost)

    def figures(self, texts: list[str], has_molecules: bool) -> dict[str, Any]:
        scores = self.ask("/v1/score", texts=texts)["data"]
        found = {
            "count": len(texts),
            "nats": sum(it["nats"] for it in scores) / sum(it["characters"] for it in scores),
            "end_nats": sum(it["character_nats"][-1] for it in scores) / len(scores),
            "unique": len(set(texts)) / len(texts),
        }
        share = valid_share(texts) if has_molecules else None
        return found if share is None else found | {"valid": share}


def is_match(text: str, condition: dict[str, Any]) -> bool:
    if "min_tokens" in condition:
        return len(text) >= int(condition["min_tokens"])
    return re.fullmatch(str(condition["regex"]), text) is not None


def stream_speed(port: int, seconds: float = 4.0) -> float:
    """Characters a second of one client's stream, which begins again when it ends."""
    request = load.post("/generate", {"prompt": "", "max_tokens": 2000, "ignore_eos": True, "stream": True})
    outcome = load.run(port, load.at_once(request, 10**9), connections=1, seconds=seconds, keep=True)
    return sum(len(peers.ours(Path()).text(reply.body, True)) for reply in outcome.replies) / outcome.seconds


def markdown(results: dict[str, Any]) -> str:
    rows = [["", *(label for label, _ in COLUMNS.values())]]
    for name, ways in results["conditions"].items():
        for way, figures in ways.items():
            cells = ((form, figures.get(key)) for key, (_, form) in COLUMNS.items())
            rows.append([f"{name}, {way}", *("" if it is None else figure([it], form) for form, it in cells)])
    parts = [table(rows)]
    head = ["another client's stream, characters/s", "alone", "beside exact answers", "ratio"]
    streams = ([name, *map("{:.0f}".format, its), f"{its[1] / its[0]:.2f}"] for name, its in results["streams"].items())
    parts.append(table([head, *streams]))
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


class Bench(Run):
    def __init__(self, args: argparse.Namespace):
        self.args = args
        found: dict[str, Any] = {"conditions": {}, "streams": {}}
        super().__init__("tests.bench.exact", args.out, "exact", markdown, ("torch", "numpy"), **found)

    def run(self) -> None:
        for data in self.args.lists:
            with self.noted(f"training on {data.stem}"):
                out = self.out / data.stem
                if not (out / "best").is_dir():
                    in_child(train, data, out, self.args.threads)
            with self.noted(f"serving {data.stem}"):
                self.measure(data, out / "best")

    def measure(self, data: Path, checkpoint: Path) -> None:
        args, conditions = self.args, conditions_of(data)
        with serving(checkpoint, threads=args.threads or cpus_per_worker({})) as server:
            asking, has_molecules = Asking(server.url), conditions is CONDITIONS["smiles"]
            pool, _, _ = asking.sample(args.pool)
            for name, condition in conditions.items():
                ways: dict[str, Any] = self.results["conditions"].setdefault(f"{data.stem}: {name}", {})
                matches = [text for text in pool if is_match(text, condition)]
                with self.noted(name):
                    ways["free"] = (asking.figures(matches, has_molecules) if matches else {"count": 0}) | {
                        "acceptance": len(matches) / len(pool)
                    }
                    for way in ("mask", "exact"):
                        texts, seconds, cost = asking.sample(args.answers, exact=way == "exact", **condition)
                        ways[way] = asking.figures(texts, has_molecules) | {"seconds": seconds}
                        if cost["candidates"]:
                            ways[way]["acceptance"] = cost["matches"] / cost["candidates"]
            with self.noted("streams"):
                alone, beside = [], []
                for _ in range(3):
                    alone.append(stream_speed(server.port))
                    options = {"connections": 2, "address": OTHER_CLIENT, "accepts": None}
                    with load.Apart(server.port, partial(load.at_once, DRAWING, 10**9), **options):
                        time.sleep(1)
                        beside.append(stream_speed(server.port))
                    time.sleep(2)
                self.results["streams"][data.stem] = [max(alone), max(beside)]


def main() -> int:
    parser = build_parser("tests.bench.exact", __doc__, "out/bench-exact")
    add = parser.add_argument
    add("--lists", nargs="+", type=Path, required=True, metavar="FILE", help="names or SMILES, one in each line")
    add("--answers", type=int, default=100, help="under each condition (default: %(default)s)")
    add("--pool", type=int, default=10_000, help="free answers (default: %(default)s)")
    add("--threads", type=int, default=0, help="0: OMP_NUM_THREADS, else one per core")
    bench = Bench(parser.parse_args())
    return bench.main(bench.run)


if __name__ == "__main__":
    sys.exit(main())
