"""How long the search takes, and how far its choice is from the best of all plans.

    python -m bench.experiments.search

GPipe's best split is exact. Of the other schedules the search runs twenty on paper, so that it may miss the best one:
here every plan with every split of the layers is run on paper, for MACHINES machines whose coefficients are drawn (seed
0) up to a factor of three around those of a CPU core, with plenty of memory and with little. Times are of the
processor, which on an idle machine are those of the clock: medians of REPEATS searches in a process that has imported
everything and remembers none of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np

from bench.provenance import write_rows
from megagraph.models.config import ModelConfig
from megagraph.planner import CostModel, NoFeasiblePlan, Workload, schedule, search
from megagraph.planner.plan import Plan
from megagraph.planner.search import HEADROOM, shapes

TIMED = ((96, 1024, 1024, 1.0), (32, 4, 64, 0.1))  # layers, processes, sequences, seconds that it may take
GAPS = ((6, 4), (6, 8), (8, 4))  # layers, processes
MACHINES, REPEATS, SPREAD = 8, 5, 3.0
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


def machine(seed: int) -> CostModel:
    """A cost model with coefficients of its own."""
    rng = np.random.default_rng(seed)

    def drawn(table: dict[str, float], factor: float = 1.0) -> dict[str, float]:
        return {name: value * factor * SPREAD ** rng.uniform(-1, 1) for name, value in table.items()}

    return CostModel(
        origin={"device": f"machine {seed}"},
        seconds={"forward": drawn(SECONDS), "backward": drawn(SECONDS, 2.5)},
        links={"node": drawn(LINK)},
        memory=MEMORY,
        stall_seconds=0.0,
        ranges={},
        held_out={},
    )


def model(layers: int) -> ModelConfig:
    return ModelConfig(
        in_features=128, num_classes=16, layers=layers, dim=128, ffn_dim=128, heads=8, bias="bucket", bias_size=8
    )


def everything(cost: CostModel, config: ModelConfig, world_size: int) -> Iterator[tuple[float, float, Plan]]:
    """Seconds, bytes and plan, of every plan with every split."""
    for shape in shapes(config, world_size, WORKLOAD, {}):
        parts = shape.dp * shape.num_microbatches
        if shape.num_stages > config.layers or WORKLOAD.batch_sequences % parts:
            continue
        for cuts in combinations(range(1, config.layers), shape.num_stages - 1):
            plan = replace(shape, layers=tuple(b - a for a, b in pairwise((0, *cuts, config.layers))))
            yield cost.step_seconds(config, plan, WORKLOAD), max(cost.memory_bytes(config, plan, WORKLOAD)), plan


def main() -> None:
    """Print, and write bench/results/cpu/search.json."""
    rows = []
    for layers, world_size, sequences, most in TIMED:
        workload = replace(WORKLOAD, batch_sequences=sequences)
        samples, walls = [], []
        for _ in range(REPEATS):
            schedule.order_of.cache_clear()
            schedule.count_in_flight.cache_clear()
            started, wall = time.process_time(), time.perf_counter()
            found = search(machine(0), model(layers), world_size, 80 * 2**30, workload=workload)
            samples.append(time.process_time() - started)
            walls.append(time.perf_counter() - wall)
        row = {"kind": "time", "layers": layers, "processes": world_size, "sequences": sequences, "unit": "s"}
        rows.append(
            row
            | {
                "candidates": len(found.candidates),
                "seconds": samples,
                "wall_seconds": walls,
                "median": float(np.median(samples)),
            }
        )
        verdict = "holds" if np.median(samples) <= most else "FAILS"
        print(
            f"L = {layers}, W = {world_size}: {np.median(samples):.3f} s ({min(samples):.3f} to {max(samples):.3f}), "
            f"{len(found.candidates)} candidates; <= {most} s {verdict}"
        )
    for layers, world_size in GAPS:
        gaps = []
        for seed in range(MACHINES):
            cost, config = machine(seed), model(layers)
            plans = list(everything(cost, config, world_size))
            lightest = min(size for _, size, _ in plans)
            for limit in (1.3 * lightest, 1e15):
                try:
                    found = search(cost, config, world_size, limit / (1 - HEADROOM), workload=WORKLOAD)
                except NoFeasiblePlan:  # only lighter splits of other schedules fit
                    gaps.append(float("inf"))
                    continue
                best = min(plan for plan in plans if plan[1] <= limit)
                gaps.append(found.best.step_seconds / best[0] - 1)
        row = {"kind": "gap", "layers": layers, "processes": world_size, "plans": len(plans), "gaps": gaps, "unit": "1"}
        rows.append(row)
        print(
            f"L = {layers}, W = {world_size}: {len(plans)} plans, gap to the best of all at most {max(gaps):.2%}, "
            f"0 in {sum(gap < 1e-9 for gap in gaps)} of {len(gaps)}"
        )
    print(write_rows("search", rows, folder="cpu"))


if __name__ == "__main__":
    main()
