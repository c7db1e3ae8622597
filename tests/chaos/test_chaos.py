"""Two cheap cases of `make chaos` from end to end, its files, and that a failure is reported as one."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.bench.servers import ROOT
from tests.chaos import soak
from tests.chaos.__main__ import CASES, main
from tests.chaos.case import Outcome, Plan, endings, left_of, listeners, ours, spread, worker
from tests.chaos.client import Probe, Reply, ask
from tests.chaos.processes import SHORT
from tests.chaos.report import markdown
from tests.helpers import wait_until


def received(data: bytes) -> Reply:
    return Reply(0.0, data=data)


def stream(*events: str, is_whole: bool = True) -> bytes:
    chunks = [f"data: {event}\n\n".encode() for event in events]
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + (b"0\r\n\r\n" if is_whole else b"")
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body


@pytest.mark.parametrize(
    ("data", "ending"),
    [
        (b"", "cut"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "complete"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell", "cut"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\ndata: {}", "cut"),
        (b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno", "error"),
        (stream('{"text": "a"}', "[DONE]"), "complete"),
        (stream('{"text": "a"}', "[DONE]", is_whole=False), "cut"),
        (stream('{"text": "a"}'), "cut"),
        (stream('{"text": "a"}', '{"error": {}}'), "error"),
    ],
)
def test_how_an_answer_ended(data, ending):
    assert received(data).ending == ending


def test_slope_is_per_hour():
    assert soak.slope_per_hour([(t, 5 + t / 1800) for t in range(10)]) == pytest.approx(2)
    assert soak.slope_per_hour([(1.0, 5.0)]) == 0


def test_figures_of_no_values_are_dashes():
    assert set(spread("x", [None]).values()) == {"–"}
    assert spread("x", [0.001, 0.003], "ms") == {"x, p50, ms": 1.0, "x, p99, ms": 3.0, "x, max, ms": 3.0}


def test_processes_are_found_and_a_client_that_leaves_is_counted():
    async def play(port):
        whole = await ask(port, SHORT, source="127.0.0.5")
        assert whole.ending == "complete" and len(whole.text) == SHORT["max_tokens"]
        assert whole.began_at < whole.sent_at < whole.first_at <= whole.ended_at
        stream = await ask(port, SHORT | {"stream": True})
        assert stream.ending == "complete" and stream.text == whole.text
        assert (await ask(port, b"{")).ending == "error"
        assert (await ask(port, SHORT | {"max_tokens": 9000, "stream": True}, leave_after=1)).ending == "left"
        assert (await ask(port, SHORT | {"max_tokens": 16_000}, patience=0.1)).ending == "hang"

    with ours(log_format="json") as server:
        [http], found = listeners(server), worker(server)
        assert {http.pid, found.pid, server.process.pid} <= {process.pid for process in left_of(server.process.pid)}
        with Probe(server.port, interval=0.01) as probe:
            asyncio.run(play(server.port))
        assert probe.unanswered == 0 and {wait.status for wait in probe.waits} == {200}
        assert '"client":"127.0.0.5"' in server.output()
        wait_until(lambda: endings(server) == (4, 4))
        assert server.stop() == 0


async def broken(plan: Plan, outcome: Outcome) -> None:
    with ours() as server:
        for prompt in ("A", "\u6f22"):
            reply = await ask(server.port, SHORT | {"prompt": prompt})
            outcome.check(reply.ending == "complete", f"{prompt}: {reply.ending}, status {reply.status}")


async def crashing(plan: Plan, outcome: Outcome) -> None:
    raise ValueError("no such thing")


@pytest.mark.tools
def test_cheap_cases_pass_and_results_are_written(tmp_path, capfd):
    cases = {name: CASES[name] for name in ("checkpoints", "disk")}
    assert main(["--out", str(tmp_path / "out")], cases, tmp_path) == 0
    report, results = (tmp_path / "RESULTS.md").read_text(), json.loads((tmp_path / "results.json").read_text())
    assert results["cases"]["checkpoints"]["cases"] == 2001
    assert all(not case["failures"] and not case["skipped"] for case in results["cases"].values())
    for text in ("| [checkpoints](#checkpoints) |", "| refused | 2,000 |", "| endings |", ", 0 failures, in"):
        assert text in report
    assert str(tmp_path) not in report + (tmp_path / "results.json").read_text()
    assert "2/2 disk: passed" in capfd.readouterr().err


@pytest.mark.tools
def test_failed_cases_are_reported_and_exit_with_status_1(tmp_path, capfd):
    cases = {"broken": broken, "crashing": crashing, "unused": broken}
    arguments = ["--only", "broken", "crashing", "--out", str(tmp_path / "out")]
    assert main(arguments, cases, tmp_path / "home") == 1
    assert not (tmp_path / "home").exists()  # not all cases ran
    results = json.loads((tmp_path / "out" / "results.json").read_text())["cases"]
    assert results["broken"]["failures"] == ["\u6f22: error, status 400"] and results["broken"]["cases"] == 2
    assert results["crashing"]["failures"] == ["the case itself ended with ValueError: no such thing"]
    assert set(results) == {"broken", "crashing"}
    report = (tmp_path / "out" / "RESULTS.md").read_text()
    assert "2 failures: broken, crashing" in report and "**failed**: \u6f22: error" in report
    assert "broken: FAILED, 2 cases" in capfd.readouterr().err


def test_the_documents_show_the_committed_results():
    folder = ROOT / "tests/chaos"
    results = json.loads((folder / "results.json").read_text())
    assert (folder / "RESULTS.md").read_text() == markdown(results)
    assert list(results["cases"]) == list(CASES) and not results["quick"]


def test_unknown_cases_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--only", "nothing"])
    assert stop.value.code == 2 and "invalid choice: 'nothing'" in capsys.readouterr().err
