from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.model.tokenizer import NEVER, UNKNOWN, CharTokenizer, UnknownCharacterError
from training.text.encoding import encode_array

any_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(any_text)
def test_round_trip_over_any_unicode(text):
    tokenizer = CharTokenizer(sorted(set(text)))
    assert tokenizer.characters == sorted(set(text))
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == tokenizer.decode_array(np.array(ids)) == text
    assert np.array_equal(encode_array(tokenizer, text), ids)


@given(any_text, st.characters(exclude_categories=["Cs"]), st.integers(0, 20))
def test_unknown_characters_are_named_with_their_offset(text, unknown, offset):
    tokenizer = CharTokenizer(sorted(set(text) - {unknown} or {"\0\1"[unknown == "\0"]}))
    known = tokenizer.characters[0]
    for encode in (tokenizer.encode, partial(encode_array, tokenizer)):
        with pytest.raises(UnknownCharacterError) as caught:
            encode(known * offset + unknown + known + unknown)
        assert (caught.value.character, caught.value.offset) == (unknown, offset)
        assert f"U+{ord(unknown):04X}" in str(caught.value)
        assert f"offset {offset}" in str(caught.value)


def test_unsorted_vocabularies_keep_their_order():
    tokenizer = CharTokenizer(["b", "a", "€"])
    assert tokenizer.encode("a€b") == [1, 2, 0]
    assert encode_array(tokenizer, "a€b").tolist() == [1, 2, 0]


@pytest.mark.parametrize("vocabulary", [[], ["ab"], ["a", "a"], ["\ud800"], ["\udfff"], [""]])
def test_invalid_vocabularies_are_refused(vocabulary):
    with pytest.raises(ValueError, match="vocabulary"):
        CharTokenizer(vocabulary)


def test_the_unknown_symbol_has_an_id_only_if_the_vocabulary_has_one():
    tokenizer = CharTokenizer(["a", UNKNOWN], has_unknown=True)
    assert (tokenizer.unknown_id, tokenizer.replacement) == (1, UNKNOWN)
    assert tokenizer.sampling_bias == ((1, NEVER),)
    tokenizer = CharTokenizer(["a", UNKNOWN])  # an ordinary character
    assert (tokenizer.unknown_id, tokenizer.replacement, tokenizer.sampling_bias) == (None, " ", ())
    with pytest.raises(ValueError, match=r"unknown symbol, U\+FFFD"):
        CharTokenizer(["a"], has_unknown=True)


@given(any_text, any_text)
def test_an_adapted_text_keeps_its_length_and_its_known_characters(text, vocabulary):
    tokenizer = CharTokenizer(sorted(set(vocabulary)))
    adapted = tokenizer.adapted(text)
    assert len(adapted) == len(text) and set(adapted) <= set(vocabulary)
    assert all(new == old for new, old in zip(adapted, text, strict=True) if old in vocabulary)
