"""Shares texts, has two workers read them, says «ready», and waits to be ended: `reader.py METHOD`."""

from __future__ import annotations

import sys

from outlive import DataLoader, share
from share.datasets import Texts, texts

if __name__ == "__main__":
    dataset = Texts(share(texts(20_000)))
    loader = DataLoader(dataset, batch_size=100, num_workers=2, multiprocessing_context=sys.argv[1])
    batches = iter(loader)
    next(batches)
    print("ready", flush=True)
    sys.stdin.read()
