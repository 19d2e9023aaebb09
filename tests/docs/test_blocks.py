"""Check the documents against the code: their Python blocks run, and their links lead somewhere.

Reads:   README.md, ARCHITECTURE.md, CONTRIBUTING.md and docs/.
Writes:  nothing. The blocks of a document run in one namespace, in one process.
Never:   runs a block after a comment `<!-- not run: reason -->`.

test_readme.py runs the blocks of the README, and test_reference.py checks the tables of docs/reference.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from docs.programs import run_python
from outlive.verdicts import Name, Verdict

ROOT = Path(__file__).parents[2]
RUNNABLE = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    *sorted((ROOT / "docs" / "reference").glob("*.md")),
    ROOT / "docs" / "start" / "run.md",
]
CRASHES = ROOT / "docs" / "crashes"
DOCUMENTS = [
    *RUNNABLE,
    *(ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"),
    *sorted((ROOT / "docs" / "design").glob("*.md")),
    *sorted((ROOT / "docs" / "start").glob("*.md")),  # their blocks run in tests/clients
    *sorted(CRASHES.glob("*.md")),
]
FENCE = re.compile(r"^```(\w*)$")
NOT_RUN = re.compile(r"^<!-- not run: \S.* -->$")
LINK = re.compile(r"\[[^\]]+\]\(([^)#]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\[[^\]]+\]\(([^)#]*\.md|)#([^)]+)\)")

# What the pages take for granted, because every reader has it: a dataset and a training step.
PREAMBLE = """
import logging, torch, torch.multiprocessing
torch.multiprocessing.set_start_method("fork")  # blocks are not modules: nothing else could find their classes
logging.getLogger("outlive").setLevel(logging.CRITICAL)
dataset = torch.utils.data.TensorDataset(torch.zeros(128, 3, 8, 8), torch.zeros(128))
def train_step(images, labels):
    assert len(images) == len(labels) == 64
"""


def program(text: str) -> str:
    """Return the runnable blocks of a document, each on its own lines, so that a traceback names the line."""
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


def with_blocks(paths: list[Path]) -> list[Path]:
    """Return the documents that have something to run."""
    return [path for path in paths if program(path.read_text(encoding="utf-8")).strip()]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run the blocks of a document after the preamble."""
    preamble = f"exec({PREAMBLE!r}, globals()); "  # on the first line, which is never part of a block
    return run_python(preamble + program(text), path.name)


@pytest.mark.parametrize("path", with_blocks(RUNNABLE), ids=name_of)
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


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path):
    """Relative links name files that exist."""
    targets = [link for link in LINK.findall(path.read_text(encoding="utf-8")) if "://" not in link]

    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_anchors_name_a_heading(path):
    """A link to a part of a page names one of its headings."""
    anchors = ANCHOR.findall(path.read_text(encoding="utf-8"))

    assert [link for link in anchors if link[1] not in slugs(path.parent / link[0] if link[0] else path)] == []


def slugs(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub makes them from its headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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


def test_the_map_stays_a_map():
    """ARCHITECTURE.md can be read at one sitting."""
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 150
