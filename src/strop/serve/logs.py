"""Write logs as lines of JSON. No prompt, picture or token is in them."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}
_LOGGERS = ("strop", "uvicorn", "py.warnings", "ray", "ray.serve")


class JsonLines(logging.Formatter):
    """Format a record as one line of JSON, with the fields that ``extra`` gives it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; what JSON cannot express is written as text."""
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_as_json(level: int = logging.INFO, names: Sequence[str] = _LOGGERS) -> None:
    """Send the records of Strop, of uvicorn, of Ray and of warnings to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.captureWarnings(True)
    for name in names:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    logging.getLogger("uvicorn.access").disabled = True  # the guard logs each answer
