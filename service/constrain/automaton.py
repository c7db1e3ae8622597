"""Deterministic finite automata (DFAs) over character ids: guides for constrained text, and stop patterns.

Independent of regular expressions (`service.constrain.regex` compiles them), text, logits and HTTP; loads without
torch.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field

import numpy as np

MAX_STATES = 2**15 - 1  # int16
MAX_CELLS = 2**20  # states times classes
MASK_CACHE_BYTES = 2**20  # per automaton

_HEADER = struct.Struct("<III")  # ids, states, classes
_UNREACHABLE = np.iinfo(np.int32).max  # distance from the dead state


@dataclass(frozen=True, eq=False)
class Automaton:
    """A trimmed DFA over character ids.

    State 0 is the start; every state is reachable and live (can reach an accepting one). Every class has at least one
    id.
    """

    classes: np.ndarray  # (V,) uint16: the equivalence class of each id
    table: np.ndarray  # (states, classes) int16: the next state; −1: the dead state, outside the language
    accepting: np.ndarray  # (states,) bool
    distance: np.ndarray  # (states,) int32: fewest characters to an accepting state
    _masks: dict[tuple[int, int, bool], tuple[np.ndarray | None, bool]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def min_length(self) -> int:
        """Characters of the shortest matching text."""
        return int(self.distance[0])

    def pack(self) -> bytes:
        """Serialise for another process, to a tenth of the arrays' size or less."""
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
        """The inverse of `pack`.

        Raises:
            ValueError: the data is truncated, damaged or not a valid automaton.
        """
        if len(data) < _HEADER.size:
            raise ValueError(f"a packed automaton has at least {_HEADER.size} bytes, got {len(data)}")
        ids, states, classes = _HEADER.unpack_from(data)
        if not (0 < states <= MAX_STATES and 0 < classes <= min(ids, 2**16) and states * classes <= MAX_CELLS):
            raise ValueError(
                f"an automaton must have 1 to {MAX_STATES} states, 1 to 65536 classes, at most one per id, and at most "
                f"{MAX_CELLS} cells, got {states} states, {classes} classes and {ids} ids"
            )
        widths = {"classes": 2 * ids, "table": 2 * states * classes, "accepting": states, "distance": 4 * states}
        size = sum(widths.values())
        inflater = zlib.decompressobj()
        try:
            body = inflater.decompress(data[_HEADER.size :], size + 1)
        except zlib.error as error:
            raise ValueError(f"the arrays of a packed automaton are damaged: {error}") from None
        if len(body) != size or not inflater.eof or inflater.unused_data:
            raise ValueError(f"{states} states and {classes} classes of {ids} ids must take exactly {size} bytes")
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
            raise ValueError(f"each id must be in one of {classes} classes, and no class may be empty")
        if self.table.min() < -1 or self.table.max() >= states:
            raise ValueError(f"next states must be in [-1, {states - 1}], got {self.table.min()} … {self.table.max()}")
        if (self.distance < 0).any() or (self.distance >= states).any():
            raise ValueError(f"distances must be in [0, {states - 1}]")
        # Distances that are consistent with those of the next states are correct, and prove that every state is live.
        next_distance = np.append(self.distance, _UNREACHABLE)[self.table].min(axis=1).astype(np.int64)
        if (np.where(self.accepting, 0, next_distance + 1) != self.distance).any():
            raise ValueError("the distances are inconsistent with the table and the accepting states")


class Guide:
    """One sequence's path through an automaton: the ids allowed next, and where the text ends.

    A character-level model has no end-of-text token. Instead, in an accepting state every id outside the pattern is
    allowed, and choosing one ends the text without that id.
    """

    def __init__(self, automaton: Automaton):
        self.automaton = automaton
        self._state = 0
        self._out_of_budget = False  # no id that stays in the pattern can be completed: any id ends the text
        self._class_of = automaton.classes.item
        self._next = automaton.table.item
        self._ample = int(automaton.distance.max()) + 2  # from this budget on, completion excludes no id

    @property
    def may_end(self) -> bool:
        """Whether the text so far matches."""
        return bool(self.automaton.accepting[self._state])

    @property
    def must_end(self) -> bool:
        """Whether the text so far matches and no longer text with this beginning does."""
        return self.may_end and bool((self.automaton.table[self._state] < 0).all())

    def allowed(self, remaining: int, must_continue: bool = False) -> np.ndarray | None:
        """The allowed next ids: (V,) bool, read-only and shared; None: all.

        `remaining`: characters that may still be generated, this one included. An id in the pattern is allowed only if
        the text can be completed after it. So at least one id is always allowed, and as long as only allowed ids are
        chosen, the text matches when nothing remains.

        With `must_continue` (the text is still too short) ids outside the pattern are allowed only if no other is. If
        all ids stay in the pattern and none can be completed, the result is None and `push` refuses any id.
        """
        assert self.automaton.distance[self._state] <= remaining > 0, "no matching text is that short"
        key = (self._state, min(remaining, self._ample), must_continue)
        masks = self.automaton._masks
        found = masks.get(key)
        if found is None:
            found = self._find_allowed(remaining, must_continue)
            if len(masks) * len(self.automaton.classes) < MASK_CACHE_BYTES:
                masks[key] = found
        mask, self._out_of_budget = found
        return mask

    def _find_allowed(self, remaining: int, must_continue: bool) -> tuple[np.ndarray | None, bool]:
        """(mask, out of budget)."""
        automaton = self.automaton
        distance = np.append(automaton.distance, _UNREACHABLE)[automaton.table[self._state]]  # (classes,)
        good = distance < remaining
        if automaton.accepting[self._state] and not (must_continue and good.any()):
            good |= distance == _UNREACHABLE
            if not good.any():
                return None, True
        if good.all():
            return None, False
        mask = good[automaton.classes]  # (V,)
        mask.flags.writeable = False
        return mask, False

    def push(self, id: int) -> bool:
        """Advance by the id chosen after `allowed`; False: it ends the text and is not part of it."""
        state = self._next(self._state, self._class_of(id))
        if state < 0 or self._out_of_budget:
            return False
        self._state = state
        return True


class StopPattern:
    """Finds an automaton's matches anywhere in a stream of ids; a match has at least one id.

    The last `held` ids of the stream may be the start of a match, so they must not be emitted yet.
    """

    def __init__(self, automaton: Automaton):
        self._class_of = automaton.classes.item
        self._next = automaton.table.item
        self._accepting = automaton.accepting.tolist()
        self._extensible = (automaton.table.max(axis=1) >= 0).tolist()
        self._position = 0  # ids seen
        # The state of each partial match -> its start; of those in one state the earliest. In order of the starts.
        self._starts: dict[int, int] = {}

    @property
    def held(self) -> int:
        return self._position - next(iter(self._starts.values()), self._position)

    def push(self, id: int) -> int | None:
        """Read one id; returns the length of the longest match that ends with it, or None."""
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
            if self._extensible[state]:
                starts.setdefault(state, start)
        self._starts = starts
        return found
