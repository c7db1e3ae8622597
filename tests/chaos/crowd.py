"""Many clients in a process of their own: `python -m tests.chaos.crowd PLAN`, a JSON object.

Prints "ready", waits for a line, sends all requests at once, and prints [began, sent, first, ended, status, ending] of
each.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys

from tests.chaos.client import Reply, ask


async def main() -> None:
    plan = json.loads(sys.argv[1])
    count = plan["count"]
    gate = asyncio.Barrier(count + 1) if plan["connects_first"] else None

    def start() -> list[asyncio.Task[Reply]]:
        asked = (
            ask(plan["port"], plan["body"], source=plan["source"], patience=plan["patience"], gate=gate)
            for _ in range(count)
        )
        return [asyncio.create_task(coroutine) for coroutine in asked]

    gc.disable()
    tasks = start() if gate else []
    while gate is not None and gate.n_waiting < sum(not task.done() for task in tasks):
        await asyncio.sleep(0.05)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    if gate is None:
        tasks = start()
    else:
        async with asyncio.timeout(plan["patience"]):
            await gate.wait()
    replies = await asyncio.gather(*tasks)
    print(json.dumps([[r.began_at, r.sent_at, r.first_at, r.ended_at, r.status, r.ending] for r in replies]))


if __name__ == "__main__":
    asyncio.run(main())
