"""Seconds of a stage, and of a step's passes through a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megagraph.planner.links import Links, Wire
from megagraph.planner.plan import Plan
from megagraph.planner.simulate import simulate
from megagraph.planner.split import Floats, StageTables
from megagraph.planner.terms import (
    Rates,
    Terms,
    attention_terms,
    dot,
    embedding_terms,
    head_terms,
    layer_terms,
    listed_terms,
)
from megagraph.planner.workload import RankWork


def stage_tables(seconds: Mapping[str, Rates], links: Links, work: RankWork) -> StageTables:
    """Seconds of one micro-batch on a first, middle and last stage of 0..L layers.

    Args:
        seconds: seconds per unit of every term, "forward" and "backward".
        links: between the ranks of a ring.
    """
    plan, config, m = work.plan, work.config, work.sequences
    layers = {
        way: [_layer_seconds(seconds, links, work, way, queries) for queries in (work.rows, work.targets)]
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


def _layer_seconds(seconds: Mapping[str, Rates], links: Links, work: RankWork, way: str, queries: int) -> float:
    """One layer on the rows of one rank, its ring included."""
    rates = seconds.get(way, {})
    # zero-bubble asks for gradients of inputs, then of weights; attention computes all of them both times
    times = 2 if work.plan.schedule == "zero_bubble" and way == "backward" else 1
    layer = layer_terms(work.sequences, work.rows, queries, work.config)
    if work.plan.cp == 1:  # launches of all of it run ahead
        attention = _attention_terms(work, queries)
        return dot(rates, layer | {name: times * value for name, value in attention.items()})
    others = dot(rates, layer)
    if work.config.convolution:  # rows of others, or their gradients, which nothing hides
        others += links.shared(work.plan, work.number_bytes * work.sequences * work.halo * work.config.dim)
    if work.by_heads:  # queries of all rows, whichever are wanted
        others += rates.get("layer.product", 0.0) * work.sequences * (work.rows - queries) * work.config.dim**2
        return others + times * _by_heads_seconds(rates, links, work)
    return others + times * _attention_seconds(rates, links, work, way, queries)


def _by_heads_seconds(rates: Rates, links: Links, work: RankWork) -> float:
    """Attention from all rows to all keys with a part of the heads, between two exchanges; both ways."""
    plan, config, m = work.plan, work.config, work.sequences
    if work.pairs:
        pairs = plan.cp * work.pairs
        terms = listed_terms(m, work.num_nodes, work.num_super, pairs, config, supers=True, ranks=plan.cp)
    else:
        terms = attention_terms(m, work.columns, work.columns, config, ring=False, ranks=plan.cp)
    there, back = links.to_all(plan, work.head_bytes), links.to_all(plan, work.query_bytes / plan.cp)
    return there + dot(rates, terms) + back


def _attention_terms(work: RankWork, queries: int) -> Terms:
    """Terms of attention on a rank that has all keys in one call, or all pairs."""
    if work.pairs:
        supers = queries > work.block
        return listed_terms(work.sequences, work.block, work.num_super, work.pairs, work.config, supers=supers)
    return attention_terms(work.sequences, queries, work.columns, work.config, ring=False)


def _attention_seconds(rates: Rates, links: Links, work: RankWork, way: str, queries: int) -> float:
    plan, config, m = work.plan, work.config, work.sequences
    if work.pairs or plan.comm == "allgather":
        return _with_messages(dot(rates, _attention_terms(work, queries)), links, work, way)
    hop, hop_of_gradients = _hops(links, work)
    local, visit = (
        dot(rates, attention_terms(m, queries, keys, config, ring=True)) for keys in (work.rows, work.block)
    )
    first = _behind(local, hop)
    if way == "forward":
        return first + (plan.cp - 2) * _behind(visit, hop) + visit
    if plan.cp == 2:
        return first + visit + hop_of_gradients.total
    # gradients follow from the second visit on, one step behind their block
    both = (plan.cp - 3) * _behind(visit, hop, hop_of_gradients)
    return first + _behind(visit, hop) + both + _behind(visit, hop_of_gradients) + hop_of_gradients.total


def _behind(work: float, *wires: Wire) -> float:
    """Messages travel behind work; ranks that wait for each other lose their latency."""
    return max(work, sum(wire.seconds for wire in wires)) + max(wire.latency for wire in wires)


def _hops(links: Links, work: RankWork) -> tuple[Wire, Wire]:
    """What a block takes on its way, and its gradients, which travel in what they are summed up in."""
    return (
        links.hop(work.plan, work.block_bytes),
        links.hop(work.plan, work.gradients_of_keys * work.block_bytes),
    )


def _with_messages(seconds: float, links: Links, work: RankWork, way: str) -> float:
    """Attention to all keys of a rank at once, with their way; a halo or a ring travels behind the work."""
    plan = work.plan
    more = 1.0 if way == "forward" else work.gradients_of_keys
    if plan.comm == "halo":
        return max(seconds, links.shared(plan, more * work.halo_bytes))
    hop, hop_of_gradients = _hops(links, work)
    if plan.comm == "allgather":  # gradients of a block go straight to its rank
        if way == "forward":
            return seconds + (plan.cp - 1) * hop.total
        return seconds + links.to_all(plan, more * work.block_bytes)
    if way == "forward":
        return max(seconds, (plan.cp - 1) * hop.total)
    behind = (plan.cp - 1) * hop.total + (plan.cp - 2) * hop_of_gradients.total
    return max(seconds, behind) + hop_of_gradients.total


def pipeline_seconds(
    plan: Plan, forward: Floats, backward: Floats, wires: Sequence[Wire], **options: Any
) -> tuple[float, Floats]:
    """All passes of a step, and the end of every rank [pp], by running the schedule on paper.

    Args:
        forward, backward: seconds of one micro-batch on every stage.
        wires, options: as of :func:`simulate`.
    """
    if plan.pp == 1:
        whole = plan.num_microbatches * float(forward[0] + backward[0])
        return whole, np.array([whole])
    timeline = simulate(plan, forward.tolist(), backward.tolist(), wires, **options)
    return timeline.seconds, np.asarray(timeline.rank_ends)


def pipeline_least(plan: Plan, forward: Floats, backward: Floats, wires: Sequence[Wire]) -> tuple[float, Floats]:
    """What ``pipeline_seconds`` gives at least, in closed form: a rank begins when the first micro-batch has come
    through the stages before it, works on all of them, and the last one goes back through those stages."""
    pp = plan.pp
    on_wires = np.array([max(0.0, wire.seconds - wire.burst) + wire.latency for wire in wires[: pp - 1]])
    before, after = (np.concatenate([[0.0], np.cumsum(way[: pp - 1] + on_wires)]) for way in (forward, backward))
    ends = before + plan.num_microbatches * (forward + backward).reshape(-1, pp).sum(axis=0)
    return float((ends + after).max()), ends


def pipeline_bound(
    plan: Plan, tables: StageTables, num_layers: int, wires: Sequence[Wire], layers: Sequence[int] = ()
) -> float:
    """What ``pipeline_seconds`` gives at least, however the layers are split, in closed form.

    A stage's seconds grow with its layers by the same for each, so that all stages together take as long in any split.
    A rank works on all micro-batches after the first one has come through the stages before it, and the last one goes
    back through them: most evenly spread, the work of the ranks falls by 1 - 1 / K from one to the next. With several
    stages a rank, these are its first ones, of a layer each at least, and all ranks together work for a known time. A
    layer is on one rank, so that the busiest has at least what it has where all are as even as can be; and a
    micro-batch passes all stages and wires, of which the slowest has the others to send before it.
    GPipe's ranks all go forward first, so that the others follow the first micro-batch in the time of the slowest stage
    each way, of which ``layers`` make the least.

    Args:
        layers: the split of least time under GPipe, if it is known.
    """
    num, seconds = plan.num_microbatches, tables.seconds
    if plan.num_stages == 1:
        passes = float(seconds[0, num_layers])
    else:  # as in any split
        passes = float(
            seconds[0, 1] + (plan.num_stages - 2) * seconds[1, 1] + seconds[2, num_layers - plan.num_stages + 1]
        )
    if plan.pp == 1:
        return num * passes
    # a link that was idle makes up for a burst, once; most wires are alike
    ways = {wire: 2 * (max(0.0, wire.seconds - wire.burst) + wire.latency) for wire in set(wires)}
    latest = sum(map(ways.__getitem__, wires))
    slowest = max(max(0.0, (num - 1) * wire.seconds - wire.burst) for wire in ways)
    if plan.schedule == "gpipe":
        both = passes / plan.num_stages  # of the slowest stage at least
        if layers:
            both = float(sum(way.max() for way in tables.stages(layers)))
        return passes + latest + max((num - 1) * both, 2 * slowest)
    most = num * tables.most_even(num_layers, plan.pp)
    if plan.stages_per_rank > 1:
        first, layer, _ = seconds[:, 1].tolist()
        before = np.cumsum([ways[wire] + (layer if i else first) for i, wire in enumerate(wires[: plan.pp - 1])])
        most = max(most, (num * passes + float(before.sum())) / plan.pp)
    else:
        most = max(most, passes / (1 - (1 - 1 / num) ** plan.pp))
    return max(most, passes + latest + slowest)
