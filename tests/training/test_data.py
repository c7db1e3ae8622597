"""From a text to windows: exact ids, clear refusals, constant memory, an order that depends on the seed alone."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import CORPUS
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from service.model.tokenizer import CharTokenizer, UnknownCharacterError
from training import data
from training.data import DataError, WindowSampler, encode_files, find_text, id_dtype, prepare, read_text, recode

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CHARGPT_DATA_DIR", raising=False)


@pytest.fixture
def tiny_shakespeare() -> Path:
    """The real corpus, where this machine has it."""
    if not CORPUS.is_file():
        pytest.skip(f"{CORPUS} is not here")
    return CORPUS


def text_file(tmp_path: Path, text: str | bytes) -> Path:
    file = tmp_path / "text.txt"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def test_prepare_keeps_every_character(tmp_path):
    text = "naïve\r\nзима 冬 \U0001f600\n" * 7
    corpus = prepare(str(text_file(tmp_path, text)))
    assert corpus.tokenizer.characters == sorted(set(text))
    assert corpus.tokenizer.decode(corpus.ids) == text
    assert corpus.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert np.array_equal(np.concatenate((corpus.train, corpus.val)), corpus.ids)
    assert len(corpus.train) == int(len(text) * 0.9)


def test_tiny_shakespeare_is_as_known(tiny_shakespeare):
    corpus = prepare(str(tiny_shakespeare))
    assert corpus.sha256 == data.TINYSHAKESPEARE_SHA256
    assert len(corpus.ids) == 1_115_394
    assert "".join(corpus.tokenizer.characters) == (
        "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    )
    assert corpus.tokenizer.encode("hii, there!") == [46, 47, 47, 6, 1, 58, 46, 43, 56, 43, 2]
    assert (len(corpus.train), len(corpus.val)) == (1_003_854, 111_540)


def test_a_text_is_encoded_once(tmp_path, monkeypatch):
    file = text_file(tmp_path, "to be or not to be, that is the question")
    first = prepare(str(file))
    monkeypatch.setattr(data, "_encode", None)  # a second encoding would fail
    assert np.array_equal(prepare(str(file)).ids, first.ids)
    moved = file.rename(tmp_path / "elsewhere.txt")
    assert np.array_equal(prepare(str(moved)).ids, first.ids)


def test_several_processes_prepare_one_text_at_once(tmp_path):
    """They wait for each other before they encode, so that all find an empty cache."""
    file = text_file(tmp_path, "to be or not to be, that is the question\n" * 50_000)
    code = """
import sys
from training import data
encode = data._encode
def wait(*arguments):
    print("scanned", flush=True)
    sys.stdin.readline()
    encode(*arguments)
data._encode = wait
corpus = data.prepare(sys.argv[1])
print(corpus.tokenizer.decode(corpus.ids[:20]), flush=True)
"""
    command = [sys.executable, "-c", code, file]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = [subprocess.Popen(command, **options) for _ in range(3)]
    try:
        assert [process.stdout.readline() for process in processes] == ["scanned\n"] * 3
        for process in processes:
            process.stdin.write("go on\n")
            process.stdin.flush()
        found = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert found == ["to be or not to be, \n"] * 3
    assert len(list((data.cache_dir() / "corpora").iterdir())) == 1


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 7))
@settings(deadline=None)
def test_reading_in_pieces_changes_nothing(tmp_path_factory, text, size):
    file = text_file(tmp_path_factory.getbasetemp(), text)
    before, data.CHUNK_BYTES = data.CHUNK_BYTES, size
    try:
        assert "".join(read_text([file])) == text
    finally:
        data.CHUNK_BYTES = before


@pytest.mark.parametrize("size", [1, 2, 3, 1 << 22])
def test_the_first_byte_that_is_not_utf8_is_named(tmp_path, monkeypatch, size):
    monkeypatch.setattr(data, "CHUNK_BYTES", size)
    with pytest.raises(DataError, match="byte 0xE9 at offset 8 "):
        prepare(str(text_file(tmp_path, "zwölf ".encode() + b"t\xe9l\xe9")))
    with pytest.raises(DataError, match="byte 0xE2 at offset 2 .*unexpected end"):
        prepare(str(text_file(tmp_path, b"ab\xe2\x82")))


@pytest.mark.parametrize(("text", "found"), [("", "nothing"), ("aaaa", "only the character 'a'")])
def test_a_text_needs_two_symbols(tmp_path, text, found):
    with pytest.raises(DataError, match=f"holds {found}; a text needs at least two different"):
        prepare(str(text_file(tmp_path, text)))


def test_a_text_needs_a_character_to_validate_on(tmp_path):
    with pytest.raises(DataError, match="holds 19 characters; a text needs at least 20"):
        prepare(str(text_file(tmp_path, "abcdefghij" + "k" * 9)))
    assert len(prepare(str(text_file(tmp_path, "abcdefghij" + "k" * 10))).val) == 2


def test_a_missing_file_names_what_data_takes():
    with pytest.raises(
        DataError, match="no text at nowhere.txt; --data takes UTF-8 files, plain or gzip, folders of them"
    ):
        find_text("nowhere.txt")


def test_without_internet_the_error_says_how_to_pass_a_file(monkeypatch):
    monkeypatch.setattr(data, "TINYSHAKESPEARE_URL", "http://127.0.0.1:9/input.txt")
    with pytest.raises(DataError, match="cannot be downloaded .*pass a text file: --data FILE; or put the file at"):
        find_text("tinyshakespeare")


def test_a_wrong_download_is_refused(tmp_path, monkeypatch):
    (tmp_path / "tinyshakespeare.txt").write_text("something else")
    monkeypatch.setenv("CHARGPT_DATA_DIR", str(tmp_path))
    with pytest.raises(DataError, match="is not tinyshakespeare: SHA-256"):
        find_text("tinyshakespeare")


def test_the_download_is_kept(tmp_path, monkeypatch):
    source = text_file(tmp_path, "a small text")
    monkeypatch.setattr(data, "TINYSHAKESPEARE_URL", source.as_uri())
    monkeypatch.setattr(data, "TINYSHAKESPEARE_SHA256", hashlib.sha256(source.read_bytes()).hexdigest())
    file = find_text("tinyshakespeare")
    assert file.read_text() == "a small text" and file.parent == data.cache_dir()
    source.unlink()
    assert find_text("tinyshakespeare") == file
    assert [path.name for path in file.parent.iterdir()] == ["tinyshakespeare.txt"]


def test_ids_take_the_bytes_they_need(tmp_path):
    assert [id_dtype(n).itemsize for n in (2, 256, 257, 65536, 65537)] == [1, 1, 2, 2, 4]
    text = "".join(chr(0x4E00 + i) for i in range(300)) * 2
    corpus = prepare(str(text_file(tmp_path, text)))
    assert corpus.ids.dtype == np.uint16 and corpus.tokenizer.decode(corpus.ids) == text


def test_a_foreign_text_is_encoded_or_refused_with_the_place(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CHUNK_BYTES", 4)
    tokenizer = CharTokenizer("abc")
    assert encode_files([text_file(tmp_path, "cabcab")], tokenizer).tolist() == [2, 0, 1, 2, 0, 1]
    with pytest.raises(UnknownCharacterError, match=r"'x' \(U\+0078\) at offset 6 "):
        encode_files([text_file(tmp_path, "abcabcx")], tokenizer)


@pytest.mark.parametrize("records", [False, True])
def test_a_text_in_another_vocabulary_is_the_same_text(tmp_path, monkeypatch, records):
    monkeypatch.setattr(data, "CHUNK_BYTES", 50)
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
        monkeypatch.setattr(data, "replacing_folder", None)  # a second encoding would fail
        assert np.array_equal(recode(corpus, CharTokenizer(vocabulary)).ids, other.ids)
        monkeypatch.undo()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UnknownCharacterError, match="'c'"):
        recode(corpus, CharTokenizer("\nab"))


def test_memory_does_not_grow_with_the_text(tmp_path):
    """48 MB are prepared and drawn from in a process that may take 40 MB beyond what its imports take."""
    file = tmp_path / "big.txt"
    file.write_bytes(b"All work and no play makes Jack a dull boy.\r\n" * (48_000_000 // 45))
    code = f"""
import json, resource
from training.data import WindowSampler, prepare
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
corpus = prepare({str(file)!r})
prepared = peak()
sampler = WindowSampler(corpus.train, 128, seed=1)
for _ in range(50): sampler.next_batch(16)
print(json.dumps([len(corpus.ids), prepared - before, peak() - prepared]))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    characters, preparing, drawing = json.loads(run.stdout)
    assert characters > 47_900_000
    assert preparing < 100e6, f"{preparing / 1e6:.0f} MB to prepare"
    assert drawing < 60e6, f"{drawing / 1e6:.0f} MB to draw"


@pytest.mark.parametrize(("characters", "block_size"), [(16, 8), (100, 8), (1000, 7), (1025, 1), (999, 64)])
@pytest.mark.parametrize("seed", [0, 1337, 2**63 - 1])
def test_an_epoch_holds_each_window_once(characters, block_size, seed):
    sampler = WindowSampler(np.arange(characters), block_size, seed)
    n = sampler.windows_per_epoch
    phases = set()
    for epoch in range(5):
        starts = np.sort(sampler.starts(np.arange(epoch * n, (epoch + 1) * n)))
        assert 0 <= starts[0] < block_size, "the phase"
        assert np.array_equal(np.diff(starts), np.full(n - 1, block_size)), "side by side, none twice"
        assert starts[-1] + block_size + 1 <= characters
        phases.add(starts[0])
    assert block_size == 1 or len(phases) > 1, "the phase changes"


def test_the_order_looks_random():
    sampler = WindowSampler(np.arange(64_100), 64, seed=7)
    n = sampler.windows_per_epoch
    first, second = (sampler.starts(np.arange(n) + epoch * n) // 64 for epoch in (0, 1))
    for order in (first, second):
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.1
        assert np.count_nonzero(np.diff(order) == 1) < 10
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1
    assert not np.array_equal(first, WindowSampler(np.arange(64_100), 64, seed=8).starts(np.arange(n)) // 64)


def test_targets_are_the_inputs_shifted_by_one():
    ids = np.random.default_rng(0).integers(0, 200, 500).astype(np.uint8)
    sampler = WindowSampler(ids, 10, seed=3)
    starts = sampler.starts(np.arange(6))
    x, y = sampler.next_batch(6)
    assert x.dtype == y.dtype == np.int64
    for row, start in enumerate(starts):
        assert np.array_equal(x[row], ids[start : start + 10])
        assert np.array_equal(y[row], ids[start + 1 : start + 11])


@given(st.integers(0, 200), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 2**63 - 1))
def test_the_cursor_is_all_there_is_to_restore(position, batches, seed):
    """However the windows are grouped, and wherever one goes on, the same ones come."""
    ids = np.arange(400)
    whole = WindowSampler(ids, 16, seed, position)
    inputs = np.concatenate([whole.next_batch(n)[0] for n in batches])
    again = WindowSampler(ids, 16, seed)
    again.next_batch(position or 1)
    again.position = position
    assert np.array_equal(again.next_batch(sum(batches))[0], inputs)
    assert again.position == whole.position


def test_a_text_shorter_than_two_windows_is_refused():
    with pytest.raises(DataError, match="holds 31 characters; block_size 16 needs at least 32: pass a longer text or"):
        WindowSampler(np.arange(31), 16, seed=0)
    assert WindowSampler(np.arange(32), 16, seed=0).windows_per_epoch == 1


# -- several files, folders, gzip, records --


def test_files_folders_and_gzip_are_one_text(tmp_path):
    (tmp_path / "plays" / "late").mkdir(parents=True)
    (tmp_path / "plays" / "a.txt").write_bytes("Ä tale\r\n".encode())
    (tmp_path / "plays" / ".hidden").write_text("never")
    (tmp_path / "plays" / "late" / "b.txt.gz").write_bytes(gzip.compress(b"of two cities"))
    (tmp_path / "c.txt").write_text("The end of it all")
    text = "Ä tale\r\nof two cities\nThe end of it all"
    corpus = prepare([str(tmp_path / "plays"), str(tmp_path / "c.txt")])
    assert corpus.tokenizer.decode(corpus.ids) == text
    assert corpus.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert corpus.name == "a.txt and 2 more"
    (tmp_path / "whole.txt").write_text(text, newline="")
    assert prepare(str(tmp_path / "whole.txt")).sha256 == corpus.sha256


def test_bad_gzip_and_empty_folders_are_refused(tmp_path):
    (tmp_path / "bad.gz").write_bytes(gzip.compress(b"some text" * 100)[:-12])
    with pytest.raises(DataError, match=r"bad\.gz is not a whole gzip file"):
        prepare(str(tmp_path / "bad.gz"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the folder .*empty holds no file"):
        prepare(str(tmp_path / "empty"))


@given(st.lists(st.text("abc€", max_size=6), min_size=10, max_size=60), st.booleans(), st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_one_record_in_ten_validates(tmp_path_factory, records, ended, chunk):
    """Whole records, whatever the pieces they are read in, each after a line break and with its own."""
    text = "\n".join(records) + ("\n" if ended or not records[-1] else "")
    assume(len(set(text)) > 1 and len(text) >= data.MIN_CHARACTERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(data, "CHUNK_BYTES", chunk)
        corpus = prepare(str(text_file(tmp_path_factory.getbasetemp(), text)), records=True)
    decode = corpus.tokenizer.decode
    assert decode(corpus.train) == "\n" + "".join(f"{r}\n" for i, r in enumerate(records) if i % 10 != 9)
    assert decode(corpus.val) == "\n" + "".join(f"{r}\n" for i, r in enumerate(records) if i % 10 == 9)
    assert corpus.describe()["records"] == len(records)


def test_too_few_records_are_refused(tmp_path):
    with pytest.raises(DataError, match="holds 9 records; --records needs at least 10"):
        prepare(str(text_file(tmp_path, "ab\ncd\n" * 4 + "ef\n")), records=True)
