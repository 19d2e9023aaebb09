"""How much address space this process may have, and what is in it.

Reads   its limits, /proc/self, /proc/sys/vm/max_map_count.
Writes  nothing.
Never   keeps memory of its own.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any

from outlive.quantities import in_words

_PRIVATE: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class NoRoomError(MemoryError):
    """This process could not have memory that it needs for what another one sent, which is not to blame."""


def require_room(size: int, text: str = "") -> None:
    """Raise NoRoomError if this process could not have so many bytes just now.

    Where reading a message fails for want of memory, this tells whether there is none, or the message asks for more
    than any message of its size needs.
    """
    try:
        mmap.mmap(-1, size, **_PRIVATE).close()
    except (OSError, MemoryError):
        raise NoRoomError(text) from None


def need_of(pickled: int) -> int:
    """The most that it may take to read a pickle of so many bytes."""
    return 16 * pickled + (1 << 20)


def machine_bytes() -> int:
    """The memory of this machine; where that is not known, more than any machine has."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 1 << 62


def no_room_text(cells: int, cell_bytes: int) -> str:
    """What to say when a batch came from a worker and this process could not have the memory for it."""
    limits = []
    with contextlib.suppress(Exception):
        import resource

        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        if most != resource.RLIM_INFINITY:
            used = int(_read("/proc/self/statm").split()[0]) * os.sysconf("SC_PAGE_SIZE")
            limits.append(f"its address space is limited to {in_words(most)} (ulimit -v), {in_words(used)} are in use")
    with contextlib.suppress(Exception):
        maps, most_maps = _read("/proc/self/maps").count("\n"), int(_read("/proc/sys/vm/max_map_count"))
        if maps > most_maps * 9 // 10:
            limits.append(f"it has {maps:,} of {most_maps:,} memory maps (vm.max_map_count)")
    why = "; ".join(limits) or "the system has no memory for it (see vm.overcommit_memory, and ulimit -a)"
    return (
        f"no room in this process for a batch that a worker has sent: {why}. {cells:,} batches that are kept, or not "
        f"looked at yet, hold {in_words(cell_bytes)} of it. No worker and no sample is to blame: keep fewer batches, "
        f"or raise the limit. A loader has lost nothing, and goes on with the next call of next()"
    )


def _read(path: str) -> Any:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()
