"""The data of all scripts here: 32 samples, one of which kills its worker, and one raises.

Reads   nothing.
Writes  nothing.
Never   outlive: these programs know nothing of it.
"""

import json
import os
import signal

import torch
from torch.utils.data import Dataset, get_worker_info

SIZE, DEADLY, BAD = 32, 11, 22


def touch(index):
    """What happens to a worker that takes this sample up."""
    if index == DEADLY and get_worker_info() is not None:
        os.kill(os.getpid(), signal.SIGSEGV)
    if index == BAD:
        raise ValueError(f"sample {index} is bad")


class Faulty(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        touch(index)
        return torch.tensor([index / SIZE, 1.0, 0.0, 1.0]), torch.tensor(index % 2)


def indices_of(features):
    """Which samples a batch is made of."""
    return (features.reshape(len(features), -1)[:, 0] * SIZE).round().int().tolist()


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)


def report(steps, seen):
    """The last line: what was trained on."""
    print(json.dumps({"steps": steps, "seen": sorted(set(seen))}), flush=True)
