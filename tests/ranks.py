"""Start W processes once, and run in them every case that a test of that world size asks about."""

from __future__ import annotations

import os
import tempfile
import warnings
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from tests.processes import START_METHOD


def param(world_size: int, *values: Any, id: str | None = None) -> Any:
    """Values of a test that asks for so many processes: more than three take minutes of two cores."""
    return pytest.param(*values, id=id, marks=[pytest.mark.slow] if world_size > 3 else [])


SIZES = [param(world_size, world_size) for world_size in (2, 3, 4)]


def results(world_size: int, *, only: str = "") -> list[dict[str, Any]]:
    """What every case returned, rank by rank.

    A case that fails on any rank ends all of this world size: the first test that asks fails with its error, the
    others are skipped.

    ``only``: the cases whose names begin so.
    """
    outcome = _start(world_size, only)
    if not isinstance(outcome, Exception):
        return outcome
    if (world_size, only) in _told:
        pytest.skip(f"the start of {world_size} processes failed, as {_told[world_size, only]} says")
    _told[world_size, only] = os.environ.get("PYTEST_CURRENT_TEST", "the first test that asked")
    raise outcome


_told: dict[tuple[int, str], str] = {}  # failed starts, and the tests that failed with their errors


@cache
def _start(world_size: int, only: str) -> list[dict[str, Any]] | Exception:
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(_run_cases, (world_size, folder, only), nprocs=world_size, start_method=START_METHOD)
        except Exception as error:
            return error
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _run_cases(rank: int, world_size: int, folder: str, only: str) -> None:
    from tests.attention.ring_cases import ring_cases
    from tests.checkpoint_cases import checkpoint_cases
    from tests.parallel.cases import agreement_cases, delivery_cases, layout_cases

    warnings.simplefilter("error")  # as for the tests themselves
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    timeout = timedelta(seconds=600)  # on a busy machine a rank that compiles first is minutes late
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=timeout)
    cases = ring_cases(world_size) | layout_cases(world_size) | agreement_cases(world_size, folder)
    cases |= checkpoint_cases(world_size, folder) | delivery_cases(world_size)
    outcomes = {name: case() for name, case in cases.items() if name.startswith(only)}
    torch.save(outcomes, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
