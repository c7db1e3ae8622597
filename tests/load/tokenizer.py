"""A tokenizer folder for load tools that generate prompts of their own.

    python -m tests.load.tokenizer --checkpoint DIR --out DIR

A checkpoint's tokenizer rejects unknown characters, but GuideLLM and AIPerf build prompts from texts with digits and
dashes that a model may lack. This copy maps them to a space, or without one to a line break or the first character of
the vocabulary. For load tests only.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def write_tokenizer(checkpoint: Path, out: Path) -> str:
    """Write the folder; returns the character that unknown ones are mapped to.

    Raises:
        ValueError: this is not a checkpoint's tokenizer.
        OSError: a file cannot be read or written.
    """
    path = checkpoint / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    match content:
        case {"model": {"type": "WordLevel", "vocab": {**vocabulary}} as model} if vocabulary:
            replacement = next((c for c in " \n" if c in vocabulary), min(vocabulary, key=lambda c: vocabulary[c]))
            model["unk_token"] = replacement
        case _:
            raise ValueError(f"{path} is not a WordLevel tokenizer with a vocabulary")
    config = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return replacement


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.load.tokenizer", description="Write a tokenizer folder for load tools."
    )
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint folder")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="target folder")
    arguments = parser.parse_args()
    try:
        replacement = write_tokenizer(arguments.checkpoint, arguments.out)
    except (OSError, ValueError) as error:
        sys.exit(f"tokenizer: {error}")
    print(f"{arguments.out}: unknown characters become {replacement!r}")


if __name__ == "__main__":
    main()
