"""Verdicts on SIGABRT: who called abort(), and why.

Reads   incidents.
Writes  nothing.
Never   a process, a file, a lock, the clock.

What it said before is in the crash record (the C library's own message), or among the last lines on standard error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from outlive._forensics.rules.addresses import code_facts, file_name
from outlive.crashes import SIGABRT
from outlive.incident import Incident, first_line
from outlive.verdicts import Confidence, Name, Verdict

_LONGEST = 300

_HEAP = re.compile(
    r"double free or corruption|double free detected|corrupted size vs\. prev_size|corrupted double-linked list"
    r"|\b(?:free|malloc|realloc|calloc|memalign|munmap_chunk|mremap_chunk|malloc_consolidate)\(\): \w"
    r"|malloc: top chunk is corrupt|invalid fastbin entry|unaligned (?:tcache|fastbin) chunk"
    r"|malloc\.c:\d+.*[Aa]ssertion|arena\.c:\d+.*[Aa]ssertion"
    r"|Attempt to free invalid pointer|<jemalloc>: .*(?:corrupt|invalid|free|size)|mimalloc: error"
    r"|AddressSanitizer: |Debug memory block at address|bad (?:leading|trailing) pad byte"
)
_STACK = re.compile(r"\*\*\* stack smashing detected \*\*\*|stack-buffer-overflow")
_BUFFER = re.compile(r"\*\*\* buffer overflow detected \*\*\*")
_ASSERTION = re.compile(
    r"(?P<file>[^\s:]+):(?P<line>\d+): (?P<function>.*?): ?Assertion [`'\"](?P<what>.*)['\"] failed"
)
_THROWN = re.compile(
    r"terminate called after throwing an instance of '(?P<type>[^']*)'"
    r"|terminating (?:due to|with) uncaught exception of type (?P<other>(?:[^:]|::)+)(?:: (?P<what>.*))?"
)
_WHAT = re.compile(r"^\s*what\(\):\s*(?P<what>.*)$")
_TERMINATED = re.compile(r"terminate called without an active exception|terminate called recursively")
_VIRTUAL = re.compile(r"pure virtual method called|deleted virtual method called")
# faulthandler says the same words of a signal, which is no reason.
_PYTHON = re.compile(
    r"Fatal Python error: (?!Aborted|Segmentation fault|Bus error|Floating.point exception|Illegal instruction)"
    r"(?P<what>.*)"
)
_BY_FAULTHANDLER = "Fatal Python error: Aborted"
_RUST = re.compile(r"^thread '(?P<thread>[^']*)'(?: \(\d+\))? panicked at (?P<where>.*)$")
_GO = re.compile(r"^(?:panic|fatal error): (?P<what>.+)$")
_OPENMP = re.compile(r"OMP: Error #(?P<number>\d+): (?P<what>.*)")
_CHECK = re.compile(
    r"(?i)\bcheck failed\b|^F\d{4} [\d:.]+ .*\]|\bFATAL\b.*\]|CUDA error|INTERNAL ASSERT FAILED|ENFORCE FAIL"
)

_HEAP_REMEDIES = (
    "the fault lies before the abort; meet it sooner: LD_PRELOAD=libc_malloc_debug.so.0 MALLOC_CHECK_=3 python …",
    "find the place: valgrind python …, or build the extension with -fsanitize=address",
    "suspect native code of this sample's path: ctypes, own extensions, decoders; update them first",
)
_BUFFER_REMEDIES = (
    "the function that was just returning has the buffer: the stack names it",
    "check sizes that native code gets from this sample: names, headers, shapes",
    _HEAP_REMEDIES[1],
)
_OPENMP_REMEDIES = (
    "two libraries bring two OpenMPs: install both from one source, all by pip or all by conda",
    "KMP_DUPLICATE_LIB_OK=TRUE lets them live side by side, at the risk of wrong results",
)
_MORE_REMEDIES = (
    "what it says names the condition: check what this sample hands to that library",
    "update the library, or report it with the sample and the line above",
)


@dataclass(frozen=True)
class _Meaning:
    """What a line means."""

    name: Name
    cause: str
    remedies: tuple[str, ...] = _MORE_REMEDIES


def _aborted(incident: Incident) -> Verdict | None:
    crash = incident.crash
    if incident.hung or incident.signal != SIGABRT:
        return None
    if crash is not None and (crash.signal != SIGABRT or crash.sender_pid not in (None, crash.pid)):
        return None  # of a fault before, or of somebody's kill -ABRT
    # What the C library keeps is of this very abort; standard error may have older lines, and a subprocess's.
    message = _lines(crash.message) if crash is not None else []
    words = _lines(incident.evidence.last_words)
    for lines, who in ((message, "the C library said"), (words, "it wrote")):
        place = _telling(lines)
        if place is not None:
            return _verdict(incident, _meaning(lines, place), f"{who} {_quoted(lines[place])}")
    return _unexplained(incident, [line for line in message + words if _BY_FAULTHANDLER not in line])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _telling(lines: list[str]) -> int | None:
    """The last line that says why; one that only may do so counts where there is none."""
    for patterns in (_TELLING, (_CHECK,)):
        for place in range(len(lines) - 1, -1, -1):
            if any(pattern.search(lines[place]) for pattern in patterns):
                return place
    return None


def _meaning(lines: list[str], place: int) -> _Meaning:
    line, following = lines[place], lines[place + 1] if place + 1 < len(lines) else ""
    for pattern, explain in _SPEAKERS:
        found = pattern.search(line)
        if found:
            return explain(found, following)
    return _Meaning(Name.ABORTED, f"a library's own check failed, {_quoted(line)}")


def _quoted(line: str) -> str:
    return f"«{first_line(line, _LONGEST)}»"


def _verdict(incident: Incident, meaning: _Meaning, said: str, confidence: Confidence = Confidence.CERTAIN) -> Verdict:
    crash = incident.crash
    own = ("the process sent the signal to itself, as abort() does",)
    facts = (said, *(own if crash is not None else ()), *code_facts(incident, everywhere=True))
    return Verdict(meaning.name, meaning.cause, facts, meaning.remedies, confidence)


def _unexplained(incident: Incident, lines: list[str]) -> Verdict:
    """Nothing that we know: the last line may have to do with it, or not."""
    crash = incident.crash
    what = "abort() was called"
    if crash is not None and crash.code_name == "SI_USER":
        what = "the worker sent SIGABRT to itself"
    cause = f"{what}; it last wrote {_quoted(lines[-1])}" if lines else f"{what}, without a word of why"
    remedies = (
        "look at the stack: the last Python line is the one that called native code",
        "make the library speak: its debug or verbose option, TORCH_SHOW_CPP_STACKTRACES=1, GLOG_v=1",
        _MORE_REMEDIES[1],
    )
    said = "its last lines say nothing that is known" if lines else "it wrote nothing to standard error"
    certain = Confidence.CERTAIN if crash is not None else Confidence.LIKELY
    return _verdict(incident, _Meaning(Name.ABORTED, cause, remedies), said, certain)


# ---------------------------------------------------------------- what lines mean


def _heap(found: re.Match[str], following: str) -> _Meaning:
    freed = re.search(r"double free|invalid pointer|Attempt to free", found.string)
    how = (
        "something was freed twice, or never allocated, or its header was overwritten"
        if freed
        else "a block was written past its end, or after it was freed"
    )
    cause = f"the heap is corrupt, {_quoted(found.string)}: {how}"
    return _Meaning(Name.HEAP_CORRUPTION, cause, _HEAP_REMEDIES)


def _stack(found: re.Match[str], following: str) -> _Meaning:
    cause = f"a buffer on the stack was written past its end, {_quoted(found.string)}"
    return _Meaning(Name.HEAP_CORRUPTION, cause, _BUFFER_REMEDIES)


def _buffer(found: re.Match[str], following: str) -> _Meaning:
    cause = f"a buffer is too small for what was to be copied into it, {_quoted(found.string)}"
    return _Meaning(Name.HEAP_CORRUPTION, cause, _BUFFER_REMEDIES)


def _assertion(found: re.Match[str], following: str) -> _Meaning:
    function = f" in {found['function'].strip()}" if found["function"].strip() else ""
    where = f"{file_name(found['file'])}:{found['line']}{function}"
    return _Meaning(Name.ABORTED, f"assertion «{first_line(found['what'], _LONGEST)}» failed at {where}")


def _thrown(found: re.Match[str], following: str) -> _Meaning:
    said = _WHAT.match(following)
    what = said["what"] if said else found["what"] or ""
    told = f": {first_line(what, _LONGEST)}" if what else ""
    catch = "catch it where C++ meets Python, or where its thread begins: beyond that nobody can"
    cause = f"uncaught C++ exception {found['type'] or found['other']}{told}"
    return _Meaning(Name.ABORTED, cause, (*_MORE_REMEDIES, catch))


def _terminated(found: re.Match[str], following: str) -> _Meaning:
    remedy = "join or detach every std::thread before it is destroyed: one that is neither ends the process so"
    return _Meaning(Name.ABORTED, f"the C++ runtime gave up, {_quoted(found.string)}", (remedy, _MORE_REMEDIES[1]))


def _virtual(found: re.Match[str], following: str) -> _Meaning:
    remedy = "a C++ object was used after its end, or before its beginning was over: keep its owner alive"
    return _Meaning(Name.ABORTED, f"the C++ runtime gave up, {_quoted(found.string)}", (remedy, _MORE_REMEDIES[1]))


def _rust(found: re.Match[str], following: str) -> _Meaning:
    told = f": {first_line(following, _LONGEST)}" if found["where"].endswith(":") and following else ""
    return _Meaning(Name.ABORTED, f"Rust panic at {found['where'].rstrip(':')}{told}")


def _go(found: re.Match[str], following: str) -> _Meaning:
    return _Meaning(Name.ABORTED, f"Go panic: {first_line(found['what'], _LONGEST)}")


def _python(found: re.Match[str], following: str) -> _Meaning:
    remedy = "an extension breaks Python's rules (references, the GIL): PYTHONDEVMODE=1 finds it sooner"
    cause = f"Python itself gave up: {first_line(found['what'], _LONGEST)}"
    return _Meaning(Name.ABORTED, cause, (remedy, _MORE_REMEDIES[1]))


def _openmp(found: re.Match[str], following: str) -> _Meaning:
    cause = f"OpenMP gave up: {first_line(found['what'], _LONGEST)}"
    return _Meaning(Name.ABORTED, cause, _OPENMP_REMEDIES if found["number"] == "15" else _MORE_REMEDIES)


_SPEAKERS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], str], _Meaning]], ...] = (
    (_HEAP, _heap),
    (_STACK, _stack),
    (_BUFFER, _buffer),
    (_ASSERTION, _assertion),
    (_THROWN, _thrown),
    (_VIRTUAL, _virtual),
    (_TERMINATED, _terminated),
    (_RUST, _rust),
    (_GO, _go),
    (_PYTHON, _python),
    (_OPENMP, _openmp),
)
_TELLING = tuple(pattern for pattern, _ in _SPEAKERS)

RULES: tuple[Callable[[Incident], Verdict | None], ...] = (_aborted,)
