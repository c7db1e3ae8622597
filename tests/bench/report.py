"""Figures of serve.py as tables in Markdown, for tests/README.md: what answers a reader's question; the rest is in the
JSON.

Reads only the results, so that the JSON of an earlier run gives its tables again.
"""

from __future__ import annotations

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


def table(rows: list[list[str]]) -> list[str]:
    head, *rest = ("| " + " | ".join(row) + " |" for row in rows)
    return [head, "|---" * len(rows[0]) + "|", *rest, ""]


def markdown(results: dict[str, Any]) -> str:
    """All tables of a run, with machine, versions and date."""
    lines: list[str] = []
    if "http" in results:
        lines += table(http_rows(results["http"])) + table(first_rows(results["http"]))
    if "mixed" in results:
        lines += table(beside_rows(results["mixed"])) + table(kind_rows(results["mixed"]))
    if "engine" in results:
        lines += table(engine_rows(results["engine"]["shapes"]))
    if results.keys() & {"prefill", "texts", "idle"}:
        lines += table(other_rows(results))
    if "path" in results:
        lines += table(path_rows(results))
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


def beside_rows(part: dict[str, Any]) -> list[list[str]]:
    rows = [["S, one stream beside another client's work", "alone, characters/s", "beside it", "the other's, of alone"]]
    for name, runs in part["beside"].items():
        shares = (
            figure((run[f"{who}beside"] / run[f"{who}alone"] for run in runs), "{:.0f} %", 100)
            for who in ("", "other_")
        )
        rows.append([name, figure(rates(runs, "alone")), *shares])
    return rows


def kind_rows(part: dict[str, Any]) -> list[list[str]]:
    """Whole answers of each kind, as a share of plain ones."""
    plain, *others = part["kinds"]
    counts = list(part["kinds"][plain])
    rows = [["S, whole answers, characters/s", *(plural(int(n), "client") for n in counts)]]
    rows.append([plain, *(figure(part["kinds"][plain][n]) for n in counts)])
    for kind in others:
        shares = (figure(ratios(part["kinds"][kind][n], part["kinds"][plain][n]), "{:.2f} ×") for n in counts)
        rows.append([f"{kind}, of plain", *shares])
    return rows


ENGINES = ("native float32", "native bfloat16")


def engine_rows(shapes: dict[str, Any]) -> list[list[str]]:
    """Of each shape ours, llama.cpp's best at that number of rows, the ratio, the share of the roofline."""
    counts = list(next(iter(next(iter(shapes.values()))["systems"].values()))["rows"])
    rows = [["decoding without HTTP, characters/s", *(plural(int(n), "row") for n in counts)]]
    for name, shape in shapes.items():
        systems = shape["systems"]
        for system in (system for system in ENGINES if system in systems):
            rows.append([f"{name}, {system}", *(figure(rates(systems[system]["rows"][n])) for n in counts)])
        theirs = [best_rates(systems, "llama", n) for n in counts]
        rows.append([f"{name}, llama.cpp, its fastest variant", *map(figure, theirs)])
        for system in (system for system in ENGINES[:1] if system in systems):
            ours = [rates(systems[system]["rows"][n]) for n in counts]
            if all(theirs):
                cells = (figure(ratios(*both), "{:.2f} ×") for both in zip(ours, theirs, strict=True))
                rows.append([f"{name}, {system} ÷ llama.cpp", *cells])
            rows.append([f"{name}, {system}, share of the roofline", *roofline(shape, system)])
    return rows


def best_rates(systems: dict[str, Any], family: str, rows: str) -> list[float]:
    """The rates of a family's system with the highest median; [] without one. Another model's do not count."""
    found = [rates(each["rows"][rows]) for each in systems.values() if each["family"] == family]
    return max(found, key=statistics.median, default=[])


def roofline(shape: dict[str, Any], system: str) -> list[str]:
    """The shortest time of a decode step, with products and cache in turn, as a share of the measured time."""
    each = shape["systems"][system]
    roofs = each.get("roofline") or shape["roofline"][each["flags"]["dtype"]]  # of an earlier revision
    return [
        figure(
            (
                roofs[n]["sequential_seconds"] * rate / int(n)
                for rate in rates(each["rows"][n], "decode_characters_per_second")
            ),
            "{:.0f} %",
            100,
        )
        for n in each["rows"]
    ]


def other_rows(results: dict[str, Any]) -> list[list[str]]:
    rows = [["", "measured", "compared with", "ratio"]]
    if "prefill" in results:
        shape = results["prefill"]["shapes"]["S"]["systems"]
        forward = max((v for system, v in shape.items() if system.startswith("forward")), key=statistics.median)
        for system in (system for system in ENGINES[:1] if system in shape):
            label = f"S, {results['prefill']['rows']} prompts of a whole window, characters/s"
            measured = [f"{figure(shape[system])}, {system}", f"{figure(forward)}, torch's forward"]
            rows.append([label, *measured, figure(ratios(shape[system], forward), "{:.2f} ×")])
    if "texts" in results:
        part = results["texts"]
        changed = ", ".join(f"{count:,} ({system})" for system, count in part["changed"].items())
        rows.append([f"texts that changed under load, of {part['count']:,}", changed, "the same alone", NONE])
    if "idle" in results:
        ours, stock = (results["idle"][name] for name in ("ours", "stock"))
        for label, key, form, scale in (
            ("idle, share of one core", "idle_cores", "{:.1f} %", 100),
            ("memory of all processes (PSS), MB", "pss_bytes", "{:,.0f}", 1e-6),
        ):
            theirs = f"{figure(stock[key], form, scale)}, stock LitServe"
            rows.append([label, figure(ours[key], form, scale), theirs, NONE])
    return rows


def path_rows(results: dict[str, Any]) -> list[list[str]]:
    """The path without a model."""
    rows = [["over HTTP without a model, one HTTP process", "stock LitServe", "plain FastAPI", "this service", "ratio"]]
    names = ("stock", "plain", "ours")
    path = results["path"]
    requests = {name: rates(path[name]["requests"], "per_second") for name in names}
    share = figure(ratios(requests["ours"], requests["plain"]), "{:.2f} ×")
    rows.append(["requests/s of one character", *(figure(requests[name]) for name in names), f"{share} plain"])
    for count in map(str, (min(path["streams"]), max(path["streams"]))):
        streams = {name: rates(path[name]["streams"][count]) for name in names}
        each = figure(rates(path["ours"]["streams"][count], "characters_per_event"), "{:.0f}")
        share = figure(ratios(streams["ours"], streams["plain"]), "{:.2f} ×")
        rows.append(
            [f"streamed characters/s, {plural(int(count), 'stream')} (ours: {each} per event, the others: 1)"]
            + [*(figure(streams[name]) for name in names), f"{share} plain"]
        )
    for key, p, label in (
        ("first", "p50", "time to first character, one at a time, p50"),
        ("first", "p99", "the same, p99"),
        ("whole", "max", "answer of one character, one client, longest of 4,000"),
    ):
        values = [figure(rates(path[name].get(key, ()), p), "{:.2f}", 1e3) for name in names]
        rows.append([f"{label}, ms", *values, NONE])
    value = figure(rates(path["paced"], "http_seconds_per_event"), "{:.0f}", 1e6)
    label = "CPU time of the HTTP process, µs per event; 64 streams, one step per 10 ms"
    rows.append([label, NONE, NONE, value, NONE])
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
