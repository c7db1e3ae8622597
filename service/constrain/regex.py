"""Compile regular expressions and lists of choices to automata over a vocabulary's character ids.

The language of a pattern is that of Python's `re.fullmatch`, over texts of the vocabulary, in linear time. The syntax
is in API.md, under "Constrained output"; everything else is refused, never reinterpreted. A pattern that is too
expensive to compile is refused too; cost is counted in steps, not in seconds, so the outcome is always the same.

Alternatives that need characters outside the vocabulary are dropped.

Pipeline: parse to a tree, Glushkov NFA, subset construction, minimisation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from service.constrain.automaton import MAX_CELLS, MAX_STATES, Automaton
from service.words import plural

MAX_NESTING = 50  # groups within groups
MAX_POSITIONS = 2000  # characters and classes of a pattern, with counted repeats expanded
MAX_WORK = 100_000
MAX_ROUNDS = 20  # of minimisation
MAX_ROUND_CELLS = 2**21  # table cells over all rounds together

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_NAMED_SETS: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda c: c.isalnum() or c == "_",
    "s": str.isspace,
}
_UNSUPPORTED_GROUPS = {
    "(?=": "lookahead",
    "(?!": "lookahead",
    "(?<=": "lookbehind",
    "(?<!": "lookbehind",
    "(?P=": "backreference",
    "(?P<": "named group",
    "(?<": "named group",
    "(?>": "atomic group",
    "(?(": "conditional group",
    "(?#": "comment",
}
_COUNT = re.compile(r"\{([0-9]+)(,?)([0-9]*)\}")


class RegexError(ValueError):
    """A pattern or a list of choices cannot be compiled."""

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
    """The automaton of the texts over `characters` (by id) that match the whole `pattern`.

    `allowed` restricts the texts to these characters of the vocabulary; None: no restriction.

    Raises RegexError: the syntax is not supported, the pattern is too large, or nothing can match it.
    """
    if len(pattern) > max_characters:
        raise RegexError(f"a pattern must have at most {plural(max_characters, 'character')}, got {len(pattern)}")
    alphabet = _Alphabet(characters, allowed)
    parser = _Parser(pattern, alphabet)
    tree = parser.parse()
    if tree is None:
        usable = "character" if allowed is None else "allowed character"
        raise RegexError(
            f"nothing can match: no {usable} of the vocabulary matches {', '.join(parser.unmatchable[:5])}"
        )
    budget = _WorkBudget(max_work)
    nfa = _GlushkovNFA(tree, budget)
    classes, classes_of_set = alphabet.partition()
    rows, accepting = _determinise(nfa, classes_of_set, max_states, budget)
    return _merge_classes(_minimise(_tabulate(classes, rows, accepting)))


def compile_choice(
    choices: Sequence[str],
    characters: Sequence[str],
    *,
    allowed: frozenset[str] | None = None,
    max_characters: int = 20_000,
    max_states: int = 5000,
) -> Automaton:
    """The automaton of exactly these texts; `max_characters` limits their total length.

    Raises RegexError: there are no choices or too many, or one has a character that is unknown or not allowed.
    """
    if not choices:
        raise RegexError("at least one choice is required, got none")
    total = sum(map(len, choices))
    if total > max_characters:
        raise RegexError(f"choices must have at most {max_characters} characters in total, got {total}")
    ids = {c: i for i, c in enumerate(characters) if allowed is None or c in allowed}
    symbols: dict[str, int] = {}  # character -> class
    trie: list[dict[int, int]] = [{}]
    accepting = {0} if "" in choices else set()
    for number, choice in enumerate(choices):
        node = 0
        for offset, c in enumerate(choice):
            if c not in ids:
                reason = "not in the vocabulary" if c not in characters else "not among the allowed characters"
                raise RegexError(f"text {number}: character {c!r} (U+{ord(c):04X}) at offset {offset} is {reason}")
            symbol = symbols.setdefault(c, len(symbols))
            child = trie[node].setdefault(symbol, len(trie))
            if child == len(trie):
                trie.append({})
            node = child
        accepting.add(node)
    # Merge nodes with equal suffixes. Children have higher numbers than their parents, so they are merged first.
    first_with: dict[tuple[bool, tuple[tuple[int, int], ...]], int] = {}
    merged = [0] * len(trie)
    for node in reversed(range(len(trie))):
        row = tuple(sorted((symbol, merged[child]) for symbol, child in trie[node].items()))
        merged[node] = first_with.setdefault((node in accepting, row), node)
    states = {node: i for i, node in enumerate(sorted(set(merged)))}
    limit = min(max_states, MAX_STATES)
    if len(states) > limit:
        raise RegexError(f"the choices need {len(states)} states (limit {limit}); give fewer or shorter choices")
    classes = np.full(len(characters), len(symbols), dtype=np.uint16)  # characters of no choice share the last class
    for c, symbol in symbols.items():
        classes[ids[c]] = symbol
    rows = [{symbol: states[merged[child]] for symbol, child in trie[node].items()} for node in states]
    return _merge_classes(_tabulate(classes, rows, [node in accepting for node in states]))


def compile_without(
    words: Sequence[str],
    characters: Sequence[str],
    *,
    allowed: frozenset[str] | None = None,
    end: str | None = None,
    max_states: int = 1000,
) -> Automaton:
    """The automaton of all texts of the allowed characters that contain none of these words (Aho and Corasick 1975).

    Nothing follows the character `end`, which is allowed too.

    Raises RegexError: there are too many words.
    """
    usable = {c for c in characters if allowed is None or c in allowed or c == end}
    words = [word for word in words if usable.issuperset(word) and not (end is not None and end in word[:-1])]
    words = [word for word in words if not any(other in word for other in words if other != word)]
    prefixes = sorted({word[:i] for word in words for i in range(len(word))} | {""}, key=len)
    if len(prefixes) > max_states:
        raise RegexError(f"the words need {len(prefixes)} states (limit {max_states}); give fewer or shorter words")
    states = {prefix: i for i, prefix in enumerate(prefixes)}
    symbols = {c: i for i, c in enumerate(sorted(set("".join([*words, end or ""]))))}
    rest = len(symbols)  # the class of all other allowed characters
    fallback = [0] * len(states)  # by state: that of its longest proper suffix
    rows: list[dict[int, int]] = []
    for prefix, state in states.items():
        row = dict(rows[fallback[state]]) if state else dict.fromkeys(range(rest + 1), 0)
        for c, symbol in symbols.items():
            text = prefix + c
            if text in words:
                del row[symbol]
            elif text in states:
                fallback[states[text]], row[symbol] = row[symbol], states[text]
        rows.append(row)
    if end is not None and any(symbols[end] in row for row in rows):
        rows = [row | dict.fromkeys(row.keys() & {symbols[end]}, len(rows)) for row in rows] + [{}]
    # Of the classes of each symbol, of other allowed characters and of the rest, those that have characters.
    used, classes = np.unique(
        [symbols.get(c, rest if c in usable else rest + 1) for c in characters], return_inverse=True
    )
    rows = [{i: row[symbol] for i, symbol in enumerate(used) if symbol in row} for row in rows]
    return _merge_classes(_tabulate(classes.astype(np.uint16), rows, [True] * len(rows)))


# -- character sets --


class _Alphabet:
    """The vocabulary, and the sets of its characters that a pattern uses.

    A set is a mask over the ids, (V,) bool. `index` numbers the distinct ones.
    """

    def __init__(self, characters: Sequence[str], allowed: frozenset[str] | None):
        self._characters = characters
        self._code_points = np.array([ord(c) for c in characters], dtype=np.int32)
        self._usable = np.array([allowed is None or c in allowed for c in characters])
        self._ids = {c: i for i, c in enumerate(characters) if self._usable[i]}
        self._named: dict[str, np.ndarray] = {}
        self._indices: dict[int | bytes, int] = {}
        self._sets: list[int | np.ndarray] = []  # an int: the set of this id alone

    def __len__(self) -> int:
        return len(self._characters)

    def between(self, low: str, high: str) -> np.ndarray:
        return (self._code_points >= ord(low)) & (self._code_points <= ord(high))

    def named(self, letter: str) -> np.ndarray:
        """The set of \\d, \\w or \\s, or of the complement \\D, \\W or \\S."""
        name = letter.lower()
        if name not in self._named:
            self._named[name] = np.array([_NAMED_SETS[name](c) for c in self._characters])
        members = self._named[name]
        return members if letter == name else ~members

    def index(self, members: str | np.ndarray) -> int | None:
        """The index of a set, or of a single character; None where it has no usable character."""
        if isinstance(members, str):
            id = self._ids.get(members)
        else:
            usable: np.ndarray = members & self._usable
            count = np.count_nonzero(usable)
            if count > 1:
                return self._intern(np.packbits(usable).tobytes(), usable)
            id = int(usable.argmax()) if count else None
        return None if id is None else self._intern(id, id)

    def _intern(self, key: int | bytes, members: int | np.ndarray) -> int:
        index = self._indices.setdefault(key, len(self._sets))
        if index == len(self._sets):
            self._sets.append(members)
        return index

    def partition(self) -> tuple[np.ndarray, list[list[int]]]:
        """The class of each id, (V,) uint16, and the classes of each set; ids in the same sets form one class."""
        single = [members for members in self._sets if isinstance(members, int)]
        others = [members for members in self._sets if not isinstance(members, int)]
        sets = np.array(others, dtype=bool).reshape(len(others), len(self))
        groups = _number_rows(np.packbits(sets, axis=0).T)
        groups[single] = len(self) + np.arange(len(single))
        _, representatives, classes = np.unique(groups, return_index=True, return_inverse=True)
        return classes.astype(np.uint16), [
            [int(classes[members])] if isinstance(members, int) else np.flatnonzero(members[representatives]).tolist()
            for members in self._sets
        ]


def _number_rows(rows: np.ndarray) -> np.ndarray:
    """Number the distinct rows of (N, K) by first occurrence: (N,) int64."""
    width = rows.shape[1] * rows.itemsize
    if width == 0:
        return np.zeros(len(rows), dtype=np.int64)
    data = rows.tobytes()
    numbers: dict[bytes, int] = {}
    starts = range(0, len(data), width)
    return np.array([numbers.setdefault(data[start : start + width], len(numbers)) for start in starts])


# -- parsing --


@dataclass(frozen=True, slots=True, eq=False)
class _CharSet:
    index: int
    size = 1  # positions


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    parts: tuple[_Node, ...]
    size: int
    is_union: bool = False  # of alternatives; else one part after the other


@dataclass(frozen=True, slots=True, eq=False)
class _Repeat:
    part: _Node
    low: int
    high: int | None
    size: int


_Node = _CharSet | _Group | _Repeat
_EPSILON = _Group((), 0)  # the empty text; the only node without positions


class _Parser:
    """Recursive descent. A tree that nothing can match is None and is pruned at once."""

    def __init__(self, pattern: str, alphabet: _Alphabet):
        self._pattern = pattern
        self._alphabet = alphabet
        self._at = 0
        self._depth = 0
        self.unmatchable: list[str] = []  # the parts of the pattern that no usable character matches

    def parse(self) -> _Node | None:
        tree = self._union()
        if self._at < len(self._pattern):
            raise RegexError(f"unmatched ')'; write {_literal(')')}", self._at)
        return tree

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _union(self) -> _Node | None:
        start = self._at
        branches = [self._concat()]
        while self._peek() == "|":
            self._at += 1
            branches.append(self._concat())
        parts = dict.fromkeys(branch for branch in branches if branch is not None)  # _EPSILON once
        if len(parts) <= 1:
            return next(iter(parts), None)
        return _Group(tuple(parts), self._bounded(sum(part.size for part in parts), start), is_union=True)

    def _concat(self) -> _Node | None:
        start = self._at
        parts: list[_Node | None] = []
        while self._peek() not in ("", "|", ")"):
            part = self._quantified(self._atom())
            if part is not _EPSILON:
                parts.append(part)
        nodes = tuple(part for part in parts if part is not None)
        if len(nodes) < len(parts):
            return None
        if len(nodes) == 1:
            return nodes[0]
        return _Group(nodes, self._bounded(sum(part.size for part in nodes), start)) if nodes else _EPSILON

    def _bounded(self, size: int, offset: int) -> int:
        if size > MAX_POSITIONS:
            raise RegexError(
                f"expands to {size} characters and classes (limit {MAX_POSITIONS}); lower the repeat counts", offset
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
            raise RegexError("possessive quantifiers are not supported; leave out this '+'", self._at)
        if self._peek() in ("*", "?", "{"):
            raise RegexError(f"{self._peek()!r} follows another quantifier; group the first as (?:...)", self._at)
        if high == 0 or part is _EPSILON or (part is None and low == 0):
            return _EPSILON
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
            raise RegexError(f"'{{' without a count; write {{m}}, {{m,}} or {{m,n}}, or {_literal('{')}", self._at)
        low = int(count[1])
        high = low if not count[2] else int(count[3]) if count[3] else None
        if high is not None and high < low:
            raise RegexError(f"count {count[0]} is reversed; write the smaller number first", self._at)
        self._at = count.end()
        return low, high

    def _atom(self) -> _Node | None:
        start, symbol = self._at, self._peek()
        if symbol == "(":
            return self._group()
        if symbol in "*+?{":
            raise RegexError(f"{symbol!r} has nothing to repeat; write {_literal(symbol)}", start)
        if symbol in "^$":
            raise RegexError(f"anchor {symbol!r} is not supported; leave it out, or write {_literal(symbol)}", start)
        members: str | np.ndarray
        if symbol == "[":
            members = self._class()
        elif symbol == "\\":
            members = self._escape()
        else:
            self._at += 1
            members = symbol if symbol != "." else ~self._alphabet.between("\n", "\n")
        index = self._alphabet.index(members)
        if index is None:
            self.unmatchable.append(f"'{self._pattern[start : self._at]}' at offset {start}")
            return None
        return _CharSet(index)

    def _group(self) -> _Node | None:
        start = self._at
        if self._pattern.startswith("(?:", start):
            self._at += 3
        elif self._pattern.startswith("(?", start):
            found = (opening for opening in _UNSUPPORTED_GROUPS if self._pattern.startswith(opening, start))
            opening = next(found, self._pattern[start : start + 3])
            kind = _UNSUPPORTED_GROUPS.get(opening, "group")
            raise RegexError(f"{kind} '{opening}' is not supported; groups are (...) and (?:...)", start)
        else:
            self._at += 1
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise RegexError(f"groups are nested more than {MAX_NESTING} deep", start)
        tree = self._union()
        self._depth -= 1
        if self._peek() != ")":
            raise RegexError(f"unmatched '('; write {_literal('(')}", start)
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
                    raise RegexError(f"range '{found}' needs a character at each end; write {_literal('-')}", at)
                if high < low:
                    raise RegexError(f"range '{found}' is reversed; write the lower end first, or {_literal('-')}", at)
                members |= self._alphabet.between(low, high)
            else:
                members |= self._alphabet.between(low, low) if isinstance(low, str) else low
        self._at += 1
        return ~members if negated else members

    def _class_item(self, start: int) -> str | np.ndarray:
        symbol = self._peek()
        if symbol == "":
            raise RegexError(f"unmatched '['; write {_literal('[')}", start)
        if symbol == "[":
            raise RegexError(f"'[' inside a character class; write {_literal('[')}", self._at)
        if symbol == "\\":
            return self._escape()
        self._at += 1
        return symbol

    def _escape(self) -> str | np.ndarray:
        """A character, or a set of characters."""
        start = self._at
        self._at += 1
        symbol = self._peek()
        self._at += 1
        if symbol == "":
            raise RegexError("'\\' at the end of the pattern; write \\\\ for a literal '\\'", start)
        if symbol in "dDwWsS":
            return self._alphabet.named(symbol)
        if symbol in _ESCAPES:
            return _ESCAPES[symbol]
        if symbol in _HEX_DIGITS:
            width = _HEX_DIGITS[symbol]
            digits = self._pattern[self._at : self._at + width]
            if not re.fullmatch(f"[0-9a-fA-F]{{{width}}}", digits) or int(digits, 16) > 0x10FFFF:
                raise RegexError(
                    f"'\\{symbol}{digits}' is not a code point; write \\{symbol} and {width} hexadecimal digits", start
                )
            self._at += width
            return chr(int(digits, 16))
        if symbol.isascii() and symbol.isalnum():
            if symbol == "0":
                raise RegexError("octal escape '\\0' is not supported; write \\x00", start)
            if symbol.isdigit():
                raise RegexError(f"backreference '\\{symbol}' is not supported; repeat the group itself", start)
            raise RegexError(
                f"escape '\\{symbol}' is not supported; supported are \\d \\D \\w \\W \\s \\S \\n \\t \\r \\f \\v "
                "\\xhh \\uhhhh \\Uhhhhhhhh and escaped punctuation",
                start,
            )
        return symbol


def _literal(symbol: str) -> str:
    return f"\\{symbol} for a literal '{symbol}'"


# -- tree to automaton --


class _WorkBudget:
    """Steps of work that remain; a step takes about 0.2 µs."""

    def __init__(self, steps: int):
        self._steps = self._left = steps

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise RegexError(f"the pattern takes more than {self._steps} steps to compile; simplify it")


class _GlushkovNFA:
    """The position automaton of a tree (Glushkov 1961), without epsilon transitions.

    Each character or class of the pattern, with repeats expanded, is a position. A set of positions is the bits of an
    int; the bit past the last position stands for the end of the text.
    """

    def __init__(self, tree: _Node, budget: _WorkBudget):
        self.sets: list[int] = []  # position -> index of its character set
        self.follow: list[int] = []  # position -> the positions that may follow
        self._subsumed: list[int] = []  # position -> positions whose continuations are all continuations of this one
        self._budget = budget
        nullable, self.start, last = self._add(tree)
        self.end = 1 << len(self.sets)
        self._link(last, self.end)
        if nullable:
            self.start |= self.end
        self._subsuming = sum(1 << position for position, others in enumerate(self._subsumed) if others)

    def _add(self, node: _Node) -> tuple[bool, int, int]:
        """Add a tree's positions; returns whether it is nullable, its first positions and its last ones."""
        self._budget.spend(4)
        if isinstance(node, _CharSet):
            bit = 1 << len(self.sets)
            self.sets.append(node.index)
            self.follow.append(0)
            self._subsumed.append(0)
            return False, bit, bit
        if isinstance(node, _Repeat):
            return self._add_repeat(node)
        nullable, first, last = not node.is_union, 0, 0
        for part in node.parts:
            part_nullable, part_first, part_last = self._add(part)
            if not node.is_union:
                self._link(last, part_first)
                first |= part_first if nullable else 0
                last = part_last | (last if part_nullable else 0)
                nullable = nullable and part_nullable
            else:
                first, last, nullable = first | part_first, last | part_last, nullable or part_nullable
        return nullable, first, last

    def _add_repeat(self, node: _Repeat) -> tuple[bool, int, int]:
        """Expand x{2,4} to xx(x(x)?)? and x{2,} to xx+, last copy first, so that only adjacent copies are linked.

        A nullable x counts as one that is not nullable and whose copies are all optional.
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
        # With an upper bound, whatever may follow in a late optional copy may also follow in an earlier one, which
        # leaves more repeats to come. Without one it is the reverse: a late copy leaves fewer repeats required.
        order = starts[::-1] if node.high is None else starts[: copies - max(low - 1, 0)]
        self._budget.spend(len(order) * node.part.size)
        for weak, strong in pairwise(order):
            for offset in range(node.part.size):
                self._subsumed[strong + offset] |= 1 << (weak + offset) | self._subsumed[weak + offset]
        return nullable, first, last

    def without_subsumed(self, state: int) -> int:
        """Drop the positions that others in the set subsume: the language stays, with far fewer DFA states.

        `(a|ab){1,99}` would otherwise have one state per set of possible counts.
        """
        subsuming = state & self._subsuming
        self._budget.spend(subsuming.bit_count())
        for position in _bits(subsuming):
            state &= ~self._subsumed[position]
        return state

    def _link(self, last: int, first: int) -> None:
        if first:
            self._budget.spend(last.bit_count())
            for position in _bits(last):
                self.follow[position] |= first


def _bits(number: int) -> list[int]:
    """The positions of the one bits, ascending."""
    places = []
    while number:
        low = number & -number
        places.append(low.bit_length() - 1)
        number ^= low
    return places


def _determinise(
    nfa: _GlushkovNFA, classes_of_set: list[list[int]], max_states: int, budget: _WorkBudget
) -> tuple[list[dict[int, int]], list[bool]]:
    """Subset construction: each state's transitions by class, and whether it accepts.

    A state is the set of positions that may come next. All positions are reachable and live, so all states are.
    """
    limit = min(max_states, MAX_STATES)
    numbers = {nfa.start: 0}
    states = [nfa.start]
    rows: list[dict[int, int]] = []
    for state in states:  # grows during the loop
        budget.spend(state.bit_count())
        by_set: dict[int, int] = {}
        for position in _bits(state & ~nfa.end):
            index = nfa.sets[position]
            by_set[index] = by_set.get(index, 0) | nfa.follow[position]
        budget.spend(sum(len(classes_of_set[index]) for index in by_set))
        by_class: dict[int, int] = {}
        for index, following in by_set.items():
            for symbol in classes_of_set[index]:
                by_class[symbol] = by_class.get(symbol, 0) | following
        reduced = {following: nfa.without_subsumed(following) for following in set(by_class.values())}
        row = {}
        for symbol, following in by_class.items():
            next_state = numbers.setdefault(reduced[following], len(states))
            if next_state == len(states):
                if next_state == limit:
                    raise RegexError(f"the pattern needs more than {limit} states; simplify it")
                states.append(reduced[following])
            row[symbol] = next_state
        rows.append(row)
    return rows, [bool(state & nfa.end) for state in states]


def _tabulate(classes: np.ndarray, rows: list[dict[int, int]], accepting: list[bool]) -> Automaton:
    """The automaton with these transitions."""
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


def _distances(rows: list[dict[int, int]], accepting: list[bool]) -> np.ndarray:
    """Each state's distance to an accepting one, (states,) int32: breadth-first search on the reversed transitions."""
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
    assert min(distance) >= 0, "every state is live"
    return np.array(distance, dtype=np.int32)


def _minimise(dfa: Automaton) -> Automaton:
    """Merge equivalent states by partition refinement (Moore 1956).

    Starts from the partition by distance, which equivalent states share: then few rounds are usual. If the rounds run
    out, the states stay as they are.
    """
    block = dfa.distance
    count = len(np.unique(block))
    for _ in range(min(MAX_ROUNDS, MAX_ROUND_CELLS // dfa.table.size)):
        # In the table, −1 picks the −1 that is appended.
        block = _number_rows(np.column_stack([block, np.append(block, -1)[dfa.table]]).astype(np.int16))
        if block.max() + 1 == count:
            members = np.unique(block, return_index=True)[1]  # the first state of each block
            table = np.append(block, -1)[dfa.table[members]].astype(np.int16)
            return Automaton(dfa.classes, table, dfa.accepting[members], dfa.distance[members])
        count = block.max() + 1
    return dfa


def _merge_classes(dfa: Automaton) -> Automaton:
    """Merge classes with the same transition in every state."""
    column = _number_rows(np.ascontiguousarray(dfa.table.T))
    representatives = np.unique(column, return_index=True)[1]
    table = np.ascontiguousarray(dfa.table[:, representatives])
    return Automaton(column[dfa.classes].astype(np.uint16), table, dfa.accepting, dfa.distance)
