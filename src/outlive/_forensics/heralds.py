"""Tells of incidents: one line in the log, the journal, the summary of `outlive run`, and whoever listens.

Reads   incidents.
Writes  the log, the journal; calls the user's listeners.
Never   raises: what a listener raises is logged, once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from outlive._forensics import journal, tally
from outlive.incident import Incident, IncidentKind

log = logging.getLogger("outlive")


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """What this thread's loaders have to tell stays out of the log: whoever looks for it has a better answer."""
    own = threading.get_ident()

    def lets_pass(record: logging.LogRecord) -> bool:
        return record.thread != own or record.levelno >= logging.ERROR

    log.addFilter(lets_pass)
    try:
        yield
    finally:
        log.removeFilter(lets_pass)


def outlook(incident: Incident) -> str:
    """Of a worker that may hang: what it does, and when it is ended."""
    seen = incident.evidence.seen
    does = f": it {incident.verdict.cause}" if incident.verdict is not None else ""
    if seen is None or seen.limit_s is None:
        return does
    left_s = max(0.0, seen.limit_s - incident.seconds_in_hand)
    return f"{does}. It is ended at {seen.limit_s:.4g} s, in {left_s:.3g} s from now, unless it goes on"


class Herald:
    def __init__(self, listeners: Sequence[Callable[[Incident], object]] = ()) -> None:
        self.listeners = tuple(listeners)
        self._complained: set[int] = set()  # listeners that have failed, and the log has said so

    def tell_log(self, incident: Incident) -> None:
        """A hang that is suspected: what the worker does, and when that is acted on."""
        log.warning("%s%s", replace(incident, action=""), outlook(incident))

    def tell(self, incident: Incident) -> None:
        level = logging.INFO if incident.action in ("raised", "recycled") else logging.WARNING
        why = f" ({incident.verdict.words})" if incident.verdict is not None and incident.exit is not None else ""
        if incident.kind is IncidentKind.SUSPECTED_HANG:
            self.tell_log(incident)
        else:
            log.log(level, "%s%s", incident, why)
        journal.add(incident)
        tally.note(incident)
        for place, listener in enumerate(self.listeners):
            try:
                listener(incident)
            except Exception:
                if place not in self._complained:
                    self._complained.add(place)
                    log.exception("on_incident=%r failed; the job goes on, and this is said once", listener)
