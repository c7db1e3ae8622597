"""Draw the curves of a run: the losses of its log, the baselines and the learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.run.log import read_log
from training.run.progress import BASELINES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]  # a line of the log
Name = tuple[float, str, str]  # at the right edge: height, text, color

TRAIN_COLOR, VAL_COLOR, BEST_COLOR = "tab:blue", "tab:orange", "tab:green"


def draw_curves(out: Path) -> None:
    """Plot the losses of a run, the baselines and the learning rate in OUT/loss.png."""
    curves(read_log(out)).savefig(out / "loss.png", dpi=120)


def curves(records: list[Record]) -> Figure:
    """Return a figure of the losses with the learning rate below them.

    Each curve and baseline is named at the right edge, at its last value.
    """
    from matplotlib.figure import Figure  # takes half a second to import

    train, val, ends = ([r for r in records if r["event"] == event] for event in ("train", "evaluation", "end"))
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes, rate = figure.subplots(2, sharex=True, height_ratios=(5, 1))
    names = [*_training(axes, train), *_validation(axes, val), *_baselines(axes, ends)]
    shown = [r["train_loss"] for r in train[len(train) // 20 :]] + [r["val_loss"] for r in val]
    if shown:  # the losses of the first steps, and baselines far above, would squeeze the rest
        margin = 0.05 * (max(shown) - min(shown)) + 0.02
        axes.set_ylim(min(shown) - margin, max(shown) + margin)
    _name_at_the_edge(axes, sorted(names))
    axes.set_ylabel("nats per character")
    axes.grid(alpha=0.3)
    rate.plot([r["step"] for r in train], [r["muon_lr"] for r in train], color="gray", lw=1)
    rate.set_ylabel("muon_lr")
    rate.set_ylim(bottom=0)
    rate.grid(alpha=0.3)
    rate.set_xlabel("step")
    return figure


def _training(axes: Axes, train: list[Record]) -> Iterator[Name]:
    if train:
        losses = [r["train_loss"] for r in train]
        axes.plot([r["step"] for r in train], losses, color=TRAIN_COLOR, lw=1)
        yield losses[-1], f"training {losses[-1]:.2f}", TRAIN_COLOR


def _validation(axes: Axes, val: list[Record]) -> Iterator[Name]:
    if val:
        losses, best = [r["val_loss"] for r in val], min(val, key=lambda r: r["val_loss"])
        axes.plot([r["step"] for r in val], losses, "o-", color=VAL_COLOR, ms=4)
        axes.plot(best["step"], best["val_loss"], "*", color=BEST_COLOR, ms=15, ls="none", zorder=3)
        title = f"best validation loss: {best['val_loss']:.3f} nats per character, at step {best['step']} (star)"
        axes.set_title(title, loc="left", fontsize="medium", color=BEST_COLOR)
        yield losses[-1], f"validation {losses[-1]:.2f}", VAL_COLOR


def _baselines(axes: Axes, ends: list[Record]) -> Iterator[Name]:
    for end in ends[-1:]:
        for name in filter(end.__contains__, BASELINES):
            axes.axhline(end[name], color="gray", ls="--", lw=0.8)
            yield end[name], f"{name} {end[name]:.2f}", "dimgray"


def _name_at_the_edge(axes: Axes, names: list[Name]) -> None:
    """Write sorted names at the right edge, at their heights as far as none covers another."""
    low, high = axes.get_ylim()
    spacing = 0.055 * (high - low)
    places = [max(min(height, high), low) for height, _, _ in names]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + spacing)
    for i in reversed(range(len(places))):  # back below the top
        places[i] = min(places[i], high - spacing * (len(places) - 1 - i))
    for place, (height, text, color) in zip(places, names, strict=True):
        arrow = "↑ " if height > high else "↓ " if height < low else ""
        axes.annotate(
            arrow + text, (1.01, place), xycoords=("axes fraction", "data"), color=color, va="center",
            fontsize="small", annotation_clip=False,
        )  # fmt: skip
