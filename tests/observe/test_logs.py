"""The log lines that the service's processes write to stderr."""

import datetime
import fcntl
import json
import os
import pty
import re
import select
import socket
import struct
import subprocess
import sys
import termios
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from service.http.app import OPERATIONS
from service.model.checkpoint import Checkpoint
from service.model.tokenizer import CharTokenizer
from tests.helpers import ENDLESS, PATIENCE, VOCABULARY, RunningServer, overflow, random_model, serving, wait_until, web
from tests.toolbox.http import sent
from training.run.saving import save_checkpoint

ALWAYS = {"timestamp", "level", "logger", "process", "pid", "message"}
MARKER = "SecretMarker"
REQUESTS = {operation.path: operation.request.model_fields for operation in OPERATIONS if operation.request}
BODIES = {
    "/generate": {"prompt": MARKER, "max_tokens": 3}, "/v1/completions": {"prompt": [MARKER, "a"], "max_tokens": 3},
    "/v1/score": {"texts": [MARKER, "abc"]}, "/v1/next": {"prompt": MARKER}, "/v1/attention": {"text": MARKER[:8]},
    "/tokenize": {"prompt": MARKER}, "/detokenize": {"tokens": [VOCABULARY.index(c) for c in MARKER]},
}  # fmt: skip


def lines_of(output):
    """Parses a JSON log; every line must be an object."""
    return [json.loads(line) for line in output.splitlines()]


def lines_about(server, request_id, count=1, **fields):
    """Log lines of a request with these fields; waits for them, because responses are sent before they are logged."""

    def found():
        lines = lines_of(server.output())
        lines = [line for line in lines if request_id == line.get("request_id") and fields.items() <= line.items()]
        return lines if len(lines) >= count else None

    return wait_until(found, otherwise=server.output)


def python(code):
    """Runs a program that logs JSON and must print nothing to stdout; returns its stderr."""
    code = "from service.observe import logs; logs.configure_logging('info', 'json')\n" + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == ""
    return done.stderr


@pytest.fixture(scope="module")
def broken_checkpoint(tmp_path_factory):
    """Prompts that end with Z fail in float32."""
    folder = tmp_path_factory.mktemp("broken") / "checkpoint"
    model = random_model()
    overflow(model, VOCABULARY.index("Z"))
    save_checkpoint(folder, model, CharTokenizer(VOCABULARY), {"losses": {}})
    return Checkpoint.read(folder)


@pytest.fixture(scope="module")
def server(checkpoint):
    with RunningServer(checkpoint.path, http_processes=2, workers_per_device=2, log_level="debug") as server:
        server.wait_until_ready()  # when the first of two workers is
        wait_until(lambda: server.output().count('"message":"serving ') == 2, otherwise=server.output())
        wait_until(lambda: '"message":"ready: ' in server.output(), otherwise=server.output)
        yield server
        assert server.stop() == 0
        assert lines_of(server.output())[-1]["message"] == "all processes have ended"


def test_every_line_is_json_with_time_process_and_message(server):
    def ask(_):
        return web.post(f"{server.url}/generate", json={"prompt": "a", "max_tokens": 2}).status_code

    with ThreadPoolExecutor(8) as pool:  # until each HTTP process has accepted a connection
        while len({line["process"] for line in lines_of(server.output())}) < 5:
            assert {*pool.map(ask, range(8))} == {200}
    lines = lines_of(server.output())
    started = psutil.Process(server.process.pid).create_time() - 1  # rounded to kernel ticks
    pids = {}
    for line in lines:
        assert line.keys() >= ALWAYS
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["timestamp"])
        assert started <= datetime.datetime.fromisoformat(line["timestamp"]).timestamp() <= time.time()
        pids.setdefault(line["process"], set()).add(line["pid"])
    assert pids.keys() == {"main", "http-0", "http-1", "worker-0", "worker-1"}
    assert {len(each) for each in pids.values()} == {1}
    assert {process.pid for process in server.processes()} >= {pid for each in pids.values() for pid in each}
    assert {line["logger"] for line in lines} >= {"service.server", "service.engine.worker", "service.access"}


def test_each_request_logs_one_line_with_its_counts(server):
    def ask(path, body, **fields):
        response = web.post(server.url + path, json=body)
        (line,) = lines_about(server, response.headers["x-request-id"], logger="service.access")
        assert line["level"] == "INFO"
        assert (line["method"], line["handler"], line["status"]) == ("POST", path, response.status_code)
        assert line["seconds"] > 0
        assert {name: line.get(name) for name in fields} == fields

    ends = {"prompt_characters": 3, "completion_characters": 14, "endings": {"length": 2}}
    ask("/generate", {"prompt": "abc", "max_tokens": 7, "n": 2}, **ends)
    ask("/generate", {"prompt": "a", "choice": ["bcd"]}, completion_characters=3, endings={"stop": 1})
    ask("/v1/completions", {"prompt": ["a", "bc"], "max_tokens": 4}, prompt_characters=3, completion_characters=8)
    ask("/v1/completions", {"prompt": "a", "suffix": "b", "max_tokens": 4, "best_of": 3}, endings={"length": 3})
    ask("/v1/score", {"prefix": "ab", "continuations": ["c", "de"]}, prompt_characters=5, endings={"length": 2})
    ask("/v1/next", {"prompt": ["a", "b"]}, prompt_characters=2, completion_characters=2)
    ask("/tokenize", {"prompt": "abc"}, prompt_characters=None, endings=None)
    ask("/generate", {"prompt": "漢"}, prompt_characters=None)


def test_disconnects_and_timeouts_are_logged_as_endings(server):
    body = {"prompt": "a", "max_tokens": ENDLESS, "stream": True}
    with web.stream("POST", f"{server.url}/generate", json=body) as response:
        next(response.iter_lines())
    (line,) = lines_about(server, response.headers["x-request-id"], logger="service.access")
    assert line["endings"] == {"abort": 1} and line["completion_characters"] > 0
    response = web.post(f"{server.url}/generate", json=body | {"timeout_seconds": 0.05, "stream": False})
    (line,) = lines_about(server, response.headers["x-request-id"], logger="service.access")
    assert line["endings"] == {"timeout": 1} and line["status"] == response.status_code == 504


def test_access_lines_name_only_the_route_and_probes_log_at_debug(server):
    for path, handler, level in (
        ("/v1/models/chargpt?x=1", "/v1/models/{model}", "INFO"),
        ("/generate?prompt=a&max_tokens=1", "/generate", "INFO"),
        ("/no/such/route", "other", "INFO"),
        ("/readyz", "/readyz", "DEBUG"),
        ("/livez", "/livez", "DEBUG"),
        ("/metrics", "/metrics", "DEBUG"),
    ):
        response = web.get(server.url + path)
        (line,) = lines_about(server, response.headers["x-request-id"], logger="service.access")
        assert (line["handler"], line["level"], line["method"]) == (handler, level, "GET")


def test_lines_about_several_sequences_list_all_request_ids():
    code = """
        import logging
        for ids in (["b", "a", "b"], ["b", "b"], []):
            logging.getLogger("x").error("some", extra={"request_ids": ids})
    """
    both, one, none = lines_of(python(code))
    assert both["request_ids"] == ["a", "b"] and "request_id" not in both
    assert one["request_id"] == "b" and "request_ids" not in one
    assert none.keys() == ALWAYS | {"request_ids"} and none["request_ids"] == []


def test_fatal_worker_error_is_one_line(server):
    worker = server.worker()
    (path,) = {c.laddr for c in worker.net_connections("unix") if str(c.laddr).endswith(".sock")}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(b"\x03\0\0\0bad")  # an invalid frame
        assert psutil.wait_procs([worker], timeout=PATIENCE)[0]
    (line,) = [line for line in lines_of(server.output()) if "exception" in line]
    assert (line["pid"], line["level"]) == (worker.pid, "CRITICAL") and line["process"].startswith("worker-")
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert "msgspec.ValidationError" in line["exception"]


def test_uncaught_exceptions_and_warnings_are_logged():
    code = """
        import logging, threading, warnings
        class Bad:
            def __del__(self):
                raise KeyError("in del")
        Bad()
        thread = threading.Thread(target=lambda: 1 / 0, name="beside")
        thread.start()
        thread.join()
        warnings.warn("look out")
        logging.getLogger("x").info("%d of these", "none")
        raise ValueError("too late") from OSError(2, "no file")
    """
    unraisable, thread, warning, misfit, uncaught = lines_of(python(code))
    assert unraisable["level"] == "ERROR" and "KeyError: 'in del'" in unraisable["exception"]
    assert thread["message"] == "uncaught exception in beside" and "ZeroDivisionError" in thread["exception"]
    assert (warning["logger"], warning["level"]) == ("py.warnings", "WARNING") and "look out" in warning["message"]
    assert (misfit["logger"], misfit["level"]) == ("x", "ERROR") and "TypeError" in misfit["exception"]
    assert uncaught["level"] == "CRITICAL"
    assert "ValueError: too late" in uncaught["exception"] and "no file" in uncaught["exception"]


def test_http_processes_log_tracebacks_without_exception_texts():
    code = """
        import asyncio, logging, multiprocessing
        multiprocessing.current_process().name = "http-3"

        async def fail():
            raise ValueError("a secret")

        async def main():
            task = asyncio.create_task(fail())
            await asyncio.wait([task])
            del task  # asyncio logs the unretrieved exception

        asyncio.run(main())
        try:
            try:
                asyncio.run(fail())
            except ValueError as error:
                raise RuntimeError("another secret") from error
        except RuntimeError:
            logging.getLogger("x").exception("it failed")
        logging.getLogger("x").error("no space", exc_info=OSError(28, "No space left on device"))
    """
    output = python(code)
    assert "secret" not in output.replace(f"raise ValueError({'a secret'!r})", "")
    never, failed, system = lines_of(output)
    assert {never["process"], failed["process"]} == {"http-3"}
    assert never["message"] == "Task exception was never retrieved" and "ValueError" in never["exception"]
    assert "in fail\n" in failed["exception"]
    assert re.search(r"ValueError\n.*RuntimeError\n$", failed["exception"], re.DOTALL)
    assert "No space left on device" in system["exception"]


def test_http_processes_log_messages_of_libraries_without_arguments():
    code = """
        import logging, multiprocessing, warnings
        for name in ("MainProcess", "http-3"):
            multiprocessing.current_process().name = name
            for library in ("opentelemetry.x", "litserve.server", "asyncio", "uvicorn.error", "root", "services"):
                log = logging.getLogger(library)
                log.warning("invalid %s", "secret")
                log.error("it failed\\n%s", "secret")
                log.error(ValueError("secret"))
                log.error("%d misfits", "secret")
            warnings.warn_explicit("secret: a secret", UserWarning, "/a/file.py", 7)
            logging.getLogger("service.x").warning("read again from %s", "a file")
    """
    lines = lines_of(python(code))
    assert sum("secret" in line["message"] for line in lines if line["process"] == "main") == 6 * 3 + 1
    *libraries, warning, own = (line["message"] for line in lines if line["process"] == "http-3")
    assert libraries == ["invalid %s", "it failed", "ValueError", "%d misfits"] * 6
    assert (warning, own) == ("/a/file.py:7: UserWarning", "read again from a file")


def test_lines_of_several_processes_stay_whole_in_a_full_pipe():
    code = """
        import logging, multiprocessing
        from service.observe.logs import configure_logging

        def deep(n):
            return deep(n - 1) + deep(n - 1) if n else 1 / 0

        def write(number):
            configure_logging("info", "json")
            log = logging.getLogger(f"writer {number}")
            for i in range(200):
                log.info("é" * (i * 5), extra={"fields": {"i": i}})
                try:
                    deep(i % 40)
                except ZeroDivisionError:
                    log.exception("failed", extra={"fields": {"i": i}})

        context = multiprocessing.get_context("fork")
        writers = [context.Process(target=write, args=(n,)) for n in range(4)]
        for each in writers:
            each.start()
        for each in writers:
            each.join()
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.PIPE)
    waiting = [0]

    def is_full():
        waiting.append(struct.unpack("i", fcntl.ioctl(process.stderr, termios.FIONREAD, b"\0" * 4))[0])
        return 0 < waiting[-2] == waiting[-1]

    wait_until(is_full)  # all writers wait for the reader
    output = process.communicate()[1].decode()
    lines = lines_of(output)
    assert max(len(line.encode()) for line in output.splitlines(keepends=True)) <= select.PIPE_BUF
    assert sorted((line["logger"], line["i"], line["message"] == "failed") for line in lines) == [
        (f"writer {n}", i, failed) for n in range(4) for i in range(200) for failed in (False, True)
    ]
    for line in lines:
        if line["message"] == "failed":
            assert line["exception"].endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("log_format", ["auto", "json"])
def test_terminal_output_is_text_unless_json_is_set(log_format):
    code = f"""
        import logging
        from service.observe.logs import configure_logging, request_id
        configure_logging("info", {log_format!r})
        logging.getLogger("a.b").info("hello\\x1b[31m\\n%s", "\\u009b")
        request_id.set("mine")
        try:
            1 / 0
        except ZeroDivisionError:
            logging.getLogger("a.b").exception("oh")
    """
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stderr=theirs, check=True)
    os.close(theirs)
    with os.fdopen(ours, "rb") as terminal:
        output = terminal.read1(100_000).decode().replace("\r\n", "\n")
    if log_format == "json":
        assert [line["message"] for line in lines_of(output)] == ["hello\x1b[31m\n\u009b", "oh"]
        return
    first, second, *trace = output.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} INFO main a\.b: hello\\x1b\[31m\\x0a\\x9b", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} ERROR main a\.b: oh \[mine\]", second)
    assert trace[0] == "Traceback (most recent call last):" and trace[-1] == "ZeroDivisionError: division by zero"


# -- what is never logged --


def requests_with_the_marker(key, values):
    """Requests with the marker in every field of every route, valid and invalid."""
    headers = {"Authorization": f"Bearer {key}", "Cookie": MARKER, "User-Agent": MARKER, "X-Request-Id": f"{MARKER}!"}
    assert BODIES.keys() == REQUESTS.keys()
    for path, body in BODIES.items():
        yield "POST", path, {"json": body, "headers": headers}
        for field in [*REQUESTS[path], MARKER]:
            for value in values:
                yield "POST", path, {"json": body | {field: value}, "headers": headers}
        for content in (json.dumps(body)[:-1], b"\xff" + MARKER.encode(), f'"{MARKER}"', f'{{"{MARKER}":'):
            yield "POST", path, {"content": content, "headers": headers}
        for name in ("Authorization", "Content-Length", "Content-Type", "Origin", "Last-Event-Id"):
            yield "POST", path, {"json": body, "headers": headers | {name: MARKER}}
    yield "GET", "/generate", {"params": {"prompt": MARKER, MARKER: MARKER}, "headers": headers}
    for path in ("/v1/models/M", "/M", "/info?M=M", "/livez/../M", "/%M"):
        yield "GET", path.replace("M", MARKER), {"headers": headers}
        yield "POST", path.replace("M", MARKER), {"headers": headers, "content": MARKER}
    valid = {"prompt": MARKER, "max_tokens": 40}
    others = (
        {"choice": [MARKER]}, {"choice": [MARKER], "stream": True},  # the completion is the marker
        {"regex": MARKER}, {"regex": MARKER + "("}, {"stop_regex": MARKER}, {"stop": [MARKER], "echo": True},
        {"suffix": MARKER, "n": 2}, {"allowed_characters": MARKER, "logprobs": 3}, {"logit_bias": {"S": 1}},
        {"stream": True, "timeout_seconds": 0.01, "max_tokens": ENDLESS},
        {"prompt": f"{MARKER}Z"}, {"prompt": f"{MARKER}Z", "stream": True},  # fail in the engine
        {"prompt": f"{MARKER}\n"},  # fails in the HTTP process, with the prompt in the exception's text
        {"prompt": f"{MARKER}漢", "unknown_characters": "replace"},
    )  # fmt: skip
    for more in others:
        yield "POST", "/generate", {"json": valid | more, "headers": headers}


def test_client_data_never_reaches_the_log_and_a_workers_lines_name_the_request(
    broken_checkpoint, tmp_path, monkeypatch
):
    values = (MARKER, [MARKER], [[MARKER]], {MARKER: MARKER}, {MARKER: 1}, [{MARKER: 1}])
    key = f"{MARKER}-is-a-key"
    (tmp_path / "keys.txt").write_text(key)
    (tmp_path / "sitecustomize.py").write_text(  # run by each process: a bug that quotes its input
        textwrap.dedent("""
            from service.model.tokenizer import CharTokenizer
            encode = CharTokenizer.encode
            def choke(self, text):
                if len(text) > 5 and text.endswith("\\n"):
                    raise RuntimeError(f"cannot encode {text!r}")
                return encode(self, text)
            CharTokenizer.encode = choke
        """)
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.getcwd()}")
    options = {"http_processes": 2, "log_level": "debug", "dtype": "float32", "cors_origins": "*"}
    with serving(broken_checkpoint.path, api_keys_file=tmp_path / "keys.txt", **options) as server:
        statuses, messages = set(), set()
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            for method, path, options in requests_with_the_marker(key, values):
                try:
                    answer = client.request(method, path, **options)
                    statuses.add(answer.status_code)
                    if answer.status_code == 500:
                        messages.add(answer.json()["error"]["message"])
                except httpx.TransportError:  # an invalid Content-Length
                    statuses.add(None)
        for start in (f"{MARKER} / HTTP/1.1", f"GET /{MARKER} {MARKER}", f"GET / HTTP/1.1\r\n{MARKER}"):
            with sent(server.port, f"{start}\r\n\r\n".encode()) as connection:
                assert connection.recv(1000)
        headers = {"X-Request-Id": "mine", "Authorization": f"Bearer {key}", "Origin": "https://example.org"}
        failed = web.post(f"{server.url}/generate", json={"prompt": ["aZ", "bZ"]}, headers=headers)
        assert (failed.status_code, failed.headers["access-control-allow-origin"]) == (500, "*")
        lines = lines_about(server, "mine", count=2, logger="service.engine.engine")
        assert {(line["process"], line["level"]) for line in lines} == {("worker-0", "ERROR")}
        assert all("not finite" in line["message"] for line in lines)
        (line,) = lines_about(server, "mine", logger="service.access")
        assert line["status"] == 500 and line["endings"]["error"] >= 1
        assert {200, 400, 401, 404, 500} <= statuses
        assert "internal error" in messages
        assert server.stop() == 0
        output = server.output()
    assert MARKER not in output and "secretmarker" not in output.lower()
    assert "in choke" in output and "not finite" in output and "POST /generate 200" in output
