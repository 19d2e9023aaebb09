"""Errors of code on every sample: a bug that ends the epoch at once, and no outage to be waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from faults.sources import breakers
from outlive import DataLoader, FaultPolicy, Incident, SourceUnavailableError, TooManyFaultsError

PATIENCE_S = 2.0  # else a wait for the source would be one of five minutes

BUGS: dict[str, BaseException] = {
    kind.__name__: kind("of the code")
    for kind in (
        *(NameError, UnboundLocalError, AttributeError, TypeError, ImportError, ModuleNotFoundError),
        *(AssertionError, SyntaxError, NotImplementedError),
    )
}


class Buggy(Dataset[Any]):
    """Every sample raises, from sample `first` on."""

    def __init__(self, kind: str, first: int = 0) -> None:
        self.kind, self.first = kind, first

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> int:
        if index >= self.first:
            raise BUGS[self.kind]
        return index


def patient(policy: str, **more: Any) -> FaultPolicy:
    return FaultPolicy(policy, breaker_patience=PATIENCE_S, backoff_s=0.01, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", BUGS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_bug_in_every_sample_ends_the_epoch_without_a_wait(kind, workers):
    """`max_bad` is the limit; the breaker never opens."""
    loader = DataLoader(Buggy(kind), batch_size=4, num_workers=workers, faults=patient("skip"))

    with pytest.raises(TooManyFaultsError) as raised:
        list(loader)

    assert not isinstance(raised.value, SourceUnavailableError)
    assert breakers(loader) == []
    assert kind in str(raised.value)


@pytest.mark.parametrize("kind", ["NameError", "AssertionError"])
def test_a_bug_from_some_sample_on_is_no_outage_either(kind):
    """A sample that was good before still is."""
    loader = DataLoader(Buggy(kind, first=40), batch_size=4, num_workers=1, faults=patient("skip"))

    with pytest.raises(TooManyFaultsError) as raised:
        list(loader)

    assert not isinstance(raised.value, SourceUnavailableError)
    assert breakers(loader) == []


class ReadsNothing(Dataset[Any]):
    """As an image reader that returns None for a file that is not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        read = None if (self.folder / "gone").exists() else index
        assert read is not None
        return read


def test_samples_that_read_nothing_wait_for_their_source_when_they_were_good_before(tmp_path):
    """Code that worked and works no longer has lost what it reads: no sample is left out for that."""

    def bring_back(incident: Incident) -> None:
        (tmp_path / "gone").unlink(missing_ok=True)

    loader = DataLoader(
        ReadsNothing(tmp_path), batch_size=4, num_workers=1, faults=patient("skip"), on_incident=bring_back
    )
    received = []
    for number, batch in enumerate(loader):
        received += batch.tolist()
        if number == 0:
            (tmp_path / "gone").touch()

    assert received == list(range(24))
    assert len(loader.quarantine) == 0
