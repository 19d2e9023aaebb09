"""Verdicts on SIGBUS: memory that is mapped, with nothing behind it.

Reads   incidents.
Writes  nothing.
Never   a process, a file, a lock, the clock.
"""

from __future__ import annotations

from outlive._forensics.rules.addresses import code_facts, fault_of, in_code, region_words, size_words
from outlive.crashes import SIGBUS, CrashRecord, Region
from outlive.evidence import MappedFile
from outlive.incident import Incident
from outlive.verdicts import Confidence, Name, Verdict

_PAGE = 4096
_NEARLY_NOTHING = 16 * _PAGE
_SHARED = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero", "/anon_hugepage")
_MEMORY_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")


def judge(incident: Incident) -> Verdict | None:
    crash = fault_of(incident, SIGBUS)
    if crash is None:
        return None
    if crash.code_name.startswith("BUS_MCEERR"):
        return _broken_memory(incident, crash)
    if crash.code_name == "BUS_ADRALN":
        return _misaligned(incident, crash)
    if crash.address is None:
        return None  # a stack pointer that cannot be one: told with the other wild pointers
    region = crash.region_of(crash.address)
    if region is None or not region.path.startswith("/"):
        return _no_file(incident, crash, region)
    file = incident.evidence.mapped or MappedFile(
        region.path.removesuffix(" (deleted)"), deleted=True, offset_bytes=_offset(crash, region)
    )
    if file.size_bytes is not None and file.size_bytes <= file.offset_bytes:
        return _truncated(incident, crash, region, file, Confidence.CERTAIN)
    if _is_memory(file):
        if _no_room(incident, crash, file) or "hugepage" in file.path or file.file_system == "hugetlbfs":
            return _full(incident, crash, region, file)
        return _truncated(incident, crash, region, file, Confidence.LIKELY)
    if file.size_bytes is None:
        return _truncated(incident, crash, region, file, Confidence.LIKELY)
    if crash.access != "read" and file.free_bytes is not None and file.free_bytes < _NEARLY_NOTHING:
        return _full(incident, crash, region, file)
    return _unreadable(incident, crash, file)


def _offset(crash: CrashRecord, region: Region) -> int:
    return region.offset + (crash.address or 0) - region.start


def _access(crash: CrashRecord) -> str:
    return crash.access or "access"


def _is_memory(file: MappedFile) -> bool:
    return file.path.startswith(_SHARED) or file.file_system in _MEMORY_SYSTEMS


def _shared_room(incident: Incident, crash: CrashRecord, file: MappedFile) -> tuple[int | None, int | None]:
    """What was free of what size, as near to the death as anybody looked."""
    if not file.path.startswith("/dev/shm/"):
        return file.free_bytes, None
    if crash.shared_bytes is not None:
        return crash.shared_free_bytes, crash.shared_bytes
    around = incident.evidence.surroundings
    return (around.shm_free_bytes, around.shm_bytes) if around is not None else (file.free_bytes, None)


def _no_room(incident: Incident, crash: CrashRecord, file: MappedFile) -> bool:
    free, _ = _shared_room(incident, crash, file)
    return free is not None and free < _NEARLY_NOTHING


def _truncated(
    incident: Incident, crash: CrashRecord, region: Region, file: MappedFile, confidence: Confidence
) -> Verdict:
    what = f"{_access(crash)}{in_code(incident)} at byte {file.offset_bytes} of {file.path}"
    facts = [f"the kernel says {crash.code_name} at {crash.address:#x}, in {region_words(region)}"]
    if file.size_bytes is not None:
        cause = f"{what}, which has only {file.size_bytes} bytes: it was truncated under its map"
        facts.append(f"the map reaches to byte {region.offset + region.end - region.start} of it")
    else:
        cause = f"{what}, past the end that it now has: it was truncated under its map"
        facts.append("the file has no name any more: nobody can look how long it is")
    if confidence is not Confidence.CERTAIN and crash.shared_free_bytes is not None and _is_memory(file):
        facts.append(f"/dev/shm had {size_words(crash.shared_free_bytes)} free at that moment")
    remedies = (
        "replace files whole: write a new one beside it, then os.replace(new, old), which leaves open maps alone",
        "find who writes the file while workers read it; make it read-only while the job runs: chmod a-w",
        'or read it instead of mapping it: np.fromfile, np.load(path, mmap_mode=None), open(path, "rb").read()',
    )
    return Verdict(Name.TRUNCATED_FILE, cause, (*facts, *code_facts(incident)), remedies, confidence)


def _full(incident: Incident, crash: CrashRecord, region: Region, file: MappedFile) -> Verdict:
    free, size = _shared_room(incident, crash, file)
    in_shm = file.path.startswith("/dev/shm/")
    huge = "hugepage" in file.path or file.file_system == "hugetlbfs"
    named = "/dev/shm" if in_shm else "the pool of huge pages" if huge else f"the file system of {file.path}"
    room = f" of {size_words(size)}" if size else ""
    left = f": {size_words(free)} left{room}" if free is not None else ""
    certain = free is not None and free < _PAGE and not huge
    needed = region.end - region.start
    facts = [
        f"the kernel says {crash.code_name} at {crash.address:#x}, in {region_words(region)}",
        f"this map alone is {size_words(needed)}",
    ]
    remedies: tuple[str, ...]
    if in_shm:
        target = max(1 << 30, 2 * (size or 0), 2 * needed)
        remedies = more_shared_memory(target)
    elif huge:
        remedies = ("raise vm.nr_hugepages, or map without huge pages",)
    else:
        remedies = (f"make room: df -h {file.path}", "write with os.posix_fallocate first: it raises OSError instead")
    return Verdict(
        Name.SHARED_MEMORY_FULL,
        f"{_access(crash)}{in_code(incident)} of a page of {file.path} that needs room, but {named} is full{left}",
        (*facts, *code_facts(incident)),
        remedies,
        Confidence.CERTAIN if certain else Confidence.LIKELY,
    )


def _unreadable(incident: Incident, crash: CrashRecord, file: MappedFile) -> Verdict:
    facts = (
        f"the kernel says {crash.code_name} at {crash.address:#x}",
        f"the file has {file.size_bytes} bytes now: more than that",
        *((f"it is on {file.file_system}",) if file.file_system else ()),
    )
    return Verdict(
        Name.HARDWARE_FAULT,
        f"the page at byte {file.offset_bytes} of {file.path} could not be read{in_code(incident)}: "
        "an error of its disk or network, or the file was shorter for a moment",
        facts,
        (
            f"read it through: dd if={file.path} of=/dev/null bs=1M; an error there is the disk's",
            "look for I/O errors: dmesg, smartctl -a",
            "copy the data to a local disk if this one is a network's",
        ),
        Confidence.POSSIBLE,
    )


def _broken_memory(incident: Incident, crash: CrashRecord) -> Verdict:
    return Verdict(
        Name.HARDWARE_FAULT,
        f"the memory module itself is broken at address {crash.address or 0:#x}{in_code(incident)}",
        (f"the kernel says {crash.code_name}: the hardware reported an error of memory that cannot be corrected",),
        (
            "take this machine out of service, and have its memory tested: the same sample is healthy elsewhere",
            "see which module: dmesg, ras-mc-ctl --errors, mcelog",
        ),
    )


def _misaligned(incident: Incident, crash: CrashRecord) -> Verdict:
    shown = f" of address {crash.address:#x}" if crash.address else ""  # x86-64 does not tell it
    return Verdict(
        Name.WILD_POINTER,
        f"misaligned {_access(crash)}{shown}{in_code(incident)}",
        ("the kernel says BUS_ADRALN: this code may use aligned addresses only", *code_facts(incident)),
        (
            "hand native code arrays that are aligned: np.require(array, requirements='AC')",
            "report it to the library's authors with the address and the function above",
        ),
    )


def _no_file(incident: Incident, crash: CrashRecord, region: Region | None) -> Verdict:
    where = region_words(region) if region is not None else "memory that nobody knows"
    return Verdict(
        Name.SHARED_MEMORY_FULL,
        f"{_access(crash)} of address {crash.address or 0:#x}{in_code(incident)}: there is no memory behind {where}",
        (f"the kernel says {crash.code_name}", *code_facts(incident)),
        ("look for what was short at that moment: dmesg, free -h, cat /proc/meminfo | grep -i huge",),
        Confidence.POSSIBLE,
    )


def more_shared_memory(target_bytes: int) -> tuple[str, ...]:
    """What to do about a full /dev/shm."""
    size = f"{-(-target_bytes >> 30)}g"
    return (
        f"in a container: docker run --shm-size={size}, or --ipc=host",
        f"as root: mount -o remount,size={size} /dev/shm",
        "look for what is left there by programs that were killed: ls -l /dev/shm",
    )
