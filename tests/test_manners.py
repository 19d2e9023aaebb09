"""Who gives way: workers that only the trainer wakes do, those that wait for something else do not."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from torch.utils.data import Dataset

import outlive
from outlive._worker.manners import Manners

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="nobody gives way on this system")


class SchedulingPolicies(Dataset[Any]):
    """Each sample is the scheduling policy of the worker that made it."""

    def __init__(self, waits: bool, chosen: int | None = None) -> None:
        self.waits = waits
        self.chosen = chosen

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> int:
        if self.chosen is not None:
            os.sched_setscheduler(0, self.chosen, os.sched_param(0))
        if self.waits:
            time.sleep(0.0005)  # as a read from a disk takes
        return os.sched_getscheduler(0)


def policies(dataset: SchedulingPolicies) -> list[int]:
    loader = outlive.DataLoader(dataset, batch_size=4, num_workers=1)
    return [int(policy) for batch in loader for policy in batch]


def test_a_worker_that_waits_for_the_trainer_alone_gives_way():
    assert policies(SchedulingPolicies(waits=False))[-1] == os.SCHED_BATCH


def test_a_worker_that_waits_for_something_else_is_back_at_once():
    assert set(policies(SchedulingPolicies(waits=True))) == {os.SCHED_OTHER}


def test_a_policy_of_the_user_stays():
    assert set(policies(SchedulingPolicies(waits=False, chosen=os.SCHED_IDLE))) == {os.SCHED_IDLE}


def test_scheduling_changes_with_what_a_worker_does():
    """In this process: its policy is put back."""
    before = os.sched_getscheduler(0)
    if before != os.SCHED_OTHER:
        pytest.skip("the tests run under another policy already")
    seen = []
    try:
        manners = Manners()
        for waits in (0, 5, 0):
            for _ in range(32):
                for _ in range(waits):
                    time.sleep(0.0001)  # each is one wait
                manners.task_done()
            seen.append(os.sched_getscheduler(0))
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))

    assert seen == [os.SCHED_BATCH, os.SCHED_OTHER, os.SCHED_BATCH]
