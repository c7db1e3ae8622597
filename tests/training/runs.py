"""Runs of the trainer in this process: started quietly, crashed at a step, and what they leave."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from rich.console import Console

from tests.toolbox.launch import free_port
from training.__main__ import main
from training.config import TrainConfig
from training.fit.settings import Settings
from training.model.device import resolve_auto
from training.run import estimate, folder, loop
from training.run.distributed import World
from training.run.resume import resume as resume_run
from training.run.run import Run
from training.run.start import start as start_run
from training.text import batches, corpus, files

SHAPE = {"block_size": 8, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 16}
STEPS = {"steps": 24, "batch_size": 4, "warmup_steps": 4, "eval_every": 8, "log_every": 3, "sample_chars": 10}
STEPS |= {"dropout": 0.1, "threads": 1, "weight_decay": 0.1, "patience": 0}  # of a text that is small
TEXT = "".join(random.Random(0).choices(["the cat ", "a dog ", "sat on ", "ran to ", "the mat.\n"], k=400))


def tiny(folder: Path, **changes: object) -> TrainConfig:
    """Of a run on TEXT, unless the folder has another text.txt."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
    return TrainConfig(**{**SHAPE, **STEPS, "data": str(text), **changes})


def start(config: TrainConfig, out: Path, console: Console | None = None, **options: bool) -> None:
    start_run(Settings(config.as_dict()), out, console or Console(quiet=True), **options)


def new_run(config: TrainConfig) -> Run:
    """A run that has not begun, with "auto" resolved for this machine."""
    layers = Settings(config.as_dict(), resolved=resolve_auto(config, 1))
    return Run(layers, corpus.prepare(config.data, records=config.records), World())


def resume(out: Path, changes: dict[str, object] | None = None) -> None:
    resume_run(out, changes or {}, Console(quiet=True))


class Fork:
    """The command `train` in a fork of a process that has imported torch: that takes longer than a run."""

    def __init__(self, *arguments: object, **variables: str):
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(["tests.training.runs", "training.run.loop"])
        self.process = forks.Process(target=_train, args=({**os.environ, **variables}, [*map(str, arguments)]))
        self.process.start()
        self.pid = self.process.pid

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode


def train_in_two(*arguments: str) -> None:
    """The command `train` in two processes."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [Fork(*arguments, **world, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    assert [process.wait() for process in processes] == [0, 0]


def _train(variables: dict[str, str], arguments: list[str]) -> None:
    os.environ.update(variables)
    os.fsync = lambda descriptor: None
    folder.draw_curves = lambda out: (out / "loss.png").touch()
    estimate.matmul_peak = lambda device, dtype: 1e11
    sys.argv = ["training", "train", *arguments]
    sys.exit(main())


def flags(**fields: object) -> list[str]:
    """The flags of a command that set these fields."""
    return [part for name, value in fields.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@contextmanager
def crash(after: int) -> Iterator[None]:
    """A run inside ends without a word once it has taken so many steps."""
    step = loop.step

    def fail(run: Run, save_is_due: bool = False) -> float:
        if run.progress.step == after:
            raise MemoryError
        return step(run, save_is_due)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(loop, "step", fail)
        yield


def text_file(tmp_path: Path, text: str | bytes) -> Path:
    """A file of this content."""
    file = tmp_path / "text.txt"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def chunks_of(size: int, patch: pytest.MonkeyPatch) -> None:
    """Texts are read, encoded and counted in chunks of so many bytes or characters."""
    for module in (batches, corpus, files):
        patch.setattr(module, "CHUNK_BYTES", size)


def weights(out: Path) -> list[str]:
    """The SHA-256 of the weights of `last` and `best`."""
    return [hashlib.sha256((out / it / "model.safetensors").read_bytes()).hexdigest() for it in ("last", "best")]


def events(out: Path) -> list[dict[str, object]]:
    """The log without its times and speeds."""
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if "second" not in k and "peak" not in k} for r in records]
