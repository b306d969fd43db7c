"""``--plan auto``: measure the machine for a configuration, fit the cost model, and find the plan to train under."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megagraph.attention.bias import BorderedData
from megagraph.config import TrainConfig
from megagraph.data.batch import Batch
from megagraph.data.build import Builder
from megagraph.data.full import FullBatches
from megagraph.data.graph import Graph
from megagraph.evaluate import make_loader
from megagraph.flags import in_words, processes_here
from megagraph.parallel.mesh import all_gather, on_every_rank, on_rank_zero, rank, world_size
from megagraph.planner.fitting import fit
from megagraph.planner.profile import FIT_ERROR, predicts, profile
from megagraph.planner.rows import Row
from megagraph.planner.searching import Candidate, search
from megagraph.planner.workload import Workload
from megagraph.progress import log

CACHE = Path.home() / ".cache" / "megagraph"
_FIXED = {name: name for name in ("schedule", "across", "checkpoint", "comm", "shard")} | {
    "num_microbatches": "microbatches"
}


def measure(
    config: TrainConfig,
    graph: Graph,
    builder: Builder,
    train_nodes: np.ndarray,
    device: torch.device,
    *,
    seconds: float = 60.0,
    cache: Path | None = CACHE,
    kept_only: bool = False,
) -> list[dict[str, Any]]:
    """Rows of this machine for what a configuration trains, the same on every rank. Collective.

    Args:
        kept_only: measure nothing; no rows where no profile is kept.

    Raises:
        ValueError: the configuration has a learned embedding, which the cost model does not know.
    """
    if config.embedding == "learned":
        raise ValueError("expected --embedding features: the cost model does not know the table of a learned embedding")
    loader = make_loader(config, builder, train_nodes, shuffle=True)
    batch = next(iter(loader.epoch(0)))
    workload = Workload(
        batch_sequences=config.batch_sequences,
        num_nodes=batch.layout.num_nodes,
        num_super=batch.layout.num_super,
        num_targets=batch.labels.shape[1],
        feature_rows=len(batch.features) / batch.batch_size,
        filled=_filled(batch),
        dtype=config.dtype,
        model=config.model,
        **_listed(builder, batch),
    )
    model = config.model_config(
        in_features=builder.in_features,
        num_classes=graph.num_classes,
        multi_label=graph.multi_label,
        bias_size=builder.structure.size,
    )
    stream = (batch for epoch in range(9) for batch in loader.epoch(epoch))  # an epoch may be one batch
    # what is measured is drawn, and the caller's random state stays as it is
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return on_every_rank(
            lambda: profile(
                model,
                workload,
                device=device,
                batches=stream,
                workers=config.workers,
                budget_seconds=seconds,
                cache=cache,
                kept_only=kept_only,
            )
        )


def _filled(batch: Batch) -> float:
    """Part of the slots of regular nodes that have one, to two digits, as it is a part of what a profile is kept by."""
    empty = batch.key_padding_mask[:, : batch.layout.num_nodes].double().mean().item()
    return max(0.01, round(1.0 - empty, 2))


def _listed(builder: Builder, batch: Batch) -> dict[str, Any]:
    """Fields of ``Workload`` for pairs that are listed: their number, and halo rows; none for other batches."""
    if not isinstance(builder, FullBatches):
        return {}
    assert isinstance(batch.structure, BorderedData)
    slots = builder.slots(batch.target_nodes.numpy())
    ranks = (2 << i for i in range(max(3, (world_size() - 1).bit_length())))
    halo = tuple(max(builder.halo(many, slots)) for many in ranks if many <= len(slots))
    return {"pairs": len(batch.structure.index), "halo": halo}


def choose(config: TrainConfig, rows: Sequence[Row], device: torch.device) -> Candidate:
    """The plan of least step time for a configuration, and what is predicted of it. Collective.

    Fields of the layout that are not at their default, and pp, cp and dp where given, are kept.

    Raises:
        NoFeasiblePlan: nothing fits into the memory.
        ValueError: the rows are so noisy that a fit does not predict those that it has not seen.
    """
    default = TrainConfig()
    fixed = {name: getattr(config, name) for name in ("pp", "cp", "dp") if getattr(config, name) is not None}
    for name, field in _FIXED.items():
        if getattr(config, field) != getattr(default, field):
            fixed[name] = getattr(config, field)
    given = math.inf if config.memory_gib is None else config.memory_gib * 2**30
    # the program may be larger on one rank
    limit = min(all_gather(memory_bytes(device, given)))

    def find() -> Candidate:
        cost = fit(rows)
        if not (predicts(cost) or config.any_fit):
            off = cost.held_out["time_mape"]
            raise ValueError(
                f"expected a profile that predicts its own rows to {FIT_ERROR:.0%}, got {off:.0%}: others "
                "may have used this machine; start again when it is quiet, give the plan (--plan pp,cp,dp), or pass "
                "--any-fit to search with it"
            )
        model, workload = cost.profiled()
        return search(cost, model, world_size(), limit, workload=workload, fixed=fixed).best

    best = on_rank_zero(find)
    plan = best.plan
    if rank() == 0:
        log.info(f"plan: {plan}; predicted {best.step_seconds:.3g} s a step and {in_words(best.peak_bytes)} a process")
        for what in best.extrapolated:
            log.info(f"  extrapolated: {what}")
    return best


def memory_bytes(device: torch.device, given: float = math.inf) -> float:
    """What the tensors of a process may take, of ``given`` bytes and of what there is: of a GPU what the process has
    and its part of what nobody has, of the machine or its control group its part, without the program itself.
    Collective.

    Raises:
        ValueError: the program takes all of it.
    """
    gpu = on_every_rank(lambda: _number_of(device))
    sharing = all_gather(gpu).count(gpu)
    return on_every_rank(lambda: _own_bytes(device, given, sharing))


def _number_of(device: torch.device) -> str:
    """Which GPU it is; its index depends on CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _own_bytes(device: torch.device, given: float, sharing: int) -> float:
    """``memory_bytes`` of a process, so many of which share its GPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return min(given, free / sharing + torch.cuda.memory_reserved(device))
    page = os.sysconf("SC_PAGE_SIZE")
    there = min(float(page * os.sysconf("SC_PHYS_PAGES")), _group_limit())
    program = page * int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    given = min(given, there / processes_here())
    if given <= program:
        raise ValueError(
            f"a process must have more than the {in_words(program)} that it takes already, got {in_words(given)}; "
            "raise --memory-gib, or start fewer processes on this machine"
        )
    return given - program


def _group_limit(groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes that the control groups of this process may take."""
    limits = [math.inf]
    for line in groups.read_text().splitlines() if groups.exists() else ():
        number, controllers, path = line.split(":", 2)
        place, name = (mounted, "memory.max") if number == "0" else (mounted / "memory", "memory.limit_in_bytes")
        if number != "0" and "memory" not in controllers.split(","):
            continue
        own = place / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(place) and (folder / name).is_file():
                with suppress(OSError, ValueError):  # "max"
                    limits.append(float(int((folder / name).read_text())))
    return min(limits)
