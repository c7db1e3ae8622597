"""The queueing model, checked against known formulas and simulations; the sweep, against real servers."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
import subprocess
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import SLOW, RunningServer, refusal, save_random

from service.model.config import GPTConfig
from service.model.kv_cache import KVCache
from tests.bench import load, shapes
from tests.load import capacity, sweep

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
    engine_rows=(1, 4),
    engine_length=24,
)
REPLICA = capacity.Replica(
    ((1, 0.0018), (8, 0.0026), (32, 0.0046), (64, 0.0073)), 0.003, 0.001, 0.004, 50.0, slots=64, waiting=64
)


# Formulas


def test_one_server_equals_m_m_1():
    arrivals, rate = 3.0, 5.0
    chain, load_share = capacity.Chain(arrivals, [rate]), arrivals / rate
    assert chain.mean_running == pytest.approx(load_share)
    assert chain.mean_waiting == pytest.approx(load_share**2 / (1 - load_share))
    for t in (0.0, 0.2, 1.0):
        assert chain.wait_exceeds(t) == pytest.approx(load_share * math.exp(-(rate - arrivals) * t))
    assert chain.refused == 0 and chain.throughput == arrivals


@pytest.mark.parametrize(("servers", "offered"), [(1, 0.5), (4, 3.2), (64, 60.0)])
def test_several_servers_equal_m_m_c_with_erlangs_formula(servers, offered):
    blocking = 1.0  # Erlang's B, by its recursion
    for n in range(1, servers + 1):
        blocking = offered * blocking / (n + offered * blocking)
    delayed = blocking / (1 - offered / servers * (1 - blocking))  # Erlang's C
    chain = capacity.Chain(offered, np.arange(1.0, servers + 1))
    assert chain.wait_exceeds(0) == pytest.approx(delayed)
    assert chain.mean_running == pytest.approx(offered)
    assert chain.mean_waiting == pytest.approx(delayed * offered / (servers - offered))
    lossy = capacity.Chain(offered, np.arange(1.0, servers + 1), waiting=0)
    assert lossy.refused == pytest.approx(blocking)
    assert lossy.mean_running == pytest.approx(offered * (1 - blocking))


@pytest.mark.parametrize("arrivals", [2.0, 5.0, 9.0])
def test_bounded_queue_equals_m_m_1_k(arrivals):
    rate, room = 5.0, 6  # one running, five waiting
    share = arrivals / rate
    weights = np.array([share**n for n in range(room + 1)])
    expected = weights / weights.sum()
    chain = capacity.Chain(arrivals, [rate], waiting=room - 1)
    assert chain.refused == pytest.approx(expected[-1])
    assert chain.throughput == pytest.approx(rate * (1 - expected[0]))
    assert chain.mean_running + chain.mean_waiting == pytest.approx(expected @ np.arange(room + 1))
    # The mean wait from the integral of the tail equals that from Little's law.
    grid = np.linspace(0, 20, 20_001)
    waits = np.trapezoid([chain.wait_exceeds(t) for t in grid], grid)
    assert waits == pytest.approx(chain.mean_waiting / chain.throughput, rel=1e-3)


def test_large_bounded_queue_equals_an_unbounded_one():
    rates = [REPLICA.rate(n) for n in range(1, 65)]
    arrivals = 0.9 * rates[-1]
    bounded, unbounded = capacity.Chain(arrivals, rates, 5000), capacity.Chain(arrivals, rates)
    assert bounded.mean_waiting == pytest.approx(unbounded.mean_waiting)
    assert bounded.wait_exceeds(0.05) == pytest.approx(unbounded.wait_exceeds(0.05))


def test_invalid_parameters_are_rejected():
    with pytest.raises(ValueError, match="5 requests/s exceed the capacity of 4 requests/s"):
        capacity.Chain(5.0, [2.0, 4.0])
    with pytest.raises(ValueError, match="rates must be positive"):
        capacity.Chain(5.0, [0.0])
    with pytest.raises(ValueError, match="step_seconds must be sorted by rows"):
        replace(REPLICA, step_seconds=((8, 0.1), (1, 0.2)))
    with pytest.raises(ValueError, match="a goal must have positive seconds"):
        capacity.Goal(first_seconds=0)


# Simulations


def simulated_chain(arrivals: float, rates: list[float], waiting: int, count: int, seed: int):
    """Simulates a queue whose running sequences share a machine: (throughput, refused, mean running, waits).

    Work per sequence is exponential; the n running sequences each advance at rates[n − 1] / n.
    """
    rng = random.Random(seed)
    now = done = area = 0.0  # done: work received by a sequence running since the start
    running: list[float] = []  # heap of the values of `done` at which they finish
    queue: deque[float] = deque()  # arrival times
    waits, refused, ended = [], 0, 0
    next_arrival = rng.expovariate(arrivals)
    while ended < count:
        n = len(running)
        until = (running[0] - done) * n / rates[n - 1] if n else math.inf
        step = min(until, next_arrival - now)
        area += n * step
        now += step
        if n:
            done += step * rates[n - 1] / n
        if until <= step:
            heapq.heappop(running)
            ended += 1
            if queue:
                waits.append(now - queue.popleft())
                heapq.heappush(running, done + rng.expovariate(1.0))
        else:
            next_arrival = now + rng.expovariate(arrivals)
            if n < len(rates):
                waits.append(0.0)
                heapq.heappush(running, done + rng.expovariate(1.0))
            elif len(queue) < waiting:
                queue.append(now)
            else:
                refused += 1
    return ended / now, refused / (refused + len(waits) + len(queue)), area / now, waits


@pytest.mark.parametrize("share", [0.5, 0.9, 1.3])
def test_chain_matches_a_simulated_queue(share):
    slots, waiting = 16, 24
    rates = [n / (0.5 + 0.03 * n) for n in range(1, slots + 1)]  # batching: total rate rises with n, rate per row falls
    arrivals = share * rates[-1]
    throughput, refused, mean_running, waits = simulated_chain(arrivals, rates, waiting, 60_000, seed=1)
    chain = capacity.Chain(arrivals, rates, waiting)
    assert chain.throughput == pytest.approx(throughput, rel=0.02)
    assert chain.refused == pytest.approx(refused, abs=0.01)
    assert chain.mean_running == pytest.approx(mean_running, rel=0.03)
    for t in (0.0, 0.3, 1.0):
        seen = sum(wait > t for wait in waits) / len(waits)
        assert chain.wait_exceeds(t) == pytest.approx(seen, abs=0.03)


def simulated_engine(replica: capacity.Replica, arrivals: float, count: int, seed: int, exponential: bool):
    """Simulates engine steps: (throughput, seconds to first character, mean seconds per character) of the requests.

    In each step every running sequence emits a character and newly admitted ones their first; lengths are geometric,
    or as in mixed_work.
    """
    rng = random.Random(seed)
    free, now, next_arrival = replica.slots, 0.0, 0.0
    queue: deque[float] = deque()
    running: list[list[float]] = []  # [arrived, first at, characters left, characters]
    firsts, means, ended = [], [], 0
    while ended < count:
        is_idle = not running and not queue
        if is_idle:
            now = max(now, next_arrival)
        while next_arrival <= now:
            if len(queue) < replica.waiting:
                queue.append(next_arrival)
            next_arrival += rng.expovariate(arrivals)
        new = []
        while queue and free:
            free -= 1
            if exponential:
                length = 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / replica.characters))
            else:
                length = round(160 * 16 ** -rng.random())
            new.append([queue.popleft(), 0.0, length, length])
        now += replica.step(len(running))
        if new:
            now += replica.idle_prefill_seconds if is_idle else replica.prefill_seconds
            now += (len(new) - 1) * replica.prefill_more_seconds
        for sequence in new:
            sequence[1] = now
            firsts.append(now - sequence[0] + replica.path_seconds)
        for sequence in (*running, *new):
            sequence[2] -= 1
            if sequence[2] == 0:
                ended, free = ended + 1, free + 1
                if sequence[3] > 1:
                    means.append((now - sequence[1]) / (sequence[3] - 1))
        running = [sequence for sequence in (*running, *new) if sequence[2]]
    return ended / now, firsts, means


@pytest.mark.parametrize("exponential", [True, False])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8, 2.0])
def test_replica_model_approximates_a_simulated_engine(share, exponential):
    """Also for lengths that are not exponential. While running, a request meets less varied load than at arrival."""
    mean = 50.0 if exponential else 160 * 15 / 16 / math.log(16)
    replica = replace(REPLICA, characters=mean)
    arrivals = share * replica.saturation
    throughput, firsts, means = simulated_engine(replica, arrivals, 8_000, 2, exponential)
    forecast = replica.forecast(arrivals)
    assert forecast.chain.throughput == pytest.approx(throughput, rel=0.03)
    for p in (0.5, 0.95):
        assert forecast.first(p) == pytest.approx(np.quantile(firsts, p), rel=0.25)
    assert forecast.character(0.5) == pytest.approx(np.quantile(means, 0.5), rel=0.15)
    assert 0.9 < forecast.character(0.95) / np.quantile(means, 0.95) < 1.4


# Replica, fleet, card


def test_step_times_are_measured_interpolated_or_extrapolated():
    assert [REPLICA.step(n) for n in (0, 1, 8, 64)] == pytest.approx([0, 0.0018, 0.0026, 0.0073])
    assert REPLICA.step(20) == pytest.approx(0.0036)
    assert REPLICA.step(96) == pytest.approx(0.0073 + 0.0027)
    # Alone, a completion of L characters takes one prefill and L − 1 steps.
    alone = replace(REPLICA, prefill_more_seconds=REPLICA.prefill_seconds)
    assert 1 / alone.rate(1) == pytest.approx(0.003 + 49 * 0.0018)


def test_goodput_is_the_highest_rate_that_meets_the_goal():
    goal = capacity.Goal(0.1, 0.02)
    best = capacity.goodput(REPLICA, goal)
    assert 0 < best < REPLICA.saturation
    assert goal.holds(REPLICA.forecast(best * 0.999)) and not goal.holds(REPLICA.forecast(best * 1.001))
    assert capacity.goodput(REPLICA, replace(goal, first_seconds=0.5, character_seconds=0.1)) >= best
    assert capacity.goodput(REPLICA, replace(goal, first_seconds=0.004)) == 0


def test_fleet_grows_with_load_and_a_shared_queue_needs_no_more_replicas():
    goal, before = capacity.Goal(0.05, 0.02), capacity.Fleet(0, 0, 0)
    for rate in (1, 100, 500, 3000):
        needed = capacity.fleet(REPLICA, goal, rate)
        assert 1 <= needed.at_best <= needed.at_random < needed.with_headroom
        assert (needed.at_best, needed.at_random) >= (before.at_best, before.at_random)
        assert rate / needed.at_random <= capacity.goodput(REPLICA, goal)
        assert needed.with_headroom - 1 >= rate / capacity.goodput(REPLICA, goal) / capacity.HEADROOM
        before = needed
    with pytest.raises(ValueError, match="no rate meets Goal"):
        capacity.fleet(REPLICA, capacity.Goal(0.001), 1)


def test_pooled_replicas_wait_less_than_separate_ones():
    """Two replicas with one queue, against two with a queue each."""
    arrivals = 0.97 * REPLICA.saturation
    apart, together = REPLICA.chain(arrivals), REPLICA.chain(2 * arrivals, replicas=2)
    assert together.slots == 2 * apart.slots and together.rates[-1] == pytest.approx(2 * apart.rates[-1])
    assert together.wait_exceeds(0) < apart.wait_exceeds(0)


def test_slot_bytes_match_the_cache():
    import torch

    config = shapes.config_of(shapes.SHAPES["S"])
    cache = KVCache(config, 3, "cpu", torch.float32)
    assert capacity.slot_bytes(config) == (cache.keys.nbytes + cache.values.nbytes) / 4


def test_step_on_card_counts_the_same_operations_and_bytes_as_the_benchmark():
    from tests.bench import roofline

    model, rows = shapes.random_model(TINY), 5
    counts = roofline.count(TINY, rows, TINY.block_size, "float32")
    card = capacity.Card("unit", 1.0, {"float32": 1.0})
    step = capacity.step_on_card(TINY, model.num_parameters, rows, card, "float32", operations=8, host_seconds=0.5)
    # The benchmark omits unread embedding rows and the multiplications of norms.
    assert step.read_seconds == pytest.approx(counts["weight_bytes"] + counts["cache_bytes"], rel=0.2)
    operations = counts["product_operations"] + counts["attention_operations"]
    assert step.product_seconds == pytest.approx(operations, rel=0.2)
    assert step.kernel_seconds == 20e-6 and step.host_seconds == 0.5
    assert step.seconds == max(step.read_seconds, step.product_seconds)
    busy = replace(step, host_seconds=2 * step.seconds)
    assert busy.seconds == busy.host_seconds and busy.bound == "host"


# Counts of a sweep


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
    goal = capacity.Goal(0.2, 0.05)

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
    run = sweep.Sweep(TINY_PLAN, TINY, 1, capacity.Goal(), out, systems=("ours", "stock"))
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
    measured = results["engine"]
    assert [rows for rows, _ in measured["step_seconds"]] == [1, 4] and measured["operations"]["M"]["step"] > 50

    text = (out / "sweep.md").read_text()
    assert sum(line.startswith(("| this service, ", "| stock LitServe, ")) for line in text.splitlines()) == 4
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    for name in ("tests/README.md", "deploy/CAPACITY.md"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text((ROOT / name).read_text())
    for _ in range(2):  # idempotent
        sweep.publish(results, out, tmp_path)
        assert sweep.markdown(results) in (tmp_path / "tests" / "README.md").read_text()
    page = (tmp_path / "deploy" / "CAPACITY.md").read_text()
    for name, content in capacity.tables(results).items():
        assert f"<!-- {name} -->\n{content}<!-- /{name} -->" in page
    assert 0 < (tmp_path / "deploy" / sweep.PICTURE).stat().st_size < 150_000


# The committed figures


def test_documents_show_the_sweep_picture_and_existing_flags():
    readme, tables, page = (
        (ROOT / name).read_text() for name in ("README.md", "tests/README.md", "deploy/CAPACITY.md")
    )
    assert f"](deploy/{sweep.PICTURE})" in readme and "<!-- load-sweep -->" in tables
    picture = ROOT / "deploy" / sweep.PICTURE
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 150_000
    known = help_of("tests.load.capacity") + help_of("tests.load.sweep")
    for flag in set(capacity_flags(page)):
        assert flag in known, flag


def capacity_flags(page: str) -> list[str]:
    lines = [line for line in page.splitlines() if "tests.load." in line]
    return [word for line in lines for word in line.split() if word.startswith("--")]


def help_of(module: str) -> str:
    command = [sys.executable, "-m", module, "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("sweep", ["--threads", "0"], "--threads: must be in [1, 1024], got 0"),
        ("sweep", ["--first", "-1"], "--first and --character must be positive, got -1 and 0.05"),
        ("capacity", [], "pass --rate or --write"),
        ("capacity", ["--rate", "0"], "--rate must be positive, got 0"),
    ],
)
def test_invalid_argument_is_named(module, arguments, message):
    assert message in refusal({"sweep": sweep, "capacity": capacity}[module].main, arguments)
