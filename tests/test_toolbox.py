"""The toolbox: required areas, server-sent events, server processes, tables put into documents."""

import os
import subprocess
import sys

import pytest

from tests.toolbox import figures, http, launch, needs


def test_missing_area_skips_unless_required(monkeypatch, tmp_path):
    monkeypatch.setenv("CHARGPT_REQUIRE", "curl, openssl")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    with pytest.raises(pytest.skip.Exception, match="chromium is not installed"):
        needs.program("browser")
    (tmp_path / "google-chrome").touch(mode=0o755)  # one of its names
    assert needs.program("browser") == str(tmp_path / "google-chrome")
    with pytest.raises(pytest.fail.Exception, match="curl is not installed, but CHARGPT_REQUIRE names curl"):
        needs.need("curl")


def test_unknown_area_aborts_the_run_before_any_test():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CHARGPT_REQUIRE": "curl,dokcer"})
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"unknown dokcer; allowed are {', '.join(needs.AREAS)}" in done.stderr
    assert "test_toolbox" not in done.stdout


def test_events_yields_only_data():
    lines = ["id: 1", 'data: {"text":"a"}', "", ": keep-alive", "", 'data: {"text":"b"}\n', "\n", "data: [DONE]", ""]
    assert list(http.events(lines)) == ['{"text":"a"}', '{"text":"b"}', "[DONE]"]
    assert http.text_of(http.pieces(lines)) == "ab"
    with pytest.raises(AssertionError, match="ends within an event"):
        list(http.events(lines[:-1]))
    with pytest.raises(AssertionError):
        http.pieces(lines[:-2])
    with pytest.raises(ValueError, match="unexpected field"):
        list(http.events(["event: x", ""]))


def test_log_is_shown_if_a_program_exits_before_it_is_ready(tmp_path):
    command = [sys.executable, "-c", "print('no luck'); raise SystemExit(3)"]
    for log in (None, tmp_path / "logs" / "program.log"):
        with launch.Program(command, launch.free_port(), "/", log) as program:
            with pytest.raises(launch.ServerError, match="no luck"):
                program.wait_until_ready()


def test_tables_are_put_between_their_markers(tmp_path):
    file = tmp_path / "README.md"
    file.write_text("before\n<!-- bench -->\nold\n<!-- /bench -->\nafter\n")
    for _ in range(2):  # idempotent
        figures.put("all\n", file, "bench")
        assert file.read_text() == "before\n<!-- bench -->\nall\n<!-- /bench -->\nafter\n"
    file.write_text("no markers\n")
    with pytest.raises(ValueError, match="must have one line <!-- bench -->"):
        figures.put("all\n", file, "bench")
