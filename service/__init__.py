"""Serve a character-level GPT checkpoint over HTTP: folders are processes.

    server.py       main process: the LitServe server, which starts and supervises the others
    http/           HTTP processes: routes, requests, answers
    wire.py         the messages between the two, carried by sockets.py
    engine/         inference processes: the loop around the model
    model/          the network and its checkpoint, which training writes
    constrain/      regular expressions and automata
    observe/        metrics, logs, traces

README.md beside this file follows a request through them. Imports: `model` needs torch, safetensors, numpy and msgspec;
`engine` adds `wire` and `constrain`, and its worker.py LitServe; `http` never loads torch; `training` uses `model`,
`engine` and `wire`; `service` never imports `training`. tests/test_imports.py enforces it.
"""
