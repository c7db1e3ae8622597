"""Load for a running service: streams, whole responses and scores; clients that stay and clients that disconnect.

    make load                                             starts a server and 16 users for a minute: locust.conf
    make load URL=http://127.0.0.1:8000 ARGS='--users 64 --run-time 5m'
    python -m locust -f tests/load/locustfile.py --host URL         with Locust's web page

Each user sends a request, reads and checks the answer, and sends the next. In Locust's tables, `first` is the time to
the first character of streams and `between` the mean time between characters of one stream, in whole milliseconds.

Reads events with geventhttpclient, the library under Locust's FastHttpUser, whose own `iter_lines` buffers 1,024 bytes,
some ten events.
"""

from __future__ import annotations

import atexit
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError
from locust import User, constant, events, task
from locust.env import Environment

from service.settings import BUNDLED
from tests.load.mix import Ask, mixed, problem
from tests.toolbox.http import event_data
from tests.toolbox.launch import Server, module

PATIENCE_SECONDS = 300.0  # without a byte, and for requests in flight at the end


class Wrong(Exception):
    """An answer does not match its request."""


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    group = parser.add_argument_group("chargpt")
    group.add_argument("--mix-seed", type=int, default=0, metavar="N", help="determines the requests")
    group.add_argument("--checkpoint", type=Path, default=BUNDLED, metavar="DIR", help="served if there is no --host")
    group.add_argument("--server-log", type=Path, default=Path("out/load/server.log"), metavar="FILE", help="its log")
    parser.add_argument(
        "--api-key", default="", metavar="KEY", is_secret=True, help="sent as Authorization: Bearer KEY"
    )


@events.init.add_listener
def prepare(environment: Environment, **_: Any) -> None:
    """Start a server unless there is one; read the vocabulary, from whose characters prompts are made."""
    options = environment.parsed_options
    if environment.host is None:
        server = Server(module("service", checkpoint=options.checkpoint), options.server_log, "/readyz")
        atexit.register(server.close)
        server.wait_until_ready()
        environment.host = server.url
        print(f"serving {options.checkpoint} at {server.url}, log: {options.server_log}", flush=True)
    environment.stop_timeout = environment.stop_timeout or PATIENCE_SECONDS
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    Client.prefix = urlsplit(environment.host or "").path.rstrip("/")
    try:
        Client.http = HTTPClient.from_url(
            environment.host, concurrency=9000, connection_timeout=60, network_timeout=PATIENCE_SECONDS, headers=headers
        )
        response = Client.http.request("GET", f"{Client.prefix}/info")
        Client.vocabulary = json.loads(bytes(response.read()))["model"]["vocabulary"]
    except (OSError, HTTPParseError, KeyError, TypeError, ValueError) as error:
        print(f"chargpt: {environment.host}/info: {error!r}; --host must be the URL of a service", file=sys.stderr)
        sys.exit(2)


class Client(User):
    wait_time = constant(0)
    http: HTTPClient
    prefix: str
    vocabulary: str
    numbers = itertools.count()

    @task
    def ask(self) -> None:
        asked = mixed(next(self.numbers), self.vocabulary, self.environment.parsed_options.mix_seed)
        started, size, wrong = time.perf_counter(), 0, None
        try:
            size = self.exchange(asked, started)
        except (OSError, HTTPParseError, Wrong) as error:
            wrong = error
        self.environment.events.request.fire(
            request_type="POST", name=f"{asked.path} {asked.kind}", response_length=size, exception=wrong, context={},
            response_time=(time.perf_counter() - started) * 1e3,
        )  # fmt: skip

    def exchange(self, asked: Ask, started: float) -> int:
        """The number of bytes of an answer that is right."""
        with self.http.request("POST", self.prefix + asked.path, json.dumps(asked.body).encode()) as answer:
            if not asked.body.get("stream") or answer.status_code != 200:
                body = bytes(answer.read())
            else:
                body, moments, characters = b"", [], 0
                while event := answer.readline(b"\n\n"):
                    body += event
                    data = event_data(event) or b""
                    content = json.loads(data) if data.startswith(b"{") else {}
                    if count := sum(len(each.get("text", "")) for each in content.get("choices", [content])):
                        moments.append(time.perf_counter() - started)
                        characters += count
                    if asked.leave_after is not None and characters >= asked.leave_after:
                        return len(body)
                self.log_times(asked.path, moments, characters)
            if wrong := problem(asked, answer.status_code, body, self.vocabulary):
                raise Wrong(wrong)
            return len(body)

    def log_times(self, path: str, moments: list[float], characters: int) -> None:
        """Rows of Locust's tables that its totals of requests exclude."""
        if moments:
            self.environment.stats.get(path, "first").log(moments[0] * 1e3, 0)
        if characters > 1:
            self.environment.stats.get(path, "between").log((moments[-1] - moments[0]) / (characters - 1) * 1e3, 0)
