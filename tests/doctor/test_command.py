"""`outlive doctor` as people and scripts meet it: its page, its JSON, its exit status, its progress.

Reads   standard output, standard error, a terminal of its own.
Writes  small modules to temporary folders.
Never   torch: the doctor needs it only where the dataset does.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from doctor.examination import environment
from outlive._forensics import words
from outlive.doctor import Finding, Rank, dataset, printing

DEADLINE_S = 100.0
MODULE = """
import time
print("loading")
class Numbers:
    def __len__(self): return 100
    def __getitem__(self, index):
        return [float(index)] * 10
class Broken(Numbers):
    def __getitem__(self, index):
        if index == 99: raise OSError("\\x1b[31mno such file: " + "/very/long" * 20)
        return [float(index)] * 10
class Loud(Numbers):
    def __getitem__(self, index):
        print("fetching", flush=True)
        return index
    def __reduce__(self):
        print("pickling")
        return Loud, ()
def endless():
    import threading
    threading.Thread(target=threading.Event().wait).start()
    return Loud()
class Slow(Numbers):
    def __getitem__(self, index):
        time.sleep(0.15)
        return index
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_dataset.py").write_text(MODULE)
    return tmp_path


def doctor(folder: Path, *arguments: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outlive", "doctor", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.run(
        command, cwd=folder, env=environment(), text=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL, **streams
    )


def test_a_healthy_dataset_ends_with_0_and_a_page_of_80_columns(folder):
    """It says what was looked at, and that nothing was found; nothing of it needs torch."""
    ended = doctor(folder, "my_dataset.py:Numbers", "--no-compiled", "--samples", "4", "--workers", "2")

    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stderr
    assert lines[0] == "outlive doctor my_dataset.py:Numbers"
    assert lines[-1] == "Nothing was found that kills workers, changes samples or slows them down."
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("  dataset   my_dataset.Numbers") for line in lines)
    assert any(line.startswith("  samples   4 of 100 fetched") for line in lines)
    assert any("2 workers × " in line for line in lines)
    assert ended.stderr == "loading\n"


def test_what_kills_ends_with_1_as_a_page_and_as_json(folder):
    """The page tames what an exception says; the JSON is all there is on standard output."""
    page = doctor(folder, "my_dataset:Broken", "--no-compiled", "--samples", "2")
    told = doctor(folder, "my_dataset:Broken", "--no-compiled", "--samples", "2", "--json")

    assert (page.returncode, told.returncode) == (1, 1), page.stderr + told.stderr
    assert "Will kill\n─────────\n  sample 99 raises OSError:" in page.stdout
    assert "    → outlive check my_dataset:Broken (finds all such samples)" in page.stdout.splitlines()
    assert "\x1b" not in page.stdout
    answer = json.loads(told.stdout)
    assert answer["target"] == "my_dataset:Broken"
    assert answer["kills"] is True
    assert [(finding["name"], finding["rank"]) for finding in answer["findings"]] == [("sample-raises", "will kill")]
    assert answer["samples"]["fetched"] == 2
    assert answer["machine"]["cpus"] > 0


def test_only_the_answer_is_on_standard_output_and_the_command_ends(folder):
    """Whatever the dataset prints, in this process and in others, and though its module starts a thread for ever."""
    ended = doctor(folder, "my_dataset:endless", "--no-compiled", "--samples", "2", "--json")

    assert [finding["name"] for finding in json.loads(ended.stdout)["findings"]] == ["threads-before-fork"]
    assert ended.returncode == 1
    assert {"loading", "fetching", "pickling"} <= set(ended.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no_such_module:loader",), "there is no module 'no_such_module' here"),
        (("my_dataset.py",), "names no attribute; write my_dataset.py:dataset"),
        (("my_dataset:time",), "my_dataset:time is a module: neither a DataLoader nor a dataset"),
        (("--cpu", "x86-64-v9"), "cpu 'x86-64-v9' is not in archspec's database"),
        (("--workers", "-1"), "-1 is not in the range"),
        (("--start-method", "thread"), "'thread' is not one of"),
    ],
)
def test_wrong_usage_ends_with_2_and_a_sentence(folder, arguments, words):
    """And no traceback."""
    ended = doctor(folder, *arguments)

    assert ended.returncode == 2
    assert words in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


def test_a_terminal_sees_how_far_it_is_and_a_file_does_not(folder):
    """Where it takes a while: one line, on standard error, gone at the end."""
    arguments = ("my_dataset:Slow", "--no-compiled", "--samples", "3")
    master, slave = pty.openpty()
    try:
        with ThreadPoolExecutor() as beside:
            into_pipe = beside.submit(doctor, folder, *arguments)
            seen = doctor(folder, *arguments, stderr=slave)
        os.set_blocking(master, False)
        shown = b""
        with contextlib.suppress(BlockingIOError):  # a terminal hands over a part at a time
            while True:
                shown += os.read(master, 1 << 16)
    finally:
        os.close(master)
        os.close(slave)
    piped = into_pipe.result()

    assert seen.returncode == 0
    assert b"\rlooking at samples" in shown
    assert shown.endswith(b"\r")
    assert "looking at" not in seen.stdout + piped.stdout + piped.stderr


def test_the_package_is_light_and_its_names_load_late(folder):
    """`outlive.doctor` costs a program nothing until it examines something."""
    program = (
        "import sys, outlive; outlive.doctor; assert 'numpy' not in sys.modules and 'click' not in sys.modules;"
        "told = outlive.doctor.examine(compiled=False); print(str(told).splitlines()[0]);"
        "assert 'torch' not in sys.modules"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=DEADLINE_S
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("  machine   ")


def test_a_page_has_the_worst_first_and_stays_within_its_width():
    """Whatever findings say: long words stay whole, control characters do not come through."""
    findings = [
        Finding("a", Rank.SLOWS_DOWN, "slow " * 30, ("why " * 30,), ("num_workers=2",)),
        Finding("b", Rank.WILL_KILL, "deadly \x1b[2J", (), ("/a/path/" * 20, "ulimit -n 4096")),
        Finding("c", Rank.CHANGES_DATA, "other", (), ("seed",)),
    ]

    lines = printing.lines([("machine", "fit " * 40)], findings, ["a note"], ["a part: why"])

    headings = [line for at, line in enumerate(lines[:-1]) if lines[at + 1].startswith("──")]
    assert headings == ["Will kill", "Changes data", "Slows down", "Good to know", "Not looked at"]
    assert all(len(line) <= words.WIDTH for line in lines if "/a/path/" not in line)
    assert "    → ulimit -n 4096" in lines
    assert "\x1b" not in "".join(lines)


def test_every_finding_is_in_the_guide():
    """By its name, with when it is made."""
    root = Path(printing.__file__).parent
    made = {name for file in root.glob("*.py") for name in re.findall(r'Finding\(\s*"([a-z-]+)"', file.read_text())}
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "doctor.md").read_text()

    assert len(made | dataset.HELD_KINDS.keys()) > 20
    assert sorted(name for name in made | dataset.HELD_KINDS.keys() if f"`{name}`" not in guide) == []
