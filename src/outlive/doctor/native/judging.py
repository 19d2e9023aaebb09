"""What the CPUs lack that libraries need.

Reads   what is known of libraries, and of CPUs.
Writes  nothing.
Never   blames a library for code that is chosen by CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outlive._forensics.cpu import Cpu, this_cpu
from outlive.doctor.findings import Finding, Rank
from outlive.doctor.native import code, machines
from outlive.doctor.native.code import Seen
from outlive.doctor.native.features import essential, spoken
from outlive.doctor.native.reading import Read

_MOST_SHOWN = 5  # libraries of a package
_NO_SOURCE = {"torch", "pyarrow", "tensorflow", "jaxlib"}  # pip cannot build them from what is on PyPI
_Needs = dict[Read, dict[str, Seen]]


def lacking(libraries: Iterable[Read], cpus: Iterable[Cpu]) -> Iterator[Finding]:
    """By CPU and package, the worst that is known of its libraries."""
    by_label: dict[str, list[Read]] = {}
    for library in libraries:
        # «_distances_avx2.so»: who loads it has asked before.
        if library.machine == "x86_64" and not code.is_dispatched_name(library.name):
            by_label.setdefault(library.label, []).append(library)
    for cpu in cpus:
        for group in by_label.values():
            yield from _of_package(group, cpu)


def _of_package(group: list[Read], cpu: Cpu) -> Iterator[Finding]:
    refused = [library for library in group if library.level and not machines.satisfies(cpu, library.level)]
    if refused:
        yield _refused(refused, cpu)
    at_load: _Needs = {}
    called: _Needs = {}
    for library in group:
        if library.code is None or library in refused:
            continue
        for kinds, into in (
            ((library.code.at_load,), at_load),
            ((library.code.anywhere, library.code.throughout), called),
        ):
            needed = {feature: seen for kind in kinds for feature, seen in kind.items()}
            missing = cpu.missing(sorted(needed))
            if missing:
                into[library] = {feature: needed[feature] for feature in missing}
    if at_load:
        yield _at_load(at_load, cpu)
    elif called:
        yield _when_called(called, cpu)


def _at_load(needs: _Needs, cpu: Cpu) -> Finding:
    features = _features(needs)
    library = next(iter(needs))
    return Finding(
        "cpu-feature-missing-at-import",
        Rank.WILL_KILL,
        f"{library.label} runs {spoken(features)} code as soon as it is imported; {_name(cpu)} has not got that",
        facts=(*_facts(needs, "is run when the library is loaded"), _about(cpu)),
        remedies=_remedies(library, features, cpu),
    )


def _when_called(needs: _Needs, cpu: Cpu) -> Finding:
    features = _features(needs)
    library = next(iter(needs))
    asks = [found for found in needs if found.code is not None and found.code.asks]
    why = "all of the library is compiled so" if asks else "nothing in the library asks the CPU first"
    return Finding(
        "cpu-feature-missing",
        Rank.MAY_KILL,
        f"{library.label} is compiled for CPUs with {spoken(features)}; {_name(cpu)} has not got that",
        facts=(*_facts(needs, why), _about(cpu)),
        remedies=_remedies(library, features, cpu),
    )


def _refused(group: list[Read], cpu: Cpu) -> Finding:
    library = group[0]
    level = max(found.level for found in group)
    features = cpu.missing(sorted(machines.LEVELS[level.removesuffix("-v1")]))
    return Finding(
        "cpu-level-too-low",
        Rank.WILL_KILL,
        f"{library.label} is marked as needing {level}; ld.so refuses it where {_name(cpu)} is",
        facts=(
            *(f"{found.path} has the note {found.level} (.note.gnu.property)" for found in group[:_MOST_SHOWN]),
            "the import ends with: CPU ISA level is lower than required",
            _about(cpu),
        ),
        remedies=(
            f"link it without -z {level}: LDFLAGS=-Wl,-z,{machines.level_of(cpu)}",
            *_remedies(library, features, cpu),
        ),
    )


def _features(needs: _Needs) -> tuple[str, ...]:
    return tuple(sorted({feature for needed in needs.values() for feature in needed}))


def _facts(needs: _Needs, why: str) -> Iterator[str]:
    for library, needed in list(needs.items())[:_MOST_SHOWN]:
        feature = essential(needed)[0]
        seen = needed[feature]
        through = f", reached from {seen.through}" if seen.through else ""
        count = f", in {seen.functions} functions" if seen.functions > 1 and not seen.through else ""
        yield f"{library.path}: {seen.text} at {seen.where}{count} needs {feature}{through}; {why}"
    if len(needs) > _MOST_SHOWN:
        yield f"and {len(needs) - _MOST_SHOWN} more libraries of it"


def _name(cpu: Cpu) -> str:
    return f"this CPU ({cpu.name or 'without a name'})" if cpu == this_cpu() else cpu.name


def _about(cpu: Cpu) -> str:
    return f"what {_name(cpu)} has is known from {cpu.source}; it is {machines.level_of(cpu)} as a whole"


def _remedies(library: Read, features: tuple[str, ...], cpu: Cpu) -> tuple[str, ...]:
    owner, level = library.owner, machines.level_of(cpu)
    found = []
    if owner is None:
        found.append(f"compile {library.name} with -march={level} instead of -march=native")
    elif owner.name == "numpy":
        found.append(
            f"pip install --force-reinstall --no-binary numpy -Csetup-args=-Dcpu-baseline=none {owner.requirement}"
        )
    elif owner.name not in _NO_SOURCE:
        flags = f"CFLAGS=-march={level} CXXFLAGS=-march={level}"
        found.append(f"{flags} pip install --force-reinstall --no-binary {owner.name} {owner.requirement}")
    enough = [name for name, has in machines.LEVELS.items() if set(features) <= has]
    by_level = f": {enough[0]} or later" if enough else ""
    found.append(f"use machines whose CPU has {spoken(features)}{by_level} (lscpu shows the flags)")
    return tuple(found)
