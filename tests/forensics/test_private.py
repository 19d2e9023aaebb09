"""What leaves the machine: alerts, and reports that are made to be shared, have nothing that may be private.

Reads   bodies of a webhook, reports.
Writes  a journal in a temporary folder.
Never   another machine.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings

import outlive
from forensics import example_incidents
from forensics.test_alerts import answering
from outlive import Incident, Webhook, evidence, private
from outlive._forensics import journal
from outlive.cli import main
from outlive.crashes import CrashRecord
from outlive.evidence import Examined, Instruction, Seen, Surroundings, ThreadSeen
from outlive.incident import Failure, IncidentKind
from outlive.verdicts import Name, Verdict

SECRET = "hunter2-s3cr3t"
WORD = int.from_bytes(b"hunter2!", "little")  # in a register, as a pointer that was overwritten
COMMAND = f"train.py --lr 0.1 --wandb-key={SECRET}"


def leaky(**more: Any) -> Incident:
    """An incident that holds the secret wherever one can be, and a verdict that quotes it."""
    crash = CrashRecord(
        *(11, 0x80, 4127, 4127),
        architecture="x86_64",
        address=WORD,
        registers={"rax": WORD, "rbx": 0x7F0012345678},
        instruction_pointer=0x7F1234567890,
        instruction=SECRET.encode(),
        before=SECRET.encode(),
        stack=SECRET.encode() * 4,
        possible_return_addresses=(WORD,),
    )
    found = example_incidents.segfault().evidence
    found = replace(
        found,
        crash=crash,
        last_words=f"connecting\nwith key {SECRET}\n",
        examined=Examined(instruction=Instruction(f"db {SECRET}", 4, is_valid=False, divisor_value=WORD)),
        surroundings=Surroundings(sender=f"reaper --key {SECRET}"),
        seen=Seen(
            threads=(
                ThreadSeen(
                    1, system_call="read", arguments=(WORD,), target=f"a pipe to or from process 9 (cat {SECRET})"
                ),
                ThreadSeen(2, target=f"process 7 (a {SECRET}), process 8 (b (c) {SECRET})"),
            ),
            tracer=f"process 6 (gdb -x {SECRET})",
        ),
    )
    verdict = Verdict(
        Name.WILD_POINTER,
        f"access of address {WORD:#x} in libfoo.so+0x12345, which is the text 'hunter2!', "
        f"sent by reaper --key {SECRET}",
        facts=(
            f"it last wrote: with key {SECRET}",
            f"rax holds {WORD:#x}",
            f"it waits for process 7 (a {SECRET}), process 8 (b (c) {SECRET})",
            "the kernel says SI_KERNEL",
        ),
        remedies=(f"debug it with process 6 (gdb -x {SECRET})", "update the library"),
    )
    return example_incidents.segfault(**{"evidence": found, "verdict": verdict} | more)


def has_secret(text: str) -> list[str]:
    spelled = [SECRET, SECRET.encode().hex(), "hunter2", f"{WORD:x}", f"{WORD}", b"hunter2!".hex()]
    return [word for word in spelled if word in text]


def test_an_alert_has_the_verdict_and_the_stack_and_nothing_private(monkeypatch: pytest.MonkeyPatch):
    """Readers of the channel learn what happened, to which sample, why and where."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1", f"--wandb-key={SECRET}"])
    failure = Failure("OSError", "image is truncated", 'File "a.py", line 3, in decode\nOSError', SECRET.encode())
    with answering() as server:
        hook = Webhook(server.url)
        hook(leaky())
        hook(leaky(kind=IncidentKind.EXCEPTION, failure=failure))
        assert hook.flush(60)

    crash, raised = (body for _, body in server.received)
    assert has_secret(json.dumps([crash, raised])) == []
    assert crash["verdict"]["name"] == "wild-pointer"
    assert crash["verdict"]["cause"] == (
        "access of address … in libfoo.so+0x12345, which is the text …, sent by reaper"
    )
    assert crash["verdict"]["remedies"][1] == "update the library"
    assert (crash["index"], crash["id"], crash["signal"], crash["action"]) == (18204, "7f3a12cd", "SIGSEGV", "left out")
    assert crash["stack"] == example_incidents.STACK
    assert raised["message"] == "image is truncated"
    assert 'File "a.py", line 3, in decode' in raised["traceback"]
    assert crash["job"]["program"] == "train.py"
    assert "train.py (pid " in crash["text"]
    assert not {"crash", "evidence"} & crash.keys()


def test_an_alert_names_the_function_of_a_task_and_not_its_arguments(monkeypatch: pytest.MonkeyPatch):
    """A pool's incidents show calls; those may have anything in them."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    told: list[Incident] = []
    with answering() as server:
        hook = Webhook(server.url)
        with outlive.Pool(1, on_incident=[told.append, hook], retries=0) as pool:
            assert isinstance(pool.submit(int, SECRET).exception(), ValueError)
            assert isinstance(pool.submit(divide, 1, by=SECRET).exception(), TypeError)
        assert hook.flush(60)

    bodies = [body for _, body in server.received]
    assert SECRET in told[-1].sample
    assert [body["described"] for body in bodies] == [["int"], ["divide"]]
    assert [name for body in bodies[1:] for name in has_secret(json.dumps(body))] == []


def divide(number: int, by: Any) -> float:
    return number / by


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Incident:
    """The only incident of a journal."""
    monkeypatch.setenv("OUTLIVE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", COMMAND.split())
    incident = leaky(when=time.time())
    journal.add(incident)
    assert journal.flush()
    return incident


@pytest.mark.parametrize("form", [["--json"], [], ["--html", "-"]])
def test_a_report_to_share_has_nothing_private(kept: Incident, tmp_path: Path, form: list[str]):
    """In each form; what happened is still there."""
    whole = CliRunner().invoke(main, ["report", *form]).output
    shared = CliRunner().invoke(main, ["report", *form, "--share"]).output

    assert len(has_secret(whole)) >= 3
    assert has_secret(shared) == []
    assert "--lr" not in shared
    assert str(tmp_path) not in shared
    for word in ("wild-pointer", "18204", "train.py", "dataset.py", "SI_KERNEL", "libfoo.so+0x12345"):
        assert word in shared
    assert ("What may be private" in whole, "What may be private" in shared) == (form != ["--json"], False)


def test_a_report_says_what_may_be_private(kept: Incident):
    """By the names that JSON has, so that a program can tell, too."""
    told = json.loads(CliRunner().invoke(main, ["report", "--json"]).output)
    shared = json.loads(CliRunner().invoke(main, ["report", "--json", "--share"]).output)

    assert {"crash.registers", "crash.stack", "evidence.last_words", "evidence.surroundings.sender"} <= set(
        told["private"]
    )
    assert {"verdict.cause", "verdict.facts", "crash.instruction"} <= set(told["private"])
    assert shared["private"] == []
    assert shared["job"] == {"command": "train.py", "folder": "", "pid": told["job"]["pid"], "host": "", "rank": None}
    assert json.loads(CliRunner().invoke(main, ["report", "--json"]).output)["crash"]["registers"]


@given(incident=example_incidents.incidents)
@settings(max_examples=25)
def test_any_incident_can_be_told_without_what_is_private(incident: Incident):
    """Twice is as good as once; what is left is an incident."""
    bare = private.without(incident)

    assert private.without(bare).evidence == bare.evidence
    assert bare.to_dict()["private"] == [name for name in bare.to_dict()["private"] if name.startswith("verdict")]
    assert (bare.evidence.last_words, bare.to_dict()["stack"]) == ("", incident.stack)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (f"process 9 (cat {SECRET})", "process 9 (cat)"),
        (f"process 9 (sh -c (cat) {SECRET}) has locked", "process 9 (sh) has locked"),
        (f"/data/x, which process 9 (cat {SECRET}) has locked", "/data/x, which process 9 (cat) has locked"),
        (
            f"a pipe to or from process 9 (cat {SECRET}), tcp 10.0.0.3:443",
            "a pipe to or from process 9 (cat), tcp 10.0.0.3:443",
        ),
        (f"process 7 (a {SECRET}), process 8 (b) {SECRET})", "process 7 (a)"),
        (f"process 7 (a {SECRET}", "process 7 (a)"),
        ("/data/x (on nfs)", "/data/x (on nfs)"),
    ],
)
def test_of_another_process_its_program_is_told(target: str, told: str):
    """In what a thread waits for, however that is put, and in the verdict."""
    seen = Seen(threads=(ThreadSeen(1, system_call="read", target=target),))
    verdict = Verdict(Name.WAITING_FOR_IO, f"waits for {target} to end", facts=(f"it waits for {target}",))
    hung = example_incidents.raised(evidence=evidence.Evidence(seen=seen), verdict=verdict)

    bare = private.without(hung)

    assert bare.evidence.seen is not None
    assert bare.evidence.seen.threads[0].target == told
    assert bare.verdict == replace(verdict, cause=f"waits for {told} to end", facts=(f"it waits for {told}",))


def test_values_that_are_no_secret_stay():
    """Null pointers, offsets, sizes: a verdict would say nothing without them."""
    incident = example_incidents.segfault()

    assert private.without(incident).verdict == incident.verdict
    assert private.without(example_incidents.raised()).verdict == example_incidents.raised().verdict


# Of these it was decided that others may read them.
PUBLIC = {
    *("CrashRecord.return_addresses", "Surroundings.limits", "Worked.recent_batches", "Evidence.callers"),
    *("Incident.positions", "Failure.culprits"),
}


def test_each_field_that_can_hold_memory_or_arguments_was_judged():
    """A new field of bytes, a mapping or many numbers is marked with PRIVATE, or stands in PUBLIC."""
    found = [CrashRecord, Incident, Failure, *vars(evidence).values()]
    kinds = {kind for kind in found if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    unjudged = {
        f"{kind.__name__}.{each.name}"
        for kind in kinds
        for each in dataclasses.fields(kind)
        if each.metadata != private.PRIVATE
        and any(word in str(each.type) for word in ("bytes", "Mapping", "tuple[int"))
        and each.name[-6:] != "_bytes"
    }

    assert unjudged == PUBLIC
