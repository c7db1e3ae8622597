"""What `--minutes` decides, for speeds that the tests choose; and a run of it, as a user starts one."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from service.model.checkpoint import Checkpoint
from tests.helpers import save_random
from tests.training.run.test_training import TEXT, call, flags
from training.config import MIN_SCORED, SCORED_SHARE, TrainConfig
from training.fit.plan import ENOUGH_FOR_DEPTH, LADDER, MOST_PARAMETERS, SHORT, TRAINED_SHARE, Speed, plan
from training.fit.rules import EPOCHS
from training.fit.settings import Settings
from training.text.corpus import prepare


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A text of 1.3 MB."""
    return prepare_lines(tmp_path_factory.mktemp("plan"), 500)


def prepare_lines(folder, count):
    (folder / "lines.txt").write_text("".join(f"{line}{i}\n" for i, line in enumerate(count * TEXT.splitlines())))
    return prepare(str(folder / "lines.txt"))


def planned(corpus, minutes, speed, parts=1, faster=3.0, **given):
    """The plan of a run and its config. speed: characters/s times the model's parameters, each measured in 0.1 s. An
    evaluation is `faster` times as fast.
    """

    def measure(config):
        trained = speed / config.model_config(corpus.tokenizer.vocab_size).num_parameters
        return Speed(trained, faster * trained, 0.1)

    settings = Settings({"minutes": minutes, **given})
    found = plan(settings, corpus, parts, measure=measure)
    return found, replace(settings, fitted=found.fitted).requested


def parameters(config, corpus):
    """Without embedding and head."""
    vocab_size = corpus.tokenizer.vocab_size
    return config.model_config(vocab_size).num_parameters - 2 * vocab_size * config.n_embd


def size_of(config):
    return config.n_layer, config.n_embd


def test_more_minutes_give_larger_models_and_no_more_steps_than_the_time_has(corpus):
    speed, sizes = 2e10, []
    for minutes in (0.1, 1, 4, 15, 60):
        found, config = planned(corpus, minutes, speed)
        characters = config.steps * config.tokens_per_step
        assert found.seconds < 60 * minutes * TRAINED_SHARE, "what was measured took time"
        allowed = min(found.speed.trained * found.seconds, EPOCHS * len(corpus.train))
        assert config.steps > 100 and allowed - config.tokens_per_step < characters <= allowed
        assert parameters(config, corpus) <= MOST_PARAMETERS * len(corpus.train)
        if size_of(config) != (LADDER[0]["n_layer"], LADDER[0]["n_embd"]):
            assert found.speed.trained * found.seconds >= ENOUGH_FOR_DEPTH * parameters(config, corpus)
        sizes.append(parameters(config, corpus))
    assert sizes == sorted(sizes) and len(set(sizes)) >= 3


def test_counts_teach_a_new_model_in_a_short_run_alone(corpus, tmp_path):
    for minutes, speed in (1, 2e9), (1, 2e10), (60, 2e10):
        config = planned(corpus, minutes, speed)[1]
        assert config.counted == (config.steps < SHORT), (minutes, speed)
    assert planned(corpus, 1, 2e9)[1].counted == 1.0
    assert planned(corpus, 1, 2e9, init_from=str(tmp_path))[1].counted == 0.0
    assert planned(corpus, 1, 2e9, counted=0.2)[1].counted == 0.2


def test_a_text_that_is_too_short_for_the_time_ends_the_run_early(corpus, tmp_path):
    found, config = planned(corpus, 10_000, 2e10)
    assert config.steps * config.tokens_per_step == pytest.approx(EPOCHS * len(corpus.train), rel=0.01)
    assert config.dropout > 0 and config.patience
    [chosen, short] = found.lines
    assert "10000 minutes" in chosen and "seen the text 10 times" in short
    few = prepare_lines(tmp_path, 40)
    _, config = planned(few, 60, 2e10)
    assert config.tokens_per_step == 1024, "few steps, which are smaller"
    assert config.dropout > 0.1 and config.patience


def test_a_time_that_is_too_short_is_said(corpus):
    found, config = planned(corpus, 0.01, 2e10)
    assert config.steps == 100
    [_, late] = found.lines
    assert "the run takes about" in late and "fewer than 100 steps" in late


@pytest.mark.parametrize("faster", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("minutes", [0.5, 1, 4])
def test_evaluations_and_scores_end_in_time_at_any_speed(corpus, minutes, faster):
    """A slow machine once evaluated 270,000 characters beside 102,000 trained ones. A fast one still does."""
    evaluated = []
    for speed in (3e8, 1e9, 1e10, 1e11):
        found, config = planned(corpus, minutes, speed, faster=faster)
        rate, val = found.speed, len(corpus.val)
        steps, trained = config.steps, config.steps * config.tokens_per_step
        evaluations = sum(step % config.eval_every == 0 or step == steps for step in range(1, steps + 1))
        each = min(val, max(config.eval_chars, config.block_size))
        auto = max(MIN_SCORED, trained * SCORED_SHARE / 2)
        scored = 2 * min(val, auto if config.score_chars == "auto" else int(config.score_chars))
        seconds = trained / rate.trained + (evaluations * each + scored) / rate.evaluated
        assert seconds <= 1.01 * max(60 * minutes, trained / rate.trained / TRAINED_SHARE)
        assert evaluations >= 4
        evaluated.append(config.eval_chars)
    assert faster < 3 or evaluated[-1] >= 30_000
    assert minutes > 0.5 or evaluated[0] < 30_000


def test_what_the_user_sets_stays(corpus):
    given = {"n_layer": 3, "batch_size": 5, "dropout": 0.2}
    _, config = planned(corpus, 15, 2e10, **given)
    assert given == {name: getattr(config, name) for name in given}
    assert config.n_embd == TrainConfig().n_embd  # sizes belong together
    assert planned(corpus, 4, 2e10, parts=3)[1].batch_size % 3 == 0


def test_a_run_of_minutes_is_repeated_by_what_it_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("training.run.start.measured_speed", lambda *_: Speed(1_500.0, 1_500.0))
    (tmp_path / "text.txt").write_text("".join(f"{line}{i}\n" for i, line in enumerate(20 * TEXT.splitlines())))
    common = {"data": tmp_path / "text.txt", "threads": 1, "dtype": "float32", "sample_chars": 0}
    small = {"n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 16}
    assert call(["train", *flags(out=tmp_path / "a", minutes=1, **common, **small)]) == 0
    [chosen] = re.findall(r"measured here:(.*); each can be set", capsys.readouterr().err)
    again = [*flags(out=tmp_path / "b", **common, **small), *chosen.split()]
    assert call(["train", *again]) == 0
    one, two = (Checkpoint.read(tmp_path / name / "best") for name in "ab")
    assert (one.path / "model.safetensors").read_bytes() == (two.path / "model.safetensors").read_bytes()
    recipes = [each.training["recipe"] for each in (one, two)]
    assert [recipe.pop("minutes") for recipe in recipes] == [1, 0] and recipes[0] == recipes[1]
    assert recipes[0]["steps"] > 100
    assert call(["train", "--resume", *flags(out=tmp_path / "a", minutes=1)]) == 0
    assert "is already finished" in capsys.readouterr().err


@pytest.mark.parametrize("is_tuned", [False, True])
def test_minutes_of_records_and_of_a_checkpoint(tmp_path, is_tuned):
    (tmp_path / "text.txt").write_text("".join(f"{line}{i}\n" for i, line in enumerate(20 * TEXT.splitlines())))
    fields = {"data": tmp_path / "text.txt", "threads": 1, "dtype": "float32", "sample_chars": 0, "minutes": 0.001}
    if is_tuned:
        save_random(tmp_path / "start", "".join(sorted({*(tmp_path / "text.txt").read_text()})))
        fields |= {"init_from": tmp_path / "start"}
    else:
        fields |= {"n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 16}
    assert call(["train", *flags(out=tmp_path / "out", **fields), *([] if is_tuned else ["--records"])]) == 0
    recipe = Checkpoint.read(tmp_path / "out" / "best").training["recipe"]
    assert (recipe["steps"], recipe["minutes"]) == (100, 0.001)
    assert (recipe["muon_lr"] == 0.01) == is_tuned, "a rate of fine-tuning"


@pytest.mark.parametrize("other", [["--preset", "quick"], ["--steps", "7"]])
def test_minutes_exclude_what_they_decide(tmp_path, capsys, other):
    assert call(["train", *flags(data=tmp_path, out=tmp_path / "out", minutes=2), *other]) == 1
    assert f"--minutes 2 decides what {' '.join(other)} does; pass only one" in capsys.readouterr().err
