"""Workers that write to standard error and die: `stderr_writer.py METHOD WHAT`; prints what the incidents remember."""

from __future__ import annotations

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


def main(method: str, what: str) -> None:
    policy = outlive.FaultPolicy(on_error="skip", retries=0, max_bad=None)
    loader: Any = outlive.DataLoader(Speaking(what), num_workers=1, multiprocessing_context=method, faults=policy)
    print("ready", flush=True)
    sys.stdin.readline()
    delivered = [int(batch) for batch in loader]
    print(json.dumps([delivered, [incident.evidence.last_words for incident in loader.incidents]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
