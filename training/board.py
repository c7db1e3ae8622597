"""The log as TensorBoard reads it: event files, made of the same records.

The log is what counts. A run that goes on writes the files anew from it, so that no step is there twice, whenever
the run was stopped.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Board:
    """Event files in `folder`, of `records` first.

    Each number is a scalar under its name in the log; its time is that of training, without pauses.
    """

    def __init__(self, folder: Path, records: Iterable[dict[str, Any]], elapsed_seconds: float):
        from torch.utils.tensorboard import SummaryWriter  # seconds, and a package that not everyone has

        shutil.rmtree(folder, ignore_errors=True)
        # purge_step: a TensorBoard that looks on drops what it has read of the old files.
        self.writer = SummaryWriter(str(folder), purge_step=0, flush_secs=10)
        self.begun = time.time() - elapsed_seconds
        for record in records:
            self.add(record)

    def add(self, record: dict[str, Any]) -> None:
        when = self.begun + record["elapsed_seconds"]
        for name, value in record.items():
            if name == "sample":
                indented = "    " + value.replace("\n", "\n    ")  # Markdown's way to leave it as it is
                self.writer.add_text(name, indented, record["step"], walltime=when)
            elif name not in ("event", "step", "elapsed_seconds"):
                self.writer.add_scalar(name, value, record["step"], walltime=when)

    def close(self) -> None:
        self.writer.close()
