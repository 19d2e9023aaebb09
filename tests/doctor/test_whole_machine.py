"""What the doctor says where the whole machine is set so: real strict overcommit, real swap in use.

Reads   what an examination in a process of its own found.
Writes  vm.overcommit_memory, vm.overcommit_ratio and a swap file of the machine, each for a few seconds.
Never   without being asked to (OUTLIVE_MAY_CHANGE_MACHINE=1, which `make machine` sets), nor leaves them so.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import control_groups
from deadlines import wait_until
from doctor.examination import PROGRAM, Found, environment

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(
        os.environ.get("OUTLIVE_MAY_CHANGE_MACHINE") != "1" or os.geteuid() != 0,
        reason="changes settings of the whole machine for some seconds: `make machine`, as root, where that is welcome",
    ),
]
VM = Path("/proc/sys/vm")
SWAP, HELD, KEPT = 420 << 20, 380 << 20, 60 << 20
memory_group = control_groups.memory_group
# Holds memory until it is told to end.
HOLDS = "import sys; held = bytearray(b'x') * int(sys.argv[1]); print('held', flush=True); sys.stdin.read()"


@contextlib.contextmanager
def strict_overcommit() -> Iterator[None]:
    """The kernel counts what is promised; it may promise ten times the memory, so that nothing else fails meanwhile."""
    before = {name: (VM / name).read_text() for name in ("overcommit_memory", "overcommit_ratio")}
    try:
        (VM / "overcommit_ratio").write_text("1000")
        (VM / "overcommit_memory").write_text("2")
        yield
    finally:
        for name, text in before.items():
            (VM / name).write_text(text)


@contextlib.contextmanager
def swap_file(path: Path) -> Iterator[None]:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, SWAP)
    path.chmod(0o600)
    subprocess.run(["mkswap", str(path)], check=True, capture_output=True)
    done = subprocess.run(["swapon", str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no swap can be added here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["swapoff", str(path)], check=True)


def table(path: str = "/proc/meminfo") -> dict[str, int]:
    """In bytes."""
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in Path(path).read_text().splitlines()}


def examined(**variables: str) -> tuple[Found, str]:
    """What was found, and what a fork of the examined process said then."""
    ended = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input="go\n",
        capture_output=True,
        text=True,
        timeout=110,
        env=environment(**variables),
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = json.loads(ended.stdout)
    return Found(told["machine"]), told.get("forked", "")


def test_strict_overcommit_is_found():
    """It may kill while there is room; a process of more than half of the room cannot be forked, as foretold."""
    with strict_overcommit():
        sizes = table()
        room = sizes["CommitLimit"] - sizes["Committed_AS"]
        small, small_forked = examined(RESERVE=str(1 << 20), WORKERS="2")
        large, large_forked = examined(RESERVE=str(room * 6 // 10), WORKERS="2")
    after, _ = examined(WORKERS="2")

    assert small.ranks == {"strict-overcommit": "may kill"}
    assert small_forked == "done"
    assert large.ranks == {"strict-overcommit": "will kill"}
    assert "Cannot allocate memory" in large_forked
    assert "Cannot allocate memory" in large.text("strict-overcommit")
    assert large.remedies("strict-overcommit")[0] == "sudo sysctl vm.overcommit_memory=0"
    assert after.ranks == {}


def test_swapping_is_found(tmp_path, memory_group):
    """A process that may keep 60 of its 380 MiB in memory, on a machine with 420 MiB of swap."""
    if table()["SwapTotal"]:
        pytest.skip("there is swap already: how much of it is in use is not ours to say")
    v2 = memory_group / "memory.max"
    (v2 if v2.exists() else memory_group / "memory.limit_in_bytes").write_text(str(KEPT))
    enter = f'echo $$ > {memory_group}/cgroup.procs && exec "$0" "$@"'
    with swap_file(tmp_path / "swap"):
        with subprocess.Popen(
            ["sh", "-c", enter, sys.executable, "-c", HOLDS, str(HELD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            assert wait_until(lambda: table()["SwapTotal"] - table()["SwapFree"] > 280 << 20, 60)
            found, _ = examined()
            holder.stdin.close()
        after, _ = examined()

    assert found.ranks == {"swapping": "slows down"}
    assert "of 420 MiB swap are in use" in found.text("swapping")
    assert after.ranks == {}
