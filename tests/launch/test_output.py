"""What ranks print: prefixed, whole, passed on before and after their death, kept for the incident.

Reads   what the launcher's streams got.
Writes  nothing.
Never   expects an order between ranks: only within each.
"""

from __future__ import annotations

import sys

import pytest

import outlive
from deadlines import wait_until
from launch import rank_functions


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_every_line_has_its_rank_and_arrives_before_the_error(capsys, monkeypatch, method):
    """print, a raw write, C's stdout, a progress bar, a last line without an end; standard error apart."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # else Python itself would see to it

    with pytest.raises(outlive.RankExitedError) as caught:
        outlive.spawn(rank_functions.speak, (), 1, start_method=method)

    captured = capsys.readouterr()
    assert captured.out == (
        "[rank 0] line one of 0\n[rank 0] raw 0\n[rank 0] native 0\n[rank 0] 10%\r[rank 0] 20%\r[rank 0] no end of 0\n"
    )
    assert captured.err == "[rank 0] a warning of 0\n"
    words = caught.value.incident.evidence.last_words
    assert {"line one of 0", "a warning of 0", "no end of 0"} <= set(words.replace("\r", "\n").splitlines())
    assert "no end of 0" in str(caught.value)


def test_ranks_print_as_they_like_when_prefixes_are_off(capfd):
    """Straight to the launcher's descriptors, as with torch."""
    with pytest.raises(outlive.RankExitedError):
        outlive.spawn(rank_functions.speak, (), 1, start_method="spawn", prefix_output=False)

    captured = capfd.readouterr()
    assert "[rank" not in captured.out + captured.err
    assert "raw 0\n" in captured.out
    assert "a warning of 0\n" in captured.err


@pytest.mark.parametrize("join", [True, False])
def test_no_rank_waits_at_a_full_pipe(capsys, join):
    """More output than a pipe holds, from two ranks: all of it, each line whole, also while nobody joins."""
    context = outlive.spawn(rank_functions.speak_without_end, (), 2, join, start_method="fork")
    if not join:
        assert wait_until(lambda: not any(process.is_alive() for process in context.processes), 60)
        assert context.join() in (True, False)
        while not context.join():
            pass

    lines = capsys.readouterr().out.splitlines()
    for rank in range(2):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] {number:06} " + "x" * 40 for number in range(4000)]
    assert len(lines) == 8000


class Notebook:
    """A stream with neither a buffer nor a descriptor, as a kernel has it."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_a_notebooks_stream_gets_the_output(monkeypatch):
    """Under fork, too, where ranks inherit an object that would speak to the kernel in the launcher's place."""
    monkeypatch.setattr(sys, "stdout", Notebook())

    outlive.spawn(rank_functions.say_hello, (), 1, start_method="fork")

    assert sys.stdout.text == "[rank 0] hello\n"
