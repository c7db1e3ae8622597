"""What a run shows: the bar while it trains, a line per evaluation, the closing table, the curves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from training.config import TrainConfig
from training.evaluate import bits
from training.state import Progress

MANY_SYMBOLS = 1000  # more than all alphabets in one text


class ProgressView:
    """A bar on a terminal; a line per evaluation everywhere."""

    def __init__(self, console: Console, config: TrainConfig):
        self.console, self.config = console, config
        self.loss = math.nan  # smoothed
        self.bar = Bar(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=config.steps, figures="")

    def __enter__(self) -> ProgressView:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.bar.stop()

    def stepped(self, progress: Progress, loss: float) -> None:
        self.loss = loss if math.isnan(self.loss) else 0.95 * self.loss + 0.05 * loss
        rate = progress.step * self.config.tokens_per_step / progress.elapsed_seconds
        self.bar.update(self.task, completed=progress.step, figures=f"loss {self.loss:.3f} · {rate:,.0f} characters/s")

    def evaluated(self, progress: Progress, record: dict[str, Any]) -> None:
        val = record["val_loss"]
        best = " (best)" if progress.best_step == progress.step else ""
        train = "" if math.isnan(self.loss) else f"  train {self.loss:.4f}"
        rate = progress.step * self.config.tokens_per_step / max(progress.elapsed_seconds, 1e-9)
        self.console.print(
            f"step {progress.step}/{self.config.steps}{train}  val {val:.4f} nats, "
            f"{bits(val):.4f} bits{best}  {rate:,.0f} characters/s  {progress.elapsed_seconds:.0f} s",
            markup=False,
            soft_wrap=True,
        )
        if "sample" in record:
            self.console.print(record["sample"], style="dim", markup=False, soft_wrap=True)


def warn_of_symbols(console: Console, config: TrainConfig, vocab_size: int, num_parameters: int) -> None:
    """Say what a vocabulary of thousands costs; nothing about a smaller one."""
    if vocab_size < MANY_SYMBOLS:
        return
    console.print(
        f"{vocab_size:,} different characters: embedding and head are {2 * vocab_size * config.n_embd:,} of the "
        f"{num_parameters:,} parameters, and the logits of a step {config.tokens_per_step * vocab_size * 4 / 1e6:,.0f} "
        "MB. That is as it must be for Chinese, Japanese or Korean; other texts are better cleaned of stray characters",
        soft_wrap=True,
    )


def print_report(
    console: Console,
    config: TrainConfig,
    progress: Progress,
    losses: dict[str, float],
    speed: dict[str, float],
    out: Path,
) -> None:
    """The losses of the best weights beside what mere counting reaches, and where everything lies."""
    labels = {
        "uniform": "uniform: every symbol alike",
        "unigram": "unigram: by frequency",
        "bigram": "bigram: by the character before",
        "whole": f"this model, windows of {config.block_size}",
        "streamed": "this model, streamed",
    }
    table = Table("validation split, every character", "nats", "bits")
    for name, label in labels.items():
        table.add_row(label, f"{losses[name]:.4f}", f"{bits(losses[name]):.4f}")
    console.print(table)
    records = read_log(out / "log.jsonl")
    val = {r["step"]: r["val_loss"] for r in records if r["event"] == "evaluation"}
    table = Table("step", "train", "validation", title="as the run went", title_justify="left")
    best, last = progress.best_step, max(val)
    train = {step: train_loss_until(records, step, config.eval_every) for step in (best, last) if step is not None}
    for step, loss in train.items():
        name = f"{step}, the best" if step == best else f"{step}, the last"
        table.add_row(name, "" if math.isnan(loss) else f"{loss:.4f}", f"{val[step]:.4f}")
    console.print(table)
    if progress.step < config.steps:
        console.print(
            f"stopped at step {progress.step} of {config.steps}: no lower validation loss in {config.patience} "
            f"evaluations since step {best}",
            soft_wrap=True,
        )
    if best is not None and val[last] > val[best] and train[last] < train[best]:
        console.print(
            f"overfitting: after step {best} the validation loss rose by {val[last] - val[best]:.4f} while the "
            f"training loss fell by {train[best] - train[last]:.4f}. The checkpoint is the one of step {best}. "
            "More text helps, or a smaller model, fewer steps, --dropout, --weight-decay; --patience saves the time",
            soft_wrap=True,
        )
    console.print(
        f"{progress.step * config.tokens_per_step:,} characters in {progress.elapsed_seconds:.0f} s of training: "
        f"{speed['characters_per_second']:,.0f} a second, {speed['peak_share']:.0%} of the "
        f"{speed['matmul_peak_flops'] / 1e9:,.0f} GFLOP/s that matrix products reach here; "
        f"best at step {progress.best_step}\ncheckpoint {out / 'best'}   curves {out / 'loss.png'}   "
        f"log {out / 'log.jsonl'}",
        markup=False,
        soft_wrap=True,
    )


def print_copies(console: Console, texts: dict[str, dict[str, Any]]) -> None:
    """What texts copy from the training text, a column each."""
    table = Table("", *texts)
    for name in next(iter(texts.values())):
        values = [figures[name] for figures in texts.values()]
        table.add_row(name, *(repr(v) if isinstance(v, str) else f"{v:,.4f}".removesuffix(".0000") for v in values))
    console.print(table)


def read_log(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def train_loss_until(records: list[dict[str, Any]], step: int, steps: int) -> float:
    """Mean training loss over the `steps` up to `step`, as far as it was logged; nan if it was not."""
    losses = [r["train_loss"] for r in records if r["event"] == "train" and step - steps < r["step"] <= step]
    return sum(losses) / len(losses) if losses else math.nan


def draw_curves(log: Path, png: Path) -> None:
    """Training and validation loss, learning rate and baselines from a log, as a picture."""
    from matplotlib.figure import Figure  # half a second that only the end of a run pays

    records = read_log(log)
    train = [r for r in records if r["event"] == "train"]
    val = [r for r in records if r["event"] == "evaluation"]
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot([r["step"] for r in train], [r["train_loss"] for r in train], label="train", color="tab:blue", lw=0.8)
    axes.plot([r["step"] for r in val], [r["val_loss"] for r in val], "o-", label="validation", color="tab:orange")
    if val:
        best = min(val, key=lambda r: r["val_loss"])
        label = f"best, step {best['step']}: {best['val_loss']:.3f}"
        axes.plot(best["step"], best["val_loss"], "*", label=label, color="tab:green", ms=14, ls="none")
    for end in (r for r in records if r["event"] == "end"):
        for name, style in (("uniform", ":"), ("unigram", "-."), ("bigram", "--")):
            axes.axhline(end[name], color="gray", ls=style, lw=0.8, label=f"{name} {end[name]:.2f}")
        axes.axhline(end["streamed"], color="tab:green", lw=0.8, label=f"best, streamed {end['streamed']:.3f}")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per character")
    axes.grid(alpha=0.3)
    rate = axes.twinx()
    rate.plot([r["step"] for r in train], [r["muon_lr"] for r in train], color="tab:red", lw=0.8, label="learning rate")
    rate.set_ylabel("muon_lr")
    rate.set_ylim(bottom=0)
    lines = [*axes.get_lines(), *rate.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], loc="upper right")
    figure.savefig(png, dpi=120)
