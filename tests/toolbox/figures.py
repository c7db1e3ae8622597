"""Figures as JSON that a person can read and compare: one line for each run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_figures(path: Path, value: Any) -> None:
    path.write_text(dumps(value) + "\n", encoding="utf-8")


def dumps(value: Any, indent: str = "") -> str:
    """`value` as JSON; what holds no more than lists and objects of numbers and texts takes one line."""
    if depth(value) <= 2:
        return json.dumps(value, ensure_ascii=False)
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(str(key))}: {dumps(each, inner)}" for key, each in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + dumps(each, inner) for each in value) + f"\n{indent}]"


def depth(value: Any) -> int:
    """0: a number or a text."""
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
    return 0 if parts is None else 1 + max(map(depth, parts), default=0)
