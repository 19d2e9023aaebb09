"""PyTorch Lightning: its Trainer, two epochs with workers that persist, and its Fabric."""

import lightning
import torch
from torch.nn.functional import cross_entropy

from faulty import Faulty, indices_of, model, report


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.steps, self.seen = model(), 0, []

    def training_step(self, batch, _):
        features, labels = batch
        self.steps += 1
        self.seen += indices_of(features)
        return cross_entropy(self.layer(features), labels)

    def validation_step(self, batch, _):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def main(DataLoader=torch.utils.data.DataLoader):
    loader = DataLoader(Faulty(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    module = Module()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    lightning.Trainer(max_epochs=2, accelerator="cpu", **quiet).fit(
        module, loader, DataLoader(Faulty(), batch_size=4, num_workers=1)
    )
    fabric(DataLoader, module)
    report(module.steps, module.seen)


def fabric(DataLoader, module):
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    layer = model()
    layer, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), 0.1))
    seen = []
    for features, labels in fabric.setup_dataloaders(DataLoader(Faulty(), batch_size=4, shuffle=True, num_workers=2)):
        seen += indices_of(features)
        optimizer.zero_grad()
        fabric.backward(cross_entropy(layer(features), labels))
        optimizer.step()
    assert sorted(seen) == sorted(set(module.seen))


if __name__ == "__main__":
    main()
