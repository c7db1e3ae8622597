"""Compile regular expressions and lists of choices to automata over the character ids of a vocabulary.

A pattern matches the texts of the vocabulary that Python's `re.fullmatch` accepts, in linear time. API.md documents
the syntax under "Constrained output". All other syntax is refused, and never gets another meaning. A pattern that is
too expensive to compile is refused too. The cost is counted in steps, not in seconds, so the outcome is always the
same.

Alternatives that need characters outside the vocabulary are dropped.

A pattern is compiled in four stages: parse it to a term, build the Glushkov NFA, construct the subsets, minimise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from service.constrain.automaton import MAX_CELLS, MAX_STATES, Automaton
from service.constrain.dfa import Row, explore, merge_classes, minimise, tabulate, trim
from service.constrain.errors import RegexError
from service.constrain.nfa import GlushkovNFA
from service.constrain.parse import Alphabet, parse
from service.words import plural

__all__ = ["RegexError", "compile_choice", "compile_regex", "compile_without", "ended", "intersection"]

MAX_WORK = 100_000  # steps to compile a pattern, see `GlushkovNFA`


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
    alphabet = Alphabet(characters, allowed)
    nfa = GlushkovNFA(parse(pattern, alphabet), max_work)
    classes, classes_of_set = alphabet.partition()
    # Subset construction. All positions are reachable and live, so all sets of positions are too.
    rows, states = explore(nfa.start, lambda state: nfa.after(state, classes_of_set), min(max_states, MAX_STATES))
    accepting = [bool(state & nfa.end) for state in states]
    return merge_classes(minimise(tabulate(classes, rows, accepting)))


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
    rows, states = explore(whole, lambda state: {symbols[c]: after for c, after in left[state].after.items()})
    classes = np.full(len(characters), len(symbols), dtype=np.uint16)  # the last class: characters that no choice has
    for c, symbol in symbols.items():
        classes[ids[c]] = symbol
    return merge_classes(tabulate(classes, rows, [left[state].may_be_nothing for state in states]))


def compile_without(
    words: Sequence[str],
    characters: Sequence[str],
    *,
    allowed: frozenset[str] | None = None,
    end: str | None = None,
    max_states: int = 1000,
) -> Automaton:
    """Return the automaton of all texts of the allowed characters that contain none of the words.

    words: none is empty.
    characters, allowed: as in `compile_regex`.
    end: this character is allowed too, but only as the last character of a text.

    Raises:
        RegexError: there are too many words.
    """
    usable = {c for c in characters if allowed is None or c in allowed or c == end}
    bad = _shortest({word for word in words if usable.issuperset(word) and (end is None or end not in word[:-1])})
    # Each character of a bad word has a class, and the end has one. All other usable characters share one.
    special, symbols = {*"".join(bad), end}, dict[str | bool, int]()
    classes = [symbols.setdefault(c if c in special else c in usable, len(symbols)) for c in characters]
    rows = _find_first(bad, symbols, max_states)
    found = len(rows) - 1  # the state after a bad word
    dfa = minimise(tabulate(np.array(classes, dtype=np.uint16), rows, [False] * found + [True]))
    # The complement: all states but the last accept, and none leads to it.
    table = np.where(dfa.table == len(dfa.table) - 1, -1, dfa.table)[:-1]
    if end in symbols and end not in bad:
        table[:, symbols[end]] = np.where(table[:, symbols[end]] < 0, -1, len(table))
        table = np.append(table, np.full_like(table[:1], -1), axis=0)
    size = len(table)
    return merge_classes(Automaton(dfa.classes, table, np.ones(size, dtype=bool), np.zeros(size, dtype=np.int32)))


def _shortest(words: set[str]) -> set[str]:
    """Return the words that contain no other."""
    return {word for word in words if not any(other in word for other in words if other != word)}


def _find_first(words: set[str], symbols: dict[str | bool, int], max_states: int) -> list[Row]:
    """Return the transitions of the automaton of all texts that end with their first word (Aho and Corasick 1975).

    The last state accepts. Each other state stands for the longest end of the text that begins a word.

    words: none contains another.
    symbols: the class of each character of a word, and of all other allowed characters (True).
    """
    beginnings = {word[:i] for word in words for i in range(len(word))} | {""}
    if len(beginnings) > max_states:
        raise RegexError(f"the words need {len(beginnings)} states (limit {max_states}); give fewer or shorter words")
    states = {text: state for state, text in enumerate(sorted(beginnings, key=lambda text: (len(text), text)))}
    longer: list[dict[str, int]] = [{} for _ in states]  # state -> next state by character, if a word continues
    for text in [*states, *words][1:]:
        longer[states[text[:-1]]][text[-1]] = states.get(text, len(states))
    shorter = [0] * (len(states) + 1)  # state -> the state of the next longest end of the text that begins a word
    rows: list[Row] = []
    for state, following in enumerate(longer):
        row = rows[shorter[state]].copy() if state else {symbol: 0 for c, symbol in symbols.items() if c is not False}
        for c, next_state in following.items():
            shorter[next_state] = row[symbols[c]]
            row[symbols[c]] = next_state
        rows.append(row)
    return [*rows, {}]


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

    rows, states = explore((0, 0), after, min(max_states, MAX_CELLS // pairs.shape[1]))
    accepting = [bool(one.accepting[a] and other.accepting[b]) for a, b in states]
    return merge_classes(minimise(trim(classes.reshape(-1), rows, accepting)))


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
    return merge_classes(minimise(trim(classes, [*rows, {}], [False] * last + [True])))


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
