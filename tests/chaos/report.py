"""RESULTS.md from the results of a run."""

from __future__ import annotations

import re
from typing import Any

from tests.toolbox.figures import NONE, conditions, table


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


# Rows of the first table: the promise, the case that shows it, what was seen of this service and of stock LitServe in
# figures of that case.
PROMISES = (
    ("a worker is killed, 20 times: streams and answers go on", "worker",
     "in flight: {requests in flight} of 320; next answer after {next request answered after, p50, s} s (p50)",
     "in flight: {requests in flight}"),
    ("an HTTP process is killed, of two", "http",
     "next answer after {two processes: next request answered after, max, s} s at most", NONE),
    ("the main process is killed: nothing is left behind", "main",
     "{orphans after 10 s} orphans", "{orphans after 10 s} orphans"),
    ("a process hangs (SIGSTOP): it is replaced", "hang",
     "next answer after {inference process: next request answered after, s} s",
     "{inference process: next request answered after, s}"),
    ("SIGTERM during 100 streams: all end, new requests get 503", "sigterm",
     "{streams that completed} ended, {new requests that got 503} got 503, exit status {exit status}",
     "{streams that completed} ended, {new requests that got 503} got 503, exit status {exit status}"),
    ("one client's flood of 1,000 requests: another's first character", "fairness",
     "{flood of 1,000: first character, p50, ms} ms (p50), alone {alone: first character, p50, ms} ms",
     "{flood of 1,000: first character, p50, ms} ms, alone {alone: first character, p50, ms} ms"),
    ("a prompt of 99,000 characters, 128 times: the same", "fairness",
     "{99,000 characters, n 128: first character, p50, ms} ms", NONE),
    ("500 clients leave: their slots are free within 1 s", "leave",
     "{busy slots 1 s later} busy", "next answer: {the next request is answered after, s}"),
    ("a bad request beside 31 good ones, 100 times", "bad",
     "{good texts equal to running alone} of {good requests} good texts as alone",
     "{good ones that got their text} of {good requests}"),
    ("10,000 requests at once over new connections: memory is bounded, accepted ones end", "burst",
     "{new connections: memory at most, MB} MB, {new connections: accepted} ended, the others got 429",
     "{new connections: memory at most, MB} MB, {new connections: accepted} ended"),
    ("one connection pipelines 1,000 requests of the largest file and reads nothing", "attacks",
     "{1,000 pipelined GET /openapi.json, unread: over idle at most, MB} MB over idle", NONE),
    ("16 clients send patterns that do not compile: another's /livez", "attacks",
     "{16 clients with patterns that do not compile: /livez, max, ms} ms at most", NONE),
    ("20 minutes of mixed traffic: each accepted sequence ends once", "soak",
     "{endings} of {sequences accepted}; worker's memory {inference: slope of memory, MB per hour} MB per hour", NONE),
)  # fmt: skip


def promises(cases: dict[str, Any]) -> list[str]:
    """The promises, beside what was seen; of the cases that ran to their end."""

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
    """A table of all cases, then one of each with stock LitServe beside it."""
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
    rows = [["case", "done", "checks", "failures", "goals met", "seconds"]]
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
        "- Clients and servers share the cores. A client is an address 127.0.0.x. Raw values are in results.json.",
        "- Elsewhere: random valid and invalid requests by schemathesis in tests/http/test_openapi.py.",
    ]
    return "\n".join(lines) + "\n"
