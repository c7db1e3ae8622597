"""Answers under a condition, by mask and exactly: how far each is from the model's own answers that match.

    python -m tests.bench.exact --lists names.txt smiles.txt

Each list, a record in each line, is trained on as installed (`train --records`), served as installed (`python -m
service`), and asked over HTTP under conditions of its kind. Per condition:

    free      free answers of the model that match, found by sampling --pool records: what answers should be like
    mask      answers by the mask, the default
    exact     answers with "exact": true

All are scored by `/v1/score`: nats per character, and of the end of a record. With RDKit installed, the share of valid
SMILES too. `exact` has its acceptance and its time. Then, for each list, the speed of another client's stream alone and
beside a request for exact answers that draws all the time (it matches nothing and ends at its limits).

    chi-square    --draws exact answers of a tiny model, alone and under load, against enumeration (test_draw.py)

Rewrites OUT/exact.json and OUT/exact.md after each part.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console

from service.engine.backends import open_runner
from service.engine.engine import Engine
from service.settings import cpus_per_worker
from tests.engine.test_draw import CASES, CHARACTERS, chances, draw, load, p_value
from tests.engine.test_draw import run as run_draws
from tests.helpers import random_model, serving
from tests.toolbox.figures import figure, table
from training import jobs
from training.config import TrainConfig
from training.recipe import SETTINGS

from .command import BenchError, Run, build_parser, in_child

CONDITIONS = {
    "smiles": {
        "contains S(=O)(=O)N": {"regex": r"[^\n]*S\(=O\)\(=O\)N[^\n]*"},
        "[^Ss]{20,30}": {"regex": r"[^Ss\n]{20,30}"},
        "min_tokens 40": {"min_tokens": 40},
    },
    "names": {"[a-z]*ella": {"regex": "[a-z]*ella"}, "[a-z]{6}": {"regex": "[a-z]{6}"}},
}
MAX_TOKENS = 200
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
    config = TrainConfig(data=(str(data),), records=True, threads=threads, sample_chars=0, device="cpu")
    jobs.start(config, out, Console(stderr=True, highlight=False), adaptable=SETTINGS)


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


@contextlib.contextmanager
def drawing(url: str) -> Iterator[None]:
    """Another client draws candidates all the time, as none matches: no record repeats a character so often."""
    ends = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=600, headers={"X-Forwarded-For": "10.0.0.2"}) as http:
            body = {
                "prompt": "",
                "max_tokens": MAX_TOKENS,
                "regex": r"[^\n]*(CCCCCCCCCC|aaaaaaaaaa){4}[^\n]*",
                "exact": True,
            }
            while not ends.is_set():
                with contextlib.suppress(httpx.HTTPError):  # the server ends
                    http.post(f"{url}/generate", json=body | {"seed": time.monotonic_ns() % 10**9, "n": 64})

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    try:
        yield
    finally:
        ends.set()


def stream_speed(url: str, seconds: float = 4.0) -> float:
    """Characters a second of one client's stream, which begins again when its record ends."""
    with httpx.Client(timeout=60, headers={"X-Forwarded-For": "10.0.0.1"}) as http:
        count, started = 0, time.perf_counter()
        body = {"prompt": "", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with http.stream("POST", f"{url}/generate", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    count += len(json.loads(line[6:]).get("text", ""))
                if time.perf_counter() - started > seconds:
                    break
        return count / (time.perf_counter() - started)


def chi_square(case: str, draws: int) -> dict[str, float]:
    """p-values of a kind of condition, alone and under load."""
    model = random_model(torch.float64, seed=5, vocab_size=len(CHARACTERS), block_size=8)
    options, outcome = CASES[case]
    expected, found = chances(model, "\n", 6, outcome), {}
    for name, others in (("alone", 0), ("under load", 400)):
        engine = Engine(open_runner(model, "auto", "float64", 64), max_waiting=10_000)
        texts, _ = run_draws(engine, [draw(1, answers=draws, seed=2, **options)], load(others))
        found[name] = p_value(Counter(text for text, *_ in texts[1]), expected)
    return found


def markdown(results: dict[str, Any]) -> str:
    rows = [["", *(label for label, _ in COLUMNS.values())]]
    for name, ways in results["conditions"].items():
        for way, figures in ways.items():
            cells = ((form, figures.get(key)) for key, (_, form) in COLUMNS.items())
            rows.append([f"{name}, {way}", *("" if it is None else figure([it], form) for form, it in cells)])
    parts = [table(rows)]
    if streams := results["streams"]:
        head = ["another client's stream, characters/s", "alone", "beside exact answers", "ratio"]
        parts.append(
            table(
                [
                    head,
                    *([name, *(f"{it:.0f}" for it in its), f"{its[1] / its[0]:.2f}"] for name, its in streams.items()),
                ]
            )
        )
    if tests := results["p_values"]:
        parts.append(
            table(
                [
                    ["p-value", "alone", "under load"],
                    *([k, *(f"{p:.3f}" for p in v.values())] for k, v in tests.items()),
                ]
            )
        )
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


class Bench(Run):
    def __init__(self, args: argparse.Namespace):
        self.args = args
        super().__init__(
            "tests.bench.exact", args.out, "exact", markdown, ("torch", "numpy"), conditions={}, streams={}, p_values={}
        )

    def run(self) -> None:
        for data in self.args.lists:
            with self.noted(f"training on {data.stem}"):
                out = self.out / data.stem
                if not (out / "best").is_dir():
                    in_child(train, data, out, self.args.threads)
            with self.noted(f"serving {data.stem}"):
                self.measure(data, out / "best")
        for case in CASES if self.args.draws else ():
            with self.noted(f"chi-square: {case}"):
                self.results["p_values"][case] = in_child(chi_square, case, self.args.draws)

    def measure(self, data: Path, checkpoint: Path) -> None:
        args, conditions = self.args, conditions_of(data)
        settings = {"client_header": "X-Forwarded-For", "max_tokens": 16_384}
        with serving(checkpoint, **settings, threads=args.threads or cpus_per_worker({})) as server:
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
                    alone.append(stream_speed(server.url))
                    with drawing(server.url):
                        beside.append(stream_speed(server.url))
                    time.sleep(2)
                self.results["streams"][data.stem] = [max(alone), max(beside)]


def main() -> int:
    parser = build_parser("tests.bench.exact", __doc__, "out/bench-exact")
    add = parser.add_argument
    add("--lists", nargs="*", type=Path, default=[], metavar="FILE", help="names or SMILES, one in each line")
    add("--answers", type=int, default=100, help="under each condition (default: %(default)s)")
    add("--pool", type=int, default=10_000, help="free answers (default: %(default)s)")
    add("--draws", type=int, default=20_000, help="of the chi-square tests; 0: without (default: %(default)s)")
    add("--threads", type=int, default=0, help="0: OMP_NUM_THREADS, else one per core")
    bench = Bench(parser.parse_args())
    return bench.main(bench.run)


if __name__ == "__main__":
    sys.exit(main())
