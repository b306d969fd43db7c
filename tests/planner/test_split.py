"""Splits of layers over stages, against all splits there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import megagraph as mg
from megagraph.planner.split import StageTables, balance
from tests.planner.gpipe import gpipe_seconds


def all_splits(num_layers: int, num_stages: int):
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, num_layers)))


def stages(split):
    bounds = np.concatenate([[0], np.cumsum(split)]).tolist()
    return [(stage, bounds[stage], bounds[stage + 1]) for stage in range(len(split))]


@st.composite
def any_costs(draw):
    """Costs without any structure: of every stage and every run of layers."""
    num_layers = draw(st.integers(1, 10))
    num_stages = draw(st.integers(1, min(num_layers, 8)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    seconds, memory = rng.integers(0, 12, (2, num_stages, num_layers + 1, num_layers + 1)).astype(float)
    limit = draw(st.sampled_from([3.0, 6.0, 9.0, 12.0]))
    return num_layers, num_stages, seconds, memory, limit


@given(any_costs())
def test_split_layers_is_the_best_split(problem):
    num_layers, num_stages, seconds, memory, limit = problem
    best = min(
        (
            max(seconds[stage] for stage in stages(split))
            for split in all_splits(num_layers, num_stages)
            if all(memory[stage] <= limit for stage in stages(split))
        ),
        default=None,
    )
    arguments = (num_layers, num_stages, lambda *stage: seconds[stage], lambda *stage: memory[stage], limit)
    if best is None:
        with pytest.raises(mg.planner.NoFeasiblePlan, match=r"no split of \d+ layers .*, stage \d needs"):
            mg.planner.split_layers(*arguments)
        return
    split = mg.planner.split_layers(*arguments)
    assert len(split) == num_stages and sum(split) == num_layers and min(split) >= 1
    assert all(memory[stage] <= limit for stage in stages(split))
    assert max(seconds[stage] for stage in stages(split)) == best


@st.composite
def like_layers(draw):
    """Middle stages convex in their layers, any first and last stage, any memory that grows with the layers."""
    num_layers = draw(st.integers(1, 10))
    num_stages = draw(st.integers(1, min(num_layers, 8)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tables = rng.integers(0, 20, (2, 3, num_layers + 1)).astype(float)
    for table in tables:
        table[1] = np.cumsum(np.sort(rng.integers(0, 5, num_layers + 1)))
    memory = np.cumsum(rng.integers(0, 4, (num_stages, num_layers + 1)), axis=1).astype(float)
    return StageTables(*tables), memory, draw(st.sampled_from([4.0, 8.0, 16.0, 99.0])), draw(st.integers(1, 6))


@given(like_layers())
def test_balance_is_the_best_split_under_gpipe(problem):
    tables, memory, limit, num_microbatches = problem
    num_stages, num_layers = memory.shape[0], memory.shape[1] - 1

    def seconds(split):
        roles = [0 if stage == 0 else 2 if stage == num_stages - 1 else 1 for stage in range(num_stages)]
        forward, backward = (
            [table[role, count] for role, count in zip(roles, split, strict=True)]
            for table in (tables.forward, tables.backward)
        )
        return gpipe_seconds(forward, backward, num_microbatches)

    feasible = [
        split
        for split in all_splits(num_layers, num_stages)
        if all(memory[stage, count] <= limit for stage, count in enumerate(split))
    ]
    found = balance(tables, memory[:, : num_layers - num_stages + 2], limit, num_microbatches)
    if not feasible:
        assert found is None
        return
    assert found is not None
    assert found in feasible
    assert seconds(found) == min(map(seconds, feasible))


@pytest.mark.parametrize(
    ("extra", "slowest"), [(0.0, 6.0), (1.0, 7.0), (2.5, 7.0), (3.9, 7.0), (6.0, 8.0)], ids=lambda x: f"{x:g}"
)
def test_a_heavy_first_stage_gets_fewer_layers(extra, slowest):
    def cost(stage, start, stop):
        return stop - start + extra * (stage == 0)

    split = mg.planner.split_layers(24, 4, cost, lambda *stage: 1.0, 2.0)
    assert max(cost(*stage) for stage in stages(split)) == slowest
    counts = np.arange(25.0)
    tables = np.stack([counts + extra, counts, counts])
    balanced = balance(StageTables(tables, tables), np.ones((4, 22)), 2.0, 8)
    assert max(cost(*stage) for stage in stages(balanced)) == slowest
    if extra == 3.9:  # the paper's example
        assert split == balanced == (3, 7, 7, 7)
