"""/metrics of a server with two HTTP processes and two workers."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import re
import threading
import time

import psutil
import pytest
from prometheus_client.core import GaugeMetricFamily

from service.observe.exposition import Exposition
from tests.helpers import ENDLESS, lasting, save_random, serving, wait_until, web
from tests.toolbox.http import answer, post, sent
from tests.toolbox.launch import ROOT

LOSS = 1.25


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("metrics") / "checkpoint", about={"losses": {"whole": LOSS}}).path


@pytest.fixture(scope="module")
def server(checkpoint):
    settings = {"max_connections": 1000}
    yield from lasting(checkpoint, http_processes=2, workers_per_device=2, max_running_requests=4, **settings)


def generate(server, **body):
    return web.post(f"{server.url}/generate", json={"prompt": "ab", "max_tokens": 5} | body)


def generate_all(server, bodies):
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda body: generate(server, **body), bodies))


def settled(server):
    """The metrics once no request runs; a worker's last observations arrive with its next flush."""
    for gauge in ("num_requests_running", "num_requests_waiting", "cache_slots_in_use"):
        server.wait_until_metric(f"chargpt_{gauge}", 0)
    return server.metrics()


class Increases(contextlib.AbstractContextManager):
    """Increases of series within the `with` block."""

    def __init__(self, server):
        self.server, self.before = server, settled(server)

    def __exit__(self, *_):
        self.after = settled(self.server)

    def __call__(self, name, **labels):
        key = (name, frozenset(labels.items()))
        return self.after.get(key, 0) - self.before.get(key, 0)


@contextlib.contextmanager
def open_stream(server, **body):
    """A streaming request that has started; the client disconnects at the end of the block."""
    body = {"prompt": "a", "max_tokens": ENDLESS, "stream": True} | body
    with sent(server.port, post("/generate", body)) as connection, answer(connection) as response:
        assert response.status == 200
        yield


def test_phases_add_up_to_the_time_to_first_token(server):
    with Increases(server) as increase:
        generate_all(server, [{"max_tokens": 1 + i % 7, "stream": i % 2 == 0, "seed": i} for i in range(40)])
    parts = ("request_queue_time", "request_prefill_time", "request_first_decode_time")
    assert [increase(f"chargpt_{part}_seconds_count") for part in parts] == [40, 40, 40]
    assert increase("chargpt_time_to_first_token_seconds_count") == 40
    total = sum(increase(f"chargpt_{part}_seconds_sum") for part in parts)
    assert total == pytest.approx(increase("chargpt_time_to_first_token_seconds_sum"), abs=1e-6)
    inference = sum(increase(f"chargpt_request_{phase}_time_seconds_sum") for phase in ("prefill", "decode"))
    assert inference == pytest.approx(increase("chargpt_request_inference_time_seconds_sum"), abs=1e-6)


def test_scoring_records_no_time_to_first_token_and_unknown_characters_are_counted(server):
    body = {"prompt": "€", "unknown_characters": "drop"}
    with Increases(server) as increase:
        assert web.post(f"{server.url}/v1/score", json={"texts": ["abc", "abcd"]}).status_code == 200
    assert increase("chargpt_time_to_first_token_seconds_count") == 0
    assert increase("chargpt_request_queue_time_seconds_count") == 2
    assert increase("chargpt_request_success_total", finished_reason="length") == 2
    with Increases(server) as increase:
        assert web.post(f"{server.url}/tokenize", json=body).json()["dropped_characters"] == 1  # runs no model
        generate(server, prompt="a€b€", unknown_characters="drop")
        generate(server, prompt="a€b", unknown_characters="replace", replacement_character="b")
    assert increase("chargpt_unknown_characters_total", policy="drop") == 2
    assert increase("chargpt_unknown_characters_total", policy="replace") == 1


def test_inter_token_latency_has_one_observation_per_character_after_the_first(server):
    with Increases(server) as increase:
        generate_all(server, [{"max_tokens": n} for n in (1, 1, 1, 30, 30)])
    assert increase("chargpt_inter_token_latency_seconds_count") == 2 * 29
    assert increase("chargpt_request_time_per_output_token_seconds_count") == 2
    assert increase("chargpt_generation_tokens_total") == 63
    assert increase("chargpt_request_generation_tokens_sum") == 63
    with Increases(server) as increase:
        generate_all(server, [{"max_tokens": 2}])  # the second one takes all the time after the first one
    each, decode = (
        increase(f"chargpt_request_{name}_seconds_sum") for name in ("time_per_output_token", "decode_time")
    )
    assert each == pytest.approx(decode) and each > 0


def test_requests_are_counted_by_finish_reason_and_gauges_return_to_zero(server):
    with Increases(server) as increase:
        assert generate(server, max_tokens=400, stop_regex="[a-z]").json()["choices"][0]["finish_reason"] == "stop"
        assert generate(server).status_code == 200
        assert generate(server, max_tokens=ENDLESS, timeout_seconds=0.2).status_code == 504
        with open_stream(server):
            pass
        with open_stream(server, stream_interval=0):
            server.wait_until_metric("chargpt_kv_cache_usage_perc", 1 / 8)
        assert generate(server, temperature=-1).status_code == 400
        web.post(f"{server.url}/generate", content=b"{")
    endings = {reason: 1 for reason in ("stop", "length", "timeout")} | {"abort": 2, "error": 0}
    for reason, count in endings.items():
        assert increase("chargpt_request_success_total", finished_reason=reason) == count, reason
    assert increase("chargpt_e2e_request_latency_seconds_count") == 2
    assert increase("chargpt_request_generation_tokens_count") == 5
    for status, count in (("400", 2), ("504", 1), ("499", 2)):
        assert increase("chargpt_http_requests_total", handler="/generate", method="POST", status=status) == count
    duration = increase("chargpt_http_request_duration_seconds_count", handler="/generate", method="POST")
    assert duration == sum(
        increase(name, **dict(labels)) for name, labels in increase.after
        if name == "chargpt_http_requests_total" and ("handler", "/generate") in labels
    )  # fmt: skip
    server.wait_until_metric("chargpt_http_requests_in_progress", 1)  # the scrape itself
    assert server.metric("chargpt_kv_cache_usage_perc") == 0


def test_counters_survive_a_worker_restart_and_gauges_do_not(checkpoint):
    with serving(checkpoint, max_running_requests=4) as server:
        generate_all(server, [{"seed": i} for i in range(8)])
        before = settled(server)
        started = server.metric("chargpt_process_start_time_seconds", process="worker-0")
        with open_stream(server):
            server.worker().kill()
            server.wait_until_metric("chargpt_worker_restarts_total", 1)
        server.wait_until_ready()
        assert generate(server).status_code == 200
        after = settled(server)
        for key, value in before.items():
            if key[0].endswith(("_total", "_count", "_sum", "_bucket")) and "process" not in dict(key[1]):
                assert after[key] >= value, key
        count = "chargpt_iteration_seconds_count", frozenset()
        assert after[count] > before[count]
        assert after["chargpt_cache_slots", frozenset()] == 4
        assert server.metric("chargpt_process_start_time_seconds", process="worker-0") > started


def test_iteration_phases_add_up_to_the_iteration_time(server):
    with Increases(server) as increase:
        generate_all(server, [{"max_tokens": 120, "seed": i} for i in range(12)])
    phases = {dict(labels)["phase"] for name, labels in increase.after if name == "chargpt_iteration_phase_seconds_sum"}
    assert phases == {"schedule", "decode", "prefill", "update", "transport"}
    total = sum(increase("chargpt_iteration_phase_seconds_sum", phase=phase) for phase in phases - {"transport"})
    assert total == pytest.approx(increase("chargpt_iteration_seconds_sum"), rel=1e-6)
    steps = increase("chargpt_iteration_seconds_count")
    assert increase("chargpt_iteration_phase_seconds_count", phase="schedule") == steps
    rows = increase("chargpt_iteration_batch_size_sum")
    assert 12 * 2 <= rows <= 12 * 119  # prefill gives each first character; a step decodes up to 64 of each row
    assert increase("chargpt_iteration_batch_utilization_ratio_sum") == pytest.approx(rows / 4)
    assert increase("chargpt_iteration_tokens_total_sum") == 12 * 119 + 12 * 2


KINDS = {"application/openmetrics-text; version=1.0.0; charset=utf-8", "text/plain; version=0.0.4; charset=utf-8"}


class Slow(Exposition):
    """Each page has its number, and ends when the test says so."""

    def __init__(self):
        needed = [it.name for it in dataclasses.fields(self) if it.default is it.default_factory is dataclasses.MISSING]
        super().__init__(**dict.fromkeys(needed))
        self.numbers, self.has_begun, self.may_end = itertools.count(), threading.Event(), threading.Event()

    def collect(self):
        yield GaugeMetricFamily("page", "of all", next(self.numbers))
        self.has_begun.set()
        self.may_end.wait()


@pytest.mark.anyio
async def test_all_who_wait_for_a_page_get_the_same_one():
    """Each of 40 scrapers once had a page of its own rendered, in the threads that also compiled patterns."""
    exposition = Slow()

    def ask():
        kinds = ["application/openmetrics-text; version=1.0.0, text/plain; q=0.5", "text/plain"] * 10
        return [asyncio.create_task(exposition.page(kind)) for kind in kinds]

    first = ask()
    await asyncio.to_thread(exposition.has_begun.wait)
    later = ask()
    await asyncio.sleep(0)  # they have asked while a page of each kind, or its rendering, was under way
    exposition.may_end.set()
    first, later = await asyncio.gather(*first), await asyncio.gather(*later)
    for pages in (first, later):
        assert {kind for _, kind in pages} == KINDS and len(set(pages)) == 2
        assert all(page.endswith(b"# EOF\n") == kind.startswith("application") for page, kind in pages)
    assert len({*first, *later}) == 3  # the second one had not begun
    assert next(exposition.numbers) == 3


def test_process_metrics_match_the_operating_system(server):
    metrics, resident = server.metrics(), "chargpt_process_resident_memory_bytes"
    memory = {dict(labels)["process"]: value for (name, labels), value in metrics.items() if name == resident}
    assert set(memory) == {"main", "http-0", "http-1", "worker-0", "worker-1"}
    main = psutil.Process(server.process.pid)
    assert memory["main"] == pytest.approx(main.memory_info().rss, rel=0.2)
    times = main.cpu_times()
    cpu = metrics["chargpt_process_cpu_seconds_total", frozenset({("process", "main")})]
    assert 0 < cpu <= times.user + times.system + 1


def test_limits_are_shown_beside_what_is_used(server):
    """Two HTTP processes divide those of connections and of memory. Each process has that of open files."""
    server.wait_until_metric("chargpt_http_max_connections", 1000)
    server.wait_until_metric("chargpt_max_held_bytes", 1 << 50)
    limits = {dict(labels)["process"]: it for (_, labels), it in server.metrics("chargpt_process_max_fds").items()}
    assert len(limits) == 5
    for name, pid in (("main", server.process.pid), ("worker-0", server.worker().pid)):
        assert limits[name] == psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)[0]
    with contextlib.ExitStack() as stack:
        for _ in range(100):  # more than those that the other tests keep open
            stack.enter_context(sent(server.port, b"GET"))
        wait_until(lambda: server.metric("chargpt_http_connections") >= 100)
    wait_until(lambda: 1 <= server.metric("chargpt_http_connections") < 100)


def test_info_metrics_describe_checkpoint_and_build(server):
    info = web.get(f"{server.url}/info").json()
    labels = {name: dict(labels) for name, labels in server.metrics() if name.endswith("_info")}
    assert labels["chargpt_checkpoint_info"]["checkpoint_sha256"] == info["model"]["checkpoint_sha256"]
    assert labels["chargpt_engine_info"] == {"backend": info["backend"], "dtype": info["dtype"]}
    assert labels["chargpt_build_info"]["torch"] == info["versions"]["torch"]
    assert server.metric("chargpt_checkpoint_validation_loss") == LOSS


def test_idle_time_is_reported_while_idle(server):
    """Without requests in between; bounded by the workers' lifetimes."""
    settled(server)

    def idle():
        return server.metric("chargpt_engine_idle_seconds_total")

    for _ in range(2):
        before = idle()
        wait_until(lambda before=before: idle() > before)
    starts = [server.metric("chargpt_process_start_time_seconds", process=f"worker-{i}") for i in range(2)]
    assert idle() <= sum(time.time() - start for start in starts)


def test_objectives_use_buckets_that_exist(server):
    """Without the bucket an objective's ratio has no value, and its alert never fires."""
    generate(server, max_tokens=2)
    for path in (ROOT / "deploy" / "prometheus").glob("rules.*"):
        used = set(re.findall(r'(\w+_bucket)\{[^}]*le="([^"]+)"', path.read_text(encoding="utf-8")))
        assert used
        for name, bound in used:
            bounds = {value for labels in server.metrics(name) for key, value in labels[1] if key == "le"}
            assert bound in bounds, (path.name, name, bound)
