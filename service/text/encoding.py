"""Encodes a request's texts and checks its ids."""

from __future__ import annotations

from collections.abc import Callable

from service.model.tokenizer import UNKNOWN, UnknownCharacterError
from service.text.errors import InvalidRequestError, invalid
from service.text.limits import Limits
from service.text.model import TextModel
from service.text.requests import Prompt, TextRequest
from service.text.work import Work
from service.words import plural

MAX_LISTED = 20  # unknown characters that an error names
MAX_SHORT = 256  # characters encoded without a pause
MAX_ENCODED = 1 << 14  # characters encoded or decoded at a time: about 0.5 ms, if they are known


class Encoder:
    """Encodes texts by the options of the request or the limits, and counts unknown characters replaced or dropped."""

    def __init__(self, limits: Limits, model: TextModel, request: TextRequest):
        self.limits, self.model = limits, model
        self.tokenizer = model.tokenizer
        self.policy = request.unknown_characters or limits.unknown_characters
        self.replacement = request.replacement_character or self.tokenizer.replacement
        self.replaced = self.dropped = 0

    def encode(self, text: str, param: str, index: int | None = None) -> Work[list[int]]:
        """Return the ids of a text: the field `param` of the request, or the item `index` in it.

        Raises InvalidRequestError: the text has unknown characters that are refused, or their replacement is unknown
        too.
        """
        if len(text) <= MAX_SHORT:
            try:
                return self.tokenizer.encode(text)
            except UnknownCharacterError:
                pass
        ids: list[int] = []
        yield from self._encode(text, param, index, ids.extend)
        return ids

    def encode_counting(self, text: str, param: str, index: int | None) -> Work[tuple[list[int], int]]:
        """`encode`, and how many characters the model does not know; its unknown symbol in the text is one too."""
        before = self.replaced + self.dropped
        ids = yield from self.encode(text, param, index)
        own = 0 if self.tokenizer.unknown_id is None else text.count(UNKNOWN)
        return ids, self.replaced + self.dropped - before + own

    def count(self, text: str, param: str) -> Work[int]:
        """Return the number of ids that `encode` would give. Raises the same."""
        counts: list[int] = []
        yield from self._encode(text, param, None, lambda ids: counts.append(len(ids)))
        return sum(counts)

    def encode_part(self, text: str) -> list[int]:
        """Return the ids of a part of a text that `count` has accepted."""
        try:
            return self.tokenizer.encode(text)
        except UnknownCharacterError:
            other = self.replacement if self.policy == "replace" else ""
            return self.tokenizer.encode("".join([c if c in self.tokenizer else other for c in text]))

    def _unknown(self, text: str) -> tuple[int, list[tuple[int, str]]]:
        """Return the number of unknown characters in a text, and the first ones with their offsets."""
        unknown = [(i, c) for i, c in enumerate(text) if c not in self.tokenizer]
        return len(unknown), unknown[:MAX_LISTED]

    def _encode(self, text: str, param: str, index: int | None, take: Callable[[list[int]], object]) -> Work[None]:
        """Give the ids of a text to `take`, a part at a time."""
        unknown: list[tuple[int, str]] = []  # the first of them
        num_unknown = 0
        for start in range(0, len(text), MAX_ENCODED):
            yield None
            part = text[start : start + MAX_ENCODED]
            try:
                take(self.tokenizer.encode(part))
            except UnknownCharacterError:
                count, first = self._unknown(part)
                num_unknown += count
                unknown += [(start + i, c) for i, c in first[: MAX_LISTED - len(unknown)]]
                if self.policy == "replace" and self.replacement not in self.tokenizer:
                    offset, character = unknown[0]
                    message = (
                        f"{self.replacement!r}, which is to replace {character!r} at offset "
                        f"{offset} of {param if index is None else f'{param}.{index}'}, is not in the vocabulary either"
                    )
                    raise invalid("replacement_character", message) from None
                if self.policy != "refuse":
                    take(self.encode_part(part))
        if num_unknown and self.policy == "refuse":
            raise unknown_characters(unknown, num_unknown, param, index)
        if self.policy == "drop":
            self.dropped += num_unknown
        elif self.policy == "replace":
            self.replaced += num_unknown

    def decode(self, ids: list[int]) -> Work[str]:
        """Return the text of ids."""
        parts = []
        for start in range(0, len(ids), MAX_ENCODED):
            yield None
            parts.append(self.tokenizer.decode(ids[start : start + MAX_ENCODED]))
        return "".join(parts)

    def encode_prompts(self, prompts: list[Prompt], is_list: bool) -> Work[list[list[int]]]:
        """Return the ids of the field `prompt`, within the limits. is_list: errors give the prompt's index.

        Raises InvalidRequestError: a prompt is too long or has unknown characters or ids.
        """
        limit, ids = self.limits.max_prompt_characters, []
        for i, prompt in enumerate(prompts):
            index, name = (i, f"prompt.{i}") if is_list else (None, "prompt")
            if len(prompt) > limit:
                message = f"{name}: at most {plural(limit, 'character')}, got {len(prompt)}"
                raise InvalidRequestError(message, "prompt")
            if isinstance(prompt, list):
                check_ids(self.model, prompt, "prompt", name)
                if self.model.vocab_size > 257:  # equal ids of a text are one object; in JSON, each is its own
                    prompt = self.tokenizer.encode(self.tokenizer.decode(prompt))
                ids.append(prompt)
            else:
                ids.append((yield from self.encode(prompt, "prompt", index)))
            yield None
        return ids


def check_ids(model: TextModel, ids: list[int], param: str, name: str | None = None) -> None:
    if ids and max(ids) >= model.vocab_size:
        wrong = next(id for id in ids if id >= model.vocab_size)
        message = f"{name or param}: ids must be in [0, {model.vocab_size - 1}], got {wrong}"
        raise InvalidRequestError(message, param)


def begun(model: TextModel, ids: list[int], param: str) -> list[int]:
    """Return a prompt as the model sees it. A model of records gets the end of one first, if it is not there.

    An empty prompt means the beginning of a document, a line break.

    Raises InvalidRequestError: the vocabulary has none.
    """
    end = model.record_end
    if end is not None:
        return ids if ids[:1] == [end] else [end, *ids]
    if ids:
        return ids
    if "\n" not in model.tokenizer:
        raise invalid(param, "must not be empty, as the vocabulary has no line break")
    return model.tokenizer.encode("\n")


def unknown_characters(
    unknown: list[tuple[int, str]], count: int, param: str, index: int | None = None
) -> InvalidRequestError:
    """Return the error for `count` unknown characters. It names the first ones with offsets and code points."""
    listed = [f"{c!r} (U+{ord(c):04X}) at offset {i}" for i, c in unknown[:MAX_LISTED]]
    if count == 1:
        message = f"character {listed[0]} is not in the vocabulary"
    else:
        more = f" and {count - len(listed)} more" if count > len(listed) else ""
        message = f"characters {', '.join(listed)}{more} are not in the vocabulary"
    name = param if index is None else f"{param}.{index}"
    return InvalidRequestError(f"{name}: {message}", param, "unknown_character")
