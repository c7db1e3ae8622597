"""Patterns are compiled one at a time, each client's in turn."""

import asyncio

import pytest

from service.http.models.patterns import PatternCache, PatternThread
from tests.helpers import compiled

pytestmark = pytest.mark.anyio


async def test_a_client_waits_for_one_pattern_of_another_and_not_for_all():
    thread = PatternThread()
    models = [PatternCache(thread) for _ in range(2)]  # one thread compiles those of all models
    finished = []

    async def compile(client, number):
        await compiled(models[number % 2], client, f"[abc]{{1,{100 + number}}}")
        finished.append(client)

    flood = [asyncio.create_task(compile("one", number)) for number in range(16)]
    await asyncio.sleep(0)  # all of them wait before the other client comes
    await asyncio.gather(compile("other", 16), *flood)
    assert "other" in finished[:3] and finished.count("one") == 16


async def test_a_pattern_that_many_wait_for_is_compiled_once():
    cache = PatternCache(PatternThread())
    first, *others = await asyncio.gather(*(compiled(cache, f"{i % 3}", "[abc]{1,300}") for i in range(9)))
    assert all(found is first for found in others)


async def test_a_client_that_leaves_lets_the_next_one_compile():
    cache = PatternCache(PatternThread())
    left = [asyncio.create_task(compiled(cache, "one", f"[abc]{{1,{n}}}")) for n in range(300, 310)]
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    assert (await compiled(cache, "one", "abc")).min_length == 3
    assert all(isinstance(it, asyncio.CancelledError) for it in await asyncio.gather(*left, return_exceptions=True))
