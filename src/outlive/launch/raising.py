"""The errors of `spawn`, and their text: torch's first line, then who failed first and why, what became of the others.

Reads   incidents.
Writes  messages.
Never   needs torch: where it is installed, these are its exceptions as well, so that `except` clauses go on working.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outlive import errors
from outlive._forensics.ledger import Incidents
from outlive.errors import OutliveError
from outlive.incident import Exit, Incident, IncidentKind, first_line

_MOST_SAID = 3


def _torchs(name: str) -> Any:
    """Torch's class, or one without anything in it."""
    try:
        if importlib.util.find_spec("torch") is not None:
            return getattr(importlib.import_module("torch.multiprocessing.spawn"), name)
    except Exception:
        pass  # a torch that cannot be imported here raises nothing that anybody could wait for
    return type(name, (Exception,), {"__doc__": "Stands in for torch's, which is not installed."})


if TYPE_CHECKING:

    class _Raised(Exception): ...

    class _Exited(Exception):
        exit_code: int
        signal_name: str | None
else:
    _Raised, _Exited = _torchs("ProcessRaisedException"), _torchs("ProcessExitedException")


class SpawnError(OutliveError):
    """A rank failed, and the others were ended; `incident` is about the first that did, in the last attempt."""

    msg: str
    error_index: int
    error_pid: int
    incidents: tuple[Incident, ...] = Incidents()

    @property
    def incident(self) -> Incident | None:
        return self.incidents[-1] if self.incidents else None

    def _repr_html_(self) -> str | None:
        """For a notebook that shows the error as a value; one that is raised it prints as text."""
        return self.incident._repr_html_() if self.incident is not None else None

    def _set(self, msg: str, index: int, pid: int, incidents: Sequence[Incident]) -> None:
        Exception.__init__(self, msg)
        self.msg, self.error_index, self.error_pid, self.incidents = msg, index, pid, Incidents(incidents)


class RankRaisedError(SpawnError, _Raised):
    """The function raised in a rank. Also torch's ProcessRaisedException."""

    def __init__(self, msg: str, error_index: int, error_pid: int, incidents: Sequence[Incident] = ()) -> None:
        self._set(msg, error_index, error_pid, incidents)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.msg, self.error_index, self.error_pid, self.incidents)


class RankExitedError(SpawnError, _Exited):
    """A rank died of a signal, or exited with a code. Also torch's ProcessExitedException."""

    def __init__(
        self,
        msg: str,
        error_index: int,
        error_pid: int,
        exit_code: int,
        signal_name: str | None = None,
        incidents: Sequence[Incident] = (),
    ) -> None:
        self._set(msg, error_index, error_pid, incidents)
        self.exit_code, self.signal_name = exit_code, signal_name

    def __reduce__(self) -> tuple[Any, ...]:
        told = (self.msg, self.error_index, self.error_pid, self.exit_code, self.signal_name, self.incidents)
        return type(self), told


class RankHungError(RankExitedError):
    """A rank ran longer than `timeout=`, and was killed."""


class RankStartError(RankExitedError):
    """A rank did not get as far as calling the function."""


def error_of(incidents: Sequence[Incident], nprocs: int) -> SpawnError:
    """What the last of these incidents, one per attempt, is raised as."""
    incident = incidents[-1]
    index, pid, failure = incident.slot, incident.pid, incident.failure
    exit = incident.exit or Exit(code=1)
    body = _body(incident, nprocs, len(incidents))
    if failure is not None and incident.kind is IncidentKind.EXCEPTION:
        # The traceback comes last, as torch has it: what was raised is the last line in the terminal.
        text = f"\n\n-- Process {index} terminated with the following error:\n{body}\n{failure.traceback}"
        return RankRaisedError(text, index, pid, incidents)
    if exit.signal is not None:
        head, code, name = f"signal {exit.signal_name}", -exit.signal, exit.signal_name
    else:
        code, name = 255 if exit.code is None else exit.code, None
        head = f"exit code {code}"
    text = f"process {index} terminated with {head}\n\n{body}"
    if failure is not None and failure.traceback:
        text += f"\n{failure.traceback}"
    kind = RankHungError if incident.kind is IncidentKind.HANG else RankExitedError
    if incident.kind is IncidentKind.START:
        kind = RankStartError
    return kind(text, index, pid, code, name, incidents)


def _body(incident: Incident, nprocs: int, attempts: int) -> str:
    of = f" of {nprocs}" if nprocs > 1 else ""
    verdict = incident.verdict
    cause = verdict.words if verdict is not None else incident.cause
    rows = [("cause", cause), *errors.where(incident)]
    if incident.failure is None:
        said = [line for line in incident.evidence.last_words.splitlines() if line.strip()][-_MOST_SAID:]
        rows += [("" if n else "said", first_line(line, 160)) for n, line in enumerate(said)]
    rows += [("" if n else "others", text) for n, text in enumerate(incident.consequences)]
    if attempts > 1:
        rows.append(("state", f"attempt {attempts} of {incident.attempts_allowed}; no restart is left"))
    rows += [("" if n else "next", text) for n, text in enumerate(errors.remedies(incident))]
    lines = [f"  {name:<8} {text}" for name, text in rows]
    return "\n".join([f"rank {incident.slot}{of} (pid {incident.pid}) {_ended(incident)}", *lines, ""])


def _ended(incident: Incident) -> str:
    seconds = f", {incident.seconds_in_hand:.1f} s after its start"
    if incident.kind is IncidentKind.START:
        return f"{incident.cause}{seconds}"
    if incident.kind is IncidentKind.HANG:
        return f"{incident.cause} while {incident.doing}"
    return f"{incident.cause} while {incident.doing}{seconds}"
