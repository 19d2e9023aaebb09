"""Runs one small epoch with the installed wheel; copied away from the checkout by check-wheel.

Reads   the installed package, and a list of the files it must have.
Writes  one line when all is well.
Never   the checkout.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

import outlive


class Squares(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index * index


def main() -> None:
    installed = Path(outlive.__file__).parent
    assert installed.is_relative_to(sys.prefix), f"outlive came from {installed}, not from the wheel"
    expected = Path(sys.argv[1]).read_text().split()
    missing = [name for name in expected if not (installed.parent / name).is_file()]
    assert not missing, f"the wheel lacks {missing}; add them to the packages or package data in pyproject.toml"
    assert version("outlive") == outlive.__version__

    command = Path(sys.executable).with_name("outlive")
    listed = subprocess.run([command, "explain"], check=True, capture_output=True, text=True).stdout
    assert "null-pointer" in listed, f"`outlive explain` lists no verdicts: {listed!r}"

    built = [name for name in ("_capture/_recorder", "graph/sampling/_sampler") if list(installed.glob(f"{name}*.so"))]
    assert len(built) in (0, 2), f"of the C parts the wheel has only {built}"

    batches = list(outlive.DataLoader(Squares(), batch_size=8, num_workers=2))

    assert torch.cat(batches).tolist() == [index * index for index in range(64)]
    print(f"wheel: outlive {outlive.__version__}, {len(expected)} files, {len(batches)} batches by 2 workers")


if __name__ == "__main__":
    main()
