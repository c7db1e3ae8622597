"""What is said of a text before a run."""

import pytest

from training.config import TrainConfig
from training.fit.warnings import warnings_of
from training.text.corpus import prepare

WORDS = "the cat sat on a mat and the dog ran off with it to see what was in a box or not".split()


@pytest.fixture
def check(tmp_path):
    """The subjects of the lines, and the lines, for a text."""

    def run(text, *, records=False, parameters=1000, n_embd=1, **settings):
        (tmp_path / "text.txt").write_text(text)
        corpus = prepare(str(tmp_path / "text.txt"), records=records)
        lines = list(warnings_of(corpus, TrainConfig(n_embd=n_embd, **settings), parameters))
        assert len(lines) <= 6 and not any("\n" in line for line in lines)
        return [line.split(":")[0] for line in lines], "\n".join(lines)

    return run


def sentences(count):
    """Which do not repeat."""
    return "".join(
        f"{WORDS[i % 19]} {WORDS[i // 3 % 17]} {WORDS[i // 5 % 13]} {i * 7919 % 9973}\n" for i in range(count)
    )


def test_a_text_without_problems_has_one_line(check):
    subjects, line = check(sentences(300))
    assert subjects == ["size"] and line.startswith("size: 1,000 parameters for ") and "memorize" not in line
    assert check("".join(f"{i * 7919 % 9973}\n" for i in range(300)), records=True)[0] == ["size"]


def test_more_parameters_than_a_text_can_teach(check):
    text = sentences(300)
    found = check(text, parameters=10**6)[1]
    assert f"1,000,000 parameters for {int(0.9 * len(text)):,} characters" in found
    assert "that many memorize a text: take more text, a smaller --n-embd and --n-layer, or --dropout" in found
    found = check(text, parameters=10**6, dropout=0.1)[1]  # by the user or the recipe
    assert "take more text, or a smaller --n-embd and --n-layer" in found and "--dropout" not in found


def test_rare_symbols_are_named(check):
    subjects, lines = check("€" + sentences(300) + "ÄÖ")  # the last two are in the validation split
    assert subjects == ["size", "rare"]
    assert "rare: 3 symbols with fewer than 5 occurrences to learn from: 'Ä' 'Ö' '€'" in lines
    assert "rare: 1 symbol with fewer than 5 occurrences to learn from: '€'" in check("€" + sentences(300))[1]
    many = "".join(map(chr, range(0x400, 0x400 + 15)))
    assert "rare: 15 symbols" in (found := check(many + sentences(300))[1]) and found.endswith(" and 5 more")


def test_a_vocabulary_of_rare_characters_is_said_with_the_remedy(check):
    text = sentences(300) + "".join(map(chr, range(0x4E00, 0x4E00 + 100))) * 2 + "é" * 4 + "\ufffd" * 3
    subjects, line = check(text, parameters=10_000, n_embd=16)
    assert subjects == ["size", "vocabulary"]
    shown = f"vocabulary: 101 of {len({*text})} symbols occur fewer than 5 times, "
    shown += f"{1e6 * 204 / len(text):.3g} per million characters together, and take 3,232 of 10,000 parameters, 32%; "
    assert shown + "--min-count 5 makes them one unknown symbol, U+FFFD" in line
    # Nothing is suggested where a checkpoint gives the vocabulary, nor where it is a small part.
    for given in ({"init_from": "ck"}, {"teachers": ("ck",)}, {"parameters": 100_000}):
        assert check(text, **{"parameters": 10_000, "n_embd": 16, **given})[0] == ["size", "rare"]


def test_a_minimum_that_would_be_refused_is_not_suggested(check):
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 100)))
    assert "--min-count" not in check(text + "ab" * 4, n_embd=16)[1]
    assert "--min-count 5" in check(text + "ab" * 50 + "c" * 50, n_embd=16)[1]


def test_a_large_vocabulary_of_frequent_characters_is_said(check):
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 1000))) * 20
    subjects, line = check(text, parameters=50_000, n_embd=16)
    assert subjects[:2] == ["size", "vocabulary"]
    assert (
        "vocabulary: embedding and head of 1,000 symbols take 32,000 of 50,000 parameters, 64%, and the logits of"
        in line
    )


def test_a_sorted_list_should_be_read_as_records(check):
    names = "".join(f"{a}{b}{c}\n" for a in "abcdefgh" for b in "aeiou" for c in "lmnrst")
    assert check(names)[0] == ["size", "sorted"]
    assert "sorted" not in check(names, records=True)[0]
    assert "sorted" not in check("\n".join(sorted(names.split(), key=lambda it: it[::-1])) + "\n")[0]


def test_a_validation_split_that_was_trained_on(check):
    subjects, lines = check(sentences(50) * 10)
    assert subjects == ["size", "overlap"] and "100% of the validation split's 50-grams occur" in lines


def test_blocks_that_begin_alike_should_be_read_as_records(check):
    tunes = "\n\n".join(f"X:{i}\nT:{i * 7919 % 9973}\n{i * 104_729 % 7919} abc" for i in range(90))
    subjects, lines = check(tunes)
    assert "blocks" in subjects and "sorted" not in subjects
    assert "100% of the 81 groups of lines between blank lines begin with 'X:'; --records blank learns" in lines
    assert "blocks" not in check(tunes, records="blank")[0]
    paragraphs = "\n\n".join(f"{i * 7919 % 9973} a\nb\nc" for i in range(90))
    double_spaced = "\n\n".join(f"X:{i * 7919 % 9973}" for i in range(90))
    indented = "\n\n".join(f"  {i * 7919 % 9973} a\nb\nc" for i in range(90))
    for text in (paragraphs, double_spaced, indented, sentences(300)):
        assert "blocks" not in check(text)[0]


def test_records_longer_than_the_window_are_counted(check):
    names = [f"{i * 7919 % 9973:05}\n{i}" for i in range(100)]
    text = "\n\n".join([*names, *(["x" * 40] * 10)])
    subjects, lines = check(text, records="blank", block_size=40)
    assert "cut" in subjects and "more than --block-size 40 characters" in lines and "the longest has 41" in lines
    assert "cut" not in check(text, records="blank", block_size=41)[0]


def test_duplicate_records_and_those_in_both_splits(check):
    names = "".join(f"{i * 7919 % 9973}\n" for i in range(100))
    subjects, lines = check(names * 2, records=True)
    assert subjects == ["size", "duplicates", "overlap"]
    assert "records of 180 to train on repeat another, the most frequent 2 times" in lines
    assert "records of 20 to validate are also trained on" in lines


def test_large_texts_are_looked_at_in_part(check, monkeypatch):
    """But symbols are counted in all."""
    monkeypatch.setattr("training.fit.warnings.AT_MOST", 100)
    names = "".join(f"{i * 7919 % 9973}\n" for i in range(20))
    subjects, lines = check(names * 10, records=True)
    assert subjects == ["size", "duplicates", "overlap"] and lines.count("of the first 100 characters") == 2
    assert check(sentences(300) + "€")[0] == ["size", "rare"]


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{{"text": "some {} words", "id": {}}}', "look like JSON objects"),
        ('{},"a name",{}', "look like a table of 3 columns, whose commas, quotes and header"),
        ("{}\t{}", "look like a table of 2 columns, whose tabs"),
        ("word, {} and {}, then", None),
        ("word {} {}", None),
    ],
)
def test_tables_and_json_are_pointed_out(check, records, line, said):
    text = "".join(line.format(i * 7919 % 9973, i * 31 % 77) + "\n" for i in range(60))
    subjects, lines = check(text, records=records)
    assert (said in lines and "format" in subjects) if said else "format" not in subjects
