"""Every rank learns of an error that happened on one, and of a plan that does not fit."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import megagraph as mg
from megagraph.parallel import mesh
from tests import ranks
from tests.parallel.cases import BAD_PLANS


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("equal", "no error"),
        (
            "different",
            "ValueError: the configuration must be the same on every rank, but layers is 0 on rank 0 and 1 on rank 1",
        ),
        (
            "other fields",
            "ValueError: the graph must be the same on every rank, but labels is None on rank 0 and 1 on rank 1",
        ),
        (
            "other program",
            "ValueError: the program must be the same on every rank, but sources is 0 on rank 0 and 1 on rank 1",
        ),
        (
            "uneven nodes",
            "ValueError: a profile, and so --plan auto, needs as many ranks on every node, side by side, got "
            "[[0, 1], [2]]; start as many on each, or give the plan (--plan pp,cp,dp)",
        ),
        ("no room on a GPU", "MemoryError: rank 2: the disk is full"),
        ("no room to measure", "MemoryError: rank 2: the disk is full"),
        ("fails on the last", "OSError: rank 2: the disk is full"),
        ("fails everywhere", "OSError: the disk is full"),
        ("a plan fails", "ValueError: rank 0: the disk is full"),
        ("a queue fails", "RuntimeError: rank 0: the disk is full (Full)"),
        ("rank zero", "done on rank 0"),
        ("rank zero fails", "OSError: rank 0: the disk is full"),
    ],
)
def test_all_ranks_agree(case, expected):
    assert [result[case] for result in ranks.results(3)] == [expected] * 3


def test_sparse_features_that_differ_are_told():
    for result in ranks.results(3):
        assert re.fullmatch(
            r"ValueError: the graph must be the same on every rank, but features is \d+ on rank 0 and \d+ on rank 1",
            result["sparse features"],
        ), result["sparse features"]


def test_what_fails_nowhere_returns():
    assert [result["fails nowhere"] for result in ranks.results(3)] == [f"done on rank {rank}" for rank in range(3)]


def test_one_process_makes_the_pairs_that_a_store_keeps():
    (first, columns), *others = (result["pairs of a store"] for result in ranks.results(3))
    assert first == 1 and others == [(0, columns)] * 2 and len(columns) > 60


@pytest.mark.parametrize("case", BAD_PLANS)
def test_bad_plan(case):
    messages = [result[case] for result in ranks.results(2)]
    assert messages[0] == messages[1]
    assert re.search(BAD_PLANS[case][1], messages[0]), messages[0]


@pytest.mark.parametrize(
    ("gpus", "processes", "backend"),
    [(0, 1, "gloo"), (0, 4, "gloo"), (4, 4, "cpu:gloo,cuda:nccl"), (8, 4, "cpu:gloo,cuda:nccl"), (1, 4, "gloo")],
)
def test_gpus_that_processes_share_need_gloo(monkeypatch, gpus, processes, backend):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert mesh.choose_backend() == backend


def test_ranks_of_one_start_meet_whatever_earlier_ones_have_left():
    """A restart that each node counts for itself, with the last rank late."""
    store = dist.HashStore()

    def start(rank):
        time.sleep(0.2 * (rank == 2))
        return mesh.meet(store, rank, 3, 20.0)

    with ThreadPoolExecutor(3) as pool:
        first, second = (set(pool.map(start, range(3))) for _ in range(2))
    assert len(first) == len(second) == 1 and first != second
    with pytest.raises(TimeoutError, match=r"rank 1 has not met all of 3 ranks in 0\.1 s"):
        mesh.meet(store, 1, 3, 0.1)


@pytest.mark.parametrize(("last", "backend"), [("gloo", "gloo"), ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl")])
def test_a_node_with_fewer_gpus_than_processes_keeps_all_from_nccl(monkeypatch, last, backend):
    store, asked = dist.HashStore(), iter(["cpu:gloo,cuda:nccl"] * 2 + [last])
    monkeypatch.setattr(mesh, "choose_backend", lambda: next(asked))
    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(lambda rank: mesh.backend_of_all(store, rank, 3), range(3))) == {backend}


def test_a_group_of_gpus_alone_is_refused():
    """init_process_group("nccl") makes such a one: ranks could not agree whether to stop, after an epoch."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"got 'cuda:gloo'; start it with .*cpu:gloo,cuda"), mesh.process_group():
            pass
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("device", "gpus", "message"),
    [
        (
            "auto",
            1,
            "process 1 of this machine needs a GPU of its own, but there are 1; start fewer, or pass --device cu",
        ),
        ("cuda:0", 2, "2 processes cannot share cuda:0 where each can have its own; pass --device cuda"),
        ("cuda:0", 1, None),
        ("cuda", 2, None),
    ],
)
def test_processes_share_a_gpu_if_they_must(monkeypatch, device, gpus, message):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: None)  # every device is here
    config = mg.TrainConfig(device=device)
    if message is None:
        assert config.torch_device() == torch.device("cuda", gpus - 1)
    else:
        with pytest.raises(ValueError, match=message):
            config.torch_device()


def test_ranks_with_different_plans():
    for result in ranks.results(2):
        assert re.search(
            r"what ranks hold and send must be the same on every rank, but plan is Plan\(.*layers=\(1, 2\).* on rank 0 "
            r"and Plan\(.*layers=\(2, 1\).* on rank 1",
            result["different plans"],
        ), result["different plans"]
