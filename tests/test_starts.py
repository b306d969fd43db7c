"""Who runs in a folder: two starts at once, a start that waits, signals, a time limit, ranks that were killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

import megagraph as mg
from megagraph import epochs, files
from megagraph.data.store import write_store
from megagraph.lock import Lock
from megagraph.run import Run, restarted
from tests.checkpoint_cases import config, graph, outcome, stop_at
from tests.processes import Command


def test_a_second_run_in_the_same_folder_waits_and_is_told(tmp_path):
    run, _ = Run.enter(config(tmp_path / "run"))
    try:
        with pytest.raises(TimeoutError, match=rf"is in use by process {os.getpid()} on .*--lock-wait"):
            mg.Trainer(config(tmp_path / "run", lock_wait=0.5)).fit(graph())
    finally:
        run._lock.release()


def told(name: str) -> None:
    """Let this process get the signal in its step 5."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    real = epochs.Epochs._train_step

    def train_step(self, *arguments):
        if self.step == 5:
            os.kill(os.getpid(), getattr(signal, name))
        return real(self, *arguments)

    epochs.Epochs._train_step = train_step


SMALL = dict(layers=2, dim=16, ffn_dim=16, heads=2, samples=1, batch_size=10, device="cpu", epochs=2)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Flags of a small run of a process of its own, on a graph in a store."""
    store = tmp_path_factory.mktemp("data") / "store"
    write_store(graph(), store)
    values = SMALL | dict(dataset=store)
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)]


def test_two_starts_at_once_one_runs_and_one_is_told(tmp_path, flags):
    started = [Command("train", *flags, "--seed", seed, "--out", tmp_path / "run") for seed in (0, 1)]
    ran, refused = sorted((command.finish() for command in started), key=lambda done: done.returncode)
    assert (ran.returncode, refused.returncode) == (0, 1), (ran, refused)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "step" in line]
    assert steps == list(range(len(steps)))
    assert "holds a run already" in refused.stderr and "Traceback" not in refused.stderr
    assert not (tmp_path / "run/lock").exists()


def test_a_run_that_another_start_makes_meanwhile_is_not_a_file_of_others(tmp_path, monkeypatch):
    with stop_at(3):
        mg.Trainer(config(tmp_path / "theirs")).fit(graph())
    (tmp_path / "run").mkdir()
    listed = files.others

    def make_and_list(folder, ours):
        shutil.copytree(tmp_path / "theirs", tmp_path / "run", dirs_exist_ok=True)
        return listed(folder, ours)

    monkeypatch.setattr(files, "others", make_and_list)
    with pytest.raises(FileExistsError, match="holds a run already"):
        mg.Trainer(config(tmp_path / "run")).fit(graph())


def wait_for(path: Path, lines: int, process: Command) -> None:
    deadline = time.monotonic() + 600
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert process.poll() is None and time.monotonic() < deadline, process.finish()
        time.sleep(0.02)


@pytest.mark.slow
def test_loader_workers_do_not_hold_the_lock_of_a_rank_that_was_killed(tmp_path, flags):
    out = tmp_path / "run"
    process = Command("train", *flags, "--epochs", 1000, "--workers", 2, "--out", out)
    wait_for(out / "metrics.jsonl", 3, process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.finish()
    assert any(child.is_running() for child in children)
    Lock(out, wait_seconds=0.5).release()
    psutil.wait_procs(children, timeout=30)


def test_under_torchrun_a_folder_without_a_name_is_that_of_the_launch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with stop_at(3):
        mg.Trainer(config(None)).fit(graph())
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name == "synthetic-job-7"
    with pytest.raises(FileExistsError, match="holds a run already"):
        mg.Trainer(config(None)).fit(graph())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert mg.Trainer(config(None)).fit(graph()).steps == 18
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-8")  # not its own run
    with pytest.raises(FileExistsError, match="holds a run already"):
        mg.Trainer(config(run)).fit(graph())


def test_a_restart_is_known_by_any_of_its_nodes(tmp_path):
    """Another may have become rank 0 since, and each has its own torchrun, and counts its restarts alone."""
    out = mg.TrainConfig(out=tmp_path / "run")

    def start(*launches, **changes):
        run, _ = Run.enter(replace(out, **changes), launches)
        run._lock.release()
        return run

    start("first", "second")
    assert restarted(out, ["second", "new"]) == tmp_path / "run"
    assert restarted(out, ["new", None]) is None
    assert restarted(replace(out, resume="auto"), ["second"]) is None
    run = start("third")  # nothing has been trained yet
    assert restarted(out, ["third"]) == tmp_path / "run"
    run.write_config(out)
    run.log(step=0)
    start("fourth", resume="auto")
    assert restarted(out, ["fourth"]) == tmp_path / "run" and restarted(out, ["third"]) is None


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    mg.Trainer(mg.TrainConfig(**SMALL, out=out)).fit(graph())
    return outcome(out)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT", "time limit"])
def test_a_signal_or_the_time_limit_loses_and_repeats_no_step(tmp_path, flags, undisturbed, name):
    out = tmp_path / "out"
    flags = [*flags, "--resume", "auto", "--out", out]
    # the time is over before the first step
    if name == "time limit":
        done = Command("train", *flags, "--time-limit", "1s", before=partial(time.sleep, 1)).finish()
    else:
        done = Command("train", *flags, before=partial(told, name)).finish()
    error = done.stderr
    assert "Traceback" not in error
    steps = sum('"step"' in line for line in (out / "metrics.jsonl").read_text().splitlines())
    if name == "SIGINT":
        assert done.returncode == 130
        assert error.rstrip().endswith(f"interrupted; go on with megagraph train --resume {out}")
    else:
        assert done.returncode == 75, error
        reason = "the time limit" if name == "time limit" else name
        assert f"stopped by {reason} after {steps} steps; go on with the same command" in error
        assert (out / "checkpoints/latest").read_text() == f"step-{steps:06d}"
        assert steps == (1 if name == "time limit" else 6)
    mg.Trainer.resume(out).fit()
    assert outcome(out)["lines"] == undisturbed["lines"]
    assert all(torch.equal(x, undisturbed["weights"][name]) for name, x in outcome(out)["weights"].items())
