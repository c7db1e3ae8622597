"""Figures of measurements: quantiles, tables in Markdown, and JSON with one line for each run."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NONE = "–"


def quantile(values: Iterable[float], q: float) -> float:
    """By nearest rank; NaN without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else math.nan


def percentiles(seconds: Iterable[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"p{p}": quantile(ordered, p / 100) for p in (50, 95, 99)}


def figure(values: Iterable[float], form: str = "{:,.0f}", scale: float = 1.0, middle: Any = statistics.median) -> str:
    """Median (lowest–highest)."""
    scaled = [value * scale for value in values]
    if not scaled:
        return NONE
    low, mid, high = (form.format(x) for x in (min(scaled), middle(scaled), max(scaled)))
    return mid if low == high else f"{mid} ({low}–{high})"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def table(rows: list[list[str]]) -> list[str]:
    """The lines of a table, the first row its head; none where there is only a head."""
    head, *rest = ("| " + " | ".join(row) + " |" for row in rows)
    return [head, "|---" * len(rows[0]) + "|", *rest, ""] if rest else []


def conditions(results: dict[str, Any]) -> str:
    """Machine, load, date, versions and revision of a run."""
    machine = results["machine"]
    return (
        f"{machine['cpu']}, {plural(machine['cores'], 'core')}{', ' + machine['gpu'] if 'gpu' in machine else ''}, "
        f"{machine['system']}; load {results['load_average']:.2f} at the start; {results['date'][:10]}; "
        f"{', '.join(f'{name} {version}' for name, version in results['versions'].items())}; "
        f"revision {results['revision']}"
    )


def put(content: str, path: Path, name: str) -> None:
    """Write lines between the markers <!-- NAME --> and <!-- /NAME --> of a file.

    Raises:
        ValueError: the file does not have each marker once, in order.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    text = path.read_text(encoding="utf-8")
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed or begin in rest or end in before + after:
        raise ValueError(f"{path} must have one line {begin} and after it one line {end}")
    path.write_text(f"{before}{begin}\n{content}{end}{after}", encoding="utf-8")


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
