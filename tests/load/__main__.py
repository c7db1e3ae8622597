"""Run one of three load tools against a service, starting the service unless --url is given.

    make load  make load-guidellm  make load-aiperf         ARGS='…' is passed to the tool
    python -m tests.load locust --url http://127.0.0.1:8000 -- --arrivals 20 --run-time 5m

Writes the tool's output and the server's log to --out. Exits with the tool's status, non-zero if requests failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

from tests.bench.servers import ROOT, Server, ServerError
from tests.load.tokenizer import write_tokenizer

PROMPT, COMPLETION, STREAMS, REQUESTS = 48, 24, 4, 100  # defaults for GuideLLM and AIPerf, overridden by ARGS


class ToolError(RuntimeError):
    """A tool failed, or its requests did."""


@contextlib.contextmanager
def service(url: str | None, checkpoint: Path, out: Path) -> Iterator[str]:
    """Yield the address of the service under load."""
    if url:
        yield url.rstrip("/")
        return
    log = out / "server.log"
    command = [sys.executable, "-m", "service", "--checkpoint", str(checkpoint)]
    with Server(command, log, "/readyz") as server:
        server.wait_until_ready()
        print(f"serving {checkpoint} at http://127.0.0.1:{server.port}, log: {log}", flush=True)
        yield f"http://127.0.0.1:{server.port}"


def tokenizer(url: str, checkpoint: Path, out: Path) -> Path:
    """Write a tokenizer folder for the tools, from the served checkpoint.

    Raises:
        ToolError: `checkpoint` has another vocabulary than the model at `url`.
    """
    with urlopen(f"{url}/info", timeout=30) as answer:
        served = json.load(answer)["model"]["vocabulary"]
    folder = out / "tokenizer"
    write_tokenizer(checkpoint, folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    if set(vocabulary) != set(served):
        raise ToolError(f"{checkpoint} and the model at {url} have different vocabularies: pass the served CHECKPOINT")
    return folder


def locust(url: str, out: Path, arguments: list[str]) -> None:
    report = out / "report.html"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "locust", "-f", "tests/load/locustfile.py", "--headless", "--host", url]
    command += ["--users", "16", "--spawn-rate", "16", "--run-time", "1m", "--only-summary", "--loglevel", "WARNING"]
    command += ["--folder", str(out), "--html", str(report), "--csv", str(out / "locust")]
    status = call(command + arguments)
    if report.exists():
        print(f"report: {report}")
    sys.exit(status)


def guidellm(url: str, out: Path, arguments: list[str], *, bin: Path, checkpoint: Path) -> None:
    folder, report = tokenizer(url, checkpoint, out), out / "guidellm.json"
    report.unlink(missing_ok=True)
    defaults = {
        "--profile": f"kind=concurrent,streams={STREAMS}",
        "--constraint": f"kind=max_requests,count={REQUESTS}",
        "--data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={COMPLETION}",
    }
    status = call(
        [
            str(bin / "guidellm"),
            "run",
            "--backend",
            f"kind=openai_http,target={url},model={model(url)},request_format=/v1/completions",
            "--tokenizer",
            f"kind=huggingface_auto,model={folder}",
            "--output",
            f"kind=json,path={report}",
            "--output",
            f"kind=csv,path={report.with_suffix('.csv')}",
            *completed(arguments, defaults),
        ]  # fmt: skip
    )
    if status:
        raise ToolError(f"guidellm ended with status {status}")
    runs = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    totals = [run["metrics"]["request_totals"] for run in runs]
    check("guidellm", sum(total["successful"] for total in totals), sum(total["errored"] for total in totals))


def aiperf(url: str, out: Path, arguments: list[str], *, bin: Path, checkpoint: Path) -> None:
    folder, reports = tokenizer(url, checkpoint, out), out / "aiperf"
    report = reports / "profile_export_aiperf.json"
    report.unlink(missing_ok=True)
    defaults = {
        "--synthetic-input-tokens-mean": str(PROMPT),
        "--output-tokens-mean": str(COMPLETION),
        "--concurrency": str(STREAMS),
        "--request-count": str(REQUESTS),
        "--prompt-corpus": "random",
        "--ui": "simple",
    }
    status = call(
        [
            str(bin / "aiperf"),
            "profile",
            "--model",
            model(url),
            "--tokenizer",
            str(folder),
            "--url",
            url,
            "--endpoint-type",
            "completions",
            "--streaming",
            "--output-artifact-dir",
            str(reports),
            *completed(arguments, defaults),
        ]  # fmt: skip
    )
    if status:
        raise ToolError(f"aiperf ended with status {status}")
    figures = json.loads(report.read_text(encoding="utf-8"))
    failed = (figures.get("error_request_count") or {}).get("avg", 0)
    check("aiperf", figures["request_count"]["avg"], failed)


def completed(arguments: list[str], defaults: dict[str, str]) -> list[str]:
    """`arguments` preceded by the defaults of flags not among them: both tools reject or merge repeated flags."""
    named = {argument.partition("=")[0] for argument in arguments}
    return [part for flag, value in defaults.items() if flag not in named for part in (flag, value)] + arguments


def model(url: str) -> str:
    with urlopen(f"{url}/v1/models", timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


def call(command: list[str]) -> int:
    # With HF_HUB_OFFLINE AIPerf does not accept a local tokenizer folder.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def check(tool: str, answered: float, failed: float) -> None:
    print(f"{tool}: {answered:.0f} requests answered, {failed:.0f} failed")
    if failed or not answered:
        raise ToolError(f"{tool}: {failed:.0f} of {answered + failed:.0f} requests failed")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.load", description="Run a load tool against a service.")
    parser.add_argument("tool", choices=("locust", "guidellm", "aiperf"))
    parser.add_argument("--url", help="address of a running service (default: start one)")
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "service/checkpoints/tinyshakespeare", metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("out/load"), metavar="DIR", help="default: out/load")
    parser.add_argument("--bin", type=Path, default=Path(sys.executable).parent, metavar="DIR",
                        help="folder of guidellm and aiperf")  # fmt: skip
    parser.add_argument("arguments", nargs="*", help="after --: further flags for the tool")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped too
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        with service(given.url, given.checkpoint, given.out) as url:
            if given.tool == "locust":
                locust(url, given.out, given.arguments)
            else:
                tool = guidellm if given.tool == "guidellm" else aiperf
                tool(url, given.out, given.arguments, bin=given.bin.absolute(), checkpoint=given.checkpoint)
    except (ToolError, ServerError, OSError, ValueError, KeyError) as error:
        sys.exit(f"load: {error}")


if __name__ == "__main__":
    main()
