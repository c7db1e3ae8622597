"""Draw windows or records without replacement, and arrange them as batches.

The order of the windows takes 8 bytes of memory per window. This module knows nothing about models.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import numpy as np

from training.messages import plural
from training.text.files import CHUNK_BYTES, DataError

IGNORED = -1  # a target that the loss ignores
PADDING = 16  # a part of a batch may be padding to at most one in so many characters
PACK = 32  # characters


class WindowSampler:
    """Draws every window of the text once per epoch, in an order determined by the seed.

    A window's place is a pure function of its number. The only state is `position`, the number of windows drawn.
    Each epoch cuts the text into consecutive windows from a random phase in [0, block_size). The characters left out at
    the two ends, fewer than 2 block_size together, therefore differ from epoch to epoch.

    Raises:
        DataError: the text is shorter than two windows.
    """

    def __init__(self, ids: np.ndarray, block_size: int, seed: int, position: int = 0):
        self.ids, self.block_size, self.seed, self.position = ids, block_size, seed, position
        # This count leaves room for any phase, and for the last target, one character past the inputs.
        self.per_epoch = (len(ids) - block_size) // block_size
        if self.per_epoch < 1:
            raise DataError(
                f"the training split has {plural(len(ids), 'character')}; block_size {block_size} needs at least "
                f"{2 * block_size:,}: pass a longer text or a smaller block_size"
            )

    def rows(self, characters: int) -> int:
        """Return the number of windows in a step of `characters` characters."""
        return characters // self.block_size

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """Return the start offsets of the windows with these numbers: (B,) -> (B,) int64."""
        places, phases = _places(numbers, self.per_epoch, self.seed)
        return places * self.block_size + (phases * self.block_size).astype(np.int64)

    def next_batch(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs of the next windows, and targets one character ahead: (batch_size, block_size) int64 each."""
        starts = self.starts(np.arange(self.position, self.position + batch_size))
        self.position += batch_size
        places = starts[:, None] + np.arange(self.block_size)
        return self.ids[places].astype(np.int64), self.ids[places + 1].astype(np.int64)


class RecordSampler:
    """Draws every record once per epoch, as WindowSampler draws windows. Each record has a row of its own.

    A row begins with the end of the previous record, as in the service, and holds nothing else of another record. A
    record longer than block_size is cut into pieces, each in its own row. `position` is the number of pieces drawn.
    """

    def __init__(self, ids: np.ndarray, block_size: int, seed: int, position: int = 0):
        self.ids, self.seed, self.position = ids, seed, position
        self.pieces = record_pieces(ids, block_size)
        self.per_epoch = len(self.pieces[0])
        self.mean = float(self.pieces[1].mean())  # mean number of characters of a piece

    def rows(self, characters: int) -> int:
        """Return the number of pieces that hold about `characters` characters, at least 1."""
        return max(1, round(characters / self.mean))

    def next_batch(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the next pieces. Return their inputs and targets as `padded` does: (batch_size, longest) int64 each."""
        numbers = np.arange(self.position, self.position + batch_size)
        self.position += batch_size
        piece, _ = _places(numbers, self.per_epoch, self.seed)
        return padded(self.ids, *(part[piece] for part in self.pieces))


def record_pieces(ids: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and the number of inputs of each piece of all records in a split: (pieces,) int64 each.

    A record's first piece begins with the end of the previous record. The last target of its last piece is its own end.
    """
    breaks = places_of(ids, ids[0])
    lengths = np.diff(breaks)
    counts = -(-lengths // longest)
    offsets = longest * (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
    return np.repeat(breaks[:-1], counts) + offsets, np.minimum(longest, np.repeat(lengths, counts) - offsets)


def places_of(ids: np.ndarray, id: int) -> np.ndarray:
    """Return the places of an id in a memory-mapped text, (n,) int64. Reads the text in chunks that fit memory."""
    starts = range(0, len(ids), CHUNK_BYTES)
    return np.concatenate([start + np.flatnonzero(ids[start : start + CHUNK_BYTES] == id) for start in starts])


def unseen_records(ids: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Return for each record of the split `ids` whether the split `train` lacks it: (records,) bool."""
    known = {hash(record) for record in _records(train)}  # two records collide with probability 2⁻⁶⁴
    return np.array([hash(record) not in known for record in _records(ids)])


def _records(ids: np.ndarray) -> Iterator[bytes]:
    """Yield the ids of each record of a split, its end included."""
    for start, length in zip(*record_pieces(ids, len(ids)), strict=True):
        yield ids[start + 1 : start + 1 + length].tobytes()


def window_pieces(ids: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and the number of inputs of consecutive windows: (pieces,) int64 each.

    The last window may be shorter.
    """
    starts = np.arange(0, len(ids) - 1, length)
    return starts, np.minimum(length, len(ids) - 1 - starts)


def padded(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs of pieces of a text, and targets one character ahead: (pieces, longest) int64 each.

    Inputs are padded with 0 and targets with IGNORED, both on the right. Padding there does not affect a causal model's
    other outputs.
    """
    within = np.arange(lengths.max())
    is_padding = within >= lengths[:, None]
    places = np.minimum(starts[:, None] + within, len(ids) - 2)
    idx, targets = (ids[places + ahead].astype(np.int64) for ahead in (0, 1))
    idx[is_padding], targets[is_padding] = 0, IGNORED
    return idx, targets


Part = tuple[np.ndarray, ...]  # idx and targets (B, T); a packed part also has the lengths of its rows


def micro_batches(idx: np.ndarray, targets: np.ndarray, cells: int) -> Iterator[Part]:
    """Yield the rows of a padded batch, the longest first, in parts of at most `cells` characters, padding included.

    A part has at most `cells` / PADDING characters of padding, which cost as much time as another part. A part may be
    larger than `cells` if it is a single row.
    """
    lengths = (targets != IGNORED).sum(axis=1)
    order, first = np.argsort(-lengths, kind="stable"), 0
    while first < len(order):
        longest = int(lengths[order[first]])
        rows = order[first : first + max(1, cells // longest)]
        rows = rows[np.cumsum(longest - lengths[rows]) <= cells // PADDING]
        yield idx[rows, :longest], targets[rows, :longest]
        first += len(rows)


def packed(idx: np.ndarray, targets: np.ndarray, count: int) -> list[Part]:
    """Pack the rows of a padded batch into at most `count` parts of about equally many characters.

    A part is a single row that holds its rows one after another: idx and targets (1, N), and the lengths of these rows,
    (rows,) int64. N is a multiple of PACK, because torch compiles bfloat16 products anew for each N. Rows of padding
    fill it up.
    """
    lengths = (targets != IGNORED).sum(axis=1)
    dealt = np.arange(len(lengths)) % (2 * count)  # deals rows to the parts back and forth, the longest first
    order, owner = np.argsort(-lengths, kind="stable"), np.minimum(dealt, 2 * count - 1 - dealt)
    parts: list[Part] = []
    for own in (order[owner == part] for part in range(min(count, len(lengths)))):
        is_kept = targets[own] != IGNORED
        padding = -int(lengths[own].sum()) % PACK
        rows = np.diff([*range(0, padding, int(lengths.max())), padding])
        parts.append((
            np.pad(idx[own][is_kept], (0, padding))[None],
            np.pad(targets[own][is_kept], (0, padding), constant_values=IGNORED)[None],
            np.concatenate((lengths[own], rows)),
        ))  # fmt: skip
    return parts


def two_halves(parts: Iterable[Part]) -> list[list[Part]]:
    """Divide the parts into two lists of about equally many characters. Return one list if there is one part."""
    halves: tuple[list[Part], list[Part]] = [], []
    for part in parts:
        min(halves, key=lambda half: sum(each[0].size for each in half)).append(part)
    return [half for half in halves if half]


def _places(numbers: np.ndarray, per_epoch: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of numbers (B,) in their epochs, (B,) int64 in [0, per_epoch), and the epochs' phases, (B,) in
    [0, 1).
    """
    epochs, within = np.divmod(numbers, per_epoch)
    places, phases = np.empty(len(numbers), np.int64), np.empty(len(numbers))
    for epoch in np.unique(epochs):
        own = epochs == epoch
        order, phases[own] = random_order(per_epoch, seed, int(epoch))
        places[own] = order[within[own]]
    return places, phases


@functools.lru_cache(maxsize=2)  # a batch may straddle two epochs
def random_order(n: int, seed: int, epoch: int) -> tuple[np.ndarray, float]:
    """Return a random order of 0 … n−1 and a random number in [0, 1), the same in every version of NumPy."""
    words = [*divmod(seed, 1 << 32), *divmod(epoch, 1 << 32)]
    random, order = np.random.RandomState(words), np.arange(n, dtype=np.uint32)  # frozen, unlike np.random.Generator
    random.shuffle(order)
    return order, random.random_sample()
