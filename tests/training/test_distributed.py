"""Data-parallel training in real processes over gloo, started by torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from service.model.checkpoint import Checkpoint
from tests.helpers import call
from training.distributed import World

TEXT = "".join(chr(97 + i * i % 23) + (" " if i % 5 == 0 else "") for i in range(4000))
TINY = ["--n-layer", "1", "--n-embd", "16", "--n-head", "2", "--n-kv-head", "1", "--block-size", "16"]
RUN = ["--steps", "40", "--batch-size", "8", "--eval-every", "20", "--sample-chars", "0", "--warmup-steps", "4"]


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def train(*flags: str, processes: int = 2) -> list[str]:
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "-m"] if processes > 1 else ["-m"]
    return [sys.executable, *start, "training", "train", *flags]


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}


def run(command: list[str], tmp_path: Path, code: int = 0) -> str:
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_alone(folder: Path, *flags: str) -> None:
    """The same run in this process."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        assert call(["train", *flags, "--threads", "1"]) == 0
    torch.set_num_threads(threads)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(Checkpoint.read(path).load_model().named_parameters())


def losses(out: Path) -> list[float]:
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [record["train_loss"] for record in records if record["event"] == "train"]


def test_losses_do_not_depend_on_processes_or_accumulation(text, tmp_path):
    """Without dropout, they differ by rounding only."""
    common = ["--data", str(text), *TINY, *RUN, "--dtype", "float32"]
    run_alone(tmp_path, *common, "--out", str(tmp_path / "one"))
    run_alone(tmp_path, *common, "--accumulate", "4", "--out", str(tmp_path / "accumulated"))
    run(train(*common, "--out", str(tmp_path / "two")), tmp_path)
    one = losses(tmp_path / "one")
    assert one[-1] < one[0] - 0.3, "it learns"
    for name, processes in {"one": 1, "two": 2, "accumulated": 1}.items():
        assert losses(tmp_path / name) == pytest.approx(one, abs=2e-3), name
        trained = json.loads((tmp_path / name / "best" / "training.json").read_text())
        assert trained["machine"]["processes"] == processes


def test_records_and_teachers_in_two_processes(text, tmp_path):
    """The losses of one process, whatever a row is and whatever is learned."""
    lines = sorted({f"{a}{b}{c}" for a in "bdgk" for b in "aeiou" for c in ("b", "dd", "lan", "rik")})
    (tmp_path / "names.txt").write_text("\n".join(lines))
    common = [*TINY, *RUN, "--dtype", "float32"]
    teacher = tmp_path / "teacher"
    run_alone(tmp_path, "--data", str(text), *common, "--out", str(teacher))
    for name, flags in {
        "records": ["--data", str(tmp_path / "names.txt"), "--records"],
        "student": ["--data", str(text), "--teachers", str(teacher / "best"), "--seed", "1"],
    }.items():
        run_alone(tmp_path, *common, *flags, "--out", str(tmp_path / f"{name}1"))
        run(train(*common, *flags, "--out", str(tmp_path / f"{name}2")), tmp_path)
        assert losses(tmp_path / f"{name}2") == pytest.approx(losses(tmp_path / f"{name}1"), abs=2e-3)


STOPPED = [*TINY, *RUN, "--dtype", "float32", "--dropout", "0.1"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "text.txt").write_text(TEXT)
    run(train("--data", str(folder / "text.txt"), *STOPPED, "--out", str(folder / "out")), folder)
    return folder / "out"


def workers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """By rank."""
    return sorted(psutil.Process(process.pid).children(), key=lambda child: int(child.environ()["RANK"]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_two_processes_resume_to_the_same_bytes(uninterrupted, text, tmp_path, number):
    """After SIGTERM to torchrun, which passes it on, and after the death of one, which the other reports."""
    flags = ["--data", str(text), *STOPPED, "--save-seconds", "0"]
    out = tmp_path / "out"
    process = subprocess.Popen(train(*flags, "--out", str(out)), env=environment(tmp_path), stderr=subprocess.PIPE)
    while not (out / "last").is_dir() or json.loads((out / "last/state.json").read_text())["progress"]["step"] < 7:
        time.sleep(0.01)
        assert process.poll() is None
    if number == signal.SIGTERM:
        process.send_signal(number)
    else:
        workers(process)[1].send_signal(number)
    error = process.communicate(timeout=60)[1].decode()
    assert process.returncode != 0
    own = [line for line in error.splitlines() if line.startswith(("SIG", "error:"))]
    if number == signal.SIGTERM:
        assert len(own) == 1 and own[0].startswith("SIGTERM: saved at step "), error
        hint = f"; resume with: torchrun --nproc-per-node 2 -m training train --resume --out {out}"
        assert own[0].endswith(hint), error
    else:
        assert len(own) == 1 and own[0].startswith("error: a process of this run has died"), error
    alone = run(train("--resume", "--out", str(out), processes=1), tmp_path, code=1)
    assert "must be resumed with 2 processes as before, got 1; torchrun starts several" in alone
    run(train("--resume", "--out", str(out)), tmp_path)
    expected, found = weights(uninterrupted / "last"), weights(out / "last")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_indivisible_batch_sizes_are_refused(text, tmp_path):
    flags = ["--data", str(text), *TINY, *RUN, "--accumulate", "3", "--out", str(tmp_path / "out")]
    message = "--batch-size must be a multiple of processes × accumulate = 2 × 3, got 8"
    printed = run(train(*flags), tmp_path, code=1)
    assert printed.count(message) == 1 and "has died" not in printed


@pytest.mark.parametrize(("n", "size"), [(100, 3), (5, 2), (1, 2), (0, 2), (64, 5)])
def test_shards_are_consecutive_and_complete(n, size):
    shards = [World(rank, size).shard(n) for rank in range(size)]
    assert [i for shard in shards for i in range(n)[shard]] == list(range(n))
    assert {len(range(n)[shard]) for shard in shards} <= {n // size, n // size + 1}
