import functools
import os
from pathlib import Path

import pytest
import torch

from training.run import estimate, folder

PEAK, DRAW, PICTURE = functools.cache(estimate.matmul_peak), folder.draw_curves, list[bytes]()


def draw_once(out: Path) -> None:
    """The curves of the first run, for all: to draw them takes longer than most runs here."""
    if not PICTURE:
        DRAW(out)
        PICTURE.append((out / "loss.png").read_bytes())
    (out / "loss.png").write_bytes(PICTURE[0])


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """A cache and downloads per test; torch's thread count is restored; the machine's speed is measured once.

    No file is forced to the disk: no test here cuts the power, and test_folders.py sees what would be forced.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CHARGPT_DATA_DIR", raising=False)
    monkeypatch.setattr(estimate, "matmul_peak", PEAK)
    monkeypatch.setattr(folder, "draw_curves", draw_once)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
