"""Bytes that a rank takes: parameters, what waits for the backward pass, and what there is once."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import NamedTuple

import numpy as np

from megagraph.attention.bias import aligned_columns
from megagraph.models.config import ModelConfig
from megagraph.planner.schedule import AHEAD, in_flight
from megagraph.planner.split import Floats
from megagraph.planner.terms import (
    Rates,
    dot,
    embedding_kept_terms,
    head_kept_terms,
    kept_terms,
    stage_parameters,
    workspace_terms,
)
from megagraph.planner.workload import RankWork


class Kept(NamedTuple):
    """Bytes that a micro-batch leaves for the backward pass, of a layer, the last one, and both ends of a model."""

    layer: float
    last_layer: float
    embedding: float
    head: float


def stage_bytes(rates: Rates, work: RankWork, counts: Floats) -> dict[str, Floats]:
    """Bytes of every stage, by what they are for, without what a rank holds once.

    Args:
        counts: layers of every stage; [stages, C], for C loads of each.

    Returns:
        [stages, C] or [stages, 1] each: "parameters" and their moments, "activations" and gradients at their peak,
        "boundary" for what is sent and received, on the first stage the raw features; "allocator" for what the process
        keeps of freed memory.
    """
    parameters = stage_parameters(work.config, counts, work.codes)
    parts = _tensor_bytes(rates, work, counts, parameters, kept_bytes(rates, work))
    allocator = (_process_factor(rates) - 1) * reduce(add, parts)
    return dict(zip(("parameters", "activations", "boundary", "allocator"), (*parts, allocator), strict=True))


def stage_totals(rates: Rates, work: RankWork, counts: Floats, parameters: Floats, kept: Kept) -> Floats:
    """The sum of ``stage_bytes`` [stages, C], where the parameters of these loads and what a layer keeps are known."""
    return _process_factor(rates) * reduce(add, _tensor_bytes(rates, work, counts, parameters, kept))


def _tensor_bytes(
    rates: Rates, work: RankWork, counts: Floats, parameters: Floats, kept: Kept
) -> tuple[Floats, Floats, Floats]:
    """Bytes of parameters, activations and boundaries, as of :func:`stage_bytes`."""
    plan, replicas = work.plan, work.plan.cp * work.plan.dp
    parameters = work.sum_bytes / (replicas if plan.shard else 1) * parameters
    gradients = parameters * (1 if plan.shard or replicas == 1 else 2)  # DDP holds buckets, too
    activations, boundary = _with_boundaries(_of_stages(kept, work, counts), work)
    flight = np.array(in_flight(plan), float).T.reshape(-1, 1)
    if plan.schedule == "gpipe" and (
        plan.pp > 1 or plan.num_microbatches == 1
    ):  # the most activations come before the first gradient
        activations = np.maximum(flight * activations, (flight - 1) * activations + gradients)
    else:
        activations = flight * activations + gradients
    if plan.schedule == "zero_bubble":
        activations = activations + _late_gradients(work, counts)
    features = feature_bytes(work.feature_rows, work.config.in_features, work.codes)
    boundary[0] += _batches(rates, work) * work.batch_sequences * features
    return 3 * parameters, activations, boundary


def kept_bytes(rates: Rates, work: RankWork) -> Kept:
    """What the sequences of a micro-batch leave for backward on one of cp ranks, whatever the stages."""
    plan, config, m, rows, columns = work.plan, work.config, work.sequences, work.rows, work.columns
    mixed = work.dtype == "bf16"
    layer, last_layer = (
        dot(rates, kept_terms(m, rows, queries, columns, config, mixed=mixed)) for queries in (rows, work.targets)
    )
    if plan.cp > 1 and plan.comm == "allgather":  # k and v as all ranks send them, in the place of a rank's own
        gathered = 2 * work.number_bytes * m * (plan.cp - 1) * rows * config.dim
        layer, last_layer = layer + gathered, last_layer + gathered
    elif plan.comm == "halo":
        layer, last_layer = (kept + work.halo_bytes for kept in (layer, last_layer))
    elif work.by_heads:  # q, k, v and results of all rows, of a rank's heads, and results of its rows
        own, wanted = work.query_bytes, work.query_bytes * work.targets / rows
        whole = own * work.all_rows / rows / plan.cp
        layer += 4 * whole - 3 * own
        last_layer += 4 * whole - 2 * own - 2 * wanted  # without a copy of what q is made of
    embedding = dot(rates, embedding_kept_terms(m, rows, config, mixed=mixed))
    head = dot(rates, head_kept_terms(m, rows, work.targets, config, mixed=mixed))
    return Kept(layer, last_layer, embedding, head)


def _of_stages(kept: Kept, work: RankWork, counts: Floats) -> Floats:
    """What every stage keeps of a micro-batch; ``counts`` and result [stages, C]."""
    checkpoint = work.plan.checkpoint
    stages = counts * (work.hidden_bytes if checkpoint else kept.layer)
    stages[0] += kept.embedding
    stages[-1] += kept.head + (0.0 if checkpoint else kept.last_layer - kept.layer)
    return stages


def _late_gradients(work: RankWork, counts: Floats) -> Floats:
    """Gradients of results that wait until zero-bubble makes those of weights of them; [stages, C].

    Of a rank's last stage, and of a micro-batch more on every next rank. The first stage of all makes both at once.
    """
    config, pp = work.config, work.plan.pp
    of_rows = (3 + config.convolution) * config.dim  # keys, values and a norm
    layer, last_layer = (
        work.number_bytes * work.sequences * (of_rows * work.rows + (5 * config.dim + config.ffn_dim) * queries)
        for queries in (work.rows, work.targets)
    )
    late = counts * layer
    late[-1] += last_layer - layer
    late[:-pp] = 0.0
    late[-pp:] *= np.arange(1, pp + 1).reshape(-1, 1)
    late[0] = 0.0
    return late


def _with_boundaries(kept: Floats, work: RankWork) -> tuple[Floats, Floats]:
    """What every stage keeps of a micro-batch in flight, and what it holds of all; [stages, C] and [stages, 1].

    torch has a buffer for each hidden state and gradient that a stage receives, one of which is the input of its first
    layer, and keeps its results until their backward pass. Schedules that do not wait for what they send hold all of it
    until the end of a step: results, and gradients in the place of what was kept for them.
    """
    hidden, num = work.hidden_bytes, work.plan.num_microbatches
    before, after = (np.ones((len(kept), 1)) for _ in range(2))
    before[0] = after[-1] = 0.0
    boundary = num * hidden * (before + after)
    if work.plan.schedule in AHEAD:
        more, boundary = -2 * hidden * before, 2 * boundary
    else:
        more = hidden * (after - before)
    return np.maximum(kept + more, 0.0, out=kept), boundary


def shared_bytes(rates: Rates, work: RankWork, kept: Kept | None = None) -> float:
    """What a rank holds once, however many stages, layers and micro-batches: the batch's data, workspace, ring buffers,
    a layer that is computed again; ``kept`` as above."""
    plan, config = work.plan, work.config
    rows, pairs = (work.all_rows, plan.cp * work.pairs) if work.by_heads else (work.rows, work.pairs)
    if work.pairs:
        data = listed_bytes(rows, work.num_super, pairs, config)
    else:
        data = dense_bytes(rows, work.columns, config, work.dtype)
    total = _batches(rates, work) * work.batch_sequences * data + dot(
        rates, workspace_terms(work.sequences, work.rows, work.targets, config)
    )
    if plan.checkpoint:
        total += (kept or kept_bytes(rates, work)).layer
    if plan.cp > 1 and plan.comm == "allgather":
        total += plan.cp * work.gradients_of_keys * work.block_bytes  # the gradients of k and v of all nodes
    elif plan.comm == "halo":
        total += work.gradients_of_keys * work.halo_bytes
    elif work.by_heads:  # a message of q, k and v to all ranks, and of all
        total += 2 * plan.cp * work.head_bytes
    elif plan.cp > 1:  # two visiting blocks each way, accumulator
        total += 2 * (1 + work.gradients_of_keys) * work.block_bytes + work.hidden_bytes
    return total * _process_factor(rates)


def feature_bytes(rows: float, in_features: int, codes: int) -> float:
    """Raw features, fp32, and int64 degrees where these have codes."""
    return rows * (4 * in_features + (8 if codes else 0))


def dense_bytes(rows: float, columns: float, config: ModelConfig, dtype: str) -> float:
    """Data of a sequence with a bucket, or its channels, for every pair, in rows as memory has them."""
    pair = 1 if config.bias == "bucket" else (2 if dtype == "bf16" else 4) * config.bias_size
    return rows * aligned_columns(int(columns)) * pair


def listed_bytes(rows: float, num_super: float, pairs: float, config: ModelConfig) -> float:
    """Data of a sequence whose pairs are listed: by row and by key, with a bucket, and buckets of super nodes; the same
    lists with a weight for a convolution."""
    neighbours = 16 * (pairs + rows) if config.convolution else 0
    return 13 * pairs + 2 * rows * num_super + 16 * rows + neighbours


def _process_factor(rates: Rates) -> float:
    """Bytes that a process takes for every byte of its tensors; 1 where no row says so."""
    return rates.get("process.byte", 1.0)


def _batches(rates: Rates, work: RankWork) -> float:
    """Batches that a rank's device holds at once; a full batch is the only one."""
    return 1.0 if work.pairs else rates.get("batches", 1.0)
