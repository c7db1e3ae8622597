"""Serve a character-level GPT checkpoint over HTTP.

A map, in the order a request passes:

    server.py      HTTP process: routes, streaming, probes; builds the LitServe server
    protocol.py    what requests, answers and errors look like
    transport.py   frames between the HTTP processes and the inference processes
    worker.py      inference process: the loop that takes arrivals and sends deltas
    engine.py      submit / abort / step over character ids
    scheduler.py   who gets a cache slot, when, and when a sequence ends
    model/         the network, its cache, the sampler, the tokenizer, the checkpoint folder
    metrics.py     every metric
    settings.py    every setting

Import rule: `service.model` imports torch, safetensors and itself; `service.engine` and
`service.scheduler` add nothing to that; `training` imports `service.model` and `service.engine`;
`service` never imports `training`. `tests/test_imports.py` holds it.
"""
