"""TensorBoard event files, read by TensorBoard itself, against the log."""

import json
import random
import sys

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers import call
from training import jobs
from training.config import TrainConfig
from training.loop import Run

NAMES = ("train_loss", "val_loss", "muon_lr", "whole", "bigram")


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("".join(random.Random(0).choices(["a cat ", "sat\n"], k=100)))
    threads = torch.get_num_threads()
    shape = {"block_size": 8, "n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 8}
    run = {"steps": 12, "batch_size": 2, "warmup_steps": 2, "eval_every": 4, "log_every": 2, "sample_chars": 5}
    yield TrainConfig(data=str(tmp_path / "text.txt"), threads=1, dtype="float32", tensorboard=True, **shape, **run)
    torch.set_num_threads(threads)


def scalars(out):
    """Name -> [(step, value)]."""
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in NAMES}


def logged(out):
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {name: [(r["step"], pytest.approx(r[name])) for r in records if name in r] for name in NAMES}


@pytest.mark.parametrize("stop_at", [None, 4, 9])
def test_event_files_equal_the_log(tmp_path, monkeypatch, config, stop_at):
    """Also after a crash and a resume; at 4, the crash is between a step's log line and its evaluation."""
    out = tmp_path / "out"
    if stop_at is not None:
        with monkeypatch.context() as patch:
            step, evaluate = Run.step, Run.evaluate

            def crash_in_step(run):
                if run.progress.step == stop_at:
                    raise MemoryError
                return step(run)

            def crash_after_evaluation(run):
                evaluate(run)
                raise MemoryError

            if stop_at == 4:
                patch.setattr(Run, "evaluate", crash_after_evaluation)
            else:
                patch.setattr(Run, "step", crash_in_step)
            with pytest.raises(MemoryError):
                jobs.start(config, out, Console(quiet=True))
        jobs.resume(out, {}, Console(quiet=True))
    else:
        jobs.start(config, out, Console(quiet=True))
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
