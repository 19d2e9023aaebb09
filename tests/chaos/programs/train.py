"""A program that knows nothing of outlive: two epochs over a map-style loader, then one over a stream.

Arguments: «map» or «both» (with a loader without workers, too); «fail» to fail by itself; «idle» to load nothing;
«wait» to wait for a minute.
"""

import sys
import time

if "wait" in sys.argv:
    time.sleep(60)
if "fail" in sys.argv:
    sys.exit("it fails by itself")
if "idle" in sys.argv:
    sys.exit()

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info


class Numbers(Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, index):
        return torch.tensor([index])


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for number in range(info.id, 60, info.num_workers):
            yield torch.tensor([number])


def main():
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2, generator=order)
    total = sum(int(batch.sum()) for _ in range(2) for batch in loader)
    if "both" in sys.argv:
        total += sum(int(batch.sum()) for batch in DataLoader(Stream(), batch_size=4, num_workers=2))
        total += sum(int(batch.sum()) for batch in DataLoader(Numbers()))
    print(total)


if __name__ == "__main__":
    main()
