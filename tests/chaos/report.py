"""RESULTS.md from the results of a run."""

from __future__ import annotations

import re
from typing import Any

from tests.toolbox.figures import NONE, conditions, table


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


# Rows of the first table: the promise, the case that tests it, and a template for the figures of each service.
PROMISES = (
    ("Streams and answers continue after a worker is killed (20 times)", "worker",
     "{requests in flight} of 320; next answer after {next request answered after, p50, s} s (median)",
     "{requests in flight}"),
    ("After one of two HTTP processes is killed, the service answers again", "http",
     "within {two processes: next request answered after, max, s} s", NONE),
    ("After the main process is killed, no other process is left", "main",
     "{orphans after 10 s} left", "{orphans after 10 s} left"),
    ("A process that hangs (SIGSTOP) is replaced", "hang",
     "next answer after {inference process: next request answered after, s} s",
     "{inference process: next request answered after, s}"),
    ("After SIGTERM, 100 streams run to their end and new requests get 503", "sigterm",
     "{streams that completed} ended, {new requests that got 503} got 503, exit status {exit status}",
     "{streams that completed} ended, {new requests that got 503} got 503, exit status {exit status}"),
    ("While one client sends 1,000 requests, another gets its first character", "fairness",
     "after {flood of 1,000: first character, p50, ms} ms (median); alone {alone: first character, p50, ms} ms",
     "after {flood of 1,000: first character, p50, ms} ms; alone {alone: first character, p50, ms} ms"),
    ("While one client runs a prompt of 99,000 characters 128 times, another gets its first character", "fairness",
     "after {99,000 characters, n 128: first character, p50, ms} ms (median)", NONE),
    ("The slots of 500 clients that leave are free within 1 s", "leave",
     "{busy slots 1 s later} busy", "next answer: {the next request is answered after, s}"),
    ("A bad request does not change 31 good ones beside it (100 times)", "bad",
     "{good texts equal to running alone} of {good requests} texts as alone",
     "{good ones that got their text} of {good requests}"),
    ("10,000 requests at once on new connections end or get 429, in bounded memory", "burst",
     "{new connections: accepted} ended, {new connections: peak memory, MB} MB",
     "{new connections: accepted} ended, {new connections: peak memory, MB} MB"),
    ("A connection that pipelines 1,000 requests and reads nothing takes little memory", "attacks",
     "{1,000 pipelined GET /openapi.json, unread: memory above idle, max, MB} MB", NONE),
    ("While 16 clients send patterns that do not compile, another's /livez is answered", "attacks",
     "within {16 clients with patterns that do not compile: /livez, max, ms} ms", NONE),
    ("Each sequence accepted in 20 minutes of mixed traffic ends once", "soak",
     "{endings} of {sequences accepted}; the worker grows by {inference: slope of memory, MB per hour} MB per hour",
     NONE),
)  # fmt: skip


def promises(cases: dict[str, Any]) -> list[str]:
    """The table of promises. It omits cases that did not run to their end."""

    def filled(template: str, figures: dict[str, Any]) -> str | None:
        if not figures.keys() >= set(re.findall(r"\{(.*?)\}", template)):
            return None
        return re.sub(r"\{(.*?)\}", lambda label: shown(figures[label[1]]), template)

    rows = [["promise", "this service", "stock LitServe"]]
    for promise, name, ours, theirs in PROMISES:
        if name in cases and (seen := filled(ours, cases[name]["figures"])):
            rows.append([promise, seen, filled(theirs, cases[name]["stock"]) or NONE])
    return table(rows)


def markdown(results: dict[str, Any]) -> str:
    """The tables of promises and of cases, then one for each case that compares it with stock LitServe."""
    cases = results["cases"]
    failed = [name for name, case in cases.items() if case["failures"]]
    lines = ["# Results of `make chaos`", ""]
    lines += [
        f"{len(cases)} cases, {sum(case['cases'] for case in cases.values()):,} checks, "
        f"{sum(len(case['failures']) for case in cases.values()):,} failures"
        + (f": {', '.join(failed)}" if failed else "")
        + f", in {results['seconds'] / 60:.0f} minutes{', --quick' if results['quick'] else ''}.",
        "",
    ]
    rows = [["case", "test", "checks", "failures", "goals met", "seconds"]]
    for name, case in cases.items():
        goals = f"{sum(case['goals'].values())} of {len(case['goals'])}" if case["goals"] else NONE
        failures = f"skipped: {case['skipped']}" if case["skipped"] else shown(len(case["failures"]))
        rows.append([f"[{name}](#{name})", case["did"], shown(case["cases"]), failures, goals, shown(case["seconds"])])
    lines += [*promises(cases), *table(rows)]
    for name, case in cases.items():
        did = case["did"] or f"skipped: {case['skipped']}"
        lines += [f"## {name}", "", f"{did[0].upper()}{did[1:]}."]
        if case["stock_did"]:
            lines[-1] += f" Stock LitServe: {case['stock_did']}."
        lines += [""]
        labels = list(dict.fromkeys([*case["figures"], *case["stock"]]))
        rows = [["", "this service", *(["stock LitServe"] if case["stock"] else [])]]
        for label in labels:
            sides = (case["figures"], case["stock"]) if case["stock"] else (case["figures"],)
            rows.append([label, *(shown(side.get(label, NONE)) for side in sides)])
        lines += table(rows) if labels else []
        lines += [f"- goal {'met' if met else 'missed'}: {goal}" for goal, met in case["goals"].items()]
        lines += [f"- **failed**: {failure}" for failure in case["failures"][:20]]
        lines += [""] if case["goals"] or case["failures"] else []
    lines += [
        f"- {conditions(results)}.",
        "- Clients and servers share the cores. Each client has an address 127.0.0.x. results.json has the raw values.",
        "- tests/http/test_openapi.py sends random valid and invalid requests, generated by schemathesis.",
    ]
    return "\n".join(lines) + "\n"
