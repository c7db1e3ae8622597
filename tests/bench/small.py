"""Training on small corpora as installed, beside nanoGPT's recipe and, of lists, makemore.py, on the same splits.

    python -m tests.bench.small --lists names.txt openings.txt --texts code.txt --makemore makemore.py

A list has a record in each line. Of each list and seed, 1,000 records or a tenth are held out, those that makemore.py
holds out with this seed; of a text, the last tenth. Nothing is set but --records, the seed and the threads:

    ours        train, which keeps a tenth of its text to choose the best weights; the loss of `best` and of `last`,
                of lists also without what was trained on too
    nanogpt     its CPU recipe for as many CPU seconds, on all that is not held out; the lowest of nine evaluations
    makemore    makemore.py's transformer with its defaults, on all that is not held out; the lowest of its evaluations,
                one every 500 steps, and the lowest within our CPU seconds

So of lists what is held out chooses the peers' weights, and not ours; of a text the last tenth chooses both. nanoGPT's
loss is the lower of that of records alone and that in windows of the held-out list. CPU seconds are of optimizer steps.
Rewrites OUT/small.json and OUT/small.md after each run. makemore.py needs the package tensorboard; it and names.txt are
in https://github.com/karpathy/makemore.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from service.model.checkpoint import Checkpoint
from tests.toolbox.figures import figure, table
from training import jobs
from training.config import TrainConfig
from training.data import prepare, record_pieces
from training.evaluate import piece_loss, split_losses, whole_loss
from training.inputs import OF_LINES, Encoder, encode_files
from training.recipe import SETTINGS

from . import nanogpt
from .command import Run, build_parser, in_child, run_checked

PROBE_STEPS, EVALUATIONS, MAKEMORE_STEPS = 100, 8, 20_000
COLUMNS = {  # name in the JSON: label, format
    "ours": ("ours, `best`", "{:.4f}"),
    "ours_last": ("ours, `last`", "{:.4f}"),
    "best_unseen": ("ours, without records that were trained on", "{:.4f}"),
    "ours_cpu": ("CPU s", "{:.0f}"),
    "nanogpt": ("nanoGPT, equal CPU s", "{:.4f}"),
    "makemore_equal": ("makemore.py, equal CPU s", "{:.4f}"),
    "makemore": ("makemore.py, its best", "{:.4f}"),
    "makemore_cpu": ("CPU s to it", "{:.0f}"),
}


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


def run_ours(train: Path, held_out: Path | None, seed: int, threads: int, out: Path) -> dict[str, Any]:
    """One run as `train --data FILE [--records]`; scored on `held_out`, or on the validation split of a text."""
    shutil.rmtree(out, ignore_errors=True)
    config = TrainConfig(
        data=(str(train),), records=held_out is not None, seed=seed, threads=threads, sample_chars=0, device="cpu"
    )
    jobs.start(config, out, Console(stderr=True, highlight=False), adaptable=SETTINGS)
    figures: dict[str, Any] = {}
    for name in ("best", "last"):
        checkpoint = Checkpoint.read(out / name)
        about, tokenizer, model = checkpoint.training, checkpoint.tokenizer, checkpoint.load_model("cpu").eval()
        encoded = [encode_files([path], Encoder(tokenizer), OF_LINES) for path in (held_out, train) if held_out]
        ids, known = encoded or (prepare(str(train)).val, None)
        losses = split_losses(model, ids, bool(held_out), known)
        figures["ours" if name == "best" else "ours_last"] = losses["whole"]
        figures |= {f"{name}_step": about["step"], f"{name}_unseen": losses.get("unseen")}
    same = {name: about[name] for name in ("parameters", "recipe")}
    return figures | {"ours_cpu": about["training_cpu_seconds"]} | same


def run_nanogpt(train: Path, held_out: Path | None, seed: int, threads: int, cpu_seconds: float) -> dict[str, Any]:
    """nanoGPT's recipe with as many steps as take `cpu_seconds`."""
    if threads:
        torch.set_num_threads(threads)
    if held_out:
        tokenizer = prepare(str(train), records=True).tokenizer
        ids, val = (encode_files([path], Encoder(tokenizer), OF_LINES) for path in (train, held_out))
    else:
        corpus = prepare(str(train))
        tokenizer, ids, val = corpus.tokenizer, corpus.train, corpus.val
    costs: list[float] = []
    losses: list[float] = []

    def evaluated(model: Any, step: int, seconds: float, wall: float) -> None:
        costs.append(seconds)
        found = [whole_loss(model, val)]
        if held_out:
            found.append(piece_loss(model, val, *record_pieces(val, model.config.block_size)))
        losses.append(min(found))

    probe = nanogpt.Recipe(steps=PROBE_STEPS)
    nanogpt.train(probe, ids, tokenizer.vocab_size, seed, lambda model, step, seconds, wall: costs.append(seconds))
    steps = max(EVALUATIONS, round(cpu_seconds / costs[-1] * PROBE_STEPS))
    recipe = nanogpt.Recipe(steps=steps, eval_every=-(-steps // EVALUATIONS))
    nanogpt.train(recipe, ids, tokenizer.vocab_size, seed, evaluated)
    return {"nanogpt": min(losses), "nanogpt_last": losses[-1], "nanogpt_cpu": costs[-1], "nanogpt_steps": steps}


def run_makemore(script: Path, data: Path, seed: int, steps: int, cpu_seconds: float, out: Path) -> dict[str, Any]:
    """makemore.py in one thread; of the times of steps that it prints, the share in which it had a CPU."""
    shutil.rmtree(out, ignore_errors=True)
    flags = ["-i", str(data), "-o", str(out), "-n", "0", "--seed", str(seed), "--max-steps", str(steps + 1)]
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


def markdown(results: dict[str, Any]) -> str:
    rows = [["nats per character, held out", *(label for label, _ in COLUMNS.values())]]
    for corpus, runs in results["runs"].items():
        columns = ((form, [r[name] for r in runs if r.get(name) is not None]) for name, (_, form) in COLUMNS.items())
        rows.append([corpus, *(figure(values, form, middle=statistics.mean) for form, values in columns)])
    return "\n".join(table(rows)) + "\n"


class Bench(Run):
    def __init__(self, args: argparse.Namespace):
        self.args = args
        super().__init__("tests.bench.small", args.out, "small", markdown, ("torch", "numpy"), runs={})

    def run(self) -> None:
        for data in (*self.args.lists, *self.args.texts):
            for seed in self.args.seeds:
                with self.noted(f"{data.stem}, seed {seed}"):
                    self.results["runs"].setdefault(data.stem, []).append(self.figures(data, seed))

    def figures(self, data: Path, seed: int) -> dict[str, Any]:
        args, folder = self.args, self.out / f"{data.stem}-{seed}"
        train, held_out = split(data, seed, folder) if data in args.lists else (data, None)
        figures = in_child(run_ours, train, held_out, seed, args.threads, folder / "ours")
        cpu = figures["ours_cpu"]
        figures |= in_child(run_nanogpt, train, held_out, seed, args.threads, cpu)
        if args.makemore and data == args.lists[0]:
            figures |= run_makemore(args.makemore, data, seed, MAKEMORE_STEPS, cpu, folder / "makemore")
        return {"seed": seed, **figures, "finished": time.strftime("%H:%M:%S")}


def main() -> int:
    parser = build_parser("tests.bench.small", __doc__, "out/bench-small")
    add = parser.add_argument
    add("--lists", nargs="*", type=Path, default=[], metavar="FILE", help="a record in each line")
    add("--texts", nargs="*", type=Path, default=[], metavar="FILE")
    add("--makemore", type=Path, metavar="FILE", help="makemore.py, run on the first list (default: without it)")
    add("--seeds", nargs="+", type=int, default=[2049, 2050, 2051], help="(default: 2049 2050 2051)")
    add("--threads", type=int, default=0, help="0: OMP_NUM_THREADS, else one per core")
    bench = Bench(parser.parse_args())
    return bench.main(bench.run)


if __name__ == "__main__":
    sys.exit(main())
