"""Records of several lines with the real programs: trained, sampled, scored, reported, fine-tuned and served."""

import json
import random
import re

import pytest
import torch

from service.model.checkpoint import Checkpoint
from tests.helpers import call, serving, web
from tests.toolbox.http import pieces, text_of
from tests.training.runs import SHAPE, STEPS, flags

END = "\x1e"
RUN = flags(**(SHAPE | {"block_size": 64, "n_embd": 32} | STEPS | {"steps": 150, "eval_every": 75, "dropout": 0.0}))


def tunes(count, seed=0):
    r = random.Random(seed)
    return [
        f"X:{i}\nK:{r.choice('ABC')}\n" + "\n".join(" ".join(r.choices("abc", k=3)) for _ in range(2))
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run on tunes, tunes.txt beside it."""
    folder = tmp_path_factory.mktemp("blocks")
    (folder / "tunes.txt").write_text("\n\n".join(tunes(90)) + "\n")
    command = ["train", "--data", folder / "tunes.txt", "--records", "blank", "--out", folder / "out", *RUN]
    assert call(command) == 0
    return folder / "out"


def test_the_checkpoint_says_what_ends_a_record(run):
    checkpoint = Checkpoint.read(run / "best")
    assert checkpoint.record_end_character == END and checkpoint.example_prompt == ""
    assert checkpoint.training["recipe"]["records"] == "blank"
    assert checkpoint.training["data"]["records"] == 90 and checkpoint.training["data"]["record_end"] == END


def test_what_is_sampled_can_be_read_again(run, capsys):
    sample = ["sample", "--checkpoint", run, "-n", "40", "--seed", "5", "--max-tokens", "200"]
    assert call(sample) == 0
    printed = capsys.readouterr().out
    assert call([*sample, "--format", "jsonl"]) == 0
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert printed == "\n\n".join(texts) + "\n" and not any(END in text for text in texts)
    assert sum("\n" in text for text in texts) > 20 and sum(len(text) < 200 for text in texts) >= 36
    assert call(["sample", "--checkpoint", run, "-n", "9", "--regex", r"X:\d+\nK:A[^A]*", "--exact"]) == 0
    found = capsys.readouterr().out.removesuffix("\n").split("\n\nX:")
    assert all(re.fullmatch(r"(X:)?\d+\nK:A[^A]*", text) for text in found) and len(found) == 9
    assert call(["sample", "--checkpoint", run, "-n", "50", "--novel", "--unique", "--prompt", r"X:1\nK:"]) == 0
    assert not {*capsys.readouterr().out.removesuffix("\n").split("\n\n")} & {*tunes(90)}


def test_records_are_scored_one_by_one(run, capsys, tmp_path):
    (tmp_path / "some.txt").write_text("\n\n \n" + "\n\n".join(tunes(3, seed=1)))
    assert call(["score", "--checkpoint", run, "--data", tmp_path / "some.txt"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == tunes(3, seed=1)
    assert [row["characters"] for row in rows] == [len(row["text"]) + 1 for row in rows]
    assert call(["evaluate", "--checkpoint", run, "--data", tmp_path / "some.txt"]) == 0
    nats = sum(row["nats"] for row in rows) / sum(row["characters"] for row in rows)
    assert f"streamed   {nats:.4f} nats" in capsys.readouterr().out
    assert call(["evaluate", "--checkpoint", run]) == 0
    losses = Checkpoint.read(run / "best").training["losses"]
    assert f"whole      {losses['whole']:.4f} nats" in capsys.readouterr().out


def test_the_report_and_its_check_see_whole_records(run, capsys, tmp_path):
    check = """perl -00 -ne 'print if /K:A/'"""
    assert call(["report", "--checkpoint", run, "-n", "60", "--check", check, "--html", tmp_path / "report.html"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "90 records" in page and "\nK:" in page and "<del>" in page
    assert "share that is valid" in capsys.readouterr().out


def test_runs_go_on_and_are_fine_tuned_as_they_began(run, capsys, tmp_path):
    text = run.parent / "tunes.txt"
    assert call(["train", "--out", run, "--resume", "--records", "blank", "--data", text]) == 0
    assert "already finished" in capsys.readouterr().err
    assert call(["train", "--out", run, "--resume", "--records"]) == 1
    assert "records was 'blank', got 'lines'" in capsys.readouterr().err
    tuned = ["train", "--init-from", run, "--data", text, "--steps", "3", "--eval-every", "3", "--batch-size", "4"]
    assert call([*tuned, "--out", tmp_path / "a"]) == 0
    assert "; records may have several lines, as there\n" in capsys.readouterr().err
    assert Checkpoint.read(tmp_path / "a" / "best").record_end_character == END
    assert call([*tuned, "--out", tmp_path / "b", "--records"]) == 0
    assert "; each line is a record, unlike there\n" in capsys.readouterr().err
    assert Checkpoint.read(tmp_path / "b" / "best").record_end_character == "\n"
    taught = ["train", "--teachers", run, "--data", text, "--records", "blank", "--out", tmp_path / "student", *RUN]
    assert call([*taught, "--steps", "3", "--eval-every", "3"]) == 0
    assert Checkpoint.read(tmp_path / "student" / "best").record_end_character == END
    assert call([*tuned, "--out", tmp_path / "c", "--no-records"]) == 0
    assert Checkpoint.read(tmp_path / "c" / "best").record_end is None


def test_the_service_ends_records_at_their_separator(run):
    checkpoint = Checkpoint.read(run / "best")
    tokenizer = checkpoint.tokenizer
    with serving(run / "best") as server:

        def ask(path="generate", **body):
            answer = web.post(f"{server.url}/{path}", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        choices = ask(prompt="", max_tokens=200, n=16, seed=1)["choices"]
        assert sum(choice["finish_reason"] == "stop" for choice in choices) >= 14
        assert all("\n" in choice["text"] and END not in choice["text"] for choice in choices)
        body = {"prompt": "X:7\n", "max_tokens": 200, "seed": 3}
        [whole] = ask(**body)["choices"]
        assert text_of(pieces(web.post(f"{server.url}/generate", json=body | {"stream": True}))) == whole["text"]
        kept = ask(**body, include_stop_str_in_output=True)["choices"][0]["text"]
        assert kept == whole["text"] + END * (whole["finish_reason"] == "stop")
        assert ask(**body, stop="\n")["choices"][0]["text"] == whole["text"].split("\n")[0]
        for choice in ask(prompt="", regex=r"X:\d+\nK:B[^K]*", exact=True, n=8, max_tokens=200)["choices"]:
            assert re.fullmatch(r"X:\d+\nK:B[^K]*", choice["text"]) and choice["finish_reason"] == "stop"
        [score] = ask("v1/score", texts=[tunes(1)[0]])["data"]
        ids = torch.tensor([tokenizer.encode(END + tunes(1)[0] + END)])
        logits = checkpoint.load_model(dtype=torch.float64)(ids[:, :-1])[0]
        expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        assert score["characters"] == len(tunes(1)[0]) + 1 and score["nats"] == pytest.approx(expected, rel=0.01)
