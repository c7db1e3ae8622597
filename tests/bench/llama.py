"""llama.cpp as a peer: its programs, built from source, and the GGUF files that they read.

The folder (--llama-cpp) defaults to CHARGPT_LLAMA_CPP, else to ~/.cache/chargpt/llama.cpp. The source comes from the
source package of llama-cpp-python, cmake and ninja from PyPI.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .command import BenchError, run_checked
from .shapes import PROMPT

FOLDER = Path(os.environ.get("CHARGPT_LLAMA_CPP") or Path.home() / ".cache" / "chargpt" / "llama.cpp")
PACKAGE = "llama-cpp-python==0.3.36"
PROGRAMS = ("llama-server", "llama-batched-bench", "llama-quantize")
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
)  # fmt: skip
DTYPES = ("F32", "F16", "BF16")  # the same model; Q8_0 would be another
CACHES = ("f16", "f32")


@dataclass(frozen=True)
class Variant:
    """A GGUF file with the dtype of the KV cache."""

    dtype: str
    cache: str
    file: Path

    @property
    def name(self) -> str:
        return f"{self.dtype}, {self.cache} cache"

    @property
    def flags(self) -> list[str]:
        return ["-m", str(self.file), "-fa", "on", "-ctk", self.cache, "-ctv", self.cache]


def add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--llama-cpp", type=Path, default=FOLDER, metavar="DIR",
        help="folder of the build, which is made if missing (default: %(default)s)",
    )  # fmt: skip


def programs(folder: Path) -> dict[str, Path]:
    return {name: folder / "build" / "bin" / name for name in PROGRAMS}


def build(folder: Path) -> dict[str, Path]:
    """The paths of PROGRAMS, built in `folder` if any is missing.

    Raises:
        BenchError: a step failed.
    """
    found = programs(folder)
    if all(program.exists() for program in found.values()):
        return found
    folder.mkdir(parents=True, exist_ok=True)
    tools = folder / "tools"
    run_checked([sys.executable, "-m", "venv", tools])
    pip = [tools / "bin" / "pip", "--quiet", "--disable-pip-version-check"]
    run_checked([*pip, "install", "cmake", "ninja"])
    run_checked([*pip, "download", "--no-deps", "--no-binary=:all:", f"--dest={folder}", PACKAGE])
    [archive] = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    environment = os.environ | {"PATH": f"{tools / 'bin'}:{os.environ['PATH']}"}
    configure = ["cmake", "-S", source, "-B", folder / "build", "-G", "Ninja", *CMAKE_FLAGS]
    run_checked(["nice", *configure], env=environment)
    run_checked(["nice", "ninja", "-C", folder / "build", *PROGRAMS], env=environment)
    return found


def convert(found: Mapping[str, Path], checkpoint: Path, folder: Path) -> dict[str, Path]:
    """A GGUF file of the checkpoint by dtype in `folder`: the exported F32, and what llama-quantize makes of it.

    Raises:
        BenchError: the export or a conversion failed.
    """
    files = {dtype: folder / f"{dtype}.gguf" for dtype in DTYPES}
    export = ["training", "export", f"--checkpoint={checkpoint}", "--to=gguf", f"--out={files['F32']}"]
    run_checked([sys.executable, "-m", *export])
    for dtype, file in files.items():
        if dtype != "F32":
            run_checked([found["llama-quantize"], files["F32"], file, dtype])
    return files


def variants(files: Mapping[str, Path]) -> list[Variant]:
    """Every dtype with every cache."""
    return [Variant(dtype, cache, files[dtype]) for dtype, cache in itertools.product(DTYPES, CACHES)]


def batched_bench(
    found: Mapping[str, Path], variant: Variant, rows: int, length: int, threads: int, repeats: int
) -> dict[str, Any]:
    """Characters per second over `repeats` runs of one program: of decode alone, without sampling, and with prefill.

    Raises:
        BenchError: it failed, or its output has no results.
    """
    context = rows * -(-(PROMPT + length) // 256) * 256  # it reserves whole blocks of 256
    command = [
        str(found["llama-batched-bench"]), *variant.flags, "-c", str(context), "-b", "2048", "-ub", "2048",
        "-t", str(threads), "-tb", str(threads), "-npp", str(PROMPT), "-ntg", str(length),
        "-npl", ",".join([str(rows)] * repeats), "--output-format", "jsonl",
    ]  # fmt: skip
    for _ in range(10):  # what it has written last may be lost when it ends, by its thread that writes
        results = [json.loads(line) for line in run_checked(command).splitlines() if line.startswith("{")]
        if len(results) == repeats:
            break
    else:
        raise BenchError(f"no results in the output of {command}")
    given = sum(row["pl"] * row["tg"] for row in results)
    prefill, decode = (sum(row[name] for row in results) for name in ("t_pp", "t_tg"))
    return {"decode_characters_per_second": given / decode, "characters_per_second": given / (prefill + decode)}


def server_command(found: Mapping[str, Path], variant: Variant, threads: int, slots: int) -> list[str]:
    """llama-server without its port; every slot has room for prompt and answer, and nothing is cached or logged."""
    return [
        str(found["llama-server"]), *variant.flags, "-t", str(threads), "-tb", str(threads), "-np", str(slots),
        "-c", str(slots * 256), "-b", "2048", "-ub", "2048", "--cache-ram", "0", "--no-slots", "--log-disable",
    ]  # fmt: skip
