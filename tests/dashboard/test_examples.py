"""What the dashboard says of examples/seeing, run as they are, only shorter.

Reads   findings, over HTTP.
Writes  a file to read from, in a folder of its own.
Never   compares seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import warm_server
from dashboard.server_process import DEADLINE_S, Server
from deadlines import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples" / "seeing"
_BLOCK = 8 << 20


def waits_for_disk(folder: Path) -> bool:
    """Whether reads past the page cache are seen as such here: not in memory, nor in some sandboxes."""
    file = folder / "probe"
    file.write_bytes(os.urandom(_BLOCK))
    try:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    code = f"import mmap, os\nm = mmap.mmap(-1, {_BLOCK})\nprint(flush=True)\nwhile True: os.preadv({fd}, [m], 0)"
    reader = warm_server.Popen([sys.executable, "-c", code], pass_fds=[fd], stdout=subprocess.PIPE)
    seen: Counter[str] = Counter()
    try:
        assert reader.stdout is not None
        reader.stdout.readline()

        def shows_the_page() -> bool:
            seen[Path(f"/proc/{reader.pid}/stat").read_text().rpartition(")")[2].split()[0]] += 1
            return seen.total() >= 40

        assert wait_until(shows_the_page, DEADLINE_S)
    finally:
        reader.kill()
        reader.communicate()
        os.close(fd)
        file.unlink()
    return seen["D"] >= 0.5 * seen.total()


@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who waits for a disk")
def test_a_slow_disk_is_named_when_workers_wait_for_one(server: Server, tmp_path: Path):
    """examples/seeing/slow_disk.py on a real disk: what is slow, since when, what it costs, how many would do."""
    if not waits_for_disk(tmp_path):
        pytest.skip("reads from the folder of this test are not seen to wait for a disk")
    with warm_server.Popen([sys.executable, str(EXAMPLES / "slow_disk.py"), "24", str(tmp_path)]) as job:
        try:
            slow: list[dict] = []

            def is_named() -> bool:
                found = [finding for job in server.jobs() for finding in job["findings"]]
                slow[:] = [finding for finding in found if finding["title"].startswith("The disk is slow")]
                return bool(slow)

            assert wait_until(is_named, DEADLINE_S), server.jobs()
            (finding,) = slow
            (told,) = server.jobs()
        finally:
            job.terminate()

    assert finding["who"] == "all 2 alike"
    assert finding["which"].startswith("no single sample: each takes a worker ")
    assert finding["since"] > told["began"]
    assert finding["cost"].startswith("the trainer waited")
    assert "batches a second, before that" in finding["cost"]
    assert "for the disk" in finding["why"]
    assert finding["change"][0].startswith("num_workers=")
    assert "(now 2)" in finding["change"][0]
    assert finding["change"][1].startswith("faster storage")
