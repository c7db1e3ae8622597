"""Random byte streams of requests, and what our connection, h11 and hyper each read in them.

hyper answers through granian. A server that has a whole request describes it in a header of its answer (ANSWER), which
HEAD shows too. A stream ends with a request of its own, so that a server that has lost its place shows it.

`python -m tests.http.framing --streams 200000` writes tests/http/framing.json: `make framing`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.parse import unquote

import h11
import uvloop

ROOT = Path(__file__).parents[2]
FIGURES = Path(__file__).with_name("framing.json")
ANSWER = "x-request-read"
AT_ONCE = 96  # streams
LOOK_SECONDS = 0.02  # between two looks at those that are quiet
QUIET_SECONDS = 0.25  # after which a server that says nothing is taken to wait for more
SHORT_SECONDS = 0.1  # the same for one of many that are tried in order to shorten a stream
SURE_SECONDS = 10.0  # the same for a stream that is looked at again, alone
MAX_EVENT_BYTES = 1 << 16

# -- streams --


@dataclass(slots=True)
class Draft:
    """A request before it is written down. `head` has lines without their ends: framing, too."""

    method: bytes
    target: bytes
    version: bytes
    head: list[bytes]
    content: bytes
    is_chunked: bool
    body: bytes  # as sent
    end: bytes = b"\r\n"
    line: bytes | None = None  # in place of method, target and version
    before: bytes = b""
    blank: bytes = b"\r\n"

    def encode(self) -> bytes:
        line = b"%b %b %b" % (self.method, self.target, self.version) if self.line is None else self.line
        return self.before + b"".join([each + self.end for each in (line, *self.head)]) + self.blank + self.body

    def add(self, random: Random, *lines: bytes) -> None:
        for line in lines:
            self.head.insert(random.randint(0, len(self.head)), line)

    def drop(self, name: bytes) -> None:
        self.head = [line for line in self.head if not line.lower().startswith(name + b":")]

    def replace(self, random: Random, name: bytes, *values: bytes) -> None:
        """All headers of a name, by others."""
        self.drop(name.lower())
        self.add(random, *[b"%b:%b" % (name, value) for value in values])


class Stream(NamedTuple):
    pieces: tuple[bytes, ...]
    mutations: tuple[str, ...]  # none: all of it is valid

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: b\r\n\r\n"
METHODS = (b"GET", b"GET", b"POST", b"POST", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"DELETE", b"PATCH")
TARGETS = (
    b"/", b"/a", b"/generate", b"/v1/models/a%2Fb", b"/a?x=1&y=%20", b"/?q=a?b/c", b"/a//b/../c", b"/~x;y=1,2",
    b"http://a.example/p?q", b"http://a.example", b"http://a.example:8000/",
)  # fmt: skip
HEADERS = (
    b"Accept: */*", b"User-Agent: a/1.0 (b; c)", b"Cookie: a=b; c=d", b"X-A: 1", b"x-a:2", b"X-Empty:",
    b"X-Space:   a  b \t", b"X-Colon: a:b::c", b"Content-Type: application/json", b"Accept-Encoding: gzip, br",
    b"TE: trailers", b"Connection: keep-alive", b"Authorization: Bearer a", b"X-Odd!#$%&'*+-.^_`|~: 1",
    b"Expect: 100-continue",
)  # fmt: skip
CONTENTS = (
    b"", b"a", b'{"prompt": "a"}', SMUGGLED, b"0\r\n\r\n" + SMUGGLED, b"\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n",
    bytes(range(256)), b"x" * 3000, b"\r\n\r" * 3000,
)  # fmt: skip
EXTENSIONS = (b"", b"", b"", b";a", b";a=b", b';a="b c"', b";a=1;b=2")
TRAILERS = (b"", b"", b"", b"X-T: 1\r\n", b"X-T: 1\r\nX-U:\r\n")
LAST = b"GET /last HTTP/1.1\r\nHost: last\r\nConnection: close\r\n\r\n"


def split(random: Random, data: bytes, most: int) -> list[bytes]:
    """Into at most `most` parts, none of them empty."""
    count = min(random.randint(1, most), len(data))
    cuts = sorted(random.sample(range(1, len(data)), count - 1)) if count > 1 else []
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if start < end]


def chunked(
    random: Random, content: bytes, fault: tuple[bytes, bytes] | None = None, trailers: bytes | None = None
) -> bytes:
    """fault: (line, end) of one of the chunks, in place of its own; %x stands for the size."""
    parts = [*split(random, content, 4), b""]
    broken = random.randrange(len(parts)) if fault else -1
    out = b""
    for index, part in enumerate(parts):
        size = random.choice((b"%x", b"%x", b"%X", b"0%x")) % len(part)
        line, end = size + random.choice(EXTENSIONS) + b"\r\n", b"\r\n"
        if index == broken:
            assert fault is not None
            line, end = fault[0].replace(b"%x", size), fault[1]
        if not part and trailers is None:
            end = random.choice(TRAILERS) + end
        elif not part:
            end = trailers + end
        out += line + part + end
    return out


def draft(random: Random) -> Draft:
    method, target = random.choice(METHODS), random.choice(TARGETS)
    has_body = random.random() < (0.2 if method in (b"GET", b"HEAD", b"OPTIONS") else 0.9)
    content = random.choice(CONTENTS) if has_body else b""
    is_chunked = has_body and random.random() < 0.5
    new = Draft(method, target, b"HTTP/1.1", [b"Host: a.example"], content, is_chunked, b"")
    new.add(random, *random.sample(HEADERS, random.choice((0, 1, 2, 5))))
    if has_body:
        frame(random, new)
    return new


def frame(random: Random, new: Draft) -> None:
    if new.is_chunked:
        new.add(random, random.choice((b"Transfer-Encoding: chunked", b"transfer-encoding:chunked")))
        new.body = chunked(random, new.content)
    else:
        new.add(random, b"Content-Length: %d" % len(new.content))
        new.body = new.content


def with_body(random: Random, new: Draft, is_chunked: bool) -> None:
    """Give it a body of that kind."""
    new.drop(b"content-length")
    new.drop(b"transfer-encoding")
    new.content, new.is_chunked = new.content or random.choice(CONTENTS[1:]), is_chunked
    frame(random, new)


# Mutations. In these tables %d and %x stand for the true length.

LENGTHS = (
    b" +%d", b" -%d", b" 0x%x", b" %d, %d", b" %d,%d", b" %d, 0", b"", b" ", b" %d ", b"\t%d\t", b" 0%d", b" 000000%d",
    b" %d.0", b" %de0", b" 1_%d", b" %d\x0b", b" \x0c%d", b" %d;", b' "%d"', b" %d\x00", b" %d a", b" % d", b" %d,",
    b" ,%d", b" 18446744073709551616", b" 1844674407370955161%d", b" 9223372036854775808", b" 99999999999999999999999",
    b" \xb2", b" %d\r", b" \r\n %d", b" %d\r\n ", b" a", b" 0", b" 1", b" 4294967297",
)  # fmt: skip
LENGTH_NAMES = (
    b"Content-Length :", b"Content-Length\t:", b"Content_Length:", b" Content-Length:", b"Content-Length\x00:",
    b"Content-Length", b"Content-\r\n Length:", b"Content Length:", b"content-LENGTH:", b"X: a\rContent-Length:",
    b"X: a\nContent-Length:", b"X:\r\n Content-Length:",
)  # fmt: skip
CODINGS = (
    b" chunked, chunked", b" gzip, chunked", b" chunked, gzip", b" xchunked", b" chunkedx", b"\tchunked", b" chunked\t",
    b" chunked ", b" Chunked", b" CHUNKED", b" identity", b" identity, chunked", b" chunked, identity", b"", b" ",
    b" ,chunked", b" chunked,", b" chunked;q=1", b' "chunked"', b" chunked\x0b", b" \x0bchunked", b" chun\x00ked",
    b" gzip", b" deflate, chunked", b" \r\n chunked", b" chunked\r\n ", b" chunked\r\n , gzip", b" gzip,\r\n chunked",
    b" \xe3hunked", b" chunked \x00", b" chunked\xa0", b" chun ked", b" x, chunked", b" trailers, chunked",
    b" chunked\r", b" ,", b" chunked gzip",
)  # fmt: skip
CODING_NAMES = (
    b"Transfer-Encoding :", b"Transfer-Encoding\t:", b"Transfer_Encoding:", b" Transfer-Encoding:",
    b"Transfer-Encoding\x00:", b"Transfer-Encoding", b"Transfer-\r\n Encoding:", b"Transfer Encoding:",
    b"TRANSFER-encoding:", b"X: a\rTransfer-Encoding:", b"X: a\nTransfer-Encoding:", b"X:\r\n Transfer-Encoding:",
    b"Transfer-Encodin\xe7:", b":Transfer-Encoding:",
)  # fmt: skip
TWO_CODINGS = (
    (b" chunked", b" chunked"), (b" identity", b" chunked"), (b" chunked", b" identity"), (b" gzip", b" chunked"),
    (b" chunked", b" gzip"), (b"", b" chunked"), (b" chunked", b""), (b" chunked", b" x"), (b" x", b" chunked"),
)  # fmt: skip
CHUNK_LINES = (
    b"0x%x\r\n", b"%x \r\n", b" %x\r\n", b"\t%x\r\n", b"%x\t\r\n", b"%x\n", b"%x\r", b"%x\r\r\n", b"%x\n\r\n",
    b"+%x\r\n", b"-%x\r\n", b"%x;\r\n", b"%x;a\n", b"%x;a\n\r\n", b"%x;a=b\nc\r\n", b"%x;a\rb\r\n", b"%x;a\x00\r\n",
    b"%x ;a\r\n", b"%x \t;a=b\r\n", b"%x; a = b\r\n", b'%x;a="\r\n"\r\n', b'%x;a="\\""\r\n', b'%x;a="b\r\n',
    b"%x;\xff\r\n", b"%x;;\r\n", b"%x;=\r\n", b"0000000000000000000%x\r\n", b"00000000%x\r\n",
    b"10000000000000000%x\r\n", b"1000000%x\r\n", b"ffffffffffffffff\r\n", b"7fffffffffffffff\r\n",
    b"fffffffffffffffff%x\r\n", b"80000000\r\n", b"%x_0\r\n", b"\r\n%x\r\n", b"%xg\r\n", b"%x,1\r\n", b"\r\n",
    b"%xh\r\n", b"\n%x\r\n", b"%x\x00\r\n", b"\x00%x\r\n", b"%x.0\r\n", b"%x;" + b"e" * 300 + b"\r\n", b"%x\x0b\r\n",
    b"%x\x85\r\n", b"%x1\r\n", b"g\r\n", b"%x/\r\n", b"%x:\r\n", b"%x@\r\n", b"%x`\r\n", b"%x \x0b;a\r\n", b"%x a\r\n",
    b"0\r\n", b"1\r\n", b"5\r\n", b"-1\r\n",
)  # fmt: skip
CHUNK_ENDS = (
    b"", b"\n", b"\r", b"XX", b"\r\n\r\n", b"\n\r", b" \r\n", b"\r\r\n", b"X\r\n", b"\r\nX", b"\x00\r\n", b"\r\x00",
)  # fmt: skip
BAD_TRAILERS = (
    b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: other\r\n", b"Connection: close\r\n",
    b"Connection: upgrade\r\nUpgrade: x\r\n", b" folded\r\n", b"X-T: 1\r\n folded\r\n", b"nocolon\r\n", b"X-T : 1\r\n",
    b"X-T: 1\n", b"X-T: 1\r", b"X-T: \x00\r\n", b": 1\r\n", b"X-T: \xff\r\n", b"\n", b"X\x00: 1\r\n",
    b"Authorization: a\r\n", b"Transfer-Encoding: gzip\r\n", b"Content-Length: x\r\n",
    b"Content-Length: 1\r\nContent-Length: 2\r\n", b"X-T: 1\r\r\n", b"GET / HTTP/1.1\r\n",
    b"Content-Length: 5\r\nTransfer-Encoding: x\r\n", b"Expect: 100-continue\r\n", b"X: a\rb\r\n",
    b"X-T: " + b"t" * 300 + b"\r\n", b"\tX-T: 1\r\n",
)  # fmt: skip
UPGRADES = (
    (b"Connection: upgrade", b"Upgrade: x"),
    (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__"),
    (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: eA=="),
    (b"Connection: keep-alive, Upgrade", b"Upgrade: websocket"),
    (b"Connection: upgrade", b"Connection: close", b"Upgrade: x"),
    (b"Connection: upgrade",),
    (b"Upgrade: h2c",),
    (b"Connection: upgrade", b"Upgrade:"),
    (b"Connection: UPGRADE", b"Upgrade: TLS/1.0, HTTP/2.0"),
    (b"Connection: upgrade", b"Upgrade: a", b"Upgrade: b"),
)
ODD_TARGETS = (
    b"*", b"http://other.example/x", b"https://other.example", b"//x/y", b"a", b"", b"/a b", b"/a#f", b"/a#f?q",
    b"/\x00", b"/\xe9", b"/%zz", b"/%", b"http:/a", b"http://", b"http:///a", b"http://a:99999/", b"http://[::1]/",
    b"/a\tb", b"/{}", b'/"', b"/a\\b", b"http://user@host/", b"?x", b"ftp://a/b", b"/|", b"/^", b"/<>", b"/\x7f",
    b"a.example:443", b"#", b"/?", b"/?#", b"/%2e%2e/", b"HTTP://a.example/", b"http://a.example?q", b"http://a b/",
    b"/a?\xff", b"/a?\x01", b"**", b"*?", b"http://a.example#f", b"/;", b"/\xc3\xa9", b"/?a[]=`", b"a:b", b"://",
    b"http://[::1", b"http://a:/", b"http://a:b/",
)  # fmt: skip
HOSTS = (
    (), (b" a", b" a"), (b" a", b" b"), (b"",), (b" ",), (b" a b",), (b" a/b",), (b" x, y",), (b" [::1",), (b" a:b",),
    (b" a:80:80",), (b" u@a",), (b" [::1]:80",), (b" a\tb",), (b" A.EXAMPLE",), (b" %41",), (b" a?b",), (b" a#b",),
    (b" \xe9",), (b" a:",), (b" :80",), (b" a:99999",), (b" ..",), (b" a\x00",), (b" a_b-c.d~",), (b" a\r\n b",),
    (b" [::1]",), (b" 127.0.0.1:8000",), (b" [v1.a]",), (b" []",), (b" a\\b",), (b" http://a",), (b" a,b",),
    (b" [fe80::1%25eth0]",), (b" a!$&'()*+;=",), (b" %zz",), (b" <a>",), (b" a:-1",), (b" a:+80",), (b" xn--e1a",),
    (b" a.",),
)  # fmt: skip
VERSIONS = (
    b"HTTP/1.2", b"HTTP/2.0", b"HTTP/2", b"HTTP/0.9", b"HTTP/1", b"HTTP/1.10", b"HTTP/01.1", b"HTTP/1.1x", b"http/1.1",
    b"HTTP /1.1", b"HTTPS/1.1", b"RTSP/1.0", b"ICE/1.0", b" HTTP/1.1", b"HTTP/1.1 ", b"HTTP/1.1\t", b"HTTP/1,1",
    b"HTTP/9.9", b"HTTP/3.0", b"HTTP/1.1 x", b"", b"HTTP/-1.1", b"HTTP/1.1\x00", b"HTTP/11", b"HTTP/1.\xb9",
    b"HTTP/1. 1", b"HTP/1.1",
)  # fmt: skip
ODD_METHODS = (
    b"CONNECT", b"PRI", b"get", b"Get", b"FOO", b"G-T", b"GET\x00", b"", b"M-SEARCH", b"SOURCE", b"QUERY", b"G:T",
    b"\xc7ET", b"GET/", b"TRACE", b"A" * 40, b" GET", b"\tGET", b"PROPFIND", b"LINK", b"PURGE", b"DESCRIBE", b"(GET)",
    b"GE", b"GETT", b"POS", b"H" * 3, b"UNLOCK", b"ANNOUNCE", b"FLUSH",
)  # fmt: skip
SEPARATORS = (b"\t", b"  ", b" \t", b"\x0b", b"\x0c", b"", b"\xa0", b"\r", b"\x00", b"\n", b"\x85", b"\r\n ")
LINE_ENDS = (
    b"\n", b"\r", b"\r\r\n", b"\n\r", b"\r\n\r\n", b"\x0b", b"\x85", b" \r\n", b"\t\r\n", b"\x00\r\n", b"\r\x00\n",
    b"\r\n\n",
)  # fmt: skip
LINES = (
    b"X Y: 1", b"X : 1", b"X\t: 1", b": 1", b":", b"nocolon", b"X\x00: 1", b"X\xe9: 1", b"X(: 1", b'"X": 1', b"X;: 1",
    b"X\r: 1", b"X=: 1", b"X@: 1", b"X[]: 1", b"X{: 1", b"X,: 1", b"X/: 1", b"X<: 1", b"X?: 1", b"X\\: 1", b"X\x7f: 1",
    b"X\x01: 1", b" X: 1", b"\tX: 1", b" ", b"\t", b"X: 1\r\n folded", b"X: 1\r\n\tfolded", b"X: 1\r\n ",
    b"X:\r\n folded", b"X: 1\n folded", b"X: \x00", b"X: a\x00b", b"X: \x01", b"X: a\x07", b"X: a\x0bb", b"X: \x0c",
    b"X: \x1f", b"X: \x7f", b"X: a\x7fb", b"X: \x80", b"X: \xff", b"X: \xc3\xa9", b"X: a\rb", b"X: a\r", b"X: a\nb",
    b"X: a\n", b"X: \r", b"X: \x0b", b"X: a\x0b", b"X: \xa0a\xa0", b"X: a\x85", b"X:\x0ba", b"X:1\r\rY: 2",
    b"X: 1\r\n\r", b"GET / HTTP/1.1", b"X: 1\r\n folded\r\n again", b"X: a\x1bb", b"X: \t a \t ", b"X:\t", b"X: a\x1e",
    b"\x00", b"\xff", b"\x00X: 1", b"X: a\x00",
)  # fmt: skip
CONNECTIONS = (
    b"close", b"keep-alive", b"Keep-Alive, close", b"close, keep-alive", b"CLOSE", b"", b"close,", b",close", b"closed",
    b"x, close", b"close;a", b'"close"', b"keep-alive, x", b"close\tx", b"\x0bclose", b"x close", b"te, close",
    b"close close",
)  # fmt: skip
OTHERS = (
    b"Expect: 100-Continue", b"Expect: x", b"Expect: 100-continue, x", b"Expect:", b"Proxy-Connection: close",
    b"Keep-Alive: timeout=5", b"Trailer: X-T", b"TE: chunked", b"Content-Encoding: gzip", b"Content-Length2: 5",
    b"X-HTTP-Method-Override: PUT", b"Http2-Settings: AAMAAABkAAQAAP__",
    b"Content-Type: multipart/form-data; boundary=a",
)  # fmt: skip
BETWEEN = (
    b"\r\n", b"\n", b"\r", b" ", b"\r\n\r\n", b"\x00", b"0\r\n\r\n", b"\n\n\n", b"\r\n \r\n", b"\xef\xbb\xbf", b"X",
    b"\t", b"\r\n" * 9, b"\r\n\n\r\n", b"\r\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x00\x05",
)  # fmt: skip
BYTES = (
    b"\x00", b"\n", b"\r", b" ", b"\t", b":", b"\x7f", b"\x80", b"\xff", b"\x0b", b"0", b",", b";", b"\r\n", b"a",
    b"\x01",
)  # fmt: skip


def _sized(random: Random, template: bytes, length: int) -> bytes:
    return template.replace(b"%d", b"%d" % length).replace(b"%x", b"%x" % length)


def odd_length(random: Random, new: Draft) -> None:
    with_body(random, new, is_chunked=False)
    new.replace(random, b"Content-Length", _sized(random, random.choice(LENGTHS), len(new.content)))


def odd_length_name(random: Random, new: Draft) -> None:
    with_body(random, new, is_chunked=False)
    new.drop(b"content-length")
    new.add(random, b"%b %d" % (random.choice(LENGTH_NAMES), len(new.content)))


def several_lengths(random: Random, new: Draft) -> None:
    with_body(random, new, is_chunked=False)
    length = len(new.content)
    other = random.choice((b" %d", b" 0", b" 1", b" %d1", b" 0%d", b"", b" x", b" +%d", b" %d, %d"))
    values = [b" %d" % length, _sized(random, other, length)]
    random.shuffle(values)
    new.replace(random, b"Content-Length", *values)


def wrong_length(random: Random, new: Draft) -> None:
    with_body(random, new, is_chunked=False)
    new.replace(random, b"Content-Length", b" %d" % max(0, len(new.content) + random.choice((-3, -2, -1, 1, 2, 40))))


def no_length(random: Random, new: Draft) -> None:
    with_body(random, new, is_chunked=random.random() < 0.5)
    new.drop(b"content-length")
    new.drop(b"transfer-encoding")


def odd_coding(random: Random, new: Draft) -> None:
    with_body(random, new, is_chunked=True)
    new.replace(random, b"Transfer-Encoding", random.choice(CODINGS))
    if random.random() < 0.3:
        new.add(random, b"Content-Length: %d" % len(random.choice((new.content, new.body))))


def odd_coding_name(random: Random, new: Draft) -> None:
    with_body(random, new, is_chunked=True)
    new.drop(b"transfer-encoding")
    new.add(random, random.choice(CODING_NAMES) + b" chunked")
    if random.random() < 0.5:
        new.add(random, b"Content-Length: %d" % len(random.choice((new.content, new.body))))


def several_codings(random: Random, new: Draft) -> None:
    with_body(random, new, is_chunked=True)
    new.drop(b"transfer-encoding")
    first, second = random.choice(TWO_CODINGS)
    at = random.randint(0, len(new.head))
    new.head[at:at] = [b"Transfer-Encoding:" + first, b"Transfer-Encoding:" + second]


def length_and_coding(random: Random, new: Draft) -> None:
    with_body(random, new, is_chunked=random.random() < 0.6)
    if new.is_chunked:
        lengths = (len(new.content), len(new.body), 0, 5)
        new.add(random, b"Content-Length: %d" % random.choice(lengths))
    else:
        new.add(random, b"Transfer-Encoding:" + random.choice((b" chunked", *CODINGS)))


def odd_chunk(random: Random, new: Draft) -> None:
    with_body(random, new, is_chunked=True)
    fault = (random.choice(CHUNK_LINES), b"\r\n") if random.random() < 0.75 else (b"%x\r\n", random.choice(CHUNK_ENDS))
    new.body = chunked(random, new.content, fault)


def odd_trailers(random: Random, new: Draft) -> None:
    with_body(random, new, is_chunked=True)
    new.body = chunked(random, new.content, trailers=random.choice(BAD_TRAILERS))


def upgrade(random: Random, new: Draft) -> None:
    if random.random() < 0.7:
        with_body(random, new, is_chunked=random.random() < 0.4)
    new.add(random, *random.choice(UPGRADES))


def old(random: Random, new: Draft) -> None:
    """HTTP/1.0."""
    new.version = b"HTTP/1.0"
    if random.random() < 0.5:
        new.drop(b"connection")
        new.add(random, b"Connection: " + random.choice((b"keep-alive", b"close", b"Keep-Alive")))
    if random.random() < 0.3:
        new.drop(b"host")


def odd_target(random: Random, new: Draft) -> None:
    new.target = random.choice(ODD_TARGETS)
    if random.random() < 0.2:
        new.method = random.choice((b"OPTIONS", b"CONNECT"))


def odd_host(random: Random, new: Draft) -> None:
    new.replace(random, b"Host", *random.choice(HOSTS))


def odd_version(random: Random, new: Draft) -> None:
    new.version = random.choice(VERSIONS)


def odd_method(random: Random, new: Draft) -> None:
    new.method = random.choice(ODD_METHODS)
    if new.method == b"CONNECT" and random.random() < 0.7:
        new.target = b"a.example:443"


def odd_separator(random: Random, new: Draft) -> None:
    first, second = random.choice(((random.choice(SEPARATORS), b" "), (b" ", random.choice(SEPARATORS))))
    new.line = new.method + first + new.target + second + new.version
    if random.random() < 0.3:
        new.line = b"%b %b" % (new.method, new.target)


def odd_line_end(random: Random, new: Draft) -> None:
    end = random.choice(LINE_ENDS)
    match random.randrange(4):
        case 0:
            new.end = new.blank = end
        case 1:
            new.blank = end
        case 2:
            new.end = end
        case _:
            at = random.randrange(len(new.head)) if new.head else 0
            new.head[at : at + 2] = [end.join(new.head[at : at + 2])]


def odd_line(random: Random, new: Draft) -> None:
    new.add(random, random.choice(LINES))


def fold(random: Random, new: Draft) -> None:
    """A header's value, wherever it can be."""
    at = random.randrange(len(new.head)) if new.head else 0
    name, colon, value = b"".join(new.head[at : at + 1]).partition(b":")
    folded = random.choice((b"\r\n ", b"\r\n\t", b"\n ", b"\r\n  \r\n "))
    new.head[at : at + 1] = [
        name + colon + random.choice((folded + value.strip(), value + folded, value + folded + b"x"))
    ]


def odd_connection(random: Random, new: Draft) -> None:
    new.drop(b"connection")
    new.add(random, b"Connection: " + random.choice(CONNECTIONS))


def odd_other(random: Random, new: Draft) -> None:
    new.add(random, random.choice(OTHERS))


def many_headers(random: Random, new: Draft) -> None:
    new.add(random, *[b"X-%d: %d" % (index % 7, index) for index in range(random.randint(30, 85))])


def large_header(random: Random, new: Draft) -> None:
    new.add(random, b"X-Large: " + b"l" * random.randint(1000, 4000))
    if random.random() < 0.3:
        new.target = b"/" + b"t" * random.randint(1000, 3000)


def between(random: Random, new: Draft) -> None:
    new.before = random.choice(BETWEEN)


MUTATIONS: tuple[Callable[[Random, Draft], None], ...] = (
    odd_length, odd_length_name, several_lengths, wrong_length, no_length, odd_coding, odd_coding_name, several_codings,
    length_and_coding, odd_chunk, odd_chunk, odd_trailers, upgrade, upgrade, old, odd_target, odd_host, odd_version,
    odd_method, odd_separator, odd_line_end, odd_line, odd_line, fold, odd_connection, odd_other, many_headers,
    large_header, between,
)  # fmt: skip


def disturb(random: Random, data: bytes) -> bytes:
    """Change a byte or two anywhere."""
    for _ in range(random.choice((1, 1, 2))):
        at = random.randrange(len(data))
        match random.randrange(4):
            case 0:
                data = data[:at] + data[at + 1 :]
            case 1:
                data = data[:at] + random.choice(BYTES) + data[at:]
            case 2:
                data = data[:at] + random.choice(BYTES) + data[at + 1 :]
            case _:
                data = data[:at] + data[at : at + 1] + data[at:]
    return data


def generate(random: Random) -> Stream:
    drafts = [draft(random) for _ in range(random.choice((1, 1, 2, 2, 3, 4, 5)))]
    names = []
    is_valid = random.random() < 0.12
    if is_valid:
        ending = random.randrange(4)
        if ending == 0:
            drafts[-1].version = b"HTTP/1.0"
            drafts[-1].drop(b"connection")
            with_body(random, drafts[-1], is_chunked=False)
        elif ending == 1:
            drafts[-1].drop(b"connection")
            drafts[-1].add(random, b"Connection: close")
    else:
        for _ in range(random.choice((1, 1, 1, 2, 2, 3))):
            mutation = random.choice(MUTATIONS)
            mutation(random, random.choice(drafts))
            names.append(mutation.__name__)
    data = b"".join([each.encode() for each in drafts]) + LAST
    if not is_valid and random.random() < 0.08:
        data = disturb(random, data)
        names.append("disturb")
    if not is_valid and random.random() < 0.05:
        data = data[: random.randrange(1, len(data))]
        names.append("truncate")
    return Stream(tuple(split(random, data, random.choice((1, 2, 4, 12)))), tuple(names))


# -- verdicts --


class Accepted(NamedTuple):
    """A whole request as a server read it. Headers without those of framing, sorted by name."""

    method: str
    target: tuple[str, str]
    headers: tuple[tuple[str, str], ...]
    body: str

    def __str__(self) -> str:
        headers = ", ".join(f"{name}: {value}" for name, value in self.headers)
        body = self.body if len(self.body) <= 100 else f"{self.body[:50]}…{self.body[-50:]}"
        return f"{self.method} {'?'.join(self.target)} {{{headers}}} {body!r}"

    def differing(self, other: Accepted) -> set[str]:
        return {name for name in self._fields if getattr(self, name) != getattr(other, name)}


def accepted(method: str, target: tuple[str, str], headers: Iterable[tuple[bytes, bytes]], body: bytes) -> Accepted:
    """What comes as bytes is shown in Latin-1, one character each."""
    pairs = [(name.decode("latin-1").lower(), value.decode("latin-1").strip(" \t")) for name, value in headers]
    pairs = [pair for pair in pairs if pair[0] not in ("content-length", "transfer-encoding")]
    return Accepted(method, target, tuple(sorted(pairs, key=lambda pair: pair[0])), body.decode("latin-1"))


def parts(target: str) -> tuple[str, str]:
    """The path, decoded, and the query, of a target in any form."""
    if match := re.match(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*", target):
        target = target[match.end() :]
        target = target if target.startswith("/") else "/" + target
    path, _, query = target.partition("#")[0].partition("?")
    return unquote(path), query


class Verdict(NamedTuple):
    accepted: tuple[Accepted, ...]
    end: str  # "closed", "waiting", or "refused: " with the reason

    @property
    def has_refused(self) -> bool:
        return self.end.startswith("refused")


def verdict(received: bytes, is_closed: bool) -> Verdict:
    """Of a server's answers."""
    requests, position, closes, refused = [], 0, False, ""
    while (end := received.find(b"\r\n\r\n", position)) >= 0:
        lines = received[position:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        position = end + 4
        if lines[0].split()[1] == "100":
            continue
        length = int(headers.get("content-length", 0))
        if ANSWER in headers:
            method, target, pairs, body = json.loads(headers[ANSWER])
            requests.append(Accepted(method, tuple(target), tuple(map(tuple, pairs)), body))
            closes = headers.get("connection", "") == "close" or lines[0].startswith("HTTP/1.0")
        else:
            refused = f"refused: {lines[0].split(' ', 1)[1]}"
            body = received[position : position + length]
            with contextlib.suppress(ValueError, KeyError, TypeError):
                refused += " " + json.loads(body)["error"]["message"]
            position += length
    if refused:
        return Verdict(tuple(requests), refused if is_closed else "waiting after it " + refused)
    if is_closed:
        return Verdict(tuple(requests), "closed" if closes else "refused: closed without an answer")
    return Verdict(tuple(requests), "waiting")


def read_with_h11(data: bytes) -> Verdict:
    requests: list[Accepted] = []
    try:
        while data := re.sub(rb"\A(?:\r\n)+", b"", data):  # h11 refuses what RFC 9112, 2.2 has servers ignore
            connection = h11.Connection(h11.SERVER, MAX_EVENT_BYTES)
            connection.receive_data(data)
            body = b""
            while (event := connection.next_event()) is not h11.NEED_DATA and not isinstance(event, h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    request = event
                else:
                    body += event.data
            if event is h11.NEED_DATA:
                break
            method, target = request.method.decode("latin-1"), parts(request.target.decode("latin-1"))
            requests.append(accepted(method, target, request.headers, body))
            status = 405 if method == "CONNECT" else 200
            connection.send(h11.Response(status_code=status, headers=[("Content-Length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                return Verdict(tuple(requests), "closed")
            data = connection.trailing_data[0]
    except h11.RemoteProtocolError as error:
        return Verdict(tuple(requests), f"refused: {error}")
    return Verdict(tuple(requests), "waiting")


async def hyper(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """An ASGI application for granian."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":  # what came was not a whole request
            return
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    target = parts((scope["raw_path"] + b"?" + scope["query_string"]).decode("latin-1"))
    described = json.dumps(accepted(scope["method"], target, scope["headers"], body)).encode()
    status = 405 if scope["method"] == "CONNECT" else 200
    headers = [(ANSWER.encode(), described), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


# -- servers --


class Recorder:
    """Stands for App: answers each whole request with what it is."""

    tasks: set[Any] = set()

    def begin(self, request: Any) -> None:
        request.owner = self

    def receive(self, request: Any) -> None:
        if request.is_complete:
            request.is_running = request.is_ended = True
            target = request.path, request.query.decode("latin-1")
            described = accepted(request.method, target, request.headers, bytes(request.content))
            request.respond(b"", f"{ANSWER}: {json.dumps(described)}\r\n".encode())

    def add_headers(self, request: Any, headers: bytes) -> bytes:
        return headers

    def expire(self, request: Any) -> None:
        request.drop()

    def end(self, request: Any) -> None:
        request.is_ended = True


@contextlib.asynccontextmanager
async def ours() -> AsyncIterator[Callable[[], asyncio.Protocol]]:
    """Makes our connections, in this process."""
    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from service.http.connection.limits import ConnectionLimits
    from service.http.connection.protocol import Connection
    from service.settings import BUNDLED, Settings

    settings = Settings(checkpoint=BUNDLED, max_connections_per_address=0, max_header_bytes=MAX_EVENT_BYTES)
    limits, app, config, state = ConnectionLimits(settings), Recorder(), Config(app=None), ServerState()

    async def sweep() -> None:
        while True:
            await asyncio.sleep(0.05)
            limits.sweep(time.monotonic())

    sweeping = asyncio.create_task(sweep())
    yield lambda: Connection(limits, app, config, state)  # type: ignore[arg-type]
    sweeping.cancel()
    for connection in list(limits.every):
        connection.abort()


@contextlib.contextmanager
def granian() -> Iterator[str]:
    """Serves `hyper`; yields the path of its socket."""
    with tempfile.TemporaryDirectory(prefix="framing-") as folder, tempfile.TemporaryFile() as log:
        path = f"{folder}/s"
        command = [sys.executable, "-m", "granian", "--interface", "asginl", "--http", "1", "--no-ws", "--uds", path]
        command += ["--no-access-log", "--log-level", "error", "--backlog", "1024", "tests.http.framing:hyper"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + 60
            while True:
                try:
                    with socket.socket(socket.AF_UNIX) as probe:
                        probe.connect(path)
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > until:
                        log.seek(0)
                        raise RuntimeError(f"granian does not answer: {log.read().decode()}") from None
                    time.sleep(0.02)
            yield path
        finally:
            process.terminate()
            process.wait(20)


class Client:
    """One connection to a server, on a socket that is connected."""

    def __init__(self, connected: socket.socket):
        self.socket, self.received, self.is_closed = connected, b"", False
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self.num_quiet = 0  # looks at it without news: time alone would include pauses of this process
        self.socket.setblocking(False)
        self.loop.add_reader(self.socket, self._read)

    def send(self, piece: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # it has been closed: what was answered can still be read
            sent = self.socket.send(piece)
            assert sent == len(piece), "a stream is larger than a socket's buffer"

    def _read(self) -> None:
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.received += data
            self.num_quiet = 0
        else:
            self.is_closed = True
            self.end()

    def end(self) -> None:
        if not self.ended.done():
            self.loop.remove_reader(self.socket)
            self.socket.close()
            self.ended.set_result(None)


class Servers:
    """Our connection and hyper, and whoever asks them."""

    def __init__(self, ours: Callable[[], asyncio.Protocol], hyper: str, listener: socket.socket):
        self.ours, self.hyper, self.listener = ours, hyper, listener
        self.waiting: dict[Client, float] = {}

    async def watch(self) -> None:
        """End what is quiet."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for client, seconds in list(self.waiting.items()):
                client.num_quiet += 1
                if client.num_quiet * LOOK_SECONDS > seconds:
                    client.end()

    async def connect(self) -> Client:
        """To ours. Accepted here, as an event loop that listens accepts one connection in a turn."""
        connected = socket.create_connection(self.listener.getsockname())
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)  # a whole stream
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no TIME_WAIT
        accepted, _ = self.listener.accept()
        await asyncio.get_running_loop().connect_accepted_socket(self.ours, accepted)
        return Client(connected)

    def connect_to_hyper(self) -> Client:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(self.hyper)
        return Client(connected)

    async def read(self, pieces: Iterable[bytes], quiet: float, pause: float = 0) -> list[Verdict]:
        """Of ours and of hyper."""
        clients = [await self.connect(), self.connect_to_hyper()]
        for piece in pieces:
            for client in clients:
                if not client.is_closed:
                    client.send(piece)
            await asyncio.sleep(pause)
        self.waiting |= dict.fromkeys(clients, quiet)
        for client in clients:
            await client.ended
            del self.waiting[client]
        return [verdict(client.received, client.is_closed) for client in clients]


@contextlib.asynccontextmanager
async def servers(hyper: str) -> AsyncIterator[Servers]:
    """hyper: where it listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with ours() as make:
            both = Servers(make, hyper, listener)
            watching = asyncio.create_task(both.watch())
            yield both
            watching.cancel()


# -- judgement --


@dataclass(slots=True)
class Case:
    """What became of a stream."""

    stream: Stream
    ours: Verdict
    h11: Verdict
    hyper: Verdict
    fault: str = ""  # none: as it should be

    def __str__(self) -> str:
        lines = [f"{self.fault}: {', '.join(self.stream.mutations) or 'valid'}", f"    {self.stream.data!r}"]
        for name, each in (("ours", self.ours), ("h11", self.h11), ("hyper", self.hyper)):
            lines.append(f"    {name}: {each.end}")
            lines += [f"      {it}" for it in each.accepted]
        return "\n".join(lines)


def agreed(one: Verdict, other: Verdict) -> tuple[Accepted, ...]:
    """The requests with which two begin alike."""
    count = 0
    for mine, theirs in zip(one.accepted, other.accepted, strict=False):
        if mine != theirs:
            break
        count += 1
    return one.accepted[:count]


def fault(ours: Verdict, oracles: dict[str, Verdict], is_valid: bool) -> str:
    """What is wrong with our verdict; nothing: ""."""
    following, framing = dict(oracles), {"method", "body"}  # following: those that have framed all as we have, so far
    for number, request in enumerate(ours.accepted):
        others = {name: it.accepted[number] for name, it in following.items() if len(it.accepted) > number}
        if not others and len(following) == len(oracles):
            return "accepts what neither accepts"
        if not others:  # the other has refused a request before, or read another one
            break
        if len(set(others.values())) == 1 and len(others) == len(oracles):
            differing = request.differing(next(iter(others.values())))
        else:
            differing = min((request.differing(it) & framing for it in others.values()), key=len)
        if differing:
            return f"another {' and '.join(sorted(differing))} than {' and '.join(others)}"
        following = {name: following[name] for name, it in others.items() if not framing & request.differing(it)}
    both, count = agreed(*oracles.values()), len(ours.accepted)
    if ours.end.startswith("waiting after"):
        return "refuses, and does not close"
    if len(both) > count and ours.end == "waiting":
        return "waits where both accept"
    if is_valid and not ours.accepted == both == oracles["h11"].accepted == oracles["hyper"].accepted:
        return "a valid stream is not accepted by all"
    return ""


def without_added_host(hyper: Verdict, *others: Verdict) -> Verdict:
    """granian adds a Host to a request that has none: one that another server has read without."""
    requests = list(hyper.accepted)
    for other in others:
        for number, (mine, its) in enumerate(zip(requests, other.accepted, strict=False)):
            if "host" not in dict(its.headers):
                kept = tuple(pair for pair in mine.headers if pair[0] != "host")
                requests[number] = mine._replace(headers=kept)
    return hyper._replace(accepted=tuple(requests))


def judge(stream: Stream, ours: Verdict, hyper: Verdict) -> Case:
    read = read_with_h11(stream.data)
    hyper = without_added_host(hyper, ours, read)
    return Case(stream, ours, read, hyper, fault(ours, {"h11": read, "hyper": hyper}, not stream.mutations))


@dataclass
class Figures:
    streams: int = 0
    valid_streams: int = 0
    requests: int = 0  # that ours accepted
    all_agree: int = 0  # streams of which all three accept the same requests
    oracles_differ: int = 0  # streams of which h11 and hyper do not
    faults: list[Case] = field(default_factory=list)
    not_repeated: int = 0  # faults that a second look did not show
    refused: Counter[str] = field(default_factory=Counter)  # by our reason
    stricter: Counter[str] = field(default_factory=Counter)  # the same, where both accept
    mutations: Counter[str] = field(default_factory=Counter)

    def add(self, case: Case) -> None:
        self.streams += 1
        self.valid_streams += not case.stream.mutations
        self.mutations.update(case.stream.mutations)
        self.requests += len(case.ours.accepted)
        self.all_agree += case.ours.accepted == case.h11.accepted == case.hyper.accepted
        self.oracles_differ += case.h11.accepted != case.hyper.accepted
        reason = re.sub(r"(?<=got )\S.*", "…", case.ours.end.removeprefix("refused: "))
        if case.ours.has_refused:
            self.refused[reason] += 1
        if len(agreed(case.h11, case.hyper)) > len(case.ours.accepted):
            self.stricter[reason] += 1
        if case.fault:
            self.faults.append(case)


async def compare(servers: Servers, streams: Iterable[Stream]) -> Figures:
    figures, source = Figures(), iter(streams)

    async def work() -> None:
        for stream in source:
            case = judge(stream, *await servers.read(stream.pieces, QUIET_SECONDS))
            if case.fault:
                case = await look_again(servers, stream)
                figures.not_repeated += not case.fault
            figures.add(case)

    await asyncio.gather(*[work() for _ in range(AT_ONCE)])
    return figures


async def look_again(servers: Servers, stream: Stream) -> Case:
    """Slowly, so that a busy machine is not taken for a fault."""
    return judge(stream, *await servers.read(stream.pieces, SURE_SECONDS, pause=0.01))


async def shorten(servers: Servers, case: Case) -> Case:
    """A smaller stream, in one piece, with the same fault; the case itself if there is none."""

    async def attempt(data: bytes) -> Case | None:
        stream = Stream((data,), case.stream.mutations)
        found = judge(stream, *await servers.read(stream.pieces, SHORT_SECONDS))
        return found if found.fault == case.fault else None

    best = await attempt(case.stream.data)
    if best is None:  # it depends on the pieces
        return case
    size = len(best.stream.data) // 2
    while size:
        at = 0
        while at < len(data := best.stream.data):
            starts = range(at, len(data), size)[:AT_ONCE]
            without = [data[:start] + data[start + size :] for start in starts]
            found = await asyncio.gather(*[attempt(each) for each in without if each])
            shorter = next(filter(None, found), None)
            if shorter is None:
                at = starts[-1] + size
            else:
                at, best = starts[found.index(shorter)], shorter
        size //= 2
    best = await look_again(servers, best.stream)
    return best if best.fault == case.fault else case


async def run(hyper: str, num_streams: int, seed: int, num_shown: int) -> Figures:
    """Compare random streams; print the first faults, shortened."""
    chance = Random(seed)
    async with servers(hyper) as both:
        figures = await compare(both, (generate(chance) for _ in range(num_streams)))
        for case in sorted(figures.faults, key=lambda it: len(it.stream.data))[:num_shown]:
            print(await shorten(both, case))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare our connection with h11 and hyper on random streams.")
    parser.add_argument("--streams", type=int, default=200_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="default: a new one")
    parser.add_argument("--out", type=Path, default=FIGURES, help="default: %(default)s")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    started = time.monotonic()
    with granian() as hyper:
        figures = uvloop.run(run(hyper, arguments.streams, arguments.seed, num_shown=20))
    shown = {
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - started),
        "versions": {name: version(name) for name in ("h11", "granian", "httptools")},
    }
    for each in fields(figures):
        value = getattr(figures, each.name)
        shown[each.name] = dict(value.most_common()) if isinstance(value, Counter) else value
    shown["faults"] = Counter(case.fault for case in figures.faults)
    arguments.out.write_text(json.dumps(shown, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{figures.streams} streams, {len(figures.faults)} faults: {arguments.out}")
    sys.exit(bool(figures.faults))


if __name__ == "__main__":
    main()
