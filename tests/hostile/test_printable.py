"""Texts of user code in the log: no line of it steers a terminal, forges another line, or hides what it says.

Reads   records of the logger, and what a handler prints of them.
Writes  log lines with anything in them.
Never   a terminal.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import hypothesis
import pytest
from hypothesis import strategies as st

import outlive
from outlive.printable import printable

HOSTILE = "a\x1b[2J\x1b]0;owned\x07b\r\nERROR:root:forged\0c\u202egnp.exe\u2028d\udcffe\x85f"
log = logging.getLogger("outlive")


class Raising:
    """A dataset whose errors are hostile."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 1:
            raise type(HOSTILE.replace("\0", "").replace("\udcff", ""), (ValueError,), {})(HOSTILE)
        return index


@pytest.fixture
def printed() -> Iterator[io.StringIO]:
    """What a plain handler prints."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    log.addHandler(handler)
    yield stream
    log.removeHandler(handler)


def test_an_exception_of_user_code_cannot_steer_the_terminal_from_the_log(printed):
    """Its type, its message and the words of `describe` stand in lines of the log."""
    loader = outlive.DataLoader(Raising(), faults="skip", describe=lambda index: HOSTILE)

    assert len(list(loader)) == 3

    lines = printed.getvalue().splitlines()
    assert len(lines) == printed.getvalue().count("\n") == 2  # the incident, and the epoch's summary
    assert all(line.isprintable() for line in lines)
    assert "\\x1b[2J" in lines[0]
    assert not any(line.startswith("ERROR") for line in lines)


def test_a_listener_that_fails_cannot_do_so_with_its_traceback(printed):
    """Tracebacks keep their lines, and nothing else that is not printed."""

    def listen(incident: outlive.Incident) -> None:
        raise ValueError(HOSTILE)

    loader = outlive.DataLoader(Raising(), faults="skip", on_incident=listen)

    assert len(list(loader)) == 3
    assert "in listen\n" in printed.getvalue()
    assert all(line.isprintable() for line in printed.getvalue().split("\n"))


@hypothesis.given(st.text(st.characters(exclude_categories=())))
def test_what_is_printable_is_left_and_the_rest_can_be_read(text):
    """The escapes are Python's own."""
    told = printable(text)

    assert told.isprintable()
    assert told == "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def test_a_record_that_needs_no_escape_is_left_alone(caplog):
    """Its arguments stay for handlers that group by them."""
    with caplog.at_level(logging.INFO, "outlive"):
        log.info("%d of %s", 1, "two")
        log.info("%s", HOSTILE)

    plain, escaped = caplog.records
    assert (plain.msg, plain.args) == ("%d of %s", (1, "two"))
    assert (escaped.msg, escaped.args) == (printable(HOSTILE), None)
