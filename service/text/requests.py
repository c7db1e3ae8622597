"""The fields of requests: the name, type, bounds, default and meaning of each, which /docs shows.

Pydantic models explain an invalid field. Bounds that depend on the model or a server are checked later (generation.py).
"""

from __future__ import annotations

import operator
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    Strict,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from service.model.params import MAX_BIAS, MAX_SEED, SAMPLING_META, SamplingParams
from service.text.errors import InvalidRequestError, invalid
from service.text.foreign import check_unknown, generation_fields
from service.words import shortened

MAX_CHOICES = 1000
MAX_STOPS = 16
MAX_BIASES = 10_000
MAX_BAD_WORDS = 256
MAX_ID = 2**31 - 1
MAX_SEQUENCES = 10_000  # maximum of a request, whatever the server's limit
MAX_ATTENTION_CHARACTERS = 256
MAX_TOKENS = 256  # default of /generate and of Python; OpenAI's completions have 16

Item = TypeVar("Item")
# Validated up to the first error, because only that is reported.
List = Annotated[list[Item], Field(fail_fast=True)]
Character = Annotated[str, Field(min_length=1, max_length=1)]
# A text of the model's characters. This format replaces a pattern that would list thousands of them.
Text = Annotated[str, Field(json_schema_extra={"format": "vocabulary"})]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
Pattern = Annotated[str, Field(min_length=1, json_schema_extra={"format": "regex"})]
ChoiceString = Annotated[Text, Field(min_length=1, max_length=1000)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Id = Annotated[int, Field(ge=0, le=MAX_ID)]
StopIds = Annotated[List[Id], Field(max_length=MAX_STOPS)]
AllowedIds = Annotated[List[Id], Field(min_length=1, max_length=MAX_BIASES)]
BadWord = Annotated[Text, Field(min_length=1, max_length=100)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
BiasPair = Annotated[tuple[Character | Id, Bias], Strict(False)]  # JSON has no tuples: accept a list
Prompt = str | list[int]
UnknownCharacters = Literal["refuse", "replace", "drop"]


def field(default: Any, *examples: Any, **bounds: Any) -> Any:
    return Field(default, examples=[*examples], **bounds)


def _sampling(name: str) -> Any:
    meta, default = SAMPLING_META[name], getattr(SamplingParams(), name)
    return field(default, *meta.examples or (), description=meta.description, ge=meta.ge, gt=meta.gt, le=meta.le)


class Body(BaseModel):
    """A request body. Invalid fields are refused. null means the default of a field.

    The validation's context, a list, gets the names of unknown fields, unless they are probably typos of known ones.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
    path: ClassVar[str] = ""  # prefix of this body's fields in errors

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            name = cls.path.removesuffix(".")
            message = f"{name or 'body'}: Input should be an object, got {shortened(data)}"
            raise InvalidRequestError(message, name or None)
        data, fields = cls._mapped(data), cls.__pydantic_fields__
        if not data.keys() <= fields.keys():
            unknown = [name for name in data if name not in fields]
            given = [name for name, value in data.items() if value is not None]
            check_unknown(cls.path, unknown, tuple(fields), given)
            if info.context is not None:
                info.context.extend(cls.path + name for name in unknown)
            data = {name: value for name, value in data.items() if name in fields}
        if None in data.values():
            data = {name: value for name, value in data.items() if value is not None or fields[name].is_required()}
        return data

    @classmethod
    def _mapped(cls, data: dict[str, Any]) -> dict[str, Any]:
        return data

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, field in schema["properties"].items():
            field["description"] = field["description"].replace("\n", " ")
            if field.get("default", ...) is None:  # the description says what the default is
                del field["default"]
            if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                about = {key: field.pop(key) for key in ("description", "default", "examples") if key in field}
                branches = field["anyOf"] if "anyOf" in field else [field]
                if len(branches) > 1:  # generators do not know of which branch a default is
                    about.pop("default", None)
                schema["properties"][name] = {"anyOf": [*branches, {"type": "null"}], **about}
        return schema


class TextRequest(Body):
    """Fields that all requests share."""

    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def ignored_fields(self) -> list[str]:
        """The names of unknown fields."""
        return self._ignored

    unknown_characters: UnknownCharacters | None = field(None, "replace")
    """for characters absent from the vocabulary: refuse the request, replace them or drop them; the answer counts them.
    Default: the server's setting"""
    replacement_character: Character | None = field(None, " ")
    """replacement for an unknown character. Default: the vocabulary's unknown symbol, else a space"""


CONDITIONS = ("regex", "choice", "allowed_characters", "allowed_token_ids", "bad_words", "min_tokens")
_EARLY = ", which could end the answer before a match"
_ENDS = ("stop", "stop_token_ids", "stop_regex")
_CONFLICTS = (
    ("regex", "choice", ""),
    *((name, end, _EARLY) for name in ("regex", "choice") for end in _ENDS),
    ("allowed_token_ids", "allowed_characters", ""),
    ("logprobs", "suffix", ""),
)
_CONFLICTING = {name for conflict in _CONFLICTS for name in conflict[:2]}
_sampling_values = operator.attrgetter(*[name for name in SamplingParams.__struct_fields__ if name in SAMPLING_META])


class GenerationRequest(TextRequest):
    """A text to continue."""

    @classmethod
    def _mapped(cls, data: dict[str, Any]) -> dict[str, Any]:
        return generation_fields(data)

    prompt: Text | List[Text] | List[Id] | List[List[Id]] = field("", "ROMEO:")
    """text to continue, or a list of texts, or ids. An empty text means the beginning of a document: a line break that
    is not part of the answer. For a model of records, a text is the beginning of one: the end of another precedes it
    unseen, and the answer ends at its own. That is a line break, or U+001E if records have several lines"""
    truncate_prompt_tokens: int | None = field(None, 500, ge=-1, le=MAX_ID)
    """use only the last this many characters of each prompt; -1: as many as are accepted"""
    suffix: Text | None = field(None, "\n\nJULIET:")
    """text that follows the answer (infill): `best_of` candidates are sampled and cut where the suffix is likely to
    begin. Those after which the suffix is likeliest are the answers"""
    max_tokens: int = field(16, 80, ge=0)
    """maximum number of characters to generate. The default is lowered to the server's limit"""
    min_tokens: int = field(0, 20, ge=0)
    """minimum number of characters: stops before this are ignored, and `regex` and `choice` match with at least so
    many"""
    ignore_eos: bool = field(False, True)
    """of a model of records: go on after the end of one; no effect on other models, which have no
    end-of-text character"""
    n: int = field(1, 2, ge=1, le=MAX_SEQUENCES)
    """answers per prompt; the server limits prompts × n"""
    best_of: int | None = field(None, 4, ge=1, le=MAX_SEQUENCES)
    """sample this many per prompt and return the `n` with the highest mean log-probability (empty texts, then repeated
    ones last), or with `suffix` those after which it is likeliest; the server limits prompts × best_of. Default: n;
    with `suffix`, 8"""
    seed: Seed | Annotated[List[Seed], Field(max_length=MAX_SEQUENCES)] | None = field(None, 1)
    """the same seed gives the same text; a list has one per prompt. Answer j of a prompt uses seed + j. Default:
    random, reported in the answer"""
    temperature: float = _sampling("temperature")
    top_k: int = _sampling("top_k")
    top_p: float = _sampling("top_p")
    min_p: float = _sampling("min_p")
    typical_p: float = _sampling("typical_p")
    repetition_penalty: float = _sampling("repetition_penalty")
    presence_penalty: float = _sampling("presence_penalty")
    frequency_penalty: float = _sampling("frequency_penalty")
    logit_bias: (
        Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)]
        | Annotated[List[BiasPair], Field(max_length=MAX_BIASES)]
    ) = Field(default_factory=dict, examples=[{"e": -100, "\n": 2.5}, [["e", -100], [5, 1.0]]])
    """added to logits, -100 to 100. The keys of an object are ids in decimal (as in OpenAI's API) or any other single
    character: {"5": -100} is about id 5. In a list of pairs, [["5", -100]] is about the character 5 and [[5, -100]]
    about id 5"""
    stop: StopString | Annotated[List[StopString], Field(max_length=MAX_STOPS)] | None = field(None, ["\n\n", "ROMEO:"])
    """the text ends before the first of these"""
    stop_token_ids: StopIds | None = field(None, [0])
    """as `stop`, by the ids of single characters"""
    stop_regex: Pattern | None = field(None, "\n[A-Z]+:")
    """the text ends before the first match of this regular expression, which must not match the empty text"""
    include_stop_str_in_output: bool = field(False, True)
    """keep the stop at the end of the text"""
    regex: Pattern | None = field(None, "[A-Z][a-z]+( [A-Z][a-z]+)?")
    """the whole answer matches this regular expression: literals, classes, groups, alternation and repetition. Once the
    text matches, it ends as soon as the model samples a character that would break the match; a record ends with its
    own end"""
    choice: Annotated[List[ChoiceString], Field(min_length=1, max_length=MAX_CHOICES)] | None = field(
        None, ["yes", "no"]
    )
    """the answer is one of these texts"""
    allowed_characters: Text | None = field(None, "ACGT", min_length=1)
    """the answer contains only these characters"""
    allowed_token_ids: AllowedIds | None = field(None, [1, 2, 3])
    """as `allowed_characters`, by their ids"""
    bad_words: Annotated[List[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = field(None, ["qq"])
    """the answer contains none of these texts"""
    exact: bool = field(False, True)
    """draw the answers as the model itself would write them under the condition of `regex`, `choice`,
    `allowed_characters`, `bad_words` and `min_tokens`: free candidates are sampled, and the first `n` that match are
    the answers. Default: a mask, which allows only what can still match and so draws from another distribution"""
    max_candidates: int | None = field(None, 2000, ge=1, le=MAX_ID)
    """with `exact`: candidates that an answer may cost. Default: the server's limit"""
    max_candidate_characters: int | None = field(None, 100_000, ge=1, le=MAX_ID)
    """with `exact`: characters of candidates that an answer may cost. Default: the server's limit"""
    logprobs: int | None = field(None, 3, ge=0)
    """report the log-probability of each character under the unmodified model, and of this many of the likeliest; at
    most the size of the vocabulary"""
    echo: bool = field(False, True)
    """begin the answer with the prompt, and its log-probabilities if requested"""

    @model_validator(mode="after")
    def _fields_agree(self) -> GenerationRequest:
        given = [name for name in _CONFLICTING & self.model_fields_set if getattr(self, name) not in (None, "", [])]
        for name, other, reason in _CONFLICTS if len(given) > 1 else ():
            if name in given and other in given:
                raise invalid(name, f"cannot be combined with {other}{reason}")
        if self.exact:
            self._check_exact()
        else:
            for name in ("max_candidates", "max_candidate_characters"):
                if getattr(self, name):
                    raise invalid(name, "needs exact")
        if self.min_tokens > self.max_tokens:
            raise invalid("min_tokens", f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.best_of is not None and self.best_of < self.n:
            raise invalid("best_of", f"must be at least n ({self.n}), got {self.best_of}")
        if isinstance(self.seed, list) and len(self.seed) != len(self.prompts):
            raise invalid("seed", f"a list must have one seed per prompt ({len(self.prompts)}), got {len(self.seed)}")
        return self

    def _check_exact(self) -> None:
        for name, is_given in (
            ("suffix", self.suffix),
            ("echo", self.echo),
            ("best_of", self.best_of not in (None, self.n)),
        ):
            if is_given:
                raise invalid("exact", f"cannot be combined with {name}")
        if self.max_tokens == 0:
            raise invalid("exact", "needs max_tokens of at least 1, got 0")
        if not any(getattr(self, name) for name in CONDITIONS):
            raise invalid("exact", f"needs a condition: one of {', '.join(CONDITIONS)}")

    def sampling(self, logit_bias: tuple[tuple[int, float], ...], seed: int = 0) -> SamplingParams:
        temperature, top_k, top_p, *others = _sampling_values(self)
        return SamplingParams(temperature, top_k, top_p, seed, *others, logit_bias)  # type: ignore[call-arg]

    @property
    def has_max_tokens(self) -> bool:
        """True if the request has max_tokens."""
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


class ScoreRequest(TextRequest):
    """`texts` to score, or `continuations` of a `prefix`."""

    texts: Text | List[Text] | None = field(None, ["To be, or not to be"])
    """texts to score: each character but the first, given those before it"""
    prefix: Text = field("", "To be or not to")
    """text before each continuation; empty: the beginning of a document"""
    continuations: List[Text] | None = field(None, [" be", " bee", " qqq"])
    """texts to score after the prefix: every character"""
    characters: bool = field(True, False)
    """report the nats of each character, not only the sums"""

    @model_validator(mode="after")
    def _one_of_two(self) -> ScoreRequest:
        if (self.texts is None) == (self.continuations is None):
            raise invalid("texts", "give either texts or continuations")
        if self.texts is not None and self.prefix:
            raise invalid("prefix", "needs continuations")
        return self


class NextRequest(TextRequest):
    """Prompts, before the next character."""

    prompt: Text | List[Text] = field("", "ROMEO")
    """text before the character, or a list of texts; empty: the beginning of a document"""

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


class AttentionRequest(TextRequest):
    """A text to look at."""

    text: Text = field(
        ..., "To be", max_length=MAX_ATTENTION_CHARACTERS,
        description=f"text to look at: at most the model's block_size and {MAX_ATTENTION_CHARACTERS} characters",
    )  # fmt: skip
    layer: int | None = field(None, 0, ge=0, le=MAX_ID)
    """only this layer; 0 is the first"""
    head: int | None = field(None, 0, ge=0, le=MAX_ID)
    """only this head of each layer"""
    scores: bool = field(False, True)
    """report the products of queries and keys too"""
    values: bool = field(False, True)
    """report the value vectors too, which the weights mix"""


class TokenizeRequest(TextRequest):
    """A text to encode."""

    prompt: Text = field(..., "ROMEO:")
    """text to encode"""


class DetokenizeRequest(TextRequest):
    """Ids to decode."""

    tokens: List[Id] = field(..., [30, 27, 25])
    """ids to decode"""
