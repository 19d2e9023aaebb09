"""When a fault fires, and how often: once, so many times, at a moment, by chance, for a while.

Reads   marks that other processes have made.
Writes  marks.
Never   the global random generators: a fault must not change the augmentation of the samples after it.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from outlive.settings import check_number
from outlive.testing.faults import MOMENTS, Fault
from outlive.testing.marks import Marks


@dataclass(frozen=True)
class Modified(Fault):
    """A fault with something said about it."""

    fault: Fault

    def __post_init__(self) -> None:
        if not isinstance(self.fault, Fault):
            named = f"; write {self.fault.__name__}()" if isinstance(self.fault, type) else ""
            raise TypeError(f"{type(self).__name__} takes a fault such as Kill(), got {self.fault!r}{named}")

    @property
    def moment(self) -> str:
        return self.fault.moment

    @property
    def plain(self) -> Fault:
        return self.fault.plain

    @property
    def permanent(self) -> bool:  # type: ignore[override]
        return self.fault.permanent

    def due(self, key: str) -> Fault | None:
        return self.fault.due(key)

    def fire(self) -> Any:
        due = self.due("")
        return due() if due is not None else None


class Times(Modified):
    """Fire the first `count` times that a sample is tried, in whichever processes that is; then never again."""

    def __init__(self, count: int, fault: Fault, marks: Marks | None = None) -> None:
        check_number("count", count, least=1, whole=True)
        super().__init__(fault)
        object.__setattr__(self, "count", count)
        object.__setattr__(self, "marks", marks if marks is not None else Marks())

    count: int
    marks: Marks

    @property
    def permanent(self) -> bool:  # type: ignore[override]
        return False

    @property
    def fired(self) -> int:
        """How often it has fired so far, in all processes."""
        names = [line.partition("\t")[0] for line in self.marks.lines()]
        return sum(min(names.count(name), self.count) for name in set(names))

    def due(self, key: str) -> Fault | None:
        due = self.fault.due(key)
        return due if due is not None and self.marks.place(key) < self.count else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.count}, {self.fault!r})"


class Once(Times):
    """Fire the first time that a sample is tried, and never again: what a retry survives."""

    def __init__(self, fault: Fault, marks: Marks | None = None) -> None:
        super().__init__(1, fault, marks)

    def __repr__(self) -> str:
        return f"Once({self.fault!r})"


class At(Modified):
    """Fire at a moment: «start» (worker_init_fn), «fetch», «collate» or «send» (while the batch is pickled)."""

    def __init__(self, moment: str, fault: Fault) -> None:
        if moment not in MOMENTS:
            raise ValueError(f"At takes a moment, one of {', '.join(map(repr, MOMENTS))}, got {moment!r}")
        super().__init__(fault)
        object.__setattr__(self, "_moment", moment)
        if fault.plain.name == "unpicklable" and moment != "send":
            raise ValueError(f"Unpicklable() fires while a batch is sent; At({moment!r}, …) is not possible with it")

    _moment: str

    @property
    def moment(self) -> str:
        return self._moment

    def __repr__(self) -> str:
        return f"At({self._moment!r}, {self.fault!r})"


class Sometimes(Modified):
    """Fire at a share of the samples, chosen by the seed: the same ones in every run and in every try."""

    def __init__(self, probability: float, fault: Fault, seed: int = 0) -> None:
        check_number("probability", probability, least=0)
        if probability > 1:
            raise ValueError(f"probability is a share between 0.0 and 1.0, got {probability} (2 % is 0.02)")
        super().__init__(fault)
        object.__setattr__(self, "probability", probability)
        object.__setattr__(self, "seed", seed)

    probability: float
    seed: int

    def chooses(self, key: str) -> bool:
        """Whether the sample of this key is one of those."""
        return random.Random(f"{self.seed}:{key}").random() < self.probability

    def due(self, key: str) -> Fault | None:
        return self.fault.due(key) if self.chooses(key) else None

    def __repr__(self) -> str:
        return f"Sometimes({self.probability}, {self.fault!r}, seed={self.seed})"


@dataclass(frozen=True)
class Outage(Fault):
    """A source that fails for a while: every sample raises as long as it lasts.

    `with outage:` has it last that long; `after` has it begin by itself once so many samples were asked for, and
    `seconds` has it end so long after it began. All processes that have a copy of it see the same.
    """

    error: BaseException = field(default_factory=lambda: ConnectionRefusedError(111, "Connection refused"))
    after: int | None = None
    seconds: float | None = None
    marks: Marks = field(default_factory=Marks, repr=False, compare=False)

    name: ClassVar[str] = "outage"
    deadly: ClassVar[bool] = False
    notice: ClassVar[str] = "exception"
    permanent: ClassVar[bool] = False  # type: ignore[misc]

    def __post_init__(self) -> None:
        if self.after is not None:
            check_number("after", self.after, least=0, whole=True)
            if self.seconds is None:
                raise ValueError("an outage that begins by itself must end by itself: Outage(after=20, seconds=3.0)")
        if self.seconds is not None:
            check_number("seconds", self.seconds, least=0)

    def begin(self) -> None:
        self.marks.note(f"begun\t{time.monotonic_ns()}")

    def end(self) -> None:
        self.marks.note("ended\t")

    def __enter__(self) -> Outage:
        self.begin()
        return self

    def __exit__(self, *how: object) -> None:
        self.end()

    def is_on(self) -> bool:
        said = [line.partition("\t") for line in self.marks.lines() if line.startswith(("begun", "ended"))]
        if not said or said[-1][0] == "ended":
            return False
        begun_ns = int(said[-1][2])
        return self.seconds is None or time.monotonic_ns() - begun_ns < self.seconds * 1e9

    def due(self, key: str) -> Fault | None:
        if self.after is not None and not any(line.startswith("begun") for line in self.marks.lines()):
            if self.marks.place("asked") < self.after:
                return None
            self.begin()
        return self if self.is_on() else None

    def fire(self) -> Any:
        raise self.error.with_traceback(None)
