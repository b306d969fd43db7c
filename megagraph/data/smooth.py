"""What a node's features are given beside: its degree, and features of its surroundings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse as sp

from megagraph.data.coarsen import normalized_adjacency
from megagraph.data.graph import Graph

MOST_BYTES = 1 << 35


def with_degrees(graph: Graph) -> Graph:
    """The graph with features [V, d_in + 1], of the kind that it has: the last one is log(1 + degree), of mean 0, as
    large as others that are not 0.

    Attention takes a mean over neighbours, which does not say how many they are.
    """
    logs, features = np.log1p(np.diff(graph.indptr)), graph.features
    values = features.ravel() if isinstance(features, np.ndarray) else features.data
    size = np.sqrt(np.einsum("i,i->", values, values, dtype=np.float64) / max(np.count_nonzero(values), 1)) or 1.0
    column = (logs - logs.mean()) * (size / max(logs.std(), np.finfo(np.float32).tiny))
    most = np.finfo(features.dtype).max  # of half precision less than a hub may have
    column = column.clip(-most, most).astype(features.dtype)[:, None]
    if isinstance(features, np.ndarray):
        return replace(graph, features=np.concatenate([features, column], axis=1))
    return replace(graph, features=sp.hstack([features, sp.csr_array(column)], format="csr"))


def propagated(graph: Graph, steps: int) -> Graph:
    """The graph with features float32 [V, (1 + steps) * d_in]: x, A~ x, ..., A~^steps x (SIGN, Frasca et al. 2020).

    x has rows of norm 1, and every block is scaled so that the norms of its rows have the root mean square of those
    that the graph came with: a projection then sees no power before another.

    Raises:
        ValueError: they would take more than 32 GiB, or are not finite.
    """
    if steps == 0 or graph.in_features == 0:
        return graph
    num_bytes = 4 * graph.num_nodes * graph.in_features * (1 + steps)
    if num_bytes > MOST_BYTES:
        raise ValueError(
            f"expected propagated features of at most {MOST_BYTES / 2**30:.0f} GiB, got {num_bytes / 2**30:.1f} GiB "
            f"for --propagate {steps}; take fewer steps"
        )
    adjacency = normalized_adjacency(graph.adjacency)
    features = np.empty((graph.num_nodes, 1 + steps, graph.in_features), np.float32)
    own = np.empty((graph.num_nodes, graph.in_features), np.float32)
    graph.read_features(np.arange(graph.num_nodes), own)
    _, exponents = np.frexp(np.maximum(own.max(axis=1), -own.min(axis=1)))
    np.ldexp(own, -exponents[:, None], out=own)  # powers of two, which round nothing: squares stay in float32
    norms = np.sqrt(np.einsum("ij,ij->i", own, own))
    size = _root_mean_square(np.ldexp(norms.astype(np.float64), exponents))
    power: np.ndarray | sp.csr_array = own / np.maximum(norms, np.finfo(np.float32).tiny)[:, None]
    for step in range(1 + steps):
        power = power if step == 0 else adjacency @ power
        norm = _root_mean_square(np.sqrt(np.einsum("ij,ij->i", power, power)))
        with np.errstate(over="ignore"):
            np.multiply(power, size / norm if norm else 0.0, out=features[:, step])
    if not np.isfinite(features).all():
        raise ValueError(
            f"expected features whose norms are finite in float32, to propagate them (--propagate {steps}), got some "
            f"of {np.ldexp(norms.astype(np.float64), exponents).max():g}; scale the features"
        )
    return replace(graph, features=features.reshape(graph.num_nodes, -1))


def _root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x, dtype=np.float64).mean()))
