"""How texts become records: blocks between blank lines or marks, and cells of tables."""

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.model.checkpoint import Checkpoint
from tests.helpers import save_random
from tests.training.runs import chunks_of
from training.commands.inputs import encode_files, encoder_of
from training.config import ConfigError, TrainConfig
from training.text.corpus import prepare
from training.text.files import CHUNK_BYTES, DataError
from training.text.records import Splitting, blocks, separator_between, split_printed

END = "\x1e"
POEM = "a rose\n  is red\n"


def poems(count=12, between="\n"):
    return between.join(f"poem {number}\n{POEM}" for number in range(count))


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """The corpus of a text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def corpus(text, name="text.txt", **options):
        (tmp_path / name).write_text(text, newline="")
        return prepare(str(tmp_path / name), **options)

    return corpus


def records_of(corpus):
    return [record for split in (corpus.train, corpus.val) for record in corpus.texts_of(split)]


# -- blocks --


def expected_blocks(text, separator):
    """By lines, without regular expressions."""
    parts, groups = [text] if separator == "blank" else text.split(separator), []
    for part in parts:
        group = []
        for line in part.split("\n"):
            if separator == "blank" and not line.strip():
                groups.append(group)
                group = []
            else:
                group.append(line)
        groups.append(group)
    found = []
    for group in groups:
        while len(group) > 1 and not group[0].strip():
            group.pop(0)
        while len(group) > 1 and not group[-1].strip():
            group.pop()
        found.append("\n".join(group))
    return [record for record in found if record.strip()]


@pytest.mark.parametrize("separator", ["blank", "---", "%", "\n-\n", "ab"])
@given(
    text=st.lists(st.sampled_from(["a", "b", "\n", "\n", " ", "-", "---", "%"])).map("".join), size=st.integers(1, 9)
)
def test_blank_lines_or_marks_separate_records_in_pieces_of_any_size(text, separator, size):
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    found = "".join(blocks(pieces, separator, "text"))
    assert [record for record in found.split(END) if record] == expected_blocks(text, separator)
    assert not found or (found.endswith(END) and not found.startswith(END))


@given(
    records=st.lists(st.text("ab \n", min_size=1).map(lambda it: f"x{it}y".replace("\n \n", "\n")), min_size=1),
    separator=st.sampled_from(["blank", "%%", "\n%%", "%%\n", "\n%%\n", "lines"]),
)
def test_what_is_printed_is_read_as_the_same_records(records, separator):
    if separator == "blank":
        records = ["\n".join(line for line in record.split("\n") if line.strip()) for record in records]
    printed = separator_between(separator, END).join(records) + "\n"
    assert split_printed(printed, separator, END) == records
    lines = [record.replace("\n", "") for record in records]
    assert split_printed(separator_between("lines", "\n").join(lines) + "\n", "lines", "\n") == lines


@pytest.mark.parametrize("ended", ["\n", "\r\n"])
def test_records_keep_their_line_breaks(corpus, ended):
    """Lines with spaces and tabs alone are blank too; every record ends with U+001E."""
    text = "\n \n" + poems(between="\n\t \n\n") + "\n\n"
    found = corpus(text.replace("\n", ended), records="blank")
    assert (found.records, found.record_end) == (12, END)
    assert sorted(records_of(found)) == sorted(f"poem {number}\n{POEM.strip()}" for number in range(12))
    assert found.describe()["record_end"] == END and len(found.texts_of(found.val)) == 1
    whole = found.tokenizer.decode(found.ids)
    assert whole.count(END) == 14 and "\n\n" not in whole and found.example_prompt == ""


def test_a_mark_may_stand_anywhere_and_is_not_learned(corpus):
    found = corpus(poems(between="\n%%\n\n%%\n"), records="%%")
    assert found.records == 12 and "%" not in found.tokenizer
    assert found.notes == ("11 empty records left out",)
    inline = corpus(" / ".join(f"joke {number}" for number in range(10)), records=" / ")
    assert sorted(records_of(inline)) == [f"joke {number}" for number in range(10)]


def test_lines_blocks_and_marks_of_a_text_do_not_share_a_cache(corpus):
    found = [corpus(poems(), records=records) for records in ("", "lines", "blank", "is", "re", "blank", True)]
    assert [it.records for it in found] == [None, 36, 12, 13, 13, 12, 36]
    assert [it.record_end for it in found] == [None, "\n", END, END, END, END, "\n"]
    assert len({it.sha256 for it in found}) == 1 and found[3].tokenizer.characters != found[4].tokenizer.characters


@pytest.mark.parametrize("records", ["blank", "---"])
def test_a_separator_that_never_occurs_is_refused_with_the_first_lines(corpus, records):
    with pytest.raises(DataError) as raised:
        corpus("X:1\nT:Tune\nabc\n" * 10, records=records)
    what = "blank line" if records == "blank" else "'---'"
    assert f"text.txt has a single record: --records found no {what} between two" in str(raised.value)
    assert str(raised.value).endswith("It begins:\n  X:1\n  T:Tune\n  abc\n  X:1\n  T:Tune")
    with pytest.raises(DataError, match="has 3 records; --records needs at least 10"):
        corpus(poems(3), records="blank")


def test_a_record_separator_in_the_text_is_refused_unless_it_is_the_mark(corpus, monkeypatch):
    text = poems() + f"one{END}more\n"
    for chunk in (7, CHUNK_BYTES):
        chunks_of(chunk, monkeypatch)
        for records in ("blank", "red"):
            with pytest.raises(DataError, match=r"text.txt has U\+001E \(RECORD SEPARATOR\) in line 48, the character"):
                corpus(text, records=records)
    assert corpus(text, records="lines").records == 37 and END in corpus(text).tokenizer
    assert corpus(poems(between=f"{END}\n"), records=END).records == 12


def test_blank_lines_of_a_list_are_pointed_out(corpus):
    (note,) = corpus(poems(40), records=True).notes
    assert note == "39 empty lines left out; if they separate records of several lines, pass --records blank"
    assert corpus("a name\n\n" * 40, records=True).notes == ("40 empty lines left out",)


def test_ends_of_records_are_never_rare(corpus):
    found = corpus(poems(10), records="blank", min_count=15)
    assert END in found.tokenizer and found.replaced[0] > 0 and len(records_of(found)) == 10


def test_a_text_to_evaluate_is_split_as_the_training_text(corpus, tmp_path):
    tokenizer = corpus(poems(), records="blank").tokenizer
    ids = encode_files([tmp_path / "text.txt"], encoder_of(tokenizer), Splitting("blank", None, END))
    records = [f"poem {number}\n{POEM.strip()}" for number in range(12)]
    assert tokenizer.decode(ids) == END + "".join(f"{record}{END}" for record in records)


# -- tables --


def table(kind, cells):
    if kind == "jsonl":
        return "".join(json.dumps({"id": number, "text": cell}) + "\n" for number, cell in enumerate(cells))
    if kind == "tsv":
        return "id\ttext\n" + "".join(f"{number}\t{cell}\n" for number, cell in enumerate(cells))
    file = io.StringIO()
    rows = csv.writer(file)
    rows.writerows([["id", "text"], *enumerate(cells)])
    return file.getvalue()


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_a_column_gives_records_of_one_line_or_of_several(corpus, kind):
    names = [f'"{number}" is a name, ' + "\t" * (kind != "tsv") for number in range(12)] + ['"open', "x" * 200_000]
    lines = corpus(table(kind, [*names, "", " "]), f"table.{kind}", column="text")
    assert sorted(records_of(lines)) == sorted(names) and lines.record_end == "\n"
    assert END not in lines.tokenizer and lines.notes[-1] == "2 empty cells left out"
    if kind == "tsv":  # which has no quotes, so no cells of several lines
        return
    several = corpus(table(kind, [*names, "two\r\nlines\n"]), f"table.{kind}", column="text")
    assert sorted(records_of(several)) == sorted([*names, "two\nlines"])
    assert (several.record_end, several.records) == (END, 15) and END in several.tokenizer
    assert several.notes[-1] == "1 cell of several lines"


def test_a_packed_table_and_several_are_read(corpus, tmp_path):
    import gzip

    (tmp_path / "more.TSV.gz").write_bytes(gzip.compress(table("tsv", [f"more {i}" for i in range(6)]).encode()))
    (tmp_path / "some.jsonl").write_text(table("jsonl", [f"some {i}" for i in range(6)]))
    found = prepare([str(tmp_path / "more.TSV.gz"), str(tmp_path / "some.jsonl")], column="text")
    assert sorted(records_of(found)) == sorted(f"{word} {i}" for word in ("more", "some") for i in range(6))


ROWS = "".join(json.dumps({"a": str(i)}) + "\n" for i in range(12))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.csv", "id,smiles\n1,CC\n", "t.csv has no column 'a'; its columns: id, smiles"),
        ("t.csv", "", "t.csv has no column 'a'; its columns: none, it is empty"),
        ("t.csv", "a,a\n1,2\n", "t.csv has 2 columns 'a': rename one of them"),
        ("t.csv", 'id,a\n1,"two\nlines"\n2\n', "t.csv, line 4: the row has 1 cell, and no 'a'"),
        ("t.csv", 'a\n"open\n', "t.csv, line 2: unexpected end of data"),
        ("t.csv", f"a\nb{END}\n", "t.csv, line 2: the cell has U+001E (RECORD SEPARATOR), which ends records"),
        ("t.jsonl", '{"b": 1, "c": 2}\n', "t.jsonl has no column 'a'; its columns: b, c"),
        ("t.jsonl", ROWS + '\n{"b": 1}\n', "t.jsonl, line 14: 'a' must be a text, the object has none"),
        ("t.jsonl", ROWS + '{"a": 1.5}\n', "t.jsonl, line 13: 'a' must be a text, got 1.5"),
        ("t.jsonl", ROWS + '{"a": null}\n', "t.jsonl, line 13: 'a' must be a text, got null"),
        ("t.jsonl", ROWS + "[1]\n", "t.jsonl, line 13: expected a JSON object, got [1]"),
        ("t.jsonl", ROWS + '{"a"\n', "t.jsonl, line 13: not JSON: "),
        ("t.jsonl", '{"a": "\\ud800"}\n', "t.jsonl, line 1: 'a' has half of a surrogate pair"),
        ("t.jsonl", "[" * 100_000, "t.jsonl, line 1: not JSON: "),
        ("t.jsonl", "\n\n", "t.jsonl has no rows"),
        ("t.txt", "a\nb\n", "--column reads files named .csv, .tsv, .jsonl, plain or gzip, got "),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_table_is_said_with_its_line(corpus, name, text, said):
    with pytest.raises(DataError) as raised:
        corpus(text, name, column="a")
    assert said in str(raised.value)


# -- settings and checkpoints --


def test_settings_of_older_runs_are_read(tmp_path):
    assert (TrainConfig(records=True).records, TrainConfig(records=False).records) == ("lines", "")
    assert TrainConfig(column="text").records == "lines"
    with pytest.raises(ConfigError, match="records must be lines if column is set"):
        TrainConfig(column="text", records="blank")
    for recipe, about, end in (
        ({"records": True}, {}, "\n"),
        ({"records": "lines", "column": "text"}, {"record_end": END}, END),
        ({"records": "blank"}, {"record_end": END}, END),
        ({"records": "blank"}, {"record_end": 30}, None),
        ({"records": "blank"}, {"record_end": "x"}, None),
        ({"records": ""}, {"record_end": END}, None),
    ):
        checkpoint = save_random(tmp_path / "one", ["\n", "a", END], about={"recipe": recipe, "data": about})
        assert checkpoint.record_end_character == end == Checkpoint.read(tmp_path / "one").record_end_character
        ids = json.loads((tmp_path / "one" / "config.json").read_text())
        assert ids.get("eos_token_id") == ids.get("bos_token_id") == checkpoint.record_end
        named = json.loads((tmp_path / "one" / "tokenizer_config.json").read_text())
        assert named.get("eos_token") == named.get("bos_token") == (END if end == END else None)
