"""The conditions of a request, compiled, without HTTP."""

import random

import pytest

from service.text.errors import InvalidRequestError
from service.text.patterns import PatternCompiler
from service.text.work import run


@pytest.mark.parametrize(
    ("pattern", "words", "message"),
    [
        ("a+", ("a",), r"nothing can match that has none of bad_words"),
        ("(a|b){1,300}", 9, r"the pattern needs more than 5000 states; simplify it, or give fewer bad_words"),
        ("a+", 40, r"the words need \d+ states \(limit 1000\); give fewer or shorter words"),
    ],
)
def test_an_error_of_a_pattern_with_bad_words_says_what_to_change(pattern, words, message):
    if isinstance(words, int):
        chance = random.Random(0)
        words = tuple("".join(chance.choices("ab", k=40)) for _ in range(words))
    with pytest.raises(InvalidRequestError, match=f"^regex: {message}$"):
        run(PatternCompiler("abc", 1000).compile("regex", pattern, without=words))
