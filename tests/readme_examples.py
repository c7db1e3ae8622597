"""The documents' curl examples: runs them and lays out their output as the documents show it.

python tests/readme_examples.py http://localhost:8000    writes the outputs into the documents anew

Ids, times, hashes and digits after the second decimal become …; so do the members that every answer has (ENVELOPE),
unless the document shows them. JSON longer than a line is broken into lines.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCUMENTS = tuple(ROOT / folder / "README.md" for folder in ("", "service", "training", "deploy", "tests"))
EXAMPLE = re.compile(
    r"""```console\n\$\ (curl\ -s(?=[^\n]*localhost:8000)  # of a server that the test starts
    (?:[^\n']|'[^']*')*)\n  # to the end of the line on which the body ends
    (.*?)```""",
    re.DOTALL | re.VERBOSE,
)
WIDTH = 118
LONGEST_LIST = 12
ENVELOPE = ("id", "object", "created", "model", "usage", "chargpt")


class Bare(str):
    """A number as it is shown: without quotes."""


def elided(output: str) -> str:
    """An output with … for ids, times, hashes and digits after the second decimal."""
    output = output.replace("\r", "")
    output = re.sub(r'"id":"(cmpl-)?[0-9a-f]{32}"', r'"id":"\1…"', output)
    output = re.sub(r'"created":\d+', '"created":"…"', output)
    output = re.sub(r'("checkpoint_sha256":"|x-checkpoint: )[0-9a-f]{64}', r"\1…", output)
    output = re.sub(r'("[a-z]+_seconds":|"seconds_per_character":)[0-9.e-]+', r'\1"…"', output)
    return re.sub(r"(?m)^((?:x-[a-z-]+-time|x-time-per-token|date|content-length): ).*", r"\1…", output)


def rounded(number: str) -> Bare:
    return Bare(re.sub(r"(\d\.\d\d)\d+(?:e-\d+)?", r"\1…", number))


def one_line(value: Any) -> str:
    match value:
        case Bare() | "…":
            return str(value)
        case dict():
            return "{" + ", ".join(head + one_line(member) for head, member in children(value)) + "}"
        case list():
            return "[" + ", ".join(map(one_line, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def children(value: dict[str, Any] | list[Any]) -> list[tuple[str, Any]]:
    """(what stands before it, value) of each member; "…" is a member without a name."""
    if isinstance(value, list):
        return [("", item) for item in value]
    return [("" if key == "…" else f"{json.dumps(key)}: ", member) for key, member in value.items()]


def lines_of(value: Any, indent: int = 0) -> list[str]:
    """JSON in lines of at most WIDTH characters where strings allow; what fits on one line stays on one."""
    if len(one := one_line(value)) + indent <= WIDTH or not isinstance(value, dict | list):
        return [one]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    lines, is_full = [opening], False
    found = children(value)
    for number, (head, child) in enumerate(found):
        first, *rest = lines_of(child, indent + 1 + len(head))
        parts = [head + first, *rest]
        parts[-1] += "," if number < len(found) - 1 else closing
        space = " " if number else ""
        fits = len(parts) == 1 and indent + len(lines[-1]) + len(space) + len(parts[0]) <= WIDTH
        if number == 0 or fits and (not is_full or child == "…"):
            lines[-1] += space + parts[0]
            lines += [" " + part for part in parts[1:]]
        else:
            lines += [" " + part for part in parts]
        is_full = len(parts) > 1
    return lines


def cut(value: Any) -> Any:
    """Long lists by their first two elements."""
    if isinstance(value, dict):
        return {key: cut(member) for key, member in value.items()}
    if isinstance(value, list):
        return [cut(item) for item in (value if len(value) <= LONGEST_LIST else [*value[:2], "…"])]
    return value


def laid_out(output: str, whole: bool) -> str:
    """An output as a document shows it; `whole` keeps the members of ENVELOPE."""
    lines = []
    for line in elided(output).rstrip("\n").split("\n"):
        if line.startswith("{"):
            answer = json.loads(line, parse_float=rounded)
            if not whole and {"choices", "data"} & set(answer):
                answer = {key: member for key, member in answer.items() if key not in ENVELOPE} | {"…": "…"}
            lines += lines_of(cut(answer))
        else:
            if len(line) > WIDTH and line.startswith("data: {"):  # the last event of a stream
                event = json.loads(line.removeprefix("data: "))
                short = {key: {"…": "…"} if isinstance(member, dict) else member for key, member in event.items()}
                line = "data: " + one_line(short)
            lines.append(line)
    return "\n".join(lines) + "\n"


def run(command: str, url: str, whole: bool) -> str:
    command = command.replace("localhost:8000", url.removeprefix("http://"))
    finished = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    return laid_out(finished.stdout, whole)


def shows_all(output: str) -> bool:
    return '"usage": ' in output


def examples() -> list[tuple[str, str]]:
    """(command, output) of each example."""
    return [found for document in DOCUMENTS for found in EXAMPLE.findall(document.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    for document in DOCUMENTS:
        filled = EXAMPLE.sub(
            lambda match: f"```console\n$ {match[1]}\n{run(match[1], sys.argv[1], shows_all(match[2]))}```",
            document.read_text(encoding="utf-8"),
        )
        document.write_text(filled, encoding="utf-8")
