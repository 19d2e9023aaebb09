"""Verdicts on workers that hang: what they wait for, or where they run without end.

Reads   incidents.
Writes  nothing.
Never   a process, a file, a lock, the clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from outlive._forensics import frames
from outlive._forensics.frames import Frame
from outlive.evidence import Seen, ThreadSeen
from outlive.incident import Incident, IncidentKind, Stage
from outlive.verdicts import Confidence, Name, Verdict

_PYTHON = ("python", "libpython")
# Libraries with pools of threads, which a fork does not copy.
_POOLS = ("libgomp", "libiomp", "libomp", "libopenblas", "libscipy_openblas", "libmkl", "libtbb")
_POOL_REMEDIES = (
    'multiprocessing_context="spawn"   workers then start their own threads',
    "OMP_NUM_THREADS=1   in the environment of the job (and cv2.setNumThreads(0) for OpenCV): no pool, no wait",
)
_SLEEPS = ("nanosleep", "clock_nanosleep", "pause", "rt_sigsuspend", "rt_sigtimedwait")
_FILE_LOCKS = ("flock", "fcntl")
_STARTING = (Stage.STARTING, Stage.PREPARING, Stage.FORWARDING)

# What waits for another thread in Python's own library: its file and function → what is waited for.
_WAITS = {
    ("queue.py", "get"): "an item that nobody puts into a queue",
    ("queue.py", "put"): "room in a queue that nobody empties",
    ("threading.py", "join"): "a thread to end",
    ("threading.py", "_wait_for_tstate_lock"): "a thread to end",
    ("_base.py", "result"): "the result of a future",
    ("threading.py", "wait"): "an event or condition that nobody sets",
    ("synchronize.py", "__enter__"): "a lock of multiprocessing's",
}


def stopped(incident: Incident) -> Verdict | None:
    seen, main = _seen(incident)
    if seen is None or main is None or main.state not in ("T", "t"):
        return None
    if main.state == "t" or seen.tracer:
        by = seen.tracer or "a debugger"
        return Verdict(
            Name.STOPPED,
            f"stopped by {by}, which debugs it",
            facts=(f"the kernel shows it as traced, by {by}", _since(incident)),
            remedies=(
                "FaultPolicy(sample_timeout=None)   while you debug a worker: nobody is then taken for hung",
                "detach the debugger when you have seen enough",
            ),
        )
    return Verdict(
        Name.STOPPED,
        "stopped by SIGSTOP or its like: it could not run",
        facts=("the kernel shows it as stopped (state T), and nobody debugs it", _since(incident)),
        remedies=(
            "find who stops it: kill -STOP, Ctrl-Z, a debugger, a batch system that suspends jobs",
            "FaultPolicy(sample_timeout=None)   if somebody stops and continues jobs on purpose",
        ),
    )


def spinning(incident: Incident) -> Verdict | None:
    seen, main = _seen(incident)
    if seen is None or main is None or not main.busy:
        return None
    stack = frames.of_stack(incident.stack)
    at = _at(stack)
    facts = ["its main thread used the processor while it was looked at"]
    native = [place for place in seen.places if not place.startswith(_PYTHON)]
    if _is_matching(stack) and not seen.python_moved:
        return Verdict(
            Name.SPINNING_IN_NATIVE_CODE,
            f"a regular expression is matched without end{_called(stack)}",
            facts=(*facts, "the innermost Python frame is in the module re, and its stack did not change"),
            remedies=(
                "rewrite the pattern: nested repetition such as (a+)+ takes exponential time where it does not match",
                "limit the length of the text that is matched",
                _slow(incident),
            ),
        )
    if seen.python_moved or (seen.places and len(native) < len(seen.places)):
        moved = "its Python stack changed between looks" if seen.python_moved else "its code is the interpreter's own"
        return Verdict(
            Name.SPINNING_IN_PYTHON,
            f"Python code runs without end{at}",
            facts=(*facts, moved, _since(incident)),
            remedies=(
                f"give the loop{at} an end: a count of tries, or a deadline",
                _slow(incident),
            ),
            confidence=Confidence.CERTAIN if seen.python_moved else Confidence.LIKELY,
        )
    if seen.python_moved is None and not native:  # only suspected, so far: nobody followed it
        return Verdict(
            Name.SPINNING_IN_PYTHON,
            f"runs{at}, and nobody knows for how long",
            facts=(*facts, _since(incident)),
            remedies=(_slow(incident),),
            confidence=Confidence.POSSIBLE,
        )
    library, count = Counter(place.partition("+")[0] for place in native).most_common(1)[0] if native else ("", 0)
    function = next(iter(_native_functions(seen)), "")
    if native:
        facts.append(f"it was found in {native[0]}, in {count} of {len(seen.places)} looks in that library")
    if seen.python_moved is False:
        facts.append("its Python stack did not change")
    return Verdict(
        Name.SPINNING_IN_NATIVE_CODE,
        f"native code{f' in {library}' if library else ''}{f' ({function})' if function else ''} runs without end"
        f"{_called(stack)}",
        facts=(*facts, *_native(seen), _since(incident)),
        remedies=(
            *(_POOL_REMEDIES if library.startswith(_POOLS) else ()),
            f"report it to whoever makes {library or 'that library'}, with this sample; a newer version may not hang",
            "leave such samples out, or read them with another library: nothing in Python can end native code",
        ),
        confidence=Confidence.CERTAIN if native else Confidence.LIKELY,
    )


def inherited_lock(incident: Incident) -> Verdict | None:
    seen, main = _seen(incident)
    if seen is None or main is None or main.system_call != "futex":
        return None
    at = _at(frames.of_stack(incident.stack))
    left = _left_behind(seen)
    if seen.inherited_locks:
        lock = seen.inherited_locks[0]
        return Verdict(
            Name.INHERITED_LOCK,
            f"waits{at} for {lock}, which was held when the worker was forked: who held it is not here",
            facts=("its main thread waits for a lock (futex) without a timeout", *left, _since(incident)),
            remedies=(
                'multiprocessing_context="spawn"   workers then inherit no locks',
                "make the lock in worker_init_fn, or on first use in the worker, not before the loop over the loader",
                "start threads that take it only after iter(loader), or stop them before",
            ),
        )
    pool = next((place for place in seen.places if place.startswith(_POOLS)), "")
    if pool and len(seen.threads) == 1:
        library = pool.partition("+")[0]
        return Verdict(
            Name.INHERITED_LOCK,
            f"waits{at} in {library} for threads of a pool that forking does not copy",
            facts=(f"{pool} is on its stack", "the worker has but one thread", *left, _since(incident)),
            remedies=_POOL_REMEDIES,
            confidence=Confidence.LIKELY,
        )
    return None


def waiting_for_lock(incident: Incident) -> Verdict | None:
    seen, main = _seen(incident)
    if seen is None or main is None or not main.system_call.startswith(("futex", "sem")):
        return None
    stack = frames.of_stack(incident.stack)
    what = seen.lock or _awaited(stack) or "a lock"
    others = seen.threads[1:]
    facts = [f"its main thread waits in {main.system_call}, " + ("without" if main.for_ever else "with") + " a timeout"]
    if not others:
        facts.append("it has no other thread that could release it")
    busy = [thread for thread in others if thread.busy]
    if busy:
        facts.append(f"{len(busy)} other of its threads run")
    facts += [f"another of its threads waits for {t.target}" for t in others if t.target and not t.busy][:2]
    if seen.places:
        facts.append(f"native code on its stack: {', '.join(seen.places[:2])}")
    sure = main.for_ever and not busy
    return Verdict(
        Name.WAITING_FOR_LOCK,
        f"waits{_at(stack)} for {what}",
        facts=(*facts, *_native(seen), *_left_behind(seen), _since(incident)),
        remedies=(*_lock_remedies(what), _slow(incident)),
        confidence=Confidence.CERTAIN if sure else Confidence.LIKELY,
    )


def sleeping(incident: Incident) -> Verdict | None:
    seen, main = _seen(incident)
    if seen is None or main is None or main.system_call not in _SLEEPS:
        return None
    at = _at(frames.of_stack(incident.stack))
    for_signal = "sleep" not in main.system_call
    return Verdict(
        Name.SLEEPING,
        f"waits for a signal{at}" if for_signal else f"sleeps{at}",
        facts=(f"its main thread is in {main.system_call}", _since(incident)),
        remedies=(
            "a loop that tries again should give up after a time: raise, and let FaultPolicy(retry_on=…) try again",
            _slow(incident),
        ),
    )


def waiting_for_io(incident: Incident) -> Verdict | None:
    seen, main = _seen(incident)
    if seen is None or main is None or main.busy:
        return None
    if not main.system_call and main.state != "D":
        return None
    at = _at(frames.of_stack(incident.stack))
    facts = [f"its main thread is in {main.system_call or 'a system call that cannot be seen'}"]
    if main.state == "D":
        facts.append("it waits for a device or a file system, and no signal can interrupt that")
    if seen.outlives_kill:
        facts.append("SIGKILL has not ended it: it stays in the kernel until that answers or is unmounted by force")
    if main.waits_in:
        facts.append(f"in the kernel it sleeps in {main.waits_in}")
    target = main.target or ("a disk or a file system" if main.state == "D" else "something that cannot be seen")
    return Verdict(
        Name.WAITING_FOR_IO,
        f"waits{at} for {_io_words(main, target)}",
        facts=(*facts, *_native(seen), _since(incident)),
        remedies=(*_io_remedies(main, target), _slow(incident)),
        confidence=Confidence.CERTAIN if main.target else Confidence.LIKELY,
    )


def kept_by_another_thread(incident: Incident) -> Verdict | None:
    """The main thread is in no call and does nothing: it asks for the interpreter's lock every few milliseconds."""
    seen, main = _seen(incident)
    if seen is None or main is None or main.busy or main.system_call:
        return None
    busy = [thread for thread in seen.threads[1:] if thread.busy]
    if not busy:
        return None
    return Verdict(
        Name.SPINNING_IN_NATIVE_CODE,
        f"another thread of its ({busy[0].name}) runs without end, and its main thread comes to nothing",
        facts=(f"{len(busy)} other of its threads run, its main thread does not", _since(incident)),
        remedies=("have native code that takes long let go of the interpreter's lock (the GIL)", _slow(incident)),
        confidence=Confidence.LIKELY,
    )


RULES: tuple[Callable[[Incident], Verdict | None], ...] = (
    stopped,
    spinning,
    inherited_lock,
    waiting_for_lock,
    sleeping,
    waiting_for_io,
    kept_by_another_thread,
)


# ---------------------------------------------------------------- words


def _seen(incident: Incident) -> tuple[Seen | None, ThreadSeen | None]:
    hangs = incident.hung or incident.kind in (IncidentKind.HANG, IncidentKind.SUSPECTED_HANG)
    seen = incident.evidence.seen
    if not hangs or seen is None or not seen.threads:
        return None, None
    return seen, seen.threads[0]


def _at(stack: list[Frame]) -> str:
    frame = frames.nearest_users(stack)
    return f" at {frame.words}" if frame else ""


def _called(stack: list[Frame]) -> str:
    frame = frames.nearest_users(stack)
    return f", called at {frame.words}" if frame else ""


def _since(incident: Incident) -> str:
    return f"no progress for {incident.in_hand.seconds:.1f} s"


def _slow(incident: Incident) -> str:
    seconds = max(60, round(incident.in_hand.seconds * 10))
    if incident.in_hand.stage in _STARTING:
        return f"FaultPolicy(hang_floor_s={seconds})   if starting a worker takes so long"
    return f"FaultPolicy(sample_timeout={seconds})   if such a sample is only slow"


def _native(seen: Seen) -> list[str]:
    names = _native_functions(seen)
    return [f"its native stack begins with {', '.join(names[:3])}"] if names else []


def _native_functions(seen: Seen) -> list[str]:
    """Named ones, the innermost first, as py-spy writes them: «    spin (libspinner.so)»."""
    lines = [line.strip() for line in seen.native_stack.splitlines() if line.startswith(" ") and "(" in line]
    return [line.rpartition(" (")[0] for line in lines if not line.startswith("0x")]


def _left_behind(seen: Seen) -> list[str]:
    if not seen.left_behind:
        return []
    names = ", ".join(seen.left_behind[:3]) + (", …" if len(seen.left_behind) > 3 else "")
    return [f"the trainer had other threads when it was forked, which workers have not got: {names}"]


def _awaited(stack: list[Frame]) -> str:
    """What Python's own library says it waits for: the outermost word on it before the user's code."""
    found = ""
    for frame in stack:
        if frame.is_users:
            break
        found = _WAITS.get((frame.file, frame.function), found)
    return found


def _lock_remedies(what: str) -> tuple[str, ...]:
    if what.startswith("an item"):
        return ("queue.get(timeout=30)   raises queue.Empty instead of waiting for somebody who is not there",)
    if what.startswith("room"):
        return ("queue.put(…, timeout=30)   raises queue.Full instead of waiting for somebody who is not there",)
    if what.startswith("the result"):
        return ("future.result(timeout=30)   raises TimeoutError instead of waiting for ever",)
    if what.startswith(("a thread", "an event")):
        return ("give the wait a timeout: event.wait(30), thread.join(30)",)
    if "multiprocessing" in what:
        return ("share no lock between workers: one that is killed while it holds it stops all others",)
    return (
        "threading.RLock() instead of Lock()   if the same thread takes it twice",
        "lock.acquire(timeout=30)   and raise when it was not to be had",
    )


def _is_matching(stack: list[Frame]) -> bool:
    return bool(stack) and stack[0].path.endswith(("/re.py", "/re/__init__.py"))


def _io_words(main: ThreadSeen, target: str) -> str:
    call = main.system_call
    if call in ("wait4", "waitid"):
        return f"{target} to end" if main.target else "a child process to end"
    if call in _FILE_LOCKS:
        return f"the lock on {target}"
    if call == "connect":
        return f"a connection to {target}"
    if call in ("open", "openat", "openat2"):
        return f"{target} to be opened"
    if call.startswith(("write", "send", "pwrite")):
        return f"{target} to take data"
    if call in ("fsync", "fdatasync", "msync"):
        return f"{target} to reach the disk"
    return target


def _io_remedies(main: ThreadSeen, target: str) -> tuple[str, ...]:
    if main.system_call in ("wait4", "waitid") or "process " in target.partition(",")[0]:
        return ("subprocess.run(…, timeout=60)   raises TimeoutExpired, and ends the program",)
    if main.system_call in _FILE_LOCKS:
        return (
            "lslocks   shows who holds it; a lock that somebody keeps needs a deadline: LOCK_NB, and try again",
            "one file per worker instead of one that all of them lock",
        )
    if "tcp " in target or "udp " in target:
        return (
            "give the connection timeouts: socket.settimeout(30), requests.get(…, timeout=(5, 30))",
            "boto3: Config(connect_timeout=5, read_timeout=30); fsspec/aiohttp: ClientTimeout(total=60)",
        )
    if "(on " in target:
        return ("mount it so that it fails: -o soft,timeo=100,retrans=3 for NFS; and retry_on=(OSError,)",)
    if main.system_call in ("open", "openat") or "pipe" in target:
        return ("see that somebody writes to the other end, or wait with an end: select.select([fd], [], [], 30)",)
    return ("give the call a timeout: socket.settimeout(30), select.select(…, 30)",)
