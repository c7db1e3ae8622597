"""Programs and data that some tests need besides Python packages; tests are skipped without them.

CHARGPT_REQUIRE=docker,prometheus,… turns skips in these areas into failures; .ci/run sets it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

from training.text.files import cache_dir

VARIABLE = "CHARGPT_REQUIRE"
PROGRAMS = {  # by area
    "apache2": ("apache2",),
    "browser": ("chromium-headless-shell",),
    "caddy": ("caddy",),
    "compiler": ("c++",),
    "curl": ("curl",),
    "go": ("go",),
    "haproxy": ("haproxy",),
    "java": ("java", "javac"),
    "kubectl": ("kubectl",),
    "nginx": ("nginx",),
    "openssl": ("openssl",),
    "prometheus": ("prometheus", "promtool", "alertmanager", "amtool"),
    "qemu": ("qemu-aarch64", "aarch64-linux-gnu-g++"),  # arm64 programs on another machine
    "varnish": ("varnishd", "varnishncsa"),
}
OTHER_NAMES = {  # in distributions and upstream releases
    "chromium-headless-shell": ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"),
    "c++": ("g++", "clang++"),
    "alertmanager": ("prometheus-alertmanager",),
    "qemu-aarch64": ("qemu-aarch64-static",),
}
OTHERS = ("compose", "corpus", "cuda", "docker", "lm_eval", "mount")
AREAS = sorted([*PROGRAMS, *OTHERS])
CORPUS = Path(os.environ.get("CHARGPT_DATA_DIR") or cache_dir()) / "tinyshakespeare.txt"


def required() -> frozenset[str]:
    """The areas of CHARGPT_REQUIRE.

    Raises:
        pytest.UsageError: unknown area.
    """
    names = frozenset(filter(None, (name.strip() for name in os.environ.get(VARIABLE, "").split(","))))
    if unknown := sorted(names - set(AREAS)):
        raise pytest.UsageError(f"{VARIABLE}: unknown {', '.join(unknown)}; allowed are {', '.join(AREAS)}")
    return names


def missing(area: str, reason: str) -> NoReturn:
    """Skips the test, or fails it if `area` is required."""
    assert area in AREAS, area
    if area in required():
        pytest.fail(f"{reason}, but {VARIABLE} names {area}", pytrace=False)
    pytest.skip(reason)


def program(area: str, name: str | None = None) -> str:
    """The path of a program, by default the first of the area; skips the test if it is missing."""
    name = name or PROGRAMS[area][0]
    assert name in PROGRAMS[area], name
    chosen = os.environ.get("CHROMIUM") if area == "browser" else None
    names = (chosen,) if chosen else (name, *OTHER_NAMES.get(name, ()))
    return next(filter(None, map(shutil.which, names)), None) or missing(area, f"{name} is not installed")


def need(area: str) -> None:
    """Skips the test unless the whole area is available."""
    if area in PROGRAMS:
        for name in PROGRAMS[area]:
            program(area, name)
    elif area == "corpus" and not CORPUS.exists():
        missing(area, f"{CORPUS} is missing")
    elif area == "lm_eval" and not _succeeds(
        sys.executable, "-c", "import lm_eval.models.openai_completions, aiohttp, tenacity", PYTHONPATH=lm_eval_path()
    ):
        missing(area, "lm_eval and what its local-completions needs are not installed")
    elif area == "docker" and not _succeeds("docker", "version"):
        missing(area, "no Docker engine answers")
    elif area == "cuda" and not _has_gpu():
        missing(area, "no GPU that this build of torch can use")
    elif area == "compose" and not _succeeds("docker", "compose", "version"):
        missing(area, "docker compose is not installed")


def lm_eval_path() -> str:
    """Where lm-evaluation-harness is to be imported from, for PYTHONPATH."""
    return os.pathsep.join(filter(None, (os.environ.get("CHARGPT_LM_EVAL"), os.environ.get("PYTHONPATH"))))


@cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@cache
def _succeeds(*command: str, **environment: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, env=os.environ | environment).returncode == 0
