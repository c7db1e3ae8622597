"""What the image is built from: locks, Dockerfile, workflows; test_container.py builds and runs it."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from deploy.image import lock

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(name):
    return lock.parse((ROOT / "deploy" / "image" / f"{name}.txt").read_text())


def required(name):
    """Requirements of pyproject.toml that a lock must satisfy."""
    if name == "build":
        return PYPROJECT["build-system"]["requires"]
    project = PYPROJECT["project"]
    if name == "train":
        return project["optional-dependencies"]["training"]
    return project["dependencies"] + [each for extra in lock.EXTRAS for each in project["optional-dependencies"][extra]]


@pytest.mark.parametrize("name", ["cpu", "cuda", "build", "train"])
def test_a_lock_satisfies_pyproject(name):
    locked = read(name)
    for requirement in map(Requirement, required(name)):
        version = lock.version(locked, requirement.name)
        assert requirement.specifier.contains(version), f"{requirement}, locked {version}: run make lock"
    for package, lines in locked.items():
        first, *hashes = lines.rstrip().split(" \\\n    ")
        assert re.fullmatch(rf"{package}==\S+", first) and hashes, lines
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), lines


def test_the_cpu_lock_is_the_cuda_lock_without_cuda():
    cpu, cuda = read("cpu"), read("cuda")
    assert lock.version(cpu, "torch") == f"{lock.version(cuda, 'torch')}+cpu"
    assert f"torch=={lock.version(cpu, 'torch')}" in (ROOT / "Makefile").read_text()  # what make test installs
    assert cpu.pop("torch") != cuda.pop("torch")
    assert {name: lines for name, lines in cuda.items() if name in cpu} == cpu
    assert {name for name in cuda.keys() - cpu.keys() if not lock.CUDA_ONLY.match(name)} == set()


def test_workflows_run_what_exists():
    """Targets of make, files, and actions with a version. The workflows have never run; make lint checks their form."""
    assert len(WORKFLOWS) == 2
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job["steps"]:
                assert re.fullmatch(r"[\w-]+/[\w/-]+@v\d+(\.\d+)*", step.get("uses", "a/b@v1")), step
                script = step.get("run", "")
                assert set(re.findall(r"\bmake ([a-z-]+)", script)) <= targets, script
                for file in re.findall(r"(?<![\w/.-])(?:tests|deploy|\.ci)/[\w./-]+", script):
                    assert (ROOT / file).exists(), file
