"""Documents checked against the code: settings, metrics, commands, files, links, and the output of every example."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from service.settings import Settings
from tests import readme_examples
from tests.readme_examples import DOCUMENTS, OPERATIONS, README, ROOT, TRAINING, examples, run
from training.__main__ import build_parser

TEXTS = {document: document.read_text(encoding="utf-8") for document in DOCUMENTS}
TRAINING_COMMANDS = next(it for it in build_parser()._actions if it.dest == "command").choices
SETTING_FLAGS = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
TEXT_SUFFIXES = {".md", ".py", ".cpp", ".toml", ".yml", ".yaml", ".json", ".sh", ".js", ".html", ".css", ""}
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
    """GitHub's anchors for the headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_settings_table_matches_the_code():
    documented = {row[0].strip("`"): row[1:] for row in rows(TEXTS[OPERATIONS], "Settings")}
    assert documented == readme_examples.settings_table()


def test_documented_training_commands_match_the_parser():
    assert {row[0].strip("`") for row in rows(TEXTS[TRAINING], "Commands")} == TRAINING_COMMANDS.keys()
    found = [words[3:] for text in TEXTS.values() for words in commands(text) if words[1:3] == ["-m", "training"]]
    assert len(found) >= 8
    for words in found:
        build_parser().parse_args(words)


def test_documented_service_flags_are_settings():
    found = [words[3:] for text in TEXTS.values() for words in commands(text) if words[1:3] == ["-m", "service"]]
    assert found
    assert {word for words in found for word in words if word.startswith("--")} <= SETTING_FLAGS


# Flags of other programs that the documents use
FOREIGN_FLAGS = """
docker, compose and stacks: --build --build-arg --build-context --cpus --cpuset-cpus --gpus --image --ipc --log-opt
  --memory --no-recreate --pid --profile --publish --publish-add --read-only --replicas --restart --rm --scale
  --shm-size --signal --volume --wait --wait-timeout
torchrun: --master-addr --master-port --nnodes --node-rank --nproc-per-node
load tools: --backend --tokenizer --data --constraint --url --model --endpoint-type --streaming --prompt-corpus
  --synthetic-input-tokens-mean --output-tokens-mean --concurrency --request-count --users --run-time
generators of clients: --path --output-path --library --schema-mappings
others: --no-deps --target --build-lib --enable-feature
"""


def test_every_flag_in_a_document_exists():
    programs = [path.read_text(encoding="utf-8") for it in ("tests", "deploy") for path in (ROOT / it).rglob("*.py")]
    known = {*SETTING_FLAGS, *FOREIGN_FLAGS.split(), *re.findall(r'"(--[a-z][a-z-]+)"', "\n".join(programs))}
    known = known.union(*(command._option_string_actions for command in TRAINING_COMMANDS.values()))
    for document, text in TEXTS.items():
        present = text.partition("\n### Removed\n")[0]  # of the changelog
        assert set(re.findall(r"(?<![\w|-])--[a-z][a-z-]+", present)) <= known, document


def test_the_readmes_tree_exists():
    (block,) = (block for _, block in BLOCK.findall(TEXTS[README].split("\n## How it works\n")[1].split("\n## ")[0]))
    folders = [ROOT]
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth + 1 :] = [folders[depth] / line.split()[0]]
        assert folders[-1].exists(), line
    assert all(re.search(f"^{name}/ ", block, re.M) for name in ("service", "training", "deploy", "tests"))


def test_documented_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in {target for text in TEXTS.values() for target in re.findall(r"(?:`|\$ )make ([a-z-]+)", text)}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(document):
    for link in re.findall(r"\]\(([^)]+)\)", BLOCK.sub("", TEXTS[document])):
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def test_code_block_width_is_bounded():
    for text in (text for document, text in TEXTS.items() if document.name != "LECTURE.md"):  # which shows samples
        for _, block in BLOCK.findall(text):
            assert max(map(len, block.splitlines())) <= 130, block


def test_metrics_table_matches_a_running_server(bundled):
    documented = {row[0].strip("`"): [*row[1:], ""][:3] for row in rows(TEXTS[OPERATIONS], "Metrics")}
    assert documented == readme_examples.metrics_table(bundled.url)


def joined(output):
    """(concatenated text of stream events, other lines), because events may split the text anywhere."""
    text, rest = "", []
    for line in output.split("\n"):
        if line.startswith('data: {"index"'):
            text += json.loads(line.removeprefix("data: "))["text"]
        elif line:
            rest.append(line)
    return text, rest


@pytest.mark.parametrize("command,output", examples(), ids=[command[:90] for command, _ in examples()])
def test_example_output_matches_the_document(bundled, command, output):
    assert joined(run(command, bundled.url, output)) == joined(output)


def numbers(output):
    """The scores in an example's output, in order."""
    pattern = r'"(?:characters|nats|nats_per_character|bits_per_character|perplexity)": ([\d.]+)'
    return [float(number) for number in re.findall(pattern, output)]


@pytest.mark.parametrize("kind", ["texts", "records"])
def test_training_and_service_score_alike(tmp_path, kind):
    """Both documents show the same numbers but for float32's rounding, to two digits; the commands print them: these
    here, the service's in the test above."""
    of_training = [e for e in readme_examples.score_examples() if ("--records" in e[1]) == (kind == "records")]
    [(_, arguments, output)] = of_training
    assert readme_examples.run_score(arguments, tmp_path) == output
    asked = {"texts": '"texts": ["To be", "or not"]', "records": '"continuations": ["To be\\n", "or not\\n"]'}[kind]
    of_service = [found for command, found in examples() if asked in command]
    assert len(of_service) == {"texts": 2, "records": 1}[kind]  # one of the texts is in the service's document
    close = pytest.approx(numbers(output), abs=0.0101)
    assert len(numbers(output)) == 10 and all(numbers(found) == close for found in of_service)


def test_every_curl_example_is_tested():
    assert len(examples()) == sum(text.count("$ curl") - text.count("$ curl -s https") for text in TEXTS.values()) >= 15


def test_no_document_or_source_has_merge_conflict_markers():
    skipped = {".git", ".venv", "out", "build", "checkpoints", "__pycache__"}
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in skipped]
        for path in (Path(folder, name) for name in names if Path(name).suffix in TEXT_SUFFIXES):
            if path.is_file() and re.search(rb"^(<{7}|>{7}) ", path.read_bytes(), re.MULTILINE):
                found.append(path)
    assert not found
