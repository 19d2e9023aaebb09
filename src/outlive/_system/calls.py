"""Names of the system calls that a process may wait in, and which of their arguments say what for.

Reads   nothing.
Writes  nothing.
Never   a complete list: a call that does not wait is of no use to anybody here.
"""

from __future__ import annotations

import os

_X86_64 = {
    0: "read", 1: "write", 2: "open", 4: "stat", 6: "lstat", 7: "poll", 16: "ioctl", 17: "pread64", 18: "pwrite64",
    19: "readv", 20: "writev", 21: "access", 23: "select", 26: "msync", 34: "pause", 35: "nanosleep", 40: "sendfile",
    42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 65: "semop",
    72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 128: "rt_sigtimedwait", 130: "rt_sigsuspend",
    202: "futex", 208: "io_getevents", 217: "getdents64", 219: "restart_syscall", 220: "semtimedop",
    230: "clock_nanosleep", 232: "epoll_wait", 243: "mq_timedreceive", 247: "waitid", 257: "openat",
    262: "newfstatat", 270: "pselect6", 271: "ppoll", 275: "splice", 281: "epoll_pwait", 288: "accept4",
    295: "preadv", 299: "recvmmsg", 326: "copy_file_range", 332: "statx", 426: "io_uring_enter", 437: "openat2",
    441: "epoll_pwait2", 449: "futex_waitv",
}  # fmt: skip
_AARCH64 = {
    4: "io_getevents", 22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "openat", 61: "getdents64",
    63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64", 69: "preadv", 71: "sendfile",
    72: "pselect6", 73: "ppoll", 76: "splice", 79: "newfstatat", 82: "fsync", 83: "fdatasync", 95: "waitid",
    98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 128: "restart_syscall", 133: "rt_sigsuspend",
    137: "rt_sigtimedwait", 183: "mq_timedreceive", 192: "semtimedop", 193: "semop", 202: "accept", 203: "connect",
    206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 227: "msync", 242: "accept4", 243: "recvmmsg",
    260: "wait4", 285: "copy_file_range", 291: "statx", 426: "io_uring_enter", 437: "openat2", 441: "epoll_pwait2",
    449: "futex_waitv",
}  # fmt: skip
_NAMES = {"x86_64": _X86_64, "aarch64": _AARCH64}.get(os.uname().machine if hasattr(os, "uname") else "", {})

# Where the number is not told, or only that an interrupted call goes on: the kernel function that sleeps.
_BY_KERNEL_FUNCTION = (
    ("futex_", "futex"),
    ("hrtimer_nanosleep", "clock_nanosleep"),
    ("do_nanosleep", "clock_nanosleep"),
    ("poll_schedule_timeout", "poll"),
    ("do_poll", "poll"),
    ("do_sys_poll", "poll"),
    ("do_select", "select"),
    ("ep_poll", "epoll_wait"),
    ("pipe_read", "read"),
    ("anon_pipe_read", "read"),
    ("pipe_write", "write"),
    ("wait_for_partner", "openat"),
    ("do_wait", "wait4"),
    ("inet_csk_accept", "accept"),
    ("sk_wait_data", "recvfrom"),
    ("unix_stream_read", "recvfrom"),
    ("__skb_wait_for_more_packets", "recvfrom"),
    ("locks_lock_inode_wait", "flock"),
    ("fcntl_setlk", "fcntl"),
)

FD_FIRST = frozenset(
    {"read", "write", "pread64", "pwrite64", "readv", "writev", "preadv", "connect", "accept", "accept4", "sendto"}
    | {"recvfrom", "sendmsg", "recvmsg", "recvmmsg", "fcntl", "flock", "fsync", "fdatasync", "ioctl", "getdents64"}
    | {"splice", "copy_file_range", "sendfile"}
)
PATH_AT = {
    "open": 0,
    "stat": 0,
    "lstat": 0,
    "access": 0,
    "openat": 1,
    "openat2": 1,
    "newfstatat": 1,
    "statx": 1,
}  # which argument points to a path


def name_of(number: int, waits_in: str = "") -> str:
    """«futex»; "" for one that is not known."""
    name = _NAMES.get(number, "")
    return by_kernel_function(waits_in) if name in ("", "restart_syscall") else name


def by_kernel_function(waits_in: str) -> str:
    """The call that sleeps in such a function of the kernel's; "" where nobody knows."""
    return next((name for start, name in _BY_KERNEL_FUNCTION if waits_in.startswith(start)), "")
