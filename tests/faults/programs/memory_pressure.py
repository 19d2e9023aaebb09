"""A little training job whose workers do not all fit into memory: `memory_pressure.py METHOD PERSISTENT`.

Reads   from standard input one line: then it is where it should be (in a cgroup), and begins.
Writes  to standard output what it delivered and what the fleet went through, as JSON.
Never   a module of the tests: it is run by its path.
"""

from __future__ import annotations

import json
import sys
from typing import Any

WORKERS = 4
SAMPLES = 80
WEIGHT = 115 << 20

held: list[bytearray] = []


class Heavy:
    """Every worker keeps 115 MiB from its first sample on."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        import torch

        if not held:
            held.append(bytearray(b"x") * WEIGHT)
        return [index, float(torch.rand(()))]


def main(method: str, persistent: str) -> None:
    sys.stdin.readline()
    import torch

    from outlive import DataLoader, IncidentKind

    torch.manual_seed(3)
    options: Any = {"num_workers": WORKERS, "batch_size": 2, "multiprocessing_context": method, "collate_fn": list}
    loader: Any = DataLoader(Heavy(), persistent_workers=persistent == "persistent", **options)  # type: ignore[arg-type]
    batches = [batch for _ in range(2) for batch in loader]
    kinds = [incident.kind for incident in loader.incidents]
    statistics = loader.statistics()
    told = {
        "batches": batches,
        "resized": [str(i) for i in loader.incidents if i.kind is IncidentKind.RESIZED],
        "verdicts": sorted({i.verdict.name.value for i in loader.incidents if i.kind is IncidentKind.CRASH}),
        "others": sorted({kind.value for kind in kinds} - {"resized", "crash"}),
        "counts": [statistics.quarantined, statistics.errored],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
