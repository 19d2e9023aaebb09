"""Hugging Face Accelerate."""

import accelerate
import torch
from torch.nn.functional import cross_entropy

from faulty import Faulty, indices_of, model, report


def main(DataLoader=torch.utils.data.DataLoader):
    accelerator = accelerate.Accelerator(cpu=True)
    layer = model()
    layer, optimizer, loader = accelerator.prepare(
        layer,
        torch.optim.SGD(layer.parameters(), 0.1),
        DataLoader(Faulty(), batch_size=4, shuffle=True, num_workers=2),
    )
    steps, seen = 0, []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for features, labels in loader:
            steps, seen = steps + 1, seen + indices_of(features)
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(layer(features), labels))
            optimizer.step()
    report(steps, seen)


if __name__ == "__main__":
    main()
