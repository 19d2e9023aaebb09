"""The training of the demo with the DataLoader of stock torch. demo.py runs it in another process.

Reads:   the image files in the folder that the command line names.
Writes:  one line per trained batch to standard output, and torch's own error to standard error.
Never:   imports outlive, or catches an exception.
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
