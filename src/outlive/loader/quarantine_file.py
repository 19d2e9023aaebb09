"""A quarantine as a file: which samples of a dataset are known to be bad, by `outlive check`.

Reads   the file; what the dataset is (`fingerprint`); its `sample_id`, where it has one.
Writes  the file, whole or not at all; the loader's quarantine.
Never   takes a file for another dataset's in silence: indices of a changed dataset name other samples.

    check ─► write ─► quarantine.json ─► obey(path, loader) ─► ledger.quarantine ─► never tried
"""

from __future__ import annotations

import json
import logging
import os
import signal as _signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from outlive._forensics.ledger import StreamIndex
from outlive._system import safe_files
from outlive.errors import QuarantineFileError
from outlive.incident import Exit, Failure, Incident, IncidentKind, InHand, Stage
from outlive.loader import fingerprint
from outlive.loader.fingerprint import Fingerprint
from outlive.verdicts import Name, Verdict

log = logging.getLogger("outlive")

FORMAT = "outlive quarantine"
VERSION = 1
_MOST_NAMED = 5

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class OtherDatasetError(QuarantineFileError):
    """The file is of another dataset: what differs, and what can be done about it."""

    def __str__(self) -> str:
        return ".\n".join(self.args)


@dataclass(frozen=True)
class BadSample:
    """A sample that cannot be fetched, and why."""

    index: int | str  # where it was found; of a stream: the how manyth sample of its worker's
    kind: str = "exception"  # an IncidentKind's value
    verdict: str = ""  # a Name's value
    cause: str = ""
    worker: int | None = None  # of a stream: whose
    id: int | str | None = None  # what the dataset's `sample_id` calls it
    described: str = ""
    stage: str = "fetching"
    signal: str | None = None
    code: int | None = None
    exception: str | None = None
    message: str | None = None
    incident: str = ""  # its id in the journal: `outlive report ID`
    when: float = 0.0

    @property
    def key(self) -> Any:
        """As `loader.quarantine` names it."""
        return self.index if self.worker is None else StreamIndex(self.worker, int(self.index))

    @property
    def name(self) -> str:
        named = str(self.key) if self.id is None else f"{self.key} ({self.id})"
        return f"{named} ({self.described})" if self.described and self.id is None else named

    def to_incident(self, action: str) -> Incident:
        failure = None
        if self.exception is not None:
            failure = Failure(self.exception, self.message or "", "")
        number = next((int(s) for s in _signal.Signals if s.name == self.signal), None)
        ended = Exit(number, self.code) if number is not None or self.code is not None else None
        return Incident(
            IncidentKind(self.kind),
            -1 if self.worker is None else self.worker,
            0,
            -1,
            -1,
            InHand(Stage[self.stage.upper()]),
            action=action,
            index=self.key,
            indices=(self.key,),
            described=(self.described,) if self.described else (),
            exit=ended,
            failure=failure,
            verdict=Verdict(Name(self.verdict), self.cause) if self.verdict else None,
            id=self.incident,
            when=self.when,
        )


@dataclass(frozen=True)
class QuarantineFile:
    fingerprint: Fingerprint
    samples: tuple[BadSample, ...]
    workers: int | None = None  # of a stream: how many shared it when its samples were counted
    checked: int = 0
    total: int | None = None
    made: float = 0.0
    format: str = FORMAT
    version: int = VERSION

    def write(self, path: str | os.PathLike[str]) -> None:
        replace_file(Path(path), json.dumps(asdict(self), indent=1) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all, whenever we are killed."""
    safe_files.write(path, text.encode("utf-8"))


def load(path: str | os.PathLike[str]) -> QuarantineFile:
    """The file, checked."""
    again = "make it again with `outlive check`"
    try:
        told = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise QuarantineFileError(
            f"there is no quarantine file {path}; make it with `outlive check module:dataset --output {path}`"
        ) from None
    except OSError as error:
        raise QuarantineFileError(
            f"the quarantine file {path} cannot be read: {error.strerror}; let this user read it, or {again}"
        ) from None
    except ValueError as error:
        raise QuarantineFileError(f"{path} is no quarantine file: it is no JSON ({error}); {again}") from None
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise QuarantineFileError(f'{path} is no quarantine file: it lacks "format": "{FORMAT}"; {again}')
    if told.get("version") != VERSION:
        raise QuarantineFileError(
            f"{path} has version {told.get('version')} of its format, this outlive reads {VERSION}; {again}"
        )
    try:
        file = msgspec.convert(told, QuarantineFile)
        for sample in file.samples:
            sample.to_incident("")
    except (msgspec.ValidationError, ValueError, KeyError) as error:
        raise QuarantineFileError(f"{path} is damaged: {error}; {again}") from None
    return file


def obey(paths: Paths, loader: Any) -> None:
    """Have a loader never try what a file names, or several do. An error where one is of another dataset."""
    for path in _each(paths):
        _obey(path, loader, loader.dataset, log.warning)


def obey_where_it_fits(paths: Paths, loader: Any, dataset: Any) -> None:
    """The same for one of the loaders of a program, of which not all have the dataset that was checked: one that has
    another is told of once, and goes on as if there were no file.
    """
    for path in _each(paths):
        try:
            _obey(path, loader, dataset, _warn_once)
        except OtherDatasetError as error:
            kind = type(dataset).__qualname__
            _warn_once("%s. It does not count for the loader of this %s: all samples are tried", error.args[0], kind)


def check(paths: Paths) -> None:
    """Complain of files that cannot be read."""
    for path in _each(paths):
        load(path)


def _each(paths: Paths) -> Iterator[str | os.PathLike[str]]:
    one = isinstance(paths, (str, os.PathLike)) or not isinstance(paths, Iterable)
    several: Iterable[Any] = (paths,) if one else paths  # type: ignore[assignment]
    for path in several:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"quarantine must be a file by `outlive check`, or several, got {path!r}")
        yield path


_said: set[str] = set()


def _warn_once(text: str, *values: Any) -> None:
    said = text % values
    if said not in _said:
        _said.add(said)
        log.warning("%s", said)


def _obey(path: str | os.PathLike[str], loader: Any, dataset: Any, warn: Callable[..., None]) -> None:
    file = load(path)
    workers = int(loader.num_workers)
    ids = sample_ids(dataset)
    by_id = ids is not None and all(sample.id is not None for sample in file.samples)
    here = fingerprint.of(dataset)
    if not (by_id and here.kind == file.fingerprint.kind):
        _compare(path, file, here, workers, warn)
    action = f"not tried: known bad by {os.fspath(path)}"
    quarantine = loader._ledger.quarantine
    if not by_id:
        for sample in file.samples:
            quarantine.foresee(sample.key, sample.to_incident(action))
        return
    assert ids is not None
    found = indices_of(file.samples, ids, here.length or 0)
    for index, sample in found.items():
        there = BadSample(**{**asdict(sample), "index": index})
        quarantine.foresee(index, there.to_incident(action))
    gone = len({sample.id for sample in file.samples}) - len({sample.id for sample in found.values()})
    if gone:
        warn("%d of %d samples in %s are no longer in the dataset", gone, len(file.samples), path)


def _compare(
    path: str | os.PathLike[str], file: QuarantineFile, here: Fingerprint, workers: int, warn: Callable[..., None]
) -> None:
    grave, slight = here.differences(file.fingerprint)
    if file.workers is not None and file.workers != workers:
        grave.append(f"its stream was shared by {file.workers} workers, and num_workers is {workers}")
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.made))
    if grave:
        raise OtherDatasetError(
            f"{path} was made for another dataset ({made}): {_listed(grave)}",
            "Its indices would name other samples. Check again: outlive check module:dataset --output "
            f"{path}\n"
            "or give the dataset a method sample_id(index), such as a file name: a file made then goes by it.",
        )
    if slight:
        warn(
            "%s was made (%s) when the dataset was not quite the same: %s. Its samples are taken for the same; if "
            "what they are read from has changed, check again",
            path,
            made,
            _listed(slight),
        )


def _listed(differences: Sequence[str]) -> str:
    more = len(differences) - _MOST_NAMED
    return "; ".join(differences[:_MOST_NAMED]) + (f"; and {more} more differences" if more > 0 else "")


def sample_ids(dataset: Any) -> Callable[[int], Any] | None:
    """What calls its samples by names that outlive their places: the dataset's method `sample_id`; None: it has none.

    A Subset's are those of the dataset behind it.
    """
    own = getattr(dataset, "sample_id", None)
    if callable(own):
        return own  # type: ignore[no-any-return]
    behind, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    inner = getattr(behind, "sample_id", None)
    if callable(inner) and indices is not None:
        return lambda index: inner(indices[index])
    return None


def indices_of(samples: Sequence[BadSample], ids: Callable[[int], Any], length: int) -> dict[int, BadSample]:
    """Where samples are now. Most are where they were; only for others everything is looked through."""
    sought: Mapping[Any, BadSample] = {sample.id: sample for sample in samples}
    found: dict[int, BadSample] = {}
    for sample in samples:
        if isinstance(sample.index, int) and sample.index < length and ids(sample.index) == sample.id:
            found[sample.index] = sample
    if len(found) < len(sought):
        for index in range(length):
            known = sought.get(ids(index))
            if known is not None:
                found[index] = known
    return found
