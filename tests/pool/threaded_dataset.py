"""A dataset whose module starts a thread in every process but the first: no fork can share that."""

from __future__ import annotations

import multiprocessing
import threading

from pool.kin_functions import Described

if multiprocessing.parent_process() is not None:
    threading.Thread(target=threading.Event().wait, name="from-import", daemon=True).start()


class ThreadedDescribed(Described):
    """Named here, so that a worker imports this module."""
