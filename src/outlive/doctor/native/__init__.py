"""Compiled code that this CPU, or another machine's, cannot run; and libraries that cannot live here, or together.

Reads   every native library that is loaded or importable; this CPU; the database of other CPUs.
Writes  what it found out about files, into the user's cache folder.
Never   imports a package, runs code of a library; blames code that is chosen by CPU.

    libraries ─► elf ─► code (features) ─► reading (remembering) ─► judging · fitting · together ─► findings
                                             machines ─────────────────┘
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outlive.doctor.findings import Finding
from outlive.doctor.native import fitting, judging, machines, reading, together


@dataclass(frozen=True)
class Survey:
    findings: tuple[Finding, ...]
    facts: tuple[str, ...]  # what was looked at, and «not looked at: …» with the reason


def findings(cpus: Sequence[str] = (), progress: Callable[[int, int], None] | None = None) -> Iterator[Finding]:
    """What is wrong with compiled code here, and on the machines that `cpus` names («x86-64-v2», «znver2»)."""
    yield from survey(cpus, progress).findings


def survey(
    cpus: Sequence[str] = (), progress: Callable[[int, int], None] | None = None, folders: list[str] | None = None
) -> Survey:
    """Findings, and what was looked at. `folders`: only libraries under these, not what is loaded or importable."""
    judged = machines.machines(cpus)
    if sys.platform != "linux":
        return Survey((), (f"not looked at: native libraries (only on Linux; this is {sys.platform})",))
    facts: list[str] = []
    with_code = machines.is_x86() and importlib.util.find_spec("iced_x86") is not None
    if not machines.is_x86():
        facts.append("not looked at: the instructions of libraries (only on x86-64)")
    elif not with_code:
        facts.append("not looked at: the instructions of libraries; pip install 'outlive[forensics]' brings iced-x86")
    there = reading.read_all(folders, progress, with_code=with_code)
    every = there.libraries
    found = (
        *fitting.of_another_architecture(every),
        *fitting.of_another_python(every),
        *fitting.of_another_torch(every),
        *judging.lacking(every, judged if machines.is_x86() else ()),
        *together.two_openmp_runtimes(every),
        *together.two_cxx_runtimes(every),
    )
    facts.insert(0, f"{len(every)} native libraries, {sum(library.loaded for library in every)} of them loaded here")
    facts += [f"not looked at: {what}" for what in there.not_looked_at]
    return Survey(found, tuple(facts))
