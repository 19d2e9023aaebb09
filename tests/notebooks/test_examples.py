"""The notebooks of examples/, run headless with a real kernel: what they show is what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
BAR = "features  100%  ━{2,}  400/400 · 3 failed · 2 retried · [^·]+/s · in .+"

FOLDERS = re.compile(rf"{Path.home()}/|{FOLDER.parents[1]}|/(?:home|root|Users)/|site-packages|/tmp/ipykernel")

pytestmark = [pytest.mark.full, pytest.mark.alone]


def executed(name: str, folder: Path) -> Any:
    """As somebody makes it anew: `python examples/notebooks/make.py NAME`."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    ended = subprocess.run(
        [sys.executable, str(FOLDER / "make.py"), name, "--into", str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    text = (folder / f"{name}.ipynb").read_text(encoding="utf-8")
    assert FOLDERS.findall(text) == []
    return nbformat.reads(text, as_version=4)


def printed(book: Any) -> str:
    return "".join(o.text for cell in book.cells for o in cell.get("outputs", []) if o.output_type == "stream")


def shown(book: Any, mime: str = "text/html") -> list[str]:
    outputs = [o for cell in book.cells for o in cell.get("outputs", [])]
    return [o.data[mime] for o in outputs if mime in o.get("data", {})]


def test_the_loader_skips_three_digits_and_says_why(tmp_path):
    """Under every start method, with a dataset of the notebook's own."""
    book = executed("loader", tmp_path)

    text = printed(book)
    assert re.findall(r"epoch \d: (\d+) of 1797 digits", text) == ["1794", "1794"]
    assert re.findall(r"(fork|spawn|forkserver) 1794 \[404, 777, 1234\]", text) == ["fork", "spawn", "forkserver"]
    quarantine, incident = shown(book)
    assert [quarantine.count(f">{sample}<") for sample in (404, 777, 1234)] == [1, 1, 1]
    assert "image file is truncated, at In[1]:" in quarantine
    assert "null-pointer" in incident
    assert "__getitem__" in incident


def test_the_pool_does_all_but_three_and_shows_a_bar(tmp_path):
    """The bar ends full, the failures are a table, the cell that hung is named."""
    book = executed("pool", tmp_path)

    bar, endless = (text for text in shown(book) if "<progress" in text)
    assert 'value="400" max="400"' in bar
    assert re.fullmatch(BAR, next(text for text in shown(book, "text/plain") if text.startswith("features")))
    assert "stopped after" in endless
    failures = next(text for text in shown(book) if "arguments" in text)
    assert [failures.count(f"{name}.npy") for name in ("099", "170", "250")] == [1, 1, 1]
    assert re.search(r"runs without end at .*In\[1\]:\d+ features", failures)
    assert "397 of 400 recordings" in printed(book)
    assert "[0, 10, 20, 30, 40]" in printed(book)


def test_ranks_go_on_from_their_checkpoint_and_an_error_names_the_first(tmp_path):
    """A group that is started again; an error that is torch's own, and a table."""
    book = executed("spawn", tmp_path)

    text = printed(book)
    assert re.findall(r"\[rank 0\] step (\d+): loss", text) == ["3", "7", "11"]
    assert "rank 1 died of SIGKILL while running train: all ranks started again" in text
    assert "rank 1 of 2" in text
    (table,) = shown(book)
    assert "KeyError" in table
    assert "In[3]:" in table
    assert "rank 0 was ended after it" in table


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_notebook_has_outputs_and_no_personal_folder(name):
    """Somebody who reads it on the web sees what it does. `python examples/notebooks/make.py` makes them anew."""
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    book = nbformat.reads(text, as_version=4)

    assert shown(book)
    assert not [o for cell in book.cells for o in cell.get("outputs", []) if o.output_type == "error"]
    assert FOLDERS.findall(text) == []
