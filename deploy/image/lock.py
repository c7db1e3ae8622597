"""Renews the locks of the image, beside this file: make lock

cpu.txt, torch.txt and cuda.txt hold what the image installs: without torch, with its CPU build, and with CUDA's.
build.txt holds what builds its wheel, train.txt what training adds to an image with torch. All have the newest versions
that pyproject.toml allows, for Python 3.11 on x86-64 and arm64 with glibc 2.36, with the hashes of the wheels for those
alone. Where two of them have a package, they have the same version of it.

PyPI's torch is the CUDA build. The CPU build's hashes come from the index of PyTorch (TORCH_INDEX_URL), which is asked
only if the version changes. Those of 2.13.0 were not read there: x86-64's is that of the file that the tests install,
arm64's was copied from published locks (nixpkgs and others, which agree). arm64's wheel was never downloaded: were its
hash wrong, pip would refuse it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from urllib.parse import unquote

from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
EXTRAS = ("service", "tracing")
MACHINES = ("x86_64", "aarch64")
CUDA_ONLY = re.compile(r"nvidia-|cuda-|triton$")
INDEX = "https://download.pytorch.org/whl/cpu"
PYPI = "https://pypi.org/simple"
PLATFORMS = [
    *(f"manylinux_2_{glibc}_{machine}" for glibc in range(36, 4, -1) for machine in MACHINES),
    *(f"manylinux{name}_{machine}" for name in ("2014", "2010", "1") for machine in MACHINES),
]
TAGS = {*cpython_tags((3, 11), ["cp311"], PLATFORMS), *compatible_tags((3, 11), "cp311", PLATFORMS)}

Lock = dict[str, str]  # by package: its lines


class LockError(Exception):
    """The locks cannot be renewed; none was changed."""


def parse(text: str) -> Lock:
    blocks = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)
    return {block.partition("==")[0]: block for block in blocks if "==" in block}


def version(lock: Lock, package: str) -> str:
    return lock[package].partition("==")[2].split()[0]


def resolve(requirements: list[str]) -> Lock:
    """The newest versions, the same for every machine.

    Raises:
        LockError: there are none.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--python-version", "3.11"]
    command += ["--generate-hashes", "--only-binary", ":all:", "--no-header", "--no-annotate", "--quiet"]
    found = []
    for machine in MACHINES:
        done = subprocess.run(
            [*command, "--python-platform", f"{machine}-manylinux_2_28"],
            input="\n".join(requirements), text=True, stdout=subprocess.PIPE,
        )  # fmt: skip
        if done.returncode != 0:
            raise LockError(f"uv pip compile failed for {machine}")
        found.append(parse(done.stdout))
    if found[0] != found[1]:
        differing = sorted(
            name for name in found[0].keys() | found[1].keys() if found[0].get(name) != found[1].get(name)
        )
        raise LockError(f"{' and '.join(MACHINES)} need different versions of {', '.join(differing)}")
    return {name: wheels_of(name, lines) for name, lines in found[0].items()}


@functools.cache
def wheels_of(package: str, lines: str) -> str:
    """The lines of a package with the hashes of the wheels that an image may take.

    Raises:
        LockError: PyPI cannot be read, or has no such wheel.
    """
    request = urllib.request.Request(f"{PYPI}/{package}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            files = json.load(response)["files"]
    except OSError as error:
        raise LockError(f"{request.full_url}: {error}") from None
    first, *hashes = lines.rstrip().split(" \\\n    ")
    names = {f"--hash=sha256:{file['hashes']['sha256']}": file["filename"] for file in files}
    kept = [each for each in hashes if names[each].endswith(".whl") and parse_wheel_filename(names[each])[3] & TAGS]
    if not kept:
        raise LockError(f"PyPI has no wheel of {first} for {' or '.join(MACHINES)}")
    return " \\\n    ".join([first, *kept]) + "\n"


def cpu_torch(wanted: str, before: Lock, index: str) -> str:
    """The lines of the CPU build of a version of torch: those of `before`, or new ones from PyTorch's index.

    Raises:
        LockError: the index cannot be read, or lacks a file.
    """
    if "torch" in before and version(before, "torch") == f"{wanted}+cpu":
        return before["torch"]
    page = f"{index.rstrip('/')}/torch/"
    try:
        with urllib.request.urlopen(page, timeout=60) as response:
            links = response.read().decode()
    except OSError as error:
        raise LockError(f"{page} (TORCH_INDEX_URL) is needed for the hashes of torch {wanted}+cpu: {error}") from None
    hashes = []
    for machine in MACHINES:
        name = rf"/torch-{re.escape(wanted)}\+cpu-cp311-cp311-manylinux\w*_{machine}\.whl#sha256=([0-9a-f]{{64}})"
        matched = re.search(name, unquote(links))
        if matched is None:
            raise LockError(f"{page} has no hash of torch {wanted}+cpu for Python 3.11 on {machine}")
        hashes.append(matched[1])
    return " \\\n    ".join([f"torch=={wanted}+cpu", *(f"--hash=sha256:{each}" for each in sorted(hashes))]) + "\n"


def main() -> int:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(each for extra in EXTRAS for each in extras[extra])]
    path = FOLDER / "torch.txt"
    before = parse(path.read_text()) if path.exists() else {}
    try:
        cpu, cuda = resolve(needed), resolve([*needed, *extras["torch"]])
        training = resolve([*needed, *extras["training"]])
        for smaller, larger, what in ((cpu, cuda, "torch"), (cuda, training, "training")):
            if differing := sorted(name for name in smaller if larger.get(name) != smaller[name]):
                raise LockError(f"{what} needs other versions of {', '.join(differing)}")
        torch = cpu_torch(version(cuda, "torch"), before, os.environ.get("TORCH_INDEX_URL") or INDEX)
        locks = {
            "cpu": cpu,
            "torch": {name: lines for name, lines in cuda.items() if not CUDA_ONLY.match(name)} | {"torch": torch},
            "cuda": cuda,
            "train": {name: lines for name, lines in training.items() if name not in cuda},
            "build": resolve(pyproject["build-system"]["requires"]),
        }
    except LockError as error:
        print(f"make lock: {error}", file=sys.stderr)
        return 1
    for name, lock in locks.items():
        (FOLDER / f"{name}.txt").write_text(
            f"# Written by `make lock`: {Path(__file__).name}\n" + "".join(lock.values())
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
