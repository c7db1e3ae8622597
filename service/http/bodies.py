"""Reads request bodies. A large one is cut into its fields first, so that none blocks the event loop for long.

Pydantic validates small bodies, and the small fields of large ones; an id takes it 0.2 µs. Large fields are lists of
texts or ids: msgspec decodes them as such in a tenth of that, each prompt after a look at its length. Either way the
same is accepted, and refused in the same words, but a large value that is refused is shown abbreviated.
"""

from __future__ import annotations

import asyncio
import functools
import re
from typing import Annotated, Any
from weakref import WeakValueDictionary

import msgspec
from msgspec import Meta, Raw
from pydantic import BaseModel

from service.http.schemas import (
    EXPECTED,
    FIELD_NAME,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_ID,
    MAX_STOPS,
    MAX_UNKNOWN_FIELDS,
    REFUSED_FIELDS,
    AnyRequest,
    ApiError,
    NextRequest,
    StreamOptions,
    TokenizeRequest,
    invalid_json,
    parse,
)
from service.http.turns import Pause
from service.settings import Settings
from service.words import plural

LARGE_BODY_BYTES = 1 << 16
LARGE_FIELD_BYTES = 1 << 12
DECODED_BYTES = 1 << 17  # of a list of ids at a time: about 1 ms

_Ids = list[Annotated[int, Meta(ge=0, le=MAX_ID)]]
_LISTS: dict[str, Any] = {
    "texts": list[str], "continuations": list[str], "tokens": _Ids, "stop": list[str], "choice": list[str],
    "seed": list[int],
}  # fmt: skip
_FIRST_ITEM = re.compile(rb"\[\s*(.)")
_decode = msgspec.json.decode
_encode = msgspec.json.encode


class BodyReader:
    """Parses one large body at a time, each client's in turn, so that many of one hold up others no longer than one."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._turn = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by client, of those that wait

    async def read(self, kind: type[AnyRequest], body: bytes, client: str) -> AnyRequest:
        """The request in a large JSON body.

        Raises:
            ApiError: 400, with the field, what was given and what is allowed.
        """
        own = self._turns.get(client) or self._turns.setdefault(client, asyncio.Lock())
        async with own, self._turn:
            await asyncio.sleep(0)
            return await parse_large(kind, body, self._settings)


async def parse_large(kind: type[AnyRequest], body: bytes, settings: Settings) -> AnyRequest:
    """As `schemas.parse`.

    Raises:
        ApiError: as `schemas.parse`; also for more prompts or longer ones than the settings allow.
    """
    pause = Pause()
    fields = _fields(kind, body)
    small: dict[str, Any] = dict.fromkeys(await _unknown(kind, body, pause))
    large: dict[str, Any] = {}
    for name, raw in fields.items():
        await pause.if_due()
        if len(raw) <= LARGE_FIELD_BYTES or raw[:1] == b'"':
            small[name] = Raw(raw)
        elif name == "prompt" and raw[:1] == b"[" and kind is not TokenizeRequest:
            prompts = await _prompts(raw, settings, pause, may_be_ids=kind is not NextRequest)
            large[name], is_one = prompts, bool(prompts) and isinstance(prompts[0], int)
            small[name] = [0] if is_one else [""] * len(prompts)  # as many; pydantic looks at no more
        elif name in _LISTS and raw[:1] == b"[":
            tokens = await _ids(raw, pause) if name == "tokens" else None
            items = _list(kind, name, raw) if tokens is None else tokens
            if name in ("texts", "continuations", "tokens"):
                large[name], small[name] = items, []
            elif name in EXPECTED and len(items) > max(MAX_STOPS, settings.max_prompts):
                raise _expected(name)
            elif name == "choice" and len(items) > MAX_CHOICES:
                raise ApiError(400, f"choice: at most {MAX_CHOICES} texts, got {len(items)}", param=name)
            else:
                small[name] = items
        elif name == "logit_bias":
            small[name] = _biases(raw)
        elif name == "stream_options" and raw[:1] == b"{":
            small[name] = dict.fromkeys(await _unknown(StreamOptions, raw, pause))
            small[name] |= {key: _abbreviated(key, value) for key, value in _fields(StreamOptions, raw).items()}
        else:
            small[name] = _abbreviated(name, raw)
    await pause.if_due()
    request = parse(kind, _encode(small))
    for name, value in large.items():
        setattr(request, name, value)
    return request


@functools.cache
def _decoder(kind: type[BaseModel]) -> msgspec.json.Decoder[msgspec.Struct]:
    """Cuts an object into the JSON of its fields, and skips unknown ones."""
    return msgspec.json.Decoder(msgspec.defstruct(kind.__name__, [(name, Raw, Raw()) for name in _names(kind)]))


def _names(kind: type[BaseModel]) -> list[str]:
    """The kind's fields, and those of others whose values are looked at."""
    return [*kind.model_fields, *REFUSED_FIELDS, "structured_outputs"]


@functools.lru_cache(maxsize=256)
def _strict_decoder(kind: type[BaseModel], others: tuple[str, ...]) -> msgspec.json.Decoder[msgspec.Struct]:
    """Fails at the first field that is neither the kind's nor one of the others."""
    names = {f"field_{i}": name for i, name in enumerate((*kind.model_fields, *others))}
    fields = [(field, Raw, Raw()) for field in names]
    return msgspec.json.Decoder(msgspec.defstruct(kind.__name__, fields, rename=names, forbid_unknown_fields=True))


_PLACE = re.compile(r"\(byte (\d+)\)$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


async def _unknown(kind: type[BaseModel], body: bytes, pause: Pause) -> list[str]:
    """The unknown fields of a JSON object, in order: at most one more than allowed, and none after an invalid name.

    A decoder names the first one that it does not have, so that each takes another; a dict of all fields could have
    hundreds of thousands.
    """
    names: list[str] = []
    while len(names) <= MAX_UNKNOWN_FIELDS:
        try:
            _strict_decoder(kind, tuple(names)).decode(body)
        except msgspec.ValidationError as error:
            found = _UNKNOWN.fullmatch(str(error))
            assert found is not None, error  # it is an object, as _fields has decoded it
            names.append(found[1])
            if not FIELD_NAME.fullmatch(found[1]):
                break
        else:
            break
        await pause.if_due()
    return names


def _fields(kind: type[BaseModel], body: bytes) -> dict[str, bytes]:
    """The JSON of each field given."""
    try:
        if not body.isascii():
            body.decode()  # msgspec does not look into what it skips
        cut = _decoder(kind).decode(body)
    except msgspec.ValidationError:
        raise ApiError(400, "body: Input should be an object") from None
    except UnicodeDecodeError as error:
        raise invalid_json(body, str(error), error.start) from None
    except (msgspec.DecodeError, RecursionError) as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        place = _PLACE.search(reason)
        raise invalid_json(body, reason, int(place[1]) if place else len(body)) from None
    raws = ((name, bytes(getattr(cut, name))) for name in _names(kind))
    return {name: raw for name, raw in raws if raw}


async def _prompts(raw: bytes, settings: Settings, pause: Pause, *, may_be_ids: bool) -> list[Any]:
    """The field `prompt`, if it is a list: of texts, of ids, or of lists of ids."""
    first = _FIRST_ITEM.match(raw)[1]  # type: ignore[index]  # a list, as `raw` was checked
    if first == b'"':
        prompts: list[Any] = _checked("prompt", raw, list[str])
    elif first == b"[" and may_be_ids:
        _check_count(raw.count(b"[") - 1, settings)
        prompts = []
        for i, one in enumerate(_checked("prompt", raw, list[Raw])):
            prompts.append(await _prompt(bytes(one), settings, pause, f"prompt.{i}"))
        return prompts
    elif may_be_ids:
        return await _prompt(raw, settings, pause, "prompt")
    else:
        raise _expected("prompt")
    _check_count(len(prompts), settings)
    return prompts


async def _prompt(raw: bytes, settings: Settings, pause: Pause, name: str) -> list[int]:
    limit, length = settings.max_prompt_characters, raw.count(b",") + 1
    if length > limit:
        raise ApiError(400, f"{name}: at most {plural(limit, 'character')}, got {length}", param="prompt")
    ids = await _ids(raw, pause)
    if ids is None:
        raise _expected("prompt")
    return ids


async def _ids(raw: bytes, pause: Pause) -> list[int] | None:
    """The ids in a list, decoded in slices; None: not a list of ids."""
    if raw[:1] != b"[":
        return None
    ids: list[int] = []
    start, end = 1, len(raw) - 1  # between brackets
    try:
        while start <= end:
            comma = raw.find(b",", start + DECODED_BYTES, end)
            stop = end if comma < 0 else comma
            ids += _decode(b"[%b]" % raw[start:stop], type=_Ids)
            start = stop + 1
            await pause.if_due()
    except (msgspec.DecodeError, RecursionError):
        return None
    return ids


def _check_count(count: int, settings: Settings) -> None:
    if count > settings.max_prompts:
        message = f"sequences per request (prompts × n or best_of) must be in [1, {settings.max_prompts}], got {count}"
        raise ApiError(400, f"prompt: {message}", param="prompt")


def _checked(name: str, raw: bytes, kind: Any) -> Any:
    try:
        return _decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _expected(name) from None


def _expected(name: str) -> ApiError:
    return ApiError(400, f"{name}: Input should be {EXPECTED[name]}", param=name)


def _list(kind: type[AnyRequest], name: str, raw: bytes) -> list[Any]:
    if name in EXPECTED:
        items: list[Any] = _checked(name, raw, _LISTS[name])
        return items
    try:
        items = _decode(raw, type=_LISTS[name])
        return items
    except msgspec.ValidationError as error:
        place = re.search(r"\$\[(\d+)\]", str(error))
    assert place is not None
    index = int(place[1])
    wrong = bytes(_decode(raw, type=list[Raw])[index])
    try:
        parse(kind, b'{"%b": [%b]}' % (name.encode(), wrong if len(wrong) <= LARGE_FIELD_BYTES else b"[]"))
    except ApiError as error:
        alone, param = f"{name}.0", f"{name}.{index}"
        raise ApiError(400, error.message.replace(alone, param, 1), param=param) from None
    raise AssertionError(f"{name}: msgspec refuses what pydantic accepts: {wrong!r}")


def _biases(raw: bytes) -> Raw:
    """`logit_bias`, for pydantic, unless it has more entries than allowed."""
    is_object = raw[:1] == b"{"
    # A valid entry of an object has one or two colons, one of a list a bracket and a comma.
    if (raw.count(b":") if is_object else raw.count(b"[") - 1) > 2 * MAX_BIASES:
        raise _expected("logit_bias")
    _checked("logit_bias", raw, dict[str, float] if is_object else list[tuple[str | int, float]])
    return Raw(raw)


def _abbreviated(name: str, raw: bytes) -> Raw:
    """A value that is too large to be valid, or is a text, as one that pydantic refuses alike."""
    match raw[:1]:
        case _ if len(raw) <= LARGE_FIELD_BYTES:
            return Raw(raw)
        case b'"':
            return Raw(raw)
        case b"[":
            return Raw(b"[]")
        case b"{":
            return Raw(b"{}")
    raise ApiError(400, f"body is not valid JSON: {name} has {len(raw)} digits", code="invalid_json")
