"""The bundled checkpoint: its description is true."""

from __future__ import annotations

import math

import pytest
from helpers import CORPUS

from service.model.checkpoint import Checkpoint
from service.settings import BUNDLED, Settings
from training.config import TrainConfig
from training.data import TINYSHAKESPEARE_SHA256, prepare
from training.evaluate import streamed_loss, whole_loss


@pytest.fixture(scope="module")
def bundled() -> Checkpoint:
    return Checkpoint.read(BUNDLED)


def test_small_and_served_by_default(bundled):
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) < 3_000_000
    assert Settings().checkpoint == BUNDLED
    assert bundled.load_model().num_parameters == bundled.training["parameters"]


def test_names_its_text_recipe_and_command(bundled):
    about = bundled.training
    assert about["data"]["sha256"] == TINYSHAKESPEARE_SHA256
    assert TrainConfig(**about["recipe"]) == TrainConfig.from_preset("cpu", weights="float16"), "make bundled"
    assert "train --preset cpu --weights float16" in about["command"]


@pytest.mark.needs("corpus")
def test_recorded_losses_are_reproduced(bundled, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    corpus = prepare(str(CORPUS))
    model, losses = bundled.load_model(), bundled.training["losses"]
    assert whole_loss(model, corpus.val) == pytest.approx(losses["whole"], abs=1e-4)
    assert streamed_loss(model, corpus.val) == pytest.approx(losses["streamed"], abs=1e-4)
    assert losses["whole"] < 1.45 and losses["streamed"] < 1.42


def test_predicts_unseen_shakespeare(bundled):
    """Lines outside the training corpus; runs without it."""
    lines = (
        "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\n"
        "Rough winds do shake the darling buds of May,\nAnd summer's lease hath all too short a date;\n"
    )
    loss = whole_loss(bundled.load_model(), bundled.tokenizer.encode_array(lines))
    assert loss < 2.0 < math.log(bundled.tokenizer.vocab_size) / 2
