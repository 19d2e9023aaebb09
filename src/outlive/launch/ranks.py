"""One rank, as its launcher holds it: started, watched, ended, and what it leaves.

Reads   its black box, stacks, report and output; how it ended.
Writes  signals to it, by handle; SIGKILL to its group, by lifeline.
Never   decides: the group does.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from outlive._capture import blackbox, crash, stacks
from outlive._capture.blackbox import BlackBox, Reason
from outlive._capture.vitals import Vitals
from outlive._forensics import hanging
from outlive._forensics.surroundings import OomWatch
from outlive._system import nameless, ownership, processes, starting
from outlive._system.lifeline import Lifeline
from outlive._system.offspring import Offspring
from outlive.evidence import Evidence, Seen, Surroundings, Worked
from outlive.incident import Exit, Failure, InHand, Stage
from outlive.launch import inside
from outlive.launch.call import Call
from outlive.launch.inside import Handed, Orders
from outlive.launch.output import Pump, Voice

NAME = "outlive-rank-"
_MARK = "OUTLIVE_RANK"  # in the environment of a rank, and so of what it starts
_STATUS_S = 10.0  # under forkserver the status comes from the server, a moment after the end


@dataclass(frozen=True)
class Plan:
    """How the ranks of a group are started."""

    call: Call
    context: BaseContext
    nprocs: int
    daemon: bool
    memory_bytes: int | None
    prefix_output: bool


class Rank:
    def __init__(self, index: int, plan: Plan, environment: Mapping[str, str], pump: Pump) -> None:
        self.index = index
        self.exit: Exit | None = None  # None: it runs
        self.noticed = 0.0  # when we saw that it had failed or ended,
        self.after = 0.0  # and when we had looked before
        self._dying: tuple[float, float] | None = None  # likewise, of when it began to end
        self.asked_to_end = False  # by us, while it still ran
        self.hung_s: float | None = None  # it ran so long, longer than it may
        self._reported: tuple[float, Failure | None] | None = None
        self._memory_bytes = plan.memory_bytes
        self._forked = plan.context.get_start_method() == "fork"
        self._pump = pump
        self._kept = bytearray()
        self._seen: Seen | None = None
        self._around: Surroundings | None = None
        self._usage: resource.struct_rusage | None = None
        self.handle = self.bell = self._stacks = self._report = -1
        self.lifeline = Lifeline()
        self._offspring = Offspring()
        self._mark = secrets.token_hex(8)
        self._voices: list[Voice] = []
        self.process: BaseProcess = plan.context.Process()  # type: ignore[attr-defined]  # until it is started
        self.box: BlackBox
        ownership.own(self)
        try:
            self._start(plan, environment)
        except BaseException:
            self.lifeline.cut()
            for voice in self._voices:
                voice.abandon()
            self._close()
            raise

    # ------------------------------------------------------------ starting

    def _start(self, plan: Plan, environment: Mapping[str, str]) -> None:
        box = nameless.descriptor(blackbox.SIZE, "outlive-box")
        end = self.lifeline.end()
        handed = Handed(lifeline=end, box=box)
        try:
            self.box = BlackBox(nameless.attach(box))
            for name in ("stacks", "report"):
                fd = nameless.descriptor(0, f"outlive-{name}")
                setattr(self, f"_{name}", fd)
                handed.add(name, os.dup(fd))
            self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            handed.add("bell", os.dup(self.bell))
            if plan.prefix_output:
                self._voices = [Voice(self.index, name, self._kept) for name in ("stdout", "stderr")]
                for voice in self._voices:
                    handed.add(voice.stream, voice.end())
            here = plan.context.get_start_method() != "forkserver" and _in_main_thread()
            told = {**environment, _MARK: self._mark}
            orders = Orders(self.index, os.getpid(), told, plan.memory_bytes, dies_with_parent=here)
            self.process = plan.context.Process(  # type: ignore[attr-defined]
                target=inside.main,
                args=(handed, plan.call, orders),
                name=f"{NAME}{self.index}",
                daemon=plan.daemon,
            )
            self.started = time.monotonic()
            with self._pump.lock:  # a fork must not find another thread in the middle of a print
                starting.start(self.process, end)
            pid = self.process.pid
            assert pid is not None
            self.pid = pid
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # of a fork; whichever of the two comes first
            self.lifeline.bind(pid)
            self.handle = _handle(self.process)
            self.vitals = Vitals(pid, self.started)
        finally:
            handed.close()
            plan.call.close()
        for voice in self._voices:
            self._pump.add(voice)

    # ------------------------------------------------------------ watching

    @property
    def runs(self) -> bool:
        return self.exit is None

    @property
    def has_begun(self) -> bool:
        """Whether it has come to our own code."""
        return self.box.pid > 0

    def has_rung(self) -> bool:
        """Whether it has failed, and says so, though it may not have ended yet."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)
            self._reported = inside.read_report(self._report)
        return self._reported is not None

    def see_hanging(self, seconds: float) -> None:
        """It runs too long: look at it. It is killed after this."""
        self.hung_s = seconds
        if self.has_begun:  # before that, the signal that asks for stacks would end it
            self._seen = hanging.see(self.pid, self._stacks, ending=True)

    def notice(self, now: float, before: float) -> None:
        """It was seen failing or ending `now`, and not when somebody looked `before`."""
        if not self.noticed:
            self.noticed, self.after = self._dying or (now, before)

    def notice_dying(self, now: float, before: float) -> None:
        """Another has failed: if this one is on its way out already, that came first, though it ends later."""
        if self._dying is None and processes.is_exiting(self.pid):
            self._dying = now, before

    @property
    def is_falling(self) -> bool:
        """It has failed, or is on its way out: nobody needs to end it, only to wait."""
        return bool(self.noticed) or self._dying is not None

    # ------------------------------------------------------------ ending

    def signal(self, number: int) -> None:
        """Ask it to end."""
        self.asked_to_end = True
        self._offspring.note(self.pid)
        with contextlib.suppress(OSError):  # it has ended
            try:
                signal.pidfd_send_signal(self.handle, number)
            except (AttributeError, OSError):
                if self.process.is_alive():  # the handle may be a sentinel, see `_handle`
                    os.kill(self.pid, number)

    def kill(self) -> None:
        """It, and all of its group."""
        if self.runs and not processes.has_ended(self.handle):
            self.asked_to_end = True
            self._offspring.note(self.pid)
        self.lifeline.cut()
        self._offspring.end()

    def bury(self, oom: OomWatch) -> None:
        """It has ended: how, what was around it; what is left of its group goes."""
        if self.exit is not None:
            return
        by_signal = crash.sender_of(self.box)
        status = _status_of(self.handle)
        if status != 0:
            killed = status == -signal.SIGKILL and not self.asked_to_end
            self._around = oom.surroundings(self.pid, killed=killed, sender=by_signal)
        self.lifeline.cut()
        if status != 0:  # daemons of a rank that ended well may be meant to stay
            self._offspring.end_marked(f"{_MARK}={self._mark}")
        self.exit = self._reaped()
        self.has_rung()
        self._reported = self._reported or inside.read_report(self._report)
        self._pump.farewell(self._voices)

    def _reaped(self) -> Exit:
        popen: Any = self.process._popen  # type: ignore[attr-defined]
        with contextlib.suppress(
            ChildProcessError
        ):  # under forkserver it is the server's child; or somebody was faster
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid == self.pid:
                popen.returncode = os.waitstatus_to_exitcode(status)
                self._usage = usage
        self.process.join(_STATUS_S)
        code = self.process.exitcode
        if code is None:
            # Somebody else has reaped it, or the launcher ignores SIGCHLD: nobody will ever know how it ended.
            popen.returncode = 0 if self.box.in_hand().stage is Stage.LEAVING else 255
            self.process.join(0)  # now multiprocessing knows as well, and lets go of it
            return Exit(code=0) if popen.returncode == 0 else Exit()
        return Exit(signal=-code) if code < 0 else Exit(code=code)

    def close(self) -> None:
        """Nobody asks for it any more."""
        self.lifeline.cut()
        self._close()
        if hasattr(self, "box"):
            self.box.release()

    def abandon(self) -> None:
        """In a fork of the launcher, another rank perhaps: none of this is ours."""
        self._close()

    def _close(self) -> None:
        for fd in (self.handle, self.bell, self._stacks, self._report):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self.handle = self.bell = self._stacks = self._report = -1

    # ------------------------------------------------------------ what it leaves

    @property
    def failure(self) -> Failure | None:
        return self._reported[1] if self._reported is not None else None

    @property
    def failed_at(self) -> float | None:
        """By its own word, on the clock that both have."""
        record = crash.read(self.box)
        if record is not None:
            return record.time_ns / 1e9
        return self._reported[0] if self._reported is not None else None

    @property
    def succeeded(self) -> bool:
        return self.exit == Exit(code=0) and self._reported is None

    @property
    def in_hand(self) -> InHand:
        seconds = (self.failed_at or self.noticed or time.monotonic()) - self.started
        seconds = seconds if self.hung_s is None else self.hung_s
        stage = self.failure.stage if self.failure is not None else self.box.in_hand().stage
        return InHand(stage, seconds=seconds)

    @property
    def stack(self) -> str:
        text = stacks.read(self._stacks)
        return stacks.without_repeats(text) if self.hung_s is not None else text

    @property
    def said(self) -> str:
        return self._kept.decode("utf-8", "replace")

    def evidence(self) -> Evidence:
        vitals, usage, box = self.vitals, self._usage, self.box
        reason, reached, bound = box.retired
        refused = reason is Reason.REFUSED
        worked = Worked(
            memory=vitals.samples(time.monotonic()),
            peak_resident_bytes=usage.ru_maxrss * 1024 if usage is not None else None,
            cpu_s=usage.ru_utime + usage.ru_stime if usage is not None else None,
            descriptors=vitals.descriptors,
            threads=vitals.threads,
            left_by_exit=box.left_by_exit,
        )
        return replace(
            Evidence(worked, self._seen, self._around, last_words=self.said),
            crash=crash.read(box),
            recorder=crash.could_record(box),
            inherited=crash.inherited(box) if self._forked else None,
            over_limit_bytes=reached if refused else None,
            memory_limit_bytes=bound if refused else self._memory_bytes,
        )


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _handle(process: BaseProcess) -> int:
    """Readable when the process has ended, reaped or not."""
    try:
        return os.pidfd_open(process.pid or -1)
    except OSError:  # it has ended, and somebody has reaped it
        return os.dup(process.sentinel)


def _status_of(handle: int) -> int | None:
    """As an exit code, without reaping; None: nobody can say yet."""
    try:
        ended = os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        return None
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
