"""The sweep's counts, and a tiny run against real servers."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from service.model.config import GPTConfig
from tests.bench import load, shapes
from tests.helpers import SLOW, RunningServer, refusal, save_random
from tests.load import sweep

ROOT = Path(__file__).parents[2]
TINY = GPTConfig(len(shapes.VOCABULARY), block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=16)
TINY_PLAN = replace(
    sweep.QUICK,
    shares=(0.3, 2.0),
    longest=32,
    saturation_seconds=1.5,
    warm_seconds=0.3,
    window_seconds=1.0,
    cool_seconds=0.7,
    least_requests=1,
)


def test_every_rate_sends_the_same_requests_with_poisson_gaps():
    slow, fast = sweep.at_rate(64, 10.0, 60.0), sweep.at_rate(64, 20.0, 30.0)
    assert [(item.prompt, item.max_tokens) for item in slow] == [(item.prompt, item.max_tokens) for item in fast]
    assert [item.at for item in slow] == pytest.approx([2 * item.at for item in fast])
    moments = [item.at for item in itertools.islice(sweep.poisson_work(64), 4000)]
    gaps = np.diff(moments)
    assert gaps.mean() == pytest.approx(1, rel=0.05) and gaps.std() == pytest.approx(1, rel=0.05)


def chunk(text: str) -> bytes:
    event = b'data: {"index":0,"text":"%b"}\n\n' % text.encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def test_latencies_start_at_the_due_time_and_include_unfinished_requests():
    due = [shapes.Work("p", 3, at) for at in (0.5, 1.0, 1.2, 1.4, 1.6, 1.8, 2.5)]
    ended = load.Reply(due[1], 101.1, 101.2, 101.6, 1, 2, [(101.2, chunk("a")), (101.6, chunk("bc"))])
    refused = load.Reply(due[2], 101.2, None, 101.21, is_refused=True)
    begun = load.Reply(due[3], 101.4, 101.5, None, 1, 1, [(101.5, chunk("a"))])
    silent = load.Reply(due[4], 101.6)
    outcome = load.Outcome(3.0, 0.3, [load.Reply(due[0], 100.5), ended, refused, begun, silent], 100.0)
    rung = sweep.summary("ours", due, outcome, 1.0, 2.0)
    counts = {name: rung[name] for name in ("due", "ended", "refused", "unfinished", "without_first")}
    assert counts == {"due": 5, "ended": 1, "refused": 1, "unfinished": 3, "without_first": 2}
    # First characters after 0.2 s (sent 0.1 s late) and 0.1 s; censored at 1.4 and 1.2 s by the end of the run.
    assert rung["first"] == pytest.approx({"p50": 0.2, "p95": 1.4, "p99": 1.4})
    assert rung["whole"] == pytest.approx({"p50": 1.2, "p95": 1.6, "p99": 1.6})
    assert rung["per_character"]["p50"] == pytest.approx(0.2)
    assert rung["per_character"]["p99"] == pytest.approx(1.5)  # of the unfinished one
    assert rung["between"] == pytest.approx({"p50": 0.2, "p95": 0.2, "p99": 0.2})
    assert rung["characters_per_second"] == 4 and rung["requests_per_second"] == 1
    assert rung["late_p99"] == pytest.approx(0.1) and rung["load_cores"] == pytest.approx(0.1)
    assert "100 ms late" in sweep.warnings(rung)[0]
    assert "busy on 0.90 cores" in sweep.warnings(rung | {"load_cores": 0.9, "late_p99": 0.0})[0]


def test_completion_of_the_wrong_length_raises():
    due = [shapes.Work("p", 4, 0.0)]
    reply = load.Reply(due[0], 100.0, 100.1, 100.2, 1, 1, [(100.2, chunk("abc"))])
    with pytest.raises(load.LoadError, match="expected 4 characters, got 3"):
        sweep.summary("ours", due, load.Outcome(1.0, 0.1, [reply], 100.0), 0.0, 1.0)


def test_measured_goodput_ends_at_the_first_missed_goal():
    goal = sweep.Goal(0.2, 0.05)

    def rung(rate: float, first: float, refused: int = 0) -> dict:
        return {"rate": rate, "refused": refused, "first": {"p95": first}, "per_character": {"p95": 0.01}}

    rungs = [rung(8, 0.1), rung(1, 0.05), rung(4, 0.3), rung(2, 0.15)]
    assert sweep.goodput(rungs, goal) == (2, 4)
    assert sweep.goodput([rung(1, 0.1), rung(2, 0.1, refused=1)], goal) == (1, 2)
    assert sweep.goodput([rung(1, 0.1)], goal) == (1, None)
    assert sweep.goodput([rung(1, 0.3)], goal) == (0, 1)


def test_rejections_are_counted_and_their_connections_reused(tmp_path):
    save_random(tmp_path / "slow", **SLOW)  # the first request runs while the others come
    with RunningServer(tmp_path / "slow", max_running_requests=1, max_queued_requests=0) as server:
        server.wait_until_ready()
        due = [shapes.Work("abc", 400, 0.0)] * 6
        requests = [(0.0, sweep.asked("ours", i, item), item) for i, item in enumerate(due)]
        with pytest.raises(load.LoadError, match="was answered b'HTTP/1.1 429"):
            load.run(server.port, requests, connections=6)
        server.wait_until_metric("chargpt_num_requests_running", 0)
        outcome = load.run(server.port, requests, connections=6, keep=True, refusals=True)
        refused = [reply.is_refused for reply in outcome.replies]
        rung = sweep.summary("ours", due, outcome, 0.0, 1.0)
        assert rung["refused"] == sum(refused) >= 1 and rung["ended"] == 6 - sum(refused) >= 1
        assert rung["unfinished"] == 0


@pytest.mark.tools
@pytest.mark.timeout(900)
def test_tiny_sweep_counts_every_request_and_writes_tables_and_picture(tmp_path):
    out = tmp_path / "out"
    run = sweep.Sweep(TINY_PLAN, TINY, 1, sweep.Goal(), out, systems=("ours", "stock"))
    run.run()
    results = json.loads((out / "sweep.json").read_text())
    for system in ("ours", "stock"):
        saturation, rungs = results["systems"][system]["saturation"], results["systems"][system]["rungs"]
        assert saturation["requests_per_second"] > 0
        assert [rung["share"] for rung in rungs] == pytest.approx(TINY_PLAN.shares)
        for rung in rungs:
            end = TINY_PLAN.warm_seconds + rung["window_seconds"]
            seconds = end + TINY_PLAN.cool_seconds
            due = [item for item in sweep.at_rate(32, rung["rate"], seconds) if TINY_PLAN.warm_seconds <= item.at < end]
            assert rung["due"] == len(due) == rung["ended"] + rung["refused"] + rung["unfinished"]
    text = (out / "sweep.md").read_text()
    assert sum(line.startswith(("| this service, ", "| stock LitServe, ")) for line in text.splitlines()) == 4
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "deploy").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "README.md").write_text((ROOT / "tests" / "README.md").read_text())
    for _ in range(2):  # idempotent
        sweep.publish(results, out, tmp_path)
        assert sweep.markdown(results) in (tmp_path / "tests" / "README.md").read_text()
    assert 0 < (tmp_path / "deploy" / sweep.PICTURE).stat().st_size < 150_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], "--threads: must be in [1, 1024], got 0"),
        (["--first", "-1"], "--first and --character must be positive, got -1 and 0.05"),
    ],
)
def test_invalid_argument_is_named(arguments, message):
    assert message in refusal(sweep.main, arguments)
