"""The command `report`: print the findings of `measure.copies` as a table, and write a page with losses and samples.

The page, `report.html`, is a single file to share. It loads nothing, runs nothing and contains its styles and curves.
Everything that comes from texts is escaped. The page names the text's file and hash, but no path of this machine.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from service.model.checkpoint import Checkpoint
from service.text.model import TextModel
from training.commands.inputs import training_corpus
from training.commands.sample import check_counts, kept, opened, report_cost, sample_of
from training.config import ConfigError
from training.measure.copies import NGRAM, SHOWN_CHARACTERS, Examination, examine
from training.measure.losses import bits
from training.messages import plural
from training.model.loading import find_checkpoint, load_model
from training.run.curves import curves
from training.run.log import read_log
from training.run.progress import LOSSES, overfitting_of, verdict
from training.text.corpus import Corpus

MAX_TEXTS, MAX_RECORDS, MAX_PASSAGES = 10, 200, 10  # shown on the page
MAX_CHARACTERS = 2000  # shown of a text
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222;
  background: #fff; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td.bar { width: 22rem; } .bar div { height: .8rem; background: #999; } .bar .own { background: #2a7; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f5f5; padding: .6rem; margin: .3rem 0 1rem; }
mark { background: #fd6; } del { color: #a33; } ul.records { columns: 10rem; list-style: none; padding: 0; }
.records li { overflow-wrap: anywhere; white-space: pre-wrap; } .chart { background: #fff; }
svg { max-width: 100%; height: auto; }
.hint { color: #555; } .warning { border-left: .3rem solid #c60; padding-left: .8rem; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818; } pre { background: #262626; }
  mark { background: #850; color: #fff; } .hint { color: #aaa; } del { color: #f88; } }
"""


def command(args: argparse.Namespace) -> None:
    args.checkpoint = find_checkpoint(args.checkpoint)
    run = args.checkpoint.parent if (args.checkpoint.parent / "log.jsonl").is_file() else None
    checkpoint, gpt = load_model(args)
    are_records = checkpoint.record_end is not None
    if args.n is None:
        args.n = 1000 if are_records else 20
    check_counts(args)
    if (args.check is not None or args.regex is not None) and not are_records:
        raise ConfigError("--regex and --command are for models of records")
    corpus = training_corpus(checkpoint, args)
    fields = {"prompt": "" if are_records else corpus.example_prompt, "max_tokens": args.max_tokens, "seed": args.seed}
    if args.exact:
        fields["regex"] = args.regex
    with opened(checkpoint, gpt, TextModel.of(checkpoint), args) as model:
        sample = sample_of(model, args, fields)
        found = examine(kept(sample, args.n), corpus, args.regex, args.check)
    print_copies(Console(highlight=False), found.columns)
    report_cost(sample)
    if page := args.html or (run and run / "report.html"):
        write_page(page, checkpoint, corpus, found, run)
        print(f"report {page}", file=sys.stderr)


def print_copies(console: Console, texts: dict[str, dict[str, Any]]) -> None:
    """Print the figures of `copies.describe_copies` or `describe_records`, one column per text."""
    table = Table("", *texts)
    for name in next(iter(texts.values())):
        values = [figures[name] for figures in texts.values()]
        table.add_row(name, *(repr(v) if isinstance(v, str) else figure_of(v) for v in values))
    console.print(table)


def figure_of(value: float) -> str:
    return f"{value:,.4f}".removesuffix(".0000")


def write_page(file: Path, checkpoint: Checkpoint, corpus: Corpus, found: Examination, run: Path | None) -> None:
    """Write the page. run: the run's folder, which has its curves and the samples of its evaluations.

    Raises:
        OSError: the file cannot be written.
    """
    records = read_log(run) if run else []
    evaluations = {record["step"]: record for record in records if record["event"] == "evaluation"}
    best = checkpoint.training.get("step")
    overfits = best in evaluations and overfitting_of(evaluations, best) is not None
    title = f"Report: {corpus.name}"
    body = [
        f"<h1>{_text(corpus.name)}</h1>",
        _facts(checkpoint, corpus),
        "<h2>Losses</h2>",
        _losses(checkpoint.training.get("losses", {}), overfits),
        *(["<h2>Course</h2>", _chart(records), _course(records)] if records else []),
        "<h2>Copied or new</h2>",
        _figures(found),
        *(_texts(found) if corpus.records is None else _records(found)),
    ]
    page = f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(title)}</title>
<style>{STYLE}</style>
<body>
{chr(10).join(body)}
</body>
</html>
"""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page, encoding="utf-8")


def _text(text: str) -> str:
    """Escape a text for HTML, and replace control characters, which HTML does not allow, by their symbols."""
    visible = "".join([chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text])
    return escape(visible)


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return a table of HTML cells. The first cell of a row is its heading; the others begin with their <td> tag."""
    lines = ["<tr>" + "".join(f"<th scope=col>{cell}" for cell in head)] if head else []
    for first, *rest in rows:
        lines.append(f"<tr><th scope=row>{first}" + "".join(rest))
    return "<table>" + "\n".join(lines) + "</table>"


def _facts(checkpoint: Checkpoint, corpus: Corpus) -> str:
    about, shape = checkpoint.training, checkpoint.config
    of_text = [plural(len(corpus.ids), "character"), plural(corpus.symbols, "symbol")]
    if corpus.records is not None:
        of_text.append(plural(corpus.records, "record"))
    rows = [
        ("text", f"<td>{', '.join(of_text)}; SHA-256 {corpus.sha256[:16]}…"),
        ("model", "<td>" + ", ".join(f"{name} {getattr(shape, name)}" for name in ("n_layer", "n_embd", "block_size"))),
    ]
    if "parameters" in about:
        rows.append(("", f"<td>{plural(about['parameters'], 'parameter')}"))
    if "step" in about:
        seen, seconds = about.get("characters_seen", 0), about.get("training_seconds", 0)
        course = f"{plural(about['step'], 'step')}, {plural(seen, 'character')}, {seconds:,.0f} s to the best"
        rows.append(("training", f"<td>{course}"))
    rows.append(("checkpoint", f"<td>SHA-256 {checkpoint.digest[:16]}…"))
    return _table(rows)


def _losses(losses: dict[str, float], overfits: bool) -> str:
    rows, known = [], {name: losses[name] for name in LOSSES if losses.get(name) is not None}
    for name, loss in known.items():
        own = " class=own" if name in ("whole", "streamed", "mixed", "unseen") else ""
        width = 100 * loss / max(known.values())
        bar = f'<td class=bar><div{own} style="width: {width:.1f}%"></div>'
        rows.append(
            (name, f"<td>{LOSSES[name]}{bar}", f"<td class=number>{loss:.4f}", f"<td class=number>{bits(loss):.4f}")
        )
    if not rows:
        return "<p>The run has not ended: it is not compared with baselines yet."
    hint = "<p class=hint>Per character of the validation split, which was not trained on; shorter bars are better."
    table = _table(rows, ("", "", "", "nats", "bits"))
    warning = verdict(losses, overfits) if known.keys() >= {"whole", "streamed"} else None
    return hint + table + (f"<p class=warning>{_text(warning[0].upper() + warning[1:])}." if warning else "")


def _chart(records: list[dict[str, Any]]) -> str:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "chargpt"}), io.StringIO() as svg:  # the same bytes each time
        curves(records).savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
        drawn = svg.getvalue()
    return f'<div class=chart role=img aria-label="Losses by step">{drawn[drawn.index("<svg") :]}</div>'


def _course(records: list[dict[str, Any]]) -> str:
    """Return the samples of the first, the middle, the best and the last evaluation."""
    sampled = [record for record in records if record["event"] == "evaluation" and "sample" in record]
    if not sampled:
        return ""
    best = min(sampled, key=lambda record: record["val_loss"])
    shown = {record["step"]: record for record in (sampled[0], sampled[len(sampled) // 2], best, sampled[-1])}
    parts = []
    for step, record in sorted(shown.items()):
        name = f"step {step:,}" + (" (best)" if record is best else "")
        parts.append(f"<h3>{name}: {record['val_loss']:.4f} nats</h3><pre>{_text(record['sample'].strip())}</pre>")
    return "".join(parts)


def _figures(found: Examination) -> str:
    first, *_ = found.columns.values()
    rows = []
    for name in first:
        values = [figures[name] for figures in found.columns.values()]
        cells = [f"<td>{_text(v)}" if isinstance(v, str) else f"<td class=number>{figure_of(v)}" for v in values]
        rows.append((_text(name), *cells))
    return _table(rows, ("", *map(_text, found.columns)))


def _texts(found: Examination) -> Iterable[str]:
    examined = list(zip(found.texts, found.passages, strict=True))
    longest = sorted(
        ((end - start, seed, text[start:end]) for (seed, text), spans in examined for start, end in spans), reverse=True
    )
    yield "<h2>Copied passages</h2>"
    if not longest:
        yield f"<p>No passage of {NGRAM} characters or more is copied from the training text."
    for length, seed, passage in longest[:MAX_PASSAGES]:
        cut = "…" if length > SHOWN_CHARACTERS else ""
        yield f"<p>{plural(length, 'character')}, seed {seed}:<pre>{_text(passage[:SHOWN_CHARACTERS])}{cut}</pre>"
    yield f"<h2>Samples</h2><p class=hint>Marked: passages of {NGRAM} characters or more from the training text."
    for (seed, text), spans in examined[:MAX_TEXTS]:
        shown, at, parts = text[:MAX_CHARACTERS], 0, []
        for start, end in spans:
            copied = _text(shown[start:end])
            parts += [_text(shown[at:start]), f"<mark>{copied}</mark>" if copied else ""]
            at = end
        cut = "…" if len(shown) < len(text) else ""
        yield f"<h3>seed {seed}</h3><pre>{''.join(parts)}{_text(shown[at:])}{cut}</pre>"


def _records(found: Examination) -> Iterable[str]:
    copies = sorted(found.copies)
    yield f"<h2>Exact copies of training records</h2><p>{plural(len(copies), 'different record')}:"
    yield f"<ul class=records>{''.join(f'<li>{_text(record)}' for record in copies[:MAX_RECORDS])}</ul>"
    if len(copies) > MAX_RECORDS:
        yield f"<p>… and {len(copies) - MAX_RECORDS:,} more"
    invalid = "" if found.valid is None else "; crossed out: not valid"
    yield f"<h2>Samples</h2><p class=hint>Marked: exact copies of training records{invalid}."
    items = []
    for _, record in found.texts[:MAX_RECORDS]:
        item = _text(record[:MAX_CHARACTERS])
        if record in found.copies:
            item = f"<mark>{item}</mark>"
        if found.valid is not None and record not in found.valid:
            item = f"<del>{item}</del>"
        items.append(f"<li>{item}")
    yield f"<ul class=records>{''.join(items)}</ul>"
