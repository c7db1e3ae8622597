"""The command chargpt, run as `python -m service.command`; tests/test_install.py runs it as it is installed."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version

import pytest

from service import installing
from service.command import COMMANDS
from tests.toolbox.launch import ROOT
from training.__main__ import build_parser

OURS = "service.command"


def run(*arguments, module=OURS):
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_help_lists_every_command_on_one_screen():
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    training = next(action for action in build_parser()._actions if action.dest == "command").choices
    assert set(COMMANDS) == {"serve", *training}
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(COMMANDS)


@pytest.mark.parametrize(
    ("module", "arguments", "code", "message"),
    [
        (OURS, "trian", 2, "chargpt: unknown command 'trian'\nusage: "),
        (OURS, "", 2, "chargpt: no command given\nusage: "),
        (OURS, "train --step 3", 2, "chargpt train: error: unknown argument --step; did you mean --steps?"),
        (OURS, "serve --port 1", 2, "--port (CHARGPT_PORT): "),
        (OURS, "sample --help", 0, "usage: chargpt sample [-h] --checkpoint DIR"),
        ("training", "sample --help", 0, "-m training sample"),
    ],
)
def test_help_errors_and_exit_statuses_come_from_the_subcommand(module, arguments, code, message):
    done = run(*arguments.split(), module=module)
    printed, other = (done.stderr, done.stdout) if code else (done.stdout, done.stderr)
    assert (done.returncode, other) == (code, "")
    assert message in printed and "Traceback" not in printed


@pytest.mark.parametrize(
    ("module", "arguments"),
    [(OURS, "--version"), (OURS, "serve --version"), ("service", "--version"), ("training", "--version")],
)
def test_every_command_tells_its_version(module, arguments):
    done = run(*arguments.split(), module=module)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"chargpt {version('chargpt')}\n", "")


def test_a_missing_extra_is_named_in_one_line(tmp_path):
    """Each module is the first of its extra that the command imports; the others may be missing too."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nfor name in os.environ['ABSENT'].split(): sys.modules[name] = None"
    )
    paths = os.pathsep.join(map(str, (tmp_path, ROOT)))

    def run(absent, *arguments):
        environment = os.environ | {"PYTHONPATH": paths, "ABSENT": absent}
        return subprocess.run([sys.executable, "-m", OURS, *arguments], capture_output=True, text=True, env=environment)

    for absent, extra, command, *flags in (
        ("litserve", "service", "serve"),
        ("torch", "training", "train", "--data", "x"),
        ("rich", "training", "sample", "--checkpoint", "x"),
    ):
        done = run(absent, command, *flags)
        assert (done.returncode, done.stdout) == (1, "")
        line = f"chargpt {command}: the module {absent} is not installed: {installing(extra)}\n"
        assert done.stderr == line
    for flag in ("--help", "--version"):
        assert run("litserve torch rich", flag).returncode == 0


def test_a_fault_of_an_installed_package_keeps_its_traceback(tmp_path):
    (tmp_path / "litserve.py").write_text("import json.absent")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-m", OURS, "serve"], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and done.stderr.endswith("ModuleNotFoundError: No module named 'json.absent'\n")


@pytest.mark.parametrize("leftover", [False, True], ids=["absent", "empty folder"])
def test_without_the_training_package_only_serve_works(tmp_path, leftover):
    """As in the container image."""
    (tmp_path / "service").mkdir()
    for name in ("__init__.py", "command.py"):
        shutil.copy(ROOT / "service" / name, tmp_path / "service")
    (tmp_path / "service" / "__main__.py").write_text("import sys; print(sys.argv)")
    if leftover:
        (tmp_path / "training").mkdir()

    def run_isolated(*arguments):  # -S: without site-packages, where training is installed; -E: without PYTHONPATH
        command = [sys.executable, "-SE", "-m", "service.command", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    done = run_isolated("train", "--data", "my.txt")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "chargpt train: this installation has no training package; install chargpt from source with the extra "
        "[training]\n"
    )
    done = run_isolated("serve", "--port", "8001")
    assert (done.returncode, done.stdout) == (0, "['chargpt serve', '--port', '8001']\n")
    assert run_isolated("--help").returncode == 0
    assert run_isolated("--version").stdout == "chargpt 0.0\n"  # not installed
