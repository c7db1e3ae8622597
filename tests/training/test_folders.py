"""A saved folder survives a power failure: all is on the disk before it takes its place."""

import os

import pytest

from training.folders import replacing_folder


@pytest.mark.parametrize("is_first", [True, False])
def test_files_are_on_the_disk_before_the_folder_takes_its_place_and_that_after(tmp_path, monkeypatch, is_first):
    path, synced, fsync = tmp_path / "saved", {}, os.fsync

    def recorded(descriptor):
        synced[os.fstat(descriptor).st_ino] = (path / "new").exists()
        fsync(descriptor)

    if not is_first:
        path.mkdir()
        (path / "old").write_text("old")
    monkeypatch.setattr(os, "fsync", recorded)
    with replacing_folder(path) as folder:
        (folder / "new").write_text("new")
        (folder / "more").write_text("more")
    assert {file.name for file in path.iterdir()} == {"new", "more"}
    in_place = {file.name: synced.get(file.stat().st_ino) for file in (path / "new", path / "more", path, tmp_path)}
    assert in_place == {"new": False, "more": False, "saved": False, tmp_path.name: True}
