"""The pages of docs/start: their blocks run as they stand.

Reads   docs/start.
Writes  each page's program, in a temporary folder.
Never   a page whose library is not installed: `make clients` installs all.
"""

from __future__ import annotations

import sys

import pytest

from clients.test_clients import CLIENTS, SCRIPTS, ended, skip_without
from docs.test_blocks import PREAMBLE, ROOT, program

# torchrun.md is the program that test_clients runs; run.md needs no library, and tests/docs runs it.
PAGES = {
    page.stem: page for page in sorted((ROOT / "docs" / "start").glob("*.md")) if page.stem not in ("run", "torchrun")
}
BEFORE = {"timm": f"import sys; sys.path.append({str(SCRIPTS)!r}); import torchvision_operators\n"}
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", PAGES)
def test_blocks_of_a_page_run_as_they_stand(name, tmp_path):
    """What a reader copies works."""
    skip_without(next(client for client in CLIENTS if client.script.startswith(name)))
    script = tmp_path / f"{name}_page.py"
    script.write_text(PREAMBLE + BEFORE.get(name, "") + program(PAGES[name].read_text(encoding="utf-8")))

    done = ended(sys.executable, str(script))

    assert done.returncode == 0, done.stderr[-4000:]
