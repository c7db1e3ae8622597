"""JSON in parts, so that a large answer is encoded while it is written. It knows nothing about answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

MAX_NUMBERS = 1024  # encoded at a time: about 1 ms
MAX_CHARACTERS = 1 << 16  # of a text, encoded at a time

Some = TypeVar("Some", bound=Sequence[Any])
_HOLE = msgspec.Raw(b"\0")  # where parts follow; JSON never contains this byte


def json_parts(content: Any) -> Iterator[bytes]:
    """Yield the JSON of `content`. An iterator in it, as of text_parts, yields the JSON of its place."""
    return _filled(*_encoded(content))


def list_parts(slices: Iterable[list[Any]]) -> Iterator[bytes]:
    """Yield the JSON of a list from slices that are not empty. Their items may contain iterators, as in json_parts."""
    before = b"["
    for some in slices:
        json, inner = _encoded(some)
        yield before
        yield from _filled(json[1:-1], inner)
        before = b","
    yield b"]" if before == b"," else b"[]"


def text_parts(texts: Iterable[str]) -> Iterator[bytes]:
    """Yield the JSON of a text from its slices."""
    yield b'"'
    for text in texts:
        yield msgspec.json.encode(text)[1:-1]
    yield b'"'


def sliced(items: Some, size: int = MAX_NUMBERS) -> Iterator[Some]:
    return (items[i : i + size] for i in range(0, len(items), size))  # type: ignore[misc]


def _encoded(content: Any) -> tuple[bytes, list[Iterator[bytes]]]:
    """Return the JSON of `content` with a hole for each iterator in it, and these."""
    inner: list[Iterator[bytes]] = []

    def leave_hole(parts: Iterator[bytes]) -> msgspec.Raw:
        inner.append(parts)
        return _HOLE

    return msgspec.json.encode(content, enc_hook=leave_hole), inner


def _filled(json: bytes, inner: list[Iterator[bytes]]) -> Iterator[bytes]:
    first, *rest = json.split(b"\0")
    yield first
    for parts, after in zip(inner, rest, strict=True):
        yield from parts
        yield after


_BREAK = re.compile(rb"\xc2\x85|\xe2\x80[\xa8\xa9]")  # U+0085, U+2028, U+2029


def escape_breaks(json: bytes) -> bytes:
    """Escape Unicode's line breaks, so that JSON is one line for clients such as httpx, which split at all of them."""
    return _BREAK.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), json)
