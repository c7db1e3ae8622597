"""TensorBoard event files, written from the records of the log.

A resumed run rewrites the files from the log, so that no step appears twice.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Board:
    """Event files in `folder`, beginning with `records`.

    Scalars have their names in the log. Wall times count training only, not the pauses between resumed runs.
    """

    def __init__(self, folder: Path, records: Iterable[dict[str, Any]], elapsed_seconds: float):
        from torch.utils.tensorboard import SummaryWriter  # optional, and takes seconds to import

        shutil.rmtree(folder, ignore_errors=True)
        # purge_step makes a running TensorBoard drop what it read from the old files.
        self.writer = SummaryWriter(str(folder), purge_step=0, flush_secs=10)
        self.start = time.time() - elapsed_seconds
        for record in records:
            self.add(record)

    def add(self, record: dict[str, Any]) -> None:
        when = self.start + record["elapsed_seconds"]
        for name, value in record.items():
            if name == "sample":
                indented = "    " + value.replace("\n", "\n    ")  # a Markdown code block
                self.writer.add_text(name, indented, record["step"], walltime=when)
            elif name not in ("event", "step", "elapsed_seconds"):
                self.writer.add_scalar(name, value, record["step"], walltime=when)

    def close(self) -> None:
        self.writer.close()
