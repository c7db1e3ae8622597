"""Models, servers and waiting shared by the tests."""

import contextlib
import os
import string
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from prometheus_client.parser import text_string_to_metric_families

from service.model.checkpoint import Checkpoint
from service.model.config import GPTConfig
from service.model.gpt import GPT
from service.model.params import SamplingParams
from service.model.tokenizer import CharTokenizer
from service.shared import REASONS
from service.text.patterns import PatternCompiler
from service.wire import Logprobs
from tests.toolbox.http import PATIENCE
from tests.toolbox.launch import Program, free_port
from tests.toolbox.needs import CORPUS as CORPUS
from tests.toolbox.needs import program
from training.run.saving import save_checkpoint

# A connection per request, as httpx.get makes, without reading the system's certificates each time (25 ms).
# "close" ends it with its answer: an idle one, httpcore may hand to one thread while it closes it for another.
web = httpx.Client(headers={"Connection": "close"}, limits=httpx.Limits(max_connections=None), timeout=PATIENCE)

VOCABULARY = sorted("\n !'.,:;?" + string.ascii_letters)

# The largest --max-tokens: a quarter of an hour for the smallest model. For requests that must still run when a test
# looks; it must abort them or let them time out.
ENDLESS = 100_000_000

# For such requests: no limit on memory by estimate, and none that a busy machine could reach.
UNBOUNDED = {"max_held_bytes": 1 << 50, "max_queue_seconds": 1000, "hang_seconds": 120}

# Limits that a slow machine must not reach; a test that needs one sets its own.
PATIENT = {"hang_seconds": 120, "max_queue_seconds": 3600, "drain_seconds": PATIENCE}

# Of a random model that takes seconds for a few hundred characters, for requests that must still run when a test looks
# and then end by themselves.
SLOW = {"n_embd": 512, "n_head": 8, "n_kv_head": 8}


def random_model(dtype: torch.dtype = torch.float32, seed: int = 0, **config: int) -> GPT:
    """A small model whose weights are large enough that texts vary and every layer matters."""
    fields = {"vocab_size": len(VOCABULARY), "block_size": 8, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 16}
    model = GPT(GPTConfig(**(fields | config)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                std = 1.5 * parameter.size(1) ** -0.5
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval().requires_grad_(False)


def overflow(model: GPT, id: int) -> None:
    """Make all logits after a character overflow float32: it alone has a value in dimension 0."""
    with torch.no_grad():
        model.embed.weight[:, 0] = 0.0
        model.embed.weight[id, 0] = model.norm.weight[0] = 10.0
        model.head.weight[:, 0] = 3e38
        for block in model.blocks:
            block.attn.proj.weight[0] = block.mlp.proj.weight[0] = 0.0


def save_random(
    folder: Path, characters: Iterable[str] = VOCABULARY, about: dict[str, object] | None = None, **options: int
) -> Checkpoint:
    """A checkpoint folder with a random model; about: what training.json says of it."""
    tokenizer = CharTokenizer(list(characters))
    model = random_model(vocab_size=tokenizer.vocab_size, **options)
    save_checkpoint(folder, model, tokenizer, {"losses": {}} | (about or {}))
    return Checkpoint.read(folder)


def exact(checkpoint: Checkpoint, prompt: str, max_tokens: int, **params: Any) -> str:
    """The text that a seed gives, by definition."""
    ids, model = checkpoint.tokenizer.encode(prompt), checkpoint.load_model(dtype=torch.float64)
    return checkpoint.tokenizer.decode(model.generate(ids, max_tokens, SamplingParams(**params)))


def call(arguments: Iterable[object]) -> int | str | None:
    """Runs `python -m training` in this process; returns the exit status."""
    from training.__main__ import main

    before, sys.argv = sys.argv, ["training", *map(str, arguments)]
    try:
        return main()
    except SystemExit as stop:
        return stop.code
    finally:
        sys.argv = before


def refusal(*flags: object) -> str:
    """What `python -m service` says on stderr with flags that it must reject."""
    command = [sys.executable, "-m", "service", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (2, ""), done
    return done.stderr


class RunningServer(Program):
    """`python -m service`, or a program of the test's own that takes its flags, on a free port."""

    def __init__(self, checkpoint: Path, program: tuple[str, ...] = ("-m", "service"), **settings: Any):
        port = settings.setdefault("port", free_port())
        settings = {"checkpoint": checkpoint, "threads": 1, "max_tokens": ENDLESS} | UNBOUNDED | PATIENT | settings
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        super().__init__([sys.executable, *program, *flags], port, "/readyz", start_new_session=True)
        self.client = web  # with TLS: one that trusts the certificate
        if "tls_certificate" in settings:
            self.url = f"https://127.0.0.1:{port}"

    def metrics(self, prefix: str = "") -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Samples as prometheus_client parses them: (name, labels without model_name) -> value.

        prefix: of the names; parsing all of them takes 10 ms.
        """
        samples, lines = {}, self.client.get(f"{self.url}/metrics").text.splitlines()
        page = "\n".join(line for line in lines if line.startswith(prefix))
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = frozenset(item for item in sample.labels.items() if item[0] != "model_name")
                samples[sample.name, labels] = sample.value
        return samples

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics(name).get((name, frozenset(labels.items())), 0.0)

    def endings(self) -> tuple[float, dict[str, float]]:
        """How many sequences were accepted, and how many ended for each reason."""
        metrics, name = self.metrics(), "chargpt_request_success_total"
        ended = {reason: metrics[name, frozenset({("finished_reason", reason)})] for reason in REASONS}
        return metrics["chargpt_requests_accepted_total", frozenset()], ended

    def wait_until_all_ended(self) -> None:
        """Each accepted sequence, once."""

        def have_ended() -> bool:
            accepted, ended = self.endings()
            return accepted == sum(ended.values())

        wait_until(have_ended, otherwise=lambda: self.endings())

    def wait_until_metric(self, name: str, value: float, timeout: float = PATIENCE, **labels: str) -> None:
        wait_until(lambda: self.metric(name, **labels) == value, timeout, f"{name} did not become {value}")

    def stop(self, timeout: float = PATIENCE) -> int:
        """Sends SIGTERM, waits until every process has ended and returns the exit status."""
        self.process.terminate()
        status = self.process.wait(timeout)
        self.wait_until_gone()
        return status

    def wait_until_gone(self) -> None:
        """Waits until no process of the server's session is left, orphans included."""
        wait_until(lambda: not self._left(), otherwise=lambda: self._left())

    def _left(self) -> list[psutil.Process]:
        left = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                is_own = os.getsid(process.pid) == self.process.pid
                if is_own and not (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() == 1):
                    left.append(process)  # a zombie with threads holds files
        return left

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        super().close()


@contextlib.contextmanager
def serving(checkpoint: Path, program: tuple[str, ...] = ("-m", "service"), **settings: Any) -> Iterator[RunningServer]:
    """A RunningServer that is ready; at the end it is killed."""
    with RunningServer(checkpoint, program, **settings) as server:
        server.wait_until_ready()
        yield server


def lasting(checkpoint: Path, program: tuple[str, ...] = ("-m", "service"), **settings: Any) -> Iterator[RunningServer]:
    """For the fixture of a server that several tests use; at the end it stops as it should."""
    with serving(checkpoint, program, **settings) as server:
        yield server
        assert server.stop() == 0, server.output()
        assert "Traceback" not in server.output()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key: ca.pem, key.pem."""
    certificate, key = folder / "ca.pem", folder / "key.pem"
    command = [program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-noenc", "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def timed_out_stream(
    server: RunningServer, path: str, body: dict[str, object], seconds: Iterable[float] = (0.1, 1.0, 10.0, 100.0)
) -> httpx.Response:
    """A stream, already read, that reached its time limit after it had begun: on a slow machine, with more time."""
    for limit in seconds:
        body = body | {"stream": True, "timeout_seconds": limit}
        response = web.post(server.url + path, json=body)
        if response.status_code == 200:
            return response
        assert response.status_code == 504, response.text  # before it began
    raise AssertionError("it did not begin")


def http_processes(server: RunningServer) -> list[psutil.Process]:
    """In order of their numbers."""
    found = {}
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
            if (name := child.name()).startswith("http-"):
                found[name] = child
    return [found[name] for name in sorted(found)]


def workers(server: RunningServer) -> dict[str, psutil.Process]:
    """The inference processes, by name."""
    found = {}
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if (name := child.name()).startswith("worker-") and child.status() != psutil.STATUS_ZOMBIE:
                found[name] = child
    return found


def logprobs_of(values: Iterable[float], top_ids: Iterable[int] = (), top_values: Iterable[float] = ()) -> Logprobs:
    return Logprobs(bytearray(array("d", values)), bytearray(array("I", top_ids)), bytearray(array("d", top_values)))


def wait_until(condition: Callable[[], Any], timeout: float = PATIENCE, otherwise: object = "timed out") -> Any:
    """Polls `condition` until it returns a true value, and returns that. The timeout is only a safety net.

    otherwise: the assertion message, or a function that returns it.
    """
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, otherwise() if callable(otherwise) else otherwise
        time.sleep(0.05)
    return found


async def compiled(cache, client, regex, characters="abc"):
    """A regex of a client, compiled by a cache of the HTTP process."""
    work, found = PatternCompiler(characters, 1000).compile("regex", regex), None
    try:
        while True:
            found = await cache.find(client, work.send(found))
    except StopIteration as end:
        return end.value
