"""Raises in the trainer what was raised in a worker: same type, same text, plus a note with the sample.

Reads   an incident.
Writes  nothing.
Never   loses an exception because its class does not pickle or takes odd arguments.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import Any, NoReturn

from torch._utils import ExceptionWrapper

from outlive.incident import Incident

NOT_PICKLABLE = (  # torch's words, which its users search for
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)


def reraise(incident: Incident) -> NoReturn:
    raise rebuilt(incident)


def rebuilt(incident: Incident) -> BaseException:
    """The exception of the worker, as torch would raise it here."""
    failure = incident.failure
    assert failure is not None
    where = f"in DataLoader worker process {incident.slot}"
    try:
        kind = _type_of(failure.pickled_type)
        if kind is None:
            raise RuntimeError(f"Caught {failure.type_name} {where}.\nOriginal {failure.traceback}")
        wrapper: Any = ExceptionWrapper.__new__(ExceptionWrapper)
        wrapper.exc_type, wrapper.exc_msg, wrapper.where = kind, failure.traceback, where
        wrapper.reraise()
        raise AssertionError("ExceptionWrapper.reraise returned")
    except BaseException as error:
        if isinstance(error, StopIteration):
            # Raised out of next() it would pass for the end of the epoch, and the rest would be silently missing.
            error = RuntimeError(str(error))
        annotate(error, incident)
        return error.with_traceback(None)


def annotate(error: BaseException, incident: Incident) -> None:
    """Add what is known to an exception, as a note and as a field."""
    add_note(error, note(incident))
    with contextlib.suppress(Exception):  # likewise
        error.incident = incident  # type: ignore[attr-defined]


def note(incident: Incident) -> str:
    what = incident.sample or incident.in_hand.stage.words
    batch = f", batch {incident.batch} of epoch {incident.epoch}" if incident.batch >= 0 else ""
    pid = f" (pid {incident.pid})" if incident.pid > 0 else ""
    return f"outlive: {what}{batch}, worker {incident.slot}{pid}"


def add_note(error: BaseException, text: str) -> None:
    with contextlib.suppress(Exception):  # a class may refuse new attributes in any way it likes
        if hasattr(error, "add_note"):
            error.add_note(text)
        else:
            error.__notes__ = [*getattr(error, "__notes__", []), text]  # type: ignore[attr-defined]


def _type_of(pickled: bytes | None) -> Any:
    if pickled is None:
        return None
    try:
        return pickle.loads(pickled)
    except Exception:  # known to the worker only, say from a module that it alone imported
        return None
