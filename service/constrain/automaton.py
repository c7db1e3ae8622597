"""Deterministic finite automata (DFAs) over character ids: guides for constrained text, and stop patterns.

Independent of regular expressions (`service.constrain.regex` compiles them), text, logits and HTTP; loads without
torch.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

MAX_STATES = 2**15 - 1  # int16
MAX_CELLS = 2**20  # states times classes
MASK_CACHE_BYTES = 2**20  # per automaton, and per minimum length
MAX_LENGTH_STEPS = 2**26  # transitions followed for a minimum length; about 0.2 s
MAX_LENGTH_BITS = 2**21  # of its layers together

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
    _masks: dict[tuple[int, int, bool], np.ndarray | None] = field(default_factory=dict, init=False, repr=False)

    @property
    def min_length(self) -> int:
        """Characters of the shortest matching text."""
        return int(self.distance[0])

    def match_lengths(self, ids: Iterable[int]) -> set[int]:
        """The lengths of those beginnings of `ids` that match."""
        state, found = 0, set()
        for length, id in enumerate(itertools.chain(ids, [None])):
            if self.accepting[state]:
                found.add(length)
            if id is None or (state := int(self.table[state, self.classes[id]])) < 0:
                break
        return found

    def pack(self) -> bytes:
        """Serialise for another process of this service, to a tenth of the arrays' size or less."""
        return _pack(self.classes, self.table, self.accepting, self.distance)

    @classmethod
    def unpack(cls, data: bytes) -> Automaton:
        """The inverse of `pack`."""
        return cls(*_unpack(data))


def _pack(*arrays: np.ndarray) -> bytes:
    listed = [(array.dtype.str, array.shape, array.tobytes()) for array in arrays]
    return zlib.compress(msgspec.msgpack.encode(listed), level=1)


def _unpack(data: bytes) -> list[np.ndarray]:
    listed = msgspec.msgpack.decode(zlib.decompress(data))
    return [np.frombuffer(numbers, dtype).reshape(shape) for dtype, shape, numbers in listed]


def _remember(masks: dict[Any, Any], key: Any, good: np.ndarray, classes: np.ndarray) -> np.ndarray | None:
    """The ids of good classes, (V,) bool; None: of all or of none. Kept if there is room."""
    mask = None if good.all() or not good.any() else good[classes]
    if mask is not None:
        mask.flags.writeable = False
    if len(masks) * len(classes) < MASK_CACHE_BYTES:
        masks[key] = mask
    return mask


class LengthError(ValueError):
    """Which matches have an allowed length is too expensive to find out."""


@dataclass(frozen=True, eq=False)
class MinimumLength:
    """From which states of an automaton a text that is still too short can end as a match that is not too long.

    A text that lacks d characters of the minimum may get d to d + room more, where room = maximum − minimum. Layer d
    holds the states from which a match is that far; it follows from layer d − 1, so that equal layers have equal
    successors. After the last layer comes layer `repeat` again.
    """

    length: int  # the minimum
    layers: np.ndarray  # (layers, ⌈states / 8⌉) uint8: a bit for each state
    repeat: int
    _masks: dict[tuple[int, int], np.ndarray | None] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, automaton: Automaton, minimum: int, maximum: int) -> MinimumLength | None:
        """For matches of `minimum` to `maximum` characters; None: there is none.

        Raises LengthError: beyond MAX_LENGTH_STEPS or MAX_LENGTH_BITS.
        """
        states = len(automaton.table)
        targets = np.sort(automaton.table, axis=1)
        is_new = np.ones(targets.shape, dtype=bool)
        is_new[:, 1:] = targets[:, 1:] != targets[:, :-1]
        edges = targets[is_new]  # the next states of each state, the dead one included
        starts = np.append(0, is_new.sum(axis=1).cumsum()[:-1])
        reach = np.zeros(states + 1, dtype=bool)  # index −1: the dead state
        reach[:states] = automaton.distance <= maximum - minimum
        layers: dict[bytes, int] = {}
        for missing in range(minimum + 1):
            if not reach.any():  # nor in later layers
                return None
            packed = np.packbits(reach[:states]).tobytes()
            if packed in layers:
                break
            layers[packed] = missing
            if len(layers) * states > MAX_LENGTH_BITS or missing * len(edges) > MAX_LENGTH_STEPS:
                raise LengthError(f"an automaton of {states} states is too large for a minimum length of {minimum}")
            reach[:states] = np.logical_or.reduceat(reach[edges], starts)
        rows = np.frombuffer(b"".join(layers), dtype=np.uint8).reshape(len(layers), -1)
        found = cls(minimum, rows, layers[packed])
        return found if found.layers[found._index(minimum)][0] & 0x80 else None  # from state 0

    def _index(self, missing: int) -> int:
        count = len(self.layers)
        return missing if missing < count else self.repeat + (missing - self.repeat) % (count - self.repeat)

    def allowed(self, automaton: Automaton, state: int, missing: int) -> np.ndarray | None:
        """The ids after which a match of an allowed length can be reached: (V,) bool with at least one; None: all."""
        key = (state, self._index(missing - 1))
        if key in self._masks:
            return self._masks[key]
        layer = np.unpackbits(self.layers[key[1]], count=len(automaton.table)).astype(bool)
        good = np.append(layer, False)[automaton.table[state]]  # (classes,)
        return _remember(self._masks, key, good, automaton.classes)

    def reaches(self, state: int, missing: int) -> bool:
        """Whether a text in this state, so many characters short of the minimum, can reach a match."""
        return bool(self.layers[self._index(missing), state // 8] >> (7 - state % 8) & 1)

    def pack(self) -> bytes:
        return _pack(np.array([self.length, self.repeat]), self.layers)

    @classmethod
    def unpack(cls, data: bytes) -> MinimumLength:
        """The inverse of `pack`."""
        numbers, layers = _unpack(data)
        return cls(int(numbers[0]), layers, int(numbers[1]))


class Guide:
    """One sequence's path through an automaton: the ids allowed next, and where the text ends.

    A character-level model has no end-of-text token. Instead, in an accepting state every id outside the pattern is
    allowed, and choosing one ends the text without that id: not before `minimum`. None: every match is long enough.

    An id in the pattern is allowed only if the text can be completed after it, within `maximum` characters, and to the
    minimum while it is shorter. So at least one id is always allowed, and as long as only allowed ids are chosen, the
    text matches when nothing remains.

    Without `may_leave`, ids outside the pattern are allowed only if no other is. If all ids stay in the pattern and
    none can be completed, all are allowed and `push` refuses any.

    Without `masks`, every id is allowed always: `push` refuses one after which no match can follow, and `accepts` says
    whether the text before it matches. native.cpp follows the same rules.
    """

    def __init__(
        self,
        automaton: Automaton,
        maximum: int = 2**31 - 1,
        minimum: MinimumLength | None = None,
        may_leave: bool = True,
        masks: bool = True,
    ):
        self.automaton = automaton
        self.minimum = minimum
        self.may_leave = may_leave
        self.masks = masks
        self.state = 0
        self.remaining = maximum  # characters, to the maximum
        self.missing = 0 if minimum is None else minimum.length  # characters, to the minimum
        self._class_of = automaton.classes.item
        self._next = automaton.table.item
        self._distance = automaton.distance.item
        self._ample = int(automaton.distance.max()) + 2  # from this budget on, completion excludes no id

    @property
    def may_end(self) -> bool:
        """Whether the text so far matches."""
        return bool(self.automaton.accepting[self.state])

    @property
    def must_end(self) -> bool:
        """Whether the text so far matches and no longer text with this beginning does."""
        return self.may_end and bool((self.automaton.table[self.state] < 0).all())

    @property
    def distance(self) -> int:
        """Fewest characters that are missing to a match."""
        return int(self._distance(self.state))

    def accepts(self, refused: int | None) -> bool:
        """Whether the text so far matches and is long enough, and may end with the id that `push` refused, if any."""
        if not self.may_end or self.missing:
            return False
        return refused is None or (self.may_leave and self._next(self.state, self._class_of(refused)) < 0)

    def forced(self) -> list[int]:
        """The ids with which every match goes on from here; they end where one may end."""
        automaton, state = self.automaton, self.state
        members = np.bincount(automaton.classes)
        ids: list[int] = []
        while not automaton.accepting[state]:
            possible = np.flatnonzero(automaton.table[state] >= 0)  # at least one, as the state is live
            if len(possible) > 1 or members[possible[0]] > 1:
                break
            ids.append(int(np.flatnonzero(automaton.classes == possible[0])[0]))
            state = int(automaton.table[state, possible[0]])
        return ids

    def allowed(self) -> np.ndarray | None:
        """The allowed next ids: (V,) bool, read-only and shared; None: all."""
        if not self.masks:
            return None
        assert self.automaton.distance[self.state] <= self.remaining > 0, "no matching text is that short"
        if self.missing:
            assert self.minimum is not None
            return self.minimum.allowed(self.automaton, self.state, self.missing)
        key = (self.state, min(self.remaining, self._ample), self.may_leave)
        masks = self.automaton._masks
        if key in masks:
            return masks[key]
        automaton = self.automaton
        distance = np.append(automaton.distance, _UNREACHABLE)[automaton.table[self.state]]  # (classes,)
        good = distance < self.remaining
        if automaton.accepting[self.state] and (self.may_leave or not good.any()):
            good |= distance == _UNREACHABLE
        return _remember(masks, key, good, automaton.classes)

    def push(self, id: int) -> bool:
        """Advance by the chosen id; False: it ends the text and is not part of it."""
        state = self._next(self.state, self._class_of(id))
        if state < 0 or self._distance(state) >= self.remaining:
            return False
        if self.missing:
            assert self.minimum is not None
            if not self.masks and not self.minimum.reaches(state, self.missing - 1):
                return False
            self.missing -= 1
        self.state = state
        self.remaining -= 1
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
        self.num_followed = 0  # partial matches by one id each, of all time

    @property
    def num_partial(self) -> int:
        return len(self._starts)

    @property
    def held(self) -> int:
        return self._position - next(iter(self._starts.values()), self._position)

    def push(self, id: int) -> int | None:
        """Read one id; returns the length of the longest match that ends with it, or None."""
        symbol, step = self._class_of(id), self._next
        self._starts.setdefault(0, self._position)
        self.num_followed += len(self._starts)
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
