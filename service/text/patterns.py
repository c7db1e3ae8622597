"""Compiles the patterns of requests to packed automata."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from service.constrain.automaton import Automaton, LengthError, MinimumLength
from service.constrain.regex import RegexError, compile_choice, compile_regex, compile_without, ended, intersection
from service.text.errors import invalid
from service.text.work import Job, Work

MAX_CHOICE_CHARACTERS = 20_000  # limit of all texts of a choice together
MAX_STOP_STATES = 256  # limit of stop_regex, because each state may cost time at each character


class Compiled(NamedTuple):
    packed: bytes
    min_length: int
    matches_empty: bool


class PatternCompiler:
    """characters: of the vocabulary; max_regex_characters: limit of a regex."""

    def __init__(self, characters: Sequence[str], max_regex_characters: int):
        self._characters = characters
        self._max_characters = max_regex_characters

    def compile(
        self,
        param: str,
        pattern: str | tuple[str, ...],
        allowed: frozenset[str] | None = None,
        end: str | None = None,
        without: tuple[str, ...] = (),
    ) -> Work[Compiled]:
        """Compile the field `param`, a regex, choice or bad words, over `allowed` characters (None: all).

        end: the character that ends a record and a match; without: bad words for a regex or choice.

        Raises InvalidRequestError: the pattern is invalid or too large.
        """
        compile = functools.partial(self._compile, param, pattern, allowed, end, without)
        length = len(pattern) if isinstance(pattern, str) else sum(map(len, pattern))
        limit = self._max_characters if isinstance(pattern, str) else MAX_CHOICE_CHARACTERS
        if length > limit and param != "bad_words":  # a body can hold little more of these
            found = compile()  # it is refused for its length at once
        else:
            found = yield Job((param, pattern, allowed, end, without), 8 * (length + sum(map(len, without))), compile)
        if isinstance(found, str):
            raise invalid(param, found, "invalid_pattern")
        return found

    def minimum(
        self, param: str, packed: bytes, min_tokens: int, max_tokens: int, wanted: str | None = None
    ) -> Work[bytes]:
        """Return the packed MinimumLength for matches of the given lengths. `wanted` describes them in errors.

        Raises InvalidRequestError: no match has an allowed length, or the pattern is too large to tell.
        """
        find = functools.partial(_find_minimum, packed, min_tokens, max_tokens)
        found: bytes | str | None = yield Job((packed, min_tokens, max_tokens), len(packed), find)
        if isinstance(found, bytes):
            return found
        if found is None:
            wanted = wanted or f"min_tokens ({min_tokens}) to max_tokens ({max_tokens}) characters"
            raise invalid(param, f"no match has {wanted}", "invalid_pattern")
        advice = "lower min_tokens, or give a smaller pattern"
        raise invalid("min_tokens", f"{found} of {param}; {advice}", "invalid_pattern")

    def _compile(
        self,
        param: str,
        pattern: str | tuple[str, ...],
        allowed: frozenset[str] | None,
        end: str | None,
        without: tuple[str, ...],
    ) -> Compiled | str:
        """Compile. Returns the message of a RegexError if there is one."""
        try:
            if isinstance(pattern, tuple) and param == "bad_words":
                automaton = compile_without(pattern, self._characters, allowed=allowed, end=end)
            elif isinstance(pattern, tuple):
                automaton = compile_choice(
                    pattern, self._characters, allowed=allowed, max_characters=MAX_CHOICE_CHARACTERS
                )
            else:
                limits = {"max_states": MAX_STOP_STATES} if param == "stop_regex" else {}
                automaton = compile_regex(
                    pattern, self._characters, allowed=allowed, max_characters=self._max_characters, **limits
                )
            if param not in ("bad_words", "stop_regex"):
                automaton = self._combined(automaton, end, without)
        except RegexError as error:
            return str(error)
        return Compiled(automaton.pack(), automaton.min_length, bool(automaton.accepting[0]))

    def _combined(self, automaton: Automaton, end: str | None, without: tuple[str, ...]) -> Automaton:
        """Combine two automata. Raises RegexError: nothing is left."""
        if end is not None:
            try:
                automaton = ended(automaton, self._characters.index(end))
            except RegexError:
                raise RegexError(
                    f"nothing can match: a record has {end!r} at its end alone; use ignore_eos to go on after it"
                ) from None
        if without:
            others = compile_without(without, self._characters, end=end)
            try:
                automaton = intersection(automaton, others)
            except RegexError as error:
                is_empty = str(error) == "nothing can match"
                advice = " that has none of bad_words" if is_empty else ", or give fewer bad_words"
                raise RegexError(f"{error}{advice}") from None
        return automaton


def _find_minimum(packed: bytes, min_tokens: int, max_tokens: int) -> bytes | str | None:
    automaton = Automaton.unpack(packed)
    try:
        found = MinimumLength.of(automaton, min_tokens, max_tokens)
    except LengthError as error:
        return str(error)
    return None if found is None else found.pack()
