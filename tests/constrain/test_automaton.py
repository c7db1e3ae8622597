import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.constrain.automaton import Automaton, Guide, LengthError, MinimumLength, StopPattern
from service.constrain.regex import compile_choice, compile_regex, compile_without

VOCABULARY = "abc"
# In some, every character of the vocabulary stays in the pattern, so none can end the text.
PATTERNS = [
    "a", "a*", "a+b", "(ab|c)*", "(aa)*", "(aaa|bb)*c?", "a{2,4}", "(a|b)*abb", "(...)*", "(..|a.)*", ".*", "a?b?c?",
    "(abc|abd|ab)*", "a(b|cc(a|bbb))*", "(a|ab)(c|bcd)?", "(abc)?", "b|(a{3})*", "[^a]+a", "((a|b)(b|c)){1,2}",
    "", "d?",
]  # fmt: skip


def follow(automaton, text, vocabulary=VOCABULARY):
    """The guide after `text`; None where the text leaves the pattern."""
    guide = Guide(automaton)
    return guide if all(guide.push(vocabulary.index(c)) for c in text) else None


@settings(max_examples=100)
@given(
    st.lists(st.text("abcz", min_size=1, max_size=4), max_size=5),
    st.none() | st.sets(st.sampled_from(VOCABULARY), min_size=1).map(frozenset),
    st.none() | st.sampled_from(VOCABULARY),
)
def test_texts_without_words_are_those_that_contain_none(words, allowed, end):
    """And nothing follows the end."""
    automaton = Automaton.unpack(compile_without(words, VOCABULARY, allowed=allowed, end=end).pack())
    for length in range(6):
        for text in map("".join, itertools.product(VOCABULARY, repeat=length)):
            is_good = not any(word in text for word in words) and (end is None or end not in text[:-1])
            is_good = is_good and all(allowed is None or c in allowed or c == end for c in text)
            assert (follow(automaton, text) is not None) == is_good, text


def allowed_by(guide, remaining, may_leave=True):
    guide.remaining, guide.may_leave = remaining, may_leave
    return guide.allowed()


def matches(pattern, least, most):
    texts = ("".join(t) for n in range(least, most + 1) for t in itertools.product(VOCABULARY, repeat=n))
    return {t for t in texts if re.fullmatch(pattern, t)}


def check_allowed(guide, prefix, language, min_tokens):
    """Compare with the matches of allowed lengths; returns (allowed ids, those in the pattern)."""
    good = {i for i, c in enumerate(VOCABULARY) if any(t.startswith(prefix + c) for t in language)}
    ids = set(range(len(VOCABULARY)))
    mask = guide.allowed()
    mine = ids if mask is None else set(np.flatnonzero(mask))
    if mask is not None:
        assert (mask.dtype, mask.shape, mask.flags.writeable) == (np.bool_, (len(VOCABULARY),), False)
        assert not mask.all()
    assert mine, "no dead end"
    if prefix not in language or len(prefix) < min_tokens:
        assert mine == good
    else:
        may_leave = guide.may_leave or not good
        leaving = {i for i in ids if may_leave and follow(guide.automaton, prefix + VOCABULARY[i]) is None}
        assert mine == good | leaving or (mask is None and not good | leaving)
    return mine, good


@given(st.sampled_from(PATTERNS), st.integers(0, 6), st.integers(0, 6), st.randoms(use_true_random=False))
@settings(max_examples=350)
def test_guided_texts_match_within_their_budget(pattern, min_tokens, room, chance):
    max_tokens = min(6, min_tokens + room)
    automaton = compile_regex(pattern, VOCABULARY)
    reference = re.compile(pattern)
    language = matches(pattern, min_tokens, max_tokens)
    minimum = MinimumLength.of(automaton, min_tokens, max_tokens)
    assert (minimum is not None) == bool(language)
    if not min_tokens:
        assert (automaton.min_length <= max_tokens) == bool(language)
    if minimum is None:
        return
    if min_tokens <= automaton.min_length and chance.random() < 0.5:
        minimum = None  # which is the same
    else:
        minimum = MinimumLength.unpack(minimum.pack())
    options = {} if chance.random() < 0.5 else {"may_leave": False}
    guide, text = Guide(automaton, max_tokens, minimum, **options), ""
    while len(text) < max_tokens and not guide.must_end:
        assert guide.may_end == bool(reference.fullmatch(text))
        mine, good = check_allowed(guide, text, language, min_tokens)
        id = chance.choice(sorted(mine))
        taken = guide.push(id)
        assert taken == (id in good)
        if not taken:
            break
        text += VOCABULARY[id]
    assert text in language and guide.may_end
    if guide.must_end and len(text) < max_tokens:
        assert not any(longer != text and longer.startswith(text) for longer in language)


@given(
    st.sampled_from(PATTERNS),
    st.integers(0, 4),
    st.integers(0, 4),
    st.booleans(),
    st.lists(st.integers(0, 2), max_size=7),
)
@settings(max_examples=200)
def test_without_masks_a_guide_refuses_the_first_id_after_which_nothing_matches(pattern, least, room, may_leave, ids):
    automaton, language = compile_regex(pattern, VOCABULARY), matches(pattern, least, least + room)
    if not language:
        return
    minimum = MinimumLength.of(automaton, least, least + room)
    guide, text, refused = Guide(automaton, least + room, minimum, may_leave, masks=False), "", None
    for id in ids:
        assert guide.allowed() is None
        longer = text + VOCABULARY[id]
        taken = guide.push(id)
        assert taken == any(t.startswith(longer) for t in language)
        if not taken:
            refused = id
            break
        text = longer
    assert guide.accepts(None) == (text in language)
    if refused is not None:
        assert guide.accepts(refused) == (text in language and may_leave and follow(automaton, longer) is None)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_forced_ids_are_those_that_every_match_begins_with(pattern):
    language, forced = matches(pattern, 0, 7), ""
    while forced not in language:
        following = {t[len(forced)] for t in language if t.startswith(forced)}
        if len(following) > 1:
            break
        forced += following.pop()
    found = Guide(compile_regex(pattern, VOCABULARY)).forced()
    assert "".join(VOCABULARY[id] for id in found) == forced


def test_a_text_that_cannot_be_completed_further_ends_with_any_id():
    """Every character stays in the pattern, which needs two more, but only one remains."""
    guide = Guide(compile_regex("(..)*", VOCABULARY))
    assert allowed_by(guide, 3) is None
    assert guide.push(0) and guide.push(0)
    for may_leave in (False, True):
        assert allowed_by(guide, 1, may_leave) is None
        assert not any(guide.push(id) for id in range(3))
    assert guide.may_end
    assert allowed_by(guide, 2) is None and guide.push(2)  # a larger budget allows it


@pytest.mark.parametrize("remaining", [2, 0, -1])
def test_a_limit_that_no_match_keeps_is_an_error(remaining):
    with pytest.raises(ValueError, match=f"no match ends within the limit; characters left: {remaining}"):
        Guide(compile_regex("abc", VOCABULARY), remaining).allowed()


@given(st.sampled_from(PATTERNS), st.integers(0, 300), st.integers(0, 20))
@settings(max_examples=100)
def test_layers_of_a_minimum_length_are_those_of_the_definition(pattern, minimum, room):
    """However long the minimum is: they repeat."""
    automaton = compile_regex(pattern, VOCABULARY)
    found = MinimumLength.of(automaton, minimum, minimum + room)
    ends = [automaton.accepting]  # by length: the states from which some text of exactly so many characters matches
    for _ in range(minimum + room):
        ends.append(np.append(ends[-1], False)[automaton.table].any(axis=1))
    layers = [np.any(ends[missing : missing + room + 1], axis=0) for missing in range(minimum + 1)]
    assert (found is not None) == bool(layers[minimum][0])
    for missing, layer in enumerate(layers if found is not None else ()):
        row = found.layers[found._index(missing)]
        assert np.unpackbits(row, count=len(layer)).astype(bool).tolist() == layer.tolist()


def test_a_minimum_length_is_small_or_refused():
    assert len(MinimumLength.of(compile_regex(".*", VOCABULARY), 16_000, 16_384).layers) == 1
    assert len(MinimumLength.of(compile_regex("(.{7})*", VOCABULARY), 16_002, 16_002).layers) == 7
    assert len(MinimumLength.of(compile_regex(".{0,900}", VOCABULARY), 500, 900).pack()) < 20_000
    # Cycles of 29, 31, 37 and 41 states: the layers repeat only after 1,363,783.
    cycles = "aa(.{29})*|ab(.{31})*|ba(.{37})*|bb(.{41})*"
    automaton = compile_regex(cycles, VOCABULARY)
    message = f"an automaton of {len(automaton.table)} states is too large for a minimum length of 1000000"
    with pytest.raises(LengthError, match=message):
        MinimumLength.of(automaton, 1_000_000, 1_000_000)


STOPS = ["a", "a+", "ab*c", "(ab|b)c", "abab", "a.{2}b", "(a|b){3}", "c.*a", "(abc|bc)+", "aab|ab|b{3}", "[^a]a*b"]


@given(st.sampled_from(STOPS), st.text(VOCABULARY, max_size=25))
@settings(max_examples=250)
def test_stop_patterns_find_every_match_and_hold_it_back(pattern, text):
    automaton, reference = compile_regex(pattern, VOCABULARY), re.compile(pattern)
    stop = StopPattern(automaton)
    emitted = 0
    held = []
    for end in range(1, len(text) + 1):
        found = stop.push(VOCABULARY.index(text[end - 1]))
        lengths = [end - start for start in range(end) if reference.fullmatch(text, start, end)]
        assert found == max(lengths, default=None)
        if found is not None:
            assert all(h >= before - (end - found) for before, h in held if before > end - found)
        # Held: the longest suffix that can be the start of a match.
        guides = [(length, follow(automaton, text[end - length : end])) for length in range(1, end + 1)]
        assert stop.held == max((n for n, guide in guides if guide is not None and not guide.must_end), default=0)
        held.append((end, stop.held))
        assert end - stop.held >= emitted, "emitted ids are final"
        emitted = end - stop.held


def test_partial_matches_are_at_most_as_many_as_states():
    automaton = compile_regex("(a|b)*c", VOCABULARY)
    stop = StopPattern(automaton)
    for n in range(1, 3000):
        assert stop.push(n % 2) is None
        assert stop.held == n and len(stop._starts) <= len(automaton.table)
    assert stop.push(2) == 3000


def test_packed_automata_are_small():
    large = [chr(c) for c in range(0x4E00, 0x4E00 + 5000)]
    assert len(compile_regex("[一-龥]{3,900}", large).pack()) < 4000
    assert len(compile_choice(["".join(large[i : i + 10]) for i in range(0, 500, 5)], large).pack()) < 20_000
