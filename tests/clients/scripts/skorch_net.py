"""skorch, which makes its loaders by itself."""

import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback

from faulty import Faulty, indices_of, model, report


class Notes(Callback):
    steps, seen = 0, ()

    def on_batch_end(self, net, batch=None, training=False, **_):
        if training:
            self.steps += 1
            self.seen = (*self.seen, *indices_of(batch[0]))


def main(DataLoader=torch.utils.data.DataLoader):
    notes = Notes()
    net = NeuralNetClassifier(
        model(),
        criterion=torch.nn.CrossEntropyLoss,
        max_epochs=2,
        batch_size=4,
        iterator_train=DataLoader,
        iterator_train__num_workers=2,
        iterator_train__shuffle=True,
        train_split=None,
        callbacks=[("notes", notes)],
        verbose=0,
        classes=[0, 1],
    )
    net.fit(Faulty(), y=None)
    report(notes.steps, notes.seen)


if __name__ == "__main__":
    main()
