"""compose.yaml on a real engine, with stand-ins for the images of others: load, lost and restarted replicas, alerts."""

import datetime
import json
import os
import re
import shlex
import subprocess
import time

import pytest
import yaml

from service.settings import Settings
from tests.deploy.stack import (
    DEPLOY,
    ROOT,
    SIZE,
    Load,
    answered_by,
    build,
    build_stand_ins,
    build_with,
    query,
    references,
    run,
)
from tests.helpers import save_random, wait_until, web
from tests.toolbox.http import events
from tests.toolbox.launch import free_port

pytestmark = [
    pytest.mark.container, pytest.mark.needs("docker", "compose"), pytest.mark.timeout(900),
    pytest.mark.usefixtures("networks"),
]  # fmt: skip

PROJECT = "chargpt-test-compose"


class Stack:
    """The stack of compose.yaml, as a project of its own on free ports, without Grafana, which has no stand-in."""

    def __init__(self, engine, folder, checkpoint):
        self.engine, self.checkpoint = engine, checkpoint
        self.image = build_with(checkpoint, "chargpt:test-compose")
        images = build_stand_ins() | {"CHARGPT_IMAGE": self.image}
        dockerfile = ["--file", DEPLOY / "train.Dockerfile", "--build-arg", f"BASE={self.image}"]
        images["TRAIN_IMAGE"] = build("chargpt:test-train", ROOT, *dockerfile)
        ports = {name: str(free_port()) for name in ("HTTP_PORT", "PROMETHEUS_PORT", "ALERTMANAGER_PORT")}
        self.environment = os.environ | ports | images
        self.url = f"http://127.0.0.1:{ports['HTTP_PORT']}"
        self.files = ["-f", DEPLOY / "compose.yaml", "-f", in_seconds(folder)]

    def compose(self, *words, **variables):
        return run("docker", "compose", "-p", PROJECT, *self.files, *words, env=self.environment | variables)

    def documented(self, heading, replaced):
        """Runs the commands that README.md has under a heading, on this project; whether they succeed."""
        text = (DEPLOY / "README.md").read_text()
        script = re.search(rf"^\*\*{heading}\*\* .*?^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
        here = shlex.join(["docker", "compose", "-p", PROJECT, *map(str, self.files)])
        for old, new in (replaced | {"docker compose -f deploy/compose.yaml": here}).items():
            assert old in script
            script = script.replace(old, new)
        return subprocess.run(["sh", "-c", script], env=self.environment, timeout=600).returncode == 0

    def containers(self, service):
        labels = [f"com.docker.compose.project={PROJECT}", f"com.docker.compose.service={service}"]
        return sorted(self.engine.containers.list(filters={"label": labels}), key=lambda each: each.name)

    def replicas(self):
        return self.containers("chargpt")

    def query(self, expression):
        [prometheus] = self.containers("prometheus")
        return query(prometheus, expression)

    def are_up(self):
        """How many replicas haproxy sends to, by its own metrics, a second ago."""
        return self.query('haproxy_backend_active_servers{proxy="chargpt"}')

    def wait_until_both_serve(self):
        wait_until(lambda: all(each.health == "healthy" for each in self.replicas()) and self.are_up() == ["2"])

    def load(self):
        return Load(self.url, {"random": self.checkpoint})

    def alerts(self):
        """What the container that receives alerts got."""
        [receiver] = self.containers("alerts")
        # Between them: what http.server prints when Alertmanager did not wait for its answer.
        return [json.loads(line) for line in receiver.logs().decode().splitlines() if line.startswith("{")]


def in_seconds(folder):
    """An override file with which Prometheus and Alertmanager take seconds where they take minutes."""
    folder.chmod(0o755)
    for name in ("prometheus.yml", "rules.yml", "alertmanager.yml"):
        text = re.sub(r"for: \d+m", "for: 3s", (DEPLOY / "prometheus" / name).read_text())
        text = re.sub(r"((?:scrape|evaluation|group)_interval|group_wait): \w+", r"\1: 1s", text)
        (folder / name).write_text(text)
    mounts = {"prometheus": f"{folder}:/etc/prometheus:ro"}
    mounts["alertmanager"] = f"{folder}/alertmanager.yml:/etc/alertmanager/alertmanager.yml:ro"
    override = {"services": {name: {"volumes": [mount]} for name, mount in mounts.items()}}
    (folder / "override.yaml").write_text(yaml.safe_dump(override))
    return folder / "override.yaml"


def kill(container):
    """SIGKILL that is no command of Docker's, after which it would not restart the container: like the OOM killer's.

    Returns time.time() of it.
    """
    container.reload()
    program = f"import os, time; print(time.time()); os.kill({container.attrs['State']['Pid']}, 9)"
    options = {"entrypoint": "python", "user": "root", "pid_mode": "host", "cap_add": ["KILL"], "remove": True}
    return float(container.client.containers.run(container.image, ["-c", program], **options))


@pytest.fixture(scope="module")
def stack(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compose")
    stack = Stack(engine, folder, save_random(folder / "checkpoint", **SIZE))
    down = ["down", "--volumes", "--remove-orphans"]
    stack.compose(*down)  # what a test run that was killed left
    try:
        stack.compose("up", "--detach", "--wait", "haproxy", "prometheus", "alertmanager")  # and what these depend on
        stack.wait_until_both_serve()
        yield stack
    finally:
        stack.compose(*down)


@pytest.mark.parametrize("name", ["compose.yaml", "stack.yaml"])
def test_grace_period_and_timeouts_follow_from_the_settings(name):
    service = yaml.safe_load((DEPLOY / name).read_text())["services"]["chargpt"]
    given = {key.removeprefix("CHARGPT_").lower(): value for key, value in service["environment"].items()}
    settings = Settings(_cli_parse_args=[], **given)
    assert service["stop_grace_period"] == f"{settings.shutdown_delay_seconds + settings.drain_seconds + 10:.0f}s"
    haproxy = (DEPLOY / "haproxy" / "haproxy.cfg").read_text()
    [wait] = set(re.findall(r"timeout (?:client|server) (\d+)s", haproxy))
    assert int(wait) > settings.request_timeout_seconds


def test_override_for_gpus_is_valid():
    run("docker", "compose", "-f", DEPLOY / "compose.yaml", "-f", DEPLOY / "compose.gpu.yaml", "--profile", "train",
        "config", "--quiet")  # fmt: skip


def test_the_volume_follows_the_image_but_keeps_what_came_from_elsewhere(tmp_path):
    """Through resets, restarts, a copy that was cut off, and images that change."""
    checkpoints = {name: save_random(tmp_path / name, seed=seed, **SIZE) for seed, name in enumerate(("old", "new"))}
    images = {name: build_with(each, f"chargpt:test-{name}") for name, each in checkpoints.items()}
    project = ["docker", "compose", "-p", f"{PROJECT}-volume", "-f", DEPLOY / "compose.yaml"]
    look = "sha256sum chargpt/manifest.json | cut -c1-64; stat -c %u . chargpt chargpt/* | sort -u"
    digests = {checkpoint.digest: name for name, checkpoint in checkpoints.items()}
    steps = (  # an image, what its user does before its service starts, and whose manifest is there then
        ("old", "true", "old"),
        ("old", "rm -r chargpt", "old"),
        ("old", "rm -r chargpt; mkdir .new", "old"),
        ("new", "true", "new"),
        ("old", "rm .placed", "new"),  # not known to be an image's: it stays
        ("new", "true", "new"),
        ("old", "true", "old"),
        ("old", "echo >>chargpt/manifest.json", None),
        ("new", "true", None),
    )
    task = [*project, "run", "--rm", "--no-TTY", "--workdir", "/checkpoints"]
    try:
        for name, shell, found in steps:
            environment = os.environ | {"CHARGPT_IMAGE": images[name]}
            run(*task, "--entrypoint", "sh", "checkpoints", "-euc", shell, env=environment)
            run(*task, "checkpoints", env=environment)
            # The first image's container starts again, and places nothing.
            run(*project, "up", "--no-recreate", "checkpoints", env=environment)
            shown = run(*task, "--entrypoint", "sh", "checkpoints", "-euc", look, env=environment)
            digest = re.search(r"^([0-9a-f]{64})\n10001$", shown, re.MULTILINE)[1]
            assert digests.get(digest) == found, shell
    finally:
        run(*project, "down", "--volumes")


def test_requests_spread_over_both_replicas_and_keep_their_client(stack):
    with stack.load() as load:
        load.wait_for(3)
    assert load.failed() == []
    asked = {sent.id for sent in load.sent}

    def logs():
        return [answered_by(replica) for replica in stack.replicas()]

    # Replicas write the lines of their last requests together, a moment later.
    wait_until(lambda: asked <= {id for log in logs() for id in log})
    counts = [len(asked & set(log)) for log in logs()]
    assert sum(counts) == len(asked) and min(counts) > len(asked) / 4
    [haproxy] = stack.containers("haproxy")
    networks = haproxy.attrs["NetworkSettings"]["Networks"].values()
    clients = {line["client"] for log in logs() for line in log.values()}
    assert not clients & {network["IPAddress"] for network in networks}


def test_events_of_a_stream_arrive_one_by_one(stack):
    """The first event comes while the replica still writes: it has not logged the request yet."""
    headers = {"X-Request-Id": "one-by-one"}
    body = {"prompt": "Hello", "max_tokens": 8000, "seed": 1, "stream": True}
    with web.stream("POST", f"{stack.url}/generate", json=body, headers=headers) as answer:
        for number, _ in enumerate(events(answer)):
            if number in (0, 10, 20):
                assert all("one-by-one" not in answered_by(replica) for replica in stack.replicas())
    assert number > 20


def test_checkpoints_trained_here_and_elsewhere_are_served_after_sighup(stack, tmp_path):
    text = tmp_path / "my.txt"
    text.write_text("".join(f"{number} sheep and {number + 1} wolves.\n" for number in range(2000)))
    text.chmod(0o644)
    tmp_path.chmod(0o755)
    with stack.load() as load:
        size = ["--n-layer=1", "--n-head=2", "--n-kv-head=1", "--n-embd=16", "--block-size=32"]
        train = ["--profile=train", "run", "--rm", "train", "--steps=20", *size]
        stack.compose(*train, TEXT=str(text), NAME="sheep")
        stack.compose("kill", "--signal=HUP", "chargpt")

        def models():
            """Of each replica: haproxy may send any number of requests to one of them."""
            read = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/v1/models').read().decode())"
            answers = [json.loads(it.exec_run(["python", "-c", read]).output) for it in stack.replicas()]
            return {tuple(sorted(model["id"] for model in answer["data"])) for answer in answers}

        wait_until(lambda: models() == {("chargpt", "sheep")}, otherwise=models)
        body = {"model": "sheep", "prompt": "12 sheep", "max_tokens": 40, "seed": 1}
        answers = [web.post(f"{stack.url}/generate", json=body).json() for _ in range(6)]
    assert load.failed() == []
    [text] = {answer["choices"][0]["text"] for answer in answers}
    assert len(text) == 40 and {answer["model"] for answer in answers} == {"sheep"}
    body = {"model": "mine", "prompt": "Hello", "max_tokens": 40, "seed": 1}

    def texts():
        answers = [web.post(f"{stack.url}/generate", json=body) for _ in range(6)]
        return {it.json()["choices"][0]["text"] if it.status_code == 200 else it.text for it in answers}

    for seed in (2, 3):  # the second one takes the place of the first
        mine = save_random(tmp_path / f"elsewhere-{seed}", seed=seed, **SIZE)
        assert stack.documented("Place", {"$PWD/out/mine/best": str(mine.path)})
        expected = {*references(mine.path, "Hello", (1,), 40)}
        wait_until(lambda expected=expected: texts() == expected, otherwise=texts)


def test_a_killed_replica_costs_only_its_requests_and_comes_back(stack):
    killed, other = stack.replicas()
    with stack.load() as load:
        load.wait_for(1)
        end = kill(killed)
        wait_until(lambda: killed.reload() or killed.attrs["RestartCount"] == 1)
        stack.wait_until_both_serve()
        recovered = time.time()
        wait_until(lambda: set(answered_by(killed)) & {sent.id for sent in load.sent if sent.started > recovered})
    assert killed.attrs["RestartCount"] == 1
    dead = datetime.datetime.fromisoformat(killed.attrs["State"]["FinishedAt"]).timestamp()
    for sent in load.failed():
        assert end < sent.ended and sent.started < dead, sent
        assert sent.id not in answered_by(other), sent
        assert sent.failure.startswith("cut") or '"replica_lost"' in sent.failure, sent


def test_replicas_restarted_one_by_one_lose_nothing(stack):
    """One of them is down at first: it starts again before the other one is restarted."""
    down, _ = stack.replicas()
    run("docker", "kill", down.id)  # which ends Docker's restarts
    wait_until(lambda: stack.are_up() == ["1"])
    with stack.load() as load:
        load.wait_for(1)
        assert stack.documented("Restart", {})
        load.wait_for(1)
    assert load.failed() == []
    stack.wait_until_both_serve()
    wait_until(lambda: stack.query("up") == ["1"] * 3, 60)  # haproxy is one
    wait_until(lambda: stack.query('haproxy_backend_http_responses_total{proxy="chargpt", code="2xx"} > 0'))


def test_a_restart_one_by_one_stops_when_a_replica_does_not_come_back(stack):
    """As every checkpoint is damaged: the other replica goes on with the copies that it has."""

    def in_volume(command):
        task = ["run", "--rm", "--no-TTY", "--workdir", "/checkpoints", "--entrypoint", "sh"]
        stack.compose(*task, "checkpoints", "-euc", command)

    begun = {replica.id: replica.attrs["State"]["StartedAt"] for replica in stack.replicas()}
    in_volume("find . -name manifest.json -execdir mv {} kept.json ';'")
    try:
        with stack.load() as load:
            load.wait_for(1)
            assert not stack.documented("Restart", {"--wait-timeout 600": "--wait-timeout 20"})
            load.wait_for(1)
        assert load.failed() == []
        goes_on = [it for it in stack.replicas() if it.attrs["State"]["StartedAt"] == begun[it.id]]
        assert len(goes_on) == 1 and goes_on[0].health == "healthy"
    finally:
        in_volume("find . -name kept.json -execdir mv {} manifest.json ';'")
    stack.wait_until_both_serve()  # Docker starts the other one again and again


def test_a_new_image_rolls_out_with_its_checkpoint(stack, tmp_path):
    """Without a failed request; afterwards each text is that of the new image's checkpoint."""
    new = save_random(tmp_path / "new", seed=1, **SIZE)
    image = build_with(new, "chargpt:test-compose-new")
    before = {replica.id for replica in stack.replicas()}
    with Load(stack.url, {"old": stack.checkpoint, "new": new}) as load:
        load.wait_for(1)
        assert {sent.checkpoint for sent in load.sent} == {"old"}
        assert stack.documented("Roll out", {"compose build chargpt": f"docker tag {image} {stack.image}"})
        sent_before = len(load.sent)
        load.wait_for(3)  # more answers than there are clients
    assert load.failed() == []
    assert {sent.checkpoint for sent in load.sent[sent_before + load.clients :]} == {"new"}
    assert len(stack.replicas()) == 2 and not before & {replica.id for replica in stack.replicas()}
    stack.checkpoint = new
    stack.wait_until_both_serve()


def test_a_replica_that_hangs_is_left_out_and_its_alert_arrives(stack):
    hung, other = stack.replicas()
    address = next(iter(hung.attrs["NetworkSettings"]["Networks"].values()))["IPAddress"]
    since, body = datetime.datetime.now(datetime.UTC).isoformat(), {"prompt": "Hello", "max_tokens": 5}

    def alerts(receiver, status, **labels):
        kind = (receiver, status)
        new = [it for it in stack.alerts() if (it["receiver"], it["status"]) == kind and it["startsAt"] > since]
        return [it for it in new if labels.items() <= it["labels"].items()]

    down = ("tickets", {"alertname": "ChargptTargetDown", "severity": "ticket", "instance": f"{address}:8000"})
    none = [("pager", {"alertname": name, "severity": "page"}) for name in ("ChargptTargetsDown", "ChargptNoReplica")]
    # Prometheus sends an alert again after a minute: one that was lost on its way is late, not gone.
    hung.pause()
    try:
        wait_until(lambda: stack.are_up() == ["1"])
        assert [web.post(f"{stack.url}/generate", json=body).status_code for _ in range(10)] == [200] * 10
        wait_until(lambda: alerts(down[0], "firing", **down[1]), otherwise=stack.alerts)
        assert not alerts(down[0], "resolved", **down[1])
        other.pause()  # none is left: haproxy answers itself, in the service's form
        wait_until(lambda: stack.are_up() == ["0"])
        answer = web.post(f"{stack.url}/generate", json=body)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
        assert answer.json()["error"]["code"] == "not_ready"
        wait_until(
            lambda: all(alerts(receiver, "firing", **labels) for receiver, labels in none), otherwise=stack.alerts
        )
    finally:
        stack.compose("unpause", "chargpt")
    wait_until(lambda: alerts(down[0], "resolved", **down[1]), otherwise=stack.alerts)
    stack.wait_until_both_serve()
