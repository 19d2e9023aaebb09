"""A job with faults, at the pace of whoever writes to its standard input: `program.py plain|hostile|here`.

Reads   standard input: a line has it deliver a batch, the end of it ends the job.
Writes  «ready» once its first batch is there; then «at N» after each batch.
Never   runs on by itself.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

import outlive

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
RAISES, DIES = 9, 13


class Faulty(torch.utils.data.Dataset[int]):
    """Sample 9 raises, 13 ends its worker; both only after the first batch was delivered. It outlasts any deadline."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        if index == RAISES:
            raise ValueError(self.message)
        if index == DIES:
            ctypes.string_at(0)
        return index


def main(what: str) -> None:
    dataset: Any = Faulty("no such picture")
    describe = None
    if what == "hostile":
        kind = type(HOSTILE, (Faulty,), {"__module__": __name__})
        globals()[HOSTILE] = kind
        dataset = kind(HOSTILE)
        describe = _hostile
    workers: dict[str, Any] = {
        **{"num_workers": 1, "prefetch_factor": 1, "memory_limit": "2GiB", "multiprocessing_context": "fork"},
    }
    if what == "here":
        dataset, workers = torch.utils.data.Subset(dataset, range(DIES)), {"num_workers": 0}
    loader = outlive.DataLoader(dataset, batch_size=2, faults="skip", describe=describe, **workers)
    batches = iter(loader)
    next(batches)
    print("ready", flush=True)
    for _ in sys.stdin:
        batch = next(batches, None)
        if batch is None:
            break
        print(f"at {batch.tolist()}", flush=True)


def _hostile(index: int) -> str:
    return f"{HOSTILE}{index}"


if __name__ == "__main__":
    main(sys.argv[1])
