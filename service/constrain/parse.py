"""Parse regular expressions with Python's own parser, so that they mean what they mean in `re`.

The parser's tree becomes a term over the character sets of a vocabulary. An opcode that cannot be in a term is refused.
In the versions of Python that exist, syntax.py refuses such syntax before, and names its position.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np

from service.constrain.dfa import number_rows
from service.constrain.errors import RegexError
from service.constrain.nfa import Factor, Repeat, Term, Union
from service.constrain.syntax import scan


def parse(pattern: str, alphabet: Alphabet) -> Term:
    """Return the term of a pattern, without alternatives that no text of usable characters matches.

    Raises:
        RegexError: the syntax is not supported, the pattern is too large, or no text matches it.
    """
    atoms = scan(pattern)
    for offset, source, text in reversed(atoms):
        if text != source:
            pattern = pattern[:offset] + text + pattern[offset + len(source) :]
    try:
        term = term_of(_parser.parse(pattern), alphabet)
    except (re.error, OverflowError) as error:
        raise RegexError(str(error)) from None
    if term is None:
        missing = (atom for atom in atoms if term_of(_parser.parse(atom.text), alphabet) is None)
        listed = ", ".join(f"'{atom.source}' at offset {atom.offset}" for atom in islice(missing, 5))
        raise RegexError(f"nothing can match: no {alphabet.noun} of the vocabulary matches {listed}")
    return term


def term_of(tree: Any, alphabet: Alphabet) -> Term | None:
    """Return the term of a tree of the parser, or None if no text matches it."""
    factors: list[Factor] = []
    for opcode, argument in tree:
        part = _part(opcode, argument, alphabet)
        if part is None:
            return None
        factors.extend(part)
    return tuple(factors)


def _part(opcode: Any, argument: Any, alphabet: Alphabet) -> Term | None:
    if opcode in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
        index = alphabet.index(opcode, argument)
        return None if index is None else (index,)
    if opcode is sre.BRANCH:
        return _union([term_of(branch, alphabet) for branch in argument[1]])
    if opcode is sre.SUBPATTERN and argument[1:3] == (0, 0):  # it turns no flag on or off
        return term_of(argument[3], alphabet)
    if opcode in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        low, high, repeated = argument
        term = term_of(repeated, alphabet)
        if high == 0 or term == () or (term is None and low == 0):
            return ()
        return None if term is None else (Repeat(term, low, None if high is sre.MAXREPEAT else high),)
    raise RegexError(f"{opcode} is not supported")


def _union(branches: list[Term | None]) -> Term | None:
    terms = dict.fromkeys(branch for branch in branches if branch is not None)
    return (Union(tuple(terms)),) if len(terms) > 1 else next(iter(terms), None)


_CATEGORIES = {
    sre.CATEGORY_DIGIT: re.compile(r"\d+"),
    sre.CATEGORY_NOT_DIGIT: re.compile(r"\D+"),
    sre.CATEGORY_WORD: re.compile(r"\w+"),
    sre.CATEGORY_NOT_WORD: re.compile(r"\W+"),
    sre.CATEGORY_SPACE: re.compile(r"\s+"),
    sre.CATEGORY_NOT_SPACE: re.compile(r"\S+"),
}


class Alphabet:
    """The vocabulary, and the sets of characters that a pattern uses. Each set has an index.

    characters: the vocabulary; the index of a character is its id.
    allowed: the usable characters of the vocabulary. None: all are.
    """

    def __init__(self, characters: Sequence[str], allowed: frozenset[str] | None):
        self.noun = "character" if allowed is None else "allowed character"
        self._text = "".join(characters)
        self._codes = np.frombuffer(self._text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        self._usable = np.array([allowed is None or c in allowed for c in characters])
        self._found: dict[Any, int | None] = {}  # opcode and argument -> index of the set
        self._indices: dict[bytes, int] = {}  # packed mask of a set -> its index
        self._sets: list[np.ndarray] = []  # the sets as masks over the ids, (V,) bool

    def index(self, opcode: Any, argument: Any) -> int | None:
        """Return the index of the set of characters that an opcode matches, or None if no usable character is in it."""
        key = (opcode, tuple(argument) if opcode is sre.IN else argument)
        if key not in self._found:
            members = self._members(opcode, argument) & self._usable
            self._found[key] = self._intern(members) if members.any() else None
        return self._found[key]

    def partition(self) -> tuple[np.ndarray, list[list[int]]]:
        """Return the class of each id, (V,) uint16, and the classes of each set.

        Two ids have the same class if they are in the same sets.
        """
        sets = np.array(self._sets, dtype=bool).reshape(-1, len(self._text))
        classes = number_rows(np.packbits(sets, axis=0).T)
        representatives = np.unique(classes, return_index=True)[1]
        return classes.astype(np.uint16), [np.flatnonzero(members[representatives]).tolist() for members in sets]

    def _intern(self, members: np.ndarray) -> int:
        index = self._indices.setdefault(np.packbits(members).tobytes(), len(self._sets))
        if index == len(self._sets):
            self._sets.append(members)
        return index

    def _members(self, opcode: Any, argument: Any) -> np.ndarray:
        if opcode is sre.ANY:
            return self._codes != ord("\n")
        if opcode is sre.NOT_LITERAL:
            return self._codes != argument
        items = argument if opcode is sre.IN else [(opcode, argument)]
        is_negated = items[0][0] is sre.NEGATE
        members = np.zeros(len(self._text), dtype=bool)
        for kind, value in items[is_negated:]:
            if kind is sre.LITERAL:
                members |= self._codes == value
            elif kind is sre.RANGE:
                members |= (self._codes >= value[0]) & (self._codes <= value[1])
            elif kind is sre.CATEGORY and value in _CATEGORIES:
                for run in _CATEGORIES[value].finditer(self._text):
                    members[run.start() : run.end()] = True
            else:
                raise RegexError(f"{kind} in a class is not supported")
        return members ^ is_negated
