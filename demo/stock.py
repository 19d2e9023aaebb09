"""The «before»: the demonstration's training with stock torch's DataLoader. Run by demo.py, in a process of its own.

Reads   the image files in the folder it is given.
Writes  one line per trained batch to standard output; torch's own error to standard error.
Never   imports outlive, nor catches anything.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from digits import PLANTED, TRAIN, Digits
from training import SEED, Network, make_loader, train


def main(folder: Path) -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    dataset = Digits(folder, range(TRAIN), planted=PLANTED, augment=True)
    loader = make_loader(torch.utils.data.DataLoader, dataset)
    train(loader, Network(), lambda epoch, numbers, loss: print(epoch, len(numbers), flush=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
