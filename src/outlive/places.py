"""Source files by the name that people know them by: «dataset.py», or «In[3]» for a notebook's third cell.

Reads   IPython's list of cells, where this process is its kernel.
Writes  nothing.
Never   imports IPython.
"""

from __future__ import annotations

import sys


def file_name(path: str) -> str:
    """Without its folder. Cells are files to Python, too: /tmp/ipykernel_4127/3831177444.py, which says nothing."""
    name = path.rpartition("/")[2]
    return (_cell(path) if "ipykernel" in path else "") or name


def _cell(path: str) -> str:
    module = sys.modules.get("IPython")
    try:
        _, name = module.get_ipython().compile.format_code_name(path)  # type: ignore[union-attr]
    except Exception:  # no notebook, another IPython, a cell of another kernel
        return ""
    return str(name)
