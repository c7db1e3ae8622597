"""deploy/prometheus and deploy/grafana, checked with Prometheus, Alertmanager and Grafana's own models."""

import concurrent.futures
import contextlib
import itertools
import json
import math
import re
import runpy
import subprocess
import time
import typing
from pathlib import Path

import httpx
import pytest
import yaml

from service.http.client import MAX_RUNS
from service.model.checkpoint import save_checkpoint
from service.model.tokenizer import CharTokenizer
from service.settings import Settings
from tests.helpers import ENDLESS, VOCABULARY, RunningServer, make_certificate, random_model, wait_until, web
from tests.toolbox.http import events, post, sent
from tests.toolbox.launch import Program, free_port
from tests.toolbox.needs import program

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS, RULES = DEPLOY / "prometheus", DEPLOY / "prometheus" / "rules.yml"
GRAFANA = DEPLOY / "grafana"
DASHBOARDS = {path.name: json.loads(path.read_text()) for path in (GRAFANA / "dashboards").iterdir()}
MODEL = "plays"
RUNBOOK = (DEPLOY / "RUNBOOK.md").read_text(encoding="utf-8")


needs = pytest.mark.needs


def check(*command):
    """Runs a program that must succeed; returns its output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    return done.stdout


def rules():
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts():
    return [rule for rule in rules() if "alert" in rule]


def panels(*names):
    """Of these dashboards, or of all."""
    documents = [DASHBOARDS[name] for name in names or DASHBOARDS]
    return [panel for document in documents for panel in document["panels"] if panel["type"] != "row"]


# -- static checks --


@needs("prometheus")
def test_configuration_and_rules_are_valid():
    assert "50 rules found" in check("promtool", "check", "config", PROMETHEUS / "prometheus.yml")
    check("amtool", "check-config", PROMETHEUS / "alertmanager.yml")


@needs("compose")
def test_compose_file_is_valid_and_mounts_existing_files():
    config = check("docker", "compose", "-f", DEPLOY / "compose.yaml", "config", "--format=json")
    services = json.loads(config)["services"]
    mounted = [v["source"] for service in services.values() for v in service.get("volumes", []) if v["type"] == "bind"]
    assert mounted and all(Path(path).exists() for path in [*mounted, services["chargpt"]["build"]["context"]])
    provider = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "dashboards" / "chargpt.yml").read_text())
    targets = {volume["target"] for volume in services["grafana"]["volumes"]}
    assert {provider["providers"][0]["options"]["path"], "/etc/grafana/provisioning"} <= targets


@needs("prometheus")
@pytest.mark.parametrize("tests", ["rules_test.yml", "budgets_test.yml"])
def test_alerts_fire_exactly_when_specified(tests):
    check("promtool", "test", "rules", PROMETHEUS / tests)


def test_rule_tests_fire_every_alert_and_evaluate_every_group():
    texts = [(PROMETHEUS / tests).read_text() for tests in ("rules_test.yml", "budgets_test.yml")]
    fired = {
        (case["alertname"], label)
        for text in texts
        for test in yaml.safe_load(text)["tests"]
        for case in test.get("alert_rule_test", [])
        for alert in case["exp_alerts"]
        for label in (alert["exp_labels"].get("window"),)
    }
    # the longer windows of ChargptFailures appear as ALERTS in budgets_test.yml
    fired |= {("ChargptFailures", window) for window in re.findall(r'slo="sequences", window="(\w+)"', texts[1])}
    assert fired == {(rule["alert"], rule["labels"].get("window")) for rule in alerts()}
    groups = [group["name"] for group in yaml.safe_load(RULES.read_text())["groups"]]
    assert [yaml.safe_load(text)["group_eval_order"] for text in texts] == [groups, groups]


def test_every_alert_has_severity_summary_description_and_a_link_to_the_runbook():
    headings = set(re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE))
    for rule in alerts():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert "{{" in rule["annotations"]["summary"] + rule["annotations"]["description"] or "absent" in rule["expr"]
        assert rule["annotations"]["runbook_url"].partition("#")[2] == rule["alert"].lower()
    assert headings >= {rule["alert"] for rule in alerts()}


def test_runbook_names_only_existing_settings_and_alerts():
    flags = set(re.findall(r"`(--[a-z-]+)", RUNBOOK))
    assert flags and flags <= {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    named = {heading for heading in re.findall(r"^## (Chargpt\w+)$", RUNBOOK, re.MULTILINE)}
    assert named <= {rule["alert"] for rule in alerts()}


def test_runbook_names_only_existing_panels():
    """Panels and rows are the runbook's italics."""
    named = set(re.findall(r"(?<![*\w])\*([A-Z][^*]+)\*(?!\*)", RUNBOOK.replace("\n", " ")))
    titles = {panel["title"] for document in DASHBOARDS.values() for panel in document["panels"]}
    assert (
        "Finish reasons" in named and named - {"Targets", "Configuration"} <= titles
    )  # those two are Prometheus' pages


# -- the dashboards --


def test_committed_dashboards_equal_the_generated_ones():
    committed = {path.name: path.read_text(encoding="utf-8") for path in (GRAFANA / "dashboards").iterdir()}
    assert committed == runpy.run_path(str(GRAFANA / "dashboard.py"))["texts"]()


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_have_titles_unique_ids_and_no_overlap(name):
    document = DASHBOARDS[name]
    ids = [panel["id"] for panel in document["panels"]]
    assert len(ids) == len(set(ids))
    assert all(panel["title"] and panel["description"] and panel["targets"] for panel in panels(name))
    covered = set()
    for panel in document["panels"]:
        place = panel["gridPos"]
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert not cells & covered and place["x"] + place["w"] <= 24, panel["title"]
        covered |= cells
    variables = {variable["name"] for variable in document["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(document))) - {"__rate_interval", "__all"}
    assert used == variables == {"datasource", "environment", "model_name", "instance"}
    sources = {json.dumps(source) for source in (t["datasource"] for p in panels(name) for t in (p, *p["targets"]))}
    assert sources == {'{"type": "prometheus", "uid": "${datasource}"}'}


# -- real programs --


def get(server, path, **params):
    """The JSON response of Prometheus or Alertmanager."""
    answer = web.get(f"{server.url}/api/{path}", params=params, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def start_prometheus(folder, config, port, alertmanager_port=1):
    """Prometheus with this test's intervals and addresses in its configuration."""
    config["global"] = {"scrape_interval": "400ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(RULES)]
    config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{alertmanager_port}"]
    config["scrape_configs"] = [chargpt] = [job for job in config["scrape_configs"] if job["job_name"] == "chargpt"]
    del chargpt["dns_sd_configs"]
    chargpt["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    check("promtool", "check", "config", folder / "prometheus.yml")
    port = free_port()
    command = [
        program("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage",
    ]  # fmt: skip
    return Program(command, port, "/-/ready", folder / "prometheus.log")


class Load:
    """Sends requests of every kind and outcome, each with a unique id."""

    def __init__(self, server):
        self.server = server
        self.sent = set()
        self._numbers = itertools.count()
        self._pool = concurrent.futures.ThreadPoolExecutor(24)

    def _headers(self):
        id = f"sent-{next(self._numbers)}"
        self.sent.add(id)
        return {"X-Request-Id": id}

    def ask(self, path="/generate", **body):
        return web.post(self.server.url + path, json=body, headers=self._headers(), timeout=60)

    def stream(self, num_events=None, meanwhile=lambda: None, **body):
        """Reads a stream to its end, or `num_events` events after the first before disconnecting."""
        body = {"prompt": "ROMEO:", "stream": True} | body
        url = f"{self.server.url}/generate"
        with web.stream("POST", url, json=body, headers=self._headers(), timeout=60) as answer:
            given = events(answer)
            next(given)
            meanwhile()
            return list(itertools.islice(given, num_events))

    def disconnect_while_sending(self):
        request = post("/generate", b"{", Content_Length=100, Expect="100-continue")
        with sent(self.server.port, request) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 100 ")  # the server has begun to read the body

    def round(self):
        """One round of all requests, in a second or two."""
        calls = [self._pool.submit(self.stream, max_tokens=40 * i) for i in (1, 2, 3)]
        calls += [self._pool.submit(self.ask, prompt="JULIET:\n" * i, max_tokens=60) for i in (1, 20)]
        concurrent.futures.wait(calls)
        self.disconnect_while_sending()
        calls = [
            self._pool.submit(self.stream, 1, max_tokens=ENDLESS),
            self._pool.submit(self.ask, "/v1/score", texts=["To be", "or not to be"]),
            self._pool.submit(self.ask, "/v1/completions", prompt="To be", stop_regex="[A-Za-z]"),
            self._pool.submit(self.ask, prompt="naïve", unknown_characters="replace", max_tokens=5),
            self._pool.submit(self.ask, prompt="naïve", unknown_characters="drop", max_tokens=5),
        ]
        concurrent.futures.wait(calls)
        assert self.ask(prompt="naïve").status_code == 400
        assert self.ask(prompt="To be", max_tokens=ENDLESS, timeout_seconds=0.1).status_code == 504
        crowd = []

        def come():
            """20 while all slots are taken: 4 wait, 16 are rejected."""
            crowd.extend(self._pool.submit(self.ask, prompt="To be", max_tokens=200) for _ in range(20))
            wait_until(lambda: sum(call.done() for call in crowd) == 16)

        self.stream(0, n=4, max_tokens=ENDLESS, meanwhile=come)
        assert sorted(call.result().status_code for call in crowd) == [200] * 4 + [429] * 16

    def kill_the_worker(self):
        """Kills each that runs the same stream, until that gives up, and one more: the next request finds no worker.

        Each replacement waits for longer than the one before, at last for longer than a request does.
        """

        def kill():
            for number in range(MAX_RUNS):
                self.server.wait_until_metric("chargpt_worker_restarts_total", number)
                self.server.wait_until_metric("chargpt_num_requests_running", 1)
                self.server.worker().kill()

        *_, last, _ = self.stream(max_tokens=ENDLESS, meanwhile=kill)
        assert json.loads(last)["error"]["code"] == "worker_lost"
        self.server.wait_until_metric("chargpt_worker_restarts_total", MAX_RUNS)
        self.server.worker().kill()
        assert self.ask(prompt="To be").status_code == 503


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deploy") / "checkpoint"
    save_checkpoint(folder, random_model(), CharTokenizer(VOCABULARY), {"losses": {"whole": 3.5}})
    return folder


class Monitored(typing.NamedTuple):
    server: RunningServer
    prometheus: Program
    alertmanager: Program
    load: Load
    page: str  # /metrics in the text format


@pytest.fixture(scope="module")
def monitored(checkpoint, tmp_path_factory):
    """A service scraped by Prometheus during every kind of request, a full queue and a worker crash."""
    folder = tmp_path_factory.mktemp("deploy")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    port = free_port()
    command = [
        program("prometheus", "alertmanager"), f"--config.file={PROMETHEUS}/alertmanager.yml",
        f"--storage.path={folder}/alerts", f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=",
    ]  # fmt: skip
    with (
        RunningServer(f"{MODEL}={checkpoint}", max_running_requests=4, max_queued_requests=4) as server,
        Program(command, port, "/-/ready", folder / "alertmanager.log") as alertmanager,
        start_prometheus(folder, config, server.port, port) as prometheus,
    ):
        server.wait_until_ready(timeout=180)
        alertmanager.wait_until_ready()
        prometheus.wait_until_ready()
        load = Load(server)
        load.round()
        assert wait_for_data(prometheus, ["chargpt_worker_restarts_total"]) == []  # the increase needs a first sample
        load.kill_the_worker()
        server.wait_until_ready(timeout=180)
        load.round()
        page = web.get(f"{server.url}/metrics").text
        yield Monitored(server, prometheus, alertmanager, load, page)


real = needs("prometheus")


def values(prometheus, expression):
    result = get(prometheus, "v1/query", query=expression)["data"]["result"]
    return [float(series["value"][1]) for series in result]


def wait_for_data(prometheus, expressions):
    """Waits until each expression has a number; returns those without one."""
    waiting = list(expressions)

    def is_complete():
        waiting[:] = [each for each in waiting if not any(map(math.isfinite, values(prometheus, each)))]
        return not waiting

    with contextlib.suppress(AssertionError):
        wait_until(is_complete, timeout=60)
    return waiting


def filled_in(expression):
    """With one model chosen, whose name is not that of the service."""
    expression = expression.replace("$model_name", MODEL).replace("$__rate_interval", "2m")
    return re.sub(r"\$(environment|instance)\b", ".*", expression)


@real
def test_every_panel_has_data_under_load(monitored):
    expressions = [filled_in(target["expr"]) for panel in panels() for target in panel["targets"]]
    assert len(expressions) > 70
    assert wait_for_data(monitored.prometheus, expressions) == []


@real
def test_every_client_visible_failure_is_counted(monitored):
    counters = {
        "chargpt_request_success_total": {"finished_reason": ("stop", "length", "abort", "timeout", "error")},
        "chargpt_admission_rejections_total": {"reason": ("queue_full", "not_ready")},
        "chargpt_http_requests_total": {"status": ("200", "400", "429", "499", "503", "504")},
        "chargpt_unknown_characters_total": {"policy": ("replace", "drop")},
        "environment_model_name:chargpt_failures:ratio_rate5m": {"slo": ("sequences", "answers")},
        "environment_model_name:chargpt_failures:ratio_rate3d": {"slo": ("sequences", "answers")},
    }
    wanted = [
        f'{name}{{{label}="{value}"}} > 0'
        for name, labels in counters.items()
        for label, values in labels.items()
        for value in values
    ]
    assert wait_for_data(monitored.prometheus, [*wanted, "chargpt_worker_restarts_total > 0"]) == []


@real
def test_every_rule_has_data(monitored):
    """The series of recording rules, and every series that an alert queries, whether it fires or not."""
    selectors = {
        selector
        for rule in rules()
        for selector in re.findall(r"\b(?:environment_model_name:|chargpt[_:]|up\b)[\w:]*(?:\{[^}]*\})?", rule["expr"])
    }
    recorded = {f'{rule["record"]}{{slo="{rule["labels"]["slo"]}"}}' for rule in rules() if "record" in rule}
    assert len(recorded) == 24 and 'up{job="chargpt"}' in selectors
    with_tls = {"chargpt_tls_certificate_expiry_timestamp_seconds"}  # another test has these
    assert with_tls < selectors
    selectors -= with_tls
    assert wait_for_data(monitored.prometheus, selectors | recorded) == []
    for group in get(monitored.prometheus, "v1/rules")["data"]["groups"]:
        assert [(rule["name"], rule.get("lastError")) for rule in group["rules"] if rule["health"] != "ok"] == []


@real
def test_exemplars_carry_ids_of_sent_requests(monitored):
    now = time.time()
    expressions = {filled_in(t["expr"]) for panel in panels() for t in panel["targets"] if t.get("exemplar")}
    assert len(expressions) == 20
    for expression in expressions:  # Grafana queries exemplars by the panel's expression
        answer = get(monitored.prometheus, "v1/query_exemplars", query=expression, start=now - 300, end=now + 60)
        found = {exemplar["labels"]["request_id"] for series in answer["data"] for exemplar in series["exemplars"]}
        assert found and found <= monitored.load.sent, expression


@real
def test_worker_crash_alert_reaches_alertmanager(monitored):
    def fired():
        alerts = get(monitored.alertmanager, "v2/alerts")
        return [alert for alert in alerts if alert["labels"]["alertname"] == "ChargptWorkerRestarted"]

    [alert] = wait_until(fired, timeout=60, otherwise=lambda: get(monitored.prometheus, "v1/alerts"))
    assert alert["labels"]["instance"] == f"127.0.0.1:{monitored.server.port}"
    assert alert["labels"]["severity"] == "ticket" and alert["labels"]["model_name"] == "chargpt"
    assert [receiver["name"] for receiver in alert["receivers"]] == ["tickets"]
    assert alert["annotations"]["summary"].startswith(f"A process of 127.0.0.1:{monitored.server.port} crashed")
    assert alert["annotations"]["runbook_url"].endswith("deploy/RUNBOOK.md#chargptworkerrestarted")


# Accepted warnings of promtool, with the reason.
LINT = {
    'chargpt_iteration_tokens_total non-counter metrics should not have "_total" suffix',  # vLLM's name
}


@real
def test_promtool_reports_only_accepted_warnings(monitored):
    done = subprocess.run(["promtool", "check", "metrics"], input=monitored.page, capture_output=True, text=True)
    assert set((done.stdout + done.stderr).splitlines()) == LINT


@real
def test_prometheus_scrapes_without_warnings(monitored):
    [target] = get(monitored.prometheus, "v1/targets")["data"]["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    kinds = {name: found[0]["type"] for name, found in get(monitored.prometheus, "v1/metadata")["data"].items()}
    assert kinds["chargpt_iteration_tokens_total"] == kinds["chargpt_inter_token_latency_seconds"] == "histogram"
    assert kinds["chargpt_generation_tokens"] == "counter"  # OpenMetrics family name, without _total
    assert wait_for_data(monitored.prometheus, ['chargpt_iteration_tokens_total_bucket{le="+Inf"} > 0']) == []
    assert not [line for line in monitored.prometheus.output().splitlines() if re.search("level=(warn|err)", line)]


@needs("prometheus", "openssl")
def test_commented_configuration_scrapes_a_service_with_keys_and_tls(checkpoint, tmp_path, monkeypatch):
    certificate, key = make_certificate(tmp_path)
    (tmp_path / "api-key").write_text("only-for-this-test\n")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))  # trusted by httpx

    text = (PROMETHEUS / "prometheus.yml").read_text()
    head, tail = text.split("    # scheme: https")
    config = yaml.safe_load(head + re.sub(r"(?m)^    # ", "    ", "    # scheme: https" + tail))
    settings = {"api_keys_file": tmp_path / "api-key", "tls_certificate": certificate, "tls_key": key}
    with (
        RunningServer(checkpoint, **settings) as server,
        start_prometheus(tmp_path, config, server.port) as prometheus,
    ):
        server.url = f"https://127.0.0.1:{server.port}"
        server.wait_until_ready(timeout=180)
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        prometheus.wait_until_ready()
        assert (
            wait_for_data(
                prometheus,
                ['up{job="chargpt"} == 1', "chargpt_cache_slots", "chargpt_tls_certificate_expiry_timestamp_seconds"],
            )
            == []
        )
