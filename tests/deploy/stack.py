"""For the tests of compose.yaml and stack.yaml: images, and load whose answers are checked against the reference."""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import json
import os
import secrets
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import httpx

from service.engine.engine import Engine
from service.engine.runner import open_runner
from service.model.checkpoint import Checkpoint
from service.model.params import SamplingParams
from service.wire import Submit
from tests.helpers import wait_until
from tests.toolbox.http import DONE, events, text_of

ROOT = Path(__file__).parents[2]
DEPLOY, STAND_INS = ROOT / "deploy", Path(__file__).parent / "standins.Dockerfile"
FIRST_CHARACTERS = 100  # compared with the reference
SIZE = {"n_embd": 256, "n_head": 8, "n_kv_head": 8}  # a long stream takes a second or two


def run(*command: object, **options: Any) -> str:
    """Runs a program that must succeed; returns its output."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}"
    return done.stdout


def build(tag: str, folder: object = ROOT, *options: object, **given: Any) -> str:
    """Builds an image, from local wheels where there are some; returns its tag."""
    command = ["docker", "build", "--progress", "plain", "--tag", tag, *options]
    wheels = os.environ.get("PIP_FIND_LINKS")
    if wheels and Path(wheels).is_dir():  # installs torch from local wheels
        command += ["--build-context", f"wheels={wheels}", "--build-arg", "TORCH_INDEX_URL="]
    # Test files run at the same time: the first build fills the cache for the others.
    with open(Path(tempfile.gettempdir()) / "chargpt-test-build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run(*command, folder, **given)
    return tag


def build_with(checkpoint: Checkpoint, tag: str) -> str:
    """The image with that checkpoint built in."""
    return build(tag, ROOT, "--build-context", f"checkpoint={checkpoint.path}")


def build_stand_ins() -> dict[str, str]:
    """The variables with which compose.yaml and stack.yaml take images from Debian's packages."""
    text, programs = STAND_INS.read_text(), ("haproxy", "prometheus", "alertmanager")
    return {
        f"{program.upper()}_IMAGE": build(f"chargpt-stand-in:{program}", "-", "--target", program, input=text)
        for program in programs
    }


def answered_by(container: Any) -> dict[str, dict[str, Any]]:
    """A replica's access log by request id."""
    lines = [json.loads(line) for line in container.logs().decode().splitlines()]
    return {line["request_id"]: line for line in lines if line["logger"] == "service.access"}


def reference(checkpoint: Checkpoint, prompt: str, seed: int) -> str:
    """The first characters of a seed's text by this process's engine, in float32 as the images' is."""
    submit = Submit(0, checkpoint.tokenizer.encode(prompt), FIRST_CHARACTERS, SamplingParams(seed=seed))
    (ids,) = Engine(open_runner(checkpoint)).generate([submit])
    return checkpoint.tokenizer.decode(ids)


@dataclasses.dataclass
class Sent:
    """A request and how it ended."""

    id: str
    kind: str
    started: float  # time.time()
    ended: float = 0.0
    failure: str | None = None
    checkpoint: str | None = None


class Load:
    """Clients that send short and long streams and whole answers, each client one after another, until the end.

    checkpoints: those of which each answer must be one.
    """

    PROMPT, SEEDS = "Hello", range(3)
    KINDS = {  # name: (max_tokens, stream)
        "short stream": (60, True),
        "whole": (500, False),
        "long stream": (3000, True),
    }

    def __init__(self, url: str, checkpoints: Mapping[str, Checkpoint], clients: int = 6):
        self.url, self.clients = url, clients
        self.sent: list[Sent] = []
        self._name = secrets.token_hex(4)
        self._texts: dict[tuple[object, ...], str] = {}  # of a checkpoint, seed and kind, as first answered
        self._expected = {
            (name, seed): reference(checkpoint, self.PROMPT, seed)
            for name, checkpoint in checkpoints.items()
            for seed in self.SEEDS
        }
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(clients)

    def __enter__(self) -> Self:
        self._running = [self._pool.submit(self._client, number) for number in range(self.clients)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for client in self._running:
            client.result()

    def wait_for(self, count: int) -> None:
        """Waits until `count` more requests of each kind have been answered."""

        def answered() -> Counter[str]:
            return Counter(sent.kind for sent in self.sent[:] if sent.failure is None)

        before = answered()
        wait_until(lambda: all(answered()[kind] >= before[kind] + count for kind in self.KINDS), 120, answered)

    def failed(self) -> list[Sent]:
        return [sent for sent in self.sent if sent.failure is not None]

    def _client(self, number: int) -> None:
        # Connections stay open, as most clients keep them: a stale one is a failure here.
        with httpx.Client(timeout=60) as client:
            for index, kind in enumerate(itertools.cycle(self.KINDS)):
                if self._stop.is_set():
                    return
                sent = Sent(f"{self._name}-{number}-{index}", kind, time.time())
                seed = (number + index // len(self.KINDS)) % len(self.SEEDS)
                try:
                    sent.failure = self._send(client, sent, seed)
                except httpx.HTTPError as error:
                    sent.failure = f"{'hang' if isinstance(error, httpx.TimeoutException) else 'broken'}: {error!r}"
                sent.ended = time.time()
                self.sent.append(sent)
                if sent.failure is not None:
                    time.sleep(0.2)  # as a client backs off

    def _send(self, client: httpx.Client, sent: Sent, seed: int) -> str | None:
        """Returns what was wrong with the answer."""
        max_tokens, stream = self.KINDS[sent.kind]
        body = {"prompt": self.PROMPT, "max_tokens": max_tokens, "seed": seed, "stream": stream}
        headers = {"X-Request-Id": sent.id}
        with client.stream("POST", f"{self.url}/generate", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                return f"status {answer.status_code}: {answer.read().decode()}"
            if stream:
                *parts, last = events(answer)
                if last != DONE:
                    return f"error event: {last}"
                text = text_of(map(json.loads, parts))
            else:
                answer.read()
                text = answer.json()["choices"][0]["text"]
        if len(text) != max_tokens:
            return f"wrong: {len(text)} characters instead of {max_tokens}"
        first = text[:FIRST_CHARACTERS]
        names = {name for (name, of), whole in self._expected.items() if of == seed and whole.startswith(first)}
        if not names:
            return f"wrong: {text!r}"
        (sent.checkpoint,) = names
        same = self._texts.setdefault((sent.checkpoint, seed, sent.kind), text)
        return None if same == text else f"wrong: {text!r} instead of {same!r}"
