"""A file system whose server stops answering: one file, whose first read is never answered.

Reads   requests of the kernel.
Writes  answers, up to the first read; then only «stuck» to standard output.
Never   anything by libfuse: the protocol is spoken on /dev/fuse.

    python silent_fuse.py FOLDER SOURCE     until SIGTERM
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import sys

IN = struct.Struct("=IIQQIIIHH")  # length, opcode, unique, node, uid, gid, pid, extensions, padding
OUT = struct.Struct("=IiQ")
ATTRIBUTES = struct.Struct("=QQQQQQIIIIIIIIII")
LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, INIT, INTERRUPT, FLUSH = 1, 2, 3, 14, 15, 18, 26, 36, 25
FILE = 2
SIZE = 1 << 20


def attributes(node: int) -> bytes:
    mode, size = (0o40755, 0) if node == 1 else (0o100644, SIZE)
    return ATTRIBUTES.pack(node, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def answer(opcode: int, node: int) -> bytes | int:
    """What is sent back; a number for an error."""
    if opcode == INIT:
        return struct.pack("=IIIIHHIIHHIII24x", 7, 31, 0, 0, 12, 12, 4096, 1, 0, 0, 0, 0, 0)[:64]
    if opcode == LOOKUP:
        return struct.pack("=QQQQII", FILE, 0, 3600, 3600, 0, 0) + attributes(FILE)
    if opcode == GETATTR:
        return struct.pack("=QII", 3600, 0, 0) + attributes(node)
    if opcode == OPEN:
        return struct.pack("=QII", 1, 1, 0)  # direct: no page is read ahead
    if opcode in (RELEASE, FLUSH):
        return b""
    return -errno.ENOSYS


def serve(fd: int) -> None:
    while True:
        request = os.read(fd, 1 << 17)
        _, opcode, unique, node, *_ = IN.unpack_from(request)
        if opcode in (FORGET, INTERRUPT):
            continue
        if opcode == READ:
            print("stuck", flush=True)
            continue
        told = answer(opcode, node)
        body, error = (b"", told) if isinstance(told, int) else (told, 0)
        os.write(fd, OUT.pack(OUT.size + len(body), error, unique) + body)


def main(folder: str, source: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if libc.mount(source.encode(), folder.encode(), b"fuse", 6, options.encode()):  # MS_NOSUID | MS_NODEV
        raise OSError(ctypes.get_errno(), f"mount: {os.strerror(ctypes.get_errno())}")
    print("mounted", flush=True)
    try:
        serve(fd)
    finally:
        os.close(fd)  # what waits for an answer gets an error now
        libc.umount2(folder.encode(), 2)  # MNT_DETACH


if __name__ == "__main__":
    main(*sys.argv[1:])
