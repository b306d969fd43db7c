"""The search against every plan and every split there is, and what it refuses."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import megagraph as mg
from bench.experiments.search import bound_of
from megagraph.flags import in_words
from megagraph.planner import plots
from megagraph.planner.searching import HEADROOM
from megagraph.planner.shapes import MAX_MICROBATCHES, shapes
from megagraph.planner.split import lightest_split
from tests.planner import synthetic
from tests.planner.test_split import all_splits

CONFIG = mg.ModelConfig(
    in_features=32, num_classes=5, layers=6, dim=64, ffn_dim=64, heads=8, bias="bucket", bias_size=8
)
PLENTY = 1e15


@pytest.fixture(scope="module")
def cost():
    return mg.planner.fit(synthetic.rows())


def every_shape(world_size, sequences, mappings):
    """All that a plan may be; micro-batches divide a replica's sequences, or leave 1, 2, 4, ... each."""
    sizes = range(1, world_size + 1)
    schedules = [("gpipe", 1), ("1f1b", 1), *(("interleaved", stages) for stages in range(2, CONFIG.layers + 1))]
    for pp, cp, dp in (degrees for degrees in product(sizes, repeat=3) if np.prod(degrees) == world_size):
        own = sequences // dp
        counts = [k for k in range(1, own + 1) if own % k == 0 or k in {math.ceil(own / 2**i) for i in range(9)}]
        ways = ("ring", "allgather", "ulysses") if cp > 1 else ("ring",)
        for num, (schedule, stages), comm in product(counts, schedules, ways):
            if pp * stages > CONFIG.layers or (comm == "ulysses" and CONFIG.heads % cp):
                continue
            for across, checkpoint, shard in product(mappings, (False, True), {False, cp * dp > 1}):
                base = dict(pp=pp, cp=cp, dp=dp, comm=comm, across=across, checkpoint=checkpoint, shard=shard)
                with suppress(ValueError):  # no such plan
                    yield mg.Plan(**base, schedule=schedule, stages_per_rank=stages, num_microbatches=num)


def everything(cost, world_size, mappings=("pp",)):
    """(seconds, bytes, plan) of every plan with every split."""
    for shape in every_shape(world_size, cost.workload.batch_sequences, mappings):
        for split in all_splits(CONFIG.layers, shape.num_stages):
            plan = replace(shape, layers=split)
            yield cost.step_seconds(CONFIG, plan), max(cost.memory_bytes(CONFIG, plan)), plan


@pytest.mark.parametrize("sequences", [64, 7])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_search_looks_at_all_that_a_plan_may_be(cost, world_size, sequences):
    given, mappings = replace(cost.workload, batch_sequences=sequences), ("pp", "dp")
    found = list(shapes(CONFIG, world_size, given, {}, mappings))
    possible = {x for x in found if x.num_stages <= CONFIG.layers and x.dp * x.num_microbatches <= sequences}
    assert possible == set(every_shape(world_size, sequences, mappings)) and len(set(found)) == len(found)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_best_plan_is_the_best_of_all(cost, world_size):
    plans = list(everything(cost, world_size))
    gpipe = [plan for plan in plans if plan[2].schedule == "gpipe"]
    lightest = min(size for _, size, _ in gpipe)
    for limit in (1.01 * lightest, 1.5 * lightest, 3 * lightest, PLENTY):
        found = mg.planner.search(cost, CONFIG, world_size, limit / (1 - HEADROOM))
        fits = [plan for plan in plans if plan[1] <= limit]
        assert found.best.step_seconds == pytest.approx(min(fits)[0], rel=1e-9)
        assert found.best.peak_bytes <= limit
        assert found.best.step_seconds == pytest.approx(cost.step_seconds(CONFIG, found.best.plan), rel=1e-12)
        assert found.best.peak_bytes == pytest.approx(max(cost.memory_bytes(CONFIG, found.best.plan)), rel=1e-12)


@pytest.mark.parametrize("sequences", [29, 97, 106])
def test_a_batch_with_few_divisors_has_micro_batches(cost, sequences):
    """Next to the best of every number of them, the last one with fewer sequences than the others."""
    few = replace(cost, workload=replace(cost.workload, batch_sequences=sequences))
    plans = [
        mg.Plan(pp=2, layers=split, num_microbatches=num)
        for num in range(1, min(sequences, MAX_MICROBATCHES) + 1)
        for split in all_splits(CONFIG.layers, 2)
    ]
    found = mg.planner.search(few, CONFIG, 2, PLENTY, fixed={"pp": 2, "schedule": "gpipe"}).best
    assert found.step_seconds <= 1.01 * min(few.step_seconds(CONFIG, plan) for plan in plans)


@pytest.mark.parametrize("slower", [1.0, 1000.0])
def test_stages_or_replicas_lie_on_other_nodes(cost, slower):
    """Two nodes of two ranks, whose link is slower by so much than those inside."""
    across = {name: slower * rate for name, rate in cost.links["node"].items()}
    origin = cost.origin | {"ranks_per_node": "2"}
    far = replace(cost, origin=origin, links=cost.links | {"across": across})
    plans = list(everything(far, 4, ("pp", "dp")))
    assert mg.planner.search(far, CONFIG, 4, PLENTY).best.step_seconds == pytest.approx(min(plans)[0], rel=1e-9)
    # hidden states of all micro-batches cross, or gradients of half of the parameters
    both = [plan for plan in plans if plan[2].pp == plan[2].dp == 2]
    found = mg.planner.search(far, CONFIG, 4, PLENTY, fixed={"pp": 2, "dp": 2}).best
    assert found.step_seconds == pytest.approx(min(both)[0], rel=1e-9)
    assert found.plan.across == ("pp" if slower == 1.0 else "dp")


@pytest.mark.parametrize("slowness", [(1.0, 2.0), (1.0, 1.0, 3.0), (1.3, 1.0, 2.0, 3.5), (2.0, 2.0, 1.0, 1.0)])
def test_ranks_of_unequal_speed_get_the_best_of_all_shares_and_splits(cost, slowness):
    few = replace(cost.workload, batch_sequences=7)
    unequal = replace(cost, slowness=slowness, workload=few)
    plans = []
    for _, _, plan in everything(replace(cost, workload=few), len(slowness), ("pp", "dp")):
        plans.append(plan)
        shares = all_splits(few.batch_sequences, plan.dp)
        plans += [replace(plan, shares=given) for given in shares if min(given) >= plan.num_microbatches]
    plans = [(unequal.step_seconds(CONFIG, plan), max(unequal.memory_bytes(CONFIG, plan)), plan) for plan in plans]
    even = max(size for _, size, plan in plans if plan.pp == plan.cp == 1 and not (plan.shares or plan.checkpoint))
    for limit in (PLENTY, even * (1 + 1e-6)):
        found = mg.planner.search(unequal, CONFIG, len(slowness), limit / (1 - HEADROOM)).best
        fits = [seconds for seconds, size, _ in plans if size <= limit]
        assert found.step_seconds == pytest.approx(min(fits), rel=1e-9)
        assert found.step_seconds == pytest.approx(unequal.step_seconds(CONFIG, found.plan), rel=1e-12)
    alike = mg.planner.search(replace(cost, workload=few), CONFIG, len(slowness), PLENTY)
    assert not any(candidate.plan.shares for candidate in alike.candidates)


def test_a_replica_may_have_all_that_the_others_leave(cost):
    """7 of 9 sequences in two micro-batches, where there is room for them and not for 8, else 6."""
    unequal = replace(cost, slowness=(4.0, 1.0), workload=replace(cost.workload, batch_sequences=9))
    plan = mg.Plan(dp=2, layers=(6,), num_microbatches=2, shares=(2, 7))
    fixed = {"dp": 2, "num_microbatches": 2, "checkpoint": False, "shard": False}
    for room, shares in ((1 + 1e-6, (2, 7)), (1 - 1e-6, (3, 6))):
        limit = max(unequal.memory_bytes(CONFIG, plan)) * room
        found = mg.planner.search(unequal, CONFIG, 2, limit / (1 - HEADROOM), fixed=fixed)
        assert found.best.plan.shares == shares


@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_interleaved_stages_share_the_room_of_their_rank(cost, num_microbatches):
    """The best of the splits that fit, whatever the limit: the fastest, the lightest, or one between them."""
    shape = mg.Plan(pp=2, schedule="interleaved", stages_per_rank=2, num_microbatches=num_microbatches)
    plans = [replace(shape, layers=split) for split in all_splits(CONFIG.layers, 4)]
    known = [(cost.step_seconds(CONFIG, plan), max(cost.memory_bytes(CONFIG, plan)), plan.layers) for plan in plans]
    fixed = {"pp": 2, "stages_per_rank": 2, "num_microbatches": num_microbatches, "checkpoint": False}
    for limit in sorted({size * (1 + 1e-6) for _, size, _ in known}):
        seconds, *_ = min(plan for plan in known if plan[1] <= limit)
        found = mg.planner.search(cost, CONFIG, 2, limit / (1 - HEADROOM), fixed=fixed).best
        assert found.step_seconds == pytest.approx(seconds, rel=1e-9) and found.peak_bytes <= limit


def test_a_step_is_that_of_the_slowest_replica(cost):
    """By its own sequences and speed; the bytes are those of the one that has most."""
    given = replace(cost, workload=replace(cost.workload, batch_sequences=7), slowness=(1.0, 3.0))

    def alone(sequences):
        workload = replace(given.workload, batch_sequences=sequences)
        return cost.explain(CONFIG, mg.Plan(), workload)["slowest rank computes"]

    terms = given.explain(CONFIG, mg.Plan(dp=2, shares=(5, 2)))
    assert terms["slowest rank computes"] == pytest.approx(max(alone(5), 3 * alone(2)), rel=1e-12)
    ten = replace(given.workload, batch_sequences=10)
    assert given.memory_bytes(CONFIG, mg.Plan(dp=2, shares=(5, 2))) == given.memory_bytes(CONFIG, mg.Plan(dp=2), ten)
    # of 7 sequences dealt evenly, one has 4, and one of three 3
    eight, nine = (replace(given.workload, batch_sequences=number) for number in (8, 9))
    for dp, filled in ((2, eight), (3, nine)):
        assert cost.step_seconds(CONFIG, mg.Plan(dp=dp), given.workload) == pytest.approx(
            cost.step_seconds(CONFIG, mg.Plan(dp=dp), filled), rel=1e-12
        )


def test_every_candidate_is_there_and_says_why_it_is_not(cost):
    found = mg.planner.search(cost, CONFIG, 8, PLENTY)
    assert {(c.plan.pp, c.plan.cp, c.plan.dp) for c in found.candidates} == {
        (pp, cp, 8 // pp // cp) for pp in (1, 2, 4, 8) for cp in (1, 2, 4, 8) if pp * cp <= 8
    }
    assert {c.pruned for c in found.candidates} == {None, "layers"}
    assert {c.plan.schedule for c in found.candidates} == {"gpipe", "1f1b", "interleaved"}
    assert {(c.plan.pp, c.plan.stages_per_rank) for c in found.candidates if c.plan.schedule == "interleaved"} == {
        (2, 2),
        (2, 3),
    }
    assert all(c.plan.shard in (False, c.plan.cp * c.plan.dp > 1) for c in found.candidates)
    assert {c.plan.shard for c in found.candidates if c.plan.pp == 4 and c.plan.schedule == "gpipe"} == {False, True}
    small = mg.planner.Workload(batch_sequences=2, num_nodes=60, num_super=4)
    reasons = {c.pruned for c in mg.planner.search(cost, CONFIG, 8, PLENTY, workload=small).candidates}
    assert reasons == {None, "layers", "batch", "tile"}
    some = mg.planner.search(cost, CONFIG, 4, found.pareto[-1].peak_bytes * 3)
    assert "memory" in {c.pruned for c in some.candidates}


def test_bounds_are_those_of_the_plan(cost):
    """Which the search shares between plans that differ in their memory only."""
    found = mg.planner.search(cost, CONFIG, 8, PLENTY)
    bounded = [c for c in found.candidates if not (c.pruned or c.exact or c.lightest) and c.plan.schedule != "gpipe"]
    assert len({(c.plan.schedule, c.plan.stages_per_rank, c.plan.shard) for c in bounded}) == 6
    for c in bounded:
        work = cost.rank_work(CONFIG, c.plan)
        assert c.step_seconds == pytest.approx(cost.step_bound(work, cost.stage_tables(work)), rel=1e-12)


def test_shards_where_nothing_else_fits(cost):
    lightest = {
        shard: min(size for _, size, plan in everything(cost, 2) if plan.shard == shard) for shard in (False, True)
    }
    assert lightest[True] < lightest[False]
    found = mg.planner.search(cost, CONFIG, 2, (lightest[False] - 1) / (1 - HEADROOM))
    assert found.best.plan.shard


def test_pareto_front(cost):
    found = mg.planner.search(cost, CONFIG, 4, PLENTY)
    assert found.pareto[0].step_seconds == found.best.step_seconds
    for faster, slower in zip(found.pareto, found.pareto[1:], strict=False):
        assert faster.step_seconds < slower.step_seconds and faster.peak_bytes > slower.peak_bytes
    beaten = [c for c in found.candidates if c.pruned is None and c.plan.schedule == "gpipe" and c not in found.pareto]
    for c in beaten:
        assert any(p.step_seconds <= c.step_seconds * (1 + 1e-8) and p.peak_bytes <= c.peak_bytes for p in found.pareto)


def test_memory_without_a_limit_is_plenty(cost):
    free, plenty = (mg.planner.search(cost, CONFIG, 4, limit) for limit in (math.inf, PLENTY))
    assert free.candidates == plenty.candidates and free.pareto == plenty.pareto


def test_no_point_of_the_figure_beats_the_front_but_bounds_which_are_pale(cost, tmp_path, monkeypatch):
    figure, (axis,) = plots._figure(1)
    monkeypatch.setattr(plots, "_figure", lambda columns: (figure, [axis]))
    found = mg.planner.search(cost, CONFIG, 4, PLENTY)
    plots.pareto(found, tmp_path / "pareto.png")
    pale, told = ([line for line in axis.lines[:-1] if (line.get_alpha() == 1) == told] for told in (False, True))
    front = list(zip(*axis.lines[-1].get_data(), strict=True))
    for x, y in (point for line in told for point in zip(*line.get_data(), strict=True)):
        assert any(seconds <= x * (1 + 1e-8) and gib <= y for seconds, gib in front)
    drawn = sum(len(line.get_xdata()) for line in (*pale, *told))
    assert drawn == sum(candidate.pruned is None for candidate in found.candidates)
    assert sum(len(line.get_xdata()) for line in pale) > 0 and "pale: at least" in axis.get_xlabel()


def test_partly_fixed_plans(cost):
    found = mg.planner.search(cost, CONFIG, 4, PLENTY, fixed={"pp": 2, "schedule": "1f1b", "checkpoint": True})
    assert all(c.plan.pp == 2 and c.plan.schedule == "1f1b" and c.plan.checkpoint for c in found.candidates)


def test_lightest_split():
    rng = np.random.default_rng(0)
    for _ in range(50):
        num_stages, num_layers = 4, 9
        memory = np.cumsum(rng.integers(1, 5, (num_stages, num_layers + 1)), axis=1).astype(float)
        splits = [max(memory[i, c] for i, c in enumerate(split)) for split in all_splits(num_layers, num_stages)]
        split = lightest_split(memory[:, : num_layers - num_stages + 2])
        assert sum(split) == num_layers and min(split) >= 1
        assert max(memory[i, c] for i, c in enumerate(split)) == min(splits)


def test_zero_bubble_is_searched_where_it_is_asked_for(cost):
    found = mg.planner.search(cost, CONFIG, 4, PLENTY, fixed={"schedule": "zero_bubble", "shard": True})
    assert found.best.plan.schedule == "zero_bubble" and not found.best.plan.checkpoint
    found = mg.planner.search(cost, CONFIG, 4, PLENTY, fixed={"schedule": "zero_bubble"})
    assert {(c.plan.pp, c.plan.shard) for c in found.candidates} == {(2, True), (4, False)}
    assert "zero_bubble" not in {c.plan.schedule for c in mg.planner.search(cost, CONFIG, 4, PLENTY).candidates}


def test_a_part_of_the_memory_stays_free(cost):
    """8 % of the limit is for what the model does not know: 0.92 of it holds a plan."""
    lightest = min(size for _, size, _ in everything(cost, 1))
    found = mg.planner.search(cost, CONFIG, 1, lightest / 0.9199)
    assert found.best.peak_bytes == pytest.approx(lightest)
    with pytest.raises(mg.planner.NoFeasiblePlan, match=rf"8% headroom: .*, needs {in_words(lightest)} on its"):
        mg.planner.search(cost, CONFIG, 1, lightest / 0.9201)


def test_interleaved_stages_may_be_of_one_layer_each(cost):
    found = shapes(replace(CONFIG, layers=4), 2, cost.workload, {})
    assert any(plan.schedule == "interleaved" and plan.pp == 2 for plan in found)
    assert not any(plan.schedule == "interleaved" for plan in shapes(replace(CONFIG, layers=3), 2, cost.workload, {}))


def test_a_pipeline_has_two_to_four_stages_a_rank_and_as_few_micro_batches_as_ranks(cost):
    found = list(shapes(replace(CONFIG, layers=8), 2, cost.workload, {}))
    assert {plan.stages_per_rank for plan in found if plan.schedule == "interleaved"} == {2, 3, 4}
    assert any(plan.schedule == "1f1b" and plan.num_microbatches == 2 for plan in found)


def test_a_profile_names_model_and_workload(cost):
    whole = replace(cost, model=CONFIG)
    assert whole.profiled() == (CONFIG, cost.workload)
    for name in ("model", "workload"):
        with pytest.raises(ValueError, match="the rows of the cost model name no model"):
            replace(whole, **{name: None}).profiled()


@pytest.mark.parametrize("slowness", [(), (1.0, 1.0, 0.5, 4.0)])
def test_no_plan_is_faster_than_its_bound(cost, slowness):
    given = replace(cost, slowness=slowness)
    closest = [bound_of(given, CONFIG, given.workload, plan) / seconds for seconds, _, plan in everything(given, 4)]
    assert max(closest) <= 1 + 1e-9 and (slowness or max(closest) > 1 - 1e-9)
