"""Every plan there is for a machine and a batch, but for how its layers are split (paper Alg. 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from megagraph.models.config import ModelConfig
from megagraph.planner.plan import Across, Plan
from megagraph.planner.split import NoFeasiblePlan
from megagraph.planner.workload import Workload

MAX_MICROBATCHES = 64
STAGES_PER_RANK = (2, 3, 4)  # under the interleaved schedule


def shapes_with(
    fixed: Mapping[str, Any], config: ModelConfig, world_size: int, given: Workload, mappings: Sequence[Across]
) -> list[Plan]:
    """Those of ``shapes`` whose fields are as fixed; NoFeasiblePlan says which leave none."""

    def found(fixed: Mapping[str, Any]) -> list[Plan]:
        plans = shapes(config, world_size, given, fixed, mappings)
        return [plan for plan in plans if all(getattr(plan, name) == value for name, value in fixed.items())]

    if plans := found(fixed):
        return plans
    alone = {name: value for name, value in fixed.items() if not found({name: value})} or fixed
    said = ", ".join(f"{name} = {value}" for name, value in alone.items())
    raise NoFeasiblePlan(
        f"no plan of {world_size} processes has {said}; change the number of processes, or what is fixed"
    )


def shapes(
    config: ModelConfig,
    world_size: int,
    given: Workload,
    fixed: Mapping[str, Any],
    mappings: Sequence[Across] = ("pp",),
) -> Iterator[Plan]:
    """Every plan but for its layers, laid out over nodes in these ways; replicated, and right after it sharded."""
    for pp in divisors(world_size):
        for cp in divisors(world_size // pp):
            dp = world_size // pp // cp
            if any(fixed.get(name, value) != value for name, value in (("pp", pp), ("cp", cp), ("dp", dp))):
                continue
            possible = {"ring": True, "allgather": True, "halo": given.pairs > 0, "ulysses": config.heads % cp == 0}
            ways = tuple(way for way, can in possible.items() if can) if cp > 1 else ("ring",)
            laid_out = mappings if min(pp, dp) > 1 else ("pp",)
            shards = (bool(fixed["shard"]),) if "shard" in fixed else (False, True) if cp * dp > 1 else (False,)
            local_batch = max(given.batch_sequences // dp, 1)
            for comm, across, checkpoint in product(ways, laid_out, (False, True)):
                base: dict[str, Any] = dict(pp=pp, cp=cp, dp=dp, comm=comm, across=across, checkpoint=checkpoint)
                for schedule in _schedules(pp, config.layers, local_batch, fixed.get("schedule")):
                    # zero-bubble over several replicas needs shards, and computes no layer again
                    split = schedule.get("schedule") == "zero_bubble"
                    if not (split and checkpoint):
                        yield from (
                            Plan(**base, **schedule, shard=shard)
                            for shard in shards
                            if shard or not split or cp * dp == 1
                        )


def _schedules(pp: int, num_layers: int, local_batch: int, asked: str | None) -> Iterator[dict[str, Any]]:
    """How micro-batches go through a pipeline, as fields of a plan."""
    yield dict(num_microbatches=1)
    if pp > num_layers:
        return
    for num in _microbatch_counts(local_batch):
        yield dict(num_microbatches=num)
        if pp == 1:
            continue
        if num >= pp:
            yield dict(num_microbatches=num, schedule="1f1b")
        if num % pp:
            continue
        for per_rank in STAGES_PER_RANK:
            if per_rank * pp <= num_layers:
                yield dict(num_microbatches=num, schedule="interleaved", stages_per_rank=per_rank)
        # on paper it runs like 1F1B with attention's backward pass twice: only for who asks for it
        if asked == "zero_bubble":
            yield dict(num_microbatches=num, schedule="zero_bubble")


def _microbatch_counts(local_batch: int) -> list[int]:
    """Counts above 1: what divides a replica's sequences, and as many as have 1, 2, 4, ... each, but for the last."""
    by_size = (-(-local_batch // 2**power) for power in range(local_batch.bit_length()))
    return sorted(num for num in {*divisors(local_batch), *by_size} if 1 < num <= MAX_MICROBATCHES)


def divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]
