"""The page of a run: what it shows, and that it is safe to open."""

import json
import math
from html.parser import HTMLParser

import pytest

from service.model.checkpoint import Checkpoint
from service.text.model import TextModel
from tests.helpers import random_model
from training.commands.report import write_page
from training.measure.copies import Examination, examine
from training.model.loading import open_model
from training.run.saving import save_checkpoint
from training.text.corpus import prepare

EVIL = "<script>alert('1')</script>&amp;<img src=x onerror=\"alert(2)\">"
LOSSES = {"uniform": 3.0, "unigram": 2.5, "kneser_ney": 2.2, "whole": 2.0, "streamed": 1.9}


class Page(HTMLParser):
    """The elements of a page, its text, and what is inside the elements of one name."""

    def __init__(self, content):
        super().__init__()
        self.elements, self.text, self.inside = [], "", {}
        self._open = []
        self.feed(content)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        self.inside.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        self.text += data
        for tag in set(self._open):
            self.inside[tag][-1] += data


@pytest.fixture
def run(tmp_path):
    """A run on a text, with a log; its folder, checkpoint and corpus."""

    def make(text, *, records=False, losses=LOSSES):
        source = tmp_path / "<b>evil&.txt"
        source.write_text(text)
        corpus = prepare(str(source), records=records)
        out = tmp_path / "run"
        about = {"losses": losses, "data": corpus.describe(), "recipe": {"data": [str(source)], "records": records}}
        about |= {"parameters": 5, "step": 1, "characters_seen": 1, "training_seconds": 1.0}
        about |= {"command": f"python -m training train --data {source}"}
        model = random_model(vocab_size=corpus.tokenizer.vocab_size)
        save_checkpoint(out / "best", model, corpus.tokenizer, about)
        log = [{"event": "train", "step": 10, "train_loss": 2.0, "muon_lr": 0.01}]
        log += [{"event": "evaluation", "step": 10, "val_loss": 2.0, "sample": f"sampled {EVIL}\x1b\0"}]
        log += [{"event": "end", "step": 10, **LOSSES}] if losses is LOSSES else []
        (out / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
        return out, Checkpoint.read(out / "best"), corpus, model

    return make


def page_of(file, checkpoint, corpus, found, out=None):
    write_page(file, checkpoint, corpus, found, out)
    content = file.read_text(encoding="utf-8")
    page = Page(content)
    assert content.startswith("<!DOCTYPE html>")
    # Nothing is run or loaded, whatever the texts contain.
    assert not {tag for tag, _ in page.elements} & {"script", "img", "iframe", "link", "object", "b"}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        assert all((attributes.get(name) or "#").startswith("#") for name in ("href", "src", "xlink:href"))
    policy = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    return page


def test_a_page_shows_losses_curves_samples_and_copied_passages(run, tmp_path):
    text = (EVIL + " to be or not to be, that is the question\n") * 20
    out, checkpoint, corpus, _ = run(text)
    copied = corpus.tokenizer.decode(corpus.train[:100])
    texts = [(7, "xx" + copied + "yy"), (8, "all new")]
    found = Examination({"generated": {"rows": 1}}, texts, [[(2, 102)], []])
    page = page_of(out / "report.html", checkpoint, corpus, found, out)
    assert page.inside["mark"] == [copied] and "100 characters, seed 7" in page.text and "all new" in page.text
    assert f"sampled {EVIL}␛␀" in page.text and "<b>evil&.txt" in page.inside["h1"]
    assert all(f"{loss:.4f}" in page.text and f"{loss / math.log(2):.4f}" in page.text for loss in LOSSES.values())
    assert [tag for tag, _ in page.elements].count("svg") == 1 and "best validation loss" not in page.inside["p"]
    assert str(tmp_path) not in (out / "report.html").read_text()


def test_a_page_of_records_marks_copies_and_invalid_ones(run):
    names = [f"{EVIL}{i}" for i in range(30)]
    out, checkpoint, corpus, _ = run("\n".join(names), records=True)
    copy, other = corpus.tokenizer.decode(corpus.train).split("\n")[1], "<i>new</i>"
    found = Examination(
        {"generated": {"records": 2}, "validation split": {"records": 3}},
        [(1, copy), (2, other)], [[], []], copies={copy}, valid={copy},
    )  # fmt: skip
    page = page_of(out / "report.html", checkpoint, corpus, found)
    assert page.inside["mark"] == [copy] and page.inside["del"] == [other] and "1 different record" in page.text
    assert "svg" not in page.inside


def test_a_page_says_in_words_that_a_model_is_no_good(run):
    text = "to be or not to be, that is the question\n" * 20
    out, checkpoint, corpus, model = run(text, losses={**LOSSES, "whole": 3.5, "streamed": 3.4})
    with open_model(model, TextModel.of(checkpoint), slots=2) as served:
        answers = served.generate(corpus.example_prompt, n=2, max_tokens=60)
    found = examine(answers, corpus, None, None)
    page = page_of(out / "report.html", checkpoint, corpus, found, out)
    assert "The network is no better than guessing all characters alike" in page.text
    out, checkpoint, corpus, model = run(text, losses={"val": 3.5})
    assert "The run has not ended" in page_of(out / "report.html", checkpoint, corpus, found, out).text
