"""Compiles the patterns of requests to packed automata in a thread, and keeps the latest ones."""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from service.constrain.automaton import Automaton, LengthError, MinimumLength
from service.constrain.regex import RegexError, compile_choice, compile_regex, compile_without, ended, intersection
from service.http.connection.errors import invalid
from service.http.connection.turns import FairLock

CACHE_BYTES = 32 << 20  # limit of each cache of a model
ENTRY_BYTES = 500  # of an entry, besides its key and its result
MAX_CHOICE_CHARACTERS = 20_000  # limit of all texts of a choice together
MAX_STOP_STATES = 256  # limit of stop_regex, because each state may cost time at each character


Found = TypeVar("Found")


class PatternThread:
    """Compiles one pattern at a time, with the clients in turn.

    Each additional thread would take the GIL from the event loop for another switch interval.
    """

    def __init__(self) -> None:
        self.lock = FairLock()
        self._pool = ThreadPoolExecutor(1, "patterns")  # starts its thread with the first pattern

    async def run(self, call: Callable[[], Found]) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


class Compiled(NamedTuple):
    packed: bytes
    min_length: int
    matches_empty: bool


class _Cache:
    """The results that were used last, at most CACHE_BYTES together. An error is kept as its message.

    An exception would keep its traceback, and with it everything in its frames.
    """

    def __init__(self, thread: PatternThread) -> None:
        self._thread = thread
        self._found: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0

    async def find(self, client: str, key: Hashable, key_bytes: int, call: Callable[[], Any]) -> Any:
        """Return the result of `call` for this key. If it is not cached, run it in the thread at the client's turn."""
        if key not in self._found:
            async with self._thread.lock.held(client):
                if key not in self._found:  # another request may have compiled it meanwhile
                    found = await self._thread.run(call)
                    size = ENTRY_BYTES + key_bytes + _size(found)
                    if size > CACHE_BYTES:
                        return found
                    self._found[key] = found, size
                    self._bytes += size
                    while self._bytes > CACHE_BYTES:
                        self._bytes -= self._found.popitem(last=False)[1][1]
        self._found.move_to_end(key)
        return self._found[key][0]


def _size(found: Any) -> int:
    return len(found.packed) if isinstance(found, Compiled) else 0 if found is None else len(found)


class PatternCompiler:
    def __init__(self, characters: Sequence[str], max_regex_characters: int, thread: PatternThread):
        self._characters = characters
        self._max_characters = max_regex_characters
        self._compiled, self._minima = _Cache(thread), _Cache(thread)

    async def compile(
        self,
        client: str,
        param: str,
        pattern: str | tuple[str, ...],
        allowed: frozenset[str] | None = None,
        end: str | None = None,
        without: tuple[str, ...] = (),
    ) -> Compiled:
        """Compile the field `param`, a regex, choice or bad words, over `allowed` characters (None: all).

        end: the character that ends a record and a match; without: bad words for a regex or choice.

        Raises ApiError: 400, the pattern is invalid or too large.
        """
        compile = functools.partial(self._compile, param, pattern, allowed, end, without)
        length = len(pattern) if isinstance(pattern, str) else sum(map(len, pattern))
        limit = self._max_characters if isinstance(pattern, str) else MAX_CHOICE_CHARACTERS
        if length > limit and param != "bad_words":  # a body can hold little more of these
            found = compile()  # it is refused for its length, so it is not cached
        else:
            found = await self._compiled.find(
                client, (param, pattern, allowed, end, without), 8 * (length + sum(map(len, without))), compile
            )
        if isinstance(found, str):
            raise invalid(param, found, "invalid_pattern")
        return found

    async def minimum(
        self, client: str, param: str, packed: bytes, min_tokens: int, max_tokens: int, wanted: str | None = None
    ) -> bytes:
        """Return the packed MinimumLength for matches of the given lengths. `wanted` describes them in errors.

        Raises ApiError: 400, no match has an allowed length, or the pattern is too large to tell.
        """
        find = functools.partial(_find_minimum, packed, min_tokens, max_tokens)
        key = (packed, min_tokens, max_tokens)
        found: bytes | str | None = await self._minima.find(client, key, len(packed), find)
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
            try:
                automaton = intersection(automaton, compile_without(without, self._characters, end=end))
            except RegexError as error:
                raise RegexError(f"{error} that has none of bad_words") from None
        return automaton


def _find_minimum(packed: bytes, min_tokens: int, max_tokens: int) -> bytes | str | None:
    automaton = Automaton.unpack(packed)
    try:
        found = MinimumLength.of(automaton, min_tokens, max_tokens)
    except LengthError as error:
        return str(error)
    return None if found is None else found.pack()
