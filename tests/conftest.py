import gc
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from service.settings import available_cpus

# Assert statements that pytest rewrites run under -O too. It rewrites those of test_*.py and conftest.py by itself.
pytest.register_assert_rewrite(*(f"tests.{name}" for name in ("deploy", "helpers", "http", "toolbox", "training")))

if TYPE_CHECKING:
    from service.model.checkpoint import Checkpoint
    from tests.helpers import RunningServer

# Takes a second to import, and lets jsonschema check IRIs, of which no document here has any.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
gc.disable()  # while tests are collected, which leaves little garbage
# Test models are tiny: a second thread would only spin and compete with the servers under test.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as the commands do, for runs of two threads in this process
from tests.toolbox import needs  # noqa: E402 (imports torch, which reads it)

FOLDER = Path(__file__).parent
ON_DEMAND = ("chaos", "cuda", "slow", "tools")

# The files that take longest come first, so that none of them is left for one of several processes at the end.
# test_swarm.py not while test_compose.py runs. test_api.py stands for all of TOGETHER.
LONGEST = """
    deploy/test_compose.py bench/test_bench.py deploy/test_container.py http/test_api.py training/run/test_training.py
    test_supervision.py deploy/test_proxies.py http/test_page.py engine/test_engine.py test_server.py
    http/test_bodies.py test_checkpoints.py http/test_prefix_leaks.py training/run/test_distributed.py
    http/test_counted.py http/test_attacks.py http/test_protocol.py deploy/test_swarm.py
    training/commands/test_commands.py http/test_lease.py http/test_exact.py text/test_exact.py engine/test_native.py
    test_changed_model.py engine/test_cuda.py training/commands/test_score.py observe/test_tracing.py http/test_jdk.py
    observe/test_metrics.py observe/test_logs.py constrain/test_regex.py training/fit/test_plan.py
    training/commands/test_export.py http/test_openapi.py deploy/test_kubernetes.py deploy/test_deploy.py
    test_blocks.py test_install.py
""".split()

# For one process of several: importing transformers takes seconds.
TOGETHER = """
    http/test_api.py model/test_checkpoint.py model/test_model.py model/test_sampling.py http/test_records.py
    training/text/test_min_count.py test_end_to_end.py
""".split()


def pytest_configure() -> None:
    needs.required()  # an unknown area aborts the run before any test
    # Hypothesis judges speed, which here is that of whatever else runs on the machine.
    ignored = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("any speed", deadline=None, suppress_health_check=ignored)
    hypothesis.settings.load_profile("any speed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are CPUs: tests of servers wait for some of their time, and more processes take turns."""
    return available_cpus() + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay in one process, and so do those of TOGETHER."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid).removeprefix("tests/")
            return TOGETHER[0] if file in TOGETHER else file

    return Scheduling(config, log) if config.option.dist == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests with a marker of ON_DEMAND unless -m names that marker; puts the LONGEST files first."""
    rank = {FOLDER / name: number for number, name in enumerate(LONGEST)}
    assert all((FOLDER / name).is_file() for name in (*LONGEST, *TOGETHER))
    items.sort(key=lambda item: rank.get(item.path, len(rank)))
    unrequested = {marker for marker in ON_DEMAND if marker not in config.option.markexpr}
    deselected = [item for item in items if unrequested & {mark.name for mark in item.iter_markers()}]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)  # fewer collections
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda"):
        needs.need("cuda")
    for mark in item.iter_markers("needs"):
        for area in mark.args:
            needs.need(area)


@pytest.fixture
def chance() -> random.Random:
    """Times faults at random. CHARGPT_CHAOS_SEED repeats the choices of an earlier run."""
    seed = int(os.environ.get("CHARGPT_CHAOS_SEED") or random.SystemRandom().randrange(2**32))
    print(f"\nCHARGPT_CHAOS_SEED={seed}", flush=True)
    return random.Random(seed)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder for sockets, with a short path. Those of a worker close with its process, which here is this one."""
    folder = Path(tempfile.mkdtemp(prefix="chargpt-test-"))
    yield folder
    gc.collect()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> "Checkpoint":
    """Random weights over VOCABULARY."""
    from tests.helpers import save_random

    return save_random(tmp_path_factory.mktemp("random") / "checkpoint")


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> "Checkpoint":
    """A model that takes seconds for a few hundred characters."""
    from tests.helpers import SLOW, save_random

    return save_random(tmp_path_factory.mktemp("slow") / "checkpoint", **SLOW)


@pytest.fixture(scope="session")
def server(checkpoint: "Checkpoint") -> "Iterator[RunningServer]":
    """Of `checkpoint`, for all tests that need no settings of their own."""
    from tests.helpers import lasting

    yield from lasting(checkpoint.path, max_body_bytes=64 << 20)


@pytest.fixture(scope="session")
def bundled() -> "Iterator[RunningServer]":
    """Of the bundled checkpoint, with default settings."""
    from service.settings import BUNDLED
    from tests.helpers import lasting

    yield from lasting(BUNDLED)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium. Its event loop runs in this thread until the module ends."""
    from playwright.sync_api import sync_playwright

    chromium = needs.program("browser")
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-features=SpareRendererForSitePerProcess"]  # a process for a page to come
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        yield browser
        browser.close()
