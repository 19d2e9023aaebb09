"""One rank of a job: a loader with faults, and a collective for each batch. `tests/test_ranks.py` starts two.

rank_program.py RANK MEETING_FILE MODE
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

import outlive
from outlive.loader.agreeing import RankWatch

SAMPLES = 24
BATCH = 2
BAD = {0, 1, 8, 9, 13, 22, 23}  # of rank 1: the first batch, the last one, one in the middle, and one sample alone


def fetch(index: int, deadly: bool) -> torch.Tensor:
    if index in BAD:
        if deadly and index == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(f"sample {index} is bad")
    return torch.tensor([float(index)])


class Samples(Dataset[torch.Tensor]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return fetch(index, deadly=True) if self.rank == 1 else torch.tensor([float(index)])


class Inline(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        return fetch(index, deadly=False) if self.rank == 1 else torch.tensor([float(index)])


class Stream(IterableDataset[torch.Tensor]):
    """Its iterator survives what it raises."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[torch.Tensor]:
        return _Steps(self.rank)


class _Steps(Iterator[torch.Tensor]):
    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, -1

    def __next__(self) -> torch.Tensor:
        self.at += 1
        if self.at == SAMPLES:
            raise StopIteration
        return fetch(self.at, deadly=False) if self.rank == 1 else torch.tensor([float(self.at)])


def loader_of(mode: str, rank: int) -> outlive.DataLoader[torch.Tensor]:
    kind = {"stream": Stream, "inline": Inline}.get(mode, Samples)
    lone = mode in ("gives-up", "gives-up-apart", "caught")
    policy = outlive.FaultPolicy(
        on_error="skip",
        ranks="apart" if mode == "apart" else "agree",
        ranks_grace_s=1.0,
        max_bad=0 if lone else None,
    )
    return outlive.DataLoader(kind(rank), batch_size=BATCH, num_workers=0 if mode == "inline" else 1, faults=policy)


def wait_for_the_other(path: str) -> None:
    deadline = time.monotonic() + 60
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.01)  # between two looks


def main() -> None:
    rank, meeting, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    logging.basicConfig(level=logging.WARNING)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    total, seen = torch.zeros(1), []
    try:
        for batch in loader_of(mode, rank):
            seen.append(batch.flatten().tolist())
            if mode == "raises" and rank == 1 and len(seen) == 3:
                raise KeyError("a bug in the training step")
            if mode == "killed" and rank == 1 and len(seen) == 3:
                assert RankWatch.bond is not None
                assert RankWatch.bond.await_meeting(60)
                os.kill(os.getpid(), signal.SIGKILL)
            if mode == "gives-up-apart":
                if rank == 0:
                    assert RankWatch.bond is not None
                    assert RankWatch.bond.await_fallen(60)
            elif mode != "apart":
                dist.all_reduce(total)
    except outlive.TooManyFaultsError:
        if mode == "caught":
            wait_for_the_other(meeting + ".ended")  # alive, and in no collective
        raise
    print(f"rank {rank}: {len(seen)} batches {seen}", flush=True)
    if mode == "done" and rank == 0:
        wait_for_the_other(meeting + ".ended")  # the other one leaves first
        print("rank 0 is well", flush=True)


if __name__ == "__main__":
    main()
