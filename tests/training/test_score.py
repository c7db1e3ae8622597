"""Scores of lines against one line, one character at a time."""

import pytest
import torch

from service.model.tokenizer import CharTokenizer
from tests.helpers import VOCABULARY, random_model
from training import score
from training.data import DataError
from training.inputs import Encoder


@pytest.fixture(scope="module")
def model():
    return random_model()


def test_nats_are_the_sum_of_the_characters_losses(model, monkeypatch):
    """At any group and batch size."""
    tokenizer = CharTokenizer(VOCABULARY)
    lines = ["", "a", "Hello, you?", "x" * 60, "b", "It is.", "y" * 3]
    expected = []
    for line in lines:
        ids = tokenizer.encode(f"\n{line}\n")
        logs = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
        expected.append(-sum(float(logs[i, id]) for i, id in enumerate(ids[1:])))
    for batch, group in ((1 << 14, 4096), (70, 3), (1, 1)):
        monkeypatch.setattr("training.evaluate.BATCH_CHARS", batch)
        monkeypatch.setattr(score, "LINES", group)
        records = list(score.score_lines(model, Encoder(tokenizer), lines, records=True, refused=pytest.fail))
        assert [r["text"] for r in records] == lines
        assert [r["characters"] for r in records] == [len(line) + 1 for line in lines]
        assert [r["nats"] for r in records] == pytest.approx(expected, abs=1e-4)
        assert records[3]["nats_per_character"] == pytest.approx(expected[3] / 61, abs=1e-5)


def test_a_bad_line_does_not_end_the_others(model, monkeypatch):
    """Also where it ends a group."""
    monkeypatch.setattr(score, "LINES", 2)
    lines, refused = ["ok", "abé", "\udcff", "yes", "", "no"], []
    encoder = Encoder(CharTokenizer(VOCABULARY))
    records = score.score_lines(model, encoder, lines, records=False, refused=lambda *what: refused.append(what))
    assert [(r["line"], r["text"], r["characters"]) for r in records] == [
        (1, "ok", 1), (4, "yes", 2), (5, "", 0), (6, "no", 1)
    ]  # fmt: skip
    assert refused == [
        (2, "character 'é' (U+00E9) at offset 2 is not in the vocabulary"),
        (3, "byte 0xFF at offset 0 is not UTF-8"),
    ]


def test_records_need_a_line_break(model):
    with pytest.raises(DataError, match="whose vocabulary includes the line break"):
        list(score.score_lines(model, Encoder(CharTokenizer("ab")), ["a"], records=True, refused=pytest.fail))
