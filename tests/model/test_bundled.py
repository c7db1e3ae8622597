"""The bundled checkpoint: its description is true."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from service.model.checkpoint import Checkpoint
from service.model.counts import COUNTS
from service.settings import BUNDLED, Settings
from tests.helpers import CORPUS, web
from training.config import TrainConfig
from training.measure.losses import whole_loss
from training.text.corpus import prepare
from training.text.encoding import encode_array
from training.text.files import TINYSHAKESPEARE_SHA256


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint.read(BUNDLED)


def test_small_and_served_by_default(checkpoint):
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) < 7_000_000
    assert Settings().places == [(None, BUNDLED)]
    assert checkpoint.load_model().config.num_parameters == checkpoint.training["parameters"]


def test_names_its_text_recipe_and_command(checkpoint):
    about = checkpoint.training
    assert about["data"]["sha256"] == TINYSHAKESPEARE_SHA256
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    seeds = re.search(r"^TEACHERS := (.*)$", makefile, re.M)[1].split()
    teachers = [f"checkpoints/teacher-{seed}/best" for seed in seeds]
    flags, steps, decay = re.search(r"THEN\) (--steps (\d+) --weight-decay ([\d.]+)) --teachers", makefile).groups()
    assert "THEN := --block-size 256 --batch-size 8 --eval-every 610 " in makefile
    settings = dict(
        block_size=256, batch_size=8, eval_every=610, steps=int(steps), weight_decay=float(decay), score_chars="all"
    )
    assert TrainConfig(**about["recipe"]) == TrainConfig(teachers=teachers, weights="float16", **settings)
    assert f"{flags} --teachers {' '.join(teachers)} --weights float16" in about["command"]
    assert [teacher["path"] for teacher in about["teachers"]] == teachers


@pytest.mark.needs("corpus")
def test_counts_are_those_of_its_text(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert checkpoint.read_file(COUNTS) == prepare(str(CORPUS)).counts.dump()


@pytest.mark.needs("corpus")
def test_recorded_losses_are_those_of_the_service(checkpoint, bundled, monkeypatch, tmp_path):
    """In windows, each without what precedes it, and streamed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    losses, window = checkpoint.training["losses"], checkpoint.config.block_size
    text = checkpoint.tokenizer.decode(prepare(str(CORPUS)).val)
    windows = [text[i : i + window + 1] for i in range(0, len(text) - 1, window)]
    for name, texts in {"whole": windows, "streamed": [text]}.items():
        found = web.post(f"{bundled.url}/v1/score", json={"texts": texts}).json()["data"]
        nats, characters = (sum(each[key] for each in found) for key in ("nats", "characters"))
        assert characters == len(text) - 1 and nats / characters == pytest.approx(losses[name], abs=1e-5)
    assert losses["whole"] < 1.375 and losses["streamed"] < 1.36


def test_predicts_unseen_shakespeare(checkpoint):
    """Lines outside the training corpus; runs without it."""
    lines = (
        "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\n"
        "Rough winds do shake the darling buds of May,\nAnd summer's lease hath all too short a date;\n"
    )
    loss = whole_loss(checkpoint.load_model(), encode_array(checkpoint.tokenizer, lines))
    assert loss < 2.0 < math.log(checkpoint.tokenizer.vocab_size) / 2
