"""Build automata from transitions: find the states, drop those that no match passes, and merge equivalent ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import TypeVar

import numpy as np

from service.constrain.automaton import MAX_CELLS, Automaton
from service.constrain.errors import RegexError

MAX_ROUNDS = 20  # rounds of minimisation
MAX_ROUND_CELLS = 2**21  # table cells read in all rounds of minimisation together

State = TypeVar("State", bound=Hashable)
Row = dict[int, int]  # the transitions of a state: class -> number of the next state


def explore(
    start: State, after: Callable[[State], dict[int, State]], limit: float = math.inf
) -> tuple[list[Row], list[State]]:
    """Find all states that can be reached from `start`, breadth first, and number them; `start` has number 0.

    after: gives the next states of a state by class.

    Return the transitions of each state, and the states in order.

    Raises:
        RegexError: there are more than `limit` states.
    """
    numbers, states = {start: 0}, [start]
    rows: list[Row] = []
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


def trim(classes: np.ndarray, rows: list[Row], accepting: list[bool]) -> Automaton:
    """Return the automaton with these transitions, without states that no match passes and classes that have no id.

    Raises:
        RegexError: there is no match, or the table would have more than MAX_CELLS cells.
    """
    used, numbers = np.unique(classes, return_inverse=True)
    place = {symbol: i for i, symbol in enumerate(used.tolist())}
    rows = [{place[symbol]: to for symbol, to in row.items() if symbol in place} for row in rows]
    is_live = _distances(rows, accepting) >= 0
    if not is_live[0]:
        raise RegexError("nothing can match")

    def after(state: int) -> Row:
        return {symbol: to for symbol, to in rows[state].items() if is_live[to]}

    kept, states = explore(0, after)
    return tabulate(numbers.reshape(-1).astype(np.uint16), kept, [accepting[state] for state in states])


def tabulate(classes: np.ndarray, rows: list[Row], accepting: list[bool]) -> Automaton:
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


def _distances(rows: list[Row], accepting: list[bool]) -> np.ndarray:
    """Return the distance of each state to an accepting state, (states,) int32; −1 if it reaches none.

    The search is breadth first over the reversed transitions.
    """
    before: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for following in set(row.values()):
            before[following].append(state)
    distance = [0 if accepts else -1 for accepts in accepting]
    queue = [state for state, accepts in enumerate(accepting) if accepts]
    for state in queue:  # grows during the loop
        for earlier in before[state]:
            if distance[earlier] < 0:
                distance[earlier] = distance[state] + 1
                queue.append(earlier)
    return np.array(distance, dtype=np.int32)


def minimise(dfa: Automaton) -> Automaton:
    """Merge equivalent states by partition refinement (Moore 1956).

    The first partition is by distance, because equivalent states have the same distance. A few rounds are usually
    enough from there. If the rounds run out, no state is merged.
    """
    block = dfa.distance
    count = len(np.unique(block))
    for _ in range(min(MAX_ROUNDS, MAX_ROUND_CELLS // dfa.table.size)):
        # An entry −1 of the table reads the −1 appended to `block`.
        block = number_rows(np.column_stack([block, np.append(block, -1)[dfa.table]]).astype(np.int16))
        if block.max() + 1 == count:
            members = np.unique(block, return_index=True)[1]  # the first state of each block
            table = np.append(block, -1)[dfa.table[members]].astype(np.int16)
            return Automaton(dfa.classes, table, dfa.accepting[members], dfa.distance[members])
        count = block.max() + 1
    return dfa


def merge_classes(dfa: Automaton) -> Automaton:
    """Merge classes that have the same transition in every state."""
    column = number_rows(np.ascontiguousarray(dfa.table.T))
    representatives = np.unique(column, return_index=True)[1]
    table = np.ascontiguousarray(dfa.table[:, representatives])
    return Automaton(column[dfa.classes].astype(np.uint16), table, dfa.accepting, dfa.distance)


def number_rows(rows: np.ndarray) -> np.ndarray:
    """Return the number of each row of (N, K), (N,) int64: distinct rows are numbered by their first occurrence."""
    width = rows.shape[1] * rows.itemsize
    if width == 0:
        return np.zeros(len(rows), dtype=np.int64)
    data = rows.tobytes()
    numbers: dict[bytes, int] = {}
    starts = range(0, len(data), width)
    return np.array([numbers.setdefault(data[start : start + width], len(numbers)) for start in starts])
