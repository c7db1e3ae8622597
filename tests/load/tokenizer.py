"""A tokenizer folder for load tools that make prompts of their own.

    python -m tests.load.tokenizer --checkpoint DIR --out DIR

A checkpoint's tokenizer refuses what it does not know. GuideLLM and AIPerf put together prompts from texts of theirs,
which have digits and dashes that the model may lack. In the copy that this writes such a character becomes one of the
vocabulary: a space, or where there is none a line break or the first character. It is for nothing but load.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def write_tokenizer(checkpoint: Path, out: Path) -> str:
    """Write the folder; the character that stands for those that the model does not know.

    Raises:
        ValueError: it is not the tokenizer of a checkpoint of ours.
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
    parser = argparse.ArgumentParser(prog="python -m tests.load.tokenizer", description="A tokenizer for load tools.")
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint folder")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the copy goes")
    arguments = parser.parse_args()
    try:
        replacement = write_tokenizer(arguments.checkpoint, arguments.out)
    except (OSError, ValueError) as error:
        sys.exit(f"tokenizer: {error}")
    print(f"{arguments.out}: characters that the model does not know become {replacement!r}")


if __name__ == "__main__":
    main()
