"""Which system layer serves: Linux's own, or the portable one. Nobody else asks for the platform.

Reads   the platform, and OUTLIVE_SYSTEM, which may be "portable".
Writes  nothing.
Never   changes its mind: a process and all that it starts use one of them.
"""

from __future__ import annotations

import os
import sys

PORTABLE = sys.platform != "linux" or os.environ.get("OUTLIVE_SYSTEM", "") == "portable"
