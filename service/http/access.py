"""What a request's head must have, whatever its route does: an API key, a body of JSON, and no foreign page behind it.

Functions on the fields of a head, with names in lower case. Each raises ApiError: what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256

from service.http.api.errors import ApiError, shortened

Fields = Mapping[bytes, bytes]


def name_of_key(fields: Fields, keys: Mapping[bytes, str]) -> str:
    """The name of the request's API key; keys: names by digest, so that a look-up's time tells nothing of a key.

    Raises ApiError: 401.
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
    """Accept JSON that is not compressed. Raises ApiError: 415."""
    _check_content_type(fields)
    coding = fields.get(b"content-encoding")
    if coding is not None and coding.strip().lower() not in (b"", b"identity"):
        message = f"Content-Encoding must be absent or identity, got {shortened(coding.decode('latin-1'))}"
        headers = {"Accept-Encoding": "identity"}
        raise ApiError(415, message, code="unsupported_content_encoding", headers=headers)


def _check_content_type(fields: Fields) -> None:
    """Accept application/json, and for curl's sake its default and none at all; but these from no web page.

    A browser sends application/json to another origin only after asking, so that --cors-origins decides. It would send
    the others without; it names the page's origin with each.
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


def check_site(fields: Fields, is_allowed_origin: Callable[[str], bool] | None) -> None:
    """Refuse what a page of another site has a browser send without asking: a GET.

    is_allowed_origin: by --cors-origins; None: there are none.

    Raises ApiError: 403.
    """
    if fields.get(b"sec-fetch-site") != b"cross-site":
        return
    origin = fields.get(b"origin", b"").decode("latin-1")
    if is_allowed_origin is None or not is_allowed_origin(origin):
        message = "Sec-Fetch-Site is cross-site: a page of another site may send this only if --cors-origins allows it"
        raise ApiError(403, f"{message}, got Origin {shortened(origin)}", code="cross_site")
