"""Everything that can be checked only on a GPU, in one command: correctness, speed, training, the image.

    make gpu-check                       on an NVIDIA GPU, with torch built for CUDA; about 25 minutes, an estimate
    make gpu-check ARGS='--only engine'  again, this part alone

    tests      pytest -m cuda: parity in each dtype, 10,000 texts whatever the load, graphs against eager,
               out of memory, a killed worker, two HTTP processes
    engine     S and M by rows: characters per second, share of memory bandwidth and of products
    http       whole answers, streams and the first character, beside stock LitServe, transformers serve and vLLM
    training   the preset gpu, with and without torch.compile
    image      the CUDA image: built, and one generation in it

Rewrites OUT/gpu-check.json and OUT/gpu-check.md after each part. A part that fails leaves its reason, and the others
run. Exit status: 0; 1, a part failed; 2, no GPU.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from service.engine.backends import slots_that_fit
from service.model.checkpoint import Checkpoint
from tests.toolbox.figures import conditions, table
from tests.toolbox.launch import ROOT
from training.config import TrainConfig
from training.run.estimate import matmul_peak

from . import engine, peers, roofline, serve, train
from .command import BenchError, Remote, Run, add_only, build_parser, in_child, run_checked
from .report import first_rows, http_rows
from .shapes import SHAPES, checkpoint_of

PARTS = ("tests", "engine", "http", "training", "image")
ROWS = (1, 32, 128, 512, 2048)
DTYPES = ("float32", "bfloat16")
REPEATS = 3
HTTP_PLAN = replace(serve.FULL, repeats=REPEATS, clients=(1, 64, 512), http_seconds=1.0, first_requests=100)
HTTP_PROCESSES = min(8, max(1, (os.cpu_count() or 2) // 2))
GENERATE = """
import json, urllib.request as u
body = json.dumps({"prompt": "A", "max_tokens": 20}).encode()
u.urlopen(u.Request("http://127.0.0.1:8000/generate", body, {"Content-Type": "application/json"})).read()
"""


class Check(Run):
    def run(self, parts: Iterable[str]) -> None:
        with tempfile.TemporaryDirectory(prefix="chargpt-gpu-") as folder:
            self.folders = {name: checkpoint_of(shape, Path(folder) / name) for name, shape in SHAPES.items()}
            self.parts(parts, self.results["parts"])

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
        read = in_child(_read_rate)
        products = {dtype: in_child(matmul_peak, torch.device("cuda"), getattr(torch, dtype)) for dtype in DTYPES}
        found: dict[str, Any] = {"bytes_per_second": read, "operations_per_second": products, "runs": [], "absent": {}}
        free = torch.cuda.mem_get_info()[0]
        every = ((shape, dtype, rows) for shape in self.folders for dtype in DTYPES for rows in ROWS)
        for shape, dtype, rows in every:
            folder = self.folders[shape]
            config = Checkpoint.read(folder).config
            try:
                if slots_that_fit(config, dtype, free) < rows:
                    raise BenchError(f"{rows} rows do not fit")
                run = self.full_windows(folder, dtype, rows)
            except BenchError as error:
                name = f"{shape} {dtype}, {rows} rows"
                found["absent"][name] = str(error)[-1000:]
                self.say(f"{name} cannot be measured: {error}")
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
            remote.call("run", rows, 0)
            rates = [remote.call("full", rows) for _ in range(REPEATS)]
        return {"characters_per_second": statistics.median(rates), "each": rates}

    def http(self) -> dict[str, Any]:
        bench = GpuBench(HTTP_PLAN, {"S": SHAPES["M"]}, 1, self.out)
        with bench.prepared():
            found = bench.http() | {"title": "M"}
        if "ours" not in found["first"]:
            raise BenchError(f"the service could not be measured: {found['absent']}")
        return found

    def training(self) -> dict[str, Any]:
        config = TrainConfig.from_preset("gpu", device="cuda", sample_chars=0)
        runs = {name: replace(config, compile=name == "compiled") for name in ("compiled", "eager")}
        return {name: in_child(train.run_ours, run, self.out / "train" / name) for name, run in runs.items()}

    def image(self) -> dict[str, Any]:
        if shutil.which("docker") is None or subprocess.run(["docker", "version"], capture_output=True).returncode:
            return {"skipped": "no Docker engine answers"}
        run_checked("docker build --quiet --build-arg ACCELERATOR=cuda -t chargpt:cuda .".split(), cwd=ROOT)
        size = int(run_checked("docker image inspect --format {{.Size}} chargpt:cuda".split(), cwd=ROOT))
        container = run_checked(
            "docker run --rm --detach --gpus all --read-only --tmpfs /tmp chargpt:cuda".split(), cwd=ROOT
        ).strip()
        try:
            deadline, ask = time.monotonic() + 120, ["docker", "exec", container, "python", "-c", GENERATE]
            while subprocess.run(ask, capture_output=True).returncode:
                if time.monotonic() > deadline:
                    raise BenchError("no generation within 120 s")
                time.sleep(1)
            done = subprocess.run(["docker", "logs", container], capture_output=True, text=True)
        finally:
            subprocess.run(["docker", "rm", "--force", container], capture_output=True)
        if "backend cuda" not in done.stdout + done.stderr:
            raise BenchError(f"the container did not serve on the GPU: {(done.stdout + done.stderr)[-1000:]}")
        return {"bytes": size}


class GpuBench(serve.Bench):
    def systems(self) -> list[peers.System]:
        """Every server that is installed, on the same checkpoint folder."""
        folder = self.folders["S"]
        ours = {"accelerator": "cuda", "max_running_requests": 512, "http_processes": HTTP_PROCESSES}
        systems = [replace(peers.ours(folder, ours | {"dtype": dtype}), name=dtype) for dtype in DTYPES]
        systems += [system for system in peers.stock_litserve(folder, 1) if system.name.startswith("bfloat16")]
        if find_spec("transformers"):
            systems += [s for s in peers.transformers_serve(folder, "cuda") if s.name.startswith("bfloat16, cont")]
        if vllm := shutil.which("vllm"):
            model = str(folder.resolve())
            command = (vllm, "serve", model, "--dtype=bfloat16", "--host=127.0.0.1", "--max-num-seqs=512")
            command += (f"--max-model-len={2 * Checkpoint.read(folder).config.block_size}",)
            systems.append(peers.System("vllm", "bfloat16", command, model=model))
        return systems


# -- in fresh processes --


def _read_rate() -> float:
    """Bytes per second of reading a tensor much larger than the caches."""
    data = torch.ones(1 << 30, device="cuda")  # 4 GiB

    def seconds() -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        data.sum()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3

    return data.nbytes / min(seconds() for _ in range(10))


# -- output --


def rows(head: str, form: str, runs: Iterable[dict[str, Any]]) -> list[str]:
    """A table with a row for each run; the columns of both are separated by |."""
    return table([head.split("|"), *(form.format(**run).split("|") for run in runs)])


def markdown(results: dict[str, Any]) -> str:
    parts = results["parts"]
    engine, http, training = (parts.get(part, {}) for part in ("engine", "http", "training"))
    lines = [f"{conditions(results)}; CUDA {results['cuda']}", ""]
    if "tests" in parts:
        lines += [f"Tests: {parts['tests']['summary']}", ""]
    lines += rows(
        "engine, full windows|rows|characters/s|of memory bandwidth|of products",
        "{shape} {dtype}|{rows:,}|{characters_per_second:,.0f}|{bandwidth_share:.0%}|{product_share:.0%}",
        engine.get("runs", []),
    )
    if http:
        lines += table(http_rows(http)) + table(first_rows(http))
    lines += rows(
        "training|whole loss|seconds|characters/s|of peak",
        "{name}|{whole:.4f}|{wall_seconds:.0f}|{characters_per_second:,.0f}|{peak_share:.1%}",
        ({"name": name} | run for name, run in training.items() if isinstance(run, dict)),
    )
    if image := parts.get("image"):
        size = f"{image['bytes'] / 1e9:.1f} GB, one generation on the GPU" if "bytes" in image else image["skipped"]
        lines += [f"Image: {size}", ""]
    absent = engine.get("absent", {}) | http.get("absent", {})
    lines += [f"- {name} was not measured: {reason.splitlines()[-1]}" for name, reason in absent.items()]
    lines += [f"- {part} failed: {reason}" for part, reason in results["errors"].items()]
    lines += [f"- {part} was not run" for part in PARTS if part not in parts and part not in results["errors"]]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = build_parser("tests.bench.gpu", __doc__, "out")
    add_only(parser, PARTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        build = "without CUDA" if torch.version.cuda is None else f"with CUDA {torch.version.cuda}"
        print(f"error: no NVIDIA GPU that torch {torch.__version__} ({build}) can use", file=sys.stderr)
        return 2
    check = Check("tests.bench.gpu", args.out, "gpu-check", markdown, ("torch",), cuda=torch.version.cuda, parts={})
    return check.main(lambda: check.run(args.only or PARTS))


if __name__ == "__main__":
    sys.exit(main())
