"""A fleet in memory: obeys the machine's actions, checks that each is lawful, and lets chance decide what happens when.

Reads   the machine's actions.
Writes  events: results, errors, deaths at every moment, questions, and late news of those who are gone.
Never   a process, a clock; times are numbers.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from outlive import records as r
from outlive._fleet.dealing import MOST_SENT
from outlive._fleet.machine import Machine
from outlive._fleet.renewal import MOST
from outlive.evidence import Evidence, Oom, Seen, Surroundings
from outlive.incident import Decision, Exit, Failure, InHand, Stage
from outlive.records import Outcome, Plan, SourceWord
from outlive.settings import FaultPolicy

NO_LIMITS = {"max_restarts": 10**9, "max_bad": None, "breaker_patience": None}


def failure(position: int = -1, decision: Decision | None = None, **more: Any) -> Failure:
    return Failure("ValueError", "bad", "Traceback …", None, Stage.FETCHING, position, decision, **more)


@dataclass
class SimulatedWorker:
    incarnation: int
    ready: bool = False
    asking: bool = False
    answered: bool = False
    inbox: deque[r.SendTask] = field(default_factory=deque)
    told_end: bool = False
    dismissed: bool = False
    doubts: bool = False
    probes: bool = False
    kind: int = 0  # how often all workers had been renewed when it was started
    going: bool = False  # it ends with its kind
    last_words: int = 0  # batches that it had sent before, and that are read before its end

    @property
    def waits(self) -> bool:
        """For an answer: it does nothing by itself."""
        return self.asking or self.doubts


@dataclass
class Scenario:
    """What the simulated samples do: some positions kill, while they are fetched or while they are collated."""

    sizes: list[int]
    fetch_poison: frozenset[tuple[int, int]] = frozenset()
    collate_poison: frozenset[tuple[int, int]] = frozenset()
    bad_substitutes: int = 0  # so many candidates of each poisonous position kill, too
    stream_batches: int | None = None  # each slot's stream has so many batches
    can_skip: bool = False
    bound: bool = True  # each task has a slot of its own

    @property
    def poison(self) -> set[tuple[int, int]]:
        return set(self.fetch_poison | self.collate_poison)


class SimulatedFleet:
    """An engine in memory that obeys the machine's actions and lets Hypothesis decide what happens when.

    Checks with every action that it is lawful.
    """

    def __init__(self, slots: int, policy: FaultPolicy, scenario: Scenario) -> None:
        self.machine = Machine(slots, policy, takes_turns=scenario.stream_batches is None)
        self.policy = policy
        self.scenario = scenario
        self.workers: list[SimulatedWorker | None] = [None] * slots
        self.incarnations = [0] * slots
        self.now = 0.0
        self.submitted: list[int] = []
        self.outcomes: dict[int, Outcome] = {}
        self.ends: dict[int, r.ConcludeTask] = {}
        self.delivered_by: dict[int, list[int]] = defaultdict(list)
        self.quarantined: list[tuple[int, int]] = []
        self.questions: deque[r.AskPolicy] = deque()
        self.give_ups: list[r.GiveUp] = []
        self.exits: list[float] = []
        self.history: list[Any] = []
        self.taken: dict[int, int] = defaultdict(int)  # batches that a slot's stream has given
        self.leavers: deque[int] = deque()
        self.can_renew = True
        self.renewals = 0
        self.hung_in: dict[int, int] = {}  # tasks that hung for want of threads, and in which kind of worker
        self._obey(self.machine.begin())

    # what the machine wants

    def tell(self, event: Any) -> None:
        if hasattr(event, "incarnation"):
            self.history.append(event)
        gave_up = self.machine.given_up
        actions = self.machine.handle(event, self.now)
        assert not (gave_up and actions), "a given-up machine acts"
        self._obey(actions)

    def _obey(self, actions: list[r.Action]) -> None:
        for action in actions:
            getattr(self, f"_obey_{type(action).__name__}")(action)

    def _obey_StartWorker(self, action: r.StartWorker) -> None:
        assert self.workers[action.slot] is None, "two living incarnations in one slot"
        assert action.incarnation == self.incarnations[action.slot] + 1
        self.incarnations[action.slot] = action.incarnation
        self.workers[action.slot] = SimulatedWorker(action.incarnation, kind=self.renewals)
        living = sum(worker is not None for worker in self.workers)
        assert living <= self.machine.crew.capacity, "more workers than may live"

    def _obey_RenewWorkers(self, action: r.RenewWorkers) -> None:
        if not self.can_renew:
            self.tell(r.RenewalFailed("TypeError: cannot pickle '_thread.lock' object"))
            return
        self.renewals += 1
        for worker in self.workers:
            if worker is not None:
                worker.going, worker.last_words = True, worker.incarnation % 2
        self.tell(r.WorkersRenewed())

    def _obey_DismissWorker(self, action: r.DismissWorker) -> None:
        worker = self.workers[action.slot]
        assert worker is not None
        assert worker.incarnation == action.incarnation
        assert not worker.dismissed, "dismissed twice"
        worker.dismissed = True

    def _obey_SendTask(self, action: r.SendTask) -> None:
        worker = self.workers[action.slot]
        assert worker is not None, "a task for an empty slot"
        assert worker.incarnation == action.incarnation, "a task for a dead incarnation"
        assert action.seq in self.submitted
        assert action.seq not in self.outcomes, "a concluded task is sent again"
        assert not worker.dismissed, "a task for one who leaves"
        assert self.hung_in.get(action.seq, -1) < worker.kind, "a task is tried again in the kind of worker that hung"
        if self.scenario.bound:
            assert all(earlier.seq < action.seq for earlier in worker.inbox), "a slot's order was not kept"
        assert all(earlier.seq != action.seq for earlier in worker.inbox), "a task was sent twice"
        worker.inbox.append(action)
        assert len(worker.inbox) <= MOST_SENT

    def _obey_ConcludeTask(self, action: r.ConcludeTask) -> None:
        assert action.seq in self.submitted
        assert action.seq not in self.outcomes, "a task was concluded twice"
        self.outcomes[action.seq] = action.outcome
        self.ends[action.seq] = action
        if action.outcome is Outcome.DELIVERED and self.scenario.bound:
            self.delivered_by[self.slot_of(action.seq)].append(action.seq)
        if action.outcome is Outcome.ERRORED:
            assert action.incident is not None, "an error without an incident"

    def _obey_ReportIncident(self, action: r.ReportIncident) -> None:
        assert action.incident.action, "an incident that does not say what was done"
        assert str(action.incident)

    def _obey_PutInQuarantine(self, action: r.PutInQuarantine) -> None:
        assert action.positions
        self.quarantined += [(action.seq, position) for position in action.positions]

    def _obey_AskPolicy(self, action: r.AskPolicy) -> None:
        self.questions.append(action)

    def _obey_AnswerWorker(self, action: r.AnswerWorker) -> None:
        worker = self.workers[action.slot]
        assert worker is not None
        assert worker.incarnation == action.incarnation, "an answer for a dead incarnation"
        assert worker.asking, "an answer to no question"
        worker.asking, worker.answered = False, True

    def _obey_AnswerDoubt(self, action: r.AnswerDoubt) -> None:
        worker = self.workers[action.slot]
        assert worker is not None
        assert worker.incarnation == action.incarnation, "an answer for a dead incarnation"
        assert worker.doubts, "an answer to no doubt"
        assert not worker.probes
        assert action.pause_s >= 0
        worker.probes = action.word is SourceWord.PROBE
        worker.doubts = worker.probes
        if action.word is SourceWord.LEAVE:
            self.leavers.append(action.slot)
            worker.doubts = True  # it does nothing any more
        assert sum(w is not None and w.probes for w in self.workers) <= 1, "two probes at a time"

    def _obey_StepOver(self, action: r.StepOver) -> None:
        assert self.scenario.stream_batches is not None, "only streams are stepped over"
        self.taken[action.slot] += 1

    def _obey_GiveUp(self, action: r.GiveUp) -> None:
        self.give_ups.append(action)

    # what happens

    def slot_of(self, seq: int) -> int:
        return seq % len(self.workers) if self.scenario.bound else -1

    def submit(self) -> None:
        if len(self.submitted) < len(self.scenario.sizes) and not self.machine.given_up:
            seq = len(self.submitted)
            self.submitted.append(seq)
            skippable = self.scenario.stream_batches is None
            self.tell(r.TaskSubmitted(seq, self.slot_of(seq), self.scenario.sizes[seq], skippable))

    def kills(self, seq: int, position: int, plan: Plan, poison: frozenset[tuple[int, int]]) -> bool:
        return (seq, position) in poison and plan.substitutes.get(position, 0) <= self.scenario.bad_substitutes

    def live(self, action: r.SendTask) -> list[int]:
        """The samples that the worker has to do with; in a stream, what replaces one comes behind the others."""
        plan = action.plan
        stream = self.scenario.stream_batches is not None
        end = self.scenario.sizes[action.seq] + (sum(plan.substitutes.values()) if stream else 0)
        gone = plan.excluded | frozenset(plan.substitutes if stream else ())
        return [p for p in range(end) if p not in gone and (plan.probe is None or p in plan.probe)]

    def advance(self, slot: int) -> bool:
        """Let a worker do the next thing that it does by itself; False when there is nothing to do."""
        worker = self.workers[slot]
        if worker is not None and worker.going:
            if not worker.last_words:
                self.die(slot, Stage.FETCHING, worker.inbox[0].seq if worker.inbox else -1, 0, blameless=True)
                return True
            worker.last_words -= 1
        if worker is not None and worker.probes:
            self.probe(slot, works=True)
            return True
        if slot in self.leavers:
            self.leavers.remove(slot)
            self.die(slot, Stage.LEAVING, recycled="the source is gone")
            return True
        if worker is None or worker.waits:
            return False
        if not worker.ready:
            worker.ready = True
            self.tell(r.WorkerReady(slot, worker.incarnation, self.scenario.can_skip))
            return True
        if not worker.inbox or worker.told_end:
            worker.inbox.clear()
            if worker.dismissed:
                self.die(slot, Stage.LEAVING, recycled="it was asked to leave")
            return worker.dismissed
        action = worker.inbox[0]
        if self.scenario.stream_batches is not None and self.taken[slot] >= self.scenario.stream_batches:
            worker.told_end = True
            self.tell(r.TaskFinished(slot, worker.incarnation, action.seq, ended=True))
            return True
        live = self.live(action)
        for position in live:
            if self.kills(action.seq, position, action.plan, self.scenario.fetch_poison):
                self.die(slot, Stage.FETCHING, action.seq, position)
                return True
        if any(self.kills(action.seq, position, action.plan, self.scenario.collate_poison) for position in live):
            self.die(slot, Stage.COLLATING, action.seq)
            return True
        worker.inbox.popleft()
        if action.plan.probe is None:
            self.taken[slot] += 1
        empty = action.plan.probe is None and not live
        self.tell(r.TaskFinished(slot, worker.incarnation, action.seq, empty=empty))
        return True

    def die(self, slot: int, stage: Stage, seq: int = -1, position: int = -1, **more: Any) -> None:
        worker = self.workers[slot]
        if worker is None:
            return
        self.workers[slot] = None
        if slot in self.leavers:
            self.leavers.remove(slot)
        self.exits.append(self.now)
        in_hand = InHand(stage, seq, position)
        self.tell(r.WorkerExited(slot, worker.incarnation, 1, Exit(signal=9), in_hand, **more))

    def die_with_next(self, slot: int, stage: Stage, position: int = -1, **more: Any) -> None:
        worker = self.workers[slot]
        if worker is None or not worker.ready or not worker.inbox or worker.waits or worker.told_end:
            return
        action = worker.inbox[0]
        live = self.live(action)
        if stage is Stage.FETCHING:
            if not live:
                return
            position = live[position % len(live)]
        self.die(slot, stage, action.seq, position, **more)

    def hang_without_threads(self, slot: int, position: int) -> None:
        """It waits for a thread that its kind has not got."""
        worker = self.workers[slot]
        busy = worker is not None and worker.ready and worker.inbox and not worker.waits and not worker.told_end
        if worker is not None and busy and worker.kind < MOST and not worker.going and self.live(worker.inbox[0]):
            self.hung_in[worker.inbox[0].seq] = worker.kind
            evidence = Evidence(seen=Seen(out_of_reach="threads of OpenMP"))
            self.die_with_next(slot, Stage.FETCHING, position, hung=True, evidence=evidence)

    def die_idle(self, slot: int) -> None:
        worker = self.workers[slot]
        if worker is not None and worker.ready:
            self.die(slot, Stage.PROBING if worker.probes else Stage.WAITING if worker.waits else Stage.IDLE)

    def die_starting(self, slot: int, stage: Stage) -> None:
        worker = self.workers[slot]
        if worker is not None and not worker.ready:
            self.die(slot, stage)

    def fail_to_prepare(self, slot: int) -> None:
        worker = self.workers[slot]
        if worker is not None and not worker.ready:
            self.workers[slot] = None
            self.tell(r.PreparationFailed(slot, worker.incarnation, 1, failure()))

    def raise_next(self, slot: int, position: int) -> None:
        worker = self.workers[slot]
        if worker is not None and worker.ready and worker.inbox and not worker.waits and not worker.told_end:
            action = worker.inbox.popleft()
            self.tell(r.TaskErrored(slot, worker.incarnation, action.seq, failure(position % 4)))

    def skip_next(self, slot: int, decision: Decision, position: int) -> None:
        """The worker deals with exceptions by itself and delivers, or has nothing left."""
        worker = self.workers[slot]
        if worker is None or not worker.ready or not worker.inbox or worker.waits or worker.told_end:
            return
        if decision is Decision.RETRY:  # told at once; the batch comes later, or never
            self.tell(r.TaskRetried(slot, worker.incarnation, worker.inbox[0].seq, failure(0, decision)))
            return
        action = worker.inbox.popleft()
        size = self.scenario.sizes[action.seq]
        dealt = (failure(position % size, decision),)
        empty = decision is Decision.SKIP and size == 1
        self.tell(r.TaskFinished(slot, worker.incarnation, action.seq, dealt, empty=empty))

    def ask(self, slot: int) -> None:
        worker = self.workers[slot]
        if worker is not None and worker.ready and worker.inbox and not worker.waits and not worker.told_end:
            worker.asking = True
            self.tell(r.DecisionAsked(slot, worker.incarnation, 1, worker.inbox[0].seq, failure(0)))

    def doubt(self, slot: int, sample: int, *, proven: bool) -> None:
        """Samples fail, and the worker asks whether it is they or their source."""
        worker = self.workers[slot]
        if worker is not None and worker.ready and worker.inbox and not worker.waits and not worker.told_end:
            worker.doubts = True
            seq, named = worker.inbox[0].seq, (str(sample),)
            # Where others were fetched well after it, an answer comes at once.
            failed_at = max(0.1, self.now - 1.0) if not proven and sample % 2 else 0.0
            self.tell(r.SourceDoubted(slot, worker.incarnation, 1, seq, failure(0), named, (0,), proven, failed_at))

    def probe(self, slot: int, *, works: bool, sample: int = 0, proven: bool = False) -> None:
        worker = self.workers[slot]
        if worker is not None and worker.probes:
            worker.probes = False
            seq = worker.inbox[0].seq
            found = (True, (1,)) if works else (False, (), failure(0), (str(sample),), proven)
            self.tell(r.SourceProbed(slot, worker.incarnation, 1, seq, *found))

    def answer(self, decision: Decision) -> None:
        if self.questions:
            question = self.questions.popleft()
            self.tell(r.DecisionMade(question.ticket, decision))

    def suspect(self, slot: int) -> None:
        worker = self.workers[slot]
        if worker is not None:
            self.tell(r.WorkerSuspected(slot, worker.incarnation, 1, InHand(Stage.FETCHING, 0, 0, 99.0)))

    def run_out_of_memory(self, slot: int) -> None:
        """The kernel kills whoever it likes, whatever it does."""
        evidence = Evidence(surroundings=Surroundings(oom=Oom(group_kills=1)))
        worker = self.workers[slot]
        if worker is not None and worker.inbox and worker.ready and not worker.asking:
            self.die_with_next(slot, Stage.FETCHING, evidence=evidence)
        else:
            self.die(slot, Stage.IDLE, evidence=evidence)

    def tell_memory(self, slot: int, scarce: bool, later: float) -> None:
        self.now += later
        self.tell(r.MemoryTold(scarce, slot, 1 << 30, 1 << 31, 1 << 20))

    def want(self, workers: int) -> None:
        self.tell(r.SizeWanted(workers))

    def repeat_stale_events(self, number: int) -> None:
        """Late or doubled news of an incarnation that is gone."""
        old = [event for event in self.history if event.incarnation < self.incarnations[event.slot]]
        if old:
            self.tell(old[number % len(old)])

    # ends

    def settle(self, answer: Decision = Decision.SKIP, steps: int = 5000) -> None:
        """No more accidents: let everybody work until nothing is left to do."""
        for _ in range(steps):
            if self.machine.given_up:
                return
            self.submit()
            self.answer(answer)
            progress = [self.advance(slot) for slot in range(len(self.workers))]
            waiting = any(worker is not None and worker.waits for worker in self.workers)
            if (
                not any(progress)
                and not self.questions
                and not waiting
                and len(self.submitted) == len(self.scenario.sizes)
            ):
                return
        raise AssertionError("the fleet does not come to rest")

    def check_lawful_end(self) -> None:
        assert len(self.give_ups) == int(self.machine.given_up), "one GiveUp, and only when given up"
        if not self.machine.given_up:
            assert set(self.outcomes) == set(self.submitted), "a task has no end"
            assert self.machine.tasks == {}
            assert self.machine.questions == {}
            assert not any(worker is not None and worker.waits for worker in self.workers), "a doubt has no answer"
        for seqs in self.delivered_by.values():
            assert seqs == sorted(seqs), "a slot delivered out of order"
        assert self.machine.restarts <= sum(self.incarnations) + len(self.exits)


RULES = {"raise": "raise", "skip": "skip", "replace": "replace", "callable": lambda incident: "skip"}
MOST_SIZE = 6


@st.composite
def scenarios(draw: st.DrawFn, *, poison: bool = True, streams: bool = True) -> tuple[int, Scenario]:
    slots = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, MOST_SIZE), min_size=1, max_size=8))
    places = [(seq, position) for seq, size in enumerate(sizes) for position in range(size)]
    deadly = draw(st.sets(st.sampled_from(places), max_size=4)) if poison else set()
    fetch = {place for place in sorted(deadly) if draw(st.booleans())}
    stream = draw(st.none() | st.integers(0, 4)) if streams else None
    bound = stream is not None or draw(st.booleans())
    return slots, Scenario(sizes, frozenset(fetch), frozenset(deadly - fetch), stream_batches=stream, bound=bound)


STEPS = st.lists(
    st.tuples(st.integers(0, 23), st.integers(0, 2), st.integers(0, MOST_SIZE - 1), st.integers(0, 3)), max_size=60
)

DECISIONS = tuple(Decision)


def interpret(fleet: SimulatedFleet, steps: list[tuple[int, int, int, int]], *, accidents: bool = True) -> None:
    """Turn numbers into what happens, always in the same way: small numbers are small accidents."""
    for what, where, position, choice in steps:
        if fleet.machine.given_up:
            return
        slot = where % len(fleet.workers)
        fleet.now += choice
        if what <= 4 or not accidents:
            fleet.advance(slot)
        elif what <= 6:
            fleet.submit()
        elif what == 7:
            fleet.repeat_stale_events(position * 7 + choice)
        elif what == 8:
            fleet.suspect(slot)
        elif what == 9:
            fleet.answer(DECISIONS[choice])
        elif what == 10:
            fleet.die_idle(slot)
        elif what == 11:
            fleet.die_starting(slot, (Stage.STARTING, Stage.PREPARING, Stage.FORWARDING)[position % 3])
        elif what == 12:
            fleet.die_with_next(slot, Stage.FETCHING, position, hung=choice == 0, blameless=choice == 1)
        elif what == 13:
            fleet.die_with_next(slot, (Stage.COLLATING, Stage.SENDING, Stage.FETCHING_MANY)[position % 3])
        elif what == 14:
            fleet.fail_to_prepare(slot)
        elif what == 15:
            fleet.raise_next(slot, position)
        elif what == 16:
            fleet.skip_next(slot, (Decision.SKIP, Decision.REPLACE, Decision.RETRY)[choice % 3], position)
        elif what == 18:
            fleet.run_out_of_memory(slot)
        elif what == 19:
            fleet.tell_memory(slot, scarce=choice < 2, later=position * 20.0)
        elif what == 20:
            fleet.want(position)
        elif what == 17:
            fleet.ask(slot)
        elif what == 23:
            fleet.hang_without_threads(slot, position)
        elif what == 21:
            fleet.doubt(slot, position, proven=choice == 0)
        else:
            for prober in range(len(fleet.workers)):
                fleet.probe(prober, works=choice == 3, sample=position, proven=choice == 0)
