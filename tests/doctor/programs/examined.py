"""Examines what it is told to: `examined.py SITUATION…`, functions of `doctor.situations`; none: only the machine.

Reads   from standard input one line: then it is where it should be (in a cgroup), and begins.
Writes  to standard output, as JSON, what was found in each situation.
Never   a thread of pytest's: it has a process to itself.
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    from holdfast.doctor.examination import examine

    sys.stdin.readline()
    user = os.environ.get("AS_USER")
    if user:
        import ctypes

        os.setuid(int(user))
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as of a program that this user started
    told = {}
    if not sys.argv[1:]:
        told["machine"] = examine(compiled=False, workers=int(os.environ.get("WORKERS", "0"))).to_dict()
    else:
        from doctor import situations

        for name in sys.argv[1:]:
            target, options = getattr(situations, name)()
            told[name] = examine(target, **{"compiled": False, **options}).to_dict()
    print(json.dumps(told))
