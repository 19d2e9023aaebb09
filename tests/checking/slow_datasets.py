"""Samples that note that they were tried, and from CHECK_HOLD on wait for a kill.

Reads   CHECK_LOG, CHECK_HOLD.
Writes  the log, a line per sample.
Never   ends by itself while it is held.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset, get_worker_info

_HOLD = int(os.environ.get("CHECK_HOLD", "1000"))


def fetch(number: int) -> int:
    if number >= _HOLD:
        time.sleep(3600)  # until somebody kills us
    if number == 3:
        raise ValueError("three is bad")
    with open(os.environ["CHECK_LOG"], "a") as log:
        log.write(f"{number}\n")
    return number


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> int:
        return fetch(index)


class SlowStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        return map(fetch, range(info.id, 200, info.num_workers))


slow = Slow()
slow_stream = SlowStream()
