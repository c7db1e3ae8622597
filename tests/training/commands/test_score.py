"""`score`, and the losses of pieces by the native engine, against one plain forward for each text."""

import contextlib
import csv
import io
import json
import os
import pty
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from service.engine import native
from service.model.gpt import SwiGLU
from service.model.tokenizer import UNKNOWN, CharTokenizer
from tests.helpers import VOCABULARY, call, random_model, save_random
from tests.training.runs import new_run, tiny
from training.measure.losses import engine_sums, fast_piece_sums, piece_sums, sampled_scores
from training.run.estimate import Estimate
from training.run.saving import save_checkpoint
from training.text.batches import record_pieces

EXACT = random_model(torch.float64)
HALF = 1e-3  # the service stores keys and values in half precision


@pytest.fixture
def checkpoint(tmp_path):
    return save_random(tmp_path / "ck").path


@pytest.fixture
def lines(tmp_path):
    """Writes the file whose lines are scored, and returns its path."""

    def write(content):
        path = tmp_path / "lines.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def output_of(capsys):
    """Run `score`, which must succeed; returns its standard output."""

    def run(*arguments):
        assert call(["score", *arguments]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def rows(output):
    return [json.loads(line) for line in output.splitlines()]


def nats_of(text, model=EXACT, characters=VOCABULARY):
    ids = torch.tensor(CharTokenizer(characters).encode(text))
    with torch.no_grad():
        return F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="sum").item()


# pieces


def sums_one_by_one(model, ids, starts, lengths, skips):
    """By a banded forward over each piece alone, in float64."""
    found = []
    for start, length, skip in zip(starts, lengths, skips, strict=True):
        text = torch.from_numpy(ids[start : start + length + 1].astype(np.int64))
        with torch.no_grad():
            losses = (
                F.cross_entropy(model(text[None, :-1])[0], text[1:], reduction="none") if length else torch.zeros(0)
            )
        found.append(losses[skip:].sum().item())
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_the_native_engine_scores_pieces_as_single_forwards_do(threads, seed, monkeypatch):
    monkeypatch.setattr("training.measure.losses.SLOTS", 5)
    monkeypatch.setattr("training.measure.losses.SCORED_SECONDS", 1e-4)  # many pieces of prompts
    rng = np.random.default_rng([seed, threads])
    ids = rng.integers(0, len(VOCABULARY), 1500).astype(np.uint8)
    lengths = rng.choice([0, 1, 2, 7, 23, 24, 25, 60, 700], 40)
    starts = np.array([rng.integers(0, len(ids) - length) for length in lengths])
    skips = np.array([rng.integers(0, length + 1) for length in lengths])
    torch.set_num_threads(threads)
    sums_of, scored = fast_piece_sums(random_model()), []
    expected = sums_one_by_one(EXACT, ids, starts, lengths, skips)
    assert sums_of(ids, starts, lengths, scored.append, skips) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert sum(scored) == (lengths - skips).sum()
    assert piece_sums(EXACT, ids, starts, lengths, int, skips) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_long_text_has_the_same_sum_by_any_number_of_threads():
    ids = np.random.default_rng(4).integers(0, len(VOCABULARY), 4000).astype(np.uint8)
    pieces, sums = (np.array([3]), np.array([3900]), int, np.array([10])), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        sums.append(fast_piece_sums(random_model())(ids, *pieces).tolist())
    assert sums[0] == sums[1] == pytest.approx(sums_one_by_one(EXACT, ids, [3], [3900], [10]), rel=1e-6)


def test_a_model_without_finite_logits_has_no_losses():
    model = random_model()
    with torch.no_grad():
        model.head.weight.fill_(float("inf"))
    starts = np.arange(100)
    assert np.isnan(fast_piece_sums(model)(np.arange(200, dtype=np.uint8) % 9, starts, starts)[1:]).all()


@pytest.mark.parametrize("records", [False, True])
def test_evaluations_by_the_native_engine_are_those_of_the_model(records):
    """Which computes in float64 here, as the engine does not."""
    ids = np.random.default_rng(5).integers(1, len(VOCABULARY), 3000).astype(np.uint8)
    if records:
        ids[::11] = 0
        ids[-1] = 0
    found, expected = (sampled_scores(model, ids, 1000, records, ids[:1100]) for model in (random_model(), EXACT))
    assert fast_piece_sums(random_model()).func is engine_sums
    assert found.losses == pytest.approx(expected.losses, rel=1e-6) and found.characters == expected.characters
    assert found.standard_error == pytest.approx(expected.standard_error, rel=1e-5)


def test_what_the_native_engine_does_not_compute_is_scored_by_gpt(monkeypatch):
    model, ids = random_model(), np.arange(40, dtype=np.uint8)
    pieces = np.array([0, 10]), np.array([9, 29])
    before = fast_piece_sums(model)(ids, *pieces)
    monkeypatch.setattr(SwiGLU, "forward", lambda self, x: x)  # as if gpt.py had changed
    assert fast_piece_sums(model).func is piece_sums
    after = fast_piece_sums(model)(ids, *pieces)
    assert after == pytest.approx(piece_sums(model, ids, *pieces)) and abs(after - before).min() > 0.1
    monkeypatch.undo()
    monkeypatch.setattr(native, "why_not", lambda: "no compiler")
    assert fast_piece_sums(model).func is piece_sums
    assert fast_piece_sums(model)(ids, *pieces) == pytest.approx(before, rel=1e-5)


def test_records_of_any_length_are_scored():
    ids = np.concatenate([[0], *([1 + i % 50] * (1 + i % 9) + [0] for i in range(200))]).astype(np.uint8)
    starts, lengths = record_pieces(ids, len(ids))
    assert fast_piece_sums(random_model())(ids, starts, lengths) == pytest.approx(
        piece_sums(EXACT, ids, starts, lengths), rel=1e-5
    )


@pytest.mark.parametrize(("start", "length"), [(0, 10), (9, 1), (5, 5)])
def test_the_native_engine_reads_no_piece_beyond_its_text(start, length):
    ids = np.zeros(10, np.uint8)  # the last one is the target of the ninth
    with pytest.raises(ValueError, match="a piece ends beyond the text"):
        fast_piece_sums(random_model())(ids, np.array([start]), np.array([length]))


# lines


@pytest.mark.parametrize("group", [4096, 2, 1])
def test_score_prints_an_object_per_line(checkpoint, lines, output_of, capsys, monkeypatch, group):
    """Of each line alone, or with the line breaks on both sides; at any size of groups of lines."""
    monkeypatch.setattr("training.commands.score.GROUP_LINES", group)
    texts = ["The cat", "", "T", "To be, or not to be?", 1000 * "so "]  # the last in pieces
    command = ["--checkpoint", checkpoint, "--data", lines("\n".join(texts))]
    alone, records = rows(output_of(*command)), rows(output_of(*command, "--records"))
    for found in (alone, records):
        assert [(r["line"], r["text"]) for r in found] == list(enumerate(texts, 1))
        assert {r["unknown_characters"] for r in found} == {0}
    assert [r["characters"] for r in alone] == [6, 0, 0, 19, 2999]
    assert [r["characters"] for r in records] == [8, 1, 2, 21, 3001]
    assert [r["nats"] for r in alone[1:3]] == [0, 0] and alone[1]["perplexity"] is None
    for row in (alone[0], *alone[3:]):
        assert row["nats"] == pytest.approx(nats_of(row["text"]), rel=HALF)
        assert row["nats_per_character"] == pytest.approx(row["nats"] / row["characters"])
    for row in records:
        assert row["nats"] == pytest.approx(nats_of(f"\n{row['text']}\n"), rel=HALF)
    assert call(["score", "--checkpoint", checkpoint, "--data", "nowhere.txt"]) == 1
    assert "nowhere.txt" in capsys.readouterr().err
    assert call(["score", "--checkpoint", checkpoint]) == 2
    assert "required: --data" in capsys.readouterr().err


def test_lines_are_scored_as_the_model_was_trained(checkpoint, tmp_path, lines, output_of):
    save_random(tmp_path / "of records", about={"recipe": {"records": True}})
    command = ["--data", lines("Al\nBob\n"), "--checkpoint"]
    assert output_of(*command, tmp_path / "of records") == output_of(*command, checkpoint, "--records")
    assert output_of(*command, tmp_path / "of records", "--no-records") == output_of(*command, checkpoint)


def test_lines_with_unknown_characters_are_scored_and_say_how_many(checkpoint, lines, output_of, capsys):
    """They were left out, which lost the strangest lines of a log."""
    command = ["--checkpoint", checkpoint, "--data", lines("good\nbäd ö\nä\n")]
    assert call(["score", *command]) == 0
    output, error = capsys.readouterr()
    assert [(r["characters"], r["unknown_characters"]) for r in rows(output)] == [(3, 0), (4, 2), (0, 1)]
    assert rows(output)[1]["text"] == "bäd ö" and rows(output)[1]["nats"] == pytest.approx(nats_of("b d  "), rel=HALF)
    assert error == "3 unknown characters replaced\n"
    found = rows(output_of(*command, "--unknown-characters", "drop"))
    assert [(r["characters"], r["unknown_characters"]) for r in found] == [(3, 0), (2, 2), (0, 1)]
    assert found[1]["nats"] == pytest.approx(nats_of("bd "), rel=HALF)
    found = rows(output_of(*command, "--replacement-character", r"\n"))
    assert found[1]["nats"] == pytest.approx(nats_of("b\nd \n"), rel=HALF) and found[1]["unknown_characters"] == 2
    assert call(["score", *command, "--replacement-character", "ß"]) == 1
    assert "'ß', which is to replace 'ä' at offset 1 of line 2, is not" in capsys.readouterr().err


def test_unknown_characters_are_dropped_if_nothing_can_replace_them(tmp_path, lines, capsys):
    save_random(tmp_path / "letters", "\nabcd")
    command = ["score", "--checkpoint", tmp_path / "letters", "--data", lines("ab cd\n")]
    assert call(command) == 0
    output, error = capsys.readouterr()
    (row,) = rows(output)
    assert (row["characters"], row["unknown_characters"]) == (3, 1) and error == "1 unknown character dropped\n"
    assert call([*command, "--unknown-characters", "replace"]) == 1
    assert "' ', which is to replace ' ' at offset 2 of line 1, is not" in capsys.readouterr().err


def test_the_unknown_symbol_counts_as_unknown(tmp_path, lines, output_of):
    characters = ["\n", *"abcd", UNKNOWN]
    model = random_model(vocab_size=6)
    save_checkpoint(tmp_path / "rare", model, CharTokenizer(characters, has_unknown=True), {"losses": {}})
    command = ["--checkpoint", tmp_path / "rare", "--data", lines(f"abxd\na{UNKNOWN}é\n")]
    first, second = rows(output_of(*command))
    exact = random_model(torch.float64, vocab_size=6)
    assert (first["unknown_characters"], second["unknown_characters"]) == (1, 2)
    assert first["nats"] == pytest.approx(nats_of(f"ab{UNKNOWN}d", exact, characters), rel=HALF)
    assert second["nats"] == pytest.approx(nats_of(f"a{UNKNOWN}{UNKNOWN}", exact, characters), rel=HALF)
    assert rows(output_of(*command, "--unknown-characters", "drop"))[1]["unknown_characters"] == 2


def test_a_line_that_is_not_scored_is_reported(checkpoint, lines, capsys, monkeypatch):
    monkeypatch.setattr("training.commands.score.GROUP_LINES", 2)  # one of them ends a group
    command = ["score", "--checkpoint", checkpoint, "--data", lines("good\nbäd\n".encode() + b"b\xe4d\nfine\n")]
    assert call([*command, "--unknown-characters", "refuse"]) == 1
    output, error = capsys.readouterr()
    assert [(r["line"], r["text"]) for r in rows(output)] == [(1, "good"), (4, "fine")]
    assert error.splitlines() == [
        "line 2: character 'ä' (U+00E4) at offset 1 is not in the vocabulary",
        "line 3: byte 0xE4 at offset 1 is not UTF-8",
        "error: 2 lines of 4 not scored",
    ]
    assert call(command) == 1
    output, error = capsys.readouterr()
    assert [r["line"] for r in rows(output)] == [1, 2, 4] and "error: 1 line of 4 not scored" in error
    command[-1] = lines("é\n" * 30 + "ok\n")
    assert call([*command, "--unknown-characters", "refuse"]) == 1
    *reported, last = capsys.readouterr().err.splitlines()
    assert len(reported) == 20 and last == "error: 30 lines of 31 not scored, the first 20 of which are named above"


def test_a_file_without_lines_is_refused(checkpoint, tmp_path, capsys):
    (tmp_path / "empty.log").touch()
    assert call(["score", "--checkpoint", checkpoint, "--data", tmp_path / "empty.log"]) == 1
    assert f"{tmp_path / 'empty.log'} has no lines to score" in capsys.readouterr().err


def test_the_strangest_lines_come_first(checkpoint, lines, output_of, capsys, monkeypatch):
    monkeypatch.setattr("training.commands.score.GROUP_LINES", 3)
    texts = ["The cat", "q", "xQzJ", "", "To be", "The cat", "and so on"]
    command = ["--checkpoint", checkpoint, "--data", lines("\n".join(texts))]
    each = {r["line"]: r for r in rows(output_of(*command))}
    scored = sorted((n for n in each if each[n]["characters"]), key=lambda n: (-each[n]["bits_per_character"], n))
    expected = [each[n] for n in (*scored, 2, 4)]  # those without a score last
    assert rows(output_of(*command, "--sort")) == expected
    assert scored.index(6) == scored.index(1) + 1  # of equal lines the first
    for count in (1, 3, 7, 50):
        assert rows(output_of(*command, "--top", count)) == expected[:count]
        assert rows(output_of(*command, "--top", count, "--sort")) == expected[:count]
    assert call(["score", *command, "--top", 0]) == 1
    assert "--top must be at least 1, got 0" in capsys.readouterr().err


def test_rows_are_the_same_in_csv(checkpoint, lines, output_of):
    command = ["--checkpoint", checkpoint, "--data", lines('a, "b"\n\nsay ä,\r\n')]
    objects = rows(output_of(*command))
    table = list(csv.DictReader(io.StringIO(output_of(*command, "--format", "csv"), newline="")))
    assert [list(row) for row in table] == [list(row) for row in objects]
    for row, other in zip(table, objects, strict=True):
        assert row == {name: "" if value is None else str(value) for name, value in other.items()}


def test_sampled_texts_are_the_same_in_csv(checkpoint, capsys):
    command = ["sample", "--checkpoint", checkpoint, "-n", 3, "--max-tokens", 30, "--format"]
    assert call([*command, "jsonl"]) == call([*command, "csv"]) == 0
    *objects, header, rest = capsys.readouterr().out.split("\n", 4)
    table = list(csv.DictReader(io.StringIO(f"{header}\n{rest}", newline="")))
    assert [(row["text"], int(row["seed"])) for row in table] == [tuple(json.loads(it).values()) for it in objects]


def test_the_estimate_counts_streamed_text_at_its_own_speed(tmp_path, monkeypatch):
    """It was counted at the speed of windows, which a short window makes several times as high."""
    now = 0.0

    def slow(model):
        sums_of = fast_piece_sums(model)

        def sums(ids, starts, lengths, advance=int, skips=None, each=None):
            nonlocal now
            now += 0 if skips is None else 0.02 * (lengths - skips).sum()
            return sums_of(ids, starts, lengths, advance, skips, each)

        return sums

    config = tiny(tmp_path, score_chars="all", dtype="float32")
    run = new_run(config)
    monkeypatch.setattr("training.measure.losses.fast_piece_sums", slow)
    monkeypatch.setattr("training.run.estimate.time.monotonic", lambda: now)
    said = f"about 6 s to the end: 0 s of training, 6 s of scoring {len(run.corpus.val)} validation characters"
    assert Estimate(run).line(0.0) == said and len(run.corpus.val) == 298


def test_rows_go_to_a_file_while_the_terminal_shows_a_bar(checkpoint, lines, tmp_path, monkeypatch):
    """They went to the terminal instead."""
    monkeypatch.setenv("TERM", "xterm")
    scored, sampled = ["score", "--data", lines("The cat\nsat on\nthe mat")], ["sample", "-n", 3, "--max-tokens", 9]
    for command, count in (([*sampled, "--format", "jsonl"], 3), (scored, 3), ([*scored, "--top", 2], 2)):
        terminal, other = pty.openpty()
        with (
            ThreadPoolExecutor(1) as thread,
            open(tmp_path / "rows", "w") as file,
            open(other, "w") as error,
            monkeypatch.context() as patch,
        ):
            reading = thread.submit(all_of, terminal)
            patch.setattr(sys, "stdout", file)
            patch.setattr(sys, "stderr", error)
            assert call([*command, "--checkpoint", checkpoint]) == 0, command
        os.close(terminal)
        shown, written = reading.result(), (tmp_path / "rows").read_text().splitlines()
        assert len(written) == count, command
        assert b"\xe2\x94\x81" in shown and written[-1].encode()[:20] not in shown, command  # a bar's line, and no row


def all_of(terminal: int) -> bytes:
    """What is written to a terminal until it is closed."""
    shown = b""
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 1 << 16):
            shown += part
    return shown
