"""The log of a run: OUT/log.jsonl, and TensorBoard's event files on request.

The log continues where the save ends that a run resumes from; the event files are rewritten from it, so that no step
appears twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.state import Progress

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LOG = "log.jsonl"


class RunLog(contextlib.ExitStack):
    """The log in the folder `out` of the run with this `progress`; it takes one record per event."""

    def __init__(self, out: Path, progress: Progress, *, tensorboard: bool):
        super().__init__()
        self.progress = progress
        self._file = self.enter_context(open(out / LOG, "ab"))
        self._file.truncate(progress.log_bytes)
        self._file.seek(0, os.SEEK_END)  # truncate() leaves the position, which sync() returns, at the old end
        self._board: SummaryWriter | None = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # optional, and takes seconds to import

            folder = out / "tensorboard"
            shutil.rmtree(folder, ignore_errors=True)
            # purge_step makes a running TensorBoard drop what it read from the old files.
            self._board = self.enter_context(SummaryWriter(str(folder), purge_step=0, flush_secs=10))
            self._start = time.time() - progress.elapsed_seconds
            for record in read_log(out):
                self._add_to_board(self._board, record)

    def add(self, record: dict[str, Any]) -> None:
        record["elapsed_seconds"] = round(self.progress.elapsed_seconds, 3)
        record["cpu_seconds"] = round(self.progress.cpu_seconds, 3)
        self._file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
        self._file.flush()
        if self._board:
            self._add_to_board(self._board, record)

    def _add_to_board(self, board: SummaryWriter, record: dict[str, Any]) -> None:
        """Scalars have their names in the log. Wall times count training only, not the pauses between resumed runs."""
        when = self._start + record["elapsed_seconds"]
        for name, value in record.items():
            if name == "sample":
                indented = "    " + value.replace("\n", "\n    ")  # a Markdown code block
                board.add_text(name, indented, record["step"], walltime=when)
            elif name not in ("event", "step", "elapsed_seconds"):
                board.add_scalar(name, value, record["step"], walltime=when)

    def sync(self) -> int:
        """Write the log to the disk and return its length in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()


def read_log(out: Path) -> list[dict[str, Any]]:
    # Not splitlines: samples may have characters at which that splits too.
    return [json.loads(line) for line in (out / LOG).read_text(encoding="utf-8").split("\n") if line]
