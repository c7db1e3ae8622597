"""Deterministic finite automata (DFAs) over character ids: guides for constrained text, and stop patterns.

The module handles ids only, without text, logits, HTTP or torch. `service.constrain.regex` compiles regular
expressions to automata.
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
MASK_CACHE_BYTES = 2**20  # for each automaton, and for each minimum length
MAX_LENGTH_STEPS = 2**26  # transitions followed to compute a minimum length; this takes about 0.2 s
MAX_LENGTH_BITS = 2**21  # in all layers of a minimum length

_UNREACHABLE = np.iinfo(np.int32).max  # the distance of the dead state


@dataclass(frozen=True, eq=False)
class Automaton:
    """A trimmed DFA over character ids.

    State 0 is the start state. Every state is reachable from it, and is live: it can reach an accepting state. Every
    class has at least one id.
    """

    classes: np.ndarray  # (V,) uint16: the equivalence class of each id
    table: np.ndarray  # (states, classes) int16: the next state; −1: the dead state, outside the language
    accepting: np.ndarray  # (states,) bool
    distance: np.ndarray  # (states,) int32: the number of characters on the shortest path to an accepting state
    _masks: dict[tuple[int, int, bool], np.ndarray | None] = field(default_factory=dict, init=False, repr=False)

    @property
    def min_length(self) -> int:
        """The number of characters of the shortest match."""
        return int(self.distance[0])

    def match_lengths(self, ids: Iterable[int]) -> set[int]:
        """Return the length of each prefix of `ids` that matches."""
        state, found = 0, set()
        for length, id in enumerate(itertools.chain(ids, [None])):
            if self.accepting[state]:
                found.add(length)
            if id is None or (state := int(self.table[state, self.classes[id]])) < 0:
                break
        return found

    def pack(self) -> bytes:
        """Serialise the automaton for another process of this service.

        The result has at most about a tenth of the arrays' size.
        """
        return _pack(self.classes, self.table, self.accepting, self.distance)

    @classmethod
    def unpack(cls, data: bytes) -> Automaton:
        """Return the automaton that `pack` serialised."""
        return cls(*_unpack(data))


def _pack(*arrays: np.ndarray) -> bytes:
    listed = [(array.dtype.str, array.shape, array.tobytes()) for array in arrays]
    return zlib.compress(msgspec.msgpack.encode(listed), level=1)


def _unpack(data: bytes) -> list[np.ndarray]:
    listed = msgspec.msgpack.decode(zlib.decompress(data))
    return [np.frombuffer(numbers, dtype).reshape(shape) for dtype, shape, numbers in listed]


def _remember(masks: dict[Any, Any], key: Any, good: np.ndarray, classes: np.ndarray) -> np.ndarray | None:
    """Return the mask of the ids in good classes, (V,) bool and read-only; return None if all or no classes are good.

    Store the result in `masks` while `masks` holds less than MASK_CACHE_BYTES.
    """
    mask = None if good.all() or not good.any() else good[classes]
    if mask is not None:
        mask.flags.writeable = False
    if len(masks) * len(classes) < MASK_CACHE_BYTES:
        masks[key] = mask
    return mask


class LengthError(ValueError):
    """A minimum length is too expensive to compute for an automaton."""


@dataclass(frozen=True, eq=False)
class MinimumLength:
    """The states of an automaton from which a text that is still too short can become a match of an allowed length.

    Let room be maximum − minimum. A text that lacks d characters of the minimum must get d to d + room characters more.
    Layer d is the set of states that reach an accepting state in d to d + room characters. Each layer follows from the
    layer before it alone, so equal layers have equal successors. The layers therefore repeat: the layer after the last
    one is layer `repeat`.
    """

    length: int  # the minimum, in characters
    layers: np.ndarray  # (layers, ⌈states / 8⌉) uint8: one bit for each state
    repeat: int  # number of the layer that follows the last one
    _masks: dict[tuple[int, int], np.ndarray | None] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, automaton: Automaton, minimum: int, maximum: int) -> MinimumLength | None:
        """Return the layers for matches of `minimum` to `maximum` characters, or None if there is no such match.

        Raises:
            LengthError: the layers need more than MAX_LENGTH_STEPS steps or MAX_LENGTH_BITS bits.
        """
        states = len(automaton.table)
        targets = np.sort(automaton.table, axis=1)
        is_new = np.ones(targets.shape, dtype=bool)
        is_new[:, 1:] = targets[:, 1:] != targets[:, :-1]
        edges = targets[is_new]  # the distinct next states of each state, one state after the other; −1: dead
        starts = np.append(0, is_new.sum(axis=1).cumsum()[:-1])
        reach = np.zeros(states + 1, dtype=bool)  # the last entry is the dead state's, which index −1 reads
        reach[:states] = automaton.distance <= maximum - minimum
        layers: dict[bytes, int] = {}
        for missing in range(minimum + 1):
            if not reach.any():  # all later layers are empty too
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
        return found if found.layers[found._index(minimum)][0] & 0x80 else None  # the bit of state 0

    def _index(self, missing: int) -> int:
        count = len(self.layers)
        return missing if missing < count else self.repeat + (missing - self.repeat) % (count - self.repeat)

    def allowed(self, automaton: Automaton, state: int, missing: int) -> np.ndarray | None:
        """Return the ids after which the text can still become a match of an allowed length: (V,) bool.

        At least one id is allowed. Return None if all ids are.
        """
        key = (state, self._index(missing - 1))
        if key in self._masks:
            return self._masks[key]
        layer = np.unpackbits(self.layers[key[1]], count=len(automaton.table)).astype(bool)
        good = np.append(layer, False)[automaton.table[state]]  # (classes,)
        return _remember(self._masks, key, good, automaton.classes)

    def reaches(self, state: int, missing: int) -> bool:
        """Return True if a text in `state` that lacks `missing` characters can become a match of an allowed length."""
        return bool(self.layers[self._index(missing), state // 8] >> (7 - state % 8) & 1)

    def pack(self) -> bytes:
        return _pack(np.array([self.length, self.repeat]), self.layers)

    @classmethod
    def unpack(cls, data: bytes) -> MinimumLength:
        """Return the minimum length that `pack` serialised."""
        numbers, layers = _unpack(data)
        return cls(int(numbers[0]), layers, int(numbers[1]))


class Guide:
    """The path of one sequence through an automaton: it gives the ids allowed next, and ends the text.

    An id is in the pattern if the text can still become a match after it. A character-level model has no end-of-text
    token. Instead, every id outside the pattern is allowed in an accepting state. Such an id ends the text and is not
    part of it.

    automaton: the pattern.
    maximum: the limit of the text, in characters. An id in the pattern is allowed only if a match is possible within
        the limit after it. A text of allowed ids matches when it reaches the limit.
    minimum: the text cannot end before it has this length. Until then, an id is allowed only if a match of an allowed
        length is still possible after it. None: every match is long enough.
    may_leave: False: ids outside the pattern are allowed only if no id in the pattern is.
    masks: False: every id is always allowed. `push` refuses an id after which no match is possible. Call `accepts` to
        find out if the text before that id matches.

    At least one id is always allowed. If these rules allow none, because every id is in the pattern and no match fits
    the limit, all ids are allowed and `push` refuses any of them.

    native.cpp follows the same rules.
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
        self.remaining = maximum  # characters up to the maximum
        self.missing = 0 if minimum is None else minimum.length  # characters up to the minimum
        self._class_of = automaton.classes.item
        self._next = automaton.table.item
        self._distance = automaton.distance.item
        self._ample = int(automaton.distance.max()) + 2  # with this many characters remaining, every match fits

    @property
    def may_end(self) -> bool:
        """True if the text so far matches, short or not."""
        return bool(self.automaton.accepting[self.state])

    @property
    def must_end(self) -> bool:
        """True if the text so far matches, and no longer text that begins with it matches."""
        return self.may_end and bool((self.automaton.table[self.state] < 0).all())

    @property
    def distance(self) -> int:
        """The number of characters that the text needs at least to become a match."""
        return int(self._distance(self.state))

    def accepts(self, refused: int | None) -> bool:
        """Return True if the text so far may end: it matches and is long enough.

        refused: the id that `push` refused. Such an id may end the text only with `may_leave`, and only if it is
            outside the pattern. None: no id was refused.
        """
        if not self.may_end or self.missing:
            return False
        return refused is None or (self.may_leave and self._next(self.state, self._class_of(refused)) < 0)

    def forced(self) -> list[int]:
        """Return the ids that every match continues with.

        They end at the first state in which a match may end or more than one id is in the pattern.
        """
        automaton, state = self.automaton, self.state
        members = np.bincount(automaton.classes)
        ids: list[int] = []
        while not automaton.accepting[state]:
            possible = np.flatnonzero(automaton.table[state] >= 0)  # at least one class, because the state is live
            if len(possible) > 1 or members[possible[0]] > 1:
                break
            ids.append(int(np.flatnonzero(automaton.classes == possible[0])[0]))
            state = int(automaton.table[state, possible[0]])
        return ids

    def allowed(self) -> np.ndarray | None:
        """Return the allowed next ids, (V,) bool; return None if all are allowed.

        The array is read-only, and guides share it.
        """
        if not self.masks:
            return None
        if not self.automaton.distance[self.state] <= self.remaining > 0:
            raise ValueError(f"no match ends within the limit; characters left: {self.remaining}")
        if self.minimum is not None and self.missing:
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
        """Append the chosen id to the text and return True; return False if the id ends the text instead.

        An id that ends the text is not part of it.
        """
        state = self._next(self.state, self._class_of(id))
        if state < 0 or self._distance(state) >= self.remaining:
            return False
        if self.minimum is not None and self.missing:
            if not self.masks and not self.minimum.reaches(state, self.missing - 1):
                return False
            self.missing -= 1
        self.state = state
        self.remaining -= 1
        return True


class StopPattern:
    """Finds the matches of an automaton in a stream of ids. A match may begin anywhere and has at least one id.

    The last `held` ids of the stream may be the beginning of a match, so they must not be emitted yet.
    """

    def __init__(self, automaton: Automaton):
        self._class_of = automaton.classes.item
        self._next = automaton.table.item
        self._accepting = automaton.accepting.tolist()
        self._extensible = (automaton.table.max(axis=1) >= 0).tolist()
        self._position = 0  # number of ids read
        # The state of a partial match -> the position of its first id, in order of the positions. Partial matches in
        # the same state have the same future, so only the earliest of them is kept.
        self._starts: dict[int, int] = {}

    @property
    def held(self) -> int:
        return self._position - next(iter(self._starts.values()), self._position)

    def push(self, id: int) -> int | None:
        """Read one id. Return the length of the longest match that ends with it, or None if there is no match."""
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
