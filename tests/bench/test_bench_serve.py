"""The parts of `make bench`: load generator, statistics, counts; a tiny run of the whole benchmark."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import random_model, refusal

from bench import engine, load, report, serve, shapes
from service.model.checkpoint import Checkpoint
from service.model.config import GPTConfig
from service.model.kv_cache import KVCache

TINY = GPTConfig(len(shapes.VOCABULARY), block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=16)
TINY_PLAN = replace(
    serve.QUICK,
    repeats=1,
    rows={"S": (1, 3)},
    path_seconds=0.4,
    streams=(1, 64),
    paced_length=10,
    requests=24,
    longest=32,
    whole_repeats=1,
    metrics_repeats=1,
    idle_seconds=0.1,
    queue_steps=5,
)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return shapes.save_random(TINY, tmp_path_factory.mktemp("shapes") / "S")


# The load generator


def chunked(*chunks: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


class FixedServer:
    """Sends the same response to every request, `cut` bytes at a time; `closing`: then closes the connection."""

    def __init__(self, answer: bytes, cut: int = 1 << 20, closing: bool = False):
        self.answer, self.cut, self.closing = answer, cut, closing
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.requests: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            while request := sock.recv(1 << 16):
                self.requests.append(request)
                for start in range(0, len(self.answer), self.cut):
                    sock.sendall(self.answer[start : start + self.cut])
                if self.closing:
                    return

    def __enter__(self) -> FixedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()


CHUNKS = [b'data: {"index":0,"text":"a"}\n\n', b'data: {"index":0,"text":"0\\r"}\n\n', b"data: [DONE]\n\n"]


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 7, 11, 1 << 20])
def test_events_are_counted_for_any_fragmentation(cut):
    request = load.post("/generate", {"prompt": "a"})
    with FixedServer(chunked(*CHUNKS), cut) as server:
        outcome = load.run(server.port, load.at_once(request, 6, "a"), connections=2, keep=True)
        assert server.requests == [request] * 6
    assert len(outcome.ended) == len(outcome.replies) == 6
    assert outcome.num_events == 12
    for reply in outcome.replies:
        assert [chunk for _, chunk in load.dechunked(reply.parts)] == CHUNKS
        assert reply.sent_at < reply.first_at <= reply.ended_at and reply.asked == "a"
        assert reply.num_bytes == len(chunked(*CHUNKS))


@pytest.mark.parametrize("cut", [1, 9, 1 << 20])
def test_response_ends_at_its_content_length(cut):
    with FixedServer(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello", cut) as server:
        outcome = load.run(server.port, load.at_once(load.post("/", {}), 3), connections=1, keep=True)
    assert [b"".join(data for _, data in reply.parts) for reply in outcome.ended] == [b"hello"] * 3


def test_requests_are_sent_when_due_and_dropped_after_the_end():
    with FixedServer(chunked(*CHUNKS)) as server:
        requests = [(0.05 * i, load.post("/", {}), i) for i in range(3)] + [(60.0, load.post("/", {}), 3)]
        outcome = load.run(server.port, requests, connections=4, seconds=0.3)
    assert [reply.asked for reply in outcome.replies] == [0, 1, 2]
    assert all(reply.sent_at >= outcome.started_at + 0.05 * reply.asked for reply in outcome.replies)


@pytest.mark.parametrize(
    ("answer", "closing", "message"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n", False, "x was answered b'HTTP/1.1 429"),
        (chunked(*CHUNKS)[:-5], True, r"closed a connection after \d+ bytes of x"),
    ],
)
def test_invalid_responses_raise_instead_of_counting(answer, closing, message):
    with FixedServer(answer, closing=closing) as server:
        with pytest.raises(load.LoadError, match=message):
            load.run(server.port, load.at_once(load.post("/", {}), 1, "x"), connections=1)


# Statistics and workload


def test_percentiles_equal_numpys():
    values = np.random.default_rng(0).exponential(size=237)
    expected = np.percentile(values, [50, 95, 99], method="inverted_cdf")
    assert list(serve.percentiles(values.tolist()).values()) == pytest.approx(expected.tolist())
    assert serve.percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}


def test_figures_are_medians_with_range_and_ratios_are_per_turn():
    assert report.figure([0.003, 0.001, 0.010], "{:.1f}", 1e3) == "3.0 (1.0–10.0)"
    assert report.figure([1234.4, 1234.0]) == "1,234"
    assert report.figure([]) == "–"
    assert report.ratios([2.0, 9.0, 8.0], [1.0, 3.0]) == [2.0, 3.0, 8 / 3]


def test_mixed_work_is_deterministic_and_bounded():
    work = shapes.mixed_work(300, longest=160, arriving=0.5)
    assert work == shapes.mixed_work(300, longest=160, arriving=0.5)
    lengths = [item.max_tokens for item in work]
    assert min(lengths) >= 10 and max(lengths) <= 160 and len(set(lengths)) > 50
    assert {len(item.prompt) for item in work} <= set(range(4, 65))
    moments = [item.at for item in work]
    assert moments == sorted(moments) and 0 <= moments[0] and moments[-1] <= 0.5


def test_shapes_have_their_nominal_size_and_varied_texts():
    sizes = {name: shapes.random_model(config).num_parameters for name, config in shapes.SHAPES.items()}
    assert sizes["S"] == pytest.approx(1.1e6, rel=0.02) and 9e6 < sizes["M"] < 10.7e6
    model = shapes.random_model(TINY).double()
    texts = {tuple(model.generate(shapes.prompt(4, row), 60, shapes.sampling(row))) for row in range(8)}
    assert len(texts) == 8 and min(len(set(text)) for text in texts) > 5


def test_interval_of_the_median_uses_tabulated_order_statistics():
    """Conover, table A3: with 10 values the 2nd and 9th, with 20 the 6th and 15th enclose it with ≥ 95 % confidence."""
    assert report.interval([7.0]) == (7.0, 7.0)
    assert report.interval([3, 1, 2]) == (1, 3)
    assert report.interval(list(range(1, 11))) == (2, 9)
    assert report.interval(list(range(20, 0, -1))) == (6, 15)


# The engine's figures


def test_roofline_counts_the_operations_and_bytes_of_a_decode_step():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    rows, length = 3, 12
    model = random_model(vocab_size=65, block_size=16, n_layer=2, n_head=4, n_kv_head=4, n_embd=16)
    cache = KVCache(model.config, rows, "cpu", torch.float32)
    cache.lengths = [length - 1] * (rows + 1)
    # FlopCounterMode does not count fused attention on a CPU.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(rows, 1, dtype=torch.long), cache.decode(rows))
    roof = engine.roofline(model, rows, length, "cpu", seconds=0.01)
    assert roof["operations"] == counter.get_total_flops()
    # A step reads only its rows of the embedding.
    assert roof["weight_bytes"] == sum(p.nbytes for p in model.parameters()) - (65 - rows) * 16 * 4
    assert roof["cache_bytes"] == (cache.keys.nbytes + cache.values.nbytes) / (rows + 1) * rows * length / 16
    assert roof["seconds"] == max(roof["memory_seconds"], roof["product_seconds"]) > 0


def test_phases_exclude_nested_phases(monkeypatch):
    moments = iter([0.0, 1.0, 3.0, 10.0, 14.0, 20.0])
    monkeypatch.setattr(engine.time, "perf_counter", lambda: next(moments))
    timer = engine.Phases(lambda: None)
    inner = timer.timed("inner", lambda: None)
    with timer.phase("outer"):  # 0 to 20
        inner()  # 1 to 3
        inner()  # 10 to 14
    assert timer.seconds == {"inner": 6.0, "outer": 14.0}


def test_shape_figures_compare_with_transformers_and_cover_every_phase(tiny):
    figures = engine.measure_shape(tiny, [1, 3], length=20, threads=1, repeats=2, device="cpu")
    for rows, run in zip([1, 3], figures["rows"], strict=True):
        assert run["rows"] == rows and len(run["ratio"]) == 2
        for rate, peer, ratio in zip(run["characters_per_second"], run["peer"], run["ratio"], strict=True):
            assert ratio == rate / peer > 0
        assert set(run["phases"]) >= {"prefill", "decode", "sampling", "schedule", "rest", "all"}
        parts = dict(run["phases"])
        assert min(parts.values()) > 0 and parts.pop("all") == pytest.approx(sum(parts.values()))
    json.dumps(figures)


def test_memory_matches_the_formula(tiny):
    figures = engine.measure_memory(tiny, 5, threads=1, device="cpu")
    assert figures["cache_bytes"] == figures["formula_bytes"] == figures["bytes_per_slot"] * 6
    assert figures["weight_bytes"] * 2 == figures["exact_weight_bytes"]


def test_growth_is_measured_at_the_given_lengths_and_queues(tiny):
    lengths = engine.measure_lengths(tiny, 2, [16, 160], threads=1, device="cpu")
    assert lengths["lengths"] == [16, 160] and min(lengths["step_seconds"]) > 0
    queue = engine.measure_queue(tiny, 2, [1, 50], steps=4, repeats=3, threads=1, device="cpu")
    assert queue["queued"] == [1, 50] and [len(values) for values in queue["step_seconds"]] == [3, 3]


# The whole benchmark, tiny


@pytest.mark.tools
@pytest.mark.timeout(900)
def test_tiny_run_yields_every_figure_table_and_picture(tmp_path, monkeypatch, capsys):
    bench = serve.Bench(TINY_PLAN, {"S": TINY}, 1, tmp_path / "out")
    bench.run(["path", "whole", "metrics"])
    assert bench.results["errors"] == {}
    assert [len(runs) for runs in bench.results["metrics"].values()] == [1, 1]
    assert all(0 < run["cpu_seconds_per_character"] < 1 for runs in bench.results["metrics"].values() for run in runs)
    path, whole = bench.results["path"], bench.results["whole"]
    for name in ("ours", "plain", "stock"):
        assert len(path[name]["requests"]) == TINY_PLAN.repeats and path[name]["requests"][0]["per_second"] > 0
        for run in path[name]["streams"]["64"]:
            assert (
                run["characters_per_event"] == pytest.approx(1) if name != "ours" else run["characters_per_event"] >= 1
            )
    work = shapes.mixed_work(24, longest=32, arriving=0.5)
    assert whole["characters"] == sum(item.max_tokens for item in work)
    for name in ("ours", "stock"):
        assert len(whole[name]["runs"]) == 1 and whole[name]["pss_bytes"] > 50e6

    saved = json.loads((tmp_path / "out" / "serve.json").read_text())
    assert saved["path"] == path and saved["settings"]["plan"]["repeats"] == TINY_PLAN.repeats
    text = report.markdown(saved)
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    assert {len(row) for row in rows} == {7}
    assert any(row[0].startswith(" whole service, S, 64 streams") for row in rows)
    assert (tmp_path / "out" / "serve.png").read_bytes().startswith(b"\x89PNG")

    later = serve.Bench(TINY_PLAN, {"S": TINY}, 1, tmp_path / "out")
    later.keep(["whole"])
    assert later.results["path"] == path and "whole" not in later.results
    assert later.results["kept"]["path"] == {"revision": saved["revision"], "date": saved["date"]}
    other = serve.Bench(TINY_PLAN, {"S": TINY}, 2, tmp_path / "out")
    with pytest.raises(serve.BenchError, match="has different settings"):
        other.keep(["whole"])

    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- bench -->\nold\n<!-- /bench -->\nafter\n")
    for _ in range(2):  # idempotent
        report.write_table(saved, readme)
        assert readme.read_text() == f"before\n<!-- bench -->\n{text}<!-- /bench -->\nafter\n"
    readme.write_text("no markers\n")
    monkeypatch.setattr(sys, "argv", ["serve", "--out", str(tmp_path / "out"), "--table", str(readme)])
    assert serve.main() == 1
    assert "must have one line <!-- bench -->" in capsys.readouterr().err


def test_failed_part_reports_its_reason_and_the_others_continue(tmp_path, monkeypatch):
    bench = serve.Bench(TINY_PLAN, {"S": TINY}, 1, tmp_path / "out")

    def fail() -> None:
        raise load.LoadError("x was answered 500")

    monkeypatch.setattr(bench, "path", fail)
    bench.run(["path", "growth"])
    assert bench.results["errors"] == {"path": "LoadError: x was answered 500"}
    text = (tmp_path / "out" / "serve.md").read_text()
    assert "failed: path, LoadError: x was answered 500" in text
    assert re.search(r"step with 1,000 waiting, ms \| [0-9.]+", text)


def test_stub_engine_emits_one_id_per_step_and_obeys_its_limits(tiny):
    from bench.stub import StubEngine
    from service.engine.scheduler import QueueFullError
    from service.model.params import SamplingParams
    from service.wire import Submit

    stub = StubEngine(Checkpoint.read(tiny).load_model("cpu"), max_running=1, max_waiting=1)
    for id in (7, 8):
        stub.submit(Submit(id, [0], 3, SamplingParams()))
    with pytest.raises(QueueFullError):
        stub.submit(Submit(9, [0], 3, SamplingParams()))
    stub.abort(8)
    given = [(delta.id, len(delta.ids), delta.finish_reason) for _ in range(3) for delta in stub.step()]
    assert given == [
        (8, 0, "abort"),
        (7, 1, None),
        (7, 1, None),
        (7, 1, "length"),
    ]
    assert not stub.has_work


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "gpu"], "unknown part 'gpu'; allowed: engine, path, whole, metrics, growth"),
        (["--threads", "0"], "--threads: must be in [1, 1024], got 0"),
    ],
)
def test_invalid_argument_is_named(arguments, message):
    assert message in refusal(serve.main, arguments)
