"""The README's curl examples: what their output looks like once all that varies is left out.

python tests/readme_examples.py http://localhost:8000    writes the outputs into the README anew
"""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
EXAMPLE = re.compile(
    r"```console\n\$ (curl -s[^\n]* localhost:8000[^\n]*|curl -sN? \"localhost:8000[^\n]*)\n(.*?)```", re.DOTALL
)


def elided(output: str) -> str:
    """An output with … for ids, times, hashes and digits after the second decimal."""
    output = output.replace("\r", "")
    output = re.sub(r'"id":"(cmpl-)?[0-9a-f]{32}"', r'"id":"\1…"', output)
    output = re.sub(r'"created":\d+', '"created":…', output)
    output = re.sub(r'("checkpoint_sha256":"|x-checkpoint: )[0-9a-f]{64}', r"\1…", output)
    output = re.sub(r'("[a-z]+_seconds":|"seconds_per_character":)[0-9.e-]+', r"\1…", output)
    output = re.sub(r"(?m)^((?:x-[a-z-]+-time|x-time-per-token|date|content-length): ).*", r"\1…", output)
    return re.sub(r"(\d\.\d\d)\d+(?:e-\d+)?", r"\1…", output)


def run(command: str, url: str) -> str:
    command = command.replace("localhost:8000", url.removeprefix("http://"))
    return elided(subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout)


def examples() -> list[tuple[str, str]]:
    """(command, output) of each example."""
    return EXAMPLE.findall(README.read_text(encoding="utf-8"))


if __name__ == "__main__":
    filled = EXAMPLE.sub(
        lambda match: f"```console\n$ {match[1]}\n{run(match[1], sys.argv[1]).rstrip()}\n```",
        README.read_text(encoding="utf-8"),
    )
    README.write_text(filled, encoding="utf-8")
