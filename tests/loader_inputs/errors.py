"""Errors for datasets to raise, among them some that are hard to send or to show.

Reads   the worker's generators; marker files, where a dataset is to kill its worker.
Writes  marker files, each before the kill that it counts.
Never   pytest: importing this is part of every worker's start.
"""

from __future__ import annotations


class OddError(Exception):
    """Takes two arguments, neither of them the text."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"code {code} at {place}")


class MessageError(Exception):
    """Takes its text by keyword, as torch allows for."""

    message = "none yet"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message


class MuteError(Exception):
    """Its text is empty."""


def odd_error() -> Exception:
    return OddError(17, "the edge")


def message_error() -> Exception:
    return MessageError("said by keyword")


def key_error() -> Exception:
    return KeyError("a\nkey")


def unicode_error() -> Exception:
    try:
        b"\xff\xfe".decode("utf-8")
    except UnicodeDecodeError as error:
        return error
    raise AssertionError


def stop_iteration() -> Exception:
    return StopIteration("no more")


def assertion_error() -> Exception:
    return AssertionError("1 is not 2")


def chained_error() -> Exception:
    error = ValueError("the second")
    error.__cause__ = OSError(2, "the first")
    return error


def mute_error() -> Exception:
    return MuteError()


ERRORS = {
    1: key_error,
    4: odd_error,
    5: message_error,
    8: unicode_error,
    9: assertion_error,
    10: chained_error,
    12: stop_iteration,
    13: mute_error,
}


STREAM_ERRORS = {3: key_error, 104: odd_error, 105: assertion_error, 111: unicode_error}
