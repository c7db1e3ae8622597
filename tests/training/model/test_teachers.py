"""Runs that learn from teachers: what is learned, whom they refuse, and resuming."""

import random

import pytest
import torch

from service.model.checkpoint import Checkpoint, CheckpointError
from tests import reference
from tests.helpers import call, save_random
from tests.training.runs import STEPS, crash, flags, new_run, resume, start, tiny, weights
from training.config import ConfigError
from training.measure.losses import whole_loss
from training.run import loop
from training.run.errors import ResumeError
from training.text.batches import IGNORED
from training.text.corpus import prepare

TEXT = "".join(random.Random(1).choices("abcd\n", weights=[8, 4, 2, 1, 1], k=4000))


@pytest.fixture(autouse=True)
def teachers(tmp_path):
    """A text and two teachers per test."""
    (tmp_path / "text.txt").write_text(TEXT)
    for seed in (1, 2):
        save_random(tmp_path / f"teacher{seed}", "\nabcd", seed=seed)


def config(tmp_path, **changes):
    teachers = [str(tmp_path / f"teacher{seed}") for seed in (1, 2)]
    return tiny(tmp_path, **{"dtype": "float32", "teachers": teachers, **changes})


def test_the_loss_is_that_against_the_teachers_mean(tmp_path):
    run = new_run(config(tmp_path, dropout=0.0))
    with torch.no_grad():
        run.model.head.weight.normal_()
    idx = torch.tensor([[1, 2, 3, 4, 0], [0, 1, 1, 2, 2]])
    targets = torch.tensor([[2, 3, 4, 0, 1], [1, 1, 2, IGNORED, IGNORED]])
    own = run.model(idx).log_softmax(-1).tolist()
    expected = 0.0
    for row in range(2):
        taught = [reference.logits(tmp_path / f"teacher{seed}", idx[row].tolist()) for seed in (1, 2)]
        for place in range(5):
            if targets[row, place] != IGNORED:
                for each in taught:
                    probabilities = reference.softmax(each[place])
                    expected -= sum(p / 2 * q for p, q in zip(probabilities, own[row][place], strict=True))
    assert loop.loss(run, idx, targets).item() == pytest.approx(expected, rel=1e-5)


def test_a_fine_tuned_run_takes_teachers_of_its_vocabulary(tmp_path):
    """That of the checkpoint it starts from, with the characters added."""
    save_random(tmp_path / "origin", "\nabc", n_head=2, n_kv_head=1)
    save_random(tmp_path / "of_the_run", "\nabcd")
    save_random(tmp_path / "sorted", "abcd\n")
    origin = ["--init-from", tmp_path / "origin", "--extend-vocabulary"]
    command = ["train", "--data", tmp_path / "text.txt", *origin, *flags(**STEPS, dtype="float32")]
    assert call([*command, "--out", tmp_path / "a", "--teachers", tmp_path / "of_the_run"]) == 0
    assert Checkpoint.read(tmp_path / "a/best").training["recipe"]["window_stages"] == 1
    assert call([*command, "--out", tmp_path / "b", "--teachers", tmp_path / "sorted"]) == 1


def test_a_run_with_teachers_resumes_to_the_same_bytes(tmp_path):
    start(config(tmp_path), tmp_path / "whole")
    with crash(13):
        start(config(tmp_path), tmp_path / "out")
    save_random(tmp_path / "teacher2", "\nabcd", seed=3)
    with pytest.raises(ResumeError, match="the teachers of this run have changed: expected .*teacher2"):
        resume(tmp_path / "out")
    save_random(tmp_path / "teacher2", "\nabcd", seed=2)
    teachers = ["--teachers", tmp_path / "teacher1", tmp_path / "teacher2"]
    assert call(["train", "--resume", "--out", tmp_path / "out", *teachers]) == 0
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    best = Checkpoint.read(tmp_path / "out" / "best")
    assert [teacher["path"] for teacher in best.training["teachers"]] == list(best.training["recipe"]["teachers"])
    # The validation loss is the text's, as ever.
    val = prepare(str(tmp_path / "text.txt")).val
    assert best.training["losses"]["whole"] == pytest.approx(whole_loss(best.load_model(), val))


def test_teachers_that_do_not_fit_are_refused_before_an_earlier_run_is_replaced(tmp_path, capsys):
    out = tmp_path / "out"
    start(config(tmp_path, steps=1, teachers=()), out)
    before = weights(out)
    save_random(tmp_path / "other", "\nabcde")
    save_random(tmp_path / "small", "\nabcd", block_size=4)
    order = "teachers must have the run's vocabulary, 5 characters in their order: .*has another, of 6"
    for teacher, error, message in (
        ("other", ConfigError, order),
        ("small", ConfigError, "teachers must have a block_size of at least 8: .*small has 4"),
        ("missing", CheckpointError, "no checkpoint at .*missing"),
        ("out/best", ConfigError, "out/best is in .*out, which this run would replace"),
    ):
        with pytest.raises(error, match=message):
            start(config(tmp_path, teachers=[str(tmp_path / teacher)]), out, overwrite=True)
    assert weights(out) == before
    command = ["train", "--data", tmp_path / "text.txt", "--out", out, "--overwrite", "--block-size", 8]
    assert call([*command, "--teachers", tmp_path / "other"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: --teachers must have the run's vocabulary")
