"""A program: trains a tiny model once undisturbed and once while it is killed again and again, and prints both ends.

Reads   its arguments: a folder, a seed for the moments of the kills, how many kills.
Writes  checkpoints and positions into the folder; one line of JSON.
Never   restores anything but what a trainer has on disk after a SIGKILL.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import outlive

EPOCHS, BATCHES, EVERY = 8, 24, 4
# So many words after the one that its killer waits for, a process waits for its death. Words up to 34 make no more than
# three checkpoints, up to 16 no more than one: 20 kills leave some of the 48 undone, however late they come.
WORDS_LEFT = 18


class Points(Dataset):
    """Augmented by all three generators of a worker."""

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(5) + random.random() + np.random.rand() + index


def train(folder: Path, workers: int, tell: Any) -> str:
    """One life of the trainer: from its last checkpoint to the end. Returns the weights."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
    momenta = [torch.zeros_like(weights) for weights in model.parameters()]  # torch.optim takes seconds to import
    loader = outlive.DataLoader(
        Points(),
        batch_size=2,
        shuffle=True,
        num_workers=workers,
        journal_position=folder / "position",
        journal_every=EVERY,
    )
    step = begun = 0
    checkpoint = folder / "checkpoint"
    if checkpoint.exists():
        kept = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(kept["model"])
        momenta = kept["momenta"]
        step, begun = kept["step"], kept["epoch"]
        loader.load_position(batches=step, epoch=begun)
        torch.set_rng_state(kept["torch"])
        random.setstate(kept["random"])
        np.random.set_state(kept["numpy"])
    for epoch in range(begun, EPOCHS):
        for batch in loader:
            tell()
            model.zero_grad()
            model(batch).pow(2).mean().backward()
            with torch.no_grad():
                for weights, momentum in zip(model.parameters(), momenta, strict=True):
                    weights -= 1e-4 * momentum.mul_(0.9).add_(weights.grad)
            step += 1
            if step % EVERY == 0:
                kept = {"model": model.state_dict(), "momenta": momenta, "step": step, "epoch": epoch}
                kept |= {"torch": torch.get_rng_state(), "random": random.getstate(), "numpy": np.random.get_state()}
                torch.save(kept, folder / "new")
                tell()
                os.replace(folder / "new", checkpoint)
            tell()
    return json.dumps([weight.hex() for part in model.parameters() for weight in part.flatten().tolist()])


def live(folder: Path, workers: int, kill_after: int | None = None, wait_s: float | None = None) -> str | None:
    """A process that trains; None: it was killed after so many words of its progress: at once, or a moment later."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = itertools.count(1)

        def tell() -> None:
            word = next(said)
            if word == kill_after and wait_s is None:
                os.kill(os.getpid(), signal.SIGKILL)
            if kill_after is not None and word == kill_after + WORDS_LEFT:
                signal.pause()
            os.write(writing, b".")

        try:
            (folder / "weights").write_text(train(folder, workers, tell))
        finally:
            os._exit(0)
    os.close(writing)
    heard = 0
    while word := os.read(reading, 1):
        heard += len(word)
        if heard == kill_after and wait_s is not None:
            time.sleep(wait_s)  # any moment will do: this is what makes it a random one
            os.kill(pid, signal.SIGKILL)
            break
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    return None if os.WIFSIGNALED(status) else (folder / "weights").read_text()


def main() -> None:
    folder, seed, kills, workers = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    chance = random.Random(seed)
    (folder / "undisturbed").mkdir()
    (folder / "killed").mkdir()
    undisturbed = live(folder / "undisturbed", workers)
    done, weights = 0, None
    while done < kills and weights is None:
        wait_s = chance.uniform(0, 0.01) if done % 2 else None
        weights = live(folder / "killed", workers, chance.randint(1, 16), wait_s)
        done += weights is None
    weights = weights or live(folder / "killed", workers)
    left = sorted(path.name for path in (folder / "killed").iterdir())
    print(json.dumps({"kills": done, "undisturbed": undisturbed, "killed": weights, "left": left}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
