"""Libraries that make, change and wrap loaders: trained for real, over data that ends them on stock torch.

Reads   what the programs in `scripts` report.
Writes  nothing.
Never   a line of a script for outlive's sake. A library that is not installed is skipped: `make clients` installs all.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("scripts")
# Beside the environment, not in it: a torchvision for another build of torch breaks the import of its neighbours.
VISION = Path(sys.prefix) / "vision"
LAUNCH = ("--", sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")
TORCHRUN = ("--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SIZE, DEADLY, BAD = 32, 11, 22
pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Client:
    script: str
    needs: tuple[str, ...]
    steps: int
    faults: str = "skip"
    before: tuple[str, ...] = ()


CLIENTS = [
    Client("lightning_both", ("lightning",), 16),
    Client("accelerate_loop", ("accelerate",), 16, "replace", LAUNCH),
    Client("transformers_trainer", ("transformers", "accelerate"), 8),
    Client("datasets_rows", ("datasets",), 8),
    Client("ignite_engine", ("ignite",), 16),
    Client("fastai_learner", ("fastai",), 16),
    Client("timm_loader", ("timm", "torchvision"), 16),
    Client("monai_loader", ("monai",), 16),
    Client("skorch_net", ("skorch",), 16),
    Client("pyg_loader", ("torch_geometric",), 8),
    Client("webdataset_shards", ("webdataset",), 8),
    Client("ddp", (), 8, "replace", TORCHRUN),
]
# In one process each: importing these libraries takes longer than training with them.
COMPANIES = [
    ("lightning_both", "transformers_trainer", "accelerate_loop", "skorch_net"),
    ("datasets_rows", "ignite_engine", "monai_loader", "pyg_loader", "fastai_learner", "webdataset_shards"),
    ("timm_loader",),
    ("ddp",),
]


def ended(*command: str) -> subprocess.CompletedProcess[str]:
    path = [entry for entry in sys.path if entry]
    if any("timm" in word for word in command):
        path.append(str(VISION))
    return subprocess.run(
        command,
        cwd=SCRIPTS,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
    )


def reports(said: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.splitlines() if line.startswith('{"steps"')]


def expected(client: Client) -> dict[str, Any]:
    dies_once = client.script == "webdataset_shards"
    out = {BAD} if dies_once else {DEADLY, BAD}
    return {"steps": client.steps, "seen": [i for i in range(SIZE) if i not in out]}


def skip_without(client: Client) -> None:
    for name in client.needs:
        there = importlib.util.find_spec(name) or (name == "torchvision" and (VISION / name).is_dir())
        if not there:
            pytest.skip(f"{name} is not installed (make clients does that)")


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.script)
def test_training_finishes_when_it_is_run_by_us(client):
    """Not a line of the program changed; every good sample was trained on, and the bad ones are told of at the end."""
    skip_without(client)

    done = ended(
        sys.executable, "-m", "outlive", "run", "--faults", client.faults, *client.before, f"{client.script}.py"
    )

    assert done.returncode == 0, done.stderr[-6000:]
    assert reports(done.stdout) == [expected(client)]
    told = re.findall(r"^outlive: \d+ workers? (?:was|were) lost", done.stderr, re.MULTILINE)
    assert len(told) == 1, done.stderr[-6000:]


@pytest.mark.parametrize("company", COMPANIES, ids="-".join)
def test_training_finishes_when_it_is_given_a_loader_of_ours(company):
    """Passed where the library takes a loader; `installed()` where it makes its own."""
    clients = {client.script: client for client in CLIENTS}
    names = []
    for name in company:
        try:
            skip_without(clients[name])
        except pytest.skip.Exception as skipped:
            if company == (name,):
                raise
            print(skipped)
        else:
            names.append(name)
    if not names:
        pytest.skip("none of these is installed (make clients does that)")

    done = ended(*(TORCHRUN[1:] if company == ("ddp",) else (sys.executable,)), "with_outlive.py", *names)

    assert done.returncode == 0, done.stderr[-6000:]
    assert reports(done.stdout) == [expected(clients[name]) for name in names]


def test_batches_of_fastai_are_the_same_when_they_are_seen_as_a_map():
    """Bit for bit, over epochs, shuffled, with random numbers drawn in workers, by fastai's own kinds of loaders."""
    skip_without(next(client for client in CLIENTS if client.script == "fastai_learner"))

    done = ended(sys.executable, "fastai_same.py")

    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["same", "same", "same"]


@pytest.mark.parametrize("name", ["accelerate_loop", "datasets_rows", "webdataset_shards", "ddp"])
def test_training_dies_on_stock_torch(name):
    """What the other tests survive is deadly."""
    client = next(client for client in CLIENTS if client.script == name)
    skip_without(client)
    command = client.before[1:] or (sys.executable,)

    done = ended(*command, f"{name}.py")

    assert done.returncode != 0
    assert reports(done.stdout) == []
    assert re.search(r"DataLoader worker|is bad|Connection|exited unexpectedly", done.stderr), done.stderr[-2000:]
