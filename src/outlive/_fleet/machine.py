"""Decides when a worker is replaced, a task redone, a sample condemned, a loader given up.

Reads   events, and the time it is handed.
Writes  nothing; answers with actions.
Never   a process, a file, a lock, the clock.

    slot   empty → starting → ready → empty (any exit) → starting …
    task   queued → sent ⇄ (its worker died) → concluded: delivered | empty | errored | ended

A slot's tasks are done in the order in which they were submitted. When its worker dies, those
that did not arrive are sent to the next incarnation in the same order. A task that kills
workers without showing which sample did it is searched by halving; the slot's other tasks wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outlive import records as r
from outlive._fleet import incidents
from outlive._fleet.breaker import Breaker
from outlive._fleet.crew import Crew
from outlive._fleet.dealing import Dealer
from outlive._fleet.halving import Halving
from outlive._fleet.policy import Intensity, too_many_bad
from outlive._fleet.renewal import Renewal
from outlive._fleet.state import OWN_STAGES, START_STAGES, Question, Slot, Task
from outlive.incident import Decision, Failure, Incident, IncidentKind, Stage
from outlive.records import Action, Event, Outcome
from outlive.settings import FaultPolicy

LEAST_STARTS = 3  # a worker that dies while it starts gets so many tries, whatever the policy


class Machine:
    """One fleet's decisions. Deterministic: the same events at the same times give the same actions."""

    def __init__(self, slots: int, policy: FaultPolicy, *, takes_turns: bool = True, never_twice: bool = False) -> None:
        self.policy = policy
        self._never_twice = never_twice  # a task that was begun is not begun again, whoever is to blame
        self.tasks_pay = False  # a task in hand pays for each death: they are no reason to give others up
        self.slots = [Slot(n) for n in range(slots)]
        self.crew = Crew(self.slots, self._start, self._do, takes_turns=takes_turns)
        self.tasks: dict[int, Task] = {}
        self.dealer = Dealer(self.slots, self.tasks, self._do)
        self.renewal = Renewal(self.slots, self._do)
        self.given_up = False
        self.restarts = self.retries = self.replaced = self.recycled = self.spared = self.healed = 0
        self.bad = self.drawn = self._tickets = 0
        self._concluded = 0  # tasks so far: what counts as progress
        self._intensity = Intensity(policy.max_restarts, policy.restart_window_s)
        self.breaker = Breaker(policy)
        self.questions: dict[int, Question] = {}
        self._actions: list[Action] = []
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            r.TaskSubmitted: self._task_submitted,
            r.WorkerReady: self._worker_ready,
            r.TaskFinished: self._task_finished,
            r.TaskErrored: self._task_errored,
            r.TaskRetried: self._task_retried,
            r.WorkerExited: self._worker_exited,
            r.PreparationFailed: self._preparation_failed,
            r.WorkerSuspected: lambda event, now: self._report_of(event, incidents.of_suspicion(event), event.again),
            r.WorkerGrew: lambda event, now: self._report_of(event, incidents.of_growth(event)),
            r.MemoryTold: self.crew.memory_told,
            r.SizeWanted: lambda event, now: self.crew.want(event.workers),
            r.DecisionAsked: self._decision_asked,
            r.DecisionMade: self._decision_made,
            r.SourceDoubted: self._source_doubted,
            r.SourceProbed: lambda event, now: self._heed(self.breaker.probed(event, now)),
            r.WorkersRenewed: self._workers_renewed,
            r.RenewalFailed: lambda event, now: self._heed(self.renewal.failed(event)),
            r.EpochBegan: self._epoch_began,
        }

    def begin(self) -> list[Action]:
        """Fill the slots."""
        self.crew.arrange()
        return self._take_actions()

    def handle(self, event: Event, now: float) -> list[Action]:
        if self.given_up:
            return []
        self._handlers[type(event)](event, now)
        return self._take_actions()

    def _take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _do(self, action: Action) -> None:
        self._actions.append(action)

    # ------------------------------------------------------------ healthy work

    def _task_submitted(self, event: r.TaskSubmitted, now: float) -> None:
        self.drawn += event.size
        if event.slot >= 0 and self.slots[event.slot].ended:
            self._do(r.ConcludeTask(event.seq, Outcome.ENDED))
            return
        task = self.tasks[event.seq] = Task(event.seq, event.slot, event.size, event.skippable)
        if (event.known_bad or event.spared or event.exchanged) and self._leave_out(task, event):
            del self.tasks[event.seq]
            self._do(r.ConcludeTask(event.seq, Outcome.EMPTY))
            return
        self.dealer.add(task)
        if self.crew.is_short and event.slot >= 0 and self.slots[event.slot].state == "empty":
            self.crew.arrange()

    def _leave_out(self, task: Task, event: r.TaskSubmitted) -> bool:
        """Leave out what is known to be bad, by an earlier epoch or by a file; True when nothing is left."""
        task.leave_out(event, self.policy.crash_rule)
        self.spared += len(event.spared) + len(event.exchanged)
        self.replaced += len(event.exchanged)
        return not task.live()

    def _worker_ready(self, event: r.WorkerReady, now: float) -> None:
        slot = self.slots[event.slot]
        if event.incarnation == slot.incarnation and slot.state == "starting":
            slot.state = "ready"
            slot.failed_starts = 0
            slot.can_skip = event.can_skip
            if self.crew.is_short:
                self.crew.arrange()

    def _task_finished(self, event: r.TaskFinished, now: float) -> None:
        slot = self.slots[event.slot]
        task = self._current(event.slot, event.incarnation, event.seq)
        if task is None:
            return
        slot.state = "ready"
        slot.failed_starts = 0
        if task.search is not None and not event.ended:
            self._search_on(slot, task, survived=True)
            return
        if event.failures:
            self._note_failures(task, slot, event.failures, now)
            if self.given_up:
                return
        elif not task.excluded and not task.substitutes:
            self.breaker.good_batch = event.seq
            if self.breaker.deserted:
                self._heed(self.breaker.close(now))
        if event.ended:
            self._end_stream(slot)
        else:
            self._conclude(slot, task, Outcome.EMPTY if event.empty else Outcome.DELIVERED)

    def _task_errored(self, event: r.TaskErrored, now: float) -> None:
        slot = self.slots[event.slot]
        task = self._current(event.slot, event.incarnation, event.seq)
        if task is None:
            return
        if task.search is not None:  # an error is a survival: the search is for what kills
            self._search_on(slot, task, survived=True)
            return
        if event.earlier:
            self._note_failures(task, slot, event.earlier, now)
            if self.given_up:
                return
        incident = self._failure_incident(slot, task, event.failure, "raised")
        self._do(r.ReportIncident(incident))
        self._conclude(slot, task, Outcome.ERRORED, incident)
        if event.ended:
            self._end_stream(slot)

    def _note_failures(self, task: Task, slot: Slot, failures: tuple[Failure, ...], now: float) -> None:
        """Failures that the worker has dealt with by itself, by the plain policy."""
        for failure in failures:
            replaced = failure.decision is Decision.REPLACE
            done = "replaced by another sample" if replaced else "left out"
            incident = self._failure_incident(slot, task, failure, done)
            self._condemn(task, incident.positions, incident, replaced)

    def _task_retried(self, event: r.TaskRetried, now: float) -> None:
        task = self._current(event.slot, event.incarnation, event.seq)
        if task is not None:
            self.retries += 1
            self._do(r.ReportIncident(self._failure_incident(self.slots[event.slot], task, event.failure, "retried")))

    def _failure_incident(self, slot: Slot, task: Task, failure: Failure, action: str) -> Incident:
        return incidents.of_failure(slot, task, failure, action, self.policy.retries + 1)

    def _conclude(self, slot: Slot, task: Task, outcome: Outcome, incident: Incident | None = None) -> None:
        if slot.queue.index(task.seq) < slot.sent:
            slot.sent -= 1
        slot.queue.remove(task.seq)  # nearly always the first
        del self.tasks[task.seq]
        self._concluded += 1
        self._do(r.ConcludeTask(task.seq, outcome, incident))
        self.dealer.send(slot)
        if not slot.queue and self.crew.is_short:
            self.crew.arrange()

    def _end_stream(self, slot: Slot) -> None:
        """A stream has no more: what was still asked of it will not come."""
        slot.ended = True
        while slot.queue:
            seq = slot.queue.popleft()
            del self.tasks[seq]
            self._do(r.ConcludeTask(seq, Outcome.ENDED))
        slot.sent = 0
        if self.crew.is_short:
            self.crew.arrange()

    # ------------------------------------------------------------ deaths

    def _worker_exited(self, event: r.WorkerExited, now: float) -> None:
        slot = self.slots[event.slot]
        if event.incarnation != slot.incarnation or slot.state == "empty":
            return
        started = slot.state == "ready"
        slot.state, slot.sent = "empty", 0
        dismissed, slot.leaving = slot.leaving, False
        self._heed(self.breaker.exited(slot.number, now))
        if self.renewal.took(event) or event.recycled:
            if event.recycled and not dismissed:
                self.recycled += 1
                self._do(r.ReportIncident(incidents.of_recycling(event)))
            self._fill(slot)
            return
        incident = incidents.of_death(event, self.policy.retries + 1)
        if self.renewal.is_due(event) and not self._never_twice:
            self.restarts += 1
            self.renewal.begin(incident)
            return
        stage = event.in_hand.stage
        head = self.tasks.get(slot.queue[0]) if slot.queue else None
        in_hand = head is not None and (head.seq == event.in_hand.batch or stage is Stage.AT_WORK)
        if head is not None and stage is Stage.AT_WORK:
            incident = replace(incident, batch=head.seq)
        pays = self.tasks_pay and in_hand and not event.blameless
        if head is not None and in_hand and (self._never_twice or (pays and stage in OWN_STAGES)):
            self._died_with(slot, head, incident)
        elif self.crew.was_killed_for_memory(event, incident, now):
            pass  # nobody's fault, and told
        elif stage is Stage.DELIVERING and head is not None and in_hand and head.keeps_being_undelivered():
            if event.unsent is None:
                self._died_with(slot, head, incident)
            else:
                self._do(r.ReportIncident(replace(incident, action="gave up")))
                text = f"{head.undelivered} workers have made batch {head.seq}, and none of them could send it"
                self._give_up(r.LimitKind.UNSENT, text, incident)
        elif event.blameless or stage in OWN_STAGES:
            self._do(r.ReportIncident(incident))
        elif stage in START_STAGES or not started:
            if stage is Stage.FORWARDING:
                self._do(r.ReportIncident(incident))  # as long as a stream is long: only the intensity limits these
            else:
                self._start_failed(slot, replace(incident, kind=IncidentKind.START))
        elif head is None or not in_hand:
            self._do(r.ReportIncident(incident))
        elif stage is Stage.FETCHING and head.has(event.in_hand.position):
            self._died_at(slot, head, event.in_hand.position, incident)
        else:
            self._died_with(slot, head, incident)
        if self.given_up:
            return
        self.restarts += 1
        if not pays and self._intensity.exceeded_by(now, self._concluded, waiting=bool(self.tasks)):
            self._give_up(r.LimitKind.RESTARTS, self._intensity.words, incident)
            return
        self._fill(slot)

    def _fill(self, slot: Slot) -> None:
        """Start a worker where one is missing and wanted; here, if there may be one more."""
        if not self.crew.is_short:
            if slot.state == "empty" and not (slot.ended and not slot.queue):
                self._start(slot)
            return
        self.crew.arrange()
        if slot.state == "empty":
            self.dealer.pass_on(slot)

    def _died_at(self, slot: Slot, task: Task, position: int, incident: Incident) -> None:
        deaths = task.deaths[position] = task.deaths.get(position, 0) + 1
        incident = replace(incident, positions=(position,), attempt=deaths)
        if deaths <= self.policy.retries:
            self.retries += 1
            self._do(r.ReportIncident(replace(incident, action="replaced, sample tried again")))
            return
        self._poison(slot, task, (position,), incident)

    def _died_with(self, slot: Slot, task: Task, incident: Incident) -> None:
        """The worker died with a whole batch in hand: in __getitems__, collating or sending."""
        if task.search is not None:
            incident = replace(incident, positions=task.search.probe)
            if not task.search.would_end:
                self._do(r.ReportIncident(replace(incident, action="searched by halving")))
            self._search_on(slot, task, survived=False, incident=incident)
            return
        task.whole_deaths += 1
        live = task.live()
        incident = replace(incident, positions=live, attempt=task.whole_deaths)
        if self.tasks_pay and len(live) > 1:  # whoever submitted it sends its parts one by one
            self._do(r.ReportIncident(replace(incident, action="replaced, each sample tried alone")))
            self._conclude(slot, task, Outcome.ERRORED, incident)
            return
        if task.whole_deaths <= self.policy.retries:
            self.retries += 1
            self._do(r.ReportIncident(replace(incident, action="replaced, batch tried again")))
            return
        if len(suspects := task.suspects()) <= 1:
            self._poison(slot, task, live, incident)
            return
        self._do(r.ReportIncident(replace(incident, action="searched by halving")))
        task.search = Halving(suspects)

    def _search_on(self, slot: Slot, task: Task, *, survived: bool, incident: Incident | None = None) -> None:
        assert task.search is not None
        search = task.search
        search.learn(survived)
        if search.culprits is None:
            slot.sent = 0
            self.dealer.send(slot)
            return
        culprits = search.culprits if len(search.culprits) == 1 else task.live()
        task.search, task.whole_deaths, slot.sent = None, 0, 0
        if incident is None:
            incident = incidents.of_search(slot, task, self.policy.retries + 1)
        attempt = 1 + max(task.deaths.get(p, self.policy.retries) for p in culprits)
        task.deaths.update(dict.fromkeys(culprits, attempt))
        self._poison(slot, task, culprits, replace(incident, attempt=attempt))
        if slot.state != "empty":
            self.dealer.send(slot)

    def _poison(self, slot: Slot, task: Task, positions: tuple[int, ...], incident: Incident) -> None:
        """These samples have killed as many workers as they may."""
        incident = replace(incident, positions=positions)
        rule = self.policy.crash_rule
        if callable(rule):
            self._ask(Question(incident, slot.number, slot.incarnation, task, positions))
        else:
            self._sentence(slot, task, positions, incident, Decision(rule))

    def _sentence(
        self, slot: Slot, task: Task, positions: tuple[int, ...], incident: Incident, decision: Decision
    ) -> None:
        stuck = not task.skippable and not slot.can_skip and incident.in_hand.stage is Stage.FETCHING
        if decision is Decision.RETRY:
            self.retries += 1
            self._do(r.ReportIncident(replace(incident, action="replaced, sample tried again")))
            return
        if incident.in_hand.stand_in is not None and not any(task.substitutes.get(p) for p in positions):
            # The worker put it there itself, and took with it what it knew of the sample that was there before.
            lost = incidents.of_lost(slot, task, positions)
            self._condemn(task, positions, lost, True)
        if decision is Decision.REPLACE and not stuck:
            used = max((task.substitutes.get(p, 0) for p in positions), default=0)
            if used >= r.MOST_SUBSTITUTES:
                decision = Decision.RAISE
        if decision is Decision.RAISE or stuck:
            incident = replace(incident, action="raised", stuck=stuck)
            self._do(r.ReportIncident(incident))
            if not task.skippable and not stuck:
                killers = positions if incident.in_hand.stage is Stage.FETCHING else ()
                self._do(r.StepOver(slot.number, task.size, frozenset(task.excluded.union(killers))))
            self._conclude(slot, task, Outcome.ERRORED, incident)
            if stuck:
                self._end_stream(slot)
            return
        if decision is Decision.REPLACE:
            task.whole_deaths = 0
            for position in positions:
                task.substitutes[position] = task.substitutes.get(position, 0) + 1
                task.deaths.pop(position, None)
            self._condemn(task, positions, replace(incident, action="replaced by another sample"), True)
        else:
            task.excluded.update(positions)
            self._condemn(task, positions, replace(incident, action="left out"), False)
        if not self.given_up and not task.live() and task.skippable:  # a stream's worker must step over them itself
            self._conclude(slot, task, Outcome.EMPTY)

    def _condemn(self, task: Task, positions: tuple[int, ...], incident: Incident, replaced: bool) -> None:
        self._do(r.ReportIncident(incident))
        self._do(r.PutInQuarantine(task.seq, positions, incident))
        self.bad += max(1, len(positions))
        if replaced:
            self.replaced += max(1, len(positions))
        if too_many_bad(self.policy, self.bad, self.drawn):
            limit = self.policy.max_bad
            allowed = f"{limit:.0%} of {self.drawn}" if isinstance(limit, float) else str(limit)
            self._give_up(r.LimitKind.BAD_SAMPLES, f"{self.bad} samples are bad; the policy allows {allowed}", incident)

    # ------------------------------------------------------------ starts

    def _preparation_failed(self, event: r.PreparationFailed, now: float) -> None:
        slot = self.slots[event.slot]
        if event.incarnation != slot.incarnation:
            return
        slot.state = "empty"
        self._start_failed(slot, incidents.of_preparation(event))
        if not self.given_up:
            self.restarts += 1
            self._fill(slot)

    def _start_failed(self, slot: Slot, incident: Incident) -> None:
        slot.failed_starts += 1
        # An exception in worker_init_fn comes again; a kill from outside need not.
        allowed = self.policy.retries + 1
        if incident.failure is None or not incident.failure.type_name:
            allowed = max(LEAST_STARTS, allowed)
        incident = replace(incident, attempt=slot.failed_starts, attempts_allowed=allowed, action="started again")
        if slot.failed_starts < allowed:
            self._do(r.ReportIncident(incident))
            return
        self._give_up(
            r.LimitKind.STARTS, f"worker {slot.number} could not be started", replace(incident, action="gave up")
        )

    def _start(self, slot: Slot) -> None:
        slot.incarnation += 1
        slot.state = "starting"
        slot.sent = 0
        slot.leaving = False
        self._do(r.StartWorker(slot.number, slot.incarnation))
        self.dealer.send(slot)

    # ------------------------------------------------------------ the rest

    def _report_of(self, event: r.WorkerSuspected | r.WorkerGrew, incident: Incident, again: bool = False) -> None:
        if event.incarnation == self.slots[event.slot].incarnation:
            self._do(r.ReportIncident(incident, again))

    def _workers_renewed(self, event: r.WorkersRenewed, now: float) -> None:
        self.healed += 1
        self.renewal.done(event.alone)
        self.crew.arrange()

    def _decision_asked(self, event: r.DecisionAsked, now: float) -> None:
        task = self._current(event.slot, event.incarnation, event.seq)
        if task is None:
            return
        slot = self.slots[event.slot]
        incident = replace(self._failure_incident(slot, task, event.failure, ""), pid=event.pid)
        self._ask(Question(incident, slot.number, slot.incarnation, None))

    def _ask(self, question: Question) -> None:
        self._tickets += 1
        if question.task is not None:
            question.task.is_asked_about = True
        self.questions[self._tickets] = question
        self._do(r.AskPolicy(self._tickets, question.incident))

    def _decision_made(self, event: r.DecisionMade, now: float) -> None:
        if (question := self.questions.pop(event.ticket, None)) is None:
            return
        slot = self.slots[question.slot]
        if question.task is None:
            if slot.incarnation == question.incarnation and slot.state != "empty":
                self._do(r.AnswerWorker(slot.number, slot.incarnation, event.decision))
            return
        question.task.is_asked_about = False
        if question.task.seq in self.tasks:
            slot.sent = 0
            self._sentence(slot, question.task, question.positions, question.incident, event.decision)
            if not self.given_up:
                self.dealer.send(slot)

    def _source_doubted(self, event: r.SourceDoubted, now: float) -> None:
        if self._current(event.slot, event.incarnation, event.seq) is not None:
            self._heed(self.breaker.doubted(event, now))

    def _heed(self, actions: list[Action]) -> None:
        """What the breaker, or the renewal, says is done."""
        self._actions += actions
        self.given_up = self.given_up or any(isinstance(action, r.GiveUp) for action in actions)

    def _epoch_began(self, event: r.EpochBegan, now: float) -> None:
        self.tasks.clear()
        self.questions.clear()
        self.breaker.reset()
        self.bad = self.drawn = 0
        self.dealer.clear()
        for slot in self.slots:
            slot.ended = False
        self.crew.arrange()

    def _current(self, number: int, incarnation: int, seq: int) -> Task | None:
        """The task, if this very incarnation was to do it; late news of an earlier one count for nothing."""
        slot = self.slots[number]
        is_its = incarnation == slot.incarnation and seq in slot.queue
        return self.tasks.get(seq) if is_its else None

    def _give_up(self, limit: r.LimitKind, text: str, incident: Incident | None) -> None:
        self.given_up = True
        if incident is not None and limit is r.LimitKind.STARTS:
            self._do(r.ReportIncident(incident))
        self._do(r.GiveUp(limit, text, incident))
