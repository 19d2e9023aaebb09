"""Workers that write to standard error and die: `stderr_writer.py METHOD WHAT`; prints what the incidents remember.

A third argument has root give up the right to open what belongs to others.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

from torch.utils.data import Dataset

import outlive

WHAT = {
    "line": b"a line of sample %d\n",
    "no newline": b"half a line of %d",
    "bytes": b"\xff\xfe sample %d \x00 \xc3\n",
    "some": b"%07d" + b"~" * 30_000 + b"the end\n",
    "much": b"%07d" + b"~" * 300_000 + b"the end\n",
}


class Speaking(Dataset[int]):
    def __init__(self, what: str) -> None:
        self.what = what

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index % 2:
            said = WHAT[self.what] % index
            while said:
                said = said[os.write(2, said) :]
        if index == 3:
            os._exit(3)
        return index


def give_up_override() -> None:
    """Give up CAP_DAC_OVERRIDE: files of others can be read and written only as their modes allow."""
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, data) == 0
    for word in range(3):  # effective, permitted, inheritable
        data[word] &= ~2
    assert libc.capset(header, data) == 0


def main(method: str, what: str, user: str = "") -> None:
    if user:
        give_up_override()
    policy = outlive.FaultPolicy(on_error="skip", retries=0, max_bad=None)
    loader: Any = outlive.DataLoader(Speaking(what), num_workers=1, multiprocessing_context=method, faults=policy)
    print("ready", flush=True)
    sys.stdin.readline()
    delivered = [int(batch) for batch in loader]
    print(json.dumps([delivered, [incident.evidence.last_words for incident in loader.incidents]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
