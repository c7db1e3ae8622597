"""Compiles the patterns of requests to packed automata, in a thread, with a cache."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import NamedTuple

from service.constrain.automaton import Automaton, LengthError, MinimumLength
from service.constrain.regex import RegexError, any_of, compile_choice, compile_regex
from service.http.schemas import ApiError

MAX_STOP_STATES = 256  # of stop_regex: each may cost time at each character


class Compiled(NamedTuple):
    packed: bytes
    min_length: int
    matches_empty: bool


class PatternCompiler:
    def __init__(self, characters: Sequence[str], max_regex_characters: int):
        self._characters = characters
        self._max_characters = max_regex_characters
        self._compile = functools.lru_cache(maxsize=256)(self._compile_uncached)
        self._find_minimum = functools.lru_cache(maxsize=64)(_find_minimum_uncached)

    async def compile(
        self, param: str, pattern: str | tuple[str, ...], allowed: frozenset[str] | None = None
    ) -> Compiled:
        """A regex or the texts of a choice, of the request's field `param`, over `allowed` characters (None: all).

        Raises:
            ApiError: 400, the pattern is invalid or too large.
        """
        compiled = await asyncio.to_thread(self._compile, param == "stop_regex", pattern, allowed)
        if isinstance(compiled, RegexError):
            raise ApiError(400, f"{param}: {compiled}", param=param, code="invalid_pattern")
        return compiled

    async def minimum(self, param: str, compiled: Compiled, min_tokens: int, max_tokens: int) -> bytes | None:
        """The packed MinimumLength for matches of so many characters; None: every match has `min_tokens`.

        Raises:
            ApiError: 400, no match has an allowed length, or the pattern is too large to find out.
        """
        if min_tokens <= compiled.min_length:
            return None
        found = await asyncio.to_thread(self._find_minimum, compiled.packed, min_tokens, max_tokens)
        if isinstance(found, bytes):
            return found
        if found is None:
            given = f"min_tokens ({min_tokens}) to max_tokens ({max_tokens}) characters"
            raise ApiError(400, f"{param}: no match has {given}", param=param, code="invalid_pattern")
        message = f"min_tokens: {found} of {param}; lower min_tokens, or give a smaller pattern"
        raise ApiError(400, message, param="min_tokens", code="invalid_pattern")

    def any_of(self, allowed: frozenset[str]) -> bytes:
        """Texts of these characters, of any length."""
        return any_of(allowed, self._characters).pack()

    def _compile_uncached(
        self, is_stop: bool, pattern: str | tuple[str, ...], allowed: frozenset[str] | None
    ) -> Compiled | RegexError:
        try:
            if isinstance(pattern, tuple):
                automaton = compile_choice(pattern, self._characters, allowed=allowed)
            else:
                limits = {"max_states": MAX_STOP_STATES} if is_stop else {}
                automaton = compile_regex(
                    pattern, self._characters, allowed=allowed, max_characters=self._max_characters, **limits
                )
        except RegexError as error:
            return error
        return Compiled(automaton.pack(), automaton.min_length, bool(automaton.accepting[0]))


def _find_minimum_uncached(packed: bytes, min_tokens: int, max_tokens: int) -> bytes | LengthError | None:
    automaton = Automaton.unpack(packed)
    try:
        found = MinimumLength.of(automaton, min_tokens, max_tokens)
    except LengthError as error:
        return error
    return None if found is None else found.pack(len(automaton.table))
