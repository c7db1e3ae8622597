"""Files as text: what is found, and how it is read."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shlex
import subprocess

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.runs import chunks_of, text_file
from training.text import files
from training.text.corpus import prepare
from training.text.files import DataError


@pytest.mark.parametrize("records", [False, True])
def test_files_from_windows_are_read_as_those_from_linux(tmp_path, monkeypatch, records):
    text = "".join(f"{name}\n" for name in ("Ada", "Bo", "Cy", "Di", "Ed", "Flo", "Gus", "Hal", "Ida", "Jo"))
    linux = prepare(str(text_file(tmp_path, text)), records=records)
    assert linux.notes == ()
    (tmp_path / "windows.txt").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    windows = prepare(str(tmp_path / "windows.txt"), records=records)
    assert windows.sha256 == linux.sha256 and np.array_equal(windows.ids, linux.ids)
    if records:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    notes = ("windows.txt: byte-order mark left out", "windows.txt: line breaks of Windows or an old Mac read as \\n")
    for _ in range(2):  # from the file, then from the cache
        assert prepare(str(tmp_path / "windows.txt"), records=records).notes == notes


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), st.integers(1, 7))
def test_reading_does_not_depend_on_the_chunk_size(tmp_path_factory, text, size):
    file = text_file(tmp_path_factory.getbasetemp(), text)
    with pytest.MonkeyPatch.context() as patch:
        chunks_of(size, patch)
        assert "".join(files.read_text([file])) == text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


@pytest.mark.parametrize("size", [1, 3, 1 << 22])
def test_the_first_invalid_byte_is_reported(tmp_path, monkeypatch, size):
    chunks_of(size, monkeypatch)
    with pytest.raises(DataError, match="byte 0xE9 at offset 8 "):
        prepare(str(text_file(tmp_path, "zwölf ".encode() + b"t\xe9l\xe9")))
    with pytest.raises(DataError, match="byte 0xE9 at offset 4 "):  # with the mark
        prepare(str(text_file(tmp_path, b"\xef\xbb\xbft\xe9l")))
    with pytest.raises(DataError, match="byte 0xE2 at offset 2 .*unexpected end"):
        prepare(str(text_file(tmp_path, b"ab\xe2\x82")))


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    """As in a container that runs as a number which /etc/passwd does not have."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(DataError, match="set HOME or XDG_CACHE_HOME to a folder"):
        prepare("tinyshakespeare")


def test_the_download_is_cached(tmp_path, monkeypatch):
    source = text_file(tmp_path, "a small text")
    monkeypatch.setattr(files, "TINYSHAKESPEARE_URL", source.as_uri())
    monkeypatch.setattr(files, "TINYSHAKESPEARE_SHA256", hashlib.sha256(source.read_bytes()).hexdigest())
    file = files.find_text("tinyshakespeare")
    assert file.read_text() == "a small text" and file.parent == files.cache_dir()
    source.unlink()
    assert files.find_text("tinyshakespeare") == file
    assert [path.name for path in file.parent.iterdir()] == ["tinyshakespeare.txt"]


def test_a_file_of_several_names_is_read_once(tmp_path):
    """Half of its copies were once in the validation split."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"the text of the file {name}\n" * 3)
    once = prepare(str(folder))
    assert once.notes == ()
    (folder / "c.txt").symlink_to(folder / "a.txt")
    (folder / "d.txt").hardlink_to(folder / "b.txt")
    (tmp_path / "link").symlink_to(folder)
    linked = prepare(str(folder))
    assert linked.sha256 == once.sha256
    assert linked.notes == (f"read once, under its first name: 2 files: {folder}/c.txt, {folder}/d.txt",)
    twice = prepare([str(folder / "b.txt"), str(tmp_path / "link"), str(folder / "a.txt")])
    assert twice.tokenizer.decode(twice.ids) == "".join((folder / f"{name}.txt").read_text() for name in "ba")
    [note] = twice.notes
    assert "4 files" in note and str(tmp_path / "link" / "b.txt") in note


def test_binary_files_of_a_folder_are_skipped_and_counted(tmp_path):
    """But not texts in other encodings, which are to be converted."""
    folder = tmp_path / "code"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.py").write_text("print('é')\n" * 5)
    (folder / "sub" / "b.md").write_text("# text\n" * 5)
    (folder / "empty.py").write_text("")
    only_text = prepare(str(folder))
    assert only_text.notes == ()
    (folder / "a.pyc").write_bytes(b"\xa7\r\r\n\0\0code")
    (folder / "sub" / "c.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "d.bin.gz").write_bytes(gzip.compress(bytes(100)))
    corpus = prepare(str(folder))
    assert corpus.notes == (f"{folder}: skipped 3 binary files: a.pyc, d.bin.gz, sub/c.png",)
    assert corpus.sha256 == only_text.sha256
    (folder / "latin1.txt").write_bytes("schön".encode("latin1"))
    with pytest.raises(DataError, match=r"latin1.txt is not UTF-8: .*iconv"):
        prepare(str(folder))
    with pytest.raises(DataError, match=r"a.pyc is not UTF-8: byte 0x00 at offset 4 \(NUL\); it is a binary file"):
        prepare(str(folder / "a.pyc"))


def test_glob_chooses_among_the_files_of_a_folder(tmp_path):
    folder = tmp_path / "code"
    (folder / "docs").mkdir(parents=True)
    for name in ("a.py", "docs/b.py", "docs/c.md", "d.txt"):
        (folder / name).write_text(f"this is the file {name}\n")

    def names(*glob):
        return [str(path.relative_to(folder)) for path in files.find_texts([str(folder)], glob)]

    assert names("*.py") == ["a.py", "docs/b.py"]
    assert names("docs/*.py", "*.txt") == ["d.txt", "docs/b.py"]
    assert names() == ["a.py", "d.txt", "docs/b.py", "docs/c.md"]
    with pytest.raises(DataError, match=r"none of the 4 files in .* matches --glob \*.c \*.h"):
        names("*.c", "*.h")
    assert files.find_texts([str(folder / "d.txt")], ["*.py"]) == [
        folder / "d.txt"
    ]  # files are taken as they are named
    (folder / "e.png").write_bytes(bytes(9))
    with pytest.raises(DataError, match="has no text files: skipped 1 binary file: e.png"):
        names("*.png")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_with_a_mark_is_read_as_the_same_text(tmp_path, encoding):
    """As Excel exports it; the astral character takes two units."""
    text = "name\tvalue\r\ndéjà vu\t𝄞\r\n" * 3
    marked = text_file(tmp_path, ("\ufeff" + text).encode("utf-32-le"))
    assert prepare(str(marked)).tokenizer.characters == sorted(set(text) - {"\r"})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "export.txt").write_bytes(("\ufeff" + text).encode(encoding))
    corpus = prepare(str(tmp_path / "folder"))
    assert corpus.tokenizer.decode(corpus.ids.tolist()) == text.replace("\r\n", "\n")
    assert "export.txt: UTF-16 read as text" in corpus.notes
    assert prepare(str(text_file(tmp_path, text.replace("\r\n", "\n")))).sha256 == corpus.sha256


def test_patterns_that_exclude_nothing_are_named(tmp_path):
    folder = tmp_path / "a b"
    (folder / "docs").mkdir(parents=True)
    for name in ("a.py", "b.md", "docs/c.py"):
        (folder / name).write_text(f"this is the file {name}\n")
    other = tmp_path / "other.txt"
    other.write_text("another text, of a file\n")
    names = [str(folder), str(other)]
    assert prepare(names, exclude=("*.md",)).notes == ()
    assert prepare(names, exclude=("*.md",), glob=("*.py",)).notes == ()  # left out twice
    [note] = prepare(names, exclude=("*.md", "*.rst", "x y")).notes
    assert note == f"--exclude '*.rst' 'x y' matches no file in {folder}"
    [note] = prepare(str(other), exclude=("*.rst",)).notes
    assert note == "--exclude '*.rst' matches nothing: --data names no folder"


def test_a_file_of_another_encoding_is_refused_with_a_command_that_converts_it(tmp_path):
    """Once the user has filled in the encoding, which is not guessed."""
    for name, text, encoding, wrong in (
        ("a b.txt", "café naïve ", "WINDOWS-1252", "byte 0xE9 at offset 3 "),
        ("plain.txt.gz", "中文字符 ", "GB18030", "byte 0xD6 at offset 0 "),
        ("utf16.txt", "name, ", "UTF-16LE", "byte 0x00 at offset 1 (NUL); it is a binary file, or UTF-16 without a"),
    ):
        content = (9 * text).encode(encoding)
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        with pytest.raises(DataError) as error:
            prepare(str(tmp_path / name))
        assert f"{tmp_path / name} is not UTF-8: {wrong}" in str(error.value)
        command = re.search("(zcat|iconv).*", str(error.value))[0]
        subprocess.run(command.replace("ENCODING", encoding), shell=True, check=True, cwd=tmp_path)
        assert (tmp_path / "converted.txt").read_text() == text * 9
    packed = tmp_path / "it's.zip"
    packed.write_bytes(b"PK\3\4" + b"\xff" * 40)
    with pytest.raises(DataError) as error:
        prepare(str(packed))
    assert str(error.value).endswith(f"unpack it first, with unzip {shlex.quote(str(packed))}")


def test_all_files_of_another_encoding_are_named_at_once(tmp_path):
    for name, word in {"a": b"caf\xe9 ", "b": b"fine ", "c": b"na\xefve ", "d": b"\xe9\xe9 "}.items():
        (tmp_path / f"{name}.txt").write_bytes(word * 9)
    folder = re.escape(str(tmp_path))
    leave_out = ", or leave it out with --exclude a.txt"
    named = rf"{folder}/a.txt is not UTF-8: .*{leave_out}; 2 other files likewise: {folder}/c.txt, {folder}/d.txt$"
    with pytest.raises(DataError, match=named):
        prepare(str(tmp_path))
