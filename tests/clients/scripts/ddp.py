"""Two ranks on gloo under torchrun, with DistributedSampler and DistributedDataParallel."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from faulty import Faulty, indices_of, model, report


def main(DataLoader=torch.utils.data.DataLoader):
    dist.init_process_group("gloo")
    layer = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    data = Faulty()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2, persistent_workers=True)
    steps, seen = 0, []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for features, labels in loader:
            steps, seen = steps + 1, seen + indices_of(features)
            optimizer.zero_grad()
            cross_entropy(layer(features), labels).backward()
            optimizer.step()
    everywhere = [None, None]
    dist.all_gather_object(everywhere, (steps, seen, layer.module.weight.tolist()))
    assert everywhere[0][0] == everywhere[1][0], "ranks have made different numbers of steps"
    assert everywhere[0][2] == everywhere[1][2], "ranks have different weights"
    if dist.get_rank() == 0:
        report(steps, [index for _, indices, _ in everywhere for index in indices])
    del loader
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
