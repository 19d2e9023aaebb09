"""A loader's position as plain values: what `state_dict()` returns, and what `load_state_dict()` takes.

Reads   random states, stands of slots, the ledger.
Writes  dictionaries of numbers and texts, which pickle, torch.save and JSON can carry.
Never   a dataset, a process or an iterator: those are for `resuming`.

Random states are most of it. Of a slot's three generators only those are told of that are not as they were seeded:
whoever does not use NumPy's does not carry it; torch's is told as the 32-bit words that it is, not as 64-bit ones.
"""

from __future__ import annotations

import base64
import functools
import pickle
import random
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data._utils import worker as torch_worker

from outlive import errors
from outlive._forensics.ledger import COUNTS, Ledger, StreamIndex
from outlive._worker import randomness
from outlive.engines.workers import Stand
from outlive.evidence import NO_EVIDENCE
from outlive.incident import Incident

FORMAT = 1
_GENERATORS = ("torch", "random", "numpy")
_WORDS = slice(24, 24 + 8 * 624)  # where a CPU generator of torch's has its words, each in 64 bits
_CPU_STATE = 5056
_LONGEST_TEXT = 2000  # of a traceback or a stack in a quarantined sample's incident


# ---------------------------------------------------------------- bytes


def to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def to_bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _dense(state: bytes) -> bytes:
    """A torch generator's state, at half its size where it is the one we know."""
    if len(state) == _CPU_STATE:
        words = memoryview(state)[_WORDS].cast("I")
        if not any(words[1::2].tobytes()):
            return b"w" + state[: _WORDS.start] + words[::2].tobytes() + state[_WORDS.stop :]
    return b"r" + state


def _whole(dense: bytes) -> bytes:
    if dense[:1] == b"r":
        return dense[1:]
    start, size = 1 + _WORDS.start, 4 * 624
    wide = bytearray(8 * 624)
    memoryview(wide).cast("I")[::2] = memoryview(dense[start : start + size]).cast("I")
    return dense[1:start] + bytes(wide) + dense[start + size :]


def of_generator(generator: Any) -> Any:
    """The state of a random generator of torch, Python or NumPy."""
    if isinstance(generator, torch.Generator):
        return to_text(_dense(generator.get_state().numpy().tobytes()))
    if isinstance(generator, random.Random):
        version, internal, gauss = generator.getstate()
        return {"python": [version, list(internal), gauss]}
    if hasattr(generator, "bit_generator"):
        return {"numpy": _without_arrays(generator.bit_generator.state)}
    return {"numpy": _without_arrays(generator.get_state(legacy=False))}


def set_generator(generator: Any, told: Any) -> None:
    """Set a random generator to a state. One that is of another kind by now keeps its own."""
    if isinstance(generator, torch.Generator):
        if isinstance(told, str):
            generator.set_state(torch.frombuffer(bytearray(_whole(to_bytes(told))), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        if "python" in told:
            version, internal, gauss = told["python"]
            generator.setstate((version, tuple(internal), gauss))
    elif "numpy" in told:
        state = _with_arrays(told["numpy"])
        if hasattr(generator, "bit_generator"):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)


def _without_arrays(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _without_arrays(value) for key, value in state.items()}
    if hasattr(state, "dtype"):
        return {"array": state.tolist(), "dtype": str(state.dtype)} if state.ndim else state.item()
    return state


def _with_arrays(state: Any) -> Any:
    import numpy

    if not isinstance(state, Mapping):
        return state
    if "array" in state:
        return numpy.array(state["array"], dtype=state["dtype"])
    return {key: _with_arrays(value) for key, value in state.items()}


# ---------------------------------------------------------------- random states

Parts = tuple[bytes, bytes, bytes]


def of_random(state: bytes, known: Parts | None = None) -> dict[str, str]:
    """The parts of a random state that differ from those that are known anyway."""
    parts = randomness.parts_of(state)
    told = {}
    for place, (name, part) in enumerate(zip(_GENERATORS, parts, strict=True)):
        if known is None or part != known[place]:
            told[name] = to_text(_dense(part) if name == "torch" and part else part)
    return told


def to_random(told: Mapping[str, str], known: Parts | None = None) -> bytes:
    parts = list(known or (b"", b"", b""))
    for place, name in enumerate(_GENERATORS):
        if name in told:
            part = to_bytes(told[name])
            parts[place] = _whole(part) if name == "torch" and part else part
    return randomness.joined((parts[0], parts[1], parts[2]))


@functools.lru_cache(maxsize=256)
def seeded(base_seed: int, slot: int) -> Parts:
    """The random state of a worker that has drawn nothing yet, as `Randomness` reads it."""
    seed = base_seed + slot
    generator = torch.Generator()
    generator.manual_seed(seed)
    _, (*words, index), _ = random.Random(seed).getstate()
    python_state = b"f" + b"\0" * 9 + struct.pack("<625I", index, *words)
    try:
        import numpy
    except ImportError:
        return generator.get_state().numpy().tobytes(), python_state, b""
    held: Any = numpy.random.RandomState(torch_worker._generate_state(base_seed, slot)).get_state()
    numpy_state = b"f" + struct.pack("<qd", held[3], held[4]) + held[1].tobytes() + struct.pack("<I", held[2])
    return generator.get_state().numpy().tobytes(), python_state, numpy_state


# ---------------------------------------------------------------- slots


def of_stand(stand: Stand, base_seed: int, slot: int) -> dict[str, Any]:
    known = seeded(base_seed, slot)
    told: dict[str, Any] = {}
    if stand.random_at_start is not None:
        told["random_at_start"] = of_random(stand.random_at_start, known)
    if stand.random_now is not None:
        told["random"] = of_random(stand.random_now, known)
    if stand.place is not None:
        told["place"] = to_text(stand.place)
    if stand.dataset is not None:
        told["dataset"] = to_text(stand.dataset)
    if stand.steps:
        told["steps"] = [[count, sorted(killers)] for count, killers in stand.steps]
    if stand.iterations:
        told["iterations"] = stand.iterations
    return told


def to_stand(told: Mapping[str, Any], base_seed: int, slot: int) -> Stand:
    known = seeded(base_seed, slot)
    at_start, now = told.get("random_at_start"), told.get("random")
    return Stand(
        None if at_start is None else to_random(at_start, known),
        None if now is None else to_random(now, known),
        to_bytes(told["place"]) if "place" in told else None,
        to_bytes(told["dataset"]) if "dataset" in told else None,
        tuple((count, frozenset(killers)) for count, killers in told.get("steps", ())),
        told.get("iterations", 0),
    )


# ---------------------------------------------------------------- the ledger


class LedgerTeller:
    """Tells what a ledger has counted and put in quarantine; each incident is put into words once."""

    def __init__(self) -> None:
        self._told: dict[Any, tuple[Incident, dict[str, Any]]] = {}

    def tell(self, ledger: Ledger, counts: Mapping[str, int]) -> dict[str, Any]:
        return {
            **{name: getattr(ledger, name) for name in ("delivered", "errored", "emptied")},
            **{name: getattr(ledger, name) + counts.get(name, 0) for name in COUNTS},
            "incidents": ledger.earlier + len(ledger.incidents),
            "quarantine": [self._sample(key, incident) for key, incident in ledger.quarantine.items()],
        }

    def _sample(self, key: Any, incident: Incident) -> dict[str, Any]:
        known = self._told.get(key)
        if known is None or known[0] is not incident:
            told = {"sample": _of_index(key), "incident": _slim(incident).to_dict()}
            known = self._told[key] = (incident, told)
        return known[1]


def restore_ledger(ledger: Ledger, told: Mapping[str, Any]) -> None:
    for name in ("delivered", "errored", "emptied", *COUNTS):
        setattr(ledger, name, told.get(name, 0))
    ledger.earlier = max(0, told["incidents"] - len(ledger.incidents))
    for sample in told["quarantine"]:
        ledger.quarantine.put(_to_index(sample["sample"]), Incident.from_dict(sample["incident"]))


def _slim(incident: Incident) -> Incident:
    failure = incident.failure
    if failure is not None:
        failure = replace(failure, traceback=failure.traceback[-_LONGEST_TEXT:])
    return replace(incident, evidence=NO_EVIDENCE, stack=incident.stack[-_LONGEST_TEXT:], failure=failure)


def _of_index(key: Any) -> Any:
    if isinstance(key, StreamIndex):
        return {"worker": key.worker, "ordinal": key.ordinal}
    if type(key) in (int, str):
        return key
    return {"pickled": to_text(pickle.dumps(key))}


def _to_index(told: Any) -> Any:
    if not isinstance(told, Mapping):
        return told
    if "pickled" in told:
        return pickle.loads(to_bytes(told["pickled"]))
    return StreamIndex(told["worker"], told["ordinal"])


# ---------------------------------------------------------------- does it fit?


def heading(loader: Any) -> dict[str, Any]:
    """What a position and the loader that takes it up must have in common."""
    stream = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    length = None
    if not stream:
        try:
            length = len(loader.dataset)
        except Exception:  # it has none: then the sampler knows how far indices go
            pass
    return {
        "outlive": FORMAT,
        "kind": "iterable" if stream else "map-style",
        "batch_size": loader.batch_size,
        "length": length,
        "num_workers": "auto" if loader._sizing is not None else int(loader.num_workers),
    }


_WORDS_FOR = {
    "kind": ("the dataset is {here}, the state is of one that is {there}", "load it with the dataset it was taken of"),
    "batch_size": ("batch_size is {here}, in the state it is {there}", "batches would be cut elsewhere; set {there}"),
    "length": ("the dataset has {here} samples, in the state it has {there}", "indices would mean other samples"),
}


def check(state: Any, loader: Any) -> None:
    """Raise an error that says what differs, with both values, where a position cannot be taken up."""
    if not isinstance(state, Mapping) or "outlive" not in state:
        raise errors.PositionError(
            "this is no state of outlive.DataLoader: it lacks the key 'outlive'; "
            "pass what state_dict() returned (torchdata's states have another form)"
        )
    if state["outlive"] != FORMAT:
        raise errors.PositionError(
            f"the state has format {state['outlive']}, this version of outlive reads {FORMAT}; "
            "load it with the version that wrote it"
        )
    here = heading(loader)
    for name, (said, advice) in _WORDS_FOR.items():
        if here[name] != state[name]:
            words = {"here": here[name], "there": state[name]}
            raise errors.PositionError(f"{said.format(**words)}: {advice.format(**words)}")
    if state["kind"] == "iterable" and "begun" in state and here["num_workers"] != state["num_workers"]:
        raise errors.PositionError(
            f"num_workers is {here['num_workers']}, in the state it is {state['num_workers']}: the streams of an "
            f"IterableDataset belong to their workers; set num_workers={state['num_workers']} until this epoch is over"
        )
