"""A training program that knows nothing of outlive: sums up what its loader gives.

Reads   its arguments: how workers are started, and whether another Python does the same before.
Writes  the sum, and what is in the way of a sample.
Never   outlive.
"""

import os
import signal
import subprocess
import sys

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Samples(Dataset):
    """Of the main module: spawned workers must find it there."""

    def __init__(self, faulty):
        self.faulty = faulty

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if self.faulty and index == 5 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.faulty and index == 9:
            raise ValueError("sample 9 is bad")
        return torch.tensor(float(index))


if __name__ == "__main__":
    method, *more = sys.argv[1:]
    if "twice" in more:
        subprocess.run([sys.executable, __file__, method], check=True)
    loader = DataLoader(Samples("sound" not in more), batch_size=4, num_workers=2, multiprocessing_context=method)
    print(sum(float(batch.sum()) for batch in loader), flush=True)
