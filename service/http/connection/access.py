"""Checks of a request's head: the API key and the type of the body.

Each function takes the header fields with names in lower case, and raises ApiError.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from service.http.connection.errors import ApiError
from service.words import shortened

Fields = Mapping[bytes, bytes]


def name_of_key(fields: Fields, keys: Mapping[bytes, str]) -> str:
    """Return the name of the request's API key.

    keys: names by digest, so that the time of a look-up reveals nothing about a key.

    Raises ApiError: 401, the key is missing or unknown.
    """
    authorization = fields.get(b"authorization")
    if authorization is None:
        raise ApiError(401, "an API key is required: Authorization: Bearer KEY", code="invalid_api_key")
    scheme, _, key = authorization.partition(b" ")
    name = keys.get(sha256(key.strip(b" ")).digest())
    if name is None or scheme.lower() != b"bearer":
        raise ApiError(401, "the API key in Authorization is not valid", code="invalid_api_key")
    return name


def check_content(fields: Fields) -> None:
    """Accept uncompressed JSON. Raises ApiError: 415."""
    _check_content_type(fields)
    coding = fields.get(b"content-encoding")
    if coding is not None and coding.strip().lower() not in (b"", b"identity"):
        message = f"Content-Encoding must be absent or identity, got {shortened(coding.decode('latin-1'))}"
        headers = {"Accept-Encoding": "identity"}
        raise ApiError(415, message, code="unsupported_content_encoding", headers=headers)


def _check_content_type(fields: Fields) -> None:
    """Accept application/json. Also accept curl's default type, or none, unless a web page sends the request.

    A browser asks before it sends application/json to another origin, so --cors-origins decides. It sends the other
    types without asking, but with an Origin header.
    """
    content_type = fields.get(b"content-type", b"")
    if content_type == b"application/json":
        return
    given = content_type.decode("latin-1")
    kind = given.partition(";")[0].strip().lower()
    if kind == "application/json":
        return
    if kind not in ("", "application/x-www-form-urlencoded"):
        message = f"Content-Type must be application/json, got {shortened(given)}"
    elif b"origin" in fields:
        message = f"Content-Type must be application/json in a request of a web page, got {shortened(given)}"
    else:
        return
    raise ApiError(415, message, code="unsupported_content_type")
