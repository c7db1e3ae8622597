"""Figures of serve.py as tables in Markdown, for tests/README.md: what answers a reader's question; the rest is in the
JSON.

Reads only the results, so that the JSON of an earlier run gives its tables again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tests.toolbox.figures import NONE, conditions, figure, plural, table

from .peers import FAMILIES

NATIVE = "native float32"
PEERS = ("llama", "transformers", "stock", "vllm")


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Of alternating measurements."""
    return figure((a / b for a, b in zip(ours, theirs, strict=True)), "{:.2f} ×")


def rates(runs: Iterable[dict[str, Any]], key: str = "characters_per_second") -> list[float]:
    return [run[key] for run in runs]


def markdown(results: dict[str, Any]) -> str:
    """All tables of a run, with machine, versions and date."""
    lines: list[str] = []
    for part, tables in TABLES.items():
        for rows in tables if part in results else ():
            lines += table(rows(results[part]))
    return "\n".join([*lines, *("- " + line for line in footnotes(results))]) + "\n"


def http_rows(part: dict[str, Any]) -> list[list[str]]:
    """Characters per second by family, streamed with the fewest and most clients; ratios to each peer."""
    runs = [each["families"] for by_clients in part["modes"].values() for each in by_clients.values()]
    compared = [peer for peer in PEERS if any(peer in families for families in runs)]
    rows = [[f"{part.get('title', 'S')} over HTTP, answers of {part['length']}, characters/s", "this service"]]
    rows[0] += [text for peer in compared for text in (FAMILIES[peer], "ratio")]
    for mode, by_clients in part["modes"].items():
        ends = min(by_clients, key=int), max(by_clients, key=int)
        for clients in by_clients if mode == "whole" else dict.fromkeys(ends):
            families = by_clients[clients]["families"]
            ours = rates(families["ours"]["runs"])
            row = [f"{mode}, {plural(int(clients), 'client')}", figure(ours)]
            for peer in compared:
                if peer in families:
                    theirs = rates(families[peer]["runs"])
                    row += [f"{figure(theirs)}, {families[peer]['variant']}", ratios(ours, theirs)]
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
    plain, *others = part["kinds"].items()
    rows = [["S, whole answers, characters/s", *(plural(int(n), "client") for n in plain[1])]]
    rows.append([plain[0], *map(figure, plain[1].values())])
    return rows + [[f"{kind}, of plain", *(ratios(each[n], plain[1][n]) for n in plain[1])] for kind, each in others]


def engine_rows(part: dict[str, Any]) -> list[list[str]]:
    """Of each shape ours, llama.cpp's best at that number of rows; of the first the ratio and the roofline's share."""
    rows: list[list[str]] = []
    for name, by_rows in part["shapes"].items():
        rows = rows or [["decoding without HTTP, characters/s", *(plural(int(n), "row") for n in by_rows)]]
        ours = [each[NATIVE] for each in by_rows.values()]
        theirs = [each["llama"]["runs"] for each in by_rows.values()]
        rows.append([f"{name}, {NATIVE}", *(figure(rates(mine["runs"])) for mine in ours)])
        rows.append([f"{name}, llama.cpp, its fastest variant", *(figure(rates(runs)) for runs in theirs)])
        if name == next(iter(part["shapes"])):
            cells = (ratios(rates(mine["runs"]), rates(runs)) for mine, runs in zip(ours, theirs, strict=True))
            rows.append([f"{name}, native float32 ÷ llama.cpp", *cells])
            shares = (roofline_share(mine, int(n)) for mine, n in zip(ours, by_rows, strict=True))
            rows.append([f"{name}, native float32, share of the roofline", *shares])
    return rows


def roofline_share(mine: dict[str, Any], rows: int) -> str:
    """The shortest time of a decode step, with products and cache in turn, as a share of the measured time."""
    decode = rates(mine["runs"], "decode_characters_per_second")
    return figure((mine["roofline"]["sequential_seconds"] * rate / rows for rate in decode), "{:.0f} %", 100)


def template_rows(part: dict[str, Any]) -> list[list[str]]:
    ways = part["at_once"].values()
    return [
        ["50 templates of 200 characters, S in float32, without HTTP", *(f"{n} at a time" for n in part["at_once"])],
        ["characters of prompts copied", *(figure(rates(way["with"], "copied"), "{:.0f} %", 100) for way in ways)],
        *(
            [f"time to first character {how} reuse, p50, ms"]
            + [figure(rates(way[how], "p50"), "{:.2f}", 1e3) for way in ways]
            for how in ("with", "without")
        ),
    ]


def path_rows(path: dict[str, Any]) -> list[list[str]]:
    rows = [["over HTTP without a model, one HTTP process", "stock LitServe", "plain FastAPI", "this service", "ratio"]]
    names = ("stock", "plain", "ours")

    def add(
        label: str, found: dict[str, list[float]], form: str = "{:,.0f}", scale: float = 1, ratio: str = ""
    ) -> None:
        share = f"{ratios(found['ours'], found['plain'])} plain" if ratio else NONE
        rows.append([label, *(figure(found.get(name, ()), form, scale) for name in names), share])

    for key, label in (("requests", "requests/s of one character"), ("unlogged", "the same without log lines")):
        values = {name: rates(path[name][key], "per_second") for name in names if key in path[name]}
        add(label, values, ratio="plain")
    for count in map(str, (min(path["streams"]), max(path["streams"]))):
        each = figure(rates(path["ours"]["streams"][count], "characters_per_event"), "{:.0f}")
        label = f"streamed characters/s, {plural(int(count), 'stream')} (ours: {each} per event, the others: 1)"
        add(label, {name: rates(path[name]["streams"][count]) for name in names}, ratio="plain")
    for key, p, label in (
        ("first", "p50", "time to first character, one at a time, p50"),
        ("whole", "p99.9", "answer of one character, one client, p99.9"),
        ("whole", "max", f"the same, longest of each of {plural(len(path['ours']['whole']), 'turn')}"),
    ):
        values = {name: rates(path[name][key], p) for name in names if key in path[name]}
        add(f"{label}, ms", values, "{:.2f}", 1e3)
    label = "CPU time of the HTTP process, µs per event; 64 streams, one step per 10 ms"
    add(label, {"ours": rates(path["paced"], "http_seconds_per_event")}, scale=1e6)
    return rows


TABLES = {
    "http": (http_rows, first_rows), "mixed": (beside_rows, kind_rows), "engine": (engine_rows,),
    "templates": (template_rows,), "path": (path_rows,),
}  # fmt: skip


def footnotes(results: dict[str, Any]) -> list[str]:
    """Machine, versions, date, and what could not be measured."""
    settings = results["settings"]
    lines = [
        f"{conditions(results)}; llama.cpp of {settings['llama']}",
        f"{plural(settings['cores'], 'thread')} per engine alone and per peer, {settings['threads']} of the service"
        f"{'; the quick form' if settings['quick'] else ''}. Medians (lowest–highest) of turns; flags and every run "
        "are in the JSON.",
    ]
    if "path" in results:
        each = [run["load_cores"] / run["per_second"] for run in results["path"]["ours"]["requests"]]
        lines.append(
            f"The client shares the cores with the servers; an answer takes {figure(each, '{:.0f}', 1e6)} µs of its "
            "CPU time."
        )
    for part in ("http", "mixed"):
        for what, reason in results.get(part, {}).get("absent", {}).items():
            lines.append(f"Not measured, {part}: {what}: {reason.splitlines()[-1]}")
    return lines + [f"failed: {part}, {reason}" for part, reason in results["errors"].items()]
