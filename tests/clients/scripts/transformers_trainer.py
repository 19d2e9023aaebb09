"""Hugging Face Transformers' Trainer, which makes its loader by itself."""

import tempfile

import torch
import transformers
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from faulty import SIZE, indices_of, model, report, touch


class Rows(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        touch(index)
        return {"features": torch.tensor([index / SIZE, 1.0, 0.0, 1.0]), "labels": index % 2}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.steps, self.seen = model(), 0, []

    def forward(self, features, labels):
        self.steps += 1
        self.seen += indices_of(features)
        logits = self.layer(features)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def main(Trainer=transformers.Trainer):
    layers = Model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=1,
            per_device_train_batch_size=4,
            dataloader_num_workers=2,
            remove_unused_columns=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        Trainer(model=layers, args=arguments, train_dataset=Rows()).train()
    report(layers.steps, layers.seen)


if __name__ == "__main__":
    main()
