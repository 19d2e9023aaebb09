"""Runs the scripts that are named with a loader of ours: passed where a library takes one, installed where it does not.

Reads   names of scripts.
Writes  their reports, a line each.
Never   changes a script.
"""

import functools
import importlib
import sys

import outlive

Skipping = functools.partial(outlive.DataLoader, faults="skip")


def passed(script):
    script.main(Skipping)


def replacing(script):
    script.main(functools.partial(outlive.DataLoader, faults="replace"))


def installed(script):
    with outlive.installed("skip") as adoption:
        script.main()
    assert adoption.incidents


def transformers(script):
    from transformers import Trainer

    class OurTrainer(Trainer):
        def get_train_dataloader(self):
            size, workers = self._train_batch_size, self.args.dataloader_num_workers
            return Skipping(self.train_dataset, batch_size=size, num_workers=workers, collate_fn=self.data_collator)

    script.main(OurTrainer)


def monai(script):
    from monai.data.utils import list_data_collate, worker_init_fn

    with outlive.installed("skip"):  # ThreadDataLoader is a class of MONAI's
        script.main(functools.partial(Skipping, collate_fn=list_data_collate, worker_init_fn=worker_init_fn))


def pyg(script):
    from torch_geometric.data import Batch

    with outlive.installed("skip"):  # NodeLoader has no room for another class
        script.main(functools.partial(Skipping, collate_fn=Batch.from_data_list))


WAYS = {
    "accelerate_loop": installed,  # prepare() makes a loader of torch's class from any other
    "ddp": replacing,
    "fastai_learner": installed,
    "monai_loader": monai,
    "pyg_loader": pyg,
    "timm_loader": installed,
    "transformers_trainer": transformers,
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        WAYS.get(name, passed)(importlib.import_module(name))
