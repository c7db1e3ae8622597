"""What a further checkpoint costs, and what clients notice when one is replaced.

    python -m tests.bench.checkpoints [--add 8] [--replace 10] [--clients 8]

Serves a folder with the bundled checkpoint, under a load of streams whose texts are compared with that of their seed.
Adds copies of it with SIGHUP, one after the other, then replaces the one under load. Writes out/bench/checkpoints.json.
"""

from __future__ import annotations

import itertools
import json
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from service.model.checkpoint import Checkpoint
from service.settings import BUNDLED
from tests.bench import peers
from tests.bench.command import build_parser, context
from tests.helpers import RunningServer, http_processes, serving, wait_until, web
from tests.toolbox import load
from tests.toolbox.figures import quantile, write_figures
from training.saving import save_checkpoint

CHARACTERS, SEEDS = 200, 16
SETTLING = 1.0  # seconds after a change


def save_copy(folder: Path, number: int) -> str:
    """The bundled checkpoint with another digest, which is returned: `number` is in its training.json."""
    bundled = Checkpoint.read(BUNDLED)
    about = bundled.training | {"copy": number}
    save_checkpoint(folder, bundled.load_model(), bundled.tokenizer, about, dtype="float16")
    return Checkpoint.read(folder).digest


def megabytes(server: RunningServer) -> dict[str, float]:
    """Private memory of the worker and of the HTTP process."""
    (http,) = http_processes(server)
    both = (("worker", server.worker()), ("http", http))
    return {name: process.memory_full_info().uss / 1e6 for name, process in both}


def reload(server: RunningServer, model: str, field: str, value: str) -> tuple[float, float]:
    """When SIGHUP was sent, and when /info showed that field of the model."""
    began = time.monotonic()
    server.process.send_signal(signal.SIGHUP)

    def has_come() -> bool:
        answer = web.get(f"{server.url}/info", params={"model": model})
        return answer.status_code == 200 and answer.json()["model"][field] == value

    wait_until(has_come)
    ended = time.monotonic()
    time.sleep(SETTLING)
    return began, ended


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def wrong_texts(replies: list[load.Reply]) -> list[str]:
    """Streams of a seed whose text is another one than its first."""
    system, texts = peers.System("ours", ""), dict[int, str]()
    found = []
    for reply in replies:
        text = system.text(reply.body, True)
        if len(text) != CHARACTERS or texts.setdefault(reply.asked, text) != text:
            found.append(f"seed {reply.asked}: {text!r}")
    return found


def streams() -> Iterator[load.Due]:
    body = {"model": "model-0", "prompt": "ROMEO:", "max_tokens": CHARACTERS, "stream": True}
    for seed in itertools.cycle(range(SEEDS)):
        yield 0.0, load.post("/generate", body | {"seed": seed}), seed


def measure(add: int, replace: int, clients: int) -> dict[str, Any]:
    about = context("tests.bench.checkpoints", "torch", "litserve")  # before there is any load
    with tempfile.TemporaryDirectory(prefix="chargpt-bench-") as name:
        folder = Path(name)
        save_copy(folder / "model-0", 0)
        with serving(folder, log_level="warning") as server:
            with load.Apart(server.port, streams, drains=True, connections=clients, keep=True) as running:
                began = time.monotonic()
                time.sleep(5)
                quiet_until = time.monotonic()
                memory, seconds, windows = [megabytes(server)], [], []
                for i in range(1, add + 1):
                    save_copy(folder / f"model-{i}", i)
                    at = reload(server, f"model-{i}", "name", f"model-{i}")
                    seconds.append(at[1] - at[0])
                    memory.append(megabytes(server))
                    print(f"added {i}: {seconds[-1]:.2f} s, worker {memory[-1]['worker']:.0f} MB", flush=True)
                for i in range(replace):
                    digest = save_copy(folder / "model-0", 1000 + i)
                    windows.append(reload(server, "model-0", "checkpoint_sha256", digest))
            replies = running.outcome.replies
            assert server.stop() == 0
    gaps = [(b, b - a) for reply in replies for (a, _), (b, _) in zip(reply.parts, reply.parts[1:], strict=False)]
    by_time = {
        "without": [gap for at, gap in gaps if began < at < quiet_until],
        "while_replacing": [gap for at, gap in gaps if any(a <= at <= b + SETTLING for a, b in windows)],
    }
    return about | {
        "clients": clients,
        "requests": len(replies),
        "failed": wrong_texts(replies),
        "seconds_to_add": spread(seconds),
        "seconds_to_replace": spread([b - a for a, b in windows]),
        "megabytes_per_checkpoint": {it: (memory[-1][it] - memory[0][it]) / add for it in ("worker", "http")},
        "megabytes_of_files": sum(path.stat().st_size for path in BUNDLED.iterdir()) / 1e6,
        "gap_seconds_p999": {name: quantile(values, 0.999) for name, values in by_time.items()},
    }


def main() -> None:
    parser = build_parser("tests.bench.checkpoints", __doc__, "out/bench")
    for flag, default, what in (
        ("--add", 8, "checkpoints to add"),
        ("--replace", 10, "times to replace the one under load"),
        ("--clients", 8, "streams at once"),
    ):
        parser.add_argument(flag, type=int, default=default, help=f"{what} (default: %(default)s)")
    given = parser.parse_args()
    results = measure(given.add, given.replace, given.clients)
    given.out.mkdir(parents=True, exist_ok=True)
    write_figures(given.out / "checkpoints.json", results)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
