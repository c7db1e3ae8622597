"""Other requests are answered while one with a large body or answer is, whether it is valid or not."""

import concurrent.futures
import json
import threading
import time

import httpx
import pytest

from tests.helpers import VOCABULARY, web
from tests.toolbox.http import pieces

LONGEST_SECONDS = 0.5  # each took 0.9 s or much longer before; other work on the machine adds to it
TEXT = "Hello, world! " * 20_000


def content_of(*path_and_bodies):
    return [(path, body if isinstance(body, bytes) else json.dumps(body).encode()) for path, body in path_and_bodies]


def send(server, requests):
    """The statuses and sizes of the answers to requests sent at the same time, and the longest wait of another."""
    longest, is_done = 0.0, threading.Event()

    def probe():
        nonlocal longest
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not is_done.is_set():
                started_at = time.monotonic()
                client.get("/livez")
                longest = max(longest, time.monotonic() - started_at)
                time.sleep(0.005)

    def ask(request):
        path, content = request
        with web.stream("POST", server.url + path, content=content, timeout=60) as response:
            return response.status_code, sum(map(len, response.iter_raw()))

    prober = threading.Thread(target=probe)
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        prober.start()
        try:
            answers = list(pool.map(ask, requests))
        finally:
            is_done.set()
            prober.join()
    return answers, longest


ECHO = {"prompt": TEXT[:20_000], "echo": True, "logprobs": len(VOCABULARY), "max_tokens": 1}
MILLION_IDS = b"[" + b"-1," * 999_999 + b"-1]"
CASES = {
    "a stream of 19 MB": (200, 18e6, content_of(("/v1/completions", ECHO | {"stream": True}))),
    "the nats of a long text": (200, 2e6, content_of(("/v1/score", {"texts": TEXT}))),
    "invalid ids of 20 prompts": (400, 0, [("/generate", b'{"prompt": [' + b",".join([MILLION_IDS] * 20) + b"]}")]),
    "many invalid bodies": (400, 0, content_of(*[("/generate", {"prompt": [[-1] * 100_000]})] * 20)),
    "unknown fields": (400, 0, [("/generate", b'{"max_tokens": 1' + b',"%d":1' * 600_000 % (*range(600_000),) + b"}")]),
    "a long number": (400, 0, content_of(("/generate", b'{"n": ' + b"1" * 4_000_000 + b"}"))),
    "many biases": (400, 0, [("/generate", b'{"logit_bias": [' + b"[0,0]," * 600_000 + b"[0,0]]}")]),
    "many options": (400, 0, [("/generate", b'{"stream_options": {' + b'"a":0,' * 600_000 + b'"b":0}}')]),
    "many prompts": (400, 0, [("/generate", b'{"prompt": [' + b"[]," * 1_000_000 + b"[]]}")]),
    "deep": (400, 0, [("/generate", b'{"prompt": ' + b"[" * 2_000_000 + b"]" * 2_000_000 + b"}")]),
    "many seeds": (400, 0, [("/generate", b'{"seed": [' + b"1," * 2_000_000 + b"1]}")]),
    "many texts": (400, 0, [("/v1/score", b'{"texts": [' + b'"abcdefgh",' * 300_000 + b'"a"]}')]),
    "many ids": (200, 2e6, content_of(("/detokenize", {"tokens": [5] * 2_000_000}))),
}


@pytest.mark.parametrize("name", CASES)
def test_other_requests_are_answered_meanwhile(server, name):
    status, size, requests = CASES[name]
    for _ in range(3):  # the machine may be busy with something else
        answers, longest = send(server, requests)
        assert all(got == status and length >= size for got, length in answers), answers
        if longest < LONGEST_SECONDS:
            return
    raise AssertionError(f"/livez took {longest:.2f} s")


def test_a_large_answer_is_the_same_whole_and_streamed(server):
    """Both are encoded in parts, and go out in many writes."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        (whole,) = client.post("/v1/completions", json=ECHO | {"seed": 1}).json()["choices"]
        with client.stream("POST", "/v1/completions", json=ECHO | {"seed": 1, "stream": True}) as response:
            parts = [part["choices"][0] for part in pieces(response)]
    assert len(parts) > 20 and "".join(part["text"] for part in parts) == whole["text"]
    assert len(whole["text"]) == 20_001
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [value for part in parts for value in part["logprobs"][name]] == whole["logprobs"][name]
