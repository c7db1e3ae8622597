"""Run one of three load tools against a service, starting the service unless --url is given.

    make load  make load-guidellm  make load-aiperf         ARGS='…' is passed to the tool
    python -m tests.load locust --url http://127.0.0.1:8000 -- --users 64 --run-time 5m

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
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from service.settings import BUNDLED
from tests.load.tokenizer import write_tokenizer
from tests.toolbox.launch import ROOT, Server, ServerError, module

PROMPT, COMPLETION, STREAMS, REQUESTS = 48, 24, 4, 100  # of GuideLLM and AIPerf, replaced by ARGS


class ToolError(RuntimeError):
    """A tool failed, or its requests did."""


def get(url: str) -> Any:
    with urlopen(url, timeout=30) as answer:
        return json.load(answer)


def locust(url: str, out: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "locust", "-f", "tests/load/locustfile.py", "--headless", "--host", url]
    command += ["--users", "16", "--spawn-rate", "16", "--run-time", "1m", "--only-summary", "--loglevel", "WARNING"]
    command += ["--html", str(out / "report.html"), "--csv", str(out / "locust")]
    call([*command, *arguments])
    print(f"report: {out / 'report.html'}")


def guidellm(url: str, out: Path, arguments: list[str], bin: Path, tokenizer: Path, model: str) -> None:
    report = out / "guidellm.json"
    command = [
        str(bin / "guidellm"), "run",
        "--backend", f"kind=openai_http,target={url},model={model},request_format=/v1/completions",
        "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
        "--output", f"kind=json,path={report}", "--output", f"kind=csv,path={report.with_suffix('.csv')}",
    ]  # fmt: skip
    defaults = {
        "--profile": f"kind=concurrent,streams={STREAMS}",
        "--constraint": f"kind=max_requests,count={REQUESTS}",
        "--data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={COMPLETION}",
    }
    figures = measured(command, defaults, arguments, report)
    totals = [run["metrics"]["request_totals"] for run in figures["benchmarks"]]
    check("guidellm", *(sum(total[name] for total in totals) for name in ("successful", "errored")))


def aiperf(url: str, out: Path, arguments: list[str], bin: Path, tokenizer: Path, model: str) -> None:
    reports = out / "aiperf"
    command = [
        str(bin / "aiperf"), "profile", "--model", model, "--tokenizer", str(tokenizer), "--url", url,
        "--endpoint-type", "completions", "--streaming", "--output-artifact-dir", str(reports),
    ]  # fmt: skip
    defaults = {
        "--synthetic-input-tokens-mean": str(PROMPT),
        "--output-tokens-mean": str(COMPLETION),
        "--concurrency": str(STREAMS),
        "--request-count": str(REQUESTS),
        "--prompt-corpus": "random",
        "--ui": "simple",
    }
    figures = measured(command, defaults, arguments, reports / "profile_export_aiperf.json")
    check("aiperf", figures["request_count"]["avg"], (figures.get("error_request_count") or {}).get("avg", 0))


def measured(command: list[str], defaults: dict[str, str], arguments: list[str], report: Path) -> Any:
    """Run a tool, with the defaults of flags not among `arguments`: both reject or merge repeated flags."""
    report.unlink(missing_ok=True)
    named = {argument.partition("=")[0] for argument in arguments}
    call([*command, *(part for flag in defaults if flag not in named for part in (flag, defaults[flag])), *arguments])
    return json.loads(report.read_text(encoding="utf-8"))


def call(command: list[str]) -> None:
    # With HF_HUB_OFFLINE AIPerf does not accept a local tokenizer folder.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if status:
        raise ToolError(f"{Path(command[0]).name} ended with status {status}")


def check(tool: str, answered: float, failed: float) -> None:
    print(f"{tool}: {answered:.0f} requests answered, {failed:.0f} failed")
    if failed or not answered:
        raise ToolError(f"{tool}: {failed:.0f} of {answered + failed:.0f} requests failed")


def run(given: argparse.Namespace) -> None:
    out, url = given.out.resolve(), given.url
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if not url:
            command = module("service", checkpoint=given.checkpoint)
            server = stack.enter_context(Server(command, out / "server.log", "/readyz"))
            server.wait_until_ready()
            url = server.url
            print(f"serving {given.checkpoint} at {url}, log: {out / 'server.log'}", flush=True)
        url = url.rstrip("/")
        if given.tool == "locust":
            return locust(url, out, given.arguments)
        vocabulary = write_tokenizer(given.checkpoint, out / "tokenizer")
        if set(vocabulary) != set(get(f"{url}/info")["model"]["vocabulary"]):
            raise ToolError(f"{given.checkpoint} has another vocabulary than the model at {url}: pass its CHECKPOINT")
        tool = guidellm if given.tool == "guidellm" else aiperf
        model = str(get(f"{url}/v1/models")["data"][0]["id"])
        tool(url, out, given.arguments, given.bin.absolute(), out / "tokenizer", model)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.load", description="Run a load tool against a service.")
    parser.add_argument("tool", choices=("locust", "guidellm", "aiperf"))
    parser.add_argument("--url", help="address of a running service (default: start one)")
    parser.add_argument("--checkpoint", type=Path, default=BUNDLED, metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("out/load"), metavar="DIR", help="default: out/load")
    parser.add_argument(
        "--bin", type=Path, default=Path(sys.executable).parent, metavar="DIR", help="folder of guidellm and aiperf"
    )
    parser.add_argument("arguments", nargs="*", help="after --: further flags for the tool")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped too
    try:
        run(parser.parse_args())
    except (ToolError, ServerError, OSError, ValueError, KeyError) as error:
        sys.exit(f"load: {error}")


if __name__ == "__main__":
    main()
