"""Environment variables of ranks, as torchrun sets them.

Reads   the launcher's environment; asks the kernel for a free port.
Writes  nothing; the ranks set them.
Never   changes what somebody has set before: a scheduler's MASTER_ADDR, or a rank of a node, means what it meant.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

ADDRESS = "127.0.0.1"
_SET_BY_US = "OUTLIVE_SPAWN"  # names of variables that an outer spawn has set: they are not ours


def shared(nprocs: int, restarts: int) -> dict[str, str]:
    """What all ranks of an attempt have in common."""
    wanted = {
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(free_port()),
    }
    counted = {"RESTART_COUNT": str(restarts), "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    return {**_unset(wanted), **counted}


def of_rank(rank: int, common: Mapping[str, str]) -> dict[str, str]:
    own = _unset({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    return {**common, **own, _SET_BY_US: " ".join([*common, *own])}


def _unset(wanted: Mapping[str, str]) -> dict[str, str]:
    outer = os.environ.get(_SET_BY_US, "").split()
    return {name: value for name, value in wanted.items() if name not in os.environ or name in outer}


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])
