"""The routes, checked against transformers, the trainer's evaluation, Python's re and replay."""

import concurrent.futures
import gzip
import itertools
import json
import math
import random
import re
import threading

import httpx
import numpy as np
import pytest
import torch

from service.http.connection.errors import ApiError
from service.http.routes.stream import event
from tests.helpers import ENDLESS, VOCABULARY, lasting, save_random, serving, web
from tests.http.programs import changed
from tests.toolbox.http import PATIENCE, events, pieces, sent, text_of
from tests.toolbox.http import post as written
from training.measure.losses import streamed_loss


@pytest.fixture(scope="module")
def server(checkpoint):
    """In float64, whose log-probabilities can be compared with transformers'."""
    program = changed({"service.http.routes.stream.KEEP_ALIVE_SECONDS": 0.01})
    yield from lasting(checkpoint.path, program, dtype="float64")


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="module")
def post(client):
    def post(path, **body):
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    return post


@pytest.fixture(scope="module")
def peer(checkpoint):
    """transformers' Qwen3 from the same folder: text -> log-probabilities (T, V) of the next character."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float64)

    def logprobs(text):
        with torch.no_grad():
            return model(torch.tensor([checkpoint.tokenizer.encode(text)])).logits[0].log_softmax(-1)

    return logprobs


def rejection(client, path, **body):
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


# -- log-probabilities --


def test_logprobs_of_prompt_and_completion_equal_transformers(post, checkpoint, peer):
    prompt, V = "Hello there, you", len(VOCABULARY)
    answer = post("/v1/completions", prompt=prompt, max_tokens=20, seed=4, echo=True, logprobs=V)
    (choice,) = answer["choices"]
    text, reported = choice["text"], choice["logprobs"]
    assert text.startswith(prompt) and len(text) == len(prompt) + 20
    assert reported["tokens"] == list(text)
    assert reported["text_offset"] == list(range(len(text)))
    assert reported["token_logprobs"][0] is None and reported["top_logprobs"][0] is None
    expected = peer(text)
    ids = checkpoint.tokenizer.encode(text)
    for i in range(1, len(text)):
        assert reported["token_logprobs"][i] == pytest.approx(float(expected[i - 1, ids[i]]), abs=5e-6)
        tops = dict(zip(VOCABULARY, expected[i - 1].tolist(), strict=True))
        assert reported["top_logprobs"][i] == pytest.approx(tops, abs=5e-6)
    assert answer["usage"] == {"prompt_tokens": 16, "completion_tokens": 20, "total_tokens": 36}


def test_top_logprobs_include_the_sampled_character(post):
    (choice,) = post("/generate", prompt="ab", max_tokens=50, seed=1, logprobs=1, temperature=3)["choices"]
    sizes = set()
    for character, top in zip(choice["text"], choice["logprobs"]["top_logprobs"], strict=True):
        assert character in top
        sizes.add(len(top))
    assert sizes == {1, 2}
    (alone,) = post("/generate", prompt="ab", max_tokens=5, seed=1, logprobs=0)["choices"]
    assert [len(top) for top in alone["logprobs"]["top_logprobs"]] == [1] * 5
    (without,) = post("/generate", prompt="ab", max_tokens=5, seed=1)["choices"]
    assert "logprobs" not in without


def test_max_tokens_zero_only_scores_the_prompt(post, checkpoint, peer):
    text = "To be, or not to be"
    answer = post("/v1/completions", prompt=[text, "a", ""], max_tokens=0, echo=True, logprobs=0)
    assert [choice["text"] for choice in answer["choices"]] == [text, "a", ""]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3
    reported = answer["choices"][0]["logprobs"]["token_logprobs"]
    ids, expected = checkpoint.tokenizer.encode(text), peer(text)
    assert reported[1:] == pytest.approx([float(expected[i - 1, ids[i]]) for i in range(1, len(ids))], abs=5e-6)
    assert answer["choices"][1]["logprobs"]["token_logprobs"] == [None]
    assert answer["choices"][2]["logprobs"]["token_logprobs"] == []
    assert answer["usage"]["completion_tokens"] == 0


def test_stream_with_echo_and_logprobs_equals_the_whole_response(client, post):
    options = {"prompt": ["Hello", "x"], "max_tokens": 30, "seed": 2, "echo": True, "logprobs": 3, "n": 2, "stop": "e"}
    whole = post("/v1/completions", **options)["choices"]
    parts = pieces(client.post("/v1/completions", json=options | {"stream": True}))
    for choice in whole:
        mine = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert len(choice["logprobs"]["tokens"]) == len(choice["text"])  # they end at the stop too
        for name in ("tokens", "text_offset"):
            assert [item for c in mine for item in c["logprobs"][name]] == choice["logprobs"][name]
        values = [v or 0.0 for c in mine for v in c["logprobs"]["token_logprobs"]]
        assert values == pytest.approx([v or 0.0 for v in choice["logprobs"]["token_logprobs"]], abs=1e-4)
        assert [c["seed"] for c in mine] == [choice["seed"]] * len(mine)


def test_a_large_answer_is_the_same_whole_and_streamed(client):
    """Both are encoded in parts, and go out in many writes."""
    text = "Hello, world! " * 300
    body = {"prompt": text, "echo": True, "logprobs": len(VOCABULARY), "max_tokens": 1, "seed": 1}
    (whole,) = client.post("/v1/completions", json=body).json()["choices"]
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        parts = [part["choices"][0] for part in pieces(response)]
    assert len(parts) > 5 and "".join(part["text"] for part in parts) == whole["text"]
    assert len(whole["text"]) == len(text) + 1
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [value for part in parts for value in part["logprobs"][name]] == whole["logprobs"][name]


# -- several completions --


def test_n_completions_use_consecutive_seeds(post):
    """The last one is followed by 0."""
    several = post("/v1/completions", prompt=["ab", "cd"], max_tokens=10, seed=2**64 - 2, n=3)["choices"]
    assert [choice["index"] for choice in several] == list(range(6))
    assert [choice["seed"] for choice in several] == [2**64 - 2, 2**64 - 1, 0] * 2
    for choice in several:
        prompt = ["ab", "cd"][choice["index"] // 3]
        (alone,) = post("/v1/completions", prompt=prompt, max_tokens=10, seed=choice["seed"])["choices"]
        assert alone["text"] == choice["text"]


def test_best_of_returns_the_highest_mean_logprobs(post):
    options = {"prompt": "ab", "max_tokens": 12, "seed": 3, "stop": [*VOCABULARY[10:26]], "logprobs": 0}
    candidates = post("/generate", **options, n=10)["choices"]

    def mean(choice):
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values) if values else -math.inf

    assert "" in {choice["text"] for choice in candidates}
    first_of = {choice["text"]: choice for choice in reversed(candidates)}
    expected = sorted(first_of.values(), key=mean, reverse=True)[:3]
    best = post("/generate", **options, n=3, best_of=10)
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in expected]
    assert [choice["seed"] for choice in best["choices"]] == [choice["seed"] for choice in expected]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2]
    assert best["usage"]["completion_tokens"] == sum(len(choice["text"]) for choice in candidates)
    echoed = post("/generate", **options, n=3, best_of=10, echo=True)["choices"]
    assert [choice["text"] for choice in echoed] == ["ab" + choice["text"] for choice in expected]


# -- scoring --


def test_score_equals_the_trainers_evaluation(post, checkpoint):
    """For a text far longer than the receptive field."""
    r = random.Random(0)
    text = "".join(r.choices(VOCABULARY, k=3000))
    (item,) = post("/v1/score", texts=text)["data"]
    ids = np.array(checkpoint.tokenizer.encode(text))
    assert item["characters"] == 2999
    assert item["nats_per_character"] == pytest.approx(streamed_loss(checkpoint.load_model(), ids), abs=1e-5)
    assert item["bits_per_character"] == pytest.approx(item["nats_per_character"] / math.log(2))
    assert item["perplexity"] == pytest.approx(math.exp(item["nats_per_character"]))
    assert item["nats"] == pytest.approx(math.fsum(item["character_nats"][1:]), abs=1e-3)
    assert item["character_nats"][0] is None and len(item["character_nats"]) == 3000


def test_thousands_of_texts_are_scored_in_one_request(post, peer, checkpoint):
    r = random.Random(1)
    texts = ["".join(r.choices(VOCABULARY, k=r.randrange(12))) for _ in range(2500)]
    answer = post("/v1/score", texts=texts, characters=False)
    assert [item["index"] for item in answer["data"]] == list(range(2500))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))
    for i in range(0, 2500, 83):
        ids, item = checkpoint.tokenizer.encode(texts[i]), answer["data"][i]
        assert item["characters"] == max(0, len(ids) - 1)
        assert "character_nats" not in item and "rank" not in item
        if len(ids) > 1:
            expected = -sum(float(row[id]) for row, id in zip(peer(texts[i]), ids[1:], strict=False))
            assert item["nats"] == pytest.approx(expected, abs=1e-4)
        else:
            assert (item["nats"], item["perplexity"]) == (0, None)


def test_continuations_are_ranked(post, peer, checkpoint):
    prefix, continuations = "To be, or ", ["not", "n", "", "xyz", "not to be"]
    answer = post("/v1/score", prefix=prefix, continuations=continuations)
    nats = []
    for continuation in continuations:
        ids, rows = checkpoint.tokenizer.encode(continuation), peer(prefix + continuation)
        nats.append(-sum(float(rows[len(prefix) + i - 1, id]) for i, id in enumerate(ids)))
    assert [item["nats"] for item in answer["data"]] == pytest.approx(nats, abs=1e-4)
    assert [len(item["character_nats"]) for item in answer["data"]] == [3, 1, 0, 3, 9]
    order = sorted(range(5), key=nats.__getitem__)
    assert [order.index(i) + 1 for i in range(5)] == [item["rank"] for item in answer["data"]]
    (first,) = post("/v1/score", continuations=["a"])["data"]
    assert first["nats"] == pytest.approx(-float(peer("\n")[0, VOCABULARY.index("a")]), abs=1e-4)


def test_scores_of_replaced_characters_say_how_many(post):
    for policy in ("replace", "drop"):
        data = post("/v1/score", texts=["na\u00efve \u6f22", "plain"], unknown_characters=policy)["data"]
        assert [row["unknown_characters"] for row in data] == [2, 0]
    assert "unknown_characters" not in post("/v1/score", texts=["plain"])["data"][0]


def test_invalid_score_requests_are_rejected_with_a_reason(client):
    assert "either" in rejection(client, "/v1/score")["message"]
    assert "either" in rejection(client, "/v1/score", texts=["a"], continuations=["b"])["message"]
    assert rejection(client, "/v1/score", texts=[])["param"] == "texts"
    assert "must be in [1, 10000], got 10001" in rejection(client, "/v1/score", texts=["a"] * 10_001)["message"]
    assert rejection(client, "/v1/score", texts=["ok", "é"])["message"].startswith("texts.1: character 'é' (U+00E9)")
    assert rejection(client, "/v1/score", prefix="é", continuations=["a"])["param"] == "prefix"


def test_next_returns_the_whole_distribution(post, peer):
    answer = post("/v1/next", prompt=["Hello", ""])
    for item, text in zip(answer["data"], ["Hello", "\n"], strict=True):
        expected = peer(text)[-1]
        reported = item["distribution"]
        ranked = expected.sort(descending=True).values.tolist()
        assert [entry["logprob"] for entry in reported] == pytest.approx(ranked, abs=5e-6)
        assert {entry["character"] for entry in reported} == set(VOCABULARY)
        assert all(VOCABULARY[entry["id"]] == entry["character"] for entry in reported)
        assert sum(entry["probability"] for entry in reported) == pytest.approx(1)
        assert item["entropy_nats"] == pytest.approx(float(-(expected.exp() * expected).sum()), abs=1e-5)
        assert item["entropy_bits"] == pytest.approx(item["entropy_nats"] / math.log(2))


# -- constraints and stops --


@pytest.mark.parametrize("pattern", ["(ab|c)+d?", "[^a-z]*"])
def test_every_completion_matches_its_regex(post, pattern):
    for max_tokens in (6, 9, 60):
        answer = post("/generate", prompt="a", regex=pattern, n=30, max_tokens=max_tokens, temperature=2)
        for choice in answer["choices"]:
            assert re.fullmatch(pattern, choice["text"]), choice
            assert len(choice["text"]) <= max_tokens
            assert choice["finish_reason"] in ("stop", "length")


def test_min_tokens_holds_for_a_choice_and_is_refused_where_no_match_is_long_enough(client, post):
    (choice,) = post("/generate", prompt="a", choice=["a", "abc"], min_tokens=2, logit_bias={"x": 50})["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")
    error = rejection(client, "/generate", prompt="a", choice=["a", "abcd"], min_tokens=2, max_tokens=3)
    assert (error["param"], error["code"]) == ("choice", "invalid_pattern")
    assert error["message"] == "choice: no match has min_tokens (2) to max_tokens (3) characters"
    assert rejection(client, "/generate", prompt="a", regex="(..)*", min_tokens=3, max_tokens=3)["param"] == "regex"
    # Cycles of 29, 31, 37 and 41 characters.
    cycles = "aa(.{29})*|ab(.{31})*|ba(.{37})*|bb(.{41})*"
    error = rejection(client, "/generate", prompt="a", regex=cycles, min_tokens=10**6, max_tokens=10**6)
    assert error["param"] == "min_tokens" and "is too large for a minimum length of 1000000" in error["message"]


def test_choice_frequencies_follow_the_model(post, peer, checkpoint):
    """The model's probabilities apply, renormalised at each character."""
    rows = peer("Hello")[-1].exp()
    a, b = (float(rows[VOCABULARY.index(c)]) for c in "ab")
    seen = [0, 0]
    for start in range(0, 2000, 100):
        answer = post("/generate", prompt="Hello", choice=["a", "bb"], n=100, max_tokens=2, seed=start)
        for choice in answer["choices"]:
            assert (choice["text"], choice["finish_reason"]) in (("a", "stop"), ("bb", "stop"))
            seen[choice["text"] == "bb"] += 1
    expected = 2000 * a / (a + b)
    assert abs(seen[0] - expected) < 5 * math.sqrt(expected * b / (a + b))


def test_stream_ends_at_the_first_stop_regex_match(client, post, checkpoint):
    free = post("/generate", prompt="a", max_tokens=400, seed=5)["choices"][0]["text"]
    for pattern in ("[A-Z][a-z]", "[.!?]", "e[a-z]*E"):
        found = next(((i, j) for j in range(1, 401) for i in range(j) if re.fullmatch(pattern, free[i:j])), (400, 400))
        options = {"prompt": "a", "max_tokens": 400, "seed": 5, "stop_regex": pattern, "stream": True}
        for include, end in ((False, found[0]), (True, found[1])):
            parts = pieces(client.post("/generate", json=options | {"include_stop_str_in_output": include}))
            assert text_of(parts) == free[:end]
            assert parts[-2]["finish_reason"] == ("stop" if found[0] < 400 else "length")


def test_min_tokens_delays_stops_and_ignore_eos_does_not(post):
    free = post("/generate", prompt="a", max_tokens=100, seed=5)["choices"][0]["text"]
    options = {"prompt": "a", "max_tokens": 100, "seed": 5, "stop": free[3], "ignore_eos": True}
    assert post("/generate", **options)["choices"][0]["text"] == free[: free.index(free[3])]
    later = post("/generate", **options, min_tokens=50)["choices"][0]["text"]
    end = free.find(free[3], 50)
    assert later == (free[:end] if end >= 0 else free)


# -- infilling --


def test_infill_returns_the_candidates_that_fit_the_suffix_best(post):
    prompt, suffix = "Hello", " there, you"
    options = {"prompt": prompt, "suffix": suffix, "max_tokens": 8, "seed": 3, "best_of": 12}
    best = post("/v1/completions", **options, n=5)["choices"]
    assert len({choice["text"] for choice in best}) == 5
    sampled = post("/v1/completions", prompt=prompt, max_tokens=8, seed=3, n=12)["choices"]
    by_seed = {choice["seed"]: choice["text"] for choice in sampled}

    def fit(middles):
        found = (post("/v1/score", prefix=prompt + middle, continuations=[suffix]) for middle in middles)
        return np.array([it["data"][0]["nats"] for it in found])

    for choice in best:
        assert by_seed[choice["seed"]].startswith(choice["text"])
        assert (choice["finish_reason"] == "stop") == (len(choice["text"]) < 8)
    given = fit([choice["text"] for choice in best])
    assert (np.diff(given) >= -1e-3).all()  # best first
    assert given.max() <= fit(set(by_seed.values()) - {choice["text"] for choice in best}).min() + 1e-3
    (echoed,) = post("/v1/completions", **options, echo=True)["choices"]
    assert echoed["text"] == prompt + best[0]["text"]


@pytest.mark.parametrize("regex", ["[^q]{2,4}", "([^q]{2})+"])
def test_infill_with_a_pattern_is_cut_only_where_it_matches(post, regex):
    matches = re.compile(regex).fullmatch
    options = {"prompt": "Hello y", "max_tokens": 6, "seed": 3, "regex": regex}
    best = post("/v1/completions", suffix="r there", best_of=16, n=8, **options)["choices"]
    assert all(matches(choice["text"]) for choice in best)
    by_seed = {it["seed"]: it["text"] for it in post("/v1/completions", n=16, **options)["choices"]}
    assert all(by_seed[choice["seed"]].startswith(choice["text"]) for choice in best)
    assert any(by_seed[choice["seed"]] != choice["text"] for choice in best)


def test_infill_streams_each_text_in_one_event(client, post):
    options = {"prompt": "ab", "suffix": "cd", "max_tokens": 5, "seed": 3, "n": 2}
    whole = post("/generate", **options)["choices"]
    *parts, last = pieces(client.post("/generate", json=options | {"stream": True}))
    assert [part["text"] for part in parts] == [choice["text"] for choice in whole]
    assert last["chargpt"]["seeds"] == [3]


# -- characters outside the vocabulary --


def test_unknown_characters_are_refused_replaced_or_dropped(client, post):
    text = "na\u00efve caf\u00e9 \u6f22"
    error = rejection(client, "/generate", prompt=text)
    assert error["code"] == "unknown_character"
    for shown in ("'ï' (U+00EF) at offset 2", "'é' (U+00E9) at offset 9", "'漢' (U+6F22) at offset 11"):
        assert shown in error["message"]
    options = {"max_tokens": 5, "seed": 1, "echo": True}
    dropped = post("/generate", prompt=text, unknown_characters="drop", **options)
    assert dropped["choices"][0]["text"].startswith("nave caf ")
    assert (dropped["chargpt"]["replaced_characters"], dropped["chargpt"]["dropped_characters"]) == (0, 3)
    replaced = post("/generate", prompt=text, unknown_characters="replace", replacement_character="x", **options)
    assert replaced["choices"][0]["text"].startswith("naxve cafx x")
    assert (replaced["chargpt"]["replaced_characters"], replaced["chargpt"]["dropped_characters"]) == (3, 0)
    assert post("/tokenize", prompt="\u00e9a", unknown_characters="drop")["count"] == 1
    error = rejection(client, "/generate", prompt="a", suffix="\u00e9", unknown_characters="drop")
    assert (error["param"], error["message"]) == ("suffix", "suffix: none of its characters is in the vocabulary")
    many = rejection(client, "/generate", prompt="\u00e9" * 1000)["message"]
    assert "and 980 more" in many and len(many) < 1000


# -- small routes --


def test_a_replacement_outside_the_vocabulary_matters_only_where_something_is_replaced(client, post):
    options = {"max_tokens": 4, "unknown_characters": "replace", "replacement_character": "€"}
    assert post("/generate", prompt="JULIET", **options)["chargpt"]["replaced_characters"] == 0
    error = rejection(client, "/generate", prompt="JULI\u6f22ET", **options)
    assert error["param"] == "replacement_character"
    assert error["message"] == (
        "replacement_character: '€', which is to replace '漢' at offset 4 of prompt, is not in the vocabulary either"
    )


def test_tokenize_and_detokenize(client, post, checkpoint):
    text = "Hello there\n"
    answer = post("/tokenize", prompt=text)
    assert answer["tokens"] == checkpoint.tokenizer.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (12, 100_000)
    assert post("/detokenize", tokens=answer["tokens"]) == {"prompt": text}
    assert rejection(client, "/detokenize", tokens=[0, len(VOCABULARY)])["param"] == "tokens"
    assert rejection(client, "/tokenize")["param"] == "prompt"
    info = client.get("/tokenizer_info").json()
    assert (info["vocab_size"], info["bos_token"], info["eos_token"]) == (len(VOCABULARY), "\n", None)
    assert client.head("/metrics").status_code == 200


@pytest.mark.parametrize(
    ("path", "given", "meant"),
    [
        ("/generate", {"max_token": 5}, "max_tokens"),
        ("/generate", {"maxTokens": 5}, "max_tokens"),
        ("/v1/completions", {"max_new_tokens": 5}, "max_tokens"),
        ("/v1/score", {"texts": ["ab"], "priorty": 1}, "priority"),
        ("/tokenize", {"promt": "a"}, "prompt"),
        ("/detokenize", {"token": [1]}, "tokens"),
        ("/generate", {"stream_options": {"include_usages": True}}, "include_usage"),
    ],
)
def test_likely_typos_are_refused(client, path, given, meant):
    error = rejection(client, path, **given)
    assert error["code"] == "unknown_field"
    assert error["message"] == f"{error['param']}: unknown field; did you mean {meant}?"


def test_unknown_fields_are_named_and_refused_on_request(client, post):
    body = {"prompt": "a", "max_tokens": 2, "user": "me", "colour": "red"}
    for size in (0, 70_000):  # small and large bodies
        for stream in (False, True):
            others = {"stream": True, "stream_options": {"x": 1}} if stream else {}
            response = client.post("/generate", json=body | {"metadata": "m" * size} | others)
            assert response.status_code == 200
            names = set(response.headers["x-ignored-fields"].split(", "))
            assert names == {"user", "colour", "metadata"} | ({"stream_options.x"} if stream else set())
        error = rejection(client, "/generate", **body, metadata="m" * size, strict=True)
        assert error["code"] == "unknown_field"
        assert "refused because of strict; known fields are unknown_characters, " in error["message"]
    assert "x-ignored-fields" not in client.post("/tokenize", json={"prompt": "a"}).headers
    assert client.post("/tokenize", json={"prompt": "a", "user": 1}).headers["x-ignored-fields"] == "user"
    marked = client.post("/tokenize", content=b'\xef\xbb\xbf{"prompt": "a"}')
    assert len(marked.json()["tokens"]) == 1  # a file from Windows may begin so
    assert client.get("/info?model=%ff").json()["error"]["message"] == "the query is not UTF-8"
    post("/generate", prompt="a", max_tokens=2, strict=True)


@pytest.mark.parametrize("size", [0, 70_000])
def test_a_body_is_json(client, size):
    """Of a repeated name, the last value counts, as in Python's parser and JavaScript's."""
    rest = b'"prompt": "a", "metadata": "%b"' % (b"m" * size)
    twice = client.post("/generate", content=b'{"max_tokens": 1, "max_tokens": 2, %b}' % rest).json()
    assert twice["usage"]["completion_tokens"] == 2
    error = client.post("/generate", content=b'{"user": NaN, %b}' % rest).json()["error"]
    assert (error["param"], error["code"]) == (None, "invalid_json")


def test_a_compressed_body_is_refused_by_its_coding(client):
    content = gzip.compress(b'{"prompt": "a"}')
    response = client.post("/generate", content=content, headers={"Content-Encoding": "gzip"})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_content_encoding")
    assert response.headers["accept-encoding"] == "identity"


def test_logit_bias_is_by_character_or_id_and_errors_say_what_a_digit_means(client, post):
    digits = rejection(client, "/generate", logit_bias={VOCABULARY[5]: 1, "5": 2})["message"]
    assert digits == (
        "logit_bias: '5', id 5, appears twice; in an object \"5\" is the id, and the character is written as a pair: "
        '[["5", 2.0]]'
    )
    pair = rejection(client, "/generate", logit_bias=[["5", -3]])["message"]  # not in this vocabulary
    assert "got '5': -3.0; in a pair \"5\" is the character, and the id is written as a number: [[5, -3.0]]" in pair
    assert len(rejection(client, "/generate", logit_bias={"9" * 5000: 1})["message"]) < 300
    x, options = VOCABULARY.index("x"), {"prompt": "a", "max_tokens": 5, "temperature": 0}
    for bias in ({"x": 100}, {str(x): 100}, [["x", 100]], [[x, 100.0]]):
        assert post("/generate", **options, logit_bias=bias)["choices"][0]["text"] == "xxxxx"


# -- streams --


def test_continuous_usage_counts_characters_in_every_chunk(client):
    body = {"prompt": "abc", "max_tokens": 12, "seed": 1, "stream": True}
    for path in ("/v1/completions", "/generate"):
        options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        parts = pieces(client.post(path, json=body | options))
        seen = [part["usage"]["completion_tokens"] for part in parts]
        assert seen == sorted(seen) and seen[0] >= 1 and seen[-1] == 12
        texts = itertools.accumulate(len(p["choices"][0]["text"] if "choices" in p else p["text"]) for p in parts[:-1])
        assert list(texts) == seen[:-1]


def test_usage_comes_only_with_include_usage_and_options_only_with_a_stream(client):
    body = {"prompt": "abc", "max_tokens": 5, "stream": True}
    for options in ({"continuous_usage_stats": True}, {"include_usage": False, "continuous_usage_stats": True}):
        parts = pieces(client.post("/v1/completions", json=body | {"stream_options": options}))
        assert not any("usage" in part for part in parts)
    for path, size in itertools.product(("/v1/completions", "/generate"), (0, 70_000)):
        for stream in ({}, {"stream": False}, {"stream": None}):
            given = {"prompt": "a", "stream_options": {"include_usage": True}, "metadata": "m" * size} | stream
            error = rejection(client, path, **given)
            assert (error["param"], error["message"]) == ("stream_options", "stream_options: needs stream")
        assert client.post(path, json={"max_tokens": 1, "stream_options": None}).status_code == 200


def test_stream_interval_batches_characters(client):
    """The first character is sent at once, the others together when the stream ends, long before the interval."""
    body = {"prompt": "a", "max_tokens": 20_000, "seed": 2, "stream": True}
    with client.stream("POST", "/generate", json=body | {"stream_interval": 60}) as response:
        texts = [part["text"] for part in pieces(response) if "text" in part]
    assert len(texts) <= 2 and sum(map(len, texts)) == 20_000
    endless = body | {"stream_interval": 0, "max_tokens": ENDLESS // 1000}
    with client.stream("POST", "/generate", json=endless) as response:
        parts = (json.loads(event)["text"] for event in events(response))
        found = "".join(itertools.islice(parts, 4))
    assert "".join(texts).startswith(found[:20_000])


def test_silent_stream_sends_keep_alive_comments(client):
    """After the first X everything may belong to the stop, so nothing is sent until the length is reached."""
    body = {"prompt": "a", "max_tokens": 20_000, "seed": 9}
    free = client.post("/generate", json=body).json()["choices"][0]["text"]
    body |= {"stop_regex": "X(.|\n)*qqqqqqqqqqqq", "stream": True}
    with client.stream("POST", "/generate", json=body) as response:
        lines = list(response.iter_lines())
    assert ": keep-alive" in lines
    # openai-go before 3.43 takes a comment and a blank line for an empty event, and ends the stream.
    assert all(after != "" for before, after in itertools.pairwise(lines) if before == ": keep-alive")
    *_, held, _ = parts = pieces(lines)
    assert text_of(parts) == free
    assert len(held["text"]) > 100


def test_events_have_no_character_at_which_a_client_splits_lines(tmp_path):
    """httpx splits at U+0085, U+2028 and U+2029 too, so that an event would end within its JSON."""
    breaks = "\x85\u2028\u2029"
    checkpoint = save_random(tmp_path / "c", sorted({*VOCABULARY, *breaks, "é", "…", "\x7f"}))
    options = {"prompt": "a", "max_tokens": 60, "seed": 1, "allowed_characters": breaks + "é…\x7f"}
    with serving(checkpoint.path) as server:
        for path in ("/generate", "/v1/completions"):
            for others in ({}, {"logprobs": 1}):
                whole = web.post(server.url + path, json=options | others).json()["choices"][0]["text"]
                assert len(set(whole)) == 6
                streamed = web.post(server.url + path, json=options | others | {"stream": True})
                parts = pieces(streamed)
                assert (
                    "".join(it["text"] for part in parts for it in part.get("choices", [part]) if "text" in it) == whole
                )
                assert len(streamed.text.splitlines()) == len(streamed.content.split(b"\n")) - 1
                assert "é" in streamed.text and "…" in streamed.text  # only what must be is escaped
    error = ApiError(400, f"a{breaks}b").body
    assert len(event(error).decode().splitlines()) == 2 and json.loads(event(error)[6:]) == json.loads(error)


def test_no_proxy_gathers_or_stores_a_stream(client):
    """nginx would, by default."""
    headers = client.post("/generate", json={"max_tokens": 2, "stream": True}).headers
    assert (headers["x-accel-buffering"], headers["cache-control"]) == ("no", "no-store")


# -- retries and caches --


def test_the_openai_sdk_does_not_repeat_what_took_too_long(server):
    """It repeats a 504 twice otherwise: three times the work, for the same answer."""
    import openai

    answered = {"handler": "/v1/completions", "method": "POST", "status": "504"}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2) as sdk:
        before = server.metric("chargpt_http_requests_total", **answered)
        with pytest.raises(openai.InternalServerError) as error:
            sdk.completions.create(
                model="chargpt", prompt="a", max_tokens=ENDLESS // 1000, extra_body={"timeout_seconds": 0.05}
            )
    assert error.value.response.headers["x-should-retry"] == "false"
    server.wait_until_metric("chargpt_http_requests_total", before + 1, **answered)
    lost = ApiError(503, "ended, 2 in a row", code="worker_lost", retry_after_seconds=1).headers
    assert (lost["X-Should-Retry"], lost["Retry-After"]) == ("false", "1")
    assert "X-Should-Retry" not in ApiError(503, "no worker", code="not_ready").headers


def test_no_cache_keeps_what_a_get_answers(client):
    """But files, which have an ETag."""
    paths = "/v1/models /v1/models/chargpt /info /tokenizer_info /livez /readyz /health /metrics".split()
    for path in (*paths, "/v1/models/x", "/nothing"):
        assert client.get(path).headers["cache-control"] == "no-store", path
    assert client.get("/").headers["cache-control"] == "no-cache"


# -- priority, receipts --


@pytest.fixture(scope="module")
def narrow(checkpoint):
    """A server with one slot and another default for unknown characters."""
    yield from lasting(checkpoint.path, max_running_requests=1, unknown_characters="replace")


def test_a_setting_selects_the_default_for_unknown_characters(narrow):
    answer = web.post(f"{narrow.url}/generate", json={"prompt": "\u00e9a", "max_tokens": 1, "echo": True}).json()
    assert answer["choices"][0]["text"].startswith(" a")
    assert answer["chargpt"]["replaced_characters"] == 1
    body = {"prompt": "\u00e9", "unknown_characters": "refuse"}
    assert web.post(f"{narrow.url}/generate", json=body).status_code == 400


def test_lower_priority_numbers_run_first(narrow):
    started, may_end = [], threading.Event()

    def ask(priority):
        """Holds the only slot, once it has it, until `may_end`."""
        body = {"prompt": "a", "max_tokens": ENDLESS, "priority": priority, "stream": True}
        with web.stream("POST", f"{narrow.url}/generate", json=body) as response:
            assert response.status_code == 200
            lines = response.iter_lines()  # dropping the iterator would close the stream
            next(lines)
            started.append(priority)
            assert may_end.wait(PATIENCE)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(ask, 0)]
        narrow.wait_until_metric("chargpt_num_requests_running", 1)
        for waiting, priority in enumerate((5, 7, -3, 1), 1):
            jobs.append(pool.submit(ask, priority))
            narrow.wait_until_metric("chargpt_num_requests_waiting", waiting)
        may_end.set()
        for job in jobs:
            job.result()
    assert started == [0, -3, 1, 5, 7]


def test_headers_match_the_receipt(client, checkpoint):
    response = client.post("/generate", json={"prompt": ["ab", "c"], "max_tokens": 20})
    receipt, headers = response.json()["chargpt"], response.headers
    assert headers["x-checkpoint"] == receipt["checkpoint_sha256"] == checkpoint.digest
    assert (headers["x-backend"], headers["x-dtype"]) == (receipt["backend"], receipt["dtype"])
    assert headers["x-seed"] == ",".join(map(str, receipt["seeds"]))
    with client.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 3, "stream": True}) as response:
        assert {"x-checkpoint", "x-backend", "x-dtype", "x-seed"} <= set(response.headers)
        *_, last = pieces(response)
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["chargpt"]["checkpoint_sha256"] == checkpoint.digest


OPTIONS = {
    "temperature": [0.0, 0.7, 1.0, 2.0], "top_k": [0, 5, 30], "top_p": [1.0, 0.8], "min_p": [0.0, 0.05], "n": [1, 1, 2],
    "typical_p": [1.0, 0.9], "repetition_penalty": [1.0, 1.2], "presence_penalty": [0.0, 0.5],
}  # fmt: skip
STREAM = {"stream": True, "n": 1}
KINDS = [
    {"regex": "[A-Z]?[a-z]+", "min_tokens": 1}, {"choice": ["yes", "no"], "max_tokens": 3},
    {"stop_regex": "[A-Z]{2}", "stop": ["e"]}, {"suffix": "abc", "best_of": 4}, {"best_of": 4}, STREAM, {},
]  # fmt: skip


def any_request(r):
    """A request with random options and no seed, so that the server draws one; a stream has one sequence."""
    kind = r.choice(KINDS)
    count = 1 if kind == STREAM else r.choice([1, 1, 3])
    prompts = ["".join(r.choices(VOCABULARY, k=r.randrange(30))) for _ in range(count)]
    body = {"prompt": prompts, "max_tokens": r.randrange(1, 25), "stream": False}
    return body | {name: r.choice(values) for name, values in OPTIONS.items()} | kind


def answer_of(client, path, body):
    """The (text, finish reason, seed) of each choice, or the text of a stream, and the receipt's seeds."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if body["stream"]:
        parts = pieces(response.text.split("\n"))
        choices = [choice for part in parts for choice in part.get("choices", [part])]
        return "".join(choice.get("text", "") for choice in choices), parts[-1]["chargpt"]["seeds"]
    answer = response.json()
    return [(c["text"], c["finish_reason"], c["seed"]) for c in answer["choices"]], answer["chargpt"]["seeds"]


def test_receipts_replay_exactly(client, checkpoint):
    """In other batches, and with several workers and HTTP processes."""
    r = random.Random(11)
    requests = [(r.choice(["/generate", "/v1/completions"]), any_request(r)) for _ in range(80)]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        first = list(pool.map(lambda request: answer_of(client, *request), requests))
        assert len({seed for _, seeds in first for seed in seeds}) == sum(len(seeds) for _, seeds in first)

        def differ(client):
            order = r.sample(range(80), 80)
            bodies = [requests[i][1] | {"seed": first[i][1]} for i in order]
            again = list(pool.map(lambda i, body: answer_of(client, requests[i][0], body), order, bodies))
            return [(requests[i], first[i], it) for i, it in zip(order, again, strict=True) if first[i] != it]

        assert not differ(client)
        options = {"dtype": "float64", "http_processes": 2, "workers_per_device": 2, "max_running_requests": 8}
        with serving(checkpoint.path, **options) as server:
            server.wait_until_metric("chargpt_http_processes_ready", 2)
            apart = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # either process may accept
            with httpx.Client(base_url=server.url, timeout=PATIENCE, limits=apart) as either:
                assert not differ(either)
            server.wait_until_metric("chargpt_num_requests_running", 0)
            ended = sum(v for (name, _), v in server.metrics().items() if name == "chargpt_request_success_total")
            assert ended >= sum(len(choices) for choices, _ in first)


@pytest.mark.parametrize("path", ["/generate", "/v1/next"])
def test_a_client_that_leaves_the_queue_is_an_abort_and_no_failure(narrow, path):
    """With an echoed prompt whose log-probabilities never came, or without the distribution that the answer needs."""
    fields = {"echo": True, "logprobs": 2} if path == "/generate" else {}
    narrow.wait_until_metric("chargpt_num_requests_running", 0)
    left = {"handler": path, "method": "POST", "status": "499"}
    before = narrow.metric("chargpt_http_requests_total", **left)
    with sent(narrow.port, written("/generate", {"prompt": "a", "max_tokens": ENDLESS, "stream": True})):
        narrow.wait_until_metric("chargpt_num_requests_running", 1)
        aborted = narrow.metric("chargpt_request_success_total", finished_reason="abort")
        with sent(narrow.port, written(path, {"prompt": "Hello"} | fields)):
            narrow.wait_until_metric("chargpt_num_requests_waiting", 1)
        narrow.wait_until_metric("chargpt_request_success_total", aborted + 1, finished_reason="abort")
        narrow.wait_until_metric("chargpt_http_requests_total", before + 1, **left)


# -- vLLM's fields, by ids --


def test_token_ids_stop_and_allow_as_their_characters_do(client, post, checkpoint):
    encode, options = checkpoint.tokenizer.encode, {"prompt": "ab", "max_tokens": 60, "seed": 3}
    stopped = post("/generate", **options, stop=["e", "i"])["choices"]
    assert post("/generate", **options, stop_token_ids=encode("ei"))["choices"] == stopped
    assert stopped[0]["finish_reason"] == "stop"
    both = post("/v1/completions", **options, stop="e", stop_token_ids=encode("i"), include_stop_str_in_output=True)
    assert both["choices"][0]["text"] in {stopped[0]["text"] + c for c in "ei"}
    allowed = post("/generate", **options, allowed_characters="aeiou ")["choices"]
    assert set(allowed[0]["text"]) == set("aeiou ") and len(allowed[0]["text"]) == 60
    assert post("/generate", **options, allowed_token_ids=encode("aeiou "))["choices"] == allowed
    V = len(VOCABULARY)
    for name in ("stop_token_ids", "allowed_token_ids"):
        error = rejection(client, "/generate", **options, **{name: [V]})
        assert (error["param"], error["message"]) == (name, f"{name}: ids must be in [0, {V - 1}], got {V}")
    assert rejection(client, "/generate", **options, allowed_token_ids=[])["param"] == "allowed_token_ids"
    error = rejection(client, "/generate", **options, allowed_token_ids=[1], allowed_characters="a")
    assert error["message"] == "allowed_token_ids: cannot be combined with allowed_characters"


def test_bad_words_never_appear_and_change_nothing_else(client, post):
    options = {"prompt": "ab", "max_tokens": 300, "n": 8, "seed": 3}
    words = ["e", "th", "ab", "\n\n", "漢"]
    texts = [it["text"] for it in post("/generate", **options, bad_words=words)["choices"]]
    assert all(len(text) == 300 for text in texts)
    assert not any(word in text for text in texts for word in words)
    assert post("/generate", **options, bad_words=["漢字"])["choices"] == post("/generate", **options)["choices"]
    some = post("/generate", **options, bad_words=["aa"], allowed_characters="ab ")["choices"]
    assert all(set(it["text"]) <= set("ab ") and "aa" not in it["text"] for it in some)
    blind = {"allowed_characters": "aet", "bad_words": ["aa", "ae", "at"]}  # nothing may follow an a
    long = post("/generate", prompt="a", n=20, min_tokens=4, max_tokens=6, **blind)["choices"]
    assert all(len(it["text"]) >= 4 for it in long)
    both = post("/generate", **options, bad_words=["a", "ee"], regex="[a-e]{8}([a-e]*)")["choices"]
    assert all(re.fullmatch("[b-e]{8,}", it["text"]) and "ee" not in it["text"] for it in both)
    error = rejection(client, "/generate", **options, bad_words=["a"], regex="[ab]*a")
    assert error["message"] == "regex: nothing can match that has none of bad_words"
    error = rejection(client, "/generate", **options, bad_words=[c * 100 for c in "abcdefghijkl"])
    assert (error["param"], error["code"]) == ("bad_words", "invalid_pattern")


def test_a_truncated_prompt_is_its_last_characters(client, post):
    options = {"max_tokens": 20, "seed": 1, "echo": True}
    short = post("/generate", prompt="there", **options)
    for prompt in ("Hello there", ["Hello there"]):
        cut = post("/generate", prompt=prompt, truncate_prompt_tokens=5, **options)
        assert (cut["choices"], cut["usage"]) == (short["choices"], short["usage"])
    assert post("/generate", prompt="there", truncate_prompt_tokens=50, **options)["choices"] == short["choices"]
    empty = post("/generate", prompt="", **options)["choices"]
    assert post("/generate", prompt="there", truncate_prompt_tokens=0, **options)["choices"] == empty
    for long in ("a" * 120_000 + "b", ids := [VOCABULARY.index(it) for it in "a" * 120_000 + "b"], [ids]):
        cut = post("/v1/completions", prompt=long, truncate_prompt_tokens=-1, max_tokens=0, echo=True)
        assert cut["usage"]["prompt_tokens"] == 100_000 and cut["choices"][0]["text"] == "a" * 99_999 + "b"
    assert rejection(client, "/generate", prompt="a", truncate_prompt_tokens=-2)["param"] == "truncate_prompt_tokens"
