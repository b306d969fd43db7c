"""From a graph to its batches: all that is computed once per graph."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from megagraph.data.build import Builder
from megagraph.data.cluster import ClusterBatches
from megagraph.data.coarsen import Coarsening, coarsen, merge, nested_partition, partition, quotient
from megagraph.data.ego import EgoBatches
from megagraph.data.full import PIECES, FullBatches, cut, row_costs
from megagraph.data.graph import Graph
from megagraph.data.options import BatchOptions
from megagraph.data.pairs import PairBuckets
from megagraph.data.sample import Pagerank
from megagraph.data.smooth import propagated, with_degrees
from megagraph.data.structure import BiasChannels, DistanceBuckets
from megagraph.progress import log

_LARGE = 50_000  # nodes, of which it takes long enough to be told about
_CLUSTER_NODES = 300  # and fewer in short sequences: some eight make one
_ORDERED_NODES = 64  # of a cluster of a full batch, whose order they are: neighbours stand close in memory
_COARSE_EDGES = 32  # of a super node of cluster batches


def prepare(
    graph: Graph,
    options: BatchOptions,
    *,
    known: np.ndarray | None = None,
    cluster_size: int | None = None,
) -> Builder:
    """Super nodes, neighbours or clusters, and the tables of the bias.

    Args:
        known: nodes whose labels are input, with ``options.label_input``.
        cluster_size: nodes per cluster; default 300, or an eighth of N' where that is less.
    """
    if options.degree_input:
        graph = with_degrees(graph)
    builder = _builder(propagated(graph, options.propagate), options, cluster_size)
    if known is not None and isinstance(builder, FullBatches):
        builder.show_labels(known, options.label_input)
    if options.shuffle_structure and builder.relabel is None:
        builder.relabel = _other_nodes([np.arange(graph.num_nodes)])
    return builder


def _other_nodes(groups: Sequence[np.ndarray]) -> np.ndarray:
    """[V]: a random permutation of all nodes, the same each time, that takes a group as a whole to one of its size."""
    rng, sizes = np.random.default_rng(0), np.array([*map(len, groups)])
    others = np.empty(sizes.sum(), np.int64)
    for size in np.unique(sizes):
        same = np.flatnonzero(sizes == size)
        for group, other in zip(same.tolist(), rng.permutation(same).tolist(), strict=True):
            others[np.sort(groups[group])] = rng.permutation(np.sort(groups[other]))
    return others


def _say(graph: Graph, what: str) -> None:
    level = logging.INFO if graph.num_nodes >= _LARGE else logging.DEBUG
    log.log(level, f"preparing {graph.name}: {what}")


def _builder(graph: Graph, options: BatchOptions, cluster_size: int | None) -> Builder:
    if options.batching == "ego":
        num_clusters = max(1, round(graph.num_nodes * options.super_ratio))
        _say(graph, f"{num_clusters:,} clusters")
        coarsening = coarsen(graph, partition(graph, num_clusters))
        structure = _structure(graph, coarsening, options)
        _say(graph, "PageRank around every node")
        pagerank = Pagerank(graph, epsilon=options.epsilon, max_candidates=options.num_candidates)
        return EgoBatches(graph, coarsening, structure, pagerank, options)
    if cluster_size is None and options.batching == "full":
        cluster_size = _ORDERED_NODES
    elif cluster_size is None:
        cluster_size = min(_CLUSTER_NODES, max(1, options.sequence_nodes // 8))
    if cluster_size < 1:
        raise ValueError(f"expected cluster_size >= 1, got {cluster_size}")
    num_clusters = -(-graph.num_nodes // cluster_size)
    _say(graph, f"{num_clusters:,} clusters")
    if options.batching == "full":
        halves = min(1 << (num_clusters - 1).bit_length(), graph.num_nodes)
        costs = row_costs(np.diff(graph.indptr) + 1, options.num_super)
        clusters = nested_partition(graph, halves, costs)
    else:
        clusters = partition(graph, num_clusters)
    edges = quotient(graph, clusters)
    supers, between = merge(graph, clusters, edges, options.num_super - options.global_tokens)
    coarsening = coarsen(graph, supers, edges=between, strongest=_COARSE_EDGES)
    if options.batching == "full":
        order = np.argsort(clusters, kind="stable")
        ends = np.flatnonzero(np.diff(clusters[order])) + 1
        most = max(options.partitions, len(ends) + 1) if options.partitions > 1 else 1
        number = min(PIECES * options.partitions, most, graph.num_nodes)  # who predicts may have fewer nodes
        if options.shuffle_structure:  # pieces change places, or few of the pairs would be left in a step
            pieces = tuple(graph.num_nodes * piece // number for piece in range(number + 1))
            others = _other_nodes(np.split(order, pieces[1:-1]))
        else:
            pieces, others = cut(costs[order], ends, number), None
        _say(graph, "the pairs that attend")
        pairs = PairBuckets(graph, coarsening, order if others is None else others[order], options)
        full = FullBatches(graph, coarsening, pairs, options, order, ends, pieces)
        full.relabel = others
        return full
    structure = _structure(graph, coarsening, options)
    return ClusterBatches(graph, coarsening, structure, clusters, edges, options)


def _structure(graph: Graph, coarsening: Coarsening, options: BatchOptions) -> BiasChannels | DistanceBuckets:
    _say(graph, f"{options.bias} bias")
    if options.bias == "bucket":
        return DistanceBuckets(
            graph, coarsening, max_distance=options.max_distance, global_tokens=options.global_tokens
        )
    return BiasChannels(
        graph,
        coarsening,
        num_powers=options.channels,
        global_tokens=options.global_tokens,
        scope=options.power_scope,
        most_bytes=options.power_gib * 2**30,
        own_super=options.batching == "cluster",
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[options.channel_dtype],
    )
