"""Everything that can be checked only on a GPU, in one command: correctness, speed, training, the image.

    make gpu-check                       on an NVIDIA GPU, with torch built for CUDA; about 25 minutes, an estimate
    make gpu-check ARGS='--only engine'  again, this part alone

    tests      pytest -m cuda: parity in each dtype, batch invariance over 10,000 generations, graphs against eager,
               out of memory, a killed worker, two HTTP processes
    engine     S and M by rows: characters per second, share of memory bandwidth and of products, a profile of one call
    http       whole answers, streams and the first character, beside stock LitServe, transformers serve and vLLM
    training   the preset gpu, with and without torch.compile; nanoGPT's recipe for as long
    image      the CUDA image: built, and one generation in it

Rewrites OUT/gpu-check.json and OUT/gpu-check.md after each part; parts that an earlier run of the same revision
finished are kept. A part that fails leaves its reason, and the others run. Exit status: 0; 1, a part failed; 2, no GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from service.engine.runner import slots_that_fit
from tests.toolbox.figures import write_figures
from training.config import TrainConfig
from training.speed import matmul_peak

from . import engine, nanogpt, peers, roofline, serve, train
from .command import BenchError, Progress, Remote, build_parser, context, in_child, prepare_process, subset
from .report import table
from .servers import ROOT
from .shapes import SHAPES, checkpoint_of, config_of

PARTS = ("tests", "engine", "http", "training", "image")
ROWS = (1, 32, 128, 512, 2048)
DTYPES = ("float32", "bfloat16")
CLIENTS = (1, 64, 512)
REPEATS = 3
HTTP_PROCESSES = min(8, max(1, (os.cpu_count() or 2) // 2))


class Check:
    """One run and its results so far."""

    def __init__(self, out: Path):
        self.out, self.say = out, Progress()
        self.results: dict[str, Any] = {
            **context("tests.bench.gpu", "torch"), "cuda": torch.version.cuda, "parts": {}, "errors": {},
        }  # fmt: skip

    def keep(self, repeated: list[str]) -> None:
        """Take what an earlier run on this revision and machine has finished, except what is to be repeated."""
        if (self.results["revision"] or "-dirty").endswith("-dirty"):
            return  # the code may have changed
        with contextlib.suppress(OSError, ValueError, KeyError):
            earlier = json.loads((self.out / "gpu-check.json").read_text(encoding="utf-8"))
            if all(earlier[name] == self.results[name] for name in ("revision", "machine", "versions")):
                done = earlier["parts"]
                self.results["parts"] = {part: done[part] for part in PARTS if part in done and part not in repeated}

    def run(self, parts: list[str]) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="chargpt-gpu-") as folder:
            self.folders = {name: checkpoint_of(shape, Path(folder) / name) for name, shape in SHAPES.items()}
            for part in parts:
                if part in self.results["parts"]:
                    self.say(f"{part}: done by an earlier run")
                    continue
                self.say(f"{part} …")
                started = self.say.seconds
                try:
                    found = getattr(self, part)()
                except Exception as error:
                    self.results["errors"][part] = f"{type(error).__name__}: {error}"
                    self.say(f"{part} failed: {error}")
                else:
                    self.results["parts"][part] = found | {"seconds": self.say.seconds - started}
                self.write()

    def write(self) -> None:
        write_figures(self.out / "gpu-check.json", self.results)
        (self.out / "gpu-check.md").write_text(markdown(self.results), encoding="utf-8")

    # -- the parts --

    def tests(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "--timeout", "900"]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"CHARGPT_REQUIRE": "cuda"}, capture_output=True, text=True
        )
        (self.out / "tests.log").write_text(done.stdout + done.stderr, encoding="utf-8")
        lines = done.stdout.strip().splitlines() or [""]
        if done.returncode:
            raise BenchError(f"{lines[-1]}; see {self.out / 'tests.log'}")
        return {"summary": lines[-1]}

    def engine(self) -> dict[str, Any]:
        """Decode rates with as many slots as rows, as the shapes of a launch are those of its slots."""
        read = in_child(_read_rate)["bytes_per_second"]
        products = {dtype: in_child(_peak, dtype)["operations_per_second"] for dtype in DTYPES}
        found: dict[str, Any] = {"bytes_per_second": read, "operations_per_second": products, "runs": [], "absent": {}}
        free = torch.cuda.mem_get_info()[0]
        for shape, folder in self.folders.items():
            config = config_of(folder)
            for dtype in DTYPES:
                for rows in ROWS:
                    if slots_that_fit(config, dtype, free) < rows:
                        self.say(f"{shape} {dtype}: {rows} rows do not fit")
                        continue
                    try:
                        run = self.full_windows(folder, dtype, rows)
                    except BenchError as error:
                        found["absent"][f"{shape} {dtype}, {rows} rows"] = str(error)
                        self.say(f"{shape} {dtype}, {rows} rows cannot be measured: {error}")
                        continue
                    counts = roofline.count(config, rows, config.block_size, dtype)
                    step = rows / run["characters_per_second"]
                    run["bandwidth_share"] = (counts["weight_bytes"] + counts["cache_bytes"]) / read / step
                    operations = counts["product_operations"] + counts["attention_operations"]
                    run["product_share"] = operations / products[dtype] / step
                    found["runs"].append({"shape": shape, "dtype": dtype, "rows": rows} | run)
                    self.say(f"{shape} {dtype}, {rows} rows: {run['characters_per_second']:,.0f} characters/s")
        if not found["runs"]:
            raise BenchError(f"nothing could be measured: {found['absent']}")
        return found

    def full_windows(self, folder: Path, dtype: str, rows: int) -> dict[str, Any]:
        with Remote(engine.Ours, folder, "cuda", dtype, slots=rows, threads=1, device="cuda") as remote:
            remote.call("run", rows)
            rates = [remote.call("full", rows) for _ in range(REPEATS)]
            profile = remote.call("profile", rows) if rows in (1, 512) else None
        return {"characters_per_second": statistics.median(rates), "each": rates, "profile": profile}

    def http(self) -> dict[str, Any]:
        found: dict[str, Any] = {"runs": [], "absent": {}}
        for number, system in enumerate(gpu_systems(self.folders["M"])):
            name = f"{system.family} {system.name}"
            try:
                with system.start(self.out / f"{system.family}-{number}.log") as server:
                    server.wait_until_ready(300)
                    serve.answers_once(system, server, 2, 2, system.streams[-1])
                    for clients in CLIENTS:
                        for streamed in system.streams:
                            count = max(8, 4 * clients)
                            runs = [
                                serve.answers_once(system, server, clients, count, streamed) for _ in range(REPEATS)
                            ]
                            rates = [run["characters_per_second"] for run in runs]
                            mode = "streamed" if streamed else "whole"
                            found["runs"].append(
                                {"system": name, "flags": shlex.join(system.command), "clients": clients, "mode": mode,
                                 "characters_per_second": statistics.median(rates), "each": rates}
                            )  # fmt: skip
                            self.say(f"{name}, {clients} clients, {mode}: {statistics.median(rates):,.0f} characters/s")
                    if True in system.streams:
                        found.setdefault("first", {})[name] = serve.first_once(system, server, 100)
            except Exception as error:
                found["absent"][name] = f"{type(error).__name__}: {str(error)[-1000:]}"
                self.say(f"{name} cannot be measured: {error}")
        if not any(run["system"].startswith("ours") for run in found["runs"]):
            raise BenchError(f"the service could not be measured: {found['absent']}")
        return found

    def training(self) -> dict[str, Any]:
        """The preset gpu, with and without torch.compile, and nanoGPT, which is not compiled, for as long as ours.

        Not with two processes, which would share the GPU.
        """
        found: dict[str, Any] = {}
        for name, compiled in (("compiled", True), ("eager", False)):
            config = TrainConfig.from_preset("gpu", device="cuda", compile=compiled, sample_chars=0)
            found[name] = in_child(train.run_ours, config, self.out / "train" / name)
            self.say(f"{name}: {found[name]['whole']:.4f} in {found[name]['wall_seconds']:.0f} s")
        found["nanogpt"] = in_child(_nanogpt_on_gpu, found["eager"]["wall_seconds"])
        return found

    def image(self) -> dict[str, Any]:
        if shutil.which("docker") is None or subprocess.run(["docker", "version"], capture_output=True).returncode:
            return {"skipped": "no Docker engine answers"}
        _checked("docker build --quiet --build-arg ACCELERATOR=cuda -t chargpt:cuda .")
        size = int(_checked("docker image inspect --format {{.Size}} chargpt:cuda"))
        container = _checked("docker run --rm --detach --gpus all --read-only --tmpfs /tmp chargpt:cuda").strip()
        ask = "import json, urllib.request as u; print(u.urlopen(u.Request('http://127.0.0.1:8000/generate', "
        ask += "json.dumps({'prompt': 'A', 'max_tokens': 20}).encode(), {'Content-Type': 'application/json'})).read())"
        try:
            deadline = time.monotonic() + 120
            while subprocess.run(["docker", "exec", container, "python", "-c", ask], capture_output=True).returncode:
                if time.monotonic() > deadline:
                    raise BenchError(f"no generation within 120 s; the container's log: {_log(container)[-1000:]}")
                time.sleep(1)
            log = _log(container)
        finally:
            subprocess.run(["docker", "rm", "--force", container], capture_output=True)
        if not re.search(r"backend cuda", log):
            raise BenchError(f"the container did not serve on the GPU: {log[-1000:]}")
        return {"bytes": size}


def gpu_systems(folder: Path) -> list[peers.System]:
    """Every server that is installed, on the same checkpoint folder."""
    ours = {"accelerator": "cuda", "max_running_requests": 512, "http_processes": HTTP_PROCESSES}
    systems = [
        *(replace(peers.ours(folder, ours | {"dtype": dtype})[0], name=dtype) for dtype in DTYPES),
        *(s for s in peers.stock_litserve(folder, 1) if s.name.startswith("bfloat16") and "continuous" not in s.name),
    ]
    if find_spec("transformers"):
        systems += [s for s in peers.transformers_serve(folder, "cuda") if s.name.startswith("bfloat16, cont")]
    if vllm := shutil.which("vllm"):
        command = [vllm, "serve", str(folder.resolve()), "--dtype=bfloat16", "--host=127.0.0.1"]
        command += [f"--max-model-len={2 * config_of(folder).block_size}", "--max-num-seqs=512"]
        systems.append(peers.System("vllm", "bfloat16", tuple(command), "/health"))
    return systems


def _checked(command: str) -> str:
    done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"{command}: {done.stderr[-1000:]}")
    return done.stdout


def _log(container: str) -> str:
    done = subprocess.run(["docker", "logs", container], capture_output=True, text=True)
    return done.stdout + done.stderr


# -- in fresh processes --


def _read_rate() -> dict[str, float]:
    """Bytes per second of reading a tensor much larger than the caches."""
    data = torch.ones(1 << 30, device="cuda")  # 4 GiB

    def seconds() -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        data.sum()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3

    return {"bytes_per_second": data.nbytes / min(seconds() for _ in range(10))}


def _peak(dtype: str) -> dict[str, float]:
    return {"operations_per_second": matmul_peak(torch.device("cuda"), getattr(torch, dtype))}


def _nanogpt_on_gpu(seconds: float) -> dict[str, Any]:
    """nanoGPT's recipe for tiny Shakespeare on a GPU (10.7 M parameters), with as many steps as take as long."""
    probe = replace(nanogpt.GPU, steps=200, eval_every=100)
    first, last = train.run_nanogpt(probe, 1337, 0, "cuda")["curve"][-2:]  # CUDA has started before the second half
    step = (last["wall_seconds"] - first["wall_seconds"]) / 100
    recipe = replace(nanogpt.GPU, steps=max(1, int(seconds / step)), eval_every=1000)
    return train.run_nanogpt(recipe, 1337, 0, "cuda")


# -- output --


def markdown(results: dict[str, Any]) -> str:
    about, parts = results["machine"], results["parts"]
    lines = [
        f"{about.get('gpu', about['cpu'])}, torch {results['versions']['torch']} with CUDA {results['cuda']}, "
        f"{results['date'][:10]}, revision {results['revision']}",
        "",
    ]
    if "tests" in parts:
        lines += [f"Tests: {parts['tests']['summary']}", ""]
    for rows in (engine_rows, profile_rows, http_rows, training_rows):
        lines += rows(parts)
    if "image" in parts:
        image = parts["image"]
        size = f"{image['bytes'] / 1e9:.1f} GB, one generation on the GPU" if "bytes" in image else image["skipped"]
        lines += [f"Image: {size}", ""]
    absent = parts.get("engine", {}).get("absent", {}) | parts.get("http", {}).get("absent", {})
    lines += [f"- {name} was not measured: {reason.splitlines()[-1]}" for name, reason in absent.items()]
    lines += [f"- {part} failed: {reason}" for part, reason in results["errors"].items()]
    lines += [f"- {part} was not run" for part in PARTS if part not in parts and part not in results["errors"]]
    return "\n".join(lines).rstrip() + "\n"


def engine_rows(parts: dict[str, Any]) -> list[str]:
    runs = parts.get("engine", {}).get("runs", [])
    if not runs:
        return []
    rows = [
        [f"{run['shape']} {run['dtype']}", f"{run['rows']:,}", f"{run['characters_per_second']:,.0f}",
         f"{run['bandwidth_share']:.0%}", f"{run['product_share']:.0%}"]
        for run in runs
    ]  # fmt: skip
    return table([["engine, full windows", "rows", "characters/s", "of memory bandwidth", "of products"], *rows])


def profile_rows(parts: dict[str, Any]) -> list[str]:
    """The kernels that take most of the device's time, with most rows of the largest shape."""
    profiled = [run for run in parts.get("engine", {}).get("runs", []) if run.get("profile")]
    if not profiled:
        return []
    run = profiled[-1]
    head = [f"kernels of {run['shape']} {run['dtype']}, {run['rows']:,} rows", "calls", "of the device's time"]
    rows = [[f"`{it['name'][:80]}`", f"{it['calls']:,}", f"{it['share']:.0%}"] for it in run["profile"][:12]]
    return table([head, *rows])


def http_rows(parts: dict[str, Any]) -> list[str]:
    part = parts.get("http", {})
    rows = [
        [run["system"], f"{run['clients']}", run["mode"], f"{run['characters_per_second']:,.0f}"]
        for run in part.get("runs", [])
    ]
    lines = table([["over HTTP, M", "clients", "answers", "characters/s"], *rows]) if rows else []
    first = [[name, *(f"{1e3 * each[p]:.2f}" for p in ("p50", "p95"))] for name, each in part.get("first", {}).items()]
    return lines + (table([["first character, one client, ms", "p50", "p95"], *first]) if first else [])


def training_rows(parts: dict[str, Any]) -> list[str]:
    runs = {name: run for name, run in parts.get("training", {}).items() if isinstance(run, dict)}
    rows = [
        [name, f"{run['whole']:.4f}", f"{run['wall_seconds']:.0f}", f"{run['characters_per_second']:,.0f}",
         f"{run['peak_share']:.1%}"]
        for name, run in runs.items()
    ]  # fmt: skip
    return table([["training", "whole loss", "seconds", "characters/s", "of peak"], *rows]) if rows else []


def main() -> int:
    parser = build_parser("tests.bench.gpu", __doc__, "out")
    parser.add_argument("--only", type=subset(PARTS), metavar="PARTS", help=f"of {','.join(PARTS)} (default: all)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        build = "without CUDA" if torch.version.cuda is None else f"with CUDA {torch.version.cuda}"
        print(f"error: no NVIDIA GPU that torch {torch.__version__} ({build}) can use", file=sys.stderr)
        return 2
    prepare_process()
    check = Check(args.out)
    check.keep(args.only or [])
    stopped = False
    try:
        check.run(args.only or list(PARTS))
    except KeyboardInterrupt:
        stopped = True
    check.write()
    print(markdown(check.results))
    return 130 if stopped else 1 if check.results["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
