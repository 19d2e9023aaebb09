"""A sample that kills after it was fetched, by a thread that it started: it pays, and not the one then in hand."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from deadlines import wait_until
from outlive import DataLoader

KILLS: dict[str, Callable[[], Any]] = {
    "a segmentation fault": lambda: ctypes.string_at(0),
    "an exit": lambda: os._exit(3),
    "a kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
CULPRIT, IN_HAND = 5, 7  # both of one batch


class StartsAThread(Dataset[int]):
    """Sample 5 starts a thread that kills when sample 7 is in hand, or soon, if that one does not come."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.reached: Any = None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == CULPRIT:
            self.reached = threading.Event()
            threading.Thread(target=self._kill_later, daemon=True).start()
        elif index == IN_HAND and self.reached is not None:
            self.reached.set()
            wait_until(lambda: False)  # its end comes now
        return index

    def _kill_later(self) -> None:
        self.reached.wait(0.01)
        KILLS[self.how]()


@pytest.mark.parametrize("how", KILLS)
def test_only_the_sample_that_kills_with_a_delay_is_left_out(how):
    """The one in hand is tried by itself, and is well; then the culprit is searched among its batch."""
    loader = DataLoader(StartsAThread(how), batch_size=4, num_workers=1, multiprocessing_context="fork", faults="skip")

    assert [int(number) for batch in loader for number in batch] == [n for n in range(12) if n != CULPRIT]
    assert set(loader.quarantine) == {CULPRIT}


class CountsCalls(Dataset[Any]):
    """Each sample says how many were fetched before it. Sample 6 kills, once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == 6 and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os._exit(1)
        self.calls += 1
        return index, self.calls

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_a_try_leaves_no_trace_in_a_dataset_with_a_state(tmp_path):
    """What a sample is fetched for once more, to see whether it kills, does not count."""
    loader = DataLoader(CountsCalls(tmp_path), batch_size=4, num_workers=1, multiprocessing_context="fork")

    batches = [list(zip(*(part.tolist() for part in batch))) for batch in loader]

    assert [pair for batch in batches for pair in batch] == [(n, n + 1) for n in range(12)]
    assert loader.statistics().restarts == 1
