"""Scores of lines against one line, one character at a time."""

import pytest
import torch
from helpers import VOCABULARY, random_model

from service.model.tokenizer import CharTokenizer
from training import score
from training.data import DataError


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
        monkeypatch.setattr(score, "BATCH_CHARS", batch)
        monkeypatch.setattr(score, "LINES", group)
        records = list(score.score_lines(model, tokenizer, lines))
        assert [r["text"] for r in records] == lines
        assert [r["characters"] for r in records] == [len(line) + 1 for line in lines]
        assert [r["nats"] for r in records] == pytest.approx(expected, abs=1e-4)
        assert records[3]["nats_per_character"] == pytest.approx(expected[3] / 61, abs=1e-5)


def test_an_unknown_character_is_reported_with_its_line(model):
    with pytest.raises(DataError, match=r"line 2, character 3: 'é' is not in the vocabulary"):
        list(score.score_lines(model, CharTokenizer(VOCABULARY), ["ok", "abé"]))
