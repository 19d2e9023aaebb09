"""A fault that fires every time its sample is touched: the sample is named, and everything else is delivered."""

from __future__ import annotations

from faults.expectations import (
    BAD,
    BAD_BATCH,
    BAD_SLOT,
    all_batches,
    assert_explains,
    is_cheap,
    is_reachable,
    loader_with,
    name_of_bad,
    real_incidents,
    rows,
    without_bad,
)
from faults.faulty_datasets import BATCH, SIZE, all_indices, outcomes_of
from faults.table import SITES, Fault, FaultSite, Moment

MAP_SITES = tuple(site for site in SITES if not site.stream)
STREAM_SITES = tuple(site for site in SITES if site.stream)


@rows(SITES, is_reachable, turn=0)
def test_everything_else_is_delivered_when_a_bad_sample_is_skipped(fault: Fault, site: FaultSite) -> None:
    """Under "skip" a bad sample costs itself and nothing else; the quarantine names it and says why."""
    loader = loader_with(fault, site, "skip")

    delivered = all_indices(loader)

    assert delivered == without_bad(site)
    assert list(loader.quarantine) == [name_of_bad(site)]
    incident = loader.quarantine[name_of_bad(site)]
    assert incident.indices == (name_of_bad(site),)
    assert incident.action == "left out"
    assert_explains(incident, fault, site)
    assert {incident.batch for incident in real_incidents(loader)} == {BAD_BATCH}


@rows(MAP_SITES, is_cheap, turn=1)
def test_batches_keep_their_size_when_a_bad_sample_is_replaced(fault: Fault, site: FaultSite) -> None:
    """Under "replace" another sample takes the place, the same one in every run with the same seed."""
    loader = loader_with(fault, site, "replace")

    delivered = all_indices(loader)

    expected = all_batches(site)
    other = delivered[BAD_BATCH][expected[BAD_BATCH].index(BAD)]
    expected[BAD_BATCH] = [other if index == BAD else index for index in expected[BAD_BATCH]]
    assert delivered == expected
    assert other != BAD
    assert list(loader.quarantine) == [name_of_bad(site)]
    assert loader.quarantine[BAD].action == "replaced by another sample"
    assert_explains(loader.quarantine[BAD], fault, site)
    if not fault.hangs:
        assert all_indices(loader_with(fault, site, "replace")) == delivered


@rows(STREAM_SITES, is_cheap, is_reachable, turn=1)
def test_the_stream_s_next_sample_fills_the_batch_when_a_bad_one_is_replaced(fault: Fault, site: FaultSite) -> None:
    """A stream has no other sample to give than its next one; only its end comes sooner."""
    loader = loader_with(fault, site, "replace")

    delivered = all_indices(loader)

    assert delivered == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 15, 17], [16, 18, 20, 22], [19, 21, 23]]
    assert list(loader.quarantine) == [name_of_bad(site)]
    assert_explains(loader.quarantine[name_of_bad(site)], fault, site)


@rows(SITES, is_cheap, turn=2)
def test_the_error_comes_in_its_batch_s_place_when_a_bad_sample_is_raised(fault: Fault, site: FaultSite) -> None:
    """Under "raise" the error names the sample; batches before it came, and next() gives every other one."""
    loader = loader_with(fault, site, "raise")

    outcomes = outcomes_of(loader)

    error = outcomes.pop(BAD_BATCH)
    assert isinstance(error, fault.raises)
    assert outcomes == other_batches(fault, site)
    assert dict(loader.quarantine) == {}
    assert_explains(error.incident, fault, site)  # type: ignore[attr-defined]
    if fault.kills:
        assert error.incident.indices == (name_of_bad(site),)  # type: ignore[attr-defined]
        assert f"worker {BAD_SLOT}" in str(error)
    else:
        (note,) = error.__notes__
        assert str(name_of_bad(site)) in note
        assert f"batch {BAD_BATCH}" in note
        assert f"worker {BAD_SLOT}" in note
        assert f"in DataLoader worker process {BAD_SLOT}" in str(error)
    if fault.says_torn and not fault.kills:
        assert fault.fire.__name__ in str(error)


def other_batches(fault: Fault, site: FaultSite) -> list[list[int]]:
    """What a consumer that catches the error gets besides it."""
    batches = all_batches(site)
    del batches[BAD_BATCH]
    if site.moment is Moment.NEXT and not fault.spares:
        # A death inside __next__ ends this stream. After an exception it goes on behind the bad sample, which is in the
        # middle of a batch: so it does with torch's own loader.
        batches[-1:] = [] if fault.kills else [[15, 17, 19, 21], [23]]
    return batches


def test_the_bad_sample_stands_where_this_file_says() -> None:
    """The rows speak of one sample: in the middle of its batch, with batches of its slot before and after it."""
    assert all_batches(MAP_SITES[0])[BAD_BATCH] == [12, BAD, 14, 15]
    assert all_batches(STREAM_SITES[0])[BAD_BATCH] == [9, 11, BAD, 15]
    assert len(all_batches(MAP_SITES[0])) == SIZE // BATCH == BAD_BATCH + 3
