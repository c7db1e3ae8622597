"""The guard reads a byte stream as h11 does, or refuses it; without sockets."""

import asyncio
import json
import random
import re
from urllib.parse import unquote

import h11
import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from service.http.connection.guard import Connection
from service.http.connection.limits import ConnectionLimits
from service.settings import Settings

NUM_STREAMS = 2000
LAST = b"GET /last HTTP/1.1\r\nHost: last\r\nConnection: close\r\n\r\n"
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


# -- random streams: requests, some of whose framing is changed --

BODIES = (b"", b"a", b"0\r\n\r\n", b"GET /smuggled HTTP/1.1\r\nHost: b\r\n\r\n", b"\n\r" * 1500, bytes(range(256)))
HEADERS = (b"X-A: 1", b"X-Space:   a  b \t", b"X-Empty:", b"Expect: 100-continue", b"TE: trailers", b"x-b:2")
ODD_HEADERS = (
    b"Content-Length: 5", b"Content-Length: +5", b"Content-Length: 0x5", b"Content-Length: 5, 5", b"Content-Length:",
    b"Content-Length : 5", b"Content-Length: 18446744073709551617", b"content-length: 4", b"Content-Length\x0b: 3",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: Chunked", b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding : chunked",
    b"Transfer-Encoding: \x0bchunked", b"Transfer-Encoding:\r\n chunked", b"Connection: close",
    b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket", b"Connection: upgrade\r\nUpgrade: h2c",
    b"Host: other", b"X: a\rb", b"X: a\nContent-Length: 5", b" folded", b"X: \0", b"no colon",
    b"Proxy-Connection: close",
)  # fmt: skip
ODD_LINES = (
    b"GET / HTTP/1.0", b"GET / HTTP/1.2", b"GET / HTTP/2.0", b"GET /", b"GET\t/ HTTP/1.1", b"CONNECT a:1 HTTP/1.1",
    b"GET http://a.example?q HTTP/1.1", b"OPTIONS * HTTP/1.1", b"GET // HTTP/1.1", b"PRI * HTTP/2.0", b"get / HTTP/1.1",
)  # fmt: skip
ODD_CHUNKS = (
    b"3 \r\nabc\r\n", b"3\r\nabcd\r\n", b"+3\r\nabc\r\n", b"-1\r\n", b"3\nabc\r\n", b"3;a\nb\r\nabc\r\n", b"\r\n",
    b"f" * 17 + b"\r\n", b"3\r\nabc\n", b"0x3\r\nabc\r\n",
)  # fmt: skip
ODD_TRAILERS = (
    b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Connection: close", b"Host: b", b"X: y\n",
    b"Proxy-Connection: close",
)  # fmt: skip


def chunks(r, body):
    parts = []
    while body:
        size = r.choice((1, 3, 16, len(body)))
        part, body = body[:size], body[size:]
        parts.append(b"%x%b\r\n%b\r\n" % (len(part), r.choice((b"", b"", b";a=b")), part))
    if r.random() < 0.1:
        parts.insert(r.randrange(len(parts) + 1), r.choice(ODD_CHUNKS))
    trailers = [r.choice((*HEADERS[:3], *ODD_TRAILERS)) for _ in range(r.choice((0, 0, 0, 1)))]
    return b"".join(parts) + b"0\r\n" + b"".join(it + b"\r\n" for it in trailers) + b"\r\n"


def request(r):
    body, line = r.choice(BODIES), r.choice((b"GET", b"POST", b"HEAD", b"PUT")) + b" /a?b=%20 HTTP/1.1"
    headers = [b"Host: a", *r.sample(HEADERS, r.randrange(3))]
    match r.randrange(3):
        case 0:
            headers.append(b"Content-Length: %d" % len(body))
        case 1:
            headers.append(b"Transfer-Encoding: chunked")
            body = chunks(r, body)
        case _:
            body = b""
    while r.random() < 0.3:
        headers.insert(r.randrange(len(headers) + 1), r.choice(ODD_HEADERS))
    if r.random() < 0.1:
        line = r.choice(ODD_LINES)
    return b"\r\n".join([line, *headers]) + b"\r\n\r\n" + body


def stream(r):
    data = b"".join(request(r) for _ in range(r.choice((1, 2, 3)))) + LAST
    if r.random() < 0.1:  # change a byte
        at = r.randrange(len(data))
        data = data[:at] + r.choice((b"", b"\r", b"\n", b" ", b"\0", b":", b"5")) + data[at + 1 :]
    return data


# -- what each reads --


def described(method, target, headers, body):
    """A request, without its framing."""
    path, _, query = re.sub(r"^[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*/?", "/", target).partition("#")[0].partition("?")
    pairs = sorted([name.decode("latin-1").lower(), value.decode("latin-1").strip(" \t")] for name, value in headers)
    pairs = [pair for pair in pairs if pair[0] not in ("content-length", "transfer-encoding")]
    return [method, unquote(path), query, pairs, body.decode("latin-1")]


def read_with_h11(data):
    """The requests, and the reason why it reads no further; "": it needs more, or the connection ends."""
    found = []
    try:
        while data := re.sub(rb"\A(?:\r\n)+", b"", data):  # h11 refuses what RFC 9112, 2.2 has servers ignore
            connection = h11.Connection(h11.SERVER, 1 << 16)
            connection.receive_data(data)
            body = b""
            while (event := connection.next_event()) is not h11.NEED_DATA and not isinstance(event, h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    head = event
                else:
                    body += event.data
            if event is h11.NEED_DATA:
                break
            found.append(described(head.method.decode(), head.target.decode("latin-1"), head.headers, body))
            status = 405 if head.method == b"CONNECT" else 200  # a tunnel would begin
            connection.send(h11.Response(status_code=status, headers=[("Content-Length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                break
            data = connection.trailing_data[0]
    except h11.RemoteProtocolError as error:
        return found, str(error)
    return found, ""


async def application(scope, receive, send):
    """Answers with what it was asked."""
    body, has_more = b"", True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        has_more = message["more_body"]
    target = (scope["raw_path"] + b"?" + scope["query_string"]).decode("latin-1")
    answer = json.dumps(described(scope["method"], target, scope["headers"], body)).encode()
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"x-read", answer), (b"content-length", b"0")]}
    )
    await send({"type": "http.response.body"})


class Transport(asyncio.Transport):
    """Keeps what is written. The peer reads at once."""

    def __init__(self):
        super().__init__({"peername": ("10.0.0.1", 1), "sockname": ("10.0.0.2", 2)})
        self.written, self.has_ended, self.is_paused = b"", False, False

    def write(self, data):
        self.written += data

    def close(self):
        self.has_ended = True

    abort = write_eof = close

    def is_closing(self):
        return self.has_ended

    def can_write_eof(self):
        return True

    def get_write_buffer_size(self):
        return 0

    def pause_reading(self):
        self.is_paused = True

    def resume_reading(self):
        self.is_paused = False


async def settle(transport):
    """Returns when nothing happens in further turns of the event loop."""
    before = None
    while before != (before := (transport.written, transport.has_ended)):
        for _ in range(12):
            await asyncio.sleep(0)


async def read_with_guard(limits, config, pieces):
    """The requests that were answered, and whether the last answer says that the connection ends."""
    transport, connection = Transport(), Connection(limits, config, ServerState(), {})
    connection.connection_made(transport)
    for piece in pieces:
        if transport.has_ended:
            break
        connection.data_received(piece)
    await settle(transport)
    has_ended = transport.has_ended
    connection.connection_lost(None)
    await settle(transport)
    found, ends = [], False
    for answer in re.split(rb"(?=HTTP/1\.1 \d{3} )", transport.written)[1:]:
        assert not ends, transport.written
        if not answer.startswith(b"HTTP/1.1 100 "):
            ends = b"\r\nconnection: close\r\n" in answer
            if (read := re.search(rb"\r\nx-read: (.*)\r\n", answer)) is not None:
                found.append(json.loads(read[1]))
    assert ends == has_ended, (b"".join(pieces), transport.written)
    return found, ends


def compare(streams, size=None):
    """The faults of the guard, each with its stream, which arrives in pieces of a size."""

    async def main():
        settings = Settings(max_connections_per_address=0)
        config = Config(app=application, ws="none", log_level="critical", access_log=False, lifespan="off")
        config.load()
        limits, faults = ConnectionLimits(settings), []
        for data in streams:
            step = size or random.choice((7, 100, 5000))
            pieces = [data[i : i + step] for i in range(0, len(data), step)]
            found, ends = await read_with_guard(limits, config, pieces)
            expected, reason = read_with_h11(data)
            # httptools is more lenient with the spaces and the protocol of a request line, which change no framing.
            is_lenient = reason.startswith("illegal request line")
            same = found[: len(expected)] == expected[: len(found)]
            if not same or (len(found) > len(expected) and not is_lenient):
                faults.append((data, found, expected, reason))
            elif len(found) < len(expected) and not ends:
                faults.append((data, found, expected, "it waits"))
        return faults

    return asyncio.run(main())


def test_known_streams_are_read_as_h11_reads_them():
    for size in (1, 7, 5000):
        assert not compare([data + LAST for data in KNOWN], size)


def test_random_streams_are_read_as_h11_reads_them():
    seed = random.SystemRandom().randrange(2**32)
    r = random.Random(seed)
    faults = compare([stream(r) for _ in range(NUM_STREAMS)])
    shortest = min(faults, key=lambda fault: len(fault[0]), default=None)
    assert not faults, f"seed {seed}, {len(faults)} faults, the shortest: {shortest}"


# -- what is not read yet --


@pytest.mark.parametrize("is_refused", [False, True])
def test_what_waits_behind_a_request_is_bounded(is_refused):
    """The socket is not read, although the application waits for the end of the connection."""
    one = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    answers = asyncio.Event()

    async def waiting(scope, receive, send):
        await receive()
        watch = asyncio.create_task(receive())
        await answers.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})
        watch.cancel()

    async def main():
        config = Config(app=waiting, ws="none", access_log=False, lifespan="off")
        config.load()
        transport = Transport()
        connection = Connection(ConnectionLimits(Settings()), config, ServerState(), {})
        connection.connection_made(transport)
        if is_refused:
            connection.data_received(one + b"nonsense\r\n\r\n")
        connection.data_received(one * 8000)
        await settle(transport)
        assert transport.is_paused and not transport.written
        answers.set()
        await settle(transport)
        assert not transport.is_paused  # the rest is read, or discarded so that the error is not lost
        found = re.findall(rb"HTTP/1.1 (\d+)", transport.written)
        assert found == ([b"200", b"400"] if is_refused else [b"200"] * 8000)
        connection.connection_lost(None)
        await settle(transport)

    asyncio.run(main())
