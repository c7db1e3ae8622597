"""`training/__init__.py` lists each module."""

from tests.toolbox.launch import ROOT


def test_each_module_is_listed():
    text = (ROOT / "training" / "__init__.py").read_text()
    files = (ROOT / "training").rglob("*.py")
    assert not [path for path in files if path.name != "__init__.py" and path.name not in text]
