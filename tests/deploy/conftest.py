import contextlib

import docker
import pytest


@pytest.fixture(scope="session")
def engine():
    """A client of the Docker engine."""
    with contextlib.closing(docker.from_env()) as client:
        yield client
