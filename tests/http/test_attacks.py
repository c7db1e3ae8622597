"""What one client sends to stop the others, or to have its bytes taken for another's: each was possible once."""

import contextlib
import socket
import threading

import pytest

from tests.helpers import ENDLESS, lasting, serving, wait_until, web
from tests.http.programs import COUNTING, COUNTING_WITH_MIDDLEWARE
from tests.toolbox.http import answer, post, received, sent

GET = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
BOUND = 16_000_000  # bytes that any one connection may make Python allocate in the process
KEY = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def server(checkpoint):
    """Counts what Python allocates; tests/chaos measures the memory, and the waits of another client."""
    yield from lasting(checkpoint.path, COUNTING)


def traced(server):
    return server.client.get(f"{server.url}/traced", headers={"Authorization": f"Bearer {KEY}"}).json()


def peak_over_idle(server, attack):
    """Bytes by which Python's memory grows at most while `attack` runs."""
    traced(server)
    web.get(f"{server.url}/openapi.json")  # what each thread and cache takes once
    before = traced(server)["traced"]
    attack()
    others_are_answered(server)
    return traced(server)["peak"] - before


def others_are_answered(server):
    """Each of these answers lets every connection have its turn."""
    for _ in range(50):
        assert web.get(f"{server.url}/livez").status_code == 200


def drain(connection):
    """Read everything, however it ends."""
    found = bytearray()
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            found += data
    return found


def push(connection, data):
    """Send as much as is taken, and read nothing."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(data)


# -- A1: an upgrade that is not made --

SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
OFFERS = {
    "any": {"Connection": "upgrade", "Upgrade": "x"},
    "websocket": {"Connection": "keep-alive, Upgrade", "Upgrade": "websocket"},
    "h2c": {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2_Settings": "AAMAAABkAAQAAP__"},
}


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
@pytest.mark.parametrize("pieces", [1, 40])
def test_the_body_of_a_request_that_offers_an_upgrade_is_its_body(server, offer, pieces):
    """RFC 9110, 7.8: a server may ignore the offer; the body then ran as the next request."""
    plain = post("/tokenize", b'{"prompt": "abc"}', **offer)
    chunked = plain.replace(b"Content-Length: 17", b"Transfer-Encoding: chunked").replace(
        b'{"prompt": "abc"}', b'5\r\n{"pro\r\nc\r\nmpt": "abc"}\r\n0\r\nX: y\r\n\r\n'
    )
    smuggling = post("/tokenize", SMUGGLED, **offer)
    for data, status in ((plain, b"200"), (chunked, b"200"), (smuggling, b"400")):
        last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        with sent(server.port, b"") as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            whole = data + GET + last
            for start in range(0, len(whole), size := -(-len(whole) // pieces)):
                connection.sendall(whole[start : start + size])
            found = [part.split(b"\r\n")[0] for part in received(connection).split(b"HTTP/1.1 ")[1:]]
        assert [line.split()[0] for line in found] == [status, b"200", b"200"]


# -- A2, A3, A7: pipelines --


@pytest.mark.parametrize("target", ["/openapi.json", "/docs", "/livez", "/v1/models", "/nothing", "/metrics"])
def test_answers_that_nobody_reads_are_not_made(server, target):
    data = b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % target.encode() * 2000

    def attack():
        connection.sendall(data)  # fits the buffers of the system

    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        assert peak_over_idle(server, attack) < BOUND


def test_streams_and_whole_answers_that_nobody_reads_are_bounded(server):
    body = {"prompt": "a", "max_tokens": 100_000}
    data = (post("/generate", body) + post("/generate", body | {"stream": True})) * 20
    before = server.metric("chargpt_generation_tokens_total")

    def attack():
        connection.sendall(data)
        wait_until(lambda: server.metric("chargpt_generation_tokens_total") >= before + 200_000)

    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        assert peak_over_idle(server, attack) < BOUND


@pytest.mark.parametrize("reads", [False, True])
def test_pipelined_requests_do_not_stop_the_others(server, reads):
    """Others are answered before all of these are."""
    count = 100_000
    with contextlib.ExitStack() as stack:
        flood = [stack.enter_context(sent(server.port, GET)) for _ in range(4)]
        for connection in flood:
            assert connection.recv(1)
        threads = [threading.Thread(target=push, args=(connection, GET * count)) for connection in flood]
        ended = []
        if reads:
            threads += [threading.Thread(target=lambda it=it: ended.append(len(drain(it)))) for it in flood]
        for thread in threads:
            thread.start()
        others_are_answered(server)
        assert not ended
        for connection in flood:
            connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
    assert all(length < 100 * count for length in ended)


def test_a_pipelined_request_that_has_come_whole_is_answered(server):
    """It waited for bytes that had come already, and was refused for being late."""
    one = post("/generate", {"prompt": "a" * 5000, "max_tokens": 1})
    count = 60
    with sent(server.port, b"") as connection:
        sender = threading.Thread(target=push, args=(connection, one * count))
        sender.start()
        found = b""
        while found.count(b"HTTP/1.1 200 OK\r\n") < count:
            assert (data := connection.recv(1 << 16)), found[-1000:]
            found += data
        sender.join()


# -- A4: bodies where none is expected --


def test_a_body_that_no_route_asks_for_is_not_kept(server):
    head = b"GET /metrics HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"100000\r\n%b\r\n" % bytes(1 << 20)

    def attack():
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(6)]
            for connection in connections:
                connection.sendall(head)
            for _ in range(3):  # within max_body_bytes
                for connection in connections:
                    push(connection, chunk)
            for connection in connections:
                connection.sendall(b"0\r\n\r\n")
                with answer(connection) as response:
                    assert response.status == 200

    assert peak_over_idle(server, attack) < BOUND / 2
    with sent(server.port, b"") as connection:
        push(connection, head + chunk * 50)  # the connection ends before all of it is read
        drain(connection)


# -- A10: with middlewares --


@pytest.fixture(scope="module")
def wrapped(checkpoint, tmp_path_factory):
    """A server with a middleware and a key."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    with serving(checkpoint.path, COUNTING_WITH_MIDDLEWARE, api_keys_file=keys, public_metrics=True) as server:
        yield server


def test_bodies_are_admitted_behind_middlewares(wrapped):
    traced(wrapped)
    before = traced(wrapped)["traced"]
    with contextlib.ExitStack() as stack:
        data = post("/generate", b'{"prompt": "' + b"a" * 3_900_000, Content_Length=4_000_000)
        for _ in range(10):
            connection = stack.enter_context(sent(wrapped.port, b""))
            push(connection, data)
            with answer(connection) as response:
                assert response.status == 401
        assert traced(wrapped)["peak"] - before < BOUND
    for status in (299, 418, 520):
        response = web.get(f"{wrapped.url}/status/{status}")
        assert (response.status_code, response.content) == (status, b"own")
    body = {"prompt": "a", "max_tokens": 30, "stream": True}
    response = web.post(f"{wrapped.url}/generate", json=body, headers={"Authorization": f"Bearer {KEY}"})
    assert response.text.endswith("data: [DONE]\n\n")


def test_a_client_that_leaves_ends_its_request_behind_middlewares_too(wrapped):
    for more in ({}, {"stream": True}):
        endless = post("/generate", {"prompt": "a", "max_tokens": ENDLESS} | more, Authorization=f"Bearer {KEY}")
        with sent(wrapped.port, endless):
            wrapped.wait_until_metric("chargpt_num_requests_running", 1)
        wrapped.wait_until_metric("chargpt_num_requests_running", 0)
        wrapped.wait_until_metric("chargpt_http_requests_in_progress", 1)  # that for the metrics


def test_answers_without_a_body_have_none_behind_middlewares_either(wrapped):
    key = f"Authorization: Bearer {KEY}\r\n".encode()
    head = b"HEAD /livez HTTP/1.1\r\nHost: a\r\n" + key + b"\r\n"
    last = b"GET /livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    with sent(wrapped.port, head + head + last) as connection:
        answers = received(connection).split(b"HTTP/1.1 200 OK\r\n")
    assert [answer.endswith(b"\r\n\r\n") for answer in answers[1:3]] == [True, True]
    assert b"alive" not in answers[1] + answers[2] and b"chunked" not in answers[1] and b"alive" in answers[3]


def test_line_breaks_before_a_request_do_not_stop_the_others(server):
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(sent(server.port, b"\r\n" * 16_000))
        others_are_answered(server)
