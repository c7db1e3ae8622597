"""A model of records over HTTP, beside the same weights as a model of other texts, asked in so many words."""

import re

import pytest
import torch

from service.model.checkpoint import Checkpoint
from service.model.tokenizer import CharTokenizer
from tests.helpers import VOCABULARY, lasting, random_model, web
from tests.toolbox.http import pieces, text_of
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
def server(checkpoints):
    """Of both, by the names records and texts."""
    yield from lasting(",".join(f"{path.name}={path}" for path in checkpoints), dtype="float64")


@pytest.fixture
def choices(ask):
    def choices(model, **body):
        body = {"max_tokens": 60, "seed": 1, "n": 20} | body
        return [(it["text"], it["finish_reason"]) for it in ask(model, **body)["choices"]]

    return choices


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"prompt": "Al"}, {"prompt": "\nAl", "stop": "\n"}),
        ({"prompt": "\nAl"}, {"prompt": "\nAl", "stop": "\n"}),
        ({"prompt": "Al", "stop": "e"}, {"prompt": "\nAl", "stop": ["e", "\n"]}),
        ({"prompt": "Al", "ignore_eos": True}, {"prompt": "\nAl"}),
        ({"prompt": "Al", "regex": "[a-z]+"}, {"prompt": "\nAl", "regex": "[a-z]+\n", "max_tokens": 61}),
        ({"prompt": "Al", "regex": "[a-z]+\n"}, {"prompt": "\nAl", "regex": "[a-z]+\n", "max_tokens": 61}),
        (
            {"prompt": "Al", "choice": ["abc", "abcd"], "max_tokens": 4},
            {"prompt": "\nAl", "regex": "(abc|abcd)\n", "max_tokens": 5},
        ),
        (
            {"prompt": "Al", "regex": "[a-z]+", "bad_words": ["e", "oo"]},
            {"prompt": "\nAl", "regex": "[a-z]+\n", "bad_words": ["e", "oo"], "max_tokens": 61},
        ),
        (
            {"prompt": "Al", "regex": "[a-z]+", "ignore_eos": True},
            {"prompt": "\nAl", "regex": "[a-z]+"},
        ),
    ],
    ids=str,
)
def test_a_prompt_begins_a_record_and_a_line_break_ends_it(choices, given, meant):
    found = choices("records", **given)
    end = "\n" if meant.get("regex", "").endswith("\n") else ""
    assert found == [(text.removesuffix(end), reason) for text, reason in choices("texts", **meant)]
    assert "stop" in {reason for _, reason in found} or "ignore_eos" in given
    assert any("\n" in text for text, _ in found) == (given == {"prompt": "Al", "ignore_eos": True})


def test_a_record_ends_after_min_tokens_and_within_allowed_characters(choices, ask):
    found = choices("records", prompt="Al", min_tokens=12)
    assert all(len(text) >= 12 and "\n" not in text for text, _ in found)
    allowed = choices("records", prompt="Al", allowed_characters="abcdefg")
    assert all(set(text) <= set("abcdefg") for text, _ in allowed)
    assert all("stop" in {reason for _, reason in some} for some in (found, allowed))
    assert ask("records", prompt="Al", max_tokens=5)["usage"]["prompt_tokens"] == 2


NOT_EMPTY = [
    {}, {"max_tokens": 1}, {"bad_words": ["e", "\nB"]}, {"allowed_characters": "abc"}, {"best_of": 30},
    {"allowed_characters": "abc\n", "min_tokens": 5}, {"bad_words": ["ab"], "min_tokens": 5}, {"min_tokens": 2},
]  # fmt: skip


@pytest.mark.parametrize("prompt", ["", "\n", "\nAl\n"])
@pytest.mark.parametrize("fields", NOT_EMPTY, ids=str)
def test_no_record_is_empty_or_shorter_than_min_tokens(ask, fields, prompt):
    body = {"prompt": prompt, "max_tokens": 40, "seed": 1, "n": 20, "logit_bias": {"\n": 4}} | fields
    texts = [it["text"] for it in ask("records", **body)["choices"]]
    least = fields.get("min_tokens", 1)
    assert all(len(text) >= least and "\n" not in text for text in texts)
    assert any(len(text) == least for text in texts) or "best_of" in fields
    assert not any(word in text for word in fields.get("bad_words", []) for text in texts)


def test_a_pattern_ends_where_the_record_does(ask, choices):
    """Six letters are a whole record, not the first six of a longer one; a pattern may name the end or leave it out."""
    for regex, alike in (("[a-z]{6}", "[a-z]{6}\n"), ("[^\n]*e", "[^\n]*e\n?")):
        found = choices("records", regex=regex)
        assert found == choices("records", regex=alike)
        assert all(re.fullmatch(regex, text) and reason == "stop" for text, reason in found)
    assert all(text for text, _ in choices("records", regex="[a-z]*", logit_bias={"\n": 6}))
    kept = choices("records", regex="[a-z]{3}", max_tokens=4, include_stop_str_in_output=True)
    assert all(re.fullmatch("[a-z]{3}\n", text) for text, _ in kept)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "a\nb"}, "regex: nothing can match: a record has '\\n' at its end alone; use ignore_eos"),
        ({"regex": "()"}, "regex: no match has 1 character before the end of the record"),
        ({"regex": "[a-z]{6}", "max_tokens": 5}, "regex: the shortest match has 6 characters, max_tokens is 5"),
        ({"choice": ["ab"], "bad_words": ["b"]}, "choice: nothing can match that has none of bad_words"),
    ],
    ids=str,
)
def test_what_no_record_matches_is_refused(server, fields, message):
    for exact in (False, True):
        body = {"model": "records", "exact": exact, **fields}
        response = web.post(f"{server.url}/generate", json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"].startswith(message)


def test_a_whole_record_as_prompt_may_end_beside_one_that_begins(ask):
    body = {"prompt": ["", "Al"], "seed": [1, 1], "n": 20, "max_tokens": 40, "logit_bias": {"\n": 4}}
    texts = [it["text"] for it in ask("records", **body)["choices"]]
    assert "" not in texts[:20] and "" in texts[20:]
    assert "" in [it["text"] for it in ask("texts", **body | {"prompt": "", "seed": 1, "stop": "\n"})["choices"]]


def test_echo_and_log_probabilities_are_of_what_is_shown(ask):
    body = {"max_tokens": 8, "seed": 2, "echo": True, "logprobs": 1}
    (one,) = ask("records", "/v1/completions", prompt="Al", **body)["choices"]
    (other,) = ask("texts", "/v1/completions", prompt="\nAl", stop="\n", **body)["choices"]
    assert "\n" + one["text"] == other["text"]
    assert one["logprobs"]["token_logprobs"] == other["logprobs"]["token_logprobs"][1:]
    assert None not in one["logprobs"]["token_logprobs"]
    assert one["logprobs"]["text_offset"] == list(range(len(one["text"])))


def test_ids_and_log_probabilities_of_a_prompt_are_its_own(ask, checkpoints):
    encode = Checkpoint.read(checkpoints[0]).tokenizer.encode
    body = {"max_tokens": 8, "seed": 2, "return_token_ids": True, "prompt_logprobs": 0}
    (one,) = ask("records", "/v1/completions", prompt="Al", **body)["choices"]
    (other,) = ask("texts", "/v1/completions", prompt="\nAl", stop="\n", **body)["choices"]
    assert (one["prompt_token_ids"], one["token_ids"]) == (encode("Al"), encode(one["text"]))
    assert one["prompt_logprobs"] == other["prompt_logprobs"][1:] and other["prompt_logprobs"][0] is None


def test_streams_end_too(server, ask):
    body = {"prompt": "Al", "max_tokens": 60, "seed": 1}
    streamed = web.post(f"{server.url}/generate", json=body | {"model": "records", "stream": True})
    assert text_of(pieces(streamed)) == ask("records", **body)["choices"][0]["text"]


def test_scores_are_those_of_training(ask, checkpoints):
    lines = ["Alice", "Bob", "a", "who?"]
    checkpoint = Checkpoint.read(checkpoints[0])
    model = checkpoint.load_model(dtype=torch.float64)
    encoder = Encoder(checkpoint.tokenizer, "refuse", "?")
    expected = list(score_lines(model, encoder, lines, records=True, refused=lambda *_: None))
    found = ask("records", "/v1/score", texts=lines)
    for one, other in zip(found["data"], expected, strict=True):
        assert one["characters"] == other["characters"] == len(other["text"]) + 1
        assert one["nats"] == pytest.approx(other["nats"], rel=1e-5)
        assert len(one["character_nats"]) == one["characters"]


def test_distributions_infill_and_attention_see_the_beginning(ask):
    for prompt in ("Al", ""):
        one, other = ask("records", "/v1/next", prompt=prompt), ask("texts", "/v1/next", prompt="\n" + prompt)
        assert one["data"][0]["distribution"] == other["data"][0]["distribution"]
    body = {"suffix": "e", "max_tokens": 6, "seed": 3, "best_of": 4}
    one, other = ask("records", prompt="Al", **body), ask("texts", prompt="\nAl", stop="\n", **body)
    assert one["choices"][0]["text"] == other["choices"][0]["text"]
    body["regex"] = "[^e]{2,3}"  # a record's end is not in it, and does not follow it
    one, other = ask("records", prompt="Al", **body), ask("texts", prompt="\nAl", **body | {"regex": "[^e\n]{2,3}"})
    assert one["choices"][0]["text"] == other["choices"][0]["text"] != ""
    one, other = ask("records", "/v1/attention", text="Al"), ask("texts", "/v1/attention", text="\nAl")
    assert (one["text"], one["data"]) == (other["text"], other["data"])


def test_information_says_records(server):
    for model, is_records in (("records", True), ("texts", False)):
        info, tokenizer = (
            web.get(f"{server.url}/{path}", params={"model": model}).json() for path in ("info", "tokenizer_info")
        )
        assert (info["model"]["records"], tokenizer["eos_token"]) == (is_records, "\n" if is_records else None)


def test_transformers_ends_by_itself(checkpoints):
    from transformers import AutoModelForCausalLM

    records, _ = checkpoints
    tokenizer = Checkpoint.read(records).tokenizer
    model = AutoModelForCausalLM.from_pretrained(records, dtype=torch.float64)
    idx = torch.tensor([tokenizer.encode("\nAl")] * 20)
    torch.manual_seed(0)
    found = model.generate(idx, max_new_tokens=60, do_sample=True, pad_token_id=0)
    end = tokenizer.encode("\n")[0]
    ended = [after for row in found if end in (after := row[3:].tolist())]
    assert len(ended) >= 15
    assert all(set(after[after.index(end) + 1 :]) <= {0} for after in ended)
