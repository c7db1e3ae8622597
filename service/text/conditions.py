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

from service.text.encoding import check_ids, unknown_characters
from service.text.errors import invalid
from service.text.model import TextModel
from service.text.patterns import Compiled
from service.text.requests import GenerationRequest
from service.text.work import Work
from service.wire import Submit
from service.words import plural

LIMITING = ("bad_words", "allowed_characters", "allowed_token_ids")  # fields that limit texts without a pattern


class Conditions:
    """The conditions of one request. has_suffix: the answers are followed by a suffix.

    Each method raises InvalidRequestError: a field is invalid, or no text meets the conditions.
    """

    def __init__(self, model: TextModel, request: GenerationRequest, max_tokens: int, has_suffix: bool):
        self._model, self._request, self._max_tokens = model, request, max_tokens
        self._is_whole = request.regex is not None or request.choice is not None  # the text is one match
        has_end = model.record_end is not None and not request.ignore_eos and max_tokens > 0
        self._continues = has_end and self._is_whole and has_suffix  # in the suffix
        self._ends_record = has_end and not self._continues
        # The answer usually excludes the record's end, which then does not count in max_tokens.
        self._num_hidden = int(self._is_whole and self._ends_record and not request.include_stop_str_in_output)
        if self._is_whole:
            self._param = "regex" if request.choice is None else "choice"
        else:
            self._param = next((name for name in LIMITING if getattr(request, name)), "min_tokens")

    @property
    def are_given(self) -> bool:
        """True if the request gives a condition, besides the end of a record."""
        return any(getattr(self._request, name) for name in ("min_tokens", "stop_regex", "regex", "choice", *LIMITING))

    def constrain(self, submit: Submit) -> Work[None]:
        """Set the constraint, the minimum and the stop pattern of a sequence."""
        request, model = self._request, self._model
        allowed = self._allowed()
        if request.stop_regex is not None:
            submit.stop_pattern = yield from self._stop_pattern(request.stop_regex)
        needs_end = self._ends_record and request.min_tokens > 0
        if not (self._is_whole or allowed is not None or request.bad_words or needs_end):
            return
        compiled = yield from self._compile(allowed)
        submit.constraint, submit.may_leave = compiled.packed, self._is_whole
        if self._is_whole:
            if (shortest := compiled.min_length - self._num_hidden) > self._max_tokens:
                message = f"the shortest match has {plural(shortest, 'character')}, max_tokens is {self._max_tokens}"
                raise invalid(self._param, message)
            submit.max_tokens = self._max_tokens + self._num_hidden
        if self._ends_record and model.record_end is not None:
            submit.stop = (*submit.stop, (model.record_end,))
        if request.min_tokens and request.min_tokens + self._ends_record > compiled.min_length:
            if self._ends_record:
                submit.minimum = yield from self._record_minimum(compiled.packed, request.min_tokens)
            else:  # some texts may allow no further character
                its = compiled.packed, request.min_tokens, self._max_tokens
                submit.minimum = yield from model.patterns.minimum(self._param, *its)

    def begin_records(self, submits: list[Submit]) -> Work[None]:
        """Forbid an empty record, because the model was trained on none."""
        model = self._model
        if not self._ends_record or self._request.min_tokens:
            return
        begins = [it for it in submits if it.prompt[-1] == model.record_end]
        if not begins:
            return
        if (constraint := begins[0].constraint) is None:
            first = (yield from model.patterns.compile("prompt", f"[^{model.record_end_character}]")).packed
            for submit in begins:
                submit.constraint, submit.constrains_first = first, True
        else:
            minimum = yield from self._record_minimum(constraint, 1)
            for submit in begins:
                submit.minimum = minimum

    def _allowed(self) -> frozenset[str] | None:
        """Return the characters that the texts may have, or None for all. The record's end comes on top of them."""
        request, model, allowed = self._request, self._model, None
        if request.allowed_characters is not None:
            unknown = [(i, c) for i, c in enumerate(request.allowed_characters) if c not in model.tokenizer]
            if unknown:
                raise unknown_characters(unknown, len(unknown), "allowed_characters")
            allowed = frozenset(request.allowed_characters)
        elif request.allowed_token_ids is not None:
            check_ids(model, request.allowed_token_ids, "allowed_token_ids")
            allowed = frozenset(model.tokenizer.decode(request.allowed_token_ids))
        if self._continues:
            every = frozenset(model.tokenizer.characters)
            return (every if allowed is None else allowed) - {model.record_end_character}
        if self._is_whole and self._ends_record and (within := model.text_characters):
            return within if allowed is None else allowed & within
        return allowed

    def _stop_pattern(self, regex: str) -> Work[bytes]:
        within = self._model.text_characters if self._ends_record else None
        compiled = yield from self._model.patterns.compile("stop_regex", regex, within)
        if compiled.matches_empty:
            raise invalid("stop_regex", "must not match the empty text")
        return compiled.packed

    def _compile(self, allowed: frozenset[str] | None) -> Work[Compiled]:
        request, words = self._request, tuple(self._request.bad_words or ())
        end = self._model.record_end_character if self._ends_record else None
        compile = self._model.patterns.compile
        if self._is_whole:
            pattern = tuple(request.choice or ()) if request.regex is None else request.regex
            return (yield from compile(self._param, pattern, allowed, end, words))
        return (yield from compile("bad_words", words, allowed, end))

    def _record_minimum(self, packed: bytes, length: int) -> Work[bytes]:
        """For records of at least `length` characters. Without a pattern, max_tokens may end a record early."""
        wanted = f"{plural(length, 'character')} before the end of the record"
        most = self._max_tokens + self._num_hidden
        if not self._is_whole:
            most = max(most, length + 1)
        return (yield from self._model.patterns.minimum(self._param, packed, length + 1, most, wanted))
