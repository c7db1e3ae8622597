"""Benchmarks of the service against what a user would choose instead, part by part, on this machine.

    make bench                      about 40 minutes, and five more once to build llama.cpp
    make bench-quick                about five minutes: fewer systems, rows and repeats
    make bench ARGS='--only engine,http --threads 1'
    make bench-table                tables of OUT/serve.json into tests/README.md

    engine   in process: our engine with each backend and dtype, llama-batched-bench on each GGUF, transformers'
             generate with each dtype and cache; the roofline
    prefill  whole prompts: our engine and torch's forward
    http     answers and streams of 128 characters over HTTP and the time to the first character: the service,
             llama.cpp's server, transformers serve, stock LitServe
    mixed    one stream beside another client's work, and kinds of requests beside plain ones
    texts    whether a text depends on load, and how often it depends on the dtype
    path     the service around a stub engine; compared with plain FastAPI and stock LitServe, both without a model
    idle     CPU time of the idle service, its start and its memory, beside stock LitServe

Rewrites OUT/serve.json and OUT/serve.md after each part; the servers' logs are in OUT/logs. Systems that are compared
are each in a process of its own and measured in turns, since the speed of a shared machine drifts. Figures are medians
(lowest–highest) over the turns, ratios are taken within a turn. Where a system has several variants, the fastest at the
row or client count in question stands for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from service.model.config import GPTConfig
from service.settings import available_cpus
from tests.toolbox.figures import write_figures
from tests.toolbox.http import DONE, event_data, events, text_of

from . import engine, llama, load, peers, roofline
from .command import (
    BenchError,
    Progress,
    Remote,
    add_threads,
    build_parser,
    busy_warning,
    context,
    device,
    prepare_process,
    subset,
)
from .report import markdown, put
from .servers import ROOT, Server, ServerError, module
from .shapes import ANSWER, PROMPT, SAMPLING, SHAPES, Work, checkpoint_of, config_of, mixed_work, prompt_text

CONNECTIONS = 64
ALONE = {  # one client, one request after the other
    "probe": b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "whole": load.post("/generate", {"prompt": "a", "max_tokens": 1}),
}
ALONE_PER_SECOND = 4000 / 3  # of a measurement: 20,000 in five turns
BESIDE = {  # what another client asks all the time, and how many requests at a time
    "n = 64": (load.post("/generate", {"prompt": "\n", "max_tokens": ANSWER, "n": 64}), 1),
    "/v1/score, 40 texts of 500": (load.post("/v1/score", {"texts": [prompt_text(500, i) for i in range(40)]}), 4),
    "/v1/next, 128 prompts": (load.post("/v1/next", {"prompt": [prompt_text(PROMPT, i) for i in range(128)]}), 2),
    "prompts of 8,000": (load.post("/generate", {"prompt": 8 * prompt_text(1000, 0), "max_tokens": 1}), 4),
    "one regex": (load.post("/generate", {"prompt": "\n", "regex": "[A-Za-z \n]{128}", "max_tokens": ANSWER}), 1),
}
OTHER_CLIENT = "127.0.0.2"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "regex": {"regex": f"[A-Za-z \n]{{{ANSWER}}}"},
    "5 log-probabilities": {"logprobs": 5},
}
PACE_SECONDS = 0.01  # step time of the paced stub: 64 streams emit 6,400 events/s
STOCK_EVENT = b'{"text": "a"'
KEEP_ABOVE = 0.6  # of its family's best: a variant below it at every row count runs in the first turn only
DEFAULT = "native float32"  # of the service on a CPU
SLOTS = 128  # of the engine alone
PREFILL_ROWS = 32

PARTS = ("engine", "prefill", "http", "mixed", "texts", "path", "idle")
FAILURES = (BenchError, ServerError, load.LoadError, llama.LlamaError, roofline.RooflineError, OSError)


@dataclass(frozen=True)
class Plan:
    """Amount of measurement."""

    repeats: int  # turns
    rows: dict[str, tuple[int, ...]]  # by shape
    every_variant: bool  # of the peers, instead of one of each
    clients: tuple[int, ...]
    http_seconds: float  # per measurement
    first_requests: int
    texts: int  # generations by dtype
    path_seconds: float  # per measurement of the path
    streams: tuple[int, ...]
    paced_length: int
    idle_seconds: float
    starts: int


FULL = Plan(
    repeats=5,
    rows={"S": (1, 8, 32, 128), "M": (1, 8, 32, 128)},
    every_variant=True,
    clients=(1, 8, 32),
    http_seconds=3.0,
    first_requests=200,
    texts=10_000,
    path_seconds=3.0,
    streams=(1, 32, 64, 256),
    paced_length=400,
    idle_seconds=5.0,
    starts=5,
)
QUICK = Plan(
    repeats=2,
    rows={"S": (1, 8, 32), "M": (8,)},
    every_variant=False,
    clients=(1, 32),
    http_seconds=1.0,
    first_requests=40,
    texts=300,
    path_seconds=1.0,
    streams=(1, 64, 256),
    paced_length=100,
    idle_seconds=2.0,
    starts=1,
)


class Bench:
    """One run and its results so far."""

    def __init__(
        self, plan: Plan, shapes: dict[str, Path | GPTConfig], threads: int, out: Path, llama_folder: Path | None = None
    ):
        self.plan, self.shapes, self.threads, self.out = plan, shapes, threads, out
        self.llama_folder = llama_folder or llama.default_folder()
        self.cores = available_cpus()  # threads of an engine alone, and of the peers' engines
        self.device = device()
        self.say = Progress()
        self.folder = Path()  # of this run's files
        self.folders: dict[str, Path] = {}  # checkpoint folder by shape
        self.results: dict[str, Any] = {
            **context("tests.bench.serve", "torch", "transformers", "litserve", "fastapi", "uvicorn"),
            "settings": {
                "plan": asdict(plan),
                "quick": plan is QUICK,
                "threads": threads,
                "cores": self.cores,
                "device": self.device,
                "llama": llama.PACKAGE,
                "shapes": {name: about(shape) for name, shape in shapes.items()},
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
            self.folder = Path(folder)
            self.folders = {name: checkpoint_of(shape, self.folder / name) for name, shape in self.shapes.items()}
            self.results["load_generator"] = load.ceiling(0.5)
            for part in parts:
                self.say(f"{part} …")
                started = self.say.seconds
                try:
                    self.results[part] = getattr(self, part)()
                    self.results[part] |= {
                        "load_average": os.getloadavg()[0],
                        "elapsed_seconds": self.say.seconds - started,
                    }
                except FAILURES as error:
                    self.results["errors"][part] = f"{type(error).__name__}: {error}"
                    self.say(f"{part} failed: {error}")
                self.write()

    def write(self) -> None:
        write_figures(self.out / "serve.json", self.results)
        (self.out / "serve.md").write_text(markdown(self.results), encoding="utf-8")

    # -- the parts: engines --

    def engine(self) -> dict[str, Any]:
        return {"shapes": {name: self.engine_of(name, list(rows)) for name, rows in self.plan.rows.items()}}

    def engine_of(self, shape: str, rows: list[int]) -> dict[str, Any]:
        """{"systems": {name: {"family", "flags", "rows": {rows: a run per turn}, "roofline"}}, "full", "absent"}."""
        folder, config = self.folders[shape], config_of(self.folders[shape])
        figures: dict[str, Any] = {"parameters": parameters(config), "systems": {}, "absent": {}, "full": {}}
        systems = figures["systems"]
        runs: dict[str, Callable[[int], dict[str, Any]]] = {}  # by system: one run of a number of rows
        with contextlib.ExitStack() as stack:
            for name, remote in self.engines(folder, SLOTS, stack, figures["absent"]).items():
                systems[name] = {"family": "ours", "flags": remote.call("about"), "rows": {}}
                runs[name] = lambda rows, remote=remote: warmed(remote, rows)
            for dtype, cache in self.some([(d, c) for d in ("float32", "bfloat16") for c in (None, "static")]):
                name = f"transformers {dtype}{', static cache' if cache else ''}"
                remote = stack.enter_context(
                    Remote(engine.Generate, folder, dtype, cache, threads=self.cores, device=self.device)
                )
                systems[name] = {"family": "transformers", "flags": {"dtype": dtype, "cache": cache}, "rows": {}}
                runs[name] = lambda rows, remote=remote: warmed(remote, rows)
            programs, files = self.llama_files(shape)
            for variant in self.some(llama.variants(files)):
                name = f"llama.cpp {variant.name}"
                family = "llama" if variant.dtype != llama.LOSSY else "lossy"
                command = llama.batched_bench_command(programs, variant, rows, ANSWER, self.cores)
                systems[name] = {"family": family, "flags": shlex.join(command), "rows": {}}
                runs[name] = lambda rows, variant=variant: llama.batched_bench(
                    llama.batched_bench_command(programs, variant, [rows], ANSWER, self.cores)
                )[rows]
            for turn in range(self.plan.repeats):
                for count in rows:
                    for name in runs if turn == 0 else contenders(systems, rows):
                        systems[name]["rows"].setdefault(str(count), []).append(runs[name](count))
                self.say(f"{shape}: " + best_line(systems, rows))
            ours = {name: system for name, system in systems.items() if system["family"] == "ours"}
            for system in ours.values():
                system["roofline"] = {
                    str(count): self.roofline(config, count, PROMPT + ANSWER / 2, system["flags"]) for count in rows
                }
            best = max(ours, key=lambda name: rate_of(ours[name], rows[-1]))
            with contextlib.ExitStack() as again:
                remote = again.enter_context(self.engine_remote(folder, *backend_of(ours[best]), slots=SLOTS))
                figures["full"] = {"system": best, "rows": {}}
                for count in rows:  # every text fills the window from the first step on
                    figures["full"]["rows"][str(count)] = {
                        "runs": [remote.call("run", count, ANSWER, config.block_size) for _ in range(2)],
                        "roofline": self.roofline(config, count, config.block_size, ours[best]["flags"]),
                    }
        return figures

    def roofline(self, config: GPTConfig, rows: int, length: float, flags: dict[str, Any]) -> dict[str, float]:
        return roofline.roofline(config, rows, length, flags["dtype"], self.cores, stored=flags["weights"])

    def prefill(self) -> dict[str, Any]:
        """Characters per second of PREFILL_ROWS prompts of block_size characters."""
        shapes = {}
        for shape in self.plan.rows:
            folder = self.folders[shape]
            characters = config_of(folder).block_size
            figures: dict[str, Any] = {"characters": characters, "systems": {}, "absent": {}}
            with contextlib.ExitStack() as stack:
                remotes = self.engines(folder, PREFILL_ROWS, stack, figures["absent"])
                for dtype in ("float32", "bfloat16"):
                    forward = Remote(engine.Forward, folder, dtype, threads=self.cores, device=self.device)
                    remotes[f"forward {dtype}"] = stack.enter_context(forward)
                for name, remote in remotes.items():
                    remote.call("prefill", 2, characters)
                    figures["systems"][name] = []
                for _ in range(self.plan.repeats):
                    for name, remote in remotes.items():
                        figures["systems"][name].append(remote.call("prefill", PREFILL_ROWS, characters))
            shapes[shape] = figures
        return {"rows": PREFILL_ROWS, "shapes": shapes}

    def texts(self) -> dict[str, Any]:
        """How many of the same generations differ: under load from alone, and between dtypes."""
        figures: dict[str, Any] = {"count": self.plan.texts, "absent": {}, "changed": {}, "between": {}}
        found: dict[str, list[str]] = {}
        for backend, dtype in engine.candidates():
            if backend == "torch" and found:  # native is the one with a promise in every dtype, and is faster
                continue
            name = f"{backend} {dtype}"
            if backend == "torch" and dtype != "float64":
                continue
            try:
                with self.engine_remote(self.folders["S"], backend, dtype, slots=CONNECTIONS) as remote:
                    found[name] = remote.call("texts", self.plan.texts, ANSWER, alone=False)
                with self.engine_remote(self.folders["S"], backend, dtype, slots=1) as remote:
                    alone = remote.call("texts", self.plan.texts, ANSWER, alone=True)
            except BenchError as error:
                figures["absent"][name] = str(error)
                continue
            figures["changed"][name] = differing(found[name], alone)
            self.say(f"{name}: {figures['changed'][name]} of {self.plan.texts} texts changed under load")
        for name, texts in found.items():
            exact = f"{name.split()[0]} float64"
            if exact in found and name != exact:
                figures["between"][name] = differing(texts, found[exact])
        return figures

    # -- the parts: over HTTP --

    def http(self) -> dict[str, Any]:
        """By mode ("whole", "streamed") and clients: the probe of each variant, and runs of each family's best."""
        systems = self.systems()
        figures: dict[str, Any] = {
            "flags": {f"{s.family} {s.name}": shlex.join(s.command) for s in systems}, "modes": {}, "first": {},
            "length": ANSWER, "absent": {},
        }  # fmt: skip
        with contextlib.ExitStack() as stack:
            servers: dict[peers.System, Server] = {}
            for number, system in enumerate(systems):
                server = stack.enter_context(system.start(self.out / "logs" / f"{system.family}-{number}.log"))
                try:
                    server.wait_until_ready()
                    answers_once(system, server, 2, 2, system.streams[-1])
                except (ServerError, load.LoadError, OSError) as error:
                    figures["absent"][f"{system.family} {system.name}"] = str(error)[-1000:]
                    self.say(f"{system.family} {system.name} cannot be measured: {error}")
                    server.close()
                    continue
                server.pause()
                servers[system] = server
            best: dict[tuple[str, int], dict[str, tuple[peers.System, int]]] = {}
            for streamed in (False, True):
                mode = "streamed" if streamed else "whole"
                figures["modes"][mode] = {}
                for clients in self.plan.clients:
                    probe: dict[str, float] = {}
                    chosen: dict[str, tuple[float, peers.System, int]] = {}
                    for system, server in servers.items():
                        if streamed not in system.streams:
                            continue
                        try:
                            with running(server):
                                run = answers_once(system, server, clients, clients, streamed)
                        except (load.LoadError, OSError) as error:
                            name = f"{system.family} {system.name}, {mode}, {clients} clients"
                            figures["absent"][name] = str(error)[-1000:]
                            self.say(f"{name} cannot be measured: {error}")
                            continue
                        rate = probe[f"{system.family} {system.name}"] = run["characters_per_second"]
                        rounds = max(1, round(self.plan.http_seconds / run["seconds"]))
                        if rate > chosen.get(system.family, (0.0,))[0]:
                            chosen[system.family] = (rate, system, rounds)
                    best[mode, clients] = {family: (system, n) for family, (_, system, n) in chosen.items()}
                    figures["modes"][mode][str(clients)] = {
                        "probe": probe,
                        "families": {f: {"variant": s.name, "runs": []} for f, (_, s, _) in chosen.items()},
                    }
            for _ in range(self.plan.repeats):
                for (mode, clients), chosen_now in best.items():
                    into = figures["modes"][mode][str(clients)]["families"]
                    for family, (system, rounds) in chosen_now.items():
                        server = servers[system]
                        with running(server):
                            run = answers_once(system, server, clients, rounds * clients, mode == "streamed")
                        into[family]["runs"].append(run)
                for family, (system, _) in best["streamed", self.plan.clients[0]].items():
                    with running(servers[system]):
                        first = first_once(system, servers[system], self.plan.first_requests)
                    figures["first"].setdefault(family, {"variant": system.name, "runs": []})["runs"].append(first)
                self.say("whole answers: " + http_line(figures["modes"]["whole"]))
        return figures

    def mixed(self) -> dict[str, Any]:
        """A stream alone and beside the work of another client, whose own rate alone and beside the stream follows; and
        characters per second of whole answers by kind and clients. Of the service as installed.
        """
        seconds = self.plan.http_seconds
        command = module("service", checkpoint=self.folders["S"], log_level="warning")
        figures: dict[str, Any] = {"beside": {name: [] for name in BESIDE}, "kinds": {name: {} for name in KINDS}}
        with Server(command, self.log("mixed"), "/readyz") as server:
            server.wait_until_ready()
            for turn in range(-1, self.plan.repeats):
                for name, (request, connections) in BESIDE.items():
                    run = beside_once(server.port, request, connections, seconds)
                    if turn >= 0:  # the first is a warm-up
                        figures["beside"][name].append(run)
                for clients in self.plan.clients if turn >= 0 else ():
                    for kind, fields in KINDS.items():
                        rate = kind_once(server.port, fields, clients, seconds / 2)
                        figures["kinds"][kind].setdefault(str(clients), []).append(rate)
                self.say(f"a stream beside n = 64: {figures['beside']['n = 64'][turn:]}")
        return figures

    def path(self) -> dict[str, Any]:
        streams = list(self.plan.streams)
        figures: dict[str, Any] = {"streams": streams}
        with contextlib.ExitStack() as stack:
            ours = stack.enter_context(self.server("tests.bench.stub", "stub"))
            paced = stack.enter_context(
                self.server("tests.bench.stub", "stub-paced", {"CHARGPT_STUB_STEP_SECONDS": str(PACE_SECONDS)})
            )
            stock = stack.enter_context(
                Server(module("tests.bench.stock", stub=True), self.out / "logs" / "stock-stub.log", "/health")
            )
            for server in (ours, paced, stock):
                server.wait_until_ready()
            answers = self.out / "logs" / "answers.json"
            answers.write_text(json.dumps(answers_of(ours.port)), encoding="utf-8")
            plain = stack.enter_context(
                Server(module("tests.bench.plain", answers=answers), self.out / "logs" / "plain.log", "/readyz")
            )
            plain.wait_until_ready()
            check_same_bytes(ours.port, plain.port)
            servers = {"ours": ours, "plain": plain, "stock": stock}
            for server in (*servers.values(), paced):
                server.pause()
            for name in servers:
                figures[name] = {"requests": [], "first": [], "streams": {str(n): [] for n in streams}}
                figures[name] |= {kind: [] for kind in ALONE if name != "stock"}
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
        for kind, request in ALONE.items():
            if kind in mine:
                mine[kind].append(alone_once(server, request, round(ALONE_PER_SECOND * seconds)))
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

    def idle(self) -> dict[str, Any]:
        figures: dict[str, Any] = {
            name: {"start_seconds": [], "idle_cores": [], "pss_bytes": []} for name in ("ours", "stock")
        }
        work = mixed_work(16, longest=64, arriving=0.1)
        for _ in range(self.plan.starts):
            for name, server in (("ours", self.server("service", "idle")), ("stock", self.stock())):
                with server:
                    mine = figures[name]
                    mine["start_seconds"].append(server.wait_until_ready())
                    load_work(server, name, work)
                    time.sleep(0.5)
                    with server.busy() as cores:
                        time.sleep(self.plan.idle_seconds)
                    mine["idle_cores"].append(cores["http"] + cores["worker"])
                    mine["pss_bytes"].append(server.pss_bytes())
        return figures

    # -- helpers --

    def engines(
        self, folder: Path, slots: int, stack: contextlib.ExitStack, absent: dict[str, str]
    ) -> dict[str, Remote]:
        """Our engine with every backend and dtype that is there, each in a process of its own."""
        found = {}
        for backend, dtype in engine.candidates():
            try:
                found[f"{backend} {dtype}"] = stack.enter_context(
                    self.engine_remote(folder, backend, dtype, slots=slots)
                )
            except BenchError as error:
                absent[f"{backend} {dtype}"] = str(error)
        if not found:
            raise BenchError(f"no backend of the engine can be opened: {absent}")
        return found

    def engine_remote(self, folder: Path, backend: str, dtype: str, *, slots: int) -> Remote:
        return Remote(engine.Ours, folder, backend, dtype, slots=slots, threads=self.cores, device=self.device)

    def llama_files(self, shape: str) -> tuple[dict[str, Path], dict[str, Path]]:
        """llama.cpp's programs, built if necessary, and the GGUF files of a shape."""
        if not all(program.exists() for program in llama.programs(self.llama_folder).values()):
            self.say(f"building llama.cpp in {self.llama_folder}, once, about five minutes …")
        programs = llama.build(self.llama_folder)
        folder = self.folder / f"{shape}-gguf"
        if not folder.exists():
            folder.mkdir()
            llama.convert(programs, self.folders[shape], folder)
        return programs, {dtype: folder / f"{dtype}.gguf" for dtype in (*llama.DTYPES, llama.LOSSY)}

    def some(self, variants: list[Any]) -> list[Any]:
        return variants if self.plan.every_variant else variants[:1]

    def systems(self) -> list[peers.System]:
        programs, files = self.llama_files("S")
        same = [variant for variant in llama.variants(files) if variant.dtype != llama.LOSSY]
        stock = peers.stock_litserve(self.folders["S"], self.cores)
        return [
            *peers.ours(self.folders["S"], {"threads": self.threads}),
            *peers.llama_cpp(programs, self.some(same), self.cores, max(self.plan.clients)),
            *self.some(peers.transformers_serve(self.folders["S"])),
            *(stock if self.plan.every_variant else stock[:2]),  # one for whole answers, one for streams
        ]

    def server(self, name: str, log: str, environment: dict[str, str] | None = None, **flags: object) -> Server:
        """The service on shape S, or its variant in the module `name`."""
        command = module(name, checkpoint=self.folders["S"], threads=self.threads, log_level="warning", **flags)
        return Server(command, self.out / "logs" / f"{log}.log", "/readyz", environment)

    def log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"

    def stock(self) -> Server:
        command = module("tests.bench.stock", checkpoint=self.folders["S"], threads=self.cores)
        return Server(command, self.out / "logs" / "stock.log", "/health")


def about(shape: Path | GPTConfig) -> Any:
    return asdict(shape) if is_dataclass(shape) else shape.name


def parameters(config: GPTConfig) -> int:
    """Weights, the embedding included."""
    counts = roofline.count(config, 0, 0, "bfloat16")
    return round(counts["weight_bytes"] / roofline.ITEM_BYTES["bfloat16"]) + config.vocab_size * config.n_embd


def backend_of(system: dict[str, Any]) -> tuple[str, str]:
    return system["flags"]["backend"], system["flags"]["dtype"]


def warmed(remote: Remote, rows: int) -> dict[str, Any]:
    """A run after a short one that is not counted, as llama-batched-bench does: another system had the processor."""
    remote.call("run", rows, 16)
    return remote.call("run", rows)


def rate_of(system: dict[str, Any], rows: int) -> float:
    return statistics.median(run["characters_per_second"] for run in system["rows"][str(rows)])


def contenders(systems: dict[str, Any], rows: list[int]) -> list[str]:
    """The default, and the systems that reach KEEP_ABOVE of their family's best at one number of rows or more."""
    found = []
    for name, system in systems.items():
        family = [other for other in systems.values() if other["family"] == system["family"]]
        if name == DEFAULT or any(
            rate_of(system, n) >= KEEP_ABOVE * max(rate_of(other, n) for other in family) for n in rows
        ):
            found.append(name)
    return found


def best_line(systems: dict[str, Any], rows: list[int]) -> str:
    """The last rates of each family's fastest."""
    parts = []
    for count in rows:
        best: dict[str, float] = {}
        for system in systems.values():
            rate = system["rows"][str(count)][-1]["characters_per_second"]
            best[system["family"]] = max(best.get(system["family"], 0.0), rate)
        parts.append(f"{count} rows " + " ".join(f"{family} {rate:,.0f}" for family, rate in best.items()))
    return "; ".join(parts)


def http_line(modes: dict[str, Any]) -> str:
    return "; ".join(
        f"{clients} clients "
        + " ".join(f"{f} {x['runs'][-1]['characters_per_second']:,.0f}" for f, x in each["families"].items())
        for clients, each in modes.items()
    )


def differing(texts: list[str], others: list[str]) -> int:
    return sum(a != b for a, b in zip(texts, others, strict=True))


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


def answers_once(
    system: peers.System, server: Server, clients: int, count: int, streamed: bool, length: int = ANSWER
) -> dict[str, Any]:
    """`count` answers of `length` characters to `clients` clients, each asking again as soon as it is answered.

    Raises:
        LoadError: an answer has another length.
    """
    requests = (
        (0.0, system.request(prompt_text(PROMPT, number), length, streamed, number), (system.family, system.name))
        for number in range(count)
    )
    before = sum(server.cpu_seconds().values())
    outcome = load.run(server.port, requests, connections=clients, marker=system.marker, keep=True)
    cpu = sum(server.cpu_seconds().values()) - before
    for reply in outcome.replies:
        given = len(system.text(reply, streamed))
        if given != length:
            raise load.LoadError(f"{system.family} {system.name}: expected {length} characters, got {given}")
    return {
        "characters_per_second": count * length / outcome.seconds,
        "answers": count,
        "seconds": outcome.seconds,
        "server_cpu_seconds": cpu,
        "client_cpu_seconds": outcome.cpu_seconds,
    }


def beside_once(port: int, request: bytes, connections: int, seconds: float) -> dict[str, float]:
    """Characters per second of a stream, and answers per second of another client's `request`: alone and together.

    The other client is a process of its own, at an address of its own, and begins before the stream.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        work = (answers_per_second, port, request, connections)
        run = {"alone": stream_rate(port, seconds), "other_alone": pool.submit(*work, seconds).result()}
        other = pool.submit(*work, seconds + 0.5)
        time.sleep(0.25)
        return run | {"beside": stream_rate(port, seconds), "other_beside": other.result()}


def stream_rate(port: int, seconds: float) -> float:
    """Characters per second that one client's streams, one after the other, give within `seconds`."""
    request = load.post("/generate", {"prompt": "\n", "max_tokens": 16_000, "stream": True})
    outcome = load.run(port, load.at_once(request, 10**9), connections=1, seconds=seconds, keep=True)
    texts = (b"".join(data for _, data in load.dechunked(reply.parts)) for reply in outcome.replies)
    return sum(len(ours_text(text)) for text in texts) / outcome.seconds


def answers_per_second(port: int, request: bytes, connections: int, seconds: float) -> float:
    """Of a client that asks again as soon as it is answered; those that the end cuts off count in part."""
    outcome = load.run(
        port, load.at_once(request, 10**9), connections=connections, seconds=seconds, address=OTHER_CLIENT
    )
    whole = [reply.ended_at - reply.sent_at for reply in outcome.replies if reply.ended_at is not None]
    if not whole:
        raise load.LoadError(f"no answer within {seconds:g} s")
    ended_at = outcome.started_at + outcome.seconds
    open_for = sum(ended_at - reply.sent_at for reply in outcome.replies if reply.ended_at is None)
    return (len(whole) + open_for / statistics.mean(whole)) / outcome.seconds


def kind_once(port: int, fields: dict[str, Any], clients: int, seconds: float) -> float:
    """Characters per second of whole answers of ANSWER characters."""
    requests = (
        (0.0, load.post("/generate", {"prompt": prompt_text(PROMPT, n), "max_tokens": ANSWER, "seed": n} | fields), n)
        for n in range(10**9)
    )
    outcome = load.run(port, requests, connections=clients, seconds=seconds)
    return len(outcome.ended) * ANSWER / outcome.seconds


def first_once(system: peers.System, server: Server, count: int) -> dict[str, float]:
    """Percentiles of the time to the first character of one client that pauses 20 ms between its requests."""
    requests = (
        (0.02 * number, system.request(prompt_text(PROMPT, number), 8, True, number), number) for number in range(count)
    )
    outcome = load.run(server.port, requests, connections=1, marker=system.marker)
    return percentiles(outcome.times_to_first)


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


def alone_once(server: Server, request: bytes, count: int) -> dict[str, float]:
    """How long one client waits for each of `count` answers; the slowest are what a median hides."""
    outcome = load.run(server.port, load.at_once(request, count), connections=1)
    seconds = sorted(reply.ended_at - reply.sent_at for reply in outcome.replies if reply.ended_at is not None)
    return percentiles(seconds) | {"p99.9": seconds[-(-999 * len(seconds) // 1000) - 1], "max": seconds[-1]}


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
    llama.add_folder(parser)
    parser.add_argument("--quick", action="store_true", help="about five minutes")
    parser.add_argument(
        "--only", type=subset(PARTS), default=list(PARTS), metavar="PARTS", help=f"of {','.join(PARTS)} (default: all)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the other parts of OUT/serve.json")
    parser.add_argument("--table", action="store_true", help="write OUT/serve.json into tests/README.md and exit")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if args.table:
        try:
            results = json.loads((args.out / "serve.json").read_text(encoding="utf-8"))
            put(markdown(results), ROOT / "tests" / "README.md", "bench")
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0
    prepare_process()
    bench = Bench(QUICK if args.quick else FULL, SHAPES, args.threads, args.out, args.llama_cpp)
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
    bench.say(f"figures: {args.out / 'serve.json'}, .md")
    return 1 if bench.results["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
