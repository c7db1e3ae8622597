"""TensorBoard event files, read by TensorBoard itself, against the log."""

import sys

import pytest

from service import installing
from tests.helpers import call
from tests.training.runs import crash, events, resume, start, tiny
from training.run.log import read_log

NAMES = ("train_loss", "val_loss", "muon_lr", "whole", "kneser_ney")


def scalars(out):
    """Name -> [(step, value)]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = EventAccumulator(str(out / "tensorboard"))
    files.Reload()
    return {name: [(event.step, event.value) for event in files.Scalars(name)] for name in NAMES}


def logged(out):
    return {name: [(r["step"], pytest.approx(r[name])) for r in events(out) if name in r] for name in NAMES}


@pytest.mark.parametrize("stop_at", [None, 8, 19])
def test_event_files_equal_the_log(tmp_path, stop_at):
    """Also after a crash and a resume; at 8, the crash is between an evaluation and the next save."""
    config, out = tiny(tmp_path, dtype="float32", tensorboard=True), tmp_path / "out"
    if stop_at is None:
        start(config, out)
    else:
        with crash(stop_at):
            start(config, out)
        resume(out)
    found = scalars(out)
    assert [step for step, _ in found["train_loss"]] == [3, 6, 9, 12, 15, 18, 21, 24]
    assert [step for step, _ in found["val_loss"]] == [8, 16, 24]
    assert found == logged(out)
    assert len(list((out / "tensorboard").iterdir())) == 1


def test_samples_may_have_characters_at_which_lines_are_split(tmp_path):
    (tmp_path / "text.txt").write_text("a\u2028b\u2029c\x85" * 400)
    start(tiny(tmp_path), tmp_path / "out")
    samples = [record["sample"] for record in read_log(tmp_path / "out") if "sample" in record]
    assert {"\u2028", "\u2029", "\x85"} <= set("".join(samples))


def test_missing_tensorboard_is_reported_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert call(["train", "--tensorboard", "--out", tmp_path / "out"]) == 1
    error = f"error: --tensorboard needs the package tensorboard: {installing('tensorboard')}\n"
    assert error in capsys.readouterr().err and not (tmp_path / "out").exists()
