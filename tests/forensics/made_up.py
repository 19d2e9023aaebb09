"""Incidents made by Hypothesis and by hand, for what reads them.

Reads   nothing.
Writes  nothing.
Never   a process: real ones are in the tests of verdicts.
"""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

from hypothesis import strategies as st

from holdfast.crashes import CrashRecord, Region
from holdfast.evidence import (
    CodePlace,
    Evidence,
    Examined,
    Instruction,
    MemorySample,
    Oom,
    Seen,
    Surroundings,
    ThreadSeen,
    Worked,
)
from holdfast.incident import Decision, Exit, Failure, Incident, IncidentKind, InHand, Stage
from holdfast.verdicts import Confidence, Name, Verdict

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


memory_samples = st.builds(MemorySample, floats, counts, maybe(counts))
worked = st.builds(
    Worked, some(counts), some(plain_indices), counts, some(memory_samples), maybe(counts), maybe(counts),
    maybe(counts), maybe(st.booleans()),
)  # fmt: skip
threads = st.builds(
    ThreadSeen, counts, texts, texts, texts, some(words_of_memory), texts, texts, st.booleans(), some(texts)
)
seen = st.builds(Seen, some(threads), floats, st.booleans(), maybe(st.booleans()), texts, some(texts))
ooms = st.builds(Oom, maybe(counts), maybe(counts), maybe(counts), maybe(counts), texts, texts)
surroundings = st.builds(
    Surroundings, ooms, maybe(counts), maybe(counts), texts, maybe(counts), maybe(counts),
    st.dictionaries(texts, counts, max_size=3),
)  # fmt: skip
places = st.builds(CodePlace, words_of_memory, texts, maybe(counts), texts, maybe(counts))
instructions = st.builds(Instruction, texts, counts, some(texts), some(texts), st.booleans())
examined = st.builds(Examined, maybe(places), some(places), maybe(instructions), texts)
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
)
evidence = st.builds(
    Evidence, worked, maybe(seen), maybe(surroundings), texts, maybe(crashes), st.booleans(), maybe(examined)
)
verdicts = st.builds(Verdict, st.sampled_from(Name), texts, some(texts), some(texts), st.sampled_from(Confidence))
failures = st.builds(
    Failure, texts, texts, texts, maybe(st.binary(max_size=20)), st.sampled_from(Stage), counts,
    maybe(st.sampled_from(Decision)), counts, some(counts), counts, plain_indices,
)  # fmt: skip
incidents = st.builds(
    Incident,
    kind=st.sampled_from(IncidentKind),
    slot=counts,
    incarnation=counts,
    pid=counts,
    batch=counts,
    in_hand=st.builds(InHand, st.sampled_from(Stage), counts, counts, floats, maybe(counts)),
    action=texts,
    positions=some(counts),
    index=plain_indices,
    indices=some(plain_indices),
    epoch=counts,
    exit=maybe(st.builds(Exit, maybe(st.integers(0, 64)), maybe(st.integers(0, 255)))),
    failure=maybe(failures),
    stack=texts,
    evidence=evidence,
    verdict=maybe(verdicts),
    attempt=counts,
    attempts_allowed=counts,
    number=counts,
    id=texts,
    when=floats,
    hung=st.booleans(),
    stuck=st.booleans(),
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
            Oom(0, 0, 1 << 30, 950 << 20, "/docker/ab12"), 2 << 30, 16 << 30, limits={"nofile": 1024, "core": -1}
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
