"""TensorBoard event files, read by TensorBoard itself, against the log."""

import json
import random
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers import call
from tests.training.runs import crash, resume, start
from training.config import TrainConfig

NAMES = ("train_loss", "val_loss", "muon_lr", "whole", "bigram")


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text.txt").write_text("".join(random.Random(0).choices(["a cat ", "sat\n"], k=100)))
    shape = {"block_size": 8, "n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 8}
    run = {"steps": 12, "batch_size": 2, "warmup_steps": 2, "eval_every": 4, "log_every": 2, "sample_chars": 5}
    return TrainConfig(data=str(tmp_path / "text.txt"), threads=1, dtype="float32", tensorboard=True, **shape, **run)


def scalars(out):
    """Name -> [(step, value)]."""
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in NAMES}


def logged(out):
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {name: [(r["step"], pytest.approx(r[name])) for r in records if name in r] for name in NAMES}


@pytest.mark.parametrize("stop_at", [None, 4, 9])
def test_event_files_equal_the_log(tmp_path, config, stop_at):
    """Also after a crash and a resume; at 4, the crash is between an evaluation and the next save."""
    out = tmp_path / "out"
    if stop_at is None:
        start(config, out)
    else:
        with crash(stop_at):
            start(config, out)
        resume(out)
    found = scalars(out)
    assert [step for step, _ in found["train_loss"]] == [2, 4, 6, 8, 10, 12]
    assert [step for step, _ in found["val_loss"]] == [4, 8, 12]
    assert found == logged(out)
    assert len(list((out / "tensorboard").iterdir())) == 1


def test_missing_tensorboard_is_reported_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert call(["train", "--tensorboard", "--out", tmp_path / "out"]) == 1
    error = "error: --tensorboard needs the package tensorboard; pip install -e '.[tensorboard]'"
    assert error in capsys.readouterr().err and not (tmp_path / "out").exists()
