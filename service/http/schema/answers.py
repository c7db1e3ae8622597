"""The bodies of answers, which /docs shows: plain dicts, whose members the routes add in this order.

The bodies of requests are in requests.py, errors in errors.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic needs this before Python 3.12

from service.text.requests import UnknownCharacters


def about(description: str, *examples: str) -> Any:
    return Field(description=description, examples=[*examples] or None)


FinishReason = Annotated[
    Literal["stop", "length"],
    about("stop: at a stop, or where the pattern ends or no longer match fits; length: at max_tokens"),
]
StreamedFinishReason = Annotated[Literal["stop", "length"] | None, about("as in a whole answer; null: more is to come")]
Index = Annotated[int, about("prompt number × n + answer number")]
ChoiceSeed = Annotated[
    int,
    about("this prompt alone with this `seed` gives the same text again (with `suffix`, before it was cut)"),
]
RequestId = Annotated[str, about("the request's id")]


class Usage(TypedDict):
    """Numbers of characters, because a token is a character. `completion_tokens` includes all `best_of` candidates."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def usage(prompt_tokens: int, completion_tokens: int = 0) -> Usage:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


class Timing(TypedDict):
    """Durations. With several sequences, each is the longest one, and the time per character is the mean."""

    queue_seconds: Annotated[float, about("from the request's arrival to a cache slot")]
    prefill_seconds: Annotated[float, about("from the cache slot until the prompt has run")]
    decode_seconds: Annotated[float, about("from the end of the prompt to the last character")]
    seconds_per_character: Annotated[
        float | None, about("decode time per character after the first; null: no such character")
    ]


class Exact(TypedDict):
    """The cost of exact answers, over all prompts."""

    candidates: Annotated[int, about("candidates sampled, up to the last answer")]
    matches: Annotated[int, about("candidates that are answers")]
    acceptance: Annotated[float, about("matches / candidates")]
    characters: Annotated[int, about("characters of these candidates, up to the drop of each")]


class Receipt(TypedDict):
    """The data that reproduce this answer, and its durations."""

    checkpoint_sha256: Annotated[str, about("of the checkpoint's manifest; also in /info")]
    backend: Annotated[str, about("backend that ran the model", "native")]
    dtype: Annotated[
        str, about("number format of the model: only float64 gives the same text on every machine", "float32")
    ]
    seeds: Annotated[list[int], about("one seed per prompt; empty if nothing is sampled")]
    timing: Timing
    replaced_characters: Annotated[int, about("unknown characters of the request that were replaced")]
    dropped_characters: Annotated[int, about("unknown characters of the request that were dropped")]
    exact: NotRequired[Annotated[Exact, about("with `exact`")]]


class TokenLogprobs(TypedDict):
    """Log-probabilities in nats under the unmodified model, as in OpenAI's API."""

    tokens: Annotated[list[str], about("the characters")]
    token_logprobs: Annotated[list[float | None], about("null: the first character of a document")]
    top_logprobs: Annotated[list[dict[str, float] | None], about("the likeliest characters, and the one in the text")]
    text_offset: Annotated[list[int], about("of each character in the choice's text")]


IsExact = Annotated[bool, about("true, with `exact`")]


class GenerateChoice(TypedDict):
    """One text."""

    index: Index
    text: str
    finish_reason: FinishReason
    seed: ChoiceSeed
    logprobs: NotRequired[Annotated[TokenLogprobs, about("if requested")]]
    exact: NotRequired[IsExact]


class GenerateAnswer(TypedDict):
    """Whole answer of POST /generate."""

    id: RequestId
    model: str
    choices: list[GenerateChoice]
    usage: Usage
    chargpt: Receipt


class GenerateEvent(TypedDict):
    """Event of a stream of /generate: new characters of one choice."""

    index: Index
    text: str
    finish_reason: StreamedFinishReason
    seed: ChoiceSeed
    logprobs: NotRequired[Annotated[TokenLogprobs, about("of these characters, if requested")]]
    exact: NotRequired[IsExact]
    usage: NotRequired[Annotated[Usage, about("so far, with continuous_usage_stats")]]


class GenerateEnd(TypedDict):
    """Last event of a stream of /generate before `[DONE]`."""

    id: RequestId
    model: str
    usage: Usage
    chargpt: Receipt


class ChunkChoice(TypedDict):
    """New characters of one choice."""

    index: Index
    text: str
    logprobs: TokenLogprobs | None
    finish_reason: StreamedFinishReason
    seed: ChoiceSeed
    exact: NotRequired[IsExact]


class CompletionChoice(TypedDict):
    """One text, as in OpenAI's API; `seed` is added."""

    index: Index
    text: str
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason
    seed: ChoiceSeed
    exact: NotRequired[IsExact]


class Completion(TypedDict):
    """Whole answer of POST /v1/completions, as in OpenAI's API; `chargpt` is added."""

    id: str
    object: Literal["text_completion"]
    created: Annotated[int, about("Unix time in seconds")]
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    chargpt: Receipt


class CompletionChunk(TypedDict):
    """Event of a stream of /v1/completions, as in OpenAI's API."""

    id: str
    object: Literal["text_completion"]
    created: Annotated[int, about("Unix time in seconds")]
    model: str
    choices: Annotated[list[ChunkChoice], about("one, or none in the final usage chunk")]
    usage: NotRequired[Annotated[Usage | None, about("with include_usage, null until the final chunk")]]
    chargpt: NotRequired[Annotated[Receipt, about("with the last choice to end")]]


class Score(TypedDict):
    """The likelihood of one text. Nats are negative log-likelihoods: fewer nats mean a likelier text."""

    index: int
    characters: Annotated[int, about("characters scored")]
    nats: float
    nats_per_character: Annotated[float | None, about("null if nothing was scored, like the next two")]
    bits_per_character: float | None
    perplexity: Annotated[float | None, about("per character: e to the nats per character")]
    unknown_characters: NotRequired[
        Annotated[int, about("of the text; absent if they are refused and the vocabulary has no unknown symbol")]
    ]
    rank: NotRequired[Annotated[int, about("among continuations: 1 is the likeliest")]]
    character_nats: NotRequired[Annotated[list[float | None], about("null: the first character of a document")]]


class ScoreAnswer(TypedDict):
    """Answer of POST /v1/score."""

    id: RequestId
    model: str
    object: Literal["list"]
    data: list[Score]
    usage: Usage
    chargpt: NotRequired[Annotated[Receipt, about("absent if there was nothing to score")]]


class NextCharacter(TypedDict):
    """A possible next character."""

    character: str
    id: int
    probability: float
    logprob: float


class Next(TypedDict):
    """The distribution of the character after one prompt."""

    index: int
    entropy_nats: float
    entropy_bits: float
    distribution: Annotated[list[NextCharacter], about("the whole vocabulary, likeliest first")]


class NextAnswer(TypedDict):
    """Answer of POST /v1/next."""

    id: RequestId
    model: str
    object: Literal["list"]
    data: list[Next]
    usage: Usage
    chargpt: Receipt


class HeadAttention(TypedDict):
    """One head's attention over a text."""

    layer: int
    head: int
    weights: Annotated[list[list[float]], about("row t: weights of the characters 0 to t, which sum to 1")]
    scores: NotRequired[
        Annotated[list[list[float]], about("query t · key j in row t, column j, before scale and mask; if requested")]
    ]
    values: NotRequired[Annotated[list[list[float]], about("the value vector of each character; if requested")]]


class AttentionAnswer(TypedDict):
    """Answer of POST /v1/attention, computed in float64."""

    id: RequestId
    model: str
    checkpoint_sha256: str
    text: Annotated[str, about("the text as read, with unknown characters replaced or dropped")]
    n_layer: int
    n_head: int
    scale: Annotated[float, about("factor of the scores before the softmax: 1 / √head_dim")]
    data: list[HeadAttention]
    replaced_characters: int
    dropped_characters: int


class TokenizeAnswer(TypedDict):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: Annotated[int, about("longest prompt accepted")]
    tokens: list[int]
    replaced_characters: int
    dropped_characters: int


class DetokenizeAnswer(TypedDict):
    """Answer of POST /detokenize."""

    prompt: str


class TokenizerInfo(TypedDict):
    """Answer of GET /tokenizer_info, as in vLLM's API; lm-evaluation-harness reads it."""

    tokenizer_class: Literal["CharTokenizer"]
    vocab_size: int
    bos_token: Annotated[str | None, about("the meaning of an empty prompt: a line break, or the end of a record")]
    eos_token: Annotated[str | None, about("the end of a record: a line break, or U+001E after several lines")]
    unk_token: Annotated[str | None, about("the unknown symbol, U+FFFD, if the vocabulary has no rare characters")]
    pad_token: Annotated[str | None, about("always null: no padding")]


class ModelCard(TypedDict):
    """The served model, as in OpenAI's API."""

    id: str
    object: Literal["model"]
    created: Annotated[int, about("when the service started, Unix time in seconds")]
    owned_by: str
    max_model_len: Annotated[int, about("longest prompt accepted")]


class ModelList(TypedDict):
    """Answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class ServedModel(TypedDict):
    """The checkpoint."""

    name: str
    checkpoint_sha256: str
    config: Annotated[dict[str, Any], about("hyperparameters of the network")]
    vocabulary: Annotated[str, about("every character; its index is its id")]
    records: Annotated[bool, about("true: trained on records; a prompt begins a record, and the model ends it")]
    example_prompt: Annotated[str, about("a text to begin with; empty for records")]
    training: Annotated[dict[str, Any], about("training.json without paths: recipe, data and losses")]


class Limits(TypedDict):
    """Limits of requests."""

    max_prompts: int
    max_prompt_characters: int
    max_tokens: int
    max_score_texts: int
    max_candidates: int
    max_candidate_characters: int
    max_regex_characters: int
    max_body_bytes: int
    max_request_bytes: int
    max_running_requests: int
    max_queued_requests: int
    request_timeout_seconds: float
    max_attention_characters: Annotated[
        int, about("maximum length of a text for /v1/attention and this model; 0: not available")
    ]


class Info(TypedDict):
    """Answer of GET /info."""

    model: Annotated[ServedModel, about("the model that the query names (?model=NAME), or the default")]
    models: Annotated[list[str], about("names of all served models")]
    limits: Limits
    unknown_characters: UnknownCharacters
    backend: str
    dtype: str
    devices: list[str]
    versions: dict[str, str]


class Status(TypedDict):
    """Answer of a probe."""

    status: Literal["alive", "main process hangs", "ready", "shutting down", "draining", "no worker"]
