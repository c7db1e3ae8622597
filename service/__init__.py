"""Serve a character-level GPT checkpoint over HTTP. INTERNALS.md in this folder follows a request through it.

Imports: `model` needs torch, safetensors, numpy and msgspec; `engine` adds `wire` and `constrain`, and its worker.py
LitServe; `http` never loads torch; `local` uses `text` and `engine`; `training` uses `model`, `engine`, `constrain` and
`wire`; `service` never imports `training`. tests/test_imports.py enforces it.
"""

from pathlib import Path

# Tiny Shakespeare; `make bundled` retrains it.
BUNDLED = Path(__file__).parent / "checkpoints" / "tinyshakespeare"


def release(package: str = "chargpt") -> str:
    """Return the version of an installed package; 0.0 if it is not installed, such as this program run from source."""
    from importlib import metadata  # imported here because it takes longer than this package

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "0.0"


def installing(extra: str) -> str:
    """The shell command that installs an extra of this package. pip takes the package as it is already installed."""
    import shlex
    import sys

    return f"{shlex.quote(sys.executable)} -m pip install 'chargpt[{extra}]'"
