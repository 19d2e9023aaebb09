"""Runtimes of which a process should have one: OpenMP's, and C++'s.

Reads   which libraries are loaded.
Writes  nothing.
Never   complains of two copies of libgomp: wheels bring their own by the dozen, and they keep out of each other's way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from outlive.doctor.findings import Finding, Rank
from outlive.doctor.native.reading import Read

_OPENMP = {
    "libgomp": re.compile(r"^libgomp(-[0-9a-f.]+)?\.so"),
    "libiomp5": re.compile(r"^libiomp5(-[0-9a-f.]+)?\.so"),
    "libomp": re.compile(r"^libomp5?(-[0-9a-f.]+)?\.so"),
}
_CXX = {
    "libstdc++": re.compile(r"^libstdc\+\+(-[0-9a-f.]+)?\.so"),
    "libc++": re.compile(r"^libc\+\+(-[0-9a-f.]+)?\.so"),
}


def two_openmp_runtimes(libraries: list[Read]) -> Iterator[Finding]:
    there = _loaded(libraries, _OPENMP)
    kinds = sorted(there)
    of_llvm = [*there.get("libiomp5", ()), *there.get("libomp", ())]
    if len(kinds) < 2 and len(of_llvm) < 2:
        return
    if len(of_llvm) > 1:
        harm = "the second of them to start aborts the process: «OMP: Error #15»"
    else:
        harm = (
            "each has threads of its own, and the functions of one are used by code for the other: deadlocks, crashes"
        )
    what = " and ".join(kinds) if len(kinds) > 1 else f"{len(of_llvm)} copies of {kinds[0]}"
    keep = of_llvm[0]
    mkl = any("libmkl" in library.name for library in libraries if library.loaded)
    yield Finding(
        "two-openmp-runtimes",
        Rank.MAY_KILL,
        f"{what} are loaded in one process",
        facts=(
            *(f"{kind}: {library.path}{_of(library)}" for kind in kinds for library in there[kind]),
            harm,
        ),
        remedies=(
            f"LD_PRELOAD={keep.path}   all then use this one: it has the functions of libgomp, too",
            *(("MKL_THREADING_LAYER=GNU   MKL then uses libgomp",) if mkl and "libgomp" in kinds else ()),
            "OMP_NUM_THREADS=1   no runtime then has threads that another, or a fork, can lose",
        ),
    )


def two_cxx_runtimes(libraries: list[Read]) -> Iterator[Finding]:
    for kind, copies in _loaded(libraries, _CXX).items():
        if len(copies) < 2:
            continue
        owners = [library for library in copies if library.owner is not None]
        yield Finding(
            "two-cxx-runtimes",
            Rank.MAY_KILL,
            f"{len(copies)} copies of {kind} are loaded in one process",
            facts=(
                *(f"{library.path}{_of(library)}" for library in copies),
                "an exception, a stream or a locale of one that reaches the other ends the process",
            ),
            remedies=(
                *(f"pip install --force-reinstall {library.owner.requirement}" for library in owners if library.owner),
                f"LD_PRELOAD={copies[0].path}   all then use this one",
            ),
        )


def _loaded(libraries: list[Read], kinds: dict[str, re.Pattern[str]]) -> dict[str, list[Read]]:
    found: dict[str, list[Read]] = {}
    for library in libraries:
        for kind, pattern in kinds.items():
            if library.loaded and pattern.match(library.name):
                found.setdefault(kind, []).append(library)
    return found


def _of(library: Read) -> str:
    owner = library.owner
    return f" of {owner.words}" if owner is not None else ""
