"""The parts of `make bench`: load generator, statistics, counts; a tiny run of the whole benchmark."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from service.model.checkpoint import Checkpoint
from service.model.config import GPTConfig
from service.model.kv_cache import KVCache
from tests.bench import engine, llama, load, peers, report, roofline, serve, shapes
from tests.bench.command import BenchError, Remote
from tests.helpers import random_model, refusal

TINY = GPTConfig(len(shapes.VOCABULARY), block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=16)
TINY_PLAN = replace(
    serve.QUICK,
    repeats=1,
    rows={"S": (1, 3)},
    clients=(1, 2),
    first_requests=3,
    texts=20,
    path_seconds=0.4,
    streams=(1, 64),
    paced_length=10,
    idle_seconds=0.1,
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
    sizes = {"S": Checkpoint.read(shapes.SHAPES["S"]).load_model("cpu").num_parameters}
    sizes["M"] = shapes.random_model(shapes.SHAPES["M"]).num_parameters
    assert sizes["S"] == pytest.approx(1.1e6, rel=0.02) and 9e6 < sizes["M"] < 10.7e6
    model = shapes.random_model(TINY).double()
    texts = {tuple(model.generate(shapes.prompt(4, row), 60, shapes.sampling(row))) for row in range(8)}
    assert len(texts) == 8 and min(len(set(text)) for text in texts) > 5


# The engine's figures


def test_roofline_counts_the_operations_and_bytes_of_a_decode_step():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    rows, length = 3, 12
    model = random_model(vocab_size=65, block_size=16, n_layer=2, n_head=4, n_kv_head=4, n_embd=16)
    cache = KVCache(model.config, rows, "cpu", torch.float32)
    cache.lengths = [length - 1] * len(cache.lengths)
    # FlopCounterMode does not count fused attention on a CPU.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(rows, 1, dtype=torch.long), cache.decode([True] * rows))
    counts = roofline.count(model.config, rows, length, "float32")
    assert counts["product_operations"] + counts["attention_operations"] == counter.get_total_flops()
    # A step reads only its rows of the embedding.
    assert counts["weight_bytes"] == sum(p.nbytes for p in model.parameters()) - (65 - rows) * 16 * 4
    assert counts["cache_bytes"] == 2 * 2 * 4 * 4 * length * rows * 4  # keys and values, layers, heads, head size
    assert (
        2 * roofline.count(model.config, rows, length, "float32", "float16")["weight_bytes"] == counts["weight_bytes"]
    )
    assert serve.parameters(model.config) == model.num_parameters


@pytest.mark.needs("compiler")
def test_roofline_is_the_slower_of_arithmetic_and_reading():
    config = GPTConfig(65, block_size=256, n_layer=6, n_head=4, n_kv_head=2, n_embd=128)
    roof = roofline.roofline(config, 8, 80, "float32", threads=1, seconds=0.02)
    arithmetic = (roof["product_operations"] + roof["attention_operations"]) / roof["operations_per_second"]
    reading = (roof["weight_bytes"] + roof["cache_bytes"]) / roof["bytes_per_second"]
    assert roof["seconds"] == pytest.approx(max(arithmetic, reading))
    assert roof["seconds"] <= roof["sequential_seconds"] <= arithmetic + reading
    # More than a scalar loop could reach, less than any core.
    assert 2e9 < roof["operations_per_second"] < 1e12


@pytest.mark.needs("compiler")
def test_roofline_without_a_compiler_names_it(monkeypatch):
    monkeypatch.setattr(roofline, "COMPILE", ("no-such-compiler",))
    with pytest.raises(roofline.RooflineError, match="the roofline needs no-such-compiler"):
        roofline.probe.__wrapped__()


def test_engine_run_counts_every_character_and_phase(tiny):
    ours = engine.Ours(tiny, "torch", "float64", slots=4, threads=1, device="cpu")
    run = ours.run(3, 20, 12)
    assert run["characters_per_second"] > 0 and run["decode_characters_per_second"] > 0
    assert {"prefill", "decode", "rest"} <= set(run["phases"]) and min(run["phases"].values()) >= 0
    assert ours.prefill(3, 16) > 0
    assert ours.about() == {"backend": "torch", "dtype": "float64", "weights": "float64", "slots": 4}


def test_texts_under_load_are_all_generated_and_equal_those_alone(tiny):
    ours = engine.Ours(tiny, "torch", "float64", slots=4, threads=1, device="cpu")
    loaded, alone = ours.texts(30, 12, alone=False), ours.texts(30, 12, alone=True)
    assert len(loaded) == 30 and len(set(loaded)) > 20
    assert serve.differing(loaded, alone) == 0
    assert serve.differing(loaded, [*alone[:-2], "x", "y"]) == 2
    lengths = [request.max_tokens for request in engine.random_requests(30, 12)]
    assert min(lengths) >= 1 and max(lengths) <= 12 and len(set(lengths)) > 5


def test_random_load_submits_every_request_once_and_reaches_a_full_queue(tiny):
    ours = engine.Ours(tiny, "torch", "float64", slots=4, threads=1, device="cpu")
    requests, running, ended = engine.random_requests(60, 6), [], []
    loaded = ours.new_engine(60)
    for _ in engine.at_random(loaded, requests, 4):
        running.append(len(loaded.scheduler))
        ended += [delta.id for delta in loaded.step() if delta.finish_reason is not None]
    assert sorted(ended) == list(range(60)) and ended != sorted(ended)
    assert min(running) < 4 < max(running)


def test_slow_variants_run_once_and_each_familys_best_stands_for_it():
    def system(family: str, *values: float) -> dict[str, object]:
        return {"family": family, "rows": {"1": [{"characters_per_second": v} for v in values]}}

    systems = {"a": system("x", 10.0), "b": system("x", 7.0), "c": system("x", 5.0), "d": system("y", 1.0)}
    assert serve.contenders(systems, [1]) == ["a", "b", "d"]
    assert report.best_rates(systems, "x", "1") == [10.0] and report.best_rates(systems, "z", "1") == []


# llama.cpp and the servers


def test_batched_bench_output_becomes_rates(tmp_path):
    program = tmp_path / "llama-batched-bench"
    line = {"pp": 16, "tg": 128, "pl": 8, "t_pp": 0.5, "t_tg": 2.0}
    program.write_text(f"#!/bin/sh\necho loading\necho '{json.dumps(line)}'\n")
    program.chmod(0o755)
    variant = llama.Variant("BF16", "f16", tmp_path / "m.gguf")
    command = llama.batched_bench_command({"llama-batched-bench": program}, variant, [8], 128, 2)
    assert command[command.index("-c") + 1] == str(8 * 256)  # a block holds 16 + 128
    assert llama.batched_bench(command) == {8: {"decode_characters_per_second": 512.0, "characters_per_second": 409.6}}
    program.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    with pytest.raises(llama.LlamaError, match="ended with status 3:\nbroken"):
        llama.batched_bench(command)


def test_every_dtype_competes_with_every_cache_and_the_lossy_one_with_none():
    variants = llama.variants({dtype: Path(dtype) for dtype in (*llama.DTYPES, llama.LOSSY)})
    assert [v.name for v in variants] == [
        "F32, f16 cache", "F32, f32 cache", "F16, f16 cache", "F16, f32 cache", "BF16, f16 cache", "BF16, f32 cache",
        "Q8_0, f16 cache",
    ]  # fmt: skip
    assert llama.default_folder({"CHARGPT_LLAMA_CPP": "/x"}) == Path("/x")


@pytest.mark.parametrize(
    ("family", "whole", "streamed"),
    [
        ("ours", '{"choices": [{"text": "ab"}]}', 'data: {"text": "a"}\n\ndata: {"text": "b"}\n\ndata: [DONE]\n\n'),
        ("llama", '{"content": "ab"}', 'data: {"content": "a"}\n\ndata: {"content": "b", "stop": true}\n\n'),
        (
            "transformers",
            '{"choices": [{"text": "ab"}]}',
            'data: {"choices": [{"text": "ab"}]}\n\ndata: {"choices": [{"text": ""}]}\n\n',
        ),
        ("stock", '{"text": "ab"}', '{"text": "a"}\n{"text": "b"}\n'),
    ],
)
def test_answers_of_each_server_are_read(family, whole, streamed):
    system = peers.System(family, "x", ("server", "model"), "/health")
    for is_streamed, body in ((False, whole), (True, streamed)):
        answer = (
            chunked(body.encode())
            if is_streamed
            else (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body.encode()))
        )
        request = system.request("pq", 2, is_streamed, 7)
        with FixedServer(answer) as server:
            outcome = load.run(server.port, load.at_once(request, 2), connections=1, marker=system.marker, keep=True)
        assert [system.text(reply, is_streamed) for reply in outcome.replies] == ["ab", "ab"]
        assert (outcome.num_events > 0) == is_streamed
        assert b'"pq"' in request


def test_announced_close_is_followed_by_a_new_connection():
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
    with FixedServer(answer, closing=True) as server:
        outcome = load.run(server.port, load.at_once(load.post("/", {}), 5), connections=2)
    assert len(outcome.ended) == 5


def test_prompts_are_real_text_and_differ():
    texts = [shapes.prompt_text(16, seed) for seed in range(128)]
    assert len(set(texts)) == 128 and all(text in shapes.TEXT for text in texts)
    assert set(shapes.TEXT) <= set(shapes.VOCABULARY)
    assert "".join(shapes.VOCABULARY[id] for id in shapes.prompt(16, 5)) == texts[5]
    assert "".join(Checkpoint.read(shapes.BUNDLED).tokenizer.characters) == shapes.VOCABULARY


def test_remote_keeps_its_object_and_reports_failures():
    with Remote(list, [1]) as remote:
        remote.call("append", 2)
        assert remote.call("index", 2) == 1
        with pytest.raises(BenchError, match="ValueError: 3 is not in list"):
            remote.call("index", 3)
        assert remote.call("index", 1) == 0  # still there
    with pytest.raises(BenchError, match="ValueError: invalid literal"):
        Remote(int, "x")


# The whole benchmark, tiny


@pytest.mark.tools
@pytest.mark.timeout(900)
def test_tiny_run_yields_every_figure_and_table(tmp_path, capsys):
    bench = serve.Bench(TINY_PLAN, {"S": TINY}, 1, tmp_path / "out")
    bench.run(["path", "mixed", "prefill", "texts", "idle"])
    assert bench.results["errors"] == {}
    path = bench.results["path"]
    for name in ("ours", "plain", "stock"):
        assert len(path[name]["requests"]) == TINY_PLAN.repeats and path[name]["requests"][0]["per_second"] > 0
        for run in path[name]["streams"]["64"]:
            assert run["characters_per_event"] == pytest.approx(1) or name == "ours"
    assert set(bench.results["texts"]["changed"].values()) == {0}
    saved = json.loads((tmp_path / "out" / "serve.json").read_text())
    assert saved["path"] == path and saved["settings"]["plan"]["repeats"] == TINY_PLAN.repeats
    text = report.markdown(saved)
    assert "over HTTP without a model" in text and "32 prompts of a whole window" in text

    later = serve.Bench(TINY_PLAN, {"S": TINY}, 1, tmp_path / "out")
    later.keep(["idle"])
    assert later.results["path"] == path and "idle" not in later.results
    assert later.results["kept"]["path"] == {"revision": saved["revision"], "date": saved["date"]}
    other = serve.Bench(TINY_PLAN, {"S": TINY}, 2, tmp_path / "out")
    with pytest.raises(serve.BenchError, match="has different settings"):
        other.keep(["idle"])


def test_tables_are_put_between_their_markers(tmp_path):
    file = tmp_path / "README.md"
    file.write_text("before\n<!-- bench -->\nold\n<!-- /bench -->\nafter\n")
    for _ in range(2):  # idempotent
        report.put("all\n", file, "bench")
        assert file.read_text() == "before\n<!-- bench -->\nall\n<!-- /bench -->\nafter\n"
    file.write_text("no markers\n")
    with pytest.raises(ValueError, match="must have one line <!-- bench -->"):
        report.put("all\n", file, "bench")


def test_failed_part_reports_its_reason_and_the_others_continue(tmp_path, monkeypatch):
    bench = serve.Bench(TINY_PLAN, {"S": TINY}, 1, tmp_path / "out")

    def fail() -> None:
        raise load.LoadError("x was answered 500")

    monkeypatch.setattr(bench, "path", fail)
    bench.run(["path", "prefill"])
    assert bench.results["errors"] == {"path": "LoadError: x was answered 500"}
    text = (tmp_path / "out" / "serve.md").read_text()
    assert "failed: path, LoadError: x was answered 500" in text
    assert "torch's forward" in text


def test_stub_engine_emits_one_id_per_step_and_obeys_its_limits(tiny):
    from service.engine.runner import open_runner
    from service.engine.scheduler import QueueFullError
    from service.model.params import SamplingParams
    from service.wire import Submit
    from tests.bench.stub import StubEngine

    stub = StubEngine(open_runner(Checkpoint.read(tiny), slots=1), max_waiting=1)
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
        (["--only", "gpu"], "unknown part 'gpu'; allowed: engine, prefill, http, mixed, texts, path, idle"),
        (["--threads", "0"], "--threads: must be in [1, 1024], got 0"),
    ],
)
def test_invalid_argument_is_named(arguments, message):
    assert message in refusal(serve.main, arguments)
