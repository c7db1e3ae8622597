"""`--min-count`: rare characters as one unknown symbol, from the text to samples, scores and further runs."""

import json
import random
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.model.checkpoint import Checkpoint, CheckpointError
from service.model.params import SamplingParams
from service.model.tokenizer import NEVER, UNKNOWN, CharTokenizer
from service.text import work
from tests.helpers import VOCABULARY, call, random_model, save_random
from tests.training.runs import STEPS, TEXT, chunks_of, crash, flags, resume, start, tiny, weights
from training.commands.inputs import encoder_of
from training.config import ConfigError
from training.fit.origin import load_origin
from training.measure.losses import whole_loss
from training.run.saving import save_checkpoint
from training.text.corpus import prepare
from training.text.files import DataError, cache_dir

RARE = "漢字é"
MIXED = "".join(random.Random(1).choices(TEXT.split(" "), k=600)) + "漢é字 é漢 é" + TEXT[:200]  # é 3, 漢 2, 字 1


def without(text, min_count):
    """The text with its rare characters replaced, by counting."""
    counts = Counter(text)
    return "".join(c if counts[c] >= min_count or c in "\n\ufffd" else UNKNOWN for c in text)


def decoded(corpus):
    return corpus.tokenizer.decode(corpus.ids.tolist())


@settings(max_examples=40, deadline=None)
@given(st.text(st.sampled_from("ab\n\ufffd漢é😀x"), min_size=30, max_size=80), st.integers(2, 9))
def test_rare_characters_become_one_symbol(tmp_path_factory, text, min_count):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(text, newline="")
    expected = without(text, min_count)
    if len({*expected} - {UNKNOWN}) < 2:
        with pytest.raises(DataError):
            prepare(str(file), min_count=min_count)
        return
    corpus = prepare(str(file), min_count=min_count)
    assert decoded(corpus) == expected
    assert corpus.tokenizer.characters == sorted({*expected})
    assert corpus.symbols == len({*expected}) == corpus.describe()["symbols"]
    assert (corpus.tokenizer.unknown_id is not None) == (UNKNOWN in expected)
    replaced = sum(a != b for a, b in zip(text, expected, strict=True))
    assert corpus.replaced == (len({*text} - {*expected}), replaced)
    assert any(f"with {replaced:,} occurrence" in note for note in corpus.notes) == (replaced > 0)


def test_without_a_minimum_nothing_changes(tmp_path):
    (tmp_path / "text.txt").write_text(MIXED + UNKNOWN)
    corpus = prepare(str(tmp_path / "text.txt"))
    files = {path: path.read_bytes() for path in (cache_dir() / "corpora").rglob("*") if path.is_file()}
    for min_count in (0, 1):
        other = prepare(str(tmp_path / "text.txt"), min_count=min_count)
        assert decoded(other) == decoded(corpus) and other.tokenizer.unknown_id is None
        assert other.describe() == corpus.describe() and "replaced" not in other.describe()
    assert files == {path: path.read_bytes() for path in (cache_dir() / "corpora").rglob("*") if path.is_file()}


def test_each_minimum_has_an_encoding_of_its_own(tmp_path, monkeypatch):
    chunks_of(50, monkeypatch)
    (tmp_path / "text.txt").write_text(MIXED)
    for _ in range(2):  # written, then read from the cache
        for min_count in (1, 2, 3, 4):
            assert decoded(prepare(str(tmp_path / "text.txt"), min_count=min_count)) == without(MIXED, min_count)


def test_of_records_the_line_break_stays(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"{'ab' * 9}{c}\n" for c in "ABCDEFGHIJ"))
    corpus = prepare(str(tmp_path / "text.txt"), records=True, min_count=90)
    assert corpus.records == 10 and corpus.tokenizer.characters == ["\n", "a", "b", UNKNOWN]
    assert Counter(decoded(corpus))["\n"] == 12  # each split begins with one
    assert corpus.replaced == (10, 10)


def test_a_minimum_that_is_impossible_or_leaves_too_little_is_refused(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("a" * 30 + "b" * 20 + "c" * 10)
    for command in (["prepare"], ["train", "--out", tmp_path / "out"]):
        assert call([*command, "--data", text, "--min-count", -3]) == 1
        assert "--min-count must be " in (error := capsys.readouterr().err) and "got -3" in error
        assert call([*command, "--data", text, "--min-count", 21]) == 1
        assert capsys.readouterr().err.splitlines()[-1] == (
            "error: --min-count 21 leaves 1 of the 3 distinct characters of text.txt; a text needs at least 2: pass at "
            "most 20"
        )
    assert decoded(prepare(str(text), min_count=20)) == "a" * 30 + "b" * 20 + UNKNOWN * 10
    text.write_text("a" * 30 + "b" * 20 + "\n")
    with pytest.raises(DataError, match="leaves 1 of the 3 .* pass at most 30"):
        prepare(str(text), min_count=31)


@pytest.fixture
def run(tmp_path):
    """The folder of a run on MIXED with --min-count 3: é stays."""
    (tmp_path / "text.txt").write_text(MIXED)
    start(tiny(tmp_path, min_count=3), tmp_path / "out")
    return tmp_path / "out"


def test_a_run_names_its_unknown_symbol_and_repeats_its_bytes(tmp_path, run):
    checkpoint = Checkpoint.read(run / "best")
    tokenizer, about = checkpoint.tokenizer, checkpoint.training
    assert tokenizer.characters == sorted({*without(MIXED, 3)}) and "é" in tokenizer
    assert tokenizer.decode([tokenizer.unknown_id]) == UNKNOWN == tokenizer.replacement
    assert about["recipe"]["min_count"] == 3
    assert about["data"]["symbols"] == tokenizer.vocab_size == checkpoint.config.vocab_size
    assert about["data"]["replaced"] == {"symbols": 2, "characters": 3}
    assert UNKNOWN not in checkpoint.example_prompt
    start(tiny(tmp_path, min_count=3), tmp_path / "again")
    with crash(after=13):
        start(tiny(tmp_path, min_count=3, save_seconds=0), tmp_path / "crashed")
    resume(tmp_path / "crashed")
    assert weights(run) == weights(tmp_path / "again") == weights(tmp_path / "crashed")
    assert Checkpoint.read(tmp_path / "crashed" / "best").training["data"] == about["data"]
    # Without the option only the vocabulary and the recipe differ from what was before it.
    start(tiny(tmp_path), tmp_path / "plain")
    start(tiny(tmp_path, min_count=0), tmp_path / "zero")
    assert weights(tmp_path / "plain") == weights(tmp_path / "zero")
    plain = Checkpoint.read(tmp_path / "plain" / "best")
    assert plain.tokenizer.characters == sorted({*MIXED}) and plain.tokenizer.unknown_id is None
    assert sorted(path.name for path in plain.path.iterdir() if "generation" in path.name) == []


def test_commands_follow_the_unknown_symbol(tmp_path, run, capsys):
    checkpoint = Checkpoint.read(run / "best")
    assert call(["evaluate", "--checkpoint", run / "best"]) == 0
    shown = capsys.readouterr().out
    ids = np.array(checkpoint.tokenizer.encode(without(MIXED, 3)))
    loss = whole_loss(checkpoint.load_model(), ids[int(len(ids) * 0.9) :])
    assert f"whole      {loss:.4f} nats" in shown
    assert call(["report", "--checkpoint", run / "best", "-n", 2, "--max-tokens", 50]) == 0, capsys.readouterr().err
    # A line to score may have unknown characters, unless they are refused.
    (tmp_path / "lines.txt").write_text(f"the 漢 cat\nthe {UNKNOWN} cat\n")
    command = ["score", "--checkpoint", run / "best", "--data", tmp_path / "lines.txt"]
    capsys.readouterr()
    assert call([*command, "--unknown-characters", "refuse"]) == 1
    assert "'漢' (U+6F22) at offset 4 is not in the vocabulary" in capsys.readouterr().err
    assert call(command) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["nats"] == second["nats"] and first["characters"] == 8
    assert first["unknown_characters"] == second["unknown_characters"] == 1
    assert call(["sample", "--checkpoint", run / "best", "--prompt", "漢é", "--unknown-characters", "replace"]) == 0
    assert capsys.readouterr().out.startswith(f"{UNKNOWN}é")


def test_a_vocabulary_without_one_is_replaced_by_spaces_as_before():
    tokenizer = CharTokenizer("ab " + UNKNOWN)
    assert tokenizer.unknown_id is None and tokenizer.sampling_bias == ()

    def replaced(tokenizer, replacement=None):
        encoder = encoder_of(tokenizer, unknown_characters="replace", replacement_character=replacement)
        return tokenizer.decode(work.run(encoder.encode("a漢b", "text")))

    assert replaced(tokenizer) == "a b"
    named = CharTokenizer("ab " + UNKNOWN, has_unknown=True)
    assert (replaced(named), replaced(named, "b")) == (f"a{UNKNOWN}b", "abb")
    with pytest.raises(ValueError, match=r"must have its unknown symbol, U\+FFFD"):
        CharTokenizer("ab", has_unknown=True)


def with_unknown(folder, **about):
    """A random model that finds the unknown symbol likely everywhere."""
    tokenizer = CharTokenizer(sorted([*VOCABULARY, UNKNOWN]), has_unknown=True)
    model = random_model(vocab_size=tokenizer.vocab_size)
    with torch.no_grad():
        model.head.weight[tokenizer.unknown_id] *= 3
    save_checkpoint(folder, model, tokenizer, {"losses": {}, **about})
    return Checkpoint.read(folder)


def test_samples_do_not_have_it_though_the_model_finds_it_likely(tmp_path, capsys):
    checkpoint = with_unknown(tmp_path / "ck")
    model, prompt, unknown = checkpoint.load_model(), checkpoint.tokenizer.encode("\n"), checkpoint.tokenizer.unknown_id
    free = [model.generate(prompt, 100, SamplingParams(seed=seed)) for seed in range(5)]
    assert sum(ids.count(unknown) for ids in free) > 20
    assert call(["sample", "--checkpoint", checkpoint.path, "-n", 20, "--max-tokens", 200, "--temperature", 2]) == 0
    shown = capsys.readouterr().out
    assert len(shown) > 3000 and UNKNOWN not in shown


@pytest.mark.parametrize("named", ["", " ", "[UNK]", None, 7])
def test_another_unk_token_means_nothing_as_ever(tmp_path, named):
    checkpoint = changed_tokenizer(save_random(tmp_path / "ck", [*VOCABULARY, UNKNOWN]), named)
    assert checkpoint.tokenizer.unknown_id is None


def test_a_checkpoint_that_lacks_the_symbol_that_it_names_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer.json: the vocabulary must have its unknown symbol, U\+FFFD"):
        changed_tokenizer(save_random(tmp_path / "ck"), UNKNOWN)


def changed_tokenizer(checkpoint, unk_token):
    """Read again, with another unk_token in its tokenizer.json."""
    import hashlib

    content = json.loads((checkpoint.path / "tokenizer.json").read_bytes())
    content["model"]["unk_token"] = unk_token
    manifest = json.loads((checkpoint.path / "manifest.json").read_bytes())
    new = json.dumps(content).encode()
    manifest["files"]["tokenizer.json"] = {"sha256": hashlib.sha256(new).hexdigest(), "size": len(new)}
    (checkpoint.path / "tokenizer.json").write_bytes(new)
    (checkpoint.path / "manifest.json").write_text(json.dumps(manifest))
    return Checkpoint.read(checkpoint.path)


# -- fine-tuning and distillation --


def tuning(tmp_path, source, **changes):
    from training.config import TrainConfig
    from training.fit.origin import inherited

    fields = {"data": str(tmp_path / "more.txt"), "init_from": str(source.path), "dtype": "float32", **STEPS}
    return TrainConfig(**inherited(source) | fields | changes)


def test_fine_tuning_leaves_new_characters_to_the_symbol_only_if_asked(tmp_path):
    source = with_unknown(tmp_path / "source")
    text = TEXT + "é漢漢Q"  # Q is rare, but known
    (tmp_path / "more.txt").write_text(text)
    with pytest.raises(ConfigError, match="lacks 2 of .* or pass --extend-vocabulary to add them, or --min-count N to"):
        start(tuning(tmp_path, source), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"lacks 1 of the text's \d+ characters: '漢' \(U\+6F22\)\. Remove it"):
        start(tuning(tmp_path, source, min_count=2), tmp_path / "out")
    with crash(after=13):
        start(tuning(tmp_path, source, min_count=3, save_seconds=0), tmp_path / "crashed")
    start(tuning(tmp_path, source, min_count=3), tmp_path / "out")
    shutil.move(source.path, tmp_path / "elsewhere")
    resume(tmp_path / "crashed")
    assert weights(tmp_path / "out") == weights(tmp_path / "crashed")
    tuned = Checkpoint.read(tmp_path / "out" / "best")
    assert tuned.tokenizer.characters == source.tokenizer.characters
    assert tuned.tokenizer.unknown_id == source.tokenizer.unknown_id
    assert tuned.training["data"]["replaced"] == {"symbols": 2, "characters": 3}
    assert call(["evaluate", "--checkpoint", tuned.path]) == 0


def test_fine_tuning_extends_by_frequent_characters_and_by_the_symbol(tmp_path):
    (tmp_path / "more.txt").write_text(TEXT + "é漢漢")
    source = with_unknown(tmp_path / "source")
    corpus = prepare(str(tmp_path / "more.txt"))
    origin = load_origin(source, tuning(tmp_path, source, min_count=2, extend_vocabulary=True), corpus)
    assert origin.tokenizer.characters == [*source.tokenizer.characters, "漢"]
    assert origin.tokenizer.unknown_id == source.tokenizer.unknown_id
    plain = save_random(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"has no unknown symbol, U\+FFFD, and lacks 2 characters with it: '漢'"):
        load_origin(plain, tuning(tmp_path, plain, min_count=2), corpus)
    origin = load_origin(plain, tuning(tmp_path, plain, min_count=2, extend_vocabulary=True), corpus)
    assert origin.tokenizer.characters == [*VOCABULARY, "漢", UNKNOWN]
    assert origin.tokenizer.unknown_id == len(VOCABULARY) + 1
    assert origin.weights["embed.weight"].shape[0] == len(VOCABULARY) + 2


def test_teachers_have_the_vocabulary_of_the_run(tmp_path, run):
    taught = tiny(tmp_path, min_count=3, teachers=[str(run / "best")])
    start(taught, tmp_path / "taught")
    assert Checkpoint.read(tmp_path / "taught" / "best").tokenizer.unknown_id is not None
    with pytest.raises(ConfigError, match="teachers must have the run's vocabulary"):
        start(tiny(tmp_path, teachers=[str(run / "best")]), tmp_path / "other")


def test_a_command_prints_what_became_of_rare_characters(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(MIXED)
    assert call(["prepare", "--data", tmp_path / "text.txt", "--min-count", 3]) == 0
    line = (
        f"2 rare symbols with 3 occurrences, {3e6 / len(MIXED):.3g} per million characters, became the unknown symbol"
    )
    assert f"{line}, U+FFFD" in capsys.readouterr().out
    command = ["train", "--data", tmp_path / "text.txt", "--min-count", 3, "--out", tmp_path / "out"]
    assert call([*command, *flags(**STEPS, n_layer=1, n_embd=16, n_head=2, n_kv_head=1, block_size=8)]) == 0
    assert line in capsys.readouterr().err
    # The same command with --resume, and with another minimum.
    assert call([*command, "--resume"]) == 0
    command[command.index(3)] = 2
    assert call([*command, "--resume"]) == 1
    assert "min_count was 3, got 2" in capsys.readouterr().err


# -- other programs --


def test_transformers_encode_and_sample_as_the_service(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = with_unknown(tmp_path / "ck")
    theirs, ours = AutoTokenizer.from_pretrained(checkpoint.path), checkpoint.tokenizer
    assert (theirs.unk_token, theirs.unk_token_id) == (UNKNOWN, ours.unknown_id)
    assert theirs.encode("a漢b\n é", add_special_tokens=False) == ours.encode(f"a{UNKNOWN}b\n {UNKNOWN}")
    text = "".join(ours.characters) + "  a \n\n b"
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert len(theirs) == ours.vocab_size
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path).eval()
    prompt = torch.tensor([ours.encode("The ")])
    torch.manual_seed(0)
    assert ours.unknown_id not in model.generate(prompt, max_new_tokens=100, do_sample=True)[0]
    greedy = model.generate(prompt, max_new_tokens=40, do_sample=False)[0, 4:].tolist()
    params = SamplingParams(temperature=0.0, logit_bias=((ours.unknown_id, NEVER),))
    assert greedy == checkpoint.load_model().generate(prompt[0].tolist(), 40, params)
    torch.testing.assert_close(model(prompt).logits, checkpoint.load_model()(prompt), rtol=0, atol=1e-4)


def test_of_records_too(tmp_path):
    checkpoint = with_unknown(tmp_path / "ck", recipe={"records": True})
    found = json.loads(checkpoint.read_file("generation_config.json"))
    end = checkpoint.record_end
    assert found == {"bos_token_id": end, "eos_token_id": end, "suppress_tokens": [checkpoint.tokenizer.unknown_id]}
    assert "suppress_tokens" not in json.loads(checkpoint.read_file("config.json"))
