"""The sampling parameters, with the bounds and the meaning of each.

service/text/requests.py builds the HTTP schema from these fields, and service/wire.py sends them to a worker.
sampling.py (also for cuda.py) and native.cpp implement them. Both read `factors`, in which a new parameter must be, and
native.py packs it. A new parameter also needs a field in requests.py, no entry in foreign.py, and a flag in
training/commands/flags.py and sample.py. This module loads without torch.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

MAX_SEED = 2**64 - 1
MAX_BIAS = 100.0  # the same bound as OpenAI's


def _param(description: str, example: float, **bounds: Any) -> Meta:
    return Meta(description=description, examples=[example], **bounds)


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The parameters for choosing the next character. `sampling.Sampler.choose` documents the order of their steps.

    Raises:
        ValueError: a field is out of bounds. The message gives the field, its value and the bounds.
    """

    temperature: Annotated[
        float, _param("divides the logits: below 1 favours likely characters; 0 takes the likeliest", 0.8, ge=0, le=100)
    ] = 1.0
    top_k: Annotated[int, _param("sample from the k likeliest characters; 0 or -1: all", 20, ge=-1, le=2**31 - 1)] = 0
    top_p: Annotated[
        float, _param("sample from the smallest set of likeliest characters with this probability", 0.9, gt=0, le=1)
    ] = 1.0
    seed: int = 0  # 0 to MAX_SEED; __post_init__ checks it, because the bounds of msgspec end at 2^63
    min_p: Annotated[
        float, _param("sample from characters at least this probable, relative to the likeliest", 0.05, ge=0, le=1)
    ] = 0.0
    typical_p: Annotated[
        float, _param("sample from the most typical characters with this probability (Meister 2022)", 0.95, gt=0, le=1)
    ] = 1.0
    repetition_penalty: Annotated[
        float, _param("above 1: penalises characters of prompt and completion (Keskar 2019)", 1.1, ge=0.01, le=100)
    ] = 1.0
    presence_penalty: Annotated[
        float, _param("subtracted from the logit of each character in the completion", 0.5, ge=-2, le=2)
    ] = 0.0
    frequency_penalty: Annotated[
        float, _param("subtracted from a character's logit once per occurrence in the completion", 0.1, ge=-2, le=2)
    ] = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, added to its logit)

    def __post_init__(self) -> None:
        _check_bounds(_bounded_values(self))
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must be in [0, {MAX_SEED}], got {self.seed}")
        if not self.logit_bias:
            return
        biased: set[int] = set()
        for id, bias in self.logit_bias:
            if id < 0 or id in biased:
                raise ValueError(f"logit_bias must be of distinct ids ≥ 0, got id {id}")
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise ValueError(f"logit_bias must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}], got {bias} for id {id}")
            biased.add(id)

    @property
    def factors(self) -> tuple[float, ...]:
        """The numbers that samplers use: temperature, top_p, log min_p, typical_p, then the three penalties."""
        log_min_p = math.log(self.min_p) if self.min_p else -math.inf
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return (self.temperature, self.top_p, log_min_p, self.typical_p, *penalties)

    @property
    def needs_history(self) -> bool:
        """True if a choice depends on which characters occurred before, because a penalty is set."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


# Field -> its bounds, description and examples, for each field that has bounds.
SAMPLING_META: dict[str, Meta] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}


@functools.lru_cache(maxsize=1024)  # most requests have the same values
def _check_bounds(values: tuple[float, ...]) -> None:
    """Check the values of the fields in SAMPLING_META, in their order.

    Raises:
        ValueError: as in SamplingParams.
    """
    for (name, meta), value in zip(SAMPLING_META.items(), values, strict=True):
        low: Any = meta.gt if meta.ge is None else meta.ge
        high: Any = meta.le
        if not low <= value <= high or value == meta.gt:
            raise ValueError(f"{name} must be in {'(' if meta.ge is None else '['}{low}, {high}], got {value}")


_bounded_values = operator.attrgetter(*SAMPLING_META)
