"""Files and folders that others prepared: links in wait, folders of other users, things of the user's in our way.

Reads   what is left of them afterwards.
Writes  links, files and folders as an attacker, or an unlucky user, would.
Never   anything outside of the test's folder.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest
import torch

import outlive
from outlive._metrics import publishing, runtime, viewing
from outlive._system import named, safe_files
from outlive.doctor.native import remembering
from outlive.doctor.native.code import Code
from outlive.doctor.native.elf import Library
from outlive.graph import SharedGraph
from outlive.loader import quarantine_file
from outlive.testing import chaos
from outlive.testing import plan as chaos_plan


def write_checkpoint(path: Path) -> None:
    list(outlive.DataLoader(range(8), batch_size=4, journal_position=path, journal_every=1))


def write_quarantine(path: Path) -> None:
    quarantine_file.replace_file(path, "{}")


def write_graph(path: Path) -> None:
    SharedGraph.from_edge_index(torch.tensor([[0, 1], [1, 0]])).save(path)


def write_cache(path: Path) -> None:
    memory = remembering.Memory(path)
    with Library(sys.executable) as library:
        memory.keep(library, Code())
    memory.save()


WRITERS = (write_checkpoint, write_quarantine, write_graph, write_cache)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_link_beside_a_file_is_not_written_through(tmp_path, writer):
    """Another user of the folder guesses the name of a file in the making, and points it at the user's own files."""
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    folder = tmp_path / "shared"
    folder.mkdir()
    path = folder / "made"
    planted = {f"{path.name}.new", f".{path.name}.{os.getpid()}", f"{path.name}.{os.getpid()}"}
    for name in planted:
        (folder / name).symlink_to(precious)

    writer(path)

    assert precious.read_text() == "years of work"
    assert path.is_file()
    assert not path.is_symlink()
    assert {each.name for each in folder.iterdir()} == {path.name, *planted}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_of_the_users_beside_a_file_is_left_alone(tmp_path, writer):
    """`model.new` beside `model` is the user's: it is neither overwritten nor taken for ours."""
    path = tmp_path / "made"
    others = {f"{path.name}.new", f".{path.name}.{os.getpid()}", f"{path.name}.{os.getpid()}"}
    for name in others:
        (tmp_path / name).write_text("the user's")

    writer(path)

    assert {(tmp_path / name).read_text() for name in others} == {"the user's"}


def test_a_process_killed_while_it_writes_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path):
    """However large the file in the making: it has no name until it is whole."""
    if not safe_files.has_nameless_files(tmp_path):
        pytest.skip("this file system has no files without names")
    (tmp_path / "made").write_text("before")
    code = (
        "import os, signal, sys, pathlib\n"
        "from outlive._system import safe_files\n"
        "with safe_files.replacing(pathlib.Path(sys.argv[1])) as file:\n"
        "    file.write(b'x' * 100_000)\n"
        "    file.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )

    subprocess.run([sys.executable, "-c", code, str(tmp_path / "made")], check=False)

    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert (tmp_path / "made").read_text() == "before"


@pytest.mark.parametrize("nameless", [True, False])
def test_an_error_while_writing_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path, monkeypatch, nameless):
    """With and without files that have no names."""
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    path = tmp_path / "made"
    path.write_text("before")

    with pytest.raises(TypeError), safe_files.replacing(path) as file:
        file.writelines([b"half", None])  # type: ignore[list-item]

    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["made"]
    with safe_files.replacing(path) as file:
        file.write(b"whole")
    assert path.read_text() == "whole"
    assert [each.name for each in tmp_path.iterdir()] == ["made"]


def test_a_link_of_the_users_own_is_followed_and_one_of_another_user_is_replaced(tmp_path):
    """The user's link leads where the user wants it; another user's may lead to ~/.bashrc."""
    (tmp_path / "far").write_text("before")
    (tmp_path / "link").symlink_to(tmp_path / "far")

    safe_files.write(tmp_path / "link", b"after")

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "far").read_text() == "after"
    if os.geteuid() != 0:
        pytest.skip("only root can give a link away")
    os.lchown(tmp_path / "link", 65534, 65534)
    safe_files.write(tmp_path / "link", b"stolen")
    assert (tmp_path / "far").read_text() == "after"
    assert (tmp_path / "link").read_text() == "stolen"
    assert not (tmp_path / "link").is_symlink()


def test_a_new_file_is_never_one_that_was_there(tmp_path):
    """Neither a file nor a link, one that leads nowhere included."""
    (tmp_path / "file").write_text("there")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")

    for name in ("file", "link", "dangling"):
        with pytest.raises(FileExistsError):
            safe_files.create(tmp_path / name)

    assert (tmp_path / "file").read_text() == "there"
    assert not (tmp_path / "nowhere").exists()


# ---------------------------------------------------------------- what is deleted


def grow_old(*paths: Path) -> None:
    """As if no process had written there for years."""
    for top in paths:
        for path in (*top.rglob("*"), top):
            os.utime(path, (1e9, 1e9), follow_symlinks=False)


def contents(folder: Path) -> dict[str, bytes | None]:
    """All that is in a folder, without what jobs published."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if f"/{os.getpid()}-" not in str(path)
    }


def publish() -> None:
    """Publish a job that has ended. A loader publishes only what lasts for a while."""
    publisher = publishing.Publisher("loader", "numbers", 1, {})
    publisher.make()
    publisher.end()


def fill_like_a_home(folder: Path, count: int = 45) -> None:
    for number in range(count):
        (folder / f"experiment-{number}").mkdir(parents=True)
        (folder / f"experiment-{number}" / "weights.pt").write_bytes(b"a week of training")
        (folder / f"7-{number}-a").mkdir()
        (folder / f"7-{number}-a" / "board").write_bytes(b"of a game")


def test_publishing_deletes_nothing_from_the_folder_that_the_user_names(tmp_path, monkeypatch):
    """OUTLIVE_RUNTIME may be any folder: with many old folders in it, named as they like, all are there afterwards."""
    fill_like_a_home(tmp_path)
    grow_old(tmp_path)
    before = contents(tmp_path)
    monkeypatch.setenv("OUTLIVE_RUNTIME", str(tmp_path))

    publish()
    viewing.jobs()

    assert [job.pid for job in viewing.jobs()] == [os.getpid()]
    after = contents(tmp_path)
    assert {name: after[name] for name in after if not name.startswith("outlive")} == before


def test_publishing_deletes_nothing_from_a_folder_of_the_users_that_has_our_name(tmp_path, monkeypatch):
    """A clone of a repository called outlive, say: without our mark, nothing in it is ours to remove."""
    fill_like_a_home(tmp_path / "outlive")
    grow_old(tmp_path)
    before = contents(tmp_path)
    monkeypatch.setenv("OUTLIVE_RUNTIME", str(tmp_path))

    publish()

    assert [job.pid for job in viewing.jobs()] == [os.getpid()]
    assert contents(tmp_path) == before


def test_only_whole_folders_of_jobs_are_swept_from_a_folder_with_our_mark(tmp_path, monkeypatch):
    """What the user put there stays: another name, a file more, a link, a folder with the name of a file of a job."""
    monkeypatch.setenv("OUTLIVE_RUNTIME", str(tmp_path))
    home = runtime.folder()
    ours = [runtime.make(f"7-{number}-a") for number in range(45)]
    for folder in ours:
        (folder / runtime.WHO).write_text(json.dumps({"pid": 1 << 22, "start": 1}))
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / runtime.WHO).write_text("{}")
    (home / "8-0-a").symlink_to(precious)
    (home / "notes").mkdir()
    for number, name in enumerate(("notes.txt", "board/deep", "events.jsonl.gz")):
        (home / f"9-{number}-a" / name).parent.mkdir(parents=True)
        (home / f"9-{number}-a" / name).write_text("the user's")
        (home / f"9-{number}-a" / runtime.EVENTS).touch()
    (home / "9-3-a").mkdir()
    (home / "9-3-a" / runtime.BOARD).symlink_to(precious / runtime.WHO)
    grow_old(tmp_path)
    before = contents(tmp_path)

    publish()
    viewing.jobs()

    gone = set(before) - set(contents(tmp_path))
    swept = {folder.name for folder in ours}
    assert gone == {f"outlive/{name}" for name in swept} | {f"outlive/{name}/{runtime.WHO}" for name in swept}


def test_a_job_that_cannot_publish_removes_only_what_it_made(tmp_path, monkeypatch, caplog):
    """The board could not be mapped: the folder that was just made goes, and what it was made in stays."""
    monkeypatch.setenv("OUTLIVE_RUNTIME", str(tmp_path))
    monkeypatch.setattr(publishing, "failure_logged", False)
    (tmp_path / "mine").write_text("mine")

    def fail(*args: object) -> None:
        raise OSError("no map today")

    monkeypatch.setattr(publishing.nameless, "map_descriptor", fail)
    publish()

    assert "no map today" in caplog.text
    assert sorted(path.name for path in tmp_path.rglob("*")) == [runtime.MARK, "mine", "outlive"]


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="this system does not list shared memory")
def test_sweeping_after_a_dead_worker_takes_only_names_that_its_own_job_gave():
    """Another container, or another program of the user's, may have a process with the same number."""
    others = ["outlive-70000-0c", "outlive-70000-000000-0c", "outlive-70000"]
    segments = [shared_memory.SharedMemory(name, create=True, size=16) for name in others]
    code = "from outlive._system import named; named.create(16, 'outlive-cell')"
    worker = multiprocessing.get_context("spawn").Process(target=exec, args=(code,))
    try:
        worker.start()
        worker.join()
        assert worker.pid is not None
        before = set(os.listdir("/dev/shm"))
        left = {name for name in before if name.startswith(f"outlive-{worker.pid}-")}
        named.sweep(70000)
        named.sweep(worker.pid)
        after = set(os.listdir("/dev/shm"))
    finally:
        for segment in segments:
            segment.close()
            segment.unlink()

    assert len(left) == 1
    assert left.isdisjoint(after)
    assert set(others) <= after


def test_a_check_neither_replaces_nor_removes_a_file_of_the_users(tmp_path):
    """`state_file` names a file that is no state of a check: the check does not begin."""
    mine = tmp_path / "results.json"
    mine.write_text('{"accuracy": 0.93}')

    with pytest.raises(outlive.PositionError, match="is no state of a check"):
        outlive.check(list(range(8)), workers=1, state_file=mine)

    assert mine.read_text() == '{"accuracy": 0.93}'


def test_a_check_that_ends_removes_its_own_state_only(tmp_path):
    """A state of its own goes; what took its place meanwhile stays."""
    path = tmp_path / "state.json"
    path.write_text('{"format": "outlive check 1"}')
    outlive.check(list(range(8)), workers=1, state_file=path)
    assert not path.exists()

    class Replacing(list):
        def __getitem__(self, index: Any) -> Any:
            path.write_text("the user's")
            return super().__getitem__(index)

    outlive.check(Replacing(range(8)), workers=1, state_file=path, start_method="fork")

    assert path.read_text() == "the user's"


def test_chaos_removes_no_folder_that_only_has_the_name_of_one_of_its_own(tmp_path, monkeypatch):
    """Without the mark, or of another user, or a link: it stays. One that a killed run left goes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    prefix = f"outlive-chaos-{os.stat('/proc/self/ns/pid').st_ino}-{1 << 22}-"
    mine, stale, other, link = (tmp_path / f"{prefix}{name}" for name in ("mine", "stale", "other", "link"))
    for folder in (mine, stale, other):
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "file").write_text("precious")
        folder.chmod(0o700)
    for folder in (stale, other):
        (folder / ".outlive-chaos").touch()
    other.chmod(0o777)
    link.symlink_to(stale)

    with pytest.raises(chaos.ProgramFailedError):
        chaos.run(["--", "false"], chaos_plan.Plan(kill_every_s=1.0))

    assert sorted(path.name.rpartition("-")[2] for path in tmp_path.iterdir()) == ["link", "mine", "other"]
    assert (mine / "deep" / "file").read_text() == (other / "deep" / "file").read_text() == "precious"
