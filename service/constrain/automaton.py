"""Deterministic automata over character ids: what a constrained text may go on with, and where a stop pattern ends.

Knows nothing of regular expressions, text or HTTP (`service.constrain.regex` makes automata), nor of logits; loads
without torch.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field

import numpy as np

MAX_STATES = 2**15 - 1  # int16
MAX_CELLS = 2**20  # states times classes
MASK_CACHE_BYTES = 2**20  # of one automaton

_HEADER = struct.Struct("<III")  # ids, states, classes
_LEAVES = np.iinfo(np.int32).max  # stands for the distance to an accepting state where an id leaves the language


@dataclass(frozen=True, eq=False)
class Automaton:
    """A trimmed deterministic automaton over character ids.

    State 0 is the start; every state is reachable and live: an accepting one can be reached from it. Every class
    has at least one id.
    """

    classes: np.ndarray  # (V,) uint16: the class of each id; ids that behave alike share one
    table: np.ndarray  # (states, classes) int16: the next state; -1: the id leaves the language
    accepting: np.ndarray  # (states,) bool
    distance: np.ndarray  # (states,) int32: fewest further characters until an accepting state; 0 where accepting
    _masks: dict[tuple[int, int, bool], tuple[np.ndarray | None, bool]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def min_length(self) -> int:
        """Characters of the shortest text that matches."""
        return int(self.distance[0])

    def pack(self) -> bytes:
        """As bytes for another process, a tenth or less of the arrays' size."""
        header = _HEADER.pack(len(self.classes), *self.table.shape)
        arrays = (
            self.classes.astype("<u2"),
            self.table.astype("<i2"),
            self.accepting.astype("u1"),
            self.distance.astype("<i4"),
        )
        return header + zlib.compress(b"".join(array.tobytes() for array in arrays), level=1)

    @classmethod
    def unpack(cls, data: bytes) -> Automaton:
        """What `pack` gave.

        Raises:
            ValueError: these bytes are no automaton; says what is wrong with them.
        """
        if len(data) < _HEADER.size:
            raise ValueError(f"a packed automaton has at least {_HEADER.size} bytes, got {len(data)}")
        ids, states, classes = _HEADER.unpack_from(data)
        if not (0 < states <= MAX_STATES and 0 < classes <= min(ids, 2**16) and states * classes <= MAX_CELLS):
            raise ValueError(
                f"{states} states and {classes} classes of {ids} ids are no automaton: "
                f"1 to {MAX_STATES} states, 1 to 65536 classes and no more than ids, {MAX_CELLS} cells at most"
            )
        widths = {"classes": 2 * ids, "table": 2 * states * classes, "accepting": states, "distance": 4 * states}
        size = sum(widths.values())
        inflater = zlib.decompressobj()
        try:
            body = inflater.decompress(data[_HEADER.size :], size + 1)
        except zlib.error as error:
            raise ValueError(f"the arrays of a packed automaton are damaged: {error}") from None
        if len(body) != size or not inflater.eof or inflater.unused_data:
            raise ValueError(f"{states} states and {classes} classes of {ids} ids take {size} bytes exactly")
        parts, start = {}, 0
        for name, width in widths.items():
            parts[name] = body[start : start + width]
            start += width
        automaton = cls(
            np.frombuffer(parts["classes"], dtype="<u2"),
            np.frombuffer(parts["table"], dtype="<i2").reshape(states, classes),
            np.frombuffer(parts["accepting"], dtype="u1") != 0,
            np.frombuffer(parts["distance"], dtype="<i4"),
        )
        automaton._validate()
        return automaton

    def _validate(self) -> None:
        states, classes = self.table.shape
        if self.classes.max() >= classes or not np.bincount(self.classes, minlength=classes).all():
            raise ValueError(f"each of {classes} classes must have an id, and each id one of these classes")
        if self.table.min() < -1 or self.table.max() >= states:
            raise ValueError(f"a next state must be in [-1, {states - 1}], got {self.table.min()} … {self.table.max()}")
        if (self.distance < 0).any() or (self.distance >= states).any():
            raise ValueError(f"a distance must be in [0, {states - 1}]")
        # Distances that agree with those of the next states everywhere are the right ones, and every state is live.
        after = np.append(self.distance, _LEAVES)[self.table].min(axis=1).astype(np.int64) + 1
        if (np.where(self.accepting, 0, after) != self.distance).any():
            raise ValueError("the distances do not fit the table and the accepting states")


class Guide:
    """One sequence's way through an automaton: which ids may come next, and where the text ends.

    A character-level model has no symbol for the end of a text; leaving the pattern plays that role. Where the text
    matches already, any id may be chosen, and one that leaves the pattern ends the text, without that id.
    """

    def __init__(self, automaton: Automaton):
        self.automaton = automaton
        self._state = 0
        self._must_end_here = False  # by the budget: an id that stays in the pattern ends the text too
        self._class_of = automaton.classes.item
        self._next = automaton.table.item
        self._far = int(automaton.distance.max()) + 2  # no budget from here on rules anything out

    @property
    def may_end(self) -> bool:
        """Whether the text so far matches."""
        return bool(self.automaton.accepting[self._state])

    @property
    def must_end(self) -> bool:
        """Whether the text so far matches and no character can follow."""
        return self.may_end and bool((self.automaton.table[self._state] < 0).all())

    def allowed(self, remaining: int, must_go_on: bool = False) -> np.ndarray | None:
        """The ids that may come next: (V,) bool, read-only and shared; None: any.

        `remaining` characters, this one included, may still be generated. An id that stays in the pattern is allowed
        only where the text can be completed after it; so as long as each id is one that was allowed, the text
        matches by the time nothing remains, and at least one id is allowed every time.

        With `must_go_on` (fewer characters than wanted so far) ids that leave the pattern are not allowed either,
        unless no other can follow. Where every id would stay in the pattern and none can be completed, the answer
        is None, and `push` refuses whatever is chosen.
        """
        assert self.automaton.distance[self._state] <= remaining > 0, "no text of this pattern is that short"
        key = (self._state, min(remaining, self._far), must_go_on)
        masks = self.automaton._masks
        found = masks.get(key)
        if found is None:
            found = self._find_allowed(remaining, must_go_on)
            if len(masks) * len(self.automaton.classes) < MASK_CACHE_BYTES:
                masks[key] = found
        mask, self._must_end_here = found
        return mask

    def _find_allowed(self, remaining: int, must_go_on: bool) -> tuple[np.ndarray | None, bool]:
        """(mask, whether the text must end here)."""
        automaton = self.automaton
        after = np.append(automaton.distance, _LEAVES)[automaton.table[self._state]]  # (classes,)
        good = after < remaining  # the text goes on and can be completed
        if automaton.accepting[self._state] and not (must_go_on and good.any()):
            good |= after == _LEAVES
            if not good.any():
                return None, True
        if good.all():
            return None, False
        mask = good[automaton.classes]  # (V,)
        mask.flags.writeable = False
        return mask, False

    def push(self, id: int) -> bool:
        """Take the id chosen after `allowed`; False: it leaves the pattern, and is not taken."""
        state = self._next(self._state, self._class_of(id))
        if state < 0 or self._must_end_here:
            return False
        self._state = state
        return True


class StopPattern:
    """Looks for the matches of an automaton anywhere in a stream of ids, one id at a time.

    A match has at least one id. `held` ids at the end of the stream could be the beginning of one, so they may not be
    given away yet.
    """

    def __init__(self, automaton: Automaton):
        self._class_of = automaton.classes.item
        self._next = automaton.table.item
        self._accepting = automaton.accepting.tolist()
        self._goes_on = (automaton.table.max(axis=1) >= 0).tolist()
        self._position = 0  # ids taken
        # Where each attempt that is still alive began, by its state: the earliest of those that share it, earliest
        # first (a dict keeps its order).
        self._starts: dict[int, int] = {}

    @property
    def held(self) -> int:
        return self._position - next(iter(self._starts.values()), self._position)

    def push(self, id: int) -> int | None:
        """Take one id; the length of the match that it completes (the longest of several), or None."""
        symbol, step = self._class_of(id), self._next
        self._starts.setdefault(0, self._position)
        self._position += 1
        starts: dict[int, int] = {}
        found = None
        for state, start in self._starts.items():
            state = step(state, symbol)
            if state < 0:
                continue
            if found is None and self._accepting[state]:
                found = self._position - start
            if self._goes_on[state]:
                starts.setdefault(state, start)
        self._starts = starts
        return found
