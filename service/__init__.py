"""Serve a character-level GPT checkpoint over HTTP.

A map, in the order a request passes:

    server.py      builds the LitServe server: starts, supervises and ends the processes
    edge.py        HTTP process: request ids, API keys, bounds on bodies, before any route
    api.py         HTTP process: the routes, from a request's body to its answer
    protocol.py    what requests and errors look like
    regex.py       patterns that an answer must match, or ends at, to automata
    run.py         the sequences of one request, from submission to pieces of text
    answers.py     what answers and events look like
    responses.py   how they go out, whole or streamed
    openapi.py     the OpenAPI document and /docs
    client.py      submits sequences to the inference processes and gathers what they send
    transport.py   frames between the HTTP processes and the inference processes
    worker.py      inference process: the loop that takes arrivals and sends deltas
    engine.py      submit / abort / step over character ids
    scheduler.py   who gets a cache slot, when, and when a sequence ends
    model/         the network, its cache, the sampler, the tokenizer, the checkpoint folder
    metrics.py     every metric
    settings.py    every setting

Import rule: `service.model` imports torch, safetensors and itself; `service.engine.engine` and
`service.engine.scheduler` add nothing to that; `training` imports `service.model` and `service.engine.engine`;
`service` never imports `training`. `tests/test_imports.py` holds it.
"""
