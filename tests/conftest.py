import os
import random

import pytest

from tests.toolbox import needs

# The models here are tiny: a second thread would only spin, and fight with the servers that the tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ON_DEMAND = ("chaos", "slow", "tools")


def pytest_configure() -> None:
    needs.required()  # an unknown name ends the run before any test


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long runs only where -m names it."""
    unasked = {marker for marker in ON_DEMAND if marker not in config.option.markexpr}
    left_out = [item for item in items if unasked & {mark.name for mark in item.iter_markers()}]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for area in mark.args:
            needs.need(area)


@pytest.fixture
def chance() -> random.Random:
    """What decides on random moments. CHARGPT_CHAOS_SEED gives those of an earlier test again."""
    seed = int(os.environ.get("CHARGPT_CHAOS_SEED") or random.SystemRandom().randrange(2**32))
    print(f"\nCHARGPT_CHAOS_SEED={seed}", flush=True)
    return random.Random(seed)
