"""What a start loads: the modules of all processes, and the threads that a library starts unasked."""

import re
import sys

import psutil
import pytest

from service.engine import native
from service.settings import BUNDLED
from tests.helpers import lasting, web

OWN = {"service", "_distutils_hack"}
NEEDED = {
    "numpy", "msgspec", "safetensors",  # the model and the engine
    "pydantic", "pydantic_core", "pydantic_settings", "annotated_types", "typing_extensions", "typing_inspection",
    "uvicorn", "uvloop", "httptools", "click", "h11", "prometheus_client", "psutil", "fastapi_swagger",  # HTTP
    "litserve", "fastapi", "starlette", "anyio", "sniffio", "idna", "annotated_doc", "zmq",  # LitServe imports these
}  # fmt: skip
# LitServe, FastAPI, uvicorn and pydantic try these, and do without.
TRIED = {
    "opentelemetry", "watchfiles", "dotenv", "pydantic_extra_types", "python_multipart", "multipart", "email_validator",
    "a2wsgi", "snappy", "org", "exceptiongroup", "orjson", "ujson", "yaml", "toml", "sitecustomize", "usercustomize",
}  # fmt: skip


@pytest.fixture(scope="module")
def started():
    """With the bundled checkpoint, whose products are large enough for NumPy's threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)  # OpenBLAS obeys it too
        yield from lasting(BUNDLED, ("-X", "importtime", "-m", "service"))


def test_numpy_starts_no_threads_of_its_own(started):
    """OpenBLAS had one per CPU, which fought with the engine's: the check of the backend took 0.7 s instead of 0.1, and
    an answer of /v1/attention 0.5 s."""
    assert [process.num_threads() for process in (psutil.Process(started.process.pid), started.worker())] == [1, 1]


@pytest.mark.skipif(native.why_not() is not None, reason="torch's worker loads much more")
def test_processes_load_only_these_packages(started):
    """Each import delays every start: what is new here should be imported where it is used, or not at all."""
    for path, body in ("generate", {"prompt": "a", "max_tokens": 2}), ("v1/attention", {"text": "a"}):
        web.post(f"{started.url}/{path}", json=body).raise_for_status()
    names = {
        name.partition(".")[0] for name in re.findall(r"import time: +\d+ \|[^|]*\| +(\w[\w.]*)", started.output())
    }
    assert {"service", "numpy", "litserve"} <= names
    names = {name for name in names if not name.startswith(("__editable__", "_sysconfigdata"))}
    assert names - sys.stdlib_module_names - OWN - NEEDED - TRIED == set()
