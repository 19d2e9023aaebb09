"""`outlive chaos`: a program under faults, and the survival table of it.

Reads   what the command prints, and its exit status.
Writes  plans, into temporary folders.
Never   believes the table alone: the program's own sum, which the command compares, is in the notes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

import warm_server
from outlive.cli import main
from outlive.testing.faults import CATALOGUE
from outlive.testing.surroundings import NotPossibleError, check_mounting

PROGRAMS = Path(__file__).with_name("programs")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
SAMPLES = 2 * 120


def chaos(*words: str, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    ended = warm_server.run(
        [sys.executable, "-m", "outlive", "chaos", *words],
        cwd=PROGRAMS,
        env={**ENVIRONMENT, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended


PROGRAM = ("train.py", "map")


def test_nothing_is_lost_under_the_whole_catalogue_and_stock_torch_dies_of_it(tmp_path):
    """Every kind of fault fires, is noticed where there is something to notice, is survived, and costs no sample."""
    words = ("--faults", "all", "--sample-timeout", "1s", "--compare", "torch", "--json")
    report = json.loads(chaos(*words, *PROGRAM, TMPDIR=str(tmp_path)).stdout)
    ours, theirs = report["outlive"], report["torch"]
    rows = {row["fault"]: row for row in ours["rows"]}

    assert (ours["lost"], ours["twice"], ours["status"]) == (0, 0, 0)
    assert (ours["received"], ours["expected"]) == (SAMPLES, SAMPLES)
    assert rows.keys() == CATALOGUE.keys()
    for name, row in rows.items():
        assert (row["injected"], row["survived"], row["lost"]) == (1, 1, 0), row
        assert row["noticed"] == (1 if CATALOGUE[name]().notice else None), row
        assert (row["recovery_p99_s"] is None) == (not CATALOGUE[name]().notice), row
    assert ours["rate"] > 0
    assert ours["plain_rate"] > 0
    assert theirs["status"] != 0
    assert theirs["lost"] > SAMPLES // 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("outlive-chaos-")]


@pytest.mark.full
def test_two_faults_that_fall_on_one_sample_are_survived(tmp_path):
    """In a stream, too, where no sample can be left out."""
    (tmp_path / "plan.toml").write_text(
        "".join(f'[[fault]]\nfault = "{fault}"\nsamples = [[1, 7]]\nloaders = [1]\n' for fault in ("segv", "kill"))
    )

    ended = chaos("--plan", str(tmp_path / "plan.toml"), "--json", "train.py", "both")
    rows = json.loads(ended.stdout)["outlive"]["rows"]

    assert {row["fault"]: row["survived"] for row in rows} == {"segv": 1, "kill": 1}


def test_bad_samples_are_excused_and_killed_workers_cost_nothing(tmp_path):
    """A plan of a file: samples that are bad for good are nobody's loss; streams and moments have their faults, too."""
    (tmp_path / "plan.toml").write_text(
        'seed = 3\npolicy = "skip"\nkill_every = "0.5s"\nbusy_cpus = 1\n'
        '[[fault]]\nfault = "raise"\nerror = "OSError: torn"\ncount = 2\ntimes = "always"\nloaders = [0]\n'
        '[[fault]]\nfault = "exit"\ncode = 9\nmoment = "collate"\nshare = "2%"\n'
        '[[fault]]\nfault = "kill"\nmoment = "start"\nloaders = [0]\n'
        '[[fault]]\nfault = "slow"\nseconds = 0.05\nshare = 0.5\n'
        '[[fault]]\nfault = "segv"\nsamples = [[1, 7]]\nloaders = [1]\n'
    )

    ended = chaos("--plan", str(tmp_path / "plan.toml"), "--json", "train.py", "both")
    report = json.loads(ended.stdout)
    rows = {row["fault"]: row for row in report["outlive"]["rows"]}

    assert (report["loaders"], report["epochs"], report["seed"]) == (2, 3, 3)
    assert report["outlive"]["expected"] == SAMPLES + 60
    assert report["outlive"]["lost"] == 0
    # Two bad samples are missing from each of two epochs.
    assert report["outlive"]["received"] == SAMPLES + 60 - 4
    assert rows["exit@collate"]["survived"] == rows["exit@collate"]["injected"] >= 4
    assert rows["segv"]["injected"] == rows["kill@start"]["injected"] == 1
    assert rows["kill-every"]["injected"] >= 1
    assert all(row["survived"] == row["injected"] for row in rows.values())
    assert report["left"] == {"2": "it has no workers: a fault would be the program's own"}


@pytest.mark.full
def test_nothing_is_lost_when_sources_and_networks_fail_under_burdens(tmp_path):
    """For a while and for all samples; the breaker waits for them. The disk is full only for the program."""
    full = tmp_path / "full"
    tables = {
        "outage": 'for = "4s"\nfrom = 0\nloaders = [1]\nerror = "TimeoutError: no answer"',
        "network": 'for = "4s"\nfrom = "0s"',
        "memory": 'for = "1s"\nsize = "32MiB"',
        "cpus": "count = 1",
        **({"disk": f'size = "64KiB"\nfolder = "{full}"'} if _can_mount() else {}),
    }
    (tmp_path / "plan.toml").write_text(
        "\n".join(f'[[surroundings]]\nkind = "{kind}"\n{more}' for kind, more in tables.items())
    )
    before = psutil.Process().children(recursive=True)

    words = ("--plan", str(tmp_path / "plan.toml"), "--keep", str(tmp_path / "kept"), "--json")
    report = json.loads(chaos(*words, "remote.py", str(full)).stdout)
    rows = {row["fault"]: row for row in report["outlive"]["rows"]}

    assert (report["undone"], report["outlive"]["lost"]) == ([], 0)
    assert report["outlive"]["received"] == report["outlive"]["expected"] == 120
    assert rows.keys() == tables.keys()
    assert all((row["injected"], row["survived"], row["lost"]) == (1, 1, 0) for row in rows.values())
    assert {name for name, row in rows.items() if row["noticed"]} == {"outage", "network"}
    assert all(rows[name]["recovery_p50_s"] > 0 for name in ("outage", "network"))
    said = (tmp_path / "kept" / "faults" / "out").read_text()
    assert said == ("[Errno 28] No space left on device\n" if "disk" in tables else "")
    assert (tmp_path / "kept" / "plain" / "out").read_text() == ""
    assert psutil.Process().children(recursive=True) == before


def _can_mount() -> bool:
    try:
        check_mounting()
    except NotPossibleError:
        return False
    return True


@pytest.mark.full
def test_what_a_policy_gives_up_is_lost_and_said():
    """Without retries a transient fault costs its sample: that is a loss, and the status says so."""
    ended = chaos("--faults", "kill:3", "--seed", "1", *PROGRAM, status=1, OUTLIVE_RETRIES="0")
    lines = ended.stdout.splitlines()

    assert lines[0] == "train.py: 240 samples in 2 epochs of 1 loader; seed 1, policy skip"
    assert lines[2].split() == ["fault", "injected", "noticed", "survived", "lost", "recovered", "p50", "p99"]
    assert lines[4].split()[:4] == ["kill", "3", "3", "3"]
    assert int(lines[4].split()[4]) >= 3
    assert any(line.strip().startswith("lost: ") for line in lines)


def test_nothing_is_said_of_a_program_that_fails_by_itself_or_has_no_loader():
    """Status 3, and why."""
    failing = chaos("--faults", "segv", "train.py", "fail", status=3)
    idle = chaos("--kill-every", "1s", "train.py", "idle", status=3)

    assert "fails without any faults (exit status 1)" in failing.stderr
    assert "it fails by itself" in failing.stderr
    assert "no DataLoader with workers" in idle.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train.py",), "a plan without faults shows nothing"),
        (("--faults", "segv"), "say what to run"),
        (("--faults", "segw", "train.py"), "there is no fault 'segw'; did you mean segv"),
        (("--faults", "segv:lots", "train.py"), "write 2% or 5 (samples), x3 (times at each) or always"),
        (("--plan", "no.toml", "train.py"), "no.toml cannot be read: No such file"),
        (("--plan", "no.toml", "--faults", "segv", "train.py"), "choose one"),
        (("--kill-every", "soon", "train.py"), "--kill-every: 'soon' is no span of time"),
        (("--kill-every", "0", "train.py"), '--kill-every is written 5 or "5s", and is more than 0, got'),
        (("--faults", "segv", "--keep", ".", "train.py"), "--keep .: there is something of that name; name a folder"),
        (("--faults", "memory:100TiB", "train.py"), "asks for 100 TiB, and"),
        (("--faults", "memory", "train.py"), "how much memory?"),
        (("--faults", "segv", "--", "no-such-command"), "no-such-command: No such file or directory"),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(words, said):
    """Status 2, and what would be right."""
    ended = CliRunner().invoke(main, ["chaos", *words])

    assert ended.exit_code == 2
    assert said in " ".join(ended.output.split())
