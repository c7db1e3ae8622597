import pytest

from service.settings import Settings, read_settings


def test_a_flag_beats_a_variable_beats_the_default(monkeypatch):
    assert read_settings(["--checkpoint", "x"]).max_queued_requests == 1024
    monkeypatch.setenv("CHARGPT_MAX_QUEUED_REQUESTS", "7")
    assert read_settings(["--checkpoint", "x"]).max_queued_requests == 7
    assert read_settings(["--checkpoint", "x", "--max-queued-requests", "8"]).max_queued_requests == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "x", "--port", "80"], "--port (CHARGPT_PORT): Input should be greater than or equal to 1024"),
        (["--checkpoint", "x", "--drain-seconds", "nan"], "--drain-seconds (CHARGPT_DRAIN_SECONDS): "),
        (["--checkpoint", "x", "--nonsense", "1"], "unrecognized arguments: --nonsense 1"),
    ],
)
def test_a_bad_setting_names_itself(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        read_settings(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_help_describes_every_setting(capsys):
    with pytest.raises(SystemExit) as exit:
        read_settings(["--help"])
    assert exit.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')} " in text
        assert field.description in text
