"""Examines what it is told to: `examine.py SITUATION…`, functions of `doctor.situations`; none: only the machine.

Reads   from standard input one line: then it is where it should be (in a cgroup), and begins; AS_USER, WORKERS,
        RESERVE.
Writes  to standard output, as JSON, what was found in each situation.
Never   a thread of pytest's: it has a process to itself.
"""

from __future__ import annotations

import json
import os
import sys


def forked() -> str:
    """What a fork of this process says now."""
    try:
        pid = os.fork()
    except OSError as error:
        return str(error)
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return "done"


if __name__ == "__main__":
    from outlive.doctor.examination import examine

    sys.stdin.readline()
    user = os.environ.get("AS_USER")
    if user:
        import ctypes

        os.setuid(int(user))
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as of a program that this user started
    told: dict[str, object] = {}
    if "RESERVE" in os.environ:  # memory that is asked for and never used: only an honest kernel minds
        import mmap

        reserved = mmap.mmap(-1, int(os.environ["RESERVE"]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not sys.argv[1:]:
        told["machine"] = examine(compiled=False, workers=int(os.environ.get("WORKERS", "0"))).to_dict()
    else:
        from doctor import situations

        for name in sys.argv[1:]:
            target, options = getattr(situations, name)()
            told[name] = examine(target, **{"compiled": False, **options}).to_dict()
    if "RESERVE" in os.environ:
        told["forked"] = forked()
    print(json.dumps(told))
