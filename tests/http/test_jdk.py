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


def answers(server, *others):
    """The lines of each answer to COUNT requests with each of these fields, of one client."""
    bodies = [json.dumps({"prompt": "a", "max_tokens": 5, "seed": 1} | fields) for fields in others]
    # -XX: it compiles and exits before more would pay off.
    command = [program("java"), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", CLIENT, f"{server.url}/generate"]
    done = subprocess.run([*command, str(COUNT), *bodies], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = done.stdout.split("HTTP_1_1 200 kept\n")
    assert found[0] == "" and len(found) == 1 + COUNT * len(bodies), done.stdout
    return [each.splitlines() for each in found[1:]]


def test_whole_and_streamed_answers_on_a_kept_connection(server):
    before = server.metric(REFUSED, reason="malformed")
    found = answers(server, {}, {"stream": True})
    whole = [json.loads("".join(lines))["choices"][0]["text"] for lines in found[:COUNT]]
    streamed = [text_of(pieces([*lines, ""])) for lines in found[COUNT:]]
    assert len(whole) == len(streamed) == COUNT and len({*whole, *streamed}) == 1
    assert server.metric(REFUSED, reason="malformed") == before
