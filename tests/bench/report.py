"""Figures of serve.py as tables in Markdown, also for tests/README.md, and as a picture.

Reads only the results, so that the JSON of an earlier run gives its tables again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

NONE = "–"

# Of this service: (required, aimed at), each a lower bound, or with "<" an upper one.
TARGETS = {
    "requests": ("60 %", "85 %"),
    "streams": ("100,000", "400,000"),
    "first_p50": ("< 2 ms", "< 0.7 ms"),
    "first_p99": ("< 5 ms", "< 2 ms"),
    "whole": ("5 ×", "30 ×"),
    "whole_first": ("a tenth", NONE),
    "alone": ("70 %", "90 %"),
    "idle": ("< 2 %", "< 0.5 %"),
    "metrics": ("98 %", NONE),
    "start": ("< 8 s", "< 4 s"),
}


def figure(values: Iterable[float], form: str = "{:,.0f}", scale: float = 1.0) -> str:
    """Median (lowest–highest)."""
    scaled = [value * scale for value in values]
    if not scaled:
        return NONE
    low, middle, high = (form.format(x) for x in (min(scaled), statistics.median(scaled), max(scaled)))
    return middle if low == high else f"{middle} ({low}–{high})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ratios of alternating measurements; where `theirs` has fewer, its last one is repeated."""
    return [a / theirs[min(i, len(theirs) - 1)] for i, a in enumerate(ours)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Confidence interval of the median, at least 95 %; the whole range of few values.

    By order statistics, without assuming a distribution (Conover, Practical Nonparametric Statistics, 3.2).
    """
    ordered, n = sorted(values), len(values)
    rarely = 0.025 * 2**n
    k = max((k for k in range(1, n // 2 + 1) if sum(math.comb(n, i) for i in range(k)) <= rarely), default=1)
    return ordered[k - 1], ordered[n - k]


def table(rows: list[list[str]]) -> list[str]:
    head, *rest = ("| " + " | ".join(row) + " |" for row in rows)
    return [head, "|---" * len(rows[0]) + "|", *rest, ""]


def markdown(results: dict[str, Any]) -> str:
    """All tables of a run, with machine, versions and date."""
    lines: list[str] = []
    if results.keys() & {"path", "whole", "metrics"}:
        lines += table(service_rows(results))
    if "engine" in results:
        lines += table(engine_rows(results["engine"]))
    if "engine" in results or "growth" in results:
        lines += table(growth_rows(results))
    return "\n".join([*lines, *("- " + line for line in footnotes(results))]) + "\n"


def service_rows(results: dict[str, Any]) -> list[list[str]]:
    rows = [
        ["over HTTP, one HTTP process", "stock LitServe", "plain FastAPI", "this service", "ratio", "required", "aim"]
    ]
    path, whole = results.get("path"), results.get("whole")
    names = ("stock", "plain", "ours")
    if path is not None:
        requests = {name: [run["per_second"] for run in path[name]["requests"]] for name in names}
        share = figure(ratios(requests["ours"], requests["plain"]), "{:.0f} %", 100)
        rows.append(
            ["requests/s of one character, stub engine"]
            + [figure(requests[name]) for name in names]
            + [f"{share} of plain", *TARGETS["requests"]]
        )
        for count in map(str, path["streams"]):
            streams = {name: path[name]["streams"][count] for name in names}
            rates = {name: [run["characters_per_second"] for run in streams[name]] for name in names}
            named = f"{count} stream{'s' if count != '1' else ''}"
            each = figure((run["characters_per_event"] for run in streams["ours"]), "{:.0f}")
            rows.append(
                [f"streamed characters/s, stub engine, {named} (ours: {each} per event, the others: 1)"]
                + [figure(rates[name]) for name in names]
                + [figure(ratios(rates["ours"], rates["plain"]), "{:.0f} %", 100) + " of plain"]
                + list(TARGETS["streams"] if count == "64" else (NONE, NONE))
            )
        for p in ("p50", "p99"):
            rows.append(
                [f"time to first character, stub engine, one at a time, {p}, ms"]
                + [figure((run[p] for run in path[name]["first"]), "{:.2f}", 1e3) for name in names]
                + [NONE, *TARGETS[f"first_{p}"]]
            )
        for label, key, form, scale in (
            ("CPU time of the HTTP process, µs per event", "http_seconds_per_event", "{:.0f}", 1e6),
            ("CPU time of the worker, µs per event", "worker_seconds_per_event", "{:.0f}", 1e6),
            ("time between writes, p99, ms", "gap_p99", "{:.1f}", 1e3),
        ):
            value = figure((run[key] for run in path["paced"]), form, scale)
            rows.append([f"{label}; 64 streams, one step per 10 ms", NONE, NONE, value, NONE, NONE, NONE])
    if whole is not None:
        runs = {name: whole[name]["runs"] for name in ("stock", "ours")}
        rate = {name: [run["characters_per_second"] for run in runs[name]] for name in runs}
        rows.append(
            [f"whole service, S, {whole['connections']} streams of mixed lengths, characters/s"]
            + [figure(rate["stock"]), NONE, figure(rate["ours"])]
            + [figure(ratios(rate["ours"], rate["stock"]), "{:.1f} ×"), *TARGETS["whole"]]
        )
        for key, label in (
            ("first", "time to first character"),
            ("gap", "time between writes"),
            ("per_character", "mean per character after the first"),
        ):
            for p in ("p50", "p95", "p99"):
                values = {name: [run[key][p] for run in runs[name]] for name in runs}
                rows.append(
                    [f"the same, {label}, {p}, ms"]
                    + [figure(values["stock"], "{:,.1f}", 1e3), NONE, figure(values["ours"], "{:,.1f}", 1e3)]
                    + [figure(ratios(values["ours"], values["stock"]), "{:.3f} ×")]
                    + list(TARGETS["whole_first"] if (key, p) == ("first", "p95") else (NONE, NONE))
                )
        alone = figure(ratios(rate["ours"], whole["engine"]), "{:.0f} %", 100)
        rows.append(["the same, share of the engine alone", NONE, NONE, figure(rate["ours"]), alone, *TARGETS["alone"]])
        idle = {name: [sum(whole[name]["idle_cores"][part] for part in ("http", "worker"))] for name in runs}
        for label, values, form, scale, target in (
            ("idle, share of one core", idle, "{:.1f} %", 100, TARGETS["idle"]),
            ("ready after start, s", {n: whole[n]["start_seconds"] for n in runs}, "{:.1f}", 1, TARGETS["start"]),
            (
                "memory of all processes (PSS), MB",
                {n: [whole[n]["pss_bytes"]] for n in runs},
                "{:,.0f}",
                1e-6,
                (NONE, NONE),
            ),
        ):
            rows.append(
                [label, figure(values["stock"], form, scale), NONE, figure(values["ours"], form, scale), NONE, *target]
            )
    if "metrics" in results:
        for label, key, form, scale, target in (
            ("characters/s", "characters_per_second", "{:,.0f}", 1.0, TARGETS["metrics"]),
            ("CPU time per character, µs", "cpu_seconds_per_character", "{:,.0f}", 1e6, (NONE, NONE)),
        ):
            values = {name: [run[key] for run in runs] for name, runs in results["metrics"].items()}
            ours, without = (scale * statistics.median(values[name]) for name in ("ours", "unmeasured"))
            shares = [100 * share for share in ratios(values["ours"], values["unmeasured"])]
            low, high = interval(shares)
            rows.append(
                [f"whole service, S, 64 short streams, {label}, beside itself without metrics, {len(shares)} pairs"]
                + [NONE, NONE, form.format(ours)]
                + [f"{statistics.median(shares):.1f} % (95 %: {low:.1f}–{high:.1f}) of {form.format(without)}", *target]
            )
    return rows


def engine_rows(part: dict[str, Any]) -> list[list[str]]:
    rows = [
        ["engine alone", "characters/s", "ms per step", "transformers", "ratio", "share of the roofline"]
        + ["decode", "sampling", "fp64", "prefill", "schedule", "rest"]
    ]
    for name, shape in part["shapes"].items():
        for run in shape["rows"]:
            options = run["peer_options"]
            peer = f"{figure(run['peer'])}, {options['dtype']}{', static' if options['cache'] else ''}"
            phases = run["phases"]
            rows.append(
                [f"{name}, {run['rows']} rows", figure(run["characters_per_second"])]
                + [figure(run["step_seconds"], "{:.2f}", 1e3), peer, figure(run["ratio"], "{:.2f} ×")]
                + [figure(run["roofline_share"], "{:.0f} %", 100)]
                + [
                    f"{100 * phases.get(phase, 0.0) / phases['all']:.0f} %"
                    for phase in ("decode", "sampling", "exact", "prefill", "schedule", "rest")
                ]
            )
    return rows


def growth_rows(results: dict[str, Any]) -> list[list[str]]:
    rows = [["growth and memory", ""]]
    if "growth" in results:
        lengths, queue = results["growth"]["lengths"], results["growth"]["queue"]
        first = lengths["step_seconds"][0]
        for length, seconds in zip(lengths["lengths"], lengths["step_seconds"], strict=True):
            rows.append(
                [f"step in texts of {length:,.0f} characters, ms", f"{1e3 * seconds:.2f} ({seconds / first:.2f} ×)"]
            )
        base = queue["step_seconds"][0]
        for count, values in zip(queue["queued"], queue["step_seconds"], strict=True):
            ratio = figure(ratios(values, base), "{:.2f} ×")
            rows.append([f"step with {count:,} waiting, ms", f"{figure(values, '{:.2f}', 1e3)}, {ratio}"])
    for name, memory in results.get("engine", {}).get("memory", {}).items():
        of = memory["cache_bytes"] / memory["formula_bytes"]
        rows += [
            [
                f"{name}: keys and values per slot, KB",
                f"{memory['bytes_per_slot'] / 1e3:,.0f} ({of:.2f} × the formula)",
            ],
            [
                f"{name}: weights, fp64 copy, cache of {memory['slots']} slots, MB",
                ", ".join(f"{memory[k] / 1e6:.1f}" for k in ("weight_bytes", "exact_weight_bytes", "cache_bytes")),
            ],
        ]
    return rows


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def footnotes(results: dict[str, Any]) -> list[str]:
    """Machine, versions, date, and failed parts."""
    about, versions, settings = results["machine"], results["versions"], results["settings"]
    lines = [
        f"{about['cpu']}, {about['cores']} cores{', ' + about['gpu'] if 'gpu' in about else ''}, {about['system']}; "
        f"load {results['load_average']:.2f} at the start; {results['date'][:10]}; torch {versions['torch']}, "
        f"transformers {versions['transformers']}, LitServe {versions['litserve']}; revision {results['revision']}",
        f"{settings['threads']} {'thread' if settings['threads'] == 1 else 'threads'} per engine, {settings['device']}"
        f"{'; the quick form' if settings['quick'] else ''}. "
        "Medians (lowest–highest); compared systems were measured alternately.",
    ]
    if "load_generator" in results:
        ceiling = results["load_generator"]["requests_per_cpu_second"]
        lines.append(
            f"The load generator shares the cores with the server; alone it reaches {ceiling:,.0f} requests/s."
        )
    for part, source in results.get("kept", {}).items():
        lines.append(f"Part {part}: revision {source['revision']}, {source['date'][:10]}.")
    return lines + [f"failed: {part}, {reason}" for part, reason in results["errors"].items()]


def write_table(results: dict[str, Any], path: Path) -> None:
    """Write the tables between the markers of a file.

    Raises:
        ValueError: as `put`.
    """
    put(markdown(results), path, "bench")


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


def draw(results: dict[str, Any], png: Path) -> None:
    """Plot engine speed and phases by rows, the path by streams, step time by length and queue."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(13, 8), layout="constrained")
    (left, right), (lower_left, lower_right) = picture.subplots(2, 2)
    colors = {"S": "tab:blue", "M": "tab:red", "ours": "tab:blue", "plain": "tab:gray", "stock": "tab:orange"}
    shapes = results.get("engine", {}).get("shapes", {})
    labels, stacks = [], []
    for name, shape in shapes.items():
        runs = shape["rows"]
        rows = [run["rows"] for run in runs]
        for key, style, label in (("characters_per_second", "o-", "ours"), ("peer", "s--", "transformers")):
            values = [statistics.median(run[key]) for run in runs]
            left.plot(rows, values, style, color=colors[name], ms=4, label=f"{name}, {label}")
        roof = [run["rows"] / run["roofline"]["seconds"] for run in runs]
        left.plot(rows, roof, ".:", color=colors[name], label=f"{name}, roofline")
        labels += [f"{name} {run['rows']}" for run in runs]
        stacks += [run["phases"] for run in runs]
    bottom = [0.0] * len(stacks)
    for phase in ("decode", "sampling", "exact", "prefill", "schedule", "rest"):
        shares = [100 * stack.get(phase, 0.0) / stack["all"] for stack in stacks]
        right.bar(labels, shares, bottom=bottom, label=phase)
        bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
    if "path" in results:
        path = results["path"]
        for name in ("ours", "plain", "stock"):
            rates = [
                statistics.median(run["characters_per_second"] for run in path[name]["streams"][str(n)])
                for n in path["streams"]
            ]
            lower_left.plot(path["streams"], rates, "o-", color=colors[name], ms=4, label=name)
    if "growth" in results:
        lengths, queue = results["growth"]["lengths"], results["growth"]["queue"]
        lower_right.plot(
            lengths["lengths"], [1e3 * s for s in lengths["step_seconds"]], "o-", label="characters per text"
        )
        waits = [1e3 * statistics.median(values) for values in queue["step_seconds"]]
        lower_right.plot(queue["queued"], waits, "s-", label="waiting sequences")
    for axes, title, x, y in (
        (left, "Engine alone", "rows", "characters/s"),
        (right, "Time by phase", "shape and rows", "%"),
        (lower_left, "HTTP path, stub engine", "streams", "characters/s"),
        (lower_right, "Growth", "characters, sequences", "ms per step"),
    ):
        axes.set(title=title, xlabel=x, ylabel=y)
        if axes is not right:
            axes.set_xscale("log", base=2)
            axes.grid(alpha=0.3)
        if axes in (left, lower_left) and axes.lines:
            axes.set_yscale("log")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    lower_right.set_ylim(bottom=0)
    about = results["machine"]
    picture.suptitle(f"{about['cpu']}, {about['cores']} cores, {results['date'][:10]}", fontsize=9)
    picture.savefig(png, dpi=110)
