"""What a head alone rules out: keys, types and codings of bodies, pages of other sites."""

import hashlib

import pytest

from service.http.connection.access import check_content, name_of_key
from service.http.connection.errors import ApiError

KEYS = {hashlib.sha256(key).digest(): key[:3].decode() for key in (b"one-key-0123", b"two-key-0123")}


@pytest.mark.parametrize("given", [b"Bearer one-key-0123", b"bearer  one-key-0123 "])
def test_a_key_has_the_name_of_its_digest(given):
    assert name_of_key({b"authorization": given}, KEYS) == "one"


@pytest.mark.parametrize("given", [None, b"", b"Bearer", b"Basic one-key-0123", b"Bearer one-key", b"one-key-0123"])
def test_without_a_valid_key_a_request_is_refused(given):
    with pytest.raises(ApiError) as error:
        name_of_key({} if given is None else {b"authorization": given}, KEYS)
    assert (error.value.status, error.value.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("given", [None, b"", b"identity", b" Identity "])
def test_a_body_may_say_that_it_is_not_compressed(given):
    check_content({} if given is None else {b"content-encoding": given})


@pytest.mark.parametrize("given", [b"gzip", b"GZIP", b"br", b"identity, gzip", b"x"])
def test_a_compressed_body_is_refused_and_what_is_accepted_named(given):
    """It would be taken for JSON that is not valid otherwise."""
    with pytest.raises(ApiError) as error:
        check_content({b"content-encoding": given, b"content-type": b"application/json"})
    assert (error.value.status, error.value.code) == (415, "unsupported_content_encoding")
    assert error.value.headers["Accept-Encoding"] == "identity"
    assert error.value.message == f"Content-Encoding must be absent or identity, got {given.decode()!r}"


@pytest.mark.parametrize(
    ("kind", "origin", "is_refused"),
    [
        (b"application/json", b"https://a", False), (b"Application/JSON; charset=utf-8", b"https://a", False),
        (b"application/x-www-form-urlencoded", None, False), (None, None, False), (b"text/plain", None, True),
        (b"application/x-www-form-urlencoded", b"https://a", True), (None, b"https://a", True),
    ],
)  # fmt: skip
def test_a_body_is_json_and_of_a_page_declared_so(kind, origin, is_refused):
    fields = {b"content-type": kind, b"origin": origin}
    fields = {name: value for name, value in fields.items() if value is not None}
    if not is_refused:
        check_content(fields)
        return
    with pytest.raises(ApiError) as error:
        check_content(fields)
    assert (error.value.status, error.value.code) == (415, "unsupported_content_type")
