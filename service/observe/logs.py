"""Where every log line goes: one to stderr for each record, JSON for machines or short text for people.

All loggers come here, whoever made them, with Python's warnings and the exceptions that nobody catches. A line
belongs to the request whose id its context holds, or to the requests of the sequences that it is about.

What clients send is not for logs. Messages are ours, or uvicorn's and LitServe's, which do not hold it; an exception's
text may, so HTTP processes leave it out and say its type and where it was raised. Inference processes know ids alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

LogFormat = Literal["auto", "json", "text"]

MAX_LINE_BYTES = select.PIPE_BUF  # a pipe takes so much in one piece, whoever else writes to it

# What the form for people gives a place of its own, or leaves out.
IN_TEXT = frozenset(
    {"timestamp", "level", "logger", "process", "pid", "message", "request_id", "request_ids", "exception"}
    | {"method", "handler", "status"}
)

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

logger = logging.getLogger(__name__)


def configure_logging(level: str, log_format: LogFormat) -> None:
    """Send all logs of this process to stderr."""
    is_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, LineHandler):
            root.removeHandler(handler)
    root.addHandler(LineHandler(json_line if is_json else text_line))
    root.setLevel(level.upper())
    adopt_litserve()
    # What no line shows need not be found out for each.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_of_thread
    sys.unraisablehook = _log_unraisable


def adopt_litserve() -> None:
    """Let LitServe's loggers pass their records on; it gives them a handler when imported, and when it runs."""
    litserve = logging.getLogger("litserve")
    litserve.handlers.clear()
    litserve.propagate = True
    for name in ("litserve", "litserve.server"):  # it logs prompts at DEBUG
        logging.getLogger(name).setLevel(max(logging.INFO, logging.getLogger().level))


def process_name() -> str:
    """What metrics call this process: main, http-0, worker-0; from the names that LitServe gives."""
    name = multiprocessing.current_process().name
    if name == "inference-worker":
        return f"worker-{os.environ['LITSERVE_WORKER_ID']}"
    return "main" if name == "MainProcess" else name.replace("LitServer-", "http-")


class LineHandler(logging.Handler):
    """Writes each record at once and in one piece, so that the lines of several processes stay whole."""

    def __init__(self, form: Callable[[float, dict[str, Any]], bytes]):
        super().__init__()
        self._form = form

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields = self._fields(record)
        except Exception as error:  # a record that does not fit its message; logging would show its arguments
            message = f"{record.pathname}:{record.lineno} logs what cannot be written"
            broken = logging.LogRecord(record.name, logging.ERROR, "", 0, message, None, (type(error), error, None))
            fields = self._fields(broken)
        self.write(record.created, fields)

    def write(self, created: float, fields: dict[str, Any]) -> None:
        """Write a line that begins as `first_fields`; what is too long for a pipe loses its middle."""
        line = self._form(created, fields)
        while len(line) > MAX_LINE_BYTES:
            name = max(("message", "exception", "request_ids"), key=lambda name: len(fields.get(name, "")))
            kept = len(fields[name]) * 9 // 20
            if name == "request_ids":
                fields[name] = fields[name][:kept]
            else:
                fields[name] = f"{fields[name][:kept]} … {fields[name][-kept:]}"
            line = self._form(created, fields)
        with contextlib.suppress(OSError):  # stderr is gone, and there is nowhere to say so
            os.write(2, line)

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        message = record.getMessage()
        if record.name == "asyncio":  # in further lines it shows tasks, with their exceptions' texts
            message = message.partition("\n")[0]
        message = message.rstrip("\n").encode(errors="backslashreplace").decode()
        fields = first_fields(record.levelname, record.name, message)
        request_ids: list[str] | None = getattr(record, "request_ids", None)
        if request_ids is not None:
            ids = sorted(set(request_ids))
            fields |= {"request_id": ids[0]} if len(ids) == 1 else {"request_ids": ids}
        fields |= getattr(record, "fields", {})
        if record.exc_info is not None and record.exc_info[1] is not None:
            error = record.exc_info[1]
            is_ours = not fields["process"].startswith("http")  # nothing that a client sent is in its text
            text = "".join(traceback.format_exception(error)) if is_ours else _places(error)
            fields["exception"] = text.encode(errors="backslashreplace").decode()
        return fields


def first_fields(level: str, name: str, message: str) -> dict[str, Any]:
    """What every line begins with."""
    fields = {
        "timestamp": "",  # the form's to give
        "level": level,
        "logger": name,
        "process": process_name(),
        "pid": os.getpid(),
        "message": message,
    }
    id = request_id.get()
    if id is not None:
        fields["request_id"] = id
    return fields


def log_fields(logger: logging.Logger, level: int, message: str, fields: dict[str, Any]) -> None:
    """As `logger.log` with further fields, at half the cost, for lines that come with each request.

    Whoever calls it asks before whether the level is enabled.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineHandler):
            handler.write(time.time(), first_fields(logging.getLevelName(level), logger.name, message) | fields)


def json_line(created: float, fields: dict[str, Any]) -> bytes:
    second, fraction = divmod(created, 1)
    fields["timestamp"] = f"{_utc(second)}.{int(1000 * fraction):03}Z"
    return msgspec.json.encode(fields) + b"\n"


@functools.lru_cache(maxsize=8)
def _utc(second: float) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def text_line(created: float, fields: dict[str, Any]) -> bytes:
    """For a terminal: the time of day there, and no more than a reader needs."""
    clock = datetime.fromtimestamp(created).isoformat(" ", "milliseconds").partition(" ")[2]
    line = f"{clock} {fields['level']} {fields['process']} {fields['logger']}: {fields['message']}"
    line += "".join(f" {name}={value}" for name, value in fields.items() if name not in IN_TEXT)
    if ids := fields.get("request_ids") or [fields[name] for name in ("request_id",) if name in fields]:
        line += f" [{' '.join(ids)}]"
    if "exception" in fields:
        line += "\n" + fields["exception"].rstrip("\n")
    return line.encode() + b"\n"


def _places(error: BaseException | None) -> str:
    """A traceback without the exceptions' texts, save the system's own."""
    parts: list[str] = []
    while error is not None:
        text = f": {error.strerror}" if isinstance(error, OSError) else ""
        frames = "".join(traceback.format_tb(error.__traceback__))
        parts.insert(0, f"Traceback (most recent call last):\n{frames}{type(error).__qualname__}{text}\n")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(parts)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        logger.critical("uncaught exception", exc_info=error)


def _log_uncaught_of_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
        name = arguments.thread.name if arguments.thread else "a thread"
        logger.critical("uncaught exception in %s", name, exc_info=arguments.exc_value)


def _log_unraisable(unraisable: Any) -> None:
    logger.error("an exception that could not be raised", exc_info=unraisable.exc_value)
