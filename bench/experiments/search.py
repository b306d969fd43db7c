"""How long the search takes, and how far its choice is from the best of all plans.

    python -m bench.experiments.search [times | gaps]

Times: of the processor, which on an idle machine are those of the clock: medians of REPEATS searches in a process that
has imported everything and remembers none of them; and beside them, of looking at all candidates that a search can
leave out, for who asks for its list.

Gaps: PROBLEMS small ones, drawn with seed 0: a machine whose coefficients lie up to a factor of ten around those of a
CPU core, on one host or on several, 1 to 8 processes, 2 to 7 layers, 1 to 16 sequences, replicated, sharded or either
of them, and memory that holds few of the plans, half of them, or all; of UNEQUAL, in a third of the problems, each
process has a speed of its own. Over hosts, stages or replicas lie on the other one first. Every plan with every split
of its layers, and for these every share of the sequences, is run on paper. The search must find the best (GAP), a plan
where there is one, and no plan may be faster than its bound.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any, Literal

import numpy as np
import tyro

from bench.provenance import write_rows
from megagraph.models.config import ModelConfig
from megagraph.planner import CostModel, NoFeasiblePlan, Workload, schedule, search, simulate
from megagraph.planner.plan import Plan
from megagraph.planner.searching import HEADROOM, KERNEL_TILE
from megagraph.planner.shapes import shapes
from megagraph.planner.split import balance

TIMED = ((96, 1024, 1024, 3.0), (512, 1024, 1024, 15.0), (96, 5040, 5040, 15.0), (32, 4, 64, 0.2))
"""Layers, processes, sequences, seconds that it may take."""
PROBLEMS, GAP = 400, 0.01
UNEQUAL = ((2, 6, 12), (3, 5, 8), (4, 4, 8))  # processes, layers, sequences, at most
REPEATS = 3
WORKLOAD = Workload(batch_sequences=16, num_nodes=1024, num_super=64, num_targets=1024)
SECONDS = {
    "layer.call": 1e-4,
    "layer.product": 5e-11,
    "layer.element": 2e-9,
    "attention.call": 5e-5,
    "attention.score": 2e-9,
    "attention.product": 6e-11,
    "attention.state": 1e-9,
    "embedding.product": 6e-11,
    "embedding.element": 1e-9,
    "head.product": 7e-11,
    "optimizer.call": 1e-4,
    "optimizer.parameter": 1e-9,
}
LINK = {"transfer.call": 5e-5, "transfer.byte": 1e-9, "all_reduce.call": 5e-5, "all_reduce.byte": 1e-9}
MEMORY = {"kept.key": 42.0, "kept.head_row": 4.0, "kept.embedding": 5.0, "kept.head": 8.0, "workspace.element": 16.0}


def machine(seed: int, spread: float = 3.0, per_node: int | None = None) -> CostModel:
    """A cost model with coefficients of its own, of a host or of several whose links are slower."""
    rng = np.random.default_rng(seed)

    def drawn(table: dict[str, float], factor: float = 1.0) -> dict[str, float]:
        return {name: value * factor * spread ** rng.uniform(-1, 1) for name, value in table.items()}

    return CostModel(
        origin={"device": f"machine {seed}"} | ({} if per_node is None else {"ranks_per_node": str(per_node)}),
        seconds={"forward": drawn(SECONDS), "backward": drawn(SECONDS, 2.5)},
        links={"node": drawn(LINK)} | ({} if per_node is None else {"across": drawn(LINK, 20)}),
        memory=MEMORY,
        stall_seconds=0.0,
        ranges={},
        held_out={},
    )


def model(layers: int) -> ModelConfig:
    return ModelConfig(
        in_features=128, num_classes=16, layers=layers, dim=128, ffn_dim=128, heads=8, bias="bucket", bias_size=8
    )


def everything(
    cost: CostModel, config: ModelConfig, workload: Workload, world_size: int, fixed: dict[str, Any]
) -> Iterator[tuple[float, float, Plan]]:
    """Seconds, bytes and plan, of every plan with every split."""
    for shape in shapes(config, world_size, workload, fixed, cost.mappings(world_size)):
        num, sequences = shape.num_microbatches, workload.batch_sequences
        if shape.num_stages > config.layers or sequences < shape.dp * num:
            continue
        if shape.cp > 1 and workload.num_nodes / shape.cp < KERNEL_TILE:
            continue
        for cuts in combinations(range(1, config.layers), shape.num_stages - 1):
            split = tuple(b - a for a, b in pairwise((0, *cuts, config.layers)))
            dealt = combinations(range(1, sequences), shape.dp - 1) if cost.slowness else ()
            shares = [tuple(b - a for a, b in pairwise((0, *ends, sequences))) for ends in dealt]
            for given in [(), *(given for given in shares if min(given) >= num)]:
                plan = replace(shape, layers=split, shares=given)
                yield cost.step_seconds(config, plan, workload), max(cost.memory_bytes(config, plan, workload)), plan


def times() -> list[dict[str, Any]]:
    """Rows of searches of many processes."""
    rows = []
    for layers, world_size, sequences, most in TIMED:
        workload = replace(WORKLOAD, batch_sequences=sequences)
        samples, walls, lists = [], [], []
        for _ in range(REPEATS):
            for remembered in (schedule.order_of, schedule.slots_of, schedule.count_in_flight, simulate._programs):
                remembered.cache_clear()
            started, wall = time.process_time(), time.perf_counter()
            found = search(machine(0), model(layers), world_size, 80 * 2**30, workload=workload)
            samples.append(time.process_time() - started)
            walls.append(time.perf_counter() - wall)
            started = time.process_time()
            candidates = len(found.candidates)
            lists.append(time.process_time() - started)
        row = {"kind": "time", "layers": layers, "processes": world_size, "sequences": sequences, "unit": "s"}
        row |= {"candidates": candidates, "seconds": samples, "wall_seconds": walls, "list_seconds": lists}
        rows.append(row | {"median": float(np.median(samples)), "most": most})
        verdict = "holds" if np.median(samples) <= most else "FAILS"
        print(
            f"L = {layers}, W = {world_size}: {np.median(samples):.3f} s ({min(samples):.3f} to {max(samples):.3f}), "
            f"{candidates} candidates in {np.median(lists):.3f} s more; <= {most} s {verdict}",
            flush=True,
        )
    return rows


def gaps() -> list[dict[str, Any]]:
    """A row of all problems."""
    rng, found_gaps, missed, broken, bounds, untold, plans_seen = random.Random(0), [], 0, 0, 0, 0, 0
    for problem in range(PROBLEMS):
        world_size, layers = rng.randint(1, 8), rng.randint(2, 7)
        per_node = rng.choice([None, 1, 2])
        sequences = rng.choice([1, 2, 4, 6, 7, 8, 12, 16])
        cost = machine(problem, spread=10.0, per_node=per_node)
        if rng.random() < 1 / 3:
            world_size, *most = rng.choice(UNEQUAL)
            layers, sequences = min(layers, most[0]), min(sequences, most[1])
            cost = replace(cost, slowness=tuple(rng.choice([1.0, 1.3, 2.0, 3.5]) for _ in range(world_size)))
        config, workload = model(layers), replace(WORKLOAD, batch_sequences=sequences)
        fixed: dict[str, Any] = rng.choice([{}, {"shard": False}, {"shard": True}])
        plans = list(everything(cost, config, workload, world_size, fixed))
        sizes = sorted(size for _, size, _ in plans)
        limit = rng.choice([sizes[len(sizes) // 20], sizes[len(sizes) // 2], sizes[-1]]) if sizes else 1e15
        limit *= rng.choice([1 - 1e-6, 1 + 1e-6])
        fits = [plan for plan in plans if plan[1] <= limit]
        plans_seen += len(plans)
        try:
            found = search(cost, config, world_size, limit / (1 - HEADROOM), workload=workload, fixed=fixed)
        except NoFeasiblePlan:
            missed += bool(fits)
            continue
        broken += found.best.peak_bytes > limit
        chosen = cost.step_seconds(config, found.best.plan, workload)
        untold += abs(found.best.step_seconds / chosen - 1) > 1e-9
        found_gaps.append(chosen / min(seconds for seconds, *_ in fits) - 1)
        for seconds, _, plan in rng.sample(plans, min(40, len(plans))):
            bounds += seconds < bound_of(cost, config, workload, plan) * (1 - 1e-9)
    row = {"kind": "gap", "problems": PROBLEMS, "plans": plans_seen, "gaps": found_gaps, "unit": "1"}
    row |= {"missed": missed, "over_the_limit": broken, "faster_than_their_bound": bounds, "not_as_said": untold}
    print(
        f"{PROBLEMS} problems, {plans_seen} plans: {len(found_gaps)} solved, gap at most {max(found_gaps):.2%}, "
        f"{sum(gap > GAP for gap in found_gaps)} above {GAP:.0%}; {missed} plans missed, {broken} above the limit, "
        f"{bounds} faster than their bound, {untold} whose seconds are not those that the search gives"
    )
    return [row]


def bound_of(cost: CostModel, config: ModelConfig, workload: Workload, plan: Plan) -> float:
    """The larger of those that the search computes, before and after it has split the layers."""
    work = cost.rank_work(config, plan, workload)
    tables, free = cost.stage_tables(work), np.zeros((plan.num_stages, config.layers - plan.num_stages + 2))
    fastest = balance(tables, free, 0.0, plan.num_microbatches)
    assert fastest is not None
    return max(cost.step_bound(work, tables, layers) for layers in ((), fastest))


def main(what: tyro.conf.Positional[Literal["times", "gaps", "both"]] = "both", /) -> None:
    """Print, and write bench/results/cpu/search-times.json and search-gaps.json."""
    for name, rows_of in (("times", times), ("gaps", gaps)):
        if what in (name, "both"):
            print(write_rows(f"search-{name}", rows_of(), folder="cpu"))


if __name__ == "__main__":
    tyro.cli(main)
