"""A graph in a file: written once, then mapped by whoever opens it, without reading it.

Reads   the head of a file; its size.
Writes  a file beside the one that is asked for, which then takes its name: nobody ever sees half of one.
Never   maps what the head does not account for: a file that was cut short is refused here, and is not the death
        (SIGBUS) of whoever reads it later.

    b"outlive.graph\\n\\0\\0"   version, sizes of head and file   the head: JSON   arrays, each at a multiple of 64
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from outlive._system import mapped, safe_files
from outlive.graph.arrays import Array, Extent, Key, Layout

_MAGIC = b"outlive.graph\n\0\0"
_VERSION = 1
_LENGTHS = struct.Struct("<IQQ")
_PREFIX = len(_MAGIC) + _LENGTHS.size
_ALIGNMENT = 64
_LONGEST_HEAD = 1 << 26
_DTYPE = re.compile(r"[<>|](b1|[iu][1248]|f[248]|f16|c8|c16)")


@dataclass(frozen=True, slots=True)
class Origin:
    """Which file a graph lies in: where it is, and the number that was drawn when it was written."""

    path: str
    id: str


class Opened(NamedTuple):
    memory: Any
    layout: Layout
    origin: Origin


def save(path: Path, layout: Layout, arrays: dict[Key, Array]) -> None:
    """Write a graph to a file."""
    head, extents = _head(layout)
    size = max((extent.at + extent.nbytes for extent in extents.values()), default=_aligned(_PREFIX + len(head)))
    with safe_files.replacing(path) as file:
        file.write(_MAGIC + _LENGTHS.pack(_VERSION, len(head), size) + head)
        for key, extent in extents.items():
            file.seek(extent.at)
            file.write(arrays[key].reshape(-1).view("u1").data if extent.nbytes else b"")
        file.truncate(size)


def _head(layout: Layout) -> tuple[bytes, dict[Key, Extent]]:
    """The head, and where it says that each array lies: which depends on how long the head is."""
    at = 0
    placed: dict[Key, Extent] = {}
    for key, extent in layout.extents.items():
        placed[key] = replace(extent, at=at)
        at = _aligned(at + extent.nbytes)
    table = {
        "id": secrets.token_hex(16),
        "num_nodes": layout.num_nodes,
        "num_edges": [[*kind, count] for kind, count in layout.num_edges.items()],
        "arrays": [[list(key), extent.dtype, list(extent.shape), extent.at] for key, extent in placed.items()],
    }
    head = json.dumps(table, ensure_ascii=True).encode("ascii")
    begin = _aligned(_PREFIX + len(head))
    return head, {key: replace(extent, at=begin + extent.at) for key, extent in placed.items()}


def _aligned(at: int) -> int:
    return -(-at // _ALIGNMENT) * _ALIGNMENT


def open_file(path: str, expected: str | None = None) -> Opened:
    """Map a file that `save` wrote; `expected`: the number it must have."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is no regular file, and no graph that SharedGraph.save wrote")
        prefix = file.read(_PREFIX)
        if len(prefix) < _PREFIX or not prefix.startswith(_MAGIC):
            raise ValueError(f"{path} is no graph that SharedGraph.save wrote (its first bytes are {prefix[:16]!r})")
        version, head_size, size = _LENGTHS.unpack_from(prefix, len(_MAGIC))
        if version != _VERSION:
            raise ValueError(
                f"{path} is of format {version}, and this version of outlive reads {_VERSION} "
                f"(save the graph again with this version, or update outlive)"
            )
        there = os.fstat(file.fileno()).st_size
        if there != size:
            raise ValueError(
                f"{path} has {there} bytes of {size}: it was cut short or added to, as by a copy that was not finished "
                f"(copy or save it again)"
            )
        head = file.read(head_size) if _PREFIX + head_size <= min(size, _LONGEST_HEAD) else b""
        try:
            layout, number = _read_head(head, _aligned(_PREFIX + head_size), size)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: its head says nothing sensible ({error}); save it again") from error
        if expected is not None and number != expected:
            raise ValueError(
                f"{path} is another graph by now than the one that was opened in the process that sent it: it was "
                f"saved anew meanwhile (open it again there, or save under another name)"
            )
        return Opened(mapped.map_file(file, size), layout, Origin(path, number))


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe would have us wait for its writer


def _read_head(head: bytes, begin: int, size: int) -> tuple[Layout, str]:
    table = json.loads(head)
    extents: dict[Key, Extent] = {}
    for key, dtype, shape, at in table["arrays"]:
        if not _DTYPE.fullmatch(dtype):
            raise ValueError(f"no such type of numbers: {dtype!r}")
        if not all(type(number) is int and number >= 0 for number in (*shape, at)):
            raise ValueError(f"no such array: {shape!r} at {at!r}")
        extent = Extent(dtype, tuple(shape), begin + at)
        if at % _ALIGNMENT or extent.at + extent.nbytes > size:
            raise ValueError(f"the array {key!r} lies outside the file")
        extents[tuple(map(str, key))] = extent
    edges = {(str(source), str(name), str(target)): int(count) for source, name, target, count in table["num_edges"]}
    nodes = {str(kind): int(count) for kind, count in table["num_nodes"].items()}
    return Layout(nodes, edges, extents), str(table["id"])
