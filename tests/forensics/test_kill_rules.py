"""The rules on kills and exits, by table: what this machine cannot produce, and how sure a verdict may be.

The machine's own OOM killer cannot be provoked without harm to everything else that runs here; pods whose limit is out
of sight, kernels without counters and outlive's own memory limit are made up for the same reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outlive._forensics import verdict
from outlive.crashes import CrashRecord
from outlive.evidence import Evidence, MemorySample, Oom, Surroundings, Worked
from outlive.incident import Exit, Incident, IncidentKind, InHand, Stage
from outlive.verdicts import Confidence, Name

GIB, MIB = 1 << 30, 1 << 20
SIGKILL, SIGTERM, SIGUSR2 = Exit(signal=9), Exit(signal=15), Exit(signal=12)
MEMORY = (MemorySample(60.0, GIB), MemorySample(1.0, 3 * GIB))
HUNGRY = Worked(memory=MEMORY, peak_resident_bytes=4 * GIB)
MACHINE_LINE = (
    "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=python,pid=77,uid=0\n"
    "Out of memory: Killed process 77 (python) total-vm:9kB, anon-rss:8kB"
)
GROUP_LINE = "Memory cgroup out of memory: Killed process 77 (python) total-vm:9kB, anon-rss:8kB"


def died(exit: Exit, oom: Oom | None = None, around: dict[str, Any] | None = None, **evidence: Any) -> Incident:
    if oom is not None or around is not None:
        evidence["surroundings"] = Surroundings(oom=oom or Oom(), **(around or {}))
    hand = InHand(Stage.FETCHING, 0, 0)
    return Incident(IncidentKind.CRASH, 0, 0, 77, 0, hand, exit=exit, evidence=Evidence(**evidence))


SHORT = {"available_bytes": 5 * GIB, "total_bytes": 16 * GIB}  # the worker's 4 GiB are free again
PLENTY = {"available_bytes": 12 * GIB, "total_bytes": 16 * GIB}
LIMITED = {"group_limit_bytes": 8 * GIB, "group_used_bytes": 8 * GIB, "group": "/docker/ab"}

TABLE: list[tuple[str, Incident, Name, Confidence, str]] = [
    (
        "the log says machine",
        died(SIGKILL, Oom(1, 1, log=MACHINE_LINE), SHORT, worked=HUNGRY),
        Name.OOM_KILLER,
        Confidence.CERTAIN,
        "the machine's memory ran out, and this worker held 4.0 GiB of 16.0 GiB",
    ),
    (
        "a limit that was never reached",
        died(SIGKILL, Oom(1, 1, limit_hits=0, **LIMITED), SHORT, worked=HUNGRY),
        Name.OOM_KILLER,
        Confidence.LIKELY,
        "the machine's memory ran out",
    ),
    (
        "no cgroups, and the machine's counter moved",
        died(SIGKILL, Oom(None, 1), PLENTY, worked=HUNGRY),
        Name.OOM_KILLER,
        Confidence.LIKELY,
        "OOM killer",
    ),
    (
        "the log says cgroup",
        died(SIGKILL, Oom(1, 1, log=GROUP_LINE, **LIMITED), SHORT, worked=HUNGRY),
        Name.CGROUP_LIMIT,
        Confidence.CERTAIN,
        "the cgroup /docker/ab reached its memory limit of 8.0 GiB, and this worker held 4.0 GiB",
    ),
    (
        "the group stood at its limit",
        died(SIGKILL, Oom(1, 1, limit_hits=3, **LIMITED), SHORT, worked=HUNGRY),
        Name.CGROUP_LIMIT,
        Confidence.LIKELY,
        "memory limit of 8.0 GiB",
    ),
    (
        "a pod's limit that cannot be seen from the container",
        died(SIGKILL, Oom(1, 1), PLENTY, worked=HUNGRY),
        Name.CGROUP_LIMIT,
        Confidence.LIKELY,
        "a cgroup above the one that can be seen",
    ),
    (
        "nothing counted",
        died(SIGKILL, Oom(0, 0, limit_hits=5, **LIMITED), SHORT, worked=HUNGRY),
        Name.KILLED,
        Confidence.LIKELY,
        "that some process sent",
    ),
    (
        "somebody else on the machine was killed for memory",
        died(SIGKILL, Oom(0, 1), PLENTY),
        Name.KILLED,
        Confidence.LIKELY,
        "that some process sent",
    ),
    ("no counters", died(SIGKILL, Oom(), PLENTY), Name.KILLED, Confidence.POSSIBLE, "or the kernel's OOM killer"),
    ("no surroundings", died(SIGKILL), Name.KILLED, Confidence.POSSIBLE, "or the kernel's OOM killer"),
    (
        "outlive's own limit",
        died(SIGKILL, Oom(0, 0), over_limit_bytes=5 * GIB, memory_limit_bytes=4 * GIB, worked=HUNGRY),
        Name.MEMORY_LIMIT,
        Confidence.CERTAIN,
        "outlive ended it at 5.0 GiB, over its memory_limit of 4.0 GiB",
    ),
    (
        "without a recorder",
        died(SIGTERM),
        Name.KILLED,
        Confidence.CERTAIN,
        "SIGTERM, sent from outside, by whom nobody",
    ),
    (
        "a sender that is gone",
        died(SIGTERM, crash=CrashRecord(15, 0, 77, 77, sender_pid=5, sender_uid=0)),
        Name.KILLED,
        Confidence.CERTAIN,
        "SIGTERM, sent by process 5, which is gone",
    ),
    (
        "a record of another signal, survived",
        died(SIGTERM, crash=CrashRecord(11, 0, 77, 77, sender_pid=5, sender_uid=0)),
        Name.KILLED,
        Confidence.CERTAIN,
        "by whom nobody recorded",
    ),
    ("no black box", died(Exit(code=3)), Name.EXITED, Confidence.POSSIBLE, "something ended it with code 3"),
    ("lost", died(Exit()), Name.ZYGOTE_LOST, Confidence.CERTAIN, "outlive-zygote"),
]


@pytest.mark.parametrize(
    ("incident", "name", "confidence", "words"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_the_verdict_is_as_sure_as_its_evidence(
    incident: Incident, name: Name, confidence: Confidence, words: str
) -> None:
    """The right name, the right values, and no more certainty than there is."""
    judged = verdict.judge(incident)

    assert (judged.name, judged.confidence) == (name, confidence), judged
    assert words in judged.cause
    assert judged.remedies
    assert "\n" not in "".join((judged.cause, *judged.facts, *judged.remedies))


def test_the_remedies_of_a_limit_have_values() -> None:
    """Limit plus what the worker held; what a worker less leaves."""
    oom = Oom(1, 1, limit_hits=3, **LIMITED)
    judged = verdict.judge(died(SIGKILL, oom, PLENTY, worked=HUNGRY))

    assert "at least 12GiB instead of 8.0 GiB" in judged.remedies[0]
    assert "one worker less leaves up to 4.0 GiB" in judged.remedies[1]
    assert "its memory had grown from 1.0 GiB to 3.0 GiB in 59 s" in judged.facts


def test_the_remedy_of_our_own_limit_is_a_value_for_it() -> None:
    """A quarter more than what it held."""
    judged = verdict.judge(died(SIGKILL, over_limit_bytes=4 * GIB, worked=HUNGRY))

    assert judged.remedies[0].startswith('memory_limit="5GiB"')


def test_a_hang_is_not_a_kill() -> None:
    """We sent that SIGKILL ourselves."""
    hung = replace(died(SIGKILL, Oom(1, 1, log=GROUP_LINE)), kind=IncidentKind.HANG, hung=True)

    assert verdict.judge(hung).name not in (Name.KILLED, Name.CGROUP_LIMIT, Name.OOM_KILLER)
