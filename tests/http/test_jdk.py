"""The JDK's HttpClient, with which Java programs ask: it offers h2c with each request on plain HTTP."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.toolbox.http import pieces, text_of
from tests.toolbox.needs import program

CLIENT = Path(__file__).with_name("JdkClient.java")
COUNT = 3
REFUSED = "chargpt_http_connections_rejected_total"

pytestmark = pytest.mark.needs("java")


def answers(server, **body):
    """The lines of each answer to COUNT requests of one client."""
    body = {"prompt": "a", "max_tokens": 5, "seed": 1} | body
    command = [program("java"), CLIENT, f"{server.url}/generate", json.dumps(body), str(COUNT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = done.stdout.split("HTTP_1_1 200 kept\n")
    assert found[0] == "" and len(found) == 1 + COUNT, done.stdout
    return [each.splitlines() for each in found[1:]]


def test_whole_and_streamed_answers_on_a_kept_connection(server):
    before = server.metric(REFUSED, reason="malformed")
    whole = [json.loads("".join(lines))["choices"][0]["text"] for lines in answers(server)]
    streamed = [text_of(pieces([*lines, ""])) for lines in answers(server, stream=True)]
    assert len(whole) == len(streamed) == COUNT and len({*whole, *streamed}) == 1
    assert server.metric(REFUSED, reason="malformed") == before
