"""What one client sends to stop the others, or to have its bytes taken for another's: each was possible once."""

import contextlib
import socket
import ssl
import threading
import time

import httpx
import pytest

from tests.helpers import ENDLESS, http_processes, lasting, make_certificate, serving, wait_until, web
from tests.toolbox.http import answer, post, received, sent

GET = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
BOUND = 16_000_000  # bytes that any one connection may make the process hold over idle
KEY = "0123456789abcdef0123456789abcdef"
LONGEST_WAIT = 0.5  # seconds of another client, on a machine that runs other tests; tests/chaos measures it


@pytest.fixture(scope="module")
def server(checkpoint):
    yield from lasting(checkpoint.path)


def peak_over_idle(server, attack):
    """Bytes by which the HTTP process grows at most while `attack` runs."""
    [http] = http_processes(server)
    web.get(f"{server.url}/openapi.json")  # what each thread and cache takes once
    before = http.memory_info().rss
    with open(f"/proc/{http.pid}/clear_refs", "w") as file:
        file.write("5")  # VmHWM begins anew
    attack()
    with open(f"/proc/{http.pid}/status") as file:
        [peak] = [int(line.split()[1]) for line in file if line.startswith("VmHWM")]
    assert http.is_running() and web.get(f"{server.url}/livez").status_code == 200
    return 1024 * peak - before


@contextlib.contextmanager
def waits_of_another(server):
    """How long each /livez of another client takes meanwhile, in seconds."""
    waits, is_over = [], threading.Event()

    def ask():
        while not is_over.is_set():
            begun = time.monotonic()
            assert web.get(f"{server.url}/livez", timeout=20).status_code == 200
            waits.append(time.monotonic() - begun)
            time.sleep(0.01)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield waits
    finally:
        is_over.set()
        thread.join()


def drain(connection):
    """Read everything, however it ends."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        received(connection)


def push(connection, data, seconds):
    """Send as much as is taken within some seconds, and read nothing."""
    connection.settimeout(seconds)
    with contextlib.suppress(TimeoutError, ConnectionError):
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
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            push(connection, data, 1)
            time.sleep(0.5)

    assert peak_over_idle(server, attack) < BOUND


def test_streams_and_whole_answers_that_nobody_reads_are_bounded(server):
    body = {"prompt": "a", "max_tokens": 100_000}
    data = (post("/generate", body) + post("/generate", body | {"stream": True})) * 20

    def attack():
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            push(connection, data, 1)
            time.sleep(2)

    assert peak_over_idle(server, attack) < BOUND


@pytest.mark.parametrize("reads", [False, True])
def test_pipelined_requests_do_not_stop_the_others(server, reads):
    with contextlib.ExitStack() as stack:
        flood = [stack.enter_context(sent(server.port, b"")) for _ in range(4)]
        threads = [threading.Thread(target=push, args=(connection, GET * 100_000, 3)) for connection in flood]
        if reads:
            threads += [threading.Thread(target=drain, args=(connection,)) for connection in flood]
        with waits_of_another(server) as waits:
            for thread in threads:
                thread.start()
            time.sleep(3)
            for connection in flood:
                connection.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
    assert max(waits) < LONGEST_WAIT, sorted(waits)[-5:]


def test_a_pipelined_request_that_has_come_whole_is_answered(server):
    """It waited for bytes that had come already, and was refused for being late."""
    one = post("/generate", {"prompt": "a" * 5000, "max_tokens": 1})
    count = 60
    with sent(server.port, b"") as connection:
        sender = threading.Thread(target=push, args=(connection, one * count, 60))
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
            connections = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(30)]
            for connection in connections:
                connection.sendall(head)
            for _ in range(3):  # within max_body_bytes
                for connection in connections:
                    push(connection, chunk, 10)
            for connection in connections:
                connection.settimeout(20)
                connection.sendall(b"0\r\n\r\n")
                with answer(connection) as response:
                    assert response.status == 200

    assert peak_over_idle(server, attack) < BOUND
    with sent(server.port, head + chunk * 5) as connection, answer(connection) as response:
        assert response.status == 413


# -- A5: TLS --


def test_what_a_tls_connection_once_sent_or_received_is_not_kept(checkpoint, tmp_path, monkeypatch):
    certificate, key = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.create_default_context(cafile=certificate)
    (keys := tmp_path / "keys").write_text(KEY)
    settings = {"tls_certificate": certificate, "tls_key": key, "api_keys_file": keys}
    with serving(checkpoint.path, **settings) as server, httpx.Client(verify=context) as server.client:
        [http] = http_processes(server)
        large = b'"prompt": "%b"' % (b"a" * 250_000)
        key = {"Authorization": f"Bearer {KEY}"}
        requests = {
            "large body": (
                200,
                post("/generate", b'{%b, "truncate_prompt_tokens": 5}' % large, **key),
            ),
            "large answer": (200, post("/tokenize", b"{%b}" % large, **key)),
            "no key": (401, post("/tokenize", b"{%b}" % large)),
        }
        for kind, (status, data) in requests.items():
            with contextlib.ExitStack() as stack:

                def ask(count, data=data, status=status, stack=stack):
                    for _ in range(count):
                        plain = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                        connection = stack.enter_context(context.wrap_socket(plain, server_hostname="127.0.0.1"))
                        with contextlib.suppress(ConnectionError):  # an error is sent before the end of the body
                            connection.sendall(data)
                        with answer(connection) as response:
                            assert response.status == status
                            response.read()
                    wait_until(lambda: not [it for it in http.net_connections("tcp") if it.status == "ESTABLISHED"])
                    return http.memory_info().rss

                count = 60
                before = ask(count)  # with what the process itself needs for so many
                kept = (ask(count) - before) / count
                assert kept < 300_000, f"{kind}: {kept:.0f} bytes of a connection"


# -- A10: with middlewares --

PROGRAM = """
import sys
from service.__main__ import serve
from service.settings import read_settings

class Answering:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if not scope["path"].startswith("/status/"):
            return await self.app(scope, receive, send)
        await send({"type": "http.response.start", "status": int(scope["path"][8:]), "headers": []})
        await send({"type": "http.response.body", "body": b"own"})

sys.exit(serve(read_settings(), middlewares=[Answering]))
"""


@pytest.fixture(scope="module")
def wrapped(checkpoint, tmp_path_factory):
    """A server with a middleware and a key."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    with serving(checkpoint.path, ("-c", PROGRAM), api_keys_file=keys, public_metrics=True) as server:
        yield server


def test_middlewares_run_once_the_key_was_checked_and_bodies_are_admitted(wrapped):
    [http] = http_processes(wrapped)
    before = http.memory_info().rss
    with contextlib.ExitStack() as stack:
        data = post("/generate", b'{"prompt": "' + b"a" * 3_900_000, Content_Length=4_000_000)
        for _ in range(20):
            connection = stack.enter_context(sent(wrapped.port, b""))
            push(connection, data, 5)
            connection.settimeout(20)
            with answer(connection) as response:
                assert response.status == 401
        assert http.memory_info().rss - before < BOUND
    for status in (299, 418, 520):
        response = web.get(f"{wrapped.url}/status/{status}", headers={"Authorization": f"Bearer {KEY}"})
        assert (response.status_code, response.content) == (status, b"own")
    assert web.get(f"{wrapped.url}/status/299").status_code == 401
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
    with contextlib.ExitStack() as stack, waits_of_another(server) as waits:
        for _ in range(200):
            stack.enter_context(sent(server.port, b"\r\n" * 16_000))
        time.sleep(1)
    assert max(waits) < LONGEST_WAIT, sorted(waits)[-5:]
