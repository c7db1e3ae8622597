"""A model of records over HTTP: a prompt begins a record, and a line break ends it.

Held against the same weights as a model of other texts, asked in so many words.
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from service.model.checkpoint import Checkpoint
from service.model.tokenizer import CharTokenizer
from tests.helpers import VOCABULARY, RunningServer, random_model, web
from tests.toolbox.http import events
from training.inputs import Encoder
from training.saving import save_checkpoint
from training.score import score_lines


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(of records, of other texts): the same weights."""
    folder = tmp_path_factory.mktemp("records")
    model, tokenizer = random_model(seed=3), CharTokenizer(VOCABULARY)
    with torch.no_grad():  # so that records end after some ten characters
        model.head.weight[tokenizer.encode("\n")[0]] *= 1.5
    save_checkpoint(folder / "records", model, tokenizer, {"losses": {}, "recipe": {"records": True}})
    save_checkpoint(folder / "texts", model, tokenizer, {"losses": {}, "recipe": {}})
    return folder / "records", folder / "texts"


@pytest.fixture(scope="module")
def servers(checkpoints):
    records, texts = checkpoints
    with RunningServer(records, dtype="float64") as one, RunningServer(texts, dtype="float64") as other:
        one.wait_until_ready()
        other.wait_until_ready()
        yield one, other


def ask(server, path="/generate", **body):
    response = web.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def choices(server, **body):
    return [(it["text"], it["finish_reason"]) for it in ask(server, seed=1, n=20, **body)["choices"]]


def test_a_prompt_begins_a_record_and_a_line_break_ends_it(servers):
    records, texts = servers
    for prompt in ("Al", "", "\nAl"):
        found = choices(records, prompt=prompt, max_tokens=60)
        assert found == choices(texts, prompt="\n" + prompt.removeprefix("\n"), max_tokens=60, stop="\n")
        assert {reason for _, reason in found} >= {"stop"}
        assert not any("\n" in text for text, _ in found)
    assert choices(records, prompt="Al", max_tokens=60, stop="e") == choices(
        texts, prompt="\nAl", max_tokens=60, stop=["e", "\n"]
    )
    usage = ask(records, prompt="Al", max_tokens=5)["usage"]
    assert usage["prompt_tokens"] == 2


def test_ignore_eos_goes_on(servers):
    records, texts = servers
    found = choices(records, prompt="Al", max_tokens=60, ignore_eos=True)
    assert found == choices(texts, prompt="\nAl", max_tokens=60)
    assert any("\n" in text for text, _ in found)


def test_min_tokens_holds_and_the_record_ends_after_it(servers):
    records, _ = servers
    found = choices(records, prompt="Al", max_tokens=60, min_tokens=12)
    assert all(len(text) >= 12 and "\n" not in text for text, _ in found)
    assert {reason for _, reason in found} >= {"stop"}


def test_patterns_follow_the_beginning(servers):
    records, texts = servers
    for pattern in ({"regex": "[a-z]+"}, {"choice": ["abc", "xyz"]}):
        assert choices(records, prompt="Al", max_tokens=30, **pattern) == choices(
            texts, prompt="\nAl", max_tokens=30, **pattern
        )
    found = choices(records, prompt="Al", max_tokens=60, allowed_characters="abcdefg")
    assert all(set(text) <= set("abcdefg") for text, _ in found)
    assert {reason for _, reason in found} >= {"stop"}


def test_echo_and_log_probabilities_are_of_what_is_shown(servers):
    records, texts = servers
    body = {"max_tokens": 8, "seed": 2, "echo": True, "logprobs": 1}
    (one,) = ask(records, "/v1/completions", prompt="Al", **body)["choices"]
    (other,) = ask(texts, "/v1/completions", prompt="\nAl", stop="\n", **body)["choices"]
    assert "\n" + one["text"] == other["text"]
    assert one["logprobs"]["token_logprobs"] == other["logprobs"]["token_logprobs"][1:]
    assert None not in one["logprobs"]["token_logprobs"]
    assert one["logprobs"]["text_offset"] == list(range(len(one["text"])))


def test_streams_end_too(servers):
    records, _ = servers
    body = {"prompt": "Al", "max_tokens": 60, "seed": 1}
    with web.stream("POST", f"{records.url}/generate", json=body | {"stream": True}) as response:
        pieces = [json.loads(data) for data in events(response) if data != "[DONE]"]
    text = "".join(piece.get("text", "") for piece in pieces)
    assert text == ask(records, **body)["choices"][0]["text"]


def test_scores_are_those_of_training(servers, checkpoints):
    records, _ = servers
    lines = ["Alice", "Bob", "a", "who?"]
    checkpoint = Checkpoint.read(checkpoints[0])
    model = checkpoint.load_model(dtype=torch.float64)
    encoder = Encoder(checkpoint.tokenizer, "refuse", "?")
    expected = list(score_lines(model, encoder, lines, records=True, refused=lambda *_: None))
    found = ask(records, "/v1/score", texts=lines)
    for one, other in zip(found["data"], expected, strict=True):
        assert one["characters"] == other["characters"] == len(other["text"]) + 1
        assert one["nats"] == pytest.approx(other["nats"], rel=1e-5)
        assert len(one["character_nats"]) == one["characters"]


def test_the_next_character_is_that_of_a_record(servers):
    records, texts = servers
    for prompt in ("Al", ""):
        (one,) = ask(records, "/v1/next", prompt=prompt)["data"]
        (other,) = ask(texts, "/v1/next", prompt="\n" + prompt)["data"]
        assert one["distribution"] == other["distribution"]


def test_infill_and_attention_see_the_beginning(servers):
    records, texts = servers
    body = {"suffix": "e", "max_tokens": 6, "seed": 3, "best_of": 4}
    one, other = ask(records, prompt="Al", **body), ask(texts, prompt="\nAl", stop="\n", **body)
    assert one["choices"][0]["text"] == other["choices"][0]["text"]
    one, other = (ask(server, "/v1/attention", text=text) for server, text in ((records, "Al"), (texts, "\nAl")))
    assert (one["text"], one["data"]) == (other["text"], other["data"])


def test_information_says_records(servers):
    for server, is_records in zip(servers, (True, False), strict=True):
        assert web.get(f"{server.url}/info").json()["model"]["records"] is is_records
        assert web.get(f"{server.url}/tokenizer_info").json()["eos_token"] == ("\n" if is_records else None)


def test_transformers_ends_by_itself(checkpoints):
    records, _ = checkpoints
    tokenizer = Checkpoint.read(records).tokenizer
    model = AutoModelForCausalLM.from_pretrained(records, dtype=torch.float64)
    idx = torch.tensor([tokenizer.encode("\nAl")] * 20)
    torch.manual_seed(0)
    found = model.generate(idx, max_new_tokens=60, do_sample=True, pad_token_id=0)
    end = tokenizer.encode("\n")[0]
    ended = [row[3:].tolist().index(end) for row in found if end in row[3:]]
    assert len(ended) >= 15
    for row in found:
        after = row[3:].tolist()
        if end in after:
            assert set(after[after.index(end) + 1 :]) <= {0}
