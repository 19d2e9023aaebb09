"""Holds the documents to the code: their Python blocks run, their links lead somewhere, their tables are complete.

Reads   README.md, ARCHITECTURE.md, CONTRIBUTING.md and docs/.
Writes  nothing; each document's blocks run in one namespace, in a process of their own.
Never   a block after a comment `<!-- not run: reason -->`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import outlive
from outlive.settings import FaultPolicy
from outlive.verdicts import Name, Verdict

ROOT = Path(__file__).parents[1]
RUNNABLE = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    ROOT / "docs" / "start" / "run.md",
]
CRASHES = ROOT / "docs" / "crashes"
DOCUMENTS = [
    *RUNNABLE,
    *(ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"),
    *sorted((ROOT / "docs" / "design").glob("*.md")),
    *sorted((ROOT / "docs" / "start").glob("*.md")),  # their blocks run in tests/clients
    *sorted(CRASHES.glob("*.md")),
]
FENCE = re.compile(r"^```(\w*)$")
NOT_RUN = re.compile(r"^<!-- not run: \S.* -->$")
LINK = re.compile(r"\[[^\]]+\]\(([^)#]+)(?:#[^)]*)?\)")

# What the README takes for granted, as every reader has it: a dataset and a step.
PREAMBLE = """
import logging, torch, torch.multiprocessing
torch.multiprocessing.set_start_method("fork")  # blocks are not modules: nothing else could find their classes
logging.getLogger("outlive").setLevel(logging.CRITICAL)
dataset = torch.utils.data.TensorDataset(torch.zeros(128, 3, 8, 8), torch.zeros(128))
def train_step(images, labels):
    assert len(images) == len(labels) == 64
"""


def program(text: str) -> str:
    """The runnable blocks of a document, each on its own lines, so that a traceback names the document's line."""
    lines: list[str] = []
    language: str | None = None
    last = ""
    for line in text.splitlines():
        fence = FENCE.match(line)
        if language is None and fence:
            language = "" if NOT_RUN.match(last) else fence[1]
            lines.append("")
        elif language is not None and line == "```":
            language = None
            lines.append("")
        else:
            lines.append(line if language == "python" else "")
        last = line.strip() or last
    return "\n".join(lines)


def run(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    runner = (
        f"import sys; names = {{'__name__': '__main__'}}; exec({PREAMBLE!r}, names);"
        f"exec(compile(sys.stdin.read(), {path.name!r}, 'exec'), names)"
    )
    return subprocess.run(
        [sys.executable, "-c", runner], input=program(text), capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.name)
def test_python_blocks_run_as_they_stand(path):
    """What a reader copies works."""
    ended = run(path, path.read_text(encoding="utf-8"))

    assert ended.returncode == 0, ended.stderr


def test_a_block_that_fails_is_found_by_its_line(tmp_path):
    """A check that cannot fail checks nothing."""
    ended = run(tmp_path / "page.md", "# Page\n\n```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n")

    assert ended.returncode == 1
    assert 'File "page.md", line 10' in ended.stderr


def test_a_block_is_left_out_when_it_says_why():
    """Other languages are no Python, and a reason is needed not to run what is."""
    text = "```\nno\n```\n<!-- not run: needs a GPU -->\n```python\nno\n```\n<!-- not run: -->\n```python\nyes\n```\n"

    assert program(text).split() == ["yes"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    """Relative links name files that exist."""
    targets = [link for link in LINK.findall(path.read_text(encoding="utf-8")) if "://" not in link]

    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("name", Name)
def test_every_verdict_has_its_page(name):
    """What one sees, why, what to do, how sure it is; error messages lead there."""
    page = (CRASHES / f"{name.value}.md").read_text()

    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert headings[0].startswith("# ")
    assert len(headings) >= 4
    assert Verdict(name, "").page == f"docs/crashes/{name.value}.md"


def test_every_page_is_about_a_verdict():
    """None is left of a verdict that has another name now."""
    assert {path.stem for path in CRASHES.glob("*.md")} == {name.value for name in Name}


def test_readme_has_every_option_with_its_default():
    """The tables of DataLoader and FaultPolicy say what the classes say."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.+?) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    told = {
        name: default.strip("`")
        for names, defaults in rows
        for name, default in zip(re.findall(r"\w+", names), defaults.split(", "), strict=True)
    }
    options = {field.name: json.dumps(field.default) for field in dataclasses.fields(FaultPolicy)}
    in_words = {"on_crash": "as `on_error", "retry_on": "()"}  # what JSON cannot say

    assert told == {**options, **in_words, **loader_options()}


def test_readme_has_every_option_of_spawn_with_its_default():
    """Those beyond torch's own."""
    told = dict(re.findall(r"^\| `(\w+)=` \| `(.+?)` \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M))
    theirs = inspect.signature(torch.multiprocessing.spawn).parameters
    ours = inspect.signature(outlive.spawn).parameters

    assert told == {name: repr(option.default) for name, option in ours.items() if name not in theirs}
    assert list(ours)[: len(theirs)] == list(theirs)


def loader_options() -> dict[str, str]:
    """What `DataLoader` takes beyond torch's own."""
    theirs = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    ours = inspect.signature(outlive.DataLoader.__init__).parameters
    return {name: repr(parameter.default).replace("'", '"') for name, parameter in ours.items() if name not in theirs}


def test_the_map_stays_a_map():
    """ARCHITECTURE.md can be read at one sitting."""
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 150
