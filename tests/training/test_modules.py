"""The modules of training/: none imports one that imports it, and `training/__init__.py` lists each."""

import ast

from tests.toolbox.launch import ROOT

FILES = sorted((ROOT / "training").glob("*.py"))


def imported(path):
    """Also inside functions and under TYPE_CHECKING."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.module for node in nodes if isinstance(node, ast.ImportFrom)}


def test_there_are_no_circles():
    """data and inputs imported each other once, and so did report and its page."""
    left = {f"training.{path.stem}": imported(path) for path in FILES}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    assert not left


def test_each_module_is_listed():
    text = (ROOT / "training" / "__init__.py").read_text()
    assert not [path.name for path in FILES if path.name != "__init__.py" and path.name not in text]
