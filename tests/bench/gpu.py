"""Everything that can be checked only on a GPU, in one command: correctness, speed, training, the image.

    make gpu-check                       under 25 minutes on one NVIDIA GPU, with the CUDA build of torch installed
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
from training.config import TrainConfig
from training.speed import matmul_peak

from . import engine, load, nanogpt, peers, roofline, serve, train
from .command import BenchError, Progress, Remote, build_parser, context, in_child, prepare_process, subset
from .servers import ROOT, ServerError
from .shapes import ANSWER, SHAPES, checkpoint_of, config_of

PARTS = ("tests", "engine", "http", "training", "image")
ROWS = (1, 32, 128, 512, 2048)
DTYPES = ("float32", "bfloat16")
CLIENTS = (1, 64, 512)
REPEATS = 3
HTTP_PROCESSES = min(8, max(1, (os.cpu_count() or 2) // 2))
CUDA_INDEX = "https://download.pytorch.org/whl/cu130"
# figure: its bound in the table, on an H200
TARGETS = {
    "M float32, 512 rows": 0.7e6,
    "M bfloat16, 512 rows": 1.5e6,
    "M, one row": 8000.0,
    "over HTTP": 300_000.0,
}
FAILURES = (BenchError, ServerError, load.LoadError, OSError, subprocess.SubprocessError)


class Check:
    """One run and its results so far."""

    def __init__(self, out: Path):
        self.out, self.say = out, Progress()
        self.results: dict[str, Any] = {
            **context("tests.bench.gpu", "torch"), "cuda": torch.version.cuda, "parts": {}, "errors": {},
        }  # fmt: skip

    def keep(self, repeated: list[str]) -> None:
        """Take what an earlier run on this revision and machine has finished, except what is to be repeated."""
        with contextlib.suppress(OSError, ValueError):
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
                except FAILURES as error:
                    self.results["errors"][part] = f"{type(error).__name__}: {error}"
                    self.say(f"{part} failed: {error}")
                else:
                    self.results["parts"][part] = found | {"seconds": self.say.seconds - started}
                self.write()

    def write(self) -> None:
        (self.out / "gpu-check.json").write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
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
        found: dict[str, Any] = {"bytes_per_second": read, "operations_per_second": products, "runs": []}
        free = torch.cuda.mem_get_info()[0]
        for shape, folder in self.folders.items():
            config = config_of(folder)
            for dtype in DTYPES:
                for rows in ROWS:
                    if slots_that_fit(config, dtype, free) < rows:
                        self.say(f"{shape} {dtype}: {rows} rows do not fit")
                        continue
                    options = {"slots": rows, "threads": 1, "device": "cuda"}
                    with Remote(engine.Ours, folder, "cuda", dtype, **options) as remote:
                        remote.call("run", rows)
                        length = config.block_size + ANSWER  # windows are full for ANSWER characters
                        runs = [remote.call("run", rows, ANSWER, config.block_size) for _ in range(REPEATS)]
                        profile = remote.call("profile", rows) if rows in (1, 512) else None
                    rate = statistics.median(run["decode_characters_per_second"] for run in runs)
                    counts = roofline.count(config, rows, config.block_size, dtype)
                    step = rows / rate
                    found["runs"].append(
                        {
                            "shape": shape, "dtype": dtype, "rows": rows, "length": length, "profile": profile,
                            "characters_per_second": rate,
                            "each": [run["decode_characters_per_second"] for run in runs],
                            "bandwidth_share": (counts["weight_bytes"] + counts["cache_bytes"]) / read / step,
                            "product_share": (counts["product_operations"] + counts["attention_operations"])
                            / products[dtype] / step,
                        }
                    )  # fmt: skip
                    self.say(f"{shape} {dtype}, {rows} rows: {rate:,.0f} characters/s")
        return found

    def http(self) -> dict[str, Any]:
        found: dict[str, Any] = {"runs": [], "absent": {}}
        for system in gpu_systems(self.folders["M"]):
            name = f"{system.family} {system.name}"
            try:
                with system.start(self.out / f"{system.family}.log") as server:
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
            except (ServerError, load.LoadError, OSError) as error:
                found["absent"][name] = str(error)[-1000:]
                self.say(f"{name} cannot be measured: {error}")
        if not any(run["system"].startswith("ours") for run in found["runs"]):
            raise BenchError(f"the service could not be measured: {found['absent']}")
        return found

    def training(self) -> dict[str, Any]:
        """The last part of each: losses, seconds, characters per second and share of the peak."""
        found: dict[str, Any] = {"two processes": "skipped: they would share one GPU, and be slower than one"}
        for name, compiled in (("compiled", True), ("eager", False)):
            config = TrainConfig.from_preset("gpu", device="cuda", compile=compiled, sample_chars=0)
            found[name] = in_child(train.run_ours, config, self.out / "train" / name)
            self.say(f"{name}: {found[name]['whole']:.4f} in {found[name]['wall_seconds']:.0f} s")
        found["nanogpt"] = in_child(_nanogpt_on_gpu, found["compiled"]["wall_seconds"])
        return found

    def image(self) -> dict[str, Any]:
        if shutil.which("docker") is None or subprocess.run(["docker", "version"], capture_output=True).returncode:
            return {"skipped": "no Docker engine answers"}
        build = [
            "docker",
            "build",
            "--quiet",
            "--build-arg",
            f"TORCH_INDEX_URL={CUDA_INDEX}",
            "-t",
            "chargpt:cuda",
            ".",
        ]
        _checked(build)
        size = int(_checked(["docker", "image", "inspect", "--format", "{{.Size}}", "chargpt:cuda"]))
        container = _checked(
            ["docker", "run", "--rm", "--detach", "--gpus", "all", "--read-only", "--tmpfs", "/tmp", "chargpt:cuda"]
        ).strip()
        ask = "import json, urllib.request as u; print(u.urlopen(u.Request('http://127.0.0.1:8000/generate', "
        ask += "json.dumps({'prompt': 'A', 'max_tokens': 20}).encode(), {'Content-Type': 'application/json'})).read())"
        try:
            deadline = time.monotonic() + 120
            while subprocess.run(["docker", "exec", container, "python", "-c", ask], capture_output=True).returncode:
                if time.monotonic() > deadline:
                    raise BenchError(f"no generation: {_checked(['docker', 'logs', container])[-1000:]}")
                time.sleep(1)
            log = subprocess.run(["docker", "logs", container], capture_output=True, text=True).stderr
        finally:
            subprocess.run(["docker", "rm", "--force", container], capture_output=True)
        if not re.search(r"backend cuda", log):
            raise BenchError(f"the container did not serve on the GPU: {log[-1000:]}")
        return {"bytes": size}


def gpu_systems(folder: Path) -> list[peers.System]:
    """Every server that is installed, on the same checkpoint folder."""
    ours = {"accelerator": "cuda", "max_running_requests": 512, "http_processes": HTTP_PROCESSES}
    systems = [
        *(_renamed(peers.ours(folder, ours | {"dtype": dtype})[0], dtype) for dtype in DTYPES),
        *(s for s in peers.stock_litserve(folder, 1) if s.name.startswith("bfloat16") and "continuous" not in s.name),
    ]
    if find_spec("transformers"):
        command = [str(Path(sys.executable).with_name("transformers")), "serve", "--device=cuda", "--dtype=bfloat16"]
        command += ["--continuous-batching", "--host=127.0.0.1", "--log-level=error", str(folder.resolve())]
        systems.append(peers.System("transformers", "bfloat16, continuous batching", tuple(command), "/health"))
    if vllm := shutil.which("vllm"):
        command = [vllm, "serve", str(folder.resolve()), "--dtype=bfloat16", "--host=127.0.0.1"]
        command += [f"--max-model-len={2 * config_of(folder).block_size}", "--max-num-seqs=512"]
        systems.append(peers.System("vllm", "bfloat16", tuple(command), "/health"))
    return systems


def _renamed(system: peers.System, name: str) -> peers.System:
    return peers.System(system.family, name, system.command, system.ready, system.streams)


def _checked(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"{shlex.join(command)}: {done.stderr[-1000:]}")
    return done.stdout


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
    probe = replace(nanogpt.GPU, steps=100, eval_every=100)
    step = train.run_nanogpt(probe, 1337, 0, "cuda")["wall_seconds"] / 100
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
    for table in (engine_rows, http_rows, training_rows):
        lines += table(parts)
    if "image" in parts:
        image = parts["image"]
        size = f"{image['bytes'] / 1e9:.1f} GB, one generation on the GPU" if "bytes" in image else image["skipped"]
        lines += [f"Image: {size}", ""]
    lines += [f"- {part} failed: {reason}" for part, reason in results["errors"].items()]
    lines += [f"- {part} was not run" for part in PARTS if part not in parts and part not in results["errors"]]
    return "\n".join(lines).rstrip() + "\n"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    line = "| {} |".format
    return [line(" | ".join(head)), "|---" * len(head) + "|", *(line(" | ".join(row)) for row in rows), ""]


def engine_rows(parts: dict[str, Any]) -> list[str]:
    runs = parts.get("engine", {}).get("runs", [])
    if not runs:
        return []
    rows = [
        [f"{run['shape']} {run['dtype']}", f"{run['rows']:,}", f"{run['characters_per_second']:,.0f}",
         f"{run['bandwidth_share']:.0%}", f"{run['product_share']:.0%}"]
        for run in runs
    ]  # fmt: skip
    return _table(["engine, full windows", "rows", "characters/s", "of memory bandwidth", "of products"], rows)


def http_rows(parts: dict[str, Any]) -> list[str]:
    part = parts.get("http", {})
    rows = [
        [run["system"], f"{run['clients']}", run["mode"], f"{run['characters_per_second']:,.0f}"]
        for run in part.get("runs", [])
    ]
    lines = _table(["over HTTP, M", "clients", "answers", "characters/s"], rows) if rows else []
    first = [[name, *(f"{1e3 * each[p]:.2f}" for p in ("p50", "p95"))] for name, each in part.get("first", {}).items()]
    return lines + (_table(["first character, one client, ms", "p50", "p95"], first) if first else [])


def training_rows(parts: dict[str, Any]) -> list[str]:
    runs = {name: run for name, run in parts.get("training", {}).items() if isinstance(run, dict)}
    rows = [
        [name, f"{run['whole']:.4f}", f"{run['wall_seconds']:.0f}", f"{run['characters_per_second']:,.0f}",
         f"{run['peak_share']:.1%}"]
        for name, run in runs.items()
    ]  # fmt: skip
    return _table(["training", "whole loss", "seconds", "characters/s", "of peak"], rows) if rows else []


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
    with contextlib.suppress(KeyboardInterrupt):
        check.run(args.only or list(PARTS))
    check.write()
    print(markdown(check.results))
    return 1 if check.results["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
