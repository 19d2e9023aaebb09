"""A program with tasks that do not end, and many behind them: `python ending.py METHOD HOW FOLDER`."""

import contextlib
import os
import signal
import sys
import threading
import time

from outlive import Pool
from pool import task_functions

PENDING = 50


def interrupt_once_refused(pool: Pool) -> None:
    """Ctrl-C, as soon as the main thread waits for the pool to end."""
    while True:
        try:
            pool.submit(abs, 1)
        except RuntimeError:
            os.kill(os.getpid(), signal.SIGINT)
            return
        time.sleep(0.005)  # between two looks


def interrupt() -> None:
    time.sleep(0.05)  # any moment will do
    os.kill(os.getpid(), signal.SIGINT)


def main(method: str, how: str, folder: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where tests run in the background
    pool = Pool(2, method)
    with pool if "block" in how else contextlib.nullcontext():
        tasks = [pool.submit(task_functions.stay, folder, n) for n in range(2)]
        while len(os.listdir(folder)) < 2:
            time.sleep(0.005)  # until both have begun
        tasks += [pool.submit(task_functions.note, folder, n) for n in range(2, PENDING)]
        if "waits" in how:
            threading.Thread(target=interrupt_once_refused, args=(pool,), daemon=True).start()
        elif "interrupt" in how:
            threading.Thread(target=interrupt, daemon=True).start()
            tasks[-1].result()
        else:
            raise ValueError("the program failed")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
