import os
import random

import pytest

# The models here are tiny: a second thread would only spin, and fight with the servers that the tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ON_DEMAND = ("chaos", "slow", "tools")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long runs only where -m names it."""
    unasked = {marker for marker in ON_DEMAND if marker not in config.option.markexpr}
    left_out = [item for item in items if unasked & {mark.name for mark in item.iter_markers()}]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def chance() -> random.Random:
    """What decides on random moments. CHARGPT_CHAOS_SEED gives those of an earlier test again."""
    seed = int(os.environ.get("CHARGPT_CHAOS_SEED") or random.SystemRandom().randrange(2**32))
    print(f"\nCHARGPT_CHAOS_SEED={seed}", flush=True)
    return random.Random(seed)
