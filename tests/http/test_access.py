"""Access over real sockets: API keys, CORS, path prefix, slow bodies, TLS."""

import contextlib
import json
import os
import select
import signal
import socket
import ssl
import subprocess
import time

import httpx
import pytest
from starlette.testclient import TestClient

from service.http.app import EXPOSED_HEADERS
from service.server import build_server
from service.settings import Settings
from tests.helpers import ENDLESS, RunningServer, http_processes, lasting, make_certificate, wait_until, web
from tests.http.programs import changed
from tests.toolbox.http import PATIENCE, answer, post, received, sent
from tests.toolbox.needs import program

KEYS = ["first-key-0123", 'odd~!"%&/()=#', "last" * 50]
ORIGIN = "https://app.example.org"
PROTECTED = ["/info", "/", "/page/page.js", "/docs", "/openapi.json", "/nothing", "/readyz/", "/livez/../info"]


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.txt"
    path.write_bytes(
        b"# of the first team\n%b\r\n\n   \n%b\n#%b\n%b" % (*map(str.encode, KEYS[:2]), b"x" * 9, KEYS[2].encode())
    )
    return path


@pytest.fixture(scope="module")
def server(checkpoint, keys_file):
    settings = {
        "api_keys_file": keys_file, "public_metrics": "true", "cors_origins": f"http://localhost:3000,{ORIGIN}",
        "root_path": "/chargpt", "request_timeout_seconds": 1000,
        "max_body_bytes": 100_000, "log_level": "debug",
    }  # fmt: skip
    program = changed({"service.http.app.BODY_TIMEOUT_SECONDS": 0.5})
    for server in lasting(checkpoint.path, program, **settings):
        yield server
        command_lines = " ".join(" ".join(process.cmdline()) for process in server.processes())
        assert not [key for key in KEYS if key in server.output() + command_lines]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def https_server(checkpoint, keys_file, certificate):
    settings = {"api_keys_file": keys_file, "public_docs": "true", "cors_origins": "*", "http_processes": 2}
    settings |= {"tls_certificate": certificate[0], "tls_key": certificate[1]}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))  # trusted by httpx
        yield from lasting(checkpoint.path, **settings)


def test_protected_routes_require_a_key(server):
    for method, path in (*(("GET", path) for path in PROTECTED), ("POST", "/generate"), ("OPTIONS", "/generate")):
        response = web.request(method, server.url + path)
        assert response.status_code == 401, (method, path)
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
        assert len(response.headers["x-request-id"]) == 32


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/metrics"])
def test_probes_and_public_metrics_need_no_key(server, path):
    assert web.get(server.url + path).status_code == 200
    assert web.get(f"{server.url}/chargpt{path}").status_code == 200


@pytest.mark.parametrize("key", KEYS, ids=["first", "odd", "long"])
def test_every_key_grants_access(server, key):
    for scheme in ("Bearer", "bearer", "BEARER", "Bearer  "):
        headers = {"Authorization": f"{scheme} {key}"}
        assert web.get(f"{server.url}/info", headers=headers).status_code == 200, scheme
    assert web.get(f"{server.url}/nothing", headers=bearer(key)).status_code == 404
    assert web.put(f"{server.url}/generate", headers=bearer(key)).status_code == 405
    assert web.get(f"{server.url}/docs", headers=bearer(key)).status_code == 200


def test_invalid_credentials_are_rejected_and_not_echoed(server):
    for authorization in (
        "", KEYS[0], f"Basic {KEYS[0]}", f"Bearer {KEYS[0][:-1]}", f"Bearer {KEYS[0]}4", f"Bearer {KEYS[0]} {KEYS[2]}",
        "Bearer # of the first team", f"Bearer {'x' * 9}", f"Bearer {'x' * 30_000}", b"Bearer \xff\xfe",
    ):  # fmt: skip
        response = web.get(f"{server.url}/info", headers={"Authorization": authorization})
        assert response.status_code == 401, authorization
        assert KEYS[0][:-1] not in response.text


def test_more_than_one_authorization_header_is_refused(server):
    valid, other = (b"Authorization: Bearer %b\r\n" % key.encode() for key in (KEYS[0], "another-key"))
    for headers, status in ((valid, 200), (valid + other, 400), (other + valid, 400), (valid + valid, 400)):
        with sent(server.port, b"GET /info HTTP/1.1\r\nHost: a\r\n" + headers + b"\r\n") as connection:
            with answer(connection) as response:
                assert response.status == status


@pytest.mark.parametrize("length", [1000, 1_000_000])
def test_key_is_checked_before_the_body_is_read(server, length):
    head = post("/generate", b"", Connection="close", Content_Length=length, Expect="100-continue")
    with sent(server.port, head) as connection:
        assert received(connection).startswith(b"HTTP/1.1 401 ")  # reading the body would have sent 100 first


def preflight(server, origin):
    """With the headers of the openai SDK."""
    headers = {"Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}
    headers |= {"Origin": origin, "Access-Control-Request-Method": "POST"}
    return web.options(f"{server.url}/v1/completions", headers=headers)


@pytest.mark.parametrize("origin", [ORIGIN, "http://localhost:3000"])
def test_preflight_needs_no_key(server, origin):
    response = preflight(server, origin)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == origin
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("origin", ["http://app.example.org", f"{ORIGIN}:8443"])
def test_unlisted_origin_is_not_allowed(server, origin):
    response = preflight(server, origin)
    assert response.status_code == 400
    assert "access-control-allow-origin" not in response.headers
    response = web.get(f"{server.url}/info", headers={"Origin": origin} | bearer(KEYS[0]))
    assert "access-control-allow-origin" not in response.headers
    assert "Origin" in response.headers["vary"]


def test_error_responses_carry_cors_headers(server):
    def ask(method, path, status, key=KEYS[0], **body):
        headers = {"Origin": ORIGIN, "Content-Type": "application/json"} | bearer(key)
        response = web.request(method, server.url + path, headers=headers, **body)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert response.headers["access-control-expose-headers"] == ", ".join(EXPOSED_HEADERS)
        assert response.headers["x-request-id"]
        return response.json()

    ask("GET", "/info", 200)
    ask("GET", "/info", 401, key="wrong-key")
    ask("GET", "/nothing", 404)
    ask("POST", "/generate", 400, json={"prompt": "漢"})
    ask("POST", "/generate", 413, content=b"x" * 100_001)
    ask("POST", "/generate", 413, content=(b"x" * 60_000 for _ in range(2)))
    assert (
        ask("POST", "/generate", 504, json={"max_tokens": ENDLESS, "timeout_seconds": 0.1})["error"]["code"]
        == "timeout"
    )


def test_keys_and_certificate_change_at_sighup_and_invalid_files_change_nothing(checkpoint, tmp_path):
    """A process that is replaced has what was last valid, whatever is in the files."""
    keys, (certificate, key) = tmp_path / "keys.txt", make_certificate(tmp_path)
    keys.write_text("first-key-0123\n")
    settings = {"api_keys_file": keys, "tls_certificate": certificate, "tls_key": key}
    with RunningServer(checkpoint.path, **settings) as server, httpx.Client(verify=False) as client:

        def asked(name, path="/info"):
            with contextlib.suppress(httpx.TransportError):
                return client.get(f"{server.url}{path}", headers=bearer(name))

        def status(name):
            return (found := asked(name)) and found.status_code

        def presented():
            return ssl.get_server_certificate(("127.0.0.1", server.port)).split()

        def shown(name, what=""):
            lines = asked("second-key-0123", "/metrics").text.splitlines()
            found = [line.split() for line in lines if line.startswith(name + "{") and what in line]
            return sum(float(value) for _, value in found)

        def expiry():
            return shown("chargpt_tls_certificate_expiry_timestamp_seconds")

        def successes():
            names = ("api_keys", "certificate", "client_limits", "checkpoints")
            return [shown("chargpt_last_reload_successful", f'what="{name}"') for name in names]

        def oldest():
            return shown("chargpt_last_reload_success_timestamp_seconds", 'what="api_keys"')

        wait_until(lambda: status("first-key-0123") == 200)
        first = presented()
        assert first == certificate.read_text().split() and status("second-key-0123") == 401
        keys.write_text("second-key-0123\n")
        make_certificate(tmp_path)
        os.kill(server.process.pid, signal.SIGHUP)
        wait_until(lambda: status("second-key-0123") == 200 and presented() != first)
        second = certificate.read_text().split()
        assert presented() == second and status("first-key-0123") == 401
        command = [program("openssl"), "x509", "-enddate", "-noout", "-in", certificate]
        date = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        end = ssl.cert_time_to_seconds(date.strip().removeprefix("notAfter="))
        wait_until(lambda: expiry() == end > time.time())
        wait_until(lambda: successes() == [1, 1, 0, 1])  # without a file of limits there is no series
        read_at = oldest()
        keys.write_text("short\n")
        certificate.write_text("nonsense")
        key.unlink()
        os.kill(server.process.pid, signal.SIGHUP)
        wait_until(lambda: all(f"{what} not changed" in server.output() for what in ("API keys", "certificate")))
        (http,) = http_processes(server)
        for is_replaced in (False, True):
            if is_replaced:
                http.kill()
                wait_until(lambda: (found := http_processes(server)) and found[0].pid != http.pid)
            wait_until(lambda: status("second-key-0123") == 200)
            assert status("first-key-0123") == 401 and presented() == second
            wait_until(lambda: successes() == [0, 0, 0, 1])
            assert oldest() == read_at
        wait_until(lambda: expiry() == end)
        keys.write_text("second-key-0123\n")
        os.kill(server.process.pid, signal.SIGHUP)
        wait_until(lambda: successes() == [1, 0, 0, 1] and oldest() > read_at)
        assert server.stop() == 0


def test_routes_answer_with_and_without_the_prefix(server):
    for prefix in ("", "/chargpt"):
        body = {"prompt": "abc", "max_tokens": 4, "seed": 1}
        response = web.post(f"{server.url}{prefix}/generate", json=body, headers=bearer(KEYS[0]))
        assert response.json()["usage"]["completion_tokens"] == 4
        document = web.get(f"{server.url}{prefix}/openapi.json", headers=bearer(KEYS[0])).json()
        assert document["servers"] == [{"url": "/chargpt"}]
        page = web.get(f"{server.url}{prefix}/docs", headers=bearer(KEYS[0])).text
        assert "url: 'openapi.json'" in page  # relative to the page
        assert web.get(f"{server.url}{prefix}/", headers=bearer(KEYS[0])).status_code == 200
    bare = web.get(f"{server.url}/chargpt", headers=bearer(KEYS[0]))
    assert (bare.status_code, bare.headers["location"]) == (307, "chargpt/")  # so that the page's links are right
    for path in ("/chargptgenerate", "/chargpt/chargpt/generate", "/other/generate"):
        assert web.get(server.url + path, headers=bearer(KEYS[0])).status_code == 404, path


@pytest.mark.parametrize("root_path", ["/v1", "/generate", "/deep/er"])
def test_prefix_may_equal_a_route(root_path, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    app = build_server(Settings(checkpoint=checkpoint.path, root_path=root_path)).http
    client = TestClient(app)
    for prefix in ("", root_path):
        assert client.get(f"{prefix}/v1/models").json()["object"] == "list"
        assert client.delete(f"{prefix}/generate").status_code == 405


@contextlib.contextmanager
def trickled(server):
    """The response to a request whose body arrives byte by byte, and whose client goes on sending."""
    head = post("/generate", b"", Content_Length=90_000, X_Request_Id="slow", **bearer(KEYS[0]))
    with sent(server.port, head) as connection:
        while not select.select([connection], [], [], 0.1)[0]:
            connection.sendall(b" ")
        for _ in range(5):
            connection.sendall(b" " * 1000)
        with answer(connection) as response:
            yield response


def test_trickled_body_times_out_with_408_that_can_be_read(server):
    with trickled(server) as response:
        assert response.status == 408
        assert response.headers["x-request-id"] == "slow"
        error = json.load(response)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "body_timeout")
    assert "within 0.5 s" in error["message"]


def test_request_outlives_the_body_timeout_and_aborts_on_disconnect(server):
    aborted = server.metric("chargpt_request_success_total", finished_reason="abort")
    body = {"prompt": "a", "max_tokens": ENDLESS}
    with sent(server.port, post("/generate", body, **bearer(KEYS[0]))):
        server.wait_until_metric("chargpt_num_requests_running", 1)
        with trickled(server) as response:  # started later and timed out
            assert response.status == 408
        assert server.metric("chargpt_num_requests_running") == 1
    server.wait_until_metric("chargpt_request_success_total", aborted + 1, finished_reason="abort")


def test_every_http_process_serves_tls(https_server):
    body = {"prompt": "abc", "max_tokens": 5, "seed": 1}
    texts = set()
    for _ in range(8):
        response = httpx.post(f"{https_server.url}/generate", json=body, headers=bearer(KEYS[2]), timeout=PATIENCE)
        texts.add(response.json()["choices"][0]["text"])
    assert len(texts) == 1
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{https_server.port}/livez")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{https_server.url}/livez", verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))  # no trusted CA


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1")
def test_tls_1_2_is_the_minimum(https_server, certificate):
    def handshake(minimum, maximum):
        context = ssl.create_default_context(cafile=certificate[0])
        context.set_ciphers("ALL:@SECLEVEL=0")  # otherwise the client would refuse
        context.minimum_version, context.maximum_version = minimum, maximum
        with socket.create_connection(("127.0.0.1", https_server.port), timeout=PATIENCE) as connection:
            with context.wrap_socket(connection, server_hostname="127.0.0.1") as secure:
                return secure.version()

    version = ssl.TLSVersion
    assert handshake(version.TLSv1_2, version.TLSv1_2) == "TLSv1.2"
    assert handshake(version.TLSv1_3, version.TLSv1_3) == "TLSv1.3"
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION|UNEXPECTED_EOF"):  # both caused by the server
        handshake(version.TLSv1, version.TLSv1_1)


def test_public_docs_setting_leaves_metrics_protected(https_server):
    for path, status in (("/", 200), ("/page/page.js", 200), ("/docs", 200), ("/metrics", 401), ("/info", 401)):
        response = httpx.get(https_server.url + path, headers={"Origin": "https://anyone.example.org"})
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == "*"
    assert httpx.get(f"{https_server.url}/metrics", headers=bearer(KEYS[0])).status_code == 200
