"""Encoding, splits, the cache and memory use."""

from __future__ import annotations

import gzip
import hashlib
import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from service.model.tokenizer import CharTokenizer, UnknownCharacterError
from tests.helpers import CORPUS
from tests.training.runs import chunks_of, text_file
from training.commands import lecture
from training.commands.inputs import encode_files, encoder_of
from training.text import files
from training.text.batches import WindowSampler
from training.text.corpus import MIN_CHARACTERS, prepare, recode
from training.text.encoding import id_dtype
from training.text.files import DataError
from training.text.records import OF_LINES


def test_prepare_keeps_every_character(tmp_path):
    text = "naïve\tзима 冬 \U0001f600\n" * 7
    corpus = prepare(str(text_file(tmp_path, text)))
    assert corpus.tokenizer.characters == sorted(set(text))
    assert corpus.tokenizer.decode(corpus.ids) == text
    assert corpus.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert np.array_equal(np.concatenate((corpus.train, corpus.val)), corpus.ids)
    assert len(corpus.train) == int(len(text) * 0.9)


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


def test_a_text_of_records_to_evaluate_is_encoded_as_a_split(tmp_path):
    tokenizer = CharTokenizer("\nab")
    for content in ("a\nbb", "a\nbb\n", "\n\na\n\nbb\n\n\n"):
        ids = encode_files([text_file(tmp_path, content)], encoder_of(tokenizer), OF_LINES)
        assert tokenizer.decode(ids) == "\na\nbb\n"
    with pytest.raises(DataError, match="has no records"):
        encode_files([text_file(tmp_path, "\n\n\n")], encoder_of(tokenizer), OF_LINES)


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
