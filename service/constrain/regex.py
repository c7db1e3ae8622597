"""Compile regular expressions and lists of choices to automata over the character ids of a vocabulary.

A pattern matches the texts of the vocabulary that Python's `re.fullmatch` accepts, in linear time. API.md documents
the syntax under "Constrained output". All other syntax is refused, and never gets another meaning. A pattern that is
too expensive to compile is refused too. The cost is counted in steps, not in seconds, so the outcome is always the
same.

Alternatives that need characters outside the vocabulary are dropped.

A pattern is compiled in four stages: parse it to a term, build the Glushkov NFA, construct the subsets, minimise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from service.constrain.automaton import MAX_CELLS, MAX_STATES, Automaton
from service.words import plural

MAX_NESTING = 50  # depth of groups
MAX_POSITIONS = 2000  # characters and classes of a pattern after counted repeats are expanded
MAX_WORK = 100_000  # steps to compile a pattern, see `_GlushkovNFA.spend`
MAX_ROUNDS = 20  # rounds of minimisation
MAX_ROUND_CELLS = 2**21  # table cells read in all rounds of minimisation together


class RegexError(ValueError):
    """A pattern or a list of choices cannot be compiled."""

    def __init__(self, message: str, offset: int | None = None):
        super().__init__(message if offset is None else f"offset {offset}: {message}")
        self.offset = offset  # position of the fault in the pattern, in characters


def compile_regex(
    pattern: str,
    characters: Sequence[str],
    *,
    allowed: frozenset[str] | None = None,
    max_characters: int = 1000,
    max_states: int = 1000,
    max_work: int = MAX_WORK,
) -> Automaton:
    """Return the automaton of the texts that match the whole `pattern`.

    characters: the vocabulary; the index of a character is its id.
    allowed: the texts have only these characters of the vocabulary. None: they may have all.

    Raises:
        RegexError: the syntax is not supported, the pattern is too large, or no text matches it.
    """
    if len(pattern) > max_characters:
        raise RegexError(f"a pattern must have at most {plural(max_characters, 'character')}, got {len(pattern)}")
    alphabet = _Alphabet(characters, allowed)
    parser = _Parser(pattern, alphabet)
    term = parser.parse()
    if term is None:
        usable = "character" if allowed is None else "allowed character"
        raise RegexError(
            f"nothing can match: no {usable} of the vocabulary matches {', '.join(parser.unmatchable[:5])}"
        )
    nfa = _GlushkovNFA(term, max_work)
    classes, classes_of_set = alphabet.partition()
    # Subset construction. All positions are reachable and live, so all sets of positions are too.
    rows, states = _explore(nfa.start, lambda state: nfa.after(state, classes_of_set), min(max_states, MAX_STATES))
    accepting = [bool(state & nfa.end) for state in states]
    return _merge_classes(_minimise(_tabulate(classes, rows, accepting)))


def compile_choice(
    choices: Sequence[str],
    characters: Sequence[str],
    *,
    allowed: frozenset[str] | None = None,
    max_characters: int = 20_000,
    max_states: int = 5000,
) -> Automaton:
    """Return the automaton that matches exactly the texts in `choices`.

    characters, allowed: as in `compile_regex`.
    max_characters: the limit of the total length of the choices.

    Raises:
        RegexError: there are no choices or too many, or a choice has a character that is unknown or not allowed.
    """
    if not choices:
        raise RegexError("at least one choice is required, got none")
    total = sum(map(len, choices))
    if total > max_characters:
        raise RegexError(f"choices must have at most {max_characters} characters in total, got {total}")
    ids = {c: i for i, c in enumerate(characters) if allowed is None or c in allowed}
    for number, choice in enumerate(choices):
        for offset, c in enumerate(choice):
            if c not in ids:
                reason = "not in the vocabulary" if c not in characters else "not among the allowed characters"
                raise RegexError(f"text {number}: character {c!r} (U+{ord(c):04X}) at offset {offset} is {reason}")
    symbols = {c: i for i, c in enumerate(sorted(set("".join(choices))))}
    left = _number_left(choices)
    limit = min(max_states, MAX_STATES)
    if len(left) > limit:
        raise RegexError(f"the choices need {len(left)} states (limit {limit}); give fewer or shorter choices")
    whole = len(left) - 1
    rows, states = _explore(whole, lambda state: {symbols[c]: after for c, after in left[state].after.items()})
    classes = np.full(len(characters), len(symbols), dtype=np.uint16)  # the last class: characters that no choice has
    for c, symbol in symbols.items():
        classes[ids[c]] = symbol
    return _merge_classes(_tabulate(classes, rows, [left[state].may_be_nothing for state in states]))


def compile_without(
    words: Sequence[str],
    characters: Sequence[str],
    *,
    allowed: frozenset[str] | None = None,
    end: str | None = None,
    max_states: int = 1000,
) -> Automaton:
    """Return the automaton of all texts of the allowed characters that contain none of the words.

    characters, allowed: as in `compile_regex`.
    end: this character is allowed too, but only as the last character of a text.

    Raises:
        RegexError: there are too many words.
    """
    usable = {c for c in characters if allowed is None or c in allowed or c == end}
    bad = {word for word in words if usable.issuperset(word) and not (end is not None and end in word[:-1])}
    bad = {word for word in bad if not any(other in word for other in bad if other != word)}
    count = len({word[:i] for word in bad for i in range(len(word))} | {""})
    if count > max_states:
        raise RegexError(f"the words need {count} states (limit {max_states}); give fewer or shorter words")
    symbols = {c: i for i, c in enumerate(sorted(set("".join([*bad, end or ""]))))}
    rest = len(symbols)  # the class of all other allowed characters
    left = _number_left(bad)
    begun, nothing, ended = left[-1].after, frozenset[int](), frozenset([-1])

    def after(state: frozenset[int]) -> dict[int, frozenset[int]]:
        """Return the next state for each symbol.

        A state is `ended`, or the set of the indices in `left` of the bad words that the text has begun.
        """
        if state == ended:
            return {}
        following = {c: {number} for c, number in begun.items()}
        for number in state:
            for c, next_number in left[number].after.items():
                following.setdefault(c, set()).add(next_number)
        row = unbegun.copy()
        for c, numbers in following.items():
            if any(left[number].may_be_nothing for number in numbers):
                row.pop(symbols[c], None)
            elif c != end:
                row[symbols[c]] = frozenset(numbers)
        return row

    unbegun = {rest: nothing} | {symbol: ended if c == end else nothing for c, symbol in symbols.items()}
    rows, states = _explore(nothing, after)
    # Each symbol has a class; other allowed characters share a class, and so do all others. Drop classes without ids.
    used, classes = np.unique(
        [symbols.get(c, rest if c in usable else rest + 1) for c in characters], return_inverse=True
    )
    rows = [{i: row[symbol] for i, symbol in enumerate(used) if symbol in row} for row in rows]
    return _merge_classes(_tabulate(classes.astype(np.uint16), rows, [True] * len(states)))


def intersection(one: Automaton, other: Automaton, *, max_states: int = 5000) -> Automaton:
    """Return the automaton of the texts that match both automata.

    Raises:
        RegexError: no text matches both, or the automaton needs more than `max_states` states or MAX_CELLS transitions.
    """
    pairs, classes = np.unique(np.stack([one.classes, other.classes]), axis=1, return_inverse=True)  # (2, classes)
    tables = one.table, other.table

    def after(state: tuple[int, int]) -> dict[int, tuple[int, int]]:
        following = (table[s, its].tolist() for table, s, its in zip(tables, state, pairs, strict=True))
        return {symbol: (a, b) for symbol, (a, b) in enumerate(zip(*following, strict=True)) if a >= 0 and b >= 0}

    rows, states = _explore((0, 0), after, min(max_states, MAX_CELLS // pairs.shape[1]))
    accepting = [bool(one.accepting[a] and other.accepting[b]) for a, b in states]
    return _live(classes.reshape(-1), rows, accepting)


def ended(automaton: Automaton, end: int) -> Automaton:
    """Return the automaton of the same texts as records, each ended by the id `end`.

    A text may already end with that id, which then ends the record. The automaton drops texts that have the id before
    their end.

    Raises:
        RegexError: every text has that id before its end.
    """
    symbol = int(automaton.table.shape[1])  # `end` gets a class that no other id has
    classes = automaton.classes.astype(np.int64)
    before = int(classes[end])
    classes[end] = symbol
    table, last = automaton.table.tolist(), len(automaton.table)
    rows: list[dict[int, int]] = []
    for state, row in enumerate(table):
        found = {c: following for c, following in enumerate(row) if following >= 0}
        follows = found.get(before, -1)
        if automaton.accepting[state] or (follows >= 0 and automaton.accepting[follows]):
            found[symbol] = last
        rows.append(found)
    return _live(classes, [*rows, {}], [False] * last + [True])


# -- character sets --


class _Alphabet:
    """The vocabulary, and the sets of characters that a pattern uses. Each set has an index."""

    def __init__(self, characters: Sequence[str], allowed: frozenset[str] | None):
        self._text = "".join(characters)
        self._usable = np.array([allowed is None or c in allowed for c in characters])
        self._found: dict[str, int | None] = {}  # atom of a pattern -> index of its set
        self._indices: dict[bytes, int] = {}  # packed mask of a set -> its index
        self._sets: list[np.ndarray] = []  # the sets as masks over the ids, (V,) bool

    def index(self, atom: str) -> int | None:
        """Return the index of the set of characters that an atom matches in `re`.

        Return None if the set has no usable character. An atom is a character, an escape or a class.
        """
        if atom not in self._found:
            members = np.zeros(len(self._text), dtype=bool)
            if len(atom) == 1 and atom != ".":  # faster than compiling the atom
                members[[i] if (i := self._text.find(atom)) >= 0 else []] = True
            else:
                for run in re.finditer(f"(?:{atom})+", self._text):
                    members[run.start() : run.end()] = True
            members &= self._usable
            self._found[atom] = self._intern(members) if members.any() else None
        return self._found[atom]

    def _intern(self, members: np.ndarray) -> int:
        index = self._indices.setdefault(np.packbits(members).tobytes(), len(self._sets))
        if index == len(self._sets):
            self._sets.append(members)
        return index

    def partition(self) -> tuple[np.ndarray, list[list[int]]]:
        """Return the class of each id, (V,) uint16, and the classes of each set.

        Two ids have the same class if they are in the same sets.
        """
        sets = np.array(self._sets, dtype=bool).reshape(-1, len(self._text))
        classes = _number_rows(np.packbits(sets, axis=0).T)
        representatives = np.unique(classes, return_index=True)[1]
        return classes.astype(np.uint16), [np.flatnonzero(members[representatives]).tolist() for members in sets]


def _number_rows(rows: np.ndarray) -> np.ndarray:
    """Return the number of each row of (N, K), (N,) int64: distinct rows are numbered by their first occurrence."""
    width = rows.shape[1] * rows.itemsize
    if width == 0:
        return np.zeros(len(rows), dtype=np.int64)
    data = rows.tobytes()
    numbers: dict[bytes, int] = {}
    starts = range(0, len(data), width)
    return np.array([numbers.setdefault(data[start : start + width], len(numbers)) for start in starts])


# -- parsing --

# A pattern is parsed to a term. A term is a sequence of factors. A factor is the index of a set, a union of terms, or
# a repeat. The empty term matches the empty text.


@dataclass(frozen=True, slots=True, eq=False)
class _Union:
    terms: tuple[_Term, ...]
    size: int  # sum of `_size` of the terms


class _Repeat(NamedTuple):
    part: int | _Union
    low: int
    high: int | None  # None: no upper bound


_Factor = int | _Union | _Repeat
_Term = tuple[_Factor, ...]


def _size(term: _Term) -> int:
    """Return the number of characters and classes of a term after counted repeats are expanded."""
    size = 0
    for factor in term:
        part, low, high = factor if isinstance(factor, _Repeat) else (factor, 1, 1)
        size += (1 if isinstance(part, int) else part.size) * (max(low, 1) if high is None else high)
    return size


# Pairs of syntax that is refused and the message of the refusal. The refused syntax replaces each @ of the message.
_Refusals = Sequence[tuple[re.Pattern[str], str]]


def _refusals(*rows: tuple[str, str]) -> _Refusals:
    return [(re.compile(syntax, re.DOTALL), message) for syntax, message in rows]


_ESCAPES = (
    (r"\\\Z", r"'\' at the end of the pattern; write \\ for a literal '\'"),
    (r"\\x(?![0-9a-fA-F]{2}).{0,2}", r"'@' is not a code point; write \x and 2 hexadecimal digits"),
    (r"\\u(?![0-9a-fA-F]{4}).{0,4}", r"'@' is not a code point; write \u and 4 hexadecimal digits"),
    (r"\\U(?!00(?:0|10)[0-9a-fA-F]{4}).{0,8}", r"'@' is not a code point; write \U and 8 hexadecimal digits"),
    (r"\\0", r"octal escape '@' is not supported; write \x00"),
    (r"\\[1-9]", "backreference '@' is not supported; repeat the group itself"),
    (
        r"\\(?![dDwWsSntrfvxuU])[a-zA-Z]",
        r"escape '@' is not supported; supported are \d \D \w \W \s \S \n \t \r \f \v \xhh \uhhhh \Uhhhhhhhh and "
        "escaped punctuation",
    ),
)
_NO_ATOM = _refusals(
    (r"[*+?{]", r"'@' has nothing to repeat; write \@ for a literal '@'"),
    (r"[\^$]", r"anchor '@' is not supported; leave it out, or write \@ for a literal '@'"),
    *(
        (syntax, f"{kind} '@' is not supported; groups are (...) and (?:...)")
        for syntax, kind in (
            (r"\(\?[=!]", "lookahead"),
            (r"\(\?<[=!]", "lookbehind"),
            (r"\(\?P=", "backreference"),
            (r"\(\?P?<", "named group"),
            (r"\(\?>", "atomic group"),
            (r"\(\?\(", "conditional group"),
            (r"\(\?#", "comment"),
            (r"\(\?(?!:).?", "group"),
        )
    ),
    *_ESCAPES,
)
_NO_MEMBER = _refusals((r"\[", r"'@' inside a character class; write \@ for a literal '@'"), *_ESCAPES)
_NO_QUANTIFIER = _refusals(
    (r"\{(?![0-9]+(?:,[0-9]*)?\})", r"'@' without a count; write {m}, {m,} or {m,n}, or \@ for a literal '@'"),
    # Python converts at most 4300 digits to an integer.
    (r"\{(?=[0-9,]{4000})", "a count has too many digits; lower the repeat counts"),
)
_NO_SECOND = _refusals(
    (r"\+", "possessive quantifiers are not supported; leave out this '@'"),
    (r"[*?{]", "'@' follows another quantifier; group the first as (?:...)"),
)
_LENGTHS = {r"\x": 4, r"\u": 6, r"\U": 10}  # of the other escapes: 2
_QUANTIFIER = re.compile(r"(?:([*+?])|\{([0-9]+)(,?)([0-9]*)\})(\??)")


class _Parser:
    """Parses by recursive descent. A term that no text matches is None, and is dropped at once."""

    def __init__(self, pattern: str, alphabet: _Alphabet):
        self._pattern = pattern
        self._alphabet = alphabet
        self._at = 0
        self._depth = 0
        self.unmatchable: list[str] = []  # the parts of the pattern that no usable character matches

    def parse(self) -> _Term | None:
        term = self._union()
        if self._at < len(self._pattern):
            raise RegexError(r"unmatched ')'; write \) for a literal ')'", self._at)
        return term

    def _skip(self, text: str) -> bool:
        """Read `text` and return True if it comes next; return False otherwise."""
        is_next = self._pattern.startswith(text, self._at)
        self._at += len(text) * is_next
        return is_next

    def _refuse(self, refusals: _Refusals) -> None:
        for syntax, message in refusals:
            if found := syntax.match(self._pattern, self._at):
                raise RegexError(message.replace("@", found[0]), self._at)

    def _union(self) -> _Term | None:
        start = self._at
        branches = [self._concat()]
        while self._skip("|"):
            branches.append(self._concat())
        terms = dict.fromkeys(branch for branch in branches if branch is not None)
        if len(terms) <= 1:
            return next(iter(terms), None)
        return (_Union(tuple(terms), self._bounded(sum(map(_size, terms)), start)),)

    def _concat(self) -> _Term | None:
        start = self._at
        parts = []
        while self._pattern[self._at : self._at + 1] not in ("", "|", ")"):
            parts.append(self._quantified(self._group() if self._pattern[self._at] == "(" else self._atom()))
        if None in parts:
            return None
        term = tuple(factor for part in parts for factor in part or ())
        self._bounded(_size(term), start)
        return term

    def _bounded(self, size: int, offset: int) -> int:
        if size > MAX_POSITIONS:
            raise RegexError(
                f"expands to {size} characters and classes (limit {MAX_POSITIONS}); lower the repeat counts", offset
            )
        return size

    def _quantified(self, part: _Term | None) -> _Term | None:
        start = self._at
        self._refuse(_NO_QUANTIFIER)
        found = _QUANTIFIER.match(self._pattern, start)
        if found is None:
            return part
        if found[1]:
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[1]]
        else:
            low = int(found[2])
            high = low if not found[3] else int(found[4]) if found[4] else None
            if high is not None and high < low:
                count = found[0].removesuffix("?")
                raise RegexError(f"count {count} is reversed; write the smaller number first", start)
        self._at = found.end()
        self._refuse(_NO_SECOND)
        if high == 0 or part == () or (part is None and low == 0):
            return ()
        if part is None:
            return None
        (factor, *others) = part
        if others or isinstance(factor, _Repeat):
            factor = _Union((part,), _size(part))
        term = (_Repeat(factor, low, high),)
        self._bounded(_size(term), start)
        return term

    def _group(self) -> _Term | None:
        start = self._at
        self._refuse(_NO_ATOM)
        if not self._skip("(?:"):
            self._skip("(")
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise RegexError(f"groups are nested more than {MAX_NESTING} deep", start)
        term = self._union()
        self._depth -= 1
        if not self._skip(")"):
            raise RegexError(r"unmatched '('; write \( for a literal '('", start)
        return term

    def _atom(self) -> _Term | None:
        start = self._at
        atom = self._class() if self._skip("[") else self._one(_NO_ATOM)
        index = self._alphabet.index(atom)
        if index is None:
            self.unmatchable.append(f"'{self._pattern[start : self._at]}' at offset {start}")
            return None
        return (index,)

    def _one(self, refusals: _Refusals) -> str:
        """Read a character or an escape."""
        self._refuse(refusals)
        start = self._at
        begin = self._pattern[start : start + 2]
        self._at += _LENGTHS.get(begin, 2) if begin.startswith("\\") else 1
        return self._pattern[start : self._at]

    def _class(self) -> str:
        """Read the rest of a class, and return the class.

        In the result, every punctuation character is escaped, because `re` warns of characters that may become
        operators.
        """
        start, text, members = self._at - 1, "[^" if self._skip("^") else "[", 0
        while not (members and self._skip("]")):
            at, members = self._at, members + 1
            member = self._member(start)
            if self._pattern[self._at : self._at + 2] not in ("-", "-]") and self._skip("-"):
                member += f"-{self._member(start)}"
                try:
                    re.compile(f"[{member}]")
                except re.error:
                    found, why = self._pattern[at : self._at], "is reversed; write the lower end first, or"
                    if re.search(r"\\[dDwWsS]", member):
                        why = "needs a character at each end; write"
                    raise RegexError(rf"range '{found}' {why} \- for a literal '-'", at) from None
            text += member
        return text + "]"

    def _member(self, start: int) -> str:
        if self._at == len(self._pattern):
            raise RegexError(r"unmatched '['; write \[ for a literal '['", start)
        member = self._one(_NO_MEMBER)
        return member if member.startswith("\\") else re.escape(member)


# -- term to automaton --


class _GlushkovNFA:
    """The position automaton of a term (Glushkov 1961), without epsilon transitions.

    Each character or class of the pattern is a position after repeats are expanded. An int represents a set of
    positions, one bit for each. The bit after the last position stands for the end of the text.
    """

    def __init__(self, term: _Term, max_work: int):
        self.sets: list[int] = []  # position -> index of its character set
        self.follow: list[int] = []  # position -> the positions that may follow it
        self._subsumed: list[int] = []  # position -> positions that are redundant in a set that has this one
        self._max_work = self._left = max_work
        nullable, self.start, last = self._add(term)
        self.end = 1 << len(self.sets)
        self._link(last, self.end)
        if nullable:
            self.start |= self.end
        self._subsuming = sum(1 << position for position, others in enumerate(self._subsumed) if others)

    def spend(self, steps: int) -> None:
        """Take steps from the budget; a step takes about 0.2 µs.

        Raises:
            RegexError: the budget is spent.
        """
        self._left -= steps
        if self._left < 0:
            raise RegexError(f"the pattern takes more than {self._max_work} steps to compile; simplify it")

    def _add(self, term: _Term) -> tuple[bool, int, int]:
        """Add the positions of a term.

        Return True if the term matches the empty text (is nullable), and the sets of its first and last positions.
        """
        nullable, first, last = True, 0, 0
        for factor in term:
            part_nullable, part_first, part_last = self._add_factor(factor)
            self._link(last, part_first)
            first |= part_first if nullable else 0
            last = part_last | (last if part_nullable else 0)
            nullable = nullable and part_nullable
        return nullable, first, last

    def _add_factor(self, factor: _Factor) -> tuple[bool, int, int]:
        self.spend(4)
        if isinstance(factor, int):
            bit = 1 << len(self.sets)
            self.sets.append(factor)
            self.follow.append(0)
            self._subsumed.append(0)
            return False, bit, bit
        if isinstance(factor, _Repeat):
            return self._add_repeat(*factor)
        nullable, first, last = False, 0, 0
        for term in factor.terms:
            part_nullable, part_first, part_last = self._add(term)
            first, last, nullable = first | part_first, last | part_last, nullable or part_nullable
        return nullable, first, last

    def _add_repeat(self, part: int | _Union, low: int, high: int | None) -> tuple[bool, int, int]:
        """Expand x{2,4} to xx(x(x)?)? and x{2,} to xx+.

        The last copy is added first, so only adjacent copies are linked. A nullable x is treated as one that is not
        nullable, with all its copies optional.
        """
        copies, size = max(low, 1) if high is None else high, _size((part,))
        nullable, first, last = True, 0, 0  # of all copies added so far
        starts = []
        for i in reversed(range(copies)):
            starts.append(len(self.sets))
            part_nullable, part_first, part_last = self._add_factor(part)
            low = 0 if part_nullable else low
            self._link(part_last, part_first if high is None and i == copies - 1 else first)
            last |= part_last if nullable else 0
            first, nullable = part_first, i >= low
        # With an upper bound, an early optional copy leaves more repeats than a late one, so it subsumes the late copy.
        # Without an upper bound, a late copy requires fewer repeats than an early one, so it subsumes the early copy.
        order = starts[::-1] if high is None else starts[: copies - max(low - 1, 0)]
        self.spend(len(order) * size)
        for weak, strong in pairwise(order):
            for offset in range(size):
                self._subsumed[strong + offset] |= 1 << (weak + offset) | self._subsumed[weak + offset]
        return nullable, first, last

    def without_subsumed(self, state: int) -> int:
        """Return the set without the positions that other positions of the set subsume.

        A position subsumes another if it may be followed by every text that may follow the other. The language stays
        the same, and the DFA has far fewer states. Otherwise `(a|ab){1,99}` would have a state for each set of possible
        counts.
        """
        subsuming = state & self._subsuming
        self.spend(subsuming.bit_count())
        for position in _bits(subsuming):
            state &= ~self._subsumed[position]
        return state

    def _link(self, last: int, first: int) -> None:
        if first:
            self.spend(last.bit_count())
            for position in _bits(last):
                self.follow[position] |= first

    def after(self, state: int, classes_of_set: list[list[int]]) -> dict[int, int]:
        """Return, for each class of characters, the set of positions that may follow a set of positions.

        state: the set; its positions match a character of the class.
        classes_of_set: the classes of each character set, from `_Alphabet.partition`.
        """
        self.spend(state.bit_count())
        by_set: dict[int, int] = {}
        for position in _bits(state & ~self.end):
            index = self.sets[position]
            by_set[index] = by_set.get(index, 0) | self.follow[position]
        self.spend(sum(len(classes_of_set[index]) for index in by_set))
        by_class: dict[int, int] = {}
        for index, following in by_set.items():
            for symbol in classes_of_set[index]:
                by_class[symbol] = by_class.get(symbol, 0) | following
        reduced = {following: self.without_subsumed(following) for following in set(by_class.values())}
        return {symbol: reduced[following] for symbol, following in by_class.items()}


def _bits(number: int) -> list[int]:
    """Return the positions of the bits that are 1, in ascending order."""
    places = []
    while number:
        low = number & -number
        places.append(low.bit_length() - 1)
        number ^= low
    return places


# -- automata --

State = TypeVar("State", bound=Hashable)


def _explore(
    start: State, after: Callable[[State], dict[int, State]], limit: float = math.inf
) -> tuple[list[dict[int, int]], list[State]]:
    """Find all states that can be reached from `start`, breadth first, and number them; `start` has number 0.

    after: gives the next states of a state by class.

    Return the transitions of each state, which map classes to numbers of states, and the states in order.

    Raises:
        RegexError: there are more than `limit` states.
    """
    numbers, states = {start: 0}, [start]
    rows: list[dict[int, int]] = []
    for state in states:  # grows during the loop
        row = {}
        for symbol, following in after(state).items():
            row[symbol] = numbers.setdefault(following, len(states))
            if row[symbol] == len(states):
                if len(states) == limit:
                    raise RegexError(f"the pattern needs more than {limit} states; simplify it")
                states.append(following)
        rows.append(row)
    return rows, states


class _Left(NamedTuple):
    """A set of endings: the parts that remain of the texts of a list after a common beginning is removed."""

    may_be_nothing: bool  # True if the beginning is a text of the list
    after: dict[str, int]  # next character -> index of the set of endings after it


def _number_left(texts: Iterable[str]) -> list[_Left]:
    """Return the distinct sets of endings for all beginnings of the texts.

    The last set is that of the empty beginning: it has the whole texts.
    """
    trie: list[dict[str, int]] = [{}]
    complete = set()
    for text in sorted(texts):
        node = 0
        for c in text:
            node = trie[node].setdefault(c, len(trie))
            if node == len(trie):
                trie.append({})
        complete.add(node)
    number_of = [0] * len(trie)
    numbers: dict[tuple[bool, frozenset[tuple[str, int]]], int] = {}
    found: list[_Left] = []
    for node in reversed(range(len(trie))):  # the children of a node have higher numbers
        left = _Left(node in complete, {c: number_of[following] for c, following in trie[node].items()})
        number_of[node] = numbers.setdefault((left.may_be_nothing, frozenset(left.after.items())), len(found))
        if number_of[node] == len(found):
            found.append(left)
    return found


def _tabulate(classes: np.ndarray, rows: list[dict[int, int]], accepting: list[bool]) -> Automaton:
    """Return the automaton with these transitions; all states must be reachable and live.

    Raises:
        RegexError: its table would have more than MAX_CELLS cells.
    """
    num_classes = int(classes.max()) + 1
    if len(rows) * num_classes > MAX_CELLS:
        raise RegexError(
            f"the automaton needs {len(rows)} states x {num_classes} character classes, more than {MAX_CELLS}; "
            "use fewer distinct characters"
        )
    table = np.full((len(rows), num_classes), -1, dtype=np.int16)
    for state, row in enumerate(rows):
        table[state, list(row)] = list(row.values())
    return Automaton(classes, table, np.array(accepting), _distances(rows, accepting))


def _live(classes: np.ndarray, rows: list[dict[int, int]], accepting: list[bool]) -> Automaton:
    """Return the automaton with these transitions, minimised and without states that no match passes.

    Raises:
        RegexError: there is no match, or the table would have more than MAX_CELLS cells.
    """
    used, numbers = np.unique(classes, return_inverse=True)  # some classes may have no id
    place = {symbol: i for i, symbol in enumerate(used.tolist())}
    rows = [{place[symbol]: to for symbol, to in row.items() if symbol in place} for row in rows]
    before: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for following in set(row.values()):
            before[following].append(state)
    is_live = list(accepting)
    queue = [state for state, accepts in enumerate(accepting) if accepts]
    for state in queue:  # grows during the loop
        for earlier in before[state]:
            if not is_live[earlier]:
                is_live[earlier] = True
                queue.append(earlier)
    if not is_live[0]:
        raise RegexError("nothing can match")

    def after(state: int) -> dict[int, int]:
        return {symbol: to for symbol, to in rows[state].items() if is_live[to]}

    kept, states = _explore(0, after)
    automaton = _tabulate(numbers.reshape(-1).astype(np.uint16), kept, [accepting[state] for state in states])
    return _merge_classes(_minimise(automaton))


def _distances(rows: list[dict[int, int]], accepting: list[bool]) -> np.ndarray:
    """Return the distance of each state to an accepting state, (states,) int32.

    The search is breadth first over the reversed transitions.
    """
    before: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for next_state in set(row.values()):
            before[next_state].append(state)
    distance = [0 if accepts else -1 for accepts in accepting]
    queue = [state for state, accepts in enumerate(accepting) if accepts]
    for state in queue:  # grows during the loop
        for earlier in before[state]:
            if distance[earlier] < 0:
                distance[earlier] = distance[state] + 1
                queue.append(earlier)
    return np.array(distance, dtype=np.int32)


def _minimise(dfa: Automaton) -> Automaton:
    """Merge equivalent states by partition refinement (Moore 1956).

    The first partition is by distance, because equivalent states have the same distance. A few rounds are usually
    enough from there. If the rounds run out, no state is merged.
    """
    block = dfa.distance
    count = len(np.unique(block))
    for _ in range(min(MAX_ROUNDS, MAX_ROUND_CELLS // dfa.table.size)):
        # An entry −1 of the table reads the −1 appended to `block`.
        block = _number_rows(np.column_stack([block, np.append(block, -1)[dfa.table]]).astype(np.int16))
        if block.max() + 1 == count:
            members = np.unique(block, return_index=True)[1]  # the first state of each block
            table = np.append(block, -1)[dfa.table[members]].astype(np.int16)
            return Automaton(dfa.classes, table, dfa.accepting[members], dfa.distance[members])
        count = block.max() + 1
    return dfa


def _merge_classes(dfa: Automaton) -> Automaton:
    """Merge classes that have the same transition in every state."""
    column = _number_rows(np.ascontiguousarray(dfa.table.T))
    representatives = np.unique(column, return_index=True)[1]
    table = np.ascontiguousarray(dfa.table[:, representatives])
    return Automaton(column[dfa.classes].astype(np.uint16), table, dfa.accepting, dfa.distance)
