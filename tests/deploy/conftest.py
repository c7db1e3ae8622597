import contextlib
import fcntl
import tempfile
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def engine():
    """A client of the Docker engine."""
    import docker

    with contextlib.closing(docker.from_env()) as client:
        yield client


@pytest.fixture(scope="module")
def networks():
    """One module of those that ask for this at a time: an engine that leaves its swarm cuts off other containers."""
    with open(Path(tempfile.gettempdir()) / "chargpt-test-networks.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
