"""Every plan there is for a machine and a batch, but for how its layers are split (paper Alg. 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from megagraph.models.config import ModelConfig
from megagraph.planner.plan import Across, Plan
from megagraph.planner.workload import Workload

MAX_MICROBATCHES = 64


def shapes(
    config: ModelConfig,
    world_size: int,
    given: Workload,
    fixed: Mapping[str, Any],
    mappings: Sequence[Across] = ("pp",),
) -> Iterator[Plan]:
    """Every plan but for its layers, laid out over nodes in these ways."""
    shard = bool(fixed.get("shard", False))
    for pp in divisors(world_size):
        for cp in divisors(world_size // pp):
            dp = world_size // pp // cp
            if any(fixed.get(name, value) != value for name, value in (("pp", pp), ("cp", cp), ("dp", dp))):
                continue
            possible = {"ring": True, "allgather": True, "halo": given.pairs > 0, "ulysses": config.heads % cp == 0}
            ways = tuple(way for way, can in possible.items() if can) if cp > 1 else ("ring",)
            laid_out = mappings if min(pp, dp) > 1 else ("pp",)
            for comm, across, checkpoint in product(ways, laid_out, (False, True)):
                base: dict[str, Any] = dict(
                    pp=pp, cp=cp, dp=dp, comm=comm, across=across, checkpoint=checkpoint, shard=shard
                )
                asked = fixed.get("schedule")
                yield from _schedules(base, config.layers, max(given.batch_sequences // dp, 1), asked)


def _schedules(base: dict[str, Any], num_layers: int, local_batch: int, asked: str | None) -> Iterator[Plan]:
    pp = base["pp"]
    yield Plan(**base, num_microbatches=1)
    if pp > num_layers:
        return
    for num in divisors(local_batch):
        if not 1 < num <= MAX_MICROBATCHES:
            continue
        yield Plan(**base, num_microbatches=num)
        if pp == 1:
            continue
        if num >= pp:
            yield Plan(**base, num_microbatches=num, schedule="1f1b")
        if num % pp == 0 and 2 * pp <= num_layers:
            yield Plan(**base, num_microbatches=num, schedule="interleaved", stages_per_rank=2)
        # on paper it runs like 1F1B with attention's backward pass twice: only for who asks for it
        possible = not base["checkpoint"] and (base["shard"] or base["cp"] * base["dp"] == 1)
        if asked == "zero_bubble" and num % pp == 0 and possible:
            yield Plan(**base, num_microbatches=num, schedule="zero_bubble")


def divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]
