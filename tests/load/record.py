"""Records of a load test: every request, times between characters, and CPU use of the load generator.

Independent of Locust and HTTP.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

QUANTILES = (0.5, 0.95, 0.99)
BUSY = 0.9  # share of a core in one second above which the load generator distorts the figures
LATE_SECONDS = 0.01  # tolerated delay of arrivals, at the 99th percentile
LEFT, FAILED = "left", "failed"


class Record(NamedTuple):
    """One request and its response. Times in seconds; None if it did not occur."""

    number: int
    sent_at: float  # since the start of the test
    path: str
    shape: str  # stream, whole or opinion
    prompt_characters: int
    characters: int  # received
    first: float | None  # from sending to the first character; if not streamed, to the whole response
    last: float | None  # from sending to the last character; None if ending is LEFT or FAILED
    ending: str  # the finish reason, LEFT or FAILED
    late: float = 0.0  # delay of sending after the scheduled arrival
    wrong: str = ""  # reason of failure

    @property
    def is_complete(self) -> bool:
        return self.ending not in (LEFT, FAILED)


class Spread:
    """A histogram of durations: exact count and sum, quantiles accurate to 1 %."""

    WIDTH = math.log(1.01)

    def __init__(self) -> None:
        self.bins: Counter[int | None] = Counter()  # None: 0 seconds
        self.count = 0
        self.sum = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self.bins[math.ceil(math.log(seconds) / self.WIDTH) if seconds > 0 else None] += count
        self.count += count
        self.sum += seconds * count

    def quantile(self, q: float) -> float:
        rank, seen = math.ceil(q * self.count), 0
        for place in sorted(self.bins, key=lambda place: -math.inf if place is None else place):
            seen += self.bins[place]
            if seen >= rank:
                return 0.0 if place is None else math.exp(place * self.WIDTH)
        return math.nan


def quantile(values: Iterable[float], q: float) -> float:
    """Nearest-rank quantile; NaN without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else math.nan


class Log:
    """All records of a load test."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.gaps = Spread()  # times between characters of streams
        self.cpu_seconds = 0.0
        self.busiest = 0.0  # share of a core in the busiest second

    def busy(self, cpu_seconds: float, seconds: float) -> None:
        """Record the CPU time of the load generator over some wall time."""
        self.cpu_seconds += cpu_seconds
        self.busiest = max(self.busiest, cpu_seconds / seconds)

    def summary(self) -> dict[str, Any]:
        """Seconds, characters and counts; None where nothing was measured."""
        records, complete = self.records, [record for record in self.records if record.is_complete]
        # From the start to the last response, as responses after the last request count for the rates.
        seconds = max((r.sent_at + (r.last or r.first or 0.0) for r in records), default=0.0)
        streams = [r.first for r in records if r.shape == "stream" and r.first is not None]
        answers = [record.last for record in complete if record.last is not None]
        characters = sum(record.characters for record in records)
        return {
            "seconds": seconds,
            "requests": len(records),
            "requests_per_second": len(records) / seconds if seconds else None,
            "endings": dict(sorted(Counter(record.ending for record in records).items())),
            "prompt_characters": sum(record.prompt_characters for record in records),
            "characters": characters,
            "characters_per_second": characters / seconds if seconds else None,
            "first_character_seconds": _figures(streams),
            "answer_seconds": _figures(answers),
            "between_characters_seconds": {
                "count": self.gaps.count,
                "sum": self.gaps.sum,
                **{_name(q): self.gaps.quantile(q) if self.gaps.count else None for q in QUANTILES},
            },
            "late_seconds": _figures(record.late for record in records),
            "cpu_seconds": self.cpu_seconds,
            "busiest_second": self.busiest,
        }

    def failures(self) -> Counter[str]:
        return Counter(f"{record.path} {record.shape}: {record.wrong}" for record in self.records if record.wrong)

    def warnings(self, is_open: bool) -> list[str]:
        """Reasons why the load generator distorts the figures."""
        found = []
        if self.busiest >= BUSY:
            found.append(
                f"the load generator was busy for {self.busiest:.0%} of a second: its times are too long. "
                "Split the load among several, each with its own --mix-seed"
            )
        late = quantile((record.late for record in self.records), 0.99)
        if is_open and late > LATE_SECONDS:
            found.append(f"1 % of arrivals were sent over {late * 1e3:.0f} ms late: the requested rate was not reached")
        return found

    def write(self, folder: Path, about: dict[str, Any]) -> None:
        """Write requests.csv, a row per request, and summary.json."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "requests.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(Record._fields)
            rows.writerows(sorted(self.records))
        content = json.dumps(about | self.summary(), indent=1)
        (folder / "summary.json").write_text(content + "\n", encoding="utf-8")

    def text(self) -> str:
        """The summary for a terminal."""
        summary = self.summary()
        endings = ", ".join(f"{name} {count:,}" for name, count in summary["endings"].items())
        rate, speed = summary["requests_per_second"] or 0.0, summary["characters_per_second"] or 0.0
        lines = [
            f"requests     {summary['requests']:,} in {summary['seconds']:.1f} s, {rate:,.1f}/s: {endings}",
            f"characters   {summary['characters']:,}, {speed:,.0f}/s; in prompts {summary['prompt_characters']:,}",
            "",
            f"{'ms':24}{'p50':>9}{'p95':>9}{'p99':>9}{'values':>10}",
        ]
        for title, name in (
            ("first character, streams", "first_character_seconds"),
            ("whole response", "answer_seconds"),
            ("between characters", "between_characters_seconds"),
        ):
            figures = summary[name]
            shown = "".join(
                "        –" if figures[_name(q)] is None else f"{figures[_name(q)] * 1e3:9.1f}" for q in QUANTILES
            )
            lines.append(f"{title:24}{shown}{figures['count']:10,}")
        mean = summary["cpu_seconds"] / summary["seconds"] if summary["seconds"] else 0.0
        late = summary["late_seconds"]
        lines += [
            "",
            f"the load generator used {mean:.0%} of a core, {self.busiest:.0%} in its busiest second"
            + (f"; arrivals were late by {late['p99'] * 1e3:.1f} ms (p99)" if late["p99"] else ""),
        ]
        lines += [f"FAILED {count} ×, {wrong}" for wrong, count in self.failures().most_common(10)]
        return "\n".join(lines)


def _name(q: float) -> str:
    return f"p{q * 100:g}"


def _figures(values: Iterable[float]) -> dict[str, Any]:
    ordered = sorted(values)
    return {"count": len(ordered), **{_name(q): quantile(ordered, q) if ordered else None for q in QUANTILES}}
