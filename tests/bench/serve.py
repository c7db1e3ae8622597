"""Benchmarks of the service against what a user would build instead, part by part, on this machine.

    make bench                      about 20 minutes
    make bench-quick                under 3 minutes: fewer shapes, rows and repeats
    make bench ARGS='--only path --threads 1'
    make bench-table                tables of OUT/serve.json into tests/README.md

    engine   in process: characters/s, step time and its phases; compared with transformers' generate and the roofline
    path     the service around a stub engine; compared with plain FastAPI and stock LitServe, both without a model
    whole    the service under mixed lengths and arrivals; compared with stock LitServe on transformers, and with the
             engine alone
    metrics  the service with and without metrics
    growth   step time for long texts and long queues; memory

Rewrites OUT/serve.json, OUT/serve.md and OUT/serve.png after each part; the servers' logs are in OUT/logs. Figures are
medians (lowest–highest). Ratios are taken between alternating measurements, as the speed of a shared machine drifts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from service.model.config import GPTConfig
from tests.toolbox.http import DONE, event_data, events, text_of

from . import engine, load
from .command import (
    BenchError,
    Progress,
    add_threads,
    build_parser,
    busy_warning,
    context,
    device,
    in_child,
    prepare_process,
    subset,
)
from .report import draw, markdown, write_table
from .servers import Server, ServerError
from .shapes import SAMPLING, SHAPES, Work, mixed_work, save_random

CONNECTIONS = 64
PACE_SECONDS = 0.01  # step time of the paced stub: 64 streams emit 6,400 events/s
STOCK_EVENT = b'{"text": "a"'

PARTS = ("engine", "path", "whole", "metrics", "growth")
FAILURES = (BenchError, ServerError, load.LoadError, OSError)


@dataclass(frozen=True)
class Plan:
    """Amount of measurement."""

    repeats: int  # of path and queue
    rows: dict[str, tuple[int, ...]]  # by shape
    steps_past: float  # steps past block_size, as a share of it
    engine_repeats: int
    path_seconds: float  # per measurement of the path
    streams: tuple[int, ...]
    paced_length: int
    requests: int  # to the whole service
    longest: int  # completion, in characters
    whole_repeats: int
    stock_repeats: int
    metrics_repeats: int
    idle_seconds: float
    starts: int  # after the first
    long_rows: int
    lengths: tuple[int, ...]  # of texts, in multiples of block_size
    queue_steps: int


FULL = Plan(
    repeats=5,
    rows={"S": (1, 8, 32, 128), "M": (1, 8, 32, 128)},
    steps_past=0.25,
    engine_repeats=3,
    path_seconds=3.0,
    streams=(1, 32, 64, 256),
    paced_length=400,
    requests=256,
    longest=384,
    whole_repeats=3,
    stock_repeats=3,
    metrics_repeats=48,
    idle_seconds=5.0,
    starts=4,
    long_rows=8,
    lengths=(1, 10, 100),
    queue_steps=200,
)
QUICK = Plan(
    repeats=2,
    rows={"S": (1, 8, 32), "M": (8,)},
    steps_past=0.1,
    engine_repeats=2,
    path_seconds=1.0,
    streams=(1, 64, 256),
    paced_length=100,
    requests=96,
    longest=160,
    whole_repeats=2,
    stock_repeats=1,
    metrics_repeats=2,
    idle_seconds=2.0,
    starts=0,
    long_rows=1,
    lengths=(1, 10),
    queue_steps=40,
)
GPU_ROWS = (512, 1024)


class Bench:
    """One run and its results so far."""

    def __init__(self, plan: Plan, shapes: dict[str, GPTConfig], threads: int, out: Path):
        self.plan, self.shapes, self.threads, self.out = plan, shapes, threads, out
        self.device = device()
        self.say = Progress()
        self.folders: dict[str, Path] = {}  # checkpoint folder by shape
        self.results: dict[str, Any] = {
            **context("tests.bench.serve", "torch", "transformers", "litserve", "fastapi", "uvicorn"),
            "settings": {
                "plan": asdict(plan),
                "quick": plan is QUICK,
                "threads": threads,
                "device": self.device,
                "shapes": {name: asdict(config) for name, config in shapes.items()},
                "sampling": SAMPLING,
            },
            "errors": {},  # part: reason of failure
            "kept": {},  # part: revision and date of the earlier run that measured it
        }

    def keep(self, parts: list[str]) -> None:
        """Take the results of all other parts from OUT/serve.json.

        Raises:
            OSError, ValueError: the file is missing or invalid.
            BenchError: it comes from another machine, other settings or other versions.
        """
        earlier = json.loads((self.out / "serve.json").read_text(encoding="utf-8"))
        now = json.loads(json.dumps(self.results))  # turns tuples into lists
        for name in ("machine", "settings", "versions"):
            mine, other = (
                {key: value for key, value in results[name].items() if key != "plan"} for results in (now, earlier)
            )
            if mine != other:
                raise BenchError(f"{self.out / 'serve.json'} has different {name}: {other}, now {mine}")
        for part in earlier.keys() & set(PARTS) - set(parts):
            self.results[part] = earlier[part]
            self.results["kept"][part] = earlier.get("kept", {}).get(
                part, {"revision": earlier["revision"], "date": earlier["date"]}
            )

    def run(self, parts: list[str]) -> None:
        """Measure the parts; a part that fails leaves its reason in the results."""
        self.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="chargpt-bench-") as folder:
            self.folders = {name: save_random(config, Path(folder) / name) for name, config in self.shapes.items()}
            self.results["load_generator"] = load.ceiling(0.5)
            for part in parts:
                self.say(f"{part} …")
                try:
                    self.results[part] = getattr(self, part)()
                except FAILURES as error:
                    self.results["errors"][part] = f"{type(error).__name__}: {error}"
                    self.say(f"{part} failed: {error}")
                self.write()

    def write(self) -> None:
        (self.out / "serve.json").write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        (self.out / "serve.md").write_text(markdown(self.results), encoding="utf-8")
        draw(self.results, self.out / "serve.png")

    # -- the parts --

    def engine(self) -> dict[str, Any]:
        shapes, memory = {}, {}
        for name, rows in self.plan.rows.items():
            if self.device == "cuda":
                rows += GPU_ROWS
            folder, W = self.folders[name], self.shapes[name].block_size
            length = round(W * (1 + self.plan.steps_past))
            repeats = self.plan.engine_repeats
            shapes[name] = self.child(engine.measure_shape, folder, list(rows), length=length, repeats=repeats)
            memory[name] = self.child(engine.measure_memory, folder, 32)
        return {"shapes": shapes, "memory": memory}

    def path(self) -> dict[str, Any]:
        streams = list(self.plan.streams)
        figures: dict[str, Any] = {"streams": streams}
        with contextlib.ExitStack() as stack:
            ours = stack.enter_context(self.server("tests.bench.stub", "stub"))
            paced = stack.enter_context(
                self.server("tests.bench.stub", "stub-paced", {"CHARGPT_STUB_STEP_SECONDS": str(PACE_SECONDS)})
            )
            stock = stack.enter_context(
                Server("tests.bench.stock", self.out / "logs" / "stock-stub.log", "/health", stub=True)
            )
            for server in (ours, paced, stock):
                server.wait_until_ready()
            answers = self.out / "logs" / "answers.json"
            answers.write_text(json.dumps(answers_of(ours.port)), encoding="utf-8")
            plain = stack.enter_context(
                Server("tests.bench.plain", self.out / "logs" / "plain.log", "/readyz", answers=answers)
            )
            plain.wait_until_ready()
            check_same_bytes(ours.port, plain.port)
            servers = {"ours": ours, "plain": plain, "stock": stock}
            for server in (*servers.values(), paced):
                server.pause()
            for name in servers:
                figures[name] = {"requests": [], "first": [], "streams": {str(n): [] for n in streams}}
            figures["plain"]["same_events"] = {str(n): [] for n in streams}
            figures["paced"] = []
            for _ in range(self.plan.repeats):
                for name, server in servers.items():
                    with running(server):
                        self.path_once(figures, name, server)
                with running(paced):
                    figures["paced"].append(paced_once(paced, 64, self.plan.paced_length))
                rates = [figures[name]["requests"][-1]["per_second"] for name in servers]
                self.say("requests/s, " + ", ".join(f"{n} {r:,.0f}" for n, r in zip(servers, rates, strict=True)))
        return figures

    def path_once(self, figures: dict[str, Any], name: str, server: Server) -> None:
        mine, seconds = figures[name], self.plan.path_seconds
        whole = load.post("/whole" if name == "stock" else "/generate", {"prompt": "a", "max_tokens": 1})
        # Warm-up: the server was paused or has just started.
        load.run(server.port, load.at_once(whole, 10**9), connections=32, seconds=min(0.5, seconds))
        with server.busy() as cores:
            outcome = load.run(server.port, load.at_once(whole, 10**9), connections=32, seconds=seconds)
        rate = len(outcome.ended) / outcome.seconds
        mine["requests"].append({"per_second": rate, "cores": cores, "load_cores": outcome.cpu_seconds / seconds})
        stream = {"prompt": "a", "max_tokens": 8, "stream": True}
        pauses = [0.02 * i for i in range(round(seconds * 50))]  # one at a time, idle in between
        marker = STOCK_EVENT if name == "stock" else load.EVENT
        single = load.post("/generate", stream)
        outcome = load.run(server.port, ((at, single, None) for at in pauses), connections=1, marker=marker)
        mine["first"].append(percentiles(outcome.times_to_first))
        total = round((5_000 if name == "stock" else 150_000) * seconds)
        for count in figures["streams"]:
            each = max(1, min(16_000, total // count))
            body = stream | {"max_tokens": each}
            mine["streams"][str(count)].append(streams_once(server, body, count, marker))
            if name == "plain":  # and once with the mean event length of the service
                ours = figures["ours"]["streams"][str(count)][-1]
                body["characters"] = max(1, round(ours["characters_per_event"]))
                body["max_tokens"] *= body["characters"]
                mine["same_events"][str(count)].append(streams_once(server, body, count, marker))

    def whole(self) -> dict[str, Any]:
        work = mixed_work(self.plan.requests, longest=self.plan.longest, arriving=0.5)
        figures: dict[str, Any] = {
            "characters": sum(item.max_tokens for item in work),
            "connections": CONNECTIONS,
        }
        ours = self.server("service", "service", max_running_requests=CONNECTIONS)
        with ours:
            starts: dict[str, list[float]] = {"ours": [ours.wait_until_ready()], "stock": []}
            with self.stock() as stock:
                starts["stock"].append(stock.wait_until_ready())
                servers = {"ours": ours, "stock": stock}
                ours.pause()
                stock.pause()
                for name, server in servers.items():
                    with running(server):
                        load_work(server, name, work[:16])
                        time.sleep(0.5)
                        with server.busy() as cores:
                            time.sleep(self.plan.idle_seconds)
                    figures[name] = {"idle_cores": cores, "runs": []}
                figures["engine"] = []
                for number in range(self.plan.whole_repeats):
                    with running(ours):
                        figures["ours"]["runs"].append(load_work(ours, "ours", work))
                    alone = self.child(engine.measure_work, self.folders["S"], work, CONNECTIONS)
                    figures["engine"].append(alone["characters_per_second"])
                    if number < self.plan.stock_repeats:
                        with running(stock):
                            figures["stock"]["runs"].append(load_work(stock, "stock", work))
                    rates = [figures[name]["runs"][-1]["characters_per_second"] for name in servers]
                    self.say(f"characters/s: ours {rates[0]:,.0f}, stock {rates[1]:,.0f}, engine {alone}")
                for name, server in servers.items():
                    with running(server):
                        figures[name]["pss_bytes"] = server.pss_bytes()
        for _ in range(self.plan.starts):
            with self.server("service", "service") as again:
                starts["ours"].append(again.wait_until_ready())
            with self.stock() as again:
                starts["stock"].append(again.wait_until_ready())
        for name, seconds in starts.items():
            figures[name]["start_seconds"] = seconds
        return figures

    def metrics(self) -> dict[str, Any]:
        """Many short alternating runs, as the effect is smaller than the drift of the machine's speed."""
        work = mixed_work(2 * CONNECTIONS, longest=64, arriving=0.0)
        characters = sum(item.max_tokens for item in work)
        figures: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            servers = {}
            for name, module in (("ours", "service"), ("unmeasured", "tests.bench.unmeasured")):
                servers[name] = stack.enter_context(self.server(module, name, max_running_requests=CONNECTIONS))
                servers[name].wait_until_ready()
                servers[name].pause()
                figures[name] = []
            for number in range(-1, self.plan.metrics_repeats):
                for name, server in servers.items():
                    with running(server):
                        run = load_work(server, "ours", work)
                    cores = run["cores"]
                    run["cpu_seconds_per_character"] = (cores["worker"] + cores["http"]) * cores["seconds"] / characters
                    if number >= 0:  # the first is a warm-up
                        figures[name].append(run)
        return figures

    def growth(self) -> dict[str, Any]:
        folder, W = self.folders["S"], self.shapes["S"].block_size
        lengths = [n * W for n in self.plan.lengths]
        options = {"steps": self.plan.queue_steps, "repeats": self.plan.repeats}
        return {
            "lengths": self.child(engine.measure_lengths, folder, self.plan.long_rows, lengths),
            "queue": self.child(engine.measure_queue, folder, 8, [1, 100, 1000], **options),
        }

    # -- helpers --

    def child(self, function: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        return in_child(functools.partial(function, *arguments, **options, threads=self.threads, device=self.device))

    def server(self, module: str, log: str, environment: dict[str, str] | None = None, **flags: object) -> Server:
        """The service on shape S, or its variant in `module`."""
        return Server(
            module,
            self.out / "logs" / f"{log}.log",
            "/readyz",
            environment,
            checkpoint=self.folders["S"],
            threads=self.threads,
            log_level="warning",
            **flags,
        )

    def stock(self) -> Server:
        log = self.out / "logs" / "stock.log"
        return Server("tests.bench.stock", log, "/health", checkpoint=self.folders["S"], threads=self.threads)


# Single measurements


@contextlib.contextmanager
def running(server: Server) -> Iterator[None]:
    """Resume a server for its turn; servers that are compared are paused otherwise."""
    server.resume()
    try:
        yield
    finally:
        server.pause()


def percentiles(seconds: list[float]) -> dict[str, float]:
    """The 50th, 95th and 99th percentile, by nearest rank."""
    ordered = sorted(seconds)
    return {f"p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in (50, 95, 99)}


def streams_once(server: Server, body: dict[str, Any], count: int, marker: bytes) -> dict[str, Any]:
    """`count` concurrent streams of body["max_tokens"] characters each."""
    request = load.post("/generate", body)
    with server.busy() as cores:
        outcome = load.run(server.port, load.at_once(request, count), connections=count, marker=marker)
    characters = count * body["max_tokens"]
    return {
        "characters_per_second": characters / outcome.seconds,
        "events_per_second": outcome.num_events / outcome.seconds,
        "characters_per_event": characters / outcome.num_events,
        "cores": cores,
        "load_cores": outcome.cpu_seconds / outcome.seconds,
    }


def paced_once(server: Server, count: int, length: int) -> dict[str, float]:
    """`count` concurrent streams of the paced stub: CPU time per event, and gaps between events."""
    request = load.post("/generate", {"prompt": "a", "max_tokens": length, "stream": True})
    with server.busy() as cores:
        outcome = load.run(server.port, load.at_once(request, count), connections=count, keep=True)
    for reply in outcome.replies:
        check_length(reply, ours_text, length)
    gaps = [gap for reply in outcome.replies for gap in gaps_of(reply)]
    events = outcome.num_events
    return {
        "characters_per_event": count * length / events,
        "http_seconds_per_event": cores["http"] * cores["seconds"] / events,
        "worker_seconds_per_event": cores["worker"] * cores["seconds"] / events,
        **{f"gap_{name}": seconds for name, seconds in percentiles(gaps).items()},
    }


def gaps_of(reply: load.Reply) -> list[float]:
    """Seconds between consecutive reads."""
    moments = [at for at, _ in reply.parts]
    return [later - at for at, later in zip(moments, moments[1:], strict=False)]


def load_work(server: Server, name: str, work: list[Work]) -> dict[str, Any]:
    """Stream all of `work` over CONNECTIONS connections.

    Raises:
        LoadError: a completion has the wrong length.
    """
    requests = []
    for i, item in enumerate(work):
        body: dict[str, Any] = {"prompt": item.prompt, "max_tokens": item.max_tokens}
        if name == "ours":
            body |= {"stream": True, "seed": i, **SAMPLING[i % len(SAMPLING)]}
        requests.append((item.at, load.post("/generate", body), item))
    marker = load.EVENT if name == "ours" else b'{"text'
    with server.busy() as cores:
        outcome = load.run(server.port, requests, connections=CONNECTIONS, marker=marker, keep=True)
    text = ours_text if name == "ours" else stock_text
    per_character = []
    for reply in outcome.replies:
        length = reply.asked.max_tokens
        check_length(reply, text, length)
        assert reply.first_at is not None and reply.ended_at is not None
        if length > 1:
            per_character.append((reply.ended_at - reply.first_at) / (length - 1))
    return {
        "characters_per_second": sum(item.max_tokens for item in work) / outcome.seconds,
        "first": percentiles(outcome.times_to_first),
        "gap": percentiles([gap for reply in outcome.replies for gap in gaps_of(reply)]),
        "per_character": percentiles(per_character),
        "cores": cores,
    }


def check_length(reply: load.Reply, text: Callable[[bytes], str], length: int) -> None:
    """
    Raises:
        LoadError: the text of the response has another length.
    """
    given = len(text(b"".join(data for _, data in load.dechunked(reply.parts))))
    if given != length:
        raise load.LoadError(f"expected {length} characters, got {given}")


def ours_text(body: bytes) -> str:
    lines = body.decode().split("\n")
    return text_of(json.loads(data) for data in events(lines) if data != DONE)


def stock_text(body: bytes) -> str:
    return "".join(json.loads(line)["text"] for line in body.splitlines())


def answers_of(port: int) -> dict[str, str]:
    """Templates of the service's responses, for plain FastAPI to return the same."""
    body = {"prompt": "a", "max_tokens": 1}
    [whole] = load.run(port, load.at_once(load.post("/generate", body), 1), connections=1, keep=True).replies
    streamed = load.post("/generate", body | {"max_tokens": 2, "stream": True})
    [reply] = load.run(port, load.at_once(streamed, 1), connections=1, keep=True).replies
    text = b"".join(data for _, data in load.dechunked(reply.parts)).decode()
    event, *rest = text.split("\n\n")
    given = json.dumps(json.loads(event_data(event.encode()))["text"])
    return {
        "whole": b"".join(data for _, data in whole.parts).decode(),
        "event": event.replace(given, '"TEXT"', 1) + "\n\n",
        "last": "\n\n".join(part for part in rest if '"text":' not in part),
    }


def check_same_bytes(ours: int, plain: int) -> None:
    """Check that both send equally many bytes for the same request, headers excluded.

    Raises:
        LoadError: they do not.
    """
    sizes = []
    for port in (ours, plain):
        request = load.post("/generate", {"prompt": "a", "max_tokens": 1})
        [reply] = load.run(port, load.at_once(request, 1), connections=1, keep=True).replies
        sizes.append(sum(len(data) for _, data in reply.parts))
    if abs(sizes[0] - sizes[1]) > 16:  # numbers of digits vary
        raise load.LoadError(f"the service sends {sizes[0]} bytes, plain FastAPI {sizes[1]}")


# Command line


def parse_args() -> argparse.Namespace:
    parser = build_parser("tests.bench.serve", __doc__, "out/bench")
    add_threads(parser)
    parser.add_argument("--quick", action="store_true", help="under three minutes")
    parser.add_argument(
        "--only", type=subset(PARTS), default=list(PARTS), metavar="PARTS", help=f"of {','.join(PARTS)} (default: all)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the other parts of OUT/serve.json")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table of OUT/serve.json to FILE and exit")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if args.table is not None:
        try:
            results = json.loads((args.out / "serve.json").read_text(encoding="utf-8"))
            write_table(results, args.table)
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0
    prepare_process()
    bench = Bench(QUICK if args.quick else FULL, SHAPES, args.threads, args.out)
    if warning := busy_warning(bench.results):
        bench.say(warning)
    if args.keep:
        try:
            bench.keep(args.only)
        except (OSError, ValueError, BenchError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    try:
        bench.run(args.only)
    except KeyboardInterrupt:
        bench.say("stopped")
        return 130
    print(markdown(bench.results))
    bench.say(f"figures: {args.out / 'serve.json'}, .md, .png")
    return 1 if bench.results["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
