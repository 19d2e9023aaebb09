"""`python -m outlive`, and the command `outlive`.

Reads   the command line.
Writes  nothing.
Never   loads the command line's library for `run`: nobody should wait for it before his program starts.
"""

from __future__ import annotations

import sys


def main() -> None:
    if sys.argv[1:2] == ["run"] and sys.argv[2:3] not in ([], ["-h"], ["--help"]):
        from outlive.adoption import launching

        try:
            launching.run(sys.argv[2:])
        except launching.UsageError:
            pass  # said below, as for the other verbs
    from outlive.cli import main as other_verbs

    try:
        other_verbs(prog_name="outlive")
    except SystemExit as left:
        targets = sys.modules.get("outlive.cli.targets")
        if targets is not None and isinstance(left, targets.Answered):
            targets.end(left)
        raise


if __name__ == "__main__":
    main()
