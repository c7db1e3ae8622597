"""Builds the native engine, service/engine/native.cpp and the headers that it includes, and training/model/fused.cpp:
one library per instruction set, chosen at run time.

Plain shared libraries for ctypes, `_native_v4.so` and so on: they need neither Python's nor torch's headers, and one
build serves every Python 3. setuptools takes them for extension modules, and so puts them into wheels for this
platform. A wheel is tagged py3-none-manylinux_2_NN_ARCHITECTURE, with NN by the symbols that its libraries need.

The build is optional. Without a compiler the installation succeeds, prints one line (which pip shows with -v), and
service and training use torch. CXX names another compiler, CXXFLAGS adds flags.

    python setup.py build_ext --inplace      # or: make native

Another machine's compiler builds its wheel, here that of arm64:

    CXX=aarch64-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-aarch64 pip wheel --no-deps .
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1, which Python's images have: it only builds the libraries there
    from setuptools import Command as bdist_wheel

# Relative to this file, as setuptools demands. An image that only serves lacks the second.
SOURCE, FUSED = Path("service", "engine", "native.cpp"), Path("training", "model", "fused.cpp")
NAMES = {SOURCE: "service.engine._native", FUSED: "training.model._fused"}  # of the libraries
HEADERS = SOURCE.with_suffix("")  # folder of what SOURCE includes
FLAGS = (
    "-std=c++17 -O3 -fno-math-errno -fno-trapping-math -fvisibility=hidden -fPIC -shared -pthread -Wall -Wextra".split()
)
OWN_FLAGS = {
    # The same bits on every machine: a*b + c is rounded twice unless the source says fma, and no sum changes its order.
    SOURCE: ["-ffp-contract=off"],
    FUSED: ["-ffp-contract=fast"],
}
# The flags of each source's variants.
VARIANTS: dict[Path, dict[str, list[str]]] = {source: {"base": []} for source in NAMES}
if sysconfig.get_platform().endswith(("x86_64", "amd64")):
    v4 = ["-march=x86-64-v4", "-mprefer-vector-width=512"]
    VARIANTS = {source: {"v4": v4, "v3": ["-march=x86-64-v3"]} for source in NAMES}
    VARIANTS[FUSED] = {"v4bf16": [*v4, "-mavx512bf16"], **VARIANTS[FUSED]}
COMPILERS = ("c++", "g++", "clang++")
# libstdc++'s symbols up to GLIBCXX_3.4.MM: every distribution with glibc 2.NN or later has them (auditwheel's table).
LIBSTDCXX = {19: 17, 22: 24, 24: 27, 28: 31, 29: 34, 30: 35, 33: 39}


class NotCompiled(Exception):
    """The first line of the reason."""


def compile_native(target: Path, flags: list[str], source: Path = SOURCE) -> None:
    """Compiles `source` to a shared library. A failure removes an older `target`, which would be out of date.

    Raises:
        NotCompiled: no compiler, or it failed.
    """
    target.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    compiler = shlex.split(os.environ.get("CXX", "")) or [next(filter(shutil.which, COMPILERS), "")]
    if not compiler[0]:
        raise NotCompiled(f"no C++ compiler: none of {', '.join(COMPILERS)} is on PATH, and CXX is not set")
    # CXXFLAGS first: where two flags contradict each other, the last one counts.
    command = [*compiler, *shlex.split(os.environ.get("CXXFLAGS", "")), *FLAGS, *OWN_FLAGS[source], *flags]
    partial = target.with_suffix(".partial")
    try:
        done = subprocess.run(
            [*command, "-o", str(partial), str(source)], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except OSError as error:
        raise NotCompiled(f"{compiler[0]}: {error.strerror}") from error
    sys.stderr.write(done.stderr if done.returncode == 0 else "")  # warnings
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise NotCompiled(f"{compiler[0]}: {lines[0] if lines else f'exit status {done.returncode}'}")
    partial.replace(target)


class BuildNative(build_ext):
    """Compiles all variants at the same time, those that are up to date excepted.

    Runs the compiler itself: distutils would use the flags of this Python's own build, which differ between machines.
    """

    def run(self) -> None:
        folder = Path(__file__).parent if self.inplace else Path(self.build_lib).absolute()
        targets = [folder / self.get_ext_filename(extension.name) for extension in self.extensions]
        with ThreadPoolExecutor() as pool:
            reasons = list(pool.map(self.build, self.extensions, targets))
        every = list(zip(self.extensions, targets, reasons, strict=True))
        self.extensions = [each for each, _, reason in every if not reason]  # setuptools expects a file for each
        if not self.extensions:
            warn(
                f"installed without the native engine ({reasons[-1]}). On a CPU torch will be used, with which the "
                "service is several times slower and training takes twice as long. On x86-64 and "
                "arm64 g++ 11, clang++ 12 or later builds it: install one, then chargpt again."
            )
            return
        for extension, target, reason in every:
            if reason:
                is_replaced = any(other.sources == extension.sources for other in self.extensions)
                substitute = "Another variant" if is_replaced else "Torch, which is slower,"
                warn(f"built without {target.stem} ({reason}). {substitute} takes its place.")

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build(self, extension: Extension, target: Path) -> str | None:
        """The reason if the library could not be built."""
        source = Path(extension.sources[0])
        flags = VARIANTS[source][extension.name.rpartition("_")[2]]
        paths = Path(__file__), *(Path(__file__).parent / path for path in (source, *extension.depends))
        changed = max(path.stat().st_mtime for path in paths)
        if not self.force and target.exists() and target.stat().st_mtime > changed:
            return None
        try:
            compile_native(target, flags, source)
        except NotCompiled as error:
            return str(error)
        return None


class Wheel(bdist_wheel):
    """A wheel for every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform_tag = super().get_tag()
        return "py3", "none", manylinux(platform_tag, Path(self.bdist_dir).rglob("*.so"))


def manylinux(platform_tag: str, libraries: Iterable[Path]) -> str:
    """linux_x86_64 as manylinux_2_NN_x86_64: distributions with glibc 2.NN or later have every symbol that is needed.

    The tag stays as it is if the table lacks a symbol, or if this machine's glibc is older than 2.NN, since pip would
    refuse the wheel where it was built.
    """
    content = b"".join(library.read_bytes() for library in libraries)

    def newest(symbol: bytes) -> int:
        return max((int(minor) for minor in re.findall(rb"\0" + symbol + rb"(\d+)(?=[.\0])", content)), default=0)

    name, version = platform.libc_ver()
    if name != "glibc" or not content:
        return platform_tag
    of_libstdcxx = [its for minor, its in LIBSTDCXX.items() if minor >= newest(rb"GLIBCXX_3\.4\.")]
    relr = 36 if b"\0GLIBC_ABI_DT_RELR\0" in content else 0
    needed = max(newest(rb"GLIBC_2\."), relr, min(of_libstdcxx, default=sys.maxsize))
    if needed > int(version.split(".")[1]):
        return platform_tag
    return platform_tag.replace("linux_", f"manylinux_2_{needed}_", 1)


def warn(message: str) -> None:
    print(f"chargpt: {message}", file=sys.stderr)


if __name__ == "__main__":
    found = sorted((Path(__file__).parent / HEADERS).glob("*.h"))
    headers = {SOURCE: [(HEADERS / path.name).as_posix() for path in found]}
    setup(
        # `import chargpt` is this folder. Under its own name it is no package, as nobody would import it.
        packages=["chargpt", *find_packages(include=["service*", "training*"], exclude=["service.python"])],
        package_dir={"chargpt": "service/python"},
        ext_modules=[
            Extension(f"{name}_{variant}", [source.as_posix()], depends=headers.get(source), optional=True)
            for source, name in NAMES.items()
            for variant in VARIANTS[source]
            if Path(__file__).parent.joinpath(source).exists()
        ],
        cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
        # Not an entry point: that would import service before it could look at the import path.
        scripts=["service/chargpt"],
    )
