"""A training job that ends in the way it is told to: `python program.py ENDING METHOD FOLDER`.

Worker 0 gets stuck in a native loop that holds the GIL and ignores every signal it can; worker 1 has started a
child, a child in a session of its own, and a daemon. The job says «ready» once all of that is so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

from outlive import DataLoader, FaultPolicy

_SPIN = {"x86_64": b"\xeb\xfe", "aarch64": b"\x00\x00\x00\x14"}[platform.machine()]
_SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def spin_with_gil() -> None:
    """Loop in machine code for ever, with the GIL held."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_SPIN)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    ctypes.PYFUNCTYPE(None)(address)()


def start_children() -> None:
    subprocess.Popen(_SLEEP)
    subprocess.Popen(_SLEEP, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(_SLEEP[0], _SLEEP)
        os._exit(0)


class Hostile(Dataset):
    def __init__(self, folder: Path, stuck: bool) -> None:
        self.folder = folder
        self.stuck = stuck

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2 and self.stuck:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            (self.folder / "stuck").touch()
            spin_with_gil()
        if index == 3:
            start_children()
            (self.folder / "children").touch()
        return torch.tensor(index)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.01)


def main(ending: str, method: str, folder: Path) -> None:
    stuck = ending != "return"
    loader = DataLoader(
        Hostile(folder, stuck), num_workers=2, multiprocessing_context=method, faults=FaultPolicy(sample_timeout=None)
    )
    iterator = iter(loader)
    next(iterator)
    wait_for(folder / "children")
    if stuck:
        wait_for(folder / "stuck")
    say = sys.stdout
    say.write("ready\n")
    say.flush()
    sys.stdin.readline()
    if ending == "return":
        for _ in iterator:
            pass
    elif ending == "del":
        del iterator
    elif ending == "exception":
        raise ValueError("the training step failed")
    elif ending == "os_exit":
        os._exit(7)
    elif ending == "exit":
        sys.exit(0)  # with the iterator alive
    elif ending == "bystander":
        # Somebody forks the trainer, and the copy lives on: it must not keep anything of ours alive.
        if os.fork() == 0:
            (folder / "bystander").write_text(str(os.getpid()))
            time.sleep(120)  # outlives every deadline of the test, which kills it
            os._exit(0)
        wait_for(folder / "bystander")
        say.write("forked\n")
        say.flush()
        time.sleep(600)
    else:
        next(iterator)  # for ever: signals are sent to us


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
