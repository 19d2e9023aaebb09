"""Executes the notebooks beside it again, with a fresh kernel each, and writes their outputs into them.

Reads   the cells of *.ipynb; names of notebooks as arguments, all of them without; `--into FOLDER`.
Writes  the same files, or new ones there: outputs without what differs from machine to machine (folders).
Never   an output of a cell that raised: then it ends, and the file stays as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
TIMEOUT_S = 300
# The longest first: a virtual environment may lie in the checkout, and that in somebody's home.
FOLDERS = {
    r"/tmp/ipykernel_\d+/\d+\.py": "<cell>",
    r"/tmp/outlive-notebook-\w+": "~/.local/state/outlive",
    re.escape(str(Path(sys.prefix).resolve())): "…",
    re.escape(str(Path(sys.base_prefix).resolve())): "…",
    re.escape(str(HERE.parents[1])): "outlive",
    re.escape(str(Path.home())): "~",
}


def executed(path: Path) -> Any:
    """The notebook with the outputs of a run of its own."""
    book = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="outlive-notebook-") as home:
        os.environ["OUTLIVE_HOME"] = home  # of the kernel: its incidents are nobody's
        NotebookClient(book, timeout=TIMEOUT_S, kernel_name="python3", coalesce_streams=True).execute()
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # when it was
    return book


def scrubbed(value: Any) -> Any:
    """The same without folders of this machine."""
    if isinstance(value, str):
        for folder, instead in FOLDERS.items():
            value = re.sub(folder, instead, value)
        return value
    if isinstance(value, list):
        return [scrubbed(each) for each in value]
    if isinstance(value, dict):
        return type(value)((name, scrubbed(each)) for name, each in value.items())
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="loader, pool, spawn; all of them without")
    parser.add_argument("--into", type=Path, default=HERE, help="another folder for what is written")
    asked = parser.parse_args()
    for name in asked.names or sorted(path.stem for path in HERE.glob("*.ipynb")):
        book = executed(HERE / f"{name}.ipynb")
        for cell in book.cells:
            if "outputs" in cell:
                cell.outputs = scrubbed(cell.outputs)
        nbformat.write(book, asked.into / f"{name}.ipynb")
        print(asked.into / f"{name}.ipynb")


if __name__ == "__main__":
    main()
