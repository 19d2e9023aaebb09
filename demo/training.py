"""A small convolutional network and the loop that trains it with any loader.

Reads:   batches from a loader.
Writes:  the weights of the model, and calls a listener after each batch.
Never:   knows the class of the loader: stock torch and outlive run the same loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

EPOCHS = 2
BATCH_SIZE = 16
SEED = 0


def make_loader(kind: Callable[..., Any], dataset: Any, **extra: Any) -> Any:
    """Return the loader of the demo. Only the class differs, and `faults=` if the class takes it."""
    generator = torch.Generator().manual_seed(SEED)
    return kind(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=2, generator=generator, **extra)


class Network(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU()),
            *(nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(48 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
        )


def train(loader: Any, network: Network, saw: Callable[[int, list[int], float], None]) -> list[float]:
    """Train for EPOCHS epochs and return the accuracy per epoch.

    `saw` receives the epoch, the sample numbers and the loss of each batch.
    """
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    accuracies = []
    for epoch in range(EPOCHS):
        network.train()
        right = seen = 0
        for pixels, labels, numbers in loader:
            optimizer.zero_grad()
            output = network(pixels)
            loss = nn.functional.cross_entropy(output, labels)
            loss.backward()
            optimizer.step()
            right += int((output.argmax(1) == labels).sum())
            seen += len(labels)
            saw(epoch, numbers.tolist(), float(loss.detach()))
        accuracies.append(right / seen)
    return accuracies


@torch.no_grad()
def accuracy(loader: Any, network: Network) -> float:
    network.eval()
    right = seen = 0
    for pixels, labels, _ in loader:
        right += int((network(pixels).argmax(1) == labels).sum())
        seen += len(labels)
    return right / seen
