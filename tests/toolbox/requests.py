"""Random requests of all kinds, valid and invalid, for replay.py. Answers to them depend on nothing but the weights."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Request = dict[str, Any]  # server, method, path, headers, and the body as text; bytes beyond UTF-8 are surrogates

KEY, ORIGIN = "replay-key", "https://page.example"
SERVERS = {"texts": 5, "records": 3, "blocks": 2}  # weights; "blocks" needs the key
MODEL = "model timeout_seconds priority unknown_characters replacement_character strict".split()
# Fields that belong together; the first is always given.
THEMES = [
    "temperature top_k top_p min_p typical_p repetition_penalty presence_penalty frequency_penalty logit_bias n",
    "stop stop_token_ids stop_regex include_stop_str_in_output min_tokens ignore_eos n",
    "stop_regex min_tokens include_stop_str_in_output logprobs",
    "regex min_tokens bad_words n temperature ignore_eos echo include_stop_str_in_output",
    "choice allowed_characters bad_words n logprobs ignore_eos",
    "allowed_characters bad_words min_tokens n stop logprobs",
    "bad_words allowed_token_ids min_tokens n stop_regex",
    "exact regex n max_candidates max_candidate_characters seed prompt",
    "exact allowed_characters bad_words min_tokens n stop logprobs max_candidates",
    "exact choice bad_words n temperature max_candidates",
    "suffix best_of n regex min_tokens prompt seed echo",
    "suffix best_of n choice temperature bad_words",
    "logprobs echo max_tokens n prompt",
    "best_of n temperature logprobs echo prompt seed",
    "prompt truncate_prompt_tokens unknown_characters replacement_character echo n seed",
]
GENERATION = sorted({"stream", "stream_options", "stream_interval", *MODEL}.union(*map(str.split, THEMES)))
ROUTES = {
    "/generate": GENERATION,
    "/v1/completions": GENERATION,
    "/v1/score": ["texts", "prefix", "continuations", "characters", *MODEL],
    "/v1/next": ["prompt", *MODEL],
    "/v1/attention": ["text", "layer", "head", "scores", "values", *MODEL],
    "/tokenize": ["prompt", *MODEL],
    "/detokenize": ["tokens", *MODEL],
}  # fmt: skip
WRONG = [None, True, -1, 1.5, 10**30, "x", "", [], {}, [[]], ["a", 1], {"a": 1}]  # for most fields
FLAG = ([True, False], ["true", 1])
TEXTS = ["ROMEO:", "", "\n", "Al", "To be", "naïve", "Zoë \ufffd", "a\x1eb", "A\nB\n\nC", "To be, or not to be " * 20]
# By field: valid values, invalid ones. Some are only for models that have the characters.
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "model": (["texts", "records", "rare", "blocks"], ["nope", "a/b", "x" * 1001]),
    "timeout_seconds": ([60, 100.5, 86_400], [0, 86_401]),
    "priority": ([0, -1000, 1000, 7], [-1001, 1001]),
    "unknown_characters": (["refuse", "replace", "drop"], ["Replace", "ignore"]),
    "replacement_character": ([" ", "a", "\n"], ["é", "ab"]),
    "strict": FLAG,
    "prompt": (
        [*TEXTS, ["Al", "Bo"], ["", "To be"], [1, 2, 3], [[1, 2], [3]], ["a", "naïve"], ["e"] * 5],
        [[-1], [999], [[1], "a"], ["a"] * 200],
    ),
    "truncate_prompt_tokens": ([-1, 0, 1, 3, 500], [-2, 2**31]),
    "suffix": (["e", " the", "\n\nJULIET:", "na", "ïs"], ["ïé"]),
    "max_tokens": ([0, 1, 3, 40, 90, 180], [20_000, 10**12, "5"]),
    "min_tokens": ([0, 1, 3, 5, 20], [1000]),
    "ignore_eos": FLAG,
    "n": ([1, 2, 3, 5], [0, 200, 10_001]),
    "best_of": ([1, 2, 4, 6], [0, 200]),
    "seed": ([0, 1, 7, 2**53, 2**63 - 1, [3], [3, 4], [5, 5, 5]], [2**64, [1, "a"], [-1]]),
    "temperature": ([0, 0.3, 0.7, 1, 1.5], [-0.1, 1000]),
    "top_k": ([-1, 0, 1, 3, 40], [-2, 2**40]),
    "top_p": ([0.1, 0.5, 0.9, 1], [0, 1.1]),
    "min_p": ([0, 0.05, 0.5, 1], [1.1]),
    "typical_p": ([0.1, 0.5, 0.9, 1], [0, 1.1]),
    "repetition_penalty": ([0.5, 1, 1.2, 2], [0, 1e9]),
    "presence_penalty": ([-2, 0, 0.5, 2], [1e9]),
    "frequency_penalty": ([-2, 0, 0.5, 2], [1e9]),
    "logit_bias": (
        [{}, {"e": -100}, {"5": 3}, [["e", 2.5], [5, -1]], {"a": 100, "\n": -100}],
        [{"é": 1}, {"e": 101}, {"ab": 1}, {"999": 1}, [["a"]]],
    ),
    "stop": (["\n", "e", ["a", "th"], ["\n\n", ":"], "é", []], [["a", ""], ["a"] * 17, "x" * 1001]),
    "stop_token_ids": ([[0], [1, 5, 9], []], [[-1], [999], [1] * 17]),
    "stop_regex": (["[.!?]", "\n[A-Z]+", "[aeiou]{2}", "é|a"], ["a*", "(", "^a", "a{2000}", r"(?=a)"]),
    "include_stop_str_in_output": FLAG,
    "regex": (
        ["[A-Z][a-z]+", "[a-z ]{3,12}", "[a-z]*", "(ab|cd)+e?", r"\w{4}\n", ".{5}", "[^e]{8}", "Al(an|ice)?", "a|é"],
        ["(", "a{5,2}", "^a$", "é", r"a\b", "[z-a]", "a{999}b{999}"],
    ),
    "choice": ([["Ay", "No", "Perhaps"], ["a"], ["ab", "abc", "b"], ["yes\n", "no"]], [["é"], [""], ["a"] * 1001]),
    "allowed_characters": (["abcde ", "ACGT", "eta\n", "a\x1e"], ["é"]),
    "allowed_token_ids": ([[1, 2, 3], [0, 10, 20, 30, 40]], [[999], [-1]]),
    "bad_words": ([["th", "e"], ["a\n"], ["qq", "é"], ["\n"], ["a\x1e"], []], [[""], ["a"] * 257, ["x" * 101]]),
    "exact": FLAG,
    "max_candidates": ([20, 100, 300], [0, 20_000]),
    "max_candidate_characters": ([100, 2000], [0, 10**8]),
    "logprobs": ([0, 1, 3, 10], [500]),
    "echo": FLAG,
    "stream": FLAG,
    "stream_options": (
        [{}, *({"include_usage": True} | more for more in ({}, {"continuous_usage_stats": True}))],
        [{"include_usage": 1}, {"include_use": True}, {"continuous_usage_stats": True, "foo": 1}],
    ),
    "stream_interval": ([0, 0.01, 0.1], [61]),
    "texts": ([*TEXTS, TEXTS, ["a"], ["To be", "or not"], []], [["a", 5]]),
    "prefix": (TEXTS, [["a"]]),
    "continuations": ([[" be", " bee", " qqq"], TEXTS, [""], []], ["a"]),
    "characters": FLAG,
    "text": (["To be", "a", "", "Al", "naïve", "abcdefgh", "To be or not to be"], ["a" * 300]),
    "layer": ([0, 1], [6, 2**31]),
    "head": ([0, 3], [4, 2**31]),
    "scores": FLAG,
    "values": FLAG,
    "tokens": ([[1, 2, 3], [], [0], [5] * 50], [[999], [-1], [1.5], "abc"]),
}  # fmt: skip
NEEDS: dict[str, dict[str, Any]] = {  # a field without these is an error
    "stream_options": {"stream": True},
    **dict.fromkeys(
        ("exact", "max_candidates", "max_candidate_characters"),
        {"exact": True, "allowed_characters": "abcdefghilmnoprstu :\n"},
    ),
}
UNKNOWN = [
    "user", "metadata", "foo", "max_token", "temperatur", "max_new_tokens", "max_completion_tokens", "response_format",
    "guided_regex", "num_beams", "messages", "do_sample", "tools", "Temperature", "stop-regex", "a b", "é", "inputs",
    "structured_outputs", "skip_special_tokens", "sampling_params", "no_repeat_ngram_size", "length_penalty", "x" * 65,
]  # fmt: skip
PATHS = [
    "/generate", "/", "/docs", "/openapi.json", "/info", "/info?model=rare", "/info?model=nope", "/v1/models",
    "/v1/models/texts", "/v1/models/blocks", "/v1/models/a/b", "/v1/models/", "/tokenizer_info", "/livez", "/readyz",
    "/tokenizer_info?model=records", "/health", "/metrics", "/page/page.js", "/page/page.css", "/page/none", "/nope",
    "/docs/", "/Info", "//info", "/info/", "/v1/completions", "/v1/score", "/v1", "/generate/x", "/tokenize", "/%69nfo",
]  # fmt: skip
HEADERS: list[dict[str, str | None]] = [
    {"Content-Type": None}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"},
    {"Content-Type": "application/json; charset=utf-8"}, {"Content-Type": "application/json;charset=latin-1"},
    {"Content-Type": "multipart/form-data; boundary=x"}, {"Content-Type": "APPLICATION/JSON"}, {"Content-Type": ""},
    {"Content-Encoding": "gzip"}, {"Content-Encoding": "identity"}, {"X-Request-Id": None}, {"X-Request-Id": "a b"},
    {"X-Request-Id": "x" * 129}, {"Authorization": None}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY},
    {"Authorization": f"bearer {KEY}"}, {"Authorization": f"Basic {KEY}"}, {"Origin": ORIGIN}, {"Accept": "text/html"},
    {"Origin": "https://other.example"}, {"Origin": "null", "Content-Type": None},
    {"Origin": ORIGIN, "Content-Type": "application/x-www-form-urlencoded"}, {"Accept": "text/event-stream"},
    {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a,content-type"},
    {"Origin": "https://other.example", "Access-Control-Request-Method": "GET"},
    {"Origin": ORIGIN, "Access-Control-Request-Method": "PUT"}, {"If-None-Match": "*"}, {"If-None-Match": '"x"'},
    {"Accept": "application/openmetrics-text"},
]  # fmt: skip
STRINGS = ['"\\ud800"', '"\udcff"', '"\t"', '"\\x"', '"\\u12"', '"\0"', '"']
# Of a body that is JSON, with characters beyond ASCII or without.
MALFORMED: list[Callable[[str, random.Random], str]] = [
    lambda body, r: body[: r.randrange(len(body))],
    lambda body, r: body[:-1] + ",}",
    lambda body, r: body + r.choice(["}", "x", " ", "\n", "\0", "{}"]),
    lambda body, r: body.replace('"', "'"),
    lambda body, r: body[:-1] + ', "seed": 3, "seed": 4}',
    lambda body, r: f'{body[:-1]}, "temperature": {r.choice(["NaN", "-Infinity", "1e999", "01", "+1", "1.", "0x1"])}}}',
    lambda body, r: f'{body[:-1]}, "user": {r.choice([*STRINGS, "[" * 3000, "tru", "1" * 5000])}}}',
    lambda body, r: r.choice(["\ufeff", "  ", "//\n", "/**/", "\udcff", "\0", ")]}'\n"]) + body,
    lambda body, r: r.choice(["null", "[]", "1", '"a"', "[{}]", "prompt=a", "{}}", "{", '{"a"}', '{"a":}', "{1: 2}"]),
    lambda body, r: f"[{body}]",
    lambda body, r: json.dumps(body),
    lambda body, r: body[:-1] + "".join(f', "x{i}": {i}' for i in range(r.choice([5, 16, 17]))) + "}",
]  # fmt: skip


def body_of(path: str, fields: dict[str, Any], r: random.Random) -> dict[str, Any]:
    """A body that has the given fields, what the route requires, and what makes its answer certain and short."""
    text = r.choice(["ROMEO:", "Al", "To be", "", "Ju"])
    match path:
        case "/generate" | "/v1/completions":
            body = {"prompt": text, "max_tokens": r.choice([1, 5, 12, 30, 60]), "seed": r.randrange(100)} | fields
            if body["seed"] is None:  # would be random
                body["seed"] = 1
            if body.get("exact") is True:
                body.setdefault("max_candidates", r.choice([20, 200]))
                if isinstance(body["prompt"], list) and body.get("stream"):
                    body["prompt"] = text  # which prompts are answered before one fails depends on time
            return body
        case "/v1/score":
            return ({} if fields.keys() & {"texts", "continuations"} else {"texts": ["To be", "or not", text]}) | fields
        case "/v1/attention":
            return {"text": text[:5] or "a"} | fields
        case "/detokenize":
            return {"tokens": [1, 2, 3]} | fields
    return {"prompt": text} | fields


def single_fields(r: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Each value of each field of each route, with what it needs, in random order."""
    cases = [
        (path, NEEDS.get(name, {}) | {name: value})
        for path, names in ROUTES.items()
        for name in names
        for value in (*VALUES[name][0], *VALUES[name][1], *r.sample(WRONG, 3))
    ]
    return r.sample(cases, len(cases))


def combined_fields(path: str, r: random.Random) -> dict[str, Any]:
    """Fields that belong together and some others, mostly with valid values."""
    needed, all_fields = dict[str, Any](), [name for name in ROUTES[path] if name != "model"]
    if "max_tokens" in all_fields:
        theme, *others = r.choice(THEMES).split()
        chosen = [theme, *(name for name in others if r.random() < 0.5)]
        chosen += r.sample(r.choice(THEMES).split(), 1) * (r.random() < 0.5)
        if theme == "exact":
            needed |= {"exact": True}
            chosen.append(others[0])  # a condition
        if r.random() < 0.3:
            needed |= {"stream": True}
            chosen += r.sample(["stream_options", "stream_interval"], r.randrange(3))
    else:
        chosen = r.sample(all_fields, r.randint(1, min(4, len(all_fields))))
    chosen += r.sample(all_fields, 1) * (r.random() < 0.3)
    fields = {name: r.choice(VALUES[name][1 if VALUES[name][1] and r.random() < 0.03 else 0]) for name in chosen}
    fields |= needed
    if r.random() < 0.05:
        name = r.choice([*UNKNOWN, r.choice(all_fields)[:-1]])
        fields |= {name: r.choice([1, "x", None, True, [], {"a": 1}])}
    return fields


def make_requests(count: int, seed: int) -> list[Request]:
    """Random requests, always the same for a seed."""
    r, singles, requests = random.Random(seed), list[tuple[str, dict[str, Any]]](), []
    for i in range(count):
        server = r.choices([*SERVERS], [*SERVERS.values()])[0]
        kind = r.choices(["field", "fields", "path", "malformed", "header"], (35, 40, 12, 8, 5))[0]
        method, headers = "POST", {"Content-Type": "application/json", "X-Request-Id": f"replay-{i}"}
        if server == "blocks":
            headers["Authorization"] = f"Bearer {KEY}"
        if kind == "field":
            singles = singles or single_fields(r)
            path, fields = singles.pop()
        else:
            path = r.choices([*ROUTES], (6, 6, 2, 2, 2, 1, 1))[0]
            fields = combined_fields(path, r)
        if server == "records" and r.random() < 0.3:
            fields = {"model": "rare"} | fields
        body = json.dumps(body_of(path, fields, r), ensure_ascii=r.random() < 0.5)
        if kind == "malformed":
            body = r.choice(MALFORMED)(body, r)
        if kind == "path":
            method, path = r.choices(["GET", "HEAD", "OPTIONS", "PUT", "DELETE"], (20, 3, 3, 1, 1))[0], r.choice(PATHS)
            body = r.choice(["", "", "", "{}"])
        if kind == "header" or (kind == "path" and r.random() < 0.3):
            headers |= r.choice(HEADERS)
        headers = {name: value for name, value in headers.items() if value is not None}
        requests.append({"server": server, "method": method, "path": path, "headers": headers, "body": body})
    return requests
