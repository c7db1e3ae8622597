"""Counts of the training text: a checkpoint's second expert, and the weights that mix it with the network.

The counts are those of modified Kneser-Ney smoothing (Chen & Goodman 1999, "An empirical study of smoothing techniques
for language modeling"), interpolated. After a history, the contexts are its last 0, 1, … order − 1 characters. From the
longest known context to the empty one:

    p(w | context) = share(context, w) + rest(context) · p(w | context without its oldest character)

Below the contexts of one character stands `base`, a distribution of its own. A context begins at the beginning of the
text or at the symbol that ends records, as a prompt does. The unknown symbol is a
symbol like any other.

The mixture is p = (1 − w) · network + w · counts, in float64. The weight w depends on the length of the longest known
context and on its rest: a small rest belongs to a context that was frequent, with few different characters after it.

The n-grams that save least are pruned until the file is small enough. A tree holds the contexts, the newest character
first. A walk from the root along a history, at most order − 1 steps, finds all its contexts, so no state has to follow
a sequence from one character to the next.

The file is in safetensors format, under a name that no loader of weights looks for. It holds N contexts, the shorter
ones first, the children of a context in the order of their oldest characters. Context 0 is the empty one, the root. Ids
and numbers have type uint8 if V < 256, uint16 if V < 65,536, otherwise uint32.

    version    (1,) uint8
    weights    (order, SIZES) float64
    base       (V,) uint32    the probability of each id, times 2^32; their sum is 2^32
    older      (N,) id        the oldest character of each context; 0 for the root
    children   (M,) number    the number of contexts that are one character longer, of each of the first M contexts;
                              the others have none
    followers  (N,) number    the number of characters with a share; 0 for the root
    rests      (N,) uint8     code of the rest; a context without followers has code 0 and rest 1
    ids        (E,) id        the followers of the first context, of the second context, …, each in order
    shares     (E,) uint8     code of the share; the largest share of each context has code 0

    rest(q)  = 1 / (1 + 2^((q − 64) / 12))
    share(q) = (1 − rest) · S(q) / the sum of S over the context's followers, S(q) = round(2^(24 − q / 16))
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

COUNTS = "counts.bin"
VERSION = 1
ORDER = 8  # characters of the longest n-grams: the character to predict and seven before it
MAX_ORDER = 8
MAX_BYTES = 4_000_000
MAX_COUNTED = 20_000_000  # characters; of a longer text, a sample is counted
PARTS = 64  # the sample of a text is this many parts at equal distances
SIZES = 3  # classes of contexts of one length, by their rests
REST_LIMITS = (0.15, 0.45)  # between the classes
ROUND = 0.7  # a round of pruning leaves this part of the bytes
PRIOR = 30  # observations that a weight's prior counts for
BASE = 1 << 32
REST_CODES = 1 / (1 + 2.0 ** ((np.arange(256) - 64) / 12))
SHARE_CODES = np.rint(2.0 ** (24 - np.arange(256) / 16))


@dataclass(frozen=True, eq=False)
class Counts:
    """The tree of one text, as the module describes. Rests and shares are probabilities, not codes.

    `count` returns exact probabilities, and `load` the rounded ones of a file. Fit weights to what `load` returns.
    """

    weights: np.ndarray  # (order, SIZES) float64, in [0, 1]; all 0 until they are fitted
    base: np.ndarray  # (V,) float64
    older: np.ndarray
    children: np.ndarray
    followers: np.ndarray
    rests: np.ndarray  # (N,) float64
    ids: np.ndarray
    shares: np.ndarray  # (E,) float64

    @property
    def order(self) -> int:
        return len(self.weights)

    @property
    def vocab_size(self) -> int:
        return len(self.base)

    @functools.cached_property
    def is_mixed(self) -> bool:
        """Whether the counts change the logits. If not, they serve only to guess characters."""
        return bool(self.weights.any())

    @functools.cached_property
    def first_child(self) -> np.ndarray:
        """(N + 1,) int32: the children of context i are first_child[i] … first_child[i + 1] − 1."""
        first = np.full(len(self.older) + 1, len(self.older), np.int32)
        first[0] = 1
        np.cumsum(self.children, out=first[1 : len(self.children) + 1])
        first[1 : len(self.children) + 1] += 1
        return first

    @functools.cached_property
    def first_follower(self) -> np.ndarray:
        """(N + 1,) int32: the followers of context i are first_follower[i] … first_follower[i + 1] − 1."""
        first = np.zeros(len(self.older) + 1, np.int32)
        np.cumsum(self.followers, out=first[1:])
        return first

    @functools.cached_property
    def _context_keys(self) -> np.ndarray:
        """(N − 1,) int64 in order: the parent of each context but the root, times V, plus its oldest character."""
        parents = np.repeat(np.arange(len(self.children)), self.children)
        return parents * self.vocab_size + self.older[1:]

    @functools.cached_property
    def _follower_keys(self) -> np.ndarray:
        """(E,) int64 in order: the context of each follower, times V, plus the follower."""
        return np.repeat(np.arange(len(self.older)), self.followers) * self.vocab_size + self.ids

    @functools.cached_property
    def _sizes(self) -> np.ndarray:
        """(N,) int64: the class of each context's rest."""
        return np.digitize(self.rests, REST_LIMITS)

    def next(self, history: Sequence[int]) -> tuple[np.ndarray, float]:
        """Return the distribution after a history, (V,) float64, and the weight of it in the mixture.

        This is the definition; the other forms compute the same.
        """
        contexts, context = [], 0
        for id in reversed(history[-(self.order - 1) :]):
            first, end = self.first_child[context], self.first_child[context + 1]
            context = first + int(np.searchsorted(self.older[first:end], id))
            if context == end or self.older[context] != id:
                break
            contexts.append(context)
        p, rest = np.zeros(self.vocab_size), 1.0
        length, longest = 0, 0
        for i, context in reversed(list(enumerate(contexts, 1))):
            if self.followers[context]:
                if not length:
                    length, longest = i, context
                followers = slice(self.first_follower[context], self.first_follower[context + 1])
                p[self.ids[followers]] += rest * self.shares[followers]
                rest *= self.rests[context]
        return p + rest * self.base, float(self.weights[length, self._sizes[longest]])

    def walk(self, histories: np.ndarray) -> np.ndarray:
        """Return the context of each length ≥ 1 that ends each history, (order − 1, T) int64; -1: it is not known.

        histories: (order − 1, T) ids, the newest first; -1: the history is shorter.
        """
        found = np.full(histories.shape, -1, np.int64)
        context = np.zeros(histories.shape[1], np.int64)
        for contexts, id in zip(found, histories, strict=True):
            places = np.flatnonzero((context >= 0) & (id >= 0))
            keys = context[places] * self.vocab_size + id[places]
            numbers = np.searchsorted(self._context_keys, keys)
            is_known = numbers < len(self._context_keys)
            is_known[is_known] = self._context_keys[numbers[is_known]] == keys[is_known]
            contexts[places[is_known]] = 1 + numbers[is_known]
            context = contexts
        return found

    def _classes(self, contexts: np.ndarray) -> np.ndarray:
        """Return the place in `weights` of each history, length · SIZES + size: (T,) int64."""
        classes = np.full(contexts.shape[1], self._sizes[0])
        for length, context in enumerate(contexts, 1):
            is_known = (context >= 0) & (self.followers[context] > 0)
            classes[is_known] = length * SIZES + self._sizes[context[is_known]]
        return classes

    def after(self, histories: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the distribution after each history, (T, V) float64, and the weight of each in the mixture, (T,).

        histories: (order − 1, T) ids, the newest first; -1: the history is shorter.
        """
        contexts = self.walk(histories)
        T, V = contexts.shape[1], self.vocab_size
        p, rest = np.zeros(T * V), np.ones(T)
        for context in contexts[::-1]:
            rows = np.flatnonzero(context >= 0)
            known = context[rows]
            numbers = self.followers[known].astype(np.int64)
            ends = np.cumsum(numbers)
            places = np.arange(ends[-1] if len(ends) else 0)
            places += np.repeat(self.first_follower[known] - (ends - numbers), numbers)
            at = np.repeat(rows, numbers)
            p[at * V + self.ids[places]] += rest[at] * self.shares[places]
            rest[rows] *= self.rests[known]
        return p.reshape(T, V) + rest[:, None] * self.base, self.weights.ravel()[self._classes(contexts)]

    def histories(self, ids: np.ndarray) -> np.ndarray:
        """Return the history up to each character of a text (T,), as `after` takes them: (order − 1, T)."""
        histories = np.full((self.order - 1, len(ids)), -1, np.int64)
        for age in range(min(self.order - 1, len(ids))):
            histories[age, age:] = ids[: len(ids) - age]
        return histories

    def probabilities(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the probability of each character of a text but the first, and the place in `weights` of its history.

        It takes much less time than `after`. (T,) ids -> (T − 1,) float64, (T − 1,) int64.
        """
        contexts = self.walk(self.histories(ids[:-1]))
        targets = ids[1:].astype(np.int64)
        p = self.base[targets]
        for context in contexts:
            places = np.flatnonzero(context >= 0)
            known = context[places]
            keys = known * self.vocab_size + targets[places]
            numbers = np.searchsorted(self._follower_keys, keys)
            has_share = numbers < len(self.ids)
            has_share[has_share] = self._follower_keys[numbers[has_share]] == keys[has_share]
            p[places] *= self.rests[known]
            p[places[has_share]] += self.shares[numbers[has_share]]
        return p, self._classes(contexts)

    def fitted(self, network: np.ndarray, counts: np.ndarray, classes: np.ndarray) -> Counts:
        """Return the same counts with the weights that predict a text best.

        Expectation maximisation finds the maximum of each class, which has only one. A class with few observations
        stays near the weight of all: its prior is that of PRIOR more observations.

        Neither the network nor the counts may have learned from the text, or the weights trust them too much: fitted on
        a part of the training split, left out of the counts alone, they lose most of what the mixture gains. About
        5,000 characters are enough.

        network, counts: (n,) the probability of each character by either expert. classes: (n,), as `probabilities`
        returns them.
        """
        everything = _maximum(network, counts, np.zeros_like(classes), np.array([0.5]))
        weights = _maximum(network, counts, classes, np.full(self.weights.size, everything[0]))
        return dataclasses.replace(self, weights=weights.reshape(self.weights.shape))

    @classmethod
    def count(
        cls,
        ids: np.ndarray,
        vocab_size: int,
        *,
        end: int | None = None,
        order: int = ORDER,
        max_bytes: int | None = MAX_BYTES,
    ) -> Counts:
        """Count a text, or a split of records, which begins with their end symbol.

        end: the id that ends records. max_bytes: the size of the file; None:
        prune nothing.
        """
        if not 2 <= order <= MAX_ORDER:
            raise ValueError(f"order must be 2 to {MAX_ORDER}, got {order}")
        fixed = 768 + 8 * order * SIZES + 4 * vocab_size  # bytes without contexts
        if max_bytes is not None and max_bytes < fixed:
            raise ValueError(f"max_bytes must be at least {fixed:,} for {vocab_size:,} ids, got {max_bytes:,}")
        estimate = _Estimate(sample(ids, end), vocab_size, end, order)
        if max_bytes is not None:
            estimate.prune(max_bytes - fixed)
        return estimate.tree()

    def dump(self) -> bytes:
        from safetensors.numpy import save

        kind = _id_type(self.vocab_size)
        base = np.maximum(np.floor(self.base * BASE), 1).astype(np.int64)
        base[base.argmax()] += BASE - base.sum()
        rests, shares = self.codes
        return save(
            {
                "version": np.array([VERSION], np.uint8),
                "weights": self.weights,
                "base": base.astype(np.uint32),
                "older": self.older.astype(kind),
                "children": self.children.astype(kind),
                "followers": self.followers.astype(kind),
                "rests": rests,
                "ids": self.ids.astype(kind),
                "shares": shares,
            }
        )

    @functools.cached_property
    def codes(self) -> tuple[np.ndarray, np.ndarray]:
        """The codes of the rests (N,) and of the shares (E,), uint8."""
        has_followers = self.followers > 0
        rests = np.where(has_followers, self.rests, 0.5)
        rest_codes = np.clip(np.rint(64 + 12 * np.log2((1 - rests) / rests)), 0, 255)
        rest_codes[~has_followers] = 0
        largest = np.repeat(_reduced(np.maximum, self.shares, self.followers), self.followers)
        share_codes = np.minimum(np.rint(16 * np.log2(largest / self.shares)), 255)
        return rest_codes.astype(np.uint8), share_codes.astype(np.uint8)

    @classmethod
    def load(cls, data: bytes, vocab_size: int) -> Counts:
        """Parse the content of a file.

        Raises:
            ValueError: the content is not a tree of counts of the vocabulary. The message gives the cause.
        """
        from safetensors import SafetensorError, deserialize

        try:
            found = {name: (about["dtype"], about["shape"], about["data"]) for name, about in deserialize(data)}
        except SafetensorError:
            raise ValueError("not in the format of safetensors") from None
        kind = {1: "U8", 2: "U16", 4: "U32"}[_id_type(vocab_size)().itemsize]
        kinds = {
            "version": "U8", "weights": "F64", "base": "U32", "older": kind, "children": kind, "followers": kind,
            "rests": "U8", "ids": kind, "shares": "U8",
        }  # fmt: skip
        if found.keys() != kinds.keys():
            raise ValueError(f"must hold {', '.join(kinds)}")
        arrays = {}
        for name, expected in kinds.items():
            dtype, shape, content = found[name]
            if dtype != expected or len(shape) != 1 + (name == "weights"):
                raise ValueError(f"{name} must be {'a table' if name == 'weights' else 'one row'} of {expected}")
            of = {"U8": "u1", "U16": "<u2", "U32": "<u4", "F64": "<f8"}[dtype]
            arrays[name] = np.frombuffer(content, of).reshape(shape)
        if arrays["version"].tolist() != [VERSION]:
            raise ValueError(f"version must be {VERSION}, got {arrays['version'][:8].tolist()}")
        del arrays["version"]
        _check(vocab_size, **arrays)
        has_followers = arrays["followers"] > 0
        rests = np.where(has_followers, REST_CODES[arrays["rests"]], 1.0)
        steps = SHARE_CODES[arrays["shares"]]
        sums = np.where(has_followers, _reduced(np.add, steps, arrays["followers"]), 1.0)  # exact: all are integers
        shares = np.repeat((1 - rests) / sums, arrays["followers"]) * steps
        return cls(**arrays | {"base": arrays["base"] / BASE, "rests": rests, "shares": shares})


def mixed(log_network: np.ndarray, counts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the probabilities of the mixture, (…, V) float64.

    log_network: (…, V) log-probabilities. counts: (…, V). weights: (…).
    """
    w = np.asarray(weights)[..., None]
    return (1 - w) * np.exp(log_network.astype(np.float64)) + w * counts


def mixed_logits(logits: np.ndarray, counts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return ln of the probabilities of the mixture, (T, V) float64, NaN for rows that are not finite.

    A probability is at least the smallest normal number, so no logit is infinite.

    logits: (T, V) float64, of the network. counts: (T, V). weights: (T,).
    """
    with np.errstate(all="ignore"):
        z = np.where(np.isfinite(logits).all(axis=1, keepdims=True), logits, np.nan)
        z = z - z.max(axis=1, keepdims=True)
        log_network = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
        found: np.ndarray = np.log(np.maximum(mixed(log_network, counts, weights), np.finfo(np.float64).tiny))
    return found


def sample(ids: np.ndarray, end: int | None) -> np.ndarray:
    """Return the part of a text that is counted, at most MAX_COUNTED characters.

    It is the first records, because records are shuffled, or parts of a text at equal distances, joined.
    """
    if len(ids) <= MAX_COUNTED:
        return ids
    if end is not None:
        return ids[:MAX_COUNTED]
    size = MAX_COUNTED // PARTS
    starts = np.linspace(0, len(ids) - size, PARTS).astype(np.int64)
    return np.concatenate([ids[start : start + size] for start in starts.tolist()])


def discounts(counts: np.ndarray) -> np.ndarray:
    """Return the discounts of counts 0, 1, 2 and ≥ 3, after Chen & Goodman (1999): (4,) float64.

    If too few n-grams have small counts to estimate three discounts, all are the one discount of Kneser & Ney (1995).
    If too few have the counts 1 and 2, the discount is 0.5.
    """
    n1, n2, n3, n4 = (int(np.count_nonzero(counts == count)) for count in (1, 2, 3, 4))
    if not n1 or not n2:
        return np.array([0, 0.5, 0.5, 0.5])
    y = n1 / (n1 + 2 * n2)
    if n3 and n4:
        three = np.array([0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
        if three[1:].min() >= 1e-3:  # otherwise a context could have no rest
            return three
    return np.array([0, y, y, y])


@dataclass
class _Level:
    """The n-grams of one length in a text. An n-gram's number is its place in the arrays."""

    contexts: np.ndarray  # (n,) int32, the number of the n-gram without its last character, one level below
    suffixes: np.ndarray  # (n,) int32, the number of the n-gram without its first character, one level below
    ids: np.ndarray  # (n,) the last character
    occurrences: np.ndarray  # (n,) int32; of single characters, 0
    initial: np.ndarray  # the number of each n-gram with nothing before it, once for each occurrence
    num_contexts: int


class _Estimate:
    """The n-grams of a text, those that are kept, and their probabilities.

    The count of a longest n-gram is the number of its occurrences. A shorter n-gram counts the different characters
    before it, and its occurrences at a beginning. Where the n-gram with the character before it is pruned, the shorter
    one counts all that the longer one counted (revised Kneser pruning: Siivola et al. 2007, "On growing and pruning
    Kneser-Ney smoothed n-gram models"). So shorter contexts learn the counts that pruned contexts lose.
    """

    def __init__(self, ids: np.ndarray, vocab_size: int, end: int | None, order: int):
        self.vocab_size = vocab_size
        self.levels = _levels(ids, vocab_size, end, order)
        self.kept = [np.ones(len(level.ids), bool) for level in self.levels]
        self.discounts = [discounts(counts) for counts in self._counts()]
        self._update()

    def _counts(self) -> list[np.ndarray]:
        counts = [self.levels[-1].occurrences]
        for level, kept, below in zip(self.levels[:0:-1], self.kept[:0:-1], self.levels[-2::-1], strict=True):
            passed = np.bincount(level.suffixes, np.where(kept, 1, counts[-1]), len(below.ids)).astype(np.int32)
            passed += np.bincount(below.initial, minlength=len(below.ids)).astype(np.int32)
            counts.append(passed)
        return counts[::-1]

    def _update(self) -> None:
        """Compute the share of each n-gram, also if it is pruned, the rest of each context, and p of each n-gram."""
        self.shares: list[np.ndarray] = []
        self.rests: list[np.ndarray] = []
        self.p: list[np.ndarray] = []
        for level, kept, counts, taken in zip(self.levels, self.kept, self._counts(), self.discounts, strict=True):
            totals = np.bincount(level.contexts, counts, level.num_contexts)
            shares = np.maximum(counts - taken[np.minimum(counts, 3)], 0) / np.maximum(totals, 1)[level.contexts]
            given = np.where(kept, shares, 0)
            rests = 1 - np.bincount(level.contexts, given, level.num_contexts)
            lower = self.p[-1][level.suffixes] if self.p else 1 / self.vocab_size
            self.shares.append(shares)
            self.rests.append(rests)
            self.p.append(given + rests[level.contexts] * lower)

    def _savings(self, n: int) -> np.ndarray:
        """Return about how many nats of the text each n-gram of a level saves: (n,) float32; 0 if it is pruned.

        It is the divergence between the context's distributions with and without the n-gram (Stolcke 1998), with the
        gain of the other characters in the first order.
        """
        level, shares, p = self.levels[n], self.shares[n], self.p[n]
        occurrences = np.bincount(level.contexts, level.occurrences, level.num_contexts)
        without = (self.rests[n][level.contexts] + shares) * self.p[n - 1][level.suffixes]
        savings = occurrences[level.contexts] * (p * np.log(p / without) - (p - without))
        return np.where(self.kept[n], np.maximum(savings, 1e-30), 0).astype(np.float32)

    def prune(self, max_bytes: int) -> None:
        """Keep the n-grams that save most and, with their contexts, take at most max_bytes in a file."""
        id_bytes = _id_type(self.vocab_size)().itemsize
        goal = np.inf
        while True:
            savings = [self._savings(n) for n in range(1, len(self.levels))]
            needs = self._needs(savings)
            spent = _Spent(
                (savings, id_bytes + 1),
                (needs[:-1], 3 * id_bytes + 1),
                (needs[-1:], 2 * id_bytes + 1),  # the longest contexts have no children
            )
            if spent.above(0) <= max_bytes:
                return
            goal = max(max_bytes, ROUND * min(goal, spent.above(0)))
            threshold = spent.threshold(goal)
            for n, saving in enumerate(savings, 1):
                self.kept[n] = saving > threshold
            self._update()

    def _needs(self, savings: list[np.ndarray]) -> list[np.ndarray]:
        """Return the largest saving of the n-grams that need each context, for each length of contexts from 1.

        They are the n-grams of the context, and of longer contexts that end in it.
        """
        needs: list[np.ndarray] = []
        for n in range(len(self.levels) - 1, 0, -1):
            need = np.zeros(self.levels[n].num_contexts, np.float32)
            np.maximum.at(need, self.levels[n].contexts, savings[n - 1])
            if needs:
                np.maximum.at(need, self.levels[n].suffixes, needs[-1])
            needs.append(need)
        return needs[::-1]

    def tree(self) -> Counts:
        needs = self._needs([kept.astype(np.float32) for kept in self.kept[1:]])
        V, N = self.vocab_size, 1
        older, parents, followers = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
        ids: list[np.ndarray] = []
        rests, shares = [np.ones(1)], []
        firsts = np.arange(V)  # the first character of each n-gram of the length of the contexts
        number: np.ndarray = np.zeros(1, np.int64)  # of each context of the length before
        for n, need in enumerate(needs, 1):
            level, shorter = self.levels[n], self.levels[n - 1]
            if n > 1:
                firsts = firsts[shorter.contexts]
            grams = np.flatnonzero(need)
            keys, grams = sort_keys(number[shorter.suffixes[grams]] * V + firsts[grams], grams)
            number = np.full(level.num_contexts, -1)
            number[grams] = N + np.arange(len(grams))
            parents.append(keys // V)
            older.append(keys % V)
            rests.append(self.rests[n][grams])
            kept = np.flatnonzero(self.kept[n])
            keys, kept = sort_keys(number[level.contexts[kept]] * V + level.ids[kept], kept)
            followers.append(np.bincount(keys // V - N, minlength=len(grams)))
            ids.append(keys % V)
            shares.append(self.shares[n][kept])
            N += len(grams)
        return Counts(
            np.zeros((len(self.levels), SIZES)), self.p[0], np.concatenate(older),
            np.bincount(np.concatenate(parents), minlength=1), np.concatenate(followers), np.concatenate(rests),
            np.concatenate(ids), np.concatenate(shares),
        )  # fmt: skip


class _Spent:
    """The bytes of the n-grams and contexts of which more than a threshold is saved.

    parts: what each n-gram or context saves, and its bytes. The first part is that of the n-grams.
    """

    def __init__(self, *parts: tuple[list[np.ndarray], int]):
        self._parts = [(np.sort(np.concatenate([np.zeros(1, np.float32), *values])), size) for values, size in parts]

    def above(self, threshold: float) -> int:
        value = np.float32(threshold)
        return sum(size * (len(part) - int(np.searchsorted(part, value, "right"))) for part, size in self._parts)

    def threshold(self, max_bytes: float) -> float:
        """Return the smallest saving of an n-gram above which at most max_bytes are spent."""
        grams = self._parts[0][0]
        low, high = 0, len(grams) - 1
        while low < high:
            middle = (low + high) // 2
            if self.above(grams[middle]) <= max_bytes:
                high = middle
            else:
                low = middle + 1
        return float(grams[low])


def _levels(ids: np.ndarray, V: int, end: int | None, order: int) -> list[_Level]:
    """Return the n-grams of each length from 1 to order."""
    depths = _depths(ids, end, order)
    grams = ids.astype(np.int32)  # (T,) the number of the n-gram that each character ends; -1 if there is none
    none = np.zeros(V, np.int32)
    levels = [_Level(none, none, np.arange(V), none, none[:0], 1)]
    for n in range(2, order + 1):
        places = 1 + np.flatnonzero(depths[:-1] >= n - 1)
        keys = grams[places - 1].astype(np.int64)
        keys *= V
        keys += ids[places]
        keys, places = sort_keys(keys, places)
        is_first = np.ones(len(keys), bool)
        np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
        starts = np.flatnonzero(is_first)
        number = np.cumsum(is_first, dtype=np.int32) - 1
        keys = keys[starts]
        level = _Level(
            (keys // V).astype(np.int32), grams[places[starts]], (keys % V).astype(ids.dtype),
            np.diff(starts, append=len(places)).astype(np.int32), number[depths[places - 1] == n - 1],
            len(levels[-1].ids),
        )  # fmt: skip
        levels.append(level)
        grams = np.full(len(ids), -1, np.int32)
        grams[places] = number
    return levels


def _depths(ids: np.ndarray, end: int | None, order: int) -> np.ndarray:
    """Return the number of characters from the beginning of a text or record to each, at most order: (T,) uint8."""
    depths = np.full(len(ids), order, np.uint8)
    begins = np.zeros(len(ids), bool)
    begins[:1] = True
    if end is not None:
        begins |= ids == end
    places = np.flatnonzero(begins)
    for depth in range(order - 1, 0, -1):  # the nearest beginning is written last
        here = places + (depth - 1)
        depths[here[here < len(ids)]] = depth
    return depths


def sort_keys(keys: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return keys (n,) int64 ≥ 0 in order, and their places (n,) int64 ≥ 0. Overwrites the arguments."""
    shift = int(places.max(initial=0)).bit_length()
    if int(keys.max(initial=0)).bit_length() + shift > 63:
        order = np.argsort(keys)
        return keys[order], places[order]
    keys <<= shift  # to sort each key with its place takes a third of the time of argsort
    keys |= places
    keys.sort()
    np.bitwise_and(keys, (1 << shift) - 1, out=places)
    keys >>= shift
    return keys, places


def _maximum(network: np.ndarray, counts: np.ndarray, classes: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Return the weight of each class that maximises its likelihood times its prior, (len(prior),) float64."""
    numbers = np.bincount(classes, minlength=len(prior))
    weights = prior
    for _ in range(1000):
        w = weights[classes]
        share = w * counts / ((1 - w) * network + w * counts)
        last = weights
        weights = (np.bincount(classes, share, len(prior)) + PRIOR * prior) / (numbers + PRIOR)
        if np.abs(weights - last).max() < 1e-7:
            break
    return weights


def _id_type(vocab_size: int) -> type[np.unsignedinteger]:
    return np.uint8 if vocab_size < 1 << 8 else np.uint16 if vocab_size < 1 << 16 else np.uint32


def _reduced(function: np.ufunc, values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Reduce consecutive groups of values: (n,) float64; 0 for an empty group."""
    found, lengths = np.zeros(len(lengths)), lengths.astype(np.int64)
    has_values = lengths > 0
    if has_values.any():
        found[has_values] = function.reduceat(values, (np.cumsum(lengths) - lengths)[has_values])
    return found


def _check(
    vocab_size: int,
    weights: np.ndarray,
    base: np.ndarray,
    older: np.ndarray,
    children: np.ndarray,
    followers: np.ndarray,
    rests: np.ndarray,
    ids: np.ndarray,
    shares: np.ndarray,
) -> None:
    """Raise ValueError unless the arrays of a file are a tree of counts of the vocabulary."""
    order, N, M, E = len(weights), len(older), len(children), len(ids)
    if not 2 <= order <= MAX_ORDER or weights.shape[1] != SIZES:
        raise ValueError(f"weights must have 2 to {MAX_ORDER} rows of {SIZES}, got {weights.shape}")
    if not ((weights >= 0) & (weights <= 1)).all():  # False for NaN, too
        raise ValueError("weights must be from 0 to 1")
    if len(base) != vocab_size or not base.all() or int(base.sum(dtype=np.uint64)) != BASE:
        raise ValueError(f"base must have {vocab_size} numbers ≥ 1 whose sum is 2^32")
    if not (
        1 <= M <= N == len(followers) == len(rests)
        and len(shares) == E == int(followers.sum(dtype=np.uint64))
        and int(children.sum(dtype=np.uint64)) == N - 1
    ):
        raise ValueError("the contexts, children and followers do not belong together")
    first = 1 + np.cumsum(children, dtype=np.int64)  # after the children of each context
    if (np.concatenate([[1], first[:-1]]) <= np.arange(M)).any():
        raise ValueError("children must follow their parents")
    end = 1  # of the contexts of one length
    for _ in range(order - 1):
        end = int(first[min(end, M) - 1])
    if end != N:
        raise ValueError(f"a context must have at most {order - 1} characters")
    if older[0] or followers[0]:
        raise ValueError("the first context must be the root")
    for name, values, lengths in (("children", older[1:], children), ("followers", ids, followers)):
        if int(values.max(initial=0)) >= vocab_size:
            raise ValueError(f"{name} must have ids below {vocab_size}, got {values.max()}")
        starts = np.cumsum(lengths, dtype=np.int64)[:-1]
        is_brother = np.ones(len(values) + 1, bool)  # of the one before
        is_brother[0] = is_brother[starts] = False
        if (np.diff(values.astype(np.int64)) <= 0)[is_brother[1 : len(values)]].any():
            raise ValueError(f"the {name} of a context must be in the order of their ids")
    if _reduced(np.minimum, shares, followers).any() or rests[followers == 0].any():
        raise ValueError("the largest share of a context, and the rest of a context without followers, must be code 0")
