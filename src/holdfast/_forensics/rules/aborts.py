"""Verdicts on SIGABRT: who called abort(), and why.

Reads   incidents.
Writes  nothing.
Never   a process, a file, a lock, the clock.

What it said before is in the crash record (the C library's own message), or among the last lines on standard error.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from holdfast._forensics.rules.addresses import callers, file_name, is_runtime
from holdfast.crashes import SIGABRT
from holdfast.incident import Incident, first_line
from holdfast.verdicts import Confidence, Name, Verdict

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
_THROWN = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']*)'")
_THROWN_CLANG = re.compile(r"terminating (?:due to|with) uncaught exception of type (?P<type>[^:]+)(?:: (?P<what>.*))?")
_WHAT = re.compile(r"^\s*what\(\):\s*(?P<what>.*)$")
_TERMINATED = re.compile(r"terminate called without an active exception|terminate called recursively|libc\+\+abi: ")
_PURE = re.compile(r"pure virtual method called|deleted virtual method called")
_PYTHON = re.compile(r"Fatal Python error: (?P<what>.*)")
_BY_FAULTHANDLER = ("Aborted", "Segmentation fault", "Bus error", "Floating-point exception", "Illegal instruction")
_RUST = re.compile(r"^thread '(?P<thread>[^']*)'(?: \(\d+\))? panicked at (?P<where>.*)$")
_GO = re.compile(r"^(?:panic|fatal error): (?P<what>.+)$")
_OPENMP = re.compile(r"OMP: Error #(?P<number>\d+): (?P<what>.*)")
_CHECK = re.compile(
    r"(?i)\bcheck failed\b|^F\d{4} [\d:.]+ .*\]|\bFATAL\b.*\]|CUDA error|INTERNAL ASSERT FAILED|ENFORCE FAIL"
)

_HEAP_REMEDIES = (
    "the fault lies earlier than the abort: run the sample with MALLOC_CHECK_=3 MALLOC_PERTURB_=165 to meet it sooner",
    "find the place: valgrind python …, or build the extension with -fsanitize=address",
    "suspect native code of this sample's path: ctypes, own extensions, decoders; update them first",
)
_MORE_REMEDIES = (
    "what it says names the condition: check what this sample hands to that library",
    "update the library, or report it with the sample and the line above",
)


def _aborted(incident: Incident) -> Verdict | None:
    crash = incident.crash
    if incident.hung or incident.signal != SIGABRT:
        return None
    if crash is not None and (crash.signal != SIGABRT or crash.sender_pid not in (None, crash.pid)):
        return None  # of a fault before, or of somebody's kill -ABRT
    lines = _said(incident)
    for judge in (_corruption, _assertion, _exception, _panic, _other_words):
        verdict = judge(incident, lines)
        if verdict is not None:
            return verdict
    return _silent(incident, lines)


def _said(incident: Incident) -> list[str]:
    """What it wrote last, the C library's own message at the end: it is the one that counts."""
    lines = incident.evidence.last_words.splitlines()
    crash = incident.crash
    if crash is not None and crash.message:
        lines += crash.message.strip().splitlines()
    return [line.rstrip() for line in lines if line.strip()]


def _last(pattern: re.Pattern[str], lines: list[str]) -> tuple[int, re.Match[str]] | None:
    for place in range(len(lines) - 1, -1, -1):
        found = pattern.search(lines[place])
        if found:
            return place, found
    return None


def _quoted(line: str) -> str:
    return f"«{first_line(line, _LONGEST)}»"


def _facts(incident: Incident, line: str) -> tuple[str, ...]:
    crash = incident.crash
    kept = crash is not None and bool(crash.message) and line in crash.message
    facts = [f"{'the C library said' if kept else 'it wrote'} {_quoted(line)}"]
    if crash is not None and crash.sender_pid == crash.pid:
        facts.append("the process sent the signal to itself, as abort() does")
    facts += _caller(incident)
    return tuple(facts)


def _caller(incident: Incident) -> list[str]:
    for caller in callers(incident):
        if caller.library and not is_runtime(caller.library):
            return [f"the stack leads to {caller.words}"]
    return []


def _corruption(incident: Incident, lines: list[str]) -> Verdict | None:
    for pattern, words in (
        (_HEAP, "the heap is corrupt"),
        (_STACK, "a buffer on the stack was written past its end"),
        (_BUFFER, "a buffer is too small for what was to be copied into it"),
    ):
        found = _last(pattern, lines)
        if found is None:
            continue
        line = lines[found[0]]
        freed = re.search(r"double free|free\(\): |invalid pointer|Attempt to free", line)
        if pattern is _HEAP and freed:
            words = "the heap is corrupt: something was freed twice, or never allocated, or its header was overwritten"
        elif pattern is _HEAP:
            words = "the heap is corrupt: a block was written past its end, or after it was freed"
        remedies = _HEAP_REMEDIES
        if pattern is not _HEAP:
            remedies = (
                "the function that returned just now has the buffer: the stack names it",
                "check sizes that native code gets from this sample: names, headers, shapes",
                _HEAP_REMEDIES[1],
            )
        return Verdict(
            Name.HEAP_CORRUPTION,
            f"abort() by the C library, {_quoted(line)}: {words}",
            _facts(incident, line),
            remedies,
        )
    return None


def _assertion(incident: Incident, lines: list[str]) -> Verdict | None:
    found = _last(_ASSERTION, lines)
    if found is None:
        return None
    place, match = found
    where = f"{file_name(match['file'])}:{match['line']}"
    function = f" in {match['function'].strip()}" if match["function"].strip() else ""
    return Verdict(
        Name.ABORTED,
        f"assertion «{first_line(match['what'], _LONGEST)}» failed at {where}{function}",
        _facts(incident, lines[place]),
        _MORE_REMEDIES,
    )


def _exception(incident: Incident, lines: list[str]) -> Verdict | None:
    found = _last(_THROWN, lines) or _last(_THROWN_CLANG, lines)
    if found is not None:
        place, match = found
        what = match.groupdict().get("what") or ""
        following = _WHAT.match(lines[place + 1]) if place + 1 < len(lines) else None
        if following:
            what = following["what"]
        told = f": {first_line(what, _LONGEST)}" if what else ""
        return Verdict(
            Name.ABORTED,
            f"uncaught C++ exception {match['type']}{told}",
            _facts(incident, lines[place]),
            (
                *_MORE_REMEDIES,
                "catch it where C++ meets Python, or where the thread begins: beyond that nobody can",
            ),
        )
    found = _last(_PURE, lines) or _last(_TERMINATED, lines)
    if found is None:
        return None
    line = lines[found[0]]
    return Verdict(
        Name.ABORTED,
        f"the C++ runtime gave up, {_quoted(line)}",
        _facts(incident, line),
        (
            "a std::thread that was neither joined nor detached does that when it is destroyed, and so does "
            "std::terminate() itself",
            *_MORE_REMEDIES[1:],
        ),
    )


def _panic(incident: Incident, lines: list[str]) -> Verdict | None:
    found = _last(_RUST, lines)
    if found is not None:
        place, match = found
        where = match["where"].rstrip(":")
        message = lines[place + 1] if match["where"].endswith(":") and place + 1 < len(lines) else ""
        told = f": {first_line(message, _LONGEST)}" if message else ""
        return Verdict(Name.ABORTED, f"Rust panic at {where}{told}", _facts(incident, lines[place]), _MORE_REMEDIES)
    found = _last(_GO, lines)
    if found is not None and any(line.startswith("goroutine ") for line in lines):
        return Verdict(
            Name.ABORTED,
            f"Go panic: {first_line(found[1]['what'], _LONGEST)}",
            _facts(incident, lines[found[0]]),
            _MORE_REMEDIES,
        )
    return None


def _other_words(incident: Incident, lines: list[str]) -> Verdict | None:
    fatal = [line for line in lines if (m := _PYTHON.search(line)) and not m["what"].startswith(_BY_FAULTHANDLER)]
    if fatal:
        match = _PYTHON.search(fatal[-1])
        assert match is not None
        return Verdict(
            Name.ABORTED,
            f"Python itself gave up: {first_line(match['what'], _LONGEST)}",
            _facts(incident, fatal[-1]),
            (
                "an extension breaks Python's rules (references, the GIL): PYTHONDEVMODE=1 finds it sooner",
                *_MORE_REMEDIES[1:],
            ),
        )
    found = _last(_OPENMP, lines)
    if found is not None:
        twice = found[1]["number"] == "15"
        return Verdict(
            Name.ABORTED,
            f"OpenMP gave up: {first_line(found[1]['what'], _LONGEST)}",
            _facts(incident, lines[found[0]]),
            (
                "two libraries bring two OpenMPs: install both from one source, all by pip or all by conda",
                "KMP_DUPLICATE_LIB_OK=TRUE lets them live side by side, at the risk of wrong results",
            )
            if twice
            else _MORE_REMEDIES,
        )
    found = _last(_CHECK, lines)
    if found is not None:
        line = lines[found[0]]
        return Verdict(
            Name.ABORTED, f"a library's own check failed, {_quoted(line)}", _facts(incident, line), _MORE_REMEDIES
        )
    return None


def _silent(incident: Incident, lines: list[str]) -> Verdict:
    """Nothing that we know: the last line may have to do with it, or not."""
    crash = incident.crash
    what = "abort() was called"
    if crash is not None and crash.code_name == "SI_USER":
        what = "the worker sent SIGABRT to itself"
    own = [line for line in lines if not ((m := _PYTHON.search(line)) and m["what"].startswith(_BY_FAULTHANDLER))]
    facts = _facts(incident, own[-1]) if own else ("it wrote nothing to standard error", *_caller(incident))
    return Verdict(
        Name.ABORTED,
        what if own else f"{what}, without a word of why",
        facts,
        (
            "look at the stack: the last Python line is the one that called native code",
            "make the library speak: its debug or verbose option, TORCH_SHOW_CPP_STACKTRACES=1, GLOG_v=1",
            *_MORE_REMEDIES[1:],
        ),
        Confidence.CERTAIN if crash is not None else Confidence.LIKELY,
    )


RULES: tuple[Callable[[Incident], Verdict | None], ...] = (_aborted,)
