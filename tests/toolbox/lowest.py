"""Prints the lowest versions that pyproject.toml allows, as pip reads them: python -m tests.toolbox.lowest

`make test-lowest` installs them. torch is not among them: its lowest version is the one that the tests have.
"""

import tomllib

from packaging.requirements import Requirement

from tests.toolbox.launch import ROOT

EXTRAS = ("service", "training", "export", "tensorboard", "tracing")
TOOLS = ("transformers",)  # the newest needs a newer safetensors


def lowest() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    ours = [*project["dependencies"], *(each for extra in EXTRAS for each in extras[extra])]
    tools = [each for each in extras["test"] if Requirement(each).name in TOOLS]
    pins = []
    for requirement in map(Requirement, [*ours, *tools]):
        (version,) = (it.version for it in requirement.specifier if it.operator in (">=", "=="))
        if requirement.name != "torch":
            pins.append(f"{requirement.name}=={version}")
    return pins


if __name__ == "__main__":
    print("\n".join(lowest()))
