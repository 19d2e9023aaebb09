"""What «module:attribute» on the command line comes to.

Reads   small modules that the tests write.
Writes  sys.path and sys.modules, put back after each test.
Never   a traceback where a sentence is due.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

import warm_server
from outlive.cli import targets

MODULE = """
import torch.utils.data as data
print("loading")
class Squares(data.Dataset):
    def __init__(self, count=4): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, index): return index * index
class Callable(Squares):
    def __call__(self): raise AssertionError("a dataset is not called")
dataset = Callable()
loader = data.DataLoader(dataset, batch_size=2)
number = 3
def make(): return data.DataLoader(Squares(9))
def needs(path): return Squares()
def fails():
    raise OSError("no such bucket")
def leaves(): raise SystemExit(3)
class house: dataset = Squares(7)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "made_up_data.py").write_text(MODULE)
    (tmp_path / "broken_data.py").write_text("import math\nimport no_such_package\n")
    (tmp_path / "random.py").write_text("dataset = [1, 2, 3]\n")
    (tmp_path / "v1.2-data.py").write_text("dataset = [1, 2]\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        if "data" in name or "_outlive_target" in name:
            del sys.modules[name]


@pytest.mark.parametrize("place", ["made_up_data", "made_up_data.py", "./made_up_data.py"])
def test_a_loader_or_dataset_is_found_by_module_or_file(folder, capsys, place):
    """Named, dotted, or made by a function; what the module prints is no part of the answer."""
    found = {
        name: targets.load(f"{place}:{name}") for name in ("dataset", "loader", "make", "Squares", "house.dataset")
    }

    assert {name: len(target.dataset) for name, target in found.items()} == {
        "dataset": 4,
        "loader": 4,
        "make": 9,
        "Squares": 4,
        "house.dataset": 7,
    }
    assert {name for name, target in found.items() if target.loader is not None} == {"loader", "make"}
    assert found["loader"].loader.dataset is found["dataset"].dataset
    assert sys.modules["made_up_data"].dataset is found["dataset"].dataset
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "made_up_data",
            "'made_up_data' names no attribute; write made_up_data:dataset; it has made_up_data:dataset, ",
        ),
        ("made_up_data.py:", "'made_up_data.py:' names no attribute"),
        (":dataset", "names no attribute"),
        ("", "'' names no attribute; write module:dataset"),
        ("made_up_data:datset", "made_up_data has no attribute 'datset'; did you mean made_up_data:dataset?"),
        ("made_up_data:Square", "has no attribute 'Square'; did you mean made_up_data:Squares?"),
        ("made_up_data:xyz", "made_up_data has no attribute 'xyz'; it has made_up_data:dataset"),
        ("made_up_data:number", "made_up_data:number is an int: neither a DataLoader nor a dataset"),
        ("made_up_data:needs", "name a function that needs none (def make(): return needs(…))"),
        ("made_up_data:fails", "made_up_data:fails() raised OSError: no such bucket (made_up_data.py:16)"),
        ("made_up_data:leaves", "made_up_data:leaves() raised SystemExit: 3"),
        ("no_such_data:dataset", "there is no module 'no_such_data' here or in sys.path"),
        ("broken_data:dataset", "No module named 'no_such_package' (broken_data.py:2)"),
        ("broken_data.py:dataset", "No module named 'no_such_package' (broken_data.py:2)"),
        ("./elsewhere.py:dataset", "there is no file ./elsewhere.py"),
    ],
)
def test_a_sentence_says_what_is_wrong_with_a_name(folder, name, words):
    """Where it cannot be imported, found or used; wrong usage for the shell."""
    with pytest.raises(targets.TargetError) as raised:
        targets.load(name)

    assert words in raised.value.message
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(("file", "count"), [("random.py", 3), ("v1.2-data.py", 2)])
def test_a_file_is_found_whose_name_a_module_has_or_none_can(folder, file, count):
    """Nobody gets Python's own `random` for his."""
    assert len(targets.load(f"{file}:dataset").dataset) == count


SHORT = ("--workers", "1", "--prefetch", "2")
LOUD = """
import atexit, os, sys, threading
print("loading")
atexit.register(print, "leaving")
class Loud:
    def __len__(self): return 8
    def __getitem__(self, index):
        print("fetching", flush=True)
        os.write(1, b"natively\\n")
        return index
    def __getstate__(self):
        print("pickling")
        return {}
def endless():
    threading.Thread(target=threading.Event().wait).start()
    return Loud()
"""


@pytest.mark.parametrize(
    ("words", "answer", "said"),
    [
        (["check", "loud_data:Loud", "--workers", "1"], ("checked", 8), {"leaving"}),
        (["check", "loud_data:endless", "--workers", "1", "--start-method", "spawn"], ("checked", 8), {"pickling"}),
        (["bench", "loud_data:Loud", "--batch-size", "2", "--batches", "2", *SHORT], ("advice", ""), {"leaving"}),
    ],
    ids=["check", "check a module with a thread", "bench"],
)
def test_json_is_all_there_is_on_standard_output(tmp_path, words, answer, said):
    """Whatever the module prints, here and in workers, as it loads and as it leaves, though a thread of it stays."""
    (tmp_path / "loud_data.py").write_text(LOUD)
    path = os.pathsep.join(entry for entry in sys.path if entry)

    ended = warm_server.run(
        [sys.executable, "-m", "outlive", *words, "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OUTLIVE_HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert ended.returncode == 0, ended.stderr
    assert answer in json.loads(ended.stdout).items()
    assert {"loading", "fetching", "natively", *said} <= set(ended.stderr.split())


@pytest.mark.parametrize("verb", ["check", "bench", "doctor"])
def test_an_interrupt_during_the_import_of_a_verb_prints_one_word(tmp_path, verb):
    """Not by a traceback, and not by a status that says that something was found."""
    (tmp_path / "slow_data.py").write_text("import threading\nprint('ready', flush=True)\nthreading.Event().wait(60)\n")
    path = os.pathsep.join(entry for entry in sys.path if entry)

    with warm_server.Popen(
        [sys.executable, "-m", "outlive", verb, "slow_data:dataset"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        said, cried = process.communicate(timeout=60)

    assert (process.returncode, said, cried) == (130, "", "interrupted\n")
