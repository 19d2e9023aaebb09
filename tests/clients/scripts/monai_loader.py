"""MONAI: its DataLoader, and its ThreadDataLoader, over a dataset with transforms."""

import torch
from monai.data import DataLoader, Dataset, ThreadDataLoader
from monai.transforms import Compose, Lambda, RandGaussianNoise
from torch.nn.functional import cross_entropy

from faulty import SIZE, indices_of, model, report, touch


def load(index):
    touch(index)
    return torch.tensor([index / SIZE, 1.0, 0.0, 1.0])


def main(DataLoader=DataLoader):
    data = Dataset(list(range(SIZE)), Compose([Lambda(load), RandGaussianNoise(prob=1.0, std=1e-4)]))
    layer = model()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    steps, seen = 0, []
    for kind in (DataLoader, ThreadDataLoader):
        for features in kind(data, batch_size=4, shuffle=True, num_workers=2):
            steps, seen = steps + 1, seen + indices_of(features)
            optimizer.zero_grad()
            cross_entropy(layer(features.as_tensor()), torch.zeros(len(features), dtype=torch.long)).backward()
            optimizer.step()
    few = Dataset(list(range(8)), Lambda(load))
    threaded = ThreadDataLoader(few, batch_size=4, num_workers=2, use_thread_workers=True)
    assert sorted(i for features in threaded for i in indices_of(features)) == list(range(8))
    report(steps, seen)


if __name__ == "__main__":
    main()
