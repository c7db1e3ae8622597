"""The documents held against the code: settings, metrics, commands, files, links, and the output of every example."""

import json
import re
import shlex
from pathlib import Path

import pytest
from helpers import RunningServer
from readme_examples import DOCUMENTS, ROOT, examples, metrics_table, run, settings_table, shows_all

from service.settings import BUNDLED, Settings
from training.__main__ import build_parser

TEXTS = {document: document.read_text(encoding="utf-8") for document in DOCUMENTS}
README, SERVICE, TRAINING, *_ = TEXTS.values()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def rows(document: str, section: str) -> list[list[str]]:
    """The cells of each row of a section's tables."""
    text = document.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def commands(document: str) -> list[list[str]]:
    """The words of each command of the console blocks, without comments."""
    lines = [line for kind, block in BLOCK.findall(document) if kind == "console" for line in block.splitlines()]
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ") and "curl" not in line]


def anchors(document: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def tree(document: str, section: str, root: Path) -> set[Path]:
    """The paths of a section's tree, which must exist."""
    (block,) = (block for _, block in BLOCK.findall(document.split(f"\n## {section}\n")[1].split("\n## ")[0]))
    folders, named = [root], set()
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path = folders[depth] / line.split()[0]
        assert path.exists(), path
        named.add(path)
        folders[depth + 1 :] = [path]
    return named


def test_every_setting_with_its_default_and_meaning():
    assert {row[0].strip("`"): row[1:] for row in rows(SERVICE, "Settings")} == settings_table()


def test_every_flag_of_train_exists():
    subparsers = next(action for action in build_parser()._actions if action.dest == "command")
    flags = set(subparsers.choices["train"]._option_string_actions)
    named = {flag for row in rows(TRAINING, "Flags") for flag in re.findall(r"--[a-z-]+", row[0])}
    assert {"--init-from", "--ema-decay"} <= named <= flags


def test_every_training_command_is_one():
    assert {row[0].strip("`") for row in rows(TRAINING, "Commands")} == {
        *next(action for action in build_parser()._actions if action.dest == "command").choices
    }
    found = [words[3:] for text in TEXTS.values() for words in commands(text) if words[1:3] == ["-m", "training"]]
    assert len(found) >= 8
    for words in found:
        build_parser().parse_args(words)


def test_every_flag_of_the_service_is_a_setting():
    flags = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    found = [words[3:] for text in TEXTS.values() for words in commands(text) if words[1:3] == ["-m", "service"]]
    assert found
    assert {word for words in found for word in words if word.startswith("--")} <= flags


def test_the_trees_are_the_trees():
    assert {ROOT / "service", ROOT / "training", ROOT / "deploy", ROOT / "tests"} <= tree(README, "How it works", ROOT)


def test_every_file_of_the_service_is_named():
    found = {path for path in (ROOT / "service").rglob("*.py") if path.name != "__init__.py"}
    assert {path for path in tree(SERVICE, "Files", ROOT / "service") if path.suffix == ".py"} == found


def test_every_make_target_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in {target for text in TEXTS.values() for target in re.findall(r"(?:`|\$ )make ([a-z-]+)", text)}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document):
    links = re.findall(r"\]\(([^)]+)\)", BLOCK.sub("", TEXTS[document]))
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def test_a_newcomer_reads_no_walls():
    assert len(README.splitlines()) <= 250
    for text in TEXTS.values():
        for _, block in BLOCK.findall(text):
            assert max(map(len, block.splitlines())) <= 130, block


@pytest.fixture(scope="module")
def server():
    with RunningServer(BUNDLED) as server:
        server.wait_until_ready()
        yield server


def test_every_metric_with_its_meaning_kind_and_labels(server):
    assert {row[0].strip("`"): [*row[1:], ""][:3] for row in rows(SERVICE, "Metrics")} == metrics_table(server.url)


def joined(output):
    """The text of a stream's events, which may come in any pieces; and the other lines."""
    text, rest = "", []
    for line in output.split("\n"):
        if line.startswith('data: {"index"'):
            text += json.loads(line.removeprefix("data: "))["text"]
        elif line:
            rest.append(line)
    return text, rest


@pytest.mark.parametrize("command,output", examples(), ids=[command[:90] for command, _ in examples()])
def test_an_example_gives_what_the_document_shows(server, command, output):
    assert joined(run(command, server.url, shows_all(output))) == joined(output)


def test_all_examples_are_tried():
    shown = sum(text.count("$ curl") - text.count("$ curl -s https") for text in TEXTS.values())
    assert len(examples()) == shown >= 15
