"""Our connection reads a byte stream as h11 and hyper do, or refuses it. `make framing` compares 200,000 streams."""

import contextlib
import json
import random
import sys

import pytest
import uvloop

from tests.http import framing
from tests.http.framing import LAST, MUTATIONS, Accepted, Stream, Verdict, compare, fault, granian, run, servers

NUM_STREAMS = 1000
# A failure prints streams that can be added here.
KNOWN = [
    # An upgrade that is not made, whose body looks like a request
    b"POST / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: x\r\nContent-Length: 35\r\n\r\n"
    b"GET /smuggled HTTP/1.1\r\nHost: b\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n23\r\nGET /smuggled HTTP/1.1\r\nHost: b\r\n\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: x\r\nTransfer-Encoding: 1\r\n\r\n",
    b"CONNECT / HTTP/1.1\r\nHost: a\r\nContent-Length: 35\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: b\r\n\r\n",
    # Two lengths
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 40\r\n\r\n0\r\n\r\n"
    b"GET /smuggled HTTP/1.1\r\nHost: b\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding\x0b: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 0\r\n\r\na",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\na",
    # Codings
    b"POST / HTTP/1.0\r\nTransfer-Encoding: d\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    # Chunks
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1;a\n\r\na\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\naXX0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n10000000000000001\r\na\r\n0\r\n\r\n",
    # Trailers are no headers
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nConnection: close\r\n\r\n"
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 5\r\n\r\n",
    # Lines
    b"GET / HTTP/1.1\r\nHost: a\r\nX: a\rContent-Length: 5\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX: a\nContent-Length: 5\r\n\r\n",
    b"\rGET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n\r\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /  HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / RTSP/1.0\r\nHost: a\r\n\r\n",
    b"SOURCE / ICE/1.0\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n\r\nPOST *? HTTP/1.1\r\nHost: a\r\n\r\n",
    # Closing
    b"GET / HTTP/1.1\r\nHost: a\r\nProxy-Connection: close\r\n\r\n"
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\na",
]


@pytest.fixture(scope="module")
def hyper():
    with granian() as path:
        yield path


@pytest.mark.parametrize("most", [None, 1, 7])
def test_known_streams_are_read_as_others_read_them(hyper, most):
    """Each in one piece, and cut into pieces of one and of seven bytes."""
    streams = []
    for data in KNOWN:
        data += LAST
        size = most or len(data)
        streams.append(Stream(tuple(data[at : at + size] for at in range(0, len(data), size)), ("known",)))

    async def main():
        async with servers(hyper) as both:
            return await compare(both, streams)

    figures = uvloop.run(main())
    assert figures.streams == len(KNOWN)
    assert len(figures.faults) == 0, "\n".join(map(str, figures.faults))


def test_random_streams_are_read_as_others_read_them(hyper):
    seed = random.SystemRandom().randrange(2**32)
    print(f"python -m tests.http.framing --streams {NUM_STREAMS} --seed {seed}")
    figures = uvloop.run(run(hyper, NUM_STREAMS, seed, num_shown=3))
    assert len(figures.faults) == 0, "the smallest are printed"
    assert figures.streams == NUM_STREAMS
    assert figures.valid_streams > 0.05 * NUM_STREAMS
    assert figures.requests > NUM_STREAMS
    assert figures.all_agree > 0.6 * NUM_STREAMS
    assert all(figures.mutations[mutation.__name__] > 0.01 * NUM_STREAMS for mutation in MUTATIONS)


def test_figures_are_written_and_those_in_git_show_no_fault(hyper, tmp_path, monkeypatch):
    path = tmp_path / "framing.json"
    monkeypatch.setattr(framing, "granian", lambda: contextlib.nullcontext(hyper))
    monkeypatch.setattr(sys, "argv", ["framing", "--streams", "100", "--seed", "1", "--out", str(path)])
    with pytest.raises(SystemExit) as status:
        framing.main()
    assert status.value.code == 0
    new, kept = [json.loads(each.read_text(encoding="utf-8")) for each in (path, framing.FIGURES)]
    assert new.keys() == kept.keys() and (new["seed"], new["streams"]) == (1, 100)
    assert (kept["streams"], kept["faults"]) == (200_000, {})


# -- what is a fault --

GET = Accepted("GET", ("/", ""), (("host", "a"),), "")
POST = Accepted("POST", ("/", ""), (("host", "a"),), "a")
OTHER = POST._replace(body="b")
REFUSED = "refused: 400 Bad Request"


@pytest.mark.parametrize(
    "ours, h11, hyper, expected",
    [
        (Verdict((GET, POST), "waiting"), [GET, POST], [GET, POST], ""),
        (Verdict((GET,), REFUSED), [GET, POST], [GET, POST], ""),
        (Verdict((GET,), "closed"), [GET, POST], [GET, POST], ""),
        (Verdict((GET, POST), "waiting"), [GET], [GET, POST], ""),
        (Verdict((GET, POST), "waiting"), [GET, OTHER], [GET, POST], ""),
        (Verdict((GET, POST), "waiting"), [], [GET], ""),
        (Verdict((GET,), "waiting"), [GET, POST], [GET, POST], "waits where both accept"),
        (Verdict((GET,), "waiting after it " + REFUSED), [GET], [GET], "refuses, and does not close"),
        (Verdict((GET, POST), "waiting"), [GET], [GET], "accepts what neither accepts"),
        (Verdict((GET, POST), "waiting"), [GET, OTHER], [GET, OTHER], "another body than h11 and hyper"),
        (Verdict((GET, POST), "waiting"), [GET], [GET, OTHER], "another body than hyper"),
        (
            Verdict((GET._replace(headers=()),), "waiting"), [GET], [GET],
            "another headers than h11 and hyper",
        ),
        (Verdict((GET._replace(target=("/b", "")),), "waiting"), [GET], [GET], "another target than h11 and hyper"),
    ],
)  # fmt: skip
def test_a_fault_is_named(ours, h11, hyper, expected):
    oracles = {"h11": Verdict(tuple(h11), "waiting"), "hyper": Verdict(tuple(hyper), "waiting")}
    assert fault(ours, oracles, is_valid=False) == expected


def test_a_valid_stream_may_not_be_refused():
    oracles = dict.fromkeys(("h11", "hyper"), Verdict((GET,), "waiting"))
    assert fault(Verdict((GET,), "waiting"), oracles, is_valid=True) == ""
    assert fault(Verdict((), REFUSED), oracles, is_valid=True) == "a valid stream is not accepted by all"
