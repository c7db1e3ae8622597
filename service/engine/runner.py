"""The interface of the backends, which run a model over cache slots; backends.py chooses the backend.

    native   native.py: on a CPU, with the library built from native.cpp
    cuda     cuda.py: on an NVIDIA GPU, with CUDA graphs
    torch    eager.py: on any device

A backend holds the tensors: weights, cache and sampling state. The engine sees slots, ids and steps. This module loads
without torch and imports no backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from service.constrain.automaton import Guide
from service.model.config import GPTConfig
from service.model.counts import MAX_ORDER
from service.model.params import SamplingParams
from service.wire import Logprobs

HISTORY = MAX_ORDER - 1  # ids on which the counts' part of the mixture depends
NO_IDS = np.zeros(0, np.int32)
NONE, FAILED = -1, -2  # in Outcome.ids: no id was chosen; the logits were not finite


class Report(NamedTuple):
    """The alternatives to report with the log-probability of each id: the `likeliest` ids, or `ids` if given."""

    likeliest: int = 0
    ids: tuple[int, ...] = ()

    def num_alternatives(self, vocab_size: int) -> int:
        return len(self.ids) or min(self.likeliest, vocab_size)


class Piece(NamedTuple):
    """A piece of a prompt to run."""

    slot: int
    ids: np.ndarray  # (T,) int32, T ≥ 1
    choose: bool = False  # the prompt is complete: choose the first character after it
    guide: Guide | None = None  # restricts the ids that may be chosen
    report: Report | None = None  # what to report of the targets, then of the chosen id
    targets: np.ndarray | None = None  # (T,) int32: the id after each, if it is to be reported, else NONE
    sequence: Any = None  # the engine's sequence that has this prompt
    is_last: bool = True  # whether this is the last piece of its prompt
    before: np.ndarray = NO_IDS  # int32: the last ids of the text before the piece, HISTORY or all of them

    @property
    def num_reported(self) -> int:
        return self.choose + (0 if self.targets is None else int(np.count_nonzero(self.targets != NONE)))

    def report_of(self, logits: np.ndarray, chosen: int) -> Logprobs:
        """Return the report, computed from logits (T or more, V) float64."""
        assert self.report is not None
        targets = np.full(len(self.ids), NONE, np.int32) if self.targets is None else self.targets.copy()
        if self.choose:
            targets[-1] = max(0, chosen)
        where = np.flatnonzero(targets != NONE)
        return report_of(logits[where], targets[where], self.report)


@dataclass
class Outcome:
    """The outcome of a forward over B rows."""

    ids: np.ndarray  # (B, K) int32; NONE after a row's steps; FAILED if logits are not finite, then arbitrary ids
    reports: Mapping[int, Logprobs]  # by row that has a report; NaN if logits are not finite; more values may follow
    seconds: float = 0.0  # time on the device; 0: the call took as long as the forward

    def __call__(self) -> Outcome:
        return self  # callers wait for a forward by calling it; this one has ended


def report_of(logits: np.ndarray, ids: np.ndarray | list[int], report: Report) -> Logprobs:
    """Return log-probabilities of `ids` (N,) under logits (N, V) float64, NaN for rows that are not finite.

    native.cpp has its own implementation.
    """
    with np.errstate(invalid="ignore"):
        z = np.where(np.isfinite(logits).all(axis=1, keepdims=True), logits, np.nan)
        z = z - z.max(axis=1, keepdims=True)
        logprobs = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    k, row = report.num_alternatives(logits.shape[1]), np.arange(len(logits))[:, None]
    if report.ids:
        top_ids = np.tile(report.ids, (len(logits), 1))
    else:
        top_ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]  # among equals, the lower id comes first
    columns = (logprobs[row[:, 0], ids], top_ids.astype(np.uint32), logprobs[row, top_ids])
    return Logprobs(*(bytearray(column.tobytes()) for column in columns))


class Runner(ABC):
    """A model over cache slots 0 … slots − 1.

    For each slot, it keeps the cache, the id that the next decode step feeds (the last chosen one), the last ids, the
    sampling parameters, the number of characters chosen (the index of the next draw) and the counts for the penalties.
    A row's arithmetic does not depend on the other rows of the batch, except with backend "torch".

    If the checkpoint has counts with weights above 0 (see service/model/counts.py), all logits are those of the
    mixture, also for reports.
    """

    backend: str  # "native" | "cuda" | "torch"
    dtype: str  # "float32" | "float64" | "bfloat16"
    config: GPTConfig
    slots: int
    # Whether forwards run on a device while the host continues, in the order of the calls. The engine then launches the
    # next forwards before it collects the outcomes.
    is_async: bool = False
    # Pieces of a prompt begin at multiples of this. If it is above 1, generated characters must not be copied as part
    # of a prompt, because a row's arithmetic depends on where its pieces begin, and on whether a character was prompt
    # or answer.
    piece: int = 1
    # Whether a guided row may take several steps in a call. If not, it takes one, because the mask of each step depends
    # on the last character, which the host must see.
    follows_guides: bool = False
    step_counts: Sequence[int] = range(1, 65)  # numbers of decode steps that a call runs without waste, ascending

    @abstractmethod
    def start(
        self,
        slot: int,
        params: SamplingParams,
        prompt: Sequence[int],
        ends: Sequence[int] = (),
        written: Sequence[int] = (),
        position: int = 0,
    ) -> None:
        """Empty a slot for a sequence. Pieces of its prompt follow, then those of `written`.

        prompt: the whole prompt, which penalties count as seen.
        ends: ids that are likely to end the text. After one of them, a row need not choose more ids in the same call.
        written: ids that the sequence chose before, in another slot or process. The next draw has their number.
        position: of the first id that runs. If it is above 0, so many ids run before the first choice that the empty
            places of the cache before them influence no logits that are used.

        Raises:
            ValueError: an id of the prompt, of `written` or of a bias is outside the vocabulary.
        """

    @abstractmethod
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of source's cache to target; they become target's whole cache.

        The other state of both slots stays. Source must have processed `length` to max(W, length) positions, so that
        its ring holds the last W of the copied positions. (The next position sees only W − 1 of them, but a shorter
        prefix of the copy may be copied in turn.)
        """

    @abstractmethod
    def prefill(self, pieces: list[Piece]) -> Callable[[], Outcome]:
        """Run the next pieces of prompts. Return a function that waits for the outcome, with ids (B, 1)."""

    @abstractmethod
    def decode(
        self, slots: np.ndarray, steps: np.ndarray, guides: Mapping[int, Guide] = {}, reports: Mapping[int, Report] = {}
    ) -> Callable[[], Outcome]:
        """Choose `steps[b]` (≥ 1) further characters for the sequence in slots[b], each fed to the next step.

        Return a function that waits for the outcome, with ids (B, K) and K = steps.max(). After the character with
        which its guide ends the text, a row has NONE. After one of its `ends`, it may have NONE.

        slots: (B,), in any order.
        guides, reports: by row. The guides are not advanced.
        """

    def is_lost(self, error: Exception) -> bool:
        """Whether no further call can succeed after this error, so that the process must be replaced."""
        return False

    def close(self) -> None:
        """Free the memory and threads that the backend holds outside Python."""
        return None


def allowed_by(guides: Mapping[int, Guide], shape: tuple[int, ...]) -> np.ndarray:
    """Return the ids that may be chosen next, (B, V) bool. `guides` restrict some of the rows."""
    allowed = np.ones(shape, dtype=bool)
    for row, guide in guides.items():
        if (mask := guide.allowed()) is not None:
            allowed[row] = mask
    return allowed
