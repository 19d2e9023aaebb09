"""A program whose import takes for ever in every process but itself: `python importing_program.py METHOD FOLDER`.

Each process that imports it leaves its pid in FOLDER, and does not come further.
"""

import os
import sys
import time

if __name__ != "__main__":
    folder = os.environ["IMPORTING_FOLDER"]
    open(os.path.join(folder, str(os.getpid())), "w").close()
    time.sleep(20)  # this is the import of something large: much longer than a test waits
    open(os.path.join(folder, "came to its end"), "w").close()

import outlive


def rank(number: int) -> None:
    pass


if __name__ == "__main__":
    front_end, method = sys.argv[1:]
    if front_end == "spawn":
        outlive.spawn(rank, (), 1, start_method=method)
    else:
        with outlive.Pool(1, method) as pool:
            pool.submit(abs, -3).result()
