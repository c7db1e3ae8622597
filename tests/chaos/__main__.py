"""Faults and hostile clients against real servers: what clients see, how long recovery takes, what remains.

    make chaos                                  all cases, 29 minutes on 2 cores: tests/chaos/RESULTS.md
    make chaos ARGS=--quick                     fewer repetitions, a soak of one minute, no LitServe: out/chaos
    make chaos ARGS='--only worker fairness'    some of them: out/chaos

Cases run one after another, each against servers of its own; where stock LitServe can run the same case, it follows.
The exit status is 1 if any case failed. Faults cannot be told from a busy machine: run it on a quiet one.
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _pytest.outcomes import Skipped  # raised by tests.toolbox where the machine lacks something

from tests.bench.command import Progress, build_parser, busy_warning, context, prepare_process
from tests.chaos import clients, limits, processes, soak
from tests.chaos.case import Case, Outcome, Plan
from tests.chaos.report import markdown, shown
from tests.toolbox.figures import write_figures
from tests.toolbox.launch import ROOT

CASES: dict[str, Case] = {
    "worker": processes.kill_worker,
    "http": processes.kill_http,
    "main": processes.kill_main,
    "hang": processes.hang,
    "sigterm": processes.sigterm,
    "crash-loop": processes.crash_loop,
    "disk": processes.full_disk,
    "burst": clients.burst,
    "leave": clients.leave,
    "bad": clients.bad,
    "fairness": clients.fairness,
    "headers": clients.headers,
    "bodies": clients.bodies,
    "memory": limits.memory,
    "checkpoints": limits.checkpoints,
    "marker": limits.marker,
    "clock": limits.clock,
    "soak": soak.soak,
}
CASE_SECONDS = 300.0  # a case that takes longer has failed; the soak has its own time on top


async def run(case: Case, plan: Plan) -> Outcome:
    outcome, started = Outcome(), time.perf_counter()
    limit = CASE_SECONDS + (soak.seconds(plan) if case is soak.soak else 0)
    try:
        async with asyncio.timeout(limit):
            await case(plan, outcome)
    except Skipped as reason:
        outcome.skipped = str(reason)
    except (Exception, AssertionError) as error:
        traceback.print_exc()
        outcome.failures.append(f"the case itself ended with {type(error).__name__}: {error}"[:300])
    outcome.seconds = time.perf_counter() - started
    return outcome


def main(arguments: list[str] | None = None, cases: Mapping[str, Case] = CASES, home: Path | None = None) -> int:
    """Run cases; returns the exit status. home: folder of RESULTS.md and results.json after a run of all cases."""
    parser = build_parser("tests.chaos", __doc__, "out/chaos")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, short soak, no LitServe")
    parser.add_argument("--only", nargs="+", choices=cases, metavar="NAME", help=", ".join(cases))
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    chosen = [name for name in cases if given.only is None or name in given.only]
    is_whole = given.only is None and not given.quick
    plan, say = Plan(given.quick, given.out.resolve()), Progress()
    results: dict[str, Any] = context("tests.chaos", "torch", "transformers", "litserve")
    results |= {"quick": given.quick, "cases": {}}
    if warning := busy_warning(results):
        say(f"WARNING: {warning}")
    for number, name in enumerate(chosen, 1):
        say(f"{number}/{len(chosen)} {name} …")
        outcome = asyncio.run(run(cases[name], plan))
        verdict = "FAILED" if outcome.failures else f"skipped: {outcome.skipped}" if outcome.skipped else "passed"
        say(f"{number}/{len(chosen)} {name}: {verdict}, {outcome.cases:,} cases in {outcome.seconds:.0f} s")
        for failure in outcome.failures[:10]:
            say(f"    {failure}")
        for label, value in outcome.figures.items():
            other = f" | stock LitServe: {shown(outcome.stock[label])}" if label in outcome.stock else ""
            say(f"    {label}: {shown(value)}{other}")
        for label, value in outcome.stock.items():
            if label not in outcome.figures:
                say(f"    {label}: – | stock LitServe: {shown(value)}")
        for goal, met in outcome.goals.items():
            say(f"    goal {'met' if met else 'missed'}: {goal}")
        results["cases"][name] = asdict(outcome)
    results["seconds"] = say.seconds
    folder = (home or ROOT / "tests/chaos") if is_whole else plan.out
    write_figures(folder / "results.json", results)
    (folder / "RESULTS.md").write_text(markdown(results), encoding="utf-8")
    failed = [name for name in chosen if results["cases"][name]["failures"]]
    say(f"{len(chosen) - len(failed)} of {len(chosen)} passed: {folder / 'RESULTS.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    prepare_process()
    sys.exit(main())
