"""timm's create_loader, with one iterator for all epochs."""

import torchvision_operators  # noqa: F401  # before timm, which imports torchvision

# isort: split
import numpy
import torch
from PIL import Image
from timm.data import create_loader
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from faulty import SIZE, report, touch


class Images(Dataset):
    """Image i is of the colour 8 × i."""

    transform = None

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        touch(index)
        image = Image.fromarray(numpy.full((8, 8, 3), 8 * index, dtype=numpy.uint8))
        return self.transform(image), index % 2


def main(create=create_loader):
    loader = create(
        Images(),
        input_size=(3, 8, 8),
        batch_size=4,
        use_prefetcher=False,
        num_workers=2,
        use_multi_epochs_loader=True,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        device=torch.device("cpu"),
    )
    layer = torch.nn.Linear(192, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    steps, seen = 0, []
    for _ in range(2):
        for images, labels in loader:
            steps += 1
            seen += (images.mean((1, 2, 3)) * 255 / 8).round().int().tolist()
            optimizer.zero_grad()
            cross_entropy(layer(images.flatten(1)), labels).backward()
            optimizer.step()
    report(steps, seen)


if __name__ == "__main__":
    main()
