"""Reads the body of a request: pydantic parses the JSON and checks the fields.

It takes up to 40 ms for a body at its limits, in which nothing else runs. So a body has at most MAX_VALUES values.
"""

from __future__ import annotations

import numpy as np
from pydantic_core import from_json

from service.text.errors import InvalidRequestError
from service.text.reading import AnyRequest, parse

MAX_VALUES = 1 << 17  # numbers, texts, lists, objects and their names
COUNTED_BYTES = 1 << 17  # of a body, at a time


def read(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """Return the request in a JSON body.

    Raises InvalidRequestError: it is not valid JSON or has too many values; otherwise as `parse`.
    """
    if len(body) > MAX_VALUES:
        _check_count(body)
    try:
        fields = from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise InvalidRequestError(f"body is not valid JSON: {error}", code="invalid_json") from None
    return parse(kind, fields)


def _check_count(body: bytes) -> None:
    """Refuse a body of more than MAX_VALUES values before they are made. Raises InvalidRequestError."""
    signs = b",:[{"  # of which each value but the first has one, unless they are within strings
    if sum(map(body.count, (signs[i : i + 1] for i in range(len(signs))))) < MAX_VALUES:
        return
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    characters, count, quotes = np.frombuffer(body, np.uint8), 0, 0
    for start in range(0, len(characters), COUNTED_BYTES):
        part = characters[start : start + COUNTED_BYTES]
        before = np.cumsum(part == ord('"'), dtype=np.uint8) + np.uint8(quotes)
        is_outside, quotes = before % 2 == 0, int(before[-1]) % 2
        count += sum(int(np.count_nonzero(is_outside & (part == sign))) for sign in signs)
        if count >= MAX_VALUES:
            message = f"body: at most {MAX_VALUES} values are allowed, names of objects included, got more"
            raise InvalidRequestError(message)
