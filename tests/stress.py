"""Run pytest beside two busy loops per core, then in a random order: `python tests/stress.py [PYTEST ARGUMENTS]`.

Reads:   OUTLIVE_TEST_SEED, to repeat an order; else it draws a seed, and prints it.
Writes:  what pytest prints. The exit status is 0 where both runs were green.
Never:   runs a test again that failed.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time

from outlive.testing import busy_cpus


def main(arguments: list[str]) -> int:
    seed = int(os.environ.get("OUTLIVE_TEST_SEED", random.SystemRandom().randrange(10_000)))
    loops = 2 * (os.cpu_count() or 1)
    with busy_cpus(loops):
        beside = run(f"beside {loops} busy loops", arguments)
    shuffled = run(f"in random order {seed}", [*arguments, f"--shuffle={seed}"])
    return beside or shuffled


def run(how: str, arguments: list[str]) -> int:
    begun = time.monotonic()
    print(f"stress: {how}", flush=True)
    status = subprocess.call([sys.executable, "-m", "pytest", *arguments])
    print(f"stress: {how}: exit status {status} after {time.monotonic() - begun:.0f} s", flush=True)
    return status


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)
