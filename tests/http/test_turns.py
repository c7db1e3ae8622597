"""Handlers run as tasks would: each of these is also what asyncio.Task does with the same coroutine."""

import asyncio

from service.http.turns import Run


class Recorded(Run):
    """A Run that tells how it ended."""

    __slots__ = ("outcome",)

    def __init__(self, coroutine):
        super().__init__(coroutine)
        self.outcome = asyncio.get_running_loop().create_future()

    def ended(self, error):
        self.outcome.set_result(error)


async def outcome_of(coroutine, meanwhile):
    """(what a task ends with, what a Run ends with)"""
    task, run = asyncio.create_task(coroutine()), Recorded(coroutine())
    run.go_on()
    await asyncio.sleep(0)  # the task begins here
    for it in (task, run):
        meanwhile(it)
    (of_task,) = await asyncio.gather(task, return_exceptions=True)
    return of_task, await asyncio.wait_for(run.outcome, 10)


def test_a_run_is_cancelled_as_a_task_where_it_waits():
    async def main():
        turn = asyncio.Event()
        for wait in (lambda: asyncio.sleep(60), turn.wait, lambda: asyncio.to_thread(int)):
            seen = []

            async def handler(wait=wait, seen=seen):
                try:
                    while True:
                        await wait()
                except asyncio.CancelledError:
                    seen.append("told")
                    await asyncio.sleep(0)  # what must still be done
                    raise

            of_task, of_run = await outcome_of(handler, lambda it: it.cancel())
            assert type(of_task) is type(of_run) is asyncio.CancelledError
            assert seen == ["told", "told"]

    asyncio.run(main())
