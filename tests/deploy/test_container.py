"""The image: built from the Dockerfile, run with minimal rights, queried over HTTP, stopped by SIGTERM.

DOCKER_HOST selects the engine, as for Docker's own client; CHARGPT_IMAGE an image that exists already.
"""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import docker
import openai
import pytest
import torch

import setup
from service.model.params import SamplingParams
from service.settings import BUNDLED
from tests.helpers import SLOW, save_random, wait_until, web
from tests.observe.test_tracing import Collector
from tests.toolbox.http import pieces, text_of
from tests.toolbox.launch import free_port

ROOT = Path(__file__).parents[2]
VERSION = "1.2.3"  # of the image built here

pytestmark = [pytest.mark.container, pytest.mark.needs("docker"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engine():
    """A client of the Docker engine."""
    with contextlib.closing(docker.from_env()) as client:
        yield client


@pytest.fixture(scope="module")
def image(engine):
    if built := os.environ.get("CHARGPT_IMAGE"):
        return built
    tag = "chargpt:test"
    command = ["docker", "build", "--progress", "plain", "--tag", tag, "--build-arg", f"VERSION={VERSION}"]
    wheels = os.environ.get("PIP_FIND_LINKS")
    if wheels and Path(wheels).is_dir():  # installs torch from local wheels
        command += ["--build-context", f"wheels={wheels}", "--build-arg", "TORCH_INDEX_URL="]
    subprocess.run([*command, ROOT], check=True)
    return tag


@pytest.fixture(scope="module")
def version(engine, image):
    return engine.images.get(image).labels["org.opencontainers.image.version"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("container") / "checkpoint", **SLOW)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A checkpoint whose weights take next to no memory and time."""
    return save_random(tmp_path_factory.mktemp("tiny") / "checkpoint")


@contextlib.contextmanager
def started(engine, image, checkpoint, **options):
    """A container right after its start: a read-only root, no tmpfs, no capabilities; `options` are Docker's."""
    environment = {"CHARGPT_THREADS": "1"}  # as in the other tests
    if options.get("network_mode") != "host":
        options["ports"] = {"8000/tcp": ("127.0.0.1", None)}
    container = engine.containers.run(
        image,
        detach=True,
        read_only=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        environment=environment | options.pop("environment", {}),
        volumes={str(checkpoint.path): {"bind": "/checkpoint", "mode": "ro"}},
        **options,
    )
    try:
        yield container
    finally:
        container.remove(force=True)


def healthy(container):
    """The same container, once it is healthy."""

    def is_healthy():
        container.reload()
        assert container.status in ("created", "running"), container.logs().decode()
        return container.health == "healthy"

    wait_until(is_healthy, timeout=120, otherwise=lambda: container.logs().decode())
    return container


@pytest.fixture
def starting(engine, image, checkpoint):
    """A container right after its start."""
    with started(engine, image, checkpoint) as container:
        yield container


@pytest.fixture
def container(starting):
    """A healthy container."""
    healthy(starting)
    assert web.get(f"{url_of(starting)}/readyz").status_code == 200
    return starting


def processes(container):
    """Command lines of a running container's processes."""
    return [" ".join(line) for line in container.top(ps_args="-o pid,args")["Processes"]]


def catches_sigterm(container):
    status = container.exec_run("cat /proc/1/status").output.decode()
    caught = re.search(r"SigCgt:\s*(\w+)", status)
    return caught is not None and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1


def url_of(container):
    return f"http://127.0.0.1:{container.ports['8000/tcp'][0]['HostPort']}"


def exact(checkpoint, prompt, max_tokens, **params):
    """The reference text of a seed: the uncached fp64 model, outside the container."""
    model = checkpoint.load_model(dtype=torch.float64)
    ids = model.generate(checkpoint.tokenizer.encode(prompt), max_tokens, SamplingParams(**params))
    return checkpoint.tokenizer.decode(ids)


def test_container_returns_the_text_of_the_seed(container, checkpoint):
    body = {"prompt": "Hello", "max_tokens": 60, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 7}
    answer = web.post(f"{url_of(container)}/generate", json=body).json()
    expected = exact(checkpoint, "Hello", 60, temperature=0.8, top_k=20, top_p=0.9, seed=7)
    assert answer["choices"] == [{"index": 0, "text": expected, "finish_reason": "length", "seed": 7}]

    with openai.OpenAI(base_url=f"{url_of(container)}/v1", api_key="none", max_retries=0) as client:
        completion = client.completions.create(model="chargpt", prompt=["To be", "or not"], max_tokens=40, seed=3)
    texts = [choice.text for choice in completion.choices]
    assert texts == [exact(checkpoint, prompt, 40, seed=3) for prompt in ("To be", "or not")]
    assert web.get(f"{url_of(container)}/info").json()["backend"] == "native"


def test_container_runs_without_privileges(container):
    status = dict(line.split(":\t") for line in container.exec_run("cat /proc/1/status").output.decode().splitlines())
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"10001"}
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")} == {0}
    assert status["NoNewPrivs"] == "1"
    for folder in ("/venv", "/tmp", "/var/tmp"):
        touched = container.exec_run(f"touch {folder}/file")
        assert (touched.exit_code, b"Read-only file system" in touched.output) == (1, True), folder


def test_without_a_writable_folder_the_container_says_so(engine, image):
    """Docker mounts /dev/shm writable into a container whose root is read-only; --ipc none does not."""
    with pytest.raises(docker.errors.ContainerError) as caught:
        engine.containers.run(image, read_only=True, ipc_mode="none", remove=True)
    (line,) = caught.value.stderr.decode().splitlines()
    assert line.startswith("python -m service: TMPDIR: No usable temporary directory found")
    assert line.endswith("nor is /dev/shm writable")
    assert caught.value.exit_status == 2


def test_running_and_queued_requests_complete_after_sigterm(engine, image, checkpoint):
    slots, queued, length = 20, 50, 40
    settings = {
        "CHARGPT_MAX_RUNNING_REQUESTS": str(slots),
        "CHARGPT_MAX_QUEUE_SECONDS": "300",
        "CHARGPT_DRAIN_SECONDS": "300",
    }
    with started(engine, image, checkpoint, environment=settings) as container:
        url = url_of(healthy(container))

        def metric(name):
            found = re.search(rf"^chargpt_{name}{{.*}} (\S+)$", web.get(f"{url}/metrics").text, re.MULTILINE)
            return found is not None and float(found[1])

        def stream(seed):
            body = {"prompt": "Hello", "max_tokens": 20 * length, "seed": seed, "stream": True}
            with web.stream("POST", f"{url}/generate", json=body, timeout=300) as response:
                *parts, _ = pieces(response.iter_lines())
            return text_of(parts), parts[-1]["finish_reason"]

        def answer(seed):
            body = {"prompt": "Hello", "max_tokens": length, "seed": seed}
            (choice,) = web.post(f"{url}/generate", json=body, timeout=300).json()["choices"]
            return choice["text"], choice["finish_reason"]

        with concurrent.futures.ThreadPoolExecutor(slots + queued) as pool:
            streams = [pool.submit(stream, seed) for seed in range(slots)]
            wait_until(lambda: metric("num_requests_running") == slots)
            answers = [pool.submit(answer, seed) for seed in range(queued)]
            wait_until(lambda: metric("num_requests_waiting") == queued)
            assert metric("num_requests_running") == slots
            container.kill("SIGTERM")
            ended = [future.result() for future in streams + answers]
        assert container.wait(timeout=30)["StatusCode"] == 0
    assert {(len(text), reason) for text, reason in ended[:slots]} == {(20 * length, "length")}
    assert {(len(text), reason) for text, reason in ended[slots:]} == {(length, "length")}
    for seed, (text, _) in enumerate(ended[slots:]):  # the streams of the first seeds begin with the same text
        assert seed >= slots or ended[seed][0].startswith(text)
    assert ended[slots][0] == exact(checkpoint, "Hello", length, seed=0)


MEMORY = 640 << 20  # the minimum in deploy/README.md


def test_the_documented_memory_suffices(engine, image, tiny):
    """Requests that fill the memory for requests in progress: each gets an answer or 429, and no process is killed."""
    with started(engine, image, tiny, mem_limit=MEMORY, memswap_limit=MEMORY) as container:
        url = url_of(healthy(container))

        def status(_):
            body = {"prompt": "a" * 99_000, "max_tokens": 10}
            return web.post(f"{url}/generate", json=body, timeout=200).status_code

        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            statuses = set(pool.map(status, range(64)))
        assert statuses <= {200, 429} and 200 in statuses
        assert "died" not in container.logs().decode()
        container.stop(timeout=60)
        container.reload()
        assert (container.attrs["State"]["OOMKilled"], container.attrs["State"]["ExitCode"]) == (False, 0)


def test_too_little_memory_ends_the_container_with_137(engine, image, tiny):
    """The kernel's SIGKILL leaves no time for a message; Docker tells the reason."""
    with started(engine, image, tiny, mem_limit="64m", memswap_limit="64m") as container:
        assert container.wait(timeout=60)["StatusCode"] == 137
        container.reload()
        assert container.attrs["State"]["OOMKilled"]


CPUS = os.cpu_count() or 1
QUOTAS = {
    "no limit": ({}, CPUS),
    "--cpus 1.5": ({"nano_cpus": 1_500_000_000}, 1),
    "--cpuset-cpus 0": ({"cpuset_cpus": "0"}, 1),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_threads_follow_from_the_quota(engine, image, case):
    options, cpus = QUOTAS[case]
    look = "from service.settings import *; print(available_cpus(), read_settings([]).threads)"
    answer = engine.containers.run(image, ["-c", look], entrypoint="python", remove=True, **options)
    assert answer.decode().split() == [str(cpus), str(cpus)]


def test_traces_are_sent(engine, image, tiny):
    with contextlib.closing(Collector()) as collector:
        port = free_port()
        settings = {
            "CHARGPT_OTLP_TRACES_ENDPOINT": collector.url,
            "CHARGPT_HOST": "127.0.0.1",
            "CHARGPT_PORT": f"{port}",
        }
        with started(engine, image, tiny, environment=settings, network_mode="host") as container:
            healthy(container)
            answer = web.post(f"http://127.0.0.1:{port}/generate", json={"prompt": "a", "max_tokens": 3}).json()
            resource, _, phases = collector.request(answer["id"])
    assert resource["service.name"] == "chargpt"
    assert phases


MOMENTS = {
    "SIGTERM is caught": catches_sigterm,
    "the worker exists": lambda container: any("spawn_main" in line for line in processes(container)),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_during_startup_stops_the_container(starting, moment):
    """The service is PID 1, which ignores signals without a handler."""
    wait_until(lambda: MOMENTS[moment](starting), otherwise=lambda: starting.logs().decode())
    starting.reload()
    assert starting.health != "healthy", "startup has already finished"
    starting.stop(timeout=60)  # afterwards SIGKILL, status 137
    assert starting.wait()["StatusCode"] == 0, starting.logs().decode()
    assert "Traceback" not in starting.logs().decode()


def test_image_contains_only_the_service(engine, image):
    """Neither training nor tests."""
    looked_for = ["service/engine/engine.py", "training/loop.py", Path(__file__).relative_to(ROOT)]
    look = ["/", "-xdev", "-false", *(word for file in looked_for for word in ("-o", "-path", f"*/{file}"))]
    files = engine.containers.run(image, look, entrypoint="find", user="root", remove=True).decode().split()
    assert [Path(file).name for file in files] == ["engine.py"]


def test_image_is_as_small_as_documented(engine, image):
    assert engine.images.get(image).attrs["Size"] <= 0.9e9


def test_image_contains_the_native_engine_for_each_instruction_set(engine, image):
    """Not for the build machine's alone; and the image has what the libraries need."""
    look = (
        "import ctypes, pathlib, service.engine as e\n"
        "for path in pathlib.Path(e.__path__[0]).glob('_native_*'): print(path.name, bool(ctypes.CDLL(path)))"
    )
    lines = engine.containers.run(image, ["-c", look], entrypoint="python", remove=True).decode().splitlines()
    assert sorted(lines) == sorted(f"_native_{variant}.so True" for variant in setup.VARIANTS)


def test_the_image_installs_what_its_sbom_lists(engine, image, version, tmp_path):
    look = (
        "from importlib.metadata import distributions\n"
        "for each in distributions(path=['/venv/lib/python3.11/site-packages']): print(each.name, each.version)"
    )
    lines = engine.containers.run(image, ["-c", look], entrypoint="python", remove=True).decode().splitlines()
    installed = {re.sub(r"[-_.]+", "-", name).lower(): number for name, number in map(str.split, lines)}
    path = tmp_path / "sbom.cdx.json"
    bin = Path(sys.executable).parent
    environment = os.environ | {"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_CHARGPT": version}
    command = ["make", f"BIN={bin}", f"VENV={tmp_path}", f"SBOM={path}", "-o", f"{tmp_path}/.installed-test", "sbom"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    sbom = json.loads(path.read_text())
    listed = [sbom["metadata"]["component"], *sbom["components"]]
    assert {component["name"]: component["version"] for component in listed} == installed
    assert all(component["externalReferences"][0]["hashes"] for component in sbom["components"])


def test_the_version_is_that_of_the_build(container, version):
    assert version == VERSION or "CHARGPT_IMAGE" in os.environ
    assert web.get(f"{url_of(container)}/info").json()["versions"]["chargpt"] == version


def test_image_serves_the_bundled_checkpoint_without_a_volume(engine, image):
    files = engine.containers.run(image, ["/checkpoint"], entrypoint="ls", remove=True).decode().split()
    assert files == sorted(path.name for path in BUNDLED.iterdir())


def test_missing_checkpoint_is_reported(engine, image, tmp_path):
    volumes = {str(tmp_path): {"bind": "/checkpoint", "mode": "ro"}}
    with pytest.raises(docker.errors.ContainerError, match="/checkpoint") as caught:
        engine.containers.run(image, volumes=volumes, remove=True)
    assert caught.value.exit_status == 2


def test_the_image_has_the_command_chargpt(engine, image):
    """It serves; the rest is in the package training, which the image does not ship."""
    options = {"entrypoint": "chargpt", "remove": True, "stderr": True}
    assert b"chargpt COMMAND --help" in engine.containers.run(image, ["--help"], **options)
    assert b"--checkpoint" in engine.containers.run(image, ["serve", "--help"], **options)
    with pytest.raises(docker.errors.ContainerError, match="no training package"):
        engine.containers.run(image, ["train"], **options)
