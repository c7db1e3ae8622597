"""Benchmarks of training: our trainer against nanoGPT's CPU recipe, over seeds that nothing was tuned on.

    make bench-train
    make bench-train ARGS='--only nanogpt,equal --threads 1'
    python -m tests.bench.train --share 0.01        a smoke test; its figures mean nothing

    nanogpt           nanoGPT's CPU recipe (nanogpt.py)
    equal             our trainer for the same CPU time
    quick, cpu, gpu   the presets; gpu needs a CUDA GPU
    minute            the preset cpu for a fifth of its steps, 1.0 M characters
    curve             the preset cpu and nanoGPT's recipe for several times, each run with its whole schedule

Rewrites OUT/train.json, OUT/train.md and, for the curve, OUT/train.png after each run, and keeps a folder per run.
Each run has a fresh process, so that runs do not affect each other. Times cover optimizer steps only, unless stated
otherwise.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

from service.model.checkpoint import Checkpoint
from tests.toolbox.figures import write_figures
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
    "muon_lr": 0.04,
}

# Bounds of the mean over the seeds, by part. Those of nanogpt verify that the baseline is a fair one.
TARGETS: dict[str, dict[str, tuple[float, float]]] = {
    "nanogpt": {"whole": (1.88, 1.92)},
    "equal": {"whole": (0, 1.50), "cpu_ratio": (0, 1.02)},
    "quick": {"whole": (0, 1.70)},
    "minute": {"whole": (0, 1.55), "wall_seconds": (0, 90)},
    "cpu": {"whole": (0, 1.428), "wall_seconds": (0, 240)},
    "gpu": {"whole": (0, 1.44), "wall_seconds": (0, 120)},
}
TITLES = {
    "nanogpt": "nanoGPT's CPU recipe",
    "equal": "ours, equal CPU time",
    "quick": "ours, --preset quick",
    "minute": "ours, --preset cpu --steps 488",
    "cpu": "ours, --preset cpu",
    "gpu": "ours, --preset gpu",
}
MINUTE = 488  # steps
PARTS = (*TITLES, "curve")
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
PROBE_STEPS, WARM_STEPS = 200, 8  # enough that the first ones, which are left out, do not change the mean


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
    end = log_of(out)[-1]
    return figures | {
        "parameters": best.num_parameters,
        "characters_per_second": end["characters_per_second"],
        "peak_tflops": end["matmul_peak_flops"] / 1e12,
        "peak_share": end["peak_share"],
        **{name: about["machine"][name] for name in ("device", "dtype", "threads")},
    }


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
    rate, dtype = figures["characters"] / figures["wall_seconds"], "float32" if device == "cpu" else "bfloat16"
    peak = matmul_peak(torch.device(device), getattr(torch, dtype))
    return figures | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "characters_per_second": rate,
        "peak_tflops": peak / 1e12,
        "peak_share": rate * flops_per_character(model) / peak,
        "device": device,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
    }


# The bench


class Bench:
    """One run of the benchmark and its results so far."""

    def __init__(self, args: argparse.Namespace, console: Console):
        self.seeds: list[int] = args.seeds
        self.threads: int = args.threads
        self.share: float = args.share
        self.curve_seconds: list[int] = args.curve_seconds
        self.out: Path = args.out
        self.console = console
        self.equal: TrainConfig | None = None  # once its steps are known
        self.results: dict[str, Any] = {
            **context("tests.bench.train", "torch", "numpy"),
            "share": self.share,
            "runs": {},  # part: figures per seed
            "curve": {"nanogpt": [], "cpu": []},  # figures per time, of the first seed
            "errors": {},  # part: a reason per failed run
        }

    def run(self, parts: list[str]) -> None:
        """Run every part with every seed; a run that fails leaves its reason in the results."""
        (self.out / "train.png").unlink(missing_ok=True)  # shows figures about to be replaced
        self.write()
        for part in parts:
            if part == "curve":
                self.run_curve()
                continue
            for seed in self.seeds:
                figures = partial(self.figures, part, seed)
                self.add(self.results["runs"].setdefault(part, []), part, f"seed {seed}", figures)

    def run_curve(self) -> None:
        """Run the baseline and the preset cpu for each time, with as many steps as fit at the speed seen so far."""
        for seconds in self.curve_seconds:
            for part, runs in self.results["curve"].items():
                figures = partial(self.curve_figures, part, seconds)
                self.add(runs, part, f"{seconds} s", figures)

    def add(self, runs: list[dict[str, Any]], part: str, what: str, figures: Callable[[], dict[str, Any]]) -> None:
        """Append the figures of one run to `runs`."""
        self.console.rule(f"{TITLES[part]}, {what}")
        try:
            runs.append(figures())
        except (BenchError, ConfigError) as error:
            self.results["errors"].setdefault(part, []).append(f"{what}: {error}")
            self.console.print(f"failed: {error}", style="red", markup=False, soft_wrap=True)
        self.write()

    def curve_figures(self, part: str, seconds: float) -> dict[str, Any]:
        speeds = [run["steps"] / run["wall_seconds"] for run in self.results["runs"][part]]
        if not speeds:
            raise BenchError("no speed to scale the steps by: all its runs failed")
        steps = self.shared(round(seconds * sum(speeds) / len(speeds)))
        if part == "nanogpt":
            recipe = nanogpt.Recipe(steps=steps, eval_every=steps)
            return in_child(run_nanogpt, recipe, self.seeds[0], self.threads)
        config = self.ours(part, seed=self.seeds[0], steps=steps, eval_every=steps)
        return in_child(run_ours, config, self.out / "runs" / f"curve-{seconds}")

    def figures(self, part: str, seed: int) -> dict[str, Any]:
        if part == "nanogpt":
            recipe = nanogpt.Recipe(steps=self.shared(nanogpt.Recipe.steps))
            return in_child(run_nanogpt, recipe, seed, self.threads)
        out = self.out / "runs" / f"{part}-{seed}"
        if part == "equal":
            config = self.equal_config(seed)
            figures = in_child(run_ours, config, out)
            return figures | {"cpu_ratio": figures["cpu_seconds"] / self.baseline_cpu_seconds}
        preset = "cpu" if part == "minute" else part
        steps = self.shared(MINUTE if part == "minute" else self.ours(preset).steps)
        return in_child(run_ours, self.ours(preset, seed=seed, steps=steps), out)

    @property
    def baseline_cpu_seconds(self) -> float:
        runs = self.results["runs"]["nanogpt"]
        return float(sum(run["cpu_seconds"] for run in runs) / len(runs))

    def ours(self, preset: str, **changes: Any) -> TrainConfig:
        """A preset, without samples at evaluations."""
        device = "cuda" if preset == "gpu" else "cpu"
        return TrainConfig.from_preset(preset, device=device, threads=self.threads, sample_chars=0, **changes)

    def equal_config(self, seed: int) -> TrainConfig:
        """Our trainer with the CPU time of nanoGPT's run; the steps that fit are probed once."""
        if not self.results["runs"].get("nanogpt"):
            raise BenchError("no CPU time to match: nanoGPT's run failed")
        if self.equal is None:
            budget = self.baseline_cpu_seconds
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
        write_figures(self.out / "train.json", self.results)
        (self.out / "train.md").write_text(markdown(self.results), encoding="utf-8")
        if any(self.results["curve"].values()):
            draw(self.results, self.out / "train.png")


# Output


def cells(results: dict[str, Any]) -> list[list[str]]:
    """Rows of the table: titles, one row per figure (mean, lowest, highest over seeds), seeds, targets."""
    runs = {part: runs for part, runs in results["runs"].items() if runs}
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
    settings = {f"{run['threads']} threads, {run['dtype']} on {run['device']}": None for run in every_run(results)}
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
    return [run for group in ("runs", "curve") for runs in results[group].values() for run in runs]


def markdown(results: dict[str, Any]) -> str:
    head, *rows = ("| " + " | ".join(row) + " |" for row in cells(results))
    lines = [head, "|---" * len(cells(results)[0]) + "|", *rows, "", *("- " + line for line in footnotes(results))]
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
    """Plot the loss of whole runs against the time they took: the curve, and every seed's run of the baseline, of the
    preset cpu and of a fifth of it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for part, seeds, color in (("nanogpt", ["nanogpt"], "tab:gray"), ("cpu", ["cpu", "minute"], "tab:blue")):
        curve = results["curve"][part]
        runs = [run for name in seeds for run in results["runs"].get(name, [])]
        for points, style in ((curve, "o-"), (runs, "x")):
            times, losses = ([point[name] for point in points] for name in ("wall_seconds", "whole"))
            axes.plot(times, losses, style, color=color, ms=5, label=TITLES[part] if points is curve else None)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 6)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("seconds of training on this machine, each point a whole run")
    axes.set_ylabel("whole validation loss, nats per character")
    about = results["machine"]
    axes.set_title(f"Tiny Shakespeare; {about['cpu']}, {about['cores']} cores, {results['date'][:10]}", fontsize=9)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(png, dpi=120)


# Command line


def parse_args() -> argparse.Namespace:
    parser = build_parser("tests.bench.train", __doc__, "out/bench-train")
    parser.add_argument(
        "--only",
        type=subset(PARTS),
        metavar="PARTS",
        help=f"of {','.join(PARTS)}; equal needs nanogpt, and curve cpu too (default: all)",
    )
    parser.add_argument(
        "--seeds", type=integers, default=[2026, 2027, 2028], help="(default: 2026,2027,2028, never tuned on)"
    )
    parser.add_argument(
        "--threads", type=integer(0, 4096), default=0, help="CPU threads; 0: OMP_NUM_THREADS, else one per core"
    )
    parser.add_argument(
        "--curve-seconds", type=integers, default=[20, 60, 180, 600], metavar="S,…", help="(default: 20,60,180,600)"
    )
    parser.add_argument("--share", type=float, default=1.0, help="share of the steps, in (0, 1] (default: 1)")
    args = parser.parse_args()
    if not 0 < args.share <= 1:
        parser.error(f"--share must be in (0, 1], got {args.share}")
    return args


def integers(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be comma-separated integers, got {text!r}") from None


def main() -> int:
    args = parse_args()
    console = Console(stderr=True, highlight=False)
    asked = args.only or [part for part in PARTS if part != "gpu" or torch.cuda.is_available()]
    if "gpu" in asked and not torch.cuda.is_available():
        print("error: the part gpu needs a CUDA GPU and a torch build with CUDA", file=sys.stderr)
        return 1
    needed = {"equal": {"nanogpt"}, "curve": {"nanogpt", "cpu"}}
    wanted = set(asked).union(*(needed.get(part, set()) for part in asked))
    parts = [part for part in PARTS if part in wanted]
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
    files = f"{args.out / 'train.json'}, .md and, of the curve, .png"
    console.print(f"{'Stopped; ' if stopped else ''}figures: {files}", soft_wrap=True)
    return 130 if stopped else 1 if bench.results["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
