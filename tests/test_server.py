"""The service over real sockets, with a small random model."""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from litserve.connector import check_cuda_with_nvidia_smi

from service.engine import native
from service.engine.backends import resolve, slots_that_fit
from service.http.routes.info import published
from service.placement import (
    BackendError,
    check_devices,
    choose_accelerator,
    choose_backend,
    choose_slots,
    free_gpu_bytes,
    torch_build,
)
from service.settings import Settings
from tests.helpers import (
    ENDLESS,
    PATIENCE,
    VOCABULARY,
    RunningServer,
    exact,
    http_processes,
    refusal,
    serving,
    timed_out_stream,
    wait_until,
    web,
)
from tests.toolbox.http import answer, pieces, post, sent, text_of
from tests.toolbox.launch import is_worker

# -- generation --


def test_prompts_may_be_token_ids_and_an_empty_one_starts_a_new_text(server, checkpoint):
    ids = checkpoint.tokenizer.encode("Hello")
    for prompt, text in ((ids, "Hello"), ([ids], "Hello"), ("", "\n")):
        answer = web.post(f"{server.url}/v1/completions", json={"prompt": prompt, "max_tokens": 5, "seed": 1}).json()
        assert answer["choices"][0]["text"] == exact(checkpoint, text, 5, seed=1)
    assert answer["usage"]["prompt_tokens"] == 0


# -- validation --

CHOICE = {"choice": ["a"]}
INVALID = {  # by the parameter; beside every documented bound, which tests/http/test_openapi.py goes to and beyond
    None: [b"", b"{", b"[]", b'{"prompt": "\xff"}', b'{"prompt": ' + b"[" * 50_000, b'{"temperature": NaN}'],
    "prompt": [{"prompt": []}, {"prompt": ["a", 5]}, {"prompt": [[-1]]}],
    "temperature": [b'{"prompt": "a", "temperature": 1e999}'],
    "stream_options.include_usage": [{"stream_options": {"include_usage": 1}}],
    "seed": [{"seed": [1, 2]}],
    "n": [{"prompt": ["a"] * 15, "n": 9}],
    "best_of": [{"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}],
    "logprobs": [{"suffix": "b", "logprobs": 1}],
    "suffix": [{"suffix": "\u6f22"}],
    "min_tokens": [{"min_tokens": 17}],
    "logit_bias": [{"logit_bias": {name: 1}} for name in ("ab", "\u6f22", "9" * 5000)],
    "regex": [{"regex": it} for it in ("a(b", "a{17}", "\u6f22")]
    + [{"regex": "a"} | it for it in ({"stop": "b"}, CHOICE)],
    "choice": [CHOICE | {"stop_regex": "b"}, {"choice": ["\u6f22"]}],
    "allowed_characters": [{"allowed_characters": "a\u6f22"}],
    "stop_regex": [{"stop_regex": "b*"}],
    "unknown_characters": [{"unknown_characters": "x"}],
}


@pytest.mark.parametrize("param", INVALID)
def test_invalid_input_is_rejected_and_the_parameter_named(server, param):
    for body in INVALID[param]:
        content = body if isinstance(body, bytes) else json.dumps({"prompt": "a"} | body).encode()
        response = web.post(f"{server.url}/v1/completions", content=content)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), (body, error)
        assert error.keys() == {"message", "type", "param", "code"} and error["message"]
        assert error["type"] == "invalid_request_error" and response.headers["x-request-id"]


CONTENT_TYPES = [  # a header, whether a page of another origin sends it, the status
    ("application/json", True, 200), ("Application/JSON; charset=utf-8; x=1", False, 200), (None, False, 200),
    ("application/x-www-form-urlencoded", False, 200), ("application/x-www-form-urlencoded", True, 415),
    (None, True, 415), ("text/plain", False, 415), ("text/plain;charset=UTF-8", True, 415),
    ("multipart/form-data; boundary=x", False, 415),
]  # fmt: skip


@pytest.mark.parametrize(("given", "page", "status"), CONTENT_TYPES)
def test_content_types(server, given, page, status):
    """A browser sends the simple types, but not application/json, to another origin without asking."""
    headers = {} if given is None else {"Content-Type": given}
    headers |= {"Origin": "https://example.org"} if page else {}
    for path, body in (("/generate", b'{"prompt": "a", "max_tokens": 1}'), ("/tokenize", b'{"prompt": "a"}')):
        for content in (body, body + b" " * 70_000):
            response = web.post(server.url + path, content=content, headers=headers)
            assert response.status_code == status, response.text
            if status == 415:
                error = response.json()["error"]
                assert error["code"] == "unsupported_content_type"
                assert "must be application/json" in error["message"] and (given or "''") in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        rb'{"prompt": "ab\ud800"}', rb'{"prompt": "\ud83d\ude42\uDE42"}', rb'{"prompt": "\\ud83d\\\ud83dx"}',
        b'{"user": "\xed\xa0\x80"}',
    ],
)  # fmt: skip
def test_a_lone_surrogate_is_no_character(server, body):
    """It cannot be encoded in an answer."""
    for content in (body, b'{"stop": ["' + b"x" * 200_000 + b'"], ' + body[1:]):
        error = web.post(f"{server.url}/generate", content=content).json()["error"]
        assert (error["param"], error["code"]) == (None, "invalid_json")
        assert error["message"].startswith("body is not valid JSON: ")


def test_info_has_no_paths_of_the_trainer():
    training = {
        "data": {"name": "a.txt", "sha256": "ab"},
        "recipe": {"data": ["/home/me/a.txt"], "init_from": "/home/me/b", "teachers": ["/home/me/c"], "steps": 5},
        "init_from": {"path": "/home/me/b", "weights_sha256": "cd", "init_from": {"path": "/home/me/d", "step": 1}},
        "teachers": [{"path": "/home/me/c", "weights_sha256": "ef"}],
        "command": "python -m training train --data /home/me/a.txt",
    }
    assert published(training) == {
        "data": {"name": "a.txt", "sha256": "ab"}, "recipe": {"steps": 5},
        "init_from": {"weights_sha256": "cd", "init_from": {"step": 1}}, "teachers": [{"weights_sha256": "ef"}],
    }  # fmt: skip
    assert published({}) == {} and published({"recipe": None}) == {"recipe": None}
    assert "/home/me/a.txt" in training["recipe"]["data"]


def test_unknown_routes_and_methods_are_rejected(server):
    for method, path, status, allowed in (
        ("GET", "/nothing", 404, {""}), ("PUT", "/generate", 405, {"POST"}),
        ("POST", "/readyz", 405, {"GET", "HEAD"}), ("GET", "/tokenize", 405, {"POST"}),
    ):  # fmt: skip
        response = web.request(method, server.url + path)
        assert response.status_code == status and path in response.json()["error"]["message"]
        assert {*response.headers.get("allow", "").split(", ")} == allowed


def test_valid_request_id_is_echoed_and_an_invalid_one_replaced(server):
    response = web.get(f"{server.url}/livez", headers={"X-Request-Id": "my-id.1"})
    assert response.headers["x-request-id"] == "my-id.1"
    response = web.get(f"{server.url}/livez", headers={"X-Request-Id": 'no spaces or "quotes"'})
    assert len(response.headers["x-request-id"]) == 32


# -- probes, information, metrics --


def test_info_and_models(server, checkpoint):
    info = web.get(f"{server.url}/info").json()
    assert info["model"]["checkpoint_sha256"] == checkpoint.digest
    assert info["model"]["vocabulary"] == "".join(VOCABULARY)
    assert (info["backend"], info["dtype"]) == resolve("auto", "auto", "cpu")
    assert info["limits"]["max_score_texts"] == 10_000
    assert [model["id"] for model in web.get(f"{server.url}/v1/models").json()["data"]] == ["chargpt"]
    assert web.get(f"{server.url}/livez").status_code == 200


def test_slow_reader_does_not_delay_other_requests(server, checkpoint):
    body = {"prompt": "a", "max_tokens": 6_000, "stream": True, "seed": 1, "stream_interval": 0}
    with sent(server.port, post("/generate", body, Connection="close"), receive_bytes=4096) as slow:
        for _ in range(5):  # while the slow client reads nothing
            other = web.post(f"{server.url}/generate", json={"prompt": "b", "max_tokens": 200, "seed": 2}).json()
            assert other["choices"][0]["text"][:20] == exact(checkpoint, "b", 20, seed=2)
        server.wait_until_metric("chargpt_num_requests_running", 0)
        with answer(slow) as response:  # raises if the chunked encoding is incomplete
            text = text_of(pieces(response.read().decode().split("\n")))
    assert len(text) == 6_000
    assert text[:20] == exact(checkpoint, "a", 20, seed=1)


def test_reader_that_stopped_is_dropped_at_its_deadline(server):
    timeouts = server.metric("chargpt_request_success_total", finished_reason="timeout")
    for attempt, seconds in enumerate((1, 10, 100), 1):  # a slow machine may need more until the stream begins
        body = {"prompt": "a", "max_tokens": 1_000_000, "stream": True, "timeout_seconds": seconds, "logprobs": 58}
        request = post("/generate", body | {"stream_interval": 0})
        with sent(server.port, request, receive_bytes=4096) as reader, answer(reader) as response:
            server.wait_until_metric("chargpt_http_requests_in_progress", 1)  # only this scrape
            server.wait_until_metric("chargpt_num_requests_running", 0)
            assert server.metric("chargpt_request_success_total", finished_reason="timeout") == timeouts + attempt
            if response.status == 200:
                break
            assert response.status == 504
    else:
        pytest.fail("no stream began")
    server.wait_until_all_ended()


def test_idle_server_seldom_wakes(server):
    """An event loop that polls wakes thousands of times a second."""
    server.wait_until_metric("chargpt_num_requests_running", 0)
    processes = server.processes()

    def wakes():
        return sum(process.num_ctx_switches().voluntary for process in processes)

    fewest = []
    for _ in range(5):  # what else the tests have left to do may wake it
        before, since = wakes(), time.monotonic()
        time.sleep(0.5)
        fewest.append((wakes() - before) / (time.monotonic() - since))
        if fewest[-1] < 100:
            return
    pytest.fail(f"wakes per second: {fewest}")


# -- overload, timeouts, shutdown --


def test_full_queue_returns_429(checkpoint):
    with serving(checkpoint.path, max_running_requests=1, max_queued_requests=1) as server:
        short = {"prompt": "a", "max_tokens": 5}
        long = {"prompt": "a", "max_tokens": ENDLESS, "stream": True}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            with web.stream("POST", f"{server.url}/generate", json=long) as running:
                assert running.status_code == 200
                server.wait_until_metric("chargpt_num_requests_running", 1)
                waiting = pool.submit(web.post, f"{server.url}/generate", json=short)
                server.wait_until_metric("chargpt_num_requests_waiting", 1)
                response = web.post(f"{server.url}/generate", json=short)
                assert response.status_code == 429
                assert 1 <= int(response.headers["retry-after"]) <= 60
                assert response.json()["error"]["type"] == "rate_limit_error"
                # From now on before the body is read.
                assert web.post(f"{server.url}/generate", content=b"not JSON").status_code == 429
                assert server.metric("chargpt_num_requests_running") == 1
                assert server.metric("chargpt_num_requests_waiting") == 1
            assert waiting.result().status_code == 200
            assert len(waiting.result().json()["choices"][0]["text"]) == 5
        assert server.metric("chargpt_admission_rejections_total", reason="queue_full") == 2
        assert web.post(f"{server.url}/generate", content=b"not JSON").status_code == 400
        assert server.stop() == 0


def test_request_timeout_returns_504(checkpoint):
    with serving(checkpoint.path, request_timeout_seconds=0.3) as server:
        long = {"prompt": "a", "max_tokens": ENDLESS}
        response = web.post(f"{server.url}/generate", json=long)
        assert response.status_code == 504
        limit = "the server's --request-timeout-seconds"
        assert response.json()["error"]["message"] == f"the request took longer than 0.3 s, {limit}"
        late = web.post(f"{server.url}/generate", json=long | {"timeout_seconds": 9}).json()
        assert limit in late["error"]["message"]
        own = web.post(f"{server.url}/generate", json=long | {"timeout_seconds": 0.1}).json()["error"]["message"]
        assert own == "the request took longer than 0.1 s, its timeout_seconds"
        *_, last = pieces(timed_out_stream(server, "/generate", long, [9] * 100))
        assert last["error"]["code"] == "timeout" and limit in last["error"]["message"]
        server.wait_until_metric("chargpt_num_requests_running", 0)
        assert server.metric("chargpt_request_success_total", finished_reason="timeout") >= 4
        # Right after SIGCONT the kernel may deliver a signal to a thread that does not wake the main thread.
        main = psutil.Process(server.process.pid)
        main.suspend()
        wait_until(lambda: main.status() == psutil.STATUS_STOPPED)
        main.resume()
        assert server.stop() == 0


def test_a_signal_drains_running_requests_and_refuses_new_ones(slow):
    """Streams, whole answers, and an infill, whose second stage, which ranks the candidates, begins meanwhile. One more
    stream, until it has been looked at."""
    with serving(slow.path, shutdown_delay_seconds=0.5) as server:

        def ask(**fields):
            body = {"prompt": "a", "max_tokens": 600, "stream": False} | fields
            response = web.post(f"{server.url}/generate", json=body)
            return text_of(pieces(response)) if body["stream"] else response.json()["choices"][0]["text"]

        endless = {"prompt": "a", "max_tokens": ENDLESS, "stream": True}
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            with web.stream("POST", f"{server.url}/generate", json=endless) as stream:
                assert stream.status_code == 200
                running = [pool.submit(ask, seed=i, stream=i % 2 == 0) for i in range(4)]
                infill = pool.submit(ask, suffix=" b", best_of=2)
                server.wait_until_metric("chargpt_num_requests_running", 7)
                os.killpg(server.process.pid, signal.SIGINT)  # to all, as a terminal does
                wait_until(lambda: web.get(f"{server.url}/readyz").json() == {"status": "draining"})
                refused = web.post(f"{server.url}/generate", json={"prompt": "a"})
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert refused.json()["error"]["code"] == "shutting_down"
                assert server.metric("chargpt_admission_rejections_total", reason="shutting_down") == 1
                assert web.get(f"{server.url}/readyz").status_code == 503
                assert web.get(f"{server.url}/livez").status_code == 200
            for i, text in enumerate(running):
                assert len(text.result()) == 600
                assert text.result()[:20] == exact(slow, "a", 20, seed=i)
            assert infill.result()
        assert server.process.wait(PATIENCE) == 0
        server.wait_until_gone()
        assert "Traceback" not in server.output()


def test_requests_are_accepted_during_the_shutdown_delay(checkpoint):
    """A load balancer that has not seen /readyz yet still sends; answers close their connections."""
    with serving(checkpoint.path, shutdown_delay_seconds=ENDLESS // 100_000) as server:
        server.process.send_signal(signal.SIGTERM)
        probe = wait_until(lambda: (answer := web.get(f"{server.url}/readyz")).status_code == 503 and answer)
        assert probe.json() == {"status": "shutting down"}
        body = {"prompt": "a", "max_tokens": 5, "seed": 1}
        with httpx.Client() as client:  # which would keep its connection
            answers = [client.post(f"{server.url}/generate", json=body) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert {answer.headers["connection"] for answer in (probe, *answers)} == {"close"}
        assert answers[0].json()["choices"][0]["text"] == exact(checkpoint, "a", 5, seed=1)
        assert server.stop() == 0  # the second signal ends the delay


# -- startup --


def test_a_checkpoint_that_cannot_be_served_is_reported(tmp_path):
    problem = refusal("--checkpoint", tmp_path / "nothing")
    assert problem == f"python -m service: no checkpoint at {tmp_path / 'nothing'}: not a folder\n"


@pytest.fixture
def one_gpu(tmp_path, monkeypatch):
    """An nvidia-smi that lists one."""
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check_cuda_with_nvidia_smi.cache_clear()
    yield
    check_cuda_with_nvidia_smi.cache_clear()


BUILT, NAMED = "is built without CUDA: serving on the CPU", "CUDA_VISIBLE_DEVICES=7 names no GPU"


@pytest.mark.parametrize(
    ("built_for", "visible", "chosen", "warning"),
    [("13.0", None, "cuda", None), (None, None, "cpu", BUILT), ("13.0", "", "cpu", None), ("13.0", " ", "cpu", None),
     ("13.0", "0", "cuda", None), ("13.0", "7", "cpu", NAMED), ("13.0", "GPU-1", "cuda", None),
     ("13.0", "MIG-2", "cuda", None)],
)  # fmt: skip
def test_auto_chooses_a_gpu_that_torch_and_the_variable_allow(
    one_gpu, monkeypatch, caplog, built_for, visible, chosen, warning
):
    monkeypatch.setattr("service.placement.torch_build", lambda: ("2.13.0+cpu", built_for))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (choose_accelerator("auto"), choose_accelerator("cpu")) == (chosen, "cpu")
    assert [text for text in (BUILT, NAMED) if text in caplog.text] == [warning] * (warning is not None)
    if built_for is None:
        with pytest.raises(BackendError, match=r"--accelerator cuda: torch 2.13.0\+cpu is built without CUDA"):
            choose_accelerator("cuda")
    if visible is None:
        monkeypatch.setenv("PATH", "")
        check_cuda_with_nvidia_smi.cache_clear()
        assert choose_accelerator("auto") == "cpu"


def test_more_devices_than_there_are_is_one_sentence(one_gpu):
    with pytest.raises(BackendError, match="^--devices 2: a CPU is one device; --workers-per-device starts several"):
        check_devices(2, "cpu")
    check_devices(1, "cuda")
    with pytest.raises(BackendError, match="--devices 3: nvidia-smi and CUDA_VISIBLE_DEVICES give 1 GPU$"):
        check_devices(3, "cuda")


def test_build_of_torch_is_read_without_importing_it():
    assert torch_build() == (torch.__version__, torch.version.cuda)


def test_auto_takes_as_many_slots_as_fit_the_gpus(monkeypatch, checkpoint):
    asked = []
    monkeypatch.setattr("service.placement.free_gpu_bytes", lambda devices: asked.append(devices) or 1.3e9)
    config = checkpoint.config

    def slots(device="cuda:0", **settings):
        return choose_slots(Settings(**{"max_running_requests": "auto"} | settings), [config], "float32", device)

    fitting = slots_that_fit(config, "float32", 1.3e9)
    assert slots(devices=2) == fitting > 0
    assert slots("cpu") == 72
    assert slots(max_running_requests=7) == 7
    with pytest.raises(BackendError, match="not one sequence fits into 0.7 GB"):
        slots(workers_per_device=2)
    assert asked == [2, 1]


def test_unknown_memory_of_a_gpu_is_one_sentence(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'Traceback …' >&2; echo 'RuntimeError: no driver' >&2; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    reason = r"the free memory of 2 GPUs is unknown \(RuntimeError: no driver\); pass a number"
    with pytest.raises(BackendError, match=reason):
        free_gpu_bytes(2)


def test_torch_is_loaded_by_workers_alone_and_by_them_only_to_run_the_model(server):
    """Importing it takes half of the startup time."""
    with_torch = {process.pid for process in server.processes() if has_torch(process)}
    backend, _ = resolve("auto", "auto", "cpu")
    assert with_torch == ({server.worker().pid} if backend == "torch" else set())


@pytest.mark.parametrize(
    ("backend", "dtype", "device", "message"),
    [
        ("native", "auto", "cuda:0", "backend native runs on a cpu, got device cuda:0"),
        ("cuda", "auto", "cpu", "backend cuda runs on an NVIDIA GPU, and none can be used here"),
    ],
)
def test_impossible_backend_or_dtype_is_named_with_its_flag(backend, dtype, device, message):
    with pytest.raises(BackendError, match=f"^--backend {backend} --dtype {dtype}: .*{message}"):
        choose_backend(Settings(backend=backend, dtype=dtype), device)


def test_missing_native_backend_is_warned_of_unless_torch_was_asked_for(monkeypatch, caplog):
    monkeypatch.setattr(native, "why_not", lambda: "no compiler")
    assert choose_backend(Settings(backend="torch"), "cpu") == ("torch", "float64")
    assert not caplog.records
    assert choose_backend(Settings(), "cpu") == ("torch", "float64")
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "no compiler" in record.getMessage()


def has_torch(process):
    return any("libtorch" in part.path for part in process.memory_maps())


def send(server, how):
    """A signal, to the main process or "to all", as a terminal or systemd does."""
    name, _, to_all = how.partition(" ")
    (os.killpg if to_all else os.kill)(server.process.pid, getattr(signal, name))


SIGNALS = re.compile(r"SigCgt:\s*(\w+)")
# In startup order.
MOMENTS = {
    "SIGTERM is caught": lambda server: (
        int(SIGNALS.search(Path(f"/proc/{server.process.pid}/status").read_text())[1], 16) >> signal.SIGTERM - 1 & 1
    ),
    "the worker exists": lambda server: any(is_worker(process) for process in server.processes()),
    "the worker loads torch": lambda server: has_torch(server.worker()),
    "an HTTP process exists": lambda server: http_processes(server),
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("moment", "how"), [*zip(MOMENTS, ["SIGTERM", "SIGTERM to all", "SIGINT to all", "SIGTERM"], strict=True)]
)
def test_a_signal_during_startup_stops_every_process_quietly(checkpoint, moment, how):
    def is_reached():
        with contextlib.suppress(psutil.NoSuchProcess, StopIteration):
            return MOMENTS[moment](server)

    backend = "torch" if "torch" in moment else "auto"
    with RunningServer(checkpoint.path, backend=backend) as server:
        wait_until(is_reached, otherwise=server.output)
        send(server, how)
        assert server.process.wait(PATIENCE) == 0, server.output()
        server.wait_until_gone()
        assert "Traceback" not in server.output()
