"""What refusals name can be typed as it is: with make, with a path that has spaces, by this Python."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from service import installing
from tests.helpers import call
from tests.training.runs import SHAPE, STEPS, TEXT, flags
from training.messages import resume_command

SETTINGS = flags(**SHAPE, **STEPS, dtype="float32")


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """The flags of a run in a folder with a space, from the folder that holds its text; it has ended."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    command = ["train", "--data", "text.txt", "--out", "checkpoints/my text", *SETTINGS]
    assert call(command) == 0
    return command


def test_a_second_make_train_names_its_three_ways(trained, monkeypatch, capsys):
    assert call(trained) == 1
    error = capsys.readouterr().err
    assert "pass --resume to continue that run, --overwrite to replace it, or another --out\n" in error
    monkeypatch.setenv("MADE_BY", "make train DATA='my text'")
    assert call(trained) == 1
    error = capsys.readouterr().err
    ways = "ARGS=--resume to continue that run, ARGS=--overwrite to replace it, or NAME=… to keep it"
    assert error.endswith(f"log.jsonl, loss.png; give make {ways}\n")
    monkeypatch.setenv("MADE_ARGS", "--resume --threads 1")
    assert call(trained) == 1
    assert "give make ARGS='--threads 1 --resume' to continue" in capsys.readouterr().err
    assert call(["train", "--data", "absent.txt", "--out", "other"]) == 1
    error = capsys.readouterr().err
    assert "--data takes UTF-8 files" in error
    assert "\nWith make, --data is DATA=…, --out is NAME=…, --preset is PRESET=…, --minutes is MINUTES=…, " in error


def test_resuming_is_said_as_the_run_was_started(monkeypatch):
    out = Path("checkpoints/my text")
    assert resume_command(out, 1, {}).endswith(" -m training train --resume --out 'checkpoints/my text'")
    monkeypatch.setenv("MADE_BY", "make train DATA='my text'")
    monkeypatch.setenv("MADE_OUT", str(out))
    assert resume_command(out, 1, {}) == "make train DATA='my text' ARGS=--resume"
    assert resume_command(out, 1, {"steps": 9}) == "make train DATA='my text' ARGS='--resume --steps 9'"
    monkeypatch.setenv(
        "MADE_ARGS", "--seed 3 --overwrite --data 'a b'"
    )  # with make's preset, all settings are compared
    _, *variables = shlex.split(resume_command(out, 1, {}))
    assert variables[-1] == "ARGS=--seed 3 --data 'a b' --resume"
    assert resume_command(Path("other"), 1, {}).endswith("train --resume --out other")  # by --out in ARGS
    assert resume_command(out, 2, {}).startswith("torchrun ")
    monkeypatch.setattr(sys, "argv", ["chargpt"])
    command, *_ = shlex.split(resume_command(Path("other"), 1, {}))
    assert Path(shutil.which(command)).absolute().parent == Path(sys.executable).parent
    assert resume_command(out, 2, {}).startswith("torchrun --nproc-per-node 2 --no-python chargpt train ")


def test_a_refused_run_leaves_no_empty_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["train", *SETTINGS, "--out", "checkpoints/my", "--data"]
    assert call([*command, "absent.txt"]) == 1
    assert "no file or folder absent.txt" in capsys.readouterr().err
    assert not Path("checkpoints").exists()
    Path("checkpoints/my").mkdir(parents=True)  # the user's own
    assert call([*command, "absent.txt"]) == 1
    assert Path("checkpoints/my").is_dir()


def test_what_is_missing_is_installed_by_this_python(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    python, *rest = shlex.split(installing("export"))
    assert rest == ["-m", "pip", "install", "chargpt[export]"]
    prefix = subprocess.check_output([python, "-c", "import sys; print(sys.prefix)"], text=True)
    assert prefix.strip() == sys.prefix
