"""Benchmarks of training: our trainer against nanoGPT's CPU recipe, over seeds that nothing was tuned on.

    make bench-train
    make bench-train ARGS='--only nanogpt equal --threads 1'

    nanogpt           nanoGPT's CPU recipe (nanogpt.py)
    equal             our trainer for 2 % less CPU time, seed by seed in turn with nanogpt
    quick, cpu, gpu   the presets; gpu needs a CUDA GPU
    minute            the preset cpu for 1.0 M characters, in smaller steps
    curve             the preset cpu and nanoGPT's recipe for several times, each run with its whole schedule

Rewrites OUT/train.json, OUT/train.md and, for the curve, OUT/train.png after each run, and keeps a folder per run.
Each run has a fresh process, so that runs do not affect each other. Times cover optimizer steps only, unless stated
otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from service.model.checkpoint import Checkpoint
from tests.toolbox.figures import conditions, figure, table
from training import jobs
from training.config import TrainConfig
from training.data import TINYSHAKESPEARE, DataError, prepare
from training.evaluate import whole_loss
from training.log import read_log

from . import nanogpt
from .command import BenchError, Progress, Run, add_only, build_parser, in_child

# Changes of the part `equal` to the preset cpu, besides the number of steps.
EQUAL: dict[str, Any] = {"n_layer": 4, "n_inner": 256, "batch_size": 2, "muon_lr": 0.04, "weight_decay": 0.0}
MINUTE: dict[str, Any] = {"steps": 976, "block_size": 256, "batch_size": 4}
PARTS = {  # title; bounds of the mean over the seeds. Those of nanogpt verify that the baseline is a fair one.
    "nanogpt": ("nanoGPT's CPU recipe", {"whole": (1.88, 1.92)}),
    "equal": ("ours, equal CPU time", {"whole": (0, 1.49), "cpu_ratio": (0, 1.02)}),
    "quick": ("ours, --preset quick", {"whole": (0, 1.70)}),
    "minute": ("ours, 1.0 M characters in steps of 1,024", {"whole": (0, 1.545), "wall_seconds": (0, 90)}),
    "cpu": ("ours, --preset cpu", {"whole": (0, 1.408), "wall_seconds": (0, 240)}),
    "gpu": ("ours, --preset gpu", {"whole": (0, 1.40), "wall_seconds": (0, 120)}),
    "curve": ("", {}),
}
NEEDS = {"equal": ("nanogpt",), "curve": ("nanogpt", "cpu")}
FIGURES = {  # name in the JSON: label in the tables, format
    "parameters": ("parameters", "{:,.0f}"),
    "characters": ("characters trained on", "{:,.0f}"),
    "whole": ("whole loss", "{:.4f}"),
    "streamed": ("streamed loss", "{:.4f}"),
    "cpu_seconds": ("CPU time of steps, s", "{:.1f}"),
    "cpu_ratio": ("CPU time relative to nanoGPT", "{:.3f}"),
    "wall_seconds": ("wall time of steps, s", "{:.1f}"),
    "characters_per_second": ("characters/s", "{:,.0f}"),
    "peak_share": ("share of the peak of matrix products", "{:.1%}"),
}
PROBE_STEPS, WARM_STEPS = 200, 8  # enough that the first ones, which are left out, do not change the mean


# Runs, each in a process of its own


def run_ours(config: TrainConfig, out: Path) -> dict[str, Any]:
    """Figures of one run of our trainer, report included; replaces the folder `out`."""
    shutil.rmtree(out, ignore_errors=True)
    jobs.start(replace(config, score_chars="all"), out, Console(stderr=True, highlight=False))
    checkpoint, log = Checkpoint.read(out / "best"), read_log(out)
    best, about = checkpoint.load_model("cpu"), checkpoint.training
    evaluations, end = [record for record in log if record["event"] == "evaluation"], log[-1]
    return {
        "seed": config.seed, "steps": config.steps, "characters": config.steps * config.tokens_per_step,
        **{name: about["losses"][name] for name in ("whole", "streamed")},
        "cpu_seconds": evaluations[-1]["cpu_seconds"], "wall_seconds": evaluations[-1]["elapsed_seconds"],
        "curve": [{name: r[name] for name in ("step", "val_loss", "cpu_seconds")} for r in evaluations],
        "recipe": config.as_dict(), "parameters": best.config.num_parameters,
        "characters_per_second": end["characters_per_second"], "peak_share": end["peak_share"],
        **{name: about["machine"][name] for name in ("device", "dtype", "threads")},
    }  # fmt: skip


def probe_ours(config: TrainConfig, out: Path) -> dict[str, Any]:
    """The dtype that our trainer chooses, and its CPU seconds per step (`step`)."""
    shutil.rmtree(out, ignore_errors=True)
    jobs.start(replace(config, log_every=WARM_STEPS), out, Console(quiet=True))
    warm, *_, last = (r for r in read_log(out) if r["event"] == "train")
    step = (last["cpu_seconds"] - warm["cpu_seconds"]) / (last["step"] - warm["step"])
    return {"dtype": Checkpoint.read(out / "best").training["machine"]["dtype"], "step": step}


def run_nanogpt(recipe: nanogpt.Recipe, seed: int, threads: int) -> dict[str, Any]:
    """Figures of one run of the baseline."""
    if threads:
        torch.set_num_threads(threads)
    corpus = prepare(TINYSHAKESPEARE)
    curve: list[dict[str, float]] = []
    say = Progress()

    def evaluated(model: Any, step: int, cpu_seconds: float, wall_seconds: float) -> None:
        loss = whole_loss(model, corpus.val)
        curve.append({"step": step, "val_loss": loss, "cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds})
        say(f"step {step}/{recipe.steps}  val {loss:.4f} nats  {cpu_seconds:.0f} CPU s")

    model = nanogpt.train(recipe, corpus.train, corpus.tokenizer.vocab_size, seed, evaluated)
    end, characters = curve[-1], recipe.steps * recipe.batch_size * recipe.block_size
    return {
        "seed": seed, "steps": recipe.steps, "characters": characters, "whole": end["val_loss"],
        **{name: end[name] for name in ("cpu_seconds", "wall_seconds")}, "curve": curve,
        "parameters": sum(p.numel() for p in model.parameters()),
        "characters_per_second": characters / end["wall_seconds"], "device": "cpu", "dtype": "float32",
        "threads": torch.get_num_threads(),
    }  # fmt: skip


class Bench(Run):
    def __init__(self, args: argparse.Namespace):
        self.args = args
        curve: dict[str, list[Any]] = {"nanogpt": [], "cpu": []}  # figures per time, of the first seed
        found = {"runs": {}, "curve": curve}  # runs: by part, figures per seed
        super().__init__("tests.bench.train", args.out, "train", markdown, ("torch", "numpy"), **found)

    def run(self, parts: list[str]) -> None:
        """Run every part with every seed; a run that fails leaves its reason in the results."""
        self.results["runs"] = {part: [] for part in parts if part != "curve"}
        paired = [part for part in parts if part in ("nanogpt", "equal")]  # in turn: a machine's speed drifts
        for group in [paired, *([part] for part in parts if part not in (*paired, "curve"))]:
            for seed, part in itertools.product(self.args.seeds, group):
                with self.noted(f"{PARTS[part][0]}, seed {seed}"):
                    self.results["runs"][part].append(self.figures(part, seed))
        for seconds in self.args.curve_seconds if "curve" in parts else ():
            for part, runs in self.results["curve"].items():
                with self.noted(f"{PARTS[part][0]}, {seconds} s"):
                    runs.append(self.curve_figures(part, seconds))

    def curve_figures(self, part: str, seconds: float) -> dict[str, Any]:
        """As many steps as fit at the speed seen so far."""
        speeds = [run["steps"] / run["wall_seconds"] for run in self.results["runs"][part]]
        if not speeds:
            raise BenchError("no speed to scale the steps by: all its runs failed")
        steps = round(seconds * statistics.mean(speeds))
        if part == "nanogpt":
            recipe = nanogpt.Recipe(steps=steps, eval_every=steps)
            return in_child(run_nanogpt, recipe, self.args.seeds[0], self.args.threads)
        config = self.ours(part, seed=self.args.seeds[0], steps=steps, eval_every=steps)
        return in_child(run_ours, config, self.args.out / "runs" / f"curve-{seconds}")

    def figures(self, part: str, seed: int) -> dict[str, Any]:
        if part == "nanogpt":
            return in_child(run_nanogpt, nanogpt.Recipe(), seed, self.args.threads)
        out = self.args.out / "runs" / f"{part}-{seed}"
        if part == "equal":
            figures = in_child(run_ours, self.equal_config(seed), out)
            return figures | {"cpu_ratio": figures["cpu_seconds"] / self.results["runs"]["nanogpt"][-1]["cpu_seconds"]}
        config = self.ours("cpu", seed=seed, **MINUTE) if part == "minute" else self.ours(part, seed=seed)
        return in_child(run_ours, config, out)

    def ours(self, preset: str, **changes: Any) -> TrainConfig:
        """A preset, without samples at evaluations."""
        device = "cuda" if preset == "gpu" else "cpu"
        return TrainConfig.from_preset(preset, device=device, threads=self.args.threads, sample_chars=0, **changes)

    def equal_config(self, seed: int) -> TrainConfig:
        """Our trainer with as many steps as bring its runs to 2 % less CPU time than the baseline's runs so far.

        The cost of a step is that of the runs before, for the first seed that of a probe.
        """
        runs = self.results["runs"]["equal"]
        seeds = [seed, *(run["seed"] for run in runs)]
        baseline = [run["cpu_seconds"] for run in self.results["runs"]["nanogpt"] if run["seed"] in seeds]
        if len(baseline) < len(seeds):
            raise BenchError("no CPU time to match: nanoGPT's run failed")
        spent, done = (sum(run[name] for run in runs) for name in ("cpu_seconds", "steps"))
        budget = 0.98 * sum(baseline) - spent
        if runs:
            dtype, step = runs[0]["dtype"], spent / done
        else:
            probe = self.ours("cpu", **EQUAL, steps=PROBE_STEPS), self.args.out / "runs" / "probe"
            dtype, step = in_child(probe_ours, *probe).values()
        steps = max(1, int(budget / step))
        self.say(f"{step * 1e3:.1f} ms of CPU time per step: {steps} steps in {budget:.1f} s")
        return self.ours("cpu", **EQUAL, seed=seed, steps=steps, eval_every=-(-steps // 8), dtype=dtype)

    def write(self) -> None:
        super().write()
        if any(self.results["curve"].values()):
            draw(self.results, self.out / "train.png")


# Output


def cells(results: dict[str, Any]) -> list[list[str]]:
    """Rows of the table: titles, one row per figure (mean, lowest, highest over seeds), seeds, targets."""
    runs = {part: runs for part, runs in results["runs"].items() if runs}
    rows = [["nats per character", *(PARTS[part][0] for part in runs)]]
    for name, (label, form) in FIGURES.items():
        values = ([run[name] for run in each if name in run] for each in runs.values())
        rows.append([label, *(figure(each, form, middle=statistics.mean) for each in values)])
    rows.append(["seeds", *(", ".join(str(run["seed"]) for run in each) for each in runs.values())])
    rows.append(["target", *(judge(each, PARTS[part][1]) for part, each in runs.items())])
    return rows


def judge(runs: list[dict[str, Any]], targets: dict[str, tuple[float, float]]) -> str:
    verdicts = []
    for name, (low, high) in targets.items():
        mean = statistics.mean(run[name] for run in runs)
        asked = f"≤ {high:g}" if low == 0 else f"{low:g}–{high:g}"
        verdicts.append(f"{FIGURES[name][0]} {asked}: {'met' if low <= mean <= high else 'MISSED'}")
    return "; ".join(verdicts)


def markdown(results: dict[str, Any]) -> str:
    every = [run for group in ("runs", "curve") for runs in results[group].values() for run in runs]
    lines = [
        conditions(results),
        *{f"{run['threads']} threads, {run['dtype']} on {run['device']}": None for run in every},
        "Means over seeds (lowest–highest). Whole loss: every character of the validation split once, in windows of "
        "the training length; streamed loss: in one pass. The share of the peak excludes the optimizer's products.",
        *(f"failed: {name}: {reason}" for name, reason in results["errors"].items()),
    ]
    return "\n".join([*table(cells(results)), *("- " + line for line in lines)]) + "\n"


def draw(results: dict[str, Any], png: Path) -> None:
    """Plot the loss of whole runs against the time they took: the curve, and every seed's run of the baseline and of
    the preset cpu."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    picture = Figure(figsize=(8, 5), layout="constrained")
    axes = picture.subplots()
    for part, color in (("nanogpt", "tab:gray"), ("cpu", "tab:blue")):
        curve, runs = results["curve"][part], results["runs"].get(part, [])
        for points, style in ((curve, "o-"), (runs, "x")):
            times, losses = ([point[name] for point in points] for name in ("wall_seconds", "whole"))
            axes.plot(times, losses, style, color=color, ms=5, label=PARTS[part][0] if points is curve else None)
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
    picture.savefig(png, dpi=120)


def main() -> int:
    parser = build_parser("tests.bench.train", __doc__, "out/bench-train")
    add = parser.add_argument
    add_only(parser, PARTS)  # and what they need
    add("--seeds", nargs="+", type=int, default=[2026, 2027, 2028], help="(default: 2026 2027 2028, never tuned on)")
    add("--threads", type=int, default=0, help="CPU threads; 0: OMP_NUM_THREADS, else one per core")
    add("--curve-seconds", nargs="+", type=int, default=[20, 60, 180, 600], help="(default: 20 60 180 600)")
    args = parser.parse_args()
    asked = args.only or [part for part in PARTS if part != "gpu" or torch.cuda.is_available()]
    wanted = set(asked).union(*(NEEDS.get(part, ()) for part in asked))
    try:
        prepare(TINYSHAKESPEARE)
    except DataError as error:
        print(f"error: {error}\nThe bench needs this text; CHARGPT_DATA_DIR can name its folder", file=sys.stderr)
        return 1
    bench = Bench(args)
    return bench.main(lambda: bench.run([part for part in PARTS if part in wanted]))


if __name__ == "__main__":
    sys.exit(main())
