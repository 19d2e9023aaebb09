"""Plain data that every part of outlive speaks: events and actions.

Reads   nothing.
Writes  nothing.
Never   a process, a file, torch.

Events are what happened (past tense); actions are what to do (imperative). The machine
turns the former into the latter; the log, the statistics and the tests read the same records.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from outlive.evidence import NO_EVIDENCE, Evidence, Unpicklable
from outlive.incident import Decision, Exit, Failure, Incident, InHand
from outlive.orders import MOST_SUBSTITUTES as MOST_SUBSTITUTES
from outlive.orders import WHOLE as WHOLE
from outlive.orders import AnswerDoubt as AnswerDoubt
from outlive.orders import Plan as Plan
from outlive.orders import SourceWord as SourceWord

# ---------------------------------------------------------------- events


# Four of these are made for each batch; named tuples cost a fifth of frozen dataclasses.


class TaskSubmitted(NamedTuple):
    seq: int
    slot: int  # -1: whichever has time
    size: int
    skippable: bool = True  # False: a stream, which may be unable to step over a sample
    known_bad: tuple[int, ...] = ()  # positions of samples that have killed workers before
    spared: tuple[int, ...] = ()  # positions that are left out from the start: a quarantine file names them
    exchanged: tuple[int, ...] = ()  # likewise, and another sample takes their place


@dataclass(frozen=True)
class WorkerReady:
    slot: int
    incarnation: int
    can_skip: bool = False  # its stream can step over a sample without fetching it


class TaskFinished(NamedTuple):
    slot: int
    incarnation: int
    seq: int
    failures: tuple[Failure, ...] = ()
    empty: bool = False
    ended: bool = False


@dataclass(frozen=True)
class TaskErrored:
    slot: int
    incarnation: int
    seq: int
    failure: Failure
    earlier: tuple[Failure, ...] = ()
    ended: bool = False


@dataclass(frozen=True)
class TaskRetried:
    """A sample, or a whole batch, failed, and the worker is about to try it again."""

    slot: int
    incarnation: int
    seq: int
    failure: Failure


@dataclass(frozen=True)
class WorkerExited:
    slot: int
    incarnation: int
    pid: int
    exit: Exit
    in_hand: InHand
    stack: str = ""
    evidence: Evidence = NO_EVIDENCE
    hung: bool = False
    recycled: str = ""  # why it was asked to leave, which it did; empty: it was not asked
    blameless: bool = False
    unsent: Failure | None = None  # why it could not send what it had made: its own failure


@dataclass(frozen=True)
class PreparationFailed:
    slot: int
    incarnation: int
    pid: int
    failure: Failure


@dataclass(frozen=True)
class WorkerSuspected:
    slot: int
    incarnation: int
    pid: int
    in_hand: InHand
    stack: str = ""
    evidence: Evidence = NO_EVIDENCE
    again: bool = False  # it was told of before, and nothing has come of it


@dataclass(frozen=True)
class WorkerGrew:
    """Its memory, its descriptors or its threads grow for ever, as far as can be seen."""

    slot: int
    incarnation: int
    pid: int
    evidence: Evidence


@dataclass(frozen=True)
class MemoryTold:
    """The workers' memory as their watchman sees it: told when it is scarce, and when there is room."""

    scarce: bool  # False: another worker, as large as the largest was, has room
    slot: int = -1  # the largest worker's
    slot_bytes: int = 0
    used_bytes: int = 0
    left_bytes: int = 0


@dataclass(frozen=True)
class SizeWanted:
    """So many workers are best."""

    workers: int


@dataclass(frozen=True)
class DecisionAsked:
    slot: int
    incarnation: int
    pid: int
    seq: int
    failure: Failure


@dataclass(frozen=True)
class DecisionMade:
    ticket: int
    decision: Decision


@dataclass(frozen=True)
class SourceDoubted:
    """Samples of a batch failed, and none was fetched well after them: is it they, or where they come from?"""

    slot: int
    incarnation: int
    pid: int
    seq: int
    failure: Failure  # the last one
    samples: tuple[str, ...]  # which failed alike, in words
    positions: tuple[int, ...]  # which of the batch
    proven: bool  # a sample that had been fetched well before fails alike now
    failed_at: float = 0.0  # of the first, by time.monotonic(), where the source answers by now


@dataclass(frozen=True)
class SourceProbed:
    """What a worker found that was told to probe."""

    slot: int
    incarnation: int
    pid: int
    seq: int
    works: bool
    goods: tuple[Any, ...] = ()  # indices that work
    failure: Failure | None = None
    samples: tuple[str, ...] = ()  # which failed alike
    proven: bool = False  # one of them had been fetched well before


@dataclass(frozen=True)
class WorkersRenewed:
    """Workers that are started from now on come from a clean process; those there were are ended."""

    alone: bool = False  # each is a clean process of its own


@dataclass(frozen=True)
class RenewalFailed:
    """There is no clean process to be had: the job cannot be sent to one. Everything is as it was."""

    text: str  # why, in the words of what was raised
    unpicklable: tuple[Unpicklable, ...] = ()


@dataclass(frozen=True)
class EpochBegan:
    epoch: int


Event: TypeAlias = (
    TaskSubmitted
    | WorkerReady
    | TaskFinished
    | TaskErrored
    | TaskRetried
    | WorkerExited
    | PreparationFailed
    | WorkerSuspected
    | WorkerGrew
    | MemoryTold
    | SizeWanted
    | DecisionAsked
    | DecisionMade
    | SourceDoubted
    | SourceProbed
    | WorkersRenewed
    | RenewalFailed
    | EpochBegan
)


# ---------------------------------------------------------------- actions


@dataclass(frozen=True)
class StartWorker:
    slot: int
    incarnation: int


@dataclass(frozen=True)
class RenewWorkers:
    """End all workers, and have those to come start from a clean process: what these were forked from will not do."""


@dataclass(frozen=True)
class DismissWorker:
    """Have it leave when it has done what was sent to it."""

    slot: int
    incarnation: int


class SendTask(NamedTuple):
    slot: int
    incarnation: int
    seq: int
    plan: Plan = WHOLE


class Outcome(enum.Enum):
    DELIVERED = "delivered"
    EMPTY = "left empty"
    ERRORED = "errored"
    ENDED = "stream ended"


class ConcludeTask(NamedTuple):
    seq: int
    outcome: Outcome
    incident: Incident | None = None


@dataclass(frozen=True)
class ReportIncident:
    incident: Incident
    again: bool = False  # it goes on: for the log alone


@dataclass(frozen=True)
class PutInQuarantine:
    seq: int
    positions: tuple[int, ...]
    incident: Incident


@dataclass(frozen=True)
class AskPolicy:
    ticket: int
    incident: Incident


@dataclass(frozen=True)
class AnswerWorker:
    slot: int
    incarnation: int
    decision: Decision


@dataclass(frozen=True)
class StepOver:
    """A stream's batch was concluded without its worker: whoever comes next must leave its samples behind."""

    slot: int
    count: int
    killers: frozenset[int] = frozenset()  # positions that must not even be fetched


class LimitKind(str, enum.Enum):
    RESTARTS = "restarts"
    BAD_SAMPLES = "bad samples"
    STARTS = "starts"
    RENEWAL = "renewal"
    PATIENCE = "patience"
    UNSENT = "unsent"


@dataclass(frozen=True)
class GiveUp:
    limit: LimitKind
    text: str
    incident: Incident | None = None


Action: TypeAlias = (
    StartWorker
    | RenewWorkers
    | DismissWorker
    | SendTask
    | ConcludeTask
    | ReportIncident
    | PutInQuarantine
    | AskPolicy
    | AnswerWorker
    | AnswerDoubt
    | StepOver
    | GiveUp
)
