"""The verdict on an incident: what was the cause, what that rests on, what to do. Plain data.

Reads   nothing.
Writes  nothing.
Never   judges: the rules in `_forensics` do.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

PAGES = "docs/crashes"


class Name(str, enum.Enum):
    """Every verdict there is; the value names its page, docs/crashes/<value>.md."""

    EXCEPTION = "exception"
    UNPICKLABLE_RESULT = "unpicklable-result"
    EXITED = "exited"
    OOM_KILLER = "oom-killer"
    CGROUP_LIMIT = "cgroup-limit"
    MEMORY_LIMIT = "memory-limit"
    LEAK = "leak"
    COPY_ON_READ = "copy-on-read"
    CELLS_GROW = "cells-grow"
    DESCRIPTOR_LEAK = "descriptor-leak"
    THREAD_LEAK = "thread-leak"
    KILLED = "killed"
    NULL_POINTER = "null-pointer"
    WILD_POINTER = "wild-pointer"
    STACK_OVERFLOW = "stack-overflow"
    READ_ONLY_WRITE = "read-only-write"
    USE_AFTER_UNMAP = "use-after-unmap"
    TRUNCATED_FILE = "truncated-file"
    SHARED_MEMORY_FULL = "shared-memory-full"
    DISK_FULL = "disk-full"
    HARDWARE_FAULT = "hardware-fault"
    CPU_FEATURE_MISSING = "cpu-feature-missing"
    DELIBERATE_TRAP = "deliberate-trap"
    JUMPED_INTO_DATA = "jumped-into-data"
    HEAP_CORRUPTION = "heap-corruption"
    ABORTED = "aborted"
    ARITHMETIC_FAULT = "arithmetic-fault"
    FORBIDDEN_SYSTEM_CALL = "forbidden-system-call"
    RESOURCE_LIMIT = "resource-limit"
    SPINNING_IN_PYTHON = "spinning-in-python"
    SPINNING_IN_NATIVE_CODE = "spinning-in-native-code"
    WAITING_FOR_LOCK = "waiting-for-lock"
    FORKED_WITH_THREADS = "forked-with-threads"
    INHERITED_LOCK = "inherited-lock"
    WAITING_FOR_IO = "waiting-for-io"
    SLEEPING = "sleeping"
    STOPPED = "stopped"
    DESCRIPTORS_EXHAUSTED = "descriptors-exhausted"
    PROCESSES_EXHAUSTED = "processes-exhausted"
    UNPICKLABLE_DATASET = "unpicklable-dataset"
    IMPORT_FAILED = "import-failed"
    MAIN_GUARD_MISSING = "main-guard-missing"
    PREPARATION_FAILED = "preparation-failed"
    ZYGOTE_LOST = "zygote-lost"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


class Confidence(str, enum.Enum):
    CERTAIN = "certain"  # the kernel, or the code itself, said so
    LIKELY = "likely"  # it fits, and little else does
    POSSIBLE = "possible"  # the best guess there is

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Verdict:
    name: Name
    cause: str  # one clause without a full stop: «read of address 0x0 in libopencv.so»
    facts: tuple[str, ...] = ()  # what it rests on, a clause each
    remedies: tuple[str, ...] = ()  # what to change, with the value; the best first
    confidence: Confidence = Confidence.CERTAIN

    @property
    def page(self) -> str:
        return f"{PAGES}/{self.name.value}.md"

    @property
    def words(self) -> str:
        """The cause, with how sure it is where it is not."""
        return self.cause if self.confidence is Confidence.CERTAIN else f"{self.confidence.value}: {self.cause}"


def size_words(size_bytes: int) -> str:
    """«312 MiB», «3.1 GiB»."""
    if size_bytes < 10 << 20:
        return f"{size_bytes / (1 << 20):.1f} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"
    return f"{round(size_bytes / (1 << 20))} MiB" if size_bytes < 1 << 30 else f"{size_bytes / (1 << 30):.1f} GiB"
