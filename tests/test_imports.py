"""The import rule of service/__init__.py, seen from a fresh interpreter."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "litserve", "fastapi", "pydantic", "prometheus_client", "training", "matplotlib", "transformers"}


def imported_by(module):
    code = f"import sys; import {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("service", set()),
        ("service.model.tokenizer", set()),
        ("service.model.checkpoint", set()),
        ("service.engine.scheduler", set()),
        ("service.model.gpt", {"torch"}),
        ("service.engine.engine", {"torch"}),
        ("service.http.schemas", {"pydantic"}),
        ("service.server", {"litserve", "fastapi", "pydantic", "prometheus_client"}),
    ],
)
def test_a_module_imports_no_more_than_it_may(module, allowed):
    assert imported_by(module) & HEAVY <= allowed


def test_training_uses_the_model_and_the_engine_alone():
    service = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, training.__main__, training.loop, training.evaluate;"
            "print(*[m for m in sys.modules if m.startswith('service')])",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    extra = {m for m in service if not m.startswith("service.model")}
    assert extra <= {
        "service",
        "service.constrain",
        "service.engine",
        "service.engine.engine",
        "service.engine.scheduler",
    }
