"""What the model in Python answers with. The names are those of the fields over HTTP."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

MAX_ROWS = 20  # that a table shows
MAX_CELL = 70  # characters of a text that a table shows

Item = TypeVar("Item")


class Results(list[Item], Generic[Item]):
    """The results of a call, in the order of the texts. If there is one, its attributes are those of the list too.

    replaced_characters, dropped_characters: unknown ones in the texts.
    """

    replaced_characters: int = 0
    dropped_characters: int = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if len(self) != 1:
            raise AttributeError(f"there are {len(self)} results: take one, as in results[0].{name}")
        return getattr(self[0], name)

    def __repr__(self) -> str:
        rows = [_cells(item) for item in itertools.islice(self, MAX_ROWS)]
        more = [] if len(self) <= MAX_ROWS else [f"… {len(self) - MAX_ROWS} more"]
        return "\n".join([*table(rows), *more]) if rows else "no results"


@dataclass(frozen=True, slots=True)
class Answer:
    """A text that continues a prompt. str(answer) is the text."""

    index: int
    """answers of one prompt follow each other: of `n`, prompt i has those from i · n on"""
    text: str
    finish_reason: str
    """stop or length"""
    seed: int
    """asked for alone with this seed, the same request gives this answer"""
    logprobs: list[float | None] | None = field(default=None, repr=False)
    """the log-probability (nats) of each character, if asked for; None: nothing precedes it"""
    top_logprobs: list[dict[str, float] | None] | None = field(default=None, repr=False)
    """those of the likeliest characters in each place, and of the character itself"""

    def __str__(self) -> str:
        return self.text


class Acceptance(NamedTuple):
    """The cost of exact answers."""

    candidates: int
    matches: int
    characters: int


class Sample(Iterator[Answer]):
    """The answers of `sample`, in order. The sampling ends when nobody refers to it any more."""

    def __init__(self, answers: Iterator[Answer], cost: Callable[[], Acceptance | None] = lambda: None):
        self._answers, self._cost = answers, cost

    def __next__(self) -> Answer:
        return next(self._answers)

    @property
    def exact(self) -> Acceptance | None:
        """The cost so far, with `exact`."""
        return self._cost()


class Answers(Results[Answer]):
    """The answers of a request. A pandas.DataFrame of it has a row for each."""

    exact: Acceptance | None = None  # with `exact`

    @property
    def texts(self) -> list[str]:
        return [answer.text for answer in self]


@dataclass(frozen=True, slots=True)
class Score:
    """The likelihood of a text. Nats are negative log-likelihoods: fewer nats mean a likelier text."""

    index: int
    text: str
    characters: int
    """scored ones: the first of a document has nothing before it"""
    nats: float
    nats_per_character: float | None
    bits_per_character: float | None
    perplexity: float | None
    rank: int | None = None
    """among continuations, 1 is the likeliest"""
    unknown_characters: int | None = None
    """of the text, if they are replaced or dropped, or the vocabulary has a symbol for them"""
    character_nats: list[float | None] | None = field(default=None, repr=False)
    """of each character, unless `characters` is False; None: nothing precedes it"""


class Character(NamedTuple):
    """A character that may come next."""

    character: str
    id: int
    probability: float
    logprob: float


@dataclass(frozen=True, slots=True)
class Next:
    """The distribution of the character after a prompt."""

    index: int
    entropy_nats: float
    entropy_bits: float
    distribution: list[Character] = field(repr=False)
    """the likeliest first; the entropy is that of all characters"""

    def __getitem__(self, character: str) -> float:
        """Return the probability of a character; 0 if the distribution has none, as `top` left it out."""
        return next((it.probability for it in self.distribution if it.character == character), 0.0)


def _cells(item: Any) -> dict[str, str]:
    if isinstance(item, Next):
        likeliest = "  ".join(f"{it.character!r} {it.probability:.3f}" for it in item.distribution[:5])
        return {"entropy_bits": f"{item.entropy_bits:.3f}", "likeliest": likeliest}
    if isinstance(item, Answer):
        return {"seed": str(item.seed), "finish_reason": item.finish_reason, "text": _cut(item.text)}
    cells = {"nats": f"{item.nats:.2f}", "characters": str(item.characters)}
    mean = item.nats_per_character
    cells["nats_per_character"] = "–" if mean is None else f"{mean:.3f}"
    if item.rank is not None:
        cells["rank"] = str(item.rank)
    return cells | {"text": _cut(item.text)}


def _cut(text: str) -> str:
    return repr(text) if len(text) <= MAX_CELL else repr(text[:MAX_CELL]) + "…"


def table(rows: Iterable[dict[str, str]]) -> list[str]:
    """Return the lines of a table with a head, in columns."""
    rows = list(rows)
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
