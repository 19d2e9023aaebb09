"""Incidents made by Hypothesis and by hand, for what reads them.

Reads   nothing.
Writes  nothing.
Never   a process: real ones are in the tests of verdicts.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import signal
import typing
from typing import Any

from hypothesis import strategies as st

from outlive.crashes import CrashRecord, Region
from outlive.evidence import (
    CodePlace,
    Evidence,
    Examined,
    Instruction,
    MemorySample,
    Oom,
    Surroundings,
    Worked,
)
from outlive.incident import Exit, Failure, Incident, IncidentKind, InHand, Stage
from outlive.verdicts import Confidence, Name, Verdict

# Every character that Python's str can hold: file names bring surrogates, messages bring anything.
texts = st.text(st.characters(), max_size=20)
counts = st.integers(-1, 2**62)
words_of_memory = st.integers(0, 2**64 - 1)
floats = st.floats(0, 1e9)
plain_indices = st.one_of(
    st.none(), st.booleans(), st.integers(), texts, st.floats(allow_nan=False, allow_infinity=False)
)


def some(kind: Any) -> Any:
    return st.lists(kind, max_size=3).map(tuple)


def maybe(kind: Any) -> Any:
    return st.none() | kind


def made(hint: Any) -> Any:
    """Anything of this type: whatever fields row 0 is given, they are tried."""
    if hint is Any:
        return plain_indices
    if dataclasses.is_dataclass(hint):
        return all_of(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return some(made(arguments[0]))
    if origin is collections.abc.Mapping:
        return st.dictionaries(made(arguments[0]), made(arguments[1]), max_size=3)
    if type(None) in arguments:
        return maybe(made(next(kind for kind in arguments if kind is not type(None))))
    return {int: counts, str: texts, bool: st.booleans(), float: floats, bytes: st.binary(max_size=20)}[hint]


def all_of(kind: type, **chosen: Any) -> Any:
    """Instances of a dataclass, every field drawn."""
    hints = typing.get_type_hints(kind)
    drawn = {field.name: made(hints[field.name]) for field in dataclasses.fields(kind) if field.name not in chosen}
    return st.builds(kind, **drawn, **chosen)


regions = st.builds(Region, words_of_memory, words_of_memory, texts, words_of_memory, texts)
crashes = st.builds(
    CrashRecord,
    signal=st.integers(0, 64),
    code=st.integers(-10, 200),
    pid=counts,
    thread=counts,
    thread_name=texts,
    time_ns=counts,
    error=counts,
    address=maybe(words_of_memory),
    sender_pid=maybe(counts),
    sender_uid=maybe(counts),
    system_call=maybe(counts),
    architecture=texts,
    trap=maybe(counts),
    fault_error=maybe(words_of_memory),
    registers=st.dictionaries(texts, words_of_memory, max_size=3),
    instruction_pointer=maybe(words_of_memory),
    instruction=st.binary(max_size=64),
    before=st.binary(max_size=16),
    stack_pointer=maybe(words_of_memory),
    stack_address=words_of_memory,
    stack=st.binary(max_size=64),
    return_addresses=some(words_of_memory),
    possible_return_addresses=some(words_of_memory),
    regions=some(regions),
    message=texts,
    shared_free_bytes=maybe(counts),
    shared_bytes=maybe(counts),
)
evidence = all_of(Evidence, crash=maybe(crashes))
verdicts = all_of(Verdict)
failures = all_of(Failure)
incidents = all_of(
    Incident,
    evidence=evidence,
    exit=maybe(st.builds(Exit, maybe(st.integers(0, 64)), maybe(st.integers(0, 255)))),
)


STACK = """Fatal Python error: Segmentation fault

Current thread 0x00007f26 (most recent call first):
  File "/data/project/dataset.py", line 88 in decode
  File "/data/project/dataset.py", line 61 in __getitem__
"""


def segfault(**more: Any) -> Incident:
    """One that has everything."""
    crash = CrashRecord(
        signal=signal.SIGSEGV,
        code=1,
        pid=4127,
        thread=4127,
        thread_name="python",
        address=0,
        architecture="x86_64",
        trap=14,
        fault_error=4,
        registers={name: 0x7F0000000000 + n for n, name in enumerate(("rax", "rbx", "rcx", "rdi", "rip"))},
        instruction_pointer=0x7F1234567890,
        instruction=bytes.fromhex("488b07c3") + bytes(28),
        regions=(Region(0x7F1234560000, 0x7F1234570000, "r-xp", 0, "/usr/lib/libimgcodecs.so.4"),),
    )
    place = CodePlace(0x7F1234567890, "/usr/lib/libimgcodecs.so.4", 0x7890, "cv::imdecode", 0x1F)
    found = Evidence(
        worked=Worked(
            recent_batches=(140, 141, 142),
            recent_indices=(18202, 18203, 18204),
            batches_done=141,
            memory=tuple(
                MemorySample(60.0 - n, (300 + 9 * n + (40 if n % 7 == 0 else 0)) << 20, (210 + 9 * n) << 20)
                for n in range(61)
            ),
            peak_resident_bytes=900 << 20,
            descriptors=41,
            threads=3,
        ),
        surroundings=Surroundings(
            Oom(0, 0, 0, 1 << 30, 950 << 20, "/docker/ab12"), 2 << 30, 16 << 30, limits={"nofile": 1024, "core": -1}
        ),
        last_words="libimgcodecs: warning: marker not found\n",
        crash=crash,
        recorder=True,
        examined=Examined(
            place, (place, CodePlace(1, "/usr/bin/python3", 0x99)), Instruction("mov rax,[rdi]", 3), "EPYC"
        ),
    )
    verdict = Verdict(
        Name.NULL_POINTER,
        "read of address 0x0 in libimgcodecs.so.4",
        facts=("SIGSEGV with address 0x0, which is not mapped", "the instruction reads [rdi], and rdi is 0"),
        remedies=("pip install -U opencv-python-headless", 'faults="skip" to leave the sample out'),
        confidence=Confidence.LIKELY,
    )
    incident = Incident(
        kind=IncidentKind.CRASH,
        slot=3,
        incarnation=2,
        pid=4127,
        batch=142,
        in_hand=InHand(Stage.FETCHING, 142, 5, 0.02),
        action="left out",
        index=18204,
        indices=(18204,),
        epoch=1,
        exit=Exit(signal=int(signal.SIGSEGV)),
        stack=STACK,
        evidence=found,
        verdict=verdict,
        attempt=2,
        attempts_allowed=2,
        id="7f3a12cd",
        when=1_700_000_000.0,
    )
    return dataclasses.replace(incident, **more)


def raised(**more: Any) -> Incident:
    """An exception: little is known beside its traceback."""
    failure = Failure(
        "OSError", "image file is truncated", 'Traceback …\n  File "a.py", line 3, in decode\nOSError: …\n'
    )
    return segfault(
        **{"kind": IncidentKind.EXCEPTION, "exit": None, "failure": failure, "stack": "", "evidence": Evidence()} | more
    )
