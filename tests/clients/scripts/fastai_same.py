"""Compares what loaders of fastai's give with and without outlive.

Reads   nothing.
Writes  «same» for each loader, or fails.
Never   a tolerance.
"""

import random

import torch
from fastai.data.core import TfmdDL
from fastai.data.load import DataLoader

import outlive


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        return torch.tensor(float(index)), torch.rand(2), random.random()


def epochs(kind, **options):
    torch.manual_seed(5)
    random.seed(5)
    loader = kind(Noise(), bs=4, num_workers=2, **options)
    return [[part.tolist() for part in batch] for _ in range(2) for batch in loader], torch.rand(1).item()


if __name__ == "__main__":
    for kind, options in (
        (DataLoader, {"shuffle": True}),
        (DataLoader, {"drop_last": True}),
        (TfmdDL, {"shuffle": True}),
    ):
        theirs = epochs(kind, **options)
        with outlive.installed("skip") as adoption:
            ours = epochs(kind, **options)
        assert len(theirs[0]) == (10 if "drop_last" in options else 12)
        assert ours == theirs, (ours, theirs)
        assert adoption.loader_count, "it was not adopted"
        print("same")
