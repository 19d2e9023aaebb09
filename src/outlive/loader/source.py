"""Whether it is samples that fail, or where they come from: a worker's side of the circuit breaker.

Reads   which samples were fetched well and which failed, and of what.
Writes  doubts to the trainer, which knows of the other workers and decides.
Never   leaves a trace: what is fetched for a probe is thrown away, random state is as it was before.

A sample is condemned once its source is known to be well after it failed: because another was fetched then, or because
one that had been fetched before is fetched once more, as a probe. If that fails alike, the source is gone. If it is
well, it may have been gone all the same, and be back: that the trainer knows, from other workers.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from outlive._worker import failures
from outlive._worker.randomness import Randomness
from outlive.incident import Failure, Stage
from outlive.orders import AnswerDoubt, SourceWord

IN_A_ROW = 4  # different samples that fail alike: the source is suspected before the batch is through
RATE, WINDOW = 8, 16  # likewise, so many of the last so many samples
_KEPT, _TRIED = 8, 3
_LONGEST_NAME = 100
# Errors of code, not of what it reads. A sample that was good and now fails of one of them may have read nothing, as
# where an image reader returns None for a file that is gone; where none was ever good, it is the code.
_BUGS = (AttributeError, TypeError, ImportError, AssertionError)
_SURE_BUGS = (NameError, SyntaxError, NotImplementedError)
_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__))
_PARTICULARS = re.compile(r"""'[^']*'|"[^"]*"|\S*[/\\]\S*|0x[0-9a-fA-F]+|\d+""")


def cause_of(error: BaseException) -> str:
    """What exceptions of different samples have in common if they have one cause."""
    named = f"{type(error).__module__}.{type(error).__qualname__}"
    if isinstance(error, OSError) and error.errno is not None:
        named += f" errno {error.errno}"
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    if step is not None and not step.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
        return f"{named} at {step.tb_frame.f_code.co_filename}:{step.tb_lineno}"
    try:
        return f"{named}: {_PARTICULARS.sub('…', str(error))}"
    except Exception:  # a user's __str__ may itself fail
        return named


class Desk(Protocol):
    """What is used of a worker's desk, or of what stands for it in the trainer's own process."""

    box: Any
    randomness: Randomness

    def doubt(self, seq: int, doubt: Doubt) -> AnswerDoubt: ...
    def tell_probe(self, seq: int, found: Found) -> AnswerDoubt: ...
    def pause(self, seconds: float) -> None: ...
    def leave(self) -> None: ...


class Doubt(NamedTuple):
    """What a worker doubts, as `SourceDoubted` has it."""

    failure: Failure
    samples: tuple[str, ...]
    positions: tuple[int, ...]
    proven: bool = False
    failed_at: float = 0.0


class Found(NamedTuple):
    """What a probe showed, as `SourceProbed` has it."""

    works: bool
    goods: tuple[Any, ...] = ()
    failure: Failure | None = None
    samples: tuple[str, ...] = ()
    proven: bool = False


class Source:
    """What a worker knows of where its samples come from. `fetch` gets one of them."""

    def __init__(self, fetch: Callable[[Any], Any]) -> None:
        self._fetch = fetch
        self.goods: deque[Any] = deque(maxlen=_KEPT)  # of as many batches, the newest last
        self._row: dict[str, str] = {}  # samples that failed since one was fetched well, each with its cause
        self._window: deque[str | None] = deque(maxlen=WINDOW)  # causes; None: fetched well
        self._last: Any = None  # the index that failed last
        self._is_bug = False  # what failed last looks like an error of code: it is no mere suspicion's business
        self.failing_since = 0.0  # in the batch in hand

    def went_well(self, index: Any, count: int = 1) -> None:
        """So many samples were fetched well, this one last."""
        self.goods.append(index)
        if self._window:
            self._row.clear()
            self._window.extend([None] * min(count, WINDOW))

    def failed(self, index: Any, error: Exception) -> None:
        if isinstance(error, (MemoryError, *_SURE_BUGS)):
            return  # no fault of the source's
        self._is_bug = isinstance(error, _BUGS)
        self.failing_since = self.failing_since or time.monotonic()
        cause = cause_of(error)
        self._row[_name(index)] = cause
        self._window.append(cause)
        self._last = index

    @property
    def is_suspect(self) -> bool:
        """Different samples fail alike, in a row or at a rate."""
        if not self._window or self._window[-1] is None:
            return False
        cause = self._window[-1]
        return list(self._row.values()).count(cause) >= IN_A_ROW or self._window.count(cause) >= RATE

    @property
    def is_unsure(self) -> bool:
        """Samples failed, and none was fetched well after them."""
        return bool(self._row)

    def was_gone(self, desk: Desk, seq: int, failure: Failure, positions: tuple[int, ...]) -> bool:
        """Whether it was the source, and answers again: then the batch is to be done again. Waits until it does."""
        state = desk.randomness.read()
        try:
            again = self._was_gone(desk, seq, failure, positions)
        finally:
            desk.randomness.set(state)
        self._row.clear()
        self._window.clear()
        return again

    def was_gone_meanwhile(self, desk: Desk, seq: int, failed: Sequence[Failure], positions: tuple[int, ...]) -> bool:
        """Whether it was gone for others while these samples failed, though it answers now: then they are to be tried
        again."""
        if not self.failing_since:
            return False
        kinds = {failure.type_name: failure for failure in failed}.values()
        doubts = (Doubt(failure, (), positions, failed_at=self.failing_since) for failure in kinds)
        return any(desk.doubt(seq, doubt).word is SourceWord.AGAIN for doubt in doubts)

    def _was_gone(self, desk: Desk, seq: int, failure: Failure, positions: tuple[int, ...]) -> bool:
        if self.goods and not self._try(desk, seq, self._chosen()).proven:
            return False
        samples = () if self._is_bug else tuple(self._row)
        answer = desk.doubt(seq, Doubt(failure, samples, positions, bool(self.goods)))
        while answer.word is SourceWord.PROBE:
            desk.pause(answer.pause_s)
            answer = desk.tell_probe(seq, self._probe(desk, seq, answer))
        if answer.word is SourceWord.LEAVE:
            desk.leave()
        self.goods.extend(answer.goods)
        return answer.word is SourceWord.AGAIN

    def _chosen(self) -> list[Any]:
        """A few of those that were good, from different times where the source is suspected: part of it may be gone."""
        goods = list(self.goods)
        if not self.is_suspect:
            return goods[-1:]
        return [goods[-1 - at * len(goods) // _TRIED] for at in range(min(_TRIED, len(goods)))]

    def _probe(self, desk: Desk, seq: int, answer: AnswerDoubt) -> Found:
        goods = self._chosen() or list(answer.goods)
        if goods:
            return self._try(desk, seq, goods)
        found = Found(False)
        for index in (*answer.others, self._last):
            one = self._try(desk, seq, [index])
            if one.works:
                return one
            found = Found(False, (), one.failure, () if self._is_bug else found.samples + one.samples)
        return found

    def _try(self, desk: Desk, seq: int, indices: Sequence[Any]) -> Found:
        """Fetch these until one fails; all of them are to work."""
        causes = set(self._row.values())
        for index in indices:
            desk.box.enter(Stage.PROBING, seq)
            try:
                self._fetch(index)
            except Exception as error:
                error.__context__ = None  # the failure that led here is no part of this one
                alike = cause_of(error) in causes
                failure = failures.capture(error, Stage.FETCHING)
                return Found(False, (), failure, (_name(index),) if alike else (), alike)
            finally:
                desk.box.enter(Stage.WAITING, seq)
        return Found(True, tuple(indices))


def _name(index: Any) -> str:
    try:
        return repr(index)[:_LONGEST_NAME]
    except Exception:  # a user's __repr__ may itself fail
        return f"<{type(index).__name__}>"
