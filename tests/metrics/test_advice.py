"""The line of advice, as a job at work gets it."""

from __future__ import annotations

import time

import pytest

import outlive
from deadlines import Deadline

FETCH_S = 0.02  # what a store takes to answer


class SlowStore:
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> int:
        time.sleep(FETCH_S)  # the store that is waited for
        return index


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_more_workers_are_advised_while_the_trainer_waits_for_them_and_not_when_they_keep_up(method: str) -> None:
    loader = outlive.DataLoader(SlowStore(), num_workers=2, multiprocessing_context=method)
    batches = iter(loader)
    deadline = Deadline(60)

    while "more workers (now 2)" not in loader.statistics().advice:
        assert not deadline.passed, f"nothing was advised: {loader.statistics()}"
        next(batches)
    while loader.statistics().advice:
        assert not deadline.passed, f"still advised: {loader.statistics()}"
        next(batches)
        time.sleep(FETCH_S * 0.55)  # a step of the training, as long as two workers need for a batch
