"""The lock of a folder, with real processes: it lives exactly as long as its owner."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from drivetrain.core import locking
from drivetrain.core.locking import RUN_LOCK, FolderLock, Owner, is_locked, lock_held_here

HOLD = """
import sys, time
from pathlib import Path
from drivetrain.core.locking import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print(lock.acquire(), lock.holder, flush=True)
{then}
"""


def start(folder, then="sys.stdin.read()"):
    """Start a process that takes the lock of a folder and lives until its input ends."""
    code = HOLD.format(then=then)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline()


def end(process):
    process.communicate(timeout=60)


def elsewhere(folder, **changes):
    """Let a lock look like that of another machine."""
    path = folder / RUN_LOCK
    content = json.loads(path.read_text()) | {"host": "elsewhere", "machine": "elsewhere", **changes}
    path.write_text(json.dumps(content))
    return content


def test_a_second_process_hears_who_holds_the_lock(tmp_path):
    process, answer = start(tmp_path)
    assert answer.startswith("True")
    lock = FolderLock(tmp_path)
    assert not lock.acquire() and is_locked(tmp_path)
    said = str(lock.holder)
    assert f"process {process.pid} on host" in said and "since 20" in said and "last heartbeat 20" in said
    end(process)
    assert not (tmp_path / RUN_LOCK).exists()  # released when the process ended
    assert lock.acquire() and lock.is_held()
    lock.release()
    assert os.listdir(tmp_path) == []


def test_a_killed_owner_is_dead_at_once_also_while_nobody_has_waited_for_it(tmp_path):
    process, _ = start(tmp_path)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the list of processes
    assert not is_locked(tmp_path)
    with FolderLock(tmp_path) as lock:
        assert lock.acquire() and lock.is_held()
    end(process)


def test_a_process_with_the_number_of_a_dead_owner_is_not_the_owner(tmp_path):
    with FolderLock(tmp_path) as lock:
        assert lock.acquire()
        path = tmp_path / RUN_LOCK
        path.write_text(json.dumps(json.loads(path.read_text()) | {"started": "1"}))
        assert not is_locked(tmp_path)


def test_one_process_holds_a_folder_once(tmp_path):
    with FolderLock(tmp_path) as first, FolderLock(tmp_path) as second:
        assert first.acquire() and not second.acquire()
        assert lock_held_here(tmp_path, RUN_LOCK) is first
        second.release()
        assert first.is_held()
        first.release()
        assert second.acquire() and second.is_held() and lock_held_here(tmp_path, RUN_LOCK) is second


def test_of_many_processes_one_takes_over_the_lock_of_a_dead_one(tmp_path):
    process, _ = start(tmp_path, then="import os; os._exit(1)")
    end(process)
    assert (tmp_path / RUN_LOCK).exists()
    then = "time.sleep(0.2); print(lock.is_held(), flush=True); sys.stdin.read()"
    code = "import sys; sys.stdin.readline()\n" + HOLD.format(then=then)  # all begin at the same moment
    command = [sys.executable, "-c", code, str(tmp_path)]
    contenders = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(5)
    ]
    for contender in contenders:
        contender.stdin.write("\n")
        contender.stdin.flush()
    answers = [(c.stdout.readline().split()[0], c.stdout.readline().strip()) for c in contenders]
    assert sorted(answers) == [("False", "False")] * 4 + [("True", "True")]
    assert os.listdir(tmp_path) == [RUN_LOCK]
    for contender in contenders:
        end(contender)
    assert os.listdir(tmp_path) == []


def test_a_contender_that_judged_too_early_does_not_take_the_lock_of_the_next_owner(tmp_path, monkeypatch):
    process, _ = start(tmp_path, then="import os; os._exit(1)")
    end(process)
    fast, slow, judge = FolderLock(tmp_path), FolderLock(tmp_path), locking._is_dead

    def judge_slowly(path, seen):
        monkeypatch.setattr(locking, "_is_dead", judge)
        dead = judge(path, seen)
        assert fast.acquire()  # while the slow one goes on with what it has seen
        return dead

    monkeypatch.setattr(locking, "_is_dead", judge_slowly)
    with fast, slow:
        assert not slow.acquire() and fast.is_held()
        assert slow.holder.pid == os.getpid() and os.listdir(tmp_path) == [RUN_LOCK]


def test_a_claim_that_a_dying_process_left_does_not_block_others(tmp_path):
    process, _ = start(tmp_path, then="import os; os._exit(1)")
    end(process)
    path = tmp_path / RUN_LOCK
    token = json.loads(path.read_text())["token"]
    (tmp_path / f"{RUN_LOCK}.{token}").write_text(json.dumps(json.loads(path.read_text()) | {"token": "0" * 16}))
    with FolderLock(tmp_path) as lock:
        assert lock.acquire() and os.listdir(tmp_path) == [RUN_LOCK]


def test_an_owner_on_another_machine_lives_as_long_as_its_heartbeat_changes(tmp_path, monkeypatch, caplog):
    process, _ = start(tmp_path)
    path = tmp_path / RUN_LOCK
    elsewhere(tmp_path)
    os.utime(path, (1, 1))  # a clock that is decades behind
    monkeypatch.setattr(locking, "_POLL_SECONDS", 0.01)
    lock, looks = FolderLock(tmp_path), 0

    def look(path, look=locking._look):
        nonlocal looks
        looks += 1
        seen = look(path)
        return replace(seen, beat=seen.beat + (looks > 3))

    with monkeypatch.context() as patch:
        patch.setattr(locking, "_look", look)
        assert not lock.acquire()
    assert "Waiting up to" in caplog.text and "elsewhere" in str(lock.holder)
    monkeypatch.setattr(locking, "STALE_SECONDS", 0.05)
    assert lock.acquire()  # no change: dead, whatever the clocks say
    lock.release()
    end(process)


@pytest.mark.parametrize("content", [b"", b"rubbish", b'{"token": "../../x", "pid": "1"}', b"[" * 4000])
def test_a_file_that_names_no_owner_is_a_lock_until_it_is_stale(tmp_path, monkeypatch, content):
    (tmp_path / RUN_LOCK).write_bytes(content)
    assert is_locked(tmp_path)
    monkeypatch.setattr(locking, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(locking, "STALE_SECONDS", 0.05)
    with FolderLock(tmp_path) as lock:
        assert lock.acquire() and os.listdir(tmp_path) == [RUN_LOCK]


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_a_trap_in_the_place_of_the_lock_is_not_opened(tmp_path, kind):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / RUN_LOCK
    {"link": lambda: path.symlink_to(outside), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    assert not is_locked(folder)
    with pytest.raises(OSError):
        FolderLock(folder).acquire()
    assert outside.read_text() == "mine"


def test_a_forked_child_does_not_hold_the_lock_and_does_not_release_it(tmp_path):
    with FolderLock(tmp_path) as lock:
        assert lock.acquire()
        child = os.fork()
        if not child:
            own = FolderLock(tmp_path)
            refused = not lock.is_held() and not own.acquire() and own.holder.pid == os.getppid()
            lock.release()
            os._exit(0 if refused else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert lock.is_held()


def test_the_heartbeat_changes_the_file_and_reports_a_lock_that_is_gone_or_taken(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(locking, "BEAT_SECONDS", 0.01)
    path = tmp_path / RUN_LOCK
    with FolderLock(tmp_path) as lock:
        assert lock.acquire()
        os.utime(path, (1, 1))
        wait_until(lambda: path.stat().st_mtime > 1)
        with caplog.at_level(logging.WARNING):
            path.rename(tmp_path / "away")
            wait_until(lambda: "is gone" in caplog.text)
        (tmp_path / "away").rename(path)
        elsewhere(tmp_path, token="f" * 16)
        wait_until(lambda: "was taken by" in caplog.text)
        assert not lock.is_held()
    assert path.exists()  # another's


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("is_taken_again", [False, True])
def test_a_lock_whose_folder_was_moved_away_is_free_when_it_is_released(tmp_path, is_taken_again):
    lock = FolderLock(tmp_path / "run")
    (tmp_path / "run").mkdir()
    assert lock.acquire()
    (tmp_path / "run").rename(tmp_path / "moved")
    if is_taken_again:
        (tmp_path / "run").mkdir()
        assert lock.acquire()
    lock.release()
    again = FolderLock(tmp_path / "moved")
    assert not is_locked(tmp_path / "moved") and again.acquire() and again.is_held()
    again.release()


def test_another_thread_can_release_a_lock_while_the_heartbeat_starts(tmp_path, monkeypatch):
    """As a garbage collection does that begins in the new thread."""
    (tmp_path / "other").mkdir()
    dropped, released = FolderLock(tmp_path / "other"), []

    class Starting(threading.Thread):
        def start(self):
            thread = RealThread(target=dropped.release, daemon=True)
            thread.start()
            thread.join(10)
            released.append(not thread.is_alive())
            super().start()

    RealThread = threading.Thread
    monkeypatch.setattr(locking, "_hearts", locking._HeartbeatThread())
    monkeypatch.setattr(threading, "Thread", Starting)
    lock = FolderLock(tmp_path)
    assert lock.acquire()
    lock.release()
    assert released == [True]


def test_an_owner_that_cannot_be_read_is_not_called_dead_because_this_process_released_a_lock(tmp_path):
    lock = FolderLock(tmp_path)
    assert lock.acquire()
    lock.release()
    lock.release()
    assert Owner().is_alive() is None


@pytest.mark.parametrize("hours", [-1, 1])
def test_an_owner_elsewhere_is_judged_by_the_clock_of_the_file_system(tmp_path, monkeypatch, hours):
    process, _ = start(tmp_path)
    elsewhere(tmp_path)
    path, now = tmp_path / RUN_LOCK, time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600 * hours)  # this machine's clock, and not that of the files
    os.utime(path)
    assert is_locked(tmp_path)
    os.utime(path, (now + 3600 * hours,) * 2)  # fresh only for this machine
    assert not is_locked(tmp_path)
    assert os.listdir(tmp_path) == [RUN_LOCK]
    end(process)
