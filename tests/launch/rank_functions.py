"""What ranks run in these tests.

Reads   the environment, marker files.
Writes  marker files, standard output; otherwise it ruins the process that it is called in.
Never   a function that a spawned rank could not import by name.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from deadlines import wait_until
from faults.table import PlantedFault, sleep_for_ever

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
COUNTS = ("RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def fire_at(rank: int, place: int, fault: str) -> None:
    """One rank meets a fault, the others wait for ever."""
    if rank == place:
        PlantedFault(fault)()
    sleep_for_ever()


def fall_silent(rank: int, folder: str) -> None:
    """Rank 1 says nothing more, and is killed when it is told to; rank 0 complains of that."""
    pipe = f"{folder}/pipe"
    if rank == 0:
        with open(pipe, "rb") as peer:
            peer.read()
        raise ConnectionError("closed by peer")
    with open(pipe, "wb"):
        os.close(1)
        os.close(2)
        wait_until(Path(folder, "go").exists, 60.0)
        os.kill(os.getpid(), signal.SIGKILL)


def fire_each(rank: int, faults: tuple[str, ...]) -> None:
    PlantedFault(faults[rank])()


def do_nothing(rank: int) -> None:
    pass


def put(rank: int, queue: Any) -> None:
    queue.put(rank)


def raise_together(rank: int) -> None:
    raise ValueError(f"all of us, this one is {rank}")


def note_environment(rank: int, folder: Path) -> None:
    told = {name: os.environ.get(name) for name in (*NAMES, *COUNTS)}
    (folder / f"{told['RESTART_COUNT']}-{rank}").write_text(json.dumps(told))


def die_before_others(rank: int, folder: Path) -> None:
    """Rank 2 is killed; rank 0 complains once that has happened; rank 3 has returned before; rank 1 waits for ever."""
    if rank == 2:
        wait_until((folder / "watching").exists, 60)
        _wait_for_end(folder / "done")
        (folder / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 0:
        (folder / "watching").touch()
        _wait_for_end(folder / "pid")
        raise ConnectionError("peer 2 hung up")
    elif rank == 3:
        (folder / "done").write_text(str(os.getpid()))
        return
    sleep_for_ever()


def _wait_for_end(file: Path) -> None:
    """Of the process that writes its number there."""
    wait_until(lambda: file.exists() and file.read_text() != "", 60)
    try:
        poller = select.poll()
        poller.register(os.pidfd_open(int(file.read_text())), select.POLLIN)
        poller.poll(60_000)
    except ProcessLookupError:
        pass  # it is gone altogether


def raise_and_linger(rank: int, folder: Path) -> None:
    """Rank 1 raises first, and a thread keeps it from ending until rank 0 has raised, and ended, after it."""
    if rank == 1:
        threading.Thread(target=_outlast, args=(folder,)).start()
        raise ValueError("rank 1 was the first")
    wait_until((folder / "raised").exists, 60)
    (folder / "pid").write_text(str(os.getpid()))
    raise KeyError("rank 0 was the second")


def _outlast(folder: Path) -> None:
    wait_until(lambda: not threading.main_thread().is_alive(), 60)  # it has raised, and told so
    (folder / "raised").touch()
    wait_until(lambda: (folder / "pid").exists() and (folder / "pid").read_text() != "", 60)
    wait_until(lambda: not Path(f"/proc/{(folder / 'pid').read_text()}").exists(), 5)


def allocate(rank: int) -> None:
    held = []
    while rank == 0:
        held.append(bytearray(8 << 20))
    sleep_for_ever()


def speak(rank: int) -> None:
    print(f"line one of {rank}")
    print(f"a warning of {rank}", file=sys.stderr)
    os.write(1, f"raw {rank}\n".encode())
    libc = ctypes.CDLL(None)
    libc.puts(f"native {rank}".encode())
    print("10%\r20%\r", end="")
    print(f"no end of {rank}", end="", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def speak_without_end(rank: int) -> None:
    """More than a pipe holds."""
    for number in range(4000):
        print(f"{number:06} " + "x" * 40)


def exit_with_text(rank: int) -> None:
    sys.exit("nothing to do here")


def exit_with_nothing(rank: int) -> None:
    sys.exit()


def interrupt_self(rank: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    os.kill(os.getpid(), signal.SIGINT)
    sleep_for_ever()


def fail_in_first_attempt(rank: int, folder: Path) -> None:
    """A sum over all ranks by gloo; rank 1 is killed before its first one."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="env://")
    if rank == 1 and os.environ["RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    (folder / f"sum-{rank}").write_text(f"{total.item()} {os.environ['RESTART_COUNT']}")
    dist.destroy_process_group()


def be_hostile(rank: int, folder: str) -> None:
    """Has a child, and one in a session of its own; rank 0 hears no signal. Says so by a file with all pids."""
    if rank == 0:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    children = [subprocess.Popen(SLEEP), subprocess.Popen(SLEEP, start_new_session=True)]
    note(folder, rank, [os.getpid(), *(child.pid for child in children)])
    if rank == 0:
        PlantedFault("gil-loop")()
    sleep_for_ever()


def die_with_daemon(rank: int, folder: str) -> None:
    """Leaves a process behind that left its session, and one that is its child."""
    if rank == 1:
        child = subprocess.Popen([*SLEEP[:-1], "import os, time; os.fork(); time.sleep(600)"], start_new_session=True)
        note(folder, rank, [os.getpid(), child.pid])
        os.kill(os.getpid(), signal.SIGKILL)
    sleep_for_ever()


def have_child(rank: int, folder: str) -> None:
    """With a child in its group: what the kernel ends together with it."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # what a pipe's end would mean to it otherwise
    note(folder, rank, [os.getpid(), subprocess.Popen(SLEEP).pid])
    if rank == 0:
        PlantedFault("gil-loop")()
    sleep_for_ever()


def raise_and_stay(rank: int) -> None:
    """Raises, and never ends: a thread that is no daemon is waited for."""
    if rank == 1:
        threading.Thread(target=sleep_for_ever).start()
        raise ValueError("it stays")
    sleep_for_ever()


def note(folder: str, rank: int, pids: list[int]) -> None:
    path = Path(folder) / f"pids-{rank}"
    path.with_suffix(".new").write_text(json.dumps(pids))
    path.with_suffix(".new").rename(path)


def say_hello(rank: int) -> None:
    print("hello")
