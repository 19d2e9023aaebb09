"""What a result was measured on: written beside every result, and no name or path of the machine with it."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy
import torch

import outlive

RESULTS = Path(__file__).with_name("results")
# Named where they are installed, by the names of their distributions.
OPTIONAL = ("pillow", "torchdata", "grain", "spdl")


def description() -> dict[str, Any]:
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "outlive": outlive.__version__,
            **_optional(),
        },
        "date": time.strftime("%Y-%m-%d"),
    }


def _optional() -> dict[str, str]:
    found = {}
    for name in OPTIONAL:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass  # not installed: then nothing was measured with it either
    return found


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""


def write(name: str, result: dict[str, Any]) -> Path:
    """Writes `results/name.json`, and says where that is."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": description(), **result}, indent=2, ensure_ascii=False) + "\n")
    return path
