"""The conditions of a request on its texts: patterns, allowed characters and lengths, compiled to packed automata.

A sequence has at most one constraint. It follows from what the request gives, and from whether the text ends a record:

| given | ends a record | constraint | a character that leaves a match |
|---|---|---|---|
| regex or choice | no | the pattern | ends the text |
| regex or choice | yes | the pattern, then the record's end | never comes: the end stops the text |
| allowed characters or bad words | no | every text without them | is masked |
| allowed characters, bad words or min_tokens | yes | every such text, then the record's end | is masked |

Allowed characters and bad words limit a pattern too. Before a suffix, a regex or choice does not end the record: the
suffix continues it. `begin_records` may add a constraint of the first character.
"""

from __future__ import annotations

from service.http.connection.errors import invalid
from service.http.schema.requests import GenerationRequest
from service.http.text.encoding import check_ids, unknown_characters
from service.http.text.model import Model
from service.http.text.patterns import Compiled
from service.wire import Submit
from service.words import plural

LIMITING = ("bad_words", "allowed_characters", "allowed_token_ids")  # fields that limit texts without a pattern


class Conditions:
    """The conditions of one request. has_suffix: the answers are followed by a suffix.

    Each method raises ApiError: 400, a field is invalid, or no text meets the conditions.
    """

    def __init__(self, client: str, model: Model, body: GenerationRequest, has_suffix: bool):
        self._client, self._model, self._body = client, model, body
        self._is_whole = body.regex is not None or body.choice is not None  # the text is one match
        has_end = model.record_end is not None and not body.ignore_eos and body.max_tokens > 0
        self._continues = has_end and self._is_whole and has_suffix  # in the suffix
        self._ends_record = has_end and not self._continues
        # The answer usually excludes the record's end, which then does not count in max_tokens.
        self._num_hidden = int(self._is_whole and self._ends_record and not body.include_stop_str_in_output)
        if self._is_whole:
            self._param = "regex" if body.choice is None else "choice"
        else:
            self._param = next((name for name in LIMITING if getattr(body, name)), "min_tokens")

    @property
    def are_given(self) -> bool:
        """True if the request gives a condition, besides the end of a record."""
        return any(getattr(self._body, name) for name in ("min_tokens", "stop_regex", "regex", "choice", *LIMITING))

    async def constrain(self, submit: Submit) -> None:
        """Set the constraint, the minimum and the stop pattern of a sequence."""
        body, model = self._body, self._model
        allowed = self._allowed()
        if body.stop_regex is not None:
            submit.stop_pattern = await self._stop_pattern(body.stop_regex)
        needs_end = self._ends_record and body.min_tokens > 0
        if not (self._is_whole or allowed is not None or body.bad_words or needs_end):
            return
        compiled = await self._compile(allowed)
        submit.constraint, submit.may_leave = compiled.packed, self._is_whole
        if self._is_whole:
            if (shortest := compiled.min_length - self._num_hidden) > body.max_tokens:
                message = f"the shortest match has {plural(shortest, 'character')}, max_tokens is {body.max_tokens}"
                raise invalid(self._param, message)
            submit.max_tokens = body.max_tokens + self._num_hidden
        if self._ends_record:
            assert model.record_end is not None
            submit.stop = (*submit.stop, (model.record_end,))
        if body.min_tokens and body.min_tokens + self._ends_record > compiled.min_length:
            if self._ends_record:
                submit.minimum = await self._record_minimum(compiled.packed, body.min_tokens)
            else:  # some texts may allow no further character
                its = compiled.packed, body.min_tokens, body.max_tokens
                submit.minimum = await model.patterns.minimum(self._client, self._param, *its)

    async def begin_records(self, submits: list[Submit]) -> None:
        """Forbid an empty record, because the model was trained on none."""
        model = self._model
        if not self._ends_record or self._body.min_tokens:
            return
        begins = [it for it in submits if it.prompt[-1] == model.record_end]
        if not begins:
            return
        if (constraint := begins[0].constraint) is None:
            first = (await model.patterns.compile(self._client, "prompt", f"[^{model.record_end_character}]")).packed
            for submit in begins:
                submit.constraint, submit.constrains_first = first, True
        else:
            minimum = await self._record_minimum(constraint, 1)
            for submit in begins:
                submit.minimum = minimum

    def _allowed(self) -> frozenset[str] | None:
        """Return the characters that the texts may have, or None for all. The record's end comes on top of them."""
        body, model, allowed = self._body, self._model, None
        if body.allowed_characters is not None:
            unknown = [(i, c) for i, c in enumerate(body.allowed_characters) if c not in model.tokenizer]
            if unknown:
                raise unknown_characters(unknown, len(unknown), "allowed_characters")
            allowed = frozenset(body.allowed_characters)
        elif body.allowed_token_ids is not None:
            check_ids(model, body.allowed_token_ids, "allowed_token_ids")
            allowed = frozenset(model.tokenizer.decode(body.allowed_token_ids))
        if self._continues:
            every = frozenset(model.tokenizer.characters)
            return (every if allowed is None else allowed) - {model.record_end_character}
        if self._is_whole and self._ends_record and (within := model.checkpoint.text_characters):
            return within if allowed is None else allowed & within
        return allowed

    async def _stop_pattern(self, regex: str) -> bytes:
        within = self._model.checkpoint.text_characters if self._ends_record else None
        compiled = await self._model.patterns.compile(self._client, "stop_regex", regex, within)
        if compiled.matches_empty:
            raise invalid("stop_regex", "must not match the empty text")
        return compiled.packed

    async def _compile(self, allowed: frozenset[str] | None) -> Compiled:
        body, words = self._body, tuple(self._body.bad_words or ())
        end = self._model.record_end_character if self._ends_record else None
        compile = self._model.patterns.compile
        if self._is_whole:
            pattern = tuple(body.choice or ()) if body.regex is None else body.regex
            return await compile(self._client, self._param, pattern, allowed, end, words)
        return await compile(self._client, "bad_words", words, allowed, end)

    async def _record_minimum(self, packed: bytes, length: int) -> bytes:
        """For records of at least `length` characters. Without a pattern, max_tokens may end a record early."""
        wanted = f"{plural(length, 'character')} before the end of the record"
        most = self._body.max_tokens + self._num_hidden
        if not self._is_whole:
            most = max(most, length + 1)
        return await self._model.patterns.minimum(self._client, self._param, packed, length + 1, most, wanted)
