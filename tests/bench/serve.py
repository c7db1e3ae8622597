"""Benchmarks of the service against what a user would choose instead, part by part, on this machine's CPU.

    make bench                      about 40 minutes, and five more once to build llama.cpp
    make bench-quick                about five minutes: fewer systems, rows and repeats
    make bench ARGS='--only engine http --threads 1'
    make bench-table                tables of OUT/serve.json into tests/README.md

    engine   in process: the native engine in float32, llama-batched-bench on each GGUF; the roofline
    http     answers and streams of 128 characters over HTTP and the time to the first character: the service,
             llama.cpp's server, transformers serve, stock LitServe
    mixed    one stream beside another client's work, and kinds of requests beside plain ones
    templates  in process: prompts that begin with one of 50 templates, with reuse of what slots hold and without
    path     the service around a stub engine; compared with plain FastAPI and stock LitServe, both without a model

Rewrites OUT/serve.json and OUT/serve.md after each part; the servers' logs are in OUT/logs. Systems that are compared
are each in a process of its own and measured in turns, since the speed of a shared machine drifts. Figures are medians
(lowest–highest) over the turns, ratios are taken within a turn. Where a system has several variants, one run of each
chooses the fastest at the row or client count in question.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from service.model.checkpoint import Checkpoint
from service.model.config import GPTConfig
from service.settings import available_cpus
from tests.toolbox import load
from tests.toolbox.figures import percentiles, put, quantile
from tests.toolbox.http import event_data
from tests.toolbox.launch import ROOT, Server, ServerError, module

from . import engine, llama, peers, roofline
from .command import Remote, Run, add_only, add_threads, build_parser
from .report import NATIVE, markdown
from .shapes import ANSWER, NUMBERS, PROMPT, SAMPLING, SHAPES, checkpoint_of, prompt_text

ALONE_PER_SECOND = 4000 / 3  # answers of one client, one after the other: 20,000 in five turns
BESIDE = {  # what another client asks all the time, and how many requests at a time
    "n = 64": (load.post("/generate", {"prompt": "\n", "max_tokens": ANSWER, "n": 64}), 1),
    "/v1/score, 40 texts of 500": (load.post("/v1/score", {"texts": [prompt_text(500, i) for i in range(40)]}), 2),
    "/v1/next, 128 prompts": (load.post("/v1/next", {"prompt": [prompt_text(PROMPT, i) for i in range(128)]}), 2),
    "prompts of 8,000": (load.post("/generate", {"prompt": 8 * prompt_text(1000, 0), "max_tokens": 1}), 4),
    "one regex": (load.post("/generate", {"prompt": "\n", "regex": "[A-Za-z \n]{128}", "max_tokens": ANSWER}), 1),
}
# llama.cpp can do this one: it has no longer prompts than a window, scores nothing, and its patterns are grammars.
LLAMA_BESIDE = "n = 64, llama.cpp"
OTHER_CLIENT = "127.0.0.2"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "regex": {"regex": f"[A-Za-z \n]{{{ANSWER}}}"},
    "5 log-probabilities": {"logprobs": 5},
}
PACE_SECONDS = 0.01  # step time of the paced stub: 64 streams emit 6,400 events/s
STOCK_EVENT = b'{"text": "a"'
SLOTS = 128  # of the engine alone

PARTS = ("engine", "http", "mixed", "templates", "path")


@dataclass(frozen=True)
class Plan:
    """Amount of measurement."""

    repeats: int = 5  # turns
    shapes: tuple[str, ...] = ("S", "M")
    rows: tuple[int, ...] = (1, 8, 32, 128)
    engine_seconds: float = 1.0  # per run, at least
    every_variant: bool = True  # of the peers, instead of one of each
    clients: tuple[int, ...] = (1, 8, 32, 64)
    http_seconds: float = 3.0  # per measurement
    first_requests: int = 200
    path_seconds: float = 3.0  # per measurement of the path
    streams: tuple[int, ...] = (1, 256)
    paced_length: int = 400


FULL = Plan()
QUICK = Plan(2, ("S",), (1, 8, 32), 1.0, False, (1, 64), 1.0, 40, 1.0, (1, 256), 100)


class Bench(Run):
    def __init__(
        self, plan: Plan, shapes: dict[str, Path | GPTConfig], threads: int, out: Path, llamas: Path = llama.FOLDER
    ):
        self.plan, self.shapes, self.threads, self.llama_folder = plan, shapes, threads, llamas
        self.cores = available_cpus()  # threads of an engine alone, and of the peers' engines
        settings = {
            "plan": asdict(plan), "quick": plan is QUICK, "threads": threads, "cores": self.cores,
            "llama": llama.PACKAGE,
            "shapes": {name: asdict(it) if is_dataclass(it) else it.name for name, it in shapes.items()},
            "sampling": SAMPLING,
        }  # fmt: skip
        packages = ("torch", "transformers", "litserve", "fastapi", "uvicorn")
        super().__init__("tests.bench.serve", out, "serve", markdown, packages, settings=settings)

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """With the checkpoint folders of the shapes."""
        self.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="chargpt-bench-") as folder:
            self.folder = Path(folder)
            self.folders = {name: checkpoint_of(shape, self.folder / name) for name, shape in self.shapes.items()}
            yield

    def run(self, parts: list[str]) -> None:
        with self.prepared():
            self.parts(parts, self.results)

    # -- the parts: engines --

    def engine(self) -> dict[str, Any]:
        """By shape and rows: runs of our engine in each dtype, and of the fastest variant of llama.cpp."""
        return {"shapes": {name: self.engine_of(name) for name in self.plan.shapes}}

    def engine_of(self, shape: str) -> dict[str, Any]:
        folder, rows, seconds = self.folders[shape], self.plan.rows, self.plan.engine_seconds
        config = Checkpoint.read(folder).config
        figures: dict[str, Any] = {str(count): {} for count in rows}
        programs, files = self.llama_files(shape)

        def batched(variant: llama.Variant, count: int, repeats: int) -> dict[str, Any]:
            return llama.batched_bench(programs, variant, count, ANSWER, self.cores, repeats)

        with contextlib.ExitStack() as stack:
            remotes = {NATIVE: stack.enter_context(self.remote(folder, "float32", SLOTS))}
            best: dict[int, tuple[llama.Variant, int]] = {}  # and its runs per measurement
            for count in rows:
                for name, remote in remotes.items():
                    about = remote.call("about")
                    length = PROMPT + ANSWER / 2
                    roof = roofline.roofline(config, count, length, self.cores, **about["stored"])
                    figures[str(count)][name] = {"flags": about, "roofline": roof, "runs": []}
                probe = {v: batched(v, count, 1)["characters_per_second"] for v in self.some(llama.variants(files))}
                variant = max(probe, key=probe.__getitem__)
                best[count] = variant, math.ceil(seconds * probe[variant] / count / ANSWER)
                figures[str(count)]["llama"] = {
                    "variant": variant.name, "probe": {v.name: rate for v, rate in probe.items()}, "runs": [],
                }  # fmt: skip
            for _ in range(self.plan.repeats):
                for count, systems in zip(rows, figures.values(), strict=True):
                    for name, remote in remotes.items():
                        systems[name]["runs"].append(remote.call("run", count, seconds))
                    systems["llama"]["runs"].append(batched(best[count][0], count, best[count][1]))
                self.say(f"{shape}: " + last_line(figures, "row"))
        return figures

    def templates(self) -> dict[str, Any]:
        """By requests at a time, with reuse and without."""
        figures: dict[str, Any] = {str(count): {"with": [], "without": []} for count in (1, 8)}
        with self.remote(self.folders["S"], "float32", 72) as remote:  # as many slots as the service has
            for turn in range(self.plan.repeats):
                for count, ways in figures.items():
                    for way, runs in ways.items():
                        runs.append(remote.call("templates", int(count), way == "with", turn))
        return {"at_once": figures}

    # -- the parts: over HTTP --

    def http(self) -> dict[str, Any]:
        """By mode ("whole", "streamed") and clients: the probe of each variant, and runs of each family's best."""
        systems = self.systems()
        figures: dict[str, Any] = {
            "flags": {f"{s.family} {s.name}": shlex.join(s.command) for s in systems}, "modes": {}, "first": {},
            "length": ANSWER, "absent": {},
        }  # fmt: skip

        def is_absent(name: str, error: Exception) -> None:
            figures["absent"][name] = str(error)[-1000:]
            self.say(f"{name} cannot be measured: {error}")

        with contextlib.ExitStack() as stack:
            servers: dict[peers.System, Server] = {}
            for number, system in enumerate(systems):
                server = stack.enter_context(system.start(self.log(f"{system.family}-{number}")))
                try:
                    server.wait_until_ready()
                    answers_once(system, server, 2, 2, system.streams[-1])
                except (ServerError, load.LoadError, OSError) as error:
                    is_absent(f"{system.family} {system.name}", error)
                    server.close()
                    continue
                server.pause()
                servers[system] = server
            best: dict[tuple[str, int], dict[str, tuple[peers.System, int]]] = {}
            for mode in ("whole", "streamed"):
                figures["modes"][mode] = {}
                for clients in self.plan.clients:
                    probe: dict[peers.System, float] = {}
                    chosen = best[mode, clients] = {}
                    for system in (system for system in servers if (mode == "streamed") in system.streams):
                        try:
                            with servers[system].running():
                                run = answers_once(system, servers[system], clients, clients, mode == "streamed")
                        except (load.LoadError, OSError) as error:
                            is_absent(f"{system.family} {system.name}, {mode}, {clients} clients", error)
                            continue
                        probe[system] = run["characters_per_second"]
                        if system.family not in chosen or probe[system] > probe[chosen[system.family][0]]:
                            chosen[system.family] = system, max(1, round(self.plan.http_seconds / run["seconds"]))
                    figures["modes"][mode][str(clients)] = {
                        "probe": {f"{system.family} {system.name}": rate for system, rate in probe.items()},
                        "families": {f: {"variant": system.name, "runs": []} for f, (system, _) in chosen.items()},
                    }
            for _ in range(self.plan.repeats):
                for (mode, clients), chosen_now in best.items():
                    into = figures["modes"][mode][str(clients)]["families"]
                    for family, (system, rounds) in chosen_now.items():
                        server = servers[system]
                        with server.running():
                            run = answers_once(system, server, clients, rounds * clients, mode == "streamed")
                        into[family]["runs"].append(run)
                for family, (system, _) in best["streamed", self.plan.clients[0]].items():
                    numbers = itertools.islice(NUMBERS, self.plan.first_requests)
                    requests = [system.request(prompt_text(PROMPT, n), 8, True, n) for n in numbers]
                    with servers[system].running():
                        first = first_once(servers[system], requests, system.marker)
                    figures["first"].setdefault(family, {"variant": system.name, "runs": []})["runs"].append(first)
                whole = {n: each["families"] for n, each in figures["modes"]["whole"].items()}
                self.say("whole answers: " + last_line(whole, "client"))
        return figures

    def mixed(self) -> dict[str, Any]:
        """A stream alone and beside the work of another client, whose own rate alone and beside the stream follows; and
        characters per second of whole answers by kind and clients. Of the service as installed, and in the long form,
        where it can do the same, of llama.cpp's server.
        """
        seconds, ours = self.plan.http_seconds, peers.ours(self.folders["S"])
        figures: dict[str, Any] = {"beside": {}, "kinds": {name: {} for name in KINDS}, "absent": {}}
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(ours.start(self.log("mixed")))
            loads = {name: (ours, server, 16_000, *each) for name, each in BESIDE.items()}
            if self.plan.every_variant:
                programs, files = self.llama_files("S")
                [llamas] = peers.llama_cpp(programs, llama.variants(files)[:1], self.cores, 65)
                prompts = llamas.request(["\n"] * 64, ANSWER, False, 1)
                other = stack.enter_context(llamas.start(self.log("mixed-llama")))
                loads[LLAMA_BESIDE] = (llamas, other, ANSWER, prompts, 1)
            for at in {at for _, at, *_ in loads.values()}:
                at.wait_until_ready()
            for name, (_, at, _, request, _) in list(loads.items()):
                try:
                    with at.running():
                        load.run(at.port, load.at_once(request, 1, name), connections=1)
                except load.LoadError as error:
                    figures["absent"][name] = str(error)[-1000:]
                    del loads[name]
            for turn in range(-1 if self.plan.every_variant else 0, self.plan.repeats):
                for name, (system, at, length, request, connections) in loads.items():
                    with at.running():
                        run = beside_once(system, at.port, length, request, connections, seconds)
                    if turn >= 0:  # the first is a warm-up
                        figures["beside"].setdefault(name, []).append(run)
                with server.running():
                    for clients in self.plan.clients if turn >= 0 else ():
                        for kind, fields in KINDS.items():
                            rate = kind_once(server.port, fields, clients, seconds / 2)
                            figures["kinds"][kind].setdefault(str(clients), []).append(rate)
                self.say(f"turn {turn + 1} of {self.plan.repeats}")
        return figures

    def path(self) -> dict[str, Any]:
        streams = list(self.plan.streams)
        figures: dict[str, Any] = {"streams": streams, "paced": []}
        with contextlib.ExitStack() as stack:

            def start(name: str, log: str, ready: str = "/readyz", pace: float = 0.0, **flags: object) -> Server:
                paced = {"CHARGPT_STUB_STEP_SECONDS": str(pace)}
                command = module("tests.bench.servers", name, **flags)
                server = stack.enter_context(Server(command, self.log(log), ready, paced))
                server.wait_until_ready()
                return server

            common = {"checkpoint": self.folders["S"], "threads": self.threads}
            ours = start("stub", "stub", **common)
            paced = start("stub", "stub-paced", pace=PACE_SECONDS, **common)
            stock = start("stock", "stock-stub", "/health")
            unlogged = {"ours": start("stub", "stub-unlogged", log_level="warning", **common)}
            answers = self.out / "logs" / "answers.json"
            answers.write_text(json.dumps(answers_of(ours.port)), encoding="utf-8")
            plain = start("plain", "plain", answers=answers)
            unlogged["plain"] = start("plain", "plain-unlogged", answers=answers, log_level="warning")
            check_same_bytes(ours.port, plain.port)
            servers = {"ours": ours, "plain": plain, "stock": stock}
            for server in (*servers.values(), *unlogged.values(), paced):
                server.pause()
            for name in servers:
                figures[name] = {"requests": [], "first": [], "streams": {str(n): [] for n in streams}}
                figures[name] |= {kind: [] for kind in ("whole", "unlogged") if name != "stock"}
            for _ in range(self.plan.repeats):
                for name, server in servers.items():
                    with server.running():
                        self.path_once(figures[name], name == "stock", server)
                for name, server in unlogged.items():
                    with server.running():
                        figures[name]["unlogged"].append(requests_once(server, self.plan.path_seconds))
                with paced.running():
                    body = {"prompt": "a", "max_tokens": self.plan.paced_length, "stream": True}
                    figures["paced"].append(streams_once(paced, body, 64))
                rates = [figures[name]["requests"][-1]["per_second"] for name in servers]
                self.say("requests/s, " + ", ".join(f"{n} {r:,.0f}" for n, r in zip(servers, rates, strict=True)))
        return figures

    def path_once(self, figures: dict[str, Any], is_stock: bool, server: Server) -> None:
        seconds = self.plan.path_seconds
        figures["requests"].append(requests_once(server, seconds, "/whole" if is_stock else "/generate"))
        stream = {"prompt": "a", "max_tokens": 8, "stream": True}
        marker = STOCK_EVENT if is_stock else load.EVENT
        figures["first"].append(first_once(server, [load.post("/generate", stream)] * round(seconds * 50), marker))
        if not is_stock:
            figures["whole"].append(alone_once(server, round(ALONE_PER_SECOND * seconds)))
        total = round((5_000 if is_stock else 150_000) * seconds)
        for count, runs in figures["streams"].items():
            body = stream | {"max_tokens": max(1, min(16_000, total // int(count)))}
            runs.append(streams_once(server, body, int(count), marker))

    # -- helpers --

    def remote(self, folder: Path, dtype: str, slots: int) -> Remote:
        return Remote(engine.Ours, folder, "native", dtype, slots=slots, threads=self.cores, device="cpu")

    def llama_files(self, shape: str) -> tuple[dict[str, Path], dict[str, Path]]:
        """llama.cpp's programs, built if necessary, and the GGUF files of a shape."""
        if not all(program.exists() for program in llama.programs(self.llama_folder).values()):
            self.say(f"building llama.cpp in {self.llama_folder}, once, about five minutes …")
        programs = llama.build(self.llama_folder)
        folder = self.folder / f"{shape}-gguf"
        if not folder.exists():
            folder.mkdir()
            llama.convert(programs, self.folders[shape], folder)
        return programs, {dtype: folder / f"{dtype}.gguf" for dtype in llama.DTYPES}

    def some(self, variants: list[Any]) -> list[Any]:
        return variants if self.plan.every_variant else variants[:1]

    def systems(self) -> list[peers.System]:
        programs, files = self.llama_files("S")
        stock = peers.stock_litserve(self.folders["S"], self.cores)
        return [
            peers.ours(self.folders["S"], {"threads": self.threads}),
            *peers.llama_cpp(programs, self.some(llama.variants(files)), self.cores, max(self.plan.clients)),
            *self.some(peers.transformers_serve(self.folders["S"])),
            *(stock if self.plan.every_variant else stock[:2]),  # one for whole answers, one for streams
        ]

    def log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"


def last_line(by_count: dict[str, Any], noun: str) -> str:
    """The last rates of each system, by rows or clients."""
    return "; ".join(
        f"{count} {noun}s "
        + " ".join(f"{name} {each['runs'][-1]['characters_per_second']:,.0f}" for name, each in systems.items())
        for count, systems in by_count.items()
    )


# Single measurements


def answers_once(
    system: peers.System, server: Server, clients: int, count: int, streamed: bool, length: int = ANSWER
) -> dict[str, Any]:
    """`count` answers of `length` characters to `clients` clients, each asking again as soon as it is answered.

    Raises:
        LoadError: an answer has another length.
    """
    requests = (
        (0.0, system.request(prompt_text(PROMPT, number), length, streamed, number), (system.family, system.name))
        for number in itertools.islice(NUMBERS, count)
    )
    outcome = load.run(server.port, requests, connections=clients, marker=system.marker, keep=True)
    for reply in outcome.replies:
        given = len(system.text(reply.body, streamed))
        if given != length:
            raise load.LoadError(f"{system.family} {system.name}: expected {length} characters, got {given}")
    return {
        "characters_per_second": count * length / outcome.seconds, "answers": count, "seconds": outcome.seconds,
        "client_cpu_seconds": outcome.cpu_seconds,
    }  # fmt: skip


def until(seconds: float, has: Callable[[load.Reply], object]) -> dict[str, Any]:
    """Options of load.run, which then ends after `seconds`, or later with the first reply of the kind."""
    replies: list[load.Reply] = []
    ends_at = time.monotonic() + seconds
    return {"replies": replies, "is_over": lambda: time.monotonic() >= ends_at and any(map(has, replies))}


def is_answered(reply: load.Reply) -> bool:
    return reply.ended_at is not None


def beside_once(
    system: peers.System, port: int, length: int, request: bytes, connections: int, seconds: float
) -> dict[str, float]:
    """Characters per second of a stream, and answers per second of another client's `request`: alone and together.

    length: of the streams, which follow one another. The other client is a process of its own, at an address of its
    own, and begins before the stream.
    """
    requests, options = partial(load.at_once, request, 10**9), {"connections": connections, "address": OTHER_CLIENT}
    run = {"alone": stream_rate(system, port, length, seconds)}
    run["other_alone"] = answers_per_second(load.run(port, requests(), **until(seconds, is_answered), **options))
    with load.Apart(port, requests, least=1, **options) as other:
        time.sleep(0.25)
        run["beside"] = stream_rate(system, port, length, seconds)
        time.sleep(0.25)
    return run | {"other_beside": answers_per_second(other.outcome)}


def stream_rate(system: peers.System, port: int, length: int, seconds: float) -> float:
    """Characters per second that one client's streams, one after the other, give within `seconds`."""
    requests = ((0.0, system.request("\n", length, True, number), None) for number in NUMBERS)
    outcome = load.run(port, requests, connections=1, keep=True, **until(seconds, lambda reply: reply.num_events))
    return sum(len(system.text(reply.body, True)) for reply in outcome.replies) / outcome.seconds


def answers_per_second(outcome: load.Outcome) -> float:
    """Of a client that asks again as soon as it is answered; those that the end cuts off count in part."""
    whole = [reply.ended_at - reply.sent_at for reply in outcome.replies if reply.ended_at is not None]
    ended_at = outcome.started_at + outcome.seconds
    open_for = sum(ended_at - reply.sent_at for reply in outcome.replies if reply.ended_at is None)
    return (len(whole) + open_for / statistics.mean(whole)) / outcome.seconds


def kind_once(port: int, fields: dict[str, Any], clients: int, seconds: float) -> float:
    """Characters per second of whole answers of ANSWER characters."""
    requests = (
        (0.0, load.post("/generate", {"prompt": prompt_text(PROMPT, n), "max_tokens": ANSWER, "seed": n} | fields), n)
        for n in NUMBERS
    )
    outcome = load.run(port, requests, connections=clients, **until(seconds, is_answered))
    return len(outcome.ended) * ANSWER / outcome.seconds


def first_once(server: Server, requests: Iterable[bytes], marker: bytes) -> dict[str, float]:
    """Percentiles of the time to the first character of one client that pauses 20 ms between its requests."""
    due = ((0.02 * number, request, number) for number, request in enumerate(requests))
    return percentiles(load.run(server.port, due, connections=1, marker=marker).times_to_first)


def requests_once(server: Server, seconds: float, path: str = "/generate") -> dict[str, float]:
    """Answers of one character per second, to 32 clients."""
    whole = load.post(path, {"prompt": "a", "max_tokens": 1})
    for each in (min(0.5, seconds), seconds):  # first a warm-up: the server was paused or has just started
        outcome = load.run(server.port, load.at_once(whole, 10**9), connections=32, **until(each, is_answered))
    return {"per_second": len(outcome.ended) / outcome.seconds, "load_cores": outcome.cpu_seconds / outcome.seconds}


def streams_once(server: Server, body: dict[str, Any], count: int, marker: bytes = load.EVENT) -> dict[str, Any]:
    """`count` concurrent streams of body["max_tokens"] characters each; CPU time per event."""
    request = load.post("/generate", body)
    before = server.cpu_seconds()
    outcome = load.run(server.port, load.at_once(request, count), connections=count, marker=marker)
    spent = {role: after - before[role] for role, after in server.cpu_seconds().items()}
    characters, events = count * body["max_tokens"], outcome.num_events
    return {
        "characters_per_second": characters / outcome.seconds, "characters_per_event": characters / events,
        "http_seconds_per_event": spent["http"] / events, "worker_seconds_per_event": spent["worker"] / events,
    }  # fmt: skip


def alone_once(server: Server, count: int) -> dict[str, float]:
    """How long one client waits for each of `count` answers; the slowest are what a median hides."""
    request = load.post("/generate", {"prompt": "a", "max_tokens": 1})
    outcome = load.run(server.port, load.at_once(request, count), connections=1)
    seconds = [reply.ended_at - reply.sent_at for reply in outcome.replies if reply.ended_at is not None]
    return percentiles(seconds) | {"p99.9": quantile(seconds, 0.999), "max": max(seconds)}


def answers_of(port: int) -> dict[str, str]:
    """Templates of the service's responses, for plain FastAPI to return the same."""
    body = {"prompt": "a", "max_tokens": 1}
    whole = body_of(port, body)
    event, *rest = body_of(port, body | {"max_tokens": 2, "stream": True}).split("\n\n")
    given = json.dumps(json.loads(event_data(event.encode()) or b"")["text"])
    return {
        "whole": whole,
        "event": event.replace(given, '"TEXT"', 1) + "\n\n",
        "last": "\n\n".join(part for part in rest if '"text":' not in part),
    }


def body_of(port: int, body: dict[str, Any]) -> str:
    request = load.post("/generate", body)
    [reply] = load.run(port, load.at_once(request, 1), connections=1, keep=True).replies
    return reply.body.decode()


def check_same_bytes(ours: int, plain: int) -> None:
    """Check that both send equally many bytes for the same request, headers excluded.

    Raises:
        LoadError: they do not.
    """
    sizes = [len(body_of(port, {"prompt": "a", "max_tokens": 1})) for port in (ours, plain)]
    if abs(sizes[0] - sizes[1]) > 16:  # numbers of digits vary
        raise load.LoadError(f"the service sends {sizes[0]} bytes, plain FastAPI {sizes[1]}")


def main() -> int:
    parser = build_parser("tests.bench.serve", __doc__, "out/bench")
    add_threads(parser)
    llama.add_folder(parser)
    parser.add_argument("--quick", action="store_true", help="about five minutes")
    add_only(parser, PARTS)
    parser.add_argument("--table", action="store_true", help="write OUT/serve.json into tests/README.md and exit")
    args = parser.parse_args()
    if args.table:
        results = json.loads((args.out / "serve.json").read_text(encoding="utf-8"))
        put(markdown(results), ROOT / "tests" / "README.md", "bench")
        return 0
    bench = Bench(QUICK if args.quick else FULL, SHAPES, args.threads, args.out, args.llama_cpp)
    return bench.main(lambda: bench.run(args.only or list(PARTS)))


if __name__ == "__main__":
    sys.exit(main())
