"""States that are damaged, forged, or full of pickles: each is gone on from rightly or refused, and none runs code.

Reads   real states, by way of JSON, and what loaders say of them when they were changed.
Writes  position files and states of checks, in temporary folders; a marker, if anything in a state is ever run.
Never   a loader that is given time: where one waits for a batch that never comes, its `timeout` says so.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import functools
import json
import pickle
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import loader_inputs as inputs
import outlive
from loader_comparison import seed_trainer
from outlive.checking.plan import choice_of
from outlive.checking.state import Progress, StateFile
from outlive.loader import fingerprint
from outlive.loader.quarantine_file import BadSample

Make = Callable[[], Any]
Where = tuple[Any, ...]  # keys and positions that lead to a part of a state
SIZE = 22


class Draws(torch.utils.data.Dataset):
    """One of its samples raises, in the run that the states are of, so that there is a quarantine."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise ValueError(f"sample {index} is bad")
        return index, torch.rand(1).item()


class InOrder:
    """An iterable that is no sampler of torch's, and whose place can only be counted."""

    def __iter__(self) -> Iterator[int]:
        yield from range(SIZE)


def make_loader(dataset: Any, workers: int, **options: Any) -> Any:
    return outlive.DataLoader(dataset, batch_size=2, num_workers=workers, timeout=60 if workers else 0, **options)


def shuffled_with_bad_samples(workers: int, bad: int = -1) -> Any:
    return make_loader(Draws(bad), workers, shuffle=True, faults="skip", generator=inputs.generator())


def stream(workers: int, bad: int = -1) -> Any:
    return make_loader(inputs.Stream(SIZE, 5), workers, faults="skip")


def stream_with_state(workers: int, bad: int = -1) -> Any:
    return make_loader(inputs.StatefulStream(SIZE, 5), workers, persistent_workers=bool(workers))


def drawn_as_it_goes(workers: int, bad: int = -1) -> Any:
    return make_loader(Draws(bad), workers, sampler=InOrder(), faults="skip")


LOADERS: dict[str, tuple[Callable[..., Any], int, int]] = {  # how it is made, its workers, after how many batches
    "shuffled": (shuffled_with_bad_samples, 0, 3),
    "shuffled, workers": (shuffled_with_bad_samples, 2, 3),
    "between epochs, workers": (shuffled_with_bad_samples, 2, SIZE),
    "stream": (stream, 0, 3),
    "stream, workers": (stream, 2, 3),
    "stream with a state": (stream_with_state, 0, 3),
    "stream with a state, workers": (stream_with_state, 2, 10),
    "stream with a state, workers, between epochs": (stream_with_state, 2, SIZE),
    "any sampler": (drawn_as_it_goes, 0, 3),
    "any sampler, workers": (drawn_as_it_goes, 2, 3),
}


@functools.cache
def state_text(name: str) -> str:
    make, workers, count = LOADERS[name]
    seed_trainer()
    with make(workers, bad=3) as loader:
        for number, _ in enumerate(loader, 1):
            if number == count:
                break
        return json.dumps(loader.state_dict())


def state_of(name: str) -> dict[str, Any]:
    return json.loads(state_text(name))


def places(part: Any, where: Where = ()) -> Iterator[Where]:
    """Each part of a state that is not the user's own."""
    if where:
        yield where
    if where[-1:] in (("snapshot",), ("dataset",), ("dataset_state",), ("indices",)):
        return  # what a dataset says of itself, what a sampler draws: that is for them to check
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for key, value in items:
        yield from places(value, (*where, key))


def part_at(state: Any, where: Where) -> Any:
    return functools.reduce(lambda part, key: part[key], where, state)


def with_part(state: dict[str, Any], where: Where, value: Any) -> dict[str, Any]:
    changed = json.loads(json.dumps(state))
    part_at(changed, where[:-1])[where[-1]] = value
    return changed


def goes_on(name: str, state: dict[str, Any]) -> list[Any] | None:
    """What is delivered after this state; None: it was refused, when it was loaded."""
    make, workers, _ = LOADERS[name]
    with make(workers) as loader:
        try:
            loader.load_state_dict(state)
        except outlive.PositionError:
            return None
        return list(loader)


# ---------------------------------------------------------------- pickles


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return builtins.open, (str(self.path), "w")


def disguises(path: Path) -> list[Any]:
    """A pickle in every form that a reader of states has ever taken, or may be tempted to."""
    bomb = pickle.dumps(Bomb(path))
    texts = [base64.b64encode(start + bomb).decode() for start in (b"", b"p", b"r", b"w", b"j")]
    beside = [{kind: texts[0]} for kind in ("pickled", "value", "repr", "!bytes", "!pickle", "!dict", "!array")]
    return [
        *texts,
        bomb.hex(),
        *beside,
        {"torch": texts[0], "random": texts[1], "numpy": texts[1]},
        [["set_epoch"], texts[0], {}],
    ]


@pytest.mark.parametrize("name", LOADERS)
def test_no_pickle_in_a_state_is_ever_run(name, tmp_path):
    """Whatever takes its place: the quarantine, random states, calls, a slot's stream, the user's own values."""
    marker = tmp_path / "ran"
    make, workers, _ = LOADERS[name]
    genuine = state_of(name)
    accepted = state_of(name)
    loader = make(workers)
    for where in places(genuine):
        part, (*parent, key) = part_at(genuine, where), where
        for hostile in disguises(marker):
            part_at(genuine, parent)[key] = hostile
            try:
                loader.load_state_dict(genuine)
            except outlive.PositionError:
                continue
            with contextlib.suppress(LookupError, TypeError):  # a part of what was replaced itself
                part_at(accepted, parent)[key] = hostile
        part_at(genuine, parent)[key] = part
    with contextlib.suppress(Exception):  # a dataset's or a sampler's own, to whom nonsense was told
        goes_on(name, accepted)
    goes_on(name, genuine)

    assert genuine == state_of(name)
    assert not marker.exists()


def test_no_pickle_in_an_incident_of_a_quarantine_is_run(tmp_path):
    """The class of an exception traveled as a pickle, and a quarantined sample's incident is part of a state."""
    marker = tmp_path / "ran"
    state = state_of("shuffled")
    [sample] = state["ledger"]["quarantine"]
    sample["incident"]["failure"]["pickled_type"] = pickle.dumps(Bomb(marker)).hex()
    loader = shuffled_with_bad_samples(0)
    loader.load_state_dict(state)
    [incident] = loader.quarantine.values()

    assert incident.failure.pickled_type is None
    assert not marker.exists()


@pytest.mark.parametrize("name", LOADERS)
def test_a_state_is_what_torch_loads_with_weights_only(name, tmp_path):
    """As the guide says; and what comes back is gone on from."""
    torch.save(state_of(name), tmp_path / "checkpoint.pt")
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)

    assert state == state_of(name)


# ---------------------------------------------------------------- contradictions

CONTRADICTIONS: dict[str, tuple[str, Where, Any]] = {
    "a batch is missing": ("shuffled, workers", ("begun", "received"), 0),
    "batches after the last": ("shuffled, workers", ("begun", "sent"), 10**6),
    "batches that nobody has": ("shuffled, workers", ("begun", "seqs"), []),
    "a slot that is not there": ("shuffled, workers", ("begun", "owners", 0), 7),
    "no slot": ("shuffled, workers", ("begun", "owners", 0), -1),
    "turns of no slot": ("shuffled, workers", ("begun", "next_slot"), 2),
    "endless draws": ("stream, workers", ("begun", "owed"), 10**15),
    "more drawn than there are": ("shuffled, workers", ("begun", "sampler", "drawn"), 10**15),
    "too few slots": ("shuffled, workers", ("begun", "slots"), []),
    "more epochs than there were": ("stream, workers", ("begun", "slots", 0), {"iterations": 10**15}),
    "a stream of batches without end": (
        "stream, workers",
        ("begun", "slots", 0, "stream", "runs"),
        [[1, 10**15, None]],
    ),
    "more taken than drawn": ("shuffled", ("begun", "taken"), 10**15),
    "more delivered than counted": ("shuffled", ("batches",), 10**15),
    "streams of an indexed dataset have ended": ("shuffled, workers", ("begun", "ended"), [0, 1]),
    "a worker died of a batch that is done": ("shuffled, workers", ("begun", "deaths"), [[0, [], 1]]),
    "a negative count": ("shuffled", ("ledger", "delivered"), -1),
    "a flag for a count": ("shuffled", ("ledger", "delivered"), True),
    "a number without end": ("shuffled", ("epoch",), 10**400),
    "nothing where a pass should be": ("shuffled", ("begun",), None),
    "another number of workers": ("shuffled, workers", ("num_workers",), 0),
}


@pytest.mark.parametrize(("name", "where", "value"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_state_that_contradicts_itself_is_refused_when_it_is_loaded(name, where, value):
    """`next()` would wait for ever, or draw for ever. The loader is left as it was."""
    make, workers, _ = LOADERS[name]
    loader = make(workers)
    before = loader.statistics()

    with pytest.raises(outlive.PositionError, match="the state is damaged"):
        loader.load_state_dict(with_part(state_of(name), where, value))
    assert loader.statistics() == before


@pytest.mark.parametrize("name", LOADERS)
def test_a_state_that_lacks_anything_is_refused_or_does_not_need_it(name):
    """Each key, left out: never a KeyError."""
    make, workers, _ = LOADERS[name]
    loader = make(workers)
    genuine = state_of(name)
    for where in places(genuine):
        if isinstance(part_at(genuine, where[:-1]), dict):
            truncated = json.loads(json.dumps(genuine))
            del part_at(truncated, where[:-1])[where[-1]]
            try:
                loader.load_state_dict(truncated)
            except outlive.PositionError:
                pass


# ---------------------------------------------------------------- anything

NUMBERS = st.sampled_from([-1, 0, 1, 2, 5, 625, 2**31, 2**32, 2**62, 2**63, 2**64, -(2**63), 10**30])
VALUES = st.one_of(
    NUMBERS,
    st.sampled_from([None, True, False, 0.5, float("nan"), float("inf"), "", "x", "!tuple", [], {}, [[]], {"": []}]),
    st.sampled_from(
        ["AAAA", "1", "__class__", [0, 0], {"!tuple": [1]}, {"!array": ["<i4", [9**9], ""]}, {"torch": ""}]
    ),
    st.recursive(st.integers() | st.text(max_size=3), lambda part: st.lists(part, max_size=3), max_leaves=5),
)


def change(state: Any, data: st.DataObject) -> Any:
    """One part of a state is lost, doubled, moved, cut short, or replaced."""
    where = data.draw(st.sampled_from(list(places(state))), "where")
    value = part_at(state, where)
    ways: list[Callable[[], Any]] = [lambda: data.draw(VALUES)]
    if isinstance(value, int):
        ways += [lambda: value + data.draw(st.integers(-3, 3)), lambda: data.draw(NUMBERS)] * 2
    if isinstance(value, str):
        ways += [lambda: value[: data.draw(st.integers(0, len(value)))], lambda: value[::-1]]
    if isinstance(value, list):
        ways += [lambda: value[1:], lambda: value + value[-1:], lambda: value[::-1]]
    ways += [lambda: part_at(state, data.draw(st.sampled_from(list(places(state)))))]
    return with_part(state, where, data.draw(st.sampled_from(ways))())


CHANGED = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


def indices_in(batches: list[Any]) -> list[int]:
    return [int(i) for batch in batches for i in (batch["index"] if isinstance(batch, dict) else batch[0])]


@pytest.mark.parametrize("name", [name for name, (_, workers, _) in LOADERS.items() if not workers])
@settings(max_examples=120, **CHANGED)
@given(data=st.data())
def test_a_changed_state_is_refused_or_gone_on_from(name, data):
    """In this process: no other error, no sample twice, and an end."""
    state = state_of(name)
    for _ in range(data.draw(st.integers(1, 3))):
        state = change(state, data)

    delivered = goes_on(name, state)

    if delivered is not None:
        indices = indices_in(delivered)
        assert len(indices) == len(set(indices)) <= SIZE + 5


@pytest.mark.parametrize("name", [name for name, (_, workers, _) in LOADERS.items() if workers])
@settings(max_examples=60, **CHANGED)
@given(data=st.data())
def test_a_changed_state_of_workers_is_refused_or_taken(name, data):
    """No other error when it is loaded. What is taken, workers go on from: see the next test."""
    state = state_of(name)
    for _ in range(data.draw(st.integers(1, 3))):
        state = change(state, data)
    try:
        LOADERS[name][0](2).load_state_dict(state)
    except outlive.PositionError:
        pass


@pytest.mark.parametrize("name", ["shuffled, workers", "stream, workers", "any sampler, workers"])
@settings(max_examples=4, **CHANGED)
@given(data=st.data())
def test_workers_go_on_from_a_changed_state_that_is_taken(name, data):
    """To an end, with no sample twice."""
    make, workers, _ = LOADERS[name]
    state = state_of(name)
    with make(workers) as loader:
        for _ in range(20):
            changed = change(state, data)
            try:
                loader.load_state_dict(changed)
            except outlive.PositionError:
                continue
            state = changed
        loader.load_state_dict(state)
        indices = indices_in(list(loader))

    assert len(indices) == len(set(indices))


# ---------------------------------------------------------------- files


@functools.cache
def position_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "position")
        seed_trainer()
        list(outlive.DataLoader(inputs.Noisy(8), batch_size=2, journal_position=path, journal_every=2))
        return path.read_bytes()


@settings(max_examples=150, **CHANGED)
@given(data=st.data())
def test_a_damaged_position_file_is_refused(data, tmp_path):
    """Cut short, or with other bytes: the same error, whatever it breaks."""
    whole = position_file()
    at = data.draw(st.integers(0, len(whole) - 1))
    path = tmp_path / "position"
    path.write_bytes(
        data.draw(st.sampled_from([whole[:at], whole[:at] + data.draw(st.binary(max_size=3)) + whole[at + 1 :]]))
    )

    if path.read_bytes() != whole:
        with pytest.raises(outlive.PositionError, match="damaged"):
            outlive.DataLoader(inputs.Noisy(8), batch_size=2, journal_position=path, journal_resume=True)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"[1,0,{}]", b"[1,0," + b"[" * 100_000, b"[1,0]", b'[1,0,{"!x":1}]', b"7"]
)
def test_a_forged_position_file_is_refused(body, tmp_path):
    """Its checksum is right, and what it says is no position."""
    path = tmp_path / "position"
    path.write_bytes(b"outlive position 2\n" + zlib.crc32(body).to_bytes(4, "little") + body)

    with pytest.raises(outlive.PositionError):
        outlive.DataLoader(inputs.Noisy(8), batch_size=2, journal_position=path).load_position()


def test_a_position_file_has_no_pickle_and_loses_no_type(tmp_path):
    """A dataset's own state comes back as it was: tuples, bytes, arrays and tensors."""
    path = tmp_path / "position"
    told = {"rng": torch.get_rng_state(), "pair": (1, b"\0"), 7: {2.5}, "draws": np.random.get_state()}
    seen: list[Any] = []

    class Stateful(inputs.Noisy):
        def state_dict(self) -> dict[Any, Any]:
            return told

        def load_state_dict(self, state: dict[Any, Any]) -> None:
            seen.append(state)

    list(outlive.DataLoader(Stateful(8), batch_size=2, journal_position=path))
    list(outlive.DataLoader(Stateful(8), batch_size=2, journal_position=path, journal_resume=True))
    [back] = seen

    assert b"ctorch" not in path.read_bytes()
    assert torch.equal(back.pop("rng"), told["rng"])
    drawn, given_away = back.pop("draws"), told["draws"]
    assert (drawn[0], *drawn[2:]) == (given_away[0], *given_away[2:])
    assert (drawn[1] == given_away[1]).all()
    assert back == {key: value for key, value in told.items() if key not in ("rng", "draws")}


@functools.cache
def check_state() -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state")
        progress = Progress()
        progress.position = state_of("stream with a state")
        progress.done.add(0, 4)
        progress.checked = 4
        progress.bad[3] = BadSample(3, cause="it is bad", exception="ValueError", when=1.0)
        StateFile(path, fingerprint.of(InOrder()), choice_of("5%", "1/2")).write(progress)
        return path.read_text()


@settings(max_examples=150, **CHANGED)
@given(data=st.data())
def test_a_changed_state_of_a_check_is_refused_or_taken(data, tmp_path):
    """What it has of a stream's loader is that loader's to check."""
    path = tmp_path / "state"
    path.write_text(json.dumps(change(json.loads(check_state()), data)))
    with contextlib.suppress(outlive.PositionError):
        progress = StateFile(path, fingerprint.of(InOrder()), choice_of("5%", "1/2")).read()
        assert progress.done.gaps(10) is not None
        assert isinstance(progress.position, dict | None)


def test_no_pickle_in_a_state_of_a_check_is_run(tmp_path):
    """As it was kept there before."""
    marker, path = tmp_path / "ran", tmp_path / "state"
    for hostile in disguises(marker):
        path.write_text(json.dumps({**json.loads(check_state()), "position": hostile}))
        with contextlib.suppress(outlive.PositionError):
            StateFile(path, fingerprint.of(InOrder()), choice_of("5%", "1/2")).read()

    assert not marker.exists()
