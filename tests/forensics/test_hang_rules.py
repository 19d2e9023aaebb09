"""Rules on hangs that a test cannot produce everywhere: a dead file server, a kernel that tells nothing."""

from __future__ import annotations

from typing import Any

import pytest

from outlive._forensics import verdict
from outlive.evidence import Evidence, Seen, ThreadSeen
from outlive.incident import Incident, IncidentKind, InHand, Stage
from outlive.verdicts import Confidence, Name

STACK = (
    "Current thread 0x00007f3a93c1b740 (most recent call first):\n"
    '  File "/usr/lib/python3.11/queue.py", line 171 in get\n'
    '  File "/home/me/dataset.py", line 88 in decode\n'
    '  File "/home/me/dataset.py", line 61 in __getitem__\n'
    '  File "/opt/outlive/loader/jobs.py", line 248 in _run_plain\n'
)


def hang(main: ThreadSeen | None = None, *others: ThreadSeen, stage: Stage = Stage.FETCHING, **seen: Any) -> Incident:
    threads = () if main is None else (main, *others)
    return Incident(
        kind=IncidentKind.HANG,
        slot=0,
        incarnation=1,
        pid=4711,
        batch=3,
        in_hand=InHand(stage, 3, 1, 12.0),
        stack=STACK,
        evidence=Evidence(seen=Seen(threads=threads, **seen)),
        hung=True,
    )


BUSY = ThreadSeen(1, state="R", busy=True)
LOCKED = ThreadSeen(1, state="S", system_call="futex", for_ever=True)

CASES = {
    # No test machine has a file server that stops answering, nor a disk that does.
    "nfs": (
        hang(ThreadSeen(1, state="D", system_call="read", target="/mnt/a.jpg (on nfs4 nas:/data)")),
        Name.WAITING_FOR_IO,
        Confidence.CERTAIN,
        "waits at dataset.py:88 decode for /mnt/a.jpg (on nfs4 nas:/data)",
        "soft,timeo=100",
    ),
    # A kernel that shows system calls to nobody.
    "disk": (
        hang(ThreadSeen(1, state="D")),
        Name.WAITING_FOR_IO,
        Confidence.LIKELY,
        "waits at dataset.py:88 decode for a disk or a file system",
        "",
    ),
    # Where ptrace is forbidden nobody knows in which code a thread runs.
    "spins-unseen": (
        hang(BUSY, python_moved=False),
        Name.SPINNING_IN_NATIVE_CODE,
        Confidence.LIKELY,
        "native code runs without end, called at dataset.py:88 decode",
        "that library",
    ),
    "spins-unfollowed": (hang(BUSY), Name.SPINNING_IN_PYTHON, Confidence.POSSIBLE, "runs at dataset.py:88", ""),
    "mixed": (
        hang(BUSY, python_moved=False, places=("libjpeg.so+0x10", "python3.11+0x99")),
        Name.SPINNING_IN_PYTHON,
        Confidence.LIKELY,
        "Python code runs without end at dataset.py:88 decode",
        "an end",
    ),
    "kept-by-a-thread": (  # a moment between two tries to have the interpreter's lock
        hang(ThreadSeen(1, state="S"), ThreadSeen(2, name="decoder", state="R", busy=True)),
        Name.SPINNING_IN_NATIVE_CODE,
        Confidence.LIKELY,
        "another thread of its (decoder) runs without end",
        "GIL",
    ),
    "pool-with-threads": (  # it has its threads: nothing was left behind
        hang(LOCKED, ThreadSeen(2, state="S", system_call="futex"), places=("libgomp.so.1+0x10",)),
        Name.WAITING_FOR_LOCK,
        Confidence.CERTAIN,
        "an item that nobody puts into a queue",
        "queue.get(timeout=30)",
    ),
    "works-elsewhere": (
        hang(LOCKED, ThreadSeen(2, state="R", busy=True)),
        Name.WAITING_FOR_LOCK,
        Confidence.LIKELY,
        "waits at dataset.py:88 decode",
        "",
    ),
    "connects": (
        hang(ThreadSeen(1, state="S", system_call="connect", target="tcp 10.0.0.3:443")),
        Name.WAITING_FOR_IO,
        Confidence.CERTAIN,
        "a connection to tcp 10.0.0.3:443",
        "timeout=(5, 30)",
    ),
    "nothing-known": (hang(), Name.UNKNOWN, Confidence.POSSIBLE, "hung for 12.0 s", ""),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_says_no_more_than_was_seen(name: str) -> None:
    """Less evidence is less certainty, never another story."""
    incident, expected, confidence, cause, remedy = CASES[name]

    judged = verdict.judge(incident)

    assert (judged.name, judged.confidence) == (expected, confidence)
    assert cause in judged.cause
    assert remedy in judged.remedies[0]


def test_a_worker_that_died_is_not_called_hung() -> None:
    """Evidence of a look is not enough: it was ended by something else."""
    incident = hang(LOCKED)
    died = Incident(IncidentKind.CRASH, 0, 1, 1, 3, incident.in_hand, evidence=incident.evidence)

    assert verdict.judge(died).name is not Name.WAITING_FOR_LOCK


def test_the_advice_is_about_starting_when_no_sample_was_in_hand() -> None:
    """sample_timeout has no say before the first sample."""
    judged = verdict.judge(hang(LOCKED, stage=Stage.PREPARING))

    assert "FaultPolicy(hang_floor_s=120)   if starting a worker takes so long" in judged.remedies
