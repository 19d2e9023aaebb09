"""Files looked at where they lie: mapped to be read, page by page as somebody looks.

Reads   files.
Writes  nothing.
Never   keeps a descriptor: a worker that is forked from here has no file open that it knows nothing of.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any, BinaryIO

from outlive._system import nameless


def map_file(file: BinaryIO, size: int) -> Any:
    """The first bytes of an open file as a buffer, for as long as anything looks at it; the file may be closed."""
    if sys.platform == "win32":
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    return nameless.map_descriptor(file.fileno(), size, writable=False)
