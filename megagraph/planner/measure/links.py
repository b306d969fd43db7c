"""Seconds of a message, of a hop around a ring, of an all-reduce, and of waiting for a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megagraph.attention.exchange import make_exchange
from megagraph.planner.measure.clock import average

WORK = 512  # rows and columns of the matrices that ranks multiply before a message: some ms of a core


def stall_rows(batches: Iterable[Any]) -> list[dict[str, Any]]:
    """The wait for a batch where nothing is done meanwhile; the first one starts the loader and does not count."""
    samples = []
    began = time.perf_counter()
    for _ in islice(batches, 9):
        samples.append(time.perf_counter() - began)
        began = time.perf_counter()
    return [{"kind": "stall", **average(samples[1:])}] if len(samples) > 1 else []


def communication_rows(
    device: torch.device, largest: float, budget_seconds: float, per_node: int
) -> list[dict[str, Any]]:
    """Messages from one rank to another; of all ranks, or those of a node, to the next one, as in a ring; sums of
    these; nothing for one process.

    All follow on work, as in training: its end is not the same on all ranks, and they wait for each other.

    Args:
        largest: bytes of the largest message that a plan may send; of 1 KiB to 4 MiB no size above twice that.
        per_node: ranks of a node, as many on each, side by side.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    peers = {"node": 1} if per_node > 1 else {}
    groups = {"node": per_node} if per_node > 1 else {}
    if per_node < ranks:
        peers["across"] = per_node
        groups["across"] = ranks
    nodes = [dist.new_group(range(first, min(first + per_node, ranks))) for first in range(0, ranks, per_node)]
    group_of = {"node": nodes[rank // per_node], "across": dist.group.WORLD}
    rings = {link: make_exchange(DeviceMesh.from_group(group_of[link], device.type), device) for link in groups}
    sizes = [size for size in (2**10, 2**14, 2**18, 2**20, 2**22) if size <= max(2**18, 2 * largest)]
    left = len(sizes) * (len(peers) + 2 * len(groups))
    until = time.perf_counter() + budget_seconds
    rows = []
    left_factor, right_factor = (torch.rand(WORK, WORK, dtype=torch.float32, device=device) for _ in range(2))

    def work() -> None:
        for _ in range(2):
            torch.mm(left_factor, right_factor)

    for size in sizes:
        message = torch.zeros(size // 4, dtype=torch.float32, device=device)

        def measure(fields: dict[str, Any], function: Callable[[], Any], share: float) -> None:
            nonlocal left
            seconds = _timed(work, function, device, share, (until - time.perf_counter()) / left)
            rows.append({"bytes": size, **fields, **seconds})  # noqa: B023  (called at once)
            left -= 1

        for link, peer in peers.items():

            def exchange(message: Tensor = message, peer: int = peer) -> None:
                if rank in (0, peer):  # there and back
                    first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
                    first(message, peer if rank == 0 else 0)
                    second(message, peer if rank == 0 else 0)

            measure({"kind": "transfer", "link": link}, exchange, 0.5)
        for link in groups:

            def shift(message: Tensor = message, link: str = link) -> None:
                rings[link].shift([message], [torch.empty_like(message)])()

            measure({"kind": "hop", "link": link}, shift, 1.0)
        for link, count in groups.items():

            def reduce(message: Tensor = message, link: str = link) -> None:
                dist.all_reduce(message, group=group_of[link])

            measure({"kind": "all_reduce", "ranks": count, "link": link}, reduce, 1.0)
    for group in nodes:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return rows


def _timed(
    work: Callable[[], None], function: Callable[[], Any], device: torch.device, share: float, budget_seconds: float
) -> dict[str, Any]:
    """The slowest rank's time on average over ten calls, over fewer where the time is up: at least two."""
    samples: list[float] = []
    agreed = [budget_seconds]
    dist.broadcast_object_list(agreed)  # clocks differ a little, and all must stop at the same call
    for call in range(12):
        dist.barrier()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, time.perf_counter() - began)
        samples.append(max(everyone))
        if call >= 2 and sum(samples) > agreed[0]:
            break
    return average([share * seconds for seconds in samples[min(2, len(samples) - 2) :]])
