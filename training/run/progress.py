"""Display a run: the progress bar, a line per evaluation and the final report."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from service.model.counts import ORDER
from training.config import TrainConfig
from training.measure.losses import Scores, bits
from training.messages import plural, say
from training.run.log import read_log
from training.run.saved import Progress

RECENT = 50  # steps whose mean loss the bar shows
LINE_SECONDS = 10.0  # seconds between two lines of progress if no bar is shown
NOISE = 0.005  # difference in validation loss, in nats, that another seed makes too
LOSSES = {  # losses in the final report, each with a description of its predictor
    "uniform": "guessing all characters alike",
    "unigram": "guessing by how often each character occurs",
    "bigram": "counting pairs of characters",  # of runs before kneser_ney
    "kneser_ney": f"counting up to {ORDER} characters in a row",
    "whole": "this model, in windows",
    "streamed": "this model, streamed",
    "mixed": "this model mixed with the counts, streamed",
    "unseen": "this model, records not in the training split too",
}
BASELINES = ("uniform", "unigram", "bigram", "kneser_ney")


class ProgressView(Bar):
    """Shows a progress bar on terminals, a line every LINE_SECONDS elsewhere, and a line per evaluation on both.

    The bar's loss is the mean of the last RECENT steps. An evaluation's training loss is the mean of all steps since
    the previous evaluation.
    """

    def __init__(self, console: Console, config: TrainConfig):
        super().__init__(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.config = config
        self.losses: deque[float] = deque(maxlen=RECENT)
        self.line_at = time.monotonic() + LINE_SECONDS
        self.task = self.add_task("", total=config.steps, figures="")

    def show_step(self, progress: Progress, loss: float) -> None:
        self.losses.append(loss)
        rate = progress.characters / progress.elapsed_seconds
        mean = sum(self.losses) / len(self.losses)
        figures = f"loss {mean:.3f} in {plural(len(self.losses), 'step')} · {rate:,.0f} characters/s"
        self.update(self.task, completed=progress.step, figures=figures)
        if not self.console.is_terminal and time.monotonic() >= self.line_at:
            self.line_at = time.monotonic() + LINE_SECONDS
            say(self.console, f"step {progress.step}/{self.config.steps}  {figures}")

    def show_evaluation(self, progress: Progress, record: dict[str, Any]) -> None:
        self.line_at = time.monotonic() + LINE_SECONDS
        val = record["val_loss"]
        best = " (best)" if progress.best_step == progress.step else ""
        train = ""
        if "mean_train_loss" in record:
            train = f"  train {record['mean_train_loss']:.4f} in {plural(record['mean_of_steps'], 'step')}"
        rate = progress.characters / max(progress.elapsed_seconds, 1e-9)
        say(
            self.console,
            f"step {progress.step}/{self.config.steps}{train}  val {val:.4f} nats, "
            f"{bits(val):.4f} bits{best}  {rate:,.0f} characters/s  {progress.elapsed_seconds:.0f} s",
        )
        if "sample" in record:
            say(self.console, record["sample"], style="dim")


@contextlib.contextmanager
def show_forwards(console: Console, what: str, total: int, unit: str = "characters") -> Iterator[Callable[[int], None]]:
    """Show how much of a text has gone through a model: a bar on terminals, elsewhere a line every LINE_SECONDS.

    Yields a function to call after each forward with its number of characters, or of another unit. total: about the
    number in all forwards.
    """
    done = 0
    started = line_at = time.monotonic()
    columns = (TextColumn(what), BarColumn(), TimeRemainingColumn())
    # Printed text must stay on standard output, which may be a file; rich would redirect it to the console.
    is_hidden = not console.is_terminal
    with Bar(*columns, console=console, disable=is_hidden, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=total)

        def advance(count: int) -> None:
            nonlocal done, line_at
            done = min(total, done + count)
            bar.update(task, completed=done)
            now = time.monotonic()
            if not console.is_terminal and now - line_at >= LINE_SECONDS:
                line_at, left = now, (now - started) * (total / done - 1)
                say(console, f"{what}: {done:,} of {total:,} {unit}, {left:.0f} s left")

        yield advance


def print_report(
    console: Console,
    config: TrainConfig,
    progress: Progress,
    losses: dict[str, float],
    speed: dict[str, float],
    out: Path,
    scores: Scores,
    val_characters: int,
) -> None:
    """Print the losses of the best weights and of the baselines, overfitting, speed and the paths of the results."""
    evaluations = {r["step"]: r for r in read_log(out) if r["event"] == "evaluation"}
    overfitting = overfitting_of(evaluations, progress.best_step)
    _print_losses(console, losses, scores, val_characters)
    if warning := verdict(losses, overfits=overfitting is not None):
        say(console, warning)
    say(console, about_mixture(losses, config.mixed, out))
    _print_evaluations(console, evaluations, config, progress, val_characters)
    if overfitting:
        say(console, overfitting + ("" if config.patience else "; --patience stops early"))
    say(
        console,
        f"{plural(progress.characters, 'character')} in {progress.elapsed_seconds:.0f} s of training: "
        f"{speed['characters_per_second']:,.0f} characters/s, {speed['peak_share']:.0%} of this machine's measured "
        f"matrix-product peak of {speed['matmul_peak_flops'] / 1e9:,.0f} GFLOP/s; "
        f"best at step {progress.best_step}\ncheckpoint {out / 'best'}   curves {out / 'loss.png'}   "
        f"log {out / 'log.jsonl'}",
    )


def _print_losses(console: Console, losses: dict[str, float], scores: Scores, val_characters: int) -> None:
    table = Table("", "loss per character, validation split", "nats", "bits")
    for name in filter(losses.__contains__, LOSSES):
        is_sampled = name in scores.losses and scores.standard_error is not None
        error = f" ± {scores.standard_error:.4f}" if is_sampled else ""
        table.add_row(name, LOSSES[name], f"{losses[name]:.4f}{error}", f"{bits(losses[name]):.4f}")
    console.print(table)
    if scores.standard_error is not None:
        say(
            console,
            f"scored on a sample: {scores.characters:,} of {plural(val_characters, 'character')}; ±: "
            "standard error. --score-chars all scores the rest",
        )


def overfitting_of(evaluations: dict[int, dict[str, Any]], best: int | None) -> str | None:
    """Return a sentence if the validation loss has risen since the best step while the training loss has fallen.

    evaluations: the records of the log by step.
    """
    last = max(evaluations)
    best = last if best is None else best
    val = evaluations[last]["val_loss"] - evaluations[best]["val_loss"]
    train = evaluations[last].get("mean_train_loss", math.nan) - evaluations[best].get("mean_train_loss", math.nan)
    if not (val > NOISE and train < 0):
        return None
    return (
        f"overfitting: since step {best} the validation loss has risen by {val:.4f} and the training loss has fallen "
        f"by {-train:.4f}; the checkpoint is from step {best}. Train on more text, a smaller model, fewer steps, or "
        "with more --dropout or --weight-decay"
    )


def _print_evaluations(
    console: Console,
    evaluations: dict[int, dict[str, Any]],
    config: TrainConfig,
    progress: Progress,
    val_characters: int,
) -> None:
    """Print the losses at the best and the last step, and whether the run stopped early."""
    val = {step: r["val_loss"] for step, r in evaluations.items()}
    part = f", first {plural(config.eval_chars, 'character')}" if 0 < config.eval_chars < val_characters else ""
    table = Table("step", "training loss", f"validation loss{part}, in {config.dtype}")
    best, last = progress.best_step, max(val)
    train = {s: evaluations[s].get("mean_train_loss", math.nan) for s in (best, last) if s is not None}
    for step, loss in train.items():
        name = f"{step} (best)" if step == best else f"{step} (last)"
        table.add_row(name, "" if math.isnan(loss) else f"{loss:.4f}", f"{val[step]:.4f}")
    console.print(table)
    if progress.step < config.steps:
        say(
            console,
            f"stopped early at step {progress.step} of {config.steps}: the validation loss has not improved in "
            f"{plural(config.patience, 'evaluation')} since step {best}",
        )


def about_mixture(losses: dict[str, float], is_mixed: bool, out: Path) -> str:
    """Return what the checkpoint does with the counts, and why."""
    gain = losses["streamed"] - losses["mixed"]
    change = f"{'lowers' if gain >= 0 else 'raises'} the loss by {abs(gain):.4f} nats"
    if is_mixed:
        return f"{out / 'best'} mixes the network with the counts, which {change}"
    mixing = f"--resume --mixed mixes it with the counts, which {change} but improves no texts"
    return f"{out / 'best'} is the network alone. {mixing}"


def verdict(losses: dict[str, float], overfits: bool = False) -> str | None:
    """Return a warning that names a baseline if the model is no better than it, else None.

    overfits: whether longer training would make the model worse.
    """
    longer = "on more text" if overfits else "longer, with more --minutes or a larger --preset, or on more text"
    loss = min(losses["whole"], losses["streamed"])
    for name in filter(losses.__contains__, BASELINES):
        if loss >= losses[name]:
            return (
                f"the network is no better than {LOSSES[name]}: {loss:.4f} nats on the validation split, {name} "
                f"{losses[name]:.4f}. Train {longer}; a large model of a small text memorizes it instead, and a "
                "validation split unlike the training split cannot be predicted"
            )
    return None
