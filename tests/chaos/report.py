"""RESULTS.md from the results of a run."""

from __future__ import annotations

from typing import Any

from tests.bench.report import NONE, table


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def markdown(results: dict[str, Any]) -> str:
    """A table of all cases, then one of each with stock LitServe beside it."""
    cases = results["cases"]
    failed = [name for name, case in cases.items() if case["failures"]]
    machine, versions = results["machine"], results["versions"]
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
    lines += table(rows)
    for name, case in cases.items():
        did = case["did"] or f"skipped: {case['skipped']}"
        lines += [f"## {name}", "", f"{did[0].upper()}{did[1:]}."]
        if case["stock_did"]:
            lines[-1] += f" Stock LitServe: {case['stock_did']}."
        lines += [""]
        labels = list(dict.fromkeys([*case["figures"], *case["stock"]]))
        heads = ["", "this service", *(["stock LitServe"] if case["stock"] else [])]
        rows = [heads]
        for label in labels:
            sides = (case["figures"], case["stock"]) if case["stock"] else (case["figures"],)
            rows.append([label, *(shown(side.get(label, NONE)) for side in sides)])
        lines += table(rows) if labels else []
        lines += [f"- goal {'met' if met else 'missed'}: {goal}" for goal, met in case["goals"].items()]
        lines += [f"- **failed**: {failure}" for failure in case["failures"][:20]]
        lines += [""] if case["goals"] or case["failures"] else []
    about = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines += [
        f"- {machine['cpu']}, {machine['cores']} cores, {machine['system']}; load {results['load_average']:.2f} at the "
        f"start; {results['date'][:10]}; {about}; revision {results['revision']}.",
        "- Clients and servers share the cores. A client is an address 127.0.0.x. Raw values are in results.json.",
        "- Elsewhere: random valid and invalid requests by schemathesis in tests/http/test_openapi.py.",
    ]
    return "\n".join(lines) + "\n"
