"""What requests leave behind: no reference cycles, and no memory."""

import json
import socket
import subprocess
import sys

import httpx
import pytest

from service.http.engine import patterns
from tests.helpers import http_processes, serving
from tests.toolbox.http import post, received

COUNT = 100
PROGRAM = """
import gc, json, sys
from service import server
from service.__main__ import serve
from service.http import app
from service.http.api.openapi import Operation
from service.settings import read_settings

def garbage(service, request):
    request.respond(json.dumps(gc.collect()).encode())

app.OPERATIONS = (*app.OPERATIONS, Operation("/garbage", garbage, "garbage", "operation"))
server.relax_garbage_collector = gc.disable
sys.exit(serve(read_settings()))
"""


@pytest.fixture(scope="module")
def server(checkpoint):
    """Without a garbage collector; GET /garbage gives how many objects a collection finds."""
    with serving(checkpoint.path, ("-c", PROGRAM), log_level="error") as server:
        yield server
        assert server.output() == "", "below the level of the log"


KINDS = {
    "whole": {"prompt": "a", "max_tokens": 1},
    "streamed": {"prompt": "a", "max_tokens": 3, "stream": True},
    "several with log-probabilities": {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1},
    "best of two": {"prompt": "a", "max_tokens": 2, "best_of": 2},
    "refused": {"prompt": 5},
    "unknown character": {"prompt": "\u6f22"},
    "bad pattern": {"prompt": "a", "regex": "[a-"},
    "too late": {"prompt": "a", "max_tokens": 5000, "timeout_seconds": 0.0001},
}


@pytest.mark.parametrize("kind", [*KINDS, "probe", "score", "malformed", "left"])
def test_requests_leave_no_reference_cycles(server, kind):
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def ask():
            if kind == "probe":
                client.get("/livez")
            elif kind == "score":
                client.post("/v1/score", json={"texts": ["ab"]})
            elif kind in ("malformed", "left"):
                with socket.create_connection(("127.0.0.1", server.port)) as connection:
                    if kind == "left":
                        connection.sendall(post("/generate", {"prompt": "a", "max_tokens": 5000, "stream": True}))
                        connection.recv(1)
                    else:
                        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                        received(connection)
            else:
                client.post("/generate", json=KINDS[kind])

        ask()
        client.get("/garbage")
        for _ in range(COUNT):
            ask()
        assert client.get("/garbage").json() < COUNT // 2


def test_long_prompts_are_given_back(server):
    """By reference cycles, each of these once left 15 MB behind, until the process was ended for lack of memory."""
    (http,) = http_processes(server)
    body = json.dumps({"prompt": [[1] * 100_000] * 5, "max_tokens": 1})
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def ask(count):
            for _ in range(count):
                assert client.post("/generate", content=body).status_code == 200
            return http.memory_info().rss

        before = ask(5)
        assert ask(30) - before < 30_000_000  # 112 MB before


def test_refused_patterns_are_not_kept():
    """Errors were cached with their tracebacks: 256 patterns of 4 MB took a gigabyte."""
    code = """
import asyncio, resource
from service.http.engine.patterns import PatternCompiler, PatternThread
from service.http.api.errors import ApiError

async def main():
    compiler = PatternCompiler("abc", 1000, PatternThread())
    async def refused(pattern):
        try:
            await compiler.compile("client", "regex", pattern)
        except ApiError as error:
            return error.message
    await refused("(")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(300):
        assert "at most 1000 characters" in await refused("a" * (1_000_000 + i))
        assert "1000 states" in await refused("[abc]{%d}" % (1001 + i))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.stderr
    assert int(done.stdout) < 40_000  # KiB


@pytest.mark.anyio
async def test_patterns_are_cached_within_a_bound(monkeypatch):
    monkeypatch.setattr(patterns, "CACHE_BYTES", 100_000)
    compiler = patterns.PatternCompiler("abc", 1000, patterns.PatternThread())
    for i in range(1, 200):
        first = await compiler.compile("client", "regex", f"a{{1,{i}}}")
        assert await compiler.compile("client", "regex", f"a{{1,{i}}}") is first
        assert compiler._compiled._bytes <= 100_000
    assert 10 < len(compiler._compiled._found) < 190
