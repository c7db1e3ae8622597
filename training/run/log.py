"""The log of a run: OUT/log.jsonl, and TensorBoard event files on request.

A resumed run cuts the log to its length at the save, and continues it from there. It writes the event files again from
the log. So no step appears twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.run.saved import Progress

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LOG = "log.jsonl"


class RunLog(contextlib.ExitStack):
    """The log of one run: a record for each event.

    out: the run's folder.
    progress: the run's progress. Records take their times from it.
    tensorboard: True: write the event files too.
    """

    def __init__(self, out: Path, progress: Progress, *, tensorboard: bool):
        super().__init__()
        self.progress = progress
        self._file = self.enter_context(open(out / LOG, "ab"))
        self._file.truncate(progress.log_bytes)
        self._file.seek(0, os.SEEK_END)  # truncate() leaves the position at the old end; sync() returns it
        self._board: SummaryWriter | None = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # an optional package that takes seconds to import

            folder = out / "tensorboard"
            shutil.rmtree(folder, ignore_errors=True)
            # With purge_step, a running TensorBoard drops the steps that it read from the old files.
            self._board = self.enter_context(SummaryWriter(str(folder), purge_step=0, flush_secs=10))
            self._start = time.time() - progress.elapsed_seconds
            for record in read_log(out):
                self._add_to_board(self._board, record)

    def add(self, record: dict[str, Any]) -> None:
        record["elapsed_seconds"] = round(self.progress.elapsed_seconds, 3)
        record["cpu_seconds"] = round(self.progress.cpu_seconds, 3)
        self._file.write((json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode())
        self._file.flush()
        if self._board:
            self._add_to_board(self._board, record)

    def _add_to_board(self, board: SummaryWriter, record: dict[str, Any]) -> None:
        """Add a record to the event files. Scalars keep their names in the log.

        Wall times count only the time of training, not the pauses before a run was resumed.
        """
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
    # splitlines would also split at other characters that samples may have.
    return [json.loads(line) for line in (out / LOG).read_text(encoding="utf-8").split("\n") if line]
