"""The console script: chargpt serve | prepare | train | evaluate | sample | score | report | export | lecture.

`serve` runs the package service. Every other command runs the package training, which the container image lacks. Both
are run by name, so this module imports neither and `chargpt --help` needs no torch.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec

from service import installing

COMMANDS = {
    "serve": "serve a checkpoint over HTTP",
    "prepare": "encode a text into the cache; train does this too",
    "train": "train a model on a text",
    "evaluate": "measure a checkpoint's loss on a text",
    "sample": "generate texts from a checkpoint",
    "score": "print the log-likelihood of each line of a text",
    "report": "measure how much generated text is copied from the training text",
    "export": "convert a checkpoint to GGUF or ONNX",
    "lecture": "show how it works, from a table of bigrams to attention, on a text",
}
HELP = f"""usage: chargpt COMMAND [FLAGS]

Train a character-level GPT on your own text and serve it over HTTP.

commands:
{chr(10).join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())}

chargpt COMMAND --help lists the flags of a command.
chargpt --version prints the version."""


def main() -> int:
    """Return 0 after --help and --version, 1 if a package or an extra is missing, 2 for an unknown command.

    Raises SystemExit: with the status of the command that ran.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "--version":
        from service import release

        print(f"chargpt {release()}")
        return 0
    if name in ("-h", "--help"):
        print(HELP)
        return 0
    if name not in COMMANDS:
        print(f"chargpt: unknown command {name!r}" if name else "chargpt: no command given", file=sys.stderr)
        print(HELP, file=sys.stderr)
        return 2
    found = find_spec("training")
    if name != "serve" and (found is None or found.origin is None):  # an unrelated folder of that name has no origin
        missing = "no training package; install chargpt from source with the extra [training]"
        print(f"chargpt {name}: this installation has {missing}", file=sys.stderr)
        return 1
    # Both packages take the program's name for their usage and error messages from argv[0].
    sys.argv = ["chargpt serve", *sys.argv[2:]] if name == "serve" else ["chargpt", *sys.argv[1:]]
    package = "service" if name == "serve" else "training"
    if name != "report":  # whose --command is the user's own program
        # multiprocessing starts processes with `python -c`, which otherwise imports from the current folder first.
        os.environ["PYTHONSAFEPATH"] = "1"
    try:
        runpy.run_module(package, run_name="__main__")
    except ModuleNotFoundError as error:
        missing = (error.name or package).partition(".")[0]
        if find_spec(missing) is not None:  # a fault of an installed package
            raise
        # The extras are named like the packages that need them.
        print(f"chargpt {name}: the module {missing} is not installed: {installing(package)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
