"""Request bodies, answers and errors: what goes over the wire, each stated once and shown in /docs.

Requests are pydantic models, which explain what is wrong with a field; answers are msgspec structs, which encode in
a fraction of a microsecond. Bounds that depend on the served model or its settings are checked by the routes.
"""

from __future__ import annotations

import difflib
import functools
import operator
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    Strict,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from service.model.params import MAX_BIAS, MAX_SEED, SAMPLING_META, SamplingParams

MAX_CHOICES = 1000
MAX_STOPS = 16
MAX_BIASES = 10_000
MAX_ID = 2**31 - 1
MAX_UNKNOWN_FIELDS = 16
# Of an unknown field: printable ASCII that can stand in a header's list.
FIELD_NAME = re.compile(r"[!#-+\--\[\]-~]{1,64}")

# Fields of OpenAI's and vLLM's completions that this service does not have: never taken for typos.
FOREIGN_FIELDS = frozenset(
    (
        # OpenAI
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "parallel_tool_calls", "tools", "tool_choice", "top_logprobs", "modalities", "verbosity", "reasoning_effort",
        # vLLM
        "add_special_tokens", "cache_salt", "kv_transfer_params", "request_id", "return_token_strs",
        "return_tokens_as_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "truncation_side",
        "vllm_xargs",
    )
)  # fmt: skip
_FORM = "give the form of the answer as regex or choice"
_CHARACTERS = "say it in characters, with stop, allowed_characters or logit_bias"
# Fields of other APIs that would change a generation's answer -> what to do. Refused, unless a value changes nothing.
REFUSED_FIELDS: dict[str, str] = {
    **dict.fromkeys(("guided_json", "guided_grammar", "grammar", "json_schema", "response_format"), _FORM),
    **dict.fromkeys(("allowed_token_ids", "stop_token_ids", "bad_words"), _CHARACTERS),
    **dict.fromkeys(
        ("use_beam_search", "num_beams", "length_penalty", "early_stopping"), "no beam search: use best_of"
    ),
    **dict.fromkeys(("prompt_logprobs", "logprob_token_ids"), "use logprobs, echo or /v1/score"),
    **dict.fromkeys(
        ("mirostat", "mirostat_mode", "tfs_z", "top_a", "xtc_probability"), "use top_p, min_p or typical_p"
    ),
    **dict.fromkeys(
        ("no_repeat_ngram_size", "dry_multiplier", "dry_base", "dry_allowed_length"),
        "use repetition_penalty, presence_penalty or frequency_penalty",
    ),
    "do_sample": "for the likeliest characters say temperature 0",
    "detokenize": "an answer is always text",
    "logits_processors": "no code of clients runs here",
    "messages": "there is no chat: give prompt",
    "prompt_embeds": "a prompt is text or ids",
    "return_token_ids": "POST /tokenize gives the ids of a text",
    "truncate_prompt_tokens": "shorten the prompt, or leave it: its length does not matter",
}
# The values with which these change nothing.
_NEUTRAL: dict[str, Any] = {"do_sample": True, "detokenize": True, "length_penalty": 1, "num_beams": 1}
# What other APIs call a field: refused, unless the field itself is given too.
OTHER_NAMES = {
    "max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "max_length": "max_tokens",
    "n_predict": "max_tokens", "num_predict": "max_tokens", "max_gen_toks": "max_tokens",
    "min_new_tokens": "min_tokens", "guided_regex": "regex", "guided_choice": "choice", "stop_sequences": "stop",
    "until": "stop", "num_return_sequences": "n", "repeat_penalty": "repetition_penalty", "inputs": "prompt",
    "max_output_tokens": "max_tokens",
}  # fmt: skip
MAX_ATTENTION_CHARACTERS = 256

Item = TypeVar("Item")
# Validated up to the first error, as only that is reported.
List = Annotated[list[Item], Field(fail_fast=True)]

Character = Annotated[str, Field(min_length=1, max_length=1)]
# A text of the model's characters: this format stands for a pattern that would list thousands of them.
Text = Annotated[str, Field(json_schema_extra={"format": "vocabulary"})]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
Pattern = Annotated[str, Field(min_length=1, json_schema_extra={"format": "regex"})]
ChoiceString = Annotated[Text, Field(min_length=1, max_length=1000)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Id = Annotated[int, Field(ge=0, le=MAX_ID)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
BiasPair = Annotated[tuple[Character | Id, Bias], Strict(False)]  # JSON has no tuples: accept a list
UnknownCharacters = Literal["refuse", "replace", "drop"]
ErrorType = Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]


# -- errors --


class ApiError(Exception):
    """An error to answer with, in OpenAI\'s body: https://platform.openai.com/docs/guides/error-codes."""

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
    def type(self) -> ErrorType:
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(Error(ErrorDetails(self.message, self.type, self.param, self.code)))


# -- requests --


class Body(BaseModel):
    """A request body. Invalid fields are refused; null means a field's default.

    Unknown fields are named in the validation's context, a list, unless they are likely to be meant for known ones.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    path: ClassVar[str] = ""  # of this body's fields, in errors

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        data = cls._mapped(data)
        unknown = [name for name in data if name not in cls.model_fields]
        if unknown:
            _check_unknown(cls, unknown, data)
            if info.context is not None:
                info.context.extend(cls.path + name for name in unknown)
        return {
            name: data[name]
            for name, field in cls.model_fields.items()
            if name in data and (data[name] is not None or field.is_required())
        }

    @classmethod
    def _mapped(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The fields, with those of other APIs in the place of ours that mean exactly the same.

        Raises:
            ApiError: 400, one would change the answer, and has no counterpart.
        """
        return data

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, field in schema["properties"].items():
            if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                about = {key: field.pop(key) for key in ("title", "description", "default", "examples") if key in field}
                branches = field["anyOf"] if "anyOf" in field else [field]
                schema["properties"][name] = {"anyOf": [*branches, {"type": "null"}], **about}
        return schema


def _check_unknown(kind: type[Body], unknown: list[str], given: Mapping[str, object]) -> None:
    """
    Raises:
        ApiError: 400, there are too many, one's name is invalid, or one is likely to be meant for a known field.
    """
    for name in unknown[: MAX_UNKNOWN_FIELDS + 1]:
        if not FIELD_NAME.fullmatch(name):
            message = (
                f"{shortened(name)} is not the name of a field: 1 to 64 printable ASCII characters, without blanks"
            )
            raise ApiError(400, f"{kind.path or 'body'}: {message}", code="unknown_field")
        meant = _meant(kind, name)
        if name in OTHER_NAMES and any(given.get(known) is not None for known in meant):
            continue
        if meant:
            message = f"unknown field; did you mean {' or '.join(meant)}?"
            raise ApiError(400, f"{kind.path}{name}: {message}", param=kind.path + name, code="unknown_field")
    if len(unknown) > MAX_UNKNOWN_FIELDS:
        message = f"at most {MAX_UNKNOWN_FIELDS} unknown fields are ignored, got more"
        raise ApiError(400, f"{kind.path or 'body'}: {message}", code="unknown_field")


@functools.lru_cache(maxsize=1024)
def _meant(kind: type[Body], name: str) -> list[str]:
    """The known fields that an unknown one is likely to be meant for."""
    if name in FOREIGN_FIELDS or name in REFUSED_FIELDS or name == "structured_outputs":
        return []
    if OTHER_NAMES.get(name) in kind.model_fields:
        return [OTHER_NAMES[name]]
    usual = name.lower().replace("-", "_")
    return [usual] if usual in kind.model_fields else difflib.get_close_matches(usual, kind.model_fields, cutoff=0.8)


class StreamOptions(Body):
    """How a stream reports usage."""

    path: ClassVar[str] = "stream_options."

    include_usage: bool = Field(
        False,
        description="end a stream of /v1/completions with a usage chunk; /generate always does",
        examples=[True],
    )
    continuous_usage_stats: bool = Field(False, description="report the usage so far in every event", examples=[True])


class ModelRequest(Body):
    """Fields that all routes which use the model share."""

    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def ignored_fields(self) -> list[str]:
        """The names of unknown fields."""
        return self._ignored

    model: str | None = Field(
        None, max_length=1000, description="name of the served model, as /v1/models gives it", examples=["chargpt"]
    )
    unknown_characters: UnknownCharacters | None = Field(
        None,
        description="for characters absent from the vocabulary: refuse the request, replace them or drop them; the "
        "answer counts them. Default: the server's setting",
        examples=["replace"],
    )
    replacement_character: Character | None = Field(
        None, description="replacement for an unknown character. Default: the server's setting", examples=[" "]
    )
    priority: int = Field(
        0,
        ge=-1000,
        le=1000,
        description="a client's requests in the queue start in order of priority, lowest number first, then of arrival",
        examples=[10],
    )
    timeout_seconds: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="time limit for waiting and running together; the server's own limit applies if it is lower",
        examples=[30],
    )
    strict: bool | None = Field(
        None,
        description="refuse the request if it has unknown fields; otherwise they are ignored, and named in the header "
        "X-Ignored-Fields. Default: the server's setting",
        examples=[True],
    )


Prompt = str | list[int]


def _max_tokens(default: int) -> Any:
    return Field(
        default,
        ge=0,
        description="maximum number of characters to generate. The default is lowered to the server's limit",
        examples=[80],
    )


if TYPE_CHECKING:

    class SamplingFields(ModelRequest):
        """The fields of SamplingParams, without `seed` and `logit_bias`, which have other forms in a request."""

else:
    SamplingFields = create_model(
        "SamplingFields",
        __base__=ModelRequest,
        **{
            name: (
                type(getattr(SamplingParams(), name)),
                Field(
                    getattr(SamplingParams(), name),
                    ge=meta.ge, gt=meta.gt, le=meta.le, description=meta.description, examples=meta.examples,
                ),
            )
            for name, meta in SAMPLING_META.items()
        },
    )  # fmt: skip


class GenerationRequest(SamplingFields):
    """Fields that the two generation routes share."""

    @classmethod
    def _mapped(cls, data: dict[str, Any]) -> dict[str, Any]:
        given = data.get("structured_outputs")
        if given is not None:
            kinds = {name: value for name, value in given.items() if value} if isinstance(given, dict) else {}
            if len(kinds) != 1 or not kinds.keys() <= {"regex", "choice"} or kinds.keys() & data.keys():
                param = "structured_outputs"
                message = f"{param}: must be an object with either regex or choice, got {shortened(given)}"
                raise ApiError(400, message, param=param, code="unsupported_field")
            data = {name: value for name, value in data.items() if name != "structured_outputs"} | kinds
        for name in data.keys() & REFUSED_FIELDS.keys():
            value = data[name]
            is_text = name == "response_format" and isinstance(value, dict) and value.get("type") == "text"
            changes = value is False if _NEUTRAL.get(name) is True else value and value != _NEUTRAL.get(name)
            if changes and not is_text:
                message = f"{name}: not supported here, and not ignored, as it would change the answer; "
                raise ApiError(400, message + REFUSED_FIELDS[name], param=name, code="unsupported_field")
        return data

    prompt: Text | List[Text] | List[Id] | List[List[Id]] = Field(
        "",
        description="text to continue, or a list of texts, or ids. "
        "An empty text means the beginning of a document: a line break that is not part of the answer. For a model of "
        "records, a text is the beginning of one: a line break precedes it unseen, and one ends the answer",
        examples=["ROMEO:"],
    )
    suffix: Text | None = Field(
        None,
        description="text that follows the answer (infill): `best_of` candidates are sampled, cut where the suffix is "
        "likely to begin, and ranked by the likelihood of the suffix after them",
        examples=["\n\nJULIET:"],
    )
    max_tokens: int = _max_tokens(16)
    min_tokens: int = Field(
        0,
        ge=0,
        description="minimum number of characters: stops before this are ignored, and `regex` and `choice` match "
        "with at least so many",
        examples=[20],
    )
    ignore_eos: bool = Field(
        False,
        description="of a model of records: go on after the line break that ends one; no effect on other models, which "
        "have no end-of-text character",
        examples=[True],
    )
    n: int = Field(1, ge=1, le=10_000, description="answers per prompt; the server limits prompts × n", examples=[2])
    best_of: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description="sample this many per prompt and return the `n` with the highest mean log-probability, or with "
        "`suffix` those after which it is likeliest; the server limits prompts × best_of. Default: n; with `suffix`, 8",
        examples=[4],
    )
    seed: Seed | List[Seed] | None = Field(
        None,
        description="the same seed gives the same text; a list has one per prompt. Answer j of a prompt uses seed + j. "
        "Default: random, reported in the answer",
        examples=[1],
    )

    logit_bias: (
        Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)]
        | Annotated[List[BiasPair], Field(max_length=MAX_BIASES)]
    ) = Field(
        default_factory=dict,
        description="added to logits, -100 to 100. The keys of an object are ids in decimal (as in OpenAI's API) or "
        'any other single character: {"5": -100} is about id 5. In a list of pairs, [["5", -100]] is about the '
        "character 5 and [[5, -100]] about id 5",
        examples=[{"e": -100, "\n": 2.5}, [["e", -100], [5, 1.0]]],
    )

    stop: StopString | Annotated[List[StopString], Field(max_length=MAX_STOPS)] | None = Field(
        None, description="the text ends before the first of these", examples=[["\n\n", "ROMEO:"]]
    )
    stop_regex: Pattern | None = Field(
        None,
        description="the text ends before the first match of this regular expression, which must not match the empty "
        "text",
        examples=["\n[A-Z]+:"],
    )
    include_stop_str_in_output: bool = Field(False, description="keep the stop at the end of the text", examples=[True])

    regex: Pattern | None = Field(
        None,
        description="the whole answer matches this regular expression: literals, classes, groups, alternation and "
        "repetition. Once the text matches, it ends as soon as the model samples a character that would break the "
        "match",
        examples=["[A-Z][a-z]+( [A-Z][a-z]+)?"],
    )
    choice: Annotated[List[ChoiceString], Field(min_length=1, max_length=MAX_CHOICES)] | None = Field(
        None, description="the answer is one of these texts", examples=[["yes", "no"]]
    )
    allowed_characters: Text | None = Field(
        None, min_length=1, description="the answer contains only these characters", examples=["ACGT"]
    )

    logprobs: int | None = Field(
        None,
        ge=0,
        description="report the log-probability of each character under the unmodified model, and of this many of the "
        "likeliest; at most the size of the vocabulary",
        examples=[3],
    )
    echo: bool = Field(
        False,
        description="begin the answer with the prompt, and its log-probabilities if requested",
        examples=[True],
    )

    stream: bool = Field(
        False, description="send the text as server-sent events while it is generated", examples=[True]
    )
    stream_options: StreamOptions = Field(
        default_factory=lambda: StreamOptions.model_validate({}),
        description="how a stream reports usage; no effect on a whole answer",
        examples=[{"include_usage": True}],
    )
    stream_interval: float | None = Field(
        None,
        ge=0,
        le=60,
        description="seconds for which characters gather between two events of a stream; the first is sent at once. "
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
                    refuse(name, f"cannot be combined with {other}, which could end the answer before a match")
        if self.min_tokens > self.max_tokens:
            refuse("min_tokens", f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.best_of is not None and self.best_of < self.n:
            refuse("best_of", f"must be at least n ({self.n}), got {self.best_of}")
        if self.best_of is not None and self.best_of > self.n and self.stream and not self.suffix:
            refuse("best_of", f"cannot be streamed if greater than n ({self.n}), got {self.best_of}")
        if self.suffix and self.logprobs is not None:
            refuse("logprobs", "cannot be combined with suffix")
        if isinstance(self.seed, list) and len(self.seed) != len(self.prompts):
            refuse("seed", f"a list must have one seed per prompt ({len(self.prompts)}), got {len(self.seed)}")
        return self

    def sampling(self, logit_bias: tuple[tuple[int, float], ...], seed: int = 0) -> SamplingParams:
        given = {name: getattr(self, name) for name in SAMPLING_META}
        return SamplingParams(**given, seed=seed, logit_bias=logit_bias)

    @property
    def has_max_tokens(self) -> bool:
        """Whether it was given."""
        return "max_tokens" in self.model_fields_set

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


# The fields that most requests have no others than, with the types that most of them have.
_PLAIN: dict[str, Any] = {
    "model": str, "prompt": str, "max_tokens": int, "min_tokens": int, "n": int, "seed": int, "stop": str,
    "stream": bool, "logprobs": int, "echo": bool, "timeout_seconds": float,
    **{name: type(getattr(SamplingParams(), name)) for name in SAMPLING_META},
}  # fmt: skip
_BOUNDS = {"stop": Meta(min_length=1, max_length=1000), "seed": Meta(ge=0, le=2**63 - 1)}  # that unions hide


_sampling_values = operator.attrgetter(*[name for name in SamplingParams.__struct_fields__ if name in SAMPLING_META])


class PlainRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A generation request of plain fields, which msgspec validates in a tenth of pydantic's time.

    Has the attributes of GenerationRequest. The definition, and every error, is pydantic's: what is not accepted here
    is given to it.
    """

    def sampling(self, logit_bias: tuple[tuple[int, float], ...], seed: int = 0) -> SamplingParams:
        temperature, top_k, top_p, *others = _sampling_values(self)
        return SamplingParams(temperature, top_k, top_p, seed, *others, logit_bias)  # type: ignore[call-arg]

    @property
    def stops(self) -> list[str]:
        return [self.stop] if self.stop else []  # type: ignore[attr-defined]

    @property
    def prompts(self) -> list[Prompt]:
        return [self.prompt]  # type: ignore[attr-defined]


@functools.cache
def _plain_decoder(kind: type[GenerationRequest]) -> msgspec.json.Decoder[Any]:
    """Of a PlainRequest with the bounds and defaults of the kind, which `max_tokens` lacks."""
    fields: list[Any] = []
    for name, type_ in _PLAIN.items():
        field = kind.model_fields[name]
        bounds = _BOUNDS.get(name) or Meta(
            **{
                bound: value
                for constraint in field.metadata
                for bound in ("ge", "gt", "le", "lt", "min_length", "max_length")
                if (value := getattr(constraint, bound, None)) is not None
            }
        )
        fields.append((name, Annotated[type_, bounds], None if name == "max_tokens" else field.get_default()))
    others = {
        name: field.get_default(call_default_factory=True)
        for name, field in kind.model_fields.items()
        if name not in _PLAIN
    }
    others |= {"ignored_fields": [], "has_max_tokens": True}
    name = f"Plain{kind.__name__}"
    return msgspec.json.Decoder(msgspec.defstruct(name, fields, bases=(PlainRequest,), namespace=others))


def parse_plain(kind: type[BaseModel], body: bytes) -> Any:
    """A PlainRequest that means the same as `parse`; None: that has to decide."""
    if not issubclass(kind, GenerationRequest):
        return None
    try:
        request = _plain_decoder(kind).decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if request.max_tokens is None or request.min_tokens > request.max_tokens:
        return None
    return request


class ScoreRequest(ModelRequest):
    """Body of POST /v1/score: `texts`, or `continuations` of a `prefix`."""

    texts: Text | List[Text] | None = Field(
        None,
        description="texts to score: each character but the first, given those before it",
        examples=[["To be, or not to be"]],
    )
    prefix: Text = Field(
        "",
        description="text before each continuation; empty: the beginning of a document",
        examples=["To be or not to"],
    )
    continuations: List[Text] | None = Field(
        None, description="texts to score after the prefix: every character", examples=[[" be", " bee", " qqq"]]
    )
    characters: bool = Field(True, description="report the nats of each character, not only the sums", examples=[False])

    @model_validator(mode="after")
    def _one_of_two(self) -> ScoreRequest:
        if (self.texts is None) == (self.continuations is None):
            raise ApiError(400, "texts: give either texts or continuations", param="texts")
        return self


class NextRequest(ModelRequest):
    """Body of POST /v1/next."""

    prompt: Text | List[Text] = Field(
        "",
        description="text before the character, or a list of texts; empty: the beginning of a document",
        examples=["ROMEO"],
    )


class AttentionRequest(ModelRequest):
    """Body of POST /v1/attention."""

    text: Text = Field(
        max_length=MAX_ATTENTION_CHARACTERS,
        description=f"text to look at: at most the model's block_size and {MAX_ATTENTION_CHARACTERS} characters",
        examples=["To be"],
    )
    layer: int | None = Field(None, ge=0, le=MAX_ID, description="only this layer; 0 is the first", examples=[0])
    head: int | None = Field(None, ge=0, le=MAX_ID, description="only this head of each layer", examples=[1])
    scores: bool = Field(False, description="report the products of queries and keys too", examples=[True])


class TokenizeRequest(ModelRequest):
    """Body of POST /tokenize."""

    prompt: Text = Field(description="text to encode", examples=["ROMEO:"])


class DetokenizeRequest(ModelRequest):
    """Body of POST /detokenize."""

    tokens: List[Id] = Field(description="ids to decode", examples=[[30, 27, 25]])


AnyRequest = TypeVar("AnyRequest", bound=ModelRequest)

# What a union or a list must be, in place of one pydantic message per branch.
EXPECTED = {
    "prompt": "a text, a list of texts, or one or more lists of ids",
    "stop": f"a text or a list of at most {MAX_STOPS}, of 1 to 1000 characters each",
    "seed": f"an integer from 0 to {MAX_SEED}, or a list with one per prompt",
    "logit_bias": "an object of biases (-100 to 100) by character or id, or a list of [character or id, bias] pairs",
    "texts": "a text or a list of texts",
}


def parse(kind: type[AnyRequest], body: bytes | dict[str, Any]) -> AnyRequest:
    """The request in a JSON body, or in the fields of a query, whose values are strings.

    Raises:
        ApiError: 400, with the field, what was given and what is allowed.
    """
    ignored: list[str] = []
    try:
        if isinstance(body, dict):
            request = kind.model_validate(body, strict=False, context=ignored)
        else:
            request = kind.model_validate_json(body, context=ignored)
        request._ignored = ignored
        return request
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        place, message, given = problem["loc"], problem["msg"], problem["input"]
        if problem["type"] == "json_invalid":
            assert isinstance(body, bytes)
            raise invalid_json(body, message.removeprefix("Invalid JSON: ")) from None
        shown = f", got {shortened(given)}"
        if place and place[0] in EXPECTED:
            place, shown = place[:1], ""
            message = f"Input should be {EXPECTED[str(place[0])]}"
        param = ".".join(map(str, place)) or None
        raise ApiError(400, f"{param or 'body'}: {message}{shown}", param=param) from None


# An escaped half of a surrogate pair without its other half, or one in UTF-8. The backslash is not itself escaped.
_LONE_SURROGATE = re.compile(
    rb"(?:(?<!\\)(?:\\\\)+|(?<!\\)(?<!\\u[dD][89abAB][0-9a-fA-F]{2}))"
    rb"\\u([dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})|[c-fC-F][0-9a-fA-F]{2}))"
    rb"|(\xed[\xa0-\xbf][\x80-\xbf])"
)
SURROGATE_BYTES = 1 << 16  # looked at, before the place of an error


def invalid_json(body: bytes, reason: str, place: int | None = None) -> ApiError:
    """The error for a body that cannot be parsed, as a parser says; it is named if a lone surrogate is the reason.

    place: the byte at which the parser stopped; None: unknown, the body is small.
    """
    start, end = (0, len(body)) if place is None else (max(0, place - SURROGATE_BYTES), place + 16)
    found = _LONE_SURROGATE.search(body, start, end)
    if found is not None:
        code = found[1].decode().upper() if found[1] else f"{ord(found[2].decode(errors='surrogatepass')):04X}"
        at = found.start(1) - 2 if found[1] else found.start(2)
        reason = f"U+{code} at byte {at} is a lone surrogate, half of a pair and not a character"
    return ApiError(400, f"body is not valid JSON: {reason}", code="invalid_json")


def shortened(value: object) -> str:
    text = repr(value[:101] if isinstance(value, str | list) else value)
    return text if len(text) <= 100 else text[:100] + "…"


# -- answers --

FinishReason = Annotated[
    Literal["stop", "length"],
    Meta(description="stop: at a stop, or where the pattern ends or no longer match fits; length: at max_tokens"),
]
StreamedFinishReason = Annotated[
    Literal["stop", "length"] | None, Meta(description="as in a whole answer; null: more is to come")
]
Index = Annotated[int, Meta(description="prompt number × n + answer number")]
ChoiceSeed = Annotated[
    int,
    Meta(description="this prompt alone with this `seed` gives the same text again (with `suffix`, before it was cut)"),
]
RequestId = Annotated[str, Meta(description="the request's id")]


class ErrorDetails(msgspec.Struct):
    message: Annotated[str, Meta(description="the field, what was given and what is allowed, in words")]
    type: ErrorType
    param: Annotated[str | None, Meta(description="the field of the request, dotted if it is nested")]
    code: Annotated[str | None, Meta(description="what went wrong, for programs")]


class Error(msgspec.Struct):
    """The body of every error, as in OpenAI's API."""

    error: ErrorDetails


class Usage(msgspec.Struct, gc=False):
    """Characters, as a token is a character; `completion_tokens` counts those of all `best_of` candidates."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int = 0) -> Usage:
        return cls(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


class Timing(msgspec.Struct, gc=False):
    """Where the time went; with several sequences, the longest time is reported."""

    queue_seconds: Annotated[float, Meta(description="from the request's arrival to a cache slot")]
    prefill_seconds: Annotated[float, Meta(description="from the cache slot until the prompt has run")]
    decode_seconds: Annotated[float, Meta(description="from there to the last character")]
    seconds_per_character: Annotated[
        float | None, Meta(description="decode time per character after the first; null: there is none")
    ]


class Receipt(msgspec.Struct):
    """What reproduces this answer, and how long it took."""

    checkpoint_sha256: Annotated[str, Meta(description="of the checkpoint's manifest; also in /info")]
    backend: Annotated[str, Meta(description="what ran the model", examples=["native"])]
    dtype: Annotated[
        str, Meta(description="its arithmetic: only float64 gives the same text on every machine", examples=["float32"])
    ]
    seeds: Annotated[list[int], Meta(description="one per prompt; empty if nothing is sampled")]
    timing: Timing
    replaced_characters: Annotated[int, Meta(description="unknown characters of the request that were replaced")]
    dropped_characters: Annotated[int, Meta(description="unknown characters of the request that were dropped")]


class TokenLogprobs(msgspec.Struct):
    """Log-probabilities in nats under the unmodified model, as in OpenAI's API."""

    tokens: Annotated[list[str], Meta(description="the characters")]
    token_logprobs: Annotated[list[float | None], Meta(description="null: the first character of a document")]
    top_logprobs: Annotated[
        list[dict[str, float] | None], Meta(description="the likeliest characters, and the one in the text")
    ]
    text_offset: Annotated[list[int], Meta(description="of each character in the choice's text")]


class GenerateChoice(msgspec.Struct):
    """One text."""

    index: Index
    text: str
    finish_reason: FinishReason
    seed: ChoiceSeed
    logprobs: Annotated[TokenLogprobs | UnsetType, Meta(description="if requested")] = UNSET


class GenerateAnswer(msgspec.Struct):
    """Whole answer of POST /generate."""

    id: RequestId
    model: str
    choices: list[GenerateChoice]
    usage: Usage
    chargpt: Receipt


class GenerateEvent(msgspec.Struct):
    """Event of a stream of /generate: new characters of one choice."""

    index: Index
    text: str
    finish_reason: StreamedFinishReason
    seed: ChoiceSeed
    logprobs: Annotated[TokenLogprobs | UnsetType, Meta(description="of these characters, if requested")] = UNSET
    usage: Annotated[Usage | UnsetType, Meta(description="so far, with continuous_usage_stats")] = UNSET


class GenerateEnd(msgspec.Struct):
    """Last event of a stream of /generate before `[DONE]`."""

    id: RequestId
    model: str
    usage: Usage
    chargpt: Receipt


class ChunkChoice(msgspec.Struct):
    """New characters of one choice."""

    index: Index
    text: str
    logprobs: TokenLogprobs | None
    finish_reason: StreamedFinishReason
    seed: ChoiceSeed


class CompletionChoice(ChunkChoice):
    """One text, as in OpenAI's API; `seed` is added."""

    finish_reason: FinishReason


class Completion(msgspec.Struct):
    """Whole answer of POST /v1/completions, as in OpenAI's API; `chargpt` is added."""

    id: str
    object: Literal["text_completion"]
    created: Annotated[int, Meta(description="Unix time in seconds")]
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    chargpt: Receipt


class CompletionChunk(msgspec.Struct):
    """Event of a stream of /v1/completions, as in OpenAI's API."""

    id: str
    object: Literal["text_completion"]
    created: Annotated[int, Meta(description="Unix time in seconds")]
    model: str
    choices: Annotated[list[ChunkChoice], Meta(description="one, or none in the final usage chunk")]
    usage: Annotated[Usage | None | UnsetType, Meta(description="with include_usage, null until the final chunk")] = (
        UNSET
    )
    chargpt: Annotated[Receipt | UnsetType, Meta(description="with the last choice to end")] = UNSET


class Score(msgspec.Struct):
    """How likely one text is. Nats are negative log-likelihoods: fewer nats, likelier text."""

    index: int
    characters: Annotated[int, Meta(description="characters scored")]
    nats: float
    nats_per_character: Annotated[float | None, Meta(description="like the next two, null if nothing was scored")]
    bits_per_character: float | None
    perplexity: Annotated[float | None, Meta(description="per character: e to the nats per character")]
    rank: Annotated[int | UnsetType, Meta(description="among continuations: 1 is the likeliest")] = UNSET
    character_nats: Annotated[
        list[float | None] | UnsetType, Meta(description="null: the first character of a document")
    ] = UNSET


class ScoreAnswer(msgspec.Struct):
    """Answer of POST /v1/score."""

    id: RequestId
    model: str
    object: Literal["list"]
    data: list[Score]
    usage: Usage
    chargpt: Annotated[Receipt | UnsetType, Meta(description="absent if there was nothing to score")] = UNSET


class NextCharacter(msgspec.Struct):
    """A possible next character."""

    character: str
    id: int
    probability: float
    logprob: float


class Next(msgspec.Struct):
    """The distribution of the character after one prompt."""

    index: int
    entropy_nats: float
    entropy_bits: float
    distribution: Annotated[list[NextCharacter], Meta(description="the whole vocabulary, likeliest first")]


class NextAnswer(msgspec.Struct):
    """Answer of POST /v1/next."""

    id: RequestId
    model: str
    object: Literal["list"]
    data: list[Next]
    usage: Usage
    chargpt: Receipt


class HeadAttention(msgspec.Struct):
    """One head's attention over a text."""

    layer: int
    head: int
    weights: Annotated[list[list[float]], Meta(description="row t: of the characters 0 to t; it sums to 1")]
    scores: Annotated[
        list[list[float]] | UnsetType,
        Meta(description="query t · key j in row t, column j, before scale and mask; if requested"),
    ] = UNSET


class AttentionAnswer(msgspec.Struct):
    """Answer of POST /v1/attention, computed in float64."""

    id: RequestId
    model: str
    checkpoint_sha256: str
    text: Annotated[str, Meta(description="as it was read: unknown characters are replaced or dropped")]
    n_layer: int
    n_head: int
    scale: Annotated[float, Meta(description="of the scores before the softmax: 1 / √head_dim")]
    data: list[HeadAttention]
    replaced_characters: int
    dropped_characters: int


class TokenizeAnswer(msgspec.Struct):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: Annotated[int, Meta(description="longest prompt accepted")]
    tokens: list[int]
    replaced_characters: int
    dropped_characters: int


class DetokenizeAnswer(msgspec.Struct):
    """Answer of POST /detokenize."""

    prompt: str


class TokenizerInfo(msgspec.Struct):
    """Answer of GET /tokenizer_info, as in vLLM's API; lm-evaluation-harness reads it."""

    tokenizer_class: Literal["CharTokenizer"]
    vocab_size: int
    bos_token: Annotated[str | None, Meta(description="what an empty prompt means: a line break, if in the vocabulary")]
    eos_token: Annotated[str | None, Meta(description="what ends a text: of a model of records a line break")]
    pad_token: None


class ModelCard(msgspec.Struct):
    """The served model, as in OpenAI's API."""

    id: str
    object: Literal["model"]
    created: Annotated[int, Meta(description="when the service started, Unix time in seconds")]
    owned_by: str
    max_model_len: Annotated[int, Meta(description="longest prompt accepted")]


class ModelList(msgspec.Struct):
    """Answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class ServedModel(msgspec.Struct):
    """The checkpoint."""

    name: str
    checkpoint_sha256: str
    config: Annotated[dict[str, Any], Meta(description="hyperparameters of the network")]
    vocabulary: Annotated[str, Meta(description="every character; its index is its id")]
    records: Annotated[bool, Meta(description="it was trained on records: a prompt begins one, a line break ends it")]
    example_prompt: Annotated[str, Meta(description="a text to begin with; empty for records")]
    training: Annotated[dict[str, Any], Meta(description="training.json without paths: recipe, data and losses")]


class Limits(msgspec.Struct):
    """Settings that limit requests."""

    max_prompts: int
    max_prompt_characters: int
    max_tokens: int
    max_score_texts: int
    max_regex_characters: int
    max_body_bytes: int
    max_request_bytes: int
    max_running_requests: int
    max_queued_requests: int
    request_timeout_seconds: float
    max_attention_characters: Annotated[
        int, Meta(description="of a text for /v1/attention and this model; 0: not available")
    ]


class Info(msgspec.Struct):
    """Answer of GET /info."""

    model: Annotated[ServedModel, Meta(description="the one that the query names, ?model=NAME; else the default")]
    models: Annotated[list[str], Meta(description="names of all that are served")]
    limits: Limits
    unknown_characters: UnknownCharacters
    backend: str
    dtype: str
    devices: list[str]
    versions: dict[str, str]


class Status(msgspec.Struct):
    """Answer of a probe."""

    status: Literal["alive", "main process hangs", "ready", "shutting down", "draining", "no worker"]
