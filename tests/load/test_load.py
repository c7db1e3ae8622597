"""The load tools: requests, response checks, and agreement of their figures with the server's."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
from bisect import bisect_left
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from service.observe.metrics import SECONDS
from service.settings import BUNDLED
from tests.helpers import SLOW, VOCABULARY, RunningServer, save_random
from tests.load import answers, mix, record, tokenizer

ROOT = Path(__file__).parents[2]
SHORT = ("--median-completion", 24, "--longest", 160)


def locust(url, folder, *flags, status=0):
    """Runs the load generator; returns its summary, one Row per request, and its output."""
    command = [sys.executable, "-m", "locust", "-f", "tests/load/locustfile.py", "--headless", "--only-summary"]
    command += ["--host", url, "--folder", str(folder), "--spawn-rate", "100", *map(str, flags)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    if not (folder / "summary.json").exists():
        return None, [], done.stdout + done.stderr
    with (folder / "requests.csv").open(newline="") as file:
        rows = [Row(row) for row in csv.DictReader(file)]
    return json.loads((folder / "summary.json").read_text()), rows, done.stdout


class Row:
    """A row of requests.csv."""

    def __init__(self, row):
        self.number, self.prompt, self.characters = (
            int(row[name]) for name in ("number", "prompt_characters", "characters")
        )
        self.sent_at, self.late = float(row["sent_at"]), float(row["late"])
        self.first, self.last = (float(row[name]) if row[name] else None for name in ("first", "last"))
        self.path, self.shape, self.ending, self.wrong = (row[name] for name in ("path", "shape", "ending", "wrong"))


# -- requests --


def test_mix_is_deterministic_by_seed():
    one, same, other = (mix.Mix(VOCABULARY, seed=seed) for seed in (1, 1, 2))
    asked = [one.ask(i) for i in range(200)]
    assert asked == [same.ask(i) for i in range(200)]
    assert sum(a == b for a, b in zip(asked, map(other.ask, range(200)), strict=True)) == 0
    assert asked[7] == mix.Mix(VOCABULARY, seed=1).ask(7)  # independent of earlier requests


def test_lengths_have_a_long_tail_and_kinds_match_their_shares():
    given = mix.Mix(VOCABULARY, median_prompt=20, median_completion=40, longest=1000, leaving=0.1, opinions=0.1)
    asked = [given.ask(i) for i in range(4000)]
    kinds = Counter(a.shape if a.leave_after is None else "left" for a in asked)
    for kind, share in {"opinion": 0.1, "left": 0.1, "whole": 0.2, "stream": 0.6}.items():
        assert kinds[kind] / len(asked) == pytest.approx(share, abs=0.03)
    texts = [a for a in asked if a.shape != "opinion" and a.leave_after is None]
    for values, median in (([a.prompt_characters for a in texts], 20), ([a.body["max_tokens"] for a in texts], 40)):
        assert statistics.median(values) == pytest.approx(median, rel=0.1)
        assert statistics.mean(values) > 1.4 * median and max(values) > 10 * median
        assert 1 <= min(values) and max(values) <= 1000
    assert {a.path for a in asked} == {"/generate", "/v1/completions", "/v1/score", "/v1/next"}
    assert set("".join(a.body.get("prompt") or a.body["texts"] for a in asked)) == set(VOCABULARY)
    for a in asked:
        if a.leave_after is not None:
            assert 8 * a.leave_after <= a.body["max_tokens"] == 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"median_prompt": 0}, "median_prompt must be in \\[1, 512\\], got 0"),
        ({"median_completion": 513}, "median_completion must be in \\[1, 512\\], got 513"),
        ({"whole": 0.95}, "at most 1, got .*'whole': 0.95"),
        ({"leaving": -0.1}, "at least 0 .*'leaving': -0.1"),
    ],
)
def test_invalid_mix_is_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        mix.Mix(VOCABULARY, **options)


# -- response checks --

ASK = mix.Ask(0, "/generate", {"prompt": "ab", "max_tokens": 4, "seed": 1, "stream": True, "stop": "\n"}, 2)
USAGE = {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}


def event(**content):
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def piece(text, finish_reason=None):
    return event(index=0, text=text, finish_reason=finish_reason, seed=1)


LAST, DONE = event(id="x", usage=USAGE), b"data: [DONE]\n\n"


def taken(*events):
    stream = answers.Stream(ASK, VOCABULARY)
    counts = [stream.take(event) for event in events]
    stream.end()
    return counts


def test_valid_streams_are_accepted_with_any_number_of_characters_per_event():
    assert taken(piece("a"), piece("bcd", "length"), LAST, DONE) == [1, 3, 0, 0]
    assert taken(piece("abcd"), b": keep-alive\n\n", piece("", "length"), LAST, DONE) == [4, 0, 0, 0, 0]
    short = event(id="x", usage={"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3})
    assert taken(piece("a"), piece("", "stop"), short, DONE) == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([piece("abcd", "length"), LAST], r"without \[DONE\]"),
        ([piece("abc", "length"), LAST, DONE], "3 characters with finish_reason length, max_tokens is 4"),
        ([piece("abcde", "length"), LAST, DONE], "5 characters"),
        ([piece("abcd", "stop"), LAST, DONE], "4 characters before a stop"),
        ([piece("abcd", "abort"), LAST, DONE], "finish_reason abort"),
        ([piece("abcd"), LAST, DONE], "finish_reason None"),
        ([piece("abcd", "length"), piece("", "length"), LAST, DONE], "after the finish reason"),
        ([piece("abcd", "length"), LAST, DONE, piece("a")], r"after \[DONE\]"),
        ([piece("ab\nc", "length"), LAST, DONE], "stop '.n' is in the text"),
        ([piece("ab漢c", "length"), LAST, DONE], "absent from the vocabulary: .'漢'"),
        ([piece("abcd", "length"), DONE], "usage None"),
        ([piece("abcd", "length"), event(id="x", usage=USAGE | {"prompt_tokens": 1}), DONE], "'prompt_tokens': 1"),
        ([piece("a"), event(error={"code": "engine_error", "message": "…"})], "engine_error"),
        ([b"data: {\n\n"], "not JSON"),
        ([b"event: x\n\n"], "not an event"),
    ],
)
def test_invalid_streams_fail_with_a_reason(events, message):
    with pytest.raises(answers.Wrong, match=message):
        taken(*events)


def whole(**fields):
    choice = {"index": 0, "text": "abcd", "finish_reason": "length", "seed": 1} | fields
    return json.dumps({"choices": [choice], "usage": USAGE}).encode()


def test_invalid_whole_responses_fail_with_a_reason():
    assert answers.check_whole(ASK, whole(), VOCABULARY) == (4, "length")
    for body, message in (
        (whole(text="abc"), "3 characters"),
        (whole(finish_reason=None), "finish_reason None"),
        (whole(seed=2), "seed 2, not 1"),
        (b'{"choices": []}', "not one choice"),
        (b"[]", "not an object"),
    ):
        with pytest.raises(answers.Wrong, match=message):
            answers.check_whole(ASK, body, VOCABULARY)
    for status, body, message in (
        (429, b'{"error": {"code": "queue_full"}}', "status 429: queue_full"),
        (502, b"Bad gateway", "status 502: Bad gateway"),
    ):
        with pytest.raises(answers.Wrong, match=message):
            answers.check_status(status, body)


def test_invalid_score_and_next_responses_fail():
    score, next_ = mix.Ask(0, "/v1/score", {"texts": "abc"}, 3), mix.Ask(0, "/v1/next", {"prompt": "a"}, 1)
    assert answers.check_opinion(score, b'{"data": [{"characters": 2, "nats": 3.5}]}', "ab") == 0
    even = json.dumps({"data": [{"distribution": [{"probability": 0.5}] * 2}]}).encode()
    assert answers.check_opinion(next_, even, "ab") == 1
    for ask, body in (
        (score, b'{"data": [{"characters": 3, "nats": 3.5}]}'),
        (score, b'{"data": [{"characters": 2, "nats": -1.0}]}'),
        (score, b'{"data": []}'),
        (next_, even.replace(b"0.5", b"0.4")),
        (next_, b'{"data": [{"distribution": []}]}'),
    ):
        with pytest.raises(answers.Wrong):
            answers.check_opinion(ask, body, "ab")


# -- statistics --


def test_quantiles_are_order_statistics():
    values = [random.Random(0).expovariate(10) for _ in range(1000)]
    spread = record.Spread()
    for value in values:
        spread.add(value)
    for q in (0.01, 0.5, 0.95, 0.99, 1.0):
        exact = sorted(values)[math.ceil(q * 1000) - 1]
        assert record.quantile(values, q) == exact
        assert exact <= spread.quantile(q) * (1 + 1e-9) and spread.quantile(q) <= 1.011 * exact
    spread.add(0.0, 3000)  # characters in one event
    assert spread.quantile(0.5) == 0.0 and spread.count == 4000
    assert spread.sum == pytest.approx(sum(values))
    assert math.isnan(record.quantile([], 0.5))


def test_busy_or_late_load_generator_warns():
    log = record.Log()
    log.busy(0.2, 1.0)
    log.records = [record.Record(i, i / 10, "/generate", "whole", 1, 1, 0.1, 0.1, "length", 0.001) for i in range(50)]
    assert log.warnings(is_open=True) == []
    log.records[7] = log.records[7]._replace(late=0.2)
    assert log.warnings(is_open=False) == []
    assert "200 ms late" in log.warnings(is_open=True)[0]
    log.busy(0.95, 1.0)
    assert "busy for 95% of a second" in log.warnings(is_open=False)[0]


# -- client figures against server figures --


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Few cache slots and a slow model: requests wait, and latencies are long compared with the client's overhead."""
    checkpoint = save_random(tmp_path_factory.mktemp("load") / "checkpoint", **SLOW)
    with RunningServer(checkpoint.path, max_running_requests=3, max_tokens=16_384) as server:
        server.wait_until_ready()
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.output()


class Scraped:
    """Changes in /metrics between two scrapes."""

    def __init__(self, before, after):
        self.change = {key: value - before.get(key, 0.0) for key, value in after.items()}

    def value(self, name, **labels):
        return self.change.get((name, frozenset(labels.items())), 0.0)

    def by(self, name, label, **others):
        """Changes by one label, of series with the other labels; without zeros."""
        found = Counter()
        for (series, labels), value in self.change.items():
            if series == name and value and labels >= others.items():
                found[dict(labels)[label]] += value
        return dict(found)

    def bucket(self, name, q):
        """The index of the bucket that contains the quantile."""
        counts = [self.value(f"{name}_bucket", le=str(float(bound))) for bound in SECONDS]
        total = self.value(f"{name}_count")
        return next(i for i, count in enumerate([*counts, total]) if count >= math.ceil(q * total))


def loaded(server, folder, *flags):
    """(client rows, changes in the server's metrics)"""
    before = server.metrics()
    _, rows, _ = locust(server.url, folder, *flags)
    ended = sum(value for (name, _), value in before.items() if name == "chargpt_request_success_total") + len(rows)
    for _ in range(200):  # the server may notice a disconnect late
        after = server.metrics()
        if sum(value for (name, _), value in after.items() if name == "chargpt_request_success_total") >= ended:
            break
    return rows, Scraped(before, after)


def assert_quantiles_agree(name, scraped, values):
    """Counts are equal, and the client's quantile lies in the server's bucket or a neighbouring one.

    The client starts before the server receives the request and stops after the server has written, so each of its
    times, and hence each quantile, is longer. The overhead, connection and scheduling, is a few milliseconds; buckets
    grow by factors of 1.33 to 2 and are tens of milliseconds wide where requests wait for a slot. The client's
    quantile can be one bucket lower only if both are at a bound, within the time of a write.
    """
    assert scraped.value(f"{name}_count") == len(values) > 0
    for q in (0.5, 0.95, 0.99):
        seen = record.quantile(values, q)
        apart = bisect_left(SECONDS, seen) - scraped.bucket(name, q)
        assert -1 <= apart <= 1, f"{name} at {q}: the client saw {seen} s, {apart} buckets above the server's"


def test_counts_and_latencies_agree_for_streams(server, tmp_path):
    flags = ("--users", 12, "--requests", 90, *SHORT, "--whole", 0, "--leaving", 0, "--opinions", 0)
    rows, scraped = loaded(server, tmp_path, *flags)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row.number for row in rows] == list(range(90)) and {row.shape for row in rows} == {"stream"}
    assert scraped.by("chargpt_http_requests_total", "handler", method="POST") == Counter(row.path for row in rows)
    assert scraped.by("chargpt_request_success_total", "finished_reason") == Counter(row.ending for row in rows)
    assert {"stop", "length"} <= {row.ending for row in rows}
    characters = sum(row.characters for row in rows)
    assert scraped.value("chargpt_generation_tokens_total") == characters == summary["characters"]
    assert scraped.value("chargpt_request_generation_tokens_sum") == characters
    assert scraped.value("chargpt_prompt_tokens_total") == sum(row.prompt for row in rows)
    begun = [row.first for row in rows if row.first is not None]  # a stop may come before the first character
    assert_quantiles_agree("chargpt_time_to_first_token_seconds", scraped, begun)
    assert_quantiles_agree("chargpt_e2e_request_latency_seconds", scraped, [row.last for row in rows])
    between = summary["between_characters_seconds"]
    assert scraped.value("chargpt_inter_token_latency_seconds_count") == between["count"] == characters - len(begun)
    # Per stream both sums are the time from first to last character, sent or read: they differ by the difference in
    # read delay between the last and the first.
    assert scraped.value("chargpt_inter_token_latency_seconds_sum") == pytest.approx(between["sum"], rel=0.2)


def test_counts_and_latencies_agree_for_the_whole_mix(server, tmp_path):
    flags = ("--users", 12, "--requests", 90, *SHORT, "--mix-seed", 5)
    rows, scraped = loaded(server, tmp_path, *flags, "--whole", 0.3, "--leaving", 0.2, "--opinions", 0.2)
    assert {row.shape for row in rows} == {"stream", "whole", "opinion"}
    assert scraped.by("chargpt_http_requests_total", "handler", method="POST") == Counter(row.path for row in rows)
    endings = Counter(row.ending for row in rows)
    assert endings["left"] >= 5
    endings["abort"] = endings.pop("left")
    assert scraped.by("chargpt_request_success_total", "finished_reason") == endings
    assert scraped.value("chargpt_prompt_tokens_total") == sum(row.prompt for row in rows)
    # After a disconnect the server has generated more than the client has read.
    surplus = scraped.value("chargpt_generation_tokens_total") - sum(row.characters for row in rows)
    assert 0 <= surplus <= endings["abort"] * 160
    first = [row.first for row in rows if row.first is not None]
    assert_quantiles_agree("chargpt_time_to_first_token_seconds", scraped, first)
    complete = [row.last for row in rows if row.last is not None]
    assert len(complete) == len(rows) - endings["abort"]
    assert_quantiles_agree("chargpt_e2e_request_latency_seconds", scraped, complete)


# -- open and closed loop --


def test_open_loop_arrivals_follow_the_seed_without_waiting_for_responses(server, tmp_path):
    summary, rows, printed = locust(server.url, tmp_path, "--arrivals", 500, "--requests", 40, *SHORT, "--mix-seed", 3)
    due = [row.sent_at - row.late for row in rows]
    rng = random.Random("3 arrivals")
    expected = [rng.expovariate(500) for _ in rows[1:]]
    assert [b - a for a, b in itertools.pairwise(due)] == pytest.approx(expected, abs=1e-9)
    assert min(row.late for row in rows) >= 0
    ends = [row.sent_at + (row.last or row.first) for row in rows]
    in_flight = [sum(other.sent_at <= row.sent_at < end for other, end in zip(rows, ends, strict=True)) for row in rows]
    assert max(in_flight) > 20  # 3 of them running
    assert summary["loop"] == "open" and summary["requests"] == 40
    assert "arrivals were late by" in printed and "of a core" in printed


def test_rejected_requests_are_failures_and_exit_with_status_1(tmp_path):
    with RunningServer(BUNDLED, max_running_requests=1, max_queued_requests=1) as server:
        server.wait_until_ready()
        flags = ("--users", 8, "--requests", 40, *SHORT, "--leaving", 0)
        summary, rows, printed = locust(server.url, tmp_path, *flags, status=1)
        refused = server.metric("chargpt_admission_rejections_total", reason="queue_full")
    assert summary["endings"]["failed"] == refused == sum(row.ending == "failed" for row in rows) > 0
    assert {row.wrong for row in rows if row.ending == "failed"} == {"status 429: queue_full"}
    assert "FAILED" in printed and "status 429: queue_full" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--longest", "20000"], "--longest must be ≤ 16384, the limit of the server, got 20000"),
        (["--processes", "2"], "only one process is supported"),
        (["--host", "http://127.0.0.1:9"], "http://127.0.0.1:9/info"),
    ],
)
def test_invalid_runs_are_rejected_with_a_reason(server, tmp_path, flags, message):
    *_, printed = locust(server.url, tmp_path, "--requests", 1, *flags, status=2)
    assert message in printed


def test_command_starts_a_server_runs_the_load_and_writes_reports(tmp_path):
    folder = save_random(tmp_path / "checkpoint").path
    command = [
        sys.executable,
        "-m",
        "tests.load",
        "--checkpoint",
        str(folder),
        "--out",
        str(tmp_path / "out"),
        "locust",
    ]
    done = subprocess.run(
        [*command, "--", "--requests", "30", "--users", "4", "--median-completion", "16"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "requests     30 in" in done.stdout and "FAILED" not in done.stdout
    report = (tmp_path / "out" / "report.html").read_text()
    assert "/v1/completions stream" in report and "between" in report
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files >= {"requests.csv", "summary.json", "locust_stats.csv", "server.log"}
    assert "all processes have ended" in (tmp_path / "out" / "server.log").read_text()


# -- tokenizers for other tools --


def test_exported_tokenizer_maps_only_unknown_characters_to_a_space(tmp_path):
    assert tokenizer.write_tokenizer(BUNDLED, tmp_path / "t") == " "
    ours = AutoTokenizer.from_pretrained(BUNDLED)
    copy = AutoTokenizer.from_pretrained(tmp_path / "t")
    text = "ROMEO:\nWhat, 'tis 3 o'clock!"
    assert copy.encode(text) == ours.encode(text)
    assert copy.decode(copy.encode("Café 1–2")) == "Caf    3".replace("3", " ")
    assert len(copy.encode("Café 1–2")) == 8
    with pytest.raises(Exception, match="WordLevel error: Missing"):
        ours.encode("Café")


@pytest.mark.parametrize(("vocabulary", "replacement"), [("ab\n", "\n"), ("xab", "a")])
def test_without_a_space_another_character_replaces_unknown_ones(tmp_path, vocabulary, replacement):
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "WordLevel", "vocab": {c: i for i, c in enumerate(sorted(vocabulary))}}})
    )
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert tokenizer.write_tokenizer(tmp_path, tmp_path / "t") == replacement
    assert json.loads((tmp_path / "t" / "tokenizer.json").read_text())["model"]["unk_token"] == replacement


def test_foreign_tokenizer_is_rejected(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}}}')
    with pytest.raises(ValueError, match="tokenizer.json is not a WordLevel tokenizer"):
        tokenizer.write_tokenizer(tmp_path, tmp_path / "t")


def test_tokenizer_of_another_model_is_rejected(server, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.load", "--url", server.url, "--checkpoint", str(BUNDLED),
         "--out", str(tmp_path / "out"), "--bin", str(tmp_path), "guidellm"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"and the model at {server.url} have different vocabularies" in done.stderr
