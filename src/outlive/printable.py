"""Text of user code, made harmless: an exception's message must not steer a terminal, nor forge lines of a log.

Reads   texts; records of the logger "outlive".
Writes  these records, whichever module logs them: this is the one place where log lines are escaped.
Never   fails: what cannot be escaped is left to the handlers.
"""

from __future__ import annotations

import logging
import traceback


def printable(text: object, keep: str = "") -> str:
    """Only what a terminal prints, and `keep`; the rest as a program would write it down."""
    told = str(text)
    if told.isprintable():
        return told
    return "".join(c if c in keep or c.isprintable() else repr(c)[1:-1] for c in told)


def _escape(record: logging.LogRecord) -> bool:
    try:
        message = record.getMessage()
        if not message.isprintable():
            record.msg, record.args = printable(message), None
        if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
            told = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
            record.exc_text = printable(told, keep="\n\t")
    except Exception:
        pass  # logging says so itself, where a message cannot be made
    return True


logging.getLogger("outlive").addFilter(_escape)
