"""What runs a model over cache slots, behind one interface; backends.py chooses the backend.

    native   native.py: a CPU, by the library built from native.cpp
    cuda     cuda.py: an NVIDIA GPU, by CUDA graphs
    torch    eager.py: any device

A backend holds the tensors: weights, cache and the state of sampling. The engine above it sees slots, ids and steps.
Loads without torch, and imports no backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from service.constrain.automaton import Guide
from service.model.config import GPTConfig
from service.model.params import SamplingParams
from service.wire import Logprobs

if TYPE_CHECKING:
    pass

NONE, FAILED = -1, -2  # in Outcome.ids: nothing was chosen; the logits were not finite


class Report(NamedTuple):
    """What to report beside the log-probability of each id: those of the likeliest, or of `ids`."""

    likeliest: int = 0
    ids: tuple[int, ...] = ()

    def num_alternatives(self, vocab_size: int) -> int:
        return len(self.ids) or min(self.likeliest, vocab_size)


class Piece(NamedTuple):
    """A piece of a prompt to run."""

    slot: int
    ids: np.ndarray  # (T,) int32, T ≥ 1
    choose: bool = False  # the prompt is complete: choose the first character after it
    guide: Guide | None = None  # says which ids may be chosen
    report: Report | None = None  # of the targets, then of the chosen id
    targets: np.ndarray | None = None  # (T,) int32: the id after each, to be reported; NONE: not to be
    sequence: Any = None  # the engine's, whose prompt it is
    is_last: bool = True  # of its prompt

    @property
    def num_reported(self) -> int:
        return self.choose + (0 if self.targets is None else int(np.count_nonzero(self.targets != NONE)))

    def report_of(self, logits: np.ndarray, chosen: int) -> Logprobs:
        """The report, from logits (T or more, V) float64."""
        assert self.report is not None
        targets = np.full(len(self.ids), NONE, np.int32) if self.targets is None else self.targets.copy()
        if self.choose:
            targets[-1] = max(0, chosen)
        where = np.flatnonzero(targets != NONE)
        return report_of(logits[where], targets[where], self.report)


@dataclass
class Outcome:
    """What a forward over B rows gave."""

    ids: np.ndarray  # (B, K) int32; NONE past a row's steps; FAILED where logits are not finite, then anything
    reports: Mapping[int, Logprobs]  # of each row that wants one, NaN where logits are not finite; others may follow
    seconds: float = 0.0  # on the device; 0: as long as the call took

    def __call__(self) -> Outcome:
        return self  # as that of a forward which is still under way on a device: calling it waits


def report_of(logits: np.ndarray, ids: np.ndarray | list[int], report: Report) -> Logprobs:
    """Of `ids` (N,) under logits (N, V) float64, NaN where they are not finite; native.cpp has its own."""
    with np.errstate(invalid="ignore"):
        z = np.where(np.isfinite(logits).all(axis=1, keepdims=True), logits, np.nan)
        z = z - z.max(axis=1, keepdims=True)
        logprobs = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    k, row = report.num_alternatives(logits.shape[1]), np.arange(len(logits))[:, None]
    if report.ids:
        top_ids = np.tile(report.ids, (len(logits), 1))
    else:
        top_ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]  # of equals the lower id first
    columns = (logprobs[row[:, 0], ids], top_ids.astype(np.uint32), logprobs[row, top_ids])
    return Logprobs(*(bytearray(column.tobytes()) for column in columns))


class Runner(ABC):
    """A model over cache slots 0 … slots − 1.

    Of each slot it keeps: the cache, the id that the next decode step feeds (the last chosen one), the sampling
    parameters, the number of characters chosen (the index of the next draw) and what the penalties count. A row's
    arithmetic does not depend on what else is in the batch.
    """

    backend: str  # "native" | "cuda" | "torch"
    dtype: str  # "float32" | "float64" | "bfloat16"
    config: GPTConfig
    slots: int
    # Forwards run beside the host, in the order in which they were asked for: outcomes are to be collected after the
    # next ones have been launched.
    is_async: bool = False
    # Pieces of a prompt begin at multiples of this, and what was generated is not to be copied as part of a prompt: a
    # row's arithmetic depends on where its pieces begin, and on whether a character was prompt or answer.
    piece: int = 1
    # Whether a guided row may take several steps in a call. Else it takes one: each step's mask follows from the last
    # character, which the host must see.
    follows_guides: bool = False
    step_counts: Sequence[int] = range(1, 65)  # decode steps of a call that cost no more than they must, ascending

    @abstractmethod
    def start(self, slot: int, params: SamplingParams, prompt: Sequence[int], ends: Sequence[int] = ()) -> None:
        """Empty a slot for a new sequence. `prompt`: the whole one, which penalties count as seen.

        ends: ids after one of which a row need not choose more in a call, as its text is likely to end there.

        Raises:
            ValueError: an id of the prompt or of a bias is outside the vocabulary.
        """

    @abstractmethod
    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of source's cache become target's whole cache; what else slots hold stays.

        Possible while source's ring holds the last W of them: source has processed `length` to max(W, length)
        positions. (The next position sees one fewer, but of a copy a shorter copy may be taken.)
        """

    @abstractmethod
    def prefill(self, pieces: list[Piece]) -> Callable[[], Outcome]:
        """Run the next pieces of prompts; ids (B, 1). Calling what is returned waits for the outcome."""

    @abstractmethod
    def decode(
        self, slots: np.ndarray, steps: np.ndarray, guides: Mapping[int, Guide] = {}, reports: Mapping[int, Report] = {}
    ) -> Callable[[], Outcome]:
        """Choose `steps[b]` (≥ 1) further characters for the sequence in slots[b], each fed to the next step.

        slots (B,), in any order; K = steps.max(). guides and reports: by row; guides are left where they are, and
        a row has NONE after the character with which its guide ends the text, and may have it after one of its `ends`.
        """

    def is_lost(self, error: Exception) -> bool:
        """Whether after this error no further call can succeed: the process is to end, and be replaced."""
        return False

    def close(self) -> None:
        """Free what the backend holds outside Python."""
        return None


def allowed_by(guides: Mapping[int, Guide], shape: tuple[int, ...]) -> np.ndarray:
    """The ids that may be chosen next, (B, V) bool, by guides of some of the rows."""
    allowed = np.ones(shape, dtype=bool)
    for row, guide in guides.items():
        if (mask := guide.allowed()) is not None:
            allowed[row] = mask
    return allowed
