"""Load for a running service: streams, whole responses and scores; clients that stay and clients that disconnect.

    make load                                             starts a server and 16 users for a minute
    make load URL=http://127.0.0.1:8000 ARGS='--arrivals 20 --run-time 5m'
    locust -f tests/load/locustfile.py --host URL         with Locust's web page

    closed loop   each of --users sends a request, reads the response and sends the next
    open loop     --arrivals RATE: requests arrive as a Poisson process, regardless of earlier ones

--mix-seed and its number determine a request, so two runs send the same ones. In Locust's tables, `first` is the time
to first character of streams and `between` the time between characters, one value each, in whole milliseconds.
FOLDER/summary.json and requests.csv have finer figures. An invalid response is a failure.

Reads events with geventhttpclient, the library under Locust's FastHttpUser, whose own `iter_lines` buffers 1,024 bytes,
some ten events.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gevent
from gevent.pool import Pool
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError, HTTPSocketPoolResponse
from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import LocalRunner
from locust.stats import StatsEntry, bucket_response_time

from tests.load.answers import EVENT_END, Stream, Wrong, check_opinion, check_status, check_whole
from tests.load.mix import Ask, Mix
from tests.load.record import FAILED, LEFT, Log, Record

MAX_IN_FLIGHT = 9_000  # requests; Locust raises the file limit to 10,000
PATIENCE_SECONDS = 300.0  # without a byte
STOP_SECONDS = 300.0  # for requests in flight at the end
NETWORK_ERRORS = (OSError, HTTPParseError)

logger = logging.getLogger(__name__)


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    group = parser.add_argument_group("chargpt")
    add = group.add_argument
    add("--arrivals", type=float, default=0.0, metavar="RATE", help="requests/s of an open loop; 0: closed loop")
    add("--requests", type=int, default=0, metavar="N", help="stop after N requests; 0: after --run-time")
    add("--mix-seed", type=int, default=0, metavar="N", help="determines requests and arrival times")
    add("--median-prompt", type=int, default=Mix.median_prompt, metavar="N", help="median prompt length")
    add("--median-completion", type=int, default=Mix.median_completion, metavar="N", help="median completion length")
    add("--longest", type=int, default=Mix.longest, metavar="N", help="maximum length of prompts and completions")
    add("--whole", type=float, default=Mix.whole, metavar="SHARE", help="share of responses not streamed")
    add(
        "--leaving",
        type=float,
        default=Mix.leaving,
        metavar="SHARE",
        help="share of clients that disconnect in mid-stream",
    )
    add("--opinions", type=float, default=Mix.opinions, metavar="SHARE", help="share of /v1/score and /v1/next")
    parser.add_argument(
        "--api-key", default="", metavar="KEY", is_secret=True, help="sent as Authorization: Bearer KEY"
    )
    add("--folder", default="out/load", metavar="DIR", help="folder for summary.json and requests.csv")


class Load:
    """State shared by all users."""

    def __init__(self, environment: Environment):
        self.environment = environment
        self.options = options = environment.parsed_options
        self.log = Log()
        self.started = time.perf_counter()
        self.taken = 0
        url = urlsplit(environment.host or "")
        if not url.hostname:
            raise ValueError(
                f"--host must be the address of a service, such as http://127.0.0.1:8000, got {environment.host}"
            )
        self.prefix = url.path.rstrip("/")
        self.headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self.client = HTTPClient.from_url(
            environment.host,
            concurrency=MAX_IN_FLIGHT,
            connection_timeout=60,
            network_timeout=PATIENCE_SECONDS,
            headers=self.headers | {"Content-Type": "application/json"},
        )
        info = self.info()
        limits = info["limits"]
        most = min(limits["max_tokens"], limits["max_prompt_characters"])
        if options.longest > most:
            raise ValueError(f"--longest must be ≤ {most}, the limit of the server, got {options.longest}")
        self.mix = Mix(
            info["model"]["vocabulary"],
            seed=options.mix_seed,
            **{name: getattr(options, name) for name in Mix.__annotations__ if name not in ("vocabulary", "seed")},
        )

    def info(self) -> dict[str, Any]:
        try:
            response = self.client.request("GET", f"{self.prefix}/info")
            body = bytes(response.read())
            check_status(response.status_code, body)
            return json.loads(body)  # type: ignore[no-any-return]
        except (*NETWORK_ERRORS, Wrong, ValueError) as error:
            raise ValueError(f"{self.environment.host}/info: {error}") from error

    def next(self) -> Ask | None:
        """The next request, or None after --requests."""
        if self.options.requests and self.taken >= self.options.requests:
            return None
        self.taken += 1
        return self.mix.ask(self.taken - 1)

    # -- one request --

    def send(self, ask: Ask, due: float | None = None) -> None:
        """Send a request, read and record its response. `due`: its scheduled arrival, from time.perf_counter()."""
        started = time.perf_counter()
        seen = Seen(started)
        wrong: BaseException | None = None
        ending = FAILED
        try:
            ending = self._exchange(ask, seen)
        except (*NETWORK_ERRORS, Wrong) as error:
            wrong = error
        except gevent.GreenletExit:
            wrong = Wrong("the load ended before the response")
        record = Record(
            ask.number, started - self.started, ask.path, ask.shape, ask.prompt_characters, seen.characters, seen.first,
            seen.last if wrong is None and ending != LEFT else None, ending,
            0.0 if due is None else started - due,
            "" if wrong is None else str(wrong) or type(wrong).__name__,
        )  # fmt: skip
        self.log.records.append(record)
        self.environment.events.request.fire(
            request_type="POST", name=ask.name, response_time=(time.perf_counter() - started) * 1e3,
            response_length=seen.num_bytes, exception=wrong, context={},
        )  # fmt: skip
        if seen.first is not None and ask.shape == "stream":
            self._entry("first", ask).log(seen.first * 1e3, 0)

    def _exchange(self, ask: Ask, seen: Seen) -> str:
        """Returns the finish reason, or LEFT."""
        response = self.client.request("POST", self.prefix + ask.path, json.dumps(ask.body).encode())
        with response:
            if ask.shape == "stream" and response.status_code == 200:
                return self._read_stream(ask, response, seen)
            body = bytes(response.read())
        at = time.perf_counter() - seen.started
        seen.num_bytes = len(body)
        check_status(response.status_code, body)
        if ask.shape == "opinion":
            seen.characters, ending = check_opinion(ask, body, self.mix.vocabulary), "length"
        else:
            seen.characters, ending = check_whole(ask, body, self.mix.vocabulary)
        seen.last = at
        seen.first = at if seen.characters else None
        return ending

    def _read_stream(self, ask: Ask, response: HTTPSocketPoolResponse, seen: Seen) -> str:
        stream = Stream(ask, self.mix.vocabulary)
        between = self._entry("between", ask)
        while event := response.readline(EVENT_END):
            at = time.perf_counter() - seen.started
            seen.num_bytes += len(event)
            had_ended = stream.finish_reason is not None
            count = stream.take(event)
            if count:
                new = count
                if seen.first is None:
                    seen.first = seen.last = at
                    new -= 1
                assert seen.last is not None
                if new:  # characters of one event share the time since the previous event
                    gap = (at - seen.last) / new
                    self.log.gaps.add(gap, new)
                    _log_many(between, gap * 1e3, new)
                seen.characters += count
                if ask.leave_after is not None and seen.characters >= ask.leave_after:
                    if stream.finish_reason is None:
                        return LEFT
            if count or (stream.finish_reason is not None and not had_ended):
                seen.last = at
        stream.end()
        assert stream.finish_reason is not None
        return stream.finish_reason

    def _entry(self, what: str, ask: Ask) -> StatsEntry:
        """A row of Locust's tables that its request totals exclude."""
        return self.environment.stats.get(ask.path, what)

    # -- the run --

    def begin(self, **_: Any) -> None:
        self.started = time.perf_counter()
        if self.options.requests:
            gevent.spawn(self._end_after_the_last)

    def _end_after_the_last(self) -> None:
        while len(self.log.records) < self.options.requests:
            gevent.sleep(0.05)
        self.environment.runner.quit()

    def watch(self) -> None:
        """Record this process's CPU use every second."""
        while True:
            at, cpu = time.perf_counter(), time.process_time()
            gevent.sleep(1.0)
            self.log.busy(time.process_time() - cpu, time.perf_counter() - at)

    def write(self, **_: Any) -> None:
        """Write the figures to the folder and set the exit status."""
        options = self.options
        about = {
            "url": self.environment.host,
            "loop": "open" if options.arrivals else "closed",
            "users": None if options.arrivals else options.num_users,
            "arrivals_per_second": options.arrivals or None,
            "mix": vars(self.mix),
        }
        self.log.write(Path(options.folder), about)
        if not self.log.records or self.log.failures():
            self.environment.process_exit_code = 1

    def show(self, **_: Any) -> None:
        print(f"\n{self.log.text()}")
        for warning in self.log.warnings(bool(self.options.arrivals)):
            print(f"WARNING: {warning}")
        print(f"figures: summary.json and requests.csv in {self.options.folder}", flush=True)


class Seen:
    """The part of a response received so far. Times in seconds since `started`."""

    def __init__(self, started: float):
        self.started = started
        self.characters = self.num_bytes = 0
        self.first: float | None = None
        self.last: float | None = None


def _log_many(entry: StatsEntry, milliseconds: float, count: int) -> None:
    """Log `count` equal values at once."""
    entry.log(milliseconds, 0)
    more = count - 1
    entry.num_requests += more
    entry.total_response_time += milliseconds * more
    entry.num_reqs_per_sec[int(entry.last_request_timestamp)] += more
    entry.response_times[bucket_response_time(milliseconds)] += more


class Client(User):
    """Base of the users of both loops."""

    abstract = True

    def on_start(self) -> None:
        self.load: Load = self.environment.load


class ClosedLoop(Client):
    """Sends a request, reads the response, sends the next."""

    def wait_time(self) -> float:
        return 0.0

    @task
    def ask(self) -> None:
        ask = self.load.next()
        if ask is None:
            raise StopUser
        self.load.send(ask)


class OpenLoop(Client):
    """Sends requests as a Poisson process, without waiting for responses."""

    def on_start(self) -> None:
        super().on_start()
        chance, rate = random.Random(f"{self.load.mix.seed} arrivals"), self.load.options.arrivals
        gaps = (chance.expovariate(rate) for _ in itertools.count())
        self.moments = itertools.accumulate(gaps, initial=time.perf_counter())
        self.due = next(self.moments)
        self.in_flight = Pool()

    def wait_time(self) -> float:
        return max(0.0, self.due - time.perf_counter())

    @task
    def ask(self) -> None:
        ask = self.load.next()
        if ask is None:
            raise StopUser
        if len(self.in_flight) >= MAX_IN_FLIGHT:
            logger.error("stopping: %d requests in flight, the server is too far behind", MAX_IN_FLIGHT)
            raise StopUser
        self.in_flight.spawn(self.load.send, ask, self.due)
        self.due = next(self.moments)

    def on_stop(self) -> None:
        self.in_flight.join()


@events.init.add_listener
def prepare(environment: Environment, runner: Any, **_: Any) -> None:
    options = environment.parsed_options
    environment.stop_timeout = environment.stop_timeout or STOP_SECONDS
    try:
        if not isinstance(runner, LocalRunner):  # distributed workers do not wait for requests in flight
            raise ValueError(
                "only one process is supported: for more load, start several, each with its own --mix-seed and --folder"
            )
        if options.arrivals < 0 or options.requests < 0:
            raise ValueError(f"--arrivals and --requests must be ≥ 0, got {options.arrivals:g} and {options.requests}")
        load = Load(environment)
    except ValueError as error:
        print(f"chargpt: {error}", file=sys.stderr)
        sys.exit(2)
    environment.load = load
    environment.user_classes = [OpenLoop if options.arrivals else ClosedLoop]
    if options.arrivals:
        options.num_users = 1
    environment.events.test_start.add_listener(load.begin)
    environment.events.quitting.add_listener(load.write)
    environment.events.quit.add_listener(load.show)
    gevent.spawn(load.watch)
