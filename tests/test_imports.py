"""Import rules: which part may import which, and which packages importing a module loads."""

import ast
import functools
import subprocess
import sys

import pytest

from tests.toolbox.launch import ROOT

HEAVY = {"torch", "litserve", "fastapi", "pydantic", "prometheus_client", "training", "matplotlib", "transformers"}

# part -> parts that it may import, inside functions included; imports within a part are always allowed
ARROWS = {
    "service.model": set(),
    "service.constrain": set(),
    "service.process": set(),
    "service.text": {"service.model", "service.constrain", "service.wire"},
    "service.wire": {"service.model"},
    "service.sockets": {"service.wire"},
    "service.shared": {"service.wire"},
    "service.supervisor": {"service.shared"},
    "service.catalog": {"service.model", "service.shared"},
    "service.observe": {"service.model", "service.shared"},
    "service.settings": {"service.observe", "service.process"},
    "service.local": {"service.text", "service.engine", "service.model", "service.wire", "service.process"},
    "service.python": {"service.local"},
    "service.engine": {
        "service.model", "service.constrain", "service.wire",
        "service.sockets", "service.process", "service.observe", "service.shared", "service.catalog",  # see HOSTS
        "service.settings",
    },
    "service.http": {
        "service.text", "service.model", "service.wire", "service.sockets", "service.observe", "service.settings",
        "service.shared", "service.catalog",
    },
    "service.placement": {"service.engine", "service.model", "service.settings"},
    "service.rollout": {"service.catalog", "service.observe", "service.shared", "service.supervisor"},
    "service.server": {
        "service.http", "service.engine", "service.model", "service.observe", "service.catalog", "service.placement",
        "service.process", "service.rollout", "service.settings", "service.sockets", "service.shared",
        "service.supervisor",
    },
    "service.__main__": {
        "service.server", "service.placement", "service.settings", "service.model", "service.process",
        "service.supervisor", "service.http",
    },
    "training": {"service.model", "service.engine", "service.wire", "service.text", "service.local"},
}  # fmt: skip
# Of the engine, only this module knows that there are other processes.
HOSTS = {"service.engine.worker"}
HOSTS_ONLY = {
    "service.sockets", "service.process", "service.observe", "service.shared", "service.catalog", "service.settings",
    "litserve",
}  # fmt: skip
LITSERVE = {"service.engine.worker", "service.sockets", "service.server", "service.placement"}


def part_of(module):
    return max((part for part in ARROWS if module == part or module.startswith(part + ".")), key=len, default=None)


@functools.cache
def imports(path):
    """The modules that a file imports anywhere, for typing too."""
    return list(imports_of(path))


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from service.observe import metrics` names a module of that part
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


FILES = sorted(path for folder in ("service", "training") for path in (ROOT / folder).rglob("*.py"))


def test_every_import_is_allowed():
    for path in FILES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        part = part_of(module)
        for imported in imports(path):
            target = part_of(imported)
            if target not in (None, part):
                assert target in ARROWS[part], f"{module} imports {imported}"
            if part == "service.engine" and {target, imported.split(".")[0]} & HOSTS_ONLY:
                assert module in HOSTS, f"{module} imports {imported}"
            if imported.split(".")[0] == "litserve":
                assert module in LITSERVE, module


# The steps of a request in service/http, each a folder. The modules beside them come last.
STEPS = ("connection", "schema", "models", "limits", "workers", "routes")


def test_a_step_of_a_request_imports_only_earlier_ones():
    order = [f"service.http.{step}" for step in STEPS] + ["service.http"]

    def place(module):
        return next((i for i, step in enumerate(order) if module.startswith(step + ".")), -1)

    for path in FILES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if module.startswith("service.http."):
            late = [imported for imported in imports(path) if place(imported) > place(module)]
            assert not late, f"{module} imports {late}"


# The folders of training/ and what they share. Text knows nothing of settings, and a model nothing of a run.
ROOMS = ("messages", "folders", "text", "config", "model", "measure", "fit", "run", "commands", "__main__")


def test_a_folder_of_training_imports_only_those_above_it():
    def place(module):
        return next((i for i, room in enumerate(ROOMS) if f"{module}.".startswith(f"training.{room}.")), -1)

    for path in FILES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if module.startswith("training.") and module != "training.__init__":
            assert place(module) >= 0, f"{module} is in no folder"
            late = [imported for imported in imports(path) if place(imported) > place(module)]
            assert not late, f"{module} imports {late}"


def test_no_modules_import_each_other_in_a_circle():
    """Typing included: what each of them is can be read without the others."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    graph = {}
    for module, path in modules.items():
        found = {name if name in modules else name.rpartition(".")[0] for name in imports(path)}
        graph[module] = (found & modules.keys()) - {module}
    while leaves := {module for module, others in graph.items() if not others & graph.keys()}:
        graph = {module: others for module, others in graph.items() if module not in leaves}
    # What is left are circles, and what leads to them.
    assert not graph, {module: others & graph.keys() for module, others in graph.items()}


LIGHT = (
    "service, service.command, service.model.tokenizer, service.model.checkpoint, service.model.params, "
    "service.model.attention, service.constrain.regex, service.wire, service.engine.scheduler"
)


@pytest.mark.parametrize(
    "steps",
    [
        [
            (LIGHT, set()),
            ("service.text.generation, service.text.scores", {"pydantic"}),
            ("service.python", set()),
            ("service.sockets", {"litserve", "fastapi"}),
            ("service.server", {"prometheus_client"}),
        ],
        [
            ("training.text.corpus, training.config, training.fit.plan, training.commands.prepare", {"training"}),
            ("training.measure.copies, training.fit.warnings, training.commands.inputs", {"pydantic"}),
            ("service.model.gpt, service.engine.engine, training.model.device", {"torch"}),
            ("training.__main__, training.commands.train, training.commands.evaluate", set()),
        ],
    ],
)
def test_modules_load_only_allowed_packages(steps):
    """Each step in the process of those before it: what they may load is loaded."""
    code = "import sys"
    for modules, _ in steps:
        code += f"\nimport {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    allowed = set()
    for (modules, more), loaded in zip(steps, done.stdout.splitlines(), strict=True):
        allowed |= more
        assert {name.split(".")[0] for name in loaded.split()} & HEAVY <= allowed, modules
