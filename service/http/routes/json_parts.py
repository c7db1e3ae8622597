"""JSON in parts, so that a large answer is encoded while it is written. It knows nothing about answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

MAX_NUMBERS = 1024  # encoded at a time: about 1 ms
MAX_CHARACTERS = 1 << 16  # of a text, encoded at a time

HOLE: Any = msgspec.Raw(b"\0")  # stands for a part of an answer; JSON never contains this byte

_encode = msgspec.json.encode


def filled(content: msgspec.Struct, *parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the JSON of `content` with parts in place of its holes."""
    first, *rest = _encode(content).split(b"\0")
    yield first
    for part, after in zip(parts, rest, strict=True):
        yield from part
        yield after


def text_parts(text: str) -> Iterator[bytes]:
    """Yield the JSON of a text."""
    yield b'"'
    for i in range(0, len(text), MAX_CHARACTERS):
        yield _encode(text[i : i + MAX_CHARACTERS])[1:-1]
    yield b'"'


def list_parts(slices: Iterable[list[Any]]) -> Iterator[bytes]:
    """Yield the JSON of a list from slices that are not empty."""
    return joined([_encode(some)[1:-1]] for some in slices)


def joined(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the JSON of a list from the parts of its items."""
    before = b"["
    for item in items:
        yield before
        yield from item
        before = b","
    yield b"]" if before == b"," else b"[]"


def sliced(items: Sequence[Any]) -> Iterator[list[Any]]:
    return (list(items[i : i + MAX_NUMBERS]) for i in range(0, len(items), MAX_NUMBERS))


_BREAK = re.compile(rb"\xc2\x85|\xe2\x80[\xa8\xa9]")  # U+0085, U+2028, U+2029


def escape_breaks(json: bytes) -> bytes:
    """Escape Unicode's line breaks, so that JSON is one line for clients such as httpx, which split at all of them."""
    return _BREAK.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), json)
