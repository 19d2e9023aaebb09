"""Errors of datasets, samplers and start-up are those of torch's loader.

Reads   what both loaders deliver for the same arguments and the same seed, on `loader_inputs`.
Writes  nothing.
Never   a tolerance.
"""

from __future__ import annotations

import pytest
import torch

import loader_inputs as inputs
from deadlines import Deadline
from equality.assertions import Arguments, assert_same
from loader_comparison import OURS, TORCH, Raised, differences, raised_by, run

FAILING: dict[str, Arguments] = {
    "map": lambda: {"dataset": inputs.Fails(inputs.ERRORS)},
    "map, batches of 3": lambda: {"dataset": inputs.Fails(inputs.ERRORS, 40), "batch_size": 3},
    "map, no batches": lambda: {"dataset": inputs.Fails(inputs.ERRORS, 20), "batch_size": None},
    "map, __getitems__": lambda: {"dataset": inputs.FailsMany(inputs.ERRORS, 40), "batch_size": 3},
    "map, persistent": lambda: {
        "dataset": inputs.Fails(inputs.ERRORS, 20),
        "batch_size": 2,
        "persistent_workers": True,
    },
    "collate": lambda: {"dataset": inputs.Noisy(), "batch_size": 3, "collate_fn": inputs.FailingCollate(4, 13)},
    "stream": lambda: {"dataset": inputs.FailingStream(9, 14, errors=inputs.STREAM_ERRORS), "batch_size": 3},
    "stream, no batches": lambda: {
        "dataset": inputs.FailingStream(9, 14, errors=inputs.STREAM_ERRORS),
        "batch_size": None,
    },
    "stream, persistent": lambda: {
        "dataset": inputs.FailingStream(9, 14, errors=inputs.STREAM_ERRORS),
        "batch_size": 3,
        "persistent_workers": True,
    },
    "stream that is a generator": lambda: {
        "dataset": inputs.FailingGenerator(9, 14, errors=inputs.STREAM_ERRORS),
        "batch_size": 3,
    },
    "collate of a stream": lambda: {
        "dataset": inputs.Stream(9, 14),
        "batch_size": 3,
        "collate_fn": inputs.FailingCollate(4, 107),
    },
    "collate of a stream raises StopIteration": lambda: {
        "dataset": inputs.Stream(9, 14),
        "batch_size": 3,
        "collate_fn": inputs.FailingCollate(4, kind=StopIteration),
    },
}


@pytest.mark.parametrize("arguments", FAILING.values(), ids=FAILING)
def test_errors_are_torchs_and_what_follows_is_too(arguments):
    """The same exception at the same place; a consumer that goes on gets torch's batches, random numbers included."""
    ours, _ = assert_same(arguments, num_workers=2, epochs=2)

    assert len(ours.loader.incidents) == len(ours.raised)


@pytest.mark.parametrize("dataset", [inputs.Noisy(), inputs.Stream(5, 5)], ids=["map", "stream"])
def test_the_first_error_is_torchs_when_worker_init_fn_raises(dataset):
    """worker_init_fn's own exception reaches the trainer, with torch's text."""

    def first_error(kind):
        iterator = iter(kind(dataset, num_workers=1, worker_init_fn=inputs.refuse_to_start))
        raised = raised_by(next, iterator)
        iterator._shutdown_workers()  # torch's would wait five seconds if the collector had to find it
        return raised

    assert first_error(OURS) == first_error(TORCH)


@pytest.mark.parametrize("in_order", [True, False])
def test_batches_come_before_the_error_when_a_sampler_raises(in_order):
    """What the sampler gave before it raised is delivered first, as with num_workers=0. Torch loses it."""
    arguments = {"batch_size": 2, "num_workers": 2, "in_order": in_order}
    ours = run(OURS, lambda: {"dataset": inputs.Noisy(), "sampler": inputs.FailingSampler(14), **arguments})
    healthy = run(TORCH, lambda: {"dataset": inputs.Noisy(), "sampler": list(range(14)), **arguments})
    inline = run(TORCH, lambda: {"dataset": inputs.Noisy(), "sampler": inputs.FailingSampler(14), "batch_size": 2})

    steps = ours.epochs[0]
    assert isinstance(steps[-1], Raised)
    assert steps[-1] == inline.epochs[0][-1]
    if in_order:
        assert differences(steps[:-1], healthy.epochs[0]) == []
    assert len(steps) == 8


def test_an_epoch_goes_on_when_a_sampler_can_go_on_after_its_error():
    """The error takes the place of what the sampler did not give; the next call draws again."""
    arguments = {"batch_size": None, "num_workers": 2}
    ours = run(OURS, lambda: {"dataset": inputs.Noisy(), "sampler": inputs.StumblingSampler(9, {4, 5}), **arguments})
    healthy = run(TORCH, lambda: {"dataset": inputs.Noisy(), "sampler": [0, 1, 2, 3, 6, 7, 8], **arguments})

    steps = ours.epochs[0]
    assert [step.text for step in steps if isinstance(step, Raised)] == ["nothing at 4", "nothing at 5"]
    assert [isinstance(step, Raised) for step in steps] == [False] * 4 + [True] * 2 + [False] * 3
    assert differences(ours.delivered, healthy.delivered) == []


def patiently(iterator):
    """The next batch, however often the wait for it times out; a minute at most."""
    deadline = Deadline(60)
    while True:
        try:
            return next(iterator)
        except RuntimeError as error:
            if "timed out" not in str(error) or deadline.passed:
                raise


def test_a_timeout_is_torchs_and_the_late_batch_still_comes(tmp_path):
    """timeout=: RuntimeError in torch's words, each time it passes; the batch is not lost by it."""

    def steps(kind, folder):
        folder.mkdir()
        torch.manual_seed(1)
        iterator = iter(kind(inputs.Gated(folder / "open"), batch_size=2, num_workers=1, timeout=0.4))
        before = patiently(iterator)
        late = raised_by(next, iterator)
        (folder / "open").touch()
        return before, late, [patiently(iterator) for _ in range(2)]

    assert differences(steps(OURS, tmp_path / "ours"), steps(TORCH, tmp_path / "torch")) == []
