"""The training loop. `Run.train` takes all steps of a run, `Run.step` takes one, and `Run.loss` is the loss it lowers.

A run that is killed at any moment and resumed on the same CPU ends with the same bytes as an uninterrupted run. A run
on a GPU continues from the same state, but some of torch's sums have no fixed order there.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
import zlib
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from service.model.checkpoint import Checkpoint
from service.model.gpt import GPT
from service.text.model import TextModel
from training.measure.counts import MAX_COUNTED, baselines
from training.measure.losses import piece_loss, sampled_scores
from training.messages import plural, say
from training.model.device import autocast
from training.model.fused import FusedForward
from training.model.loading import open_model
from training.run.curves import draw_curves
from training.run.progress import ProgressView, print_report, show_forwards
from training.run.speed import matmul_peak
from training.run.state import ESTIMATE_STEPS, STOPPING, RunState, catch_signals
from training.text.batches import IGNORED, Part, micro_batches, packed, two_halves
from training.text.records import separator_between

SAMPLED_RECORDS = 5  # records sampled at each evaluation


class Run(RunState):
    """One run and its training steps."""

    def train(self, console: Console) -> None:
        """Train from the current step to the end.

        Raises:
            DivergedError: the loss, the gradient or a weight is not finite. OUT/last holds an earlier step.
            StorageError: the folder cannot be written. The last save is intact.
            InterruptedRun: a signal in STOPPING was received. The run has been saved.
        """
        config, progress = self.config, self.progress
        console = console if self.world.is_main else Console(quiet=True)
        self.introduce(console)
        self.check_forward(console)
        with self.writing(), catch_signals() as self.received, ProgressView(console, config) as view:
            self.save()
            while True:
                if self.evaluation_is_due:
                    self.save()  # a failing evaluation must not cost any steps
                    view.show_evaluation(progress, self.evaluate())
                if progress.step and config.keep_every and progress.step % config.keep_every == 0:
                    self.save_served(f"step-{progress.step:08}", self.model, {})
                if progress.step == config.steps or progress.is_out_of_patience(config):
                    break
                loss = self.step()
                view.show_step(progress, loss)
                if len(self.step_seconds) == ESTIMATE_STEPS and self.world.is_main:
                    say(console, self.estimate(statistics.median(self.step_seconds)))
                if progress.step % config.log_every == 0:
                    self.log_losses()
                if self.stopped or self.save_is_due:
                    self.save()
                if self.stopped:
                    if self.world.is_main:
                        draw_curves(self.out)
                    raise self.interrupted(self.stopped)
            self.finish(console)

    @property
    def evaluation_is_due(self) -> bool:
        step, at_end = self.progress.step, self.progress.step == self.config.steps
        is_regular = step % self.config.eval_every == 0 and (step > 0 or self.lineage is not None)
        return step != self.progress.evaluated_step and (is_regular or at_end)

    def step(self) -> float:
        """Take one optimizer step and return the loss before it."""
        started, cpu_started = time.monotonic(), time.process_time()
        config, progress = self.config, self.progress
        self.gradients.all.zero_()
        # Seed, step and process alone decide the masks of dropout, so a resumed run draws the same ones.
        torch.manual_seed(zlib.crc32(f"{config.seed} {progress.step} {self.world.rank}".encode()))
        parts, count = self.next_parts()
        groups, each = (two_halves(parts), self.halves.map) if self.halves else ([[part] for part in parts], map)
        for loss in each(lambda group: self.learn(group, count), groups):
            self.gradients.extra[0] += loss
        value, norm, cpu_seconds = self.reduce()
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise self.diverged(progress.step, f"loss {value}, gradient norm {norm}")
        self.optimizers.step(progress.step, progress.position / self.sampler.per_epoch)
        progress.count_step(value, count, self.sampler.position, cpu_seconds)
        self.cpu_seconds = time.process_time() - cpu_started
        self.step_seconds.append(time.monotonic() - started)
        progress.elapsed_seconds += self.step_seconds[-1]
        return value

    def next_parts(self) -> tuple[list[Part], int]:
        """Return this process's micro-batches of the next batch, and the number of targets in the whole batch."""
        config, world = self.config, self.world
        idx, targets = self.sampler.next_batch(self.rows)
        if not config.records:
            window = config.window_at(self.progress.step)
            idx, targets = idx.reshape(-1, window), targets.reshape(-1, window)
        count, own = int((targets != IGNORED).sum()), slice(world.rank, None, world.size)
        number = config.accumulate * (2 if self.halves else 1)
        if config.records and isinstance(self.forward, FusedForward):
            return packed(idx[own], targets[own], number), count
        return list(micro_batches(idx[own], targets[own], config.tokens_per_step // (world.size * number))), count

    def learn(self, parts: list[Part], count: int) -> Tensor:
        """Add the gradients of the parts' loss, summed and divided by `count` targets, and return that loss."""
        total = torch.zeros((), device=self.device)
        for idx, targets, *lengths in parts:
            loss = self.loss(self.to_device(idx), self.to_device(targets), *map(torch.from_numpy, lengths))
            total = total + loss / count
        total.backward()
        return total.detach()

    def loss(self, idx: Tensor, targets: Tensor, *lengths: Tensor) -> Tensor:
        """Return the summed loss of idx (B, T) against targets (B, T), or against the teachers if the run has any.

        Positions whose target is IGNORED do not count. lengths: lengths of packed rows, an argument of FusedForward.
        """
        with autocast(self.config):
            logits = self.forward(idx, *lengths)  # (B, T, V)
        if self.teachers:
            expected = self.teachers(idx, *lengths) * (targets != IGNORED)[..., None]  # (B, T, V)
            return F.cross_entropy(logits.float().flatten(0, 1), expected.flatten(0, 1), reduction="sum")
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")

    def reduce(self) -> tuple[float, float, float]:
        """Sum gradients, losses and CPU seconds over the processes, and clip the gradients.

        The same call shares signals and due saves, so that all processes act on them at the same step. Returns the
        loss, the gradients' norm before clipping, and the CPU seconds of the previous step.
        """
        flat, config = self.gradients, self.config
        save_is_due = time.monotonic() - self.saved_at > config.save_seconds
        signals = [number in self.received for number in STOPPING]
        flat.extra[1:] = self.to_device(np.array([self.cpu_seconds, save_is_due, *signals], dtype=np.float32))
        self.world.all_reduce_(flat.all)
        norm = flat.clip_(config.grad_clip)
        values = torch.cat((norm[None], flat.extra)).tolist()  # the only device synchronization of a step
        norm_value, loss, cpu_seconds, save_is_due, *are_received = values
        self.stopped = next(itertools.compress(STOPPING, are_received), None)
        self.save_is_due = bool(save_is_due)
        return loss, norm_value, cpu_seconds

    def evaluate(self) -> dict[str, Any]:
        """Measure the validation loss, save the weights if they are the best so far, and return the logged record."""
        progress, model = self.progress, self.model
        model.eval()
        val_loss = self.validation_loss(model)
        if not math.isfinite(val_loss):
            raise self.diverged(progress.step - 1, f"validation loss {val_loss}")
        progress.evaluated_step = progress.step
        record = {"event": "evaluation", "step": progress.step, "val_loss": val_loss}
        if steps := progress.interval_steps:
            record |= {"mean_train_loss": progress.interval_loss_sum / steps, "mean_of_steps": steps}
            progress.interval_loss_sum, progress.interval_steps = 0.0, 0
        if self.config.sample_chars and self.world.is_main:
            record["sample"] = self.sample(model)
        if progress.best_val_loss is None or val_loss < progress.best_val_loss:
            progress.best_step, progress.best_val_loss = progress.step, val_loss
            progress.best_elapsed_seconds, progress.best_cpu_seconds = progress.elapsed_seconds, progress.cpu_seconds
            progress.best_characters = progress.characters
            self.save_served("best", model, {"val": val_loss})
        self.log(record)
        self.model.train()
        return record

    def sample(self, model: GPT) -> str:
        """Return the beginning of a text, or some records."""
        corpus, fields = self.corpus, {"max_tokens": self.config.sample_chars, "seed": self.config.seed}
        text = TextModel(corpus.tokenizer, corpus.record_end, model.config.receptive_field)
        with open_model(model, text, slots=SAMPLED_RECORDS) as served:
            if corpus.record_end is not None:
                records = served.generate(n=SAMPLED_RECORDS, **fields).texts
                return separator_between(corpus.separator, corpus.record_end).join(records)
            first = "\n" if "\n" in corpus.tokenizer else corpus.tokenizer.decode([int(corpus.train[0])])
            return first + served.generate(first, **fields).text

    def validation_loss(self, model: GPT) -> float:
        """Return the mean loss over the validation split, or its first eval_chars. The processes share the work."""
        ids, world = self.corpus.val, self.world
        starts, lengths = self.val_pieces
        count = len(lengths)
        if self.config.eval_chars:
            count = max(1, int(np.searchsorted(np.cumsum(lengths), self.config.eval_chars, "right")))
        own = world.shard(count)
        with autocast(self.config):  # finish() scores the best weights in fp32, as they are served
            part = piece_loss(model, ids, starts[own], lengths[own]) * int(lengths[own].sum())
        return world.all_reduce_(torch.tensor(part, dtype=torch.float64)).item() / int(lengths[:count].sum())

    def finish(self, console: Console) -> None:
        """Score the best weights and the baselines on the validation split, save, and print the report."""
        self.progress.finished = True
        if not self.world.is_main:
            self.save()
            return
        best = Checkpoint.read(self.out / "best").load_model(self.device)
        corpus, val = self.corpus, self.corpus.val
        count = min(self.scored_characters(self.progress.characters), len(val))
        with show_forwards(console, "scoring the validation split", self.scorings * count) as advance:
            scores = sampled_scores(best, val, count, corpus.records is not None, corpus.train, advance)
        if not all(map(math.isfinite, scores.losses.values())):
            raise self.diverged(self.progress.best_step or 0, f"validation loss {scores.losses['whole']}")
        self.scored = {"scored_characters": scores.characters}
        if MAX_COUNTED < len(corpus.train):
            self.scored["counted_characters"] = MAX_COUNTED
            trained = plural(len(corpus.train), "training character")
            say(console, f"counting n-grams in a sample: {MAX_COUNTED:,} of {trained}")
        vocab_size, records = corpus.tokenizer.vocab_size, corpus.records is not None
        losses = {**scores.losses, **baselines(corpus.train, val, vocab_size, records, scores.places)}
        if scores.standard_error is not None:
            self.scored["standard_error"] = scores.standard_error
        self.save_served("best", best, losses, self.progress.at_best)
        rate = self.progress.characters / self.progress.elapsed_seconds
        devices = 1 if self.device.type == "cpu" else self.world.size
        peak = matmul_peak(self.device, getattr(torch, self.config.dtype)) * devices
        share = rate * self.flops_per_character(self.mean_window) / peak
        speed = {"characters_per_second": rate, "matmul_peak_flops": peak, "peak_share": share}
        self.log({"event": "end", "step": self.progress.step, **losses, **self.scored, **speed})
        draw_curves(self.out)
        self.save()
        print_report(console, self.config, self.progress, losses, speed, self.out, scores, len(val) - 1)
