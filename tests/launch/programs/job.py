"""A launcher whose ranks are hostile: `python job.py FUNCTION METHOD JOIN FOLDER`. Ends as it is told by a signal."""

from __future__ import annotations

import signal
import sys
import time

import outlive
from launch import rank_functions

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    name, method, join, folder = sys.argv[1:]
    fn = getattr(rank_functions, name)
    outlive.spawn(fn, (folder,), 2, join=join == "join", start_method=method)
    while True:  # where it does not join, it does something else
        time.sleep(3600)  # until it is interrupted or killed
