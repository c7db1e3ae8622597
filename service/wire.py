"""The messages between HTTP processes and inference processes. sockets.py carries them.

They hold ids and numbers, no text and no HTTP. This module loads without torch, and imports only sampling parameters.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from service.model.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]

_CONSUMER_SHIFT = 48


def sequence_id(consumer_id: int, number: int) -> int:
    """Return an id for an HTTP process's sequence that is unique among all HTTP processes."""
    return consumer_id << _CONSUMER_SHIFT | number


def consumer_of(id: int) -> int:
    """Return the HTTP process that submitted a sequence."""
    return id >> _CONSUMER_SHIFT


class Hello(msgspec.Struct, gc=False, array_like=True, tag=True):
    """The first frame of a connection, from an HTTP process. The worker echoes it when it reads."""

    consumer_id: int
    version: int = 0  # in the echo: id of the version of a checkpoint that the worker runs (catalog.py)


class Submit(msgspec.Struct, gc=False, array_like=True):
    """One sequence to run: a prompt, how to continue it, and what another worker has written of it before."""

    id: int
    prompt: list[int]  # at least 1 id
    max_tokens: int  # 0: the prompt is only scored
    sampling: SamplingParams
    timeout_seconds: float = math.inf
    stop: tuple[tuple[int, ...], ...] = ()  # the text ends before the first of these
    stop_pattern: bytes | None = None  # or before the first match of this packed Automaton
    include_stop: bool = False  # keep the stop at the end of the text
    min_tokens: int = 0  # no stop before this many ids
    constraint: bytes | None = None  # a packed Automaton that the text must match
    minimum: bytes | None = None  # its packed MinimumLength for min_tokens; None: every match is long enough
    may_leave: bool = True  # an id that leaves an accepting constraint ends the text; False: it is masked out
    # False: a candidate of an exact answer. All ids are allowed; the text ends before the first one that no match can
    # follow. Only its last delta has ids, if it matches.
    masks: bool = True
    constrains_first: bool = False  # the constraint covers only the first id
    logprobs: int | None = None  # report each id's log-probability and this many of the likeliest; None: report none
    logprob_ids: tuple[int, ...] = ()  # report the log-probabilities of these ids instead of the likeliest
    score_from: int | None = None  # report the prompt's log-probabilities too, from this index (at least 1) on
    priority: int = 0  # among the client's own sequences; lower runs first
    seen: tuple[int, ...] = ()  # for penalties: distinct ids that were cut off before the prompt
    must_run: bool = False  # accepted already, with its request or by a lost worker
    written: bytes = b""  # the first ids of the completion, 32 bits each; only what follows is reported
    request_id: str = ""  # for the log
    client: str = ""  # the client of the sequence; clients share the worker fairly
    weight: float = 1.0  # share of the client, above 0
    reuse_group: str = ""  # keys and values are copied only between sequences of one group

    @property
    def shared(self) -> tuple[object, ...]:
        """Everything but id, seed and prompt, as the sequences of one request differ in no other sampling parameter."""
        _, _, max_tokens, _, *others = msgspec.structs.astuple(self)
        return max_tokens, *others


class Submits(msgspec.Struct, gc=False, array_like=True, tag=True):
    """Sequences of one request that differ in id, seed and prompt alone. What they share is sent and kept once."""

    first: Submit
    others: list[tuple[int, int, list[int] | None]]  # id, seed, and prompt; None: that of the one before

    @classmethod
    def of(cls, submits: list[Submit]) -> Submits:
        """submits: equal prompts should be the same list, one after the other."""
        before, others = submits[0].prompt, []
        for submit in submits[1:]:
            others.append((submit.id, submit.sampling.seed, None if submit.prompt is before else submit.prompt))
            before = submit.prompt
        return cls(submits[0], others)

    def each(self) -> Iterator[Submit]:
        first, prompt = self.first, self.first.prompt
        yield first
        for id, seed, its in self.others:
            prompt = its or prompt
            sampling = msgspec.structs.replace(first.sampling, seed=seed)
            yield msgspec.structs.replace(first, id=id, prompt=prompt, sampling=sampling)


class Abort(msgspec.Struct, gc=False, array_like=True, tag=True):
    id: int


class Refused(msgspec.Struct, gc=False, array_like=True, tag=True):
    """The sequence was not accepted: the queue is full, or the expected wait is too long."""

    id: int
    message: str
    retry_after_seconds: int


def floats(column: bytes | bytearray) -> list[float]:
    """The numbers in a column of float64."""
    return array("d", bytes(column)).tolist()


class Logprobs(msgspec.Struct, gc=False, array_like=True):
    """Log-probabilities (nats) of N ids; each id comes with k alternatives, the likeliest first.

    Columns in this machine's byte order: 12 bytes per alternative, where Python's numbers would take about 90.
    """

    values: bytearray = bytearray()  # (N,) float64
    top_ids: bytearray = bytearray()  # (N · k,) uint32
    top_values: bytearray = bytearray()  # (N · k,) float64

    def __len__(self) -> int:
        return len(self.values) // 8

    @property
    def num_alternatives(self) -> int:
        """k"""
        return len(self.top_ids) // (4 * len(self)) if self.values else 0

    def extend(self, more: Logprobs) -> None:
        self.values += more.values
        self.top_ids += more.top_ids
        self.top_values += more.top_values

    def part(self, start: int, end: int) -> Logprobs:
        """Return a copy of the entries from `start` to before `end`."""
        first, last = start * self.num_alternatives, end * self.num_alternatives
        ids, values = self.top_ids[4 * first : 4 * last], self.top_values[8 * first : 8 * last]
        return Logprobs(self.values[8 * start : 8 * end], ids, values)

    def take(self, count: int) -> Logprobs:
        """Remove and return the first `count` entries, or all if there are fewer."""
        taken = self.part(0, count)
        del self.values[: len(taken.values)], self.top_ids[: len(taken.top_ids)]
        del self.top_values[: len(taken.top_values)]
        return taken

    def rows(self) -> Iterator[tuple[float, list[tuple[int, float]]]]:
        """Return (log-probability, [(id, log-probability), …]) of each id. If there are many, use `part` first."""
        k, ids, values = self.num_alternatives, array("I", bytes(self.top_ids)).tolist(), floats(self.top_values)
        for i, value in enumerate(floats(self.values)):
            start, end = i * k, (i + 1) * k
            yield value, list(zip(ids[start:end], values[start:end], strict=True))


class Tried(msgspec.Struct, gc=False, array_like=True):
    """How a candidate of an exact answer has ended."""

    matches: bool
    characters: int  # that the model chose, with the one that ended it
    length: int  # of its text
    distance: int | None  # characters that the text lacks at least for a match; None: it has no constraint


class Delta(msgspec.Struct, gc=False, array_like=True):
    """New ids of a sequence. The last delta has a finish reason.

    Times are by time.monotonic(), which all processes of a machine share. The first delta after the prompt has run
    carries the first two.
    """

    id: int
    ids: list[int]
    finish_reason: FinishReason | None = None
    scheduled_at: float | None = None
    prefilled_at: float | None = None
    ended_at: float | None = None  # with the finish reason, if the prompt has run
    logprobs: Logprobs | None = None  # of `ids`
    prompt_logprobs: Logprobs | None = None  # of the next ids of the prompt
    # With the finish reason: ids that ran and were not emitted, or of a prompt that ran in part. Of a candidate, all of
    # the prompt's ids that ran count.
    num_unseen: int = 0
    tried: Tried | None = None  # of a candidate, with the finish reason stop or length


class Step(msgspec.Struct, gc=False, array_like=True, tag=True):
    """The results of one engine step for one HTTP process: new ids in columns, and everything else in deltas."""

    sequences: list[int]  # (B,) sequences with new ids
    counts: list[int]  # (B,) number of new ids of each
    ids: bytes  # the new ids of all, in that order; 32 bits each, in this machine's byte order
    deltas: list[Delta]  # beginnings, endings and log-probabilities, without ids; they follow the ids of this step

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Step:
        """Move the deltas' ids into columns."""
        sequences, counts, ids, others = [], [], array("I"), []
        for delta in deltas:
            if delta.ids:
                sequences.append(delta.id)
                counts.append(len(delta.ids))
                ids.extend(delta.ids)
                delta.ids = []
            if (
                delta.finish_reason
                or delta.prefilled_at is not None
                or delta.logprobs is not None
                or delta.prompt_logprobs is not None
            ):
                others.append(delta)
        return cls(sequences, counts, ids.tobytes(), others)


ToWorker = Hello | Submits | Abort
FromWorker = Hello | Step | Refused
