"""Installation: which native libraries a build makes, and what it does without a compiler."""

import ctypes
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import setup
from tests.toolbox import needs

pytestmark = pytest.mark.tools
ROOT = Path(__file__).parents[1]
SMALL = 'extern "C" __attribute__((visibility("default"))) int chargpt_abi(void) { return 7; }\n'
ALL = {f"_{stem}_{variant}.so" for stem in ("native", "fused") for variant in setup.VARIANTS}


@pytest.fixture
def source(tmp_path):
    """A copy of what is installed, with native sources that compile in no time."""
    tree = tmp_path / "source"
    for name in ("service", "training"):
        ignored = shutil.ignore_patterns("__pycache__", "_native_*", "_fused_*", "checkpoints")
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, tree)
    for path in setup.OWN_FLAGS:
        (tree / path).write_text(SMALL)
    return tree


def run(source, *command, **variables):
    """The output of a Python command in `source`."""
    clean = {name: value for name, value in os.environ.items() if name not in ("CXX", "CXXFLAGS", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=source, env=clean | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def pip(source, action, *args, **variables):
    """Runs pip without a network."""
    return run(source, "-m", "pip", action, "-v", "--no-deps", "--no-index", "--no-build-isolation", *args, **variables)


def build(source, *args, **variables):
    return run(source, "setup.py", "--quiet", "build_ext", "--inplace", *args, **variables)


def libraries(folder):
    """By name; partial files included."""
    found = (*folder.glob("service/engine/_native_*"), *folder.glob("training/_fused_*"))
    return {path.name: path for path in found}


@pytest.mark.needs("compiler")
def test_a_wheel_contains_the_libraries_and_the_page(source, tmp_path):
    pip(source, "wheel", "--wheel-dir", str(tmp_path), ".")
    (wheel,) = tmp_path.glob("*.whl")
    assert not wheel.name.endswith("-any.whl"), "libraries of one platform in a wheel for all"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "wheel")
    found = libraries(tmp_path / "wheel")
    assert set(found) == ALL
    assert not list((tmp_path / "wheel").rglob("*.cpp"))
    page = Path("service", "http", "static")
    assert {path.name for path in (tmp_path / "wheel" / page).iterdir()} == {it.name for it in (ROOT / page).iterdir()}
    for path in found.values():
        assert ctypes.CDLL(str(path)).chargpt_abi() == 7


def test_a_source_distribution_contains_the_source(source, tmp_path):
    run(source, "-c", f"import setuptools.build_meta as build; build.build_sdist({str(tmp_path)!r})")
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", *(path.as_posix() for path in setup.OWN_FLAGS)} <= names


def git(source, *command):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *identity, *command], cwd=source, check=True, stdout=subprocess.PIPE).stdout


def version_of(source):
    return run(source, "-W", "ignore", "setup.py", "--version").splitlines()[-1]


def test_the_version_is_that_of_the_git_tag(source, tmp_path):
    """Also in a shallow clone and an archive, as GitHub offers for each tag; 0.0 without any of these."""
    assert version_of(source) == "0.0"
    for name in (".gitattributes", ".git_archival.txt", ".gitignore"):
        shutil.copy(ROOT / name, source)
    git(source, "init", "--quiet")
    git(source, "add", ".")
    git(source, "commit", "--quiet", "--message", "first")
    commit = git(source, "rev-parse", "--short=9", "HEAD").decode().strip()
    assert version_of(source) == f"0.1.dev1+g{commit}"
    git(source, "tag", "v1.2.3")
    assert version_of(source) == "1.2.3"
    (tmp_path / "archive").mkdir()
    subprocess.run(["tar", "-x", "-C", tmp_path / "archive"], input=git(source, "archive", "HEAD"), check=True)
    assert version_of(tmp_path / "archive") == "1.2.3"
    git(source, "commit", "--quiet", "--allow-empty", "--message", "second")
    assert version_of(source).startswith("1.2.4.dev1+g")
    git(tmp_path, "clone", "--quiet", "--depth", "1", source.as_uri(), "shallow")
    assert version_of(tmp_path / "shallow").startswith("0.1.dev1+g")


@pytest.mark.parametrize("editable", [False, True])
def test_without_a_compiler_the_installation_succeeds_with_one_line(source, tmp_path, editable):
    site = tmp_path / "site"
    where = ("--no-compile", "--target", str(site), *(["--editable"] if editable else []), ".")
    output = pip(source, "install", *where, PATH="/nonexistent")
    (line,) = [line for line in output.splitlines() if line.strip().startswith("chargpt: ")]
    assert "installed without the native engine (no C++ compiler" in line and "g++ 11, clang++ 12 or" in line
    assert libraries(source) == {} == libraries(site)
    found = run(source if editable else site, "-c", "import service.engine as e; print(*e.__path__)")
    assert found.startswith(str(tmp_path))


def test_a_compiler_that_fails_is_named(source):
    for compiler, reason in ("false", "false: exit status 1"), ("/nonexistent/c++", "/nonexistent/c++: No such file"):
        line = build(source, CXX=compiler)
        assert line.startswith(f"chargpt: installed without the native engine ({reason}")
        assert line.count("\n") == 1 and libraries(source) == {}


@pytest.mark.needs("compiler")
@pytest.mark.skipif(len(setup.VARIANTS) == 1, reason="one instruction set")
def test_one_variant_that_fails_leaves_the_others(source, tmp_path):
    """An older library of that variant would be of an older source. The compiler is too old for bfloat16."""
    picky = tmp_path / "picky"
    fails = 'case "$*" in *avx512bf16*) echo "error: bad -mavx512bf16" >&2; exit 1;; esac'
    picky.write_text(f'#!/bin/sh\n{fails}\nexec c++ "$@"\n')
    picky.chmod(0o755)
    assert build(source) == ""
    assert set(libraries(source)) == ALL
    for path in setup.OWN_FLAGS:
        (source / path).write_text(SMALL.replace("7", "8"))
    output = build(source, CXX=str(picky))
    for name, line in zip(("_native_v4bf16", "_fused_v4bf16"), output.splitlines(), strict=True):
        assert line.startswith(f"chargpt: built without {name} ({picky}: error: bad -mavx512bf16)")
    assert set(rest := libraries(source)) == ALL - {"_native_v4bf16.so", "_fused_v4bf16.so"}
    for path in rest.values():
        assert ctypes.CDLL(str(path)).chargpt_abi() == 8


@pytest.mark.needs("compiler")
def test_a_build_compiles_again_only_after_a_change(source):
    def times():
        return {name: path.stat().st_mtime_ns for name, path in libraries(source).items()}

    build(source)
    first = times()
    build(source)
    assert times() == first
    for name in ("setup.py", *setup.OWN_FLAGS):
        before = times()
        os.utime(source / name)
        build(source)
        assert [library for library, after in times().items() if after > before[library]] == [
            library for library in before if name == "setup.py" or library.startswith(f"_{Path(name).stem}_")
        ]


def bits(command, path):
    """What tests/engine/native_bits.cpp prints, compiled by `command`."""
    flags = [flag for flag in (*setup.FLAGS, *setup.OWN_FLAGS[setup.SOURCE]) if flag != "-shared"]
    source = ROOT / "tests" / "engine" / "native_bits.cpp"
    subprocess.run([*command[:1], "-I", ROOT, "-Werror", *flags, *command[1:], source, "-o", path], check=True)
    return path


@pytest.mark.needs("compiler", "qemu")
def test_arm64_computes_the_bits_of_this_machine(tmp_path):
    host = bits([needs.program("compiler"), *list(setup.VARIANTS.values())[-1], "-O0"], tmp_path / "host")
    arm64 = bits([needs.program("qemu", "aarch64-linux-gnu-g++")], tmp_path / "arm64")
    qemu = [needs.program("qemu"), "-L", "/usr/aarch64-linux-gnu"]
    expected = subprocess.run([host], check=True, text=True, stdout=subprocess.PIPE).stdout.splitlines()
    assert subprocess.run([*qemu, arm64], check=True, text=True, stdout=subprocess.PIPE).stdout.splitlines() == expected
    # two dtypes, two sequences, 50 characters; the sequences are no constants
    assert len(expected) == len(set(expected)) == 200
    assert len({line.split(": ")[1].split()[0] for line in expected}) > 10
