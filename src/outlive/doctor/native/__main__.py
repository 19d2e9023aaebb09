"""`python -m outlive.doctor.native --cpu x86-64-v2 --cpu znver2`: this part of the doctor alone.

Reads   the command line.
Writes  findings to standard output.
Never   ends with 0 where something will kill or may.
"""

from __future__ import annotations

import argparse
import sys

from outlive.doctor.findings import ranked
from outlive.doctor.native import survey
from outlive.doctor.native.machines import UnknownMachine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m outlive.doctor.native")
    parser.add_argument("--cpu", action="append", default=[], help="another machine's CPU: x86-64-v2, znver2, …")
    try:
        seen = survey(parser.parse_args().cpu)
    except UnknownMachine as error:
        parser.error(str(error))
    for finding in ranked(list(seen.findings)):
        print(f"{finding.rank.value}: {finding.title}")
        for fact in finding.facts:
            print(f"    {fact}")
        for remedy in finding.remedies:
            print(f"  → {remedy}")
    for fact in seen.facts:
        print(fact)
    return 1 if seen.findings else 0


if __name__ == "__main__":
    sys.exit(main())
