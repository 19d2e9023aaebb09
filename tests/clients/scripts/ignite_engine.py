"""PyTorch-Ignite."""

import torch
from ignite.engine import Engine
from torch.nn.functional import cross_entropy

from faulty import Faulty, indices_of, model, report


def main(DataLoader=torch.utils.data.DataLoader):
    layer = model()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    seen = []

    def step(engine, batch):
        features, labels = batch
        seen.extend(indices_of(features))
        optimizer.zero_grad()
        cross_entropy(layer(features), labels).backward()
        optimizer.step()

    trainer = Engine(step)
    trainer.run(DataLoader(Faulty(), batch_size=4, shuffle=True, num_workers=2), max_epochs=2)
    report(trainer.state.iteration, seen)


if __name__ == "__main__":
    main()
