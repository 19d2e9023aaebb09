"""The progress bar of a `map`: in a terminal, a log file or a notebook.

Reads   what the manager's thread counts; the clock; the width of the terminal.
Writes  standard error, or a notebook's output: at most ten times a second, by whoever takes the results.
Never   a thread of its own, nor an error of its own: where it cannot be shown, nothing is.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from outlive.pool.progress import Pace, Seen, columns, line, markup

_REDRAW_S = 0.1
_NOTEBOOK_S = 0.2
LOG_INTERVAL_S = 10.0  # between two lines where they stay: a file, a pipe, a job's log
_AFTER_LOG_S = 0.1  # so long after a line in the log the bar stays away
_NARROW = 20


class Retrying(Protocol):
    """The pool's manager, as far as a bar asks it."""

    @property
    def retries(self) -> int: ...


class Screen(Protocol):
    every_s: float

    def show(self, seen: Seen, label: str) -> None: ...

    def end(self, seen: Seen, label: str) -> None: ...


class Bar:
    """Of one `map`. The manager's thread counts, whoever iterates draws."""

    def __init__(self, label: str, total: int | None, manager: Retrying, screen: Screen) -> None:
        self.done = self.failed = 0
        self._label, self._total = label, total
        self._manager, self._retries_before = manager, manager.retries
        self._screen = screen
        self._pace = Pace()
        self._begun = time.monotonic()
        self._due = 0.0

    def add(self, tasks: int, failed: int) -> None:
        """So many more have ended."""
        self.done += tasks
        self.failed += failed

    def tick(self) -> None:
        """Draw, if it is time to."""
        now = time.monotonic()
        if now >= self._due:
            self._pace.note(now, self.done)
            self._try(self._screen.show, self._seen(now))
            self._due = time.monotonic() + self._screen.every_s

    def nap_s(self, left: float | None) -> float:
        """How long to wait for news until the next tick."""
        nap = max(0.01, min(self._due - time.monotonic(), 1.0))
        return nap if left is None else min(nap, left)

    def around(self, results: Iterator[Any]) -> Iterator[Any]:
        """The same results, with the bar closed behind them however that ends."""
        ended = "stopped after"
        try:
            yield from results
            ended = "in"
        except KeyboardInterrupt:
            ended = "interrupted after"
            raise
        except Exception as error:
            ended = f"{type(error).__name__} after"
            raise
        finally:
            self._try(self._screen.end, self._seen(time.monotonic(), ended))

    def _seen(self, now: float, ended: str = "") -> Seen:
        elapsed = now - self._begun
        rate = self._pace.rate(elapsed)
        if ended:
            rate = self.done / elapsed if self.done and elapsed > 0 else None
        return Seen(
            self.done, self.failed, self._manager.retries - self._retries_before, self._total, elapsed, rate, ended
        )

    def _try(self, draw: Callable[[Seen, str], None], seen: Seen) -> None:
        try:
            draw(seen, self._label)
        except Exception:  # a closed stream, a notebook that has gone: nobody looks any more
            self._screen = Nowhere()


def bar_of(progress: Any, fn: Any, iterables: Sequence[Any], manager: Retrying) -> Bar | None:
    """What `progress=` asks for."""
    if progress is False:
        return None
    if progress is not True and not isinstance(progress, str):
        raise TypeError(f"progress must be True, False or a name for the bar, got {progress!r}")
    label = progress if isinstance(progress, str) else _name(fn)
    return Bar(label, length_of(iterables), manager, screen_of(sys.stderr))


def _name(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", "")
    return name if isinstance(name, str) and name.isidentifier() else ""


def length_of(iterables: Sequence[Any]) -> int | None:
    """Of the shortest; None where one of them does not know."""
    try:
        return min(len(iterable) for iterable in iterables)
    except Exception:  # a generator; or somebody's __len__ that only raises
        return None


# ---------------------------------------------------------------- where it is shown


def screen_of(stream: Any) -> Screen:
    """A notebook where there is one, else a terminal, else lines."""
    display = _notebook_display()
    if display is not None:
        return Notebook(display)
    if stream is None:
        return Nowhere()
    try:
        if stream.isatty() and os.environ.get("TERM") != "dumb":
            return Terminal(stream)
    except Exception:  # a stream of somebody's that is none
        pass
    return Lines(stream)


class Nowhere:
    """Nobody can see it."""

    every_s = 1.0

    def show(self, seen: Seen, label: str) -> None: ...

    def end(self, seen: Seen, label: str) -> None: ...


class Lines:
    """A line from time to time, for files and pipes."""

    def __init__(self, stream: Any) -> None:
        self.every_s = LOG_INTERVAL_S
        self._stream = stream
        self._first = True

    def show(self, seen: Seen, label: str) -> None:
        if not self._first:  # a map that is done soon needs one line only
            self._say(seen, label)
        self._first = False

    def end(self, seen: Seen, label: str) -> None:
        self._say(seen, label)

    def _say(self, seen: Seen, label: str) -> None:
        self._stream.write(line(seen, label, bar=False, simple=_is_simple(self._stream)) + "\n")
        self._stream.flush()


class Terminal:
    """One line, drawn over and over; the last one stays.

    Lines in outlive's own log, which the manager's thread writes, would end up behind it: it is wiped away before
    them, and drawn again below.
    """

    def __init__(self, stream: Any) -> None:
        self.every_s = _REDRAW_S
        self._stream = stream
        self._simple = _is_simple(stream)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._drawn = False
        self._quiet_until = 0.0
        self._listening = False

    def show(self, seen: Seen, label: str) -> None:
        if not self._listening:
            self._listening = True
            logging.getLogger("outlive").addFilter(self._step_aside)
        with self._lock:
            if time.monotonic() >= self._quiet_until:
                self._draw(line(seen, label, self._width, simple=self._simple), "")

    def end(self, seen: Seen, label: str) -> None:
        logging.getLogger("outlive").removeFilter(self._step_aside)
        with self._lock:
            self._draw(line(seen, label, self._width, simple=self._simple), "\n")

    def _draw(self, text: str, end: str) -> None:
        width = self._width
        self._stream.write(f"\r{text}{' ' * (width - columns(text))}{end}")
        self._stream.flush()
        self._drawn = not end

    @property
    def _width(self) -> int:
        """Of the last column we keep away: some terminals begin a new line there."""
        try:
            there = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            there = 0
        return max(_NARROW, (there or 80) - 1)

    def _step_aside(self, record: logging.LogRecord) -> bool:
        if os.getpid() == self._owner:  # not in a fork of us
            with self._lock:
                self._quiet_until = time.monotonic() + _AFTER_LOG_S
                if self._drawn:
                    try:
                        self._draw("", "\r")
                    except Exception:  # closed: the log may still reach a file
                        pass
        return True


class Notebook:
    """An output of the cell that is updated; where HTML is not shown, its text is."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self.every_s = _NOTEBOOK_S
        self._display = display
        self._handle: Any = None

    def show(self, seen: Seen, label: str) -> None:
        bundle = {"text/plain": line(seen, label, 100), "text/html": markup(seen, label)}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def end(self, seen: Seen, label: str) -> None:
        self.show(seen, label)


def _notebook_display() -> Callable[..., Any] | None:
    """IPython's `display`, where this process is a notebook's kernel. Nothing is imported for it that is not there."""
    module = sys.modules.get("IPython")
    if module is None:
        return None
    try:
        shell = module.get_ipython()
        if shell is None or getattr(shell, "kernel", None) is None:
            return None  # a prompt in a terminal
        display: Callable[..., Any] = importlib.import_module("IPython.display").display
    except Exception:  # a stranger of that name
        return None
    return display


def _is_simple(stream: Any) -> bool:
    """Whether only ASCII can be written there."""
    try:
        "━╸┄·…".encode(stream.encoding or "ascii")
    except Exception:
        return True
    return False
