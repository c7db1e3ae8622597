"""Send mixed load with Locust to a service, starting the service unless --url is given.

    make load                                             ARGS='…' is passed to Locust
    python -m tests.load --url http://127.0.0.1:8000 -- --users 64 --run-time 5m

Writes Locust's report and the server's log to --out. Exits with 1 if an answer was wrong, or Locust failed.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
from pathlib import Path

from service.settings import BUNDLED
from tests.toolbox.launch import ROOT, Server, ServerError, module


def run(checkpoint: Path, url: str | None, out: Path, arguments: list[str]) -> str | None:
    """What went wrong."""
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if url is None:
            command = module("service", checkpoint=checkpoint)
            server = stack.enter_context(Server(command, out / "server.log", "/readyz"))
            server.wait_until_ready()
            url = server.url
            print(f"serving {checkpoint} at {url}, log: {out / 'server.log'}", flush=True)
        locust = [*module("locust"), "-f", "tests/load/locustfile.py", "--headless", "--host", url]
        locust += ["--users", "16", "--spawn-rate", "16", "--run-time", "1m", "--only-summary", "--loglevel", "WARNING"]
        locust += ["--html", str(out / "report.html"), "--csv", str(out / "locust"), *arguments]
        status = subprocess.run(locust, cwd=ROOT).returncode
    if status:
        return f"load: locust ended with status {status}"
    print(f"report: {out / 'report.html'}")
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="address of a running service (default: start one)")
    parser.add_argument("--checkpoint", type=Path, default=BUNDLED, metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("out/load"), metavar="DIR", help="default: out/load")
    parser.add_argument("arguments", nargs="*", help="after --: further flags of Locust")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped too
    given = parser.parse_args()
    try:
        sys.exit(run(given.checkpoint, given.url, given.out.resolve(), given.arguments))
    except (ServerError, OSError) as error:
        sys.exit(f"load: {error}")
