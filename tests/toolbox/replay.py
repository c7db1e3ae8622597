"""Records the service's answers to random requests, and compares them with the answers of another revision:

    python -m tests.toolbox.replay record OUT.json
    python -m tests.toolbox.replay compare OUT.json

OUT.json holds requests and answers; the folder OUT.models holds the checkpoints, so that weights stay the same. Ids,
times and versions are masked. Of a stream, the events of each choice are joined, because their division depends on
time. The exit status of `compare` is 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from service.model.tokenizer import CharTokenizer
from tests.helpers import VOCABULARY, random_model, serving
from tests.toolbox.http import DONE, events, sent
from tests.toolbox.launch import ROOT
from tests.toolbox.requests import KEY, ORIGIN, Request, make_requests
from training.run.saving import save_checkpoint

THREADS = 4
SETTINGS: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {  # models, settings
    "texts": (("texts",), {"max_tokens": 16_384, "cors_origins": ORIGIN}),
    "records": (("records", "rare"), {"model_name": "records", "unknown_characters": "replace"}),
    "blocks": (("blocks",), {"max_tokens": 200, "max_prompt_characters": 2000}),
}
Answer = dict[str, Any]  # status, headers, body

# -- servers --


def make_models(folder: Path) -> None:
    """Save the checkpoints: the bundled one, and random models of records, of blocks and with an unknown symbol."""
    shutil.copytree(ROOT / "service/checkpoints/tinyshakespeare", folder / "texts")
    lines = CharTokenizer(VOCABULARY)
    blocks = CharTokenizer(["\x1e" if c == "\n" else c for c in VOCABULARY])
    rare = CharTokenizer(sorted([*VOCABULARY, "\ufffd"]), has_unknown=True)
    of_blocks = {"recipe": {"records": "blank"}, "data": {"record_end": "\x1e"}}
    for name, tokenizer, about in (
        ("records", lines, {"recipe": {"records": True}}), ("blocks", blocks, of_blocks), ("rare", rare, {}),
    ):  # fmt: skip
        model = random_model(seed=3, vocab_size=tokenizer.vocab_size)
        with torch.no_grad():  # so that records end after some ten characters
            model.head.weight[lines.encode("\n")[0]] *= 1.5
        save_checkpoint(folder / name, model, tokenizer, {"losses": {}} | about)


@contextlib.contextmanager
def all_serving(folder: Path, names: Iterable[str]) -> Iterator[dict[str, int]]:
    """Serve the checkpoints of a folder with the current sources, and yield the port of each server."""
    (keys := folder / "keys").write_text(f"{KEY} client\n")
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:

        def start(name: str) -> int:
            models, settings = SETTINGS[name]
            settings = {"dtype": "float64", "log_level": "error"} | settings
            if name == "blocks":
                settings["api_keys_file"] = keys
            checkpoints = ",".join(f"{model}={folder / model}" for model in models)
            return stack.enter_context(serving(checkpoints, **settings)).port

        yield dict(zip(names, pool.map(start, names), strict=True))


# -- answers --

MASK = "*"
TIMES = {"queue_seconds", "prefill_seconds", "decode_seconds", "seconds_per_character", "created"}
MACHINE = {"versions", "devices", "backend"}
NOT_COMPARED = {"date", "server", "content-length", "etag", "x-backend"} | {
    f"x-{name}" for name in ("queue-time", "prefill-time", "inference-time", "total-time", "time-per-token")
}
ID = re.compile(r"[0-9a-f]{32}")
FILES = re.compile(r"/(page/.*|docs.*|openapi\.json|metrics)?(\?.*)?")  # their contents are not compared


def masked(value: Any, name: str = "") -> Any:
    if name in MACHINE or (name in TIMES and isinstance(value, int | float)):
        return MASK
    match value:
        case dict():
            return {key: masked(part, key) for key, part in value.items()}
        case list():
            return [masked(part) for part in value]
        case str() if name == "id":
            return ID.sub(MASK, value)
    return value


def joined(before: Any, new: Any) -> Any:
    """What two events say of the same thing."""
    match before, new:
        case _, None:
            return before
        case (str(), str()) | (list(), list()):
            return before + new
        case dict(), dict():
            return before | {name: joined(before.get(name), part) for name, part in new.items()}
    return new


def stream_of(text: str) -> dict[str, Any]:
    """A stream without its division into events: each choice, what other events say last, and the last block."""
    choices: dict[int, Any] = {}
    whole: dict[str, Any] = {"end": text.rstrip("\n").rpartition("\n\n")[2]}
    for piece in (json.loads(data) for data in events(text.split("\n")) if data != DONE):
        for choice in piece.pop("choices", None) or ([piece] if "index" in piece else []):
            choice.pop("usage", None)  # so far
            index = choice.pop("index")
            choices[index] = joined(choices.get(index), choice)
        if "text" not in piece:
            whole |= masked(piece)
    if "error" in whole:  # how much came before it depends on time
        return whole
    return whole | {"choices": [[index, choices[index]] for index in sorted(choices)]}


def answer_to(request: Request, port: int) -> Answer:
    """Send a request on a connection of its own, all at once: so no answer overtakes a part of it."""
    content = request["body"].encode("utf-8", "surrogateescape")
    headers = {"Host": "127.0.0.1"} | request["headers"]
    if content or request["method"] == "POST":
        headers["Content-Length"] = str(len(content))
    head = f"{request['method']} {request['path']} HTTP/1.1\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
    try:
        with sent(port, head.encode() + content) as connection:
            connection.settimeout(120)
            response = http.client.HTTPResponse(connection, method=request["method"])
            response.begin()
            data = response.read()
    except (OSError, http.client.HTTPException) as error:
        return {"status": 0, "headers": {}, "body": repr(error)}
    headers = {name.lower(): ", ".join(response.headers.get_all(name, [])) for name in response.headers}
    headers |= dict.fromkeys(NOT_COMPARED & headers.keys(), MASK)
    headers["x-request-id"] = ID.sub(MASK, headers.get("x-request-id", ""))
    if content and response.status >= 400:
        headers.pop("connection", None)  # close if the body had not been read yet, which depends on time
    body: Any = data.decode("utf-8", "surrogateescape")
    if response.status == 200 and FILES.fullmatch(request["path"]):
        body = MASK
    elif headers.get("content-type", "").startswith("text/event-stream"):
        with contextlib.suppress(ValueError, AssertionError):
            body = stream_of(body)
    elif headers.get("content-type", "").startswith("application/json") and body:
        body = masked(json.loads(body))
    if "too_few_matches" in str(body) and '"prompt": [' in request["body"] and response.status == 400:
        body["error"]["message"] = MASK  # it is about the prompt that failed first
    return {"status": response.status, "headers": headers, "body": body}


def answers_to(requests: list[Request], models: Path) -> list[Answer]:
    """Serve the checkpoints in `models`, and send the requests, some at a time."""
    names = sorted({request["server"] for request in requests})
    with all_serving(models, names) as ports, ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda request: answer_to(request, ports[request["server"]]), requests))


def differences(before: Any, now: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(field, before, now) of each difference."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in before | now:
            yield from differences(before.get(name, "–"), now.get(name, "–"), f"{where}.{name}" if where else name)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from differences(one, other, f"{where}[{i}]")
    elif before != now:
        yield where, before, now


# -- commands --


def short(value: Any, length: int = 100) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= length else f"{text[:length]}… ({len(text)})"


def line(request: Request) -> str:
    return " ".join(request[name] for name in ("server", "method", "path", "body"))


def record(path: Path, count: int, seed: int) -> None:
    make_models(models := path.with_suffix(".models"))
    requests = make_requests(count, seed)
    answers = answers_to(requests, models)
    pairs = [{"request": request, "answer": answer} for request, answer in zip(requests, answers, strict=True)]
    path.write_text("[\n" + ",\n".join(map(json.dumps, pairs)) + "\n]\n")
    for status, number in sorted(collections.Counter(answer["status"] for answer in answers).items()):
        print(f"{number:6} answers with status {status}")


def compare(path: Path, only: str) -> bool:
    """Print the differences, and return whether there are any."""
    pairs = [pair for pair in json.loads(path.read_text()) if only in line(pair["request"])]
    answers = answers_to([pair["request"] for pair in pairs], path.with_suffix(".models"))
    kinds: collections.Counter[str] = collections.Counter()
    for pair, answer in zip(pairs, answers, strict=True):
        found = list(differences(pair["answer"], answer))
        if found:
            print("\n" + short(line(pair["request"]), 300))
        for where, before, now in found:
            print(f"    {where}: {short(repr(before))} → {short(repr(now))}")
        kinds.update({re.sub(r"\[\d+\]", "[]", where) for where, *_ in found})
    print(f"\n{len(pairs)} answers compared")
    for where, number in kinds.most_common():
        print(f"{number:6} differ in {where}")
    return bool(kinds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.toolbox.replay", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="send random requests, and save the answers")
    recording.add_argument("file", type=Path)
    recording.add_argument("--count", type=int, default=1000)
    recording.add_argument("--seed", type=int, default=0)
    comparison = commands.add_parser("compare", help="send the requests again; exit with 1 if an answer differs")
    comparison.add_argument("file", type=Path)
    comparison.add_argument("--only", metavar="TEXT", default="", help="only requests that contain this text")
    args = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # for bodies that are not UTF-8
    if args.command == "compare":
        return compare(args.file, args.only)
    record(args.file, args.count, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
