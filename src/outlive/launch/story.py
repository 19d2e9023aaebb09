"""Who failed first, and what became of the others because of it. Pure: times and ends go in, words come out.

Reads   how each rank ended, and when.
Writes  nothing.
Never   goes by the order of ranks: who has the lowest number is not the one to blame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outlive._forensics.rules.python import user_frame
from outlive.incident import Exit, Failure, first_line
from outlive.verdicts import Name

# Of several that run too long, the one that waits for nobody is to blame; those that wait may wait for it.
_BLAME = (
    *(Name.STOPPED, Name.SPINNING_IN_PYTHON, Name.SPINNING_IN_NATIVE_CODE, Name.SLEEPING),
    *(Name.FORKED_WITH_THREADS, Name.INHERITED_LOCK, Name.WAITING_FOR_IO, Name.WAITING_FOR_LOCK),
)
_COLLECTIVE = ("/torch/distributed/", "/torch/nn/parallel/", "/mpi4py/", "/horovod/")


@dataclass(frozen=True)
class Fall:
    """How and when a rank failed."""

    rank: int
    seen: float  # when the launcher saw it,
    before: float  # and when it had looked before, and had not
    noted: float | None = None  # when it was by the rank's own word, or its fatal-signal handler's

    @property
    def at(self) -> float:
        """The earliest it can have been. Of two that were seen at once, one by its own word and one without any, the
        latter comes first: a rank that is killed says nothing, and others complain of it within a millisecond."""
        return self.before if self.noted is None else self.noted


@dataclass(frozen=True)
class Other:
    """What became of another rank."""

    rank: int
    exit: Exit | None
    failure: Failure | None = None
    later_s: float | None = None  # it failed by itself, so long after the first
    succeeded: bool = False
    hung: str = ""  # it ran too long as well: doing what
    alike: bool = False  # it failed as the first did: of the same cause, not because of it


def first_of(falls: Sequence[Fall]) -> Fall:
    return min(falls, key=lambda fall: (fall.at, fall.seen, fall.rank))


def blame(name: Name | None, stack: str) -> tuple[bool, int]:
    """Sorts ranks that run too long: the least is to blame."""
    place = _BLAME.index(name) if name in _BLAME else len(_BLAME)
    return any(part in stack for part in _COLLECTIVE), place


def consequences(others: Sequence[Other]) -> tuple[str, ...]:
    """A clause each: «rank 3 failed 0.2 s later with …, probably because of it», «ranks 1, 2 were ended after it»."""
    failed = sorted((other for other in others if other.later_s is not None), key=lambda other: other.later_s or 0.0)
    told = []
    groups: dict[object, list[Other]] = {}  # a peer's end is told by all others in the same words, but for a number
    for other in failed:
        if not other.alike:
            groups.setdefault(_place(other), []).append(other)
    for group in groups.values():
        who = ranks([other.rank for other in group])
        told.append(f"{who} failed {_span(group[0].later_s or 0.0)} later {_how(group[0])}, probably because of it")
    alike = [other for other in failed if other.alike]
    if alike:
        latest = _span(max(other.later_s or 0.0 for other in alike))
        told.append(f"{ranks([other.rank for other in alike])} failed in the same way, {latest} later")
    for doing in dict.fromkeys(other.hung for other in others if other.hung):
        same = [other.rank for other in others if other.hung == doing]
        told.append(f"{ranks(same)} ran as long, perhaps waiting for it: {doing}")
    rest = [other for other in others if other.later_s is None and not other.hung]
    ended = [other.rank for other in rest if not other.succeeded]
    done = [other.rank for other in rest if other.succeeded]
    if ended:
        told.append(f"{ranks(ended)} {'was' if len(ended) == 1 else 'were'} ended after it")
    if done:
        told.append(f"{ranks(done)} had finished")
    return tuple(told)


def is_alike(one: tuple[Exit | None, Failure | None], other: tuple[Exit | None, Failure | None]) -> bool:
    """Whether two ranks failed of the same: the same type of exception at the same line, the same signal or code."""
    (exit, failure), (exit_there, failure_there) = one, other
    if failure is None or failure_there is None:
        return failure is failure_there and exit == exit_there
    here, there = user_frame(failure.traceback), user_frame(failure_there.traceback)
    return failure.type_name == failure_there.type_name and here == there


def ranks(numbers: Sequence[int]) -> str:
    """«rank 3», «ranks 1, 2», «ranks 0–6, 9»."""
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    words = []
    for begin, end in spans:
        words += [str(begin)] if begin == end else [f"{begin}–{end}"] if end - begin > 1 else [str(begin), str(end)]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(words)}"


def _place(other: Other) -> object:
    failure = other.failure
    return _how(other) if failure is None else (failure.type_name, user_frame(failure.traceback))


def _how(other: Other) -> str:
    if other.failure is not None:
        message = first_line(other.failure.message, 100)
        return f"with {other.failure.type_name}{f': {message}' if message else ''}"
    exit = other.exit
    if exit is not None and exit.signal is not None:
        return f"of {exit.signal_name}"
    return f"with exit code {exit.code}" if exit is not None and exit.code is not None else "in an unknown way"


def _span(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{max(1, round(seconds * 1000))} ms"
