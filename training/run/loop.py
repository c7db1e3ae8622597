"""The training loop: `train` takes all steps of a run, `step` takes one, and `loss` is the loss that it lowers.

A run that is killed at any moment and resumed on the same CPU ends with the same bytes as an uninterrupted run. A run
on a GPU continues from the same state, but some of torch's sums have no fixed order there.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from service.model.checkpoint import Checkpoint
from service.model.counts import MAX_COUNTED
from service.model.gpt import GPT
from service.text.model import TextModel
from training.fit.warnings import warnings_of
from training.measure.counts import baselines
from training.measure.losses import Scores, piece_loss, sampled_scores
from training.measure.mixture import fit_mixture
from training.messages import plural, say
from training.model.device import autocast
from training.model.fused import FusedForward
from training.model.loading import open_model
from training.model.optim import lr_scale
from training.model.selfcheck import NOT_SERVABLE, first_difference, is_servable
from training.run.estimate import Estimate
from training.run.folder import RunFolder
from training.run.progress import ProgressView, print_report, show_forwards
from training.run.run import ESTIMATE_STEPS, Run
from training.run.signals import STOPPING, catch_signals
from training.text.batches import IGNORED, Part, two_halves
from training.text.records import separator_between

SAMPLED_RECORDS = 5  # records sampled at each evaluation


def train(run: Run, folder: RunFolder, console: Console) -> None:
    """Train from the current step to the end.

    Raises:
        DivergedError: the loss, the gradient or a weight is not finite. OUT/last holds an earlier step.
        StorageError: the folder cannot be written. The last save is intact.
        InterruptedRun: a signal in STOPPING was received. The run has been saved.
    """
    config, progress, estimate = run.config, run.progress, Estimate(run)
    console = console if folder.is_main else Console(quiet=True)
    for line in introduction(run):
        say(console, line)
    check_forward(run, console)
    with folder.writing(), catch_signals() as run.received, ProgressView(console, config) as view:
        folder.save()
        while True:
            if evaluation_is_due(run):
                folder.save()  # a failing evaluation must not cost any steps
                view.show_evaluation(progress, evaluate(run, folder))
            if keeping_is_due(run):
                folder.save_served(f"step-{progress.step:08}", run.model, {})
            if progress.step == config.steps or progress.is_out_of_patience(config):
                break
            value = step(run, save_is_due=time.monotonic() - folder.saved_at > config.save_seconds)
            view.show_step(progress, value)
            if len(run.step_seconds) == ESTIMATE_STEPS and folder.is_main:
                say(console, estimate.line(statistics.median(run.step_seconds)))
            if progress.step % config.log_every == 0:
                log_losses(run, folder)
            if run.stopped or run.save_is_due:
                folder.save()
            if run.stopped:
                folder.draw()
                raise folder.interrupted()
        finish(run, folder, console)


def step(run: Run, save_is_due: bool = False) -> float:
    """Take one optimizer step and return the loss before it.

    The processes share what each has received and whether a save is due, so that all act on it at the same step.
    """
    config, progress, flat = run.config, run.progress, run.gradients
    started, cpu_started = time.monotonic(), time.process_time()
    # Seed, step and process alone decide the masks of dropout, so a resumed run draws the same ones.
    torch.manual_seed(zlib.crc32(f"{config.seed} {progress.step} {run.world.rank}".encode()))

    # Forward and backward, in two halves at once or one part after another.
    flat.all.zero_()
    parts, count = run.next_parts()
    groups, each = (two_halves(parts), run.halves.map) if run.halves else ([[part] for part in parts], map)
    for part in each(lambda group: learn(run, group, count), groups):
        flat.extra[0] += part

    # Sum gradients, loss and what the processes share, and clip.
    shared = [run.cpu_seconds, save_is_due, *(number in run.received for number in STOPPING)]
    flat.extra[1:] = run.to_device(np.array(shared, dtype=np.float32))
    run.world.all_reduce_(flat.all)
    norms = flat.clip_(config.grad_clip)
    # The only device synchronization of a step, unless counts teach.
    norm, value, cpu_seconds, is_due, *are_received = torch.cat((norms[None], flat.extra)).tolist()
    run.stopped = next(itertools.compress(STOPPING, are_received), None)
    run.save_is_due = bool(is_due)
    if not (math.isfinite(value) and math.isfinite(norm)):
        raise run.diverged(progress.step, f"loss {value}, gradient norm {norm}")

    run.optimizers.step(progress.step, progress.position / run.sampler.per_epoch)
    progress.count_step(value, count, run.sampler.position, cpu_seconds)
    run.cpu_seconds = time.process_time() - cpu_started
    run.step_seconds.append(time.monotonic() - started)
    progress.elapsed_seconds += run.step_seconds[-1]
    return value


def learn(run: Run, parts: list[Part], count: int) -> Tensor:
    """Add the gradients of the parts' loss, summed and divided by `count` targets, and return that loss."""
    total = torch.zeros((), device=run.device)
    for idx, targets, *lengths in parts:
        summed = loss(run, run.to_device(idx), run.to_device(targets), *map(torch.from_numpy, lengths))
        total = total + summed / count
    total.backward()
    return total.detach()


def loss(run: Run, idx: Tensor, targets: Tensor, *lengths: Tensor) -> Tensor:
    """Return the summed loss of idx (B, T) against targets (B, T), or against the teachers if the run has any.

    With `counted`, the counts' predictions replace a share of each target. Positions whose target is IGNORED do not
    count. lengths: lengths of packed rows, an argument of FusedForward.
    """
    with autocast(run.config):
        logits = run.forward(idx, *lengths)  # (B, T, V)
    logits, ids, is_scored = logits.float().flatten(0, 1), targets.flatten(), targets.flatten() != IGNORED
    if not (run.teachers or run.predictions):
        return F.cross_entropy(logits, ids, ignore_index=IGNORED, reduction="sum")
    expected = predicted = run.teachers(idx, *lengths).flatten(0, 1) if run.teachers else None  # (B·T, V)
    if run.predictions:
        share = run.config.counted_at(run.progress.step)
        ends = lengths[0].cumsum(0) if lengths else torch.arange(idx.size(1), idx.numel() + 1, idx.size(1))
        starts = np.array([0, *ends[:-1].tolist()])
        predicted = run.to_device(run.predictions.after(idx.flatten().cpu().numpy(), starts)).mul_(share)
        if expected is not None:
            predicted.add_(expected, alpha=1 - share)
        else:  # in place, as it may be large
            rest = torch.full_like(predicted[:, :1], 1 - share)
            predicted.scatter_add_(1, ids.where(is_scored, 0)[:, None], rest)
    assert predicted is not None
    return F.cross_entropy(logits, predicted.mul_(is_scored[:, None]), reduction="sum")


def evaluation_is_due(run: Run) -> bool:
    step, at_end = run.progress.step, run.progress.step == run.config.steps
    is_regular = step % run.config.eval_every == 0 and (step > 0 or run.lineage is not None)
    return step != run.progress.evaluated_step and (is_regular or at_end)


def keeping_is_due(run: Run) -> bool:
    every = run.config.keep_every
    return every > 0 and run.progress.step > 0 and run.progress.step % every == 0


def evaluate(run: Run, folder: RunFolder) -> dict[str, Any]:
    """Measure the validation loss, save the weights if they are the best so far, and return the logged record."""
    progress = run.progress
    run.model.eval()
    val_loss = validation_loss(run)
    if not math.isfinite(val_loss):
        raise run.diverged(progress.step - 1, f"validation loss {val_loss}")
    progress.evaluated_step = progress.step
    record = {"event": "evaluation", "step": progress.step, "val_loss": val_loss}
    if steps := progress.interval_steps:
        record |= {"mean_train_loss": progress.interval_loss_sum / steps, "mean_of_steps": steps}
        progress.interval_loss_sum, progress.interval_steps = 0.0, 0
    if run.config.sample_chars and folder.is_main:
        record["sample"] = sample(run)
    if progress.best_val_loss is None or val_loss < progress.best_val_loss:
        progress.set_best(val_loss)
        folder.save_served("best", run.model, {"val": val_loss})
    folder.log(record)
    run.model.train()
    return record


def validation_loss(run: Run) -> float:
    """Return the mean loss over the validation split, or its first eval_chars. The processes share the work."""
    ids, world = run.corpus.val, run.world
    starts, lengths = run.val_pieces
    count = len(lengths)
    if run.config.eval_chars:
        count = max(1, int(np.searchsorted(np.cumsum(lengths), run.config.eval_chars, "right")))
    own = world.shard(count)
    with autocast(run.config):  # finish() scores the best weights in fp32, as they are served
        part = piece_loss(run.model, ids, starts[own], lengths[own]) * int(lengths[own].sum())
    return world.all_reduce_(torch.tensor(part, dtype=torch.float64)).item() / int(lengths[:count].sum())


def sample(run: Run) -> str:
    """Return the beginning of a text, or some records."""
    corpus, fields = run.corpus, {"max_tokens": run.config.sample_chars, "seed": run.config.seed}
    text = TextModel(corpus.tokenizer, corpus.record_end, run.model.config.receptive_field)
    with open_model(run.model, text, slots=SAMPLED_RECORDS) as served:
        if corpus.record_end is not None:
            records = served.generate(n=SAMPLED_RECORDS, **fields).texts
            return separator_between(corpus.source.separator, corpus.record_end).join(records)
        first = "\n" if "\n" in corpus.tokenizer else corpus.tokenizer.decode([int(corpus.train[0])])
        return first + served.generate(first, **fields).text


def log_losses(run: Run, folder: RunFolder) -> None:
    """Log the mean training loss since the previous call."""
    progress, config = run.progress, run.config
    scale = lr_scale(progress.step - 1, config)
    folder.log({
        "event": "train",
        "step": progress.step,
        "train_loss": progress.loss_sum / progress.loss_steps,
        "muon_lr": config.muon_lr * scale,
        "adamw_lr": config.adamw_lr * scale,
        "characters_per_second": round(progress.characters / progress.elapsed_seconds),
    })  # fmt: skip
    progress.loss_sum, progress.loss_steps = 0.0, 0


def finish(run: Run, folder: RunFolder, console: Console) -> None:
    """Score the best weights and the baselines on the validation split, save, and print the report."""
    run.progress.finished = True
    if not folder.is_main:
        folder.save()
        return
    best = Checkpoint.read(folder.path / "best").load_model(run.device)
    scores = score(run, best, console)
    mixture = fit_mixture(run.corpus.counts, run.corpus.val, scores.each)
    losses = {**scores.losses, **counted_losses(run, folder, scores), "mixed": mixture.loss}
    folder.scored |= {"scored_characters": scores.characters}
    if scores.standard_error is not None:
        folder.scored["standard_error"] = scores.standard_error
    counts = mixture.counts if run.config.mixed else None
    folder.save_served("best", best, losses, run.progress.at_best, counts)
    speed = Estimate(run).speed()
    folder.log({"event": "end", "step": run.progress.step, **losses, **folder.scored, **speed})
    folder.draw()
    folder.save()
    print_report(console, run.config, run.progress, losses, speed, folder.path, scores, len(run.corpus.val) - 1)


def score(run: Run, model: GPT, console: Console) -> Scores:
    """Return the losses of the final report."""
    corpus, estimate = run.corpus, Estimate(run)
    count = min(estimate.scored_characters(run.progress.characters), len(corpus.val))
    with show_forwards(console, "scoring the validation split", estimate.scorings * count) as advance:
        scores = sampled_scores(model, corpus.val, count, corpus.records is not None, corpus.train, advance)
    if not all(map(math.isfinite, scores.losses.values())):
        raise run.diverged(run.progress.best_step or 0, f"validation loss {scores.losses['whole']}")
    return scores


def counted_losses(run: Run, folder: RunFolder, scores: Scores) -> dict[str, float]:
    """Return the losses of the baselines on the characters scored."""
    corpus = run.corpus
    if MAX_COUNTED < len(corpus.train):
        folder.scored["counted_characters"] = MAX_COUNTED
    return baselines(corpus.train, corpus.val, np.flatnonzero(~np.isnan(scores.each)), corpus.counts)


def introduction(run: Run) -> Iterator[str]:
    """Yield the sizes of the text and the run, and before the first step the warnings about them."""
    config, progress, corpus = run.config, run.progress, run.corpus
    steps, num_parameters = config.steps - progress.step, run.model.config.num_parameters
    epochs = f"{steps * run.rows / run.sampler.per_epoch:.3g}"
    in_a_step = plural(run.rows, "record") if config.records else plural(config.tokens_per_step, "character")
    yield (
        f"{corpus.name}: {plural(len(corpus.ids), 'character')}, {plural(corpus.symbols, 'symbol')}; "
        f"{num_parameters:,} parameters; {config.dtype} on {config.device}, "
        f"{plural(run.world.size, 'process')} of {plural(config.threads, 'thread')}; "
        f"{plural(steps, 'step')} of {in_a_step}, "
        f"{epochs} epoch{'' if epochs == '1' else 's'}"
    )
    if progress.step == 0 and run.world.is_main:
        yield from warnings_of(corpus, config, num_parameters)


def check_forward(run: Run, console: Console) -> None:
    """Replace the fast forward by autograd, and print a line, if it does not compute GPT.forward."""
    difference = None
    if isinstance(run.forward, FusedForward):
        difference = first_difference(run.model, run.forward.dtype)
    # This call is also a barrier, because the first save replaces files that every process reads.
    if run.world.all_reduce_(torch.tensor([float(difference is not None)])).item():
        run.forward = run.model
        if run.teachers:
            run.teachers.use_autograd()
    if difference:
        say(console, f"gpt.py has changed: {difference}")
    if run.world.is_main and not is_servable(run.model):
        say(console, NOT_SERVABLE)
