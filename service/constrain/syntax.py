"""Refuse regular expressions that are too large, or have syntax that API.md does not document.

Python's own parser gives a pattern its meaning, see parse.py. But it accepts more syntax, and its tree has no
positions. So `scan` reads each pattern first. It names the position of a fault, and bounds the parser's time and depth.
"""

from __future__ import annotations

import re
from re import _parser  # type: ignore[attr-defined]
from typing import NamedTuple

from service.constrain.errors import RegexError

MAX_NESTING = 50  # depth of groups
MAX_POSITIONS = 2000  # characters and classes of a pattern after counted repeats are expanded


class Atom(NamedTuple):
    """A character, an escape or a class of a pattern."""

    offset: int
    source: str
    text: str  # what the parser reads in place of `source`


class _Refusals:
    """rows: pairs of syntax that is refused and the message. The refused syntax replaces each @ of the message."""

    def __init__(self, *rows: tuple[str, str]):
        self._syntax = re.compile("|".join(f"({syntax})" for syntax, _ in rows), re.DOTALL)
        self._messages = ["", *(message for _, message in rows)]

    def check(self, pattern: str, offset: int) -> None:
        if found := self._syntax.match(pattern, offset):
            raise RegexError(self._messages[found.lastindex or 0].replace("@", found[0]), offset)


_ESCAPES = (
    (r"\\\Z", r"'\' at the end of the pattern; write \\ for a literal '\'"),
    (r"\\x(?![0-9a-fA-F]{2}).{0,2}", r"'@' is not a code point; write \x and 2 hexadecimal digits"),
    (r"\\u(?![0-9a-fA-F]{4}).{0,4}", r"'@' is not a code point; write \u and 4 hexadecimal digits"),
    (
        r"\\U(?!00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}).{0,8}",
        r"'@' is not a code point; write \U and 8 hexadecimal digits",
    ),
    (r"\\0", r"octal escape '@' is not supported; write \x00"),
    (r"\\[1-9]", "backreference '@' is not supported; repeat the group itself"),
    (
        r"\\(?![dDwWsSntrfvxuU])[a-zA-Z]",
        r"escape '@' is not supported; supported are \d \D \w \W \s \S \n \t \r \f \v \xhh \uhhhh \Uhhhhhhhh and "
        "escaped punctuation",
    ),
)
_NO_ATOM = _Refusals(
    (r"[*+?{]", r"'@' has nothing to repeat; write \@ for a literal '@'"),
    (r"[\^$]", r"anchor '@' is not supported; leave it out, or write \@ for a literal '@'"),
    *(
        (syntax, f"{kind} '@' is not supported; groups are (...) and (?:...)")
        for syntax, kind in (
            (r"\(\?[=!]", "lookahead"),
            (r"\(\?<[=!]", "lookbehind"),
            (r"\(\?P=", "backreference"),
            (r"\(\?P?<", "named group"),
            (r"\(\?>", "atomic group"),
            (r"\(\?\(", "conditional group"),
            (r"\(\?#", "comment"),
            (r"\(\?(?!:).?", "group"),
        )
    ),
    *_ESCAPES,
)
_NO_MEMBER = _Refusals((r"\[", r"'@' inside a character class; write \@ for a literal '@'"), *_ESCAPES)
_NO_QUANTIFIER = _Refusals(
    (r"\{(?![0-9]+(?:,[0-9]*)?\})", r"'@' without a count; write {m}, {m,} or {m,n}, or \@ for a literal '@'"),
    (r"\{(?=[0-9,]{20})", "a count has too many digits; lower the repeat counts"),
)
_NO_SECOND = _Refusals(
    (r"\+", "possessive quantifiers are not supported; leave out this '@'"),
    (r"[*?{]", "'@' follows another quantifier; group the first as (?:...)"),
)

_CHARACTER = r"(?:\\(?:x..|u....|U........|.)|.)"
_ATOM = re.compile(rf"(?P<begin>\[\^?)(?P<members>\]?(?:\\.|[^][\\])*)(?P<end>\]?)|{_CHARACTER}", re.DOTALL)
_MEMBER = re.compile(f"({_CHARACTER})(?:-({_CHARACTER}))?", re.DOTALL)
_QUANTIFIER = re.compile(r"(?:[*+?]|\{([0-9]+)(,?)([0-9]*)\})\??")
_SET_OPERATOR = re.compile(r"--|&&|~~|\|\|")  # Python's parser warns that a later version may read it in a class


def scan(pattern: str) -> list[Atom]:
    """Return the atoms of a pattern.

    Raises:
        RegexError: the syntax is not supported, or the pattern is too large.
    """
    atoms: list[Atom] = []
    opened: list[int] = []  # offsets of the open groups
    sizes = [0]  # characters and classes so far, of the pattern and of each open group
    at = 0
    while at < len(pattern):
        start = at
        if pattern[at] == "|":
            at += 1
            continue
        if pattern[at] == ")":
            if not opened:
                raise RegexError(r"unmatched ')'; write \) for a literal ')'", at)
            opened.pop()
            at, size = at + 1, sizes.pop()
        else:
            _NO_ATOM.check(pattern, at)
            if pattern[at] == "(":
                if len(opened) == MAX_NESTING:
                    raise RegexError(f"groups are nested more than {MAX_NESTING} deep", at)
                opened.append(at)
                sizes.append(0)
                at += 3 if pattern.startswith("?:", at + 1) else 1
                continue
            atoms.append(_atom(pattern, at))
            at, size = at + len(atoms[-1].source), 1
        at, size = _repeated(pattern, at, size)
        sizes[-1] += size
        _check_size(sizes[-1], start)
    if opened:
        raise RegexError(r"unmatched '('; write \( for a literal '('", opened[-1])
    return atoms


def _atom(pattern: str, offset: int) -> Atom:
    found = next(_ATOM.finditer(pattern, offset))  # each character may begin an atom
    source = text = found[0]
    if found["begin"]:
        members = list(_MEMBER.finditer(pattern, *found.span("members")))
        for member in members:
            _check_member(pattern, member)
        if not found["end"]:
            _NO_MEMBER.check(pattern, found.end())
            raise RegexError(r"unmatched '['; write \[ for a literal '['", offset)
        if _SET_OPERATOR.search(source):
            text = "".join([found["begin"], *map(_escaped, members), "]"])
    return Atom(offset, source, text)


def _check_member(pattern: str, member: re.Match[str]) -> None:
    low, high = member.groups()
    _NO_MEMBER.check(pattern, member.start())
    if high is None:
        return
    _NO_MEMBER.check(pattern, member.start(2))
    if len(low) == len(high) == 1 and low <= high:
        return
    try:
        _parser.parse(f"[{_escaped(member)}]")
    except re.error:
        why = "is reversed; write the lower end first, or"
        if re.search(r"\\[dDwWsS]", member[0]):
            why = "needs a character at each end; write"
        raise RegexError(rf"range '{member[0]}' {why} \- for a literal '-'", member.start()) from None


def _escaped(member: re.Match[str]) -> str:
    return "-".join(re.escape(end) if len(end) == 1 else end for end in member.groups() if end)


def _repeated(pattern: str, offset: int, size: int) -> tuple[int, int]:
    """Read a quantifier, if there is one. Return the offset after it, and the size of what it repeats, expanded."""
    _NO_QUANTIFIER.check(pattern, offset)
    found = _QUANTIFIER.match(pattern, offset)
    if found is None:
        return offset, size
    low, comma, high = found.groups("")
    if high and int(high) < int(low):
        count = found[0].removesuffix("?")
        raise RegexError(f"count {count} is reversed; write the smaller number first", offset)
    _NO_SECOND.check(pattern, found.end())
    if low:
        size *= max(int(low), 1) if comma and not high else int(high or low)
    _check_size(size, offset)
    return found.end(), size


def _check_size(size: int, offset: int) -> None:
    if size > MAX_POSITIONS:
        raise RegexError(
            f"expands to {size} characters and classes (limit {MAX_POSITIONS}); lower the repeat counts", offset
        )
