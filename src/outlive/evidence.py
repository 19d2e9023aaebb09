"""What is known about a worker that died, hung or raised, before anybody judges: plain data.

Reads   nothing.
Writes  nothing.
Never   an opinion: that is the verdict's.

Everything has a value that means «nobody knows»: a system may refuse to say it, and an incident is never lost for that.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outlive.crashes import CrashRecord, Region
from outlive.private import PRIVATE

RECENT_SAMPLES = 64
SHORT_OF = 1 << 16  # bytes: a file system with less is full


@dataclass(frozen=True)
class MemorySample:
    """A worker's memory at one time."""

    seconds_before: float  # … the incident
    resident_bytes: int  # RSS: what it shares with others counts in full
    private_bytes: int | None = None  # what goes when it goes (USS), cells aside; None: not looked at


class GrowthKind(str, enum.Enum):
    LEAK = "leak"  # new memory
    COPY_ON_READ = "copy on read"  # memory that it shared with the process it was forked from becomes its own
    CELLS = "cells"  # batches on their way

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Growth:
    """How a worker's memory grows."""

    kind: GrowthKind
    bytes_per_batch: float
    batches: int  # over which it was seen
    now_bytes: int
    limit_bytes: int | None = None

    @property
    def batches_left(self) -> float | None:
        """Until the limit; None: there is none."""
        return (
            None if self.limit_bytes is None else max(0.0, (self.limit_bytes - self.now_bytes) / self.bytes_per_batch)
        )


class CreepKind(str, enum.Enum):
    DESCRIPTORS = "descriptors"
    THREADS = "threads"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Creep:
    """How the number of a worker's descriptors or threads goes up and up."""

    kind: CreepKind
    now: int
    first: int  # when it began its first batch
    per_batch: float
    batches: int  # over which it was seen
    limit: int | None = None  # None: there is none
    mostly: tuple[str, ...] = ()  # what is new: «83 files in /data», the most first

    @property
    def left(self) -> int | None:
        """Until the limit; None: there is none."""
        return None if self.limit is None else max(0, self.limit - self.now)


@dataclass(frozen=True)
class Worked:
    """What a worker did before: from its black box, and from who watched it."""

    recent_batches: tuple[int, ...] = ()  # the last ones it took up, oldest first, the one in hand included
    recent_indices: tuple[Any, ...] = ()  # the last 64 samples it took up, oldest first, the one in hand included
    batches_done: int = 0
    memory: tuple[MemorySample, ...] = ()  # oldest first
    peak_resident_bytes: int | None = None
    descriptors: int | None = None
    threads: int | None = None
    cpu_s: float | None = None  # processor time of its whole life
    left_by_exit: bool | None = None  # True: SystemExit passed through; False: os._exit or exit(); None: not known


@dataclass(frozen=True)
class ThreadSeen:
    """One thread of a worker that hangs, as the kernel sees it."""

    number: int
    name: str = ""
    state: str = ""  # «R» runs, «S» waits, «D» waits for a device, «T» stopped, «t» traced, «Z» dead
    system_call: str = ""  # «futex», «read», …; empty: in none, or nobody may know
    arguments: tuple[int, ...] = field(default=(), metadata=PRIVATE)
    waits_in: str = ""  # the kernel function it sleeps in (wchan)
    target: str = ""  # what the call is about: a path, «a pipe», «tcp 10.0.0.3:443», «process 812 (ffmpeg)»
    for_ever: bool = False  # the call has no timeout
    busy: bool = False  # its CPU time grew while we looked
    kernel_stack: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen:
    """A worker that hangs, looked at twice before it was ended."""

    threads: tuple[ThreadSeen, ...] = ()  # the main thread first
    watched_s: float = 0.0  # between the two looks
    stack_answered: bool = False  # it wrote its Python stacks when it was asked
    python_moved: bool | None = None  # its Python stacks differ between two looks; None: there was but one
    native_stack: str = ""  # by py-spy or pystack, where installed and allowed
    inherited_locks: tuple[str, ...] = ()  # it waits for them, and a thread that it has not got holds them
    lock: str = ""  # what it waits for, by name: «dataset.lock (a threading.Lock)»
    places: tuple[str, ...] = ()  # native code that its main thread ran, or has on its stack: «libgomp.so.1+0x1a2f»
    tracer: str = ""  # who debugs it: «process 812 (gdb)»
    left_behind: tuple[str, ...] = ()  # Python threads of the trainer when its workers' parent was forked
    left_native: tuple[str, ...] = ()  # likewise, native ones: «4 × python»
    out_of_reach: str = ""  # what it waits for, where only a thread that no fork has could end that
    outlives_kill: bool = False  # SIGKILL has not ended it: it waits in the kernel
    limit_s: float | None = None  # how long what is in hand may take, as long as it does what was seen; None: no limit


@dataclass(frozen=True)
class Oom:
    """What the kernel says about kills for want of memory that no worker's death before this one accounts for."""

    group_kills: int | None = None  # in the worker's cgroup, whoever ran out: the group or the machine
    machine_kills: int | None = None  # in all, those of cgroups included
    limit_hits: int | None = None  # how often the group has stood at its limit since the workers' parent began
    group_limit_bytes: int | None = None
    group_used_bytes: int | None = None  # at the time of death, or its peak where that is known
    group: str = ""  # path of the cgroup
    log: str = ""  # the kernel log's lines that name this pid, where readable

    @property
    def killed(self) -> bool:
        """Whether one of these kills was this worker's."""
        return bool(self.log or (self.group_kills if self.group_kills is not None else self.machine_kills))


@dataclass(frozen=True)
class Surroundings:
    """The machine and the limits around a worker, read after its death."""

    oom: Oom = field(default_factory=Oom)
    available_bytes: int | None = None
    total_bytes: int | None = None
    pressure: str = ""  # the first line of memory pressure, where the kernel keeps it
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    limits: Mapping[str, int] = field(default_factory=dict, hash=False)  # soft RLIMITs: «nofile» → 1024; -1: none
    sender: str = ""  # the command of the process that sent the signal, where it could be seen


@dataclass(frozen=True)
class CodePlace:
    """Where an address of code lies."""

    address: int
    library: str = ""  # path of the file; empty: not in one
    offset: int | None = None  # in the file's address space: what a disassembler of it shows
    function: str = ""  # demangled where possible
    function_offset: int | None = None
    is_mapped: bool = False  # there was memory: without a file, what runs there was made at run time

    @property
    def words(self) -> str:
        """«cv::imdecode+0x1f in libopencv.so»."""
        library = self.library.rsplit("/", 1)[-1] or "no file"
        if not self.function:
            return f"{library}+{self.offset:#x}" if self.offset is not None else f"{self.address:#x} in {library}"
        return f"{self.function}+{self.function_offset or 0:#x} in {library}"


@dataclass(frozen=True)
class Instruction:
    """The machine instruction that a worker died at, decoded."""

    text: str  # «vaddps zmm0,zmm1,zmm2»
    size: int
    features: tuple[str, ...] = ()  # CPU features it needs, any of them missing: it is illegal
    missing: tuple[str, ...] = ()  # of these, what this CPU (or its system) has not got
    is_trap: bool = False  # ud2, int3, hlt, brk: somebody wrote it to end the process
    is_valid: bool = True  # False: the decoder knows no such instruction, `text` has its bytes
    divisor: str = ""  # of a division: the register or memory that it divides by,
    divisor_value: int | None = field(default=None, metadata=PRIVATE)  # and what was in there


@dataclass(frozen=True)
class Examined:
    """What files and decoders say about a crash record; dear, so it is done once."""

    place: CodePlace | None = None  # of the instruction pointer
    frames: tuple[CodePlace, ...] = ()  # of the return addresses
    instruction: Instruction | None = None
    cpu: str = ""  # its name
    system_call: str = ""  # the name of the one that SIGSYS is about


@dataclass(frozen=True)
class MappedFile:
    """The file that a worker had mapped where it faulted, looked at after its death."""

    path: str
    deleted: bool = False  # it has no name any more, or another file has it now
    size_bytes: int | None = None
    offset_bytes: int = 0  # of the fault, in the file
    file_system: str = ""  # «ext4», «tmpfs»
    free_bytes: int | None = None  # of the file system


@dataclass(frozen=True)
class Full:
    """A file system that had no room for what a worker wrote."""

    mount: str  # where it is mounted
    size_bytes: int
    free_bytes: int  # for other users than root
    no_files: bool = False  # there is room, but for no further file

    @property
    def still(self) -> bool:
        """Whether it was still full afterwards; else it is only the one that was written to."""
        return self.no_files or self.free_bytes < SHORT_OF


@dataclass(frozen=True)
class Unpicklable:
    """A part of a job that cannot be pickled."""

    path: str  # as a user would write it: «dataset.transform.keywords['lock']»
    type_name: str  # with its module: «_thread.lock»
    reason: str = ""  # what pickle says of it


@dataclass(frozen=True)
class Evidence:
    """Everything that is known of one incident beside what the incident itself says."""

    worked: Worked = field(default_factory=Worked)
    seen: Seen | None = None  # None: it did not hang
    surroundings: Surroundings | None = None
    last_words: str = field(default="", metadata=PRIVATE)  # the last lines it wrote to standard error
    crash: CrashRecord | None = None  # what the fatal-signal handler saw; None: no such signal, or no recorder
    recorder: bool = False  # whether a recorder was there to see it
    examined: Examined | None = None
    mapped: MappedFile | None = None  # of a bus error, or a fault in a file's mapping
    # Return addresses on the stack that follow a call, nearest first; old ones among them.
    callers: tuple[int, ...] = ()
    inherited: Region | None = None  # the file's mapping that it was forked with where it faulted, gone or not
    ended_because: str = ""  # why outlive itself killed it, neither for a hang nor for its memory; empty: it did not
    over_limit_bytes: int | None = None  # its memory when outlive ended it for `memory_limit`; None: it did not
    memory_limit_bytes: int | None = None  # that limit, where there is one
    unpicklable: tuple[Unpicklable, ...] = ()  # why a job could not be sent to its workers; the nearest first
    growth: Growth | None = None  # None: its memory does not grow, or it is too early to say
    unguarded: str = ""  # «train.py:12»: the main module's line that was running, outside of a __main__ guard
    creep: Creep | None = None  # None: neither its descriptors nor its threads go up and up

    @property
    def killed_for_memory(self) -> bool:
        return self.surroundings is not None and self.surroundings.oom.killed


NO_EVIDENCE = Evidence()
