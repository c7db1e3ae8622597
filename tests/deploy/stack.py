"""For the tests of compose.yaml and stack.yaml: images, and load whose answers are checked against the reference."""

from __future__ import annotations

import fcntl
import functools
import itertools
import json
import os
import re
import secrets
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

from service.engine.backends import open_runner
from service.engine.engine import Engine
from service.model.checkpoint import Checkpoint
from service.model.params import SamplingParams
from service.wire import Submit
from tests.helpers import wait_until
from tests.toolbox import load
from tests.toolbox.http import post

ROOT = Path(__file__).parents[2]
DEPLOY, STAND_INS = ROOT / "deploy", Path(__file__).parent / "standins.Dockerfile"
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


def query(prometheus: Any, expression: str) -> list[str]:
    """The values that the Prometheus of a container has now."""
    command = ["promtool", "query", "instant", "http://127.0.0.1:9090", expression]
    return sorted(re.findall(r"=> (\S+) @", prometheus.exec_run(command).output.decode()))


@functools.cache
def references(folder: Path, prompt: str, seeds: Sequence[int], length: int) -> list[str]:
    """The texts of seeds by this process's engine, in float32 as the images' is; of a folder that does not change."""
    checkpoint = Checkpoint.read(folder)
    ids = checkpoint.tokenizer.encode(prompt)
    submits = [Submit(number, ids, length, SamplingParams(seed=seed)) for number, seed in enumerate(seeds)]
    return list(map(checkpoint.tokenizer.decode, Engine(open_runner(checkpoint)).generate(submits)))


class Sent(NamedTuple):
    """A request and how it ended; times are time.time()."""

    id: str
    started: float
    ended: float
    kind: str
    failure: str | None
    checkpoint: str | None


class Load:
    """Clients that ask for short and long streams and whole answers, each one after another, until the end.

    checkpoints: those of which each answer must be one. A request is due every INTERVAL seconds, as the tests would
    otherwise wait for a busy machine.
    """

    INTERVAL = 0.2

    PROMPT, SEEDS = "Hello", range(3)
    KINDS = {"short stream": (60, True), "whole": (500, False), "long stream": (3000, True)}  # (max_tokens, stream)

    def __init__(self, url: str, checkpoints: Mapping[str, Checkpoint], clients: int = 6):
        self.port, self.clients, self._name = int(url.rpartition(":")[2]), clients, secrets.token_hex(4)
        self._texts = {name: references(it.path, self.PROMPT, self.SEEDS, 3000) for name, it in checkpoints.items()}
        self._replies: list[load.Reply] = []
        self._sent: dict[str, Sent] = {}
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        # Connections stay open, as most clients keep them: a stale one is a failure here.
        options = {"connections": self.clients, "keep": True, "accepts": None, "patience": 60, "replies": self._replies}
        self._running = ThreadPoolExecutor(1).submit(load.run, self.port, self._requests(), **options)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._running.result()

    def _requests(self) -> Iterator[load.Due]:
        works = itertools.cycle(itertools.product(self.SEEDS, self.KINDS))
        for number, (seed, kind) in enumerate(works):
            if self._stop.is_set():
                return
            id, (length, stream) = f"{self._name}-{number}", self.KINDS[kind]
            body = {"prompt": self.PROMPT, "max_tokens": length, "seed": seed, "stream": stream}
            due = max(0, number + 1 - self.clients) * self.INTERVAL  # haproxy waits 10 s for the first on a connection
            yield due, post("/generate", body, X_Request_Id=id), (id, kind, seed)

    @property
    def sent(self) -> list[Sent]:
        """What has ended."""
        since = time.time() - time.monotonic()
        for reply in self._replies[:]:
            id, kind, seed = reply.asked
            if id not in self._sent and reply.ended_at is not None:
                judged = self._judge(reply, self.KINDS[kind][0], seed)
                self._sent[id] = Sent(id, reply.began_at + since, reply.ended_at + since, kind, *judged)
        return list(self._sent.values())

    def wait_for(self, count: int) -> None:
        """Waits until `count` more requests of each kind have been answered."""

        def answered() -> Counter[str]:
            return Counter(sent.kind for sent in self.sent if sent.failure is None)

        before = answered()
        wait_until(lambda: all(answered()[kind] >= before[kind] + count for kind in self.KINDS), otherwise=answered)

    def failed(self) -> list[Sent]:
        return [sent for sent in self.sent if sent.failure is not None]

    def _judge(self, reply: load.Reply, length: int, seed: int) -> tuple[str | None, str | None]:
        """What is wrong with an answer, or its checkpoint."""
        if (ending := reply.ending) != "complete":
            return f"{ending}: status {reply.status}, {reply.body.decode()[-500:]}", None
        names = [name for name, texts in self._texts.items() if texts[seed][:length] == reply.text]
        return (None, names[0]) if names else (f"wrong: {reply.text!r}", None)
