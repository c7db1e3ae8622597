"""Runs that start from a checkpoint: shape, vocabulary, weights, lineage, and resuming without the checkpoint."""

import dataclasses
import shutil

import pytest
import torch

from service.model.checkpoint import Checkpoint
from tests.helpers import VOCABULARY, call, save_random
from tests.training.runs import STEPS, TEXT, crash, events, flags, resume, start, weights
from training.config import ConfigError, TrainConfig
from training.fit.origin import inherited, load_origin
from training.measure.losses import whole_loss
from training.text.corpus import prepare


@pytest.fixture
def source(tmp_path):
    """A checkpoint with a superset of TEXT's characters, which is beside it, and a shape unlike any preset's."""
    (tmp_path / "text.txt").write_text(TEXT)
    return save_random(tmp_path / "source", rope_theta=500, n_inner=24)


def config(tmp_path, source, **changes):
    fields = {"data": str(tmp_path / "text.txt"), "init_from": str(source.path), "dtype": "float32", **STEPS}
    return TrainConfig(**inherited(source) | fields | changes)


def test_a_run_starts_from_the_weights_and_keeps_vocabulary_and_shape(tmp_path, source):
    out = tmp_path / "out"
    start(config(tmp_path, source), out)
    first, *_, end = events(out)
    model = source.load_model()
    text = torch.tensor(source.tokenizer.encode(TEXT))
    val = text[int(len(TEXT) * 0.9) :].numpy()
    assert first["event"] == "evaluation" and first["step"] == 0
    assert first["val_loss"] == pytest.approx(whole_loss(model, val), rel=1e-6)
    assert end["whole"] < first["val_loss"]
    for name in ("last", "best"):
        tuned = Checkpoint.read(out / name)
        assert tuned.config == source.config
        assert tuned.tokenizer.characters == VOCABULARY
    assert tuned.load_model()(text[None, :50]).shape == (1, 50, len(VOCABULARY))
    assert whole_loss(tuned.load_model(), val) == pytest.approx(end["whole"], rel=1e-6)


def test_the_shape_is_the_checkpoints_and_conflicting_flags_are_refused(tmp_path, source, capsys):
    command = ["train", "--init-from", source.path, "--data", tmp_path / "text.txt", "--out", tmp_path / "out"]
    command += flags(**STEPS)
    assert call([*command, "--preset", "quick", "--n-layer", 3, "--block-size", 8, "--n-embd", 32]) == 1
    error = capsys.readouterr().err
    assert f"the shape of {source.path} cannot be changed: n_layer is 2, got 3; n_embd is 16, got 32. Omit" in error
    assert "block_size" not in error and "n_head" not in error and not (tmp_path / "out" / "last").exists()
    assert call([*command, "--preset", "quick", "--n-layer", 2]) == 0, capsys.readouterr().err
    assert "block_size 8, n_layer 2, n_head 4, n_kv_head 2, n_embd 16, 61 characters" in capsys.readouterr().err
    recipe = Checkpoint.read(tmp_path / "out" / "best").training["recipe"]
    assert recipe["muon_lr"] == 0.01 and recipe["block_size"] == 8 and recipe["n_inner"] == 24
    # The same command with --resume, after the checkpoint is gone.
    shutil.rmtree(source.path)
    assert call([*command, "--preset", "quick", "--resume"]) == 0, capsys.readouterr().err
    assert call([*command, "--preset", "quick", "--resume", "--n-layer", 3]) == 1
    assert "n_layer was 2, got 3" in capsys.readouterr().err


def test_missing_characters_are_listed(tmp_path, source):
    (tmp_path / "text.txt").write_text(TEXT + "né 1é")
    with pytest.raises(ConfigError, match=r"lacks 2 of the text's \d+ characters: '1' \(U\+0031\), 'é' \(U\+00E9\)\. "):
        start(config(tmp_path, source), tmp_path / "out")
    (tmp_path / "text.txt").write_text("".join(chr(0x4E00 + i) for i in range(50)) * 3 + "ab")
    unused = len(VOCABULARY) - 2
    with pytest.raises(ConfigError, match=rf"'专' .* and 30 more\. .*absent from the text, which are kept: {unused}\)"):
        start(config(tmp_path, source), tmp_path / "out")
    with pytest.raises(ConfigError, match="extend_vocabulary needs a checkpoint to extend; set init_from too"):
        TrainConfig(extend_vocabulary=True)


def test_extending_the_vocabulary_preserves_existing_ids_and_logits(tmp_path, source):
    (tmp_path / "text.txt").write_text(TEXT + "1é漢")
    corpus = prepare(str(tmp_path / "text.txt"))
    origin = load_origin(source, config(tmp_path, source, extend_vocabulary=True), corpus)
    assert origin.tokenizer.characters == [*VOCABULARY, "1", "é", "漢"]
    old = source.load_model()
    extended = type(old)(dataclasses.replace(source.config, vocab_size=64)).eval()
    extended.load_state_dict(origin.weights)
    idx = torch.randint(61, (2, 30), generator=torch.Generator().manual_seed(0))
    logits = extended(idx)
    torch.testing.assert_close(logits[..., :61], old(idx), rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[..., 61:], old(idx).mean(-1, keepdim=True).expand(2, 30, 3), rtol=0, atol=1e-5)
    new = origin.weights["embed.weight"][61:]
    assert not torch.equal(new[0], new[1]) and new.std() < 2 * origin.weights["embed.weight"][:61].std()


def test_the_lineage_is_recorded(tmp_path, source, capsys):
    start(config(tmp_path, source), tmp_path / "first")
    first = Checkpoint.read(tmp_path / "first" / "best")
    start(config(tmp_path, first, seed=5), tmp_path / "second")
    about = Checkpoint.read(tmp_path / "second" / "best").training
    lineage = about["init_from"]
    assert about["recipe"]["init_from"] == lineage["path"] == str(tmp_path / "first" / "best")
    assert lineage["manifest_sha256"] == first.digest
    assert lineage["data"] == first.training["data"] and lineage["step"] == first.training["step"]
    assert lineage["init_from"]["manifest_sha256"] == source.digest and lineage["init_from"]["init_from"] is None
    # evaluate and report find the run's text and read it in the run's vocabulary.
    assert call(["evaluate", "--checkpoint", tmp_path / "second" / "best"]) == 0
    assert f"whole      {about['losses']['whole']:.4f} nats" in capsys.readouterr().out
    assert call(["report", "--checkpoint", tmp_path / "second" / "best", "-n", 1, "--max-tokens", 60]) == 0
    assert prepare(str(tmp_path / "text.txt")).sha256 == about["data"]["sha256"]


@pytest.mark.parametrize("stop_at", [0, 9])
def test_resuming_without_the_checkpoint_gives_the_same_bytes(tmp_path, source, stop_at):
    (tmp_path / "text.txt").write_text(TEXT.replace("cat", "çât"))
    settings = config(tmp_path, source, extend_vocabulary=True)
    start(settings, tmp_path / "uninterrupted")
    out = tmp_path / "out"
    with crash(stop_at):
        start(settings, out)
    shutil.rmtree(source.path)
    resume(out)
    assert weights(out) == weights(tmp_path / "uninterrupted") and events(out) == events(tmp_path / "uninterrupted")
    lineages = [Checkpoint.read(folder / "best").training["init_from"] for folder in (out, tmp_path / "uninterrupted")]
    assert lineages[0] == lineages[1] and lineages[0]["added_characters"] == "âç"
    assert Checkpoint.read(out / "best").config.rope_theta == 500


def test_a_run_does_not_overwrite_its_starting_checkpoint(tmp_path, source):
    out = tmp_path / "out"
    start(config(tmp_path, source), out)
    before = weights(out)
    with pytest.raises(ConfigError, match="best is in .*out, which this run would replace; pass another --out"):
        start(config(tmp_path, Checkpoint.read(out / "best")), out, overwrite=True)
    assert weights(out) == before


def test_rates_and_dropout_of_a_small_text_are_those_of_tuning(tmp_path, source, capsys):
    """At a new model's rates a checkpoint was unlearned: 1.078 nats on 80 KB of Python, 1.026 at these."""
    (tmp_path / "text.txt").write_text(TEXT[:600])
    command = ["train", "--init-from", source.path, "--data", tmp_path / "text.txt", "--out", tmp_path / "out"]
    assert call([*command, "--threads", 1, "--steps", 2]) == 0
    assert " --dropout 0.07 " in (output := capsys.readouterr().err) and " --muon-lr 0.01 --adamw-lr 0.001 " in output
    recipe = Checkpoint.read(tmp_path / "out" / "best").training["recipe"]
    assert (recipe["muon_lr"], recipe["adamw_lr"], recipe["weight_decay"]) == (0.01, 0.001, 0.2)
    assert call([*command, "--threads", 1, "--steps", 2, "--muon-lr", 0.03, "--overwrite"]) == 0
    assert Checkpoint.read(tmp_path / "out" / "best").training["recipe"]["muon_lr"] == 0.03


def test_a_text_shorter_than_two_windows_is_refused_with_what_it_needs(tmp_path, source, capsys):
    source = save_random(tmp_path / "wide", block_size=32)
    (tmp_path / "short.txt").write_text("the cat sat on the mat, the dog too\n")
    command = ["train", "--init-from", source.path, "--data", tmp_path / "short.txt", "--out", tmp_path / "out"]
    assert call(command) == 1
    needed = "needs 64 characters to train on, two of its windows, got 32: add 36 characters of text"
    assert needed in capsys.readouterr().err


def test_a_model_of_records_is_tuned_on_records(tmp_path, capsys):
    """It once became a model of texts without a word, which scored a record without its line breaks."""
    names = "".join(f"{a}{b}{c}\n" for a in "bdgk" for b in "aeiou" for c in ("b", "dd", "rik"))
    (tmp_path / "names.txt").write_text(names)
    save_random(tmp_path / "source", about={"recipe": {"records": True}})
    command = ["train", "--init-from", tmp_path / "source", "--data", tmp_path / "names.txt", "--out", tmp_path / "out"]
    command += ["--threads", 1, "--preset", "quick"]
    assert call([*command, "--steps", 2]) == 0
    assert "; each line is a record, as there\n" in capsys.readouterr().err
    assert Checkpoint.read(tmp_path / "out" / "best").record_end is not None
    assert call([*command, "--resume", "--steps", 3]) == 0, capsys.readouterr().err
    assert call([*command, "--overwrite", "--steps", 2, "--no-records"]) == 0
    assert Checkpoint.read(tmp_path / "out" / "best").record_end is None
