"""Has a burden of each kind around it, says where, and waits to be killed."""

import contextlib
import os
import sys
import time

from outlive.testing import busy_cpus, full_disk, memory_pressure, serving

with contextlib.ExitStack() as stack:
    stack.enter_context(memory_pressure("32MiB"))
    stack.enter_context(busy_cpus(1))
    stack.enter_context(serving({"/": b""}))
    folder = stack.enter_context(full_disk("1MiB")) if os.geteuid() == 0 and "disk" in sys.argv else ""
    print(folder, flush=True)
    time.sleep(600)
