"""Examples of requests, for /openapi.json: in the vocabulary of a model, so that they work as they are."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from service.http.schema import requests as b
from service.model.tokenizer import CharTokenizer

TEXTS = {
    "suffix", "choice", "allowed_characters", "allowed_token_ids", "stop_token_ids", "bad_words", "logit_bias",
    "texts", "prefix", "continuations", "tokens", "text",
}  # fmt: skip


def adapt_examples(fields: dict[str, Any], tokenizer: CharTokenizer, model: str, example: str) -> None:
    """Make the examples of a request's fields valid for a model."""
    for name, field in fields.items():
        if name == "model":
            field["examples"] = [model]
        elif name == "prompt":
            # Records begin with an empty prompt. A letter shows more.
            letter = next(filter(str.isalpha, tokenizer.characters), tokenizer.characters[0])
            field["examples"] = [example.strip() or letter]
        elif name in TEXTS:
            field["examples"] = _in_vocabulary(field["examples"], tokenizer)


def _in_vocabulary(value: Any, tokenizer: CharTokenizer) -> Any:
    """Return an example with unknown characters and ids replaced."""
    match value:
        case str():
            return tokenizer.adapted(value)
        case int():
            return min(value, tokenizer.vocab_size - 1)
        case list():
            return [_in_vocabulary(part, tokenizer) for part in value]
        case dict():
            return {_in_vocabulary(key, tokenizer): part for key, part in value.items()}
    return value


def request_examples(request: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return bodies made of the examples of their fields."""
    examples = {name: field["examples"][0] for name, field in schemas[request.__name__]["properties"].items()}
    (main,) = [name for name in ("prompt", "texts", "text", "tokens") if name in examples]
    body = {main: examples[main]}
    bodies = {main.replace("prompt", "a text"): body}
    if issubclass(request, b.StreamedRequest):
        prompt, end = body["prompt"], body["prompt"][-1]
        body |= {"max_tokens": 16}
        if request is b.CompletionRequest:
            body |= {"model": examples["model"]}
        bodies |= {
            "a stream": body | {"seed": 1, "stream": True},
            "answers to several prompts": body | {"prompt": [prompt, end], "n": 2, "temperature": 0.8},
            "up to a stop": body | {"stop": [end], "logprobs": 1},
            "one of two texts": body | {"choice": [prompt[0], end]},
            "between prompt and suffix": body | {"suffix": prompt, "best_of": 4},
        }
    elif request is b.ScoreRequest:
        bodies["continuations"] = {name: examples[name] for name in ("prefix", "continuations", "characters")}
    elif request is b.AttentionRequest:
        bodies["one head"] = {name: examples[name] for name in ("text", "layer", "head", "scores")}
    return {name.replace(" ", "_"): {"summary": name, "value": value} for name, value in bodies.items()}
