"""Builds the native engine, service/engine/native.cpp, and training/fused.cpp: one library per instruction set,
chosen at run time.

Plain shared libraries for ctypes, `_native_v4.so` and so on: they need neither Python's nor torch's headers, and one
build serves every Python. setuptools takes them for extension modules, and so puts them into wheels for this platform.

The build is optional. Without a compiler the installation succeeds, prints one line (which pip shows with -v), and
service and training use torch. CXX names another compiler, CXXFLAGS adds flags.

    python setup.py build_ext --inplace      # or: make native
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Relative to this file, as setuptools demands. An image that only serves lacks the second.
SOURCE, FUSED = Path("service", "engine", "native.cpp"), Path("training", "fused.cpp")
FLAGS = (
    "-std=c++17 -O3 -fno-math-errno -fno-trapping-math -fvisibility=hidden -fPIC -shared -pthread -Wall -Wextra".split()
)
OWN_FLAGS = {
    # The same bits on every machine: a*b + c is rounded twice unless the source says fma, and no sum changes its order.
    SOURCE: ["-ffp-contract=off"],
    FUSED: ["-ffp-contract=fast"],
}
VARIANTS: dict[str, list[str]] = {"base": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    VARIANTS = {
        "v4bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"],
        "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
        "v3": ["-march=x86-64-v3"],
    }
COMPILERS = ("c++", "g++", "clang++")


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
        source, flags = Path(extension.sources[0]), VARIANTS[extension.name.rpartition("_")[2]]
        changed = max(path.stat().st_mtime for path in (Path(__file__), Path(__file__).parent / source))
        if not self.force and target.exists() and target.stat().st_mtime > changed:
            return None
        try:
            compile_native(target, flags, source)
        except NotCompiled as error:
            return str(error)
        return None


def warn(message: str) -> None:
    print(f"chargpt: {message}", file=sys.stderr)


if __name__ == "__main__":
    setup(
        ext_modules=[
            Extension(f"{name}_{variant}", [source.as_posix()], optional=True)
            for name, source in (("service.engine._native", SOURCE), ("training._fused", FUSED))
            for variant in VARIANTS
            if Path(__file__).parent.joinpath(source).exists()
        ],
        cmdclass={"build_ext": BuildNative},
    )
