"""Two cheap cases of `make chaos` from end to end, its files, and that a failure is reported as one."""

from __future__ import annotations

import json

import pytest

from tests.chaos.__main__ import CASES, main
from tests.chaos.case import SHORT, Outcome, Plan, ours
from tests.chaos.client import Probe, ask
from tests.chaos.report import markdown
from tests.toolbox.launch import ROOT


def test_the_documents_show_the_committed_results():
    folder = ROOT / "tests/chaos"
    results = json.loads((folder / "results.json").read_text())
    assert (folder / "RESULTS.md").read_text() == markdown(results)
    assert list(results["cases"]) == list(CASES) and not results["quick"]


async def broken(plan: Plan, outcome: Outcome) -> None:
    async with ours(outcome) as server:
        with Probe(server.port) as probe:
            for prompt in ("A", "\u6f22"):
                reply = await ask(server.port, SHORT | {"prompt": prompt})
                outcome.check(reply.ending == "complete", f"{prompt}: {reply.ending}, status {reply.status}")
            left = await ask(server.port, SHORT | {"max_tokens": 9000, "stream": True}, leave_after=1)
            hung = await ask(server.port, SHORT | {"max_tokens": 16_000}, patience=0.1)
            outcome.check([left.ending, hung.ending] == ["left", "hang"], "the client")
    outcome.check(bool(probe.outcome.replies) and probe.unanswered == 0, "the probe")


async def crashing(plan: Plan, outcome: Outcome) -> None:
    raise ValueError("no such thing")


@pytest.mark.tools
def test_cheap_cases_pass_and_failures_are_reported(tmp_path):
    cases = {name: CASES[name] for name in ("bad", "clock")}
    assert main(["--out", str(tmp_path / "out")], cases, tmp_path) == 0
    report, results = (tmp_path / "RESULTS.md").read_text(), json.loads((tmp_path / "results.json").read_text())
    assert not any(case["failures"] for case in results["cases"].values())
    for text in ("| [clock](#clock) |", "| good texts equal to running alone | 3,100 |", ", 0 failures, in"):
        assert text in report

    cases = {"broken": broken, "crashing": crashing, "unused": broken}
    arguments = ["--only", "broken", "crashing", "--out", str(tmp_path / "out")]
    assert main(arguments, cases, tmp_path / "home") == 1
    assert not (tmp_path / "home").exists()  # not all cases ran
    results = json.loads((tmp_path / "out" / "results.json").read_text())["cases"]
    assert results["broken"]["failures"] == ["\u6f22: error, status 400"] and results["broken"]["cases"] == 7
    assert results["crashing"]["failures"] == ["the case itself ended with ValueError: no such thing"]
    assert "2 failures: broken, crashing" in (tmp_path / "out" / "RESULTS.md").read_text()
