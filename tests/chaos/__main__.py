"""Faults and hostile clients against real servers: what clients see, how long recovery takes, what remains.

    make chaos                                  all cases, 27 minutes on 2 cores: tests/chaos/RESULTS.md
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

from _pytest.outcomes import Skipped  # raised by tests.toolbox where the machine lacks something

from tests.bench.command import Run, add_only, build_parser
from tests.chaos import attacks, clients, memory, processes, soak
from tests.chaos.case import Case, Outcome, Plan
from tests.chaos.report import markdown
from tests.toolbox.launch import ROOT

CASES: dict[str, Case] = {
    "worker": processes.kill_worker, "http": processes.kill_http, "main": processes.kill_main, "hang": processes.hang,
    "sigterm": processes.sigterm, "burst": clients.burst, "leave": clients.leave, "bad": clients.bad,
    "fairness": clients.fairness, "attacks": attacks.attacks, "memory": memory.peaks, "clock": processes.clock,
    "soak": soak.soak,
}  # fmt: skip
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


class Chaos(Run):
    tables = "RESULTS.md"

    def run_all(self, cases: Mapping[str, Case], plan: Plan) -> None:
        for number, (name, case) in enumerate(cases.items(), 1):
            self.say(f"{number}/{len(cases)} {name} …")
            outcome = asyncio.run(run(case, plan))
            verdict = "FAILED" if outcome.failures else f"skipped: {outcome.skipped}" if outcome.skipped else "passed"
            self.say(f"{number}/{len(cases)} {name}: {verdict}, {outcome.cases:,} cases in {outcome.seconds:.0f} s")
            self.results["cases"][name] = asdict(outcome)
            if outcome.failures:
                self.results["errors"][name] = len(outcome.failures)
            self.results["seconds"] = self.say.seconds


def main(arguments: list[str] | None = None, cases: Mapping[str, Case] = CASES, home: Path | None = None) -> int:
    """Run cases; returns the exit status. home: folder of RESULTS.md and results.json after a run of all cases."""
    parser = build_parser("tests.chaos", __doc__, "out/chaos")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, short soak, no LitServe")
    add_only(parser, cases)
    given = parser.parse_args(arguments)
    is_whole = given.only is None and not given.quick
    plan = Plan(given.quick, given.out.resolve())
    chosen = {name: case for name, case in cases.items() if given.only is None or name in given.only}
    folder = (home or ROOT / "tests/chaos") if is_whole else plan.out
    packages = ("torch", "transformers", "litserve")
    chaos = Chaos("tests.chaos", folder, "results", markdown, packages, quick=given.quick, seconds=0.0, cases={})
    return chaos.main(lambda: chaos.run_all(chosen, plan))


if __name__ == "__main__":
    sys.exit(main())
