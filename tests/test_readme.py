"""What the README says of settings, metrics and files, held against the code."""

import json
import re
from pathlib import Path

import pytest
from helpers import RunningServer, web
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from readme_examples import examples, run

from service.observe.metrics import Metrics
from service.settings import BUNDLED, Settings
from training.__main__ import build_parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def rows(section):
    """The cells of each row of a section's tables."""
    text = README.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def table(section):
    """The first two cells of each row of a section's table."""
    return {row[0].strip("`"): row[1] for row in rows(section)}


def test_every_setting_and_its_default():
    expected = {}
    for name, field in Settings.model_fields.items():
        if name == "checkpoint":
            default = "the bundled one"
        elif name == "replacement_character":
            default = "a space"
        elif field.default_factory is not None:
            default = "CPUs that the HTTP processes leave"
        else:
            default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
        expected[f"--{name.replace('_', '-')}"] = default
    assert table("Settings") == expected


def test_every_flag_of_train_exists():
    commands = next(action for action in build_parser()._actions if action.dest == "command")
    flags = set(commands.choices["train"]._option_string_actions)
    named = {flag for row in table("Train on your own text") for flag in re.findall(r"--[a-z-]+", row)}
    assert {"--init-from", "--ema-decay"} <= named <= flags


def test_the_tree_is_the_tree():
    text = README.split("## The tree")[1].split("```")[1]
    folders, named = [ROOT], set()
    for line in text.splitlines()[2:]:
        depth = (len(line) - len(line.lstrip())) // 2
        path = folders[depth] / line.split()[0]
        assert path.exists(), path
        named.add(path)
        folders[depth + 1 :] = [path]
    assert {p for p in (ROOT / "service").glob("*.py") if p.name != "__init__.py"} <= named


def test_every_make_target_and_flag_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.fixture(scope="module")
def server():
    with RunningServer(BUNDLED) as server:
        server.wait_until_ready()
        yield server


def test_every_metric_with_its_meaning_kind_and_labels(server):
    """Of the series that come with use the declarations are asked, of the others a server."""
    registry = CollectorRegistry()
    Metrics("m", registry, "test")
    page = web.get(f"{server.url}/metrics", headers={"Accept": "application/openmetrics-text"}).text
    families = {family.name: family for family in [*registry.collect(), *text_string_to_metric_families(page)]}
    labels = {collector._name: collector._labelnames for collector in registry._collector_to_names}
    expected = {}
    for name, family in families.items():
        known = set(labels.get(name, ())).union(*(sample.labels for sample in family.samples))
        expected[name + ("_total" if family.type == "counter" else "")] = [
            family.documentation,
            family.type,
            ", ".join(f"`{label}`" for label in sorted(known - {"model_name", "le"})),
        ]
    assert {row[0].strip("`"): [*row[1:], ""][:3] for row in rows("Metrics")} == expected


def joined(output):
    """The text that the events of a stream make up, which may come in any pieces; and the other lines."""
    text, rest = "", []
    for line in output.split("\n"):
        if line.startswith('data: {"index"'):
            text += json.loads(line.removeprefix("data: "))["text"]
        elif line:
            rest.append(line)
    return text, rest


@pytest.mark.parametrize("command,output", examples(), ids=[command[:90] for command, _ in examples()])
def test_an_example_gives_what_the_readme_says(server, command, output):
    assert joined(run(command, server.url)) == joined(output)


def test_all_examples_are_tried():
    assert len(examples()) == README.count("$ curl") - README.count("$ curl -s https") >= 15
