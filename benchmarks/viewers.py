"""Watches every job of this user in all the ways there are, until its standard input ends: `viewers.py`.

Reads   `outlive top` in a terminal of 80 × 24, the stream of `outlive dash`, a scrape of its metrics once a second.
Writes  «ready» once all three have answered; at its end, how often each of them did.
Never   anything of the job's process.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
import urllib.request
from typing import Any

SCRAPE_S = 1.0


def main() -> None:
    ours = (sys.executable, "-m", "outlive")
    dash = subprocess.Popen([*ours, "dash", "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert dash.stdout is not None
    found = re.search(r"http://\S+", dash.stdout.readline())
    assert found is not None
    scraper = http.client.HTTPConnection(found[0].removeprefix("http://").rstrip("/"))  # kept open, as Prometheus does
    stream = urllib.request.urlopen(f"{found[0]}api/stream")
    terminal, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    top = subprocess.Popen([*ours, "top"], stdin=its, stdout=its, stderr=its)
    counts = {"top": 0, "dash": 0, "prometheus": 0}
    sources: dict[int, str] = {terminal: "top", stream.fileno(): "dash"}
    told, due = False, time.monotonic()
    while True:
        ready, _, _ = select.select([*sources, sys.stdin], [], [], max(0.0, due - time.monotonic()))
        if sys.stdin in ready:
            break
        for fd in ready:
            os.read(fd, 1 << 20)
            counts[sources[fd]] += 1
        if time.monotonic() >= due:
            scraper.request("GET", "/metrics")
            counts["prometheus"] += b"outlive_batches" in scraper.getresponse().read()
            due += SCRAPE_S
        if not told and counts["top"] and counts["dash"]:
            told = True
            print("ready", flush=True)
    end(top, dash)
    print(json.dumps(counts), flush=True)


def end(*viewers: subprocess.Popen[Any]) -> None:
    for viewer in viewers:
        viewer.kill()
        viewer.wait()


if __name__ == "__main__":
    main()
