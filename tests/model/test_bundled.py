"""The bundled checkpoint: its description is true."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from service.model.checkpoint import Checkpoint
from service.settings import BUNDLED, Settings
from tests.helpers import CORPUS
from training.config import TrainConfig
from training.data import TINYSHAKESPEARE_SHA256, prepare
from training.evaluate import streamed_loss, whole_loss


@pytest.fixture(scope="module")
def bundled() -> Checkpoint:
    return Checkpoint.read(BUNDLED)


def test_small_and_served_by_default(bundled):
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) < 3_000_000
    assert Settings().places == [(None, BUNDLED)]
    assert bundled.load_model().config.num_parameters == bundled.training["parameters"]


def test_names_its_text_recipe_and_command(bundled):
    about = bundled.training
    assert about["data"]["sha256"] == TINYSHAKESPEARE_SHA256
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    seeds = re.search(r"^TEACHERS := (.*)$", makefile, re.M)[1].split()
    teachers = [f"checkpoints/teacher-{seed}/best" for seed in seeds]
    steps = int(re.search(r"training train --steps (\d+) --teachers", makefile)[1])
    gone = ("ema_decay", "muon_beta2")  # settings that there are no more: it was trained with NorMuon
    recipe = {name: value for name, value in about["recipe"].items() if name not in gone}
    assert TrainConfig(**recipe) == TrainConfig(steps=steps, teachers=teachers, weights="float16")
    assert f"train --steps {steps} --teachers {' '.join(teachers)} --weights float16" in about["command"]
    assert [teacher["path"] for teacher in about["teachers"]] == teachers


@pytest.mark.needs("corpus")
def test_recorded_losses_are_reproduced(bundled, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    corpus = prepare(str(CORPUS))
    model, losses = bundled.load_model(), bundled.training["losses"]
    assert whole_loss(model, corpus.val) == pytest.approx(losses["whole"], abs=1e-4)
    assert streamed_loss(model, corpus.val) == pytest.approx(losses["streamed"], abs=1e-4)
    assert losses["whole"] < 1.41 and losses["streamed"] < 1.40


def test_predicts_unseen_shakespeare(bundled):
    """Lines outside the training corpus; runs without it."""
    lines = (
        "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\n"
        "Rough winds do shake the darling buds of May,\nAnd summer's lease hath all too short a date;\n"
    )
    loss = whole_loss(bundled.load_model(), bundled.tokenizer.encode_array(lines))
    assert loss < 2.0 < math.log(bundled.tokenizer.vocab_size) / 2
