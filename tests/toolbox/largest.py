"""The largest requests of each route: tests/http/test_counted.py counts what they take, tests/chaos measures it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from service.http.schema.reading import MAX_VALUES

DROP = {"unknown_characters": "drop"}


def largest(length: int) -> dict[str, tuple[str, bytes]]:
    """By name: the path, and a body of up to `length` bytes. The bodies also fit a vocabulary without these letters."""
    wide = "a" * (length - 100) + "\U0001f600"  # of which Python keeps each character in 4 bytes
    ids = b"[" + b"-1," * (length // 60) + b"-1]"
    values = min(length // 2 - 20, MAX_VALUES - 20)  # as many as a body may have
    fives = min(length // 26, values // 2)
    many_wide = min(length // 4 - fives, values - fives)
    long, many, count = min(length // 25, 10_000), min(length // 100, 5000), length // 4200
    given: dict[str, tuple[str, Mapping[str, Any] | bytes]] = {
        "a text to refuse": ("/tokenize", {"prompt": wide}),
        "a text": ("/tokenize", {"prompt": wide} | DROP),
        "unknown characters": ("/tokenize", {"prompt": "\U0001f600" * (length // 12 - 10)} | DROP),
        "escapes": ("/tokenize", b'{"prompt": "%b"}' % (rb"\u0061" * (length // 6 - 10))),
        "ids": ("/detokenize", b'{"tokens": [%b5]}' % (b"5," * values)),
        "unknown ids": ("/detokenize", b'{"tokens": [%b300]}' % (b"5," * fives + b"300," * many_wide)),
        "texts to continue": ("/generate", {"prompt": [wide[-4000:]] * count, "max_tokens": 1} | DROP),
        "lists of ids": (
            "/v1/completions",
            b'{"max_tokens": 1, "prompt": [%b]}' % b",".join([b"[" + b"5," * 10_000 + b"5]"] * (values // 10_100)),
        ),
        "many sequences": ("/v1/completions", {"prompt": "a" * long, "n": count, "max_tokens": 20, "echo": True}),
        "streamed sequences": (
            "/v1/completions",
            {"prompt": "a" * long, "n": count, "max_tokens": 1, "echo": True, "stream": True},
        ),
        "log-probabilities": (
            "/v1/completions", {"prompt": "a" * 3 * long, "max_tokens": 1, "echo": True, "logprobs": 2},
        ),
        "streamed log-probabilities": (
            "/v1/completions",
            {"prompt": "a" * (long // 3), "max_tokens": 1, "echo": True, "logprobs": 60, "stream": True},
        ),
        "a suffix": ("/generate", {"prompt": "a", "suffix": wide, "max_tokens": 1} | DROP),
        "a text to score": ("/v1/score", {"texts": "a" * 9 * long, "characters": False}),
        "each character's score": ("/v1/score", {"texts": "a" * 9 * long}),
        "a text too long to score": ("/v1/score", {"texts": wide} | DROP),
        "continuations of a long prefix": ("/v1/score", {"prefix": "a" * 1000, "continuations": ["b"] * (many // 13)}),
        "distributions": ("/v1/next", {"prompt": [wide[-4000:]] * count} | DROP),
        "weights": ("/v1/attention", {"text": wide[:8], "scores": True, "values": True}),
        "biases": (
            "/generate",
            b'{"prompt": "a", "logit_bias": [%b[0, 0]]}' % (b"[0,0]," * min(length // 6 - 20, values // 3)),
        ),
        "too many texts": ("/v1/score", b'{"texts": [%b"\\\\"]}' % (b'"ab",' * (length // 5 - 10))),
        # Of many small objects, whose memory Python keeps in part.
        "short texts to score": ("/v1/score", {"texts": ["ab"] * (many * 3 // 5), "characters": False}),
        "texts without a score": ("/v1/score", {"texts": ["a"] * many}),
        # Each of these once stopped the event loop for 0.9 s or much longer.
        "invalid ids of 20 prompts": ("/generate", b'{"prompt": [%b]}' % b",".join([ids] * 19)),
        "too many values": ("/detokenize", b'{"tokens": [%b5]}' % (b"5," * (length // 2 - 20))),
        "unknown fields": (
            "/generate",
            b'{"max_tokens": 1%b}' % b"".join(b',"%d":1' % i for i in range(min(length // 11, values // 3))),
        ),
        "a long number": ("/generate", b'{"n": %b}' % (b"1" * (length - 20))),
        "options": ("/generate", b'{"stream_options": {%b"b":0}}' % (b'"a":0,' * min(length // 6 - 10, values // 2))),
        "prompts": ("/generate", b'{"prompt": [%b[]]}' % (b"[]," * min(length // 3 - 10, values // 2))),
        "deep": ("/generate", b'{"prompt": %b%b}' % (b"[" * (length // 2 - 10), b"]" * (length // 2 - 10))),
        "seeds": ("/generate", b'{"seed": [%b1]}' % (b"1," * values)),
    }  # fmt: skip
    bodies = {name: body if isinstance(body, bytes) else json.dumps(body).encode() for name, (_, body) in given.items()}
    assert all(len(body) <= length for body in bodies.values()), {name: len(body) for name, body in bodies.items()}
    return {name: (path, bodies[name]) for name, (path, _) in given.items()}
