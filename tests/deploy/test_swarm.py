"""stack.yaml on a real engine in swarm mode: a new checkpoint under load, and an image that fails."""

import contextlib
import os

import pytest

from tests.deploy.stack import DEPLOY, SIZE, Load, answered_by, build, build_stand_ins, build_with, query, run
from tests.helpers import save_random, wait_until, web
from tests.toolbox.launch import free_port

pytestmark = [
    pytest.mark.container, pytest.mark.needs("docker"), pytest.mark.timeout(900), pytest.mark.usefixtures("networks"),
]  # fmt: skip

STACK = "chargpt-test-swarm"
SERVICE = f"{STACK}_chargpt"
LABEL, RUNNING = {"label": f"com.docker.stack.namespace={STACK}"}, {"desired-state": "running"}


class Swarm:
    """The stack of stack.yaml on a free port."""

    def __init__(self, engine, checkpoints, images):
        self.engine, self.checkpoints, self.images, port = engine, checkpoints, images, str(free_port())
        given = {"HTTP_PORT": port, "CHARGPT_IMAGE": images["old"], "CONFIG_VERSION": "test"}
        self.environment, self.url = os.environ | build_stand_ins() | given, f"http://127.0.0.1:{port}"

    def deploy(self):
        """`docker stack deploy`, and until every task runs, which it does once it is healthy."""
        deploy = ["docker", "stack", "deploy", "--resolve-image=never", "--compose-file", DEPLOY / "stack.yaml"]
        run(*deploy, STACK, env=self.environment)

        def states():
            services = self.engine.services.list(filters=LABEL)
            return [task["Status"]["State"] for each in services for task in each.tasks(filters=RUNNING)]

        wait_until(lambda: states() == ["running"] * 6, otherwise=states)

    def update(self, image):
        """`docker service update`, until it is complete or rolled back; returns what it came to."""
        command = ["docker", "service", "update", "--quiet", "--no-resolve-image", "--image", image, SERVICE]
        done = run(*command, timeout=300)

        def state():
            found = self.engine.services.get(SERVICE).attrs["UpdateStatus"]["State"]
            return found if found.endswith(("completed", "paused")) else None

        return wait_until(state, 300, done)

    def replicas(self):
        """Containers of the tasks that run."""
        statuses = [task["Status"] for task in self.engine.services.get(SERVICE).tasks(filters=RUNNING)]
        ids = [each["ContainerStatus"]["ContainerID"] for each in statuses if each["State"] == "running"]
        return [self.engine.containers.get(id) for id in ids]

    def remove(self):
        run("docker", "stack", "rm", STACK)

        def remaining():
            containers = self.engine.containers.list(all=True, filters=LABEL, ignore_removed=True)
            return [*containers, *self.engine.networks.list(filters=LABEL)]

        wait_until(lambda: not remaining(), otherwise=remaining)
        for volume in self.engine.volumes.list(filters=LABEL):  # which stack rm leaves
            volume.remove()


@contextlib.contextmanager
def in_swarm_mode(engine):
    """A swarm of this machine alone, unless the engine is in one already: that stays."""
    if engine.info()["Swarm"]["LocalNodeState"] == "active":
        yield
        return
    run("docker", "swarm", "init", "--advertise-addr", "127.0.0.1")
    try:
        yield
    finally:
        run("docker", "swarm", "leave", "--force")
        for bridge in engine.networks.list(names=["docker_gwbridge"]):  # swarm leaves it
            bridge.remove()


@pytest.fixture(scope="module")
def swarm(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("swarm")
    checkpoints = {name: save_random(folder / name, seed=seed, **SIZE) for seed, name in enumerate(("old", "new"))}
    images = {name: build_with(checkpoint, f"chargpt:test-swarm-{name}") for name, checkpoint in checkpoints.items()}
    swarm = Swarm(engine, checkpoints, images)
    with in_swarm_mode(engine):
        swarm.remove()  # what a test run that was killed left
        try:
            swarm.deploy()
            yield swarm
        finally:
            swarm.remove()


def test_a_new_checkpoint_rolls_out_under_load(swarm):
    """Without a failed request, and every answer is that of the old or the new checkpoint."""
    with Load(swarm.url, swarm.checkpoints) as load:
        load.wait_for(1)
        assert {sent.checkpoint for sent in load.sent} == {"old"}
        assert swarm.update(swarm.images["new"]) == "completed"
        before = len(load.sent)
        load.wait_for(3)  # more answers than there are clients
    assert load.failed() == []
    assert {sent.checkpoint for sent in load.sent[before + load.clients :]} == {"new"}
    assert [it.attrs["Config"]["Image"] for it in swarm.replicas()] == [swarm.images["new"]] * 2


def test_an_image_that_fails_rolls_back_by_itself(swarm, tmp_path):
    (tmp_path / "Dockerfile").write_text(f'FROM {swarm.images["new"]}\nENTRYPOINT ["false"]\n')
    failing = build("chargpt:test-swarm-failing", tmp_path)
    before = {replica.id for replica in swarm.replicas()}
    with Load(swarm.url, swarm.checkpoints) as load:
        load.wait_for(1)
        assert swarm.update(failing) == "rollback_completed"
        load.wait_for(1)
    assert load.failed() == []
    assert {replica.id for replica in swarm.replicas()} == before


def test_the_stack_scales_and_prometheus_finds_all_replicas(swarm):
    run("docker", "service", "scale", f"{SERVICE}=3", timeout=120)
    [prometheus] = swarm.engine.containers.list(filters={"label": f"com.docker.swarm.service.name={STACK}_prometheus"})

    wait_until(lambda: query(prometheus, "sum by (job) (up)") == ["1", "3"])
    replicas = swarm.replicas()
    for _ in range(12):
        assert web.post(f"{swarm.url}/generate", json={"prompt": "Hello", "max_tokens": 2}).status_code == 200
    wait_until(lambda: all(answered_by(replica) for replica in replicas))
