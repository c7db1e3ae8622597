"""httplint, the checks of REDbot, finds nothing wrong with one answer of each kind."""

import contextlib
import http.client
import io
import socket
import time
import warnings

import pytest

from service.http.connection.guard import MAX_HEADER_BYTES
from tests.helpers import lasting
from tests.http.programs import changed
from tests.toolbox.http import post, received, sent

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from httplint import HttpRequestLinter, HttpResponseLinter, levels

KEY = "0123456789abcdef0123456789abcdef"
SETTINGS = {"max_body_bytes": 1 << 16, "cors_origins": "https://page.example"}
IMPATIENT = changed(
    {"service.http.connection.guard.HEADER_TIMEOUT_SECONDS": 1.0, "service.http.app.BODY_TIMEOUT_SECONDS": 1.0}
)
HOST = b"Host: 127.0.0.1\r\nUser-Agent: a\r\nConnection: close\r\n"
OWN = {"User_Agent": "a", "Connection": "close"}
ACCEPTED = {
    "STATUS_BAD_REQUEST": "says what 400 means",
    "STATUS_URI_TOO_LONG": "says what 414 means",
    "STATUS_VERSION_NOT_SUPPORTED": "says what 505 means",
    "VARY_COMPLEX": "a preflight is not cached",
}


@pytest.fixture(scope="module")
def server(checkpoint):
    yield from lasting(checkpoint.path, IMPATIENT, **SETTINGS)


@pytest.fixture(scope="module")
def guarded(checkpoint, tmp_path_factory):
    """Needs a key, and accepts two connections."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n")
    yield from lasting(checkpoint.path, api_keys_file=keys, max_connections_per_address=2)


def get(path, method=b"GET", *lines):
    return b"%b %b HTTP/1.1\r\n%b%b\r\n" % (method, path, HOST, b"".join([line + b"\r\n" for line in lines]))


def generate(**body):
    return post("/generate", {"prompt": "a", "max_tokens": 3} | body, **OWN)


ANSWERS = {  # name -> (request, status)
    "info": (get(b"/info"), 200),
    "head": (get(b"/info", b"HEAD"), 200),
    "page": (get(b"/"), 200),
    "metrics": (get(b"/metrics"), 200),
    "livez": (get(b"/livez"), 200),
    "models": (get(b"/v1/models"), 200),
    "openapi": (get(b"/openapi.json"), 200),
    "generate": (generate(), 200),
    "stream": (generate(stream=True), 200),
    "old stream": (generate(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0", 1), 200),
    "completion": (post("/v1/completions", {"prompt": "a", "max_tokens": 3}, **OWN), 200),
    "options": (get(b"/generate", b"OPTIONS"), 405),
    "preflight": (
        get(b"/generate", b"OPTIONS", b"Origin: https://page.example", b"Access-Control-Request-Method: POST"), 200,
    ),
    "cors": (get(b"/info", b"GET", b"Origin: https://page.example"), 200),
    "method": (get(b"/info", b"DELETE"), 405),
    "path": (get(b"/nothing"), 404),
    "invalid": (generate(prompt=1), 400),
    "not JSON": (post("/generate", b"{", **OWN), 400),
    "content type": (post("/generate", b"{}", Content_Type="text/csv", **OWN), 415),
    "too large": (post("/generate", b"x", Content_Length=1 << 20, **OWN), 413),
    "slow body": (post("/generate", b"x", Content_Length=2, **OWN), 408),
    "slow head": (get(b"/")[:-2], 408),
    "large head": (get(b"/", b"GET", b"X: " + b"x" * MAX_HEADER_BYTES), 431),
    "large target": (get(b"/" + b"x" * MAX_HEADER_BYTES), 414),
    "malformed": (get(b"/", b"GET", b"X : 1"), 400),
    "host": (get(b"/", b"GET", b"Host: b"), 400),
    "coding": (get(b"/", b"GET", b"Transfer-Encoding: gzip, chunked"), 501),
    "version": (get(b"/").replace(b"HTTP/1.1", b"HTTP/2.0"), 505),
    "connect": (get(b"a.example:443", b"CONNECT"), 400),
}  # fmt: skip


def linted(request, response):
    """What httplint finds wrong: [(name, summary)]; and the parsed answer."""
    method, target, _ = request.split(b"\r\n", 1)[0].split(b" ", 2)
    asked = HttpRequestLinter()
    asked.process_request_topline(method, b"http://127.0.0.1" + target if target[:1] == b"/" else target, b"1.1")
    head = request.split(b"\r\n\r\n", 1)[0].split(b"\r\n")[1:]
    asked.process_headers([tuple(line.split(b": ", 1)) for line in head if b": " in line])
    asked.finish_content(True)
    head, _, rest = response.partition(b"\r\n\r\n")
    line, *lines = head.split(b"\r\n")
    version, status, phrase = line.split(b" ", 2)
    given = HttpResponseLinter(start_time=time.time())
    given.is_head_response = method == b"HEAD"
    given.request = asked
    given.process_response_topline(version.removeprefix(b"HTTP/"), status, phrase)
    given.process_headers([tuple(line.split(b": ", 1)) for line in lines])
    answer = http.client.HTTPResponse(Replay(response), method=method.decode())
    answer.begin()
    given.feed_content(answer.read())
    given.finish_content(True)
    notes = [*given.notes, *[sub for note in given.notes for sub in note.subnotes]]
    wrong = {type(it).__name__: str(it) for it in notes if it.level in (levels.BAD, levels.WARN)}
    return wrong, answer


class Replay:
    """A socket that was read."""

    def __init__(self, data):
        self.data = data

    def makefile(self, mode):
        return io.BytesIO(self.data)


def check(request, response, status):
    wrong, answer = linted(request, response)
    assert answer.status == status
    assert {name: text for name, text in wrong.items() if name not in ACCEPTED} == {}
    return answer


def test_an_answer_has_no_flaw(server):
    with contextlib.ExitStack() as stack:
        connections = {name: stack.enter_context(sent(server.port, request)) for name, (request, _) in ANSWERS.items()}
        for name, (request, status) in ANSWERS.items():
            try:
                check(request, received(connections[name]), status)
            except AssertionError as error:
                raise AssertionError(name) from error


def test_a_file_that_has_not_changed_has_no_flaw(server):
    with sent(server.port, get(b"/")) as connection:
        tag = check(get(b"/"), received(connection), 200).headers["etag"]
    request = get(b"/", b"GET", b"If-None-Match: " + tag.encode())
    with sent(server.port, request) as connection:
        check(request, received(connection), 304)


@pytest.mark.parametrize("lines", [[], [b"Authorization: Bearer b"]])
def test_a_refusal_for_lack_of_a_key_has_no_flaw(guarded, lines):
    request = get(b"/info", b"GET", *lines)
    with sent(guarded.port, request) as connection:
        check(request, received(connection), 401)


def test_a_refusal_of_a_connection_has_no_flaw(guarded):
    """Of an address with two connections; loopback has no such limit."""
    request, server = get(b"/info"), ("127.0.0.1", guarded.port)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(socket.create_connection(server, source_address=("127.0.0.2", 0)))
        third = stack.enter_context(socket.create_connection(server, source_address=("127.0.0.2", 0)))
        third.sendall(request)
        check(request, received(third), 429)
