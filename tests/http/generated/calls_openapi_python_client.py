"""Calls of API.md with the client that openapi-python-client makes: `calls_openapi_python_client.py URL`.

Prints what the answers say as JSON, the same members as each program of this folder.
"""

import json
import sys

from client import Client
from client.api.characters import detokenize, get_tokenizer_info, tokenize
from client.api.information import get_info, get_model, list_models
from client.api.likelihood import next_character, score
from client.api.operation import readyz
from client.api.text import create_completion, generate
from client.models import (
    CompletionRequest,
    CompletionRequestLogitBiasType0,
    DetokenizeRequest,
    GenerateRequest,
    NextRequest,
    ScoreRequest,
    TokenizeRequest,
)

SEED = 2**53 - 1


def seeded(answer):
    return [answer.choices[0].text, answer.choices[0].seed, answer.chargpt.seeds]


with Client(base_url=sys.argv[1], raise_on_unexpected_status=True) as client:
    completion = create_completion.sync(
        client=client,
        body=CompletionRequest(
            prompt=["ab", "cd"],
            max_tokens=8,
            seed=[SEED, 7],
            logprobs=1,
            stop=["e", "f"],
            logit_bias=CompletionRequestLogitBiasType0.from_dict({"g": -2.5}),
        ),
    )
    scores = score.sync(client=client, body=ScoreRequest(texts=["abc", "cb"]))
    next = next_character.sync(client=client, body=NextRequest(prompt="ab")).data[0].distribution[0]
    tokens = tokenize.sync(client=client, body=TokenizeRequest(prompt="abc")).tokens
    tokenizer = get_tokenizer_info.sync(client=client)
    info = get_info.sync(client=client)
    failure = generate.sync_detailed(client=client, body=GenerateRequest(prompt="ab", max_tokens=-1))
    details = failure.parsed.error
    said = {
        "seeded": seeded(generate.sync(client=client, body=GenerateRequest(prompt="ab", max_tokens=8, seed=SEED))),
        "drawn": seeded(generate.sync(client=client, body=GenerateRequest(prompt="ab", max_tokens=8))),
        "completions": [[it.text, it.seed, it.finish_reason, it.logprobs.token_logprobs] for it in completion.choices],
        "scores": [[it.nats, it.characters] for it in scores.data],
        "next": [next.character, next.id, next.probability],
        "tokens": tokens,
        "text": detokenize.sync(client=client, body=DetokenizeRequest(tokens=tokens)).prompt,
        "vocab_size": tokenizer.vocab_size,
        "pad_token": tokenizer.pad_token,
        "model": get_model.sync(list_models.sync(client=client).data[0].id, client=client).id,
        "info": [info.model.vocabulary, info.limits.max_body_bytes],
        "status": readyz.sync(client=client).status,
        "error": [failure.status_code, details.param, details.type_],
    }
print(json.dumps(said))
