"""Logging: every record of every logger is one line on stderr, as JSON for machines or short text for people.

Python's warnings and uncaught exceptions are log records too. A line carries the id of the request being served, or of
the requests whose sequences it concerns.

The log has no text from clients. Only HTTP processes see such text. Messages of this package never hold it. Those of
libraries may, and so may the texts of exceptions. So HTTP processes log a library's message without its arguments, and
an exception's type and traceback alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
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

MAX_TRACEBACK_CHARACTERS = 3000  # its end is kept; a pipe takes lines of up to 4,096 bytes in one piece

# Fields that the text format shows in fixed places or omits.
FIXED_FIELDS = frozenset(
    ("timestamp", "level", "logger", "process", "pid", "message", "request_id", "request_ids", "exception")
    + ("method", "handler", "status")
)

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

logger = logging.getLogger(__name__)


def configure_logging(level: str, log_format: LogFormat) -> None:
    """Send all logs of this process to stderr."""
    is_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    root = logging.getLogger()
    root.handlers = [handler for handler in root.handlers if not isinstance(handler, LineHandler)]
    root.addHandler(LineHandler(json_line if is_json else text_line))
    root.setLevel(level.upper())
    adopt_litserve()
    # Not collected because not shown (Python's logging HOWTO, "Optimization").
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, trace: logger.critical("uncaught exception", exc_info=error)
    threading.excepthook = _log_uncaught_in_thread
    sys.unraisablehook = lambda args: logger.error("unraisable exception", exc_info=args.exc_value)


def adopt_litserve() -> None:
    """Route LitServe's loggers to the root. It adds a handler of its own on import and again on run."""
    litserve = logging.getLogger("litserve")
    litserve.handlers.clear()
    litserve.propagate = True
    for name in ("litserve", "litserve.server"):  # they log prompts at DEBUG, and a SIGTERM as KeyboardInterrupt
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


def process_name() -> str:
    """Return the name of this process as in the metrics: main, http-0, worker-0."""
    name = multiprocessing.current_process().name
    return "main" if name == "MainProcess" else name


class LineHandler(logging.Handler):
    """Writes each record with one system call. So lines of several processes do not mix, unless they are very long.

    As with any program, a process waits while nobody reads the pipe that its stderr is.

    `format_line` turns fields into a line. A record's `fields` and `request_ids` become part of it.
    """

    def __init__(self, format_line: Callable[[dict[str, Any]], bytes]):
        super().__init__()
        self.format_line = format_line

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields = self._fields(record)
        except Exception as error:  # the arguments do not fit; logging's own report would print them
            record.msg, record.args = f"cannot format {record.msg!r}", None
            record.levelname, record.exc_info = "ERROR", (type(error), error, error.__traceback__)
            fields = self._fields(record)
        self.write(fields)

    def write(self, fields: dict[str, Any]) -> None:
        line = self.format_line(fields)
        with contextlib.suppress(OSError):  # no place is left to report it
            os.write(2, line)

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        process = process_name()
        may_quote_clients = process.startswith("http")
        message = _without_arguments(record) if may_quote_clients and not _is_ours(record) else record.getMessage()
        fields: dict[str, Any] = {
            "timestamp": _timestamp(int(1000 * record.created)),
            "level": record.levelname,
            "logger": record.name,
            "process": process,
            "pid": os.getpid(),
            "message": _encodable(message.rstrip("\n")),
        }
        if current := request_id.get():
            fields["request_id"] = current
        if hasattr(record, "request_ids"):
            ids = sorted(set(record.request_ids))
            fields |= {"request_id": ids[0]} if len(ids) == 1 else {"request_ids": ids}
        fields |= getattr(record, "fields", {})
        if record.exc_info is not None and record.exc_info[1] is not None:
            text = _traceback(record.exc_info[1], with_text=not may_quote_clients)
            fields["exception"] = _encodable(text[-MAX_TRACEBACK_CHARACTERS:])
        return fields


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == "service"


def _without_arguments(record: logging.LogRecord) -> str:
    """Return the constant part of a library's message: its format, or the place and category of a warning."""
    if not isinstance(record.msg, str):  # an exception, or another object with a text of its own
        return type(record.msg).__name__
    line = record.msg.partition("\n")[0]  # asyncio shows tasks with their exceptions on later lines
    return ":".join(line.split(":")[:3]) if record.name == "py.warnings" else line


class AccessLog:
    """Writes the access lines of an HTTP process. A LogRecord for each would cost a tenth of a short request's time."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("service.access")
        self._handlers = [it for it in logging.getLogger().handlers if isinstance(it, LineHandler)]
        self._process, self._pid = process_name(), os.getpid()

    def write(
        self, level: int, method: str, route: str, status: int | None, client: str, seconds: float, id: str, *ran: Any
    ) -> None:
        """Write a request's line if its level is shown. It has the route, but not the query, which may hold a prompt.

        ran: characters of prompts and completions, and the endings, if the request ran the model.
        """
        if self._logger.isEnabledFor(level):
            line = {
                "timestamp": _timestamp(int(1000 * time.time())), "level": logging.getLevelName(level),
                "logger": "service.access", "process": self._process, "pid": self._pid,
                "message": f"{method} {route} {status}", "method": method, "handler": route, "status": status,
                "client": client, "seconds": seconds, "request_id": id,
            }  # fmt: skip
            if ran:
                line["prompt_characters"], line["completion_characters"], line["endings"] = ran
            for handler in self._handlers:
                handler.write(line)


@functools.lru_cache(maxsize=16)  # a busy process logs several lines in a millisecond
def _timestamp(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")[:23] + "Z"


def json_line(fields: dict[str, Any]) -> bytes:
    return msgspec.json.encode(fields) + b"\n"


# Control characters, with which the name of a folder could change the terminal or forge lines.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


def text_line(fields: dict[str, Any]) -> bytes:
    """Format a line for a terminal: local time, message, further fields, request ids."""
    clock = datetime.fromisoformat(fields["timestamp"]).astimezone().time().isoformat("milliseconds")
    line = f"{clock} {fields['level']} {fields['process']} {fields['logger']}: {fields['message']}"
    line += "".join(f" {name}={value}" for name, value in fields.items() if name not in FIXED_FIELDS)
    line = line.translate(CONTROLS)
    if "request_id" in fields or fields.get("request_ids"):
        line += f" [{' '.join(fields.get('request_ids') or [fields['request_id']])}]"
    if "exception" in fields:
        lines = fields["exception"].rstrip("\n").split("\n")
        line += "".join("\n" + each.translate(CONTROLS) for each in lines)
    return line.encode() + b"\n"


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _traceback(error: BaseException | None, *, with_text: bool) -> str:
    """Format a traceback. `with_text=False` omits the text of all exceptions except OSError's."""
    if with_text:
        return "".join(traceback.format_exception(error))
    parts: list[str] = []
    while error is not None:
        text = f": {error.strerror}" if isinstance(error, OSError) else ""
        frames = "".join(traceback.format_tb(error.__traceback__))
        parts.insert(0, f"Traceback (most recent call last):\n{frames}{type(error).__qualname__}{text}\n")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(parts)


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if not isinstance(args.exc_value, SystemExit):
        name = args.thread.name if args.thread else "a thread"
        logger.critical("uncaught exception in %s", name, exc_info=args.exc_value)
