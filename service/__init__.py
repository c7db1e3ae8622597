"""Serve a character-level GPT checkpoint over HTTP; INTERNALS.md beside this file follows a request through it.

Imports: `model` needs torch, safetensors, numpy and msgspec; `engine` adds `wire` and `constrain`, and its worker.py
LitServe; `http` never loads torch; `training` uses `model`, `engine` and `wire`; `service` never imports `training`.
tests/test_imports.py enforces it.
"""
