"""Benchmarks of training: our trainer against nanoGPT's CPU recipe, and the presets over several seeds.

    make bench-train
    make bench-train ARGS='--only nanogpt,equal --threads 1'
    python -m tests.bench.train --share 0.01        a smoke test; its figures mean nothing

    nanogpt   nanoGPT's CPU recipe (nanogpt.py)
    equal     our trainer for the same CPU time
    cpu, gpu  the presets; gpu needs a CUDA GPU

Rewrites OUT/train.json, OUT/train.md and OUT/train.png after each run, and keeps a folder per run. Each run has a fresh
process, so that runs do not affect each other. Times cover optimizer steps only, unless stated otherwise.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

from service.model.checkpoint import Checkpoint
from training import jobs
from training.config import ConfigError, TrainConfig
from training.data import TINYSHAKESPEARE, DataError, prepare
from training.evaluate import whole_loss
from training.speed import flops_per_character, matmul_peak

from . import nanogpt
from .command import BenchError, build_parser, busy_warning, context, in_child, integer, prepare_process, subset

# Changes of the part `equal` to the preset cpu, besides the number of steps.
EQUAL: dict[str, Any] = {
    "n_layer": 4,
    "block_size": 128,
    "batch_size": 8,
    "muon_lr": 0.035,
    "muon_momentum": 0.9,
    "weight_decay": 0.0,
}

# Bounds of the mean over the seeds, by part. Those of nanogpt verify that the baseline is a fair one.
TARGETS: dict[str, dict[str, tuple[float, float]]] = {
    "nanogpt": {"whole": (1.88, 1.92)},
    "equal": {"whole": (0, 1.53), "cpu_ratio": (0, 1.05)},
    "cpu": {"whole": (0, 1.45), "streamed": (0, 1.42), "wall_seconds": (0, 240)},
    "gpu": {"whole": (0, 1.44), "wall_seconds": (0, 120)},
}
TITLES = {
    "nanogpt": "nanoGPT's CPU recipe",
    "equal": "ours, equal CPU time",
    "cpu": "ours, --preset cpu",
    "gpu": "ours, --preset gpu",
}
FIGURES = {  # name in the JSON: label in the tables, format
    "parameters": ("parameters", "{:,.0f}"),
    "characters": ("characters trained on", "{:,.0f}"),
    "whole": ("whole loss", "{:.4f}"),
    "streamed": ("streamed loss", "{:.4f}"),
    "random_windows": ("mean of 240 random windows", "{:.4f}"),
    "cpu_seconds": ("CPU time of steps, s", "{:.1f}"),
    "cpu_ratio": ("CPU time relative to nanoGPT", "{:.3f}"),
    "wall_seconds": ("wall time of steps, s", "{:.1f}"),
    "run_seconds": ("wall time of the run, s", "{:.1f}"),
    "characters_per_second": ("characters/s", "{:,.0f}"),
    "peak_tflops": ("peak of matrix products, TFLOP/s", "{:.3g}"),
    "peak_share": ("share of that peak", "{:.1%}"),
}
PROBE_STEPS, WARM_STEPS = 40, 8


# Runs, each in a process of its own


def run_ours(config: TrainConfig, out: Path) -> dict[str, Any]:
    """Figures of one run of our trainer, report included; replaces the folder `out`."""
    started = time.perf_counter()
    shutil.rmtree(out, ignore_errors=True)
    jobs.start(config, out, Console(stderr=True, highlight=False))
    run_seconds = time.perf_counter() - started
    checkpoint = Checkpoint.read(out / "best")
    best, about = checkpoint.load_model("cpu"), checkpoint.training
    evaluations = [record for record in log_of(out) if record["event"] == "evaluation"]
    last = evaluations[-1]
    figures = {
        "seed": config.seed,
        "steps": config.steps,
        "characters": config.steps * config.tokens_per_step,
        **{name: about["losses"][name] for name in ("whole", "streamed")},
        "random_windows": nanogpt.random_windows_loss(best, prepare(config.data).val, config.seed),
        "cpu_seconds": last["cpu_seconds"],
        "wall_seconds": last["elapsed_seconds"],
        "run_seconds": run_seconds,
        "curve": [{"step": r["step"], "val_loss": r["val_loss"], "cpu_seconds": r["cpu_seconds"]} for r in evaluations],
        "recipe": config.as_dict(),
    }
    found = about["machine"]
    return figures | speed(best, figures, found["device"], found["dtype"], found["threads"], found["processes"])


def log_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def probe_ours(config: TrainConfig, out: Path) -> dict[str, Any]:
    """Cost of our trainer: CPU seconds per step (`step`), extra CPU seconds at the start, and the dtype chosen."""
    shutil.rmtree(out, ignore_errors=True)
    jobs.start(replace(config, log_every=WARM_STEPS), out, Console(quiet=True))
    warm, *_, last = (r for r in log_of(out) if r["event"] == "train")
    step = (last["cpu_seconds"] - warm["cpu_seconds"]) / (last["step"] - warm["step"])
    dtype = Checkpoint.read(out / "best").training["machine"]["dtype"]
    return {"step": step, "start": max(0.0, warm["cpu_seconds"] - (WARM_STEPS - 1) * step), "dtype": dtype}


def run_nanogpt(recipe: nanogpt.Recipe, seed: int, threads: int, device: str = "cpu") -> dict[str, Any]:
    """Figures of one run of the baseline."""
    started = time.perf_counter()
    if threads:
        torch.set_num_threads(threads)
    corpus = prepare(TINYSHAKESPEARE)
    console = Console(stderr=True, highlight=False)
    curve: list[dict[str, float]] = []

    def evaluated(model: Any, step: int, cpu_seconds: float, wall_seconds: float) -> None:
        whole = whole_loss(model, corpus.val)
        random_windows = nanogpt.random_windows_loss(model, corpus.val, seed + step)
        seconds = {"cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds}
        curve.append({"step": step, "val_loss": whole, "random_windows": random_windows, **seconds})
        console.print(f"step {step}/{recipe.steps}  val {whole:.4f} nats  {cpu_seconds:.0f} CPU s", soft_wrap=True)

    with Bar(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("nanoGPT", total=recipe.steps)
        model = nanogpt.train(
            recipe,
            corpus.train,
            corpus.tokenizer.vocab_size,
            seed,
            evaluated,
            lambda step, loss: bar.update(task, completed=step, description=f"nanoGPT, loss {loss:.3f}"),
            device,
        )
    end = curve[-1]
    figures = {
        "seed": seed,
        "steps": recipe.steps,
        "characters": recipe.steps * recipe.batch_size * recipe.block_size,
        "whole": end["val_loss"],
        "random_windows": end["random_windows"],
        "cpu_seconds": end["cpu_seconds"],
        "wall_seconds": end["wall_seconds"],
        "run_seconds": time.perf_counter() - started,
        "curve": curve,
    }
    dtype = "float32" if device == "cpu" else "bfloat16"
    return figures | speed(model, figures, device, dtype, torch.get_num_threads(), 1)


def speed(model: Any, figures: dict[str, Any], device: str, dtype: str, threads: int, processes: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    rate = figures["characters"] / figures["wall_seconds"]
    peak = matmul_peak(torch.device(device), getattr(torch, dtype))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "characters_per_second": rate,
        "peak_tflops": peak / 1e12,
        "peak_share": rate * flops_per_character(model) / peak,
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "processes": processes,
    }


# The bench


class Bench:
    """One run of the benchmark and its results so far."""

    def __init__(self, args: argparse.Namespace, console: Console):
        self.seeds: list[int] = args.seeds
        self.threads: int = args.threads
        self.share: float = args.share
        self.out: Path = args.out
        self.console = console
        self.equal: TrainConfig | None = None  # once its steps are known
        self.results: dict[str, Any] = {
            **context("tests.bench.train", "torch", "numpy"),
            "share": self.share,
            "runs": {},  # part: figures per seed
            "errors": {},  # part: a reason per failed run
        }

    def run(self, parts: list[str]) -> None:
        """Run every part with every seed; a run that fails leaves its reason in the results."""
        (self.out / "train.png").unlink(missing_ok=True)  # shows figures about to be replaced
        self.write()
        for part in parts:
            for seed in self.seeds[:1] if part == "nanogpt" else self.seeds:
                self.console.rule(f"{TITLES[part]}, seed {seed}")
                try:
                    figures = self.figures(part, seed)
                except (BenchError, ConfigError) as error:
                    self.results["errors"].setdefault(part, []).append(f"seed {seed}: {error}")
                    self.console.print(f"failed: {error}", style="red", markup=False, soft_wrap=True)
                else:
                    self.results["runs"].setdefault(part, []).append(figures)
                self.write()

    def figures(self, part: str, seed: int) -> dict[str, Any]:
        if part == "nanogpt":
            recipe = nanogpt.Recipe(steps=self.shared(nanogpt.Recipe.steps))
            return in_child(run_nanogpt, recipe, seed, self.threads)
        out = self.out / "runs" / f"{part}-{seed}"
        if part == "equal":
            config = self.equal_config(seed)
            figures = in_child(run_ours, config, out)
            [baseline] = self.results["runs"]["nanogpt"]
            return figures | {"cpu_ratio": figures["cpu_seconds"] / baseline["cpu_seconds"]}
        steps = self.shared(self.ours(part).steps)
        return in_child(run_ours, self.ours(part, seed=seed, steps=steps), out)

    def ours(self, preset: str, **changes: Any) -> TrainConfig:
        """A preset, without samples at evaluations."""
        device = "cuda" if preset == "gpu" else "cpu"
        return TrainConfig.from_preset(preset, device=device, threads=self.threads, sample_chars=0, **changes)

    def equal_config(self, seed: int) -> TrainConfig:
        """Our trainer with the CPU time of nanoGPT's run; the steps that fit are probed once."""
        if "nanogpt" not in self.results["runs"]:
            raise BenchError("no CPU time to match: nanoGPT's run failed")
        if self.equal is None:
            budget = self.results["runs"]["nanogpt"][0]["cpu_seconds"]
            cost = in_child(probe_ours, self.ours("cpu", **EQUAL, steps=PROBE_STEPS), self.out / "runs" / "probe")
            steps = max(1, int((budget - cost["start"]) / cost["step"]))
            self.console.print(f"{cost['step'] * 1e3:.1f} ms of CPU time per step: {steps} steps in {budget:.1f} s")
            changes = EQUAL | {"steps": steps, "eval_every": max(1, -(-steps // 8)), "dtype": cost["dtype"]}
            self.equal = self.ours("cpu", **changes)
        return TrainConfig(**{**self.equal.as_dict(), "seed": seed})

    def shared(self, steps: int) -> int:
        return max(1, round(steps * self.share))

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "train.json").write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        (self.out / "train.md").write_text(markdown(self.results), encoding="utf-8")
        if "nanogpt" in self.results["runs"]:
            draw(self.results, self.out / "train.png")


# Output


def cells(results: dict[str, Any]) -> list[list[str]]:
    """Rows of the table: titles, one row per figure (mean, lowest, highest over seeds), seeds, targets."""
    runs = results["runs"]
    rows = [["nats per character", *(TITLES[part] for part in runs)]]
    for name, (label, form) in FIGURES.items():
        values = [[run[name] for run in runs[part] if name in run] for part in runs]
        rows.append([label, *(spread(each, form) for each in values)])
    rows.append(["seeds", *(", ".join(str(run["seed"]) for run in runs[part]) for part in runs)])
    rows.append(["target", *(judge(runs[part], TARGETS[part], results["share"]) for part in runs)])
    return rows


def spread(values: list[float], form: str) -> str:
    if len(values) < 2:
        return form.format(values[0]) if values else "–"
    low, mean, high = (form.format(x) for x in (min(values), sum(values) / len(values), max(values)))
    return mean if low == high else f"{mean} ({low}–{high})"


def judge(runs: list[dict[str, Any]], targets: dict[str, tuple[float, float]], share: float) -> str:
    if share != 1:
        return f"not judged: {share:.1%} of the steps"
    verdicts = []
    for name, (low, high) in targets.items():
        mean = sum(run[name] for run in runs) / len(runs)
        asked = f"≤ {high:g}" if low == 0 else f"{low:g}–{high:g}"
        verdicts.append(f"{FIGURES[name][0]} {asked}: {'met' if low <= mean <= high else 'MISSED'}")
    return "; ".join(verdicts)


def footnotes(results: dict[str, Any]) -> list[str]:
    """Machine, versions and settings of the figures, and failures."""
    about, versions = results["machine"], results["versions"]
    settings = {
        f"{run['threads']} threads in {run['processes']} processes, {run['dtype']} on {run['device']}": None
        for run in every_run(results)
    }
    return [
        f"{about['cpu']}, {about['cores']} cores{', ' + about['gpu'] if 'gpu' in about else ''}, {about['system']}; "
        f"load {results['load_average']:.2f} at the start; {results['date']}; "
        f"torch {versions['torch']}, Python {versions['python']}; revision {results['revision']}",
        *settings,
        "Means over seeds (lowest–highest). Whole loss: every character of the validation split once, in windows of "
        "the training length; streamed loss: in one pass. The share of the peak excludes the optimizer's products.",
        *(f"failed: {TITLES[part]}, {reason}" for part in results["errors"] for reason in results["errors"][part]),
    ]


def every_run(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for runs in results["runs"].values() for run in runs]


def markdown(results: dict[str, Any]) -> str:
    head, *rows = ("| " + " | ".join(row) + " |" for row in cells(results))
    lines = [head, "|---" * (1 + len(results["runs"])) + "|", *rows, "", *("- " + line for line in footnotes(results))]
    return "\n".join(lines) + "\n"


def show(results: dict[str, Any], console: Console) -> None:
    head, *rows = cells(results)
    table = Table(*head, show_lines=True)
    for row in rows:
        table.add_row(*row)
    if results["runs"]:
        console.print(table)
    for line in footnotes(results):
        console.print(line, markup=False, soft_wrap=True)


def draw(results: dict[str, Any], png: Path) -> None:
    """Plot validation loss against CPU time of steps for nanogpt and equal."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    target = TARGETS["equal"]["whole"][1]
    lowest = target
    for part, color in (("nanogpt", "tab:gray"), ("equal", "tab:blue")):
        runs = results["runs"].get(part, [])
        for run in runs:
            points = [(point["cpu_seconds"], point["val_loss"]) for point in run["curve"]]
            lowest = min(lowest, *(loss for _, loss in points))
            ends = spread([run["whole"] for run in runs], "{:.3f}")
            label = f"{TITLES[part]}: {ends}" if run is runs[0] else None
            axes.plot(*zip(*points, strict=True), "o-", color=color, alpha=0.6, ms=4, label=label)
    axes.axhline(target, color="tab:green", ls="--", lw=0.8, label=f"target {target}")
    axes.set_xlim(left=0)
    axes.set_ylim(lowest - 0.05, lowest + 1.25)  # both curves begin above 4
    axes.set_xlabel("CPU time of steps, s")
    axes.set_ylabel("whole validation loss, nats per character")
    axes.set_title(f"{results['machine']['cpu']}, {results['date'][:10]}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(png, dpi=120)


# Command line


def parse_args() -> argparse.Namespace:
    parser = build_parser("tests.bench.train", __doc__, "out/bench-train")
    parser.add_argument(
        "--only",
        type=subset(TITLES),
        metavar="PARTS",
        help=f"of {','.join(TITLES)}; equal needs nanogpt (default: all)",
    )
    parser.add_argument(
        "--seeds", type=seed_list, default=[1337, 1338, 1339], help="nanogpt takes the first (default: 1337,1338,1339)"
    )
    parser.add_argument(
        "--threads", type=integer(0, 4096), default=0, help="CPU threads; 0: OMP_NUM_THREADS, else one per core"
    )
    parser.add_argument("--share", type=float, default=1.0, help="share of the steps, in (0, 1] (default: 1)")
    args = parser.parse_args()
    if not 0 < args.share <= 1:
        parser.error(f"--share must be in (0, 1], got {args.share}")
    return args


def seed_list(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be comma-separated integers, got {text!r}") from None


def main() -> int:
    args = parse_args()
    console = Console(stderr=True, highlight=False)
    asked = args.only or [part for part in TITLES if part != "gpu" or torch.cuda.is_available()]
    if "gpu" in asked and not torch.cuda.is_available():
        print("error: the part gpu needs a CUDA GPU and a torch build with CUDA", file=sys.stderr)
        return 1
    parts = [part for part in TITLES if part in asked or (part == "nanogpt" and "equal" in asked)]
    try:
        prepare(TINYSHAKESPEARE)
    except DataError as error:
        print(f"error: {error}\nThe bench needs this text; CHARGPT_DATA_DIR can name its folder", file=sys.stderr)
        return 1
    bench = Bench(args, console)
    if warning := busy_warning(bench.results):
        console.print(warning)
    prepare_process()
    stopped = False
    try:
        bench.run(parts)
    except KeyboardInterrupt:
        stopped = True
    show(bench.results, Console(highlight=False))
    console.print(f"{'Stopped; ' if stopped else ''}figures: {args.out / 'train.json'}, .md, .png", soft_wrap=True)
    return 130 if stopped else 1 if bench.results["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
