"""The numbers of each step of the lecture, and its command."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests import reference
from tests.helpers import call, random_model
from training.commands import lecture
from training.text.corpus import prepare

TEXT = "".join(f"{i} bottles of beer on the wall, take {i % 7} down\n" for i in range(400))


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "bottles.txt").write_text(TEXT)
    return prepare(str(tmp_path / "bottles.txt"))


def test_a_window_holds_as_many_examples_as_characters(corpus):
    batch, examples = lecture.examples(corpus, seed=3)
    assert batch.shape == (32, 8)
    window = "".join(following for _, following in examples)
    for t, (context, following) in enumerate(examples):
        assert len(context) == t + 1
        assert context + following in TEXT
        assert context[1:] + following == window[: t + 1]


def test_the_table_learns_what_counting_bigrams_gives(corpus):
    """Untrained, logits of N(0, 1) cost about half a nat more than a uniform guess."""
    torch.manual_seed(0)
    model = lecture.Bigram(corpus.tokenizer.vocab_size)
    uniform = math.log(corpus.tokenizer.vocab_size)
    assert lecture.validation_loss(model, corpus) == pytest.approx(uniform + 0.5, abs=0.25)
    assert len(lecture.train(model, corpus, 6000, seed=0)) == 6000
    assert lecture.validation_loss(model, corpus) == pytest.approx(lecture.counted_bigrams(corpus), abs=0.15)


def test_generation_draws_from_the_softmax_of_the_last_logits():
    def always(idx):  # character 2 after anything else, then 0
        wanted = torch.where(idx == 2, 0, 2)
        return 100.0 * F.one_hot(wanted, 3)

    idx = torch.tensor([[0], [1]])
    assert lecture.generate(always, idx, 4, seed=0).tolist() == [[0, 2, 0, 2, 0], [1, 2, 0, 2, 0]]
    likely = lecture.generate(lambda idx: torch.tensor([[[0.0, math.log(3)]]]).expand(*idx.shape, 2), idx[:1], 4000, 0)
    assert likely[0, 1:].double().mean().item() == pytest.approx(0.75, abs=0.03)


def test_the_mean_of_the_past_in_three_ways():
    x = torch.randn(8, 2, dtype=torch.float64)
    by_loops, by_matrix, by_softmax = lecture.averages(x)
    assert torch.equal(by_loops[0], x[0])
    torch.testing.assert_close(by_loops[-1], x.mean(dim=0))
    torch.testing.assert_close(by_matrix, by_loops)
    torch.testing.assert_close(by_softmax, by_loops)


def test_a_head_is_attention_and_so_are_several():
    x = torch.randn(3, 8, 32, dtype=torch.float64)
    head = lecture.Head(32, 16).double()
    q, k, v = (layer(x).detach()[:, None] for layer in (head.query, head.key, head.value))
    expected = [reference.attention(*(part[row, 0].tolist() for part in (q, k, v)), window=8) for row in range(3)]
    torch.testing.assert_close(head(x).detach(), torch.tensor(expected, dtype=torch.float64))
    assert lecture.difference_to_the_service(head, x) < 1e-12
    assert lecture.heads_at_once(x, 4) < 1e-12
    weights = head.weights(x)
    assert torch.equal(weights, weights.tril())
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(3, 8, dtype=torch.float64))


def test_the_scale_keeps_the_variance_at_one_and_the_softmax_soft():
    measured = lecture.scale(64, seed=0)
    assert measured.variance == pytest.approx(64, rel=0.1)
    assert measured.scaled == pytest.approx(1, rel=0.1)
    assert measured.sharpest > 0.8 > 0.4 > measured.softer
    assert measured.sum_if_late == pytest.approx(1 / 8, abs=1e-4)


@pytest.mark.parametrize("is_causal", [True, False])
def test_only_a_mask_hides_the_future(is_causal):
    x = torch.randn(1, 8, 32)
    changed = x.clone()
    changed[:, 5] += 1
    seen = lecture.seen_from(lecture.Head(32, 16, is_causal=is_causal), x, changed)
    assert [value > 0 for value in seen] == [not is_causal] * 5 + [True] * 3


def test_rows_never_talk_and_weights_fill_memory():
    assert lecture.difference_beside_others(random_model(torch.float64), torch.randint(61, (4, 20))) < 1e-12
    assert lecture.score_bytes(32, 8, 512) == 4 * 67_108_864


def test_the_lecture_is_given(corpus, checkpoint, tmp_path, capsys):
    (tmp_path / "other.txt").write_text("§")
    data = ["--data", tmp_path, "--glob", "*.txt", "--exclude", "other.txt"]
    flags = [*data, "--checkpoint", checkpoint.path, "--out", tmp_path / "lecture.png"]
    assert not call(["lecture", *flags, "--steps", 20])
    lines = capsys.readouterr().out.splitlines()
    assert "§" not in "".join(lines[:4])
    assert [line[:2] for line in lines if re.match(r"\d\. ", line)] == [f"{i}." for i in range(1, 10)]
    assert (tmp_path / "lecture.png").stat().st_size > 10_000
    assert call(["lecture", *flags, "--steps", 0]) == 1


def test_the_document_shows_what_the_lecture_prints_and_names_its_functions():
    text = (Path(lecture.__file__).parents[1] / "LECTURE.md").read_text(encoding="utf-8")
    shown = re.findall(r"^## (\d\. .*)$", text, re.M)
    assert len(shown) == 9
    names = set(re.findall(r"`lecture\.(\w+)`", text)) - {"png"}
    assert len(names) > 10
    for name in names:
        assert hasattr(lecture, name), name
