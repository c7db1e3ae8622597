"""The commands on a small random checkpoint: output, files and error messages."""

import hashlib
import importlib.metadata
import io
import json
import math
import re
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from service.model.checkpoint import Checkpoint
from service.model.counts import Counts
from service.model.params import SamplingParams
from service.model.tokenizer import CharTokenizer
from tests.helpers import VOCABULARY, call, random_model, save_random
from tests.training.runs import events, flags
from training.measure.losses import streamed_loss, whole_loss
from training.messages import unescaped
from training.run.saving import save_checkpoint
from training.text.corpus import prepare

TEXT = "The cat sat on the mat.\nA dog, too!\n" * 20
MODEL = random_model()
TINY = flags(block_size=8, n_layer=1, n_head=1, n_kv_head=1, n_embd=4, threads=1, dtype="float32", sample_chars=0)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.fixture
def checkpoint(tmp_path, text):
    """Random weights, recorded as trained on the text."""
    data = {"sha256": hashlib.sha256(TEXT.encode()).hexdigest()}
    training = {"recipe": {"data": [str(text)], "records": False}, "data": data}
    save_random(tmp_path / "ck", about=training)
    return tmp_path / "ck"


@pytest.fixture
def output_of(capsys):
    """Run a command that must succeed; returns its standard output."""

    def run(*arguments):
        assert call(arguments) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


@pytest.fixture
def error_of(capsys):
    """Run a command that must fail without a traceback or output; returns its standard error."""

    def run(*arguments, code=1):
        assert call(arguments) == code
        output, error = capsys.readouterr()
        assert output == "" and "Traceback" not in error
        return error

    return run


# train and prepare: texts


def test_unusable_texts_are_refused(text, tmp_path, error_of):
    text.write_bytes(b"zzzzzzzz" * 99)
    message = "text.txt contains only the character 'z'; a text needs at least 2 distinct characters"
    assert message in error_of("prepare", "--data", text)
    assert message in error_of("train", "--data", text, "--out", tmp_path / "out")
    assert not (tmp_path / "out" / "last").exists()


def test_large_vocabularies_train_with_a_warning(text, tmp_path, capsys):
    text.write_text("".join(map(chr, range(0x4E00, 0x4E00 + 3000))))
    assert call(["train", "--data", text, "--out", tmp_path / "out", *TINY, "--batch-size", 2, "--steps", 1]) == 0
    error = " ".join(capsys.readouterr().err.split())
    parameters = Checkpoint.read(tmp_path / "out" / "best").load_model().config.num_parameters
    assert f"embedding and head of 3,000 symbols take 24,000 of {parameters:,} parameters" in error


def test_a_folder_is_trained_on_by_its_texts_that_match(text, tmp_path, capsys):
    """Also by the commands that follow, and when the run is resumed."""
    folder, out = tmp_path / "folder", tmp_path / "out"
    folder.mkdir()
    text.rename(folder / "a.py")
    (folder / "b.md").write_text("not this\n" * 9)
    (folder / "d.py").write_bytes(bytes(100))
    command = ["train", "--data", folder, "--glob", "*.py", "*.txt", "--out", out, *TINY]
    assert call([*command, "--steps", 8]) == 0
    error = capsys.readouterr().err
    assert f"{folder}: skipped 1 binary file: d.py\n" in error and "warning: the vocabulary" not in error
    assert call(["prepare", "--data", folder, "--glob", "*.py"]) == 0
    assert f"{len(TEXT):,} characters, {len(set(TEXT))} symbols" in capsys.readouterr().out
    assert Checkpoint.read(out / "best").training["data"]["sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert call(["train", "--resume", "--out", out, "--steps", 12]) == 0
    assert call(["evaluate", "--checkpoint", out]) == 0 and call(["sample", "--checkpoint", out, "--novel"]) == 0
    assert "all but the first scored" in capsys.readouterr().out
    assert call(["evaluate", "--checkpoint", out, "--data", folder, "--glob", "*.py"]) == 0
    lines = f"{folder}: skipped 1 binary file: d.py\n{folder}: {len(TEXT)} characters"
    assert capsys.readouterr().out.startswith(lines)


def test_a_run_says_what_to_expect_and_how_it_went(text, tmp_path, capsys):
    """The size of the text before, the verdict after; a short run is evaluated often."""
    out = tmp_path / "out"
    assert (
        call(["train", "--data", text, "--out", out, *TINY, *flags(steps=16, muon_lr=0, adamw_lr=0, patience=0)]) == 0
    )
    output = capsys.readouterr().err
    parameters = Checkpoint.read(out / "best").load_model().config.num_parameters
    assert f"size: {parameters} parameters for 648 characters to train on" in output
    seconds = r"about \d+ s to the end: \d+ s of training, \d+ s of scoring 72 validation characters\n"
    assert re.search(seconds, output)
    assert "overlap: 100% of the validation split's 50-grams" in output  # as the text repeats two lines
    assert "648 characters to train on: --batch-size 128 --weight-decay 0.2 --warmup-steps 4 --eval-every 2;" in output
    assert [r["step"] for r in events(out) if r["event"] == "evaluation"] == list(range(2, 17, 2))
    assert "the network is no better than guessing all characters alike" in output
    assert call(["train", "--resume", "--out", out, "--steps", 18]) == 0
    assert "size:" not in capsys.readouterr().err


def test_files_of_a_folder_can_be_left_out(text, tmp_path, error_of, output_of):
    """One Latin-1 file once ended every run over a folder."""
    folder = tmp_path / "folder"
    (folder / "old").mkdir(parents=True)
    text.rename(folder / "a.txt")
    (folder / "old" / "café.txt").write_bytes("café\n".encode("latin-1") * 9)
    error = error_of("prepare", "--data", folder)
    assert (
        "café.txt is not UTF-8: byte 0xE9 at offset 3" in error and "or leave it out with --exclude 'café.txt'" in error
    )
    for pattern in ("café.txt", "old/*"):
        assert f"{len(TEXT):,} characters" in output_of("prepare", "--data", folder, "--exclude", pattern)
    assert "--exclude *.txt leaves none of 2 files in" in error_of("prepare", "--data", folder, "--exclude", "*.txt")
    out = tmp_path / "out"
    assert call(["train", "--data", folder, "--exclude", "old/*", "--out", out, *TINY, "--steps", 8]) == 0
    assert call(["train", "--resume", "--out", out, "--steps", 9]) == 0
    assert "validation split of a.txt" in output_of("evaluate", "--checkpoint", out)


@pytest.mark.parametrize(
    ("name", "module", "remedy"),
    [("a.xz", "lzma", "xz -dk"), ("a.bz2", "bz2", "bunzip2 -k"), ("a.zip", "zip", "unzip")],
)
def test_packed_texts_are_named_with_what_unpacks_them(tmp_path, error_of, name, module, remedy):
    if module == "zip":
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("a.txt", TEXT)
    else:
        (tmp_path / name).write_bytes(importlib.import_module(module).compress(TEXT.encode()))
    assert f"it is packed: unpack it first, with {remedy}" in error_of("prepare", "--data", tmp_path / name)


def test_a_home_that_is_missing_or_read_only_is_named_with_the_remedy(text, tmp_path, error_of, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("training.text.files.Path.home", no_home)
    assert "set HOME or XDG_CACHE_HOME to a folder you can write" in error_of("prepare", "--data", text)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    error = error_of("prepare", "--data", text)
    assert "cannot be written: " in error and "set XDG_CACHE_HOME to a folder for encoded texts that can" in error
    assert "cannot be created: Not a directory; pass another --out" in error_of(
        "train", "--out", tmp_path / "file" / "x"
    )


def test_a_source_tree_that_is_not_installed_trains(text, tmp_path, monkeypatch):
    """It once died at its first save, with nothing saved."""

    installed = importlib.metadata.version

    def version(name):
        if name == "chargpt":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert call(["train", "--data", text, "--out", tmp_path / "out", *TINY, "--steps", 1]) == 0
    assert Checkpoint.read(tmp_path / "out" / "best").training["versions"]["chargpt"] == "0.0"


# evaluate


def test_evaluate_prints_both_losses_of_any_text(checkpoint, text, tmp_path, output_of, error_of):
    def expected(text):
        ids = np.array(CharTokenizer(VOCABULARY).encode(text))
        losses = {"whole": whole_loss(MODEL, ids), "streamed": streamed_loss(MODEL, ids)}
        return [f"{k:<10} {v:.4f} nats  {v / math.log(2):.4f} bits per character" for k, v in losses.items()]

    first, *lines = output_of("evaluate", "--checkpoint", checkpoint, "--data", text).splitlines()
    assert first == f"{text}: {len(TEXT)} characters, all but the first scored" and lines == expected(TEXT)
    first, *lines = output_of("evaluate", "--checkpoint", checkpoint).splitlines()
    assert first == "validation split of text.txt: 72 characters, all but the first scored"
    ids = np.array(CharTokenizer(VOCABULARY).encode(TEXT))
    V = len(VOCABULARY)
    counts = Counts.load(Counts.count(ids[:-72], V).dump(), V)
    counted = -np.log(counts.probabilities(ids[-72:])[0]).mean()
    assert lines[:2] == expected(TEXT[-72:]) and [line.split()[0] for line in lines[2:]] == [
        "uniform",
        "unigram",
        "kneser_ney",
    ]
    assert lines[4].startswith(f"kneser_ney {counted:.4f} nats")
    (tmp_path / "more.txt").write_text("Yes\nNo 7, 8")
    message = (
        "character '7' (U+0037) at offset 727 is not in the vocabulary, one of 2 characters that are not; --unknown"
    )
    command = ["evaluate", "--checkpoint", checkpoint, "--data", text, tmp_path / "more.txt"]
    assert message in error_of(*command)
    assert output_of(*command, "--unknown-characters", "drop").splitlines()[1:] == expected(TEXT + "Yes\nNo , ")
    text.write_text(TEXT + "more")
    error = error_of("evaluate", "--checkpoint", checkpoint)
    assert f"{text} is not the training text of {checkpoint}: SHA-256" in error


def score(command_output):
    return [json.loads(line) for line in command_output.splitlines()]


# a run's folder as a checkpoint


def test_a_runs_folder_stands_for_its_best(checkpoint, text, tmp_path, output_of, error_of, capsys):
    run = tmp_path / "run"
    run.mkdir()
    checkpoint.rename(run / "best")
    (tmp_path / "lines.txt").write_text("The cat\n")
    for command in (
        ["evaluate", "--data", text],
        ["sample", "--max-tokens", 3],
        ["score", "--data", tmp_path / "lines.txt"],
        ["report", "-n", 1, "--max-tokens", 60],
        ["export", "--to", "gguf", "--out", tmp_path / "model.gguf"],
    ):
        assert call([command[0], "--checkpoint", run, *command[1:]]) == 0
        output, error = capsys.readouterr()
        assert f"{run} is a run's folder: taking its best, {run / 'best'}\n" in error
        if command[0] != "export":
            assert output == output_of(command[0], "--checkpoint", run / "best", *command[1:])
    few = ["--data", text, "--out", tmp_path / "tuned", "--steps", 1, "--sample-chars", 0, "--threads", 1]
    assert call(["train", "--init-from", run, *few, "--dtype", "float32"]) == 0
    assert Checkpoint.read(tmp_path / "tuned" / "best").training["init_from"]["path"] == str(run / "best")
    (run / "best").rename(run / "last")
    error = error_of("sample", "--checkpoint", run)
    assert f"{run} is the folder of a run that has no best yet" in error and str(run / "last") in error
    assert "not a folder" in error_of("sample", "--checkpoint", tmp_path / "nothing")


# sample


def test_sample_text_depends_on_its_seed_alone(checkpoint, output_of, error_of):
    exact, tokenizer = random_model(torch.float64), CharTokenizer(VOCABULARY)
    command = ["sample", "--checkpoint", checkpoint, "--prompt", "The ", "--max-tokens", 12, "-n", 3, "--seed", 7]
    command += ["--temperature", 0.8]
    for given in ({"top_k": 9}, {"min_p": 0.2}, {"typical_p": 0.5}):
        params = [SamplingParams(0.8, seed=seed, **given) for seed in (7, 8, 9)]
        expected = ["The " + tokenizer.decode(exact.generate(tokenizer.encode("The "), 12, it)) for it in params]
        records = score(output_of(*command, *flags(**given), "--format", "jsonl"))
        assert records == [{"text": text, "seed": seed} for text, seed in zip(expected, (7, 8, 9), strict=True)]
        assert output_of(*command, *flags(**given)) == "\n\n".join(expected) + "\n"
    error = error_of("sample", "--checkpoint", checkpoint, "--min-p", 2)
    assert error == "error: --min-p: Input should be less than or equal to 1, got 2.0\n"
    last = ["--seed", 2**64 - 1, "--format", "jsonl"]  # the latter of two options counts
    assert [it["seed"] for it in score(output_of(*command, *last))] == [2**64 - 1, 0, 1]


def test_sample_unique_and_stop(checkpoint, output_of, error_of, capsys):
    command = ["sample", "--checkpoint", checkpoint, "--unique", "--format", "jsonl", "--max-tokens", 3]
    texts = [it["text"] for it in score(output_of(*command, "--stop", r"\n", "--stop", "e", "-n", 40))]
    assert len(set(texts)) == len(texts) == 40 and not any("\n" in text or "e" in text for text in texts)
    error = error_of(*command, "-n", 3, "--stop", "")
    assert error.startswith("error: --stop: Input should be a text or a list of at most 16, of 1 to 1000 characters")
    assert call([*command, "--top-k", 1, "-n", 2]) == 1
    assert "error: found only 1 distinct text of 2 requested; raise the temperature" in capsys.readouterr().err


def test_escapes():
    given = [r"a\nb", r"\t", r"\\n", r"F/C=C\F", "\\"]
    assert [*map(unescaped, given)] == ["a\nb", "\t", r"\n", r"F/C=C\F", "\\"]


def test_sample_follows_patterns(checkpoint, output_of, error_of, monkeypatch):
    monkeypatch.setattr("training.commands.sample.MAX_RUNNING", 7)  # fewer than texts
    command = ["sample", "--checkpoint", checkpoint, "--prompt", "The ", "--max-tokens", 20, "-n", 30]
    pattern = "[a-e]{2,5}( [f-z]+)?"
    texts = [record["text"] for record in score(output_of(*command, "--regex", pattern, "--format", "jsonl"))]
    assert len(set(texts)) > 5 and all(re.fullmatch(f"The {pattern}", text) for text in texts)
    free = [record["text"] for record in score(output_of(*command, "--format", "jsonl"))]
    stopped = [record["text"] for record in score(output_of(*command, "--stop-regex", "[aeiou]+", "--format", "jsonl"))]
    assert stopped == ["The " + re.split("[aeiou]", text.removeprefix("The "))[0] for text in free] != free
    error = error_of(*command, "--regex", "(")
    assert error == "error: --regex: offset 0: unmatched '('; write \\( for a literal '('\n"
    assert "the shortest match has 30 characters, --max-tokens is 20" in error_of(*command, "--regex", "a{30}")
    assert "--stop-regex: must not match the empty text" in error_of(*command, "--stop-regex", "a*")
    assert "cannot be combined with --stop" in error_of(*command, "--regex", "a", "--stop", "b")


def test_exact_samples_are_the_free_ones_that_match(checkpoint, output_of, error_of, capsys):
    command = ["sample", "--checkpoint", checkpoint, "--prompt", "The ", "--max-tokens", 12, "--format", "jsonl"]
    exact = ["--exact", "--regex", "[^aeiou\n]{2}[^\n]*", "-n", 5]
    found = score(output_of(*command, *exact))
    texts = [it["text"].removeprefix("The ") for it in found]
    assert all(re.fullmatch("[^aeiou\n]{2}[^\n]*", text) for text in texts)
    for it, text in zip(found, texts, strict=True):
        (free,) = score(output_of(*command, "--seed", it["seed"]))
        assert free["text"].removeprefix("The ").startswith(text)
    assert call([*command, *exact]) == 0
    assert re.search(r"acceptance [\d.]+ %: 5 of \d+ candidates matched, \d+ characters", capsys.readouterr().err)
    unique = [it["text"] for it in score(output_of(*command, *exact, "--unique"))]
    assert len(set(unique)) == 5
    assert call([*command, *exact[:3], "-n", 500, "--max-candidates", 1]) == 1
    assert re.search(r"found only \d+ texts of 500 requested: acceptance .* raise --max-cand", capsys.readouterr().err)
    assert error_of(*command, "--exact") == "error: --exact needs --regex\n"
    assert "--max-candidates must be at least 1, got 0" in error_of(*command, *exact, "--max-candidates", 0)
    assert "--max-candidates needs --exact" in error_of(*command, "--max-candidates", 5)


def test_unknown_characters_of_a_prompt_are_refused_replaced_or_dropped(checkpoint, output_of, error_of, capsys):
    command = ["sample", "--checkpoint", checkpoint, "--max-tokens", 5, "--prompt"]
    error = error_of(*command, "naïve")
    assert error == "error: --prompt: character 'ï' (U+00EF) at offset 2 is not in the vocabulary\n"
    command += ["naïve", "--unknown-characters"]
    assert output_of(*command, "drop") == output_of(*command[:-2], "nave")
    assert output_of(*command, "replace") == output_of(*command[:-2], "na ve")
    call([*command, "replace"])
    assert "1 unknown character replaced" in capsys.readouterr().err
    error = error_of(*command, "replace", "--replacement-character", "é")
    assert error.startswith("error: --replacement-character: 'é', which is to replace 'ï' at offset 2 of prompt, is ")
    output_of(*command[:-2], "nave", "--unknown-characters", "replace", "--replacement-character", "é")  # not needed


def test_sample_ends_at_the_end_of_a_record(tmp_path, output_of):
    save_random(tmp_path, about={"recipe": {"records": True}})
    command = ["sample", "--checkpoint", tmp_path, "--max-tokens", 60, "-n", 20]
    records = output_of(*command).splitlines()
    assert len(records) == 20 and any(len(record) < 60 for record in records)
    assert any("\n" in it["text"] for it in score(output_of(*command, "--stop", "Z", "--format", "jsonl")))


def test_a_mark_that_looks_like_a_flag_needs_an_equals_sign(tmp_path, output_of, capsys):
    (tmp_path / "text.txt").write_text("\n---\n".join(f"one\n{i}" for i in range(12)))
    command = ["prepare", "--data", tmp_path / "text.txt"]
    assert call([*command, "--records", "---"]) == 2
    assert "unknown argument ---; to use it as the separator of records, write --records=---" in capsys.readouterr().err
    assert call([*command, "--records", ""]) == 2
    assert "argument --records: must not be empty" in capsys.readouterr().err
    for mark in ("---", r"\n---\n"):
        assert "76 characters, 15 symbols" in output_of(*command, f"--records={mark}")


def test_no_record_is_empty(tmp_path, output_of):
    """A model that would end every second one at once; a prompt may be a whole record."""
    model, tokenizer = random_model(), CharTokenizer(VOCABULARY)
    with torch.no_grad():
        model.head.weight[tokenizer.encode("\n")[0]] *= 4
    save_checkpoint(tmp_path, model, tokenizer, {"losses": {}, "recipe": {"records": True}})
    command = ["sample", "--checkpoint", tmp_path, "--max-tokens", 60, "-n", 200]
    records = output_of(*command).splitlines()
    assert len(records) == 200 and "" not in records
    assert "\n" in output_of(*command, "--stop", "Z")
    assert "Al" in output_of(*command, "--prompt", "Al").splitlines()


def test_records_that_were_shuffled_otherwise_are_not_scored(tmp_path, output_of, error_of):
    """A checkpoint of before the order changed has seen most of what is the validation split now."""
    (tmp_path / "names.txt").write_text("".join(f"{a}{b}{c}\n" for a in "bcd" for b in "aei" for c in "lmn"))
    corpus = prepare(str(tmp_path / "names.txt"), records=True)
    recipe = {"records": True, "data": [str(tmp_path / "names.txt")]}
    about = {"losses": {}, "recipe": recipe, "data": corpus.describe()}
    model = random_model(vocab_size=corpus.tokenizer.vocab_size)
    save_checkpoint(tmp_path / "new", model, corpus.tokenizer, about)
    assert "whole" in output_of("evaluate", "--checkpoint", tmp_path / "new")
    for old in ({"split": None}, {"records": corpus.records + 1}):
        save_checkpoint(tmp_path / "old", model, corpus.tokenizer, {**about, "data": {**corpus.describe(), **old}})
        for command in ("evaluate", "report"):
            assert "which shuffled records in another order" in error_of(command, "--checkpoint", tmp_path / "old")


def test_sample_of_a_text_without_line_breaks(tmp_path, output_of, error_of):
    save_random(tmp_path, "ACGT")
    text = output_of("sample", "--checkpoint", tmp_path, "--max-tokens", 30)
    assert len(text) == 32 and text[0] == "A" and set(text) <= set("ACGT\n")
    (tmp_path / "lines.txt").write_text("GATTACA\n")
    error = error_of("score", "--checkpoint", tmp_path, "--data", tmp_path / "lines.txt", "--records")
    assert "whose vocabulary includes the line break" in error
    command = ["sample", "--checkpoint", tmp_path, "--max-tokens", 40]  # as at the service, such stops never occur
    assert output_of(*command, "--stop", r"\n", "--stop", "xyz").strip() == output_of(*command).strip()
    assert len(output_of(*command, "--stop", r"\n", "--stop", "G")) < 41


def test_a_closed_pipe_ends_the_command_silently(checkpoint):
    """As in `sample | head`."""
    command = [sys.executable, "-W", "error", "-m", "training", "sample", "--checkpoint", checkpoint, "-n", "10000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141


def test_an_encoding_that_lacks_a_character_gets_its_escape(tmp_path, monkeypatch):
    save_random(tmp_path, "ä→\n")
    monkeypatch.setattr(sys, "stdout", stdout := io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert call(["sample", "--checkpoint", tmp_path, "--max-tokens", 50]) == 0
    stdout.flush()
    output = stdout.buffer.getvalue().decode("latin-1")
    assert set(output.replace("\\u2192", "→")) <= set("ä→\n") and "\\u2192" in output


# report


def test_report_compares_generated_text_with_the_validation_split(checkpoint, text, output_of, error_of):
    output = output_of("report", "--checkpoint", checkpoint, "-n", 2, "--max-tokens", 100)
    cells = [line.split("│") for line in output.splitlines()[3:-1]]
    rows = {it[1].strip(): [cell.strip() for cell in it[2:4]] for it in cells}
    assert rows["characters"] == ["200", "72"]
    # The text is periodic, so the validation split occurs in the training split.
    assert rows["longest copied passage"][1] == "72" and rows["share of 50-grams copied"] == ["0", "1"]
    assert int(rows["longest copied passage"][0]) < 20
    assert output_of("report", "--checkpoint", checkpoint, "--data", text, "-n", 2, "--max-tokens", 100) == output
    text.write_text(TEXT + "more")
    assert "is not the training text of" in error_of("report", "--checkpoint", checkpoint, "--data", text)
    assert "at least 1, got 0 and 5000" in error_of("report", "--checkpoint", checkpoint, "-n", 0)


def test_report_of_records_tells_what_is_unique_novel_and_valid(tmp_path, output_of, error_of, capsys):
    names = [f"{a}{b}" for a in ("an", "be", "ca", "do", "el") for b in ("", "na", "ra", "mo")]
    (tmp_path / "names.txt").write_text("\n".join(names))
    few = ["--steps", 40, "--block-size", 8, "--n-layer", 2, "--n-embd", 32, "--n-head", 2, "--n-kv-head", 1]
    few += ["--threads", 1, "--dtype", "float32", "--eval-every", 40, "--sample-chars", 0]
    command = ["train", "--records", "--preset", "quick", "--data", tmp_path / "names.txt", "--out", tmp_path / "out"]
    assert not call([*command, *few])
    report = ["report", "--checkpoint", tmp_path / "out" / "best", "-n", 50]
    capsys.readouterr()

    def rows(*flags):
        lines = [line.split("│") for line in output_of(*report, *flags).splitlines()[3:-1]]
        return {cells[1].strip(): [float(cell) for cell in cells[2:4]] for cells in lines}

    found = rows("--command", "grep -v o")
    report[2] = shutil.copytree(tmp_path / "out" / "best", tmp_path / "alone")  # without a log, there are no curves
    sampled = output_of("sample", "--checkpoint", tmp_path / "out" / "best", "-n", 50).splitlines()
    corpus = prepare(str(tmp_path / "names.txt"), records=True)
    known = set(corpus.tokenizer.decode(corpus.train).split())
    assert found["records"] == [50, 2]
    assert found["share that is novel"] == [pytest.approx(sum(name not in known for name in sampled) / 50), 1]
    assert found["share that is valid"][0] == pytest.approx(sum("o" not in name for name in sampled) / 50)
    assert rows("--command", "grep nothing-like-this")["share that is valid"] == [0, 0]
    assert "ended with status 3" in error_of(*report, "--command", "exit 3")
    assert "printed 'other', which is not a record" in error_of(*report, "--command", "echo other")
    names = set(corpus.tokenizer.decode(corpus.val).split())
    assert found["in the validation split alone"] == [sum(name in names for name in sampled), 2]
    assert rows("--regex", "[^o]*")["share that is valid"] == found["share that is valid"]
    both = rows("--regex", ".{4}", "--command", "grep -v o")["share that is valid"][0]
    assert both == pytest.approx(sum(len(name) == 4 and "o" not in name for name in sampled) / 50)
    assert "--regex '(': missing )" in error_of(*report, "--regex", "(")
    assert rows("--regex", "[a-z]{3,4}", "--exact")["share that is valid"][0] == 1
    assert "--regex: no match has 1 character before the end" in error_of(*report, "--regex", "()", "--exact")
    sample = ["sample", "--checkpoint", tmp_path / "out" / "best", "-n", 30, "--regex"]
    for way in ([], ["--exact"]):
        whole = output_of(*sample, "[a-z]{3}|[a-z]*", *way).splitlines()
        assert len(whole) == 30 and all(whole)
        assert all(len(name) == 3 for name in output_of(*sample, "[a-z]{3}", *way).splitlines())
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Exact copies of training records" in page and str(tmp_path) not in page
    command = ("sample", "--checkpoint", tmp_path / "out", "-n", 20, "--novel", "--unique")
    assert not {*output_of(*command, "--prompt", "\\n").splitlines()} & ((known | names) - {""})
    novel = output_of(*command).splitlines()
    assert len(set(novel)) == 20 and not {*novel} & (known | names)
    first = [name for name in dict.fromkeys(sampled) if name and name not in known | names]
    assert novel[: len(first)] == first[: len(novel)]
    capsys.readouterr()
    command = ["sample", "--checkpoint", tmp_path / "out" / "best", "-n", 20, "--novel", "--temperature", 0.01]
    assert call(command) == 1 and "distinct" not in (error := capsys.readouterr().err), error
    assert re.search(r"found only \d+ novel texts? of 20 requested", error)


def test_validity_is_for_records_and_a_report_needs_a_text(checkpoint, tmp_path, error_of):
    for flag in ("--command", "--regex"):
        error = error_of("report", "--checkpoint", checkpoint, flag, "cat")
        assert error == "error: --regex and --command are for models of records\n"
    save_random(tmp_path / "other")
    error = error_of("report", "--checkpoint", tmp_path / "other")
    assert "training.json does not record the training text; pass --data" in error


# export


def test_export_writes_one_file_and_prints_its_size(checkpoint, tmp_path, output_of):
    file = tmp_path / "new" / "model.gguf"
    output = output_of("export", "--checkpoint", checkpoint, "--to", "gguf", "--out", file)
    assert output.splitlines()[-1] == f"{file}: {file.stat().st_size:,} bytes" and file.read_bytes().startswith(b"GGUF")
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_export_refuses_unknown_formats_and_missing_packages(checkpoint, tmp_path, error_of, monkeypatch):
    command = ["export", "--checkpoint", checkpoint, "--out", tmp_path / "model", "--to"]
    assert "invalid choice: 'pickle' (choose from" in error_of(*command, "pickle", code=2)
    monkeypatch.setitem(sys.modules, "gguf", None)
    error = error_of(*command, "gguf")
    assert re.fullmatch(r"error: --to gguf needs the package gguf: \S+ -m pip install 'chargpt\[export\]'\n", error)
    assert not (tmp_path / "model").exists()
    (checkpoint / "model.safetensors").unlink()
    assert "model.safetensors: cannot be read: No such file" in error_of(*command, "gguf")


def test_all_commands_mean_the_mixture_of_a_run_that_mixes(tmp_path, output_of):
    """score, sample and evaluate, against the logits of GPT.forward and the definition of the counts."""
    out, words = tmp_path / "out", [f"{a}{b}{c}" for a in "BDGK" for b in "aeiou" for c in ("b", "dd", "lan", "rik")]
    (tmp_path / "names.txt").write_text("\n".join(words))
    shape = flags(steps=30, eval_every=30, sample_chars=0, n_layer=2, n_embd=16, n_head=2, n_kv_head=1, threads=1)
    output_of("train", "--data", tmp_path / "names.txt", "--records", "--mixed", "--out", out, *shape)
    checkpoint = Checkpoint.read(out / "best")
    counts, tokenizer = checkpoint.load_counts(), checkpoint.tokenizer
    assert counts.is_mixed and checkpoint.training["recipe"]["mixed"]
    ids = tokenizer.encode("\nKalan\n")
    logits = checkpoint.load_model()(torch.tensor([ids]))[0].double().detach().numpy()
    nats = 0.0
    for i, id in enumerate(ids[1:], 1):
        p, w = counts.next(ids[:i])
        network = np.exp(logits[i - 1] - logits[i - 1].max())
        nats -= math.log((1 - w) * network[id] / network.sum() + w * p[id])
    (tmp_path / "one.txt").write_text("Kalan\n")
    [row] = output_of("score", "--checkpoint", out, "--data", tmp_path / "one.txt").splitlines()
    assert json.loads(row)["nats"] == pytest.approx(nats, rel=1e-4)
    texts = output_of("sample", "--checkpoint", out, "-n", 5, "--seed", 3).splitlines()
    model = checkpoint.load_model().double()
    for seed, text in enumerate(texts, 3):
        record = tokenizer.decode(model.generate([ids[0]], 12, SamplingParams(seed=seed), counts)).split("\n")[0]
        assert record in ("", text)  # `sample` draws no empty record
    assert len(texts) == 5
    losses = dict(line.split()[:2] for line in output_of("evaluate", "--checkpoint", out).splitlines()[1:])
    assert float(losses["mixed"]) == pytest.approx(checkpoint.training["losses"]["mixed"], abs=1e-4)
    assert losses["mixed"] != losses["streamed"]
