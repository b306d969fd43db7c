"""A rank that fails ends the run: every rank that can still speak names it, its phase and its error."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from bench.failures import case, compile_loops
from megagraph import checkpoint
from megagraph.parallel import failure
from megagraph.parallel.failure import Watch, is_of_a_peer
from tests.processes import CONTEXT

UNANSWERED = r"rank 1 does not answer \(killed, stopped or cut off\), last seen in "
CASES = {
    ("kill", "forward", "2,1,1"): UNANSWERED + r"forward and backward \(step 1\)",
    ("stop", "optimizer", "1,2,1"): UNANSWERED + r"optimizer \(step 1\)",
    ("hang", "evaluation", "1,1,2"): r"rank 1 hangs in evaluation \(step 3\) at faulty.py:\d+ strike",
    ("raise", "backward", "2,1,1"): r"rank 1 in forward and backward \(step 1\): RuntimeError: injected",
}


@pytest.fixture(scope="module")
def rows():
    """All runs at once, as they mostly wait; no seconds are looked at, so a busy machine may take its time to begin."""
    compile_loops()
    with ThreadPoolExecutor(len(CASES)) as pool:
        return dict(zip(CASES, pool.map(lambda fault: case(*fault, timeout=30), CASES), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("fault", CASES, ids=" ".join)
def test_every_rank_names_the_one_that_failed(rows, fault):
    row = rows[fault]
    assert "error" not in row, row["error"]  # what a run printed that met no fault
    assert not row["hangs"]
    assert row["exit_code"] != 0
    assert row["silent_ranks"] == []
    assert len(row["causes"]) == 1 and re.fullmatch(CASES[fault], row["causes"][0]), row["causes"]


@pytest.mark.parametrize("own", [0, 1])
def test_the_rank_whose_disk_is_full_names_its_error(own, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "rank", lambda: own)
    full = OSError(27, "File too large")
    with pytest.raises(OSError, match=r"rank 0.*File too large") as caught, checkpoint._errors_of(tmp_path):
        raise CheckpointException("save", {0: (full, None)})
    assert is_of_a_peer(caught.value) == (own == 1)
    assert own == 1 or caught.value.__cause__ is full


@pytest.mark.parametrize(
    ("error", "launcher", "cause"),
    [
        (dist.DistBackendError("gone"), "here", "the machine of rank 0, which has the store, does not answer"),
        (ValueError("own"), "here", "rank 1 in the beginning: ValueError: own"),
        (dist.DistBackendError("gone"), "gone", "rank 1 in the beginning: DistBackendError: gone"),
    ],
)
def test_without_the_store_only_an_own_error_is_a_first_cause(error, launcher, cause, capsys):
    """Or where the launcher is gone, too, which says nothing of the machine of rank 0."""
    lost = Mock(**{f"{name}.side_effect": dist.DistNetworkError("reset") for name in ("set", "check", "compare_set")})
    watch = Watch(lost, 1, 2, 30.0)
    if launcher == "gone":
        watch._launcher = -1
    watch.report(error)
    assert capsys.readouterr().err == f"megagraph: rank 1 leaves, first cause: {cause}\n"


def exit_code(target, *arguments):
    """Of a process; ``None`` for one that does not end."""
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    process.join(30)
    code = process.exitcode
    process.kill()
    process.join()
    return code


def cut_off(output):
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
    failure.GRACE_SECONDS = failure.ANSWER_SECONDS = 0.0
    Watch(Mock(check=lambda _: time.sleep(1000)), 1, 2, 0.5)
    time.sleep(1000)


def test_a_rank_that_is_cut_off_ends(tmp_path):
    assert exit_code(cut_off, tmp_path / "stderr") == 1
    assert "rank 1 leaves, first cause: the store does not answer" in (tmp_path / "stderr").read_text()


def slow():
    """The store takes its time, but less than it may take, while the rank runs on for longer than that."""
    failure.GRACE_SECONDS = failure.ANSWER_SECONDS = 0.0
    watch = Watch(Mock(check=lambda _: time.sleep(0.6)), 1, 2, 1.4)
    time.sleep(2.2)
    watch.close()


def test_a_rank_whose_store_is_slow_goes_on():
    assert exit_code(slow) == 0


def test_an_error_of_a_peer_is_told_from_an_own_one():
    lost = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    wrapped = RuntimeError("[Stage 1] failed to run forward")
    wrapped.__cause__ = lost
    assert is_of_a_peer(lost) and is_of_a_peer(wrapped) and is_of_a_peer(dist.DistBackendError("NCCL"))
    assert not is_of_a_peer(RuntimeError("injected"))
