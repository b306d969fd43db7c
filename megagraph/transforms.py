"""Structural biases for PyG: a transform that adds their data to a graph, and what makes a batch of it."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from scipy.sparse.csgraph import dijkstra
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from megagraph.attention.fields import MASKED_BUCKET, MAX_CHANNELS
from megagraph.data.coarsen import normalized_adjacency


class StructuralBias(BaseTransform):
    """Adds what a bias of all pairs of nodes is made of, for small graphs that PyG's loaders batch.

    Edges count in both directions, loops and weights do not. The pairs of a graph stand one after the other, so that a
    loader joins those of several graphs; :func:`to_dense_pairs` makes ``[B, N, N]`` of them.

    Args:
        hops: ``data.hop_buckets``, uint8 [N * N]: the distance of two nodes, or ``hops + 1`` where they are further
            apart or not connected; for ``BucketBias`` with ``hops + 2`` buckets. 0: none.
        powers: ``data.power_channels``, float32 [N * N, powers]: A~, A~^2, ... of A~ = D^-1/2 (A + I) D^-1/2, for
            ``ProjectedBias`` (ANS-GT). 0: none.
        max_degree: ``data.degrees``, int64 [N], at most this, for an embedding of degrees (Graphormer). 0: none.

    Raises:
        ValueError: a number is out of range, or all are 0; or a graph is no ``Data`` with ``edge_index``.

    Example:
        >>> from torch_geometric.data import Batch
        >>> import megagraph as mg
        >>> path = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
        >>> batch = Batch.from_data_list([mg.transforms.StructuralBias(hops=5)(path)])
        >>> mg.transforms.to_dense_pairs(batch.hop_buckets, batch.batch)
        tensor([[[0, 1, 2],
                 [1, 0, 1],
                 [2, 1, 0]]], dtype=torch.uint8)
    """

    def __init__(self, hops: int = 5, powers: int = 0, max_degree: int = 0) -> None:
        for name, value, most in (
            ("hops", hops, MASKED_BUCKET - 2),
            ("powers", powers, MAX_CHANNELS),
            ("max_degree", max_degree, 1 << 31),
        ):
            if not 0 <= value <= most:
                raise ValueError(f"{name} must be 0 to {most}, got {value}")
        if not (hops or powers or max_degree):
            raise ValueError("expected hops, powers or max_degree, all are 0")
        self.hops, self.powers, self.max_degree = hops, powers, max_degree

    def forward(self, data: Data) -> Data:
        """The graph with what was asked for among its attributes; PyG calls it where the transform is called."""
        if not isinstance(data, Data) or data.edge_index is None:
            raise ValueError(f"expected a torch_geometric.data.Data with edge_index, got {data!r}")
        n, ends = data.num_nodes, data.edge_index.cpu().numpy()
        assert n is not None
        ones = np.ones(ends.shape[1], np.float32)
        adjacency = sp.coo_array((ones, (ends[0], ends[1])), shape=(n, n)).tocsr()
        adjacency = ((adjacency + adjacency.T) > 0).astype(np.float32)
        adjacency.setdiag(0)
        adjacency.eliminate_zeros()
        degrees = np.asarray(adjacency.sum(axis=1)).astype(np.int64)
        if self.hops:
            distances = dijkstra(adjacency, directed=False, unweighted=True, limit=self.hops) if n else np.zeros(0)
            buckets = np.minimum(distances, self.hops + 1).astype(np.uint8)
            data.hop_buckets = torch.from_numpy(buckets.reshape(-1))
        if self.powers:
            step = normalized_adjacency(adjacency)
            channels = [step.toarray()]
            while len(channels) < self.powers:
                channels.append(step @ channels[-1])
            data.power_channels = torch.from_numpy(np.stack(channels, axis=-1).reshape(n * n, -1))
        if self.max_degree:
            data.degrees = torch.from_numpy(degrees.clip(max=self.max_degree))
        return data


def to_dense_pairs(pairs: Tensor, batch: Tensor, max_num_nodes: int | None = None) -> Tensor:
    """What ``torch_geometric.utils.to_dense_batch`` is for nodes, for pairs of nodes.

    Args:
        pairs: [P] or [P, C], of every graph's N_b * N_b pairs row by row, one graph after the other.
        batch: int64 [V], the graph of every node, ascending.
        max_num_nodes: N; default the largest graph's nodes.

    Returns:
        [B, N, N] or [B, C, N, N]; where there is no pair 255, "must not attend", of uint8, and else 0.

    Raises:
        ValueError: there are other pairs than those of the graphs, or a graph is larger than ``max_num_nodes``.
    """
    counts = torch.bincount(batch)
    largest = int(counts.max()) if len(counts) else 0
    size = largest if max_num_nodes is None else max_num_nodes
    if largest > size:
        raise ValueError(f"max_num_nodes must be at least the {largest} nodes of the largest graph, got {size}")
    of_graph = counts * counts
    if len(pairs) != int(of_graph.sum()):
        raise ValueError(
            f"expected the {int(of_graph.sum())} pairs of graphs of {counts.tolist()} nodes, got {len(pairs)}"
        )
    graph = torch.repeat_interleave(torch.arange(len(counts), device=pairs.device), of_graph)
    place = torch.arange(len(pairs), device=pairs.device) - (of_graph.cumsum(0) - of_graph)[graph]
    fill = MASKED_BUCKET if pairs.dtype == torch.uint8 else 0
    dense = pairs.new_full((len(counts), size, size, *pairs.shape[1:]), fill)
    dense[graph, place // counts[graph], place % counts[graph]] = pairs
    return dense if pairs.ndim == 1 else dense.movedim(3, 1).contiguous()
