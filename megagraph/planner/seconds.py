"""Seconds of a stage, of a message, and of a step's passes through a pipeline."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megagraph.planner.plan import Plan
from megagraph.planner.schedule import simulate
from megagraph.planner.split import Floats, StageTables, gpipe_seconds, gpipe_tail
from megagraph.planner.terms import (
    Rates,
    all_reduce_terms,
    attention_terms,
    dot,
    embedding_terms,
    head_terms,
    layer_terms,
    listed_terms,
)
from megagraph.planner.workload import RankWork


def stage_tables(seconds: Mapping[str, Rates], link: Rates, work: RankWork) -> StageTables:
    """Seconds of one micro-batch on a first, middle and last stage of 0..L layers.

    Args:
        seconds: seconds per unit of every term, "forward" and "backward".
        link: seconds per message and byte between the ranks of a ring.
    """
    plan, config, m = work.plan, work.config, work.sequences
    layers = {
        way: [_layer_seconds(seconds, link, work, way, queries) for queries in (work.rows, work.targets)]
        for way in ("forward", "backward")
    }
    if plan.checkpoint:  # every layer is computed again before its backward pass
        layers["backward"] = [sum(both) for both in zip(layers["backward"], layers["forward"], strict=True)]
    embedding = embedding_terms(m, work.rows, config.dim, config.in_features, m * work.feature_rows)
    head = head_terms(m, work.targets, config.dim, config.num_classes)
    counts = np.arange(config.layers + 1, dtype=float)
    tables = []
    for way, (layer, last_layer) in layers.items():
        rates = seconds.get(way, {})
        table = np.tile(layer * counts, (3, 1))
        table[0] += dot(rates, embedding)
        for role in (0, 2) if plan.num_stages == 1 else (2,):
            table[role] += dot(rates, head) + last_layer - layer
        tables.append(np.maximum(table, 0.0))
    return StageTables(*tables)


def _layer_seconds(seconds: Mapping[str, Rates], link: Rates, work: RankWork, way: str, queries: int) -> float:
    """One layer on the rows of one rank, its ring included."""
    rates = seconds.get(way, {})
    # zero-bubble asks for gradients of inputs, then of weights; attention computes all of them both times
    times = 2 if work.plan.schedule == "zero_bubble" and way == "backward" else 1
    others = dot(rates, layer_terms(work.sequences, work.rows, queries, work.config))
    return others + times * _attention_seconds(rates, link, work, way, queries)


def _attention_seconds(rates: Rates, link: Rates, work: RankWork, way: str, queries: int) -> float:
    plan, config, m = work.plan, work.config, work.sequences
    hop = transfer_seconds(link, work.block_bytes)  # gradients travel in fp32, too
    if work.pairs:
        terms = listed_terms(m, work.block, work.num_super, work.pairs, config, supers=queries > work.block)
        return _listed_seconds(dot(rates, terms), hop, link, work, way)
    if plan.cp == 1 or plan.comm == "allgather":
        seconds = dot(rates, attention_terms(m, queries, work.columns, config, ring=False))
        if plan.cp > 1:
            seconds += (plan.cp - 1) * hop * (1 if way == "forward" else 2)
        return seconds
    local, visit = (
        dot(rates, attention_terms(m, queries, keys, config, ring=True)) for keys in (work.rows, work.block)
    )
    if way == "forward":
        return local + (plan.cp - 1) * max(visit, hop)
    return local + (plan.cp - 1) * max(visit, 2 * hop) + hop


def _listed_seconds(seconds: float, hop: float, link: Rates, work: RankWork, way: str) -> float:
    """Attention along listed pairs, with the way of keys and values: a halo or a ring travels behind the work."""
    hops = (work.plan.cp - 1) * hop
    if work.plan.cp == 1:
        return seconds
    if work.plan.comm == "halo":
        return max(seconds, transfer_seconds(link, work.halo_bytes))
    if work.plan.comm == "allgather":
        return seconds + hops * (1 if way == "forward" else 2)
    return max(seconds, hops) if way == "forward" else max(seconds, 2 * hops) + hop


def transfer_seconds(link: Rates, size: float) -> float:
    """A message of ``size`` bytes."""
    return link.get("transfer.call", 0.0) + link.get("transfer.byte", 0.0) * size


def pipeline_seconds(
    plan: Plan, forward: Floats, backward: Floats, transfer: float, *, closed_form: bool = False
) -> tuple[float, float, Floats]:
    """All passes of a step: the work of the slowest rank, the whole, and the end of every rank [pp].

    GPipe exactly in closed form, others by running the schedule. ``closed_form`` estimates the others, too: 1F1B as
    GPipe, which it equals where stages are even, and interleaved stages with the bubble shared among a rank's stages.

    Args:
        forward, backward: seconds of one micro-batch on every stage.
        transfer: seconds from a stage to the next, and back.
    """
    num, last = plan.num_microbatches, len(forward) - 1
    both = forward + backward
    compute = float(num * both.reshape(-1, plan.pp).sum(axis=0).max())
    if not closed_form and plan.schedule != "gpipe":
        timeline = simulate(plan, forward.tolist(), backward.tolist(), transfer)
        return compute, timeline.seconds, np.asarray(timeline.rank_ends)
    # a rank's stages share its time; between two micro-batches it needs all of them
    bubble = gpipe_seconds(forward, backward, num) - num * float(both.max())
    pipeline = compute + bubble / plan.stages_per_rank + 2 * last * transfer
    # stage i is done when the last micro-batch has come back to it
    behind = gpipe_tail(backward[: plan.pp], num)
    return compute, pipeline, pipeline - (behind[0] - behind) - np.arange(plan.pp) * transfer


def all_reduce_ends(link: Rates, ends: Floats, parameters: Floats, ranks: int) -> Floats:
    """When the gradients of every rank's ``parameters``, fp32, are summed, which begins at its own of ``ends``."""
    calls, per_byte = (link.get(name, 0.0) * count for name, count in all_reduce_terms(1.0, ranks).items())
    return ends + calls + per_byte * 4 * parameters
