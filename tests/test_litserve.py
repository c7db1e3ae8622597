"""The parts of LitServe that the service relies on: a new version fails here first, with what would break."""

import ast
import inspect
import json
import subprocess
import sys
from importlib.metadata import requires, version

import litserve
import litserve.connector
import litserve.loops.loops
import litserve.server
from litserve.test_examples import SimpleLitAPI

import service.server
from tests.helpers import save_random, web
from tests.toolbox.launch import Program, free_port


def test_installed_litserve_is_the_pinned_version():
    pinned = [requirement for requirement in requires("chargpt") if requirement.startswith("litserve")]
    assert pinned == [f'litserve=={version("litserve")}; extra == "service"']


def test_every_private_name_exists():
    """The undocumented parts of LitServer that server.py uses, or overrides: at most ten."""
    stock = litserve.LitServer(SimpleLitAPI(), accelerator="cpu", timeout=False)
    tree = ast.parse(inspect.getsource(service.server))
    (server,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Server")
    own = {node.name for node in server.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    attributes = [node for node in ast.walk(server) if isinstance(node, ast.Attribute)]
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    used = {node.attr for node in attributes if node.attr.startswith("_")} - own - {"__init__", "_loggers"}
    used |= {name for name in own if hasattr(stock, name)} - {"__init__", "spec"}
    source = inspect.getsource(litserve.LitServer)
    assert 5 < len(used) <= 10
    assert not [name for name in used if not hasattr(stock, name) and f"self.{name} = " not in source]


PROGRAM = '''
import json, os, sys
from pathlib import Path
import litserve as ls
from service.__main__ import serve
from service.settings import Settings

SEEN = Path(sys.argv[1])

def note(*what):
    with SEEN.open("a") as file:
        file.write(json.dumps(what) + "\\n")

class Hooks(ls.Callback):
    def on_before_setup(self, lit_api):
        note("before_setup")
    def on_after_setup(self, lit_api):
        note("after_setup", lit_api.settings.model_name)
        (hosted,) = lit_api.host.models.values()
        lit_api.log("slots", hosted.engine.runner.slots)
    def on_request(self, active_requests, litserver):
        note("request", active_requests)
    on_server_start = lambda self, litserver: note("server_start")
    on_server_end = lambda self, litserver: note("server_end")
    on_response = lambda self, litserver: note("response")

class FileLogger(ls.Logger):
    def process(self, key, value):
        note("logged", key, value)

class Stamp:
    """An ASGI middleware that adds a header."""
    def __init__(self, app, value):
        self.app, self.value = app, value
    async def __call__(self, scope, receive, send):
        async def stamped(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", self.value)]
            await send(message)
        await self.app(scope, receive, stamped)

if __name__ == "__main__":
    settings = Settings(checkpoint=sys.argv[2], port=int(sys.argv[3]), threads=1)
    sys.exit(serve(settings, callbacks=[Hooks()], loggers=[FileLogger()], middlewares=[(Stamp, {"value": b"here"})]))
'''


def test_callbacks_loggers_and_middlewares_work_as_documented(tmp_path):
    save_random(tmp_path / "checkpoint")
    script, seen, port = tmp_path / "hooked.py", tmp_path / "seen.jsonl", free_port()
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), str(seen), str(tmp_path / "checkpoint"), str(port)]
    with Program(command, port, "/readyz") as server:
        server.wait_until_ready()
        response = web.post(f"{server.url}/generate", json={"prompt": "a", "max_tokens": 2})
        assert response.status_code == 200
        assert response.headers["x-stamp"] == "here"
        assert web.get(f"{server.url}/info").headers["x-stamp"] == "here"  # no inference, so no hook fires
        server.process.terminate()
        assert server.process.wait(60) == 0, server.output()
    entries = [json.loads(line) for line in seen.read_text().splitlines()]
    (logged,) = (entry for entry in entries if entry[0] == "logged")
    assert logged[1] == "slots" and logged[2] > 0
    assert sorted(entry for entry in entries if entry[0] != "logged") == sorted(
        [["server_start"], ["before_setup"], ["after_setup", "chargpt"], ["request", 0], ["response"], ["server_end"]]
    )


def test_build_server_requires_a_metrics_folder(tmp_path):
    save_random(tmp_path / "checkpoint")
    code = "import sys; from service.server import build_server; from service.settings import Settings\n"
    code += "build_server(Settings(checkpoint=sys.argv[1]))"
    command = [sys.executable, "-c", code, tmp_path / "checkpoint"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "PROMETHEUS_MULTIPROC_DIR must name an empty folder" in done.stderr
