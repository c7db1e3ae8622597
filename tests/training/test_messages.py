"""What refusals name can be typed as it is: with a path that has spaces, by this Python."""

import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from service import installing
from tests.helpers import call
from tests.training.runs import SHAPE, STEPS, TEXT, events, flags, start, tiny
from training.messages import resume_command

SETTINGS = flags(**SHAPE, **STEPS, dtype="float32")


def test_a_second_run_in_a_folder_names_its_three_ways(tmp_path, capsys):
    ways, command = "--overwrite to replace it, or another --out\n", ["train", *SETTINGS, "--out", tmp_path]
    (tmp_path / "log.jsonl").touch()
    assert call(command) == 1
    assert capsys.readouterr().err == f"error: {tmp_path} already contains log.jsonl; pass {ways}"
    (tmp_path / "last").mkdir()
    assert call(command) == 1
    said = f"already contains last, log.jsonl; pass --resume to continue that run, {ways}"
    assert capsys.readouterr().err == f"error: {tmp_path} {said}"


def test_control_characters_of_a_text_do_not_reach_the_terminal(tmp_path, capsys, monkeypatch):
    """Such as those of a log that a terminal's colours went into. A file gets the texts as they are."""
    (tmp_path / "text.txt").write_text(TEXT.replace("cat", "\x1b[31mcat\x9b"))
    console = Console(file=io.StringIO(), width=200)
    start(tiny(tmp_path, sample_chars=300), tmp_path / "out", console)
    printed = console.file.getvalue()
    assert "\\x1b" in printed and not re.search(r"[\x1b\x9b]", printed)
    assert any("\x1b" in str(record.get("sample")) for record in events(tmp_path / "out"))
    sample = ["sample", "--checkpoint", tmp_path / "out", "--max-tokens", 300]
    assert call(sample) == 0 and "\x1b" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert call(sample) == 0
    printed = capsys.readouterr().out
    assert "\\x1b" in printed and not re.search(r"[\x1b\x9b]", printed)


@pytest.mark.parametrize("is_unbuffered", [False, True])
def test_a_full_device_behind_standard_output_is_named(tmp_path, capsys, monkeypatch, is_unbuffered):
    (tmp_path / "text.txt").write_text(TEXT)
    with io.TextIOWrapper(open("/dev/full", "wb", buffering=0 if is_unbuffered else -1), write_through=True) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert call(["prepare", "--data", tmp_path / "text.txt"]) == 1
    assert capsys.readouterr().err == "error: standard output cannot be written: No space left on device\n"


def test_resuming_is_said_as_the_run_was_started(monkeypatch):
    out = Path("checkpoints/my text")
    assert resume_command(out, 1, {}).endswith(" -m training train --resume --out 'checkpoints/my text'")
    assert resume_command(out, 1, {"steps": 9}).endswith(" --out 'checkpoints/my text' --steps 9")
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
