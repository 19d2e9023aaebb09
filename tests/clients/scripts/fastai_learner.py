"""fastai, whose DataLoader is its own class around torch's iterator."""

from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat

from faulty import Faulty, indices_of, model, report


class Notes(Callback):
    steps, seen = 0, ()

    def after_batch(self):
        if self.training:
            self.steps += 1
            self.seen = (*self.seen, *indices_of(self.xb[0]))


def main():
    loaders = DataLoaders(
        DataLoader(Faulty(), bs=4, shuffle=True, num_workers=2), DataLoader(Faulty(), bs=4, num_workers=2)
    )
    notes = Notes()
    learner = Learner(loaders, model(), loss_func=CrossEntropyLossFlat(), cbs=[notes])
    with learner.no_logging():
        learner.fit(2, 0.1)
    report(notes.steps, notes.seen)


if __name__ == "__main__":
    main()
