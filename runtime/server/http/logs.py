"""The log: one line for each request, as text or as JSON, on stderr; never a prompt or an answer.

As JSON, everything that this process and its engines write to stderr becomes a line of JSON, whoever writes it: the
interpreter, libraries, or code in C++.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

_LOG = logging.getLogger("enginewright.server")
_ACCESS = logging.getLogger("enginewright.access")
_MOST_REASON = 300
_PLACE = re.compile(r"'?[A-Za-z0-9_.\[\]-]{1,64}'?")
_QUOTED = re.compile(r"(?<!\w)(['\"]).*\1(?!\w)|[\[{<].*[\]}>]", re.DOTALL)
_OPENED = re.compile(r"(?<!\w)['\"\[{<].*", re.DOTALL)
_TEMPLATE = "chat:"
"""The beginning of an error's message that comes from a chat template. Such a message may quote a prompt."""


def set_up_logs(as_json: bool) -> None:
    """Sends logs to stderr, one line each. On a full disk lines are lost, but no request fails."""
    logging.raiseExceptions = False
    handler = logging.StreamHandler(_json_only() if as_json else sys.stderr)
    handler.setFormatter(_JsonLines() if as_json else _TextLines("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger("enginewright")
    root.setLevel(logging.INFO)
    for one in (root, logging.getLogger("uvicorn")):
        one.handlers[:] = [handler]
        one.propagate = False


def log_request(fields: Mapping[str, Any]) -> None:
    """Writes the log line of a request.

    Args:
        fields: ``method``, ``path``, ``status`` and optional further fields; fields that are None are omitted.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    if "reason" in fields:
        fields["reason"] = without_values(str(fields["reason"]))
    _ACCESS.info("%(method)s %(path)s %(status)s", fields, extra={"fields": fields})


def without_values(reason: str) -> str:
    """Returns an error's message without quoted values, which may be parts of a prompt.

    The name of the field at the beginning stays.
    """
    if reason.startswith(_TEMPLATE):
        return "chat: the template refuses the messages"
    place, colon, rest = reason.partition(": ")
    if not colon or not _PLACE.fullmatch(place):
        place, colon, rest = "", "", reason
    return (place + colon + _OPENED.sub("...", _QUOTED.sub("...", rest)))[:_MOST_REASON]


class _TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        fields = getattr(record, "fields", {})
        more = (f"{k}={_plain(v)}" for k, v in fields.items() if k not in ("method", "path", "status"))
        return " ".join([text, *more])


def _plain(value: Any) -> str:
    text = str(value)
    return text if re.fullmatch(r"[!-~]+", text) else json.dumps(text)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": round(record.created, 3), "level": record.levelname.lower()}
        fields = getattr(record, "fields", None)
        line |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


_stderr: IO[str] | None = None


def _json_only() -> IO[str]:
    """Returns the log's output, a copy of stderr. Other output to stderr is then logged line by line."""
    global _stderr
    if _stderr is not None:
        return _stderr
    try:
        number = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # stderr isn't a file, as within tests
        return sys.stderr
    sys.stderr.flush()
    saved = os.dup(number)
    _stderr = os.fdopen(saved, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    reads, writes = os.pipe()
    os.dup2(writes, number, inheritable=True)
    os.close(writes)

    def read() -> None:
        with os.fdopen(reads, encoding="utf-8", errors="backslashreplace") as lines:
            for line in lines:
                if text := line.rstrip():
                    _LOG.info("%s", text)

    reader = threading.Thread(target=read, name="stderr", daemon=True)
    reader.start()

    def restore() -> None:
        sys.stderr.flush()
        os.dup2(saved, number)  # the last end of the pipe, unless a process of ours still runs
        reader.join(1.0)

    atexit.register(restore)
    return _stderr
