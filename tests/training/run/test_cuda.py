"""Training on a GPU beside the same run on a CPU: texts, records and teachers; resumed; in several processes.

With -m slow the same tests run on a CPU; make gpu-check runs them on a GPU.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.training.run.test_distributed import RUN, TEXT, TINY, losses, run_alone
from tests.training.runs import train_in_two

DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.cuda)]
CLOSE = 5e-3  # nats: float32 without TF32, summed in another order, over 40 steps


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """The folder of the texts and of a run of each kind; their flags, without --device and --out."""
    folder = tmp_path_factory.mktemp("on-cpu")
    (folder / "text.txt").write_text(TEXT)
    names = [f"{a}{b}{c}" for a in "bdgk" for b in "aeiou" for c in ("b", "dd", "rik")]
    (folder / "names.txt").write_text("\n".join(names))
    common = [*TINY, *RUN, "--dtype", "float32", "--log-every", "1"]
    kinds = {
        "text": ["--data", str(folder / "text.txt"), *common],
        "records": ["--data", str(folder / "names.txt"), "--records", *common],
        "student": ["--data", str(folder / "text.txt"), "--teachers", str(folder / "text"), "--seed", "1", *common],
    }
    for name, flags in kinds.items():
        run_alone(*flags, "--device", "cpu", "--out", str(folder / name))
    return folder, kinds


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["text", "records", "student"])
def test_losses_are_those_of_a_cpu(on_cpu, tmp_path, device, kind):
    folder, kinds = on_cpu
    run_alone(*kinds[kind], "--device", device, "--out", str(tmp_path / "out"))
    assert losses(tmp_path / "out") == pytest.approx(losses(folder / kind), abs=CLOSE)


@pytest.mark.parametrize("device", DEVICES)
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(on_cpu, tmp_path, device):
    folder, kinds = on_cpu
    out = tmp_path / "out"
    flags = [*kinds["records"], "--device", device, "--save-seconds", "0", "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "training", "train", *flags, "--threads", "1"])
    while not (out / "last").is_dir() or len(losses(out)) < 7:
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert len(losses(out)) < 40, "it was stopped before its end"
    run_alone("--resume", "--out", str(out))
    assert losses(out) == pytest.approx(losses(folder / "records"), abs=CLOSE)


@pytest.mark.parametrize("device", DEVICES)
def test_two_processes_have_the_losses_of_one(on_cpu, tmp_path, device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each process")
    folder, kinds = on_cpu
    train_in_two(*kinds["text"], "--device", device, "--out", str(tmp_path / "out"))
    assert losses(tmp_path / "out") == pytest.approx(losses(folder / "text"), abs=CLOSE)
