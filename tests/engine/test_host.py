"""Several models in one inference process: how they share its slots and time."""

import math

import pytest
from prometheus_client import CollectorRegistry

from service.catalog import Catalog
from service.engine.backends import open_runner
from service.engine.engine import Engine
from service.engine.host import Host
from service.model.params import SamplingParams
from service.observe.metrics import Metrics
from service.shared import SharedState
from service.wire import Submit
from tests.helpers import save_random

SLOTS = 4


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Of three models a, b and c, and SLOTS slots."""
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "run"))
    for seed, name in enumerate("abc"):
        save_random(tmp_path / "runs" / name, seed=seed)
    catalog = Catalog([(None, tmp_path / "runs")], "chargpt", tmp_path / "run")
    catalog.open()
    state = SharedState()
    catalog.publish(state)

    def open_engine(version):
        return Engine(open_runner(version.read(catalog.folder), "torch", "float32", SLOTS))

    metrics = Metrics("chargpt", CollectorRegistry(), "worker-0")
    return Host(catalog.folder, state, "worker-0", metrics, open_engine, max_running=SLOTS)


def submit(hosted, count, max_tokens=100):
    first = len(hosted.engine.scheduler) + 1000 * hosted.version.id
    for i in range(count):
        hosted.submit(Submit(first + i, [1, 2], max_tokens, SamplingParams()), math.inf)


def turn(host):
    hosted = host.next()
    hosted.engine.step()
    host.ran(hosted, 1.0)


def running(host):
    return [hosted.engine.scheduler.num_running for hosted in host.models.values()]


@pytest.mark.parametrize(
    "demands,expected",
    [([10, 0, 0], [SLOTS, 0, 0]), ([10, 10, 0], [2, 2, 0]), ([10, 1, 0], [3, 1, 0]), ([9, 9, 9], [1, 1, 2])],
)
def test_models_share_slots_in_equal_parts_and_use_what_others_leave(host, demands, expected):
    for hosted, demand in zip(host.models.values(), demands, strict=True):
        submit(hosted, demand)
    for _ in range(6):
        turn(host)
    assert running(host) == expected


def test_a_model_that_comes_later_starts_at_once_and_gets_its_part_as_others_end(host):
    a, b, _ = host.models.values()
    submit(a, 12, max_tokens=40)
    turn(host)
    submit(b, 12, max_tokens=40)
    turn(host)
    turn(host)
    assert running(host)[:2] == [SLOTS, SLOTS // 2]
    seen = set()
    while a.engine.has_work and b.engine.has_work:
        turn(host)
        seen.add(tuple(running(host)[:2]))
    assert (2, 2) in seen and max(b for _, b in seen if _ == SLOTS) <= 2


def test_time_goes_to_models_in_equal_parts_whatever_their_turns_cost(host):
    a, b, c = host.models.values()
    submit(a, 4, max_tokens=10_000)
    submit(b, 4, max_tokens=10_000)
    cost, spent = {a: 1.0, b: 4.0, c: 2.0}, {a: 0.0, b: 0.0, c: 0.0}
    for i in range(300):
        if i == 100:
            submit(c, 1, max_tokens=10_000)  # which has no claim on the time before it came
            at = dict(spent)
        hosted = host.next()
        spent[hosted] += cost[hosted]
        host.ran(hosted, cost[hosted])
    since = [spent[hosted] - at[hosted] for hosted in (a, b, c)]
    assert max(since) - min(since) <= 2 * max(cost.values())
    assert abs(at[a] - at[b]) <= max(cost.values())
