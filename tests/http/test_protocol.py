"""Connections and headers over raw sockets: what is refused before a route, and what clients cannot hold."""

import concurrent.futures
import contextlib
import json
import re
import select
import socket
import ssl
import sys
import time

import httpx
import psutil
import pytest

from service.http.connection.addresses import network_of
from service.http.connection.guard import MAX_BODY_CHUNKS
from service.http.connection.guard import MAX_HEADER_BYTES as HEADER_BYTES
from service.http.connection.limits import LOOPBACK
from tests.helpers import ENDLESS, http_processes, lasting, make_certificate, serving, wait_until, web
from tests.http.programs import changed
from tests.toolbox.http import PATIENCE, answer, pieces, post, received, sent
from tests.toolbox.launch import Program, free_port

REJECTED = "chargpt_http_connections_rejected_total"
GET = b"GET /livez HTTP/1.1\r\nHost: a\r\n"


def with_header_timeout(seconds):
    return changed({"service.http.connection.guard.HEADER_TIMEOUT_SECONDS": seconds})


@pytest.fixture(scope="module")
def server(checkpoint):
    yield from lasting(checkpoint.path, with_header_timeout(1.0), idle_connection_seconds=1000)


def ask(server, data):
    """The status and the error's code of the answer to some bytes, after which the server closes the connection."""
    with sent(server.port, data) as connection:
        return refusal(connection)


def refusal(connection):
    with answer(connection) as response:
        assert response.headers["content-type"] == "application/json"
        assert response.headers["connection"] == "close"
        assert len(response.headers["x-request-id"]) == 32
        error = json.load(response)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert connection.recv(1) == b""
    return response.status, error["code"]


@pytest.mark.parametrize("path", ["/generate/", "//generate"])
def test_nothing_is_redirected(server, path):
    """A redirect would name any host that a client gives, in plain HTTP, and repeat the prompt."""
    request = post(f"{path}?prompt=secret", {}, Host="other.example")
    with sent(server.port, request) as connection, answer(connection) as response:
        assert (response.status, response.headers["location"]) == (404, None)
        assert b"other.example" not in response.read()


def padded(size, start=GET):
    """A request of `size` bytes."""
    return start + b"X-Pad: " + b"x" * (size - len(start) - len(b"X-Pad: \r\n\r\n")) + b"\r\n\r\n"


def statuses(connection, count):
    """The statuses of the next `count` answers, whose bodies are read."""
    found = []
    stream = connection.makefile("rb")
    for _ in range(count):
        found.append(int(stream.readline().split()[1]))
        length = 0
        while (line := stream.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        stream.read(length)
    return found


# -- headers --


@pytest.mark.parametrize("chunks", [1, 500])
def test_headers_are_limited_to_the_byte(server, chunks):
    for size, status in ((HEADER_BYTES - 1, 200), (HEADER_BYTES, 200), (HEADER_BYTES + 1, 431)):
        head = padded(size)
        with sent(server.port, b"") as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start in range(0, size, size // chunks + 1):
                connection.sendall(head[start : start + size // chunks + 1])
            with answer(connection) as response:
                assert response.status == status


def test_a_huge_header_is_refused_at_once_and_delays_nobody(server):
    before = server.metric(REJECTED, reason="headers_too_large")
    with sent(server.port, GET + b"X-Pad: ") as connection:
        with contextlib.suppress(ConnectionError, TimeoutError):  # the server reads a bounded part of it
            connection.sendall(b"x" * 60_000_000)
        assert web.get(f"{server.url}/livez").status_code == 200
    server.wait_until_metric(REJECTED, before + 1, reason="headers_too_large")
    for _ in range(5):  # the answer is not lost
        assert ask(server, padded(1_000_000)) == (431, "headers_too_large")


def test_later_requests_of_a_connection_have_the_same_limits(server):
    with sent(server.port, GET + b"\r\n") as connection:
        assert statuses(connection, 1) == [200]
        connection.sendall(padded(HEADER_BYTES))
        assert statuses(connection, 1) == [200]
        connection.sendall(padded(HEADER_BYTES + 1))
        assert refusal(connection) == (431, "headers_too_large")


# -- malformed requests --


CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
MALFORMED = [
        b"\x16\x03\x01\x00\xee\x01\x00\x00\xea\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
        b"POST /tokenize HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        GET + b"X: 1\r\n folded\r\n\r\n", GET + b"X: 1\rY: 2\r\n\r\n", GET + b"X: \0\r\n\r\n",
        b"GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n", GET + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\na",
        GET + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", GET + b"Content-Length: +1\r\n\r\na",
        GET + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        CHUNKED + b"0\r\nConnection: close\r\n\r\n",
        GET + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
]  # fmt: skip


def test_malformed_requests_get_an_error_like_others(server):
    """Nothing after the malformed part is taken for a request: a proxy may have seen a body there."""
    before = server.metric(REJECTED, reason="malformed")
    for data in MALFORMED:
        with sent(server.port, data + GET + b"\r\n") as connection:
            assert refusal(connection)[0] == 400, data
    server.wait_until_metric(REJECTED, before + len(MALFORMED), reason="malformed")


TOO_LARGE = (431, "headers_too_large")


REFUSED = [
    (b"GET /" + b"x" * 100_000, (414, "headers_too_large")),
    (GET + b"a: b\r\n" * 100 + b"\r\n", TOO_LARGE),  # 101 of them
    (CHUNKED + b'd\r\n{"prompt":"a"\r\n1\r\n}\r\n0\r\nX: ' + b"y" * 2 * HEADER_BYTES, TOO_LARGE),  # a trailer
    (CHUNKED + b"1;" + b"x" * 1_000_000, TOO_LARGE),  # an extension of the first chunk, or a later one
    (CHUNKED + b"1\r\n{\r\n1;" + b"x" * 1_000_000, TOO_LARGE),
    *(
        (CHUNKED + chunk + b"0\r\n\r\n" + GET + b"\r\n", (400, "invalid_http"))
        for chunk in (b"3 \r\nabc\r\n", b"3\r\nabcd\r\n", b"f" * 17 + b"\r\n")
    ),
    (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", (400, "invalid_http")),
    (GET + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", (501, "invalid_http")),
    (GET + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", (501, "invalid_http")),
    (b"GET /livez\r\n\r\n", (505, None)),
    (b"GET /livez HTTP/2.0\r\nHost: a\r\n\r\n", (505, None)),
    (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", (505, "invalid_http")),
]


def test_large_heads_malformed_chunks_and_other_versions_are_refused(server):
    found = [(data[-30:], ask(server, data)) for data, _ in REFUSED]
    assert found == [(data[-30:], refused) for data, refused in REFUSED]


def test_the_chunks_of_a_body_are_limited(server):
    """4 MB in chunks of one byte took the process 7 s."""
    head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    start = head + b'f\r\n{"prompt": "a"}\r\n'
    with sent(server.port, start + b"1\r\n \r\n" * (MAX_BODY_CHUNKS - 2) + b"0\r\n\r\n") as connection:
        with answer(connection) as response:
            assert response.status == 200
    assert ask(server, start + b"1\r\n \r\n" * MAX_BODY_CHUNKS) == (413, "body_too_large")


def test_a_request_that_expects_100_and_is_malformed_is_refused_once(server):
    left = {"handler": "/generate", "method": "POST", "status": "499"}
    before = server.metric("chargpt_http_requests_total", **left)
    head = b"POST /generate HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert ask(server, head + b"nonsense\r\n") == (400, "invalid_http")
    server.wait_until_metric("chargpt_http_requests_total", before + 1, **left)


def test_a_content_length_may_have_as_many_zeros_as_fit(server):
    with sent(server.port, post("/tokenize", b'{"prompt":"a"}', Content_Length="0" * 5000 + "14")) as connection:
        assert statuses(connection, 1) == [200]


def test_what_is_allowed_at_these_limits(server):
    """99 headers beside Host, chunk extensions, trailers, HTTP/1.0."""
    body = b'd;a=b;c\r\n{"prompt":"a"\r\n1;d\r\n}\r\n0\r\n'
    for data in (GET + b"a: b\r\n" * 99 + b"\r\n", CHUNKED + body + b"\r\n", CHUNKED + body + b"X: y\r\n\r\n"):
        with sent(server.port, data + GET + b"\r\n") as connection:
            assert statuses(connection, 2) == [200, 200]
    start = b"POST /tokenize HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 14\r\n\r\n{"
    with sent(server.port, start) as connection:
        connection.sendall(b'"prompt":"a"}')
        assert b" 200 " in received(connection).splitlines()[0], "HTTP/1.0 knows no 100 (RFC 9110, 10.1.1)"
    with sent(server.port, b"GET http://a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n") as connection:
        assert b" 200 " in received(connection).splitlines()[0], "a target without a path"


def test_http_1_0_gets_no_chunks(server):
    """RFC 9112, section 6.1. A body of unknown length ends with the connection."""
    for more in ({}, {"stream": True}):
        body = json.dumps({"prompt": "a", "max_tokens": 300, "n": 3} | more).encode()
        head = b"POST /generate HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
        with sent(server.port, head + body) as connection:
            head, _, content = received(connection).partition(b"\r\n\r\n")
        assert b" 200 " in head and b"chunked" not in head.lower() and b"\r\nconnection: close" in head
        assert (b"content-length: %d\r\n" % len(content) in head) != bool(more)
    *lines, last = content.strip().split(b"\n\n")
    assert len(lines) > 3 and all(line.startswith(b"data: {") for line in lines)
    assert last == b"data: [DONE]"


def test_pipelined_versions_are_told_apart(server):
    """Of a stream before a request of HTTP/1.0, chunks tell where it ends."""
    stream = post("/generate", {"prompt": "a", "max_tokens": 30, "stream": True})
    with sent(server.port, stream + stream + b"GET /livez HTTP/1.0\r\n\r\n") as connection:
        answers = received(connection).split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert [b"transfer-encoding: chunked" in answer for answer in answers] == [True, True, False]
    assert all(answer.endswith(b"0\r\n\r\n") for answer in answers[:2])


def test_an_upgrade_is_ignored(server):
    upgrade = GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with sent(server.port, upgrade + GET + b"\r\n" + upgrade) as connection:
        assert statuses(connection, 3) == [200, 200, 200]
    assert "Unsupported upgrade" not in server.output()


def test_unusual_methods_share_one_series(server):
    for method in ("PROPFIND", "M-SEARCH", "DELETE"):
        assert web.request(method, f"{server.url}/livez").status_code == 405
    methods = {dict(labels).get("method") for _, labels in server.metrics()}
    assert {"other", "DELETE"} <= methods and not {"PROPFIND", "M-SEARCH"} & methods


# -- time --


def test_slow_headers_and_silent_connections_are_closed(server):
    before = {reason: server.metric(REJECTED, reason=reason) for reason in ("header_timeout", "silent")}
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(sent(server.port, GET)) for _ in range(100)]
        silent = [stack.enter_context(sent(server.port, b"")) for _ in range(100)]
        trickling = stack.enter_context(sent(server.port, b"\r\n"))
        while not is_readable(trickling):
            for connection in (*started, trickling):
                if not is_readable(connection):  # refused already
                    connection.sendall(b"a" if connection is not trickling else b"\r\n")
            time.sleep(0.1)
        assert {refusal(connection) for connection in (*started, trickling)} == {(408, "header_timeout")}
        assert {connection.recv(1) for connection in silent} == {b""}
    server.wait_until_metric(REJECTED, before["header_timeout"] + 101, reason="header_timeout")
    server.wait_until_metric(REJECTED, before["silent"] + 100, reason="silent")


def test_a_later_request_has_the_same_time(server):
    with sent(server.port, GET + b"\r\n") as connection:
        assert statuses(connection, 1) == [200]
        assert ask(server, GET) == (408, "header_timeout")  # this one was idle for longer than headers may take
        connection.sendall(GET)
        assert refusal(connection) == (408, "header_timeout")


def test_a_request_that_began_before_the_last_answer_has_the_same_time(server, few):
    with sent(server.port, GET + b"\r\n" + GET) as connection:
        assert statuses(connection, 1) == [200]
        assert refusal(connection) == (408, "header_timeout")
    later = post("/generate", {"prompt": "a", "max_tokens": ENDLESS, "timeout_seconds": 2.5})
    with sent(few.port, GET + b"\r\n" + later[:20]) as connection:
        assert statuses(connection, 1) == [200]
        connection.sendall(later[20:])
        assert statuses(connection, 1) == [504], "the connection was not idle"


def test_an_idle_connection_is_closed_even_if_it_sends_line_breaks(few):
    with sent(few.port, GET + b"\r\n") as idle:
        assert statuses(idle, 1) == [200]
        with contextlib.suppress(ConnectionError):
            while True:
                idle.sendall(b"\r\n")
                time.sleep(0.05)


def test_a_body_that_comes_after_its_answer_is_dropped(server):
    with sent(server.port, b"POST /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n" + b"x" * 999) as early:
        assert statuses(early, 1) == [405]
        early.sendall(b"x" + GET + b"\r\n")
        assert statuses(early, 1) == [200]


# -- connections --


def connect(port, address="127.0.0.2", data=b""):
    connection = socket.create_connection(("127.0.0.1", port), PATIENCE, source_address=(address, 0))
    connection.sendall(data)
    return connection


def status_of(port, address):
    """The status and the error's code of a probe on a connection of its own."""
    with connect(port, address, GET + b"Connection: close\r\n\r\n") as connection, answer(connection) as response:
        if response.status in (429, 503):
            assert (response.headers["retry-after"], response.headers["connection"]) == ("1", "close")
        return response.status, json.load(response).get("error", {}).get("code")


@pytest.fixture(scope="module")
def few(checkpoint):
    """Accepts 20 connections, which soon are idle for too long."""
    settings = {"max_connections": 20, "max_connections_per_address": 0, "idle_connection_seconds": 1}
    yield from lasting(checkpoint.path, with_header_timeout(1000.0), **settings)


def test_connections_are_limited_in_all_and_probes_are_still_answered(few):
    server = few
    with contextlib.ExitStack() as stack:
        flood = [stack.enter_context(connect(server.port, data=GET)) for _ in range(20)]
        for _ in range(20):
            assert status_of(server.port, "127.0.0.2") == (503, "too_many_connections")
            assert status_of(server.port, "127.0.0.1")[0] == 200
            assert status_of(server.port, "127.0.0.3")[0] == 200
        assert not any(map(is_readable, flood))
        server.wait_until_metric(REJECTED, 20, reason="limit")
        bots = [stack.enter_context(connect(server.port, f"127.0.1.{i}", GET)) for i in range(1, 31)]
        wait_until(lambda: sum(map(is_readable, bots)) >= 14)  # refused
        assert status_of(server.port, "127.0.0.3")[0] == 503
        for connection in bots:
            connection.close()
        for connection in flood:
            connection.close()
        wait_until(lambda: status_of(server.port, "127.0.0.2")[0] == 200)


def test_one_network_counts_as_one_address():
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1%eth0") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") != network_of("10.0.0.2")
    assert {network_of("::1"), network_of("127.0.0.1")} == LOOPBACK


def limited(files, checkpoint, *flags, program=("-m", "service")):
    """A server that may open `files` files per process."""
    port = free_port()
    flags = ["--checkpoint", checkpoint.path, "--port", port, "--threads", 1, *flags]
    command = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "-", sys.executable, *program, *flags]
    return Program(command, port, "/livez")


def test_too_low_a_limit_of_open_files_ends_the_program_with_one_line(checkpoint):
    with limited(32, checkpoint) as server:
        assert server.process.wait(PATIENCE) == 2
        message = "python -m service: the limit of open files (ulimit -n) must be at least 256, got 32\n"
        assert server.output() == message


def test_a_flood_beyond_the_limit_of_open_files_passes(checkpoint):
    options, flags = {"program": with_header_timeout(3.0)}, ["--max-connections-per-address", 0]
    with limited(256, checkpoint, *flags, **options) as server, contextlib.ExitStack() as stack:
        server.wait_until_ready()
        wait_until(lambda: web.get(f"{server.url}/readyz").status_code == 200)
        assert "at most 64 per HTTP process instead of 10000, because the limit of open files is 256" in server.output()
        flood = [stack.enter_context(connect(server.port, data=GET)) for _ in range(1000)]
        wait_until(lambda: status_of(server.port, "127.0.0.1")[0] == 200, otherwise="a probe was not answered")
        main = psutil.Process(server.process.pid)

        def load():
            return [process.cpu_percent(0.1) for process in main.children(recursive=True)]

        wait_until(lambda: sum(load()) < 50, otherwise=lambda: load())
        wait_until(lambda: all(map(is_readable, flood)), otherwise="a connection got no answer")
        wait_until(lambda: status_of(server.port, "127.0.0.2")[0] == 200, otherwise="others were not answered")
        assert web.get(f"{server.url}/readyz").status_code == 200
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0
        assert "Traceback" not in server.output()


def is_readable(connection):
    poll = select.poll()  # select() knows no file beyond 1,023
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def test_connections_per_address_are_limited_in_each_http_process(checkpoint):
    """Each process has its part of the limit."""
    settings = {"http_processes": 2, "max_connections_per_address": 6, "host": "::"}
    program = with_header_timeout(1000.0)
    with serving(checkpoint.path, program, **settings) as server, contextlib.ExitStack() as stack:
        flood = []

        def is_full():
            flood.append(stack.enter_context(connect(server.port, data=GET)))
            return all(status_of(server.port, "127.0.0.2") == (429, "too_many_connections") for _ in range(20))

        wait_until(is_full)
        assert {status_of(server.port, "127.0.0.3")[0] for _ in range(20)} == {200}
        wait_until(lambda: server.metric(REJECTED, reason="address_limit") >= 20)
        for connection in flood:
            connection.close()
        wait_until(lambda: status_of(server.port, "127.0.0.2")[0] == 200)


def test_tls_connections_have_the_same_limits(checkpoint, tmp_path, monkeypatch):
    certificate, key = make_certificate(tmp_path)
    settings = {"tls_certificate": certificate, "tls_key": key, "max_connections": 20}
    context = ssl.create_default_context(cafile=certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    program = with_header_timeout(2.0)
    with serving(checkpoint.path, program, **settings) as server, httpx.Client(verify=context) as server.client:

        def secure(address="127.0.0.2", data=b""):
            connection = context.wrap_socket(connect(server.port, address), server_hostname="127.0.0.1")
            connection.sendall(data)
            return connection

        with contextlib.ExitStack() as stack:
            started = [stack.enter_context(secure(data=GET)) for _ in range(20)]
            with secure(data=GET) as connection:
                assert received(connection).startswith(b"HTTP/1.1 503 ")
            with secure("127.0.0.3", GET + b"Connection: close\r\n\r\n") as probe:
                assert received(probe).startswith(b"HTTP/1.1 200 ")
            assert {refusal(connection) for connection in started} == {(408, "header_timeout")}
        with secure(data=padded(100_000)) as connection:
            assert received(connection).startswith(b"HTTP/1.1 431 ")
        with connect(server.port):  # in its handshake when the server stops
            assert server.stop() == 0
        assert "Traceback" not in server.output() and "graceful shutdown exceeded" not in server.output()


# -- pipelining --


def test_pipelined_requests_are_all_answered(server):
    count = 10_000
    with sent(server.port, b"") as connection, concurrent.futures.ThreadPoolExecutor(1) as pool:
        sending = pool.submit(connection.sendall, (GET + b"\r\n") * count)
        assert web.get(f"{server.url}/livez").status_code == 200  # before any of these answers is read
        assert set(statuses(connection, count)) == {200}
        sending.result()


def test_an_error_comes_after_the_answers_to_earlier_requests(server):
    generate = post("/generate", {"prompt": "a", "max_tokens": 2000})
    with sent(server.port, generate + GET + b"\r\n" + b"nonsense\r\n\r\n") as connection:
        assert re.findall(rb"HTTP/1.1 (\d+)", received(connection)) == [b"200", b"200", b"400"]


def test_requests_that_the_server_does_not_read_yet_have_no_deadline(server):
    first = post("/generate", {"prompt": "a", "max_tokens": ENDLESS, "timeout_seconds": 1.2})  # headers have a second
    with sent(server.port, first + padded(50) * 300) as connection:  # cut by the end of what is parsed at a time
        assert [*statuses(connection, 301)] == [504, *[200] * 300]


def test_a_client_that_leaves_aborts_its_request_whatever_it_has_pipelined(server):
    before = server.metric("chargpt_request_success_total", finished_reason="abort")
    endless = post("/generate", {"prompt": "a", "max_tokens": ENDLESS})
    with sent(server.port, endless + endless):
        server.wait_until_metric("chargpt_num_requests_running", 1)
    server.wait_until_metric("chargpt_num_requests_running", 0)
    server.wait_until_metric("chargpt_request_success_total", before + 1, finished_reason="abort")


def test_a_client_that_leaves_before_anything_runs_is_counted_and_nothing_runs_for_it(server):
    left = {"handler": "/generate", "method": "POST", "status": "499"}
    before, (_, ended) = server.metric("chargpt_http_requests_total", **left), server.endings()
    with sent(server.port, post("/generate", {"prompt": ["a" * 30_000] * 100, "max_tokens": 1})):
        pass
    server.wait_until_metric("chargpt_http_requests_total", before + 1, **left)
    server.wait_until_all_ended()
    assert server.endings()[1] | {"abort": 0} == ended | {"abort": 0}


# -- readers that stop --


def test_a_reader_that_stops_does_not_hold_up_the_shutdown(checkpoint):
    with serving(checkpoint.path, drain_seconds=1) as server:
        body = {"prompt": "a", "max_tokens": 25_000, "stream": True, "logprobs": 5}  # more than fits all buffers
        with sent(server.port, post("/generate", body), receive_bytes=1024):
            server.wait_until_metric("chargpt_generation_tokens_total", 25_000)
            [http] = http_processes(server)
            wait_until(lambda: http.cpu_percent(0.3) < 20)  # it has written what fits
            assert server.stop() == 0
        output = server.output()
        assert not [it for it in ("Traceback", "Forcibly", "graceful shutdown exceeded") if it in output], output


def test_what_still_runs_after_the_drain_ends_with_an_error(checkpoint):
    """A request whose body is awaited too."""
    with serving(checkpoint.path, drain_seconds=0.2) as server, concurrent.futures.ThreadPoolExecutor(2) as pool:

        def ask(stream):
            body = {"prompt": "a", "max_tokens": ENDLESS, "stream": stream}
            response = web.post(f"{server.url}/generate", json=body)
            return response.status_code, pieces(response)[-1] if stream else response.json()

        with sent(server.port, post("/generate", b"{", Content_Length=100)) as unfinished:
            running = pool.map(ask, (False, True))
            server.wait_until_metric("chargpt_num_requests_running", 2)
            server.wait_until_metric("chargpt_http_requests_in_progress", 4)  # with that for the metrics
            assert server.stop() == 0
            with answer(unfinished) as response:
                found = [(response.status, json.load(response)), *running]
        assert [status for status, _ in found] == [503, 503, 200]
        assert {it["error"]["code"] for _, it in found} == {"shutting_down"}
        assert "Traceback" not in server.output()
