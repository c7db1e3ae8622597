"""Compiles the patterns of requests to packed automata, in a thread, with a cache."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import NamedTuple

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
