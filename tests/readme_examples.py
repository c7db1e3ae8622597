"""Generated parts of the documents: outputs of curl examples, tables of settings and metrics.

PYTHONPATH=. python tests/readme_examples.py http://localhost:8000    regenerates them in place

In outputs, … replaces ids, times, hashes, digits after the second decimal place, and the members common to all
responses (ENVELOPE) unless the document shows them. JSON longer than one line is wrapped.
"""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from service.observe.metrics import Metrics
from service.settings import Settings
from tests.helpers import call

ROOT = Path(__file__).parents[1]
README, OPERATIONS, TRAINING = (ROOT / name for name in ("README.md", "service/OPERATIONS.md", "training/README.md"))
FOLDERS = ("service", "training", "deploy", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
EXAMPLE = re.compile(
    r"""```console\n\$\ (curl\ -s(?=[^\n]*localhost:8000)  # against the server under test
    (?:[^\n']|'[^']*')*)\n  # to the end of the line on which the body ends
    (.*?)```""",
    re.DOTALL | re.VERBOSE,
)
SCORE = re.compile(r"```console\n((?:\$ [^\n]+\n)*?\$ \S+ (-m training score[^\n]+)\n)(.*?)```", re.DOTALL)
WIDTH = 118
LONGEST_LIST = 12
ENVELOPE = ("id", "object", "created", "model", "usage", "chargpt")


class Bare(str):
    """Printed without quotes."""


def elided(output: str) -> str:
    """Replaces ids, times and hashes with "…"."""
    output = output.replace("\r", "")
    output = re.sub(r'"id":"(cmpl-)?[0-9a-f]{32}"', r'"id":"\1…"', output)
    output = re.sub(r'"created":\d+', '"created":"…"', output)
    output = re.sub(r'("checkpoint_sha256":"|x-checkpoint: )[0-9a-f]{64}', r"\1…", output)
    output = re.sub(r'("(?:backend|dtype)":"|x-(?:backend|dtype): )[a-z0-9]+', r"\1…", output)
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
    """(prefix, value) of each member; "…" has an empty prefix."""
    if isinstance(value, list):
        return [("", item) for item in value]
    return [("" if key == "…" else f"{json.dumps(key)}: ", member) for key, member in value.items()]


def lines_of(value: Any, indent: int = 0) -> list[str]:
    """JSON wrapped at WIDTH characters; longer strings stay whole."""
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
    """Shortens lists longer than LONGEST_LIST to their first two elements."""
    if isinstance(value, dict):
        return {key: cut(member) for key, member in value.items()}
    if isinstance(value, list):
        return [cut(item) for item in (value if len(value) <= LONGEST_LIST else [*value[:2], "…"])]
    return value


def laid_out(output: str, whole: bool) -> str:
    """An output formatted for a document; `whole` keeps the members of ENVELOPE."""
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


def run(command: str, url: str, shown: str) -> str:
    """The output of an example, with all members where the output in the document has them."""
    command = command.replace("localhost:8000", url.removeprefix("http://"))
    finished = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    return laid_out(finished.stdout, whole='"usage": ' in shown)


def run_score(arguments: str, folder: Path) -> str:
    """Runs `python -m training score` of an example in a folder that has its lines."""
    (folder / "lines.txt").write_text("To be\nor not\n", encoding="utf-8")
    (folder / "service").symlink_to(ROOT / "service")
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        assert not call(shlex.split(arguments.removeprefix("-m training ")))
    return laid_out(printed.getvalue(), whole=True)


def score_examples() -> list[tuple[str, str, str]]:
    """(lines before the output, arguments, output) of each example of `training score` with its output."""
    found = SCORE.findall(TRAINING.read_text(encoding="utf-8"))
    return [example for example in found if "lines.txt" in example[1] and "tinyshakespeare" in example[1]]


def examples() -> list[tuple[str, str]]:
    """(command, output) of each example."""
    return [found for document in DOCUMENTS for found in EXAMPLE.findall(document.read_text(encoding="utf-8"))]


def settings_table() -> dict[str, list[str]]:
    """Flag -> default and description."""
    table = {}
    for name, field in Settings.model_fields.items():
        if name == "checkpoint":
            default = "the bundled one"
        elif field.default_factory is not None:
            default = field.default_factory.__qualname__
        else:
            default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
        table[f"--{name.replace('_', '-')}"] = [default, field.description or ""]
    return table


def metrics_table(url: str) -> dict[str, list[str]]:
    """Series -> help, type and labels. Declarations count too: a server exports some series only after use."""
    registry = CollectorRegistry()
    Metrics("m", registry, "test").of("m")
    request = urllib.request.Request(f"{url}/metrics", headers={"Accept": "application/openmetrics-text"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        page = answer.read().decode()
    families = {family.name: family for family in [*registry.collect(), *text_string_to_metric_families(page)]}
    labels = {collector._name: collector._labelnames for collector in registry._collector_to_names}
    table = {}
    for name, family in families.items():
        known = set(labels.get(name, ())).union(*(sample.labels for sample in family.samples))
        shown = ", ".join(f"`{label}`" for label in sorted(known - {"model_name", "le"}))
        table[name + ("_total" if family.type == "counter" else "")] = [family.documentation, family.type, shown]
    return table


def with_table(text: str, head: str, table: dict[str, list[str]]) -> str:
    """Replaces the rows of one table, if the document has it; new rows go last."""
    before, found, rest = text.partition(f"{head}\n")
    if not found:
        return text
    old, _, after = rest.partition("\n\n")
    rule, *lines = old.splitlines()
    names = [line.split("`")[1] for line in lines]
    order = [name for name in names if name in table] + [name for name in table if name not in names]
    rows = ["| " + " | ".join([f"`{name}`", *table[name]]) + " |" for name in order]
    return before + "\n".join([head, rule, *rows]) + "\n\n" + after


def regenerated(text: str, url: str) -> str:
    """A document with regenerated tables and example outputs."""
    text = with_table(text, "| flag | default | |", settings_table())
    text = with_table(text, "| series | | kind | labels |", metrics_table(url))

    def scored(match: re.Match[str]) -> str:
        with tempfile.TemporaryDirectory() as folder:
            return f"```console\n{match[1]}{run_score(match[2], Path(folder))}```"

    text = SCORE.sub(lambda match: scored(match) if "tinyshakespeare" in match[2] else match[0], text)
    return EXAMPLE.sub(lambda match: f"```console\n$ {match[1]}\n{run(match[1], url, match[2])}```", text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(regenerated(document.read_text(encoding="utf-8"), sys.argv[1]), encoding="utf-8")
