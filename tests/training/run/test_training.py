"""Losses against explicit loops; training runs: determinism, resume, disk errors, refusals, commands."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

from service.model.checkpoint import Checkpoint
from service.model.counts import COUNTS, Counts
from service.model.gpt import GPT
from tests.helpers import call, random_model, save_random
from tests.toolbox.disk import SmallDisk
from tests.training.runs import SHAPE, STEPS, TEXT, Fork, crash, events, flags, new_run, resume, start, tiny, weights
from training.config import ConfigError, TrainConfig
from training.fit.plan import plan
from training.fit.rules import regularization
from training.fit.settings import Settings
from training.measure.losses import (
    piece_loss,
    sampled_scores,
    split_losses,
    streamed_loss,
    stretches,
    whole_loss,
)
from training.model import fused
from training.model.device import suitable_dtype
from training.run import loop
from training.run.errors import DivergedError, ResumeError
from training.run.folder import RunFolder, exclusive
from training.run.resume import resume as resume_run
from training.run.run import Run
from training.run.saved import Saved
from training.run.signals import StandardError, catch_signals
from training.text.batches import PACK, record_pieces, window_pieces
from training.text.corpus import prepare, sampler_of

CHAOS = [pytest.mark.chaos, pytest.mark.timeout(1800)]


def tiny_flags(folder: Path, **changes: object) -> list[str]:
    (data,) = tiny(folder).data
    return flags(**{**SHAPE, **STEPS, "data": data, **changes})


def is_finished(out: Path) -> bool:
    return (out / "last").exists() and bool(progress(out)["finished"])


def progress(out: Path) -> dict[str, object]:
    return json.loads((out / "last" / "state.json").read_text())["progress"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        start(tiny(folder, dtype="float32"), folder / "out")
    return folder / "out"


# Losses


def some_model() -> GPT:
    return random_model(torch.float64, vocab_size=7, block_size=6, n_layer=3, n_head=2, n_kv_head=1, n_embd=8)


def log_probability(model: GPT, context: list[int], id: int) -> float:
    return model(torch.tensor([context]))[0, -1].log_softmax(-1)[id].item()


@pytest.mark.parametrize("characters", [2, 7, 13, 85])
def test_whole_loss_scores_each_character_once_within_its_window(characters, monkeypatch):
    monkeypatch.setattr("training.measure.losses.BATCH_CHARS", 24)
    model, ids = some_model(), np.random.default_rng(0).integers(0, 7, characters).astype(np.uint8)
    expected = 0.0
    for i in range(1, characters):
        first = (i - 1) // 6 * 6
        expected -= log_probability(model, ids[first:i].tolist(), int(ids[i]))
    assert whole_loss(model, ids) == pytest.approx(expected / (characters - 1), rel=1e-6)


@pytest.mark.parametrize("characters", [2, 17, 137])
def test_streamed_loss_equals_one_banded_forward(characters, monkeypatch):
    monkeypatch.setattr("training.measure.losses.BATCH_CHARS", 1)  # the smallest chunks
    model, ids = some_model(), np.random.default_rng(1).integers(0, 7, characters).astype(np.uint16)
    whole = torch.from_numpy(ids.astype(np.int64))
    expected = F.cross_entropy(model(whole[None, :-1])[0], whole[1:]).item()
    assert streamed_loss(model, ids) == pytest.approx(expected, rel=1e-6)
    scored = []
    whole_piece = np.array([0]), np.array([characters - 1])
    assert piece_loss(model, ids, *whole_piece, scored.append) == pytest.approx(expected, rel=1e-6)
    assert sum(scored) == characters - 1
    assert len(scored) > 1 or characters < 137  # a long piece, too, takes several forwards


@pytest.mark.parametrize("at_once", [40, 20])  # characters: all of a stretch, or not
def test_a_sample_of_a_text_scores_stretches_with_the_context_of_the_whole(monkeypatch, at_once):
    monkeypatch.setattr("training.measure.losses.BATCH_CHARS", at_once)
    model, ids = some_model(), np.random.default_rng(3).integers(0, 7, 400).astype(np.uint8)
    scores = sampled_scores(model, ids, 100, records=False)
    places = stretches(400, 100, model.config.block_size)
    assert places == [(0, 26), (124, 150), (249, 275), (374, 400)] and scores.characters == 100
    whole = [piece_loss(model, ids[first:end], *window_pieces(ids[first:end], 6)) for first, end in places]
    assert scores.losses["whole"] == pytest.approx(np.mean(whole), rel=1e-6)
    assert scores.standard_error == pytest.approx(np.std(whole, ddof=1) / 2, rel=1e-6)
    each = []
    for first, end in places:  # by one banded forward, a window of context before all but the first
        seen = torch.from_numpy(ids[max(0, first - 6) : end].astype(np.int64))
        each.append(F.cross_entropy(model(seen[None, :-1])[0][-25:], seen[-25:]).item())
    assert scores.losses["streamed"] == pytest.approx(np.mean(each), rel=1e-6)
    everything = sampled_scores(model, ids, 399, records=False)
    assert everything.standard_error is None and everything.losses == split_losses(model, ids, records=False)


@pytest.mark.parametrize("count", [1, 2, 20, 21, 98, 99, 100])
def test_stretches_are_apart_and_within_the_text(count):
    places = stretches(100, count, 4)
    starts, ends = zip(*places, strict=True)
    assert starts[0] == 0 and ends[-1] <= 100
    assert all(end <= start + 1 for end, start in zip(ends, starts[1:], strict=False))
    scored = sum(ends) - sum(starts) - len(places)
    assert count - len(places) < scored <= count or scored == 99


def test_records_that_fit_the_window_are_scored_once():
    model = some_model()
    ids = np.array([0] + [id for n in range(300) for id in (*([1 + n % 6] * (1 + n % 5)), 0)], np.uint8)
    scored = []
    scores = sampled_scores(model, ids, len(ids), True, ids[:90], scored.append)
    assert sum(scored) == len(ids) - 1 and scores.losses["whole"] == scores.losses["streamed"]
    sample = sampled_scores(model, ids, 100, records=True)
    assert 90 < sample.characters <= 100 and 0 < sample.standard_error < 0.5
    assert sample.losses["whole"] == pytest.approx(scores.losses["whole"], abs=4 * sample.standard_error)
    model.config = replace(model.config, block_size=3)
    cut = sampled_scores(model, ids, len(ids), records=True).losses
    assert cut["whole"] != cut["streamed"]


def test_scoring_is_bounded_by_the_training(tmp_path, monkeypatch):
    """It once took four minutes after 24 s."""
    monkeypatch.setattr("training.run.estimate.MIN_SCORED", 30)
    config, outs = tiny(tmp_path), [tmp_path / name for name in ("auto", "all", "number")]
    for out, fields in zip(outs, ({}, {"score_chars": "all"}, {"score_chars": "100"}), strict=True):
        start(replace(config, **fields), out)
    auto, everything, number = (Checkpoint.read(out / "best").training for out in outs)
    assert auto["scored_characters"] == 24 * 32 // 16 and auto["standard_error"] > 0
    assert everything["scored_characters"] == everything["data"]["val_characters"] - 1
    assert "standard_error" not in everything and number["scored_characters"] == 99  # 3 · 33
    with pytest.raises(ConfigError, match="score_chars must be auto, all or a number of at least 1, got 'some'"):
        replace(config, score_chars="some")


@pytest.mark.parametrize("longest", [None, 6, 2])
def test_record_loss_scores_each_record_alone(longest, monkeypatch):
    monkeypatch.setattr("training.measure.losses.BATCH_CHARS", 20)
    model = some_model()
    records = [[1], [2, 3], [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5], [4, 4, 4, 4, 4], [5, 6]]
    ids = np.array([0] + [id for record in records for id in (*record, 0)], np.uint8)
    total = 0.0
    for record in records:
        text = [0, *record, 0]
        for first in range(0, len(text) - 1, longest or len(text)):
            piece = text[first : first + (longest or len(text)) + 1]
            total -= sum(log_probability(model, piece[:i], piece[i]) for i in range(1, len(piece)))
    starts, lengths = record_pieces(ids, longest or len(ids))
    assert lengths.sum() == len(ids) - 1
    assert piece_loss(model, ids, starts, lengths) == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert piece_loss(model, ids, starts[:0], lengths[:0]) == 0


# Runs


def test_a_run_learns_and_reports(uninterrupted, tmp_path):
    records = events(uninterrupted)
    assert [r["step"] for r in records if r["event"] == "train"] == [3, 6, 9, 12, 15, 18, 21, 24]
    evaluations = [r for r in records if r["event"] == "evaluation"]
    assert [r["step"] for r in evaluations] == [8, 16, 24]
    assert all(len(r["sample"]) == 11 and r["sample"][0] == "\n" for r in evaluations)
    end = records[-1]
    assert end["event"] == "end" and end["whole"] < end["uniform"]
    assert end["kneser_ney"] < end["unigram"] < end["uniform"] and "bigram" not in end
    best = Checkpoint.read(uninterrupted / "best")
    about = best.training
    assert about["recipe"]["n_embd"] == 16 and about["data"]["sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert about["losses"]["whole"] == end["whole"] and about["step"] == 24
    assert Counts.load(best.read_file(COUNTS), best.tokenizer.vocab_size).order == 8
    assert {"torch", "python"} <= set(about["versions"]) and about["machine"]["threads"] == 1
    assert whole_loss(best.load_model(), prepare(tiny(tmp_path).data).val) == pytest.approx(end["whole"], rel=1e-6)
    assert (uninterrupted / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not [path for path in uninterrupted.rglob("*") if path.name.startswith(".") or path.suffix == ".pkl"]


def test_a_run_on_a_long_text_counts_a_sample_and_says_so(tmp_path, monkeypatch):
    for module in ("service.model.counts", "training.run.loop", "training.run.start"):
        monkeypatch.setattr(f"{module}.MAX_COUNTED", 320)
    config, console = tiny(tmp_path, steps=8), Console(record=True, width=300)
    start(config, tmp_path / "out", console)
    about, corpus = Checkpoint.read(tmp_path / "out" / "best").training, prepare(config.data)
    size, V = len(corpus.train), corpus.tokenizer.vocab_size
    assert f"counting n-grams in a sample: 320 of {size:,} training characters" in console.export_text()
    parts = np.concatenate([corpus.train[at : at + 5] for at in np.linspace(0, size - 5, 64).astype(int)])
    counts = Counts.load(Counts.count(parts, V).dump(), V)
    counted = -np.log(counts.probabilities(corpus.val)[0]).mean()
    assert about["counted_characters"] == 320 and about["losses"]["kneser_ney"] == pytest.approx(counted)


def test_equal_seeds_give_equal_bytes_and_different_seeds_do_not(uninterrupted, tmp_path):
    start(tiny(tmp_path, dtype="float32"), tmp_path / "same")
    assert weights(tmp_path / "same") == weights(uninterrupted)
    assert events(tmp_path / "same") == events(uninterrupted)
    start(tiny(tmp_path, dtype="float32", seed=1), tmp_path / "other")
    assert weights(tmp_path / "other") != weights(uninterrupted)


def test_a_command_repeats_its_bytes_whatever_the_clock_says(tmp_path, monkeypatch):
    """The dtype "auto" was once what a clock found faster: six runs, two results."""
    shape = {"n_embd": 128, "n_head": 4, "n_kv_head": 2, "block_size": 64, "dropout": 0.0}
    config, now, chance = tiny(tmp_path, **shape, steps=6, eval_every=6, sample_chars=0), 0.0, random.Random(0)

    def later():
        nonlocal now
        now += 10 ** chance.uniform(-6, 2)
        return now

    start(config, tmp_path / "whole")
    for clock in ("monotonic", "perf_counter", "process_time"):
        monkeypatch.setattr(time, clock, later)
    start(config, tmp_path / "again")
    assert weights(tmp_path / "again") == weights(tmp_path / "whole")


@pytest.mark.parametrize(
    ("flags", "fields", "expected"),
    [
        ({"avx512_bf16"}, {}, "bfloat16"),
        ({"avx512_bf16"}, {"n_embd": 64}, "float32"),
        ({"avx512_bf16"}, {"fused": "false"}, "float32"),
        ({"avx512_bf16"}, {"fused": "false", "n_embd": 256}, "bfloat16"),
        ({"avx512f"}, {}, "float32"),
    ],
)
def test_the_dtype_is_that_of_features_and_settings(flags, fields, expected):
    assert suitable_dtype(TrainConfig(**{"device": "cpu", **fields}), flags) == expected


@pytest.mark.parametrize(("stop_at", "dtype"), [(8, "float32"), (23, "float32"), (13, "bfloat16")])
def test_a_crash_between_saves_resumes_to_the_same_bytes(uninterrupted, tmp_path, stop_at, dtype):
    """The steps since the last save are repeated."""
    expected, config, out = uninterrupted, tiny(tmp_path, dtype=dtype), tmp_path / "out"
    if dtype == "bfloat16":
        config, expected = replace(config, eval_every=12, threads=2, dropout=0.0), tmp_path / "uninterrupted"
        start(config, expected)
    with crash(stop_at):
        start(config, out)
    torch.manual_seed(stop_at)
    resume(out)
    assert weights(out) == weights(expected) and events(out) == events(expected)


def test_a_second_crash_before_the_next_log_line_keeps_the_log(uninterrupted, tmp_path):
    """The first save of a resumed run once recorded the length of the log from before its truncation."""
    out = tmp_path / "out"
    with crash(15):
        start(tiny(tmp_path, dtype="float32"), out)
    with crash(8):
        resume(out)
    resume(out)
    assert weights(out) == weights(uninterrupted) and events(out) == events(uninterrupted)


def test_a_failing_evaluation_costs_no_steps(uninterrupted, tmp_path, monkeypatch):
    evaluate, out = loop.evaluate, tmp_path / "out"
    monkeypatch.setattr(loop, "evaluate", lambda run, folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        start(tiny(tmp_path, dtype="float32"), out)
    assert (progress(out)["step"], progress(out)["position"]) == (8, 32)
    monkeypatch.setattr(loop, "evaluate", evaluate)
    resume(out)
    assert weights(out) == weights(uninterrupted) and events(out) == events(uninterrupted)


@pytest.mark.parametrize(
    ("number", "stops"),
    [
        (signal.SIGKILL, 2), pytest.param(signal.SIGKILL, 50, marks=CHAOS), pytest.param(signal.SIGINT, 8, marks=CHAOS),
        pytest.param(signal.SIGTERM, 8, marks=CHAOS),
    ],
)  # fmt: skip
def test_a_run_stopped_at_random_moments_ends_with_the_same_bytes(uninterrupted, tmp_path, chance, number, stops):
    """Signals arrive at startup, in a step, an evaluation, a save or the final report."""
    steps, expected, out = 24, uninterrupted, tmp_path / "out"
    if stops > 3:  # a longer run has room for more stops
        steps, expected = 240, tmp_path / "uninterrupted"
        start(tiny(tmp_path, dtype="float32", steps=steps), expected)
    new = ["--overwrite", *tiny_flags(tmp_path, dtype="float32", steps=steps, save_seconds=0.05)]
    codes = {-number, 128 + number, 0}  # before the handlers are set, after a save, after the last step
    points = sorted(chance.randrange(steps) for _ in range(stops))
    while points or not is_finished(out):
        if is_finished(out):  # stops remain: start another run
            shutil.rmtree(out)
        command = ["--resume"] if (out / "last").exists() else new
        process = (Fork if stops < 3 else train)("--out", out, *command)
        if points:
            if chance.random() < 0.1:  # while it starts
                time.sleep(chance.uniform(0, 2))
            else:
                wait_for_progress(out, process)
                wait_for_step(out, process, points[0])
                assert {p.name for p in out.glob(".last.saving-*")} <= {f".last.saving-{process.pid}"}
                time.sleep(chance.uniform(0, 0.1))
            process.send_signal(number)
        code = process.wait()
        assert code in codes
        if (out / "last").exists():
            Checkpoint.read(out / "last").load_model()
        if code != 0:
            left = ", ".join(path.name for path in out.glob(".*.saving-*"))
            print(f"{number.name} past step {points.pop(0)}, {len(points)} to come; left: {left}", flush=True)
        elif is_finished(out):
            state = Path("last", "state.safetensors")
            assert (out / state).read_bytes() == (expected / state).read_bytes()
            assert weights(out) == weights(expected) and events(out) == events(expected)
            assert {p.name for p in out.iterdir()} == {"last", "best", "log.jsonl", "loss.png"}


@pytest.fixture
def small_disk(tmp_path):
    (tmp_path / "disk").mkdir()
    with SmallDisk(tmp_path / "disk", "2m") as disk:
        yield disk


@pytest.mark.parametrize(
    ("where", "after", "room", "named"),
    [
        ("save", 0, 0, "last"),  # the very first save
        ("log", 3, 0, "."),
        ("save", 16, 30_000, "last"),  # fails half way
        ("save_served", 16, 4096, "best"),
        ("finish", 24, 60_000, "."),  # enough for the best weights, not for the curves
    ],
)
def test_a_full_disk_loses_no_saved_work(
    uninterrupted, small_disk, tmp_path, monkeypatch, capsys, where, after, room, named
):
    out = small_disk.path / "out"
    owner = loop if where == "finish" else RunFolder
    function = getattr(owner, where)

    def fill_first(first: Run | RunFolder, *arguments: object) -> None:
        run = first if isinstance(first, Run) else first.run
        if run.progress.step >= after and not small_disk.ballast.exists():
            small_disk.fill(room)
        return function(first, *arguments)

    again = ["train", "--resume", "--out", out, "--save-seconds", "1234.5"]
    with monkeypatch.context() as patch:
        patch.setattr(owner, where, fill_first)
        assert call(["train", "--out", out, *tiny_flags(tmp_path, dtype="float32")]) == 1
    *progress, error = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: cannot write {out / named}: No space left on device. "), error
    assert "Traceback" not in "".join(progress)
    if (where, after) == ("save", 0):
        assert error.endswith("Nothing has been saved yet; once the problem is solved, run the same command again")
        again = ["train", "--out", out, *tiny_flags(tmp_path, dtype="float32")]
    else:
        assert f"The last good checkpoint is {out / 'last'}; once the problem is solved, resume with: " in error
        assert error.endswith(f"-m training train --resume --out {out}")
        small_disk.fill(0)
        for _ in range(2):  # as left by the failure, and after a failed resume
            assert {p.name for p in out.iterdir()} <= {"last", "best", "log.jsonl", "loss.png"}
            for name in ["last", "best"] if after > 8 else ["last"]:
                Checkpoint.read(out / name).load_model()
            assert call(again) == 1
            error = capsys.readouterr().err.splitlines()[-1]
            assert error.startswith("error: cannot write ") and error.endswith(f"--out {out} --save-seconds 1234.5")
    small_disk.ballast.unlink()
    assert call(again) == 0
    assert weights(out) == weights(uninterrupted) and events(out) == events(uninterrupted)


def wait_for_step(out: Path, process: subprocess.Popen[str] | Fork, step: int) -> None:
    """Wait until the log has a line of that step or the process has ended."""
    while process.poll() is None:
        lines = (out / "log.jsonl").read_bytes().splitlines(keepends=True)
        if any(json.loads(line)["step"] >= step for line in lines[-2:] if line.endswith(b"\n")):
            break
        time.sleep(0.005)


def wait_for_progress(out: Path, process: subprocess.Popen[str] | Fork) -> None:
    """Wait until the process has saved or ended."""

    def saved() -> int:
        state = out / "last" / "state.json"
        return state.stat().st_ino if state.exists() else 0

    before = saved()
    while process.poll() is None and saved() == before:
        time.sleep(0.02)


def train(*arguments: object, program: str = "training", **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", program, "train", *map(str, arguments)], **options)


def training_process(folder: Path, program: str = "training") -> subprocess.Popen[str]:
    """A long run, in a session of its own as in a shell, which ignores SIGINT in the background."""
    return train(
        "--out", folder / "out", *tiny_flags(folder, steps=10**6, eval_every=10**6), program=program,
        stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def ended_by(process: subprocess.Popen[str], number: signal.Signals, code: int) -> str:
    """What it says when a signal reaches every process of its group, as a terminal sends SIGINT."""
    os.killpg(process.pid, number)
    _, error = process.communicate()
    assert process.returncode == code and "Traceback" not in error, error
    return error


@pytest.mark.parametrize(
    ("program", "name", "number", "code"),
    [
        ("training", r"(\S*python\S*) -m training", signal.SIGINT, 130),
        ("service.command", r"\S*chargpt", signal.SIGTERM, 143),
    ],
)
def test_a_signal_saves_and_prints_the_resume_command(tmp_path, program, name, number, code):
    out = tmp_path / "out"
    process = training_process(tmp_path, program)
    wait_for_progress(out, process)
    wait_for_step(out, process, 3)
    error = ended_by(process, number, code)
    assert error.count(f"{number.name}: saved at step") == 1 and (out / "loss.png").exists()
    stop = re.search(rf"{number.name}: saved at step (\d+) of 1000000; resume with: (.*)$", error, re.M)
    assert stop, error
    assert progress(out)["step"] == int(stop[1])
    command = re.fullmatch(rf"{name} train --resume --out {re.escape(str(out))}", stop[2])
    assert command, stop[2]
    for python in command.groups():  # as a shell would find it
        show = [python, "-c", "import sys; print(sys.prefix)"]
        assert subprocess.check_output(show, text=True).strip() == sys.prefix


def test_a_closed_terminal_stops_a_run_after_a_save(tmp_path):
    """It once ended without a save; and each line that it prints after the hangup fails."""
    master, terminal = os.openpty()
    os.set_blocking(master, False)
    out, files = tmp_path / "out", dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    process = train(
        "--out", out, *tiny_flags(tmp_path, steps=10**6, eval_every=10**6), **files,
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(terminal, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(terminal)
    while process.poll() is None and not ((out / "log.jsonl").exists() and len(events(out)) > 1):
        with suppress(BlockingIOError):
            os.read(master, 1 << 16)
        time.sleep(0.02)
    step = events(out)[-1]["step"]
    os.close(master)
    assert process.wait() == 128 + signal.SIGHUP
    assert progress(out)["step"] >= step


def test_a_line_that_a_closed_terminal_refuses_is_lost_and_ends_nothing(monkeypatch):
    """The terminal fails before SIGHUP arrives: a line of progress once ended a run without a save."""
    master, terminal = os.openpty()
    saved = os.dup(2)
    try:
        os.dup2(terminal, 2)
        os.close(terminal)
        with open(2, "w", closefd=False) as stream:
            monkeypatch.setattr(sys, "stderr", stream)
            console = Console(file=StandardError())
            console.print("before")
            os.close(master)
            console.print("after")
            assert os.readlink("/proc/self/fd/2") == "/dev/null"
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def test_nohup_is_heard(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with catch_signals() as received:
            os.kill(os.getpid(), signal.SIGHUP)
            assert received == []
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("poison", ["loss", "gradient", "weights", "validation"])
def test_a_run_that_diverges_stops_before_anything_that_is_not_finite_is_saved(tmp_path, monkeypatch, poison):
    """Weights can overflow after finite gradients, and before the next loss could tell."""
    loss, step, out = loop.loss, loop.step, tmp_path / "out"

    def poisoned(run: Run, *given: torch.Tensor | None) -> torch.Tensor:
        value = loss(run, *given)
        if run.progress.step == 10 and poison != "weights":
            value = value * math.nan if poison == "loss" else value + (run.model.embed.weight.sum() * 0).sqrt()
        return value

    def overflow(run, save_is_due):
        value = step(run, save_is_due)
        if run.progress.step == 11:
            next(run.model.parameters()).data[0, 0] = math.inf
            run.save_is_due = True
        return value

    monkeypatch.setattr(loop, "loss", poisoned)
    monkeypatch.setattr(loop, "step", overflow if poison == "weights" else step)
    if poison == "validation":
        monkeypatch.setattr(loop, "validation_loss", lambda run: math.nan)
    diverged = r"11: .*nan.* at muon_lr 0.\d+ and adamw_lr "
    what = {"weights": "11: weights are not finite, ", "validation": "8: validation loss nan"}.get(poison, diverged)
    with pytest.raises(DivergedError, match=rf"diverged at step {what}.*{out / 'last'}"):
        start(tiny(tmp_path), out)
    assert progress(out)["step"] == 8 and (out / "best").exists() == (poison != "validation")
    assert all(p.isfinite().all() for p in Checkpoint.read(out / "last").load_model().parameters())


def test_records_are_trained_on_and_scored_alone(tmp_path, capsys):
    names = sorted({f"{a}{b}{c}" for a in "BDGK" for b in "aeiou" for c in ("b", "dd", "lan", "rik")})
    (tmp_path / "names.txt").write_text("\n".join(names))
    out = tmp_path / "out"
    changes = {"data": tmp_path / "names.txt", "steps": 60, "eval_every": 30, "dropout": 0.0}
    command = ["--out", out, "--records", *tiny_flags(tmp_path, **changes, dtype="float32")]
    assert call(["train", *command]) == 0
    assert re.search(r"60 steps of 6 records, [\d.]+ epochs", capsys.readouterr().err)
    checkpoint = Checkpoint.read(out / "best")
    model, losses = checkpoint.load_model(), checkpoint.training["losses"]
    corpus = prepare(str(tmp_path / "names.txt"), records=True)
    val = corpus.tokenizer.decode(corpus.val).split("\n")[1:-1]
    assert len(val) == len(names) // 10
    texts = [corpus.tokenizer.encode(f"\n{name}\n") for name in val]
    each = [-sum(log_probability(model, ids[:i], ids[i]) for i in range(1, len(ids))) for ids in texts]
    assert losses["whole"] == losses["streamed"] == pytest.approx(sum(each) / (len(corpus.val) - 1), rel=1e-4)
    evaluated = [event["val_loss"] for event in events(out) if event["event"] == "evaluation"]
    assert min(evaluated) == pytest.approx(losses["whole"], rel=1e-4)
    assert losses["whole"] < losses["unigram"]
    assert "unseen" not in losses, "no record is there twice"
    train = np.append(corpus.train, corpus.val[1 : len(texts[0])])  # the first validation record
    unseen = split_losses(model, corpus.val, True, train)["unseen"]
    assert unseen == pytest.approx(sum(each[1:]) / (len(corpus.val) - len(texts[0])), rel=1e-4)
    assert checkpoint.training["characters_seen"] < 60 * 8 * 7


PACKED = [{}, {"threads": 2}, {"accumulate": 3}, {"teachers": True, "threads": 2}]


@pytest.mark.parametrize("changes", [*PACKED, {"counted": 0.7}, {"counted": 0.7, "block_size": 4}])
def test_packed_records_are_learned_from_as_padded_ones_are(tmp_path, changes):
    """Through autograd each is in a row of its own: every gradient of a step is the same."""
    chance, found = random.Random(0), []
    lines = ["".join(chance.choices("abc", k=chance.randint(1, 9))) for _ in range(300)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    if "teachers" in changes:
        save_random(tmp_path / "teacher", "\nabc")
        changes = {**changes, "teachers": str(tmp_path / "teacher")}
    for path in ("auto", "false"):
        fields = {"dropout": 0.0, "dtype": "float32", "batch_size": 12, **changes}
        config = tiny(tmp_path, **fields, records=True, fused=path)
        run = new_run(config)
        shapes, loss_of = [], loop.loss
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in run.model.parameters():  # the projections of a new model are zero
                parameter.add_(torch.randn_like(parameter), alpha=0.3)

        def loss(run, idx, targets, *lengths, loss_of=loss_of, shapes=shapes):
            shapes.append((tuple(idx.size()), len(lengths)))
            return loss_of(run, idx, targets, *lengths)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "loss", loss)
            found.append((loop.step(run), run.gradients.all.clone(), shapes))
    (loss, gradients, packed), (expected_loss, expected, padded) = found
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    torch.testing.assert_close(gradients[:-5], expected[:-5], rtol=1e-4, atol=1e-5 * expected[:-5].abs().max().item())
    assert len(packed) == changes.get("accumulate", changes.get("threads", 1))
    assert all(rows == 1 and length % PACK == 0 and given == 1 for (rows, length), given in packed)
    assert max(rows for (rows, _), _ in padded) > 1 and not any(given for _, given in padded)


def test_counts_are_a_falling_share_of_what_a_text_teaches(tmp_path):
    """After the first characters of a window, counts see no text before it."""
    config = tiny(tmp_path, dtype="float32", dropout=0.0, counted=0.8)
    run = new_run(config)
    idx, targets = map(torch.from_numpy, run.sampler.next_batch(4))
    with torch.no_grad():
        run.model.head.weight.normal_()
        log_p = run.model(idx).log_softmax(-1)
        plain = F.nll_loss(log_p.flatten(0, 1), targets.flatten(), reduction="sum")
        counted = 0.0
        for row, its_log_p in zip(idx.tolist(), log_p, strict=True):
            for i, after in enumerate(its_log_p):
                counted -= float(torch.from_numpy(run.corpus.counts.next(row[: i + 1])[0]) @ after.double())
        for run.progress.step, share in (0, 0.8), (config.steps // 2, 0.4), (config.steps, 0.0):
            expected = (1 - share) * plain + share * counted
            assert loop.loss(run, idx, targets).item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("changes", [{"dropout": 0.0}, {"dropout": 0.2}, {"counted": 0.5}])
def test_a_crash_on_records_resumes_to_the_same_bytes(tmp_path, changes):
    (tmp_path / "text.txt").write_text("\n".join(TEXT.split()))
    config = tiny(tmp_path, records=True, threads=2, **changes)
    start(config, tmp_path / "uninterrupted")
    with crash(9):
        start(config, tmp_path / "out")
    resume(tmp_path / "out")
    assert weights(tmp_path / "out") == weights(tmp_path / "uninterrupted")


@pytest.mark.parametrize("name", ["last", "best"])
def test_a_finished_run_goes_on_with_more_steps(uninterrupted, tmp_path, name):
    """Also after a save that was interrupted between its two renames."""
    out = tmp_path / "out"
    shutil.copytree(uninterrupted, out)
    (out / name).rename(out / f".{name}.previous")
    assert not call(["train", "--resume", "--out", out, "--steps", 32, "--log-every", 1])
    steps = [event["step"] for event in events(out) if event["event"] == "train"]
    assert steps[-8:] == list(range(25, 33))
    assert [event["step"] for event in events(out) if event["event"] == "end"] == [24, 32]
    recipe = Checkpoint.read(out / "last").training["recipe"]
    assert (recipe["steps"], recipe["log_every"]) == (32, 1)
    assert not list(out.glob(".*"))


def test_a_finished_run_that_is_told_to_mix_is_scored_and_saved_again(uninterrupted, tmp_path):
    """It said that the run was finished, and left the checkpoint as it was."""
    out = tmp_path / "out"
    shutil.copytree(uninterrupted, out)
    assert not Checkpoint.read(out / "best").load_counts().is_mixed
    resume(out, {"mixed": True})
    best = Checkpoint.read(out / "best")
    assert best.load_counts().is_mixed and best.training["recipe"]["mixed"] and weights(out) == weights(uninterrupted)
    assert best.validation_loss == best.training["losses"]["mixed"] and is_finished(out)


@pytest.mark.parametrize("symbols", [999, 1000])
def test_counts_teach_no_large_vocabulary(tmp_path, symbols):
    """Their table would have the shortest contexts alone. `quick` of Chinese once became worse by 0.3 nats."""
    (tmp_path / "text.txt").write_text("".join(map(chr, range(0x4E00, 0x4E00 + symbols))) * 70 + "\n")
    found, _ = planned(Settings({}, "quick"), prepare(str(tmp_path / "text.txt")))
    assert found.counted == (symbols < 1000)


def test_counts_whose_table_has_no_contexts_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("training.measure.counts.TABLE_BYTES", 0)
    with pytest.raises(ConfigError, match="counted must be 0 for a vocabulary of .* symbols"):
        new_run(tiny(tmp_path, counted=0.5))


def test_a_preset_of_a_resumed_run_names_its_own_settings_alone(tmp_path, capsys):
    """`--resume --preset` once reset what it does not name, and refused a seed that nobody had typed."""
    own = tiny_flags(tmp_path, seed=5, steps=8)
    assert call(["train", "--preset", "quick", "--mixed", "--out", tmp_path / "out", *own]) == 0
    assert call(["train", "--resume", "--preset", "quick", "--out", tmp_path / "out", "--steps", 12]) == 0
    best = Checkpoint.read(tmp_path / "out" / "best")
    assert best.training["recipe"]["steps"] == 12 and best.load_counts().is_mixed


def test_training_json_of_the_best_is_of_its_step(tmp_path, monkeypatch):
    losses = iter([2.0, 1.0, 1.0])  # of equal ones the first is the best
    monkeypatch.setattr(loop, "validation_loss", lambda run: next(losses))
    start(tiny(tmp_path), tmp_path / "out")
    best, last = (Checkpoint.read(tmp_path / "out" / name).training for name in ("best", "last"))
    assert (best["step"], best["characters_seen"]) == (16, 16 * 32)
    assert (last["step"], last["characters_seen"]) == (24, 24 * 32)
    assert 0 < best["training_seconds"] < last["training_seconds"]


def test_ctrl_c_while_loading_is_quiet(tmp_path):
    process = training_process(tmp_path)
    while process.poll() is None and not (tmp_path / "out").exists():
        time.sleep(0.01)
    ended_by(process, signal.SIGINT, 130)


def planned(settings, corpus, *options):
    """The config by a plan, and the settings that the plan changed."""
    fitted = plan(settings, corpus, *options).fitted
    preset, config = TrainConfig.from_preset(settings.preset), replace(settings, fitted=fitted).requested
    return config, {name: value for name, value in fitted.items() if value != getattr(preset, name)}


def test_a_text_of_a_few_lines_is_trained_on_for_a_few_epochs(tmp_path, capsys):
    """With the default preset."""
    (tmp_path / "lines.txt").write_text(TEXT[:300])
    decided, _ = planned(Settings({}), prepare(str(tmp_path / "lines.txt")))
    assert (decided.block_size, decided.steps, decided.batch_size) == (64, 100, 16)
    (tmp_path / "text.txt").write_text(TEXT[:40])
    few = flags(data=tmp_path / "text.txt", out=tmp_path / "out", threads=1, dtype="float32", steps=8)
    assert call(["train", *few]) == 0
    assert ": --block-size 8 --n-layer 4 --dropout 0.3 " in capsys.readouterr().err
    recipe = Checkpoint.read(tmp_path / "out" / "best").training["recipe"]
    assert (recipe["block_size"], recipe["n_layer"]) == (8, 4)
    assert call(["train", "--resume", "--preset", "cpu", *few]) == 0
    assert "is already finished" in capsys.readouterr().err


MODEL = {"n_layer": 4, "dropout": 0.24, "weight_decay": 0.84}
SMALL = {**MODEL, "block_size": 256, "steps": 310, "eval_every": 31, "patience": 3}
FEWER = {"steps": 100, "warmup_steps": 25, "eval_every": 10, "patience": 3}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, SMALL),
        ({"steps": TrainConfig.steps}, {**MODEL, "block_size": 256, "eval_every": 280, "patience": 3}),
        ({"n_embd": 64}, {**SMALL, "n_layer": 6, "dropout": 0.0, "weight_decay": 0.2}),
        ({"batch_size": TrainConfig.batch_size}, SMALL),
        ({"steps": 99}, SMALL | {"steps": 99, "warmup_steps": 24, "eval_every": 12}),
        ({"block_size": 4096}, {**MODEL, "batch_size": 1, **FEWER}),
        (TrainConfig().as_dict(), {}),
    ],
)
def test_a_small_text_decides_what_was_not_set(tmp_path, given, expected):
    (tmp_path / "text.txt").write_text(TEXT * 12)
    corpus = prepare(str(tmp_path / "text.txt"))
    found, changed = planned(Settings(given), corpus)
    preset = TrainConfig()
    expected = {name: value for name, value in expected.items() if value != getattr(preset, name)}
    assert found == TrainConfig(**given | {name: value for name, value in expected.items() if name not in given})
    assert changed == {name: value for name, value in expected.items() if name not in given}


def test_regularization_rises_until_a_tenth_of_the_characters_that_need_none():
    config = TrainConfig()
    most, more, least = (regularization(config, length) for length in (100, 100_000, 10**7))
    assert most == regularization(config, 1000) and most["dropout"] == 0.3
    assert all(most[name] > more[name] > least[name] for name in most), (most, more, least)


@pytest.mark.parametrize("preset", ["quick", "cpu", "gpu"])
@pytest.mark.parametrize(("records", "tuned"), [(False, False), (True, False), (False, True)])
def test_what_is_printed_as_chosen_can_be_given_back(tmp_path, preset, records, tuned):
    """`--steps` with the very number that was printed once had twice the characters per step."""
    (tmp_path / "text.txt").write_text("".join(f"{line}{i}\n" for i, line in enumerate(12 * TEXT.splitlines())))
    corpus, before = prepare(str(tmp_path / "text.txt"), records=records), TrainConfig.from_preset(preset)
    fixed = {"init_from": "some", **{name: getattr(before, name) for name in SHAPE}} if tuned else {}

    def chosen(**given):
        return planned(Settings(given, preset, inherited=fixed), corpus)

    found, printed = chosen()
    assert "steps" in printed and tuned == ("muon_lr" in printed)
    assert chosen(**printed) == (found, {})
    for name, value in printed.items():
        again, rest = chosen(**{name: value})
        assert again == found and rest == {k: v for k, v in printed.items() if k != name}


def test_a_small_text_is_smaller_for_a_larger_preset(tmp_path):
    """Blocks and characters per step follow from the preset's; what holds more is regularized from a longer text on."""
    (tmp_path / "text.txt").write_text("".join(f"{line}{i}\n" for i, line in enumerate(100 * TEXT.splitlines())))
    corpus = prepare(str(tmp_path / "text.txt"))
    assert 250_000 < len(corpus.train) < 500_000
    shapes = {}
    for preset in ("cpu", "gpu"):
        found, _ = planned(Settings({}, preset), corpus)
        shapes[preset] = (found.n_layer, found.n_embd, found.tokens_per_step, found.block_size)
        assert (found.dropout, found.weight_decay) == ((0.0, 0.2) if preset == "cpu" else (0.16, 0.67))
    assert shapes == {"cpu": (4, 128, 1024, 256), "gpu": (5, 256, 2048, 256)}


def test_a_step_has_the_presets_characters_whatever_the_window(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT * 30)
    corpus, settings = prepare(str(tmp_path / "text.txt")), Settings({}, "quick")
    assert [TrainConfig.from_preset("cpu", block_size=size).batch_size for size in (128, 400, 4096)] == [16, 5, 1]
    assert TrainConfig.from_preset("cpu", block_size=256, batch_size=3).batch_size == 3
    for parts, longest, expected in ((1, None, (128, 8)), (1, 100, (100, 10)), (3, 64, (64, 18)), (3, None, (128, 9))):
        found, _ = planned(settings, corpus, parts, longest)
        assert (found.block_size, found.batch_size) == expected


@pytest.mark.parametrize(("preset", "parts"), [("quick", 1), ("cpu", 3), ("gpu", 8)])
def test_records_decide_the_window(tmp_path, preset, parts):
    """The longest has 20 characters and its line break."""
    names = [f"{a}{b}{c}" for a in ("ann", "bo", 20 * "x") for b in "aeiou" for c in ("", "la", "ri", "sson")]
    (tmp_path / "names.txt").write_text("\n".join(name[:20] for name in names))
    corpus = prepare(str(tmp_path / "names.txt"), records=True)
    config = TrainConfig.from_preset(preset)
    found, changed = planned(Settings({}, preset), corpus, parts)
    assert found.block_size == changed["block_size"] == 32
    characters, depth, width = (2048, 5, 256) if preset == "gpu" else (1024, 4, 128)
    assert found.batch_size % parts == 0 and characters <= found.tokens_per_step < characters + 32 * parts
    assert (found.n_layer, found.n_embd, found.steps) == (depth, width, 100)
    unchanged, _ = planned(Settings({"batch_size": config.batch_size}, preset), corpus)
    assert (unchanged.batch_size, unchanged.block_size) == (config.batch_size, min(256, config.block_size))


def test_kept_checkpoints(tmp_path):
    """They have the served weights of their step, also after a resume, and are removed with --overwrite."""
    config, out = tiny(tmp_path, dtype="float32", keep_every=8, steps=20), tmp_path / "out"
    start(config, tmp_path / "uninterrupted")
    with crash(13):
        start(config, out)
    resume(out)
    val = prepare(config.data).val
    for number in (8, 16):
        name = f"step-{number:08}/model.safetensors"
        kept = Checkpoint.read((out / name).parent)
        assert kept.training["step"] == number
        [logged] = [r["val_loss"] for r in events(out) if r["event"] == "evaluation" and r["step"] == number]
        assert whole_loss(kept.load_model(), val) == pytest.approx(logged, rel=1e-5)
        assert (out / name).read_bytes() == (tmp_path / "uninterrupted" / name).read_bytes()
    assert len(list(out.glob("step-*"))) == 2
    start(replace(config, keep_every=0), out, overwrite=True)
    assert not list(out.glob("step-*"))


def test_an_overfitting_run_stops_early_and_reports_it(tmp_path):
    """Random letters can only be memorized."""
    (tmp_path / "text.txt").write_text("".join(random.Random(0).choices("abcdefghij", k=300)))
    config = tiny(tmp_path, steps=400, eval_every=10, muon_lr=0.1, dropout=0.0, dtype="float32")
    start(replace(config, patience=3), tmp_path / "out", console := Console(record=True, width=200))
    *_, end = records = events(tmp_path / "out")
    losses = {r["step"]: r["val_loss"] for r in records if r["event"] == "evaluation"}
    best = min(losses, key=losses.get)
    assert end["event"] == "end" and end["step"] == best + 30 < 400 and best > 0
    assert Checkpoint.read(tmp_path / "out" / "best").training["step"] == best
    stopped = "the validation loss has not improved in 3 evaluations since step"
    assert f"stopped early at step {best + 30} of 400: {stopped} {best}\n" in console.export_text()
    # Patience does not change the schedule, and a resumed run keeps its patience.
    for patience in (0, 3):
        with crash(best + 15):
            start(replace(config, patience=patience), tmp_path / str(patience))
    assert events(tmp_path / "0") == [r for r in records if r["step"] <= best + 15]
    resume(tmp_path / "3")
    assert weights(tmp_path / "3") == weights(tmp_path / "out") and events(tmp_path / "3") == records
    resume_run(tmp_path / "3", {}, console)
    finished = f"is already finished: step {best + 30} of 400, best at step {best}; it stopped early"
    assert finished in console.export_text()
    with pytest.raises(ResumeError, match="pass a larger --patience too"):
        resume(tmp_path / "3", {"steps": 500})


def test_dropout_draws_other_masks_at_each_step_and_place(tmp_path, monkeypatch):
    """One mask for all steps would switch the same units off for good."""
    masks, dropout = [], fused._dropout

    def recorded(y, p):
        y, factors = dropout(y, p)
        masks.append(factors.clone())
        return y, factors

    run = new_run(tiny(tmp_path, dropout=0.5, device="cpu", dtype="float32", threads=1))
    monkeypatch.setattr(fused, "_dropout", recorded)
    loop.step(run)
    loop.step(run)
    assert len(masks) == 2 * 2 * SHAPE["n_layer"]  # two steps, two branches of each layer
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(masks, 2))


def test_an_evaluation_has_the_mean_loss_of_the_steps_since_the_one_before(tmp_path, monkeypatch):
    """Also where evaluations are more frequent than lines of the log, which once hid overfitting; and when resumed."""
    losses, step = [], loop.step

    def see(run, save_is_due):
        losses.append(step(run, save_is_due))
        return losses[-1]

    monkeypatch.setattr(loop, "step", see)
    fields = {"steps": 100, "eval_every": 4, "log_every": 100, "muon_lr": 0.1, "dropout": 0.0, "sample_chars": 0}
    config = tiny(tmp_path, dtype="float32", **fields)
    (tmp_path / "text.txt").write_text("".join(random.Random(0).choices("abcdefghij", k=300)))
    start(config, tmp_path / "out", console := Console(record=True, width=200))
    found = [r["mean_train_loss"] for r in events(tmp_path / "out") if r["event"] == "evaluation"]
    assert found == pytest.approx([sum(losses[i : i + 4]) / 4 for i in range(0, 100, 4)])
    assert f"  train {found[1]:.4f} in 4 steps  val " in console.export_text(clear=False)
    assert "overfitting: since step" in console.export_text()
    with crash(10):
        start(config, tmp_path / "resumed")
    resume(tmp_path / "resumed")
    assert events(tmp_path / "resumed") == events(tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 6 * [16] + 6 * [32] + 12 * [64]),
        ({"window_stages": 2}, 12 * [32] + 12 * [64]),
        ({"window_stages": 20, "steps": 4}, [16, 16, 64, 64]),  # at least 16 characters
        ({"block_size": 34}, 6 * [17] + 6 * [17] + 12 * [34]),
        ({"block_size": 65}, 24 * [65]),
    ],
)
def test_windows_grow(tmp_path, monkeypatch, changes, expected):
    """The same characters in each step, cut in shorter windows at first."""
    seen, loss = [], loop.loss

    def see(run, *given):
        seen.append([it.clone() for it in given if it is not None])
        return loss(run, *given)

    monkeypatch.setattr(loop, "loss", see)
    config = tiny(tmp_path, **{"block_size": 64, "dropout": 0.0, **changes})
    start(config, tmp_path / "out")
    assert [idx.size(1) for idx, _ in seen] == expected
    whole = sampler_of(prepare(config.data), config.block_size, config.seed)
    for idx, targets in seen:
        for got, full in zip((idx, targets), whole.next_batch(4), strict=True):
            assert np.array_equal(got.flatten(), full.flatten())


# Refusals


def test_existing_files_and_running_runs_are_protected(uninterrupted, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(ResumeError, match="already contains thesis.tex; pass --overwrite to replace it, or another"):
        start(tiny(tmp_path), out)
    with pytest.raises(ResumeError, match="nothing to resume: .*last does not exist"):
        resume(out)
    start(tiny(tmp_path, steps=2), out, overwrite=True)
    assert (out / "thesis.tex").read_text() == "years of work"
    before = weights(uninterrupted)
    resume(uninterrupted, {"steps": 24})
    assert weights(uninterrupted) == before, "already finished"
    with exclusive(out), pytest.raises(ResumeError, match="another run is writing to"):
        resume(out)


def test_resume_refuses_changed_settings_texts_and_files(tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(loop, "evaluate", lambda run, folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        start(tiny(tmp_path), out)
    with pytest.raises(ResumeError, match=r"changed on resume: seed was 1337, got 1; muon_lr was 0\.03, got 0\.01\."):
        resume(out, {"seed": 1, "muon_lr": 0.01, "n_embd": 16, "log_every": 1})
    with pytest.raises(ResumeError, match="steps must be more than the 8 taken, got 8"):
        resume(out, {"steps": 8})
    (tmp_path / "text.txt").write_text(TEXT + "!")
    with pytest.raises(ResumeError, match="text.txt is not the text of this run: it has 2,978 characters and SHA-256"):
        resume(out)
    (tmp_path / "text.txt").rename(tmp_path / "other.txt")
    (tmp_path / "moved.txt").write_text(TEXT)
    with pytest.raises(ZeroDivisionError):
        resume(out, {"data": (str(tmp_path / "moved.txt"),)})
    saved = Saved.read(out / "last")
    with (
        monkeypatch.context() as patched,
        pytest.raises(ResumeError, match="cannot go on here: device 'cuda' is not"),
    ):
        patched.setattr(torch.cuda, "device_count", lambda: 0)
        patched.setattr(Saved, "read", lambda path: replace(saved, resolved={**saved.resolved, "device": "cuda"}))
        resume(out, {"data": (str(tmp_path / "moved.txt"),)})
    changed = out / "last" / "state.safetensors"
    content = changed.read_bytes()
    changed.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match="state.safetensors: size or SHA-256 differs"):
        resume(out)


def test_an_invalid_setting_is_reported_with_the_allowed_values():
    with pytest.raises(ConfigError, match="dtype must be one of auto, float32, bfloat16, got 'float16'"):
        TrainConfig(dtype="float16")
    with pytest.raises(ConfigError, match="preset must be one of quick, cpu, gpu, got 'huge'"):
        TrainConfig.from_preset("huge")
    with pytest.raises(ConfigError, match="unknown setting 'lr'; allowed: data, glob, exclude, records"):
        TrainConfig.from_preset("cpu", lr=1)


def test_a_diverged_run_advises_float32_where_it_is_not_that_already(tmp_path):
    for dtype, advice in (("float32", "Try lower learning rates$"), ("bfloat16", "or --dtype float32$")):
        folder = RunFolder(tmp_path, new_run(tiny(tmp_path, dtype=dtype)))
        with pytest.raises(DivergedError, match=advice), folder.writing():
            raise folder.run.diverged(3, "loss nan")


# The command line


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "the following arguments are required: COMMAND"),
        (("trian",), 2, "invalid choice: 'trian' (choose from"),
        (("train", "--bathc-size", "3"), 2, "unknown argument --bathc-size; did you mean --batch-size?"),
        (("sample", "--checkpoint", "x", "--zzz"), 2, "unknown argument --zzz\nAll flags: "),
        (("train", "--steps", "many"), 2, "argument --steps: invalid int value: 'many'"),
        (("train", "--device", "mps"), 2, "argument --device: invalid choice: 'mps' (choose from "),
        (("train", "--dropout", "1"), 1, "error: --dropout must be in [0, 1), got 1.0"),
        (("train", "--resume", "--overwrite"), 1, "error: --resume continues a run, --overwrite replaces it"),
        (("train", "--resume", "--out", "OUT"), 1, "error: nothing to resume"),
        (("evaluate", "--checkpoint", "nowhere"), 1, "error: no checkpoint at nowhere"),
        (
            ("sample", "--checkpoint", "BEST", "--prompt", "zebra9"),
            1,
            "error: --prompt: characters 'z' (U+007A) at offset 0, ",
        ),
        (("sample", "--checkpoint", "BEST", "-n", "0"), 1, "error: -n and --max-tokens must be at least 1, got 0"),
        (("evaluate", "--checkpoint", "BEST", "--threads", "-3"), 1, "error: --threads must be in [0, 4096], got -3"),
        (
            ("sample", "--checkpoint", "BEST", "--top-p", "0"),
            1,
            "error: --top-p: Input should be greater than 0, got 0.0",
        ),
    ],
)
def test_a_wrong_command_is_refused_without_a_traceback(uninterrupted, tmp_path, capsys, arguments, code, message):
    places = {"OUT": str(tmp_path / "out"), "BEST": str(uninterrupted / "best")}
    found = call([places.get(a, a) for a in arguments])
    error = capsys.readouterr().err
    assert message in error and found == code, error
    assert "Traceback" not in error


def test_a_refused_run_leaves_the_one_that_it_would_replace(uninterrupted, tmp_path, capsys):
    out = shutil.copytree(uninterrupted, tmp_path / "out")
    for message, fields in (("200,000", {"block_size": 100_000}), ("n_head", {"n_head": 3, "dtype": "float32"})):
        assert call(["train", "--overwrite", "--out", out, *tiny_flags(tmp_path, **fields)]) == 1
        assert message in capsys.readouterr().err and weights(out) == weights(uninterrupted)


@pytest.mark.parametrize(("command", "remedy"), [("train", "--accumulate 2 "), ("sample", "--device cpu")])
def test_a_full_memory_of_a_device_names_what_helps(tmp_path, monkeypatch, capsys, command, remedy):
    def fail(args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(f"training.commands.{command}.command", fail)
    assert call([command, *(["--checkpoint", tmp_path] if command == "sample" else [])]) == 1
    assert re.match(f"error: the device's memory is full: .*{remedy}", capsys.readouterr().err)


def test_help_has_units_and_defaults_and_imports_no_torch(capsys):
    code = "import sys; from training.__main__ import build_parser as b; b(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert call(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"--steps INT optimizer steps (default {TrainConfig().steps}" in text
    assert "seconds between saves; a killed run loses at most this much work (default 30.0)" in text
    assert "--muon-lr" not in text and "--help-all" in text
    for command, is_shown in ((["--help"], False), (["--help-all"], True)):
        assert call(command) == 0
        shown = capsys.readouterr().out
        assert ("lecture" in shown) == ("prepare" in shown) == is_shown
    assert call(["train", "--help-all"]) == 0
    assert "--muon-lr FLOAT" in capsys.readouterr().out
    for command in ("train", "evaluate", "sample", "score", "report", "export", "prepare", "lecture"):
        assert call([command, "--help"]) == 0
        assert not re.search(r"\(default:?\s*\)", capsys.readouterr().out), command
