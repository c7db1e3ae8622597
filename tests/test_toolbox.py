"""The toolbox: required areas, server-sent events, the load generator, recorded answers."""

import json

import pytest

from tests.helpers import web
from tests.toolbox import http, load, needs, replay, requests


def test_missing_area_skips_unless_required(monkeypatch, tmp_path):
    monkeypatch.setenv("CHARGPT_REQUIRE", "curl, openssl")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    with pytest.raises(pytest.skip.Exception, match="chromium-headless-shell is not installed"):
        needs.program("browser")
    (tmp_path / "google-chrome").touch(mode=0o755)  # one of its names
    assert needs.program("browser") == str(tmp_path / "google-chrome")
    with pytest.raises(pytest.fail.Exception, match="curl is not installed, but CHARGPT_REQUIRE names curl"):
        needs.need("curl")


def test_unknown_area_is_an_error_of_usage(monkeypatch):
    monkeypatch.setenv("CHARGPT_REQUIRE", "curl,dokcer")
    with pytest.raises(pytest.UsageError, match=f"unknown dokcer; allowed are {', '.join(needs.AREAS)}"):
        needs.required()


def test_assert_statements_of_tests_are_executed():
    """Under `make test-optimized` too."""
    with pytest.raises(AssertionError):
        assert not __file__
    with pytest.raises(AssertionError):
        list(http.events(["data: a"]))


def test_events_yields_only_data():
    lines = ["id: 1", 'data: {"text":"a"}', "", ": keep-alive", "", 'data: {"text":"b"}\n', "\n", "data: [DONE]", ""]
    assert list(http.events(lines)) == ['{"text":"a"}', '{"text":"b"}', "[DONE]"]
    assert http.text_of(http.pieces(lines)) == "ab"
    with pytest.raises(AssertionError, match="ends within an event"):
        list(http.events(lines[:-1]))
    with pytest.raises(AssertionError):
        http.pieces(lines[:-2])
    with pytest.raises(ValueError, match="unexpected field"):
        list(http.events(["event: x", ""]))


def stream(*pieces, end=b"0\r\n\r\n"):
    chunks = [b"data: %b\n\n" % piece for piece in pieces]
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + end


A, B, DONE = b'{"index":0,"text":"a"}', b'{"index":0,"text":"0\\r"}', b"[DONE]"


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("data", "ending", "events"),
    [
        (stream(A, B, DONE), "complete", 2), (stream(A, B, DONE, end=b""), "cut", 2), (stream(A), "cut", 1),
        (stream(A, b'{"error": {}}'), "error", 1),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "complete", 0),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell", "cut", 0),
        (b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno", "error", 0), (b"", "cut", 0),
    ],
)  # fmt: skip
def test_answers_and_their_events_and_ends_are_found_for_any_fragmentation(data, ending, events, cut):
    reply = load.Reply("x", 0.0, 0.0)
    reader, is_over = load.Reader(reply, keep=True), False
    for at in range(0, len(data), cut):
        assert not is_over
        is_over = reader.feed(data[at : at + cut])
    if not is_over:
        with pytest.raises(load.LoadError, match="closed a connection"):
            reader.feed(b"")
        reply.failure = "cut"
    assert (reply.ending, reply.num_events, reply.num_bytes) == (ending, events, len(data))
    if ending == "complete":
        assert reply.body == b"hello" or reply.text == "a0\r"


def test_the_same_answers_are_equal_and_a_changed_one_is_noticed(tmp_path):
    replay.make_models(tmp_path)
    some = [it for it in requests.make_requests(120, seed=1) if it["server"] == "records"]
    assert some == [it for it in requests.make_requests(120, seed=1) if it["server"] == "records"]
    with replay.all_serving(tmp_path, ["records"]) as ports:
        port = ports["records"]
        first, again = ([replay.answer_to(it, port) for it in some] for _ in range(2))
        document = web.get(f"http://127.0.0.1:{port}/openapi.json").json()
    assert list(replay.differences(first, again)) == []
    assert {200, 400, 404} <= {answer["status"] for answer in first}
    for path, names in requests.ROUTES.items():  # each field of each route is sent
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert set(names) == document["components"]["schemas"][schema.rpartition("/")[2]]["properties"].keys()
    whole = next(it for it in again if it["status"] == 200 and isinstance(it["body"], dict) and it["body"].get("usage"))
    whole["body"]["usage"]["prompt_tokens"] += 1
    ((where, before, now),) = replay.differences(first, again)
    assert where == f"[{again.index(whole)}].body.usage.prompt_tokens" and now == before + 1


def test_streams_are_equal_however_their_texts_are_divided():
    def stream(*pieces, done="data: [DONE]"):
        last = {"id": "0" * 32, "usage": {"prompt_tokens": 1}, "chargpt": {"timing": {"queue_seconds": 0.5}}}
        return replay.stream_of("".join(f"data: {json.dumps(it)}\n\n" for it in (*pieces, last)) + done + "\n\n")

    def piece(text, end=None, index=0):
        return {"index": index, "text": text, "finish_reason": end, "logprobs": {"tokens": list(text)}}

    one = stream(piece("a"), piece("c", "stop", 1), piece("b", "length"))
    assert one["choices"] == [
        [0, {"text": "ab", "finish_reason": "length", "logprobs": {"tokens": ["a", "b"]}}],
        [1, {"text": "c", "finish_reason": "stop", "logprobs": {"tokens": ["c"]}}],
    ]
    assert one == stream(piece("c", "stop", 1), piece("ab", "length")) and one["id"] == "*"
    others = stream(piece("c", "stop", 1), piece("ax", "length"), done="id: done\ndata: [DONE]")
    found = {where for where, *_ in replay.differences(one, others)}
    assert found == {"end", "choices[0][1].text", "choices[0][1].logprobs.tokens[1]"}
