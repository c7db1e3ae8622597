import pytest
import torch


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """A cache per test; torch's thread count is restored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
