"""What the workers may use together: by hand-made cgroups, and on this machine.

Reads   nothing but what it wrote, and this machine's own memory.
Writes  small trees like /proc and /sys/fs/cgroup into temporary folders.
Never   a cgroup of this machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from outlive._forensics import surroundings
from outlive.engines.local.budget import ROOM_AGAIN_S, SAY_AGAIN_S, Budget, Told

MIB = 1 << 20
GIB = 1 << 30


def machine(root: Path, *, available: int = 60 * GIB, limit: int | None = None, used: int = 0, cached: int = 0) -> Path:
    """A machine of 64 GiB, in a container or not."""
    files = {"proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {available // 1024} kB\n"}
    files["proc/self/mountinfo"] = "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n"
    files["proc/self/cgroup"] = "0::/pod/box\n"
    files["sys/fs/cgroup/pod/box/memory.max"] = "max"
    files["sys/fs/cgroup/pod/memory.max"] = "max" if limit is None else str(limit)
    files["sys/fs/cgroup/pod/memory.current"] = str(used)
    files["sys/fs/cgroup/pod/memory.stat"] = f"anon 5\nactive_file {cached}\ninactive_file 0\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_budget_is_a_size_or_a_share_of_what_there_is(tmp_path):
    inside = str(machine(tmp_path, limit=10 * GIB))

    assert Budget("24GiB", inside).bytes == 24 * GIB
    assert Budget("80%", inside).bytes == 8 * GIB
    assert Budget(None, inside).bytes is None
    assert Budget("50%", str(machine(tmp_path / "bare"))).bytes == 32 * GIB


def test_workers_over_their_budget_are_told_with_the_largest(tmp_path):
    budget = Budget("4GiB", str(machine(tmp_path)))

    assert budget.look(0.0, {0: GIB, 1: GIB}) is None
    told = budget.look(10.0, {0: GIB, 1: 3 * GIB})
    assert told == Told(True, 1, 3 * GIB, 4 * GIB, 0)
    assert budget.look(10.0 + SAY_AGAIN_S / 2, {0: GIB, 1: 3 * GIB}) is None  # it has been said
    assert budget.look(10.0 + SAY_AGAIN_S, {0: GIB, 1: 3 * GIB}) == told


@pytest.mark.parametrize(
    ("around", "scarce"),
    [
        ({"limit": 8 * GIB, "used": 8 * GIB - 100 * MIB}, True),
        ({"limit": 8 * GIB, "used": 8 * GIB - 100 * MIB, "cached": 2 * GIB}, False),  # files give way
        ({"limit": 8 * GIB, "used": 6 * GIB}, False),
        ({"available": 200 * MIB}, True),
    ],
)
def test_memory_is_scarce_where_the_container_or_the_machine_runs_out(tmp_path, around, scarce):
    told = Budget(None, str(machine(tmp_path, **around))).look(0.0, {0: GIB, 1: GIB})

    assert (told is not None and told.scarce) is scarce


def test_small_workers_are_left_alone_where_others_use_the_memory(tmp_path):
    """Their leaving would change nothing."""
    assert Budget(None, str(machine(tmp_path, available=200 * MIB))).look(0.0, {0: 20 * MIB}) is None


def test_room_for_another_is_told_where_there_were_more(tmp_path):
    budget = Budget("8GiB", str(machine(tmp_path)))
    budget.look(0.0, {0: 2 * GIB, 1: 2 * GIB, 2: 2 * GIB})

    assert budget.look(10.0, {0: 2 * GIB, 1: 2 * GIB + 2 * GIB // 3}) is None  # one as large would not fit comfortably
    told = budget.look(20.0, {0: GIB, 1: GIB})
    assert told == Told(False, 0, GIB, 2 * GIB, 6 * GIB)
    assert budget.look(20.0 + ROOM_AGAIN_S / 2, {0: GIB, 1: GIB}) is None


def test_this_machine_has_some_memory_left():
    """The real files, whatever they are here."""
    assert 0 < (surroundings.available_bytes() or 0) <= (surroundings.total_bytes() or 0) * 64
    for group in surroundings.own_groups():
        assert group.held_bytes is None or group.held_bytes >= 0
    assert Budget("1%").bytes == round((surroundings.total_bytes() or 0) / 100)
