"""Positions and everything that may go wrong: deaths before and after, other settings, other loaders, leftovers.

Reads   what loaders deliver, and what they say when a state does not fit.
Writes  marker files that make a worker die at a chosen moment; position files.
Never   a tolerance.
"""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import loader_inputs as inputs
import outlive
from loader_comparison import differences, seed_trainer


def batches_of(iterator: Any, count: int) -> list[Any]:
    return [next(iterator) for _ in range(count)]


def undisturbed(**arguments: Any) -> list[Any]:
    seed_trainer()
    return list(outlive.DataLoader(**arguments))


def state_after(count: int, **arguments: Any) -> tuple[dict[str, Any], Any]:
    """A position, by way of bytes; and the loader it is of."""
    seed_trainer()
    loader = outlive.DataLoader(**arguments)
    iterator = iter(loader)
    batches_of(iterator, count)
    return pickle.loads(pickle.dumps(loader.state_dict())), loader


def indices_in(batches: list[Any]) -> list[int]:
    return [index for batch in batches for index in batch["index"].tolist()]


# ---------------------------------------------------------------- deaths


@pytest.mark.parametrize("stream", [False, True], ids=["map", "stream"])
def test_deaths_before_and_after_do_not_show(tmp_path, stream):
    """A slot whose worker was replaced stands where it stood; and the one that goes on may die as well."""

    def dataset(kills: inputs.Kills | None) -> Any:
        return inputs.Stream(12, 11, kills=kills) if stream else inputs.Noisy(23, kills=kills)

    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    whole = undisturbed(dataset=dataset(None), batch_size=2, num_workers=2)
    seed_trainer()
    dying = dataset(inputs.Kills(before, {1: {1}, 13: {1}}))
    loader = outlive.DataLoader(dying, batch_size=2, num_workers=2)
    iterator = iter(loader)
    got = batches_of(iterator, 5)
    state = loader.state_dict()
    del iterator
    again = outlive.DataLoader(dataset(inputs.Kills(after, {9: {1}, 21: {1}})), batch_size=2, num_workers=2)
    again.load_state_dict(state)

    assert differences(got + list(again), whole) == []
    assert loader.statistics().restarts > 0
    assert again.statistics().restarts > loader.statistics().restarts
    assert again.statistics().incidents > loader.statistics().incidents


@pytest.mark.parametrize("stream", [False, True], ids=["map", "stream"])
def test_a_slot_stands_where_its_dead_worker_was_while_the_next_one_starts(tmp_path, stream):
    """The batch that was delivered last is the dead one's; what it drew after that does not count."""

    def dataset(kills: inputs.Kills | None) -> Any:
        return inputs.Stream(14, kills=kills) if stream else inputs.Noisy(14, kills=kills)

    whole = undisturbed(dataset=dataset(None), batch_size=2, num_workers=1, prefetch_factor=4)
    seed_trainer()
    loader = outlive.DataLoader(
        dataset(inputs.Kills(tmp_path, {9: {1}})), batch_size=2, num_workers=1, prefetch_factor=4
    )
    iterator = iter(loader)
    got = batches_of(iterator, 2)
    while not loader.statistics().restarts:
        iterator.poll(60)
    state = loader.state_dict()
    again = outlive.DataLoader(dataset(None), batch_size=2, num_workers=1)
    again.load_state_dict(state)

    assert differences(got + list(again), whole) == []


def test_a_slot_stands_at_the_delivered_batch_however_far_its_worker_is():
    """Also where it has made more batches since than its black box remembers."""
    arguments: dict[str, Any] = {"dataset": inputs.Noisy(40), "num_workers": 1, "prefetch_factor": 30}
    whole = undisturbed(**arguments)
    seed_trainer()
    loader = outlive.DataLoader(**arguments)
    iterator = iter(loader)
    got = batches_of(iterator, 3)
    while iterator.ready_batches < 30:
        iterator.poll(60)
    again = outlive.DataLoader(**arguments)
    again.load_state_dict(loader.state_dict())

    assert differences(got + list(again), whole) == []


def test_quarantine_and_counts_are_taken_along(tmp_path):
    """A sample that has killed two workers kills no third one in the trainer's next life."""
    deadly = inputs.Kills(tmp_path, {4: {1, 2, 3, 4}})
    seed_trainer()
    loader = outlive.DataLoader(inputs.Noisy(kills=deadly), batch_size=2, num_workers=2, faults="skip")
    got = list(loader)
    again = outlive.DataLoader(inputs.Noisy(kills=deadly), batch_size=2, num_workers=2, faults="skip")
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    restored = again.statistics()
    more = list(again)

    assert set(again.quarantine) == {4}
    assert str(again.quarantine[4]) == str(loader.quarantine[4])
    assert (restored.restarts, restored.retries, restored.incidents) == (2, 1, loader.statistics().incidents)
    assert restored.delivered == len(got)
    assert again.statistics().restarts == 2
    assert sorted(indices_in(more)) == [i for i in range(23) if i != 4]


@dataclass(frozen=True)
class Key:
    name: str


class ByKey(torch.utils.data.Dataset):
    """Some of its samples are named by what plain data can carry, and some are not."""

    def __getitem__(self, index: Any) -> int:
        if index != Key("good"):
            raise ValueError("bad")
        return 1


NAMES: list[tuple[Any, Any]] = [  # an index, and as what it comes back
    (3, 3),
    ("three", "three"),
    ((3, "three"), (3, "three")),
    (3.5, 3.5),
    (frozenset({3}), frozenset({3})),
    (Key("three"), "Key(name='three')"),
    (object(), "<object object>"),
]


@pytest.mark.parametrize(("index", "name"), NAMES, ids=[str(name) for _, name in NAMES])
def test_a_quarantined_sample_is_found_by_its_index(index, name):
    """Numbers, texts and tuples come back as they were; anything else is found by its `repr`, unless that is an
    address, which means nothing in another process.
    """
    arguments: dict[str, Any] = {"dataset": ByKey(), "sampler": [Key("good"), index, Key("good")], "faults": "skip"}
    loader = outlive.DataLoader(**arguments)
    list(loader)
    again = outlive.DataLoader(**arguments)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))

    assert list(again.quarantine) == [name]
    assert (index in again.quarantine) == (type(index) is not object)
    assert Key("good") not in again.quarantine
    if index in again.quarantine:
        list(again)
        assert list(again.quarantine) == [name]  # as bad as before, and once


def test_a_sample_that_has_killed_once_has_one_try_less(tmp_path):
    """What was counted of a batch under way counts on: it is poison at its second death, not at its third."""
    deadly = inputs.Kills(tmp_path, {6: {1, 2, 3, 4}})
    seed_trainer()
    loader = outlive.DataLoader(inputs.Noisy(8, kills=deadly), batch_size=2, num_workers=1, prefetch_factor=4)
    iterator = iter(loader)
    batches_of(iterator, 3)
    while not loader.statistics().restarts:
        iterator.poll(60)
    state = loader.state_dict()
    loader.close()
    times_before = (tmp_path / "moment-6").stat().st_size
    again = outlive.DataLoader(inputs.Noisy(8, kills=deadly), batch_size=2, num_workers=1, faults="skip")
    again.load_state_dict(state)
    got = list(again)

    assert indices_in(got) == [7]
    assert (tmp_path / "moment-6").stat().st_size - times_before <= 1


# ---------------------------------------------------------------- the same loader


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_goes_back_to_its_own_positions(persistent):
    """With an iterator alive, and more than once."""
    seed_trainer()
    loader = outlive.DataLoader(
        inputs.Noisy(13), batch_size=2, shuffle=True, num_workers=2, persistent_workers=persistent
    )
    iterator = iter(loader)
    first = batches_of(iterator, 2)
    state = loader.state_dict()
    rest = list(iterator)
    loader.load_state_dict(state)
    iterator = iter(loader)
    half = batches_of(iterator, 2)
    soon = loader.state_dict()
    loader.load_state_dict(soon)

    assert loader.state_dict() == soon
    assert differences(half + list(loader), rest) == []
    loader.load_state_dict(state)
    assert differences(list(loader), rest) == []
    assert len(first) + len(rest) == 7


def test_a_position_outlives_the_iterator_that_was_left_in_the_middle():
    """`break` ends the workers, not the position."""
    arguments: dict[str, Any] = {"dataset": inputs.Noisy(13), "batch_size": 2, "shuffle": True}
    for workers in (0, 2):
        whole = undisturbed(**arguments, num_workers=workers)
        seed_trainer()
        loader = outlive.DataLoader(**arguments, num_workers=workers)
        for number, _ in enumerate(loader):
            if number == 2:
                break
        state = loader.state_dict()
        again = outlive.DataLoader(**arguments, num_workers=workers)
        again.load_state_dict(state)

        assert differences(list(again), whole[3:]) == []


# ---------------------------------------------------------------- other settings


@pytest.mark.parametrize(("workers", "later"), [(2, 3), (3, 0), (0, 2), (2, "auto")])
def test_samples_go_on_in_order_with_another_number_of_workers(workers, later, caplog):
    """What is drawn at random is then seeded by batch, and the log says so."""
    arguments: dict[str, Any] = {"dataset": inputs.Noisy(21), "batch_size": 2, "shuffle": True}
    whole = undisturbed(**arguments, num_workers=workers)
    state, _ = state_after(3, **arguments, num_workers=workers)
    with caplog.at_level(logging.INFO, "outlive"):
        again = outlive.DataLoader(**arguments, num_workers=later)
        again.load_state_dict(state)
        got = list(again)

    assert indices_in(got) == indices_in(whole[3:])
    assert ("seeded by batch" in caplog.text) == bool(later)
    if later:
        once_more = outlive.DataLoader(**arguments, num_workers=1)
        once_more.load_state_dict(state)
        assert differences(list(once_more), got) == []


def test_auto_goes_on_bit_for_bit_with_a_fixed_number(caplog):
    """Its random numbers never depended on the number of workers."""
    arguments: dict[str, Any] = {"dataset": inputs.Noisy(21), "batch_size": 2, "shuffle": True}
    whole = undisturbed(**arguments, num_workers="auto")
    state, _ = state_after(4, **arguments, num_workers="auto")
    again = outlive.DataLoader(**arguments, num_workers=2)
    again.load_state_dict(state)

    assert differences(list(again), whole[4:]) == []


def test_nothing_is_lost_or_twice_out_of_order():
    """Batches that were under way are done again, whoever had them."""
    seed_trainer()
    loader = outlive.DataLoader(inputs.Noisy(24), batch_size=2, num_workers=3, in_order=False)
    iterator = iter(loader)
    got = batches_of(iterator, 5)
    again = outlive.DataLoader(inputs.Noisy(24), batch_size=2, num_workers=3, in_order=False)
    again.load_state_dict(loader.state_dict())

    assert sorted(indices_in(got + list(again))) == list(range(24))


def test_a_state_of_batches_in_any_order_goes_on_in_order():
    """Those under way come first, and none is waited for that was delivered before."""
    seed_trainer()
    loader = outlive.DataLoader(inputs.Noisy(24), batch_size=2, num_workers=3, in_order=False)
    iterator = iter(loader)
    got = batches_of(iterator, 5)
    for workers in (3, 2):
        again = outlive.DataLoader(inputs.Noisy(24), batch_size=2, num_workers=workers)
        again.load_state_dict(json.loads(json.dumps(loader.state_dict())))

        assert sorted(indices_in(got + list(again))) == list(range(24))


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "batch_size": ({"batch_size": 4}, "batch_size is 4, in the state it is 2"),
    "length": ({"dataset": inputs.Noisy(9)}, "the dataset has 9 samples, in the state it has 23"),
    "kind": ({"dataset": inputs.Stream(9)}, "the dataset is iterable, the state is of one that is map-style"),
}


@pytest.mark.parametrize(("other", "words"), MISFITS.values(), ids=MISFITS)
def test_a_state_that_does_not_fit_is_refused_with_both_values(other, words):
    """At once, not in the middle of a wrong epoch."""
    arguments: dict[str, Any] = {"dataset": inputs.Noisy(), "batch_size": 2, "num_workers": 0}
    state, _ = state_after(1, **arguments)

    with pytest.raises(outlive.PositionError, match=words):
        outlive.DataLoader(**{**arguments, **other}).load_state_dict(state)


def test_streams_are_not_dealt_out_to_another_number_of_workers():
    """Each is one worker's; between epochs it does not matter."""
    state, loader = state_after(1, dataset=inputs.Stream(6, 6), batch_size=2, num_workers=2)
    other = outlive.DataLoader(inputs.Stream(6, 6), batch_size=2, num_workers=1)

    with pytest.raises(outlive.PositionError, match="num_workers is 1, in the state it is 2"):
        other.load_state_dict(state)
    list(loader)
    other.load_state_dict(loader.state_dict())
    assert len(list(other)) == 3


@pytest.mark.parametrize("state", [{"_snapshot": {}}, {"outlive": 99}, 7])
def test_what_is_no_state_is_refused(state):
    """Whatever somebody finds in an old checkpoint."""
    with pytest.raises(outlive.PositionError, match=r"no state of outlive|has format 99"):
        outlive.DataLoader(inputs.Noisy()).load_state_dict(state)


# ---------------------------------------------------------------- what a state is


def test_a_state_is_small_and_plain():
    """Under 100 KiB for a shuffled million with four workers; JSON and torch.load can carry it."""
    data = torch.utils.data.TensorDataset(torch.zeros(1_000_000, dtype=torch.int8))
    loader = outlive.DataLoader(data, batch_size=64, shuffle=True, num_workers=4)
    iterator = iter(loader)
    batches_of(iterator, 9)
    quiet = loader.state_dict()
    del iterator
    state, _ = state_after(9, dataset=inputs.Noisy(1000), batch_size=4, shuffle=True, num_workers=4)

    assert len(pickle.dumps(quiet)) < 30_000  # nobody drew: nothing to tell of four workers
    assert len(pickle.dumps(state)) < 100 * 1024
    assert json.loads(json.dumps(state)) == state


def test_a_state_loads_with_weights_only(tmp_path):
    """A checkpoint that torch loads safely may have it."""
    state, _ = state_after(2, dataset=inputs.Noisy(), batch_size=2, num_workers=0)
    torch.save(state, tmp_path / "checkpoint.pt")

    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True) == state


# ---------------------------------------------------------------- the position file


def test_a_position_is_written_every_n_batches(tmp_path):
    """The newest, the one before it, and the end of an epoch: whichever a checkpoint belongs to is there."""
    path = tmp_path / "position"
    arguments: dict[str, Any] = {"dataset": inputs.Noisy(14), "batch_size": 2, "num_workers": 2}
    whole = undisturbed(**arguments)
    seed_trainer()
    loader = outlive.DataLoader(**arguments, journal_position=path, journal_every=3)

    assert loader.load_position() is None
    iterator = iter(loader)
    batches_of(iterator, 6)
    del iterator
    for asked, left in ((None, 1), (6, 1), (3, 4)):
        again = outlive.DataLoader(**arguments, journal_position=copy_of(path), journal_every=3)
        assert again.load_position(asked) == (asked or 6)
        assert differences(list(again), whole[-left:]) == []
    with pytest.raises(outlive.PositionError, match=r"positions after 3 batches \(epoch 0\), 6 batches.*none with 5"):
        outlive.DataLoader(**arguments, journal_position=path).load_position(5)


def copy_of(path: Path) -> Path:
    """Return a copy of a position file: a loader that starts from it writes positions of its own."""
    return Path(shutil.copy(path, path.with_name("copy")))


def test_a_position_at_the_end_of_an_epoch_begins_the_next(tmp_path):
    """The trainer says which epoch it is in; after its last batch that is ambiguous."""
    path = tmp_path / "position"
    arguments: dict[str, Any] = {
        "dataset": inputs.Noisy(12),
        "batch_size": 2,
        "journal_position": path,
        "journal_every": 2,
    }
    seed_trainer()
    list(outlive.DataLoader(**arguments))

    for epoch, left in ((0, 0), (1, 6), (None, 6)):
        again = outlive.DataLoader(**arguments | {"journal_position": copy_of(path)})
        assert again.load_position(6, epoch) == 6
        assert len(list(again)) == left
    assert len(list(outlive.DataLoader(**arguments, journal_resume=True))) == 6


def test_a_damaged_position_is_refused_and_a_full_disk_ends_nothing(tmp_path, caplog):
    """A wrong position is worse than none; none is no reason to stop."""
    path = tmp_path / "position"
    path.write_bytes(b"outlive position 2\nxxxxrubbish")

    with pytest.raises(outlive.PositionError, match="damaged"):
        outlive.DataLoader(inputs.Noisy(), journal_position=path, journal_resume=True)
    gone = outlive.DataLoader(inputs.Noisy(6), journal_position=tmp_path / "no" / "folder", journal_every=2)
    assert len(list(gone)) == 6
    assert "could not be written" in caplog.text


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True])
def test_the_interval_is_checked(wrong):
    """A clear error for what makes no sense."""
    with pytest.raises((TypeError, ValueError), match="journal_every must be"):
        outlive.DataLoader(inputs.Noisy(), journal_every=wrong)


def test_there_is_no_position_without_a_file():
    """And the message says what to write."""
    with pytest.raises(outlive.PositionError, match="journal_position="):
        outlive.DataLoader(inputs.Noisy()).load_position()
