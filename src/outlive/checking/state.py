"""How far a check is, on disk: a check that is killed goes on from there.

Reads   the file.
Writes  the file, whole or not at all.
Never   goes on with another dataset's, or with another choice of samples; never unpickles.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from outlive._forensics import journal
from outlive.checking.plan import Choice, Done, choice_of
from outlive.checking.spread import Spread
from outlive.errors import PositionError
from outlive.loader import fingerprint
from outlive.loader.epoch_state import Count
from outlive.loader.fingerprint import Fingerprint
from outlive.loader.plain_values import NotPlainError, from_plain, to_plain
from outlive.loader.quarantine_file import BadSample, replace_file

log = logging.getLogger("outlive")

_FORMAT = "outlive check 2"
_BEGINNING = b'{"format": "outlive check '  # of the file, in every version
_EVERY_S = 2.0
_COST = 20  # times what writing costs passes before the next


class Progress:
    """What is known so far."""

    def __init__(self) -> None:
        self.done = Done()  # of a plan
        self.checked = 0  # samples that were fetched well
        self.bad: dict[Any, BadSample] = {}
        self.shaky: dict[Any, BadSample] = {}
        self.unreached: list[str] = []
        self.nanoseconds = Spread()
        self.bytes = Spread()
        self.seconds = 0.0  # that earlier runs of this check took
        self.position: dict[str, Any] | None = None  # of a stream's loader


class StateFile:
    def __init__(self, path: Path, fingerprint: Fingerprint, choice: Choice) -> None:
        self.path = path
        self._heading = {"format": _FORMAT, "fingerprint": asdict(fingerprint), "choice": asdict(choice)}
        self._fingerprint = fingerprint
        self._due = time.monotonic() + _EVERY_S

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def write(self, progress: Progress) -> None:
        begun = time.monotonic()
        try:
            position = to_plain(progress.position, "the stream's state")
        except NotPlainError as error:
            log.warning("no state of this check is written, so that it cannot be resumed: %s", error)
            self._due = math.inf
            return
        told: dict[str, Any] = {
            **self._heading,
            "done": progress.done.intervals,
            "checked": progress.checked,
            "bad": [asdict(sample) for sample in progress.bad.values()],
            "shaky": [asdict(sample) for sample in progress.shaky.values()],
            "unreached": progress.unreached,
            "nanoseconds": progress.nanoseconds.to_dict(),
            "bytes": progress.bytes.to_dict(),
            "seconds": progress.seconds,
            "position": position,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, json.dumps(told))
        now = time.monotonic()
        self._due = now + max(_EVERY_S, _COST * (now - begun))

    def read(self) -> Progress | None:
        """How far it was; None: there is nothing to go on from."""
        anew = "begin anew without resume"
        try:
            told = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise PositionError(f"{self.path} is no state of a check ({error}); {anew}") from None
        if not isinstance(told, dict) or told.get("format") != _FORMAT:
            raise PositionError(f"{self.path} is no state of a check by this version of outlive; {anew}")
        try:
            choice = msgspec.convert(told["choice"], Choice)
            before = msgspec.convert(told["fingerprint"], Fingerprint)
            progress = _progress(told)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise PositionError(f"{self.path} is damaged ({error}); {anew}") from None
        if told["choice"] != self._heading["choice"]:
            words = choice.words or "all samples"
            raise PositionError(f"{self.path} is of a check of {words}; go on with the same choice, or {anew}")
        grave, slight = self._fingerprint.differences(before)
        if grave or slight:
            raise PositionError(f"the dataset has changed since {self.path}: {'; '.join(grave + slight)}; {anew}")
        return progress

    def refuse_other_file(self) -> None:
        """Raise PositionError where this would write over a file of the user's that is no state of a check."""
        if self.path.is_file() and self.path.stat().st_size and not self._is_state():
            raise PositionError(
                f"{self.path} is there, and is no state of a check; name another file, or remove this one"
            )

    def remove(self) -> None:
        with contextlib.suppress(OSError):  # then it is written over
            if self._is_state():
                self.path.unlink()

    def _is_state(self) -> bool:
        """Whether a check wrote the file: nothing else may be removed."""
        if not self.path.is_file():  # /dev/null, say
            return False
        with open(self.path, "rb") as file:
            return file.read(len(_BEGINNING)) == _BEGINNING


def _progress(told: dict[str, Any]) -> Progress:
    progress = Progress()
    progress.done = _done(msgspec.convert(told["done"], list[tuple[Count, Count]]))
    progress.checked = msgspec.convert(told["checked"], Count)
    for kept, name in ((progress.bad, "bad"), (progress.shaky, "shaky")):
        for sample in msgspec.convert(told[name], list[BadSample]):
            sample.to_incident("")  # its words are ours, or it raises
            kept[sample.key] = sample
    progress.unreached = msgspec.convert(told["unreached"], list[str])
    progress.nanoseconds = Spread.from_dict(told["nanoseconds"])
    progress.bytes = Spread.from_dict(told["bytes"])
    progress.seconds = msgspec.convert(told["seconds"], float)
    position = from_plain(told["position"])
    progress.position = msgspec.convert(position, dict[str, Any] | None)
    return progress


def _done(intervals: list[tuple[int, int]]) -> Done:
    edges = [edge for interval in intervals for edge in interval]
    if edges != sorted(edges):
        raise ValueError("what is done is told out of order")
    return Done(intervals)


def path_for(dataset: Any, sample: Any, shard: Any, seed: int) -> Path:
    """The same, before anything is checked."""
    return default_path(fingerprint.of(dataset), choice_of(sample, shard, seed))


def default_path(what: Fingerprint, choice: Choice) -> Path:
    """Where a check keeps its state if nobody says where: the same for the same dataset and choice."""
    told = f"{what.digest}-{choice.shard + 1}of{choice.shards}"
    if choice.share is not None or choice.number is not None:
        told += f"-{choice.share or choice.number:g}-{choice.seed}"
    return journal.make_home() / "checks" / f"{told}.json"
