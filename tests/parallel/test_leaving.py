"""What schedulers do to several processes: they are told to leave, lose their launcher, come back with fewer."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from bench import restarts
from bench.restarts import FLAGS, finish, outcome, steps_of
from megagraph.data.datasets import synthetic_graph
from megagraph.data.store import write_store
from tests.processes import Command, Done, launch, start_each

pytestmark = pytest.mark.slow


def words(folder: Path, *plan: object) -> list[str]:
    command = ["train", *FLAGS.split(), "--dataset", folder.parent / "store", "--resume", "auto"]
    return [*map(str, command), "--out", str(folder / "run"), *map(str, plan or ("--plan", "1,1,2"))]


def torchrun(folder: Path, *flags: str) -> subprocess.Popen:
    command = restarts.torchrun("1,1,2", *flags, "-m", "megagraph", *words(folder))
    return restarts.start(command, folder / "output")


def undisturbed(folder: Path) -> None:
    """Where nothing is asked of a launcher: forks."""
    for done in launch(2, *words(folder)):
        assert done.returncode == 0, done.stderr


def keep_output(folder: Path, done: Done) -> None:
    with (folder / "output").open("a") as output:
        output.write(done.stderr)


def alone(folder: Path, *plan: object) -> None:
    keep_output(folder, Command(*words(folder, *plan)).finish())


def after_a_few_steps(folder: Path, started: subprocess.Popen | Command) -> None:
    while started.poll() is None and (not (folder / "run/metrics.jsonl").exists() or steps_of(folder / "run") < 4):
        time.sleep(0.01)


def one_rank_is_told(folder: Path) -> None:
    launcher = torchrun(folder)
    after_a_few_steps(folder, launcher)
    psutil.Process(launcher.pid).children()[1].send_signal(signal.SIGUSR1)
    (folder / "code").write_text(str(finish(launcher)))


def launcher_passes_it_on(folder: Path) -> None:
    launcher = torchrun(folder, "--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    after_a_few_steps(folder, launcher)
    launcher.send_signal(signal.SIGUSR1)
    finish(launcher)


def launcher_dies(folder: Path) -> None:
    launcher = torchrun(folder)
    after_a_few_steps(folder, launcher)
    ranks = psutil.Process(launcher.pid).children()
    launcher.send_signal(signal.SIGUSR1)  # kills it, as it was not told to handle it
    launcher.wait()
    _, alive = psutil.wait_procs(ranks, timeout=600)
    (folder / "code").write_text(f"{launcher.returncode} {len(alive)}")


def fewer_come_back(folder: Path) -> None:
    ranks = start_each([words(folder)] * 2)
    after_a_few_steps(folder, ranks[0])
    for rank in ranks:  # as a launcher would tell them
        os.kill(rank.pid, signal.SIGTERM)
    for rank in ranks:
        keep_output(folder, rank.finish())
    alone(folder)
    alone(folder, "--plan", "auto", "--memory-gib", 4)


CASES = (undisturbed, one_rank_is_told, launcher_passes_it_on, launcher_dies, fewer_come_back)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("leaving")
    write_store(synthetic_graph(num_nodes=600, num_classes=3, in_features=16, seed=0), place / "store")
    found = {}
    for case in CASES:
        found[case] = place / case.__name__
        found[case].mkdir()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda case: case(found[case]), CASES))
    return found


@pytest.mark.parametrize("case", CASES[1:4], ids=lambda case: case.__name__)
def test_all_ranks_leave_after_the_same_step_and_go_on(folders, case):
    folder = folders[case]
    said = (folder / "output").read_text()
    steps = steps_of(folder / "run")
    assert f"after {steps} steps; go on with the same command" in said, said
    assert (folder / "run/checkpoints/latest").read_text() == f"step-{steps:06d}"
    assert not (folder / "run/lock").exists()
    expected = {one_rank_is_told: ["0"], launcher_dies: [f"-{signal.SIGUSR1.value} 0"], launcher_passes_it_on: []}
    assert [path.read_text() for path in folder.glob("code")] == expected[case]
    if case is not one_rank_is_told:  # from there on it is as in that case
        return
    undisturbed(folder)
    lines, weights = outcome(folder / "run")
    want_lines, want_weights = outcome(folders[undisturbed] / "run")
    assert lines == want_lines
    assert all(weights[name].equal(want_weights[name]) for name in want_weights)


def test_fewer_processes_go_on_with_plan_auto_and_a_fixed_plan_says_which(folders):
    folder = folders[fewer_come_back]
    said = (folder / "output").read_text()
    assert "= 2, got 1; start them with torchrun --nproc-per-node 2, or pass --plan auto, or a plan of 1" in said
    assert "plan: pp 1, cp 1, dp 1" in said
    lines, _ = outcome(folder / "run")
    want, _ = outcome(folders[undisturbed] / "run")
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in want], rel=1e-4)
