"""What requests and errors look like on the wire.

Knows nothing of models or processes. Requests are pydantic models, so that every bound is stated once and
shown in /docs; what depends on the served model or its settings is checked in api.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, Strict, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

MAX_TEMPERATURE = 100.0  # these two as in service.model.sampling, which would load torch
MAX_SEED = 2**64 - 1
MAX_CHOICES = 1000

Character = Annotated[str, Field(min_length=1, max_length=1)]
# A text of the model's characters. The document says by this format what a pattern of thousands would hide.
Text = Annotated[str, Field(json_schema_extra={"format": "vocabulary"})]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
Pattern = Annotated[str, Field(min_length=1, json_schema_extra={"format": "regex"})]
ChoiceString = Annotated[Text, Field(min_length=1, max_length=1000)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Id = Annotated[int, Field(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasPair = Annotated[tuple[Character | Id, Bias], Strict(False)]  # JSON has no tuples: a list will do
UnknownCharacters = Literal["refuse", "replace", "drop"]


class ApiError(Exception):
    """An answer that is an error, in OpenAI's body.

    https://platform.openai.com/docs/guides/error-codes
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after_seconds is not None:
            self.headers["Retry-After"] = str(retry_after_seconds)

    @property
    def type(self) -> str:
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class Body(BaseModel):
    """A request body. Unknown fields are ignored, wrong ones refused; null stands for a field's default."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        return {
            name: value
            for name, value in data.items()
            if value is not None or name not in fields or fields[name].is_required()
        }

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, field in schema["properties"].items():
            if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                about = {key: field.pop(key) for key in ("title", "description", "default", "examples") if key in field}
                branches = field["anyOf"] if "anyOf" in field else [field]
                schema["properties"][name] = {"anyOf": [*branches, {"type": "null"}], **about}
        return schema


class StreamOptions(Body):
    """How a stream tells the usage."""

    include_usage: bool = Field(
        False,
        description="end the stream of /v1/completions with a chunk that holds the usage; /generate always does",
        examples=[True],
    )
    continuous_usage_stats: bool = Field(False, description="tell the usage so far in every event", examples=[True])


class ModelRequest(Body):
    """What all routes that run the model have in common."""

    model: str | None = Field(
        None, max_length=1000, description="name of the served model, as /v1/models gives it", examples=["chargpt"]
    )
    unknown_characters: UnknownCharacters | None = Field(
        None,
        description="what to do with a character that the model does not know: refuse the request, replace it or drop "
        "it; the answer says how many were touched. Default: the server's setting",
        examples=["replace"],
    )
    replacement_character: Character | None = Field(
        None, description="what replaces an unknown character. Default: the server's setting", examples=[" "]
    )
    priority: int = Field(
        0,
        ge=-1000,
        le=1000,
        description="lower goes first when requests have to wait; equal ones in order of arrival",
        examples=[10],
    )
    timeout_seconds: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="time the request may take, waiting and running; the server's own bound holds where it is less",
        examples=[30],
    )


Prompt = str | list[Id]


def _max_tokens(default: int) -> Any:
    return Field(
        default,
        ge=0,
        description="most characters to generate. Where the server allows fewer than the default, that is the default",
        examples=[80],
    )


class GenerationRequest(ModelRequest):
    """What the two generation routes have in common."""

    prompt: Text | list[Text] | list[Id] | list[list[Id]] = Field(
        "",
        description="text to continue, or a list of texts; ids are accepted too. "
        "An empty text stands for the beginning of a text: a line break that is not part of the answer",
        examples=["ROMEO:"],
    )
    suffix: Text | None = Field(
        None,
        description="text that comes after the answer: `best_of` middles are sampled and cut where the suffix is "
        "likely to begin, and those after which the suffix is likeliest are given",
        examples=["\n\nJULIET:"],
    )
    max_tokens: int = _max_tokens(16)
    min_tokens: int = Field(
        0, ge=0, description="the answer has at least this many characters: no stop before", examples=[20]
    )
    ignore_eos: bool = Field(
        False, description="accepted and without effect: there is no end-of-text character", examples=[True]
    )
    n: int = Field(1, ge=1, le=10_000, description="answers per prompt; the server bounds prompts × n", examples=[2])
    best_of: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description="sample this many per prompt and give the `n` with the highest mean log-probability, or with "
        "`suffix` those that fit it best; the server bounds prompts × best_of. Default: n, with `suffix` 8",
        examples=[4],
    )
    seed: Seed | list[Seed] | None = Field(
        None,
        description="same seed, same text; a list has one for each prompt. Answer j of a prompt uses seed + j. "
        "Drawn when absent, and told in the answer",
        examples=[1],
    )

    temperature: float = Field(
        1.0,
        ge=0,
        le=MAX_TEMPERATURE,
        description="logits are divided by it: below 1 the likely gets likelier. 0: always the most likely character",
        examples=[0.8],
    )
    top_k: int = Field(
        0,
        ge=-1,
        le=2**31 - 1,
        description="sample from the k likeliest characters; 0 or -1: from all",
        examples=[20],
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="sample from the smallest set of likeliest characters with this probability",
        examples=[0.9],
    )
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        description="sample from characters at least this probable, relative to the likeliest",
        examples=[0.05],
    )
    typical_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="sample from the most typical characters with this probability (Meister 2022)",
        examples=[0.95],
    )
    repetition_penalty: float = Field(
        1.0,
        ge=0.01,
        le=100,
        description="above 1: makes what the prompt or the answer holds less likely (Keskar 2019)",
        examples=[1.1],
    )
    presence_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="subtracted from the logit of each character that the answer holds",
        examples=[0.5],
    )
    frequency_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="subtracted from a character's logit once for each time the answer holds it",
        examples=[0.1],
    )
    logit_bias: (
        Annotated[dict[str, Bias], Field(max_length=10_000)] | Annotated[list[BiasPair], Field(max_length=10_000)]
    ) = Field(
        default_factory=dict,
        description="added to logits, -100 to 100. An object's key is an id in decimals (as OpenAI has it) or any "
        'other single character; a list of pairs tells "5", the character, from 5, the id',
        examples=[{"e": -100, "\n": 2.5}, [["e", -100], [5, 1.0]]],
    )

    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = Field(
        None, description="the text ends before the first of these", examples=[["\n\n", "ROMEO:"]]
    )
    stop_regex: Pattern | None = Field(
        None,
        description="the text ends before the first match of this regular expression, which must not match nothing",
        examples=["\n[A-Z]+:"],
    )
    include_stop_str_in_output: bool = Field(
        False, description="the text ends after the stop instead of before it", examples=[True]
    )

    regex: Pattern | None = Field(
        None,
        description="the whole answer matches this regular expression: literals, classes, groups, alternatives and "
        "repetition; it ends where the model would leave the pattern, if the pattern may end there",
        examples=["[A-Z][a-z]+( [A-Z][a-z]+)?"],
    )
    choice: Annotated[list[ChoiceString], Field(min_length=1, max_length=MAX_CHOICES)] | None = Field(
        None, description="the answer is one of these texts", examples=[["yes", "no"]]
    )
    allowed_characters: Text | None = Field(
        None, min_length=1, description="the answer holds only these characters", examples=["ACGT"]
    )

    logprobs: int | None = Field(
        None,
        ge=0,
        description="tell the log-probability of each character, by the model alone, and of the likeliest so many; "
        "up to the vocabulary's size",
        examples=[3],
    )
    echo: bool = Field(
        False,
        description="the answer begins with the prompt, whose log-probabilities are told too if asked for",
        examples=[True],
    )

    stream: bool = Field(False, description="send the text as server-sent events while it is made", examples=[True])
    stream_options: StreamOptions = Field(
        default_factory=lambda: StreamOptions.model_validate({}),
        description="how a stream tells the usage; without effect on a whole answer",
        examples=[{"include_usage": True}],
    )
    stream_interval: float | None = Field(
        None,
        ge=0,
        le=60,
        description="seconds between two events of a stream, in which characters gather; the first one comes at once. "
        "Default: the server's setting",
        examples=[0.1],
    )

    @model_validator(mode="after")
    def _fields_agree(self) -> GenerationRequest:
        def refuse(param: str, message: str) -> None:
            raise ApiError(400, f"{param}: {message}", param=param)

        if self.regex is not None and self.choice is not None:
            refuse("regex", "cannot be combined with choice")
        for name in ("regex", "choice"):
            if getattr(self, name) is None:
                continue
            for other in ("stop", "stop_regex", "suffix"):
                if getattr(self, other):
                    refuse(name, f"cannot be combined with {other}, which would cut the answer short of a match")
        if self.min_tokens > self.max_tokens:
            refuse("min_tokens", f"must be at most max_tokens, {self.max_tokens}, got {self.min_tokens}")
        if self.best_of is not None and self.best_of < self.n:
            refuse("best_of", f"must be at least n, {self.n}, got {self.best_of}")
        if self.best_of is not None and self.best_of > self.n and self.stream and not self.suffix:
            refuse("best_of", f"cannot be streamed when above n, {self.n}, got {self.best_of}")
        if self.suffix and self.logprobs is not None:
            refuse("logprobs", "cannot be combined with suffix")
        if isinstance(self.seed, list) and len(self.seed) != len(self.prompts):
            refuse("seed", f"a list has one seed for each of the {len(self.prompts)} prompts, got {len(self.seed)}")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, each a text or a list of ids."""
        match self.prompt:
            case str() | [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class GenerateRequest(GenerationRequest):
    """Body of POST /generate."""

    max_tokens: int = _max_tokens(256)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions: https://platform.openai.com/docs/api-reference/completions/create."""


class ScoreRequest(ModelRequest):
    """Body of POST /v1/score: `texts`, or `continuations` of a `prefix`."""

    texts: Text | list[Text] | None = Field(
        None,
        description="texts to score, each character but the first given all before it",
        examples=[["To be, or not to be"]],
    )
    prefix: Text = Field(
        "",
        description="what stands before each continuation; empty: the beginning of a text",
        examples=["To be or not to"],
    )
    continuations: list[Text] | None = Field(
        None, description="texts to score, every character, after the prefix", examples=[[" be", " bee", " qqq"]]
    )
    characters: bool = Field(True, description="tell the nats of each character, not the sums alone", examples=[False])

    @model_validator(mode="after")
    def _one_of_two(self) -> ScoreRequest:
        if (self.texts is None) == (self.continuations is None):
            raise ApiError(400, "texts: either texts or continuations must be given", param="texts")
        return self


class NextRequest(ModelRequest):
    """Body of POST /v1/next."""

    prompt: Text | list[Text] = Field(
        "",
        description="text whose next character is asked for, or a list of texts; empty: the beginning of a text",
        examples=["ROMEO"],
    )


class TokenizeRequest(ModelRequest):
    """Body of POST /tokenize."""

    prompt: Text = Field(description="text to encode", examples=["ROMEO:"])


class DetokenizeRequest(ModelRequest):
    """Body of POST /detokenize."""

    tokens: list[Id] = Field(description="ids to decode", examples=[[30, 27, 25]])


AnyRequest = TypeVar("AnyRequest", bound=ModelRequest)

# What a union or a list should be, instead of what pydantic tells of each of its branches.
EXPECTED = {
    "prompt": "a text, a list of texts, or one or more lists of ids",
    "stop": "a text or a list of at most 16, of 1 to 1000 characters each",
    "seed": f"an integer from 0 to {MAX_SEED}, or a list with one for each prompt",
    "logit_bias": "an object of characters or ids, or a list of pairs of a character or an id, with -100 to 100 each",
    "texts": "a text or a list of texts",
}


def parse(kind: type[AnyRequest], body: bytes | dict[str, Any]) -> AnyRequest:
    """The request in a JSON body, or in the fields of a query, whose values are texts.

    Raises:
        ApiError: 400, with the field, what was given and what is allowed.
    """
    try:
        if isinstance(body, dict):
            return kind.model_validate(body, strict=False)
        return kind.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        place, message, given = problem["loc"], problem["msg"], problem["input"]
        if problem["type"] == "json_invalid":
            raise ApiError(400, f"the body is not JSON: {message}", code="invalid_json") from None
        shown = f", got {_shortened(given)}"
        if place and place[0] in EXPECTED:
            place, shown = place[:1], ""
            message = f"Input should be {EXPECTED[str(place[0])]}"
        param = ".".join(map(str, place)) or None
        raise ApiError(400, f"{param or 'body'}: {message}{shown}", param=param) from None


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "…"
