"""A profile: rows about this machine for a model and a workload, measured once and kept."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megagraph.flags import short
from megagraph.models.config import ModelConfig
from megagraph.parallel.mesh import on_every_rank, ranks_of_nodes
from megagraph.planner.cost import CostModel
from megagraph.planner.fitting import fit
from megagraph.planner.measure.computing import compute_rows, ring_rows
from megagraph.planner.measure.design import design, largest, of_every_width
from megagraph.planner.measure.links import communication_rows, stall_rows
from megagraph.planner.measure.memory import memory_rows, observe_process
from megagraph.planner.plan import Plan
from megagraph.planner.rows import Row, load_rows, save_rows
from megagraph.planner.terms import stage_parameters
from megagraph.planner.workload import RankWork, Workload
from megagraph.provenance import provenance

COMMUNICATION = 0.3  # of the time, for messages
LEAST = 0.5  # of the time, for layers, whatever the memory of kernels that compile has taken
EXPIRES = 30 * 86400  # seconds, after which a machine is measured again
FIT_ERROR = 0.5  # of held-out seconds, the mean; a quiet machine gives 0.03 to 0.1
_ONCE = ("transfer", "hop", "all_reduce", "memory")  # kinds of rows that are the same on every rank


def profile(
    config: ModelConfig,
    workload: Workload,
    *,
    device: torch.device,
    batches: Iterable[Any] = (),
    workers: int = 0,
    budget_seconds: float = 60.0,
    cache: Path | None = None,
    kept_only: bool = False,
) -> list[dict[str, Any]]:
    """Measure this machine for a model and a workload; about ``budget_seconds``, less where it is cached, and more
    where kernels have to be compiled first.

    On several processes all measure at once, and every one returns the rows of all; transfers and all-reduces are
    measured between them. One process measures no communication.

    Args:
        batches: what the loader gives; how long each of the first eight takes where nothing else is done.
        workers: processes of the loader.
        cache: folder of profiles by device, versions, model, workload and workers; ``None``: none is kept. Those that
            are older than ``EXPIRES`` or do not predict their own rows (``FIT_ERROR``) are not used again.
        kept_only: measure nothing; no rows where there is no profile.

    Raises:
        ValueError: nodes have unequal numbers of processes.
    """
    nodes = ranks_of_nodes()
    per_node = len(nodes[0])
    if nodes != [list(range(first, first + per_node)) for first in range(0, len(nodes) * per_node, per_node)]:
        if kept_only:
            return []
        raise ValueError(
            f"a profile, and so --plan auto, needs as many ranks on every node, side by side, got {short(nodes)}; "
            "start as many on each, or give the plan (--plan pp,cp,dp)"
        )
    origin = provenance() | {
        "unit": "s",
        "device_type": device.type,
        "workload": _as_read(workload),
        "dtype": workload.dtype,
        "workers": workers,
        "impl": "triton" if device.type == "cuda" else "blocked",
        "ranks_per_node": per_node,
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "model": _as_read(config),
    }
    path = None if cache is None else cache / f"{_fingerprint(origin)}.json"
    found = [None if path is None else _kept(path)]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    if found[0] is not None:
        return found[0]
    if kept_only:
        return []
    # what one rank fails at, such as its memory, all raise: the others would take its error for its rows
    measured = on_every_rank(lambda: _measure(config, workload, device, batches, budget_seconds, per_node))
    rows = [row | origin for row in measured]
    if dist.is_initialized():
        rows = [row | {"rank": dist.get_rank()} for row in rows]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, rows)
        rows = everyone[0] + [row for part in everyone[1:] for row in part if row["kind"] not in _ONCE]
    if path is not None and (not dist.is_initialized() or dist.get_rank() == 0) and predicts(fit(rows)):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # another process may write it, too; it is measured again next time
            save_rows(path, rows)
    return rows


def _measure(
    config: ModelConfig,
    workload: Workload,
    device: torch.device,
    batches: Iterable[Any],
    budget_seconds: float,
    per_node: int,
) -> list[dict[str, Any]]:
    """The rows of this process."""
    until = time.perf_counter() + budget_seconds
    points = design(config, workload, device)
    rows = [
        observe_process(largest(points, config), device),  # first, as others leave freed memory behind
        *communication_rows(device, _largest_message(config, workload), COMMUNICATION * budget_seconds, per_node),
        *stall_rows(batches),
        *memory_rows(of_every_width(points), device),
    ]
    left = max(until - time.perf_counter(), LEAST * budget_seconds)
    rows += compute_rows(points, device, 0.7 * left)
    return rows + ring_rows(config, workload, device, 0.3 * left)


def _largest_message(config: ModelConfig, workload: Workload) -> float:
    """Bytes of the largest message: hidden states of a whole batch, or all gradients."""
    whole = RankWork.of(config, Plan(), workload)
    gradients = whole.sum_bytes * float(stage_parameters(config, [config.layers], whole.codes)[0])
    return max(whole.hidden_bytes, gradients)


def _as_read(given: ModelConfig | Workload) -> dict[str, Any]:
    """Fields of a model or workload as they come from the cache, lists for tuples."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(given)))
    return values


def _kept(path: Path) -> list[dict[str, Any]] | None:
    """The rows of an earlier profile; ``None`` where there are none that are whole and not too old."""
    with suppress(OSError, ValueError):
        if time.time() - path.stat().st_mtime < EXPIRES:
            return load_rows(path)
    return None


def predicts(cost: CostModel) -> bool:
    """Whether a fit predicts held-out rows to within ``FIT_ERROR``."""
    return cost.held_out.get("time_mape", 0.0) <= FIT_ERROR


def _fingerprint(origin: Row) -> str:
    """Fingerprint of all that a profile depends on; date and versions of Python and NumPy are not among it."""
    depends = {name: value for name, value in origin.items() if name not in ("date", "python", "numpy")}
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]
