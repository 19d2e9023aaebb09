"""WebDataset: shards of samples, one of which kills its worker the first time it is decoded."""

import io
import os
import signal
import tarfile
import tempfile

import torch
import webdataset
from torch.nn.functional import cross_entropy

from faulty import BAD, DEADLY, SIZE, indices_of, model, report


class Decode:
    def __init__(self, folder):
        self.marker = os.path.join(folder, "died")

    def __call__(self, sample):
        index = int(sample["__key__"])
        if index == DEADLY and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os.kill(os.getpid(), signal.SIGSEGV)
        if index == BAD:
            raise ValueError(f"sample {index} is bad")
        return torch.tensor([index / SIZE, 1.0, 0.0, 1.0]), int(sample["cls"])


def write_shards(folder):
    for shard in range(4):
        with tarfile.open(os.path.join(folder, f"{shard}.tar"), "w") as file:
            for index in range(shard, SIZE, 4):
                member = tarfile.TarInfo(f"{index:04}.cls")
                content = str(index % 2).encode()
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))


def main(DataLoader=torch.utils.data.DataLoader):
    layer = model()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    steps, seen = 0, []
    with tempfile.TemporaryDirectory() as folder:
        write_shards(folder)
        shards = webdataset.WebDataset(os.path.join(folder, "{0..3}.tar"), shardshuffle=False)
        samples = shards.map(Decode(folder), handler=webdataset.ignore_and_continue).batched(4)
        for features, labels in DataLoader(samples, batch_size=None, num_workers=2):
            features, labels = torch.as_tensor(features), torch.as_tensor(labels)
            steps, seen = steps + 1, seen + indices_of(features)
            optimizer.zero_grad()
            cross_entropy(layer(features), labels).backward()
            optimizer.step()
    report(steps, seen)


if __name__ == "__main__":
    main()
