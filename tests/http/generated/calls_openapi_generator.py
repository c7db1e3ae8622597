"""Calls of API.md with the client that openapi-generator makes for Python: `calls_openapi_generator.py URL`.

Prints what the answers say as JSON, the same members as each program of this folder.
"""

import json
import sys

from openapi_client import ApiClient, ApiException, Configuration
from openapi_client.api import CharactersApi, InformationApi, LikelihoodApi, OperationApi, TextApi
from openapi_client.models import (
    CompletionRequest,
    CompletionRequestLogitBias,
    CompletionRequestPrompt,
    CompletionRequestSeed,
    CompletionRequestStop,
    DetokenizeRequest,
    GenerateRequest,
    NextRequest,
    NextRequestPrompt,
    ScoreRequest,
    ScoreRequestTexts,
    TokenizeRequest,
)

SEED = 2**53 - 1


def seeded(answer):
    return [answer.choices[0].text, answer.choices[0].seed, answer.chargpt.seeds]


with ApiClient(Configuration(host=sys.argv[1])) as client:
    text, likelihood, characters = TextApi(client), LikelihoodApi(client), CharactersApi(client)
    information = InformationApi(client)
    prompt = CompletionRequestPrompt("ab")
    completion = text.create_completion(
        CompletionRequest(
            prompt=CompletionRequestPrompt(["ab", "cd"]),
            max_tokens=8,
            seed=CompletionRequestSeed([SEED, 7]),
            logprobs=1,
            stop=CompletionRequestStop(["e", "f"]),
            logit_bias=CompletionRequestLogitBias({"g": -2.5}),
        )
    )
    scores = likelihood.score(ScoreRequest(texts=ScoreRequestTexts(["abc", "cb"])))
    next = likelihood.next_character(NextRequest(prompt=NextRequestPrompt("ab"))).data[0].distribution[0]
    tokens = characters.tokenize(TokenizeRequest(prompt="abc")).tokens
    tokenizer = characters.get_tokenizer_info()
    info = information.get_info()
    said = {
        "seeded": seeded(text.generate(GenerateRequest(prompt=prompt, max_tokens=8, seed=CompletionRequestSeed(SEED)))),
        "drawn": seeded(text.generate(GenerateRequest(prompt=prompt, max_tokens=8))),
        "completions": [[it.text, it.seed, it.finish_reason, it.logprobs.token_logprobs] for it in completion.choices],
        "scores": [[it.nats, it.characters] for it in scores.data],
        "next": [next.character, next.id, next.probability],
        "tokens": tokens,
        "text": characters.detokenize(DetokenizeRequest(tokens=tokens)).prompt,
        "vocab_size": tokenizer.vocab_size,
        "pad_token": tokenizer.pad_token,
        "model": information.get_model(information.list_models().data[0].id).id,
        "info": [info.model.vocabulary, info.limits.max_body_bytes],
        "status": OperationApi(client).readyz().status,
    }
    try:
        # The model would refuse -1 itself.
        text.generate(GenerateRequest.model_construct(prompt=prompt, max_tokens=-1))
    except ApiException as error:
        details = error.data.error
        said["error"] = [error.status, details.param, details.type]
print(json.dumps(said))
