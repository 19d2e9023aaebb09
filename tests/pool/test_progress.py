"""Progress bars: what they say at every width, and what they leave in a real terminal, in a file, behind an error."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlive import Pool
from outlive.pool import bars
from outlive.pool.progress import Pace, Seen, columns, duration, line, markup, speed
from pool import task_functions

PROGRAM = Path(__file__).with_name("programs") / "progress_bar.py"
COLUMNS = 72

seens = st.builds(
    Seen,
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.integers(0, 10**6),
    st.none() | st.integers(0, 10**9),
    st.floats(0, 10**7),
    st.none() | st.floats(1e-9, 10**7),
    st.sampled_from(["", "in", "stopped after", "ValueError after"]),
)


@given(seens, st.text(max_size=60), st.integers(1, 200), st.booleans())
def test_a_line_fits_whatever_the_width(seen, label, width, simple):
    """A line that wraps once leaves rubbish on the screen for ever; so does a control character in a name."""
    text = line(seen, label, width, simple=simple)

    assert columns(text) <= width
    assert text.isprintable()
    assert text.isascii() or not simple
    assert markup(seen, label).startswith("<div>")


def test_a_line_says_done_failed_retried_rate_and_time_left():
    """Everything, in words that need no legend; less of it where there is less room, a bar last of all."""
    seen = Seen(6_231, 12, 3, 10_000, 2.9, 2_104.0)

    assert line(seen, "parse", bar=False) == "parse   62%  6,231/10,000 · 12 failed · 3 retried · 2,104/s · 1.8 s left"
    assert line(seen, "parse", 84) == (
        "parse   62%  ━━━━━━┄┄┄┄  6,231/10,000 · 12 failed · 3 retried · 2,104/s · 1.8 s left"
    )
    assert line(seen, "parse", 56) == " 62%  6,231/10,000 · 12 failed · 2,104/s · 1.8 s left"
    assert line(seen, "parse", 13) == "6,231/10,000"
    assert line(seen, "parse", 100, simple=True).startswith("parse   62%  ######")


def test_a_line_counts_when_the_total_is_unknown():
    """An iterable without a length, or one that gives more than it said."""
    assert line(Seen(5, elapsed_s=3.0, rate=1.7), "load") == "load  5 done · 1.7/s · 3.0 s"
    assert line(Seen(11, total=10, elapsed_s=3.0)) == "11 done · 3.0 s"
    assert line(Seen(0, total=0, elapsed_s=0.0, ended="in"), bar=False) == "100%  0/0 · in 0.0 s"


def test_times_and_rates_are_in_units_that_people_use():
    """No «0.0002/s», no «7261 s»."""
    assert [duration(s) for s in (0.04, 9.96, 59.4, 60, 200, 7265, 90_000, 86_400)] == [
        *("0.0 s", "10 s", "59 s", "1 min", "3 min 20 s", "2 h 1 min", "1 d 1 h", "1 d")
    ]
    assert [speed(r) for r in (2104.4, 9.96, 3.21, 0.25, 1e-3, 1e-5)] == [
        *("2,104/s", "10/s", "3.2/s", "15/min", "3.6/h", "0.0/h")
    ]


def test_a_rate_is_of_the_last_seconds():
    """What starting the workers took, and how slow the first tasks were, is forgotten."""
    pace = Pace()
    pace.note(5.0, 0)
    assert pace.rate(5.0) is None
    for second in range(10, 40):
        pace.note(float(second), 10 if second < 20 else 10 + (second - 19) * 100)

    assert pace.rate(40.0) == pytest.approx(100.0)


def test_a_name_is_text_in_a_notebook():
    """Not markup; and a finished bar of unknown length does not move for ever."""
    text = markup(Seen(5, ended="in"), "<script>")

    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert '<progress value="1" max="1">' in text


# ---------------------------------------------------------------- real streams


def seen_in_a_terminal(how: str) -> tuple[list[str], int]:
    """The screen after the program's end, line by line, and its exit status."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), how],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "PYTHONUTF8": "1"},
    )
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 1 << 16):
            said += piece
    except OSError:
        pass  # Linux says so at the end of a terminal
    finally:
        os.close(ours)
    return on_screen(said.decode()), process.wait()


def on_screen(text: str) -> list[str]:
    """What a terminal shows: a carriage return goes back, and what follows is written over what was there."""
    assert "\x1b" not in text
    shown = []
    for row in text.split("\n"):
        cells: list[str] = []
        for piece in row.split("\r"):
            cells[: len(piece)] = piece
        shown.append("".join(cells).rstrip())
    return shown


def test_the_terminal_is_left_in_order_when_tasks_die():
    """Lines of the log stand alone, the last state stays, what the program prints next begins a line of its own."""
    screen, status = seen_in_a_terminal("all")

    assert status == 0
    bars_left = [row for row in screen if "all of them" in row]
    assert len(bars_left) == 1
    assert re.fullmatch(
        r"all of them  100%  (━+  )?300/300 · 2 failed( · 1 retried)?( · [\d.,]+/s)? · in [\d.]+ s", bars_left[0]
    )
    assert [row for row in screen if row.startswith("worker ")]
    assert all(not row or row.startswith(("worker ", "all of them", "got 298", "end")) for row in screen), screen
    assert screen.index("got 298") == screen.index(bars_left[0]) + 1


@pytest.mark.parametrize(
    ("how", "words", "next_row"),
    [
        ("endless", "stopped after", "end"),
        ("raises", "ValueError after", "concurrent.futures.process._RemoteTraceback"),
        ("interrupted", "after", "Traceback (most recent call last)"),
    ],
)
def test_the_terminal_is_left_in_order_when_a_map_ends_early(how, words, next_row):
    """Closed, raised, Ctrl-C: the bar's line ends, and what comes next begins its own."""
    screen, status = seen_in_a_terminal(how)

    rows = [number for number, row in enumerate(screen) if words in row]
    assert len(rows) == 1, screen
    assert screen[rows[0] + 1].startswith(next_row), screen
    assert (status == 0) is (how == "endless")


def test_a_file_gets_few_lines_and_nothing_that_only_a_terminal_understands():
    """The log of a job that ran for a night can be read."""
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), "all"], capture_output=True, text=True, env={**os.environ, "PYTHONUTF8": "1"}
    )

    assert ended.stdout == "got 298\nend\n"
    assert "\r" not in ended.stderr
    assert ended.stderr.count("all of them") == 1
    assert "300/300 · 2 failed" in ended.stderr


def test_a_line_comes_from_time_to_time_where_lines_stay(monkeypatch):
    """The first only after a while: short maps have one line in all."""
    monkeypatch.setattr(bars, "LOG_INTERVAL_S", 0.0)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)

    with Pool(2, "fork") as pool:
        assert list(pool.map(task_functions.square, range(5), progress="squares")) == [0, 1, 4, 9, 16]

    rows = stream.getvalue().splitlines()
    assert len(rows) >= 2
    assert rows[-1].startswith("squares  100%  5/5")


def test_results_come_all_the_same_when_the_bar_cannot_be_shown(monkeypatch):
    """A closed stream, none at all, an odd one."""
    closed = io.StringIO()
    closed.close()
    with Pool(1, "fork") as pool:
        for stream in (closed, None, object()):
            monkeypatch.setattr(sys, "stderr", stream)
            assert list(pool.starmap(task_functions.add, [(1, 2)], progress=True)) == [3]


def test_what_progress_means_is_checked():
    """Before anything is begun."""
    with Pool(1) as pool:
        with pytest.raises(TypeError, match="progress must be True, False or a name for the bar, got 1"):
            pool.map(abs, [1], progress=1)
        assert pool.pids == []


def test_the_length_is_that_of_the_shortest_and_only_where_all_have_one():
    """As `zip` counts."""
    assert bars.length_of(([1, 2, 3], range(2))) == 2
    assert bars.length_of(([1], iter([1]))) is None
    assert bars.length_of((range(10**30),)) is None
