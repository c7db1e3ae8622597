"""A receiver for Alertmanager that logs each alert as one JSON line: `python webhook.py 9095`.

It stands where your own receivers go (alertmanager.yml) and needs only Python's standard library. GET /readyz answers
200, which is what the health check of chargpt's image asks.
"""

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NoReturn


class Receiver(BaseHTTPRequestHandler):
    timeout = 10  # seconds without a byte

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/readyz" else 404)

    def do_POST(self) -> None:
        """Logs the alerts of a notification; the path names the receiver."""
        try:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            lines = [
                {"receiver": self.path.strip("/"), **{name: alert[name] for name in FIELDS}} for alert in body["alerts"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            self._answer(400, f"not a notification of Alertmanager: {error!r}\n")
            return
        for line in lines:
            os.write(1, json.dumps(line).encode() + b"\n")  # at once: notifications come at the same time
        self._answer(200)

    def log_message(self, format: str, *args: object) -> None:
        """No access log: alerts are the only lines."""

    def _answer(self, status: int, text: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


FIELDS = ("status", "labels", "annotations", "startsAt", "endsAt")


def stop(*_: object) -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)  # PID 1 has no default handler
    ThreadingHTTPServer(("", int(sys.argv[1])), Receiver).serve_forever()
