"""What holds for iterable datasets only: stepping over, snapshots, generators, shared ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from faults.expectations import (
    BAD,
    BAD_BATCH,
    BAD_OF_STREAM,
    all_batches,
    assert_explains,
    policy_for,
    real_incidents,
    rows,
    without_bad,
)
from faults.faulty_datasets import (
    SIZE,
    FaultPlacement,
    GeneratorStream,
    Reader,
    SkippingReaderStream,
    SkippingStream,
    StatefulReaderStream,
    StatefulStream,
    Stream,
    all_indices,
    all_values,
    arguments,
    flat,
    indices_of,
    make_loader,
    outcomes_of,
    undisturbed,
)
from faults.table import FAULTS, TORN, Fault, FaultSite, Moment, PlantedFault
from outlive import FaultPolicy, TooManyFaultsError, WorkerCrashedError, WorkerStartError
from outlive._forensics.ledger import StreamIndex

NEXT = FaultSite(Moment.NEXT, stream=True)
QUICK = [FAULTS[name] for name in ("exception", "sigkill")]


def poisoned(kind: type, fault: str = "sigkill", *more: Any) -> Any:
    return kind(SIZE, FaultPlacement(next={BAD: PlantedFault(fault)}), *more)


@rows([NEXT], lambda fault, site: fault.kills)
def test_a_deadly_sample_is_stepped_over_when_the_dataset_can_skip(fault: Fault, site: FaultSite) -> None:
    """A stream that offers skip(n) loses the sample that kills inside __next__, and nothing else."""
    loader = make_loader(
        FaultPlacement(), policy_for(fault, site, "skip"), dataset=poisoned(SkippingStream, fault.name)
    )

    delivered = all_indices(loader)

    assert delivered == without_bad(site)
    assert list(loader.quarantine) == [BAD_OF_STREAM]
    assert_explains(loader.quarantine[BAD_OF_STREAM], fault, site)


def test_a_deadly_sample_is_stepped_over_when_only_the_iterator_can_skip() -> None:
    """skip(n) may be the iterator's: the dataset itself need not offer it."""
    loader = make_loader(FaultPlacement(), "skip", dataset=poisoned(SkippingReaderStream))

    delivered = all_indices(loader)

    assert delivered == without_bad(NEXT)
    assert list(loader.quarantine) == [BAD_OF_STREAM]


def test_one_more_sample_is_taken_when_a_deadly_one_is_replaced() -> None:
    """Under "replace" the stream's next sample fills the batch; only its end comes sooner."""
    loader = make_loader(FaultPlacement(), "replace", dataset=poisoned(SkippingStream))

    delivered = all_indices(loader)

    assert delivered == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 15, 17], [16, 18, 20, 22], [19, 21, 23]]
    assert list(loader.quarantine) == [BAD_OF_STREAM]


@pytest.mark.parametrize("faults", ["skip", "replace"])
def test_an_error_is_raised_when_a_deadly_sample_cannot_be_stepped_over(faults: str) -> None:
    """Without skip(n) the rest of that stream is out of reach: that is said, and the other streams go on."""
    loader = make_loader(FaultPlacement(), faults, dataset=poisoned(Stream))

    outcomes = outcomes_of(loader)

    error = outcomes.pop(BAD_BATCH)
    assert isinstance(error, WorkerCrashedError)
    assert error.incident is not None
    assert error.incident.indices == (BAD_OF_STREAM,)
    assert outcomes == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [16, 18, 20, 22]]


@pytest.mark.parametrize("faults", ["skip", "replace"])
def test_an_error_is_raised_when_an_exception_ends_a_generator(faults: str) -> None:
    """Python ends a generator with its first error. What cannot be reached must not pass for the end."""
    loader = make_loader(FaultPlacement(), faults, dataset=poisoned(GeneratorStream, "exception"))

    outcomes = outcomes_of(loader)

    (error,) = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert isinstance(error, ValueError)
    assert TORN in str(error)
    assert "generator" in str(error)
    assert error.incident.indices == (BAD_OF_STREAM,)  # type: ignore[attr-defined]
    delivered = [outcome for outcome in outcomes if outcome is not error]
    assert delivered == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11], [16, 18, 20, 22]]


def test_the_rest_of_a_generator_arrives_when_its_worker_is_killed_once(tmp_path: Path) -> None:
    """A death does not end a generator: the next life starts it again and takes it to where it was."""
    placement = FaultPlacement(next={BAD: PlantedFault("sigkill", str(tmp_path / "fired"))})
    loader = make_loader(FaultPlacement(), dataset=GeneratorStream(SIZE, placement))

    delivered = all_values(loader)

    assert delivered == undisturbed(Stream)


def test_batches_are_torch_s_when_an_exception_in_next_is_raised() -> None:
    """Under "raise" the samples that were taken for the failed batch are gone with it, as with torch's own loader."""
    placement = FaultPlacement(next={BAD: PlantedFault("exception")})
    theirs = outcomes_of(torch.utils.data.DataLoader(**arguments(placement)))

    ours = outcomes_of(make_loader(placement))

    assert [type(outcome) for outcome in ours] == [type(outcome) for outcome in theirs]
    assert [o for o in ours if isinstance(o, list)] == [o for o in theirs if isinstance(o, list)]
    assert isinstance(ours[BAD_BATCH], ValueError)


class Unopened(Stream):
    """Its fault fires in iter()."""

    def __init__(self, planted: PlantedFault) -> None:
        super().__init__(SIZE, FaultPlacement())
        self.planted = planted

    def __iter__(self) -> Any:
        if self.shard()[0] == 1:
            self.planted()
        return super().__iter__()


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.name)
def test_not_one_bit_differs_when_iter_fails_once(fault: Fault, tmp_path: Path) -> None:
    """A stream that could not be opened is opened again, in the next life."""
    loader = make_loader(FaultPlacement(), dataset=Unopened(PlantedFault(fault.name, str(tmp_path / "fired"))))

    delivered = all_values(loader)

    assert delivered == undisturbed(Stream)
    (incident,) = real_incidents(loader)
    assert incident.slot == 1


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.name)
def test_an_error_is_raised_when_iter_always_fails(fault: Fault) -> None:
    """A stream that cannot be opened has no sample to skip: it is an error under every policy."""
    loader = make_loader(FaultPlacement(), "skip", dataset=Unopened(PlantedFault(fault.name)))

    with pytest.raises(WorkerStartError if fault.kills else fault.raises) as caught:
        all_indices(loader)

    assert caught.value.incident.slot == 1


@pytest.mark.parametrize("kind", [StatefulStream, StatefulReaderStream])
def test_a_snapshot_is_restored_when_a_stateful_stream_loses_its_worker(kind: type, tmp_path: Path) -> None:
    """Where the dataset or its iterator keeps a state, samples before the snapshot are not opened again."""
    notes = tmp_path / "opened"
    placement = FaultPlacement(next={BAD: PlantedFault("sigkill", str(tmp_path / "fired"))})
    loader = make_loader(FaultPlacement(), dataset=kind(SIZE, placement, notes))

    delivered = all_values(loader)

    assert delivered == undisturbed(Stream)
    opened = [int(line) for line in notes.read_text().split()]
    assert opened.count(BAD) == 2
    assert [opened.count(index) for index in (1, 3, 5, 7)] == [1, 1, 1, 1]


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.name)
@pytest.mark.parametrize("moment", [Moment.NEXT, Moment.COLLATE, Moment.SENDING], ids=lambda moment: moment.value)
def test_everything_else_is_delivered_when_an_unbatched_stream_has_a_bad_sample(fault: Fault, moment: Moment) -> None:
    """batch_size=None: the bad sample is a batch of its own, left empty and not delivered."""
    placement = FaultPlacement.at(moment, {BAD: PlantedFault(fault.name)})
    single = SingleCollate(placement.collate)
    dataset = SkippingStream(SIZE, placement)
    loader = make_loader(FaultPlacement(), "skip", dataset=dataset, batch_size=None, collate_fn=single)

    delivered = [int(values[0]) for values, _ in loader]

    assert delivered == [index for index in range(SIZE) if index != BAD]
    assert list(loader.quarantine) == [BAD_OF_STREAM]
    assert loader.statistics().emptied == 1


class SingleCollate:
    """A collate_fn for batch_size=None, which is given one sample."""

    def __init__(self, planted_faults: Any) -> None:
        self.planted_faults = planted_faults

    def __call__(self, sample: Any) -> Any:
        values, payload = sample
        planted = self.planted_faults.get(int(values[0]))
        return values, payload if planted is None else planted()


def test_the_budget_ends_a_stream_that_raises_for_ever() -> None:
    """An iterator that never gets past its error is no endless row of skipped samples."""
    loader = make_loader(
        FaultPlacement(), FaultPolicy(on_error="skip", max_bad=10), dataset=StuckStream(SIZE, FaultPlacement())
    )

    with pytest.raises(TooManyFaultsError) as caught:
        all_indices(loader)

    assert "ValueError" in str(caught.value)
    assert len(caught.value.incidents) > 10


class StuckStream(Stream):
    def __iter__(self) -> Any:
        return StuckReader(self.shard(), self.placement)


class StuckReader(Reader):
    def __next__(self) -> Any:
        raise ValueError(TORN)


def test_several_deadly_samples_are_stepped_over_in_one_stream() -> None:
    """Each costs itself, also when two stand side by side, at the beginning or at the end."""
    bad = (1, 9, 11, 23)
    placement = FaultPlacement(next={index: PlantedFault("os-exit") for index in bad})
    loader = make_loader(FaultPlacement(), "skip", dataset=SkippingStream(SIZE, placement))

    delivered = all_indices(loader)

    assert delivered == [[index for index in batch if index not in bad] for batch in all_batches(NEXT)]
    assert set(loader.quarantine) == {StreamIndex(1, index // 2) for index in bad}
    assert len(real_incidents(loader)) == 2 * len(bad)


def test_another_epoch_is_the_same_when_a_stream_s_worker_was_killed(tmp_path: Path) -> None:
    """Persistent workers: after a death in one epoch the next one is torch's, bit for bit."""
    placement = FaultPlacement(next={BAD: PlantedFault("sigkill", str(tmp_path / "fired"))})
    stock = torch.utils.data.DataLoader(
        **arguments(FaultPlacement(), Stream(SIZE, FaultPlacement()), persistent_workers=True)
    )
    theirs = [all_values(stock), all_values(stock)]
    stock._iterator._shutdown_workers()
    loader = make_loader(placement, persistent_workers=True)

    ours = [all_values(loader), all_values(loader)]

    assert ours == theirs


def test_indices_arrive_as_they_come_when_order_does_not_matter(tmp_path: Path) -> None:
    """in_order=False: nothing is lost or doubled by a death either."""
    placement = FaultPlacement(next={BAD: PlantedFault("sigkill", str(tmp_path / "fired"))})
    loader = make_loader(placement, in_order=False)

    delivered = [index for batch in loader for index in indices_of(batch)]

    assert sorted(delivered) == list(range(SIZE))


@pytest.mark.parametrize("name", ["exception", "sigkill"])
@pytest.mark.parametrize("moment", [Moment.COLLATE, Moment.SENDING], ids=lambda moment: moment.value)
@pytest.mark.parametrize("faults", ["skip", "replace", "raise"])
def test_a_bad_batch_is_not_met_again_when_a_later_death_starts_the_stream_over(
    name: str, moment: Moment, faults: str, tmp_path: Path
) -> None:
    """Fast-forwarding passes samples that were bad in collate_fn or while sent, and does not stumble over them."""
    later = 21
    planted_faults = FaultPlacement.at(moment, {BAD: PlantedFault(name)})
    placement = FaultPlacement(
        collate=planted_faults.collate,
        sending=planted_faults.sending,
        next={later: PlantedFault("os-exit", str(tmp_path / "fired"))},
    )
    loader = make_loader(placement, faults)

    outcomes = outcomes_of(loader)

    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    delivered = [outcome for outcome in outcomes if isinstance(outcome, list)]
    bystanders = {9, 11, 15} if faults == "raise" else set()
    assert [type(error) for error in errors] == ([FAULTS[name].raises[0]] if faults == "raise" else [])
    assert sorted(flat(delivered)) == [index for index in range(SIZE) if index != BAD and index not in bystanders]
