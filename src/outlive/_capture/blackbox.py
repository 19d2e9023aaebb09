"""The black box: a small shared-memory record of what a worker is doing; it outlives the worker.

Reads   (trainer, zygote) what the worker wrote last, at any time, without its help.
Writes  (worker) plain 8-byte stores, no lock, no system call.
Never   blocks; a worker that dies between two stores leaves a record that is still lawful.

    words 0…127    state, see the names below (some are the watchman's to write); the last 64 name the batches that
                   were taken up, in turn
    1024…2047      how long batches took to fetch, collate and send: for each a sum, then counts by powers of two
    2048…4095      how long healthy samples, and healthy steps of whole batches, took: see SPANS
    4096…12287     the crash record, written by the fatal-signal handler, see crash.py
    12288…         copies of the random state, written in turn and named by the batch they follow:
                   whichever batch was the last to arrive, its state is here
    MAPS_AT…       /proc/self/maps at a crash; no memory until then, for the file is sparse
"""

from __future__ import annotations

import ctypes
import enum
import time
from array import array

from outlive.incident import InHand, Stage
from outlive.statistics import Load

COPIES = 18  # of the random state: one more than there are batches on their way to the trainer at once
STATE_ROOM = 16384 - 16
CRASH_AT, CRASH_ROOM = 4096, 8192
MAPS_AT, MAPS_ROOM = 12288 + COPIES * 16384, 4 << 20
SIZE = MAPS_AT + MAPS_ROOM
_STAGE, _BATCH, POSITION, SINCE, _LIMIT, _DONE, _PID, _COUNT, _STAND_IN = range(9)
TAKEN, _LEFT, _REASON, _AMOUNT, _BOUND = range(9, 14)
_IDLE = 32  # nanoseconds without a task, those that are over
_LOAD = slice(33, 39)  # by the watchman: shares in millionths, then nanoseconds; all zero: nobody has looked
_DESCRIPTORS, _THREADS = 39, 40  # by the watchman
_MEMORY = slice(41, 45)  # by the watchman: bytes resident, private, of cells, and bytes more per second
_ASKED = 45  # by anybody: it shall leave after its batch
_SLOT, _INCARNATION = 46, 47  # by the trainer, before there is a worker
_ASKED_NS = 48  # on a slate: when the batch in hand was asked for
_HUNG_BATCH, _HUNG_POSITION = 49, 50  # by the trainer: what hung an earlier worker; batches are counted from 1 here
_LAST_STAGE = max(Stage)
_STATES = tuple(12288 + 16384 * copy for copy in range(COPIES))

_RING, RECENT = 64, 64
SLATE_WORDS = _RING

_NOTHING = -(1 << 62)

_TIMES_AT, BUCKETS = 1024, 32
FIRST_BUCKET = 10  # what took less than 2 ** 10 ns, about a microsecond
TIMES = 3 * (1 + BUCKETS)

# How long healthy steps took, to know by when one hangs: for samples, then for steps of whole batches, a count of the
# short ones, then of those that took longer, four counts to an octave. A loop has no time to tell short ones apart.
_SPANS_AT, SAMPLE_STEPS, BATCH_STEPS = 2048, 0, 1
LONG_NS = 1 << 23  # about 8 ms
_FIRST_OCTAVE, _OCTAVES = LONG_NS.bit_length(), 21  # up to about 5 hours
SPANS = 1 + 4 * _OCTAVES  # words for each


def span_s(bucket: int) -> float:
    """How long what was counted there took at most; 0 for what is only counted."""
    octave, quarter = divmod(bucket - 1, 4)
    return float((LONG_NS << octave) * (5 + quarter)) / 4e9 if bucket > 0 else 0.0


class Reason(enum.IntEnum):
    """Why a worker left of its own accord."""

    NONE = 0
    BATCHES = 1  # it has done as many as it may
    SAMPLES = 2
    GROWTH = 3  # its memory has grown by so much
    MEMORY = 4  # its memory is near its limit
    REFUSED = 5  # it was refused memory, and ended with a sample in hand
    DESCRIPTORS = 6  # it has so many open that they will run out
    THREADS = 7
    DISMISSED = 8  # the trainer asked it to
    SOURCE = 9  # the source of its samples does not answer it
    ASKED = 10  # somebody who watches the job wants a fresh worker


class BlackBox:
    """Either side's view of the record."""

    def __init__(self, mapped: ctypes.Array[ctypes.c_ubyte]) -> None:
        self.content = memoryview(mapped).cast("B")
        # Open to the innermost loop of a job, which notes POSITION and SINCE itself: a call per sample costs too much.
        self.words = self.content[: 8 * (_RING + RECENT)].cast("q")
        self.times = self.content[_TIMES_AT : _TIMES_AT + 8 * TIMES].cast("q")
        self.spans = self.content[_SPANS_AT : _SPANS_AT + 16 * SPANS].cast("q")
        self._heads = tuple(self.content[at : at + 16].cast("q") for at in _STATES)
        self._turn = 0

    # ------------------------------------------------------------ the worker's side

    def begin(self, pid: int) -> None:
        self.forget_random_states()
        self.words[_PID] = pid
        self.enter(Stage.STARTING)

    def enter(self, stage: int, batch: int = -1, position: int = -1, count: int = 1) -> None:
        words = self.words
        words[_COUNT] = count
        words[_STAND_IN] = -1
        words[SINCE] = time.monotonic_ns()
        words[POSITION] = position
        words[_BATCH] = batch
        words[_STAGE] = stage

    def take_up(self, batch: int) -> None:
        """A batch begins."""
        words = self.words
        taken = words[TAKEN]
        words[_RING + taken % RECENT] = batch
        words[TAKEN] = taken + 1

    def forget_batches(self) -> None:
        """Batches are numbered anew."""
        self.words[TAKEN] = 0

    def note_exit(self) -> None:
        """Python code ends the process: sys.exit, not os._exit."""
        self.words[_LEFT] = 1

    def retire(self, reason: Reason, amount: int, bound: int) -> None:
        """Note why this worker leaves: what it reached, and what it may."""
        self.words[_AMOUNT] = amount
        self.words[_BOUND] = bound
        self.words[_REASON] = reason

    def note_stand_in(self, index: object) -> None:
        """What is in hand is not what the sampler drew."""
        self.words[_STAND_IN] = index if isinstance(index, int) and 0 <= index < 1 << 62 else -1

    def fetch(self, position: int) -> None:
        """Note the sample that is now in hand; the one before it was healthy."""
        words = self.words
        now = time.monotonic_ns()
        if words[_STAGE] == 4 and words[POSITION] >= 0:  # Stage.FETCHING
            self._was_healthy(now - words[SINCE], SAMPLE_STEPS)
        words[SINCE] = now
        words[POSITION] = position
        words[_STAGE] = 4

    def finished(self) -> None:
        """The sample, batch or message in hand was healthy."""
        words = self.words
        kind = SAMPLE_STEPS if words[_STAGE] == 4 else BATCH_STEPS  # Stage.FETCHING
        self._was_healthy(time.monotonic_ns() - words[SINCE], kind)

    def _was_healthy(self, nanoseconds: int, kind: int) -> None:
        if nanoseconds >= LONG_NS:
            self.took_long(nanoseconds, kind)
        else:
            self.spans[kind * SPANS] += 1

    def were_short(self, count: int) -> None:
        """So many samples were healthy, and none took as long as `LONG_NS`."""
        self.spans[0] += count

    def took_long(self, nanoseconds: int, kind: int = SAMPLE_STEPS) -> None:
        """A healthy step took at least `LONG_NS`."""
        octave = nanoseconds.bit_length() - _FIRST_OCTAVE
        quarter = (nanoseconds >> (nanoseconds.bit_length() - 3)) & 3
        self.spans[kind * SPANS + 1 + min(4 * octave + quarter, SPANS - 2)] += 1

    def note_times(self, fetch_ns: int, collate_ns: int, send_ns: int, weight: int) -> None:
        """So long a batch took; it stands for `weight` of them."""
        times, at = self.times, 0
        for took in (fetch_ns, collate_ns, send_ns):
            times[at] += weight * took
            times[at + 1 + min(BUCKETS - 1, max(0, took.bit_length() - FIRST_BUCKET))] += weight
            at += 1 + BUCKETS

    @property
    def is_asked_to_leave(self) -> bool:
        return self.words[_ASKED] != 0

    def count_done(self) -> None:
        self.words[_DONE] += 1

    def note_idle(self) -> None:
        """What it waited for has come."""
        self.words[_IDLE] += time.monotonic_ns() - self.words[SINCE]

    def forget_random_states(self) -> None:
        for head in self._heads:
            head[0] = _NOTHING

    def keep_random_state(self, batch: int, state: bytes) -> None:
        """Keep the random state after `batch`, beside those before it."""
        size = len(state)
        if size > STATE_ROOM:
            return
        if self._heads[self._turn][0] == batch:  # kept once already, and then the batch could not be sent
            self._heads[self._turn][0] = _NOTHING
        turn = self._turn = (self._turn + 1) % COPIES
        head, at = self._heads[turn], _STATES[turn] + 16
        # Unname the copy before its bytes change: dying in between must not leave
        # an old name on a new state.
        head[0] = _NOTHING
        self.content[at : at + size] = state
        head[1] = size
        head[0] = batch

    # ------------------------------------------------------------ the watchman's side

    def note_load(self, load: Load) -> None:
        shares = (load.on_cpu, load.starved, load.waiting, load.idle, load.disk)
        for word, value in zip(range(_LOAD.start, _LOAD.stop), (*shares, load.seconds), strict=True):
            self.words[word] = round(value * 1_000_000)

    def note_counts(self, descriptors: int, threads: int) -> None:
        self.words[_DESCRIPTORS], self.words[_THREADS] = descriptors, threads

    def note_memory(self, resident: int, private: int, cells: int, slope: int) -> None:
        for word, value in zip(range(_MEMORY.start, _MEMORY.stop), (resident, private, cells, slope), strict=True):
            self.words[word] = value

    def note_limit(self, limit_s: float | None) -> None:
        self.words[_LIMIT] = 0 if limit_s is None else max(1, round(limit_s * 1000))

    # ------------------------------------------------------------ the other side

    def note_hung(self, batch: int, position: int) -> None:
        """What hung an earlier worker: this one is given less time for it."""
        self.words[_HUNG_BATCH], self.words[_HUNG_POSITION] = batch + 1, position

    def assign(self, slot: int, incarnation: int) -> None:
        self.words[_SLOT], self.words[_INCARNATION] = slot, incarnation

    @property
    def assigned(self) -> tuple[int, int]:
        """Whose it is: slot and incarnation."""
        return self.words[_SLOT], self.words[_INCARNATION]

    def ask_to_leave(self) -> None:
        self.words[_ASKED] = 1

    def idle_ns(self, now_ns: int) -> int:
        """How long it has had no task in all its life."""
        words = self.words
        for _ in range(8):
            stage, since, idle = words[_STAGE], words[SINCE], words[_IDLE]
            if words[SINCE] == since:  # else it was just given one, and that time may be in both or in neither
                break
        return idle + (max(0, now_ns - since) if stage == Stage.IDLE else 0)

    @property
    def load(self) -> Load | None:
        """What its watchman saw last; None: nothing yet."""
        on_cpu, starved, waiting, idle, disk, seconds = (word / 1_000_000 for word in self.words[_LOAD])
        return Load(on_cpu, starved, waiting, idle, disk, seconds) if seconds > 0 else None

    @property
    def counts(self) -> tuple[int | None, int | None]:
        """Open descriptors and threads, as its watchman saw them last."""
        return self.words[_DESCRIPTORS] or None, self.words[_THREADS] or None

    @property
    def memory(self) -> tuple[int, int, int, int]:
        """Bytes resident, private and of cells, and how many more become private per second; 0: nobody has looked."""
        resident, private, cells, slope = self.words[_MEMORY]
        return resident, private, cells, slope

    def in_hand(self, now_ns: int | None = None) -> InHand:
        words = self.words
        stage, batch, position, since = words[_STAGE], words[_BATCH], words[POSITION], words[SINCE]
        if not 0 <= stage <= _LAST_STAGE:  # a wild write over the record: the worker is dead or dying of it
            return InHand(Stage.AT_WORK)
        seconds = ((time.monotonic_ns() if now_ns is None else now_ns) - since) / 1e9 if since else 0.0
        stand_in = words[_STAND_IN]
        return InHand(Stage(stage), batch, position, max(0.0, seconds), None if stand_in < 0 else stand_in)

    @property
    def pid(self) -> int:
        """Whose box it is; 0 before it has begun."""
        return self.words[_PID]

    @property
    def is_starting(self) -> bool:
        return self.words[_STAGE] in (Stage.STARTING, Stage.PREPARING, Stage.FORWARDING)

    @property
    def count(self) -> int:
        """How many samples are in hand at once."""
        return max(1, self.words[_COUNT])

    @property
    def has_hung_before(self) -> bool:
        """Whether what is in hand has hung an earlier worker of this slot."""
        words = self.words
        return words[_HUNG_BATCH] == words[_BATCH] + 1 > 0 and words[_HUNG_POSITION] in (-1, words[POSITION])

    @property
    def limit_s(self) -> float | None:
        """After how long what is in hand is taken for hung, as its watchman sees it; None: never."""
        return self.words[_LIMIT] / 1000 or None

    @property
    def mark(self) -> tuple[int, int, int, int]:
        """Changes whenever the worker gets on with anything."""
        words = self.words
        return words[_STAGE], words[_BATCH], words[POSITION], words[SINCE]

    @property
    def recent_batches(self) -> tuple[int, ...]:
        """The last batches that were taken up, oldest first; one that was done again is there again."""
        taken = self.words[TAKEN]
        if not 0 < taken < 1 << 62:  # a wild write over the record
            return ()
        return tuple(self.words[_RING + n % RECENT] for n in range(max(0, taken - RECENT), taken))

    @property
    def batches_done(self) -> int:
        return self.words[_DONE]

    @property
    def retired(self) -> tuple[Reason, int, int]:
        """Why it left, the number or bytes that it reached, and those it may."""
        reason = self.words[_REASON]
        if not 0 <= reason <= max(Reason):  # a wild write over the record
            return Reason.NONE, 0, 0
        return Reason(reason), self.words[_AMOUNT], self.words[_BOUND]

    @property
    def left_by_exit(self) -> bool:
        return self.words[_LEFT] == 1

    def random_state(self, batch: int) -> bytes | None:
        """The random state right after `batch`, if the worker got that far."""
        for head, at in zip(self._heads, _STATES, strict=True):
            if (
                head[0] == batch and head[1] > 0
            ):  # a fresh record is all zeros, and a worker may die before its first store
                return bytes(self.content[at + 16 : at + 16 + head[1]])
        return None

    def random_states(self, only: int | None = None) -> dict[int, bytes]:
        """All that there are, by the batch they follow; or that of one."""
        batches = [head[0] for head in self._heads if head[0] >= 0 and head[1] > 0]
        found = {batch: self.random_state(batch) for batch in batches if only is None or batch == only}
        return {batch: state for batch, state in found.items() if state is not None}

    def random_state_upto(self, batch: int) -> tuple[int, bytes] | None:
        """The last random state that follows this batch or one before it, also while the worker goes on."""
        before = [head[0] for head in self._heads if 0 <= head[0] <= batch and head[1] > 0]
        newest = max(before, default=-1)
        state = self.random_state(newest) if newest >= 0 else None
        if state is None or newest not in [head[0] for head in self._heads]:  # just written over
            return None
        return newest, state

    def crash_bytes(self) -> bytes:
        return bytes(self.content[CRASH_AT : CRASH_AT + CRASH_ROOM])

    def maps_bytes(self, size: int) -> bytes:
        return bytes(self.content[MAPS_AT : MAPS_AT + min(size, MAPS_ROOM)])

    def release(self) -> None:
        self.words.release()
        self.times.release()
        self.spans.release()
        for head in self._heads:
            head.release()
        self.content.release()


class Slate(BlackBox):
    """The state words alone, wherever they lie: those of a trainer that makes its batches itself are on its board."""

    def __init__(self, words: memoryview[int]) -> None:
        self.words = words
        self.times = memoryview(array("q", bytes(8 * TIMES)))
        self.spans = memoryview(array("q", bytes(16 * SPANS)))

    def ask(self, batch: int, now_ns: int = 0) -> None:
        """A batch is asked for, what is done for it nobody says; 0: about when the last was."""
        words = self.words
        words[_BATCH] = batch
        if now_ns:
            words[SINCE] = words[_ASKED_NS] = now_ns
        words[_STAGE] = 11  # Stage.AT_WORK

    def rest(self, now_ns: int = 0) -> None:
        """It was given, or will not be; likewise."""
        words = self.words
        if now_ns:
            words[SINCE] = now_ns
        words[_STAGE] = 3  # Stage.IDLE

    def own(self, pid: int) -> None:
        self.words[_PID] = pid
        self.rest(time.monotonic_ns())

    def take(self, position: int, index: object) -> None:
        """This sample is now in hand; it is named here, for its batch is not listed elsewhere."""
        words = self.words
        words[POSITION] = position
        words[_STAND_IN] = index if type(index) is int and 0 <= index < 1 << 62 else -1
        words[SINCE] = time.monotonic_ns()

    def note_made(self, fetch_ns: int, collate_ns: int, weight: int) -> None:
        """As `note_times`; nothing is sent."""
        times, at = self.times, 0
        for took in (fetch_ns, collate_ns):
            times[at] += weight * took
            times[at + 1 + min(BUCKETS - 1, max(0, took.bit_length() - FIRST_BUCKET))] += weight
            at += 1 + BUCKETS

    @property
    def asked_ns(self) -> int:
        """When the batch in hand was asked for; 0: none is."""
        return 0 if self.words[_STAGE] == Stage.IDLE else self.words[_ASKED_NS]
