"""Verdicts on real starts that fail: which attribute cannot be pickled, which import, which line of preparation."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import outlive
from outlive._forensics import unpicklable, verdict
from outlive.evidence import Evidence
from outlive.incident import Failure, Incident, IncidentKind, InHand, Stage
from outlive.verdicts import Name

pytestmark = [
    pytest.mark.filterwarnings("ignore:Got pickle error when attempting to start a worker Process"),
]
PROGRAMS = Path(__file__).parent / "programs"
HERE = Path(__file__).name
PICKLE_ERRORS = (TypeError, AttributeError, pickle.PicklingError)


class AttributeDataset(Dataset[int]):
    """Four healthy samples, and attributes that a test gives it."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(dataset: Any, method: str = "spawn", **more: Any) -> outlive.DataLoader[Any]:
    return outlive.DataLoader(dataset, num_workers=1, multiprocessing_context=method, **more)


def named(value: Any, **keywords: Any) -> Any:
    return value


def numbers() -> Iterator[int]:
    yield 1


class Slotted:
    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Reduced:
    """Says by itself how it is to be made again."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __reduce__(self) -> Any:
        return Reduced, (self.held,)


# What to hold, where it is then found, of which type, and words of the first remedy.
CULPRITS: dict[str, tuple[Callable[[], dict[str, Any]], str, str, str]] = {
    "lock": (lambda: {"lock": threading.Lock()}, "dataset.lock", "_thread.lock", "__getstate__"),
    "lambda-in-a-list": (
        lambda: {"steps": [named, {"a": (named, lambda x: x)}]},
        "dataset.steps[1]['a'][1]",
        "function",
        "top level of a module",
    ),
    "partial": (
        lambda: {"transform": functools.partial(named, lock=threading.RLock())},
        "dataset.transform.keywords['lock']",
        "_thread.RLock",
        "lock",
    ),
    "file": (
        lambda: {"source": open(os.devnull)},  # noqa: SIM115 - closed by the test
        "dataset.source",
        "_io.TextIOWrapper",
        "open dataset.source in the worker",
    ),
    "generator": (lambda: {"items": numbers()}, "dataset.items", "generator", "what makes the generator"),
    "slots": (lambda: {"held": Slotted()}, "dataset.held.lock", "_thread.lock", "lock"),
    "argument": (lambda: {"held": Reduced(threading.Lock())}, "dataset.held.held", "_thread.lock", "held"),
    "method": (
        lambda: {"read": AttributeDataset(lock=threading.Lock()).__getitem__},
        "dataset.read.__self__.lock",
        "_thread.lock",
        "lock",
    ),
    "behind-much": (
        lambda: {"rows": [str(n) for n in range(200_000)], "lock": threading.Lock()},
        "dataset.lock",
        "_thread.lock",
        "lock",
    ),
}


@pytest.mark.parametrize("name", CULPRITS)
def test_the_attribute_that_cannot_be_pickled_is_named(name: str) -> None:
    """The error is pickle's own, with a note on which part it was and what to do."""
    make, path, kind, remedy = CULPRITS[name]
    held = make()
    loader = loader_of(AttributeDataset(**held))

    with pytest.raises(PICKLE_ERRORS) as alone:
        ForkingPickler.dumps(AttributeDataset(**held))
    with pytest.raises(PICKLE_ERRORS) as caught:
        iter(loader)

    for value in held.values():
        if hasattr(value, "close"):
            value.close()
    incident = caught.value.incident  # type: ignore[attr-defined]
    assert incident.verdict.name is Name.UNPICKLABLE_DATASET
    assert path in incident.verdict.cause
    assert remedy in incident.verdict.remedies[0]
    part = incident.evidence.unpicklable[0]
    assert (part.path, part.type_name) == (path, kind)
    assert loader.incidents == (incident,)
    notes = "\n".join(caught.value.__notes__)
    assert path in notes
    assert incident.verdict.remedies[0] in notes
    assert (type(caught.value), str(caught.value)) == (type(alone.value), str(alone.value))


@pytest.mark.parametrize("method", ["forkserver"])
def test_it_is_named_under_forkserver_too(method: str) -> None:
    """The same pickle, another way to start."""
    loader = loader_of(AttributeDataset(lock=threading.Lock()), method)

    with pytest.raises(PICKLE_ERRORS) as caught:
        iter(loader)

    assert "dataset.lock" in "\n".join(caught.value.__notes__)


def test_other_parts_of_the_job_are_named_as_arguments_of_the_loader() -> None:
    """It need not be the dataset."""
    loader = loader_of(AttributeDataset(), collate_fn=lambda batch: batch)

    with pytest.raises(PICKLE_ERRORS) as caught:
        iter(loader)

    assert caught.value.incident.evidence.unpicklable[0].path == "collate_fn"  # type: ignore[attr-defined]


def test_what_can_be_pickled_is_not_called_unpicklable() -> None:
    """Whatever a healthy dataset holds: no false name."""
    context = multiprocessing.get_context("spawn")
    healthy = AttributeDataset(
        tensor=torch.zeros(3),
        array=np.zeros(3),
        objects=np.array([named], dtype=object),
        partial=functools.partial(named, 1),
        method=AttributeDataset().__getitem__,
        lock=context.Lock(),
        types=[int, AttributeDataset, np.float32, torch.nn.Linear],
        model=torch.nn.Linear(2, 2),
        generator=torch.Generator(),
        path=Path("a"),
        pattern=re.compile("a"),
    )
    healthy.itself = healthy  # type: ignore[attr-defined]

    assert unpicklable.find(healthy, "dataset") == ()


def test_an_array_of_objects_is_looked_into() -> None:
    """Other arrays are taken whole."""
    found = unpicklable.find(AttributeDataset(objects=np.array([threading.Lock()], dtype=object)), "dataset")

    assert [part.type_name for part in found] == ["_thread.lock"]
    assert found[0].path.startswith("dataset.objects")


# ---------------------------------------------------------------- in the worker


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_module_that_only_the_trainer_has_is_named(method: str) -> None:
    """Made by hand in sys.modules: pickle finds it here, and no worker there."""
    module = types.ModuleType("only_in_the_trainer")
    exec("class Thing:\n    pass\n", vars(module))
    sys.modules[module.__name__] = module
    try:
        loader = loader_of(AttributeDataset(thing=module.Thing()), method, faults=outlive.FaultPolicy(retries=0))
        with pytest.raises(ModuleNotFoundError) as caught:
            list(loader)
    finally:
        del sys.modules[module.__name__]

    judged = caught.value.incident.verdict  # type: ignore[attr-defined]
    assert judged.name is Name.IMPORT_FAILED
    assert "only_in_the_trainer" in judged.cause
    assert "PYTHONPATH" in judged.remedies[0]
    assert judged.cause in "\n".join(caught.value.__notes__)


def test_a_class_that_only_the_trainer_has_is_named() -> None:
    """As in a notebook: the module is there, the class is not."""
    module = sys.modules[__name__]
    late = type("Late", (), {"__module__": __name__})
    module.Late = late  # type: ignore[attr-defined]
    try:
        loader = loader_of(AttributeDataset(thing=late()), faults=outlive.FaultPolicy(retries=0))
        with pytest.raises(AttributeError) as caught:
            list(loader)
    finally:
        del module.Late  # type: ignore[attr-defined]

    judged = caught.value.incident.verdict  # type: ignore[attr-defined]
    assert judged.name is Name.IMPORT_FAILED
    assert "'Late'" in judged.cause


def fail_to_init(slot: int) -> None:
    raise ValueError(f"no such shard: {slot}")


class FailsToIterate(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise LookupError("no index")


class FailsToLoad(AttributeDataset):
    def __setstate__(self, state: Any) -> None:
        raise ValueError("cannot be restored")


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(
    ("dataset", "more", "words"),
    [
        (
            AttributeDataset(),
            {"worker_init_fn": fail_to_init},
            ("worker_init_fn raised ValueError: no such", "fail_to_init"),
        ),
        (FailsToIterate(), {}, ("iter(dataset) raised LookupError: no index", "__iter__")),
    ],
    ids=["worker_init_fn", "iter"],
)
def test_the_step_of_preparation_that_failed_is_named(
    method: str, dataset: Any, more: dict[str, Any], words: tuple[str, ...]
) -> None:
    """Which step, what it raised, and in which line."""
    loader = loader_of(dataset, method, faults=outlive.FaultPolicy(retries=0), **more)

    with pytest.raises((ValueError, LookupError)) as caught:
        list(loader)

    judged = caught.value.incident.verdict  # type: ignore[attr-defined]
    assert judged.name is Name.PREPARATION_FAILED
    assert [word for word in (*words, HERE) if word not in judged.cause] == []
    assert loader.incidents[-1].verdict == judged


def test_unpickling_that_fails_is_named() -> None:
    """User code in __setstate__ runs in the worker, and there it raised."""
    loader = loader_of(FailsToLoad(anything=1), faults=outlive.FaultPolicy(retries=0))

    with pytest.raises(ValueError, match="cannot be restored") as caught:
        list(loader)

    judged = caught.value.incident.verdict  # type: ignore[attr-defined]
    assert judged.name is Name.PREPARATION_FAILED
    assert "unpickling the dataset raised ValueError: cannot be restored" in judged.cause
    assert "__setstate__" in judged.cause


class RefusesToLeave(AttributeDataset):
    def __getstate__(self) -> Any:
        raise RuntimeError("stays where it is")


def test_a_dataset_that_refuses_to_be_pickled_is_named() -> None:
    """With whatever error its own __getstate__ raises."""
    loader = loader_of(AttributeDataset(inner=[RefusesToLeave()]))

    with pytest.raises(RuntimeError, match="stays where it is") as caught:
        iter(loader)

    incident = caught.value.incident  # type: ignore[attr-defined]
    assert incident.verdict.name is Name.UNPICKLABLE_DATASET
    assert "dataset.inner[0] cannot be pickled" in incident.verdict.cause
    assert "stays where it is" in incident.verdict.facts[0]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_missing_guard_is_told_in_one_clear_sentence(method: str) -> None:
    """And nothing multiplies: the program ends, by itself, with that one error."""
    ended = subprocess.run(
        [sys.executable, str(PROGRAMS / "no_guard.py"), method], capture_output=True, text=True, timeout=100
    )

    assert ended.returncode == 0, ended.stderr
    told = ended.stdout.splitlines()
    assert told[0] == "main-guard-missing"
    assert "no_guard.py:22 starts the loader outside of  if __name__" in ended.stdout
    assert 'put what starts the training under   if __name__ == "__main__":' in ended.stdout
    assert told[-1] == "3 {'main-guard-missing'}"


def test_an_error_of_the_users_is_not_taken_for_a_missing_guard() -> None:
    """A program without a guard may fail for other reasons: only multiprocessing's own check says that it is this."""
    told = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 3, in init\nRuntimeError: no\n'
    failed = Incident(
        IncidentKind.START,
        *(0, 1, -1, -1),
        in_hand=InHand(Stage.PREPARING),
        failure=Failure("RuntimeError", "no", told, stage=Stage.PREPARING),
        evidence=Evidence(unguarded="train.py:9"),
    )

    judged = verdict.judge(failed)

    assert judged.name is Name.PREPARATION_FAILED
    assert "RuntimeError: no (at train.py:3 init)" in judged.cause
