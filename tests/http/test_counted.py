"""What the largest requests hold and leave behind, and how often they let others run: counted, not measured.

`make chaos` measures peaks and waits.
"""

import concurrent.futures
import gc
import itertools
import socket
import tracemalloc

import httpx
import pytest

from service.http.connection.guard import MAX_BODY_CHUNKS
from service.http.models import patterns
from service.text.errors import InvalidRequestError
from tests.helpers import compiled, serving, wait_until, web
from tests.http.programs import COUNTING
from tests.toolbox.http import post, received, sent
from tests.toolbox.largest import largest

MAX_BODY_BYTES, MAX_REQUEST_BYTES, MAX_HELD_BYTES = 1 << 17, 2 << 20, 8 << 20
PARSING = 20  # times a body's size, beside what is held, while its fields are read: service/OPERATIONS.md
OTHER_BYTES = 3_000_000  # of what is encoded and written at a time
KEPT_BYTES = 150_000  # of caches
CASES = largest(MAX_BODY_BYTES)
KEYS = [f"a-secret-key-{i}" for i in range(4)]
# The least number of pauses of long work; half of those of today.
PAUSES = {
    "a text to refuse": 5, "a text": 130, "unknown characters": 3, "escapes": 25, "ids": 65, "unknown ids": 3,
    "texts to continue": 33, "lists of ids": 10, "many sequences": 95, "streamed sequences": 16,
    "log-probabilities": 165, "streamed log-probabilities": 55, "a suffix": 10, "a text to score": 6,
    "each character's score": 55,
    "a text too long to score": 6, "continuations of a long prefix": 450, "distributions": 125, "weights": 225,
    "short texts to score": 1950, "texts without a score": 5000,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("\n".join(KEYS))
    keys.chmod(0o600)
    limits = {"max_body_bytes": MAX_BODY_BYTES, "max_held_bytes": MAX_HELD_BYTES}
    with serving(checkpoint.path, COUNTING, api_keys_file=keys, log_level="error", **limits) as server:
        yield server
        assert server.output() == "", "below the level of the log"


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, timeout=web.timeout, headers=bearer(0)) as client:
        yield client


def bearer(number):
    return {"Authorization": f"Bearer {KEYS[number]}"}


def test_a_request_takes_no_more_memory_than_it_holds_and_pauses_often(client):
    _, before, wrong = client.get("/traced"), client.get("/traced").json(), []
    for name, (path, body) in CASES.items():
        status = client.post(path, content=body).status_code
        after, end = (client.get("/traced").json() for _ in range(2))
        held, peak, kept = after["of_one"], after["peak"] - before["traced"], end["traced"] - before["traced"]
        found = {
            f"answered {status}": status in (200, 400),
            f"at most {peak} bytes, of which {held} were held": peak < held + PARSING * len(body) + OTHER_BYTES,
            f"held {held} for {peak} bytes": held < 3 * peak or status != 200,
            f"holds more than it may: {held}": held <= MAX_REQUEST_BYTES,
            f"still holds {after['held']}": after["held"] == 0,
            f"keeps {kept} bytes": kept < KEPT_BYTES,
            f"leaves {after['garbage']} objects in cycles": after["garbage"] < 50,
            f"pauses {after['pauses']} times": after["pauses"] >= PAUSES.get(name, 0),
        }
        print(name, *found, sep="; ")
        wrong += [f"{name}: {what}" for what, is_right in found.items() if not is_right]
        before = end
    assert PAUSES.keys() <= CASES.keys()
    assert not wrong, "\n".join(wrong)


def test_all_requests_together_hold_no_more_than_the_limit(server, client):
    """Of four clients, all at once."""
    client.get("/counted")

    def ask(number, case):
        path, body = case
        try:
            return web.post(server.url + path, content=body, headers=bearer(number)).status_code
        except httpx.TransportError:  # refused before all of the body was read
            return 429

    cases = [*zip(itertools.cycle(range(len(KEYS))), [*CASES.values()] * 2, strict=False)]
    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        statuses = {*pool.map(ask, *zip(*cases, strict=True))}
    found = client.get("/counted").json()
    assert statuses <= {200, 400, 429} and 200 in statuses
    assert 0 < found["of_all"] <= MAX_HELD_BYTES and found["held"] == 0


def test_small_chunks_of_a_body_are_held_as_its_bytes(client, server):
    """Each was held as an object."""
    count = MAX_BODY_CHUNKS - 10
    head = b"POST /generate HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %b\r\n" % KEYS[0].encode()
    before = client.get("/traced").json()["traced"]
    with sent(server.port, head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * count):
        wait_until(lambda: client.get("/traced").json()["held"] == count)
        assert client.get("/traced").json()["traced"] - before < 4 * count + KEPT_BYTES
    wait_until(lambda: client.get("/traced").json()["held"] == 0)


COUNT = 30
KINDS = {
    "whole": {"prompt": "a", "max_tokens": 1},
    "streamed": {"prompt": "a", "max_tokens": 3, "stream": True},
    "several with log-probabilities": {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1},
    "best of two": {"prompt": "a", "max_tokens": 2, "best_of": 2},
    "refused": {"prompt": 5},
    "unknown character": {"prompt": "\u6f22"},
    "bad pattern": {"prompt": "a", "regex": "[a-"},
    "too late": {"prompt": "a", "max_tokens": 5000, "timeout_seconds": 0.0001},
}


def test_requests_leave_no_reference_cycles(server, client):
    def ask(kind):
        if kind == "probe":
            client.get("/livez")
        elif kind == "score":
            client.post("/v1/score", json={"texts": ["ab"]})
        elif kind in ("malformed", "left"):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                if kind == "left":
                    body = {"prompt": "a", "max_tokens": 5000, "stream": True}
                    connection.sendall(post("/generate", body, **bearer(0)))
                    connection.recv(1)
                else:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    received(connection)
        else:
            client.post("/generate", json=KINDS[kind])

    found = {}
    for kind in [*KINDS, "probe", "score", "malformed", "left"]:
        ask(kind)
        client.get("/counted")
        for _ in range(COUNT):
            ask(kind)
        found[kind], is_over = 0, False
        while not is_over:  # the requests of clients that left, too
            counts = client.get("/counted").json()
            found[kind], is_over = found[kind] + counts["garbage"], counts["held"] == 0
    assert all(count < COUNT // 2 for count in found.values()), found


@pytest.mark.anyio
async def test_refused_patterns_are_not_kept():
    """Errors were cached with their tracebacks: 256 patterns of 4 MB took a gigabyte."""
    cache = patterns.PatternCache(patterns.PatternThread())

    async def refused(pattern):
        with pytest.raises(InvalidRequestError) as error:
            await compiled(cache, "client", pattern)
        return error.value.message

    await refused("(")
    tracemalloc.start()
    for i in range(10):
        assert "at most 1000 characters" in await refused("a" * (1_000_000 + i))
        assert "1000 states" in await refused(f"[abc]{{{1001 + i}}}")
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 1_000_000


@pytest.mark.anyio
async def test_patterns_are_cached_within_a_bound(monkeypatch):
    monkeypatch.setattr(patterns, "CACHE_BYTES", 100_000)
    cache = patterns.PatternCache(patterns.PatternThread())
    for i in range(1, 200):
        first = await compiled(cache, "client", f"a{{1,{i}}}")
        assert await compiled(cache, "client", f"a{{1,{i}}}") is first
        assert cache._bytes <= 100_000
    assert 10 < len(cache._found) < 190
