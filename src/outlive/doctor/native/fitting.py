"""Libraries that cannot be loaded here at all: of another architecture, Python or torch.

Reads   what is known of libraries; the names that torch's libraries define.
Writes  nothing.
Never   blames a file that nobody here would load: tools bring libraries for other machines on purpose.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from outlive._forensics import symbols
from outlive.doctor.findings import Finding, Rank
from outlive.doctor.native.elf import Library, NotReadable
from outlive.doctor.native.reading import Read

_MOST_SHOWN = 5
_TAGGED = re.compile(r"^(?P<stem>[^.]+)\.(?P<tag>cpython-\d+\w*(?:-[\w-]+)?|pypy\w+(?:-[\w-]+)*)\.so$")
# std::string in mangled names, before C++11 and since.
_OLD_STRING, _NEW_STRING = "Ss", "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_ON_TORCHS_INDEX = {"torchvision", "torchaudio", "torchtext", "torchdata", "torchao"}


def _by_label(libraries: Iterable[Read]) -> Iterator[tuple[Read, list[Read]]]:
    groups: dict[str, list[Read]] = {}
    for library in libraries:
        groups.setdefault(library.label, []).append(library)
    for group in groups.values():
        yield group[0], group


def _reinstall(library: Read, why: str) -> str:
    owner = library.owner
    if owner is None:
        return f"build {library.name} again   {why}"
    return f"pip install --force-reinstall --no-cache-dir {owner.requirement}   {why}"


# ---------------------------------------------------------------- architecture


def of_another_architecture(libraries: list[Read]) -> Iterator[Finding]:
    here = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    right = {library.name for library in libraries if library.machine == here}
    needed = {file for library in libraries for file in library.needed_files}
    wrong = [
        library
        for library in libraries
        if library.machine != here and library.name not in right and (library.is_module or library.path in needed)
    ]
    for library, group in _by_label(wrong):
        yield Finding(
            "wrong-architecture",
            Rank.WILL_KILL,
            f"{library.label} is compiled for {library.machine}; this is {here}, where it cannot be loaded",
            facts=tuple(f"{found.path} is {found.machine}" for found in group[:_MOST_SHOWN]),
            remedies=(
                _reinstall(library, f"on a machine with {here}, by its own pip"),
                "make the environment anew instead of copying it from another machine",
            ),
        )


# ---------------------------------------------------------------- Python


def of_another_python(libraries: list[Read]) -> Iterator[Finding]:
    """Modules whose names Python does not even look at, and no other file for them."""
    wrong = []
    for library in libraries:
        found = _TAGGED.match(library.name)
        if found is None or library.loaded or f".{found['tag']}.so" in importlib.machinery.EXTENSION_SUFFIXES:
            continue
        if not _is_there_otherwise(os.path.dirname(library.path), found["stem"]):
            wrong.append(library)
    for library, group in _by_label(wrong):
        tag = _TAGGED.match(library.name)
        yield Finding(
            "wrong-python",
            Rank.WILL_KILL,
            f"{library.label} is compiled for {tag['tag'] if tag else '?'}; this Python is "
            f"{sysconfig.get_config_var('SOABI')} and does not find it",
            facts=tuple(f"{found.path} is the only file for this module" for found in group[:_MOST_SHOWN]),
            remedies=(_reinstall(library, f"with this interpreter's pip: Python {platform.python_version()}"),),
        )


def _is_there_otherwise(folder: str, stem: str) -> bool:
    names = [stem + suffix for suffix in importlib.machinery.all_suffixes()]
    return any(os.path.exists(os.path.join(folder, name)) for name in [*names, f"{stem}/__init__.py"])


# ---------------------------------------------------------------- torch


def of_another_torch(libraries: list[Read]) -> Iterator[Finding]:
    """Extensions that want names which the installed torch does not define."""
    home = torchs_folder()
    if home is None:
        return
    extensions = [
        library for library in libraries if library.wants_of_torch and not library.path.startswith(f"{home}{os.sep}")
    ]
    if not extensions:
        return
    defined = _defined_in(str(path) for path in sorted((home / "lib").glob("*.so*")))
    wanting: dict[Read, list[str]] = {}
    for library in extensions:
        missing = [name for name in library.wants_of_torch if name not in defined]
        if missing:
            theirs = _defined_in([*_neighbours(library, libraries)])
            missing = [name for name in missing if name not in theirs]
        if missing:
            wanting[library] = missing
    version = _torchs_version(home)
    for library, group in _by_label(wanting):
        yield _wanting(library, {found: wanting[found] for found in group}, version, defined)


def _wanting(library: Read, group: dict[Read, list[str]], version: str, defined: set[str]) -> Finding:
    names = [name for missing in group.values() for name in missing]
    facts = [
        f"{found.path} wants {len(missing)} names that torch's libraries do not define, such as "
        f"{symbols.readable(missing[0])} ({missing[0][:120]})"
        for found, missing in list(group.items())[:_MOST_SHOWN]
    ]
    return Finding(
        "torch-abi-mismatch",
        Rank.WILL_KILL,
        f"{library.label} is compiled against another torch than the {version} that is installed: "
        "its import ends with «undefined symbol»",
        facts=(*facts, *_flavours(names, defined, version)),
        remedies=tuple(_ways_to_torch(library, version)),
    )


def _ways_to_torch(library: Read, version: str) -> Iterator[str]:
    owner, variant = library.owner, version.partition("+")[2]
    if owner is None:
        yield f"compile {library.name} again with torch {version} installed"
        return
    if owner.name in _ON_TORCHS_INDEX and variant:
        index = f"--index-url https://download.pytorch.org/whl/{variant}"
        yield f"pip install --force-reinstall --no-deps {owner.requirement} {index}   the build for {version}"
    again = f"pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation --no-binary {owner.name}"
    yield f"{again} {owner.requirement}   compiles it against torch {version}"


def _flavours(names: list[str], defined: set[str], version: str) -> Iterator[str]:
    """Why names are missing, where the names tell."""
    if any(name.replace(_OLD_STRING, _NEW_STRING) in defined for name in names):
        yield "it is compiled with _GLIBCXX_USE_CXX11_ABI=0, torch with 1: they mean different things by std::string"
    if any(name.replace(_NEW_STRING, _OLD_STRING) in defined for name in names):
        yield "it is compiled with _GLIBCXX_USE_CXX11_ABI=1, torch with 0: they mean different things by std::string"
    if any("4cuda" in name for name in names) and "+cpu" in version:
        yield f"it is compiled for CUDA, torch {version} is not"


def torchs_folder() -> Path | None:
    """Where torch is installed; it is not imported."""
    try:
        found = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if found is None or not found.origin:
        return None
    home = Path(found.origin).resolve().parent
    return home if (home / "lib").is_dir() else None


def _torchs_version(home: Path) -> str:
    try:
        text = (home / "version.py").read_text(encoding="utf-8")
    except OSError:
        return "?"
    found = re.search(r"__version__ = '([^']+)'", text)
    return found[1] if found else "?"


def _neighbours(library: Read, libraries: list[Read]) -> Iterator[str]:
    """Libraries of the same package, and those it needs: names of torch's may be theirs."""
    owner = library.owner
    for other in libraries:
        same = owner is not None and other.owner == owner
        if other is not library and (same or other.path in library.needed_files):
            yield other.path


def _defined_in(paths: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for path in paths:
        try:
            with Library(path) as library:
                found.update(library.defined())
        except (NotReadable, OSError):
            continue  # a text for the linker, or gone
    return found
