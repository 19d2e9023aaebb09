"""Sends incidents to a web address: Slack, Mattermost, or a service of your own.

Reads   incidents that it is called with.
Writes  HTTP, on a thread of its own.
Never   blocks or fails the job, or keeps more than `queue` incidents: where there is no answer, the oldest are dropped.
        Sends what may be private: of an incident what is in `_TOLD`, of the job no argument.
"""

from __future__ import annotations

import difflib
import encodings.idna  # noqa: F401  # what looking up a host would import later
import functools
import http.client
import json
import logging
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from outlive import private
from outlive._forensics.courier import Courier
from outlive._forensics.job import Job, this_job
from outlive.incident import Incident, IncidentKind
from outlive.plain import of_incident
from outlive.verdicts import Name

# All that the thread needs is imported here: a fork in the middle of an import leaves the child half a module.

log = logging.getLogger("outlive")

RETRY_PAUSES_S = (0.5, 2.0, 8.0)  # before the second, third and fourth try
_LONGEST_TEXT = 8 * 1024
# A field that is added to an incident is not sent until it is named here.
_TOLD = (
    *("id", "kind", "when", "number", "role", "slot", "incarnation", "pid", "epoch", "batch", "stage"),
    *("noun", "index", "indices", "described", "doing", "cause", "action", "attempt", "attempts_allowed"),
    *("signal", "code", "exception", "message", "traceback", "stack", "function", "consequences", "verdict"),
)
_TOLD_OF_VERDICT = ("name", "cause", "confidence", "remedies", "page")


class Webhook:
    """A callable for `on_incident=` that posts each incident as JSON.

    url        where to; http or https
    timeout_s  how long one try may wait for the server
    queue      how many incidents may wait; when there are more, the oldest is dropped (`dropped` counts)
    headers    more headers, such as {"Authorization": "Bearer …"}
    only       names of verdicts to send, such as ["oom-killer"]; all by default

    The body has the verdict, the sample, the message and the Python stack, `text`, one sentence that Slack and
    Mattermost show, and `job`. Arguments, registers, memory and what a worker wrote are not in it.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 5.0,
        queue: int = 100,
        headers: Mapping[str, str] | None = None,
        only: Iterable[str] | None = None,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f'url must be like "https://host/path", got {url!r}')
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be more than 0, got {timeout_s!r}")
        if queue < 1:
            raise ValueError(f"queue must be at least 1, got {queue!r}")
        self.only = None if only is None else frozenset(map(_name, [only] if isinstance(only, str) else only))
        self.timeout_s, self.queue = timeout_s, queue
        self._headers = dict(headers or {})
        self.url = url
        self._host = parts.hostname  # what may be logged: the path of such an address is often its secret
        self._opener = urllib.request.build_opener(_NoRedirect())
        # Counted by the courier's thread alone: a lock could be held at a fork, and nobody would release it there.
        self.sent = 0
        self.failed = 0
        self._told = False
        self._courier: Courier[tuple[Incident, Job]] = Courier(
            f"outlive-webhook-{self._host}", self._send, capacity=queue
        )

    def __call__(self, incident: Incident) -> None:
        """Take it, and return at once."""
        try:
            if incident.kind is IncidentKind.RECYCLED:
                return  # nothing went wrong
            if self.only is None or (incident.verdict is not None and incident.verdict.name in self.only):
                self._courier.post((incident, this_job()))
        except Exception:
            log.debug("an alert was not taken", exc_info=True)

    @property
    def dropped(self) -> int:
        """How many were never tried, because too many waited."""
        return self._courier.dropped

    def flush(self, deadline_s: float = 10.0) -> bool:
        """Wait until all were sent or given up; False: some still wait."""
        return self._courier.flush(deadline_s)

    def __repr__(self) -> str:
        return f"<Webhook to {self._host}: {self.sent} sent, {self.failed} failed, {self.dropped} dropped>"

    def __reduce__(self) -> tuple[Any, ...]:
        settings: dict[str, Any] = {
            "timeout_s": self.timeout_s,
            "queue": self.queue,
            "headers": self._headers,
            "only": self.only,
        }
        return functools.partial(Webhook, self.url, **settings), ()

    def _send(self, posted: Sequence[tuple[Incident, Job]]) -> None:
        for incident, job in posted:
            try:
                sent = self._try(_body(incident, job))
            except Exception:
                log.debug("an alert could not be made", exc_info=True)
                sent = False
            self.sent += sent
            self.failed += not sent

    def _try(self, body: bytes) -> bool:
        headers = {"Content-Type": "application/json", "User-Agent": "outlive"} | self._headers
        for pause_s in (0.0, *RETRY_PAUSES_S):
            # When the process is about to end, the first try is the last.
            if pause_s and self._courier.leaving.wait(pause_s):
                return False
            request = urllib.request.Request(self.url, body, headers, method="POST")
            try:
                with self._opener.open(request, timeout=self.timeout_s):
                    return True
            except urllib.error.HTTPError as error:
                error.close()
                self._tell(f"answered {error.code} {error.reason}")
                if error.code < 500 and error.code not in (408, 429):
                    return False  # it will not like the same thing better next time
            except (OSError, http.client.HTTPException) as error:
                self._tell(f"cannot be reached: {getattr(error, 'reason', None) or error}")
        return False

    def _tell(self, what: str) -> None:
        level = logging.DEBUG if self._told else logging.WARNING
        self._told = True
        log.log(
            level, "the webhook at %s %s; the job is not affected, and the journal has the incident", self._host, what
        )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST becomes a GET without its body: better an error that says so."""

    def redirect_request(self, *args: Any, **more: Any) -> None:
        return None


def sentence(incident: Incident, job: Job) -> str:
    """What a chat shows: what happened, why, what was done, where."""
    why = f" ({incident.verdict.words})" if incident.verdict is not None else ""
    named = f"; outlive report {incident.id}" if incident.id else ""
    program = f"{job.program or 'python'} ({job.place})"
    text = f"{replace(incident, action='')}{why}"
    done = f": {incident.action}" if incident.action else ""
    return f"{text[:2000]}{done}. {program}{named}"


def _body(incident: Incident, job: Job) -> bytes:
    incident = private.without(incident)
    whole = of_incident(incident)
    told: dict[str, Any] = {name: _short(whole[name]) for name in _TOLD}
    if incident.verdict is not None:
        told["verdict"] = {name: whole["verdict"][name] for name in _TOLD_OF_VERDICT}
    told["job"] = {"program": job.program, "pid": job.pid, "host": job.host, "rank": job.rank}
    return json.dumps(told | {"text": sentence(incident, job)}).encode("ascii")


def _short(value: Any) -> Any:
    """Servers refuse large bodies: of a long message or stack the beginning and the end."""
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        half = _LONGEST_TEXT // 2
        return f"{value[:half]}\n…\n{value[-half:]}"
    return value


def _name(name: str) -> Name:
    try:
        return Name(name)
    except ValueError:
        near = difflib.get_close_matches(str(name), [n.value for n in Name], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"only= has {name!r}, which is no verdict{hint} (`outlive explain` lists them)") from None
