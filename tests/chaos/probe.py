"""The process of `client.Probe`: `python -m tests.chaos.probe PLAN`, a JSON object. Ends with its stdin."""

from __future__ import annotations

import json
import select
import socket
import sys
import time

HANG_SECONDS = 15.0


def wait(port: int, source: str, request: bytes) -> tuple[float, float | None, int]:
    sent_at, data, first_at = time.monotonic(), b"", None
    with socket.socket() as connection:
        connection.settimeout(HANG_SECONDS)
        connection.bind((source, 0))
        try:
            connection.connect(("127.0.0.1", port))
            connection.sendall(request)
            while chunk := connection.recv(1 << 16):
                data += chunk
                if first_at is None and data.partition(b"\r\n\r\n")[2]:
                    first_at = time.monotonic()
        except OSError:
            pass
    status = int(data[9:12]) if data.startswith(b"HTTP/1.1 ") else 0
    return sent_at, None if first_at is None else first_at - sent_at, status


def main() -> None:
    plan = json.loads(sys.argv[1])
    request = plan["request"].encode("latin-1")
    print("ready", flush=True)
    waits, due = [], time.monotonic()
    while not select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
        waits.append(wait(plan["port"], plan["source"], request))
        due = max(due + plan["interval"], time.monotonic())
    print(json.dumps(waits))


if __name__ == "__main__":
    main()
