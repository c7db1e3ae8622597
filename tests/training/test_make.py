"""`make train` and `make serve`: what they run, and what they say to run next; Python is a stand-in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.toolbox.launch import ROOT

PYTHON = """#!/bin/sh
case "$1" in
  -c) exec {python} "$@" ;;
  -m) printf '%s\\n' "$@" > arguments ;;
esac
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Run a shell's line in a folder with the Makefile; returns the arguments of Python's last -m, and the output."""
    for name in ("Makefile", "pyproject.toml", "setup.py", "service/engine/native.cpp", "training/model/fused.cpp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text(PYTHON.format(python=sys.executable))
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)
    (tmp_path / ".venv" / ".installed-service,training").touch()
    for name in (
        "MAKEFLAGS",
        "MFLAGS",
        "MAKEOVERRIDES",
        "MAKELEVEL",
        "VENV",
        "TORCH",
        "PYTHON",
        "CHECKPOINT",
        "DATA",
        "NAME",
        "PRESET",
        "ARGS",
    ):
        monkeypatch.delenv(name, raising=False)

    def run(line, code=0):
        done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        arguments = tmp_path / "arguments"
        return arguments.read_text().splitlines() if arguments.exists() else [], done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    ("variables", "data", "name"),
    [
        ("", "tinyshakespeare", "tinyshakespeare"),
        ("DATA=../my.txt", "../my.txt", "my"),
        ("DATA=names.txt.gz", "names.txt.gz", "names"),
        ("DATA=../src/", "../src/", "src"),
        ("DATA=../my.txt NAME=other", "../my.txt", "other"),
        ('DATA="it\'s a text.txt"', "it's a text.txt", "it's a text"),
    ],
)
def test_a_run_is_named_after_its_text_and_the_next_command_serves_it(make, variables, data, name):
    arguments, output = make(f"make train {variables} ARGS='--steps 3'")
    expected = ["--preset", "cpu", "--data", data, "--out", f"checkpoints/{name}", "--steps", "3"]
    assert arguments == ["-m", "training", "train", *expected]
    *_, last = output.splitlines()
    following = last.removeprefix("Serve it: ")
    if name == "my":
        assert following == "make serve CHECKPOINT=checkpoints/my/best"  # as README's next line
    arguments, _ = make(following)
    assert arguments == ["-m", "service", "--checkpoint", f"checkpoints/{name}/best"]


def test_serve_offers_what_was_trained_last(make, tmp_path):
    bundled = ["-m", "service", "--checkpoint", "service/checkpoints/tinyshakespeare"]
    assert make("make serve")[0] == bundled
    assert "trained last" not in make("make serve")[1]
    for age, name in ((1, "it's new"), (9, "old")):
        (tmp_path / "checkpoints" / name / "best").mkdir(parents=True)
        os.utime(tmp_path / "checkpoints" / name / "best", (1e9 - age, 1e9 - age))
    arguments, output = make("make serve")
    assert arguments == bundled
    command = re.search("what was trained last: (.*)", output)[1]
    assert make(command)[0] == ["-m", "service", "--checkpoint", "checkpoints/it's new/best"]
    assert "trained last" not in make("make serve CHECKPOINT=checkpoints/old/best")[1]


def test_an_environment_that_was_moved_is_named_with_the_remedy(make, tmp_path):
    """Its scripts name the old folder: `pip: not found`."""
    (tmp_path / ".venv" / ".installed-service,training").unlink()
    (tmp_path / ".venv" / "bin" / "pip").write_text("#!/nowhere/.venv/bin/python\n")
    (tmp_path / ".venv" / "bin" / "pip").chmod(0o755)
    _, output = make("make train", code=2)
    assert ".venv does not work here, as after a move of the checkout: rm -r .venv, then make again" in output
