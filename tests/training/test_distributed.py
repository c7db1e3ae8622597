"""Data-parallel training in real processes over gloo, started by the run itself and by torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import call

from service.model.checkpoint import Checkpoint
from training.distributed import World

TEXT = "".join(chr(97 + i * i % 23) + (" " if i % 5 == 0 else "") for i in range(4000))
TINY = ["--n-layer", "1", "--n-embd", "16", "--n-head", "2", "--n-kv-head", "1", "--block-size", "16"]
RUN = ["--steps", "40", "--batch-size", "8", "--eval-every", "20", "--sample-chars", "0", "--warmup-steps", "4"]


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def train(*flags: str, start: tuple[str, ...] = ("-m",)) -> list[str]:
    return [sys.executable, *start, "training", "train", *flags]


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}


def run(command: list[str], tmp_path: Path, code: int = 0) -> str:
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(Checkpoint.read(path).load_model().named_parameters())


def losses(out: Path) -> list[float]:
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [record["train_loss"] for record in records if record["event"] == "train"]


def test_losses_do_not_depend_on_processes_or_accumulation(text, tmp_path, monkeypatch):
    """Without dropout, they differ by rounding only; two processes give the same bytes however they are started."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    common = ["--data", str(text), *TINY, *RUN, "--dtype", "float32"]
    variants = {"one": [], "two": ["--processes", "2"], "accumulated": ["--accumulate", "4"]}
    for name, flags in variants.items():
        assert call(["train", *common, *flags, "--out", tmp_path / name]) == 0
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m")
    run(train(*common, "--out", str(tmp_path / "torchrun"), start=torchrun), tmp_path)
    one = losses(tmp_path / "one")
    assert one[-1] < one[0] - 0.3, "it learns"
    for name in ("two", "accumulated", "torchrun"):
        assert losses(tmp_path / name) == pytest.approx(one, abs=2e-3), name
        trained = json.loads((tmp_path / name / "best" / "training.json").read_text())
        assert trained["machine"]["processes"] == (1 if name == "accumulated" else 2)
    two, torchrun_two = weights(tmp_path / "two/last"), weights(tmp_path / "torchrun/last")
    assert all(torch.equal(two[name], torchrun_two[name]) for name in two)


STOPPED = [*TINY, *RUN, "--dtype", "float32", "--processes", "2", "--dropout", "0.1"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "text.txt").write_text(TEXT)
    run(train("--data", str(folder / "text.txt"), *STOPPED, "--out", str(folder / "out")), folder)
    return folder / "out"


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.chaos), signal.SIGKILL])
def test_two_processes_resume_to_the_same_bytes(uninterrupted, text, tmp_path, monkeypatch, number):
    flags = ["--data", str(text), *STOPPED, "--save-seconds", "0"]
    out = tmp_path / "out"
    process = subprocess.Popen(train(*flags, "--out", str(out)), env=environment(tmp_path), stderr=subprocess.PIPE)
    while not (out / "last").is_dir() or json.loads((out / "last/state.json").read_text())["progress"]["step"] < 7:
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), error
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert call(["train", "--resume", "--out", out]) == 0
    expected, found = weights(uninterrupted / "last"), weights(out / "last")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_death_of_a_process_ends_the_run_with_a_message(text, tmp_path):
    out = tmp_path / "out"
    flags = ["--data", str(text), *TINY, *RUN, "--steps", "100000", "--processes", "2", "--out", str(out)]
    process = subprocess.Popen(train(*flags), env=environment(tmp_path), stderr=subprocess.PIPE, text=True)
    while not (out / "log.jsonl").is_file() or not (out / "log.jsonl").stat().st_size:
        time.sleep(0.05)
        assert process.poll() is None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [int(child) for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]
    os.kill(workers[0], signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "a process of this run has died" in error and "Traceback" not in error


def test_indivisible_batch_sizes_are_refused(text, tmp_path):
    flags = ["--data", str(text), *TINY, *RUN, "--processes", "3", "--out", str(tmp_path / "out")]
    message = "--batch-size must be a multiple of processes × accumulate = 3 × 1, got 8"
    assert message in run(train(*flags), tmp_path, code=1)


@pytest.mark.parametrize(("n", "size"), [(100, 3), (5, 2), (1, 2), (0, 2), (64, 5)])
def test_shards_are_consecutive_and_complete(n, size):
    shards = [World(rank, size).shard(n) for rank in range(size)]
    assert [i for shard in shards for i in range(n)[shard]] == list(range(n))
    assert {len(range(n)[shard]) for shard in shards} <= {n // size, n // size + 1}
