import itertools
import os
import re
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest

from service.settings import API_KEY_VARIABLES, NO_SETTINGS, Settings, available_cpus, read_settings
from tests.helpers import make_certificate
from tests.toolbox.launch import ROOT
from tests.toolbox.needs import program


def rejection(arguments, capsys):
    """Reads invalid settings; returns the error message."""
    with pytest.raises(SystemExit) as exit:
        read_settings(arguments)
    assert exit.value.code == 2
    return capsys.readouterr().err


def test_flags_override_variables_and_variables_override_defaults(monkeypatch):
    assert read_settings(["--checkpoint", "x"]).max_queued_requests == 1024
    monkeypatch.setenv("CHARGPT_MAX_QUEUED_REQUESTS", "7")
    assert read_settings(["--checkpoint", "x"]).max_queued_requests == 7
    assert read_settings(["--checkpoint", "x", "--max-queued-requests", "8"]).max_queued_requests == 8


INVALID = [
    (["--port", "80"], "--port (CHARGPT_PORT): Input should be greater than or equal to 1024"),
    (["--drain-seconds", "nan"], "--drain-seconds (CHARGPT_DRAIN_SECONDS): "),
    (["--nonsense", "1"], "unknown argument --nonsense\nAll flags: "),
    (["--thread", "1"], "unknown argument --thread; did you mean --threads?\n"),
    (["--checkpoint"], "argument --checkpoint needs a value\nAll flags: "),
    (["--checkpoint", "--port", "8000"], "argument --checkpoint needs a value\nAll flags: "),
    (["x"], "unknown argument x\nAll flags: "),
    (["--api-keys-file", "none"], "--api-keys-file (CHARGPT_API_KEYS_FILE): none cannot be read: No such file or dir"),
    (["--api-keys-file", "/"], "/ cannot be read: Is a directory"),
]
for header in ("X Forwarded", "X-Forwarded-For:", ""):
    INVALID.append(([f"--client-header={header}"], "--client-header (CHARGPT_CLIENT_HEADER): "))
for url in ("localhost:4318", "http://localhost:4318", "http://a:b@host/v1/traces"):
    endpoint = (
        "--otlp-traces-endpoint (CHARGPT_OTLP_TRACES_ENDPOINT): must be a full URL without user or query, such as "
    )
    INVALID.append((["--otlp-traces-endpoint", url], endpoint))
for host in ("example.org", "https://example.org/", "https://*.example.org", "https://user@example.org",
             "https://example.org:443", "null", "*"):  # fmt: skip
    origins = f"--cors-origins (CHARGPT_CORS_ORIGINS): {host!r} is not an origin"
    INVALID.append((["--cors-origins", f"http://localhost:3000,{host}"], origins))
for path in ("chargpt", "/chargpt/", "/", "//a", "/a b", "/a?b"):
    root = "--root-path (CHARGPT_ROOT_PATH): Path must begin with /, must not end with /"
    INVALID += [(["--root-path", path], root), (["--root-path", path], f"got {path!r}\n")]


@pytest.mark.parametrize(("arguments", "message"), INVALID)
def test_invalid_setting_is_named(arguments, message, capsys):
    assert message in rejection(arguments, capsys)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("CHARGPT_API_KEYS_FIEL", "unknown variable CHARGPT_API_KEYS_FIEL; did you mean CHARGPT_API_KEYS_FILE?\n"),
        ("chargpt_thread", "unknown variable chargpt_thread; did you mean CHARGPT_THREADS?\n"),
        ("CHARGPT_NONSENSE_OF_MINE", "unknown variable CHARGPT_NONSENSE_OF_MINE\n"),
        *(
            (name, f"{name} is set, but API keys are read from a file: --api-keys-file (CHARGPT_API_KEYS_FILE)\n")
            for name in ("LIT_SERVER_API_KEY", "CHARGPT_API_KEY")
        ),
    ],
)
def test_a_variable_that_would_be_ignored_is_refused(variable, message, monkeypatch, capsys):
    """CHARGPT_API_KEYS_FIEL started a service that required no key. The value may be a secret."""
    monkeypatch.setenv(variable, "SECRET-SECRET")
    error = rejection([], capsys)
    assert error == f"python -m service: invalid settings\n  {message}"
    with pytest.raises(ValueError, match=re.escape(message.strip())):
        Settings()


def test_variables_that_clients_of_a_closed_service_read_may_be_set(tmp_path, monkeypatch):
    (tmp_path / "keys.txt").write_text("long-enough")
    monkeypatch.setenv("CHARGPT_API_KEYS_FILE", str(tmp_path / "keys.txt"))
    for name in API_KEY_VARIABLES:
        monkeypatch.setenv(name, "long-enough")
    monkeypatch.setenv("chargpt_threads", "3")
    settings = read_settings([])
    assert len(settings.api_keys) == 1 and settings.threads == 3


def test_every_variable_that_the_project_sets_or_reads_is_known():
    settings = {f"CHARGPT_{name.upper()}" for name in Settings.model_fields}
    known, found = settings | NO_SETTINGS | {*API_KEY_VARIABLES}, {}
    folders = ("service", "training", "tests", "deploy", ".ci", ".github")
    for path in itertools.chain(ROOT.iterdir(), *((ROOT / folder).rglob("*") for folder in folders)):
        is_binary = path.suffix in (".json", ".png", ".safetensors", ".so") or path.parent.name == "__pycache__"
        if path.is_file() and not is_binary and path != Path(__file__):
            for variable in re.findall(r"(?<![A-Z_])CHARGPT_[A-Z][A-Z_]*(?![A-Z_…])", path.read_text(errors="ignore")):
                found.setdefault(variable, str(path))
    assert {variable: name for variable, name in found.items() if variable not in known} == {}
    assert found.keys() >= NO_SETTINGS


def test_help_describes_every_setting(capsys):
    with pytest.raises(SystemExit) as exit:
        read_settings(["--help"])
    assert exit.value.code == 0
    shown = capsys.readouterr().out
    assert "(default: 8000)" in shown and "(default: none)" in shown and not re.search(r"\(default:\s*\)", shown)
    text = "".join(shown.split())  # argparse breaks lines at hyphens too
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert "".join(field.description.split()) in text


def test_lists_come_from_repeated_flags_commas_or_a_variable(monkeypatch):
    expected = ["https://a.example.org", "http://[::1]:8080"]
    both = ",".join(expected)
    assert read_settings([]).cors_origins == []
    assert read_settings(["--cors-origins", both]).cors_origins == expected
    assert read_settings([f"--cors-origins={origin}" for origin in expected]).cors_origins == expected
    monkeypatch.setenv("CHARGPT_CORS_ORIGINS", both.replace(",", " , "))
    assert read_settings([]).cors_origins == expected
    assert read_settings(["--cors-origins", "*"]).cors_origins == ["*"]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"# none\n\n  \n", " contains no key"), (b"long-enough\n# but\nSECRET7\n", ", line 3: "),
        (b"SECRET SECRET", ", line 1: "), (b"SECRET-SECRET\x00", ", line 1: "),
        ("SECRET-SECRET-é".encode(), ", line 1: "), (b"long-enough\r\nSECRET\r\n", ", line 2: "),
    ],
)  # fmt: skip
def test_invalid_keys_file_is_reported_by_line_without_showing_keys(content, place, tmp_path, capsys):
    path = tmp_path / "keys.txt"
    path.write_bytes(content)
    message = rejection(["--api-keys-file", str(path)], capsys)
    assert f"--api-keys-file (CHARGPT_API_KEYS_FILE): {path}{place}" in message
    assert "SECRET" not in message
    assert "long-enough" not in message


def test_keys_have_names(tmp_path, capsys):
    path = tmp_path / "keys.txt"
    path.write_bytes(b"first-key team-a\r\nsecond-key \t team-a\nthird-key\nfirst-key team-a\n")
    names = read_settings(["--api-keys-file", str(path)]).api_keys
    third = sha256(b"third-key").digest()
    assert names == {
        sha256(b"first-key").digest(): "team-a",
        sha256(b"second-key").digest(): "team-a",
        third: f"key-{third.hex()[:8]}",
    }
    for line in (b"first-key team b", b"first-key team/b", b"first-key " + b"x" * 65, b"first-key a\nfirst-key b"):
        path.write_bytes(line)
        number = len(line.split(b"\n"))
        assert f", line {number}: " in rejection(["--api-keys-file", str(path)], capsys)


def test_a_limits_file_nested_too_deeply_is_refused_in_a_sentence(tmp_path, capsys):
    path = tmp_path / "limits.toml"
    path.write_text("a=" + 5000 * "[")
    assert f"{path} is not valid TOML: nested too deeply" in rejection(["--client-limits", str(path)], capsys)


def test_settings_never_show_keys(tmp_path):
    (tmp_path / "keys.txt").write_text("SECRET-SECRET\nSECRET-SECRET-2")
    settings = read_settings(["--api-keys-file", str(tmp_path / "keys.txt")])
    assert [len(digest) for digest in settings.api_keys] == [32, 32]
    assert "SECRET" not in repr(settings) + settings.model_dump_json()
    assert "digest" not in repr(settings) + settings.model_dump_json()


def test_certificate_and_key_are_checked_when_settings_are_read(tmp_path, capsys):
    (tmp_path / "other").mkdir()
    certificate, key = map(str, make_certificate(tmp_path))
    other, locked = str(make_certificate(tmp_path / "other")[1]), str(tmp_path / "locked.pem")
    protect = [program("openssl"), "pkey", "-aes256", "-passout", "pass:SECRET", "-in", key, "-out", locked]
    subprocess.run(protect, check=True, capture_output=True)
    settings = read_settings(["--tls-certificate", certificate, "--tls-key", key])
    assert (str(settings.tls_certificate), str(settings.tls_key)) == (certificate, key)
    none = str(tmp_path / "none.pem")
    for arguments, message in (
        (["--tls-certificate", certificate], f"together with --tls-certificate, which is {certificate}, got None"),
        (["--tls-key", key], "together with --tls-certificate, which is None, got "),
        (["--tls-certificate", none, "--tls-key", key], f"cannot read {none}: No such file or directory"),
        (["--tls-certificate", certificate, "--tls-key", none], f"cannot read {none}: No such file or directory"),
        (["--tls-certificate", certificate, "--tls-key", other], "(KEY_VALUES_MISMATCH)"),
        (["--tls-certificate", key, "--tls-key", key], f"{key} and {key} are not a PEM certificate"),
        (["--tls-certificate", certificate, "--tls-key", locked], "the private key must not have a password"),
    ):
        text = rejection(arguments, capsys)
        assert "--tls-key (CHARGPT_TLS_KEY): " in text
        assert message in text


def test_checkpoints_are_folders_with_or_without_a_name(tmp_path, monkeypatch):
    def places(*arguments):
        return read_settings([*arguments]).places

    assert places("--checkpoint", "a=x", "--checkpoint", "b=y") == [("a", Path("x")), ("b", Path("y"))]
    assert places("--checkpoint=x, b=y=z") == [(None, Path("x")), ("b", Path("y=z"))]
    assert places("--checkpoint=./a=b") == [(None, Path("a=b"))]  # no name has a /
    monkeypatch.setenv("CHARGPT_CHECKPOINT", "a=x,b=y")
    assert places() == [("a", Path("x")), ("b", Path("y"))]
    folder = tmp_path / "with, a comma"
    folder.mkdir()
    assert places("--checkpoint", str(folder)) == [(None, folder)]


V1 = "3:cpu,cpuacct:/docker/0123\n2:memory:/docker/0123\n1:name=systemd:/docker/0123\n0::/docker/0123"
V1_ROOT = {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}
V1_GROUP = {"cpu/docker/0123/cpu.cfs_quota_us": "250000", "cpu/docker/0123/cpu.cfs_period_us": "50000"}
V2_NESTED = {"a/cpu.max": "200000 100000", "a/b.service/cpu.max": "max 100000"}
QUOTAS = {
    "version 2, in a container": ("0::/", {"cpu.max": "200000 100000"}, 2),
    "version 2, rounded down": ("0::/", {"cpu.max": "350000 100000"}, 3),
    "version 2, less than one": ("0::/", {"cpu.max": "50000 100000"}, 1),
    "version 2, more than the affinity": ("0::/", {"cpu.max": "6400000 100000"}, 8),
    "version 2, an ancestor's": ("0::/a/b.service", V2_NESTED, 2),
    "version 1, no quota": (V1, V1_ROOT, 8),
    "version 1, on the host": (V1, V1_ROOT | V1_GROUP, 5),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_cpus_are_those_of_the_quota(case, tmp_path, monkeypatch):
    groups, files, expected = QUOTAS[case]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert available_cpus(tmp_path) == 8
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{it}": files[it] for it in files}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert available_cpus(tmp_path) == expected
