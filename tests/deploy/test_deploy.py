"""deploy/prometheus and deploy/grafana, checked with promtool, amtool and a real Prometheus; locks and workflows."""

import concurrent.futures
import json
import math
import re
import runpy
import subprocess
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

from deploy.image import lock
from service.model.tokenizer import CharTokenizer
from tests.deploy.stack import DEPLOY, ROOT, run
from tests.helpers import ENDLESS, VOCABULARY, random_model, serving, wait_until, web
from tests.toolbox.launch import Program, free_port
from tests.toolbox.needs import program
from training.run.saving import save_checkpoint

PROMETHEUS, GRAFANA = DEPLOY / "prometheus", DEPLOY / "grafana"
DASHBOARD = (GRAFANA / "dashboards" / "chargpt.json").read_text(encoding="utf-8")
PANELS = json.loads(DASHBOARD)["panels"]
MODEL = "plays"
MAKEFILE = (ROOT / "Makefile").read_text()
RUNBOOK = (DEPLOY / "RUNBOOK.md").read_text(encoding="utf-8")
RULES = [rule for group in yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"] for rule in group["rules"]]
TARGETS = [target for panel in PANELS for target in panel["targets"]]


@pytest.mark.tools
@pytest.mark.needs("prometheus")
def test_configuration_is_valid_and_alerts_fire_exactly_when_specified(tmp_path):
    run("promtool", "check", "config", PROMETHEUS / "prometheus.yml")
    head, tail = (PROMETHEUS / "prometheus.yml").read_text().split("    # scheme: https")
    secured = tmp_path / "prometheus.yml"  # with keys and TLS, as its comments offer
    secured.write_text(head + re.sub(r"(?m)^    # ", "    ", "    # scheme: https" + tail))
    run("promtool", "check", "config", "--syntax-only", secured)
    run("amtool", "check-config", PROMETHEUS / "alertmanager.yml")
    run("promtool", "test", "rules", PROMETHEUS / "rules_test.yml", PROMETHEUS / "budgets_test.yml")


def test_every_alert_has_a_test_in_which_it_fires_and_a_section_of_the_runbook():
    alerts = [rule for rule in RULES if "alert" in rule]
    texts = [(PROMETHEUS / name).read_text() for name in ("rules_test.yml", "budgets_test.yml")]
    tests = [test for text in texts for test in yaml.safe_load(text)["tests"]]
    cases = [case for test in tests for case in test.get("alert_rule_test", [])]
    fired = {(case["alertname"], alert["exp_labels"].get("window")) for case in cases for alert in case["exp_alerts"]}
    # the longer windows of ChargptFailures appear as ALERTS in budgets_test.yml
    fired |= {("ChargptFailures", window) for window in re.findall(r'slo="sequences", window="(\w+)"', texts[1])}
    assert fired == {(rule["alert"], rule["labels"].get("window")) for rule in alerts}
    links = {rule["annotations"]["runbook_url"].partition("#")[2] for rule in alerts}
    sections = re.findall(r"^## (Chargpt\w+)$", RUNBOOK, re.MULTILINE)
    assert links == {section.lower() for section in sections} == {rule["alert"].lower() for rule in alerts}


def test_the_runbook_names_panels_and_series_that_exist():
    """Panels are its italics."""
    named = set(re.findall(r"(?<![*\w])\*([A-Z][^*]+)\*(?!\*)", RUNBOOK.replace("\n", " ")))
    titles = {panel["title"] for panel in PANELS}
    assert named and named - {"Targets", "Configuration"} <= titles  # those two are Prometheus' pages
    documented = re.findall(r"^\| `(chargpt_\w+)`", (ROOT / "service" / "OPERATIONS.md").read_text(), re.MULTILINE)
    named = set(re.findall(r"\bchargpt_\w+", RUNBOOK))
    assert named and named <= set(documented)


def test_committed_rules_and_dashboard_equal_the_generated_ones_and_fit_a_config_map():
    rules = runpy.run_path(str(PROMETHEUS / "rules.py"))["texts"]()
    assert {path: path.read_text(encoding="utf-8") for path in rules} == rules
    assert runpy.run_path(str(GRAFANA / "dashboard.py"))["text"]() == DASHBOARD
    # what kubectl apply keeps of it must fit in 256 KiB
    assert len(json.dumps(json.loads(DASHBOARD), indent=2).encode()) < 200_000


# What the image is built from


def read(name):
    return lock.parse((DEPLOY / "image" / f"{name}.txt").read_text())


@pytest.mark.parametrize("name", ["cpu", "torch", "cuda", "build", "train"])
def test_a_lock_satisfies_pyproject(name):
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = pyproject["project"]["optional-dependencies"]
    image = pyproject["project"]["dependencies"] + [each for extra in lock.EXTRAS for each in extras[extra]]
    needed = {"build": pyproject["build-system"]["requires"], "train": extras["training"], "cpu": image}
    locked = read(name) | (read("torch") if name == "train" else {})
    for requirement in map(Requirement, needed.get(name, image + extras["torch"])):
        version = lock.version(locked, requirement.name)
        assert requirement.specifier.contains(version), f"{requirement}, locked {version}: run make lock"


def test_the_locks_and_make_test_have_one_version_of_torch():
    cpu, torch, cuda = read("cpu"), read("torch"), read("cuda")
    assert lock.version(torch, "torch") == f"{lock.version(cuda, 'torch')}+cpu"
    assert f"torch=={lock.version(torch, 'torch')}" in MAKEFILE  # what make test installs
    without_cuda = {name: it for name, it in cuda.items() if not lock.CUDA_ONLY.match(name)}
    assert torch | {"torch": ""} == without_cuda | {"torch": ""}
    assert cpu.items() < torch.items() and "torch" not in cpu


def test_workflows_run_what_exists():
    """Targets of make, and files. The workflows have never run; make lint checks their form."""
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            script = "\n".join(step.get("run", "") for step in job["steps"])
            for target in re.findall(r"\bmake ([a-z-]+)", script):
                assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
            for file in re.findall(r"(?<![\w/.-])(?:tests|deploy|\.ci)/[\w./-]+", script):
                assert (ROOT / file).exists(), file


# With a real Prometheus


class Scraping(Program):
    """Prometheus, with this test's intervals and addresses in its configuration."""

    def __init__(self, folder, target):
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        [chargpt] = [job for job in config["scrape_configs"] if job["job_name"] == "chargpt"]
        del chargpt["dns_sd_configs"]
        chargpt["static_configs"] = [{"targets": [f"127.0.0.1:{target}"]}]
        intervals = {"scrape_interval": "400ms", "evaluation_interval": "500ms"}
        config = {"global": intervals, "rule_files": [str(PROMETHEUS / "rules.yml")], "scrape_configs": [chargpt]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        command = [
            program("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]  # fmt: skip
        super().__init__(command, port, "/-/ready", folder / "prometheus.log")

    def get(self, path, **params):
        answer = web.get(f"{self.url}/api/v1/{path}", params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def wait_for_data(self, expressions):
        """Until each expression has had a number."""
        left = [*expressions]

        def without():
            left[:] = [each for each in left if not any(map(math.isfinite, self.values(each)))]
            return left

        wait_until(lambda: not without(), otherwise=without)

    def values(self, expression):
        return [float(series["value"][1]) for series in self.get("query", query=expression)["result"]]


def load(server):
    """Requests of every kind."""

    def ask(path="/generate", **body):
        body = {"prompt": "To be"} | body if path != "/v1/score" else body
        return web.post(server.url + path, json=body).status_code

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answered = [pool.submit(ask, max_tokens=200 * i, stream=i % 2 == 0) for i in range(1, 7)]
        answered += [pool.submit(ask, prompt="JULIET:\n" * i, max_tokens=60) for i in (1, 20)]
        answered += [pool.submit(ask, "/v1/completions", stop_regex="[A-Za-z]")]
        answered += [pool.submit(ask, prompt="naïve", unknown_characters=how) for how in ("replace", "drop")]
        answered += [pool.submit(ask, regex="[^z]{2}", exact=True, max_tokens=2)]
        answered += [pool.submit(ask, "/v1/score", texts=["To be", "or not"])]
        assert {each.result() for each in answered} == {200}
        crowd = [pool.submit(ask, n=8, max_tokens=9000) for _ in range(4)]  # some wait, some are refused
        assert {each.result() for each in crowd} == {200, 429}
    assert (ask(prompt="naïve"), ask(max_tokens=ENDLESS, timeout_seconds=0.1)) == (400, 504)


def filled_in(expression):
    """With one model chosen, whose name is not that of the service."""
    expression = expression.replace("$model_name", MODEL).replace("$__rate_interval", "2m")
    return re.sub(r"\$(environment|instance)\b", ".*", expression)


@pytest.mark.tools
@pytest.mark.needs("prometheus")
def test_every_panel_and_every_rule_has_data_under_load(tmp_path):
    """The series of recording rules, and every series that an alert queries, whether it fires or not; during every kind
    of request and the loss of a worker."""
    series = r"\b(?:environment_model_name:|chargpt[_:]|up\b)[\w:]*(?:\{[^}]*\})?"
    selectors = {selector for rule in RULES for selector in re.findall(series, rule["expr"])}
    selectors |= {f'{rule["record"]}{{slo="{rule["labels"]["slo"]}"}}' for rule in RULES if "record" in rule}
    selectors.remove("chargpt_tls_certificate_expiry_timestamp_seconds")  # without TLS there is none
    expressions = {filled_in(target["expr"]) for target in TARGETS}
    save_checkpoint(tmp_path / "checkpoint", random_model(), CharTokenizer(VOCABULARY), {"losses": {"whole": 3.5}})
    with (
        serving(f"{MODEL}={tmp_path / 'checkpoint'}", max_running_requests=8, max_queued_requests=8) as server,
        Scraping(tmp_path, server.port) as prometheus,
    ):
        prometheus.wait_until_ready()
        load(server)
        prometheus.wait_for_data(["chargpt_worker_restarts_total"])  # the increase needs a first sample
        server.worker().kill()
        server.wait_until_metric("chargpt_worker_restarts_total", 1)
        server.wait_until_ready()
        load(server)
        prometheus.wait_for_data(expressions | selectors)
        for group in prometheus.get("rules")["groups"]:
            assert [(rule["name"], rule.get("lastError")) for rule in group["rules"] if rule["health"] != "ok"] == []
        assert not [line for line in prometheus.output().splitlines() if re.search("level=(warn|err)", line)]
        page = web.get(f"{server.url}/metrics").text
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True)
    assert (done.stdout + done.stderr).splitlines() == [  # the name is vLLM's
        'chargpt_iteration_tokens_total non-counter metrics should not have "_total" suffix'
    ]
