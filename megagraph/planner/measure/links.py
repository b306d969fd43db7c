"""Seconds of a message, of an all-reduce, and of waiting for a batch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megagraph.planner.measure.clock import median


def stall_rows(batches: Iterable[Any]) -> list[dict[str, Any]]:
    """The wait for a batch; the first one starts the loader and does not count."""
    samples = []
    began = time.perf_counter()
    for _ in islice(batches, 9):
        samples.append(time.perf_counter() - began)
        began = time.perf_counter()
    return [{"kind": "stall", **median(samples[1:])}] if len(samples) > 1 else []


def communication_rows(device: torch.device) -> list[dict[str, Any]]:
    """Messages between neighbours and all-reduces of all ranks, 1 KiB to 4 MiB; nothing for one process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    peers = {"node": 1} if per_node > 1 else {}
    if per_node < ranks:
        peers["across"] = per_node
    rows = []
    for size in (2**10, 2**14, 2**18, 2**20, 2**22):
        message = torch.zeros(size // 4, device=device)
        for link, peer in peers.items():

            def exchange(message: Tensor = message, peer: int = peer) -> None:
                if rank in (0, peer):  # there and back
                    first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
                    first(message, peer if rank == 0 else 0)
                    second(message, peer if rank == 0 else 0)

            rows.append({"kind": "transfer", "bytes": size, "link": link, **_timed(exchange, device, 0.5)})
        link = "across" if per_node < ranks else "node"
        reduced = _timed(lambda message=message: dist.all_reduce(message), device, 1.0)  # type: ignore[misc]
        rows.append({"kind": "all_reduce", "bytes": size, "ranks": ranks, "link": link, **reduced})
    return rows


def _timed(function: Callable[[], Any], device: torch.device, share: float) -> dict[str, Any]:
    """Median of the slowest rank's time over ten calls."""
    samples = []
    for _ in range(12):
        dist.barrier()
        began = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        samples.append(share * (time.perf_counter() - began))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, samples[2:])
    return median(np.max(everyone, axis=0).tolist())
