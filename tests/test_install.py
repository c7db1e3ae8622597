"""Installation: which native libraries a build makes, and what it does without a compiler."""

import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

import setup
from tests.toolbox import needs
from tests.toolbox.launch import Program, free_port

pytestmark = pytest.mark.tools
ROOT = Path(__file__).parents[1]
MACHINE = platform.machine()
SMALL = 'extern "C" __attribute__((visibility("default"))) int chargpt_abi(void) { return 7; }\n'
ALL = {f"{name.split('.')[-1]}_{variant}.so" for it, name in setup.NAMES.items() for variant in setup.VARIANTS[it]}


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
    found = (*folder.glob("service/engine/_native_*"), *folder.glob("training/model/_fused_*"))
    return {path.name: path for path in found}


@pytest.mark.needs("compiler")
def test_a_wheel_contains_the_libraries_and_the_page(source, tmp_path):
    pip(source, "wheel", "--wheel-dir", str(tmp_path), ".")
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(rf"chargpt-.*-py3-none-(many)?linux_.*{MACHINE}\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "wheel")
    found = libraries(tmp_path / "wheel")
    assert set(found) == ALL
    assert not [*(tmp_path / "wheel").rglob("*.cpp"), *(tmp_path / "wheel").rglob("*.h")]
    page = Path("service", "http", "static")
    assert {path.name for path in (tmp_path / "wheel" / page).iterdir()} == {it.name for it in (ROOT / page).iterdir()}
    for path in found.values():
        assert ctypes.CDLL(str(path)).chargpt_abi() == 7


@pytest.mark.needs("compiler")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="manylinux is for glibc")
def test_the_tag_of_a_wheel_names_the_oldest_glibc_that_has_its_symbols(tmp_path):
    """objdump lists the symbols; the table of libstdc++ is auditwheel's. A newer glibc than this one's: no such tag."""
    libraries = [*ROOT.glob("service/engine/_native_*.so"), *ROOT.glob("training/model/_fused_*.so")]
    listed = subprocess.run(["objdump", "-T", *libraries], check=True, text=True, stdout=subprocess.PIPE).stdout
    glibc = max(int(minor) for minor in re.findall(r"\(GLIBC_2\.(\d+)", listed))
    libstdcxx = max(int(minor) for minor in re.findall(r"\(GLIBCXX_3\.4\.(\d+)", listed))
    needed = max(glibc, min(its for minor, its in setup.LIBSTDCXX.items() if minor >= libstdcxx))
    ours = int(platform.libc_ver()[1].split(".")[1])
    expected = f"manylinux_2_{needed}_{MACHINE}" if needed <= ours else f"linux_{MACHINE}"
    assert setup.manylinux(f"linux_{MACHINE}", libraries) == expected
    for symbol in (f"GLIBC_2.{ours + 1}", f"GLIBCXX_3.4.{max(setup.LIBSTDCXX) + 1}"):
        (tmp_path / "newer.so").write_bytes(f"\0{symbol}\0".encode())
        assert setup.manylinux("linux_riscv64", [*libraries, tmp_path / "newer.so"]) == "linux_riscv64"
    for other in ("any", "macosx_14_0_arm64"):
        assert setup.manylinux(other, []) == other


@pytest.mark.needs("compiler", "qemu")
def test_a_cross_compiler_builds_the_wheel_of_its_machine(source, tmp_path):
    machine = {"CXX": "aarch64-linux-gnu-g++", "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    pip(source, "wheel", "--wheel-dir", str(tmp_path), ".", **machine)
    (wheel,) = tmp_path.glob("chargpt-*-py3-none-manylinux_2_*_aarch64.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {Path(name).name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    assert set(found) == {"_native_base.so", "_fused_base.so"}
    for content in found.values():
        assert int.from_bytes(content[18:20], "little") == 183  # ELF's number for AArch64


@pytest.fixture
def installed(source, tmp_path):
    """The command chargpt: a wheel in an environment of its own, which also has the packages of this one."""
    pip(source, "wheel", "--wheel-dir", str(tmp_path), ".", PATH="/nonexistent")
    (wheel,) = tmp_path.glob("*.whl")
    run(tmp_path, "-m", "venv", "--without-pip", "venv")
    pip(tmp_path, "install", str(wheel), PIP_PYTHON=str(tmp_path / "venv" / "bin" / "python"))
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    # Beside a thread, a worker is not forked but spawned: a new process, which imports everything again.
    (site / "thread.pth").write_text("import thread_of_test")
    (site / "thread_of_test.py").write_text(
        "import signal, threading\n"
        "def wait():\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # these are for the main thread\n"
        "    threading.Event().wait()\n"
        "threading.Thread(target=wait, daemon=True).start()\n"
    )
    for library in (*ROOT.glob("service/engine/_native_*.so"), *ROOT.glob("training/model/_fused_*.so")):
        shutil.copy(library, site / library.relative_to(ROOT))  # compiling them takes minutes
    return tmp_path / "venv" / "bin" / "chargpt"


def test_the_command_depends_on_nothing_in_the_current_folder(installed, tmp_path, monkeypatch):
    """Not on packages named like its own, not even if PYTHONPATH names that folder by an empty entry. In processes that
    multiprocessing starts, not on a module named like one of Python's.
    """
    folder = tmp_path / "mine"
    for name in ("service/__init__", "training/__init__", "service", "training", "socket", "tempfile"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the current folder was imported')")
    (folder / "my.txt").write_text("the cat sat on the mat\n" * 400)
    monkeypatch.chdir(folder)
    shape = "--n-layer 1 --n-head 2 --n-embd 8 --block-size 16 --batch-size 4 --steps 3".split()

    def chargpt(*arguments):
        return subprocess.run([installed, *arguments], check=True, text=True, stdout=subprocess.PIPE).stdout

    for path in (None, ":/nonexistent"):
        if path:
            monkeypatch.setenv("PYTHONPATH", path)
            for name in ("socket.py", "tempfile.py"):  # Python itself prefers these to its own then
                Path(name).unlink()
        else:
            monkeypatch.delenv("PYTHONPATH", raising=False)
        assert chargpt("--help").startswith("usage: chargpt COMMAND")
        chargpt("train", "--data", "my.txt", "--out", "run", "--overwrite", *shape)
        assert chargpt("sample", "--checkpoint", "run", "--max-tokens", "20")
        port = free_port()
        flags = ["--checkpoint", "run/best", "--port", port, "--http-processes", "2", "--log-format", "text"]
        with Program([installed, "serve", *flags], port, "/readyz") as server:
            server.wait_until_ready()
            asked = Request(f"{server.url}/generate", b'{"prompt": "the", "max_tokens": 5}')
            with urlopen(asked, timeout=30) as answer:
                assert json.load(answer)["choices"][0]["finish_reason"] == "length"


def test_the_package_chargpt_is_the_model_in_python(installed, tmp_path):
    """From a wheel, in any folder."""
    bundled = ROOT / "service" / "checkpoints" / "tinyshakespeare"
    code = (
        f"import chargpt, service; model = chargpt.load({str(bundled)!r}); "
        "print(chargpt.__file__, service.__file__, len(model.generate('ROMEO:', max_tokens=9).text))"
    )
    command = [installed.with_name("python"), "-c", code]
    done = subprocess.run(command, cwd=tmp_path, check=True, text=True, stdout=subprocess.PIPE)
    *files, length = done.stdout.split()
    assert all(file.startswith(str(tmp_path / "venv")) for file in files) and length == "9"


def test_a_source_distribution_contains_the_source(source, tmp_path):
    run(source, "-c", f"import setuptools.build_meta as build; build.build_sdist({str(tmp_path)!r})")
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    headers = {path.relative_to(source).as_posix() for path in (source / setup.HEADERS).glob("*.h")}
    assert headers and headers | {"setup.py", *(path.as_posix() for path in setup.OWN_FLAGS)} <= names


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
    code = (  # -S: without this environment's own chargpt
        f"import site, sys; site.addsitedir({str(site)!r}); sys.path.append({sysconfig.get_path('purelib')!r}); "
        "import chargpt; print(chargpt.load, chargpt.__file__)"
    )
    found = run(tmp_path, "-S", "-c", code)
    assert found.startswith("<function load") and f" {source if editable else site}/" in found


def test_a_compiler_that_fails_is_named(source):
    for compiler, reason in ("false", "false: exit status 1"), ("/nonexistent/c++", "/nonexistent/c++: No such file"):
        line = build(source, CXX=compiler)
        assert line.startswith(f"chargpt: installed without the native engine ({reason}")
        assert line.count("\n") == 1 and libraries(source) == {}


@pytest.mark.needs("compiler")
@pytest.mark.skipif(len(setup.VARIANTS[setup.SOURCE]) == 1, reason="one instruction set")
def test_one_variant_that_fails_leaves_the_others(source, tmp_path):
    """An older library of that variant would be of an older source. The compiler is too old for AVX-512."""
    picky = tmp_path / "picky"
    fails = 'case "$*" in *-march=x86-64-v4*) echo "error: bad -march" >&2; exit 1;; esac'
    picky.write_text(f'#!/bin/sh\n{fails}\nexec c++ "$@"\n')
    picky.chmod(0o755)
    assert build(source) == ""
    assert set(libraries(source)) == ALL
    for path in setup.OWN_FLAGS:
        (source / path).write_text(SMALL.replace("7", "8"))
    output = build(source, CXX=str(picky))
    failed = ("_native_v4", "_fused_v4bf16", "_fused_v4")
    for name, line in zip(failed, output.splitlines(), strict=True):
        assert line.startswith(f"chargpt: built without {name} ({picky}: error: bad -march)")
    assert set(rest := libraries(source)) == ALL - {f"{name}.so" for name in failed}
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
    for name in ("setup.py", *setup.OWN_FLAGS, setup.HEADERS / "lanes.h"):
        before = times()
        os.utime(source / name)
        build(source)
        assert [library for library, after in times().items() if after > before[library]] == [
            library
            for library in before
            if name == "setup.py" or library.startswith(f"_{(setup.SOURCE if name.suffix == '.h' else name).stem}_")
        ]


def bits(command, path):
    """What tests/engine/native_bits.cpp prints, compiled by `command`."""
    flags = [flag for flag in (*setup.FLAGS, *setup.OWN_FLAGS[setup.SOURCE]) if flag != "-shared"]
    source = ROOT / "tests" / "engine" / "native_bits.cpp"
    subprocess.run([*command[:1], "-I", ROOT, "-Werror", *flags, *command[1:], source, "-o", path], check=True)
    return path


@pytest.mark.needs("compiler", "qemu")
def test_arm64_computes_the_bits_of_this_machine(tmp_path):
    host = bits([needs.program("compiler"), *list(setup.VARIANTS[setup.SOURCE].values())[-1], "-O0"], tmp_path / "host")
    arm64 = bits([needs.program("qemu", "aarch64-linux-gnu-g++")], tmp_path / "arm64")
    qemu = [needs.program("qemu"), "-L", "/usr/aarch64-linux-gnu"]
    expected = subprocess.run([host], check=True, text=True, stdout=subprocess.PIPE).stdout.splitlines()
    assert subprocess.run([*qemu, arm64], check=True, text=True, stdout=subprocess.PIPE).stdout.splitlines() == expected
    # two dtypes, two weights, two sequences, 50 characters; the sequences are no constants
    assert len(expected) == len(set(expected)) == 400
    assert len({line.split(": ")[1].split()[0] for line in expected}) > 10
