"""Exact answers over HTTP: a model of records and one of texts with the same weights."""

import copy
import functools
import json
import re
import threading
from collections import Counter

import pytest
import torch

from service.http.limits.memory import RUNNING_BYTES, SENT_BYTES, SEQUENCE_BYTES, estimate
from service.model.params import SamplingParams
from service.model.tokenizer import CharTokenizer
from service.wire import Submit
from tests.helpers import lasting, random_model, serving, wait_until, web
from tests.http.programs import TIMELESS
from tests.text.test_exact import CHARACTERS, chances, p_value, record, regex
from tests.toolbox.http import pieces, sent
from tests.toolbox.http import post as http_post
from training.run.saving import save_checkpoint

BB = {"prompt": "", "regex": "[ab]*bb[ab]*", "max_tokens": 5, "exact": True}


@pytest.fixture(scope="module")
def model():
    return random_model(seed=5, vocab_size=len(CHARACTERS))


@pytest.fixture(scope="module")
def enumerated(model):
    """The model in float64, which computes the logits of a text once."""
    double = copy.deepcopy(model).double()
    logits = functools.cache(lambda ids: double(torch.tensor([ids])))
    return lambda idx: logits(tuple(idx[0].tolist()))


@pytest.fixture(scope="module")
def places(model, tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("exact"), CharTokenizer(CHARACTERS)
    for name, recipe in (("records", {"records": True}), ("texts", {})):
        save_checkpoint(folder / name, model, tokenizer, {"losses": {}, "recipe": recipe})
    return ",".join(f"{name}={folder / name}" for name in ("records", "texts"))


@pytest.fixture(scope="module")
def server(places):
    yield from lasting(places, dtype="float64")


def refused(server, model, **body):
    response = web.post(f"{server.url}/generate", json=body | {"model": model})
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize(
    ("kind", "fields", "outcome"),
    [
        ("records", {"regex": "[ab]*bb[ab]*"}, ("[ab]*bb[ab]*", True)),
        ("records", {"choice": ["a", "ab", "bb"]}, ("a|ab|bb", True)),
        ("records", {"min_tokens": 3}, ("[ab]{3,}", False)),
        ("records", {"allowed_characters": "b"}, ("b+", False)),
        ("records", {"regex": "[ab]+", "bad_words": ["ab", "aaa"]}, ("b*a{0,2}", True)),
        ("texts", {"regex": "(a|bb)*a?"}, None),
    ],
    ids=str,
)
def test_answers_are_drawn_from_the_conditional_distribution(ask, enumerated, kind, fields, outcome):
    """Of records that end within max_tokens characters; of one without a pattern, up to there."""
    if outcome is None:
        length, expected = 5, regex(fields["regex"])
    else:
        pattern, must_end = outcome
        length = 5 + must_end
        expected = record(
            lambda text, following: bool(text and re.fullmatch(pattern, text) and (following or not must_end))
        )
    body = {"prompt": "" if kind == "records" else "\n", "max_tokens": 5, "n": 100, "exact": True}
    choices = [it for i in range(4) for it in ask(kind, **body | fields, seed=i << 40)["choices"]]
    counts = Counter(it["text"] for it in choices)
    assert p_value(counts, chances(enumerated, "\n", length, expected)) > 0.01


def test_an_answer_says_what_it_cost_and_repeats(ask, server):
    answer = ask("records", n=10, seed=3, **BB)
    assert [it["index"] for it in answer["choices"]] == list(range(10))
    assert all(it["exact"] and re.fullmatch(BB["regex"], it["text"]) for it in answer["choices"])
    cost = answer["chargpt"]["exact"]
    assert cost["matches"] == 10 < cost["candidates"] < cost["characters"]
    assert cost["acceptance"] == pytest.approx(10 / cost["candidates"], abs=1e-6)
    assert answer["chargpt"]["seeds"] == [3]
    again = ask("records", "/v1/completions", n=10, seed=3, logprobs=0, **BB)
    for one, other in zip(answer["choices"], again["choices"], strict=True):
        assert (one["text"], one["seed"], one["exact"]) == (other["text"], other["seed"], other["exact"])
        assert len(other["logprobs"]["token_logprobs"]) == len(one["text"])
        alone = ask("records", seed=one["seed"], **BB)
        assert alone["choices"][0]["text"] == one["text"] and alone["chargpt"]["exact"]["candidates"] == 1
        free = ask("records", prompt="", max_tokens=6, seed=one["seed"])["choices"][0]
        assert (free["text"], free["finish_reason"]) == (one["text"], "stop")
    scored = ask("records", "/v1/score", texts=[it["text"] for it in again["choices"]])["data"]
    for it, score in zip(again["choices"], scored, strict=True):
        assert it["logprobs"]["token_logprobs"] == pytest.approx([-nats for nats in score["character_nats"][:-1]])


def test_streams_and_several_prompts_have_the_same_answers(server, ask):
    body = BB | {"prompt": ["", "a", "b"], "n": 5, "seed": [3, 4, 5]}
    whole = ask("records", **body)
    streamed = web.post(f"{server.url}/generate", json=body | {"model": "records", "stream": True})
    found = pieces(streamed)
    assert sorted((it["index"], it["text"], it["seed"]) for it in found if "index" in it) == [
        (it["index"], it["text"], it["seed"]) for it in whole["choices"]
    ]
    ends = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if '"usage"' in line]
    assert ends[-1]["chargpt"]["exact"] == whole["chargpt"]["exact"]
    for i, prompt in enumerate(body["prompt"]):
        alone = ask("records", **body | {"prompt": prompt, "seed": body["seed"][i]})["choices"]
        assert [it["text"] for it in alone] == [it["text"] for it in whole["choices"][5 * i : 5 * i + 5]]


def test_answers_under_load_are_the_same(server, ask):
    body = {"n": 20, "seed": 9, **BB}
    alone = ask("records", **body)["choices"]
    stop = threading.Event()

    def load():
        while not stop.is_set():
            ask("texts", prompt="ab", max_tokens=300, n=20)
            ask("records", prompt="ab", max_tokens=20, n=20)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert [ask("records", **body)["choices"] for _ in range(5)] == [alone] * 5
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_too_few_matches_are_an_error(server):
    body = BB | {"n": 6, "seed": 2, "max_candidates": 3}
    for stream in (False, True):
        error = refused(server, "records", stream=stream, **body)
        assert (error["param"], error["code"]) == ("exact", "too_few_matches")
        assert re.search(r"^[0-5] of 18 candidates matched \(\d+ characters\), 6 must: the nearest", error["message"])
    error = refused(server, "records", **BB | {"n": 6, "seed": 2, "max_candidate_characters": 5})
    assert "6 must" in error["message"]


def test_of_several_prompts_the_first_in_order_that_fails_gives_the_error(server):
    """Not the one that fails first: the last one, at its first candidate."""
    prompts = {"prompt": ["a", "b", "b" * 300 + "a", ""], "regex": "[ab]*aaaa[ab]*", "max_tokens": 5}
    body = BB | prompts | {"seed": [1, 2, 3, 4], "max_candidates": 4, "n": 3}
    for stream in (False, True):
        messages = {refused(server, "records", stream=stream, **body)["message"] for _ in range(10)}
        assert len(messages) == 1 and messages.pop().startswith("prompt 0: ")


def test_a_beginning_that_all_matches_share_is_set(ask):
    """Also where the answer ends with it: "abbab" is a match, and what may follow is too long."""
    body = {"prompt": "ab", "regex": "abbab(a)?", "exact": True, "n": 3, "seed": 1}
    for max_tokens in (5, 6):
        answer = ask("texts", max_tokens=max_tokens, **body)
        assert {it["text"][:5] for it in answer["choices"]} == {"abbab"}
        assert answer["chargpt"]["exact"]["candidates"] == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": None}, "exact: needs a condition: one of regex, choice, allowed_characters"),
        ({"echo": True}, "exact: cannot be combined with echo"),
        ({"best_of": 2}, "exact: cannot be combined with best_of"),
        ({"regex": None, "suffix": "a"}, "exact: cannot be combined with suffix"),
        ({"max_tokens": 0}, "exact: needs max_tokens of at least 1, got 0"),
        ({"max_candidates": 10**6}, "max_candidates: at most 10000, got 1000000"),
        ({"max_candidate_characters": 10**8}, "max_candidate_characters: at most 1000000, got 100000000"),
        ({"exact": None, "max_candidates": 5}, "max_candidates: needs exact"),
        ({"regex": "[ab]{6}"}, "regex: the shortest match has 6 characters, max_tokens is 5"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(server, fields, message):
    assert refused(server, "records", **BB | fields)["message"].startswith(message)


def test_a_deadline_ends_it_and_says_how_far_it_came(server):
    body = BB | {"regex": "[ab]*(ab){150}[ab]*", "max_tokens": 400, "timeout_seconds": 0.5, "model": "records"}
    response = web.post(f"{server.url}/generate", json=body)
    assert response.status_code == 504
    assert re.search(r"its timeout_seconds: 0 of \d+ candidates matched$", response.json()["error"]["message"])


def test_a_stop_must_keep_to_the_condition(ask):
    """Its characters belong to a candidate until it is cut."""
    body = {"prompt": "", "stop": "\n", "max_tokens": 5, "n": 20, "exact": True, "seed": 1}
    for allowed, reasons in (("ab", {"length"}), ("ab\n", {"length", "stop"})):
        choices = ask("texts", allowed_characters=allowed, **body)["choices"]
        assert {it["finish_reason"] for it in choices} == reasons


def test_candidates_count_in_metrics_and_in_a_clients_limits(places, tmp_path):
    limits = tmp_path / "limits.toml"
    limits.write_text("[default]\ncharacters_per_minute = 5000\n")
    with serving(places.split(",")[0], TIMELESS, client_limits=limits) as server:
        body = BB | {"model": "records", "seed": 1}
        first = web.post(f"{server.url}/generate", json=body | {"n": 20})
        spent = first.json()["chargpt"]["exact"]["characters"]
        assert 20 < spent < 3000
        # All that was not spent is given back: what is left is less than the spent characters below the limit.
        for fields in ({}, {"max_candidate_characters": 5000 - spent // 2}):  # {}: all characters of a minute
            refusal = web.post(f"{server.url}/generate", json=body | fields)
            assert refusal.status_code == 429 and "characters_per_minute" in refusal.text
        answered = web.post(f"{server.url}/generate", json=body | {"max_candidate_characters": 1000})
        assert answered.status_code == 200
        tried = [it.json()["chargpt"]["exact"] for it in (first, answered)]
        for name, key in (("candidates", "candidates"), ("matches", "matches"), ("candidate_tokens", "characters")):
            # Of candidates beyond the last answer some may have ended too.
            total, reported = f"chargpt_exact_{name}_total", sum(it[key] for it in tried)
            wait_until(lambda total=total, reported=reported: server.metric(total) >= reported)
            assert server.metric(total) <= 2 * reported


LIMIT = 1_000_000  # of the characters of an exact answer's candidates


def test_a_client_that_leaves_pays_for_the_candidates_that_ran(places, tmp_path):
    """No more and no less; its draw ends."""
    limits = tmp_path / "limits.toml"
    limits.write_text(f"[default]\ncharacters_per_minute = {LIMIT}\n")
    with serving(places.split(",")[0], TIMELESS, client_limits=limits) as server:

        def shown():
            return server.metric("chargpt_exact_candidate_tokens_total")

        def total():
            """Of all draws that have ended: the worker shows its counts before it takes the next request."""
            assert web.post(f"{server.url}/generate", json={"max_tokens": 1}).status_code == 200
            return shown()

        endless = {"prompt": "", "regex": "[ab]*(ab){150}[ab]*", "max_tokens": 400, "exact": True}
        with sent(server.port, http_post("/generate", endless)):
            wait_until(lambda: shown() > 15_000)
        server.wait_until_all_ended()
        spent = total()
        assert total() == spent
        refusal = web.post(f"{server.url}/generate", json=BB | {"max_candidate_characters": LIMIT - int(spent) // 2})
        assert refusal.status_code == 429 and "characters_per_minute" in refusal.text
        rest = web.post(f"{server.url}/generate", json=BB | {"max_candidate_characters": LIMIT - 2 * int(spent)})
        assert rest.status_code == 200


def test_memory_is_estimated_for_all_answers():
    one = Submit(1, [1], 100, SamplingParams())
    exact = estimate([one], 64, 50, answers=50, window=1)
    assert exact.max_tokens == estimate([one] * 50, 64, 50).max_tokens
    assert exact.prompt == estimate([one], 64, 50).prompt + 50 * SEQUENCE_BYTES
    beside = SEQUENCE_BYTES + RUNNING_BYTES + SENT_BYTES  # of each candidate
    assert estimate([one], 64, 50, answers=50, window=11).prompt == exact.prompt + 10 * beside
