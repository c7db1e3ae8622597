"""Data-parallel training in real processes over gloo, as torchrun starts them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.helpers import call
from tests.training.runs import events, train_in_two, weights
from training.run.distributed import World

TEXT = "".join(chr(97 + i * i % 23) + (" " if i % 5 == 0 else "") for i in range(4000))
TINY = ["--n-layer", "1", "--n-embd", "16", "--n-head", "2", "--n-kv-head", "1", "--block-size", "16"]
RUN = ["--steps", "40", "--batch-size", "8", "--eval-every", "20", "--sample-chars", "0", "--warmup-steps", "4"]


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def run_alone(*flags: str) -> None:
    """The same run in this process."""
    assert call(["train", "--threads", "1", *flags]) == 0


def losses(out: Path) -> list[float]:
    return [record["train_loss"] for record in events(out) if record["event"] == "train"]


def test_losses_do_not_depend_on_processes_threads_or_accumulation(text, tmp_path):
    """Without dropout, they differ by rounding only: of a text, and of records with a teacher."""
    lines = sorted({f"{a}{b}{c}" for a in "bdgk" for b in "aeiou" for c in ("b", "dd", "lan", "rik")})
    (tmp_path / "names.txt").write_text("\n".join(lines))
    common, records = [*TINY, *RUN, "--dtype", "float32"], ["--data", str(tmp_path / "names.txt"), "--records"]
    run_alone(*common, *records, "--out", str(tmp_path / "teacher"))
    for name, flags in {
        "text": ["--data", str(text)],
        "student": [*records, "--teachers", str(tmp_path / "teacher" / "best"), "--seed", "1"],
    }.items():
        outs = {kind: tmp_path / f"{name}-{kind}" for kind in ("one", "accumulated", "halves", "two")}
        for kind, more in {"one": (), "accumulated": ("--accumulate", "4"), "halves": ("--threads", "2")}.items():
            run_alone(*common, *flags, *more, "--out", str(outs[kind]))
        train_in_two(*common, *flags, "--out", str(outs["two"]))
        one = losses(outs["one"])
        assert one[-1] < one[0] - 0.05, "it learns"
        for kind, out in outs.items():
            assert losses(out) == pytest.approx(one, abs=2e-3), (name, kind)
            trained = json.loads((out / "best" / "training.json").read_text())
            assert trained["machine"]["processes"] == (2 if kind == "two" else 1)


def workers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """By rank."""
    return sorted(psutil.Process(process.pid).children(), key=lambda child: int(child.environ()["RANK"]))


@pytest.mark.tools
def test_two_processes_resume_to_the_same_bytes(text, tmp_path, capsys):
    """After SIGTERM to torchrun, which passes it on, and after the death of one, which the other reports."""
    out, flags = tmp_path / "out", ["--data", str(text), *TINY, *RUN, "--dtype", "float32", "--dropout", "0.1"]
    flags += ["--steps", "200"]
    train_in_two(*flags, "--out", str(tmp_path / "uninterrupted"))

    def stopped(step: int, kill: Callable[[subprocess.Popen[bytes]], None], *flags: str) -> str:
        """The line that a run prints when it is stopped after this step."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command = [*torchrun, "-m", "training", "train", *flags, "--out", str(out)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        state = out / "last" / "state.json"
        while not state.exists() or json.loads(state.read_text())["progress"]["step"] < step:
            time.sleep(0.01)
            assert process.poll() is None
        kill(process)
        error = process.communicate()[1].decode()
        assert process.returncode != 0
        (own,) = (line for line in error.splitlines() if line.startswith(("SIG", "error:")))
        return own

    own = stopped(7, lambda process: process.send_signal(signal.SIGTERM), *flags, "--save-seconds", "0")
    hint = f"; resume with: torchrun --nproc-per-node 2 -m training train --resume --out {out}"
    assert own.startswith("SIGTERM: saved at step ") and own.endswith(hint)
    assert call(["train", "--resume", "--out", out]) == 1
    assert "must be resumed with 2 processes as before, got 1; torchrun starts several" in capsys.readouterr().err
    taken = json.loads((out / "last" / "state.json").read_text())["progress"]["step"]
    own = stopped(taken + 7, lambda process: workers(process)[1].kill(), "--resume", "--save-seconds", "0")
    assert own.startswith("error: a process of this run has died")
    train_in_two("--resume", "--out", str(out))
    assert weights(out) == weights(tmp_path / "uninterrupted")


def test_indivisible_batch_sizes_are_refused(text, tmp_path, capsys):
    assert call(["train", "--data", text, *TINY, *RUN, "--accumulate", "3", "--out", tmp_path / "out"]) == 1
    message = "--batch-size must be a multiple of processes × accumulate = 1 × 3, got 8"
    assert capsys.readouterr().err.count(message) == 1


@pytest.mark.parametrize(("n", "size"), [(100, 3), (5, 2), (1, 2), (0, 2), (64, 5)])
def test_shards_are_consecutive_and_complete(n, size):
    shards = [World(rank, size).shard(n) for rank in range(size)]
    assert [i for shard in shards for i in range(n)[shard]] == list(range(n))
    assert {len(range(n)[shard]) for shard in shards} <= {n // size, n // size + 1}
