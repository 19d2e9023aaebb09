"""A training script without a guard: every worker that imports it would start the loader again."""

import sys

import outlive


class Numbers:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


loader: "outlive.DataLoader[int]" = outlive.DataLoader(
    Numbers(),
    num_workers=1,
    multiprocessing_context=sys.argv[1],  # type: ignore[arg-type]
)
try:
    for _batch in loader:
        pass
except outlive.WorkerStartError as error:
    print(error.incident.verdict.name)
    print(error)
    print(len(loader.incidents), {incident.verdict.name.value for incident in loader.incidents})
