"""One process at a time, and no child holds what its parent has."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megagraph import lock
from megagraph.lock import Lock

HOLD = """
import os, sys, time
from pathlib import Path
from megagraph.lock import Lock
lock = Lock(Path(sys.argv[1]))
if len(sys.argv) > 2:
    child = os.fork()
    if child == 0:
        time.sleep(60)
    print(child, flush=True)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds the lock; with an argument, one that has a child."""
    started = []

    def start(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLD, str(tmp_path), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_second_is_told_who_holds_it_and_gets_it_after_a_kill(tmp_path, holder, caplog):
    process = holder()
    assert process.stdout.readline() == "held\n"
    with pytest.raises(TimeoutError, match=rf"is in use by process {process.pid} on .* since .*--lock-wait"):
        Lock(tmp_path)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        Lock(tmp_path, wait_seconds=0.5)
    assert time.monotonic() - started >= 0.5
    assert f"in use by process {process.pid}" in caplog.text
    process.kill()
    own = Lock(tmp_path, wait_seconds=10)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    own.release()
    assert not (tmp_path / "lock").exists()


def test_a_child_that_outlives_its_parent_does_not_hold_it(tmp_path, holder):
    process = holder("with a child")
    child = int(process.stdout.readline())
    assert process.stdout.readline() == "held\n"
    with pytest.raises(TimeoutError):
        Lock(tmp_path)
    process.kill()
    process.wait()
    try:
        os.kill(child, 0)
        Lock(tmp_path, wait_seconds=1).release()
    finally:
        os.kill(child, signal.SIGKILL)


def _count(folder, queue):
    for _ in range(20):
        own = Lock(folder, wait_seconds=60)
        (folder / "number").write_text(str(int((folder / "number").read_text()) + 1))
        own.release()
    queue.put("done")


def test_never_two_at_once(tmp_path):
    (tmp_path / "number").write_text("0")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_count, args=(tmp_path, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert (tmp_path / "number").read_text() == "60"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS], ids=errno.errorcode.get)
def test_where_the_file_system_has_no_locks(tmp_path, monkeypatch, caplog, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(lock, "DEAD_SECONDS", 1.0)
    own = Lock(tmp_path)
    assert "has no locks" in caplog.text
    with pytest.raises(TimeoutError, match=f"in use by process {os.getpid()}"):
        Lock(tmp_path, wait_seconds=2)  # it beats
    own._released.set()  # as if killed
    time.sleep(0.3)
    Lock(tmp_path, wait_seconds=10).release()
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("another", ["writes later", "takes the partial file", "writes a partial file"])
def test_where_there_are_no_locks_and_two_find_it_free(tmp_path, monkeypatch, another):
    """The other is on another machine, as a process of the same number."""
    own, replace = {"host": "another", "pid": os.getpid(), "since": "now", "beat": 0.0}, os.replace
    monkeypatch.setattr(lock, "fcntl", None)
    if another == "writes later":
        monkeypatch.setattr(time, "sleep", lambda _: (tmp_path / "lock").write_text(json.dumps(own)))
    elif another == "takes the partial file":
        monkeypatch.setattr(os, "replace", lambda old, new: [replace(old, new) for _ in range(2)])
    else:
        monkeypatch.setattr(Path, "unlink", lambda path, **_: path.touch())
    with pytest.raises(TimeoutError, match="is in use by "):
        Lock(tmp_path)


def test_nothing_is_written_through_a_link(tmp_path):
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError):
        Lock(tmp_path)
    assert (tmp_path / "theirs").read_text() == "precious"
