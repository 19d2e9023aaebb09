"""A quarantine as a file: what it names is never tried, and a changed dataset is not taken for the same."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import outlive
from checking.datasets import BadSamples, Files, NamedFiles, Stream
from outlive import FaultPolicy, IncidentKind, QuarantineFileError
from outlive.loader import fingerprint, quarantine_file
from outlive.loader.quarantine_file import BadSample, QuarantineFile

NAMES = [f"{number}.png" for number in range(60)]


def write(dataset: Any, path: Path, *bad: Any, workers: int | None = None) -> Path:
    samples = tuple(each if isinstance(each, BadSample) else BadSample(each, "crash", "killed") for each in bad)
    QuarantineFile(fingerprint.of(dataset), samples, workers).write(path)
    return path


class Counting(Dataset[int]):
    """Tells which samples were tried; some of them kill."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        with open(f"{self.folder}/tried", "a") as file:
            file.write(f"{index}\n")
        return index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("faults", "stays"),
    [("raise", False), ("skip", False), ("replace", True), (lambda incident: "raise", False)],
    ids=["raise", "skip", "replace", "callable"],
)
def test_what_a_file_names_is_never_tried(tmp_path, workers, faults, stays):
    """Whatever the policy; under «replace» others take their place. Whole batches of it are left out."""
    dataset = Counting(tmp_path)
    path = write(dataset, tmp_path / "bad.json", 3, *range(8, 12), BadSample(20, "exception", "exception"))
    more: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}

    loader = outlive.DataLoader(dataset, 4, num_workers=workers, faults=faults, quarantine=path, **more)
    batches = [batch.tolist() for _ in range(2) for batch in loader]

    tried = {int(line) for line in (tmp_path / "tried").read_text().split()}
    assert tried == set(range(40)) - {3, 8, 9, 10, 11, 20}
    assert len(batches) == (20 if stays else 18)
    assert [len(batch) for batch in batches[:2]] == [4 if stays else 3, 4]
    assert set(loader.quarantine) == {3, 8, 9, 10, 11, 20}
    assert loader.quarantine[3].kind is IncidentKind.CRASH
    assert "not tried: known bad by" in str(loader.quarantine[20])
    statistics = loader.statistics()
    assert (statistics.spared, statistics.quarantined, statistics.restarts) == (12, 6, 0)
    assert statistics.replaced == (12 if stays else 0)


def test_each_kind_of_sample_is_treated_as_its_rule_says(tmp_path):
    """What raised is replaced, what killed is left out, where the policy says so."""
    dataset = Counting(tmp_path)
    path = write(dataset, tmp_path / "bad.json", 1, BadSample(2, "exception", "exception"))
    policy = FaultPolicy(on_error="replace", on_crash="skip")

    loader = outlive.DataLoader(dataset, 4, num_workers=2, faults=policy, quarantine=path)

    assert [len(batch) for batch in loader] == [3, *[4] * 9]


def test_a_stream_steps_over_what_a_file_names(tmp_path):
    """Those that kill, too; the file belongs to a number of workers."""
    dataset = Stream(40, bad=(9,), deadly=(20,))
    outlive.check(dataset, workers=2, start_method="fork", output=tmp_path / "bad.json")

    loader = outlive.DataLoader(dataset, 4, num_workers=2, quarantine=tmp_path / "bad.json")
    delivered = sorted(int(number) for batch in loader for number in batch)

    assert delivered == [number for number in range(40) if number not in (9, 20)]
    assert not loader.incidents
    with pytest.raises(QuarantineFileError, match="shared by 2 workers, and num_workers is 3"):
        outlive.DataLoader(dataset, 4, num_workers=3, quarantine=tmp_path / "bad.json")


# ---------------------------------------------------------------- another dataset


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Files(NAMES[:-1]), "it had 60 samples, and has 59 samples"),
        (Files([*NAMES[1:], "new.png"]), "its names is not the same"),
        (NamedFiles(NAMES), "it was a Files, and is a NamedFiles"),
        (Stream(60), "it was map-style, and is iterable"),
    ],
    ids=["length", "names", "class", "kind"],
)
def test_a_file_of_another_dataset_is_refused(tmp_path, other, said):
    """Its indices would name other samples; the error says what changed and what to do."""
    path = write(Files(NAMES), tmp_path / "bad.json", 3)

    with pytest.raises(QuarantineFileError, match=said) as caught:
        outlive.DataLoader(other, num_workers=1, quarantine=path)

    assert "outlive check module:dataset --output" in str(caught.value)


def test_what_need_not_change_samples_is_a_warning(tmp_path, caplog):
    """A root folder differs from machine to machine: it is said, and the file obeyed."""
    path = write(Files(NAMES), tmp_path / "bad.json", 3)

    with caplog.at_level(logging.WARNING, "outlive"):
        loader = outlive.DataLoader(Files(NAMES, root="/mnt"), quarantine=path)

    assert set(loader.quarantine) == {3}
    assert "its root is not the same" in caplog.text


def test_samples_with_ids_are_found_where_they_are_now(tmp_path, caplog):
    """In a dataset that is longer and in another order; what is gone is said."""
    output = tmp_path / "bad.json"
    outlive.check(NamedFiles(NAMES, bad=("7.png", "59.png")), workers=1, start_method="fork", output=output)
    moved = NamedFiles(["more.png", *NAMES[::-1][1:]], bad=("7.png",))

    with caplog.at_level(logging.WARNING, "outlive"):
        loader = outlive.DataLoader(moved, batch_size=None, quarantine=output)

    assert set(loader.quarantine) == {moved.names.index("7.png")}
    assert "7.png" not in list(loader)
    assert "1 of 2 samples in" in caplog.text
    subset = Subset(moved, [5, moved.names.index("7.png")])
    assert set(outlive.DataLoader(subset, quarantine=output).quarantine) == {1}


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no quarantine file"),
        ("{", "it is no JSON"),
        ("[]", 'it lacks "format"'),
        ('{"format": "outlive quarantine", "version": 7}', "has version 7"),
        ('{"format": "outlive quarantine", "version": 1, "samples": []}', "is damaged"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, text, said):
    """With what is wrong with it."""
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(QuarantineFileError, match=said):
        outlive.DataLoader(Files(NAMES), quarantine=path)


def test_a_file_with_a_sample_that_makes_no_sense_is_refused(tmp_path):
    """A kind that there is not, an index that is no number."""
    told = json.loads(write(Files(NAMES), tmp_path / "bad.json", 3).read_text())

    for wrong in ({"kind": "bad luck"}, {"index": 1.5}, {"verdict": "guilty"}):
        broken = {**told, "samples": [{**told["samples"][0], **wrong}]}
        (tmp_path / "broken.json").write_text(json.dumps(broken))
        with pytest.raises(QuarantineFileError, match="is damaged"):
            quarantine_file.load(tmp_path / "broken.json")


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    """Whoever says --output /dev/null as root still has it afterwards; a link leads to the same file as before."""
    null, link = tmp_path / "null", tmp_path / "link"
    null.symlink_to(os.devnull)
    link.symlink_to(tmp_path / "bad.json")

    for path in (null, link):
        outlive.check(Files(NAMES), workers=1, start_method="fork", output=path, state_file=null)

    assert null.resolve() == Path(os.devnull).resolve()
    assert link.is_symlink()
    assert quarantine_file.load(tmp_path / "bad.json").total == 60


def test_several_files_are_obeyed_together(tmp_path):
    """As eight machines have written them."""
    dataset = BadSamples(30, {})
    paths = [write(dataset, tmp_path / f"{number}.json", number) for number in range(3)]

    assert set(outlive.DataLoader(dataset, quarantine=paths).quarantine) == {0, 1, 2}


# ---------------------------------------------------------------- fingerprints

FINGERPRINTS = """
import torch
from checking.datasets import Files
from outlive.loader import fingerprint
files = Files([f"{n}.png" for n in range(5000)])
files.classes = {f"class {n}" for n in range(50)}
files.seen = {"a": 1.5, "b": None}
files.transform = torch.nn.Sequential(torch.nn.ReLU())
files.opened = open("/dev/null")
files.hook = lambda index: index
print(fingerprint.of(files).digest)
"""


def test_a_fingerprint_is_the_same_in_every_process():
    """Whatever Python's hash seed is, with sets, functions and open files in the dataset."""
    both = [
        subprocess.Popen(
            [sys.executable, "-c", FINGERPRINTS],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    told = [process.communicate()[0] for process in both]

    assert told[0] == told[1]
    assert len(told[0].strip()) == 16


def changed(name: str, value: Any) -> Files:
    files = Files(NAMES)
    setattr(files, name, value)
    return files


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Files(NAMES), changed("labels", torch.arange(60) % 7)),
        (Files(NAMES), Files([*NAMES[:59], "x.png"])),
        (TensorDataset(torch.zeros(50, 2)), TensorDataset(torch.cat((torch.zeros(49, 2), torch.ones(1, 2))))),
        (Subset(Files(NAMES), range(10)), Subset(Files(NAMES), range(1, 11))),
        (ConcatDataset([Files(NAMES), Files(NAMES)]), ConcatDataset([Files(NAMES), Files(NAMES[::-1])])),
        (list(range(40)), [0, *range(2, 41)]),
        (changed("rows", np.arange(60)), changed("rows", np.arange(60) + 1)),
        (changed("table", {"x": np.zeros(60)}), changed("table", {"x": np.ones(60)})),
    ],
)
def test_data_that_differs_is_seen(one, other):
    """Of lists, tensors, arrays, columns, subsets and concatenations; and the same is the same."""
    grave, _ = fingerprint.of(other).differences(fingerprint.of(one))

    assert grave
    assert fingerprint.of(one).differences(fingerprint.of(one)) == ([], [])
    assert Counter(fingerprint.of(one).data.keys()) == Counter(fingerprint.of(other).data.keys())
