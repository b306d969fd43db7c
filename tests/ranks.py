"""Start W processes once, and run in them every case that a test of that world size asks about."""

from __future__ import annotations

import tempfile
import warnings
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def results(world_size: int) -> list[dict[str, Any]]:
    """What every case returned, rank by rank. A case that fails on any rank fails all of this world size."""
    outcome = _start(world_size)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


@cache
def _start(world_size: int) -> list[dict[str, Any]] | Exception:
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_run_cases, args=(world_size, folder), nprocs=world_size)
        except Exception as error:
            return error
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _run_cases(rank: int, world_size: int, folder: str) -> None:
    from tests.attention.ring_cases import ring_cases
    from tests.parallel.cases import agreement_cases, layout_cases

    warnings.simplefilter("error")  # as for the tests themselves
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=timeout)
    cases = ring_cases(world_size) | layout_cases(world_size) | agreement_cases(world_size, folder)
    torch.save({name: case() for name, case in cases.items()}, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
