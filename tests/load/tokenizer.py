"""A tokenizer folder for load tools that generate prompts of their own.

    python -m tests.load.tokenizer --checkpoint DIR --out DIR

A checkpoint's tokenizer rejects unknown characters, but GuideLLM and AIPerf build prompts from texts with digits and
dashes that a model may lack. This copy maps them to a space, or without one to a line break or the first character of
the vocabulary. For load tests only.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path


def write_tokenizer(checkpoint: Path, out: Path) -> dict[str, int]:
    """Write the folder; returns the vocabulary."""
    content = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    content["model"]["unk_token"] = next((c for c in " \n" if c in vocabulary), min(vocabulary, key=vocabulary.get))
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    shutil.copy(checkpoint / "tokenizer_config.json", out)
    return vocabulary


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint folder")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="target folder")
    given = parser.parse_args()
    write_tokenizer(given.checkpoint, given.out)
    print(f"{given.out}: a tokenizer that maps unknown characters")
