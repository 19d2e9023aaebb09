"""Keeps batches until the trainer has no address space for another, lets go of them, and takes the rest.

`cells`: batches of a megabyte, in cells. `messages`: texts of a megabyte, which travel in memory of their own, too.
`deaths`: as cells, and the workers are killed before there is room again.
"""

import os
import resource
import signal
import sys

import torch

import outlive
from transport import batch_values

BATCHES = 300
ROOM = 100 << 20

if __name__ == "__main__":
    if sys.argv[1] != "messages":
        samples = [torch.full((1 << 20,), i % 251, dtype=torch.uint8) for i in range(BATCHES)]
    else:
        samples = [chr(ord("a") + i % 26) * (1 << 20) for i in range(BATCHES)]
    loader = outlive.DataLoader(
        batch_values.ReadySamples(*samples),
        batch_size=None,
        collate_fn=batch_values.as_is,
        num_workers=2,
        faults="skip",
    )
    batches = iter(loader)
    kept = [next(batches)]
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, resource.RLIM_INFINITY))
    try:
        while True:
            kept.append(next(batches))
    except MemoryError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    pids = {slot.pid for slot in loader.statistics().slots}
    if sys.argv[1] == "deaths":
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    assert 10 < len(kept) < BATCHES, len(kept)
    got = [str(batch[0]) for batch in kept]
    kept.clear()
    got += [str(batch[0]) for batch in batches]
    assert got == [str(sample[0]) for sample in samples], len(got)
    assert sys.argv[1] == "deaths" or {slot.pid for slot in loader.statistics().slots} <= pids | {None}
    print(f"{len(got)} batches, {len(loader.incidents)} incidents, {len(loader.quarantine)} left out")
    print(message)
