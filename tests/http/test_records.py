"""A model of records over HTTP, beside the same weights as a model of other texts, asked in so many words."""

import re

import pytest
import torch

from service.model.checkpoint import Checkpoint
from service.model.tokenizer import CharTokenizer
from service.text.model import TextModel
from tests.helpers import VOCABULARY, lasting, random_model, web
from tests.toolbox.http import pieces, text_of
from training.commands.score import Tally, score_lines
from training.model.loading import open_model
from training.run.saving import save_checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(of records, of other texts): the same weights."""
    folder = tmp_path_factory.mktemp("records")
    model, tokenizer = random_model(seed=3), CharTokenizer(VOCABULARY)
    with torch.no_grad():  # so that records end after some ten characters
        model.head.weight[tokenizer.encode("\n")[0]] *= 1.5
    save_checkpoint(folder / "records", model, tokenizer, {"losses": {}, "recipe": {"records": True}})
    save_checkpoint(folder / "texts", model, tokenizer, {"losses": {}, "recipe": {}})
    # Records of several lines: U+001E in the line break's place, so that all answers are the same but for it.
    characters = ["\x1e" if c == "\n" else c for c in VOCABULARY]
    about = {"losses": {}, "recipe": {"records": "blank"}, "data": {"record_end": "\x1e"}}
    save_checkpoint(folder / "blocks", model, CharTokenizer(characters), about)
    return folder / "records", folder / "texts", folder / "blocks"


@pytest.fixture(scope="module")
def server(checkpoints):
    """Of all, by the names records, texts and blocks."""
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


@pytest.mark.parametrize(
    ("model", "fields", "pattern"),
    [
        ("records", {"regex": "[a-e]{3,8}", "min_tokens": 4}, "[a-e]{4,8}"),
        ("records", {"regex": "[a-e]{3,8}", "allowed_characters": "abcx\n"}, "[abc]{3,8}"),
        ("blocks", {"regex": "[a-e]{3,8}", "allowed_characters": "abcx\x1e"}, "[abc]{3,8}"),
        ("blocks", {"regex": "[ab\x1e]{3}", "allowed_characters": "ab\x1e"}, "[ab]{3}"),
        ("blocks", {"regex": "ab", "max_tokens": 2, "min_tokens": 2}, "[ab]{2}"),
        ("records", {"regex": "a?", "max_tokens": 0}, "[a]{0}"),
    ],
    ids=str,
)
def test_conditions_hold_together(choices, model, fields, pattern):
    """A pattern's shortest match, with what ends the record, may be as long as min_tokens."""
    texts = [
        text for text, _ in choices(model, prompt="Al", logit_bias={"\x1e" if model == "blocks" else "\n": 4}, **fields)
    ]
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert min(map(len, texts)) == int(pattern.split("{")[1][0])


@pytest.mark.parametrize("prompt", ["", "Al"])
def test_a_shown_end_counts_in_max_tokens(server, choices, prompt):
    body = {"prompt": prompt, "include_stop_str_in_output": True, "max_tokens": 3, "logit_bias": {"\n": 4}}
    for fields, pattern in (
        ({"regex": "[a-e]{1,9}", "min_tokens": 2}, "[a-e]{2}\n"),
        ({"choice": ["ab", "abcd", "c"]}, "(ab|c)\n"),
        ({"regex": "[a-e]*"}, "[a-e]{1,2}\n" if prompt == "" else "[a-e]{0,2}\n"),
    ):
        assert all(re.fullmatch(pattern, text) for text, _ in choices("records", **body, **fields)), fields
    body |= {"model": "records", "regex": "[a-e]{1,9}", "min_tokens": 3}
    refused = web.post(f"{server.url}/generate", json=body)
    assert "no match has 3 characters before the end of the record" in refused.json()["error"]["message"]


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


def with_separators(value):
    """A body or an answer of lines as one of blocks."""
    if isinstance(value, dict):
        return {with_separators(name): with_separators(each) for name, each in value.items()}
    if isinstance(value, list):
        return [with_separators(each) for each in value]
    return value.replace("\n", "\x1e") if isinstance(value, str) else value


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"prompt": ""}, {"prompt": "\nAl"}, {"stop": "e"}, {"ignore_eos": True}, {"min_tokens": 12},
        {"include_stop_str_in_output": True}, {"logprobs": 3}, {"echo": True}, {"logit_bias": {"\n": 4}, "prompt": ""},
        {"regex": "[a-z]+"}, {"regex": ".*"}, {"regex": "[^e]*"}, {"regex": r"\S*\s?"}, {"stop_regex": "a.|[^\n]b"},
        {"regex": ".{3,9}", "exact": True}, {"regex": "[^e\n]{2,6}", "exact": True}, {"min_tokens": 5, "exact": True},
        {"choice": ["abc", "abcd"]}, {"bad_words": ["e", "oo"]}, {"allowed_characters": "abc"},
        {"stop_regex": "[aeiou]x"},
        {"suffix": "e", "best_of": 4, "n": 1}, {"suffix": "e", "best_of": 4, "n": 1, "regex": "[^e]{2,3}"},
        {"allowed_characters": "abc", "min_tokens": 3}, {"bad_words": ["ab"], "min_tokens": 3, "regex": "[a-f]*"},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_of_several_lines_ends_at_its_separator(ask, fields):
    """As one of one line ends at its line break; `.` matches neither."""
    body = {"prompt": "Al", "max_tokens": 40, "seed": 1, "n": 10} | fields
    lines, blocks = ask("records", **body), ask("blocks", **with_separators(body))
    assert blocks["choices"] == with_separators(lines["choices"]) and blocks["usage"] == lines["usage"]
    reasons = {choice["finish_reason"] for choice in blocks["choices"]}
    assert "stop" in reasons or fields.get("ignore_eos") or "suffix" in fields


def test_patterns_match_no_separator(ask, server):
    """A line break may be named where a record ends, and [^e] means it too; U+001E is text to no pattern."""
    for fields in ({"regex": "[^e]{3}"}, {"regex": r"[\s\S]{3}", "exact": True}):
        for model, least in (("records", 2), ("blocks", 3)):
            texts = [it["text"] for it in ask(model, prompt="Al", n=20, seed=1, max_tokens=9, **fields)["choices"]]
            assert {len(text) for text in texts} == {least, 3}
    body = {"model": "blocks", "prompt": "Al", "regex": "[a-z]{3}\x1e"}
    assert web.post(f"{server.url}/generate", json=body).json()["error"]["code"] == "invalid_pattern"
    texts = [it["text"] for it in ask("blocks", prompt="Al", regex=".{30}", ignore_eos=True, n=10, seed=1)["choices"]]
    assert any("\x1e" in text for text in texts)


def test_scores_and_distributions_of_blocks(ask, server):
    for path, body in (
        ("/v1/score", {"texts": ["Alice", "Bob\n", "a"]}),
        ("/v1/score", {"prefix": "Al", "continuations": ["ice", "bert"]}),
        ("/v1/next", {"prompt": ""}),
        ("/v1/attention", {"text": "Al", "layer": 0}),
    ):
        lines, blocks = ask("records", path, **body), ask("blocks", path, **with_separators(body))
        assert blocks["data"] == with_separators(lines["data"])
    told = web.get(f"{server.url}/tokenizer_info", params={"model": "blocks"}).json()
    assert (told["bos_token"], told["eos_token"]) == ("\x1e", "\x1e")
    assert web.get(f"{server.url}/info", params={"model": "blocks"}).json()["model"]["records"] is True


def test_streams_end_too(server, ask):
    body = {"prompt": "Al", "max_tokens": 60, "seed": 1}
    streamed = web.post(f"{server.url}/generate", json=body | {"model": "records", "stream": True})
    assert text_of(pieces(streamed)) == ask("records", **body)["choices"][0]["text"]


def test_scores_are_those_of_training(ask, checkpoints):
    lines = ["Alice", "Bob", "a", "who?"]
    checkpoint = Checkpoint.read(checkpoints[0])
    with open_model(checkpoint.load_model(), TextModel.of(checkpoint), slots=2) as model:
        options = {"unknown_characters": "refuse"}
        expected = list(score_lines(model, checkpoint.tokenizer, lines, options, tally=Tally()))
    found = ask("records", "/v1/score", texts=lines)
    for one, other in zip(found["data"], expected, strict=True):
        assert one["characters"] == other["characters"] == len(other["text"]) + 1
        assert one["nats"] == pytest.approx(other["nats"], rel=1e-3)  # in float64 and float32
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


def test_the_beginning_counts_in_the_limit_of_attention(server):
    limit = web.get(f"{server.url}/info", params={"model": "records"}).json()["limits"]["max_attention_characters"]
    for length, status in ((limit - 1, 200), (limit, 400)):
        body = {"model": "records", "text": "A" * length, "layer": 0, "head": 0}
        answer = web.post(f"{server.url}/v1/attention", json=body)
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"].startswith(f"text: at most {limit - 1} characters after")


def test_information_says_records(server):
    for model, is_records in (("records", True), ("texts", False)):
        info, tokenizer = (
            web.get(f"{server.url}/{path}", params={"model": model}).json() for path in ("info", "tokenizer_info")
        )
        assert (info["model"]["records"], tokenizer["eos_token"]) == (is_records, "\n" if is_records else None)


@pytest.mark.parametrize(("place", "before"), [(0, "\n"), (2, "\x1e")])
def test_transformers_ends_by_itself(checkpoints, place, before):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    records = checkpoints[place]
    tokenizer = Checkpoint.read(records).tokenizer
    model = AutoModelForCausalLM.from_pretrained(records, dtype=torch.float64)
    idx = torch.tensor([tokenizer.encode(f"{before}Al")] * 20)
    torch.manual_seed(0)
    found = model.generate(idx, max_new_tokens=60, do_sample=True, pad_token_id=0)
    end = tokenizer.encode(before)[0]
    ended = [after for row in found if end in (after := row[3:].tolist())]
    assert len(ended) >= 15
    assert all(set(after[after.index(end) + 1 :]) <= {0} for after in ended)
    theirs, text = AutoTokenizer.from_pretrained(records), f"{before}Al {before}"
    assert theirs.encode(text) == tokenizer.encode(text) and theirs.decode(tokenizer.encode(text)) == text
    left_out = theirs.decode(tokenizer.encode(text), skip_special_tokens=True)  # as vLLM decodes
    assert left_out == (text if before == "\n" else "Al ")
