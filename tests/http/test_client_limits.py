"""Who a client is, limits of each over real sockets, and fairness between clients."""

import contextlib
import itertools
import os
import re
import signal
from collections import Counter
from hashlib import sha256

import httpx
import pytest

from service.http.connection.addresses import address_of
from service.http.connection.errors import ApiError
from service.http.limits.clients import ClientLimits
from service.settings import Settings, read_client_limits
from tests.helpers import ENDLESS, serving, wait_until, web
from tests.http.programs import TIMELESS
from tests.toolbox.http import post, sent

KEYS = {"team-a": "key-of-team-a", "team-b": "key-of-team-b"}


def bearer(name):
    return {"Authorization": f"Bearer {KEYS.get(name, name)}"}


def generate(server, headers=None, **fields):
    body = {"prompt": "abc", "max_tokens": 7, "stop": None} | fields
    return web.post(f"{server.url}/generate", json=body, headers=headers)


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("192.0.2.7", [], "192.0.2.7"), ("192.0.2.7", ["10.0.0.1, 203.0.113.9 ,198.51.100.1 "], "198.51.100.1"),
        ("192.0.2.7", ["198.51.100.1", "198.51.100.2"], "198.51.100.2"),
        ("192.0.2.7", ["198.51.100.1, nonsense"], "192.0.2.7"), ("2001:db8:1:2:3:4:5:6", [], "2001:db8:1:2::/64"),
        ("fe80::1%eth0", [], "fe80::/64"), ("::ffff:192.0.2.7", [], "192.0.2.7"), ("", [], "unknown"),
        ("192.0.2.7", ["198.51.100.1:5678"], "198.51.100.1"), ("192.0.2.7", ["[2001:db8::1]:443"], "2001:db8::/64"),
    ],
)  # fmt: skip
def test_an_address_comes_from_the_nearest_proxy_or_the_peer(peer, forwarded, client):
    headers = dict((b"x-forwarded-for", value.encode()) for value in forwarded)  # of several, the last
    assert address_of(peer, headers, "X-Forwarded-For") == client
    assert address_of(peer, headers, None) == address_of(peer, {}, None)


def limits_file(folder, text):
    path = folder / "limits.toml"
    path.write_text(text)
    return path


def test_a_client_takes_from_default_what_its_own_table_leaves_out(tmp_path):
    path = limits_file(tmp_path, "[default]\nrequests_per_minute = 60\n[clients.a]\nweight = 2\n")
    limits = read_client_limits(path)
    assert (limits.clients["a"].weight, limits.clients["a"].requests_per_minute) == (2.0, 60)
    assert (limits.default.weight, limits.default.concurrent_requests) == (1.0, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x =", " is not valid TOML: Invalid value (at end of document)"),
        ("[default]\nweight = 0", ", [default] weight: Input should be greater than or equal to 0.01, got 0"),
        ("[clients.a]\nrequests_per_minute = 1.5", ", [clients.a] requests_per_minute: Input should be a valid int"),
        ("[clients.a]\nrequest_per_minute = 1", ", [clients.a] request_per_minute: unknown; known are requests_per_"),
        ("[clients]\na = 1", ", [clients.a]: must be a table"),
        ("[other]\nweight = 1", ", [other]: unknown; known are default, clients"),
    ],
)
def test_an_invalid_file_is_one_sentence_with_table_and_key(tmp_path, text, message):
    path = limits_file(tmp_path, text)
    with pytest.raises(ValueError) as error:
        read_client_limits(path)
    assert f"--client-limits (CHARGPT_CLIENT_LIMITS): {path}{message}" in str(error.value)
    assert "\n" not in str(error.value)


def limits(tmp_path, text, now=lambda: 0.0, **settings):
    return ClientLimits(Settings(client_limits=limits_file(tmp_path, text), **settings), clock=now)


def refused(function, *arguments):
    with pytest.raises(ApiError) as error:
        function(*arguments)
    return error.value.status, error.value.message, error.value.headers.get("Retry-After")


def test_requests_return_evenly_over_a_minute(tmp_path):
    """And exactly a minute's worth comes at once, whatever the rounding."""
    began = now = 12345.678
    it = limits(tmp_path, "[clients.a]\nrequests_per_minute = 30\n[clients.c]\nrequests_per_minute = 85", lambda: now)
    for client, limit, seconds in (("a", 30, "2"), ("c", 85, "1")):
        for _ in range(limit):
            it.begin(client)
        assert refused(it.begin, client) == (429, f"requests_per_minute of client {client} is {limit}", seconds)
    it.begin("b")
    now = began + 1.9
    assert refused(it.begin, "a")[2] == "1"
    now = began + 4.0
    it.begin("a")
    it.begin("a")
    assert refused(it.begin, "a")[0] == 429


def test_characters_that_did_not_run_are_given_back(tmp_path):
    now = 0.0
    it = limits(tmp_path, "[default]\ncharacters_per_minute = 600", lambda: now)
    it.begin("a")
    assert refused(it.charge, "a", 601)[0] == 400
    charge = it.charge("a", 500)
    assert refused(it.charge, "a", 200) == (429, "characters_per_minute of client a is 600", "10")
    it.give_back("a", charge, 100)
    it.charge("a", 500)
    it.charge("a", 300, False)  # a request that runs goes on
    assert refused(it.charge, "a", 1)[2] == "31"
    before, now = it.charge("b", 600), 61.0
    it.charge("a", 300)
    it.charge("b", 600)
    it.give_back("b", before, 0)  # time has done so already
    assert refused(it.charge, "b", 1)[0] == 429
    charge = it.charge("c", 600)
    (tmp_path / "limits.toml").write_text("[default]\ncharacters_per_minute = 6000")
    it.reload()
    it.give_back("c", charge, 0)  # ten seconds' worth by the new limit
    it.charge("c", 6000)


def test_idle_clients_are_forgotten(tmp_path):
    """However many have come, only those that have asked within the last minutes are kept."""
    now = 0.0
    it = limits(tmp_path, "[default]\nrequests_per_minute = 60\nconcurrent_requests = 2", lambda: now)
    for _ in range(2):
        it.begin("stays")
    for i in range(50_000):
        now += 0.1
        it.begin(f"client {i}")
        it.end(f"client {i}")
        assert len(it._clients) < 200
    assert refused(it.begin, "stays")[1] == "concurrent_requests of client stays is 2"
    it.end("stays")
    it.begin("stays")


def test_many_clients_within_a_minute_are_bounded_and_none_is_refused(tmp_path):
    """Those that asked longest ago are forgotten first, except while a request of theirs runs."""
    it = limits(tmp_path, "[default]\nrequests_per_minute = 1\ncharacters_per_minute = 100")
    running = [f"running {i}" for i in range(1000)]
    for client in running:
        it.begin(client)
    for i in range(70_000):
        it.begin(f"client {i}")
        it.charge(f"client {i}", 100)
        it.end(f"client {i}")
    assert len(it._clients) <= it.MAX_CLIENTS + len(running)
    for client in (*running, "client 69999"):
        assert refused(it.begin, client)[1] == f"requests_per_minute of client {client} is 1"
    assert refused(it.charge, "client 69999", 1)[0] == 429
    charge = it.charge(running[0], 100)
    it.begin("client 0")  # forgotten, so it may begin again
    for client in running:
        it.end(client)
    for i in range(70_000):
        it.begin(f"other {i}")
        it.end(f"other {i}")
    it.give_back(running[0], charge, 0)  # forgotten too
    assert not set(running) & set(it._clients)


@pytest.mark.parametrize("num_processes", [1, 2, 3, 7])
def test_processes_together_allow_the_limit_and_no_more_than_the_rounding(tmp_path, num_processes):
    """Each is what one HTTP process has. At least one request fits in each."""
    text = "[default]\nrequests_per_minute = 10\ncharacters_per_minute = 50\n[clients.c]\nconcurrent_requests = 4"
    processes = [limits(tmp_path, text, http_processes=num_processes) for _ in range(num_processes)]

    def allowed(function, client, *arguments):
        counts = []
        for process in processes:
            counts.append(0)
            with contextlib.suppress(ApiError):
                while True:
                    getattr(process, function)(client, *arguments)
                    counts[-1] += 1
        assert max(counts) - min(counts) == 0 < min(counts)
        return sum(counts)

    for limit, found in ((10, allowed("begin", "a")), (50, allowed("charge", "b", 1)), (4, allowed("begin", "c"))):
        assert limit <= found < limit + num_processes


def test_a_refusal_names_the_whole_limit_and_the_part_of_a_process(tmp_path):
    text = "[default]\nrequests_per_minute = 3\ncharacters_per_minute = 100\nconcurrent_requests = 4"
    it = limits(tmp_path, text, http_processes=2)
    for _ in range(2):
        it.begin("a")
    divided = "of client a is {}, {} in each of 2 HTTP processes"
    assert refused(it.begin, "a")[1] == "concurrent_requests " + divided.format(4, 2)
    it.end("a")
    assert refused(it.begin, "a") == (429, "requests_per_minute " + divided.format(3, 2), "30")
    status, message, _ = refused(it.charge, "a", 51)
    assert status == 400 and message.endswith("; characters_per_minute " + divided.format(100, 50))
    it.charge("a", 50)
    assert refused(it.charge, "a", 10) == (429, "characters_per_minute " + divided.format(100, 50), "12")


def test_a_bad_file_keeps_the_old_limits(tmp_path):
    it = limits(tmp_path, "[default]\nweight = 3")
    limits_file(tmp_path, "[default]\nweight = -3")
    with pytest.raises(ValueError, match=re.escape("limits.toml, [default] weight:")):
        it.reload()
    assert it.of("a").weight == 3
    limits_file(tmp_path, "[clients.a]\nweight = 4")
    it.reload()
    assert (it.of("a").weight, it.of("b").weight) == (4, 1)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    limits = {1: "requests_per_minute = 3", 2: "characters_per_minute = 100", 3: "concurrent_requests = 1"}
    limits |= {6: "characters_per_minute = 10", 7: "characters_per_minute = 100"}
    text = "".join(f'[clients."192.0.2.{number}"]\n{limit}\n' for number, limit in limits.items())
    return limits_file(tmp_path_factory.mktemp("file"), text)


@pytest.fixture(scope="module")
def server(checkpoint, file):
    """With limits by address, which tests choose with a header. No minute passes."""
    settings = {"client_limits": file, "client_header": "X-Forwarded-For", "log_format": "json"}
    with serving(checkpoint.path, TIMELESS, **settings) as server:
        yield server
        assert "Traceback" not in server.output()


def of(number):
    return {"X-Forwarded-For": f"203.0.113.5, 192.0.2.{number}"}


def test_two_processes_share_a_limit(checkpoint, tmp_path):
    """One connection gets half. However many there are, they get the whole and the rounding. SIGHUP reaches both."""
    path = limits_file(tmp_path, "[default]\nrequests_per_minute = 5\ncharacters_per_minute = 100")
    settings = {"client_limits": path, "client_header": "X-Forwarded-For", "http_processes": 2}
    with serving(checkpoint.path, TIMELESS, **settings) as server:
        server.wait_until_metric("chargpt_http_processes_ready", 2)
        with httpx.Client(headers=of(1)) as kept:  # one connection, so one process
            answers = [kept.get(f"{server.url}/info") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 3 + [429]
        message = answers[-1].json()["error"]["message"]
        assert message == "requests_per_minute of client 192.0.2.1 is 5, 3 in each of 2 HTTP processes"
        answered = 3

        def ask():
            with httpx.Client(headers=of(1)) as another:
                return another.get(f"{server.url}/info").status_code == 200

        def is_whole():
            nonlocal answered
            answered += ask()
            return answered == 6

        wait_until(is_whole)
        assert not any(ask() for _ in range(50))
        # Candidates of exact answers are limited to what this process may allow, and not refused.
        exact = {"exact": True, "min_tokens": 5, "max_tokens": 5}
        assert generate(server, of(2), prompt="a", **exact).status_code == 200
        path.write_text("")
        os.kill(server.process.pid, signal.SIGHUP)
        wait_until(lambda: server.output().count("client limits read again from") == 3, otherwise=server.output)
        assert all(ask() for _ in range(20))


def test_requests_beyond_the_limit_get_429(server):
    before = server.metric("chargpt_admission_rejections_total", reason="rate_limit")
    assert [generate(server, of(1)).status_code for _ in range(3)] == [200] * 3
    for method, path in (("POST", "/generate"), ("GET", "/info"), ("POST", "/tokenize")):
        response = web.request(method, server.url + path, headers=of(1))
        assert response.status_code == 429
        assert response.headers["retry-after"] == "20"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit")
        assert error["message"] == "requests_per_minute of client 192.0.2.1 is 3"
    assert web.get(f"{server.url}/readyz", headers=of(1)).status_code == 200
    assert web.get(f"{server.url}/metrics", headers=of(1)).status_code == 200
    assert generate(server, of(9)).status_code == 200
    server.wait_until_metric("chargpt_admission_rejections_total", before + 3, reason="rate_limit")


def test_characters_count_prompts_and_completions(server):
    stopped = {"prompt": "a", "stop_regex": "(.|\n)", "max_tokens": 80}
    for _ in range(3):  # each uses two characters, the others are given back
        assert generate(server, of(2), **stopped).status_code == 200
    response = generate(server, of(2), prompt="a" * 50, max_tokens=51)
    assert response.status_code == 400
    assert "characters_per_minute of client 192.0.2.2 is 100" in response.json()["error"]["message"]
    response = generate(server, of(2), prompt="a" * 40, max_tokens=40)
    assert response.status_code == 200, response.text
    response = generate(server, of(2), prompt=["a" * 10, "b" * 10], max_tokens=10)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "16"  # 6 + 80 of 100 characters are spent, and 40 more are asked for
    assert web.post(f"{server.url}/tokenize", json={"prompt": "a" * 500}, headers=of(2)).status_code == 200
    attention = [web.post(f"{server.url}/v1/attention", json={"text": "a" * 6}, headers=of(6)) for _ in range(2)]
    assert [response.status_code for response in attention] == [200, 429]
    unseen = {"prompt": "a", "stop_regex": "(.|\n){60}", "max_tokens": 80}  # which is cut off
    assert [generate(server, of(7), **unseen).status_code for _ in range(2)] == [200, 429]


def test_concurrent_requests_are_bounded(server):
    body = {"prompt": "a", "max_tokens": ENDLESS, "stream": True}
    with web.stream("POST", f"{server.url}/generate", json=body, headers=of(3)) as response:
        lines = response.iter_lines()  # whose end would close the connection
        next(lines)
        refused = generate(server, of(3))
        assert refused.json()["error"]["message"] == "concurrent_requests of client 192.0.2.3 is 1"
    wait_until(lambda: generate(server, of(3)).status_code == 200)


def test_hangup_reads_the_limits_again(server, file):
    def reload(text, line):
        file.write_text(text)
        count = server.output().count(line)
        os.kill(server.process.pid, signal.SIGHUP)
        wait_until(lambda: server.output().count(line) == count + 2, otherwise=server.output)  # main and http-0

    assert generate(server, of(4)).status_code == 200
    limit = '[clients."192.0.2.4"]\nrequests_per_minute = 1\n'
    reload(limit, "client limits read again from")
    assert generate(server, of(4)).status_code == 200
    assert generate(server, of(4)).status_code == 429
    reload(limit + "weight = 0", "client limits not changed")
    assert generate(server, of(4)).status_code == 429
    reload("", "client limits read again from")
    assert generate(server, of(4)).status_code == 200


def test_a_flood_does_not_delay_another_client_and_the_log_names_clients_and_never_keys(checkpoint, tmp_path):
    """300 requests of one client that never end, with the best priority; the other's are answered beside them."""
    (tmp_path / "keys.txt").write_text("".join(f"{key} {name}\n" for name, key in KEYS.items()) + "unnamed-key\n")
    settings = {"api_keys_file": tmp_path / "keys.txt", "public_metrics": "true", "max_running_requests": 8}
    with serving(checkpoint.path, **settings) as server:
        with contextlib.ExitStack() as flood:
            body = {"prompt": "a", "max_tokens": ENDLESS, "priority": -1000}
            for _ in range(300):
                flood.enter_context(sent(server.port, post("/generate", body, **bearer("team-a"))))
            server.wait_until_metric("chargpt_num_requests_waiting", 292)
            assert server.metric("chargpt_num_requests_running") == 8
            for name in ("team-b", "team-b", "unnamed-key"):
                assert generate(server, bearer(name), priority=1000).status_code == 200
            assert server.metric("chargpt_num_requests_waiting") == 292
        server.wait_until_metric("chargpt_num_requests_running", 0)
        assert server.metric("chargpt_num_requests_waiting") == 0
        forwarded = {"X-Forwarded-For": "198.51.100.1"}  # which no setting names
        assert generate(server, bearer("wrong-key") | forwarded).status_code == 401
        unnamed = f"key-{sha256(b'unnamed-key').hexdigest()[:8]}"
        counts = {"team-a": 300, "team-b": 2, unnamed: 1, "127.0.0.1": 1}
        wait_until(
            lambda: Counter(re.findall(r'"client":"([^"]+)"', server.output())) == counts, otherwise=server.output
        )
        assert not any(key in server.output() for key in KEYS.values())


def test_a_wait_that_is_too_long_is_refused_at_once(checkpoint):
    """The queue has room, but it moves by two requests per 0.4 s."""
    with serving(checkpoint.path, max_running_requests=1, max_queue_seconds=1.5) as server:
        slow = {"max_tokens": ENDLESS, "timeout_seconds": 0.4}
        for _ in range(3):  # shows the server how long a slot is taken
            assert generate(server, **slow).status_code == 504
        with contextlib.ExitStack() as stack:
            body = {"prompt": "a", "max_tokens": ENDLESS, "timeout_seconds": 60}
            for count in itertools.count(1):
                stack.enter_context(sent(server.port, post("/generate", body)))
                wait_until(lambda: server.metric("chargpt_num_requests_running") == 1)
                if server.metric("chargpt_admission_rejections_total", reason="queue_full"):
                    break
                assert count < 60
            response = generate(server)
            assert response.status_code == 429
            assert 2 <= int(response.headers["retry-after"]) < 600
            assert "expected wait for a slot is" in response.json()["error"]["message"]
