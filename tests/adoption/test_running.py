"""`outlive run`: programs see nothing of it, and their loaders are supervised.

Reads   what programs print, and how they end, with and without it.
Writes  signals to them.
Never   leaves one of them running.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import outlive
from outlive.adoption import launching, options
from outlive.cli import main

PROGRAMS = Path(__file__).with_name("programs")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
RUN = (sys.executable, "-m", "outlive", "run")
ALL, LEFT = float(sum(range(16))), float(sum(range(16)) - 5 - 9)


def ended(*command: str, **more: Any) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, **more.pop("environment", {})}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, **{"cwd": PROGRAMS, "input": "", **more}
    )


WAYS = {
    "script": ((sys.executable, "environment_report.py"), ("environment_report.py",)),
    "absolute script": (
        (sys.executable, str(PROGRAMS / "environment_report.py")),
        (str(PROGRAMS / "environment_report.py"),),
    ),
    "module": ((sys.executable, "-m", "environment_report"), ("-m", "environment_report")),
    "command": ((sys.executable, "-u", "environment_report.py"), ("--", sys.executable, "-u", "environment_report.py")),
}


@pytest.mark.parametrize(("plain", "ours"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("what", [("exit", "7", "-x", "--", "--faults"), ("raise",), ("kill",)], ids="-".join)
def test_a_program_sees_and_leaves_the_same_when_it_is_run_by_us(plain, ours, what, tmp_path):
    """Arguments, main module, path, flags, environment, standard streams, traceback, exit status, sitecustomize."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.customized = __name__")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])}

    theirs = ended(*plain, *what, input="told", environment=path)
    mine = ended(*RUN, *ours, *what, input="told", environment=path)

    assert json.loads(mine.stdout) == json.loads(theirs.stdout) if theirs.stdout else not mine.stdout
    assert (mine.returncode, mine.stderr) == (theirs.returncode, theirs.stderr)
    assert theirs.returncode == {"exit": 7, "raise": 1, "kill": -signal.SIGKILL}[what[0]]


def test_flags_of_python_are_the_programs_when_it_is_started_with_them():
    """`python -W error -m outlive run` means them for the program."""
    plain = ended(sys.executable, "-W", "error", "-O", "environment_report.py", "exit", "0")
    ours = ended(sys.executable, "-W", "error", "-O", "-m", "outlive", "run", "environment_report.py", "exit", "0")

    assert json.loads(ours.stdout)["flags"] == json.loads(plain.stdout)["flags"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_program_when_it_is_sent_to_us(number):
    """There is one process, and it is the program."""

    def end(*command: str) -> tuple[str, list[str], int]:
        with subprocess.Popen(
            command, cwd=PROGRAMS, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == process.pid
            process.send_signal(number)
            said, cried = process.communicate(timeout=60)
        return said, cried.splitlines()[-1:], process.returncode  # where it was is chance

    assert end(*RUN, "environment_report.py", "wait") == end(sys.executable, "environment_report.py", "wait")


def test_a_program_finishes_and_sums_up_when_samples_are_bad():
    """It dies without us; with us it finishes, and says once what happened to it and to the Pythons that it started."""
    alone = ended(sys.executable, "train.py", "fork")
    survived = ended(*RUN, "--faults", "skip", "train.py", "fork", "twice")

    assert alone.returncode == 1
    assert (survived.returncode, survived.stdout) == (0, f"{LEFT}\n{LEFT}\n")
    told = survived.stderr[survived.stderr.index("\noutlive: ") + 1 :].splitlines()
    assert survived.stderr.count("outlive: ") == 1
    assert told[0] == "outlive: 4 workers were lost (4 × killed), 2 other incidents (2 × exception)"
    assert told[1].startswith("  out      2 samples left out or replaced: ")
    assert told[2].startswith(f"  journal  {os.environ['OUTLIVE_HOME']}")


def test_samples_that_a_check_found_are_not_tried_by_an_unchanged_program(tmp_path, monkeypatch):
    """Nor in a Python that it starts; then nothing happens, and nothing is said. A variable says the same."""
    monkeypatch.setitem(sys.modules, "train", module := types.ModuleType("train"))
    exec((PROGRAMS / "train.py").read_text(), vars(module))
    for shard in (1, 2):
        file = tmp_path / f"{shard}.json"
        outlive.check(module.Samples(True), workers=1, start_method="fork", shard=(shard, 2), output=file)

    obeyed = ended(
        *RUN, "--quarantine", "1.json", "--quarantine=2.json", str(PROGRAMS / "train.py"), "fork", "twice", cwd=tmp_path
    )
    half = ended(*RUN, "train.py", "fork", environment={"OUTLIVE_QUARANTINE": str(tmp_path / "1.json")})

    assert (obeyed.returncode, obeyed.stdout, obeyed.stderr) == (0, f"{LEFT}\n{LEFT}\n", "")
    assert half.returncode == 1
    assert "sample 9 is bad" in half.stderr


def test_the_error_says_what_to_run_when_nothing_was_said_about_faults():
    """Bad samples raise by default; the loader may be a library's, so the advice is about the command."""
    raised = ended(*RUN, "train.py", "fork")

    assert raised.returncode == 1
    assert "WorkerCrashedError: worker 1 died of SIGKILL while fetching sample 5" in raised.stderr
    assert "outlive run --faults skip …   the same, where the program is not to be changed" in raised.stderr


def test_workers_find_classes_of_the_main_module_when_they_are_spawned():
    """The main module is the program's, not ours."""
    survived = ended(*RUN, "--faults", "skip", "train.py", "spawn")

    assert (survived.returncode, survived.stdout) == (0, f"{LEFT}\n")


def test_nothing_is_said_when_nothing_happened():
    """Not a word, and nothing changed."""
    sound = ended(*RUN, "train.py", "fork", "sound")

    assert (sound.returncode, sound.stdout, sound.stderr) == (0, f"{ALL}\n", "")


def test_variables_set_the_policy_and_the_switch_turns_it_off():
    """As a container's manifest has them."""
    replaced = ended(*RUN, "train.py", "fork", environment={"OUTLIVE_FAULTS": "replace", "OUTLIVE_JOURNAL": "0"})
    off = ended(*RUN, "--faults", "skip", "train.py", "fork", environment={"OUTLIVE": "0"})

    assert replaced.returncode == 0
    assert float(replaced.stdout) != LEFT
    assert "journal" not in replaced.stderr
    assert off.returncode == 1
    assert "outlive" not in off.stderr


def test_a_process_that_has_nothing_of_ours_runs_as_ever(tmp_path):
    """A Python without outlive, one that ignores the environment, a program that is no Python, no program at all."""
    (tmp_path / "outlive.py").write_text("raise ImportError('not here')")
    bare = f"PYTHONPATH={os.pathsep.join([launching.STARTUP, str(tmp_path)])}"

    without = ended(*RUN, "--", "env", bare, sys.executable, "-c", "print(1)")
    isolated = ended(*RUN, "--", sys.executable, "-I", "-c", "print(2)")
    shell = ended(*RUN, "--", "sh", "-c", "echo 3; exit 4")
    missing = ended(*RUN, "--", "no-such-command")
    denied = ended(*RUN, "--", str(tmp_path))

    assert (without.stdout, without.stderr) == ("1\n", "")
    assert (isolated.stdout, shell.stdout, shell.returncode) == ("2\n", "3\n", 4)
    assert (missing.returncode, missing.stderr) == (127, "outlive run: no-such-command: No such file or directory\n")
    assert denied.returncode == 126


def test_little_is_imported_when_a_python_starts():
    """What costs time beside torch: nothing of the command line, and nothing that Python has not already."""
    modules = "import sys; print(*sorted(sys.modules))"
    stock = set(ended(sys.executable, "-c", modules).stdout.split())
    ours = ended(sys.executable, "-X", "importtime", "-m", "outlive", "run", "-c", modules)

    added = set(ours.stdout.split()) - stock
    assert {name for name in added if not name.startswith("outlive")} <= {"sitecustomize", "atexit", "__future__"}
    assert len(added) < 12
    assert not re.search(r"\| +(click|dataclasses|torch|logging)$", ours.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fauts", "skip", "train.py"], "there is no option --fauts"),
        (
            ["--faults", "ignore", "train.py"],
            'on_error must be "raise", "skip", "replace" or a callable, got \'ignore\'',
        ),
        (["--retries=many", "train.py"], "retries must be a whole number, got 'many' (from OUTLIVE_RETRIES=many)"),
        (["--retry-on", "NoSuchError", "train.py"], "takes names of exceptions, such as OSError"),
        (["--memory-limit", "much", "train.py"], "memory_limit must be a size"),
        (["--share-dataset=perhaps", "train.py"], "OUTLIVE_SHARE_DATASET must be 1 or 0"),
        (
            ["--quarantine", "none.json", "train.py"],
            f"there is no quarantine file {os.path.abspath('none.json')}; make",
        ),
        (["--quarantine", __file__, "train.py"], f"{__file__} is no quarantine file: it is no JSON"),
        (["--quarantine=", "train.py"], "--quarantine= names no file"),
        (["--max-bad"], "--max-bad needs a value"),
        (["-x", "train.py"], "options of python go behind --"),
        ([], "say what to run"),
        (["--"], "say what to run"),
    ],
)
def test_a_wrong_command_line_is_said_before_anything_runs(words, said):
    """With what would be right."""
    result = CliRunner().invoke(main, ["run", *words])

    assert result.exit_code == 2
    assert said in result.output


def test_help_has_the_options():
    """As the other verbs' help."""
    text = CliRunner().invoke(main, ["run", "--help"]).output

    assert "outlive run -- torchrun" in text
    assert "--memory-budget" in text


def test_options_mean_what_those_of_the_classes_mean():
    """Words on a command line become the values that Python code would pass."""
    words = ["--faults=skip", "--on-crash", "replace", "--retries", "3", "--retry-on", "OSError,json.JSONDecodeError"]
    words += [
        "--max-bad",
        "0.5",
        "--sample-timeout",
        "none",
        "--worker-threads",
        "none",
        "--share-dataset",
        "x.py",
        "-v",
    ]
    texts, rest = options.parse(words)

    meant = options.loader_options(texts)

    assert rest == ["x.py", "-v"]
    policy = meant.pop("faults")
    assert (policy.on_error, policy.on_crash, policy.retries, policy.max_bad) == ("skip", "replace", 3, 0.5)
    assert (policy.retry_on, policy.sample_timeout) == ((OSError, json.JSONDecodeError), None)
    assert meant == {"worker_threads": None, "share_dataset": True}
