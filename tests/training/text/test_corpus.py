"""Encoding, splits, the cache, memory use, and the window order."""

from __future__ import annotations

import gzip
import hashlib
import os
import random
import re
import shlex
import subprocess
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from service.model.tokenizer import CharTokenizer, UnknownCharacterError
from tests.helpers import CORPUS
from tests.training.runs import chunks_of
from training.commands import lecture
from training.commands.inputs import encode_files, encoder_of
from training.text import batches, files
from training.text.batches import RecordSampler, WindowSampler, window_pieces
from training.text.corpus import MIN_CHARACTERS, prepare, recode
from training.text.encoding import id_dtype
from training.text.files import DataError
from training.text.records import OF_LINES


def text_file(tmp_path: Path, text: str | bytes) -> Path:
    file = tmp_path / "text.txt"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def test_prepare_keeps_every_character(tmp_path):
    text = "naïve\tзима 冬 \U0001f600\n" * 7
    corpus = prepare(str(text_file(tmp_path, text)))
    assert corpus.tokenizer.characters == sorted(set(text))
    assert corpus.tokenizer.decode(corpus.ids) == text
    assert corpus.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert np.array_equal(np.concatenate((corpus.train, corpus.val)), corpus.ids)
    assert len(corpus.train) == int(len(text) * 0.9)


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


@pytest.mark.needs("corpus")
def test_tiny_shakespeare():
    corpus = prepare(str(CORPUS))
    assert corpus.sha256 == files.TINYSHAKESPEARE_SHA256
    assert len(corpus.ids) == 1_115_394
    assert corpus.tokenizer.encode("hii, there!") == [46, 47, 47, 6, 1, 58, 46, 43, 56, 43, 2]
    assert (len(corpus.train), len(corpus.val)) == (1_003_854, 111_540)
    assert lecture.there_and_back(corpus) == (corpus.tokenizer.encode("hii, there!"), "hii, there!")


def test_a_text_is_encoded_once(tmp_path, monkeypatch):
    file = text_file(tmp_path, "to be or not to be, that is the question")
    first = prepare(str(file))
    monkeypatch.setattr("training.text.corpus._encode", None)  # a second encoding would fail
    assert np.array_equal(prepare(str(file)).ids, first.ids)
    assert np.array_equal(prepare(str(file.rename(tmp_path / "elsewhere.txt"))).ids, first.ids)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), st.integers(1, 7))  # NUL: UTF-16
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
    with pytest.raises(DataError, match="byte 0xE2 at offset 2 .*unexpected end"):
        prepare(str(text_file(tmp_path, b"ab\xe2\x82")))


def test_unusable_data_is_refused(tmp_path, monkeypatch):
    def refused(data, **options):
        with pytest.raises(DataError) as error:
            prepare(str(data), **options)
        return str(error.value)

    message = "no file or folder nowhere.txt; --data takes UTF-8 files, plain or gzip, folders of them"
    assert message in refused("nowhere.txt")
    assert "/dev/null is not a regular file or folder; --data takes" in refused("/dev/null")
    (tmp_path / "empty").mkdir()
    assert re.search("the folder .*empty has no files", refused(tmp_path / "empty"))
    (tmp_path / "bad.gz").write_bytes(gzip.compress(b"some text" * 100)[:-12])
    assert "bad.gz is not a complete gzip file" in refused(tmp_path / "bad.gz")
    for content, message in (
        ("", "text.txt is empty; a text needs at least 2 distinct characters"),
        ("abcdefghij" + "k" * 9, "has 19 characters; a text needs at least 20"),
        ("a schön text, in Latin-1".encode("latin1"), "byte 0xF6 at offset 5 (invalid start byte); convert it first"),
        ("".join(map(chr, range(0x10000, 0x20002))), "has 65,538 distinct characters; at most 65,536 are"),
    ):
        assert message in refused(text_file(tmp_path, content))
    assert len(prepare(str(text_file(tmp_path, "abcdefghij" + "k" * 10))).val) == 2
    for lines, count in (("ab\ncd\n" * 4 + "ef\n", "9 records"), ("one record of 20 characters\n", "1 record")):
        assert f"has {count}; --records needs at least 10" in refused(text_file(tmp_path, lines), records=True)
    monkeypatch.setattr(files, "TINYSHAKESPEARE_URL", "http://127.0.0.1:9/input.txt")
    failed = refused("tinyshakespeare")
    assert re.search("cannot download http.*; pass a text .* --data FILE, or save the file as", failed)
    (tmp_path / "tinyshakespeare.txt").write_text("something else")
    monkeypatch.setenv("CHARGPT_DATA_DIR", str(tmp_path))
    assert "is not tinyshakespeare: SHA-256" in refused("tinyshakespeare")


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


def test_encode_files_reports_the_offset_of_an_unknown_character(tmp_path, monkeypatch):
    chunks_of(4, monkeypatch)
    tokenizer = CharTokenizer("abc")
    assert encode_files([text_file(tmp_path, "cabcab")], encoder_of(tokenizer)).tolist() == [2, 0, 1, 2, 0, 1]
    with pytest.raises(UnknownCharacterError, match=r"'x' \(U\+0078\) at offset 6 "):
        encode_files([text_file(tmp_path, "abcabcx")], encoder_of(tokenizer))
    with pytest.raises(DataError, match="text.txt has 1 character; scoring needs at least 2"):
        encode_files([text_file(tmp_path, "a")], encoder_of(tokenizer))
    for policy, expected in (("drop", "abca"), ("replace", "abccac")):
        encoder = encoder_of(tokenizer, unknown_characters=policy, replacement_character="c")
        assert tokenizer.decode(encode_files([text_file(tmp_path, "abxcay")], encoder)) == expected
        assert encoder.replaced + encoder.dropped == 2


@pytest.mark.parametrize("records", [False, True])
def test_recode_preserves_the_text(tmp_path, monkeypatch, records):
    chunks_of(50, monkeypatch)
    corpus = prepare(str(text_file(tmp_path, "cab\n" * 40)), records=records)
    assert recode(corpus, CharTokenizer("\nabc")) is corpus
    many = [chr(0x4E00 + i) for i in range(300)]
    for vocabulary in (["c", "z", "\n", "b", "a"], [*many, *"ab\nc"]):
        other = recode(corpus, CharTokenizer(vocabulary))
        assert other.ids.dtype == id_dtype(len(vocabulary)) and other.tokenizer.characters == vocabulary
        for split in ("train", "val"):
            ids = getattr(other, split)
            assert other.tokenizer.decode(ids) == corpus.tokenizer.decode(getattr(corpus, split))
        assert other.describe() == corpus.describe()
        monkeypatch.setattr("training.text.corpus.replacing_folder", None)  # a second encoding would fail
        assert np.array_equal(recode(corpus, CharTokenizer(vocabulary)).ids, other.ids)
        monkeypatch.undo()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UnknownCharacterError, match="'c'"):
        recode(corpus, CharTokenizer("\nab"))


def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch):
    chunks_of(1 << 14, monkeypatch)
    prepare(str(text_file(tmp_path, "All work\n" * 9)))
    line, peaks = "All work and no play makes Jack a dull boy. \n", []
    for count in (20_000, 80_000):
        file = text_file(tmp_path, line * count)
        tracemalloc.start()
        corpus = prepare(str(file))
        sampler = WindowSampler(corpus.train, 1024, seed=1)
        for _ in range(3):
            sampler.next_batch(16)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(corpus.ids) == len(line) * count
    assert peaks[1] < peaks[0] + len(line) * 6000, peaks  # a tenth of what was added; an epoch has 4 bytes per window


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
@pytest.mark.parametrize(("characters", "block_size"), [(16, 8), (1000, 7), (1025, 1), (999, 64)])
def test_an_epoch_has_each_window_once(characters, block_size, seed):
    sampler = WindowSampler(np.arange(characters), block_size, seed)
    n = sampler.per_epoch
    phases = set()
    for epoch in range(5):
        starts = np.sort(sampler.starts(np.arange(epoch * n, (epoch + 1) * n)))
        assert 0 <= starts[0] < block_size
        assert np.array_equal(np.diff(starts), np.full(n - 1, block_size)), "adjacent, without duplicates"
        assert starts[-1] + block_size + 1 <= characters
        phases.add(starts[0])
    assert block_size == 1 or len(phases) > 1, "the phase changes"


def test_the_order_is_uncorrelated():
    sampler = WindowSampler(np.arange(64_100), 64, seed=7)
    n = sampler.per_epoch
    first, second = (sampler.starts(np.arange(n) + epoch * n) // 64 for epoch in (0, 1))
    for order in (first, second):
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.1
        assert np.count_nonzero(np.diff(order) == 1) < 10
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1
    assert not np.array_equal(first, WindowSampler(np.arange(64_100), 64, seed=8).starts(np.arange(n)) // 64)


def test_the_order_is_the_same_in_every_version_of_numpy():
    """As this one drew it: a resumed run must find its windows, and a checkpoint its validation records."""
    assert WindowSampler(np.arange(1000), 64, seed=1337).starts(np.arange(6)).tolist() == [211, 19, 595, 339, 787, 659]


@given(st.integers(0, 200), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 2**63 - 1))
def test_windows_depend_only_on_seed_and_position(position, batches, seed):
    """For any grouping into batches and any position to resume from."""
    ids = np.arange(400)
    whole = WindowSampler(ids, 16, seed, position)
    inputs = np.concatenate([whole.next_batch(n)[0] for n in batches])
    again = WindowSampler(ids, 16, seed)
    again.next_batch(position or 1)
    again.position = position
    x, y = again.next_batch(sum(batches))
    assert np.array_equal(x, inputs) and np.array_equal(y, x + 1)  # shifted by one, as the ids are 0, 1, 2 …
    assert np.array_equal(x[:, 0], whole.starts(np.arange(position, position + sum(batches))))
    assert again.position == whole.position


def test_a_text_shorter_than_two_windows_is_refused():
    with pytest.raises(DataError, match="has 31 characters; block_size 16 needs at least 32: pass a longer text or"):
        WindowSampler(np.arange(31), 16, seed=0)
    assert WindowSampler(np.arange(32), 16, seed=0).per_epoch == 1


# several files, folders, gzip, records


def test_files_folders_and_gzip_are_concatenated(tmp_path):
    (tmp_path / "plays" / "late").mkdir(parents=True)
    (tmp_path / "plays" / "a.txt").write_bytes("Ä tale\r\n".encode())
    (tmp_path / "plays" / ".hidden").write_text("never")
    (tmp_path / "plays" / "late" / "b.txt.gz").write_bytes(gzip.compress(b"of two cities"))
    (tmp_path / "c.txt").write_text("The end of it all")
    text = "Ä tale\nof two cities\nThe end of it all"
    corpus = prepare([str(tmp_path / "plays"), str(tmp_path / "c.txt")])
    assert corpus.tokenizer.decode(corpus.ids) == text
    assert corpus.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert corpus.name == "a.txt and 2 more"
    (tmp_path / "whole.txt").write_text(text, newline="")
    assert prepare(str(tmp_path / "whole.txt")).sha256 == corpus.sha256


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
    with pytest.raises(DataError, match=r"a.pyc is not UTF-8: .*it is a binary file"):
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


@given(st.lists(st.text("abc€ \t", max_size=6), min_size=10, max_size=60), st.booleans(), st.integers(1, 9))
@settings(max_examples=50)
def test_records_are_shuffled_and_one_in_ten_validates(tmp_path_factory, lines, ended, chunk):
    """At any chunk size records stay whole, each after a line break and ended by its own; blank lines are none."""
    text = "\n".join(lines) + ("\n" if ended or not lines[-1].strip() else "")
    records = [line for line in lines if line.strip()]
    assume(
        len({*"".join(records)}) > 0
        and len("".join(f"{it}\n" for it in records)) >= MIN_CHARACTERS
        and len(records) >= 10
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        chunks_of(chunk, patch)
        corpus = prepare(str(text_file(tmp_path_factory.getbasetemp(), text)), records=True)
    train, val = (corpus.tokenizer.decode(split) for split in (corpus.train, corpus.val))
    assert train[0] == val[0] == train[-1] == val[-1] == "\n"
    train, val = train[1:-1].split("\n"), val[1:-1].split("\n")
    assert sorted(train + val) == sorted(records)
    assert len(val) == len(records) // 10
    assert corpus.describe()["records"] == len(records)
    empty = len(lines) - len(records)
    assert (f"{empty} empty line" in "".join(corpus.notes)) == (empty > 0)


def test_the_order_of_records_is_always_the_same_and_not_that_of_the_file(tmp_path, monkeypatch):
    names = [f"name{i:03}" for i in range(500)]
    first = prepare(str(text_file(tmp_path, "\n".join(names))), records=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert np.array_equal(prepare(str(tmp_path / "text.txt"), records=True).ids, first.ids)
    order = [int(name[4:]) for name in first.tokenizer.decode(first.ids).split()]
    assert abs(np.corrcoef(order, range(500))[0, 1]) < 0.15
    assert np.mean(order[450:]) == pytest.approx(250, abs=60)  # of the validation split


@given(st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=30), st.integers(1, 12), st.integers(0, 3))
def test_each_record_is_drawn_once_an_epoch_in_a_row_of_its_own(records, block_size, seed):
    tokenizer = CharTokenizer("\nabc")
    ids = np.array(tokenizer.encode("\n" + "".join(f"{record}\n" for record in records)), np.uint8)
    sampler = RecordSampler(ids, block_size, seed)
    expected = []
    for text in (f"\n{record}\n" for record in records):
        expected += [text[i : i + block_size + 1] for i in range(0, len(text) - 1, block_size)]
    assert sampler.per_epoch == len(expected)
    idx, targets = sampler.next_batch(2 * sampler.per_epoch)
    rows = []
    for inputs, following in zip(idx, targets, strict=True):
        count = (following >= 0).sum()
        assert (following[count:] == -1).all() and (inputs[count:] == 0).all()
        assert (inputs[1:count] == following[: count - 1]).all()
        rows.append(tokenizer.decode([*inputs[:1].tolist(), *following[:count].tolist()]))
    assert idx.shape[1] == max(map(len, rows)) - 1 <= block_size
    assert Counter(rows[: len(expected)]) == Counter(rows[len(expected) :]) == Counter(expected)
    again = RecordSampler(ids, block_size, seed, position=len(expected)).next_batch(len(expected))[0]
    assert np.array_equal(again[:, : idx.shape[1]], idx[len(expected) :, : again.shape[1]])


@given(st.integers(2, 40), st.integers(1, 12))
def test_consecutive_windows_predict_each_character_but_the_first_once(size, length):
    starts, lengths = window_pieces(np.arange(size), length)
    predicted = [i + 1 for start, count in zip(starts, lengths, strict=True) for i in range(start, start + count)]
    assert predicted == list(range(1, size))
    assert set(lengths[:-1]) <= {length} and 1 <= lengths[-1] <= length


def test_a_text_of_records_to_evaluate_is_encoded_as_a_split(tmp_path):
    tokenizer = CharTokenizer("\nab")
    for content in ("a\nbb", "a\nbb\n", "\n\na\n\nbb\n\n\n"):
        ids = encode_files([text_file(tmp_path, content)], encoder_of(tokenizer), OF_LINES)
        assert tokenizer.decode(ids) == "\na\nbb\n"
    with pytest.raises(DataError, match="has no records"):
        encode_files([text_file(tmp_path, "\n\n\n")], encoder_of(tokenizer), OF_LINES)


def test_records_that_are_trained_on_too_are_left_out():
    tokenizer = CharTokenizer("\nabc")
    chance = random.Random(4)
    lists = [["".join(chance.choices("abc", k=chance.randint(1, 5))) for _ in range(300)] for _ in range(2)]
    train, val = (np.array(tokenizer.encode("\n" + "".join(f"{it}\n" for it in some)), np.uint8) for some in lists)
    expected = [it for it in lists[1] if it not in lists[0]]
    assert 20 < len(expected) < 280
    found = batches.unseen_records(val, train)
    assert [it for it, is_unseen in zip(lists[1], found, strict=True) if is_unseen] == expected
    assert not batches.unseen_records(val, val).any()


def test_a_padded_batch_is_cut_into_parts_of_bounded_size():
    lengths = [1, 9, 2, 2, 5, 1, 300]
    targets = np.array([[1] * n + [-1] * (300 - n) for n in lengths])
    parts = list(batches.micro_batches(targets + 1, targets, 20))
    assert [part.shape for part, _ in parts] == [(1, 300), (1, 9), (1, 5), (3, 2), (1, 1)]
    assert all(np.array_equal(idx, its_targets + 1) for idx, its_targets in parts)
    assert sum((its_targets >= 0).sum() for _, its_targets in parts) == sum(lengths)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=40), st.integers(1, 4))
def test_a_batch_is_packed_without_its_padding(lengths, count):
    targets = np.array([[n] * n + [-1] * (90 - n) for n in lengths])
    idx = np.where(targets < 0, 0, targets + np.arange(90))
    parts, rows = batches.packed(idx, targets, count), []
    assert len(parts) == min(count, len(lengths))
    for its_idx, its_targets, its_lengths in parts:
        assert its_idx.shape == its_targets.shape == (1, its_lengths.sum()) and its_idx.size % batches.PACK == 0
        assert 0 < its_lengths.min() and its_lengths.max() <= max(lengths)
        for start, length in zip(np.cumsum(its_lengths) - its_lengths, its_lengths, strict=True):
            row, following = its_idx[0, start : start + length], its_targets[0, start : start + length]
            if following[0] >= 0:
                assert (following == length).all() and (row == length + np.arange(length)).all()
                rows.append(length)
            else:
                assert (following == batches.IGNORED).all() and (row == 0).all()
    assert sorted(rows) == sorted(lengths)
    sizes = [its_idx.size for its_idx, *_ in parts]
    assert max(sizes) - min(sizes) < max(lengths) + 2 * batches.PACK or len(lengths) < count


@pytest.mark.parametrize(
    ("text", "records", "expected"),
    [
        ("ROMEO:\nWhat light?\n\nJULIET:\nAy me.\n\nROMEO:\nShe speaks.\n\nROMEO:\nO, again\n", False, "ROMEO:\n"),
        ("The sun rose.\nThe rain fell.\nAnd then\nThe wind blew.\nA calm came.\n", False, "The "),
        ("Every morning the sun rose.\n" * 5, False, "Every morning "),
        ("It is a truth universally acknowledged, that", False, "It is a truth "),
        ("Antidisestablishmentarianism is a word", False, "Antidisestablish"),  # no end of a word in sight
        ("GATTACA" * 10, False, "GATTACAGATTACAGA"),
        ("春眠不觉晓处处闻啼鸟\n" * 4 + "夜来风雨声花落知多少\n", False, "春眠不觉晓处处闻啼鸟\n"),
        ("\n\n" + "一二三四五六七八" * 3 + "\n第二行不一样了\n", False, "一二三四五六七八一二三四五六七八"),
        ("anna\nbob\ncarl\n" * 5, True, ""),
    ],
)
def test_the_example_prompt_is_how_lines_often_begin(tmp_path, text, records, expected):
    assert prepare(str(text_file(tmp_path, text)), records=records).example_prompt == expected


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("mark", ["\ufeff", ""])
def test_utf16_is_read_as_the_same_text(tmp_path, encoding, mark):
    """As Excel exports it, or without its mark; the astral character takes two units."""
    text = "name\tvalue\r\ndéjà vu\t𝄞\r\n" * 3
    marked = text_file(tmp_path, ("\ufeff" + text).encode("utf-32-le"))
    assert prepare(str(marked)).tokenizer.characters == sorted(set(text) - {"\r"})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "export.txt").write_bytes((mark + text).encode(encoding))
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
    """Once the user has filled in the encoding. It once named WINDOWS-1252 alone, which reads Chinese as garbage."""
    for name, text, encoding in (
        ("a b.txt", "café naïve ", "WINDOWS-1252"),
        ("plain.txt.gz", "中文字符 ", "GB18030"),
        ("c.txt", "日本語 ", "SHIFT_JIS"),
    ):
        content = (9 * text).encode(encoding)
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        with pytest.raises(DataError) as error:
            prepare(str(tmp_path / name))
        command, _, encodings = str(error.value).split("convert it first, with ")[1].partition("; ENCODING is for")
        assert encoding in encodings
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
    named = rf"{folder}/a.txt is not UTF-8: .*; 2 other files likewise: {folder}/c.txt, {folder}/d.txt$"
    with pytest.raises(DataError, match=named):
        prepare(str(tmp_path))
