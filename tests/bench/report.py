"""Figures of serve.py as tables in Markdown: all for tests/README.md, six rows for README.md.

Reads only the results, so that the JSON of an earlier run gives its tables again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

NONE = "–"
FAMILIES = {
    "ours": "this service",
    "llama": "llama.cpp",
    "transformers": "transformers",
    "stock": "stock LitServe",
    "lossy": "llama.cpp Q8_0",
}
PEERS = ("llama", "transformers", "stock")


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
    if "http" in results:
        lines += table(http_rows(results["http"])) + table(first_rows(results["http"]))
    for name, shape in results.get("engine", {}).get("shapes", {}).items():
        lines += table(engine_rows(name, shape)) + table(roofline_rows(name, shape))
    if results.keys() & {"prefill", "share", "sample", "texts", "idle"}:
        lines += table(other_rows(results))
    if results.keys() & {"path", "metrics"}:
        lines += table(path_rows(results))
    if "growth" in results:
        lines += table(growth_rows(results["growth"]))
    return "\n".join([*lines, *("- " + line for line in footnotes(results))]) + "\n"


def rates(runs: Iterable[dict[str, Any]], key: str = "characters_per_second") -> list[float]:
    return [run[key] for run in runs]


def http_rows(part: dict[str, Any]) -> list[list[str]]:
    """Characters per second by family; ratios of this service to each peer."""
    rows = [[f"S over HTTP, answers of {part['length']}, characters/s", "this service"]]
    rows[0] += [text for peer in PEERS for text in (FAMILIES[peer], "ratio")]
    for mode, by_clients in part["modes"].items():
        for clients, each in by_clients.items():
            families = each["families"]
            ours = rates(families["ours"]["runs"])
            row = [f"{mode}, {plural(int(clients), 'client')}", figure(ours)]
            for peer in PEERS:
                if peer in families:
                    theirs = rates(families[peer]["runs"])
                    named = f"{figure(theirs)}, {families[peer]['variant']}"
                    row += [named, figure(ratios(ours, theirs), "{:.2f} ×")]
                else:
                    row += [NONE, NONE]
            rows.append(row)
    return rows


def first_rows(part: dict[str, Any]) -> list[list[str]]:
    rows = [["time to the first character, one client, ms", "p50", "p95", "p99"]]
    for family, each in part["first"].items():
        values = [figure(rates(each["runs"], p), "{:.2f}", 1e3) for p in ("p50", "p95", "p99")]
        rows.append([f"{FAMILIES[family]}, {each['variant']}", *values])
    return rows


def engine_rows(name: str, shape: dict[str, Any]) -> list[list[str]]:
    """Every system with its rate by rows; then the ratio of each of ours to each peer's best."""
    systems = shape["systems"]
    counts = list(next(iter(systems.values()))["rows"])
    rows = [[f"{name} alone, characters/s", *(plural(int(n), "row") for n in counts)]]
    for system, each in systems.items():
        note = ", another model" if each["family"] == "lossy" else ""
        rows.append([system + note, *(figure(rates(each["rows"][n])) for n in counts)])
    for system, each in systems.items():
        if each["family"] != "ours":
            continue
        for peer in ("llama", "transformers"):
            cells = [f"{system} ÷ {FAMILIES[peer]}'s best"]
            for n in counts:
                theirs = best_rates(systems, peer, n)
                cells.append(figure(ratios(rates(each["rows"][n]), theirs), "{:.2f} ×") if theirs else NONE)
            if any(cell != NONE for cell in cells[1:]):
                rows.append(cells)
    exact = [system for system in systems if system.startswith("llama.cpp F32")]
    for system, each in systems.items():
        if exact and each["family"] == "ours" and each["flags"]["dtype"] == "float32":
            cells = [f"{system} ÷ llama.cpp at F32"]
            for n in counts:
                theirs = max((rates(systems[other]["rows"][n]) for other in exact), key=statistics.median)
                cells.append(figure(ratios(rates(each["rows"][n]), theirs), "{:.2f} ×"))
            rows.append(cells)
    return rows


def best_rates(systems: dict[str, Any], family: str, rows: str) -> list[float]:
    """The rates of a family's system with the highest median; [] without one."""
    found = [rates(each["rows"][rows]) for each in systems.values() if each["family"] == family]
    return max(found, key=statistics.median, default=[])


def roofline_rows(name: str, shape: dict[str, Any]) -> list[list[str]]:
    """Decode as a share of the roofline: of the runs above, and with every text's window full."""
    counts = list(next(iter(shape["systems"].values()))["rows"])
    rows = [[f"{name} alone, share of the roofline (products and cache in turn)"]]
    rows[0] += [plural(int(n), "row") for n in counts]

    def share(runs: list[dict[str, Any]], roof: dict[str, float], n: str) -> str:
        step = [int(n) / rate for rate in rates(runs, "decode_characters_per_second")]
        whole, sequential = (figure((roof[key] / s for s in step), "{:.0f} %", 100) for key in ROOFS)
        return f"{whole} ({sequential})"

    for system, each in shape["systems"].items():
        if each["family"] == "ours":
            roofs = each.get("roofline") or shape["roofline"][each["flags"]["dtype"]]  # of an earlier revision
            rows.append([system, *(share(each["rows"][n], roofs[n], n) for n in counts)])
    full = shape["full"]
    cells = (share(full["rows"][n]["runs"], full["rows"][n]["roofline"], n) for n in counts)
    rows.append([f"{full['system']}, windows full", *cells])
    return rows


ROOFS = ("seconds", "sequential_seconds")


def other_rows(results: dict[str, Any]) -> list[list[str]]:
    rows = [["", "measured", "compared with", "ratio"]]
    for name, shape in results.get("prefill", {}).get("shapes", {}).items():
        forward = max(
            (values for system, values in shape["systems"].items() if system.startswith("forward")),
            key=statistics.median,
        )
        for system, values in shape["systems"].items():
            if not system.startswith("forward"):
                label = f"prefill, {name}, {results['prefill']['rows']} prompts of {shape['characters']}, characters/s"
                measured = [f"{figure(values)}, {system}", f"{figure(forward)}, torch's forward"]
                rows.append([label, *measured, figure(ratios(values, forward), "{:.2f} ×")])
    if "share" in results:
        part = results["share"]
        http, alone = rates(part["http"]), rates(part["engine"])
        share = figure(ratios(http, alone), "{:.0f} %", 100)
        label = f"{part['streams']} streams of {part['length']:,} over HTTP, characters/s"
        rows.append([label, figure(http), f"{figure(alone)}, the engine alone", share])
    if "sample" in results:
        part = results["sample"]
        rate = figure(run["characters"] / run["seconds"] for run in part["runs"])
        rows.append([f"`training sample`, {part['texts']:,} lines, start included, characters/s", rate, NONE, NONE])
    if "texts" in results:
        part = results["texts"]
        for system, changed in part["changed"].items():
            label = f"texts that changed under load, {system}"
            rows.append([label, f"{changed:,} of {part['count']:,}", "the same alone", NONE])
        for system, changed in part["between"].items():
            rows.append([f"texts that differ, {system}", f"{changed:,} of {part['count']:,}", "float64", NONE])
    if "idle" in results:
        ours, stock = (results["idle"][name] for name in ("ours", "stock"))
        for label, key, form, scale in (
            ("idle, share of one core", "idle_cores", "{:.1f} %", 100),
            ("ready after start, s", "start_seconds", "{:.1f}", 1),
            ("memory of all processes (PSS), MB", "pss_bytes", "{:,.0f}", 1e-6),
        ):
            theirs = f"{figure(stock[key], form, scale)}, stock LitServe"
            rows.append([label, figure(ours[key], form, scale), theirs, NONE])
    return rows


def path_rows(results: dict[str, Any]) -> list[list[str]]:
    """The path without a model, and the cost of metrics."""
    rows = [["over HTTP without a model, one HTTP process", "stock LitServe", "plain FastAPI", "this service", "ratio"]]
    names = ("stock", "plain", "ours")
    if "path" in results:
        path = results["path"]
        requests = {name: rates(path[name]["requests"], "per_second") for name in names}
        share = figure(ratios(requests["ours"], requests["plain"]), "{:.0f} %", 100)
        rows.append(["requests/s of one character", *(figure(requests[name]) for name in names), f"{share} of plain"])
        for count in map(str, path["streams"]):
            streams = {name: rates(path[name]["streams"][count]) for name in names}
            each = figure(rates(path["ours"]["streams"][count], "characters_per_event"), "{:.0f}")
            share = figure(ratios(streams["ours"], streams["plain"]), "{:.0f} %", 100)
            rows.append(
                [f"streamed characters/s, {plural(int(count), 'stream')} (ours: {each} per event, the others: 1)"]
                + [*(figure(streams[name]) for name in names), f"{share} of plain"]
            )
        for p in ("p50", "p99"):
            values = [figure(rates(path[name]["first"], p), "{:.2f}", 1e3) for name in names]
            rows.append([f"time to first character, one at a time, {p}, ms", *values, NONE])
        for kind, label in (("probe", "a probe"), ("whole", "one character")):
            for p in ("p50", "p99", "p99.9", "max"):
                both = [figure(rates(path[name][kind], p), "{:.2f}", 1e3) for name in ("plain", "ours")]
                rows.append([f"answer of {label}, one client, {p}, ms", NONE, *both, NONE])
        for label, key, form, scale in (
            ("CPU time of the HTTP process, µs per event", "http_seconds_per_event", "{:.0f}", 1e6),
            ("CPU time of the worker, µs per event", "worker_seconds_per_event", "{:.0f}", 1e6),
            ("time between writes, p99, ms", "gap_p99", "{:.1f}", 1e3),
        ):
            value = figure(rates(path["paced"], key), form, scale)
            rows.append([f"{label}; 64 streams, one step per 10 ms", NONE, NONE, value, NONE])
    if "metrics" in results:
        part = {name: results["metrics"][name] for name in ("ours", "unmeasured")}
        for label, key, form, scale in (
            ("characters/s", "characters_per_second", "{:,.0f}", 1.0),
            ("CPU time per character, µs", "cpu_seconds_per_character", "{:,.0f}", 1e6),
        ):
            values = {name: rates(runs, key) for name, runs in part.items()}
            ours, without = (scale * statistics.median(values[name]) for name in ("ours", "unmeasured"))
            shares = [100 * share for share in ratios(values["ours"], values["unmeasured"])]
            low, high = interval(shares)
            rows.append(
                [f"S, 64 short streams, {label}, beside itself without metrics, {len(shares)} pairs", NONE, NONE]
                + [form.format(ours)]
                + [f"{statistics.median(shares):.1f} % (95 %: {low:.1f}–{high:.1f}) of {form.format(without)}"]
            )
    return rows


def growth_rows(part: dict[str, Any]) -> list[list[str]]:
    rows = [[f"growth and memory, {part['about']['backend']} {part['about']['dtype']}", ""]]
    first = [turn[0] for turn in part["seconds"]]
    for number, length in enumerate(part["lengths"]):
        values = [turn[number] for turn in part["seconds"]]
        ratio = figure(ratios(values, first), "{:.2f} ×")
        rows.append(
            [
                f"per character and row in texts of {length:,} characters, ms",
                f"{figure(values, '{:.3f}', 1e3)}, {ratio}",
            ]
        )
    base = next(iter(part["queue"].values()))
    for count, values in part["queue"].items():
        ratio = figure(ratios(values, base), "{:.2f} ×")
        rows.append([f"step with {int(count):,} waiting, ms", f"{figure(values, '{:.2f}', 1e3)}, {ratio}"])
    for slots, memory in part["memory"].items():
        rows.append([f"process with {plural(int(slots), 'slot')} in use, MB", f"{memory['process_bytes'] / 1e6:,.0f}"])
    return rows


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def footnotes(results: dict[str, Any]) -> list[str]:
    """Machine, versions, date, and what could not be measured."""
    machine, versions, settings = results["machine"], results["versions"], results["settings"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores{', ' + machine['gpu'] if 'gpu' in machine else ''}, "
        f"{machine['system']}; load {results['load_average']:.2f} at the start; {results['date'][:10]}; torch "
        f"{versions['torch']}, transformers {versions['transformers']}, LitServe {versions['litserve']}, llama.cpp of "
        f"{settings['llama']}; revision {results['revision']}",
        f"{plural(settings['cores'], 'thread')} per engine alone and per peer, {settings['threads']} of the service; "
        f"{settings['device']}{'; the quick form' if settings['quick'] else ''}. Medians (lowest–highest) of turns; "
        "flags and every run are in the JSON.",
    ]
    if "load_generator" in results:
        ceiling = results["load_generator"]
        lines.append(
            f"The client shares the cores with the servers; alone it takes {ceiling['requests_per_cpu_second']:,.0f} "
            f"answers or {ceiling['events_per_cpu_second']:,.0f} events per second of its CPU time."
        )
    for part in ("engine", "prefill", "texts", "http"):
        shapes = results.get(part, {}).get("shapes", {"": results.get(part, {})})
        for name, shape in shapes.items():
            for system, reason in shape.get("absent", {}).items():
                lines.append(f"Not measured, {part} {name}: {system}: {reason.splitlines()[-1]}".replace("  ", " "))
    for part, source in results.get("kept", {}).items():
        lines.append(f"Part {part}: revision {source['revision']}, {source['date'][:10]}.")
    return lines + [f"failed: {part}, {reason}" for part, reason in results["errors"].items()]


# README.md


def summary(results: dict[str, Any]) -> str:
    """The six rows of README.md, losses included.

    Raises:
        ValueError: the run lacks a part that they need.
    """
    if lacking := {"http", "prefill", "path"} - results.keys():
        raise ValueError(f"the six rows need the parts http, prefill and path; missing: {', '.join(sorted(lacking))}")
    rows = [["measured", "this service", "compared with", "ratio"]]
    whole = results["http"]["modes"]["whole"]
    few, many = min(whole, key=int), max(whole, key=int)
    for clients, peer in ((few, "llama"), (many, "llama"), (many, "stock")):
        families = whole[clients]["families"]
        ours, theirs = rates(families["ours"]["runs"]), rates(families[peer]["runs"])
        label = f"S over HTTP, answers of {results['http']['length']}, {plural(int(clients), 'client')}, characters/s"
        rows.append(compared(label, ours, theirs, f"{FAMILIES[peer]}, {families[peer]['variant']}"))
    first = {family: rates(each["runs"], "p50") for family, each in results["http"]["first"].items()}
    rows.append(compared("first character, one client, p50, ms", first["ours"], first["llama"], FAMILIES["llama"], 1e3))
    name, shape = list(results["prefill"]["shapes"].items())[-1]
    forward = max(
        (system for system in shape["systems"] if system.startswith("forward")),
        key=lambda system: statistics.median(shape["systems"][system]),
    )
    prefill = (shape["systems"][system] for system in ("native float32", forward))
    rows.append(compared(f"prefill of {name} in float32, characters/s", *prefill, f"torch's {forward}"))
    requests = (rates(results["path"][name]["requests"], "per_second") for name in ("ours", "plain"))
    rows.append(compared("requests/s over HTTP without a model", *requests, "plain FastAPI"))
    return "\n".join(table(rows))


def compared(label: str, ours: list[float], theirs: list[float], name: str, scale: float = 1.0) -> list[str]:
    form = "{:,.0f}" if scale == 1.0 else "{:.1f}"
    ratio = f"{statistics.median(ratios(ours, theirs)):.2g} ×"
    return [label, figure(ours, form, scale), f"{figure(theirs, form, scale)}, {name}", ratio]


def write_tables(results: dict[str, Any], root: Path) -> None:
    """Write the tables into tests/README.md and the six rows into README.md below `root`.

    Raises:
        ValueError: as `put` and `summary`.
    """
    six = summary(results)
    put(markdown(results), root / "tests" / "README.md", "bench")
    put(six, root / "README.md", "bench-summary")


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
