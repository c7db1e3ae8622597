"""What a further checkpoint costs, and what clients notice when one is replaced.

    python -m tests.bench.checkpoints [--add 8] [--replace 10] [--clients 8]

Serves a folder with the bundled checkpoint, under a load of streams whose texts are compared with that of their seed.
Adds copies of it with SIGHUP, one after the other, then replaces the one under load. Writes out/bench/checkpoints.json.
"""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from service.model.checkpoint import Checkpoint, save_checkpoint
from service.settings import BUNDLED
from tests.bench.command import build_parser, context, integer
from tests.helpers import RunningServer, http_processes, wait_until
from tests.toolbox.figures import write_figures
from tests.toolbox.http import events

CHARACTERS, SEEDS = 200, 16


def save_copy(folder: Path, number: int) -> None:
    """The bundled checkpoint with another digest: `number` is in its training.json."""
    bundled = Checkpoint.read(BUNDLED)
    save_checkpoint(
        folder, bundled.load_model(), bundled.tokenizer, bundled.training | {"copy": number}, dtype="float16"
    )


class Load:
    """Clients that stream the texts of SEEDS seeds from one model, over and over."""

    def __init__(self, url: str, model: str, clients: int):
        self.url, self.model = url, model
        self.num_requests, self.failures = 0, list[str]()
        self.gaps: list[tuple[float, float]] = []  # (when, seconds) between two events of a stream
        self._texts: dict[int, str] = {}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=[i], daemon=True) for i in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, client: int) -> None:
        with httpx.Client(timeout=30) as connection:
            for seed in itertools.cycle(range(client, client + SEEDS)):
                if self._stop.is_set():
                    return
                self.num_requests += 1
                try:
                    text = self._stream(connection, seed % SEEDS)
                    if self._texts.setdefault(seed % SEEDS, text) != text or len(text) != CHARACTERS:
                        self.failures.append(f"seed {seed % SEEDS}: another text")
                except (httpx.HTTPError, ValueError) as error:
                    self.failures.append(repr(error))

    def _stream(self, connection: httpx.Client, seed: int) -> str:
        body = {"model": self.model, "prompt": "ROMEO:", "max_tokens": CHARACTERS, "seed": seed, "stream": True}
        text, last = "", None
        with connection.stream("POST", f"{self.url}/generate", json=body | {"stream_interval": 0}) as answer:
            answer.raise_for_status()
            for event in events(answer):
                if event == "[DONE]":
                    continue
                piece = json.loads(event)
                if "error" in piece:
                    raise ValueError(event)
                text += piece.get("text", "")  # the last has none
                now = time.monotonic()
                if last is not None:
                    self.gaps.append((now, now - last))
                last = now
        return text


def megabytes(server: RunningServer) -> dict[str, float]:
    """Private memory of the worker and of the HTTP process."""
    (http,) = http_processes(server)
    return {
        name: process.memory_full_info().uss / 1e6 for name, process in (("worker", server.worker()), ("http", http))
    }


def reload(server: RunningServer, client: httpx.Client, has_come: Any) -> float:
    """Seconds from SIGHUP until `has_come(client)`."""
    began = time.monotonic()
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: has_come(client))
    return time.monotonic() - began


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(add: int, replace: int, clients: int) -> dict[str, Any]:
    about = context("tests.bench.checkpoints", "torch", "litserve")  # before there is any load
    folder = Path(tempfile.mkdtemp(prefix="chargpt-bench-"))
    save_copy(folder / "model-0", 0)
    try:
        with RunningServer(folder, log_level="warning") as server, httpx.Client() as client:
            server.wait_until_ready()
            with Load(server.url, "model-0", clients) as load:
                time.sleep(5)
                memory, seconds = [megabytes(server)], []
                quiet = [gap for _, gap in load.gaps]
                for i in range(1, add + 1):
                    save_copy(folder / f"model-{i}", i)

                    def is_listed(client: httpx.Client, name: str = f"model-{i}") -> bool:
                        return name in [card["id"] for card in client.get(f"{server.url}/v1/models").json()["data"]]

                    seconds.append(reload(server, client, is_listed))
                    time.sleep(1)
                    memory.append(megabytes(server))
                    print(f"added {i}: {seconds[-1]:.2f} s, worker {memory[-1]['worker']:.0f} MB", flush=True)
                replaced, windows = [], []
                for i in range(replace):
                    save_copy(folder / "model-0", 1000 + i)
                    digest = Checkpoint.read(folder / "model-0").digest

                    def is_served(client: httpx.Client, digest: str = digest) -> bool:
                        info = client.get(f"{server.url}/info", params={"model": "model-0"}).json()
                        return bool(info["model"]["checkpoint_sha256"] == digest)

                    began = time.monotonic()
                    replaced.append(reload(server, client, is_served))
                    time.sleep(1)
                    windows.append((began, time.monotonic()))
                    print(f"replaced {i + 1}: {replaced[-1]:.2f} s", flush=True)
            assert server.stop() == 0
            during = [gap for at, gap in load.gaps if any(a <= at <= b for a, b in windows)]
            by_time = {"without": quiet, "while_replacing": during}
    finally:
        shutil.rmtree(folder)
    return about | {
        "clients": clients,
        "requests": load.num_requests,
        "failed": load.failures,
        "seconds_to_add": spread(seconds),
        "seconds_to_replace": spread(replaced),
        "megabytes_per_checkpoint": {
            name: (memory[-1][name] - memory[0][name]) / add for name in ("worker", "http")
        },
        "megabytes_of_files": sum(path.stat().st_size for path in BUNDLED.iterdir()) / 1e6,
        "longest_gap_seconds": {name: max(gaps) for name, gaps in by_time.items()},
        "gap_seconds_p999": {name: statistics.quantiles(gaps, n=1000)[-1] for name, gaps in by_time.items()},
        "memory": memory,
    }  # fmt: skip


def main() -> None:
    parser = build_parser("tests.bench.checkpoints", __doc__, "out/bench")
    parser.add_argument("--add", type=integer(1, 100), default=8, help="checkpoints to add (default: %(default)s)")
    parser.add_argument(
        "--replace",
        type=integer(1, 1000),
        default=10,
        help="times to replace the one under load (default: %(default)s)",
    )
    parser.add_argument("--clients", type=integer(1, 1000), default=8, help="streams at once (default: %(default)s)")
    given = parser.parse_args()
    results = measure(given.add, given.replace, given.clients)
    given.out.mkdir(parents=True, exist_ok=True)
    write_figures(given.out / "checkpoints.json", results)
    print(json.dumps({name: value for name, value in results.items() if name != "memory"}, indent=1))


if __name__ == "__main__":
    main()
