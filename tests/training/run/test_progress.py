"""The lines of progress and the final report."""

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from training.config import TrainConfig
from training.measure.losses import Scores
from training.run.log import read_log
from training.run.progress import ProgressView, print_report, show_forwards
from training.run.saved import Progress

LOSSES = {"uniform": 3.0, "unigram": 2.5, "kneser_ney": 2.2, "whole": 2.0, "streamed": 1.9, "mixed": 1.8}


def write_log(out, train, val):
    records = [{"event": "train", "step": s, "train_loss": x, "muon_lr": 0.01} for s, x in train.items()]
    for step, loss in val.items():
        mean = {"mean_train_loss": train[step], "mean_of_steps": 10} if step in train else {}
        records.append({"event": "evaluation", "step": step, "val_loss": loss, **mean})
    (out / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return records


def report(out, steps, losses=LOSSES, scored=5000, error=None, **changes):
    val = {r["step"]: r["val_loss"] for r in read_log(out) if r["event"] == "evaluation"}
    best = min(val, key=val.get)
    progress = Progress(step=max(val), best_step=best, best_val_loss=val[best], elapsed_seconds=1.0)
    speed = {"characters_per_second": 1e4, "matmul_peak_flops": 1e11, "peak_share": 0.5}
    console = Console(record=True, width=300)
    config = TrainConfig(steps=steps, eval_every=10, **changes)
    scores = Scores(losses, scored, error, np.zeros(0))
    print_report(console, config, progress, losses, speed, out, scores, 5000)
    return console.export_text()


def test_the_report_has_the_training_loss_of_each_evaluation(tmp_path):
    write_log(tmp_path, {5: 3.0, 10: 2.5, 15: 1.5, 20: 1.25}, {10: 2.1, 20: 2.2})
    output = report(tmp_path, steps=20)
    assert "│ 10 (best) │ 2.5000        │ 2.1000 " in output and "│ 20 (last) │ 1.2500        │ 2.2000 " in output
    overfitting = "since step 10 the validation loss has risen by 0.1000 and the training loss has fallen by 1.2500"
    assert f"overfitting: {overfitting}" in output and "stopped" not in output
    assert "validation loss, in auto " in output
    assert "validation loss, first 4,999 characters, in auto " in report(tmp_path, steps=20, eval_chars=4999)
    assert "loss per character, validation split " in output
    assert "│ whole      │ this model, in windows " in report(tmp_path, steps=20) and "±" not in report(
        tmp_path, steps=20
    )
    sampled = report(tmp_path, steps=20, scored=999, error=0.0123)
    assert "2.0000 ± 0.0123 " in sampled and "on a sample: 999 of 5,000 characters; ±: standard error" in sampled


def test_scoring_says_how_far_it_is_and_what_is_left(monkeypatch):
    monkeypatch.setattr("training.run.progress.LINE_SECONDS", 0)
    console = Console(record=True, width=300)
    with show_forwards(console, "scoring", 2000) as advance:
        advance(500)
        advance(1800)
    assert re.findall(r"scoring: (.*) of 2,000 characters, \d+ s left", console.export_text()) == ["500", "2,000"]


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ({10: 2.0, 20: 1.0}, {10: 2.1, 20: 2.0}),  # still learning
        ({10: 2.0, 20: 2.1}, {10: 2.1, 20: 2.2}),  # diverging
        ({}, {10: 2.1, 20: 2.2}),  # no training loss logged
    ],
)
def test_overfitting_is_reported_only_if_training_loss_falls_and_validation_loss_rises(tmp_path, train, val):
    write_log(tmp_path, train, val)
    assert "overfitting:" not in report(tmp_path, steps=20)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (3.1, "no better than guessing all characters alike: 3.1000 nats on the validation split, uniform 3.0000."),
        (2.7, "no better than guessing by how often each character occurs: 2.7000"),
        (
            2.3,
            "up to 8 characters in a row: 2.3000 nats on the validation split, kneser_ney 2.2000. Train longer",
        ),
        (2.1, None),
    ],
)
def test_weights_that_are_no_better_than_a_baseline_are_reported(tmp_path, loss, said):
    write_log(tmp_path, {10: 2.0}, {10: loss})
    output = report(tmp_path, steps=10, losses={**LOSSES, "whole": loss, "streamed": loss + 0.1})
    assert (said in output) if said else "no better than" not in output


def test_the_report_says_whether_the_checkpoint_mixes_and_what_that_changes(tmp_path):
    write_log(tmp_path, {10: 2.0}, {10: 2.0})
    alone = report(tmp_path, steps=10)
    assert (
        "is the network alone. --resume --mixed mixes it with the counts, which lowers the loss by 0.1000 nats but"
        in alone
    )
    mixed = report(tmp_path, steps=10, mixed=True, losses={**LOSSES, "mixed": 1.95})
    assert "mixes the network with the counts, which raises the loss by 0.0500 nats" in mixed


def test_a_run_that_overfits_is_not_told_to_train_longer(tmp_path):
    """It was told both, in two lines."""
    write_log(tmp_path, {10: 2.0, 20: 1.0}, {10: 2.3, 20: 2.5})
    output = report(tmp_path, steps=20, losses={**LOSSES, "whole": 2.3, "streamed": 2.4})
    assert "overfitting: since step 10" in output and "Train on more text; a large model" in output
    assert "Train longer" not in output


def test_runs_that_counted_bigrams_are_shown_as_before(tmp_path):
    write_log(tmp_path, {10: 2.0}, {10: 2.0})
    losses = {"uniform": 3.0, "unigram": 2.5, "bigram": 2.2, "whole": 2.3, "streamed": 2.2, "mixed": 2.1}
    assert "no better than counting pairs of characters: 2.2000" in report(tmp_path, steps=10, losses=losses)


def test_progress_is_printed_where_there_is_no_terminal(monkeypatch):
    now = 0.0
    monkeypatch.setattr("training.run.progress.time.monotonic", lambda: now)
    console = Console(file=io.StringIO(), width=300)
    with ProgressView(console, TrainConfig(steps=100)) as view:
        for step in range(1, 36):
            now += 1.0
            view.show_step(Progress(step=step, characters=2048 * step, elapsed_seconds=now), 2.0)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["10/100", "20/100", "30/100"]
    assert lines[0] == "step 10/100  loss 2.000 in 10 steps · 2,048 characters/s"


def test_the_printed_loss_is_that_of_the_last_steps_alone():
    """It once was a slow average from the first loss on: 0.24 where the report said 0.0016."""
    console = Console(file=io.StringIO(), width=300)
    with ProgressView(console, TrainConfig(steps=200)) as view:
        for step in range(1, 201):
            view.show_step(Progress(step=step, characters=step, elapsed_seconds=1.0), 4.0 if step <= 150 else 1.0)
        figures = view.tasks[0].fields["figures"]
    assert figures.startswith("loss 1.000 in 50 steps")
