"""The load tools: what their answers must hold, the sweep's counts, and agreement of client and server figures."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest

from tests.bench import peers, shapes
from tests.helpers import VOCABULARY, save_random, serving
from tests.load import mix, sweep
from tests.toolbox import load
from tests.toolbox.launch import ROOT

# -- requests and their answers --

STREAM = mix.Ask("/generate", {"prompt": "ab", "max_tokens": 4, "seed": 1, "stream": True, "stop": "\n"})
SCORE, NEXT = mix.Ask("/v1/score", {"texts": "abc"}), mix.Ask("/v1/next", {"prompt": "a"})
LAST = {"usage": {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}}


def piece(text: str, finish_reason: str | None = None) -> dict[str, object]:
    return {"text": text, "finish_reason": finish_reason}


@pytest.mark.parametrize(
    ("ask", "pieces", "message"),
    [
        (STREAM, [piece("abcd"), piece("", "length"), LAST], ""),
        (mix.Ask(STREAM.path, STREAM.body, leave_after=9), [piece("abcd", "length"), LAST], ""),  # it ended before
        (STREAM, [piece("abc", "length"), LAST], "3 characters with finish_reason length, max_tokens 4"),
        (STREAM, [piece("abcd", "abort"), LAST], "finish_reason abort"),
        (STREAM, [piece("ab\nc", "length"), LAST], "stop '\\n' is in the text"),
        (STREAM, [piece("ab漢c", "length"), LAST], "absent from the vocabulary: ['漢']"),
        (STREAM, [piece("abcd", "length")], "StopIteration"),
        (STREAM, [piece("a"), {"error": {"code": "engine_error"}}], "engine_error"),
        (SCORE, [{"data": [{"characters": 2, "nats": 3.5}]}], ""),
        (SCORE, [{"data": [{"characters": 2, "nats": -1.0}]}], "-1.0 nats"),
        (NEXT, [{"data": [{"distribution": [{"probability": 1 / len(VOCABULARY)}] * len(VOCABULARY)}]}], ""),
        (NEXT, [{"data": [{"distribution": []}]}], "0 characters"),
    ],
)
def test_wrong_answers_are_told_from_right_ones(ask, pieces, message):
    stream = "".join(f"data: {json.dumps(each)}\n\n" for each in pieces)
    body = f"{stream}data: [DONE]\n\n" if "stream" in ask.body else json.dumps(pieces[0])
    found = mix.problem(ask, 200, body.encode(), "".join(VOCABULARY))
    assert message in found and bool(found) == bool(message)
    if "stream" in ask.body:
        assert "AssertionError" in mix.problem(ask, 200, stream.encode(), "".join(VOCABULARY))  # without [DONE]


# -- a client's figures and the server's --


def test_client_and_server_agree_about_counts(checkpoint):
    """Few cache slots: requests wait."""
    due = list(itertools.islice(sweep.poisson_work(160), 60))
    system = peers.System("ours", "")
    with serving(checkpoint.path, max_running_requests=3, max_tokens=16_384) as server:
        requests = [(0.0, system.request(item.prompt.lower(), item.max_tokens, True, 1), item) for item in due]
        outcome = load.run(server.port, requests, connections=12, keep=True)
        server.wait_until_metric("chargpt_request_success_total", 60, finished_reason="length")
        metrics = server.metrics()
    assert len(outcome.ended) == 60
    characters = [sum(count for _, count in sweep.moments(system, reply)) for reply in outcome.replies]
    assert characters == [item.max_tokens for item in due]
    assert metrics["chargpt_generation_tokens_total", frozenset()] == sum(characters)
    assert metrics["chargpt_prompt_tokens_total", frozenset()] == sum(len(item.prompt) for item in due)
    # The server's times lie within the client's: from the first character to the last, and from the request to its end.
    assert metrics["chargpt_inter_token_latency_seconds_count", frozenset()] == sum(characters) - 60
    whole = sum(reply.ended_at - reply.sent_at for reply in outcome.replies)
    first = sum(outcome.times_to_first)
    for name, most in (("time_to_first_token", first), ("e2e_request_latency", whole), ("inter_token_latency", whole)):
        assert 0 < metrics[f"chargpt_{name}_seconds_sum", frozenset()] < most, name


# -- the sweep --

GOAL = {"first_seconds": 0.2, "character_seconds": 0.05}
TINY_PLAN = sweep.Plan((2.0,), 32, 9.0, 0.3, 3.0, 0.7, 1)


def chunk(text: str) -> bytes:
    content = b'data: {"index":0,"text":"%b"}\n\n' % text.encode()
    return b"%x\r\n%b\r\n" % (len(content), content)


def test_latencies_start_at_the_due_time_and_include_unfinished_requests():
    due = [sweep.Work("p", 3, at) for at in (0.5, 1.0, 1.2, 1.4, 1.6, 1.8, 2.5)]
    ended = load.Reply(due[1], 101.1, 101.1, 101.2, 101.6, 1, 2, [(101.2, chunk("a")), (101.6, chunk("bc"))])
    refused = load.Reply(due[2], 101.2, 101.2, None, 101.21, head=b"HTTP/1.1 429")
    begun = load.Reply(due[3], 101.4, 101.4, 101.5, None, 1, 1, [(101.5, chunk("a"))])
    silent = load.Reply(due[4], 101.6, 101.6)
    outcome = load.Outcome(3.0, 0.3, [load.Reply(due[0], 100.5, 100.5), ended, refused, begun, silent], 100.0)
    rung = sweep.summary(peers.System("ours", ""), due, outcome, 1.0, 2.0)
    assert [rung[name] for name in ("due", "ended", "refused", "unfinished")] == [5, 1, 1, 3]
    # First characters after 0.2 s (sent 0.1 s late) and 0.1 s; censored at 1.4 and 1.2 s by the end of the run.
    assert rung["first"] == pytest.approx({"p50": 0.2, "p95": 1.4, "p99": 1.4})
    assert rung["whole"] == pytest.approx({"p50": 1.2, "p95": 1.6, "p99": 1.6})
    assert rung["per_character"]["p99"] == pytest.approx(1.5)  # of the unfinished one
    assert rung["characters_per_second"] == 4 and rung["requests_per_second"] == 1
    assert rung["late"]["p99"] == pytest.approx(0.1)


def test_goodput_ends_at_the_first_missed_goal():
    def rung(rate: float, first: float, refused: int = 0) -> dict:
        return {"rate": rate, "refused": refused, "first": {"p95": first}, "per_character": {"p95": 0.01}}

    assert sweep.goodput(GOAL, [rung(8, 0.1), rung(1, 0.05), rung(4, 0.3), rung(2, 0.15)]) == 2
    assert sweep.goodput(GOAL, [rung(1, 0.1), rung(2, 0.1, refused=1)]) == 1
    assert sweep.goodput(GOAL, [rung(1, 0.3)]) == 0


@pytest.mark.tools
@pytest.mark.timeout(900)
def test_tiny_sweep_counts_every_request_and_writes_tables_and_picture(tmp_path):
    sweep.Sweep(TINY_PLAN, shapes.TINY, 1, GOAL, tmp_path, tmp_path / "no-llama.cpp", ("ours", "stock")).run()
    results = json.loads((tmp_path / "sweep.json").read_text())
    for figures in results["systems"].values():
        assert figures["saturation"]["requests_per_second"] > 0 and len(figures["rungs"]) == 1
        for rung in figures["rungs"]:
            assert rung["due"] == rung["ended"] + rung["refused"] + rung["unfinished"]
    text = (tmp_path / "sweep.md").read_text()
    assert text.count("\n| this service, ") == text.count("\n| stock LitServe, ") == 1
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


# -- the tools of others --


@pytest.mark.tools
def test_make_load_starts_a_server_and_fails_where_answers_are_wrong(tmp_path):
    folder = save_random(tmp_path / "checkpoint").path
    flags = ["--config=tests/load/locust.conf", "--run-time=2s", "--users=4", f"--html={tmp_path / 'report.html'}"]
    flags += [f"--csv={tmp_path / 'locust'}", f"--server-log={tmp_path / 'server.log'}"]

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "locust", *flags, *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    done = run("--checkpoint", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "report.html").read_text()
    assert "/v1/completions stream" in report and "between" in report
    assert "all processes have ended" in (tmp_path / "server.log").read_text()
    with serving(folder, max_running_requests=1, max_queued_requests=0, max_tokens=16_384) as server:
        done = run("--host", server.url)
        assert done.returncode == 1 and "status 429: queue_full" in done.stdout + done.stderr
        done = run("--host", f"{server.url}/nothing")
        assert done.returncode == 2 and "/nothing/info" in done.stderr
