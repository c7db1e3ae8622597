"""Regular expressions and lists of choices to automata over a vocabulary's character ids.

The language of a pattern is that of Python's `re.fullmatch` for texts of the vocabulary. The subset that is linear to
match:

    literals; escapes of punctuation; \\n \\t \\r \\f \\v \\xhh \\uhhhh \\Uhhhhhhhh
    .  (any character but a line break)     \\d \\D \\w \\W \\s \\S  (by Unicode, as re does for texts)
    [abc]  [a-z]  [^...]  with escapes; an unescaped [ inside is refused
    (...)  (?:...)  |
    *  +  ?  {m}  {m,}  {m,n}, also lazy (*? and so on): that chooses among matches, and the language is the same

All else is refused, never taken for something it is not: anchors, lookaround, backreferences, named and atomic groups,
possessive quantifiers, flags, a lone { and unknown escapes. So is a pattern that takes too much to compile; that is
counted in steps, not by the clock, so the same pattern is accepted or refused every time.

A character of the pattern that the vocabulary lacks cannot occur: branches that need it are left out.

Knows nothing of HTTP, models or how an automaton is used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from service.constrain.automaton import MAX_CELLS, MAX_STATES, Automaton

MAX_NESTING = 50  # groups in groups
MAX_POSITIONS = 2000  # characters and classes of a pattern, counted repeats written out
MAX_WORK = 100_000
MAX_ROUNDS = 20  # of minimisation
MAX_ROUND_CELLS = 2**21  # of the table in all rounds together

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_KNOWN_ESCAPES = "\\d \\D \\w \\W \\s \\S \\n \\t \\r \\f \\v \\xhh \\uhhhh \\Uhhhhhhhh, and those of punctuation"
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ANCHOR = "is an anchor: the whole text always matches, leave it out"
_REFUSED_ESCAPES = (
    dict.fromkeys("AZzbB", _ANCHOR)
    | {"0": "is octal: write \\x00"}
    | dict.fromkeys("123456789", "is a backreference, which no automaton can follow")
)
_REFUSED_GROUPS = {
    "?=": "a lookahead",
    "?!": "a lookahead",
    "?<=": "a lookbehind",
    "?<!": "a lookbehind",
    "?P=": "a backreference",
    "?P<": "a named group",
    "?<": "a named group",
    "?>": "an atomic group",
    "?(": "a conditional group",
    "?#": "a comment",
}
_COUNT = re.compile(r"\{([0-9]+)(,?)([0-9]*)\}")


class RegexError(ValueError):
    """A pattern, or a list of choices, from which no automaton can be made."""

    def __init__(self, message: str, offset: int | None = None):
        super().__init__(message if offset is None else f"offset {offset}: {message}")
        self.offset = offset  # in the pattern


def compile_regex(
    pattern: str,
    characters: Sequence[str],
    *,
    allowed: frozenset[str] | None = None,
    max_characters: int = 1000,
    max_states: int = 1000,
    max_work: int = MAX_WORK,
) -> Automaton:
    """The automaton of the texts that match `pattern` whole and hold only `characters` (in order of their ids).

    `allowed`: the only characters that may occur, out of the vocabulary's; None: all.

    Raises:
        RegexError: the pattern is not of the subset, is too large, or nothing can match it.
    """
    if len(pattern) > max_characters:
        raise RegexError(f"a pattern may have at most {max_characters} characters, got {len(pattern)}")
    alphabet = _Alphabet(characters, allowed)
    parser = _Parser(pattern, alphabet)
    tree = parser.parse()
    if tree is None:
        among = "character of the vocabulary" if allowed is None else "allowed character of the vocabulary"
        raise RegexError(f"nothing can match: no {among} fits {', '.join(parser.empty[:5])}")
    budget = _Budget(max_work)
    positions = _Positions(tree, budget)
    classes, classes_of_set = alphabet.partition()
    rows, accepting = _determinise(positions, classes_of_set, max_states, budget)
    table = np.full((len(rows), int(classes.max()) + 1), -1, dtype=np.int16)
    if table.size > MAX_CELLS:
        raise RegexError(f"the automaton has {len(rows)} states of {table.shape[1]} classes: too large")
    for state, row in enumerate(rows):
        table[state, list(row)] = list(row.values())
    distance = _distances(rows, accepting)
    return _minimised(classes, table, np.array(accepting), distance)


def compile_choice(
    choices: Sequence[str],
    characters: Sequence[str],
    *,
    allowed: frozenset[str] | None = None,
    max_characters: int = 20_000,
    max_states: int = 5000,
) -> Automaton:
    """The automaton of exactly these texts; `max_characters` bounds the sum of their lengths.

    Raises:
        RegexError: there are none, they are too many, or one has a character that cannot occur.
    """
    if not choices:
        raise RegexError("at least one choice is needed, got none")
    total = sum(map(len, choices))
    if total > max_characters:
        raise RegexError(f"choices may have at most {max_characters} characters together, got {total}")
    ids = {c: i for i, c in enumerate(characters) if allowed is None or c in allowed}
    symbols: dict[str, int] = {}  # character -> class
    trie: list[dict[int, int]] = [{}]
    ends = {0} if "" in choices else set()
    for number, choice in enumerate(choices):
        node = 0
        for offset, c in enumerate(choice):
            if c not in ids:
                why = "not in the vocabulary" if c not in characters else "not allowed"
                raise RegexError(f"choice {number} has {c!r} (U+{ord(c):04X}) at offset {offset}, which is {why}")
            symbol = symbols.setdefault(c, len(symbols))
            child = trie[node].setdefault(symbol, len(trie))
            if child == len(trie):
                trie.append({})
            node = child
        ends.add(node)
    # Nodes with the same endings are one: children come after their parents, so backwards each is known in time.
    same: dict[tuple[bool, tuple[tuple[int, int], ...]], int] = {}
    merged = [0] * len(trie)
    for node in reversed(range(len(trie))):
        row = tuple(sorted((symbol, merged[child]) for symbol, child in trie[node].items()))
        merged[node] = same.setdefault((node in ends, row), node)
    states = {node: i for i, node in enumerate(sorted(set(merged)))}
    num_classes = len(symbols) + (len(symbols) < len(characters))
    if len(states) > min(max_states, MAX_STATES) or len(states) * num_classes > MAX_CELLS:
        raise RegexError(
            f"the choices need {len(states)} states of {num_classes} classes; "
            f"at most {min(max_states, MAX_STATES)} states and {MAX_CELLS} of both multiplied"
        )
    classes = np.full(len(characters), num_classes - 1, dtype=np.uint16)
    for c, symbol in symbols.items():
        classes[ids[c]] = symbol
    rows = [{symbol: states[merged[child]] for symbol, child in trie[node].items()} for node in states]
    table = np.full((len(states), num_classes), -1, dtype=np.int16)
    for state, children in enumerate(rows):
        table[state, list(children)] = list(children.values())
    accepting = [node in ends for node in states]
    return _with_fewest_classes(classes, table, np.array(accepting), _distances(rows, accepting))


# -- the vocabulary and its sets of characters --


class _Alphabet:
    """Sets of characters: masks over the ids, (V,) bool. Each distinct one that a pattern uses has a number."""

    def __init__(self, characters: Sequence[str], allowed: frozenset[str] | None):
        self._characters = characters
        self._code_points = np.array([ord(c) for c in characters], dtype=np.int32)
        self._usable = np.array([allowed is None or c in allowed for c in characters])
        self._ids = {c: i for i, c in enumerate(characters) if self._usable[i]}
        self._named: dict[str, np.ndarray] = {}
        self._numbers: dict[int | bytes, int] = {}
        self._sets: list[int | np.ndarray] = []  # an int: this id alone

    def __len__(self) -> int:
        return len(self._characters)

    def between(self, low: str, high: str) -> np.ndarray:
        return (self._code_points >= ord(low)) & (self._code_points <= ord(high))

    def named(self, name: str) -> np.ndarray:
        """\\d, \\w, \\s and their opposites, by their letter."""
        if name.isupper():
            opposite: np.ndarray = ~self.named(name.lower())
            return opposite
        if name not in self._named:
            if name == "d":
                members = [c.isdecimal() for c in self._characters]
            elif name == "w":
                members = [c.isalnum() or c == "_" for c in self._characters]
            else:
                members = [c.isspace() for c in self._characters]
            self._named[name] = np.array(members)
        return self._named[name]

    def number(self, members: str | np.ndarray) -> int | None:
        """The number of a set, or of one character alone; None: nothing of it can occur."""
        if isinstance(members, str):
            known = self._ids.get(members)
        else:
            usable: np.ndarray = members & self._usable
            count = np.count_nonzero(usable)
            if count > 1:
                return self._numbered(np.packbits(usable).tobytes(), usable)
            known = int(usable.argmax()) if count else None
        return None if known is None else self._numbered(known, known)

    def _numbered(self, key: int | bytes, members: int | np.ndarray) -> int:
        number = self._numbers.setdefault(key, len(self._sets))
        if number == len(self._sets):
            self._sets.append(members)
        return number

    def partition(self) -> tuple[np.ndarray, list[list[int]]]:
        """Ids that no set tells apart are one class: (V,) uint16, and the classes that make up each set."""
        alone = [members for members in self._sets if isinstance(members, int)]
        others = [members for members in self._sets if not isinstance(members, int)]
        sets = np.array(others, dtype=bool).reshape(len(others), len(self))
        groups = _number_rows(np.packbits(sets, axis=0).T)
        groups[alone] = len(self) + np.arange(len(alone))
        _, representatives, classes = np.unique(groups, return_index=True, return_inverse=True)
        return classes.astype(np.uint16), [
            [int(classes[members])] if isinstance(members, int) else np.flatnonzero(members[representatives]).tolist()
            for members in self._sets
        ]


def _number_rows(rows: np.ndarray) -> np.ndarray:
    """Equal rows get the same number, by first occurrence: (N, K) to (N,) int64."""
    width = rows.shape[1] * rows.itemsize
    if width == 0:
        return np.zeros(len(rows), dtype=np.int64)
    data = rows.tobytes()
    numbers: dict[bytes, int] = {}
    starts = range(0, len(data), width)
    return np.array([numbers.setdefault(data[start : start + width], len(numbers)) for start in starts])


# -- pattern to tree --


@dataclass(frozen=True, slots=True, eq=False)
class _Set:
    number: int
    size = 1  # positions


@dataclass(frozen=True, slots=True, eq=False)
class _Concat:
    parts: tuple[_Node, ...]
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class _Either:
    parts: tuple[_Node, ...]
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class _Repeat:
    part: _Node
    low: int
    high: int | None
    size: int


_Node = _Set | _Concat | _Either | _Repeat
_EMPTY = _Concat((), 0)  # the empty text; the only node without positions


class _Parser:
    """By recursive descent; trees in which nothing can match are None, and are taken out at once."""

    def __init__(self, pattern: str, alphabet: _Alphabet):
        self._pattern = pattern
        self._alphabet = alphabet
        self._at = 0
        self._depth = 0
        self.empty: list[str] = []  # what no character fits

    def parse(self) -> _Node | None:
        tree = self._either()
        if self._at < len(self._pattern):
            raise RegexError("found ')' without its '('; a literal one is written \\)", self._at)
        return tree

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _either(self) -> _Node | None:
        start = self._at
        branches = [self._concat()]
        while self._peek() == "|":
            self._at += 1
            branches.append(self._concat())
        parts = dict.fromkeys(branch for branch in branches if branch is not None)
        if len(parts) <= 1:
            return next(iter(parts), None)
        return _Either(tuple(parts), self._bounded(sum(part.size for part in parts), start))

    def _concat(self) -> _Node | None:
        start = self._at
        parts: list[_Node | None] = []
        while self._peek() not in ("", "|", ")"):
            atom = self._atom()
            part = self._quantified(atom)
            if part is not _EMPTY:
                parts.append(part)
        known = tuple(part for part in parts if part is not None)
        if len(known) < len(parts):
            return None
        if len(known) == 1:
            return known[0]
        return _Concat(known, self._bounded(sum(part.size for part in known), start)) if known else _EMPTY

    def _bounded(self, size: int, offset: int) -> int:
        if size > MAX_POSITIONS:
            raise RegexError(
                f"with repeats written out this has {size} characters and classes, at most {MAX_POSITIONS} may be",
                offset,
            )
        return size

    def _quantified(self, part: _Node | None) -> _Node | None:
        start = self._at
        bounds = self._quantifier()
        if bounds is None:
            return part
        low, high = bounds
        if self._peek() == "?":
            self._at += 1
        if self._peek() == "+":
            raise RegexError("found a possessive quantifier, which is not supported: leave its '+' out", self._at)
        if self._peek() in ("*", "?", "{"):
            raise RegexError(f"found {self._peek()!r} after a quantifier; (?:...) around the first one", self._at)
        if high == 0 or part is _EMPTY or (part is None and low == 0):
            return _EMPTY
        if part is None:
            return None
        size = part.size * (max(low, 1) if high is None else high)
        return _Repeat(part, low, high, self._bounded(size, start))

    def _quantifier(self) -> tuple[int, int | None] | None:
        symbol = self._peek()
        if symbol in ("*", "+", "?"):
            self._at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[symbol]
        if symbol != "{":
            return None
        count = _COUNT.match(self._pattern, self._at)
        if count is None:
            raise RegexError("found '{' without a count: {m}, {m,} or {m,n}; a literal one is written \\{", self._at)
        low = int(count[1])
        high = low if not count[2] else int(count[3]) if count[3] else None
        if high is not None and high < low:
            raise RegexError(f"found {count[0]}: the second number must not be less than the first", self._at)
        self._at = count.end()
        return low, high

    def _atom(self) -> _Node | None:
        start, symbol = self._at, self._peek()
        if symbol == "(":
            return self._group()
        if symbol in "*+?":
            raise RegexError(f"found {symbol!r} with nothing to repeat; a literal one is written \\{symbol}", start)
        if symbol == "{":
            raise RegexError("found '{' with nothing to repeat; a literal one is written \\{", start)
        if symbol in "^$":
            raise RegexError(f"found {symbol!r}, which {_ANCHOR}; a literal one is written \\{symbol}", start)
        members: str | np.ndarray
        if symbol == "[":
            members = self._class()
        elif symbol == "\\":
            members = self._escape(in_class=False)
        else:
            self._at += 1
            members = symbol if symbol != "." else ~self._alphabet.between("\n", "\n")
        number = self._alphabet.number(members)
        if number is None:
            self.empty.append(f"'{self._pattern[start : self._at]}' at offset {start}")
            return None
        return _Set(number)

    def _group(self) -> _Node | None:
        start = self._at
        self._at += 1
        if self._peek() == "?":
            if self._pattern.startswith("?:", self._at):
                self._at += 2
            else:
                for opening, kind in _REFUSED_GROUPS.items():
                    if self._pattern.startswith(opening, self._at):
                        raise RegexError(f"found {kind}, '({opening}', which is not supported", start)
                found = self._pattern[start : start + 3]
                raise RegexError(f"found {found!r}: flags are not supported; groups are (...) and (?:...)", start)
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise RegexError(f"groups are nested more than {MAX_NESTING} deep", start)
        tree = self._either()
        self._depth -= 1
        if self._peek() != ")":
            raise RegexError("found '(' without its ')'; a literal one is written \\(", start)
        self._at += 1
        return tree

    def _class(self) -> np.ndarray:
        start = self._at
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        first = self._at
        members = np.zeros(len(self._alphabet), dtype=bool)
        while self._peek() != "]" or self._at == first:
            at = self._at
            low = self._class_item(start)
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("", "]"):
                self._at += 1
                high = self._class_item(start)
                found = self._pattern[at : self._at]
                if not isinstance(low, str) or not isinstance(high, str):
                    raise RegexError(f"found the range '{found}': it must be from one character to another", at)
                if high < low:
                    raise RegexError(f"found the range '{found}', whose end comes before its beginning", at)
                members |= self._alphabet.between(low, high)
            else:
                members |= self._alphabet.between(low, low) if isinstance(low, str) else low
        self._at += 1
        return ~members if negated else members

    def _class_item(self, start: int) -> str | np.ndarray:
        symbol = self._peek()
        if symbol == "":
            raise RegexError("found '[' without its ']'; a literal one is written \\[", start)
        if symbol == "[":
            raise RegexError("found '[' in a class; a literal one is written \\[", self._at)
        if symbol == "\\":
            return self._escape(in_class=True)
        self._at += 1
        return symbol

    def _escape(self, in_class: bool) -> str | np.ndarray:
        """A character, or a set of them."""
        start = self._at
        self._at += 1
        symbol = self._peek()
        self._at += 1
        if symbol == "":
            raise RegexError("found '\\' at the end; a literal one is written \\\\", start)
        if symbol in "dDwWsS":
            return self._alphabet.named(symbol)
        if symbol in _ESCAPES:
            return _ESCAPES[symbol]
        if symbol in _HEX_DIGITS:
            width = _HEX_DIGITS[symbol]
            digits = self._pattern[self._at : self._at + width]
            if not re.fullmatch(f"[0-9a-fA-F]{{{width}}}", digits) or int(digits, 16) > 0x10FFFF:
                raise RegexError(f"found '\\{symbol}{digits}': \\{symbol} takes {width} hexadecimal digits", start)
            self._at += width
            return chr(int(digits, 16))
        if symbol.isascii() and symbol.isalnum():
            why = _REFUSED_ESCAPES.get(symbol)
            if why is None or (in_class and why is _ANCHOR):
                why = f"is no escape; there are {_KNOWN_ESCAPES}"
            raise RegexError(f"found '\\{symbol}', which {why}", start)
        return symbol


# -- tree to automaton --


class _Budget:
    """Steps of work that are left; a step takes some 0.2 µs."""

    def __init__(self, steps: int):
        self._steps = self._left = steps

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise RegexError(f"the pattern takes more than {self._steps} steps to compile, too many; simplify it")


class _Positions:
    """The automaton of a tree's positions (Glushkov 1961); sets of positions are the bits of an int.

    Each character or class of the pattern, with repeats written out, is a position. What may come next after a
    position, and at the start, is a set of positions; the one past the last stands for the end of the text.
    """

    def __init__(self, tree: _Node, budget: _Budget):
        self.sets: list[int] = []  # position -> number of its set of characters
        self.follow: list[int] = []
        self._weaker: list[int] = []  # position -> those from which nothing can follow that cannot from it too
        self._budget = budget
        nullable, self.start, last = self._add(tree)
        self.end = 1 << len(self.sets)
        self._link(last, self.end)
        if nullable:
            self.start |= self.end
        self._has_weaker = sum(1 << position for position, weaker in enumerate(self._weaker) if weaker)

    def _add(self, node: _Node) -> tuple[bool, int, int]:
        """Add a tree's positions: whether the empty text matches it, and where its other texts begin and end."""
        self._budget.spend(4)
        if isinstance(node, _Set):
            bit = 1 << len(self.sets)
            self.sets.append(node.number)
            self.follow.append(0)
            self._weaker.append(0)
            return False, bit, bit
        if isinstance(node, _Repeat):
            return self._add_repeat(node)
        nullable, first, last = isinstance(node, _Concat), 0, 0
        for part in node.parts:
            part_nullable, part_first, part_last = self._add(part)
            if isinstance(node, _Concat):
                self._link(last, part_first)
                first |= part_first if nullable else 0
                last = part_last | (last if part_nullable else 0)
                nullable = nullable and part_nullable
            else:
                first, last, nullable = first | part_first, last | part_last, nullable or part_nullable
        return nullable, first, last

    def _add_repeat(self, node: _Repeat) -> tuple[bool, int, int]:
        """x{2,4} as xx(x(x)?)?, x{2,} as xx+, from the back; this way only neighbours are linked.

        Copies that match the empty text are taken for ones that do not, but may be left out.
        """
        low, copies = node.low, max(node.low, 1) if node.high is None else node.high
        nullable, first, last = True, 0, 0  # of the copies so far
        starts = []
        for i in reversed(range(copies)):
            starts.append(len(self.sets))
            part_nullable, part_first, part_last = self._add(node.part)
            low = 0 if part_nullable else low
            self._link(part_last, part_first if node.high is None and i == copies - 1 else first)
            last |= part_last if nullable else 0
            first, nullable = part_first, i >= low
        # Where the repeat may end after any copy, an early one leaves as much open as a late one, and more. Without an
        # upper bound it is the other way round: a late one has less to come still.
        if node.high is None:
            order = list(reversed(starts))
        else:
            order = starts[: copies - max(low - 1, 0)]
        self._budget.spend(len(order) * node.part.size)
        for weak, strong in pairwise(order):
            for offset in range(node.part.size):
                self._weaker[strong + offset] |= 1 << (weak + offset) | self._weaker[weak + offset]
        return nullable, first, last

    def without_weaker(self, state: int) -> int:
        """The same language from fewer positions: `(a|ab){1,99}` needs not know every count that is possible."""
        doubtful = state & self._has_weaker
        self._budget.spend(doubtful.bit_count())
        for position in _bits(doubtful):
            state &= ~self._weaker[position]
        return state

    def _link(self, last: int, first: int) -> None:
        if first:
            self._budget.spend(last.bit_count())
            for position in _bits(last):
                self.follow[position] |= first


def _bits(number: int) -> list[int]:
    """The places of the ones."""
    places = []
    while number:
        low = number & -number
        places.append(low.bit_length() - 1)
        number ^= low
    return places


def _determinise(
    positions: _Positions, classes_of_set: list[list[int]], max_states: int, budget: _Budget
) -> tuple[list[dict[int, int]], list[bool]]:
    """The subset construction: each state's next states by class, and whether it accepts.

    A state is the set of positions that may come next. All positions can be reached and can reach the end, so all
    states can.
    """
    limit = min(max_states, MAX_STATES)
    numbers = {positions.start: 0}
    states = [positions.start]
    rows: list[dict[int, int]] = []
    for state in states:  # grows on the way
        budget.spend(state.bit_count())
        after_set: dict[int, int] = {}
        for position in _bits(state & ~positions.end):
            number = positions.sets[position]
            after_set[number] = after_set.get(number, 0) | positions.follow[position]
        budget.spend(sum(len(classes_of_set[number]) for number in after_set))
        after: dict[int, int] = {}
        for number, following in after_set.items():
            for symbol in classes_of_set[number]:
                after[symbol] = after.get(symbol, 0) | following
        reduced = {following: positions.without_weaker(following) for following in set(after.values())}
        row = {}
        for symbol, following in after.items():
            next_state = numbers.setdefault(reduced[following], len(states))
            if next_state == len(states):
                if next_state == limit:
                    raise RegexError(f"the pattern needs more than {limit} states; simplify it")
                states.append(reduced[following])
            row[symbol] = next_state
        rows.append(row)
    return rows, [bool(state & positions.end) for state in states]


def _distances(rows: list[dict[int, int]], accepting: list[bool]) -> np.ndarray:
    """(states,) int32: fewest characters until an accepting state; from there backwards, breadth first."""
    before: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for next_state in set(row.values()):
            before[next_state].append(state)
    distance = [0 if accepts else -1 for accepts in accepting]
    queue = [state for state, accepts in enumerate(accepting) if accepts]
    for state in queue:  # grows on the way
        for earlier in before[state]:
            if distance[earlier] < 0:
                distance[earlier] = distance[state] + 1
                queue.append(earlier)
    assert min(distance) >= 0, "every state is live"
    return np.array(distance, dtype=np.int32)


def _minimised(classes: np.ndarray, table: np.ndarray, accepting: np.ndarray, distance: np.ndarray) -> Automaton:
    """Merge states that nothing tells apart (Moore 1956).

    To begin from the distances, which equal states share, takes few rounds where patterns are usual. Where it would
    take many, the states stay as they are.
    """
    block = distance.astype(np.int32)
    count = len(np.unique(block))
    for _ in range(min(MAX_ROUNDS, MAX_ROUND_CELLS // table.size)):
        block = _number_rows(np.column_stack([block, np.append(block, -1)[table]]).astype(np.int16))
        if block.max() + 1 == count:
            members = np.unique(block, return_index=True)[1]  # of each block the first
            table = np.append(block, -1)[table[members]].astype(np.int16)
            accepting, distance = accepting[members], distance[members]
            break
        count = block.max() + 1
    return _with_fewest_classes(classes, table, accepting, distance)


def _with_fewest_classes(
    classes: np.ndarray, table: np.ndarray, accepting: np.ndarray, distance: np.ndarray
) -> Automaton:
    """Merge classes that no state tells apart."""
    column = _number_rows(np.ascontiguousarray(table.T))
    representatives = np.unique(column, return_index=True)[1]
    return Automaton(
        column[classes].astype(np.uint16), np.ascontiguousarray(table[:, representatives]), accepting, distance
    )


def any_of(allowed: frozenset[str], characters: Sequence[str]) -> Automaton:
    """Any text of the allowed characters, at least one of which the vocabulary has."""
    classes = np.array([c not in allowed for c in characters], dtype=np.uint16)
    table = np.array([[0, -1][: int(classes.max()) + 1]], dtype=np.int16)
    return Automaton(classes, table, np.array([True]), np.zeros(1, dtype=np.int32))
