"""A program with a progress bar: `progress_bar.py HOW`.

`test_progress.py` runs it in a terminal of its own, or writes its output into a pipe.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys

from outlive import Pool


def work(number: int) -> int:
    if number == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 11:
        raise ValueError("eleven")
    return number


def main(how: str) -> None:
    with Pool(2, "fork") as pool:
        if how == "all":
            print("got", len(list(pool.map(work, range(300), faults="skip", progress="all of them"))))
        elif how == "endless":
            results = pool.map(abs, itertools.count(100), ordered=False, progress=True)
            next(results)
            results.close()
        elif how == "raises":
            list(pool.starmap(work, [(11,), (12,)], progress=True))
        elif how == "interrupted":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where tests run in the background
            for number in pool.map(work, range(100, 100_000), progress=True):
                if number == 400:
                    signal.raise_signal(signal.SIGINT)
        print("end")


if __name__ == "__main__":
    main(sys.argv[1])
