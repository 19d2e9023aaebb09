"""A group of ranks: waited for together, ended together, started again together.

Reads   handles, bells and output of all ranks, in one poll.
Writes  signals; incidents, to the log, the journal and whoever listens.
Never   outlives anything: ranks go with the launcher, and what they started with them.

    running ──a rank fails──► aftermath: who else fails by itself? ──► SIGTERM, SIGKILL ──► restart, or raise
       │  └──a rank takes too long──► look at all, SIGKILL ──────────────────────────────────┘
       └──all return──► done
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import signal
import sys
import time
from dataclasses import replace
from multiprocessing import util
from multiprocessing.process import BaseProcess

from outlive._forensics import autopsy, guard
from outlive._forensics.heralds import Herald
from outlive._forensics.ledger import Incidents
from outlive._forensics.surroundings import OomWatch
from outlive._system import processes
from outlive.errors import OutliveError
from outlive.incident import Exit, Failure, Incident, IncidentKind, Stage
from outlive.launch import environment, story
from outlive.launch.output import Pump
from outlive.launch.ranks import Plan, Rank
from outlive.launch.story import Fall, Other
from outlive.verdicts import Name

log = logging.getLogger("outlive")

UNGUARDED = 78  # the exit code of a rank whose main module calls spawn while the rank imports it
TERMINATE_S = 30.0  # between SIGTERM and SIGKILL; torch's
INTERRUPT_S = 1.0  # between our signal and SIGKILL when the caller is interrupted
AFTERMATH_S = 0.25  # others that fail because of the first do so at once, and are worth a line
_LOOK_S = 1.0  # at memory and limits
_REAP_S = 5.0  # a killed process that waits for a device may take longer: nobody can hurry it

_running: set[SpawnContext] = set()  # holds them: a context may be dropped, and its ranks go on
_exit_watched_by = -1


class SpawnContext:
    """The ranks of one `spawn`: `join`, `stop`, `processes`, `pids()`; `incidents`, `restarts`.

    Everything is noticed and done in `join`: failures, timeouts, restarts. Only output is passed on at all times.
    """

    def __init__(
        self, plan: Plan, herald: Herald, *, max_restarts: int, timeout_s: float | None, threaded: bool
    ) -> None:
        self.incidents = Incidents()
        self.restarts = 0
        self._plan = plan
        self._herald = herald
        self._max_restarts = max_restarts
        self._timeout_s = timeout_s
        self._owner = os.getpid()
        self._error: BaseException | None = None
        self._pump = Pump()
        self._oom = OomWatch()
        self._looked = time.monotonic()
        self._ranks: list[Rank] = []
        self._processes: list[BaseProcess] = []
        _running.add(self)
        try:
            self._start()
            if threaded and plan.prefix_output:
                self._pump.start_thread()
        except BaseException:
            self.stop()
            raise
        _watch_exit()

    # ------------------------------------------------------------ torch's

    @property
    def processes(self) -> list[BaseProcess]:
        """Of the present attempt, by rank."""
        return list(self._processes)

    def pids(self) -> list[int]:
        return [int(process.pid or -1) for process in self._processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until a rank has ended, `timeout` seconds at most; whether all of them have.

        When one fails, the others are ended: asked by SIGTERM (after `grace_period` seconds, in which they may end by
        themselves), killed after another `grace_period`, or 30 s. Then they are started again, or the error is raised.
        """
        if os.getpid() != self._owner:
            raise OutliveError("these ranks were started by another process; only that one can wait for them")
        if self._error is not None:
            raise self._error.with_traceback(None)
        try:
            return self._join(timeout, grace_period)
        except BaseException as error:
            if error is not self._error:  # Ctrl-C, most of the time
                self.stop(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End all ranks and what they started: by this signal, after a second by SIGKILL. Nothing is raised or told."""
        if os.getpid() != self._owner:
            return
        try:
            for rank in self._living():
                if rank.has_begun:
                    rank.signal(number)
                else:
                    rank.kill()  # still importing: it would only complain
            self._wait_for_end(INTERRUPT_S)
        finally:
            self._end_all()
            self._finish()

    # ------------------------------------------------------------ waiting

    def _join(self, timeout: float | None, grace_period: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        living = len(self._living())
        while living:
            self._attend(self._next_look(deadline))
            now = time.monotonic()
            if any(rank.noticed and not rank.succeeded for rank in self._ranks):
                return self._fail(self._fallen(grace_period))
            if self._timeout_s is not None and any(now - r.started > self._timeout_s for r in self._living()):
                overdue = self._overdue()
                if overdue is not None:
                    return self._fail(overdue)
            if len(self._living()) < living or (deadline is not None and now >= deadline):
                break
        if self._living():
            return False
        self._finish()
        return True

    def _living(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.runs]

    def _attend(self, deadline: float) -> None:
        """Wait for the next thing that happens, and take notice of it; for a second at most."""
        patience_s = max(0.0, min(_LOOK_S, deadline - time.monotonic()))
        living = self._living()
        poller = select.poll()
        for rank in living:
            poller.register(rank.handle, select.POLLIN)
            if not rank.noticed:
                poller.register(rank.bell, select.POLLIN)
        for fd in self._pump.descriptors():
            poller.register(fd, select.POLLIN)
        poller.poll(patience_s * 1000)
        # Once more, with the time taken before: what is not ready now has not happened until then. Between waking and
        # asking for the time, a busy machine may let others run, fail and complain.
        before, self._looked = self._looked, time.monotonic()
        ready = {fd for fd, _ in poller.poll(0)}
        heard = [fd for fd in ready if self._pump.attend(fd)]
        silent = len(heard) > len({*heard}.intersection(self._pump.descriptors()))  # a rank's output has ended
        told = {rank.index for rank in living if rank.bell in ready and rank.has_rung()}
        over = {rank.index for rank in living if rank.handle in ready}
        for rank in living if told or over or silent else ():
            rank.notice_dying(self._looked, before)
        for rank in living:
            rang, ended = rank.index in told, rank.index in over
            if (rang or ended) and not rank.asked_to_end:
                rank.notice(self._looked, before)
            if ended:
                rank.bury(self._oom)
            else:
                rank.vitals.look(self._looked, workers=len(living))
        self._oom.look(self._looked)

    def _next_look(self, deadline: float | None) -> float:
        """When somebody must be looked at, or the caller have an answer, at the latest."""
        until = time.monotonic() + _LOOK_S if deadline is None else deadline
        if self._timeout_s is not None:
            until = min([until, *(rank.started + self._timeout_s + 0.001 for rank in self._living())])
        return until

    # ------------------------------------------------------------ failing

    def _fallen(self, grace_period: float | None) -> Incident:
        """A rank has failed: end the others, and tell which was the first."""
        self._wait_for_end(AFTERMATH_S if grace_period is None else grace_period)
        for rank in self._living():
            if not rank.is_falling:
                log.warning("Terminating process %d via signal SIGTERM: another rank failed", rank.pid)
                rank.signal(signal.SIGTERM)
                if _is_stopped(rank):
                    rank.kill()
        self._wait_for_end(TERMINATE_S if grace_period is None else grace_period)
        self._end_all()
        falls = [
            Fall(rank.index, rank.noticed, rank.after, rank.failed_at)
            for rank in self._ranks
            if rank.noticed and not rank.succeeded
        ]
        first = story.first_of(falls)
        loser = self._ranks[first.rank]
        at = {fall.rank: fall.seen if fall.noted is None else fall.noted for fall in falls}
        others = [
            Other(
                rank.index,
                rank.exit,
                rank.failure,
                later_s=max(0.0, at[rank.index] - at[first.rank]) if rank.index in at else None,
                succeeded=rank.succeeded,
                alike=story.is_alike((rank.exit, rank.failure), (loser.exit, loser.failure)),
            )
            for rank in self._ranks
            if rank is not loser
        ]
        return replace(self._incident(loser), consequences=story.consequences(others))

    def _overdue(self) -> Incident | None:
        """Ranks run longer than they may: look at all of them, end them, and tell which keeps the others waiting."""
        now = time.monotonic()
        late = [rank for rank in self._living() if not processes.has_ended(rank.handle)]
        for rank in late:
            rank.see_hanging(now - rank.started)
        self._end_all()
        for rank in late:
            if rank.exit != Exit(signal=signal.SIGKILL):
                rank.hung_s = None  # it ended by itself while we looked
        late = [rank for rank in late if rank.hung_s is not None]
        if not late:
            failed = any(rank.noticed and not rank.succeeded for rank in self._ranks)
            return self._fallen(None) if failed else None
        judged = {rank.index: self._incident(rank) for rank in late}
        first = min(late, key=lambda r: (*story.blame(_name(judged[r.index]), judged[r.index].stack), r.index)).index
        others = [
            Other(
                rank.index,
                rank.exit,
                rank.failure,
                succeeded=rank.succeeded,
                hung=judged[rank.index].verdict.words if rank.index in judged else "",  # type: ignore[union-attr]
            )
            for rank in self._ranks
            if rank.index != first
        ]
        return replace(judged[first], consequences=story.consequences(others))

    def _fail(self, incident: Incident) -> bool:
        """Start all again, or raise."""
        again = self.restarts < self._max_restarts
        action = f"all ranks started again, restart {self.restarts + 1} of {self._max_restarts}" if again else "raised"
        incident = replace(incident, action=action, number=len(self.incidents))
        self.incidents = Incidents((*self.incidents, incident))
        self._herald.tell(incident)
        if again:
            self.restarts += 1
            self._start()
            return False
        from outlive.launch.raising import error_of  # late: it brings torch, where that is installed

        self._error = error_of(self.incidents, self._plan.nprocs)
        self._finish()
        raise self._error

    def _incident(self, rank: Rank) -> Incident:
        failure, exit = rank.failure, rank.exit
        hand, evidence = rank.in_hand, rank.evidence()
        kind = IncidentKind.EXCEPTION if failure is not None else IncidentKind.CRASH
        if rank.hung_s is not None:
            kind = IncidentKind.HANG
        elif failure is not None and hand.stage is Stage.PREPARING:
            kind = IncidentKind.START
        elif not rank.has_begun and exit is not None and exit.code is not None:
            kind = IncidentKind.START
            failure = Failure("", f"the process {exit.words} while it imported the main module", "", None, hand.stage)
            if exit.code == UNGUARDED:
                evidence = replace(evidence, unguarded=guard.unguarded_line() or "the main module")
        if failure is not None and kind is IncidentKind.EXCEPTION:
            exit = Exit(code=1)  # whatever became of it after that
        return autopsy.perform(
            Incident(
                kind,
                rank.index,
                self.restarts + 1,
                rank.pid,
                -1,
                hand,
                exit=exit,
                failure=failure,
                stack=rank.stack,
                evidence=evidence,
                attempt=self.restarts + 1,
                attempts_allowed=self._max_restarts + 1,
                id=secrets.token_hex(4),
                when=time.time(),
                hung=rank.hung_s is not None,
                role="rank",
                function=self._plan.call.name,
            )
        )

    # ------------------------------------------------------------ starting, ending

    def _start(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._ranks, self._processes = [], []
        shared = environment.shared(self._plan.nprocs, self.restarts)
        for index in range(self._plan.nprocs):
            rank = Rank(index, self._plan, environment.of_rank(index, shared), self._pump)
            self._ranks.append(rank)
            self._processes.append(rank.process)

    def _wait_for_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._living() and time.monotonic() < deadline:
            self._attend(deadline)

    def _end_all(self) -> None:
        """Kill what runs, with all that was started by anybody; wait until the kernel has done it."""
        interrupted = False
        waiting = list(self._ranks)
        while waiting:
            try:
                waiting[-1].kill()
                waiting.pop()
            except KeyboardInterrupt:  # somebody is impatient: all the more nobody may be left
                interrupted = True
        if interrupted:
            raise KeyboardInterrupt
        self._wait_for_end(_REAP_S)

    def _finish(self) -> None:
        """Nothing runs any more: let go of everything but what people ask for."""
        self._pump.close()
        for rank in self._ranks:
            rank.close()
        self._ranks = []
        self._oom.close()
        _running.discard(self)


def _name(incident: Incident) -> Name | None:
    return incident.verdict.name if incident.verdict is not None else None


def _is_stopped(rank: Rank) -> bool:
    """It would not see the signal before somebody continues it."""
    seen = processes.activity(rank.pid)
    return seen is not None and seen.stopped


def _watch_exit() -> None:
    """Ranks lead groups of their own, so Ctrl-C does not reach them: a launcher that it ends must not wait for them."""
    global _exit_watched_by
    if _exit_watched_by != os.getpid():
        _exit_watched_by = os.getpid()
        util.Finalize(None, _stop_if_interrupted, exitpriority=20)


def _stop_if_interrupted() -> None:
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        for context in list(_running):
            context.stop(signal.SIGINT)
