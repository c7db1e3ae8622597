"""Benchmarks of training: our trainer beside nanoGPT's CPU recipe and makemore.py, on seeds that nothing was tuned on.

    make bench-train
    make bench-train ARGS='--only nanogpt equal --threads 1'
    make bench-train ARGS='--lists names.txt openings.txt --texts code.txt --makemore makemore.py'

Without --lists and --texts, on tiny Shakespeare:

    nanogpt           nanoGPT's CPU recipe (nanogpt.py)
    equal             our trainer for 2 % less CPU time, seed by seed in turn with nanogpt
    quick, cpu, gpu   the presets; gpu needs a CUDA GPU
    minute            the preset cpu for 1.0 M characters, in smaller steps
    curve             the preset cpu and nanoGPT's recipe for several times, each run with its whole schedule

With them, on small corpora as installed. A list has a record in each line. Of each list and seed, 1,000 records or a
tenth are held out, those that makemore.py holds out with this seed; of a text, the last tenth. Nothing is set but
--records, the seed and the threads:

    ours        train, which keeps a tenth of its text to choose the best weights; the loss of `best` and of `last`,
                of lists also without what was trained on too
    nanogpt     its CPU recipe for as many CPU seconds, on all that is not held out; the lowest of nine evaluations
    makemore    makemore.py's transformer with its defaults, on all that is not held out; the lowest of its evaluations,
                one every 500 steps, and the lowest within our CPU seconds

So of lists what is held out chooses the peers' weights, and not ours; of a text the last tenth chooses both. nanoGPT's
loss is the lower of that of records alone and that in windows of the held-out list. makemore.py needs the package
tensorboard; it and names.txt are in https://github.com/karpathy/makemore.

Rewrites OUT/train.json, OUT/train.md and, for the curve, OUT/train.png after each run, and keeps a folder per run.
Each run has a fresh process, so that runs do not affect each other. Times cover optimizer steps only, unless stated
otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from service.model.checkpoint import Checkpoint
from tests.toolbox.figures import conditions, figure, table
from training.commands.inputs import encode_files, encoder_of
from training.config import TrainConfig
from training.fit.settings import Settings
from training.measure.losses import piece_loss, split_losses, whole_loss
from training.run.log import read_log
from training.run.start import start
from training.text.batches import record_pieces
from training.text.corpus import prepare
from training.text.files import TINYSHAKESPEARE, DataError
from training.text.records import LINES, OF_LINES

from . import nanogpt
from .command import BenchError, Progress, Run, add_only, build_parser, in_child, run_checked

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
COLUMNS = {  # the same of small corpora
    "ours": ("ours, `best`", "{:.4f}"),
    "ours_last": ("ours, `last`", "{:.4f}"),
    "best_unseen": ("ours, without records that were trained on", "{:.4f}"),
    "ours_cpu": ("CPU s", "{:.0f}"),
    "nanogpt": ("nanoGPT, equal CPU s", "{:.4f}"),
    "makemore_equal": ("makemore.py, equal CPU s", "{:.4f}"),
    "makemore": ("makemore.py, its best", "{:.4f}"),
    "makemore_cpu": ("CPU s to it", "{:.0f}"),
}
PROBE_STEPS, EVALUATIONS, MAKEMORE_STEPS = 200, 8, 20_000


# Runs, each in a process of its own


def trained(given: Mapping[str, Any], out: Path) -> None:
    """Replace the folder `out` by that of a run with these settings."""
    shutil.rmtree(out, ignore_errors=True)
    start(Settings(given), out, Console(stderr=True, highlight=False))


def run_ours(config: TrainConfig, out: Path) -> dict[str, Any]:
    """Figures of one run of our trainer, report included."""
    trained(replace(config, score_chars="all").as_dict(), out)
    checkpoint, log = Checkpoint.read(out / "best"), read_log(out)
    about, evaluations, end = checkpoint.training, [it for it in log if it["event"] == "evaluation"], log[-1]
    return {
        "seed": config.seed, "steps": config.steps, "characters": config.steps * config.tokens_per_step,
        **{name: about["losses"][name] for name in ("whole", "streamed")},
        "cpu_seconds": evaluations[-1]["cpu_seconds"], "wall_seconds": evaluations[-1]["elapsed_seconds"],
        "curve": [{name: r[name] for name in ("step", "val_loss", "cpu_seconds")} for r in evaluations],
        "recipe": config.as_dict(), "parameters": checkpoint.config.num_parameters,
        "characters_per_second": end["characters_per_second"], "peak_share": end["peak_share"],
        **{name: about["machine"][name] for name in ("device", "dtype", "threads")},
    }  # fmt: skip


def run_ours_on(data: Path, held_out: Path | None, seed: int, threads: int, out: Path) -> dict[str, Any]:
    """One run as `train --data FILE [--records]`; scored on `held_out`, or on the validation split of a text."""
    records = LINES if held_out is not None else ""
    given = {"data": (str(data),), "records": records, "seed": seed, "threads": threads, "sample_chars": 0}
    trained({**given, "device": "cpu"}, out)
    figures: dict[str, Any] = {}
    for name in ("best", "last"):
        checkpoint = Checkpoint.read(out / name)
        about, tokenizer, model = checkpoint.training, checkpoint.tokenizer, checkpoint.load_model("cpu").eval()
        encoded = [encode_files([path], encoder_of(tokenizer), OF_LINES) for path in (held_out, data) if held_out]
        ids, known = encoded or (prepare(str(data)).val, None)
        losses = split_losses(model, ids, bool(held_out), known)
        figures["ours" if name == "best" else "ours_last"] = losses["whole"]
        figures |= {f"{name}_step": about["step"], f"{name}_unseen": losses.get("unseen")}
    same = {name: about[name] for name in ("parameters", "recipe")}
    return figures | {"ours_cpu": about["training_cpu_seconds"]} | same


def run_nanogpt(
    recipe: nanogpt.Recipe, seed: int, threads: int, data: str = TINYSHAKESPEARE, held_out: Path | None = None
) -> dict[str, Any]:
    """Figures of one run of the baseline; held_out: the rest of a list, whose other records are `data`."""
    if threads:
        torch.set_num_threads(threads)
    corpus = prepare(data, records=held_out is not None)
    ids, val = corpus.train, corpus.val
    if held_out:
        ids, val = (encode_files([path], encoder_of(corpus.tokenizer), OF_LINES) for path in (Path(data), held_out))
    curve: list[dict[str, float]] = []
    say = Progress()

    def evaluated(model: Any, step: int, cpu_seconds: float, wall_seconds: float) -> None:
        loss = whole_loss(model, val)
        if held_out:
            loss = min(loss, piece_loss(model, val, *record_pieces(val, recipe.block_size)))
        curve.append({"step": step, "val_loss": loss, "cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds})
        say(f"step {step}/{recipe.steps}  val {loss:.4f} nats  {cpu_seconds:.0f} CPU s")

    model = nanogpt.train(recipe, ids, corpus.tokenizer.vocab_size, seed, evaluated)
    end, characters = curve[-1], recipe.steps * recipe.batch_size * recipe.block_size
    return {
        "seed": seed, "steps": recipe.steps, "characters": characters, "whole": end["val_loss"],
        **{name: end[name] for name in ("cpu_seconds", "wall_seconds")}, "curve": curve,
        "parameters": sum(p.numel() for p in model.parameters()),
        "characters_per_second": characters / end["wall_seconds"], "device": "cpu", "dtype": "float32",
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def run_makemore(script: Path, data: Path, seed: int, cpu_seconds: float, out: Path) -> dict[str, Any]:
    """makemore.py in one thread; of the times of steps that it prints, the share in which it had a CPU."""
    shutil.rmtree(out, ignore_errors=True)
    flags = ["-i", str(data), "-o", str(out), "-n", "0", "--seed", str(seed), "--max-steps", str(MAKEMORE_STEPS + 1)]
    cpu, clock = os.times().children_user, time.monotonic()
    output = run_checked([sys.executable, script, *flags], env={**os.environ, "OMP_NUM_THREADS": "1"})
    share = (os.times().children_user - cpu) / (time.monotonic() - clock)
    times = [float(ms) / 1000 for ms in re.findall(r"step time ([\d.]+)ms", output)]
    per_step = share * sum(times) / len(times)
    losses = {int(step): float(loss) for step, loss in re.findall(r"step (\d+) train loss.* test loss: (\S+)", output)}
    best = min(losses, key=losses.__getitem__)
    within = [loss for step, loss in losses.items() if step * per_step <= cpu_seconds]
    return {
        "makemore": losses[best], "makemore_step": best, "makemore_cpu": best * per_step,
        "makemore_last": losses[max(losses)], **({"makemore_equal": min(within)} if within else {}),
    }  # fmt: skip


def split(file: Path, seed: int, out: Path) -> tuple[Path, Path]:
    """The files of what is trained on and of what is held out, as makemore.py splits a list with this seed."""
    lines = [line for each in file.read_text(encoding="utf-8").splitlines() if (line := each.strip())]
    torch.manual_seed(seed)
    order = torch.randperm(len(lines)).tolist()
    held_out = min(1000, len(lines) // 10)
    out.mkdir(parents=True, exist_ok=True)
    paths = out / "train.txt", out / "held-out.txt"
    for path, some in zip(paths, (order[:-held_out], order[-held_out:]), strict=True):
        path.write_text("".join(f"{lines[i]}\n" for i in some), encoding="utf-8")
    return paths


class Bench(Run):
    def __init__(self, args: argparse.Namespace):
        self.args = args
        curve: dict[str, list[Any]] = {"nanogpt": [], "cpu": []}  # figures per time, of the first seed
        found = {"runs": {}, "curve": curve, "corpora": {}}  # runs, corpora: by part or file, figures per seed
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
        for data, seed in itertools.product((*self.args.lists, *self.args.texts), self.args.seeds):
            with self.noted(f"{data.stem}, seed {seed}"):
                self.results["corpora"].setdefault(data.stem, []).append(self.corpus_figures(data, seed))

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
            return self.equal_figures(seed, out)
        config = self.ours("cpu", seed=seed, **MINUTE) if part == "minute" else self.ours(part, seed=seed)
        return in_child(run_ours, config, out)

    def ours(self, preset: str, **changes: Any) -> TrainConfig:
        """A preset, without samples at evaluations."""
        device = "cuda" if preset == "gpu" else "cpu"
        return TrainConfig.from_preset(preset, device=device, threads=self.args.threads, sample_chars=0, **changes)

    def equal_figures(self, seed: int, out: Path) -> dict[str, Any]:
        """Our trainer with as many steps as take 2 % less CPU time than the baseline took with this seed.

        The cost of a step is that of the run before, for the first seed that of a short one.
        """
        budgets = [run["cpu_seconds"] for run in self.results["runs"]["nanogpt"] if run["seed"] == seed]
        if not budgets:
            raise BenchError("no CPU time to match: nanoGPT's run failed")
        runs = self.results["runs"]["equal"]
        before = runs[-1] if runs else in_child(run_ours, self.ours("cpu", **EQUAL, steps=PROBE_STEPS), out)
        steps = max(1, int(0.98 * budgets[0] / before["cpu_seconds"] * before["steps"]))
        config = self.ours("cpu", **EQUAL, seed=seed, steps=steps, eval_every=-(-steps // 8), dtype=before["dtype"])
        figures = in_child(run_ours, config, out)
        return figures | {"cpu_ratio": figures["cpu_seconds"] / budgets[0]}

    def corpus_figures(self, data: Path, seed: int) -> dict[str, Any]:
        args, folder = self.args, self.out / f"{data.stem}-{seed}"
        train, held_out = split(data, seed, folder) if data in args.lists else (data, None)
        figures = in_child(run_ours_on, train, held_out, seed, args.threads, folder / "ours")
        cpu, steps = figures["ours_cpu"], PROBE_STEPS
        for _ in range(2):  # first a probe
            recipe = nanogpt.Recipe(steps=steps, eval_every=-(-steps // EVALUATIONS))
            found = in_child(run_nanogpt, recipe, seed, args.threads, str(train), held_out)
            steps = max(EVALUATIONS, round(cpu / found["cpu_seconds"] * steps))
        figures |= {"nanogpt": min(it["val_loss"] for it in found["curve"]), "nanogpt_last": found["whole"]}
        figures |= {"nanogpt_cpu": found["cpu_seconds"], "nanogpt_steps": found["steps"]}
        if args.makemore and data == args.lists[0]:
            figures |= in_child(run_makemore, args.makemore, data, seed, cpu, folder / "makemore")
        return {"seed": seed, **figures, "finished": time.strftime("%H:%M:%S")}

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


def corpus_cells(results: dict[str, Any]) -> list[list[str]]:
    rows = [["nats per character, held out", *(label for label, _ in COLUMNS.values())]]
    for corpus, runs in results["corpora"].items():
        columns = ((form, [r[name] for r in runs if r.get(name) is not None]) for name, (_, form) in COLUMNS.items())
        rows.append([corpus, *(figure(values, form, middle=statistics.mean) for form, values in columns)])
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
    tables = (table(cells(results)) if results["runs"] else []) + table(corpus_cells(results))
    return "\n".join([*tables, *("- " + line for line in lines)]) + "\n"


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
    add("--lists", nargs="*", type=Path, default=[], metavar="FILE", help="a record in each line")
    add("--texts", nargs="*", type=Path, default=[], metavar="FILE")
    add("--makemore", type=Path, metavar="FILE", help="makemore.py, run on the first list (default: without it)")
    add("--seeds", nargs="+", type=int, default=[2026, 2027, 2028], help="(default: 2026 2027 2028, never tuned on)")
    add("--threads", type=int, default=0, help="CPU threads; 0: OMP_NUM_THREADS, else one per core")
    add("--curve-seconds", nargs="+", type=int, default=[20, 60, 180, 600], help="(default: 20 60 180 600)")
    args = parser.parse_args()
    every = [] if args.lists or args.texts else [part for part in PARTS if part != "gpu" or torch.cuda.is_available()]
    asked = args.only or every
    wanted = set(asked).union(*(NEEDS.get(part, ()) for part in asked))
    try:
        if wanted:
            prepare(TINYSHAKESPEARE)
    except DataError as error:
        print(f"error: {error}\nThe bench needs this text; CHARGPT_DATA_DIR can name its folder", file=sys.stderr)
        return 1
    bench = Bench(args)
    return bench.main(lambda: bench.run([part for part in PARTS if part in wanted]))


if __name__ == "__main__":
    sys.exit(main())
