"""The runtime folder: who may publish there, what is seen, what is swept; viewers and jobs that die.

Reads   folders of jobs that live, ended, were killed or never were.
Writes  such folders; modes.
Never   the user's own runtime folder.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import outlive
import warm_server
from deadlines import wait_until
from metrics import jobs
from outlive._metrics import history, layout, publishing, viewing

JOB = """
import time, outlive
def nap(number):
    time.sleep(0.002)
    return number
with outlive.Pool(1) as pool:
    for number in pool.map(nap, range(100000)):
        if number == 3:
            print("ready", flush=True)
"""


def start_job(tmp_path, **environment: str) -> subprocess.Popen:
    program = tmp_path / "job.py"
    program.write_text(JOB)
    job = warm_server.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    return job


def age(folder, seconds: float) -> None:
    then = time.time() - seconds
    for path in (*folder.iterdir(), folder):
        os.utime(path, (then, then))


def test_jobs_and_ranks_are_seen_beside_each_other_and_one_that_was_killed_is_over(tmp_path, runtime):
    """A viewer that comes late sees all of them; a killed job ends, and is swept after a while."""
    first = start_job(tmp_path, RANK="0", WORLD_SIZE="2")
    second = start_job(tmp_path, RANK="1", WORLD_SIZE="2")

    assert wait_until(lambda: len(viewing.jobs()) == 2, jobs.DEADLINE_S)
    found = viewing.jobs()
    before = [job.snapshot()["delivered"] for job in found]
    assert wait_until(lambda: all(j.snapshot()["delivered"] > n for j, n in zip(found, before)), jobs.DEADLINE_S)
    assert [(job.pid, job.rank, job.world_size) for job in found] == [(first.pid, 0, 2), (second.pid, 1, 2)]
    assert all(job.alive and job.command.endswith("job.py") for job in found)
    first.kill()
    first.communicate()
    assert [job.alive for job in viewing.jobs()] == [False, True]
    assert found[0].snapshot()["slots"][0]["state"] == "closed"
    assert found[0].ask("recycle", 0) == "slot 0 has no worker now"
    age(found[0].path, viewing.runtime.SWEEP_S + 1)
    assert [job.pid for job in viewing.jobs()] == [second.pid]
    assert not found[0].path.exists()
    second.send_signal(signal.SIGINT)
    second.communicate()


@pytest.mark.parametrize(
    ("environment", "rank", "among"),
    [
        ({}, None, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, 1, 4),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, 3, 8),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None, None),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "RANK": "no number"}, 2, 4),
    ],
)
def test_a_rank_is_known_by_what_its_launcher_says(monkeypatch, environment, rank, among):
    """torchrun's words, and those of slurm and MPI; a process that slurm started alone is no rank."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    loader = outlive.DataLoader(range(8), batch_size=4, num_workers=1)
    list(loader)

    job = jobs.only_job()

    assert (job.rank, job.world_size) == (rank, among)


def test_a_rank_is_known_by_its_group_without_a_launcher(tmp_path):
    """Programs that start their ranks by themselves tell torch.distributed alone."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        loader = outlive.DataLoader(range(8), batch_size=4, num_workers=1)
        list(loader)
    finally:
        torch.distributed.destroy_process_group()

    assert (jobs.only_job().rank, jobs.only_job().world_size) == (0, 1)


def test_ranks_of_a_run_are_listed_together():
    """In their order, whichever was there first; runs by their age."""
    for number, (began, run, rank) in enumerate(((1.0, "a", 1), (2.0, "", None), (3.0, "a", 0), (0.5, "b", 0))):
        folder = viewing.runtime.make(f"{70000 + number}-0-a")
        who = {"pid": 70000 + number, "start": 1, "began": began, "run": run, "rank": rank}
        (folder / "who.json").write_text(json.dumps(who))

    found = [(job.began, job.rank) for job in viewing.jobs()]

    assert found == [(0.5, 0), (3.0, 0), (1.0, 1), (2.0, None)]


def test_a_viewer_that_hangs_or_dies_does_not_touch_the_job(tmp_path):
    """Stopped in the middle of looking, or killed: batches go on."""
    viewer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from outlive._metrics import viewing\n"
            "while True:\n [job.snapshot() for job in viewing.jobs()]; print('looked', flush=True)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    loader = outlive.DataLoader(range(64), batch_size=4, num_workers=2)
    batches = iter(loader)
    next(batches)
    assert viewer.stdout is not None
    viewer.stdout.readline()
    viewer.send_signal(signal.SIGSTOP)
    some = [next(batches) for _ in range(5)]
    viewer.kill()
    viewer.communicate()
    rest = list(batches)

    assert len(some) + len(rest) == 15
    assert jobs.only_job().snapshot()["delivered"] == 16


def test_a_pid_that_is_anothers_by_now_is_no_job(runtime):
    """The number alone proves nothing: the time that the process began must be the same."""
    folder = viewing.runtime.make("7-0-a")
    who = {"pid": os.getpid(), "start": viewing.runtime.start_of(os.getpid()) - 1, "key": "7-0-a"}
    (folder / "who.json").write_text(json.dumps(who))

    (job,) = viewing.jobs()

    assert not job.alive
    assert job.snapshot() == {}
    who["start"] += 1
    assert viewing.runtime.is_alive(who)


@pytest.mark.parametrize("spoil", ["mode", "owner", "link", "file"])
def test_a_folder_that_others_may_write_to_is_neither_used_nor_read(tmp_path, monkeypatch, caplog, runtime, spoil):
    """The job runs, says once why nothing is published, and viewers see nothing there."""
    if spoil == "mode":
        runtime.mkdir(mode=0o777)
        runtime.chmod(0o777)
        expected = "can be written to by other users"
    elif spoil == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        runtime.mkdir(mode=0o700)
        os.chown(runtime, 65534, 65534)
        expected = "belongs to another user"
    elif spoil == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        runtime.symlink_to(tmp_path / "elsewhere")
        expected = "is no folder"
    else:
        runtime.write_text("")
        expected = "File exists"
    monkeypatch.setattr(publishing, "failure_logged", False)

    with caplog.at_level(logging.WARNING, "outlive"):
        for _ in range(2):
            assert len(list(outlive.DataLoader(range(8), batch_size=4, num_workers=1))) == 2

    assert [expected in record.message for record in caplog.records] == [True]
    assert "OUTLIVE_RUNTIME names another folder" in caplog.text
    assert viewing.jobs() == []


def test_a_folder_of_another_user_inside_is_passed_over(runtime):
    """Only this user's jobs are shown, wherever they lie."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    list(outlive.DataLoader(range(8), batch_size=4, num_workers=1))
    (job,) = viewing.jobs()

    os.chown(job.path, 65534, 65534)

    assert viewing.jobs() == []


def test_the_job_goes_on_when_the_disk_is_full(monkeypatch, caplog, runtime):
    """Events that cannot be written are given up, with one line in the log; the board goes on."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    runtime.mkdir(mode=0o700)
    small = ["mount", "-t", "tmpfs", "-o", f"size=64k,mode=0700,uid={os.geteuid()}", "tmpfs", str(runtime)]
    if subprocess.run(small, capture_output=True, check=False).returncode != 0:
        pytest.skip("this container may not mount")
    monkeypatch.setattr(publishing, "failure_logged", False)
    try:
        loader = outlive.DataLoader(jobs.Faulty(), batch_size=4, num_workers=2, faults="skip")
        with caplog.at_level(logging.WARNING, "outlive"):
            batches = iter(loader)
            first = next(batches)
            with pytest.raises(OSError, match="No space"):
                (runtime / "rest").write_bytes(bytes(1 << 20))
            delivered = [first, *batches]
            shown = jobs.only_job().snapshot()["delivered"]
            with pytest.raises(OSError, match="No space"):
                (runtime / "more").write_bytes(bytes(1 << 20))
            other = len(list(outlive.DataLoader(range(8), batch_size=4, num_workers=8)))
    finally:
        subprocess.run(["umount", "-l", str(runtime)], check=True)

    assert len(delivered) == 16
    assert shown == 16
    assert other == 2
    assert sum("cannot publish" in record.message for record in caplog.records) == 1


def test_old_folders_are_swept_when_many_have_gathered(runtime):
    """Nobody needs to look: whoever publishes makes room, and what lives is left alone."""
    for number in range(45):
        folder = viewing.runtime.make(f"70000-{number}-a")
        (folder / "who.json").write_text(json.dumps({"pid": 1 << 22, "start": 1, "key": folder.name}))
    for folder in runtime.glob("70000-*"):
        age(folder, viewing.runtime.SWEEP_S + 1)

    loader = outlive.DataLoader(range(8), batch_size=4, num_workers=1)
    list(loader)

    left = {path.name.partition("-")[0] for path in runtime.iterdir()}
    assert left == {str(os.getpid()), viewing.runtime.MARK.partition("-")[0]}


def test_events_are_bounded_and_readers_find_their_place(tmp_path):
    """The file becomes the earlier one at its size; a reader that follows misses nothing, a late one has the rest."""
    writer, reader = history.Writer(tmp_path, most_bytes=4000), history.Reader(tmp_path)
    followed: list[int] = []
    after = 0

    for number in range(300):
        writer.write([{"kind": "resized", "why": "x" * 50}])
        if number % 7 == 0:
            while True:
                events, after = reader.events(after, 5)
                followed += [event["n"] for event in events]
                if not events:
                    break
    with open(tmp_path / viewing.runtime.EVENTS, "ab") as file:
        file.write(b'{"n": 999, "kind": "ti')  # a writer that was killed in the middle
    late_reader = history.Reader(tmp_path)
    has_news = [late_reader.has_news(), reader.has_news()]
    late, last = late_reader.events(0, 1000)

    assert has_news == [True, True]
    assert not late_reader.has_news()  # though half a line is there
    assert followed == list(range(1, max(followed) + 1))
    assert last == 300
    assert [event["n"] for event in late] == list(range(late[0]["n"], 301))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 9000
    assert history.next_tick(0.0, 10.0) == 11.0
    assert history.next_tick(0.0, 1e6) == 1e6 + 500


def test_a_board_that_is_being_written_is_never_half_seen(tmp_path, monkeypatch):
    """Writer and reader run at once, hardly ever resting: all counts of a picture are of one moment."""
    # The writer may have no processor in the middle of writing: a look that gives up on it is another test's.
    monkeypatch.setattr(viewing, "READ_TIMEOUT_S", float("inf"))
    code = (
        "import sys\n"
        "from outlive._metrics import layout, publishing\n"
        "publisher = publishing.new('loader', 'x', 2, {}); publisher.make(); words = publisher.words\n"
        "print(publisher.folder, flush=True)\n"
        "for number in range(1, 10**9):\n"
        "    words[layout.SEQUENCE] += 1\n"
        "    layout.write_counts(words, [number] * len(layout.COUNTS))\n"
        "    layout.write_row(words, 1, [number] * len(layout.ROW))\n"
        "    words[layout.SEQUENCE] += 1\n"
        "    sum(range(3000))\n"  # long enough for a copy: a reader on the other processor would else find no gap
    )
    writer = warm_server.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        (job,) = viewing.jobs()
        pictures: list[layout.Picture] = []

        def has_moved_on() -> bool:
            """The writer, by far."""
            for _ in range(300):
                words = job.read_words()
                assert words is not None
                pictures.append(layout.read(words))
            return len({picture.head["epoch"] for picture in pictures}) > 100

        assert wait_until(has_moved_on, jobs.DEADLINE_S)
    finally:
        writer.kill()
        writer.communicate()

    whole = [
        len({*(picture.head[name] for name in layout.COUNTS), *picture.rows[1].values.values()}) == 1
        for picture in pictures
    ]
    assert all(whole), f"{whole.count(False)} of {len(whole)} are of two moments"
