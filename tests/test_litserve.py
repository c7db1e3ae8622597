"""The parts of LitServe that the service relies on: a new version fails here first, with what would break."""

import ast
import contextlib
import inspect
import json
import sys

import litserve
import litserve.connector
import litserve.loops.loops
import litserve.server
import pytest
from litserve.test_examples import SimpleLitAPI

import service.server
from service.settings import Settings
from tests.helpers import PATIENCE, http_processes, save_random, web
from tests.toolbox.http import answer, post, sent
from tests.toolbox.launch import ROOT, Program, free_port


def test_every_private_name_exists():
    """The undocumented parts of LitServer that server.py uses, or overrides: at most five."""
    stock = litserve.LitServer(SimpleLitAPI(), accelerator="cpu", timeout=False)
    tree = ast.parse(inspect.getsource(service.server))
    (server,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Server")
    own = {node.name for node in server.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    attributes = [node for node in ast.walk(server) if isinstance(node, ast.Attribute)]
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    used = {node.attr for node in attributes if node.attr.startswith("_")} - own - {"__init__"}
    used |= {name for name in own if hasattr(stock, name)} - {"__init__", "spec"}
    source = inspect.getsource(litserve.LitServer)
    assert 0 < len(used) <= 5
    assert not [name for name in used if not hasattr(stock, name) and f"self.{name} = " not in source]


def test_middlewares_work_as_documented(tmp_path):
    document = (ROOT / "service" / "INTERNALS.md").read_text(encoding="utf-8")
    program = document.partition("```python\n")[2].partition("```\n")[0]
    program = program.replace("Settings(", "Settings(max_body_bytes=1 << 20, ")
    shorter = "import service.http.app\n    service.http.app.BODY_TIMEOUT_SECONDS = 0.5\n    settings ="
    program = program.replace("settings =", shorter)
    failing = "assert scope['path'] != '/fails'\n        await self.app"
    (tmp_path / "stamped.py").write_text(program.replace("await self.app", failing))
    save_random(tmp_path / "checkpoint")
    command = [sys.executable, tmp_path / "stamped.py", tmp_path / "checkpoint", port := free_port()]
    with Program(command, port, "/readyz") as server:
        server.wait_until_ready()
        whole = post("/generate", {"prompt": "a", "max_tokens": 2})  # in one piece, which no time limit cuts
        with sent(port, whole) as connection, answer(connection) as response:
            assert (response.status, response.headers["x-stamp"]) == (200, "here")
        assert web.get(f"{server.url}/info").headers["x-stamp"] == "here"
        assert web.get(f"{server.url}/fails").json()["error"]["message"] == "internal error"
        with sent(port, post("/generate", b"{", Content_Length=9)) as connection, answer(connection) as response:
            assert (response.status, json.load(response)["error"]["code"]) == (408, "body_timeout")
        [http] = http_processes(server)
        before = http.memory_info().rss
        chunked = b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        with sent(port, chunked) as connection, contextlib.suppress(ConnectionError):
            for _ in range(64):
                connection.sendall(b"100000\r\n%b\r\n" % bytes(1 << 20))
        assert http.memory_info().rss - before < 16 << 20, "what comes after a refusal is kept"
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0, server.output()


def test_build_server_requires_a_metrics_folder(monkeypatch):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    with pytest.raises(RuntimeError, match="PROMETHEUS_MULTIPROC_DIR must name an empty folder"):
        service.server.build_server(Settings())


def test_run_takes_host_and_port_as_litserve_users_pass_them(checkpoint, tmp_path):
    """It ignored them, and its worker died with AttributeError."""
    program = """
import os, sys
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[2]
from service.server import build_server
from service.settings import Settings

if __name__ == "__main__":
    server = build_server(Settings(checkpoint=sys.argv[1], host="192.0.2.1", threads=1))
    try:
        server.run(port=sys.argv[3], num_api_servers=2)
    except TypeError as error:
        print(error, flush=True)
    server.run("127.0.0.1", port=sys.argv[3])
"""
    command = [sys.executable, "-c", program, checkpoint.path, tmp_path, port := free_port()]
    with Program(command, port, "/readyz") as server:
        server.wait_until_ready()
        assert web.post(f"{server.url}/generate", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0, server.output()
        refused, *_ = server.output().splitlines()
    assert refused == "run() takes host and port, got num_api_servers; Settings has every other option"


def test_run_refuses_a_port_that_settings_refuse(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    server = service.server.build_server(Settings(checkpoint=checkpoint.path))
    with pytest.raises(ValueError, match="port\n  Input should be less than or equal to 65535"):
        server.run(port=70_000)


def test_a_worker_is_given_no_list_of_clients(checkpoint, monkeypatch, tmp_path):
    """Beyond a pipe's 64 KB the main process waits for the worker to read it, for ever if that was killed."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    (path := tmp_path / "limits.toml").write_text("[clients.a]\nweight = 2.0\n")
    server = service.server.build_server(Settings(checkpoint=checkpoint.path, client_limits=path))
    assert server.settings.limits.clients and not server.api.settings.limits.clients
