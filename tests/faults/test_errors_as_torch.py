"""Exceptions of odd classes: what reaches the trainer is what torch's own loader would raise, or better."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from faults.expectations import BAD, BAD_BATCH, all_batches, rows, without_bad
from faults.faulty_datasets import SIZE, FaultPlacement, Samples, all_indices, arguments, make_loader, outcomes_of
from faults.table import Fault, FaultSite, Moment, PlantedFault, raise_local_class

GETITEM = FaultSite(Moment.GETITEM)


def known_to_torch(fault: Fault, site: FaultSite) -> bool:
    """Torch's own loader waits for ever when the class of an exception or a result cannot be pickled."""
    return not fault.kills and not fault.spares and fault.fire is not raise_local_class


@rows([GETITEM, FaultSite(Moment.COLLATE), FaultSite(Moment.NEXT, stream=True)], known_to_torch)
def test_type_and_text_are_torch_s_when_an_exception_is_raised(fault: Fault, site: FaultSite) -> None:
    """Same type; same first line, with the worker's number; same last line, with the original error."""
    placement = FaultPlacement.at(site.moment, {BAD: PlantedFault(fault.name)})
    theirs = outcomes_of(torch.utils.data.DataLoader(**arguments(placement)))[BAD_BATCH]

    ours = outcomes_of(make_loader(placement))[BAD_BATCH]

    assert type(ours) is type(theirs)
    assert str(ours).splitlines()[0] == str(theirs).splitlines()[0]
    assert str(ours).splitlines()[-1] == str(theirs).splitlines()[-1]


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class FrozenError(Exception):
    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class OnlyInWorkers(Exception):
    """Cannot be made in the trainer."""

    def __init__(self, *arguments: object) -> None:
        if torch.utils.data.get_worker_info() is None:
            raise OSError("not here")


class Raises(Samples):
    def __init__(self, kind: type[BaseException], *values: object) -> None:
        super().__init__(SIZE, FaultPlacement())
        self.kind = kind
        self.values = values

    def __getitem__(self, index: int) -> Any:
        if index == BAD:
            raise self.kind(*self.values)
        return super().__getitem__(index)


ODD = pytest.mark.parametrize(
    "dataset",
    [
        Raises(UnprintableError),
        Raises(FrozenError, "a"),
        Raises(OnlyInWorkers),
        Raises(KeyError, "a\nb"),
        Raises(UnicodeDecodeError, "utf-8", b"\xff", 0, 1, "invalid"),
        Raises(StopIteration),
        Raises(StopAsyncIteration),
    ],
    ids=lambda dataset: dataset.kind.__name__,
)


@ODD
def test_every_other_batch_comes_when_the_exception_is_odd(dataset: Raises) -> None:
    """Whatever its class does when it is printed, copied or raised again: one error, and then all other batches."""
    loader = make_loader(FaultPlacement(), dataset=dataset)

    outcomes = outcomes_of(loader)

    assert isinstance(outcomes.pop(BAD_BATCH), (dataset.kind, RuntimeError))
    assert outcomes == all_batches(GETITEM)[:BAD_BATCH] + all_batches(GETITEM)[BAD_BATCH + 1 :]


@ODD
def test_everything_else_is_delivered_when_an_odd_exception_is_skipped(dataset: Raises) -> None:
    """The quarantine keeps its name and text, whatever the class refuses to do."""
    loader = make_loader(FaultPlacement(), "skip", dataset=dataset)

    delivered = all_indices(loader)

    assert delivered == without_bad(GETITEM)
    assert loader.quarantine[BAD].failure.type_name == dataset.kind.__name__  # type: ignore[union-attr]
