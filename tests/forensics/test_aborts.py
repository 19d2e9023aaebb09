"""Verdicts on abort(): real ones in real workers, and words that this machine has no compiler to make."""

from __future__ import annotations

import pytest

from forensics import deaths, native_libraries
from outlive._forensics import verdict
from outlive.crashes import SIGABRT, CrashRecord
from outlive.evidence import Evidence
from outlive.incident import Exit, Incident, IncidentKind, InHand, Stage
from outlive.verdicts import Confidence, Name

METHODS = ("fork", "spawn")
NAMES = list(deaths.ABORTS)


@pytest.fixture(scope="module", params=METHODS)
def died(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Incident]:
    if not native_libraries.have_compilers():
        pytest.skip("no C and C++ compilers")
    folder = tmp_path_factory.mktemp(f"aborts-{request.param}")
    native_libraries.build(folder)
    return deaths.let_die(NAMES, folder, request.param)


@pytest.mark.parametrize("name", NAMES)
def test_an_abort_is_explained_by_what_was_said(died: dict[str, Incident], name: str) -> None:
    """The C library's message, an assertion, an exception: quoted, with the sample that was in hand."""
    deaths.assert_judged(name, died[name], 2 * NAMES.index(name) + 1)


def aborted(last_words: str, crash: CrashRecord | None = None) -> Incident:
    evidence = Evidence(last_words=last_words, crash=crash, recorder=crash is not None)
    hand = InHand(Stage.FETCHING, 0, 0)
    return Incident(IncidentKind.CRASH, 0, 0, 7, 0, hand, exit=Exit(signal=SIGABRT), evidence=evidence)


@pytest.mark.parametrize(
    ("words", "name", "cause"),
    [
        # Other allocators, runtimes and languages, and C libraries older and newer than the one here.
        ("malloc(): corrupted top size", Name.HEAP_CORRUPTION, "malloc(): corrupted top size"),
        ("corrupted size vs. prev_size while consolidating", Name.HEAP_CORRUPTION, "prev_size"),
        ("munmap_chunk(): invalid pointer", Name.HEAP_CORRUPTION, "munmap_chunk()"),
        ("Fatal glibc error: malloc.c:2599 (sysmalloc): assertion failed: x", Name.HEAP_CORRUPTION, "sysmalloc"),
        ("python: malloc.c:2617: sysmalloc: Assertion `old' failed.", Name.HEAP_CORRUPTION, "sysmalloc"),
        ("src/tcmalloc.cc:332] Attempt to free invalid pointer 0x1", Name.HEAP_CORRUPTION, "Attempt to free"),
        ("==7==ERROR: AddressSanitizer: heap-use-after-free", Name.HEAP_CORRUPTION, "heap-use-after-free"),
        ("*** buffer overflow detected ***: terminated", Name.HEAP_CORRUPTION, "buffer is too small"),
        ("libc++abi: terminating due to uncaught exception of type A: b c", Name.ABORTED, "exception A: b c"),
        ("pure virtual method called\nterminate …", Name.ABORTED, "pure virtual method called"),
        ("thread 'main' panicked at 'boom', src/a.rs:1:2\nnote: run", Name.ABORTED, "panic at 'boom', src/a.rs:1:2"),
        ("panic: no tiles\n\ngoroutine 1 [running]:", Name.ABORTED, "Go panic: no tiles"),
        ("OMP: Error #15: Initializing libiomp5.so, but", Name.ABORTED, "OpenMP gave up: Initializing libiomp5.so"),
        ("[enforce fail at alloc.cpp:1] . ENFORCE FAIL\n", Name.ABORTED, "check failed"),
        ("epoch 1\nFatal Python error: Aborted\n", Name.ABORTED, "abort() was called"),
        ("", Name.ABORTED, "without a word of why"),
    ],
)
def test_words_of_other_runtimes_are_understood(words: str, name: Name, cause: str) -> None:
    """From the last lines on standard error alone, as where there is no recorder."""
    found = verdict.judge(aborted(words))

    assert found.name is name
    assert cause in found.cause


def test_the_last_message_counts_when_there_are_several() -> None:
    """An earlier worker of the same pipe, or a handled error, may have said something else before."""
    found = verdict.judge(aborted("a.c:1: f: Assertion `old' failed.\na.c:2: g: Assertion `new' failed.\n"))

    assert "«new» failed at a.c:2 in g" in found.cause


def test_the_c_librarys_own_message_counts_more_than_what_was_written() -> None:
    """Standard error is shared with subprocesses; the message in the record is this abort's."""
    crash = CrashRecord(SIGABRT, -6, 7, 7, sender_pid=7, message="a.c:2: g: Assertion `own' failed.\n")

    found = verdict.judge(aborted("free(): invalid pointer\n", crash))

    assert found.name is Name.ABORTED
    assert "«own»" in found.cause
    assert found.facts[0].startswith("the C library said")


def test_an_unobserved_abort_is_only_likely() -> None:
    """Without a recorder somebody's kill -ABRT looks the same."""
    assert verdict.judge(aborted("")).confidence is Confidence.LIKELY


def test_an_abort_sent_by_another_process_is_not_ours() -> None:
    """kill -ABRT by another process: whatever was written before has nothing to do with it."""
    crash = CrashRecord(SIGABRT, 0, 7, 7, sender_pid=99)

    assert verdict.judge(aborted("free(): invalid pointer", crash)).name not in (Name.HEAP_CORRUPTION, Name.ABORTED)
