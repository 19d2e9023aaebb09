"""Hugging Face Datasets: a table whose transform fails, and a stream whose epoch is set."""

import datasets
import torch

from faulty import SIZE, report, touch

datasets.disable_progress_bars()


def decode(rows):
    for index in rows["index"]:
        touch(index)
    return {"index": torch.tensor(rows["index"])}


def main(DataLoader=torch.utils.data.DataLoader):
    table = datasets.Dataset.from_dict({"index": list(range(SIZE))})
    loader = DataLoader(table.with_transform(decode), batch_size=4, num_workers=2)
    steps, seen = 0, []
    for rows in loader:
        steps, seen = steps + 1, seen + rows["index"].tolist()

    stream = table.to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=8)
    loader = DataLoader(stream, batch_size=4, num_workers=2, persistent_workers=True)
    orders = set()
    for epoch in range(3):
        stream.set_epoch(epoch)
        orders.add(tuple(index for rows in loader for index in rows["index"].tolist()))
    assert len(orders) == 3, "workers that persist have not seen the epoch"
    report(steps, seen)


if __name__ == "__main__":
    main()
