"""Variants of `python -m service` for tests: one that counts what it does, one whose minutes do not pass, and others
with constants of the test's own.
"""

BEGIN = """
import os
os.environ["PROMETHEUS_MULTIPROC_DIR"] = ""  # before prometheus_client is imported; `serve` names the folder
import sys
from service.__main__ import serve
from service.settings import read_settings

options = {}
"""
END = """
sys.exit(serve(read_settings(), **options))
"""

# Without a garbage collector. GET /counted and /traced report counts since the last report: the most bytes that one
# request and all requests have held, pauses of long work, which pauses wherever it may, and objects in reference
# cycles. /traced also reports the bytes that Python has allocated since the first /traced, and their peak.
COUNTS = """
import gc, json, tracemalloc
from service import server
from service.http import app, process
from service.http.connection import turns
from service.http.routes.openapi import Operation
from service.http.limits.memory import Lease

counts = {"of_one": 0, "of_all": 0, "pauses": 0}
hold, if_due = Lease.hold, turns.Pause.if_due

def counted_hold(lease, bytes, num_sequences=1):
    hold(lease, bytes, num_sequences)
    counts["of_one"] = max(counts["of_one"], bytes)
    counts["of_all"] = max(counts["of_all"], lease._ledger.held)

async def counted_pause(pause):
    counts["pauses"] += 1
    await if_due(pause)

async def answer(request):
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()  # what the process itself has is not looked through each time
    traced, peak = tracemalloc.get_traced_memory()
    held = request.lease._ledger.held
    found = counts | {"traced": traced, "peak": peak, "held": held, "garbage": gc.collect()}
    await request.respond(json.dumps(found).encode())
    counts.update(of_one=0, of_all=0, pauses=0)

async def counted(service, request):
    tracemalloc.stop()
    await answer(request)

async def traced(service, request):
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    await answer(request)
    tracemalloc.reset_peak()

Lease.hold, turns.Pause.if_due, turns.SLICE_SECONDS = counted_hold, counted_pause, 0.0
turns.FREE_SECONDS = 0.0
own = [Operation(f"/{it.__name__}", it, "counts", "operation") for it in (counted, traced)]
app.OPERATIONS = (*app.OPERATIONS, *own)
server.spare_old_objects = gc.disable
process.COLLECT_SECONDS = float("inf")
"""

# With a middleware that answers /status/N with that status.
ANSWERING = """
class Answering:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if not scope["path"].startswith("/status/"):
            return await self.app(scope, receive, send)
        await send({"type": "http.response.start", "status": int(scope["path"][8:]), "headers": []})
        await send({"type": "http.response.body", "body": b"own"})

options["middlewares"] = [Answering]
"""

# Limits of clients per minute are counted at one moment.
STILL = """
from service.http.limits.clients import ClientLimits

ClientLimits.__init__.__defaults__ = (lambda: 1000.0,)
"""

COUNTING = ("-c", BEGIN + COUNTS + END)
COUNTING_WITH_MIDDLEWARE = ("-c", BEGIN + COUNTS + ANSWERING + END)
TIMELESS = ("-c", BEGIN + STILL + END)


def changed(constants):
    """constants: by full name, such as service.http.app.BODY_TIMEOUT_SECONDS; of the main and the HTTP processes."""
    lines = [f"import {name.rpartition('.')[0]}\n{name} = {value!r}" for name, value in constants.items()]
    return "-c", BEGIN + "\n".join(lines) + END
