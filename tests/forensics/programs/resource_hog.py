"""A little training job, some of whose samples eat memory, threads or processes until the system says no.

Reads   from standard input one line: then it is where it should be (in a cgroup), and begins.
Writes  to standard output the verdicts, as JSON.
Never   a module of the tests: it is run by its path.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

MOST_BYTES = 2 << 30
CHUNK = 16 << 20
MOST_THREADS = 300


def eat_memory() -> int:
    eaten = []
    while len(eaten) * CHUNK < MOST_BYTES:
        eaten.append(b"x" * CHUNK)
    return len(eaten)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def start_threads() -> None:
    enough = threading.Event()
    threads = [threading.Thread(target=enough.wait, daemon=True) for _ in range(MOST_THREADS)]
    begun = []
    try:
        for thread in threads:
            thread.start()
            begun.append(thread)
    finally:
        enough.set()
        for thread in begun:
            thread.join()


def start_processes() -> None:
    begun = []
    try:
        for _ in range(MOST_THREADS):
            begun.append(subprocess.Popen(["sleep", "60"]))
    finally:
        for process in begun:
            process.kill()
            process.wait()


SAMPLES = {
    "memory": {3: eat_memory, 4: eat_memory, 8: be_killed},
    "processes": {3: start_threads, 5: start_processes},
}


class Hungry:
    def __init__(self, what: str) -> None:
        self.what = what

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        act = SAMPLES[self.what].get(index)
        if act is not None:
            act()
        return index


def main(what: str, method: str, log: str) -> None:
    sys.stdin.readline()
    from outlive import DataLoader, FaultPolicy
    from outlive._forensics import surroundings

    if log == "without":
        surroundings.FIRST_PID_NAMESPACE = "not this one"
    policy = FaultPolicy(on_error="skip", retries=0, max_bad=None, max_restarts=50)
    loader: Any = DataLoader(Hungry(what), num_workers=2, multiprocessing_context=method, faults=policy)
    delivered = [int(index) for index in loader]
    told = {}
    for index, incident in loader.quarantine.items():
        verdict = incident.verdict
        told[index] = {
            **{"name": verdict.name.value, "confidence": verdict.confidence.value, "cause": verdict.cause},
            **{"facts": verdict.facts, "remedies": verdict.remedies, "indices": incident.indices},
        }
    print(json.dumps({"delivered": delivered, "told": told}))


if __name__ == "__main__":
    main(*sys.argv[1:])
