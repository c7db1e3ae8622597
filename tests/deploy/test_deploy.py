"""deploy/prometheus and deploy/grafana, checked with promtool, amtool and a real Prometheus."""

import concurrent.futures
import contextlib
import itertools
import json
import math
import re
import runpy
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from service.model.tokenizer import CharTokenizer
from service.settings import Settings
from tests.helpers import ENDLESS, VOCABULARY, RunningServer, random_model, wait_until, web
from tests.toolbox.launch import Program, free_port
from tests.toolbox.needs import program
from training.saving import save_checkpoint

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


def panels():
    return [panel for document in DASHBOARDS.values() for panel in document["panels"] if panel["type"] != "row"]


# -- static checks --


@needs("prometheus")
def test_configuration_is_valid_and_alerts_fire_exactly_when_specified(tmp_path):
    assert "50 rules found" in check("promtool", "check", "config", PROMETHEUS / "prometheus.yml")
    text = (PROMETHEUS / "prometheus.yml").read_text()
    head, tail = text.split("    # scheme: https")  # with keys and TLS, as its comments offer
    secured = tmp_path / "prometheus.yml"
    secured.write_text(head + re.sub(r"(?m)^    # ", "    ", "    # scheme: https" + tail))
    check("promtool", "check", "config", "--syntax-only", secured)
    check("amtool", "check-config", PROMETHEUS / "alertmanager.yml")
    check("promtool", "test", "rules", PROMETHEUS / "rules_test.yml", PROMETHEUS / "budgets_test.yml")


def test_every_alert_has_a_test_in_which_it_fires_and_a_section_of_the_runbook():
    texts = [(PROMETHEUS / tests).read_text() for tests in ("rules_test.yml", "budgets_test.yml")]
    cases = [
        case for text in texts for test in yaml.safe_load(text)["tests"] for case in test.get("alert_rule_test", [])
    ]
    fired = {(case["alertname"], alert["exp_labels"].get("window")) for case in cases for alert in case["exp_alerts"]}
    # the longer windows of ChargptFailures appear as ALERTS in budgets_test.yml
    fired |= {("ChargptFailures", window) for window in re.findall(r'slo="sequences", window="(\w+)"', texts[1])}
    assert fired == {(rule["alert"], rule["labels"].get("window")) for rule in alerts()}
    for rule in alerts():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["runbook_url"].partition("#")[2] == rule["alert"].lower()
    assert set(re.findall(r"^## (Chargpt\w+)$", RUNBOOK, re.MULTILINE)) == {rule["alert"] for rule in alerts()}


def test_runbook_names_only_existing_settings_and_panels():
    """Panels and rows are the runbook's italics."""
    flags = set(re.findall(r"`(--[a-z-]+)", RUNBOOK))
    assert flags and flags <= {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    named = set(re.findall(r"(?<![*\w])\*([A-Z][^*]+)\*(?!\*)", RUNBOOK.replace("\n", " ")))
    titles = {panel["title"] for document in DASHBOARDS.values() for panel in document["panels"]}
    assert named and named - {"Targets", "Configuration"} <= titles  # those two are Prometheus' pages


# -- the dashboards --


def test_committed_dashboards_equal_the_generated_ones_and_fit_a_config_map():
    committed = {path.name: path.read_text(encoding="utf-8") for path in (GRAFANA / "dashboards").iterdir()}
    assert committed == runpy.run_path(str(GRAFANA / "dashboard.py"))["texts"]()
    # what kubectl apply keeps of it must fit in 256 KiB
    assert all(len(json.dumps(json.loads(text), indent=2).encode()) < 200_000 for text in committed.values())


# -- real programs --


def get(prometheus, path, **params):
    answer = web.get(f"{prometheus.url}/api/v1/{path}", params=params, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


@contextlib.contextmanager
def scraping(folder, target):
    """Prometheus, ready, with this test's intervals and addresses in its configuration."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    [chargpt] = [job for job in config["scrape_configs"] if job["job_name"] == "chargpt"]
    del chargpt["dns_sd_configs"]
    chargpt["static_configs"] = [{"targets": [f"127.0.0.1:{target}"]}]
    intervals = {"scrape_interval": "400ms", "evaluation_interval": "500ms"}
    config = {"global": intervals, "rule_files": [str(RULES)], "scrape_configs": [chargpt]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        program("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage",
    ]  # fmt: skip
    with Program(command, port, "/-/ready", folder / "prometheus.log") as prometheus:
        prometheus.wait_until_ready()
        yield prometheus


def load(server):
    """Requests of every kind, with ids; returns those."""
    numbers = itertools.count()

    def ask(path="/generate", **body):
        headers = {"X-Request-Id": f"sent-{next(numbers)}"}
        return web.post(server.url + path, json={"prompt": "To be", **body}, headers=headers, timeout=60).status_code

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answered = [pool.submit(ask, max_tokens=200 * i, stream=i % 2 == 0) for i in range(1, 7)]
        answered += [pool.submit(ask, prompt="JULIET:\n" * i, max_tokens=60) for i in (1, 20)]
        answered += [pool.submit(ask, "/v1/completions", stop_regex="[A-Za-z]")]
        answered += [pool.submit(ask, prompt="naïve", unknown_characters=how) for how in ("replace", "drop")]
        assert {each.result() for each in answered} == {200}
        crowd = [pool.submit(ask, n=8, max_tokens=2000) for _ in range(4)]  # some wait, some are refused
        assert {each.result() for each in crowd} == {200, 429}
    scored = {"url": f"{server.url}/v1/score", "json": {"texts": ["To be", "or not"]}}
    assert web.post(**scored, headers={"X-Request-Id": "sent-0"}).status_code == 200
    assert (ask(prompt="naïve"), ask(max_tokens=ENDLESS, timeout_seconds=0.1)) == (400, 504)
    return {f"sent-{number}" for number in range(next(numbers))}


@pytest.fixture(scope="module")
def monitored(tmp_path_factory):
    """A service scraped by Prometheus during every kind of request and the loss of a worker."""
    folder = tmp_path_factory.mktemp("deploy")
    save_checkpoint(folder / "checkpoint", random_model(), CharTokenizer(VOCABULARY), {"losses": {"whole": 3.5}})
    with (
        RunningServer(f"{MODEL}={folder / 'checkpoint'}", max_running_requests=8, max_queued_requests=8) as server,
        scraping(folder, server.port) as prometheus,
    ):
        server.wait_until_ready(timeout=180)
        sent = load(server)
        assert wait_for_data(prometheus, ["chargpt_worker_restarts_total"]) == []  # the increase needs a first sample
        server.worker().kill()
        server.wait_until_metric("chargpt_worker_restarts_total", 1)
        server.wait_until_ready(timeout=180)
        yield server, prometheus, sent | load(server)


def values(prometheus, expression):
    result = get(prometheus, "query", query=expression)["result"]
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


@needs("prometheus")
def test_every_panel_and_every_rule_has_data_under_load_and_exemplars_name_requests(monitored):
    """The series of recording rules, and every series that an alert queries, whether it fires or not."""
    selectors = {
        selector
        for rule in rules()
        for selector in re.findall(r"\b(?:environment_model_name:|chargpt[_:]|up\b)[\w:]*(?:\{[^}]*\})?", rule["expr"])
    }
    selectors |= {f'{rule["record"]}{{slo="{rule["labels"]["slo"]}"}}' for rule in rules() if "record" in rule}
    selectors.remove("chargpt_tls_certificate_expiry_timestamp_seconds")  # without TLS there is none
    expressions = {filled_in(target["expr"]) for panel in panels() for target in panel["targets"]}
    server, prometheus, sent = monitored
    assert len(expressions) > 70 and wait_for_data(prometheus, expressions | selectors) == []
    for group in get(prometheus, "rules")["groups"]:
        assert [(rule["name"], rule.get("lastError")) for rule in group["rules"] if rule["health"] != "ok"] == []
    assert not [line for line in prometheus.output().splitlines() if re.search("level=(warn|err)", line)]

    now = time.time()
    with_exemplars = {filled_in(t["expr"]) for panel in panels() for t in panel["targets"] if t.get("exemplar")}
    assert len(with_exemplars) == 20
    for expression in with_exemplars:  # Grafana queries exemplars by the panel's expression
        every = get(prometheus, "query_exemplars", query=expression, start=now - 300, end=now + 60)
        found = {exemplar["labels"]["request_id"] for series in every for exemplar in series["exemplars"]}
        assert found and found <= sent, expression
    page = web.get(f"{server.url}/metrics").text
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True)
    assert (done.stdout + done.stderr).splitlines() == [  # the name is vLLM's
        'chargpt_iteration_tokens_total non-counter metrics should not have "_total" suffix'
    ]
