"""Write rows of named values to standard output, as JSON lines or as CSV."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def write_rows(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], format: str) -> None:
    """Write rows as they arrive.

    columns: the names of the values, in the order of the CSV columns.
    format: "jsonl", or "csv" with a header. In CSV, None is an empty cell, and a text with line breaks is quoted.
    """
    if format == "csv":
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
