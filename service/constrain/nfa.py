"""Nondeterministic finite automata (NFAs) of terms, by Glushkov's construction."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from service.constrain.errors import RegexError


class Union(NamedTuple):
    """Matches what one of its terms matches."""

    terms: tuple[Term, ...]


class Repeat(NamedTuple):
    """Matches `low` to `high` texts of its term, one after the other."""

    term: Term
    low: int
    high: int | None  # None: no upper bound


# A term is a sequence of factors. A factor is the index of a character set, a union or a repeat. The empty term matches
# the empty text.
Factor = int | Union | Repeat
Term = tuple[Factor, ...]


class GlushkovNFA:
    """The position automaton of a term (Glushkov 1961), without epsilon transitions.

    Each character or class of the pattern is a position after repeats are expanded. An int represents a set of
    positions, one bit for each. The bit after the last position stands for the end of the text.
    """

    def __init__(self, term: Term, max_work: int):
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

    def after(self, state: int, classes_of_set: list[list[int]]) -> dict[int, int]:
        """Return, for each class of characters, the set of positions that may follow a set of positions.

        state: the set; its positions match a character of the class.
        classes_of_set: the classes of each character set, from `Alphabet.partition`.
        """
        self._spend(state.bit_count())
        by_set: dict[int, int] = {}
        for position in _bits(state & ~self.end):
            index = self.sets[position]
            by_set[index] = by_set.get(index, 0) | self.follow[position]
        self._spend(sum(len(classes_of_set[index]) for index in by_set))
        by_class: dict[int, int] = {}
        for index, following in by_set.items():
            for symbol in classes_of_set[index]:
                by_class[symbol] = by_class.get(symbol, 0) | following
        reduced = {following: self._without_subsumed(following) for following in set(by_class.values())}
        return {symbol: reduced[following] for symbol, following in by_class.items()}

    def _spend(self, steps: int) -> None:
        """Take steps from the budget; a step takes about 0.2 µs.

        Raises:
            RegexError: the budget is spent.
        """
        self._left -= steps
        if self._left < 0:
            raise RegexError(f"the pattern takes more than {self._max_work} steps to compile; simplify it")

    def _add(self, term: Term) -> tuple[bool, int, int]:
        """Add the positions of a term.

        Return True if the term matches the empty text (is nullable), and the sets of its first and last positions.
        """
        if len(term) == 1:
            return self._add_factor(term[0])
        nullable, first, last = True, 0, 0
        for factor in term:
            part_nullable, part_first, part_last = self._add_factor(factor)
            self._link(last, part_first)
            first |= part_first if nullable else 0
            last = part_last | (last if part_nullable else 0)
            nullable = nullable and part_nullable
        return nullable, first, last

    def _add_factor(self, factor: Factor) -> tuple[bool, int, int]:
        self._spend(4)
        if isinstance(factor, int):
            bit = 1 << len(self.sets)
            self.sets.append(factor)
            self.follow.append(0)
            self._subsumed.append(0)
            return False, bit, bit
        if isinstance(factor, Repeat):
            return self._add_repeat(*factor)
        nullable, first, last = False, 0, 0
        for term in factor.terms:
            part_nullable, part_first, part_last = self._add(term)
            first, last, nullable = first | part_first, last | part_last, nullable or part_nullable
        return nullable, first, last

    def _add_repeat(self, term: Term, low: int, high: int | None) -> tuple[bool, int, int]:
        """Expand x{2,4} to xx(x(x)?)? and x{2,} to xx+.

        The last copy is added first, so only adjacent copies are linked. A nullable x is treated as one that is not
        nullable, with all its copies optional.
        """
        copies = max(low, 1) if high is None else high
        nullable, first, last = True, 0, 0  # of all copies added so far
        starts = []
        for i in reversed(range(copies)):
            starts.append(len(self.sets))
            part_nullable, part_first, part_last = self._add(term)
            low = 0 if part_nullable else low
            self._link(part_last, part_first if high is None and i == copies - 1 else first)
            last |= part_last if nullable else 0
            first, nullable = part_first, i >= low
        # With an upper bound, an early optional copy leaves more repeats than a late one, so it subsumes the late copy.
        # Without an upper bound, a late copy requires fewer repeats than an early one, so it subsumes the early copy.
        self._subsume(starts[::-1] if high is None else starts[: copies - max(low - 1, 0)], len(self.sets) - starts[-1])
        return nullable, first, last

    def _subsume(self, starts: list[int], size: int) -> None:
        """Make each copy of a term subsume the copies before it. A copy has `size` positions from its start."""
        self._spend(len(starts) * size)
        for weak, strong in pairwise(starts):
            for offset in range(size):
                self._subsumed[strong + offset] |= 1 << (weak + offset) | self._subsumed[weak + offset]

    def _without_subsumed(self, state: int) -> int:
        """Return the set without the positions that other positions of the set subsume.

        A position subsumes another if it may be followed by every text that may follow the other. The language stays
        the same, and the DFA has far fewer states. Otherwise `(a|ab){1,99}` would have a state for each set of possible
        counts.
        """
        subsuming = state & self._subsuming
        self._spend(subsuming.bit_count())
        for position in _bits(subsuming):
            state &= ~self._subsumed[position]
        return state

    def _link(self, last: int, first: int) -> None:
        if first:
            self._spend(last.bit_count())
            for position in _bits(last):
                self.follow[position] |= first


def _bits(number: int) -> list[int]:
    """Return the positions of the bits that are 1, in ascending order."""
    places = []
    while number:
        low = number & -number
        places.append(low.bit_length() - 1)
        number ^= low
    return places
