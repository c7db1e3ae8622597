"""Serve a character-level GPT checkpoint over HTTP; INTERNALS.md beside this file follows a request through it.

Imports: `model` needs torch, safetensors, numpy and msgspec; `engine` adds `wire` and `constrain`, and its worker.py
LitServe; `http` never loads torch; `training` uses `model`, `engine` and `wire`; `service` never imports `training`.
tests/test_imports.py enforces it.
"""


def release() -> str:
    """The version of this program; 0.0, as without a git tag, where it runs from sources that were not installed."""
    from importlib import metadata  # which takes longer than the rest of this package

    try:
        return metadata.version("chargpt")
    except metadata.PackageNotFoundError:
        return "0.0"
