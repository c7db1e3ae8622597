"""What some tests need beside Python packages. Where it is missing they are skipped.

CHARGPT_REQUIRE=docker,prometheus,… makes these skips failures, for areas that must not be missing: .ci/run sets it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

from training.data import cache_dir

VARIABLE = "CHARGPT_REQUIRE"
# Of each program the names under which distributions and its own release install it.
PROGRAMS = {
    "browser": {"chromium": ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")},
    "curl": {"curl": ("curl",)},
    "openssl": {"openssl": ("openssl",)},
    "prometheus": {
        "prometheus": ("prometheus",),
        "promtool": ("promtool",),
        "alertmanager": ("alertmanager", "prometheus-alertmanager"),
        "amtool": ("amtool",),
    },
}
OTHERS = ("compose", "corpus", "docker", "mount")
AREAS = sorted([*PROGRAMS, *OTHERS])
CORPUS = Path(os.environ.get("CHARGPT_DATA_DIR") or cache_dir()) / "tinyshakespeare.txt"


def required() -> frozenset[str]:
    """The areas of CHARGPT_REQUIRE.

    Raises:
        pytest.UsageError: an unknown one.
    """
    names = frozenset(filter(None, (name.strip() for name in os.environ.get(VARIABLE, "").split(","))))
    if unknown := sorted(names - set(AREAS)):
        raise pytest.UsageError(f"{VARIABLE}: unknown {', '.join(unknown)}; allowed are {', '.join(AREAS)}")
    return names


def missing(area: str, reason: str) -> NoReturn:
    """Skip the test; fail it where `area` is required."""
    assert area in AREAS, area
    if area in required():
        pytest.fail(f"{reason}, but {VARIABLE} names {area}", pytrace=False)
    pytest.skip(reason)


def find(area: str, program: str) -> str | None:
    names = PROGRAMS[area][program]
    if program == "chromium" and (chosen := os.environ.get("CHROMIUM")):
        names = (chosen,)
    return next(filter(None, map(shutil.which, names)), None)


def program(area: str, name: str | None = None) -> str:
    """The path of a program, by default of that with the area's name; skips the test without it."""
    (first, *_) = PROGRAMS[area]
    name = name or first
    return find(area, name) or missing(area, f"{name} is not installed")


def need(area: str) -> None:
    """Skip the test unless the whole area is here."""
    if area in PROGRAMS:
        for name in PROGRAMS[area]:
            program(area, name)
    elif area == "corpus" and not CORPUS.exists():
        missing(area, f"{CORPUS} is missing")
    elif area == "docker" and not _succeeds("docker", "version"):
        missing(area, "no Docker engine answers")
    elif area == "compose" and not _succeeds("docker", "compose", "version"):
        missing(area, "docker compose is not installed")


@cache
def _succeeds(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0
