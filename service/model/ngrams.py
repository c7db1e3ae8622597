"""The frequencies of n-grams in the training text, from which the native engine guesses the next character.

The engine runs guesses ahead, and keeps a guess only if the model then chooses it. So guesses change the speed of an
answer but never its text. Training writes the file (training/run/folder.py). Without the file, the engine does not
guess from n-grams.

The file is in safetensors format, under a name that no loader of weights looks for. It holds a tree of n-grams, level
by level. The children of a node are the characters that follow its n-gram, in the order of their ids.

    ids       (N,) uint16  the last character of each n-gram; 0 for the root
    shares    (N,) uint8   the last character follows the others with frequency 2^(−share/16)
    children  (M,) uint16  the number of children of each of the first M nodes; the other nodes have none
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NGRAMS = "ngrams.bin"
MAX_BYTES = 1_000_000
ORDER = 5  # a guess depends on this many last characters
MIN_COUNT = 2  # rarer n-grams are dropped, because they predict worse than shorter ones
MAX_NGRAMS = 150_000  # the most frequent are kept; more predict no better, and would not fit MAX_BYTES
MAX_CHARACTERS, PARTS = 1 << 22, 64  # a longer text is counted only in this many evenly spaced parts
DISCOUNT = 0.7  # subtracted from each count; shorter n-grams get the difference (Ney et al. 1994)
STEPS = 16  # a share has this many steps for each factor of 2
REST = 1e-6  # divided equally among all ids, so that no probability is 0


@dataclass(frozen=True)
class NGrams:
    """The tree of one text. The arrays are those of the file."""

    ids: np.ndarray
    shares: np.ndarray
    children: np.ndarray

    @classmethod
    def count(cls, text: np.ndarray) -> NGrams:
        """Count the n-grams of a text, (T,) ids."""
        if len(text) > MAX_CHARACTERS:
            size = MAX_CHARACTERS // PARTS
            starts = np.linspace(0, len(text) - size, PARTS).astype(np.int64)
            text = np.concatenate([text[start : start + size] for start in starts])
        text = text.astype(np.int64)
        at, nodes = np.arange(len(text)), np.zeros(len(text), np.int64)  # beginning of each n-gram, and its node
        ids, counts, parents = [np.zeros(1, np.int64)], [np.array([len(text)])], [np.zeros(1, np.int64)]
        size = 1
        for length in range(1, ORDER + 2):
            fits = at + length <= len(text)
            fits[fits] = text[at[fits] + length - 1] < 0xFFFF  # the file cannot hold larger ids
            at, nodes = at[fits], nodes[fits]
            last = text[at + length - 1]
            found, which, count = np.unique(nodes << 16 | last, return_inverse=True, return_counts=True)
            is_kept = count >= MIN_COUNT
            number = size + np.cumsum(is_kept) - 1  # node number of each n-gram that is kept
            ids.append(found[is_kept] & 0xFFFF)
            parents.append(found[is_kept] >> 16)
            counts.append(count[is_kept])
            size += int(is_kept.sum())
            at, nodes = at[is_kept[which]], number[which][is_kept[which]]
        return cls._tree(*map(np.concatenate, (ids, parents, counts)))

    @classmethod
    def _tree(cls, ids: np.ndarray, parents: np.ndarray, counts: np.ndarray) -> NGrams:
        """Build the tree of the most frequent nodes.

        No node is more frequent than its parent, so the parent of a node in the tree is in the tree too.
        """
        if len(ids) > MAX_NGRAMS:
            is_kept = counts > np.partition(counts, -MAX_NGRAMS - 1)[-MAX_NGRAMS - 1]
            is_kept[0] = True
            number = np.cumsum(is_kept) - 1
            ids, parents, counts = ids[is_kept], number[parents[is_kept]], counts[is_kept]
        shares = np.zeros(len(ids), np.uint8)
        octaves = -np.log2((counts[1:] - DISCOUNT) / counts[parents[1:]])
        shares[1:] = np.clip(np.rint(STEPS * octaves), 0, 255)
        children = np.bincount(parents[1:], minlength=1)
        return cls(ids.astype(np.uint16), shares, children.astype(np.uint16))

    def dump(self) -> bytes:
        from safetensors.numpy import save

        return save({"ids": self.ids, "shares": self.shares, "children": self.children})

    @classmethod
    def load(cls, data: bytes, vocab_size: int) -> NGrams:
        """Parse the content of a file.

        Raises:
            ValueError: the content is not a tree of n-grams of the vocabulary. The message gives the cause.
        """
        from safetensors import SafetensorError, deserialize

        try:
            found = dict(deserialize(data))
        except SafetensorError:
            raise ValueError("not in the format of safetensors") from None
        kinds = {"ids": "U16", "shares": "U8", "children": "U16"}
        if found.keys() != kinds.keys():
            raise ValueError("must hold ids, shares and children")
        arrays = []
        for name, kind in kinds.items():
            if found[name]["dtype"] != kind or len(found[name]["shape"]) != 1:
                raise ValueError(f"{name} must be one row of {kind}")
            arrays.append(np.frombuffer(found[name]["data"], {"U8": "u1", "U16": "<u2"}[kind]))
        tree = cls(*arrays)
        tree._check(vocab_size)
        return tree

    def _check(self, vocab_size: int) -> None:
        N, M = len(self.ids), len(self.children)
        if len(self.shares) != N or not 1 <= M <= N or 1 + int(self.children.sum(dtype=np.int64)) != N:
            raise ValueError("ids, shares and children do not belong together")
        first = self.first_child
        if (first[:M] <= np.arange(M)).any():
            raise ValueError("children must follow their parents")
        if self.ids.max() >= vocab_size:
            raise ValueError(f"ids must be below {vocab_size}, got {self.ids.max()}")
        is_sibling = np.ones(N, bool)  # True if the node and the node before it have the same parent
        is_sibling[0] = False
        is_sibling[first[:M][self.children > 0]] = False
        if (np.diff(self.ids.astype(np.int64))[is_sibling[1:]] <= 0).any():
            raise ValueError("the children of a node must be in the order of their ids")

    @functools.cached_property
    def first_child(self) -> np.ndarray:
        """(N + 1,) int32: the children of node i are first_child[i] … first_child[i + 1] − 1."""
        counts = np.zeros(len(self.ids) + 1, np.int32)
        counts[1 : len(self.children) + 1] = self.children
        return (1 + np.cumsum(counts)).astype(np.int32)

    def probabilities(self, context: Sequence[int], vocab_size: int) -> np.ndarray:
        """Return the probability of each id after a context, (V,) float64.

        The children of the longest n-gram that ends the context get their shares. The children of the next shorter one
        get their shares of the rest, and so on. native.cpp implements the same rule.
        """
        p, rest = np.zeros(vocab_size), 1.0
        for length in range(min(ORDER, len(context)), -1, -1):
            node = self._find(context[len(context) - length :])
            if node is None:
                continue
            children = slice(self.first_child[node], self.first_child[node + 1])
            shares = 2.0 ** (-self.shares[children].astype(np.float64) / STEPS)
            p[self.ids[children]] += rest * shares
            rest *= max(0.0, 1.0 - shares.sum())
        return p + (rest + REST) / vocab_size

    def _find(self, ngram: Sequence[int]) -> int | None:
        node = 0
        for id in ngram:
            first, end = self.first_child[node], self.first_child[node + 1]
            at = first + int(np.searchsorted(self.ids[first:end], id))
            if at == end or self.ids[at] != id:
                return None
            node = at
        return node
