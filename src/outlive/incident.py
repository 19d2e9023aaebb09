"""An incident: one thing that went wrong in a worker, and the words for it. Plain data.

Reads   nothing.
Writes  nothing.
Never   a process, a file, torch.
"""

from __future__ import annotations

import enum
import signal as _signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outlive import printable as printable  # to have log lines escaped
from outlive.crashes import CrashRecord
from outlive.evidence import NO_EVIDENCE, Evidence, Full
from outlive.private import PRIVATE
from outlive.quantities import in_words
from outlive.verdicts import Verdict


class Stage(enum.IntEnum):
    """What a worker is doing; kept in its black box, so it outlives the worker."""

    STARTING = 0
    PREPARING = 1  # worker_init_fn, iter(dataset)
    FORWARDING = 2  # bringing a fresh iterator to where the dead worker was
    IDLE = 3
    FETCHING = 4  # one sample, its position is in the black box
    FETCHING_MANY = 5  # dataset.__getitems__
    COLLATING = 6
    SENDING = 7  # pickling and writing the batch
    WAITING = 8  # backing off before a retry, or waiting for the trainer's decision
    LEAVING = 9
    DELIVERING = 10  # handing a packed batch to the trainer
    AT_WORK = 11  # one of fetching, collating, sending: which one, nobody can say
    PROBING = 12  # fetching a sample that nobody asked for, to see whether the source answers
    RUNNING = 13  # the function of a rank

    @property
    def words(self) -> str:
        return _STAGE_WORDS[self]


_STAGE_WORDS = {
    Stage.STARTING: "starting",
    Stage.PREPARING: "running worker_init_fn or iter(dataset)",
    Stage.FORWARDING: "fast-forwarding its iterator",
    Stage.IDLE: "idle",
    Stage.FETCHING: "fetching a sample",
    Stage.FETCHING_MANY: "fetching in __getitems__",
    Stage.COLLATING: "collating",
    Stage.SENDING: "sending a batch",
    Stage.WAITING: "waiting before a retry",
    Stage.LEAVING: "leaving",
    Stage.DELIVERING: "handing a batch over",
    Stage.AT_WORK: "working on a batch",
    Stage.PROBING: "probing whether the source of its samples answers",
    Stage.RUNNING: "running its function",
}


_RANK_STAGES = {
    Stage.STARTING: "importing the main module",
    Stage.PREPARING: "unpickling its function",
}

_TASK_STAGES = {
    Stage.PREPARING: "running its initializer",
    Stage.FETCHING: "running a task",
    Stage.SENDING: "pickling a result",
    Stage.DELIVERING: "sending a result",
    Stage.AT_WORK: "working on a task",
}
_TASK_VERBS = {
    Stage.FETCHING: "running",
    Stage.SENDING: "pickling the result of",
    Stage.WAITING: "waiting before a retry of",
    Stage.DELIVERING: "sending the result of",
    Stage.AT_WORK: "working on",
}

_BATCH_VERBS = {
    Stage.FETCHING_MANY: "fetching",
    Stage.COLLATING: "collating",
    Stage.SENDING: "sending",
    Stage.AT_WORK: "working on",
}


@dataclass(frozen=True)
class InHand:
    """What a worker had in hand, read from its black box."""

    stage: Stage = Stage.STARTING
    batch: int = -1
    position: int = -1
    seconds: float = 0.0
    stand_in: int | None = None  # the index of a replacement, when that is what was in hand


@dataclass(frozen=True)
class Exit:
    """How a process ended: by a signal, with a code, or in a way nobody saw."""

    signal: int | None = None
    code: int | None = None

    @classmethod
    def from_wait_status(cls, status: int) -> Exit:
        if status & 0x7F:
            return cls(signal=status & 0x7F)
        return cls(code=(status >> 8) & 0xFF)

    @property
    def signal_name(self) -> str | None:
        if self.signal is None:
            return None
        try:
            return _signal.Signals(self.signal).name
        except ValueError:
            return f"signal {self.signal}"

    @property
    def words(self) -> str:
        if self.signal is not None:
            return f"died of {self.signal_name}"
        if self.code is not None:
            return f"exited with code {self.code}"
        return "disappeared together with the process that started it"

    @property
    def explanation(self) -> str:
        """One clause on what such an end usually means."""
        if self.signal is not None:
            return _SIGNAL_WORDS.get(self.signal, _signal.strsignal(self.signal) or "a signal")
        if self.code is not None:
            return (
                "something called sys.exit or os._exit" if self.code != 1 else "an error outside of the sample's code"
            )
        return "its zygote was killed"


_SIGNAL_WORDS = {
    int(_signal.SIGKILL): "killed from outside: the kernel's OOM killer, or somebody's kill -9",
    int(_signal.SIGSEGV): "a segmentation fault in native code, or a native stack overflow",
    int(_signal.SIGBUS): "a bus error: a mapped file was truncated, or memory behind a map ran out",
    int(_signal.SIGILL): "an illegal instruction: often a library compiled for another CPU",
    int(_signal.SIGFPE): "an arithmetic fault in native code, such as an integer division by zero",
    int(_signal.SIGABRT): "abort(): a failed native assertion, heap corruption, or an uncaught C++ exception",
    int(_signal.SIGTERM): "terminated from outside",
    int(_signal.SIGSYS): "a forbidden system call",
    int(_signal.SIGXCPU): "the CPU time limit",
}


@dataclass(frozen=True)
class Failure:
    """An exception in a worker, in a form that always travels."""

    type_name: str
    message: str
    traceback: str
    # Only between processes: JSON has no pickles.
    pickled_type: bytes | None = field(default=None, compare=False, metadata=PRIVATE)
    stage: Stage = Stage.FETCHING
    position: int = -1
    decision: Decision | None = None
    attempts: int = 1
    culprits: tuple[int, ...] = ()
    ordinal: int = -1  # which sample of its stream the batch begins with
    stand_in: Any = None  # the index of a replacement, when that is what failed
    place: str = ""  # of what cannot be pickled, inside the batch: «['meta'][3].lock»
    full: Full | None = None  # the file system that had no room; None: it is not about that, or it is not known


class Decision(str, enum.Enum):
    """What is done about a fault."""

    RAISE = "raise"
    SKIP = "skip"
    REPLACE = "replace"
    RETRY = "retry"

    def __str__(self) -> str:
        return self.value


class IncidentKind(str, enum.Enum):
    EXCEPTION = "exception"
    CRASH = "crash"
    HANG = "hang"
    SUSPECTED_HANG = "suspected hang"
    START = "failed start"
    RESIZED = "resized"  # the fleet has become smaller, or larger again, for the memory there is
    GROWTH = "growth"  # nothing died yet: a worker's memory, descriptors or threads go up and up
    RECYCLED = "recycled"  # nothing went wrong: a worker left on time, and a fresh one took its place
    BREAKER = "breaker"  # the source of the samples is gone, or back

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, repr=False)
class Incident:
    """One thing that went wrong in a worker, explained as far as it is known."""

    kind: IncidentKind
    slot: int
    incarnation: int
    pid: int
    batch: int
    in_hand: InHand
    action: str = ""
    positions: tuple[int, ...] = ()
    index: Any = None
    indices: tuple[Any, ...] = ()
    described: tuple[str, ...] = ()  # the indices in the user's words, by `describe=`
    epoch: int = 0
    exit: Exit | None = None
    failure: Failure | None = None
    stack: str = ""
    evidence: Evidence = NO_EVIDENCE
    verdict: Verdict | None = None  # None: nobody has judged yet
    attempt: int = 1
    attempts_allowed: int = 1
    number: int = -1
    id: str = ""  # names it in the journal: `outlive report ID`
    when: float = 0.0
    recycled: str = ""  # why a worker was asked to leave: «its memory reached 180 MiB of 200 MiB»
    hung: bool = False  # it was ended because it hung
    stuck: bool = False  # a stream that cannot step over this sample: the rest of it is out of reach
    noun: str = "sample"  # what the indices name: samples of a dataset, tasks of a pool
    source: str = ""  # what the circuit breaker found: «the source is gone: 4 different samples raised OSError: …»
    role: str = "worker"  # what its process is: a loader's «worker», or a «rank» of `spawn`
    function: str = ""  # that a rank runs: «train»
    consequences: tuple[str, ...] = ()  # what became of the other ranks: «ranks 0, 2 were ended after it»

    @property
    def crash(self) -> CrashRecord | None:
        """What the fatal-signal handler saw; None: no such signal, or no recorder."""
        return self.evidence.crash

    @property
    def signal(self) -> int | None:
        return self.exit.signal if self.exit else None

    @property
    def seconds_in_hand(self) -> float:
        return self.in_hand.seconds

    @property
    def sample(self) -> str:
        """The sample in words: «sample 18204», «one of samples 3, 4, 5», or what was done instead."""
        if len(self.indices) == 1:
            named = f" ({self.described[0]})" if self.described else ""
            return f"{self.noun} {self.indices[0]}{named}"
        if self.indices:
            shown = ", ".join(map(str, self.indices[:8])) + (", …" if len(self.indices) > 8 else "")
            return f"{self.noun}s {shown}"
        return ""

    @property
    def stage_words(self) -> str:
        """What it was doing, without a name: «collating», «running a task»."""
        stage = self.in_hand.stage
        return _TASK_STAGES.get(stage, stage.words) if self.noun == "task" else stage.words

    @property
    def _unit(self) -> str:
        """What a worker is sent at a time."""
        return "chunk of tasks" if self.noun == "task" else "batch"

    @property
    def cause(self) -> str:
        """One clause: what happened."""
        if self.kind is IncidentKind.EXCEPTION and self.failure:
            return f"raised {self.failure.type_name}: {first_line(self.failure.message)}"
        if self.kind is IncidentKind.GROWTH and self.evidence.growth is not None:
            return f"grows by {in_words(self.evidence.growth.bytes_per_batch)} per {self._unit}"
        if self.kind is IncidentKind.GROWTH and self.evidence.creep is not None:
            return f"has {self.evidence.creep.per_batch:.3g} more {self.evidence.creep.kind} with each {self._unit}"
        if self.kind is IncidentKind.RECYCLED:
            return f"was recycled: {self.recycled}"
        if self.kind is IncidentKind.RESIZED:
            return self.recycled
        if self.kind is IncidentKind.BREAKER:
            return self.source
        if self.kind is IncidentKind.HANG or (self.hung and self.exit):
            return f"hung for {self.in_hand.seconds:.1f} s"
        if self.kind is IncidentKind.SUSPECTED_HANG:
            return f"has shown no progress for {self.in_hand.seconds:.1f} s"
        if self.failure:
            named = f"{self.failure.type_name}: " if self.failure.type_name else ""
            head = "could not start: " if self.kind is IncidentKind.START else "failed with "
            return f"{head}{named}{first_line(self.failure.message)}"
        return self.exit.words if self.exit else "ended in an unknown way"

    @property
    def doing(self) -> str:
        """What it was doing: «fetching sample 18204», «collating batch 7», «idle»."""
        stage = self.in_hand.stage
        if self.noun == "task":
            return f"{_TASK_VERBS[stage]} {self.sample}" if self.indices and stage in _TASK_VERBS else self.stage_words
        if stage is Stage.FETCHING and self.indices:
            return f"fetching {self.sample}"
        if stage is Stage.RUNNING and self.function:
            return f"running {self.function}"
        if self.role == "rank" and stage in _RANK_STAGES:
            return _RANK_STAGES[stage]
        if stage in _BATCH_VERBS and self.batch >= 0:
            verb = _BATCH_VERBS[stage]
            named = f" ({self.sample})" if len(self.indices) == 1 else ""
            return f"{verb} batch {self.batch}{named}"
        return stage.words

    def __str__(self) -> str:
        head = f"{self.role} {self.slot} {self.cause}"
        if self.kind in (IncidentKind.RECYCLED, IncidentKind.GROWTH):
            return head
        if self.kind is IncidentKind.RESIZED:
            return f"the fleet {self.action}: {self.recycled}"
        head = self.cause if self.kind is IncidentKind.BREAKER else f"{head} while {self.doing}"
        return f"{head}: {self.action}" if self.action else head

    def __repr__(self) -> str:
        return f"<Incident {self.id or self.kind.value}: {self}>"

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, and everything: what a program or a log can take."""
        from outlive import plain

        return plain.of_incident(self)

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Incident:
        """The incident of `to_dict`; indices that are neither numbers nor texts come back as their repr."""
        from outlive import plain

        return plain.to_incident(told)

    def to_json(self) -> str:
        """One line."""
        from outlive import plain

        return plain.to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Incident:
        from outlive import plain

        return plain.from_json(text)

    def _repr_html_(self) -> str:
        """What notebooks show: a small table."""
        from outlive import tables

        return tables.of_incident(self)


def first_line(text: str, limit: int = 200) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= limit else line[: limit - 1] + "…"
