"""The image: built from the Dockerfile, run with minimal rights, queried over HTTP, stopped by SIGTERM.

DOCKER_HOST selects the engine, as for Docker's own client.
"""

import contextlib
import itertools
import os
import re
import signal
import subprocess
from pathlib import Path

import docker
import openai
import pytest
import torch
from helpers import SLOW, save_random, wait_until, web

import setup
from service.model.params import SamplingParams
from service.settings import BUNDLED
from tests.toolbox.http import pieces, text_of

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.container, pytest.mark.needs("docker"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engine():
    """A client of the Docker engine."""
    with contextlib.closing(docker.from_env()) as client:
        yield client


@pytest.fixture(scope="module")
def image(engine):
    tag = "chargpt:test"
    command = ["docker", "build", "--progress", "plain", "--tag", tag]
    wheels = os.environ.get("PIP_FIND_LINKS")
    if wheels and Path(wheels).is_dir():  # installs torch from local wheels
        command += ["--build-context", f"wheels={wheels}", "--build-arg", "TORCH_INDEX_URL="]
    subprocess.run([*command, ROOT], check=True)
    return tag


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("container") / "checkpoint", **SLOW)


@pytest.fixture
def starting(engine, image, checkpoint):
    """A container right after its start."""
    container = engine.containers.run(
        image,
        detach=True,
        read_only=True,
        tmpfs={"/tmp": ""},
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        environment={"CHARGPT_THREADS": "1"},  # as in the other tests
        volumes={str(checkpoint.path): {"bind": "/checkpoint", "mode": "ro"}},
        ports={"8000/tcp": ("127.0.0.1", None)},
    )
    yield container
    container.remove(force=True)


@pytest.fixture
def container(starting):
    """A healthy container."""

    def is_healthy():
        starting.reload()
        assert starting.status in ("created", "running"), starting.logs().decode()
        return starting.health == "healthy"

    wait_until(is_healthy, timeout=120, otherwise=lambda: starting.logs().decode())
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
    assert container.exec_run("touch /venv/file").exit_code != 0


def test_running_stream_completes_after_sigterm(container, checkpoint):
    url = url_of(container)
    body = {"prompt": "Hello", "max_tokens": 2000, "seed": 1, "stream": True}
    with web.stream("POST", f"{url}/generate", json=body, timeout=60) as response:
        lines = response.iter_lines()
        first = [next(lines)]
        container.kill("SIGTERM")  # like `docker stop` without the SIGKILL
        wait_until(lambda: web.get(f"{url}/readyz").status_code == 503)  # draining
        refused = web.post(f"{url}/generate", json=body)
        *parts, _ = pieces(itertools.chain(first, lines))
    assert refused.status_code == 503
    text = text_of(parts)
    assert (len(text), parts[-1]["finish_reason"]) == (2000, "length")
    assert text.startswith(exact(checkpoint, "Hello", 200, seed=1))
    assert container.wait(timeout=30)["StatusCode"] == 0


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
