"""The image: built from the Dockerfile, run with minimal rights, queried over HTTP, stopped by SIGTERM.

DOCKER_HOST selects the engine, as for Docker's own client; CHARGPT_IMAGE an image that exists already.
"""

import concurrent.futures
import contextlib
import errno
import json
import os
import socket
import sys
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

import setup
from service.settings import BUNDLED
from tests.deploy.stack import ROOT, build, references, run
from tests.helpers import PATIENCE, VOCABULARY, wait_until, web

MEMORY = 640 << 20  # the minimum in deploy/README.md

pytestmark = [pytest.mark.container, pytest.mark.needs("docker"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def image():
    return os.environ.get("CHARGPT_IMAGE") or build("chargpt:test", ROOT, "--build-arg", "VERSION=1.2.3")


@pytest.fixture(scope="module")
def version(engine, image):
    return engine.images.get(image).labels["org.opencontainers.image.version"]


@contextlib.contextmanager
def started(engine, image, checkpoint, **options):
    """A container right after its start: a read-only root, no tmpfs, no capabilities; `options` are Docker's."""
    options["security_opt"] = ["no-new-privileges", *options.get("security_opt", [])]
    options |= {"read_only": True, "cap_drop": ["ALL"], "detach": True}
    options["environment"] = {"CHARGPT_THREADS": "1"} | options.get("environment", {})
    options["ports"] = {"8000/tcp": ("127.0.0.1", None)}
    container = engine.containers.run(image, volumes=[f"{checkpoint.path}:/checkpoint:ro"], **options)
    try:
        yield container
    finally:
        container.remove(force=True)


def healthy(container):
    """The URL of a container, once it is healthy."""
    wait_until(lambda: container.reload() or container.health == "healthy", otherwise=lambda: container.logs().decode())
    return f"http://127.0.0.1:{container.ports['8000/tcp'][0]['HostPort']}"


def inside(engine, image, script, **options):
    """Lines that a script of Python prints in a container of the image."""
    output = engine.containers.run(image, ["-c", script], entrypoint="python", remove=True, **options)
    return output.decode().splitlines()


def test_container_answers_with_the_text_of_the_seed_and_has_no_rights(engine, image, slow, version):
    with started(engine, image, slow) as container:
        url, prompts = healthy(container), ["To be", "or not"]
        body = {"model": "chargpt", "prompt": prompts, "max_tokens": 100, "seed": 3}
        choices = web.post(f"{url}/v1/completions", json=body).json()["choices"]
        assert [choice["text"] for choice in choices] == [references(slow.path, it, (3,), 100)[0] for it in prompts]
        info = web.get(f"{url}/info").json()
        assert info["backend"] == "native" and info["versions"]["chargpt"] == version != "0.0"
        assert info["versions"]["torch"] == "0.0"  # not installed
        assert web.post(f"{url}/v1/attention", json={"text": "To be"}).status_code == 200
        assert container.exec_run("id -u").output == b"10001\n"
        assert container.exec_run("touch /tmp/file").exit_code == 1  # it runs without any writable folder


def refusing(*families):
    """A profile of seccomp under which the kernel does not know these families."""
    fails = {"names": ["socket"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EAFNOSUPPORT}
    rules = [fails | {"args": [{"index": 0, "value": family, "op": "SCMP_CMP_EQ"}]} for family in families]
    return f"seccomp={json.dumps({'defaultAction': 'SCMP_ACT_ALLOW', 'syscalls': rules})}"


IPV6 = "net.ipv6.conf.all.disable_ipv6"


@pytest.mark.parametrize(
    ("options", "addresses"),
    [
        ({"sysctls": {IPV6: "0"}}, ["127.0.0.1", "::1"]),
        ({"sysctls": {IPV6: "0", "net.ipv6.bindv6only": "1"}}, ["127.0.0.1", "::1"]),
        ({"sysctls": {IPV6: "1"}}, ["127.0.0.1"]),
        ({"security_opt": [refusing(socket.AF_INET6)]}, ["127.0.0.1"]),
    ],
    ids=["with IPv6", "apart from IPv4", "switched off", "not in the kernel"],
)
def test_a_container_serves_every_family_that_it_has(engine, image, checkpoint, options, addresses):
    look = "import socket, sys; [socket.create_connection((it, 8000), 5).close() for it in sys.argv[1:]]"
    with started(engine, image, checkpoint, **options) as container:
        url = healthy(container)
        done = container.exec_run(["python", "-c", look, *addresses])
        assert done.exit_code == 0, done.output.decode()
        assert web.get(f"{url}/readyz").status_code == 200  # through the published port


def test_a_folder_of_path_that_may_not_be_entered_and_no_user_stop_nothing(engine, image, checkpoint):
    """As after sudo with root's PATH; the number has no line in /etc/passwd."""
    path = "/root:/venv/bin:/usr/local/bin:/usr/bin:/bin"
    options = {"user": "54321", "environment": {"PATH": path, "HOME": ""}}
    with started(engine, image, checkpoint, **options) as container:
        assert web.get(f"{healthy(container)}/readyz").status_code == 200


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--backend", "torch"], "backend torch needs torch, which is not installed: install the extra [torch]"),
        (["--accelerator", "cuda"], "--accelerator cuda: torch is not installed"),
    ],
)
def test_what_needs_torch_says_so(engine, image, flags, message):
    container = engine.containers.run(image, flags, detach=True)
    try:
        assert container.wait(timeout=PATIENCE)["StatusCode"] == 2
        log = container.logs().decode()
        assert message in log and "Traceback" not in log
    finally:
        container.remove(force=True)


def test_the_documented_memory_suffices_and_too_little_ends_with_137(engine, image, checkpoint):
    """Requests that fill the memory for requests in progress, the largest answers among them: each gets an answer or
    429, and no process is killed."""
    with started(engine, image, checkpoint, mem_limit=MEMORY, memswap_limit=MEMORY) as container:
        url = healthy(container)

        def status(body):
            return web.post(f"{url}/generate", json=body).status_code

        prompts = [{"prompt": "a" * 99_000, "max_tokens": 10}] * 64
        answers = [{"prompt": "a", "max_tokens": 1200, "n": 64, "logprobs": len(VOCABULARY)}] * 2  # of 60 MB
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            for bodies in (prompts, answers):
                statuses = set(pool.map(status, bodies))
                assert statuses <= {200, 429} and 200 in statuses
        assert status(answers[0] | {"max_tokens": 4000}) == 400
        assert "died" not in container.logs().decode()
    with started(engine, image, checkpoint, mem_limit="64m", memswap_limit="64m") as container:
        assert container.wait(timeout=PATIENCE)["StatusCode"] == 137
        container.reload()
        assert container.attrs["State"]["OOMKilled"]


def test_sigterm_during_startup_stops_the_container(engine, image, slow):
    """The service is PID 1, which ignores signals without a handler."""
    with started(engine, image, slow) as container:
        wait_until(
            lambda: "worker-0" in str(container.top(ps_args="-eo pid,comm")),
            otherwise=lambda: container.logs().decode(),
        )
        container.stop(timeout=60)  # afterwards SIGKILL, status 137
        assert container.wait()["StatusCode"] == 0, container.logs().decode()
        assert "Traceback" not in container.logs().decode()


def test_image_has_the_service_and_its_checkpoint_alone_and_is_as_small_as_documented(engine, image):
    """Neither training nor tests; the native engine for every instruction set, and what its libraries need."""
    look = (
        "import ctypes, importlib.util as u, os, pathlib, service.engine as e\n"
        "print(*(name for name in ('service', 'training', 'tests') if u.find_spec(name)))\n"
        "print(*sorted(os.listdir('/checkpoint')))\n"
        "print(*sorted(path.stem for path in pathlib.Path(e.__path__[0]).glob('_native_*') if ctypes.CDLL(path)))"
    )
    assert inside(engine, image, look) == [
        "service",
        " ".join(sorted(path.name for path in BUNDLED.iterdir())),
        " ".join(sorted(f"_native_{variant}" for variant in setup.VARIANTS[setup.SOURCE])),
    ]
    assert engine.images.get(image).attrs["Size"] <= 0.34e9
    assert b"--checkpoint" in engine.containers.run(image, ["serve", "--help"], entrypoint="chargpt", remove=True)


def test_no_program_of_the_image_installs_packages_or_has_other_rights_than_its_user(engine, image):
    look = (
        "import os, subprocess\n"
        "folders = [it for it in os.scandir('/') if it.name not in ('proc', 'sys', 'dev')]\n"
        "files = [os.path.join(at, name) for it in folders for at, _, names in os.walk(it) for name in names]\n"
        "print(*(it for it in files if not os.path.islink(it) and os.lstat(it).st_mode & 0o6000))\n"
        "pythons = ('/venv/bin/python', '/usr/local/bin/python3')\n"
        "print(*(it for it in pythons if not subprocess.run([it, '-m', 'pip'], capture_output=True).returncode))\n"
        "print(*sorted(os.listdir('/venv/bin')))"
    )
    found = inside(engine, image, look, user="root")
    assert found == ["", "", "chargpt python python3 python3.11"]


def test_the_image_installs_what_its_sbom_lists(engine, image, version, tmp_path):
    look = "from importlib.metadata import *; [print(each.name, each.version) for each in distributions()]"
    installed = {canonicalize_name(name): number for name, number in map(str.split, inside(engine, image, look))}
    words = f"BIN={Path(sys.executable).parent} VENV={tmp_path} SBOM={tmp_path}/sbom -o {tmp_path}/.installed-test sbom"
    run("make", *words.split(), cwd=ROOT, env=os.environ | {"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_CHARGPT": version})
    sbom = json.loads((tmp_path / "sbom").read_text())
    listed = [sbom["metadata"]["component"], *sbom["components"]]
    assert {component["name"]: component["version"] for component in listed} == installed
