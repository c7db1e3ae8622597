import contextlib
import itertools
import re
import signal
import subprocess
import sys
import tracemalloc
import warnings
from re import _parser as sre_parser

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from service.constrain.automaton import MAX_CELLS, Automaton, Guide
from service.constrain.parse import Alphabet, term_of
from service.constrain.regex import RegexError, compile_choice, compile_regex, compile_without, ended, intersection
from service.constrain.syntax import MAX_NESTING, MAX_POSITIONS
from tests.toolbox.launch import ROOT

VOCABULARY = list("ab1_ \n.-é٣\u00a0]")  # letters, digits and spaces beyond ASCII too
PRINTABLE = ["\n", *map(chr, range(32, 127))]
LARGE = [*PRINTABLE, *map(chr, range(0xA1, 0x250)), *map(chr, range(0x4E00, 0x4E00 + 4500))]


def accepts(automaton, text, vocabulary=VOCABULARY):
    guide = Guide(automaton)
    return all(guide.push(vocabulary.index(c)) for c in text) and guide.may_end


CLASS_ITEMS = [*"ab1_ .z", *r"\d \w \s \D \W \S \n \] \- \x61 a-b 1-b \.-1 && ~~ || +--".split()]
ATOMS = [*"aab11_ -é٣z]", *r". \d \w \s \D \W \S \n \. \x61 \u00e9 \] ()".split()]

char_classes = st.builds(
    lambda negated, first, items, last: f"[{'^' * negated}{first}{''.join(items)}{last}]", st.booleans(),
    st.sampled_from(["", "]", "-"]), st.lists(st.sampled_from(CLASS_ITEMS), min_size=1, max_size=3),
    st.sampled_from(["", "-", "^"]),
)  # fmt: skip


# re backtracks exponentially on ambiguous patterns. Hence few groups; counted groups and nested loops are tested apart.
counts = ["{0}", "{1}", "{2}", "{3}", "{0,}", "{1,}", "{2,}", "{0,1}", "{0,2}", "{1,3}", "{2,2}", "{0,0}", "{1,2}?"]
loops = ["", "", "", "*", "+", "?", "*?", "+?", "??"]


def groups(parts, quantifiers):
    return st.builds(
        lambda opening, body, quantifier: f"{opening}{body}){quantifier}", st.sampled_from(["(", "(?:"]),
        alternations(parts, 2), st.sampled_from(quantifiers),
    )  # fmt: skip


def alternations(parts, branches):
    sequences = st.lists(parts, max_size=3).map("".join)
    return st.lists(sequences, min_size=1, max_size=branches).map("|".join)


atoms = st.builds(str.__add__, st.sampled_from(ATOMS) | char_classes, st.sampled_from(loops) | st.sampled_from(counts))
patterns = alternations(atoms | groups(atoms | groups(atoms, ["", "?", "??"]), loops), 3)


def compiled(pattern):
    """(automaton, Python's pattern); the automaton is None where nothing can match. Skips patterns too large."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of syntax whose meaning may change
        reference = re.compile(pattern)
    try:
        return compile_regex(pattern, VOCABULARY), reference
    except RegexError as error:
        assume(not re.search("states; simplify|steps to compile|expands to", str(error)))
        assert "nothing can match" in str(error)
        return None, reference


@contextlib.contextmanager
def within(seconds):
    """Rejects an example that takes more CPU time: in rare ones re takes minutes."""
    before = signal.signal(signal.SIGVTALRM, lambda *_: reject())  # re looks for signals while it searches
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@given(patterns, st.data())
@settings(max_examples=120, derandomize=True)
def test_the_language_is_that_of_fullmatch(pattern, data):
    with within(seconds=5):
        check_language(pattern, data)


def check_language(pattern, data):
    automaton, reference = compiled(pattern)
    texts = ["".join(c) for length in range(3) for c in itertools.product(VOCABULARY, repeat=length)]
    texts += data.draw(st.lists(st.text(VOCABULARY, min_size=3, max_size=5), max_size=20))
    texts += ["".join(c) for c in itertools.product("ab1", repeat=4)]
    if automaton is None:
        assert not any(reference.fullmatch(text) for text in texts)
        return
    assert automaton.distance.min() >= 0, "every state is live"
    for text in texts:
        assert accepts(automaton, text) == bool(reference.fullmatch(text)), text
    # Random walks find long matches; altered ones are near misses.
    chance = data.draw(st.randoms(use_true_random=False))
    for _ in range(10):
        state, text = 0, ""
        while len(text) < 5 and not (automaton.accepting[state] and chance.random() < 0.2):
            onward = np.flatnonzero(automaton.table[state][automaton.classes] >= 0)
            if not onward.size:
                break
            id = chance.choice(onward.tolist())
            state, text = int(automaton.table[state, automaton.classes[id]]), text + VOCABULARY[id]
        assert bool(automaton.accepting[state]) == bool(reference.fullmatch(text)), text
        at = chance.randrange(len(text) + 1)
        altered = text[:at] + chance.choice(["", *VOCABULARY]) + text[at + chance.randrange(2) :]
        assert accepts(automaton, altered) == bool(reference.fullmatch(altered)), altered


counted_parts = st.lists(
    st.sampled_from(["a", "ab", "ba?", "a+b", "[ab]", "aa", "b", "(?:ba){1,2}", "a{3}"]), min_size=1, max_size=3
)
counted = st.builds(
    lambda parts, low, more: f"(?:{'|'.join(parts)}){{{low},{'' if more is None else low + more}}}", counted_parts,
    st.integers(0, 4), st.none() | st.integers(0, 4),
)  # fmt: skip


@given(counted, st.sampled_from(["", "b", "a?", "ab"]), st.sampled_from(["", "{2}", "{1,2}"]))
@settings(max_examples=80)
def test_counts_of_ambiguous_parts(pattern, tail, outer):
    pattern = f"(?:{pattern}{tail}){outer}"
    automaton, reference = compiled(pattern)
    for text in map("".join, itertools.chain(*(itertools.product("ab", repeat=n) for n in range(8)))):
        assert accepts(automaton, text) == bool(reference.fullmatch(text)), text


@pytest.mark.parametrize("name", ["d", "D", "w", "W", "s", "S"])
def test_named_classes_are_those_of_re_over_all_of_unicode(name):
    last = sys.maxunicode if name.islower() else 0xFFFF  # of complements less
    characters = [chr(c) for c in range(last + 1) if not 0xD800 <= c <= 0xDFFF]
    reference = re.compile("\\" + name)
    for start in range(0, len(characters), 60_000):
        some = characters[start : start + 60_000]
        try:
            automaton = compile_regex("\\" + name, some)
            ours = automaton.table[0, automaton.classes] >= 0
        except RegexError:
            ours = np.zeros(len(some), dtype=bool)
        assert ours.tolist() == [reference.match(c) is not None for c in some]


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (r"[A-Z][a-z]+(, [A-Z][a-z]+)*\.", ["Ann.", "Ann, Bob."], ["Ann", "Ann,Bob.", "ann."]),
        (r"([A-Z][a-z]?|[cnops]|\d){1,100}", ["CCl", "C" * 50 + "Cl" * 50], ["", "l", "C" * 101, "CC" + "Cl" * 99]),
        (r"(\w+ ?){2,60}", ["ab", "a b", "a " * 60, "a" * 99], ["a", "a  b", "a " * 61]),
        (r"(\w\w? ?){5,}", ["abcde", "ab cd ef gh ij", "a" * 99], ["abcd", "ab c d ", "a  bcdef"]),
        (r"(((a*)*b?)+c|(d+|e*)*)*f", ["f", "cf", "aabbacddef", "ddeedecf"], ["", "abf", "caf", "ff"]),
    ],
)
def test_typical_patterns(pattern, matching, others):
    automaton = compile_regex(pattern, PRINTABLE)
    for text in matching + others:
        assert accepts(automaton, text, PRINTABLE) == (text in matching), text
    assert automaton.min_length <= min(map(len, matching))


def test_branches_with_unknown_characters_are_dropped():
    automaton = compile_regex("(abc|abd|(c?a)+|b(cc){0,99}|x{1000})", ["a", "b", "d"])
    texts = ["".join(c) for length in range(4) for c in itertools.product("abd", repeat=length)]
    assert [text for text in texts if accepts(automaton, text, "abd")] == ["a", "b", "aa", "aaa", "abd"]


def test_only_allowed_characters_occur():
    automaton = compile_regex(r".[^a]\w*", VOCABULARY, allowed=frozenset("ab\n"))
    texts = {t for t in map("".join, itertools.product(VOCABULARY, repeat=3)) if accepts(automaton, t)}
    assert texts == {"aba", "abb", "bba", "bbb", "a\na", "a\nb", "b\na", "b\nb"}


def test_unmatchable_patterns_name_the_missing_characters():
    message = "no character of the vocabulary matches 'é' at offset 1, '.x-z.' at offset 4$"
    with pytest.raises(RegexError, match=message):
        compile_regex(r"aéb|[x-z]b", ["a", "b"])
    with pytest.raises(RegexError, match="no allowed character of the vocabulary matches 'b' at offset 1"):
        compile_regex("ab", ["a", "b"], allowed=frozenset("a"))
    with pytest.raises(RegexError, match="matches '.\\^.x00-.uffff.' at offset 0$"):
        compile_regex(r"[^\x00-\uffff]", VOCABULARY)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("ab^c", r"offset 2: anchor '\^' is not supported; leave it out, or write \\\^ for a literal '\^'"),
        ("abc$", r"offset 3: anchor '\$' is not supported"),
        (r"\bword", r"offset 0: escape '\\b' is not supported; supported are \\d \\D"),
        (r"[\b]", r"offset 1: escape '\\b' is not supported"),
        (r"(a)\1", r"offset 3: backreference '\\1' is not supported; repeat the group itself"),
        (r"\0", r"offset 0: octal escape '\\0' is not supported; write \\x00"),
        (r"a\x6", r"offset 1: '\\x6' is not a code point; write \\x and 2 hexadecimal digits"),
        (r"\u00g0", r"offset 0: '\\u00g0' is not a code point; write \\u and 4 hexadecimal digits"),
        (r"a\x٣٣", r"hexadecimal digits"),
        (r"a\U0000062", r"offset 1: '\\U0000062' is not a code point; write \\U and 8 hexadecimal digits"),
        (r"[a-\q]", r"offset 3: escape '\\q' is not supported"),
        (r"[\U00110000]", r"offset 1: '\\U00110000' is not a code point"),
        ("ab\\", r"offset 2: '\\' at the end of the pattern; write \\\\ for a literal '\\'"),
        ("a(?=b)", r"offset 1: lookahead '\(\?=' is not supported; groups are \(...\) and \(\?:...\)"),
        ("(?<=a)b", "offset 0: lookbehind"),
        ("(?P<x>a)", "offset 0: named group"),
        ("(?>a)", "offset 0: atomic group"),
        ("(?i)a", r"offset 0: group '\(\?i' is not supported"),
        ("(?#a)", "offset 0: comment"),
        ("(a)(?(1)b|c)", "offset 3: conditional group"),
        ("a*+", "offset 2: possessive quantifiers are not supported"),
        ("a**", r"offset 2: '\*' follows another quantifier; group the first as \(\?:...\)"),
        ("*a", r"offset 0: '\*' has nothing to repeat; write \\\* for a literal '\*'"),
        ("{3}", r"offset 0: '\{' has nothing to repeat; write \\\{ for a literal '\{'"),
        ("a{", r"offset 1: '\{' without a count; write \{m\}, \{m,\} or \{m,n\}, or \\\{ for a literal '\{'"),
        ("a{٣}", r"offset 1: '\{' without a count"),
        ("a{1," + "9" * 4300 + "}", "offset 1: a count has too many digits"),
        ("a{" + "9" * 20 + "}", "offset 1: a count has too many digits"),
        ("(){" + "9" * 10 + "}", "the repetition number is too large"),
        ("a{3,2}", r"offset 1: count \{3,2\} is reversed; write the smaller number first"),
        ("a(b(c)", r"offset 1: unmatched '\('; write \\\( for a literal '\('"),
        ("ab)c", r"offset 2: unmatched '\)'; write \\\) for a literal '\)'"),
        ("a[bc", r"offset 1: unmatched '\[';"),
        ("[]", r"offset 0: unmatched '\[';"),
        ("[[:alpha:]]", r"offset 1: '\[' inside a character class; write \\\[ for a literal '\['"),
        ("[b-a]", r"offset 1: range 'b-a' is reversed; write the lower end first, or \\- for a literal '-'"),
        (r"[a-\d]", r"offset 1: range 'a-\\d' needs a character at each end; write \\- for a literal '-'"),
    ],
)
def test_unsupported_syntax_is_refused_with_its_offset(pattern, message):
    with pytest.raises(RegexError, match=message) as caught:
        compile_regex(pattern, PRINTABLE, max_characters=10_000)
    if caught.value.offset is not None:
        assert str(caught.value).startswith(f"offset {caught.value.offset}: ")


@pytest.mark.parametrize(
    ("pattern", "opcode"),
    [
        ("^a", "AT"),
        ("(?=a)", "ASSERT"),
        ("(?<!a)", "ASSERT_NOT"),
        (r"(a)\1", "GROUPREF"),
        ("(a)(?(1)b|c)", "GROUPREF_EXISTS"),
        ("(?>a)", "ATOMIC_GROUP"),
        ("a++", "POSSESSIVE_REPEAT"),
        ("(?i:a)", "SUBPATTERN"),
    ],
)
def test_what_the_scan_would_let_pass_is_refused_by_its_opcode(pattern, opcode):
    """So syntax of a later version of Python is refused too."""
    with pytest.raises(RegexError, match=f"^{opcode} is not supported$"):
        term_of(sre_parser.parse(pattern), Alphabet("ab", None))


@given(st.text(r"ab1\[](){}|*+?^-.,$:!=<>dwsxU0&~ ", max_size=12))
@settings(max_examples=800)
def test_any_text_compiles_to_the_language_of_re_or_is_refused(pattern):
    try:
        automaton = compile_regex(pattern, VOCABULARY)
    except RegexError:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        reference = re.compile(pattern)
    for text in map("".join, itertools.chain(*(itertools.product(VOCABULARY, repeat=n) for n in range(3)))):
        assert accepts(automaton, text) == bool(reference.fullmatch(text)), text


@pytest.mark.parametrize("switch", ["-O", "-OO"])
def test_patterns_are_the_same_without_assert_statements(switch):
    patterns = ["(a)", "(?:ab)+1", "((a|b){2}|[1_])*", r"\x61\u00e9?", "a(?:b|(?:1))", "(a)(b", "a)", "(?=a)"]
    program = f"""
from service.constrain.regex import RegexError, compile_regex
for pattern in {patterns}:
    try:
        print(compile_regex(pattern, {VOCABULARY}).pack())
    except RegexError as error:
        print(error)
"""
    printed = [
        subprocess.run([sys.executable, *switches, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        for switches in ((), (switch,))
    ]
    assert len(printed[0].stdout.splitlines()) == len(patterns)
    assert printed[1].stdout == printed[0].stdout


def test_limits_are_named():
    deepest = "(" * MAX_NESTING + "a" + ")" * MAX_NESTING
    for pattern, options, message in (
        ("aaaaaa", {"max_characters": 5}, "at most 5 characters, got 6"),
        ("a{10}", {"max_states": 10}, "needs more than 10 states"),
        ("ab(ab1){1000}", {}, rf"offset 7: expands to 3000 characters and classes \(limit {MAX_POSITIONS}\)"),
        ("a" * 2001, {"max_characters": 3000}, r"offset 2000: expands to 2001 characters and classes"),
        ("(a|b{0,}){1001}", {}, "offset 9: expands to 2002"),
        ("(a{1500}|b{1500}){0}", {}, "offset 9: expands to 3000"),
        ("a{40}", {"max_work": 50}, "takes more than 50 steps"),
        (f"({deepest})", {}, f"offset {MAX_NESTING}: groups are nested more than {MAX_NESTING} deep"),
    ):
        with pytest.raises(RegexError, match=message):
            compile_regex(pattern, VOCABULARY, **options)
    compile_regex(deepest, VOCABULARY)
    compile_regex("a{500}(b{2000}){0}[1_]?", VOCABULARY)
    assert len(compile_regex("a{9}", VOCABULARY, max_states=10).table) == 10
    with pytest.raises(RegexError, match=f"1101 states x 1101 character classes, more than {MAX_CELLS}"):
        compile_choice(["".join(LARGE[:1100])], LARGE[:1101])


HAN = LARGE[-1000:]
HOSTILE = [
    "(a|b)*a(a|b){20}", "(((a{1,100}){1,100}){1,100})", "(.*a){50}", "(.*.*a){30}", "(a?){500}a{500}",
    "(" + "|".join(HAN[:200]) + "|.){1,9}" + "(" + "|".join(HAN[:200]) + "|.+){1,5}",
    r"(([^ab]+|a\w+){1,30} ?){1,30}", "((a|||||||||||||||){100}){20}", "(x+x+)+y", "\\" * 999,
    "|".join(HAN[:500]), ".*" + "".join(HAN[:990]), "(a|" + "".join(HAN[:990]) + ")*", "(a{0,300}){0,300}",
    "a{" + "9" * 990 + "}", "(((((((){1000}){1000}){1000}){1000}){1000}){1000}){1000}",
    "[" + "".join(f"{a}-{b}" for a, b in zip(HAN[:330], HAN[330:660], strict=True)) + "]{0,2}",
    "[" + "".join(f"{a}-{b}" for a, b in zip(HAN[:660:2], HAN[1:660:2], strict=True)) + "]{2}",
    r"(\w*\d\w*){10}", "".join(f"[^{c}]*" for c in HAN[:200]), "(" + "|".join(f"[^{c}]{c}" for c in HAN[:140]) + ")*",
    "(.*" + ".*".join(HAN[:300]) + ")*", "a?" * 500, ".*" * 500, "".join(f"{c}?" for c in HAN[:400]),
    "(" + "".join(f"{c}?" for c in HAN[:40]) + "){40}", "(" + "(" * 45 + "a*" + ")*" * 45 + "){2000}",
    "(.{1,30}a){30}", r"[\s\S]*a[\s\S]{8}b", "(" * 5000 + ")" * 5000, "[" * 9000, "[" + "&&" * 4000 + "]", "()" * 5000,
    "[--/&&]" * 1400, "a" * 990 + "|" + "a" * 990, "[" + "a-b" * 3000 + "]", "[" + "".join(LARGE[300:]) + "]",
]  # fmt: skip


@pytest.mark.parametrize("pattern", HOSTILE, ids=lambda pattern: f"{pattern[:30]} … {len(pattern)}")
def test_hostile_patterns_are_refused_or_stay_within_every_bound(pattern):
    """The same way each time, as the bounds count work and not time."""
    answers = []
    for _ in range(2):
        try:
            automaton = compile_regex(pattern, LARGE, max_characters=10_000)
        except RegexError as error:
            answers.append(str(error))
        else:
            assert len(automaton.table) <= 1000 and automaton.table.size <= MAX_CELLS
            answers.append(automaton.pack())
    assert answers[0] == answers[1]


@given(st.lists(st.text("ab1", max_size=5), min_size=1, max_size=12))
def test_exactly_the_choices_match(choices):
    automaton = compile_choice(choices, VOCABULARY)
    for text in map("".join, itertools.chain(*(itertools.product("ab1", repeat=n) for n in range(6)))):
        assert accepts(automaton, text) == (text in choices)
    assert automaton.min_length == min(map(len, choices))
    again = Automaton.unpack(automaton.pack())
    assert (again.table == automaton.table).all()
    # Minimal: of the same size as the equivalent pattern's automaton.
    assert automaton.table.shape == compile_regex("|".join(choices), VOCABULARY).table.shape


def test_long_texts_take_memory_in_proportion_to_their_length():
    """Each state once held all of the texts that were left, which also took seconds."""
    peaks = []
    for times in (10, 80):
        tracemalloc.start()
        with pytest.raises(RegexError, match=f"the choices need {len(PRINTABLE) * times + 1} states"):
            compile_choice(["".join(PRINTABLE) * times], PRINTABLE, max_states=100)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 16 * peaks[0], peaks


@pytest.mark.parametrize(
    ("choices", "options", "message"),
    [
        ([], {}, "at least one choice is required, got none"),
        (["a", "bz"], {}, r"text 1: character 'z' \(U\+007A\) at offset 1 is not in the vocabulary"),
        (
            ["ab"],
            {"allowed": frozenset("a")},
            r"text 0: character 'b' \(U\+0062\) at offset 1 is not among the allowed",
        ),
        (["aaa", "bbb"], {"max_characters": 5}, "at most 5 characters in total, got 6"),
        (["ab1", "ba_"], {"max_states": 5}, r"need 6 states \(limit 5\)"),
    ],
)
def test_bad_choices_are_refused(choices, options, message):
    with pytest.raises(RegexError, match=message):
        compile_choice(choices, VOCABULARY, **options)


# -- bad words --


@given(
    st.lists(st.text("ab1\n", min_size=1, max_size=4), max_size=6), st.none() | st.sets(st.sampled_from("ab1\n")),
    st.sampled_from([None, "\n", "1", "z"]),
)  # fmt: skip
@settings(max_examples=200)
def test_exactly_the_texts_without_bad_words_match(words, allowed, end):
    characters = "ab1\n"
    usable = frozenset(characters if allowed is None else allowed)
    automaton = compile_without(words, characters, allowed=None if allowed is None else usable, end=end)
    found = language(automaton, characters, length=5)
    for text in map("".join, itertools.chain(*(itertools.product(characters, repeat=n) for n in range(6)))):
        begins = text[:-1] if end is not None and text.endswith(end) else text
        fits = usable.issuperset(begins) and (end is None or end not in begins)
        assert (text in found) == (fits and not any(word in text for word in words)), text
    check_states(automaton)


def check_states(automaton):
    """Every state is reachable and live, and every class has an id."""
    assert set(automaton.classes.tolist()) == set(range(automaton.table.shape[1]))
    assert automaton.distance.min() >= 0
    reached = {0}
    for _ in automaton.table:
        reached |= {int(to) for state in reached for to in automaton.table[state] if to >= 0}
    assert reached == set(range(len(automaton.table)))


def test_long_bad_words_with_a_common_end_share_its_states():
    words = [first + "the end that they have in common" for first in "abcdfgijklmpqrsuvwxyz"]
    assert len(compile_without(words, PRINTABLE).table) == len(words[0])


def test_too_many_bad_words_are_refused():
    compile_without(["abc", "abd"], "abcd", max_states=3)
    with pytest.raises(RegexError, match=r"the words need 4 states \(limit 3\); give fewer or shorter words"):
        compile_without(["abc", "add"], "abcd", max_states=3)


# -- combinations --


def language(automaton, characters, length=6):
    """All its texts of at most so many characters."""
    texts = set()
    for count in range(length + 1):
        for ids in itertools.product(range(len(characters)), repeat=count):
            state = 0
            for id in ids:
                state = automaton.table[state, automaton.classes[id]] if state >= 0 else -1
            if state >= 0 and automaton.accepting[state]:
                texts.add("".join(characters[id] for id in ids))
    return texts


PATTERNS = ["[ab]*b", "(ab)*", "[ab]{3}", "a*\n?b*", "(a|\n)*", "b+\n", "a\nb", "()"]


@pytest.mark.parametrize("one", PATTERNS)
def test_an_intersection_has_the_texts_of_both(one):
    for other in PATTERNS:
        automata = [compile_regex(pattern, "ab\n") for pattern in (one, other)]
        expected = language(automata[0], "ab\n") & language(automata[1], "ab\n")
        if not expected:
            with pytest.raises(RegexError, match="nothing can match"):
                intersection(*automata)
        else:
            assert language(intersection(*automata), "ab\n") == expected


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_ended_pattern_has_its_records(pattern):
    automaton = compile_regex(pattern, "ab\n")
    records = {text.removesuffix("\n") for text in language(automaton, "ab\n")}
    expected = {f"{text}\n" for text in records if "\n" not in text and len(text) < 6}
    if not expected:
        with pytest.raises(RegexError, match="nothing can match"):
            ended(automaton, 2)
    else:
        assert language(ended(automaton, 2), "ab\n") == expected


def test_a_combination_that_is_too_large_is_refused():
    automata = [compile_regex(pattern, "ab") for pattern in ("([ab]{97})*", "([ab]{89})*")]
    with pytest.raises(RegexError, match="more than 5000 states"):
        intersection(*automata)
