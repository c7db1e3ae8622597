"""What several tests of the routes use."""

import pytest

from tests.helpers import web


@pytest.fixture
def ask(server):
    """POST to a model of the module's `server`."""

    def ask(model, path="/generate", **body):
        response = web.post(server.url + path, json=body | {"model": model})
        assert response.status_code == 200, response.text
        return response.json()

    return ask
