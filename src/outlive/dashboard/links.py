"""Where this user's dashboards are: the link of each, token included, in a file that only this user may read.

Reads   the runtime folder.
Writes  a file there for as long as a dashboard runs; removes those of dashboards that are gone.
Never   trusts a folder that another user may write to; removes a file that is not certainly ours.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from outlive._metrics import runtime
from outlive._system.safe_files import check_private, create

log = logging.getLogger("outlive")

_NAME = re.compile(r"dash-[0-9]+\.json")


@contextlib.contextmanager
def kept(link: str) -> Iterator[None]:
    """Have `found` know this process's dashboard, until the block ends."""
    path: Path | None = None
    try:
        path = runtime.ready() / f"dash-{os.getpid()}.json"
        found()  # of a process that had this number before, the file goes
        told = {"pid": os.getpid(), "start": runtime.start_of(os.getpid()), "link": link}
        descriptor = create(path, 0o600)
        try:
            os.write(descriptor, json.dumps(told).encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        path = None
        log.warning("`outlive dash --list` will not know this dashboard: %s", error)
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def found() -> list[str]:
    """Links of the dashboards that run."""
    home, links = runtime.folder(), []
    try:
        check_private(home)
        names = sorted(filter(_NAME.fullmatch, os.listdir(home)))
    except OSError:
        return []
    for name in names:
        try:
            told = json.loads((home / name).read_bytes())
            link, runs = str(told["link"]), name == f"dash-{told['pid']}.json" and runtime.is_alive(told)
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
            continue  # it is being written, or is no file of ours
        if runs:
            links.append(link)
        elif runtime.is_marked(home):
            (home / name).unlink(missing_ok=True)
    return links
