"""Estimate what a run costs: its time, its FLOPs, and how much of the validation split its final report scores."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer

from training.config import MIN_SCORED, SCORED_SHARE
from training.measure.losses import BATCH_CHARS, STRETCH_WINDOWS, piece_loss, sampled_scores
from training.messages import duration, plural
from training.run.run import Run


class Estimate:
    """Estimates of one run. They read it and change nothing."""

    def __init__(self, run: Run):
        self.run = run

    def line(self, step_seconds: float) -> str:
        """Return a sentence about how long the rest of the run takes. Only the main process calls this.

        step_seconds: the time of a step now. Measures an evaluation and a report on a part of the validation split.
        The estimate allows for the growth of the window, which lengthens a step. It leaves out baselines and samples.
        """
        run, config, step, corpus = self.run, self.run.config, self.run.progress.step, self.run.corpus
        seconds_each = self.evaluation_seconds()
        run.model.eval()
        started = time.monotonic()
        count = max(BATCH_CHARS, 2 * STRETCH_WINDOWS * config.block_size)
        reported = sampled_scores(run.model, corpus.val, count, corpus.records is not None)
        seconds_scored = (time.monotonic() - started) / reported.characters
        run.model.train()
        val = len(corpus.val)
        scored = min(val, self.scored_characters(config.steps * config.tokens_per_step))
        evaluated = min(config.eval_chars or val, val) * -(-(config.steps - step) // config.eval_every)
        growth = self.flops_per_character(self.mean_window) / self.flops_per_character(config.window_at(step))
        training = (config.steps - step) * step_seconds * growth + evaluated * seconds_each / run.world.size
        scoring = scored * seconds_scored
        more = f" of {val:,}; --score-chars all scores the rest" if scored < val else ""
        return (
            f"about {duration(training + scoring)} to the end: {duration(training)} of training, {duration(scoring)} "
            f"of scoring {plural(scored, 'validation character')}{more}"
        )

    def evaluation_seconds(self) -> float:
        """Measure on a part of the validation split how long the evaluation of a character takes."""
        run = self.run
        starts, lengths = (part[: max(1, BATCH_CHARS // run.config.block_size)] for part in run.val_pieces)
        run.model.eval()
        started = time.monotonic()
        piece_loss(run.model, run.corpus.val, starts, lengths)
        seconds = time.monotonic() - started
        run.model.train()
        return seconds / int(lengths.sum())

    @property
    def scorings(self) -> int:
        """How often the final report scores each character: 2, in windows and streamed, or 1 if these are the same."""
        run = self.run
        is_same = run.corpus.records is not None and run.val_pieces[1].max() < run.config.block_size
        return 1 if is_same else 2

    def scored_characters(self, trained: int) -> int:
        """Return how many characters of the validation split the final report scores after training on `trained`.

        The number may exceed the length of the split.
        """
        wanted = self.run.config.score_chars
        if wanted == "all":
            return len(self.run.corpus.val)
        if wanted == "auto":
            return max(MIN_SCORED, int(trained * SCORED_SHARE) // self.scorings)
        return int(wanted)

    @property
    def mean_window(self) -> float:
        config = self.run.config
        return sum(config.window_at(config.steps * i // 100) for i in range(100)) / 100

    def flops_per_character(self, window: float) -> float:
        """Return the FLOPs to train on a character, the teachers' forwards in each step included.

        window: the number of characters in a window.
        """
        teachers = self.run.teachers.models if self.run.teachers else []
        taught = sum(flops_per_character(each, window) / 3 for each in teachers)
        return flops_per_character(self.run.model, window) + taught

    def speed(self) -> dict[str, float]:
        """Return the figures of the finished run's speed for its log. Measures the machine's matrix-product peak."""
        run, progress = self.run, self.run.progress
        rate = progress.characters / progress.elapsed_seconds
        devices = 1 if run.device.type == "cpu" else run.world.size
        peak = matmul_peak(run.device, getattr(torch, run.config.dtype)) * devices
        share = rate * self.flops_per_character(self.mean_window) / peak
        return {"characters_per_second": rate, "matmul_peak_flops": peak, "peak_share": share}


def flops_per_character(model: Any, window: float | None = None) -> float:
    """Return the FLOPs per character of the matrix products in a forward and a backward pass.

    model: a module with a `config` that has n_layer, n_embd and block_size.
    window: the characters per window; None: block_size.

    The count follows PaLM (Chowdhery et al. 2022, appendix B): it includes all T² attention scores, and excludes the
    optimizer.
    """
    config = model.config
    linear: int = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    scores: float = config.n_layer * config.n_embd * (window or config.block_size)  # q·k; weights·v has as many
    return 3 * (2 * linear + 2 * 2 * scores)


def matmul_peak(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.1) -> float:
    """Measure square matrix products of several sizes with torch's number of threads; return the highest FLOP/s.

    Each size takes at least `seconds`.
    """
    best = 0.0
    for n in (512, 1024) if device.type == "cpu" else (2048, 4096, 8192):
        a, b = torch.randn(2, n, n, device=device, dtype=dtype)
        timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
        best = max(best, 2 * n**3 / min(timer.blocked_autorange(min_run_time=seconds).times))
    return best
