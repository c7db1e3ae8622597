"""What requests may hold: the estimate, and the limits on a real server."""

import concurrent.futures
import json
import sys
import tracemalloc
from typing import Any

import httpx
import msgspec
import pytest

from service.http.connection.errors import ApiError
from service.http.limits.clients import ClientLimits
from service.http.limits.memory import Estimate, Lease, Ledger, estimate, size_of
from service.model.params import SamplingParams
from service.settings import Settings
from service.shared import SharedState
from service.wire import Submit
from tests.helpers import VOCABULARY, serving, web
from tests.toolbox.http import post, sent

V = len(VOCABULARY)
MiB = 1 << 20


def submit(prompt, max_tokens, sampling=None, **options):
    return Submit(0, prompt, max_tokens, sampling or SamplingParams(), **options)


def test_estimate_sums_prompts_completions_and_log_probabilities():
    prompt, each = [0] * 1000, 2000 + 4000
    assert estimate([submit(prompt, 50)] * 3, 100, 65) == (3 * each + 8 * 1000 + 24 * 300, 28 * 150, 0)
    assert estimate([submit(prompt, 50)] * 3, 100, 65, echo=True).prompt == 3 * each + 8 * 1000 + 24 * 300 + 4 * 3000
    for options, count in ({"logprobs": 9}, 10), ({"logprobs": 99}, 66), ({"logprobs": 0, "logprob_ids": (4,)}, 2):
        assert estimate([submit(prompt, 50, **options)], 100, 65).logprobs == 12 * count * 50
    scored = submit(prompt, 0, logprobs=0, score_from=1)
    assert estimate([scored], 100, 65) == (each + 32 * 1000, 0, 12 * 999)
    assert estimate([scored] * 3, 100, 65, window=2).prompt == 3 * 2000 + 2 * 4000 + 8 * 1000 + 24 * 2000
    late = submit(prompt, 0, logprobs=0, score_from=900)
    assert estimate([late], 100, 65) == (each + 8 * 1000 + 24 * 200, 0, 12 * 100)
    assert estimate([submit(prompt, 50)], 100, 258) == (each + 8 * 1000 + 56 * 100, 60 * 50, 0)
    assert estimate([], 100, 65) == (0, 0, 0) and estimate([], 100, 65, beside=9) == (9, 0, 0)
    biased = SamplingParams(logit_bias=((1, 2.0), (2, 3.0)))
    much = submit([0], 0, biased, stop=((1, 2), (3,)), constraint=b"12345", stop_pattern=b"6")
    for number in (1, 3):
        assert estimate([much] * number, 100, 65) == (8 + (each + 24) * number + 24 * 3 + 2 * 300 + 2 * 6, 0, 0)
    assert (sum(Estimate(1, 3, 2)), Estimate(1, 3, 2).largest) == (6, "max_tokens")


def test_sizes_of_fields_are_those_that_python_gives():
    """Of several ids of one value above 256, Python makes as many objects."""
    fields = ["a" * 1000, "a" * 999 + "\U0001f600", ["ab", "\xe9" * 9] * 500, [1000] * 1000, [[1000] * 500] * 2]
    fields += [{f"{i} \u6f22": i + 0.5 for i in range(1000)}, [("\xe9\xe9", 1.5)] * 9000]
    for value in fields:
        content, kind = msgspec.json.encode(value), list[tuple[str, float]] if value is fields[-1] else Any
        tracemalloc.start()
        value = msgspec.json.decode(content, type=kind)
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert 0 <= size_of([value], len(content), 9000) - grown < 64 + 0.4 * grown, value
    assert size_of([[""] * 9001], 3000, 9000) == sys.getsizeof([""] * 9001), "it is refused"


def ledger_of(**settings):
    found = Settings(**settings)
    return Ledger(found, ClientLimits(found), SharedState())


def test_held_bytes_are_bounded_in_all_and_per_client():
    ledger = ledger_of(max_held_bytes=32 * MiB, http_processes=2)
    assert (ledger.max_bytes, ledger.max_client_bytes) == (16 * MiB, 8 * MiB)
    first, second, third, fourth = (Lease(ledger, client) for client in "aabc")
    first.hold(5 * MiB)
    second.hold(3 * MiB)
    with pytest.raises(ApiError, match="this client") as refused:
        second.hold(3 * MiB + 1)
    assert (refused.value.status, refused.value.code, refused.value.headers["Retry-After"]) == (429, "overloaded", "1")
    assert second.bytes == 3 * MiB
    third.hold(8 * MiB)
    with pytest.raises(ApiError, match="all clients"):
        fourth.hold(1)
    second.hold(0)
    fourth.hold(3 * MiB)
    assert ledger.held == 16 * MiB
    for lease in (first, second, third, fourth):
        lease.hold(0)
    assert ledger.held == 0 and not ledger.by_client
    ledger = ledger_of(http_processes=64)  # the largest request fits, however little each process has
    assert ledger.max_client_bytes == ledger.max_bytes == Settings().max_request_bytes


@pytest.fixture(scope="module")
def server(slow):
    """max_tokens · 28 bytes: a request may have 74,898 characters, one client twice as many."""
    limits = {"max_held_bytes": 8 * MiB, "max_body_bytes": 2 * MiB}
    with serving(slow.path, **limits, max_queued_requests=0, max_running_requests=8) as server:
        yield server
        server.wait_until_metric("chargpt_held_bytes", 0)
        assert "Traceback" not in server.output()


def test_a_request_that_may_need_too_much_memory_is_refused_for_good(server):
    for path, body, param in (
        ("/generate", {"prompt": "a", "max_tokens": 74_899}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 400, "n": 8, "logprobs": V}, "logprobs"),
        ("/v1/completions", {"prompt": "a" * 90_000, "max_tokens": 0, "echo": True, "logprobs": 0}, "prompt"),
        ("/generate", {"prompt": "a", "suffix": "b", "max_tokens": 20_000, "best_of": 8}, "prompt"),
        ("/v1/score", {"texts": ["a" * 100_000]}, "prompt"),
    ):
        response = web.post(server.url + path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, None), (path, error)
        assert error["message"].startswith(f"{param}: ")
        for part in (f", {2 * MiB} are allowed", "lower n, logprobs or max_tokens, or shorten the prompt", "may need "):
            assert part in error["message"]


def test_requests_beyond_the_memory_of_a_client_are_refused_for_now_and_all_is_released(server):
    server.wait_until_metric("chargpt_held_bytes", 0)
    before = server.metric("chargpt_admission_rejections_total", reason="overloaded")
    body = {"prompt": "a", "max_tokens": 70_000, "stream": True}  # 2 MB; the client may hold 4 MiB
    with sent(server.port, post("/generate", body)), sent(server.port, post("/generate", body)):
        server.wait_until_metric("chargpt_held_bytes", 2 * (70_000 * 28 + 6032))
        refused = web.post(f"{server.url}/generate", json=body | {"n": 1})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "overloaded"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        small = web.post(f"{server.url}/generate", json={"prompt": "a", "max_tokens": 5})
        assert small.status_code == 200
        server.wait_until_metric("chargpt_admission_rejections_total", before + 1, reason="overloaded")
    server.wait_until_metric("chargpt_held_bytes", 0)  # both clients have left


def test_a_body_is_held_while_it_is_received(server):
    server.wait_until_metric("chargpt_held_bytes", 0)
    content = json.dumps({"prompt": "a" * MiB}).encode()
    with sent(server.port, post("/generate", content[: MiB // 2], Content_Length=len(content))):
        server.wait_until_metric("chargpt_held_bytes", MiB // 2)
    server.wait_until_metric("chargpt_held_bytes", 0)


def test_every_ending_releases_what_a_request_held(server):
    """Answers, refusals, bad and oversized bodies, time-outs, clients that leave, at once: each sequence ends once."""
    bodies = [
        {"prompt": "a", "max_tokens": 50},
        {"prompt": "a", "max_tokens": 50, "stream": True, "logprobs": 2, "echo": True},
        {"prompt": "a", "max_tokens": 50, "best_of": 3},
        {"prompt": "a", "max_tokens": 5, "suffix": "b"},
        {"prompt": "a", "max_tokens": 20_000, "timeout_seconds": 0.01},
        {"prompt": "\u6f22", "max_tokens": 5},
        {"prompt": "a", "n": "x"},
        {"prompt": [-1] * 50_000},
        {"prompt": "a" * 3 * MiB},
        {"prompt": "a", "max_tokens": 50, "n": 40},  # more than slots
    ]

    def ask(i):
        body = bodies[i % len(bodies)]
        if i % 7 == 0:
            with sent(server.port, post("/generate", body)):
                return 0
        try:
            url, is_timed = f"{server.url}/generate", "timeout_seconds" in body
            while (status := web.post(url, json=body).status_code) == 429 and is_timed:
                pass  # until it runs
            return status
        except httpx.TransportError:  # refused before all of the body was read
            return 413

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        statuses = set(pool.map(ask, range(140)))
    assert {200, 400, 413, 429, 504} <= statuses and 500 not in statuses
    server.wait_until_all_ended()
    server.wait_until_metric("chargpt_held_bytes", 0)
